"""Launch configuration: a typed function of target and shape, never searched for on the hot path."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.quant.launch import LaunchOptions
from narrowkv.quant.targets import Target

__all__ = ["NUM_HEADS", "SparseConfig", "choose_config", "choose_splits"]

NUM_HEADS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class SparseConfig:
    """How one attention launch is cut up.

    Attributes:
        kernel: "wide" reads 16-bit rows, "fused" FP8 rows.
        block_h: heads of a program.
        block_k: rows of a tile.
        width: columns of a fused kernel's tile: 64, or 256.
        guard: whether the loop's body stands in branches that are always taken; see `kernels.wide`.
        num_splits: programs that share a token's rows; 1 writes the result at once.
        fp8_qk: whether QK over NoPE multiplies FP8 by FP8.
        options: compiler options.
    """

    kernel: str
    block_h: int
    block_k: int
    width: int
    guard: bool
    num_splits: int
    fp8_qk: bool
    options: LaunchOptions

    def explain(self) -> str:
        """One line for people."""
        qk = "" if self.kernel == "wide" else ", QK in FP8" if self.fp8_qk else ", QK in 16 bits"
        return (
            f"{self.kernel}: {self.block_h} heads x {self.block_k} rows a tile, "
            f"{self.options.num_warps} warps, {self.num_splits} split{'s' if self.num_splits > 1 else ''}{qk}"
        )


def choose_splits(target: Target, programs: int, tiles: int) -> int:
    """How many programs share a token's rows.

    Args:
        target: what the kernel runs on.
        programs: (token, head block) pairs of the call.
        tiles: tiles that a token has on average.
    """
    units = target.figures.units if target.figures is not None else 4
    if programs * 2 > units or tiles < 2:
        return 1
    # One program a unit; two tiles at least, so that the merge stays the smaller part.
    return max(1, min(units // programs, tiles // 2, 64))


def _tiles(target: Target, kernel: str, block_h: int, fp8_qk: bool) -> tuple[int, int, bool, LaunchOptions]:
    """(rows of a tile, columns of a fused kernel's tile, guard, options)."""
    if target.is_amd:
        return 32, 64, False, LaunchOptions(num_warps=4, num_stages=1, matrix_instr_nonkdim=16)
    if target.name == "cpu":
        return 64, 64, False, LaunchOptions()
    if block_h == 64:
        return 64, 64 if fp8_qk else 256, True, LaunchOptions(num_warps=8, num_stages=2)
    return 64 if kernel == "wide" else 32, 64, False, LaunchOptions(num_warps=4, num_stages=2)


def choose_config(
    target: Target,
    *,
    kernel: str,
    num_tokens: int,
    num_heads: int,
    mean_rows: int,
    fp8_qk: bool = False,
    num_splits: int | None = None,
) -> SparseConfig:
    """The shipped configuration.

    Args:
        target: what the kernel runs on.
        kernel: "wide" or "fused".
        num_tokens: query tokens.
        num_heads: query heads.
        mean_rows: indices of a token on average.
        fp8_qk: whether QK over NoPE multiplies FP8 by FP8.
        num_splits: forces a number of splits.
    """
    block_h = max(16, min(64, num_heads))
    block_k, width, guard, options = _tiles(target, kernel, block_h, fp8_qk)
    programs = num_tokens * -(-num_heads // block_h)
    if num_splits is None:
        num_splits = choose_splits(target, programs, -(-mean_rows // block_k))
    return SparseConfig(kernel, block_h, block_k, width, guard, num_splits, fp8_qk, options)

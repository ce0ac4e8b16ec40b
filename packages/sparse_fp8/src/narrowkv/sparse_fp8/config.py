"""Launch configuration: a typed function of target and shape, never searched for on the hot path."""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

from narrowkv.quant.device import BITS
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.launch.gluon import has_gluon
from narrowkv.runtime.targets import Target

__all__ = [
    "NUM_HEADS",
    "SparseConfig",
    "choose_config",
    "choose_splits",
    "hopper_config",
    "hopper_pays",
    "num_units",
    "spares_registers",
]

NUM_HEADS = (8, 16, 32, 64, 128)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Splits go into the second extent of the grid, which has 16 bits on some targets.
MOST_SPLITS = 65535
MOST_CHOSEN_SPLITS = 64
# Of every token in batch-invariant mode: with 2048 rows a token each takes 8 tiles of 64, and the partial
# results of 64 heads (2 KiB a head and split) are half as many bytes as the token's rows.
INVARIANT_SPLITS = 4


@dataclass(frozen=True)
class SparseConfig:
    """How one attention launch is cut up.

    Attributes:
        kernel: "wide" reads 16-bit rows, "fused" FP8 rows.
        block_h: heads of a program.
        block_k: rows of a tile.
        width: columns of a fused kernel's tile: 64, 128, 256 or 512.
        guard: stages of a loop whose body stands in branches that are always taken (see `kernels.wide`); 0
            for a plain loop, which takes its stages from the options.
        stages: tiles that a kernel for Hopper keeps in shared memory; 0 for the plain kernels.
        fp8_qk: whether QK over NoPE multiplies FP8 by FP8.
        options: compiler options.
    """

    kernel: str
    block_h: int
    block_k: int
    width: int
    guard: int
    stages: int
    fp8_qk: bool
    options: LaunchOptions

    def head_blocks(self, num_heads: int) -> int:
        """Programs that the heads of a token are shared by."""
        return -(-num_heads // self.block_h)

    def explain(self) -> str:
        """One line for people."""
        qk = "" if self.kernel == "wide" else ", QK in FP8" if self.fp8_qk else ", QK in 16 bits"
        where = " for Hopper" if self.stages else ""
        return (
            f"{self.kernel}{where}: {self.block_h} heads x {self.block_k} rows a tile, "
            f"{self.options.num_warps} warps{qk}"
        )


def num_units(target: Target) -> int:
    """Compute units or multiprocessors to fill; the interpreter fills a few."""
    return target.figures.units if target.figures is not None else 4


def choose_splits(target: Target, programs: int, tiles: int) -> int:
    """How many programs share a token's rows.

    Args:
        target: what the kernel runs on.
        programs: (token, head block) pairs of the call.
        tiles: tiles that a token has on average.
    """
    units = num_units(target)
    if programs * 2 > units or tiles < 2:
        return 1
    # One program a unit; two tiles at least, so that the merge stays the smaller part.
    return max(1, min(units // max(programs, 1), tiles // 2, MOST_CHOSEN_SPLITS))


@dataclass(frozen=True)
class _Tiles:
    """Tile sizes and options; see `SparseConfig`."""

    block_h: int
    block_k: int
    options: LaunchOptions
    width: int = 64
    guard: int = 0
    stages: int = 0


# Q, two tiles and their numerators take 210 of 227 KB, and 226 with FP8 rows as stored; the accumulators of
# 64 heads need two warpgroups.
_HOPPER_TILES = {
    "wide": _Tiles(64, 64, LaunchOptions(num_warps=8, num_stages=1), stages=2),
    "fused": _Tiles(64, 64, LaunchOptions(num_warps=4, num_stages=1), stages=2),
}


def _hopper_tiles(kernel: str, num_heads: int) -> _Tiles:
    # H200, 1024 tokens, top-k 2048, microseconds. 16-bit rows, 16 heads: the kernel for few heads 350, the
    # plain one 457, the one for 64 heads 529; 32 heads 446. FP8 rows, 16 heads: 451 and, plain, 1266; for 32
    # heads its sums spill, 1022, and the kernel for 64 heads serves, which takes 582 for 64.
    block_h = max(16, num_heads)
    if block_h > (32 if kernel == "wide" else 16):
        return _HOPPER_TILES[kernel]
    # Q of 16 heads and three tiles take 218 of 227 KB. A task has warps in groups of 4.
    return _Tiles(block_h, 64, LaunchOptions(num_warps=4, num_stages=1), stages=3 if block_h == 16 else 2)


def _amd_tiles(target: Target, kernel: str, block_h: int, fp8_qk: bool, spare: bool) -> _Tiles:
    # Everything here is chosen so that no vector register spills, with two sources and with splits;
    # `narrowkv inspect sparse` shows what it compiles to. Two stages would turn the reads of 16-bit V from
    # LDS into 2-byte ones.
    options = LaunchOptions(num_warps=4, num_stages=1, matrix_instr_nonkdim=16)
    if kernel == "wide":
        return _Tiles(block_h, 16, options)
    if not fp8_qk:
        # All columns in one tile: widened once, as loaded. Tiles of 64 pass through LDS as bytes, and every
        # warp widens them itself, twice: 64 heads take 3800 vector instructions of all warps on gfx942 and
        # 5060 on gfx950, not 1700 and 1350.
        if spare and block_h == 64:
            # Two waves on each SIMD instead of one, which hide what each waits for: by a model of the compute
            # unit 312 instead of 157 TFLOP/s on gfx950, 215 instead of 136 on gfx942. All 256 vector
            # registers; up to 11 scalars wait in lanes of a vector register, none of them within a loop.
            return _Tiles(block_h, 32, replace(options, num_warps=8), width=512)
        # Triton 3.6 and 3.8 spill up to 4 scalar registers unless told not to aim at more than one wave.
        return _Tiles(block_h, 16, replace(options, waves_per_eu=1), width=512)
    if block_h > 16:
        # 64 heads spill 3 to 7 registers, according to layout and Triton. 32 at 4 warps take as many vector
        # instructions in all as 64 at 8. On gfx942 they may take up to 262 registers when not told that 256
        # leave room for two waves; on gfx950 they spill when told.
        return _Tiles(32, 16, replace(options, waves_per_eu=2 if target.name == "gfx942" else None))
    if target.name == "gfx942":
        return _Tiles(block_h, 16, options)
    # 4 warps spill 14 scalar registers; one repeats no scores, and spills none when told that it is alone.
    return _Tiles(block_h, 16, replace(options, num_warps=1, waves_per_eu=1))


def _gpu_tiles(kernel: str, block_h: int, fp8_qk: bool) -> _Tiles:
    # H100, 1024 tokens, top-k 2048, times over the floor. 64 heads, 16-bit rows: guarded 2.4, plain 3.1, the
    # product alone in a branch does not fit in shared memory. FP8 rows, 16-bit Q: tiles of 128 columns 4.2,
    # of 256 4.4, one of 512 4.9, of 64 plain 10.4. FP8 Q: 32 rows a tile, guarded and not pipelined, 5.5,
    # pipelined 6.7, 64 rows 7.4.
    if block_h == 64 and kernel == "wide":
        return _Tiles(block_h, 64, LaunchOptions(num_warps=8, num_stages=2), guard=2)
    if block_h == 64:
        options = LaunchOptions(num_warps=8, num_stages=2)
        return _Tiles(block_h, 32, options, guard=1) if fp8_qk else _Tiles(block_h, 64, options, width=128)
    # 16 heads, 16-bit rows: 64 rows a tile 5.7, 32 rows at 3 stages 6.2. FP8 rows, 16-bit Q: tiles of 256
    # columns 14.7, of 128 16.4, of 64 20; FP8 Q 18.7.
    options = LaunchOptions(num_warps=4, num_stages=2)
    return _Tiles(block_h, 64 if kernel == "wide" else 32, options, 64 if fp8_qk else 256)


def hopper_pays(target: Target, config: SparseConfig, num_tokens: int, num_heads: int) -> bool:
    """Whether a kernel for Hopper is faster than the plain one: where its programs fill the chip."""
    # H200, 1024 tokens, top-k 2048, 64 heads, microseconds with this kernel and with the plain one: 16-bit
    # rows 559 and 841, FP8 rows 582 and 1468; few heads above. Less than a chipful has not been timed.
    figures = target.figures
    return figures is not None and num_tokens * config.head_blocks(num_heads) >= figures.units


def hopper_config(target: Target, *, kernel: str, num_heads: int) -> SparseConfig | None:
    """The configuration of the kernel for Hopper, for calls that it can read; None on any other target."""
    if target.name != "sm90" or target.figures is None or not has_gluon():
        return None
    # The kernels for Hopper take a query in bf16.
    return _config(kernel, _hopper_tiles(kernel, num_heads), fp8_qk=False)


def spares_registers(target: Target, query: str, layouts: set[str], groups: set[int], route: str) -> bool:
    """Whether a fused kernel over these rows leaves AMD's compiler registers for larger tiles.

    Args:
        target: what the kernel runs on.
        query: layout of the query, "bf16" or "fp16" for a tensor.
        layouts: of the sources.
        groups: columns that a scale of a source is for.
        route: how rows are widened.
    """
    # Compiled, 64 heads, 32 rows and 8 waves. Software conversion takes 4 registers too many on gfx950, an
    # fp16 query 4 or 6; on gfx942 layouts with RoPE apart 1, and any layout 5 under Triton 3.8; on gfx950
    # 3 and 17 under Triton 3.6 and 3.7.
    if not target.is_amd or query != "bf16" or route == BITS or groups != {64} or len(layouts) != 1:
        return False
    if target.name == "gfx950":
        return TRITON >= (3, 8)
    return layouts == {"packed584"} and TRITON >= (3, 9)


def choose_config(
    target: Target, *, kernel: str, num_heads: int, fp8_qk: bool = False, spare: bool = False
) -> SparseConfig:
    """The shipped configuration of the plain kernels.

    Args:
        target: what the kernel runs on.
        kernel: "wide" or "fused".
        num_heads: query heads.
        fp8_qk: whether QK over NoPE multiplies FP8 by FP8.
        spare: `spares_registers` of the call.
    """
    block_h = max(16, min(64, num_heads))
    if target.is_amd:
        tiles = _amd_tiles(target, kernel, block_h, fp8_qk, spare)
    elif target.name == "cpu":
        tiles = _Tiles(block_h, 64, LaunchOptions())
    else:
        tiles = _gpu_tiles(kernel, block_h, fp8_qk)
    return _config(kernel, tiles, fp8_qk=fp8_qk)


def _config(kernel: str, tiles: _Tiles, *, fp8_qk: bool) -> SparseConfig:
    return SparseConfig(
        kernel, tiles.block_h, tiles.block_k, tiles.width, tiles.guard, tiles.stages, fp8_qk, tiles.options
    )

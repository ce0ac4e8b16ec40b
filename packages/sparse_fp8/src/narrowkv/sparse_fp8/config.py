"""Launch configurations of the sparse kernels, as functions of target and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target
from narrowkv.runtime.toolchain import TRITON
from narrowkv.sparse_fp8.layouts import HEAD_DIM, RowLayout

__all__ = [
    "MOST_HEADS",
    "SparseConfig",
    "choose_config",
    "choose_splits",
    "specialised_config",
    "specialised_pays",
]

MOST_HEADS = 128
# Splits are the second dimension of the grid, which is limited to 16 bits on some targets.
MOST_SPLITS = 65535
MOST_CHOSEN_SPLITS = 64
# Bytes that a buffer instruction of CDNA reaches from its base.
MOST_BUFFER_BYTES = 2**31 - 1
# Splits of every token in batch-invariant mode. With 2048 rows a token, each split has 8 tiles of 64 rows,
# and the partial results of 64 heads (2 KiB a head and split) take half as many bytes as the token's rows.
INVARIANT_SPLITS = 4


@dataclass(frozen=True)
class SparseConfig:
    """The launch configuration of one attention kernel.

    Attributes:
        kernel: "16bit" reads 16-bit rows, "fused" FP8 rows.
        block_h: heads of a program.
        block_k: rows of a tile.
        width: columns of a fused kernel's tile: 64, 128, 256 or 512.
        guard: pipeline stages of a loop whose body is inside branches that are always taken (see
            `kernels.sixteen_bit`); 0 for a loop without such branches, whose stages are in the options.
        stages: tiles that a specialised kernel keeps in shared memory; 0 for the portable kernels.
        family: "portable", or the family of targets that the kernel is for: "hopper" or "cdna".
        xcd_tokens: tokens whose programs run on one XCD, see `xcd_order`; 0 for the order of the launch.
        fp8_qk: whether QK over NoPE multiplies FP8 by FP8.
        options: compiler options.
        fill: programs a compute unit that splits are to fill the target with; 0 for `programs_at_once`'s.
        tuned: where the configuration is from, and what it gains, if it is not the shipped one.
    """

    kernel: str
    block_h: int
    block_k: int
    width: int
    guard: int
    stages: int
    fp8_qk: bool
    options: LaunchOptions
    family: str = "portable"
    xcd_tokens: int = 0
    fill: int = 0
    tuned: str = ""

    def head_blocks(self, num_heads: int) -> int:
        """Number of programs that share the heads of a token."""
        return -(-num_heads // self.block_h)

    def explain(self) -> str:
        """One line that describes the configuration."""
        qk = "" if self.kernel == "16bit" else ", QK in FP8" if self.fp8_qk else ", QK in 16 bits"
        where = {"hopper": " for Hopper", "cdna": " for CDNA"}.get(self.family, "")
        return (
            f"{self.kernel}{where}: {self.block_h} heads x {self.block_k} rows a tile, "
            f"{self.options.num_warps} warps{qk}{f'; {self.tuned}' if self.tuned else ''}"
        )


def head_block(num_heads: int) -> int:
    """Heads of a program's tile, of which the last ones may be none of the call's.

    A matrix instruction takes 16 of them. Above 16, one tile for all heads is faster than several that each
    load and widen the rows: by the model (see `modes`) 40 heads over 16-bit rows take 143 clocks of a
    compute unit for a row on gfx942 in a tile of 64, 264 in two of 32 and 564 in three of 16.
    """
    return 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64


def programs_at_once(target: Target, config: SparseConfig, paged: bool) -> int:
    """Programs that splits are to fill the target with.

    One a compute unit; on AMD two of up to 32 rows of Q over a page table, since each waits for rows that no
    other program reads, and two fit: by the model of `_paged_amd_tiles`, 64 sequences of 8k bf16 rows, gfx950
    139 us instead of 251.
    """
    shipped = 2 if paged and target.is_amd and config.block_h <= 32 else 1
    return target.compute_units * (config.fill or shipped)


def choose_splits(
    target: Target, config: SparseConfig, programs: int, tiles: int, partial_bytes: int, paged: bool = False
) -> int:
    """The number of programs that share a token's rows.

    Args:
        target: what the kernel runs on.
        config: of the kernel.
        programs: (token, head block) pairs of the call.
        tiles: tiles that a token has on average.
        partial_bytes: bytes of the partial results of all programs without splits.
        paged: whether a page table names the rows.
    """
    compute_units = programs_at_once(target, config, paged)
    if programs * 2 > compute_units or tiles < 2:
        return 1
    most = min(compute_units // max(programs, 1), MOST_CHOSEN_SPLITS)
    if config.fill:
        return min(most, tiles)
    if not target.is_nvidia:
        # As many programs as run at once, and at least two tiles each, so that the merge takes less time.
        return max(1, min(most, tiles // 2))
    tile_time = 5.0 if config.kernel == "fused" and config.family == "portable" else 2.0
    return _splits_of_least_time(min(most, tiles), tiles, tile_time, partial_bytes)


@lru_cache(maxsize=4096)
def _splits_of_least_time(most: int, tiles: int, tile_time: float, partial_bytes: int) -> int:
    """The number of splits, of 1 to `most`, at which a program's tiles and the merge take least time.

    H100, microseconds, 1 to 128 tokens, 16 to 128 heads, top-k 512 and 2048: a tile of 64 rows takes 1.5 to
    2.2, and 5.4 in the portable kernel over FP8 rows. The merge takes 3 for every 8 splits, which it reads at
    once, and 0.4 for a megabyte of partials.
    """

    def microseconds(splits: int) -> float:
        merge = 3.0 * -(-splits // 8) + 0.4e-6 * partial_bytes * splits
        return tile_time * -(-tiles // splits) + (merge if splits > 1 else 0.0)

    return min(range(1, most + 1), key=microseconds)


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
    "16bit": _Tiles(64, 64, LaunchOptions(num_warps=8, num_stages=1), stages=2),
    "fused": _Tiles(64, 64, LaunchOptions(num_warps=4, num_stages=1), stages=2),
}


def _hopper_tiles(kernel: str, num_heads: int, fine_scales: bool) -> _Tiles:
    # H200, 1024 tokens, top-k 2048, microseconds. 16-bit rows, 16 heads: the kernel for few heads 350, the
    # plain one 457, the one for 64 heads 529; 32 heads 446. FP8 rows, 16 heads: 451 and, plain, 1266.
    # H100, 32 heads over FP8 rows: with 512, 128, 32 and 8 tokens 304, 85, 43 and 30, the kernel for 64 heads
    # 296, 85, 47 and 35.
    # With scales for 32 columns, 128 tokens, 32 heads: 108, and 93 in the kernel for 64.
    block_h = head_block(num_heads)
    if block_h > (16 if fine_scales else 32):
        return _HOPPER_TILES[kernel]
    # Q of 16 heads and three tiles take 218 of 227 KB. A task has warps in groups of 4.
    return _Tiles(block_h, 64, LaunchOptions(num_warps=4, num_stages=1), stages=3 if block_h == 16 else 2)


def few_heads_registers(block_h: int, is_fp8: bool) -> tuple[int, int]:
    """Registers of a thread that computes scores, and of one that gathers, in the kernel for few heads."""
    if not is_fp8:
        return 168, 168
    return (128, 128) if block_h == 16 else (104, 112)


def _cdna_tiles(target: Target, kernel: str, num_heads: int, two_sources: bool) -> _Tiles:
    """Tiles of `kernels/cdna.py`, by the timing model: the loop's useful TFLOP/s with 8 waves.

    Names are scheduling strategies of LLVM.

    - gfx942, 64 heads: 16-bit rows 435 with iterative-ilp (396 without, max-ilp 419, 4 waves 367; the
      portable kernel 210); FP8 rows 360 with max-ilp (without 362, but two sources spill; iterative-ilp 338;
      4 waves 310; portable 173). Two tiles of 32 rows do not fit in LDS.
    - gfx950, 64 heads: 16-bit rows 694 with iterative-ilp (max-ilp 660; portable 265); FP8 rows 735 with
      max-ilp (without 553, iterative-ilp spills, 32 rows 595; portable 264).
    - Under Triton 3.8 FP8 rows on gfx942 take iterative-ilp: with max-ilp up to 32 registers spill.
    - 32 heads: gfx942 370 and 312, gfx950 510 and 488. With 16 heads the portable kernel is as fast.
    - gfx950, more than 64 heads over two sources of 16-bit rows: tiles of 64 rows spill up to 13 registers,
      those of 32, whose loop takes 1.16 times as long, none.
    """
    heads = head_block(num_heads)
    fp8, gfx950 = kernel == "fused", target.name == "gfx950"
    max_ilp = fp8 and TRITON >= (3, 9)
    attrs = f"amdgpu-sched-strategy={'max-ilp' if max_ilp else 'iterative-ilp'}"
    options = LaunchOptions(num_warps=8, num_stages=1, llvm_fn_attrs=attrs)
    if gfx950 and not fp8 and num_heads > 64 and two_sources:
        return _Tiles(heads, 32, options, stages=3)
    return _Tiles(heads, 64 if gfx950 else 32, options, stages=2 if gfx950 else 1)


def _amd_tiles(target: Target, kernel: str, block_h: int, fp16_query: bool, v4_rows: bool) -> _Tiles:
    """Tiles and options on CDNA: no vector register spills, with two sources and with splits.

    By `narrowkv inspect model --case sparse:...`, the loop's useful TFLOP/s (products that several waves
    repeat count once), 4 waves and 16 rows unless stated:

    - 16-bit rows, 64 heads. gfx942: one stage 185, two 195, three 210; 32 rows and 8 waves 187. gfx950: one
      stage 209, two 265, three 259; 32 rows and 8 waves spill.
    - The same, 16 heads. gfx942: one stage 234, three 179. gfx950: one stage 306, two 415.
    - FP8 rows, 64 heads. gfx942: one stage 138, two 171, three 173; 32 rows and 8 waves 155. gfx950: one
      stage 160, two 152; 32 rows 264, which spill with an fp16 query; 32 rows and 8
      waves 228. FNUZ rows 219, and 226 with iterative-ilp; without it an FP8 query spills a register.
    - Rows in FP4 and those with scales for 32 columns spill with 32 rows a tile: 16 for all but V4's.
    - FP8 rows, 16 heads. gfx942 199; two stages 215, but four scalars spill. gfx950 277; 32 rows 215.
    - An FP8 query that is multiplied in FP8: 122 and 100 at 64 heads, 110 and 57 at 16: every wave scales the
      scores of seven tiles. Widened once per program, it takes what a bf16 query takes.
    """
    gfx950 = target.name == "gfx950"
    options = LaunchOptions(num_warps=4, num_stages=1, matrix_instr_nonkdim=16)
    if kernel == "16bit":
        stages = 2 if gfx950 else 3 if block_h == 64 else 1
        return _Tiles(block_h, 16, replace(options, num_stages=stages))
    # All columns in one tile: widened once, as loaded. Tiles of 64 pass through LDS as bytes, and every warp
    # widens them itself, twice: 64 heads take 3800 vector instructions of all warps on gfx942 and 5060 on
    # gfx950, not 1700 and 1350.
    if block_h == 64 and gfx950 and not fp16_query and v4_rows:
        # From Triton 3.9 on these are FNUZ rows.
        attrs = "amdgpu-sched-strategy=iterative-ilp" if TRITON >= (3, 9) else None
        return _Tiles(block_h, 32, replace(options, llvm_fn_attrs=attrs), width=512)
    # Without waves_per_eu=1 Triton 3.8 spills up to 4 scalar registers.
    stages = 2 if block_h == 64 and not gfx950 else 1
    # With an fp16 query, rows in FP4 spill a register in tiles of 512 columns.
    width = 256 if gfx950 and fp16_query and not v4_rows else 512
    return _Tiles(block_h, 16, replace(options, num_stages=stages, waves_per_eu=1), width=width)


def _paged_amd_tiles(target: Target, kernel: str, tiles: _Tiles, fp16_query: bool) -> _Tiles:
    """The same over a page table: each program waits for its own rows, which no other one reads.

    Model (`narrowkv inspect model --case latent:...`), 64 sequences of 8k rows, 12 or 16 heads, 8 splits,
    microseconds. gfx950: bf16 rows, one program a compute unit 251; two 139, which iterative-ilp takes
    without spills. FP8 rows with one scale: one stage 214, two 155. gfx942: bf16 329, two stages 405; FP8 341
    and 351; 40 heads, bf16, four splits, one stage 721, two 931, three 1032. With an fp16 query two stages
    spill on gfx942 at 64 rows of Q.
    """
    options = tiles.options
    if target.name == "gfx950" and tiles.block_h == 16:
        if kernel == "16bit":
            options = replace(options, waves_per_eu=2, llvm_fn_attrs="amdgpu-sched-strategy=iterative-ilp")
        else:
            options = replace(options, num_stages=2)
    elif tiles.block_h == 64 and target.name != "gfx950" and (kernel == "16bit" or fp16_query):
        options = replace(options, num_stages=1)
    return replace(tiles, options=options)


def _gpu_tiles(kernel: str, block_h: int, fp8_qk: bool, head_dim: int) -> _Tiles:
    # H100, 1024 tokens, top-k 2048, times over the floor. 64 heads, 16-bit rows: guarded 2.4, plain 3.1, the
    # product alone in a branch does not fit in shared memory. FP8 rows, 16-bit Q: tiles of 128 columns 4.2,
    # of 256 4.4, one of 512 4.9, of 64 plain 10.4. FP8 Q: 32 rows a tile, guarded and not pipelined, 5.5,
    # pipelined 6.7, 64 rows 7.4.
    if block_h == 64 and kernel == "16bit":
        # Q and two tiles of 64 rows of 576 columns take 233 of 227 KB.
        rows = 64 if head_dim <= HEAD_DIM else 32
        return _Tiles(block_h, rows, LaunchOptions(num_warps=8, num_stages=2), guard=2)
    if block_h == 64:
        options = LaunchOptions(num_warps=8, num_stages=2)
        return _Tiles(block_h, 32, options, guard=1) if fp8_qk else _Tiles(block_h, 64, options, width=128)
    # 16 heads, 16-bit rows: 64 rows a tile 5.7, 32 rows at 3 stages 6.2. FP8 rows, 16-bit Q: tiles of 256
    # columns 14.7, of 128 16.4, of 64 20; FP8 Q 18.7.
    options = LaunchOptions(num_warps=4, num_stages=2)
    return _Tiles(block_h, 64 if kernel == "16bit" else 32, options, 64 if fp8_qk else 256)


def specialised_pays(config: SparseConfig, tiles: int) -> bool:
    """Whether a specialised kernel is faster than the portable one for programs of so many tiles.

    On Hopper it takes longer to begin than the portable kernel, and less time for a tile. H100, microseconds
    with it and with the portable kernel, 1 and 8 tokens. One tile a program: FP8 rows, 64 heads, 27.3 and
    21.6; 16 heads, 18.1 and 21.9; 16-bit rows, 16 heads, 18.4 and 16.4; 64 heads, 18.0 and 19.3. Two tiles:
    FP8 rows, 64 heads, 30.7 and 29.9. Four tiles: 128 heads, 38.3 and 42.6.
    """
    if config.family != "hopper":
        return True
    if config.block_h < 64:
        return tiles >= (2 if config.kernel == "16bit" else 1)
    return tiles >= (3 if config.kernel == "fused" else 1)


def specialised_config(
    target: Target, *, kernel: str, num_heads: int, layouts: Sequence[RowLayout] = (),
    two_sources: bool = False,
) -> SparseConfig | None:  # fmt: skip
    """The configuration of the kernel for the target's family, for calls that it can read; else None.

    `layouts`: those of quantised rows that it reads. `two_sources`: whether calls have both sources.
    """
    fine_scales = any(layout.group < 64 for layout in layouts)
    if target.name in ("gfx942", "gfx950") and head_block(num_heads) >= 32:
        if target.name == "gfx950" and kernel == "fused" and TRITON < (3, 9):
            return None  # Triton 3.8 spills vector registers beside the barrier that its code needs
        tiles = _cdna_tiles(target, kernel, num_heads, two_sources)
        return _on_xcds(_config(kernel, tiles, fp8_qk=False, family="cdna"), target, num_heads)
    if target.name != "sm90" or target.figures is None:
        return None
    # The kernels for Hopper take a query in bf16.
    return _config(kernel, _hopper_tiles(kernel, num_heads, fine_scales), fp8_qk=False, family="hopper")


def choose_config(
    target: Target, *, kernel: str, num_heads: int, head_dim: int = HEAD_DIM, fp8_qk: bool = False,
    fp16_query: bool = False, layouts: Sequence[RowLayout] = (), paged: bool = False,
) -> SparseConfig:  # fmt: skip
    """The configuration of the portable kernels.

    Args:
        target: what the kernel runs on.
        kernel: "16bit" or "fused".
        num_heads: query heads.
        head_dim: columns of a query and of a row.
        fp8_qk: whether QK over NoPE may multiply FP8 by FP8; it does where that is faster.
        fp16_query: whether the query is in fp16.
        layouts: those of a fused kernel's quantised rows.
        paged: whether a page table names the rows, and not index lists.
    """
    block_h = head_block(num_heads)
    if target.is_amd:
        v4_rows = all(layout.quantized < HEAD_DIM for layout in layouts)
        tiles, fp8_qk = _amd_tiles(target, kernel, block_h, fp16_query, v4_rows), False
        if paged:
            tiles = _paged_amd_tiles(target, kernel, tiles, fp16_query)
    elif target.name == "cpu":
        tiles = _Tiles(block_h, 64, LaunchOptions())
    else:
        tiles = _gpu_tiles(kernel, block_h, fp8_qk, head_dim)
    # A tile has one scale in fp32: it multiplies scores.
    groups = [layout.group for layout in layouts if layout.scale == "fp32"]
    tiles = replace(tiles, width=min(tiles.width, *groups, HEAD_DIM))
    if target.is_amd and target.name != "gfx950" and 64 in groups:
        # 64 heads and 4 waves spill 140 vector registers on gfx942, 32 heads and 4 waves 21 scalar ones.
        options = replace(tiles.options, num_warps=2, num_stages=1)
        tiles = replace(tiles, block_h=min(32, block_h), options=options)
    return _on_xcds(_config(kernel, tiles, fp8_qk=fp8_qk), target, num_heads)


def _on_xcds(config: SparseConfig, target: Target, num_heads: int) -> SparseConfig:
    """The configuration that runs the programs of a token on one XCD, where there are several of both.

    Model (`python tools/xcd_figures.py`), 128 heads, 16-bit rows: 1.03 times as fast on gfx942, 1.01 on
    gfx950.
    """
    shares = target.xcds > 1 and config.head_blocks(num_heads) > 1
    return replace(config, xcd_tokens=1) if shares else config


def _config(kernel: str, tiles: _Tiles, *, fp8_qk: bool, family: str = "portable") -> SparseConfig:
    return SparseConfig(
        kernel,
        tiles.block_h,
        tiles.block_k,
        tiles.width,
        tiles.guard,
        tiles.stages,
        fp8_qk,
        tiles.options,
        family,
    )

"""Decode on AMD: tiles of few rows, splits of short calls, and the merge of their partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.quant.formats import get_format
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target


@dataclass(frozen=True)
class MergeTile:
    """How the second kernel merges a row's splits.

    Attributes:
        splits: merged at once.
        warps: of a program.
    """

    splits: int = 16
    warps: int = 1


# The most splits that each tile is for. Model, microseconds, 96/8 heads, head_dim 128, gfx942 and gfx950; in
# parentheses splits at once and waves.
_MERGES = (
    (4, MergeTile(4, 1)),  # B64: 2.6 and 2.5; (16, 1) 4.2 and 3.4
    (8, MergeTile(8, 1)),  # B64: 3.1 and 2.5; (16, 1) 4.2 and 3.4; (16, 2) 9.2 and 7.2
    (16, MergeTile(16, 2)),  # B4: 1.9 and 1.6; (16, 1) 2.2 and 1.8; (32, 2) 2.5 and 1.7
    (32, MergeTile(32, 2)),  # B4: 2.6 and 2.1; (16, 1) 3.6 and 2.9; (64, 4) 3.0 and 2.8
    (48, MergeTile(64, 4)),  # B4 of 37: 3.1 and 2.6; (32, 2) 3.7 and 3.1; (128, 4) 3.4 and 2.9
    # B1 of 128: 3.4 and 2.9; (16, 1) 11.7 and 9.7; (64, 4) 5.3 and 4.5; (128, 8) 4.2 and 3.6. Of 256: 6.0
    # and 5.1; (64, 4) 9.8 and 8.3.
    (2**31, MergeTile(128, 4)),
)


def amd_merge_tile(splits: int) -> MergeTile:
    """The tile that merges rows of so many splits."""
    return next(tile for most, tile in _MERGES if splits <= most)


@dataclass(frozen=True)
class _Split:
    """Equal splits of every sequence, for calls whose longest sequence gives a program few key tiles.

    An even share of all keys would serve sequences of unequal lengths better, but is searched for by two
    loops over the batch, in the merge, too.

    Attributes:
        programs: of a compute unit.
        most_tiles, least_tiles: of a program. One sequence may have more than the most.
        block_n: keys of a tile; 0 for those of `amd_tile`.
    """

    programs: int
    most_tiles: int
    least_tiles: int = 1
    block_n: int = 0


# The first that fits is taken. Model, microseconds, FP8, page 16, 96/8 heads, head_dim 128, gfx942 and
# gfx950, in parentheses splits of a sequence.
_SPLITS = (
    # B4 8k: (32) 26.3 and 15.1, (37) 27.0 and 19.3. B1 8k: (128) 12.1 and 7.7.
    _Split(programs=4, most_tiles=4),
    # B64 1k: (4) 42.5 and 26.6, before keys were loaded sooner 45.3 and 28.5, even 50.2 and 36.8.
    _Split(programs=8, most_tiles=8),
)
# gfx942 with FP8 tiles loaded ahead: widening by bit arithmetic takes long, and smaller shares divide it more
# evenly over SIMDs. Tiles of 32 keys and, in parentheses, of 64: B4 8k 24.1 (26.3), B8 4k 23.4 (25.8), B4 4k
# 15.9 (16.6), B1 8k 11.6 (12.1), B16 1k 15.1 (15.7). One tile a program: B4 1k 8.3 (8.2). gfx950, B4 8k: 17.7
# (15.1).
_SMALL_TILES = _Split(programs=4, most_tiles=8, least_tiles=2, block_n=32)


def amd_splits(
    batch: int, capacity: int, block_n: int, compute_units: float, small_tiles: bool
) -> tuple[int, int]:
    """Keys of a tile, and the number of equal splits of every sequence; 0: an even share of all keys.

    Args:
        batch: sequences; capacity: tokens of the longest.
        block_n: keys of a tile, of `amd_tile`.
        compute_units: of the GPU, divided by the programs that one sequence has without splits.
        small_tiles: whether a short call may have smaller tiles.
    """
    for row in (_SMALL_TILES, *_SPLITS) if small_tiles else _SPLITS:
        tiles = -(-capacity // (row.block_n or block_n))
        each = -(-tiles // max(int(compute_units * row.programs) // max(batch, 1), 1))
        if row.least_tiles <= each and (each <= row.most_tiles or (batch == 1 and not row.block_n)):
            return row.block_n or block_n, -(-tiles // max(each, 1))
    return block_n, 0


def amd_tile(
    target: Target,
    block_m: int,
    k_format: str,
    v_format: str,
    *,
    q_len: int,
    q_dtype: torch.dtype,
    head_dim: int,
    scale_group: int,
    kernel: str,
) -> tuple[int, LaunchOptions, str]:
    """Keys of a tile, compiler options and `DecodeConfig.prefetch`.

    One wave a program: with more, every wave repeats the QK product and the softmax of a 16-row tile.
    Modelled issue time over memory time at ratio 12, head_dim 128 (`narrowkv inspect`): FP8 0.44 (FNUZ) and
    0.45 (OCP) on gfx942 and 0.34 on gfx950 at 64 keys, 0.59 at 32. None spills.

    Args:
        target: gfx942 or gfx950.
        block_m: rows of the tile.
        k_format: storage format of K; v_format: of V.
        q_len: query tokens of each sequence; q_dtype: bf16 or fp16; head_dim: channels of a head.
        scale_group: FP4's channels per scale, 0 for one scale per position and head.
        kernel: "decode", "native" or "fp8".
    """
    if head_dim > 256:
        return _wide_head_tile(block_m, k_format, v_format, q_len=q_len, head_dim=head_dim)
    native, narrow_head = kernel == "native", head_dim <= 128
    warps = 1 if block_m <= 32 else 4
    block_n = 16 if not narrow_head else 32 if k_format in ("bf16", "fp16") else 64
    if native:
        # The compiler lowers a scaled dot of one wave to bf16 multiplications.
        warps = max(warps, 2)
        block_n = 128 if narrow_head and block_m == 16 else 64 if block_m <= 32 else 32
    prefetch = ""
    # FNUZ would spill 64 registers on gfx942, 28 on gfx950.
    ahead = target.native_fp8 and k_format == v_format and k_format in ("fp8_e4m3fn", "fp8_e5m2")
    ahead = ahead and block_m == 16 and q_len == 1 and head_dim == 128
    if ahead:
        # Model, whole calls in microseconds, even shares, without it and with it, gfx942 and gfx950: B64 8k
        # 280 and 270, 213 and 181; B4 8k 34.8 and 32.2, 25.0 and 22.4. What takes registers, too: `fitting`.
        prefetch = "tile"
    elif block_m <= 32:
        prefetch = _prefetch(target, k_format, v_format, q_len, head_dim, scale_group, native)
    # Two waves a SIMD fit at these registers on gfx950, and on gfx942 for heads of 64 or with FP8 keys; told
    # so, the compiler spills no scalars. More are needed by the native kernel for heads wider than 128 with
    # more than 16 rows or three terms of Q, and by the masks of several query tokens.
    if native:
        fits = narrow_head or (block_m == 16 and q_dtype != torch.float16)
        fits = fits and q_len == 1
    else:
        # FP4 keys with scales of 16 channels beside another format would spill 27 registers.
        spills = scale_group == 16 and k_format == "fp4_e2m1" != v_format
        fits = block_m == 16 and (q_len == 1 or not scale_group) and not spills
    fits = fits and (get_format(k_format).is_packed or get_format(v_format).is_packed)
    roomy = target.name == "gfx950" or head_dim <= 64
    roomy = roomy or (prefetch == "tile" and k_format != v_format and q_len == 1)
    waves = 2 if ahead or (fits and roomy) else None
    options = LaunchOptions(num_warps=warps, num_stages=1, matrix_instr_nonkdim=16, waves_per_eu=waves)
    return block_n, options, prefetch


def wave32_tile(block_m: int, k_format: str, v_format: str, head_dim: int) -> tuple[int, LaunchOptions]:
    """Keys of a tile and compiler options where waves have 32 lanes.

    Compiled for gfx1201 and gfx1250 (`tests/test_codegen_untried.py`): no spills. Nothing was timed. One wave
    holds 16 rows of 128 channels; more rows or channels are shared by more waves.
    """
    half = any(get_format(name).bits == 16 for name in (k_format, v_format))
    if block_m > 32:
        warps = 8 if half else 4
    else:
        warps = 4 if head_dim > 128 else 2 if block_m > 16 else 1
    block_n = 16 if half or block_m > 16 or head_dim > 128 else 32
    return block_n, LaunchOptions(num_warps=warps, num_stages=1)


def _wide_head_tile(
    block_m: int, k_format: str, v_format: str, *, q_len: int, head_dim: int
) -> tuple[int, LaunchOptions, str]:
    """The tile of heads wider than 256, of 16 or 32 rows.

    A wave that has 16 rows of 512 channels has no room for a second one beside it, so loads a tile ahead hide
    the latency instead. Model, 8 rows over 2k keys of 512 channels, TB/s of a full chip, gfx942 and gfx950:
    FP8 with one wave 2.4 and 3.6, a tile ahead 4.6 and 5.5, two waves a tile ahead 3.6 and 5.2, four waves
    of 32 keys 1.4 and 3.6; bf16 with two waves a tile ahead 5.1 and 7.2, with one it spills, as do FP8
    beside the masks of 320 channels and FNUZ on gfx950. 32 rows of bf16 spill with two waves on gfx942,
    as do 16 rows of 576 channels beside masks.
    """
    alike = block_m == 16 and q_len == 1
    fp8 = {k_format, v_format} <= {"fp8_e4m3fn", "fp8_e5m2"}
    many = block_m == 32 or (head_dim > 512 and q_len > 1)
    warps = 4 if many else 1 if alike and fp8 and head_dim == 512 else 2
    options = LaunchOptions(num_warps=warps, num_stages=1, matrix_instr_nonkdim=16)
    return 16, options, "tile" if alike else ""


def _prefetch(
    target: Target,
    k_format: str,
    v_format: str,
    q_len: int,
    head_dim: int,
    scale_group: int,
    native: bool,
) -> str:
    """`DecodeConfig.prefetch` of tiles of 16 and 32 rows.

    Model, share of the time that HBM is busy, 96/8 heads, head_dim 128, gfx942 and gfx950, without and with
    "tile": FP4 78 and 66%, 100 and 100%; FP8 keys with FP4 values 80 and 66%, 100 and 100%; INT4 77 and
    67%, 100 and 93%. Elsewhere a tile more in registers spills.
    """
    if "fp4_e2m1" not in (k_format, v_format) and not k_format == v_format == "int4":
        return ""
    mixed, gfx942 = k_format != v_format, target.name == "gfx942"
    if gfx942 and v_format not in ("fp4_e2m1", "int4"):
        return ""
    padded = head_dim & (head_dim - 1) != 0
    if q_len > 1 and scale_group:
        # Under Triton 3.9.0 a tile beside the masks of 192 channels spills a register on gfx950 in every
        # other compilation, and page ids alone spill a scalar in gfx942's loop.
        return "" if native else "pages" if padded and not gfx942 else "tile"
    groups = (scale_group == 16 and (mixed or gfx942)) or (scale_group and mixed and gfx942)
    masked = padded or (head_dim > 128 and q_len > 1)
    narrow = native and head_dim != 128
    if narrow or groups or masked or "bf16" in (k_format, v_format):
        return "" if gfx942 else "pages"
    return "tile"

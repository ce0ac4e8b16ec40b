"""Decode's tiles of few rows on AMD."""

from __future__ import annotations

import torch

from narrowkv.quant.formats import get_format
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target


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
        kernel: "decode" or "native".
    """
    native, narrow_head = kernel == "native", head_dim <= 128
    warps = 1 if block_m <= 32 else 4
    block_n = 16 if not narrow_head else 32 if k_format in ("bf16", "fp16") else 64
    if native:
        # The compiler lowers a scaled dot of one wave to bf16 multiplications.
        warps = max(warps, 2)
        block_n = 128 if narrow_head and block_m == 16 else 64 if block_m <= 32 else 32
    prefetch = ""
    if block_m <= 32:
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
    waves = 2 if fits and roomy else None
    options = LaunchOptions(num_warps=warps, num_stages=1, matrix_instr_nonkdim=16, waves_per_eu=waves)
    return block_n, options, prefetch


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
    67%, 100 and 93%. FP8 alone reaches 100 and 96% without. Elsewhere a tile more in registers spills.
    """
    if "fp4_e2m1" not in (k_format, v_format) and not k_format == v_format == "int4":
        return ""
    mixed, gfx942 = k_format != v_format, target.name == "gfx942"
    if gfx942 and v_format not in ("fp4_e2m1", "int4"):
        return ""
    if q_len > 1 and scale_group:
        # Under Triton 3.9.0 a tile beside the masks of 192 channels spills a register on gfx950 in every other
        # compilation, and page ids alone spill a scalar in gfx942's loop.
        padded = head_dim & (head_dim - 1) != 0
        return "" if native else "pages" if padded and not gfx942 else "tile"
    groups = (scale_group == 16 and (mixed or gfx942)) or (scale_group and mixed and gfx942)
    masked = head_dim & (head_dim - 1) != 0 or (head_dim > 128 and q_len > 1)
    narrow = native and head_dim != 128
    if narrow or groups or masked or "bf16" in (k_format, v_format):
        return "" if gfx942 else "pages"
    return "tile"

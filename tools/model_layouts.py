"""Layouts of the kernels in model_kernels.py: of their products, of LDS, and of the copies to it."""

# mypy: ignore-errors
# Triton's layouts have no types.

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout
from triton.experimental.gluon.language.amd.cdna4 import compute_efficient_padded_shared_layout


def _in_order(shared: gl.PaddedSharedLayout, vector: int, warps: int) -> gl.DistributedLinearLayout:
    """The layout whose lanes, then warps, then registers write `shared` in the order of its offsets."""
    bases = [list(basis) for basis in shared.offset_bases]
    registers, lanes = vector.bit_length() - 1, vector.bit_length() - 1 + 6
    waves = lanes + warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        bases[:registers] + bases[waves:], bases[registers:lanes], bases[lanes:waves], [], list(shared.shape)
    )


def blocked_layouts(warps: int, vector: int = 8, block_k: int = 64) -> dict[str, object]:
    """Load layouts of A and B: whole lines of K by consecutive lanes, 16 bytes each."""
    lanes = block_k // vector
    return {
        "LA": gl.BlockedLayout([1, vector], [64 // lanes, lanes], [warps, 1], [1, 0]),
        "LB": gl.BlockedLayout([vector, 1], [lanes, 64 // lanes], [1, warps], [0, 1]),
    }


def raw_layouts(warps: int) -> dict[str, object]:
    """LDS as the tile lies in memory: reads of operands conflict."""
    return {
        **blocked_layouts(warps),
        "SA": gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), "SB": gl.SwizzledSharedLayout(1, 1, 1, [0, 1]),
    }  # fmt: skip


def swizzled_layouts(warps: int, rows_per_phase: int = 1) -> dict[str, object]:
    """LDS with lines of eight elements swizzled over eight phases."""
    return {
        **blocked_layouts(warps),
        "SA": gl.SwizzledSharedLayout(8, rows_per_phase, 8, [1, 0]),
        "SB": gl.SwizzledSharedLayout(8, rows_per_phase, 8, [0, 1]),
    }


def padded_layouts(
    warps: int, mma: AMDMFMALayout, tile: tuple[int, int, int], fp8: bool = False
) -> dict[str, object]:
    """LDS padded so that reads of operands are free of conflicts, and copies that follow it."""
    m, n, k = tile
    # One instruction copies 16 bytes for each lane, and an operand has as many in a row.
    vector, dtype = (16, gl.float8e5) if fp8 else (8, gl.float16)
    sa = compute_efficient_padded_shared_layout.fn(gl.DotOperandLayout(0, mma, vector), [m, k], dtype)
    sb = compute_efficient_padded_shared_layout.fn(gl.DotOperandLayout(1, mma, vector), [k, n], dtype)
    return {"SA": sa, "SB": sb, "LA": _in_order(sa, vector, warps), "LB": _in_order(sb, vector, warps)}


def mfma_layout(version: int, k: int, warps: tuple[int, int]) -> AMDMFMALayout:
    """16 x 16 x k instructions of gfx942 (version 3) or gfx950 (4), waves along rows and columns."""
    return AMDMFMALayout(version, [16, 16, k], True, list(warps))

"""The prepass: FP8 rows expanded to contiguous 16-bit rows, exactly in bf16."""

import triton
import triton.language as tl

from narrowkv.sparse_fp8.kernels.rows import load_columns, load_rope, locate, named, widen_columns


@triton.jit
def _expand_kernel(
    out_ptr, rows, indices_ptr, num_out,
    GATHER: tl.constexpr, LAYOUT: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr,
    WIDE_ADDRESS: tl.constexpr, FORMAT: tl.constexpr, ROUTE: tl.constexpr, EXPONENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Row i of `out` [num_out, 512] is row i, or with GATHER row indices[i]; rows not named become zeros."""
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < num_out
    if GATHER:
        index = tl.load(indices_ptr + i, mask=inside, other=-1)
    else:
        index = i
    live = inside & named(index, rows.num_rows)
    nope_at, rope_at, scale_at = locate(rows, index, LAYOUT, PAGE_SIZE, WIDE_ADDRESS)
    rope = load_rope(rows, rope_at, live)
    base = out_ptr + i.to(tl.int64)[:, None] * 512
    # All columns in one tile: whatever is loaded behind a store waits for it.
    x, scale = load_columns(rows, nope_at, scale_at, live, 0, 512, LAYOUT, GROUP)
    wide = widen_columns(x, scale, rope, 0, 512, FORMAT, ROUTE, EXPONENT, GROUP)  # [BLOCK_R, 512]
    tl.store(base + tl.arange(0, 512)[None, :], wide, mask=inside[:, None])

"""The prepass: FP8 rows expanded to contiguous 16-bit rows, exactly in bf16."""

import triton
import triton.language as tl

from narrowkv.sparse_fp8.kernels.rows import (
    as_row_number,
    load_columns,
    load_rope,
    locate,
    named,
    widen_columns,
)


@triton.jit(do_not_specialize=["num_rows", "num_out"])
def _expand_kernel(
    out_ptr, places_ptr, rows, csr, num_rows, num_out,
    GATHER: tl.constexpr, STORED: tl.constexpr, WIDENING: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Row i of `out` [num_out, 512] is row i, or with GATHER row indices[i]; rows not named become zeros.

    GATHER also writes int32 `places` [num_out]: i where indices[i] names a row, else -1.
    """
    LAYOUT: tl.constexpr = STORED.LAYOUT
    FORMAT: tl.constexpr = WIDENING.FORMAT
    ROUTE: tl.constexpr = WIDENING.ROUTE
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < num_out
    if GATHER:
        index = as_row_number(tl.load(csr.indices + i, mask=inside, other=-1))
    else:
        index = i
    live = inside & named(index, num_rows)
    if GATHER:
        tl.store(places_ptr + i, tl.where(live, i, -1), mask=inside)
    nope_at, rope_at, scale_at = locate(rows, index, LAYOUT, STORED.PAGE_SIZE, STORED.WIDE_ADDRESS)
    rope = load_rope(rows, rope_at, live)
    base = out_ptr + i.to(tl.int64)[:, None] * 512
    # All columns in one tile: whatever is loaded behind a store waits for it.
    x, scale = load_columns(rows, nope_at, scale_at, live, 0, 512, LAYOUT, STORED.GROUP)
    wide = widen_columns(
        x, scale, rope, 0, 512, FORMAT, ROUTE, WIDENING.EXPONENT, STORED.GROUP
    )  # [BLOCK_R, 512]
    tl.store(base + tl.arange(0, 512)[None, :], wide, mask=inside[:, None])

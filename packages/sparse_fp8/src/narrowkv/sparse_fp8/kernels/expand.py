"""The prepass: quantised rows expanded to contiguous bf16 rows; exactly, but for scales in fp32."""

import triton
import triton.language as tl

from narrowkv.sparse_fp8.kernels.rows import (
    as_row_number,
    load_columns,
    load_rope,
    locate,
    names_a_row,
    widen_columns,
    widen_rope,
)


@triton.jit(do_not_specialize=["num_rows", "num_out"])
def _expand_kernel(
    out_ptr, places_ptr, rows, csr, num_rows, num_out,
    GATHER: tl.constexpr, STORED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Row i of `out` [num_out, HEAD_DIM] is row i, or with GATHER row indices[i], zeros if there is none.

    GATHER also writes int32 `places` [num_out]: i where indices[i] names a row, else -1.
    """
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < num_out
    if GATHER:
        index = as_row_number(tl.load(csr.indices + i, mask=inside, other=-1))
    else:
        index = i
    live = inside & names_a_row(index, num_rows)
    if GATHER:
        tl.store(places_ptr + i, tl.where(live, i, -1), mask=inside)
    value_at, rope_at, scale_at = locate(rows, index, STORED)
    base = out_ptr + i.to(tl.int64)[:, None] * HEAD_DIM
    # All values are loaded in one tile: a load after a store would wait for the store.
    x, scale = load_columns(rows, value_at, scale_at, live, 0, 512, STORED)
    rope = 0
    if STORED.ROPE != "":
        rope = widen_rope(load_rope(rows, rope_at, live, STORED), scale, STORED, True)
    widened = widen_columns(x, scale, rope, 0, 512, STORED, True)  # [BLOCK_R, 512]
    tl.store(base + tl.arange(0, 512)[None, :], widened, mask=inside[:, None])
    if HEAD_DIM > 512:
        tl.store(base + (512 + tl.arange(0, 64))[None, :], rope, mask=inside[:, None])

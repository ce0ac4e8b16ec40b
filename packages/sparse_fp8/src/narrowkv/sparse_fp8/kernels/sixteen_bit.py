"""Sparse attention over 16-bit rows: one 512-column tile serves as K and as V.

DeepSeek-V3.2's K has 64 more columns, a tile of their own.
"""

import triton
import triton.language as tl

from narrowkv.runtime.attention.softmax import headroom, softmax_step
from narrowkv.sparse_fp8.kernels.prologue import heads_of_program, rows_of_program
from narrowkv.sparse_fp8.kernels.results import (
    SIZES,
    row_factor,
    store_columns,
    store_lse,
    store_state,
)
from narrowkv.sparse_fp8.kernels.rows import (
    load_indices,
    names_a_row,
    row_numbers,
    seen_keys,
)


@triton.jit
def _scores(q, q_rope, kv, rope, HEAD_DIM: tl.constexpr):
    """Q K^T, fp32 `[BLOCK_H, BLOCK_K]`."""
    s = tl.dot(q, tl.trans(kv))
    if HEAD_DIM > 512:
        s = tl.dot(q_rope, tl.trans(rope), s)
    return s


@triton.jit
def _attend_tile(
    q, q_rope, acc, m, l, qk_scale, kv, rope, live, start, unseen, HEAD_DIM: tl.constexpr,
    GUARD: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """One tile of rows `[BLOCK_K, 512]` into the softmax state."""
    if GUARD:
        # Hides that this product feeds the next: for such a chain the compiler puts all warps on the heads
        # and, with more warps than heads / 16, computes it twice.
        if start >= -1:
            s = _scores(q, q_rope, kv, rope, HEAD_DIM)
        else:
            s = tl.zeros([q.shape[0], kv.shape[0]], tl.float32)
    else:
        s = _scores(q, q_rope, kv, rope, HEAD_DIM)
    s = tl.where(seen_keys(live, start, unseen, PAGES), s * qk_scale, float("-inf"))
    p, m, l, correction = softmax_step(s, m, l, None, headroom(kv.dtype))
    return tl.dot(p.to(kv.dtype), kv, acc * correction[:, None]), m, l


@triton.jit
def _attend_16bit_rows(
    q, q_rope, acc, m, l, qk_scale, source, unseen,
    INT64_OFFSETS: tl.constexpr, HEAD_DIM: tl.constexpr, GUARD: tl.constexpr, BLOCK_K: tl.constexpr,
    PAGES: tl.constexpr,
):  # fmt: skip
    """The rows of a source, see `rows_of_program`, into the softmax state."""
    rows, lists, begin, end = source
    d = tl.arange(0, 512)
    k_range = tl.arange(0, BLOCK_K)
    loaded = load_indices(lists, begin, k_range, end, PAGES, BLOCK_K)
    # Without a product at the top of its body a loop is pipelined only if it says so itself.
    for start in tl.range(begin, end, BLOCK_K, num_stages=GUARD if GUARD else None):
        # Indices come one tile ahead: the rows' loads wait for them.
        upcoming = load_indices(lists, start + BLOCK_K, k_range, end, PAGES, BLOCK_K)
        index = row_numbers(loaded, lists, start, k_range, end, PAGES, BLOCK_K)
        live = names_a_row(index, rows.num_rows)
        offsets = (index.to(tl.int64) if INT64_OFFSETS else index) * rows.stride_n
        kv = tl.load(
            rows.nope + offsets[:, None] + d[None, :], mask=live[:, None], other=0.0
        )  # [BLOCK_K, 512]
        rope = 0
        if HEAD_DIM > 512:
            c = 512 + tl.arange(0, 64)
            rope = tl.load(
                rows.nope + offsets[:, None] + c[None, :], mask=live[:, None], other=0.0
            )  # [BLOCK_K, 64]
        if GUARD:
            # Always taken. Code in a branch goes to the end of the pipelined loop's body, so that the
            # copy of the next tile is under way before this one is multiplied, not after.
            if start >= 0:
                acc, m, l = _attend_tile(
                    q, q_rope, acc, m, l, qk_scale, kv, rope, live, start, unseen, HEAD_DIM, True, PAGES
                )
        else:
            acc, m, l = _attend_tile(
                q, q_rope, acc, m, l, qk_scale, kv, rope, live, start, unseen, HEAD_DIM, False, PAGES
            )
        loaded = upcoming
    return acc, m, l


@triton.jit(do_not_specialize=SIZES)
def _sparse_16bit_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale,
    num_tokens, num_splits, prefix_rows, prefix_nnz, extend_rows, extend_nnz,
    CALL: tl.constexpr, PREFIX: tl.constexpr, EXTEND: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program attends BLOCK_H heads of one token; programs run fastest over the heads of a token.

    Grid: tokens times blocks of heads, splits. PREFIX, EXTEND: `StoredRows`, or None for no source.
    """
    token, first_head = heads_of_program(CALL, TILES.BLOCK_H)
    heads = first_head + tl.arange(0, TILES.BLOCK_H)
    mask = heads < CALL.NUM_HEADS
    if CALL.INT64_HEADS:
        heads = heads.to(tl.int64)
    split = tl.program_id(1)
    d = tl.arange(0, 512)
    token_64 = token.to(tl.int64)
    q_rows = q.nope + token_64 * q.stride_n + heads[:, None] * q.stride_h
    q_tile = tl.load(q_rows + d[None, :], mask=mask[:, None], other=0.0)  # [BLOCK_H, 512]
    q_rope = 0
    if CALL.HEAD_DIM > 512:
        c = 512 + tl.arange(0, 64)
        q_rope = tl.load(q_rows + c[None, :], mask=mask[:, None], other=0.0)  # [BLOCK_H, 64]
    m = tl.full([TILES.BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([TILES.BLOCK_H], tl.float32)
    acc = tl.zeros([TILES.BLOCK_H, 512], tl.float32)
    prefix, extend, unseen = rows_of_program(
        prefix, prefix_csr, extend, extend_csr, token, heads, split, num_tokens, num_splits,
        prefix_rows, prefix_nnz, extend_rows, extend_nnz,
        PREFIX, EXTEND, CALL.SPLIT, CALL.PAGES, TILES.BLOCK_K,
    )  # fmt: skip
    if PREFIX is not None:
        acc, m, l = _attend_16bit_rows(
            q_tile, q_rope, acc, m, l, qk_scale, prefix, unseen,
            PREFIX.INT64_OFFSETS, CALL.HEAD_DIM, TILES.GUARD, TILES.BLOCK_K, CALL.PAGES,
        )  # fmt: skip
    if EXTEND is not None:
        acc, m, l = _attend_16bit_rows(
            q_tile, q_rope, acc, m, l, qk_scale, extend, unseen,
            EXTEND.INT64_OFFSETS, CALL.HEAD_DIM, TILES.GUARD, TILES.BLOCK_K, None,
        )  # fmt: skip
    slot = (split.to(tl.int64) * num_tokens + token) * CALL.NUM_HEADS
    factor = row_factor(out, m, l, heads, mask, CALL)
    store_columns(out, partials, acc, factor, token_64, slot, heads, mask, 0, CALL.SPLIT)
    if CALL.SPLIT:
        store_state(partials, m, l, slot, heads, mask)
    elif CALL.WRITE_LSE:
        store_lse(out, m, l, token_64, heads, mask)

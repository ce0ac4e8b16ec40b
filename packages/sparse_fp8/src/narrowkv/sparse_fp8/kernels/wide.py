"""Sparse attention over 16-bit rows: one 512-column tile serves as K and as V."""

import triton
import triton.language as tl

from narrowkv.quant.softmax import softmax_step
from narrowkv.sparse_fp8.kernels.results import (
    row_share,
    split_tiles,
    store_columns,
    store_lse,
    store_state,
)
from narrowkv.sparse_fp8.kernels.rows import load_indices, named, token_span


@triton.jit
def _step(q, acc, m, l, qk_scale, kv, live, start, GUARD: tl.constexpr):
    """One tile of rows `[BLOCK_K, 512]` into the softmax state."""
    if GUARD:
        # Hides that this product feeds the next: for such a chain the compiler puts all warps on the heads
        # and, with more warps than heads / 16, computes it twice.
        if start >= -1:
            s = tl.dot(q, tl.trans(kv))  # [BLOCK_H, BLOCK_K]
        else:
            s = tl.zeros([q.shape[0], kv.shape[0]], tl.float32)
    else:
        s = tl.dot(q, tl.trans(kv))
    s = tl.where(live[None, :], s * qk_scale, float("-inf"))
    p, m, l, correction = softmax_step(s, m, l)
    return tl.dot(p.to(kv.dtype), kv, acc * correction[:, None]), m, l


@triton.jit
def _attend_wide(
    q, acc, m, l, qk_scale, rows, csr, begin, end,
    WIDE_ADDRESS: tl.constexpr, GUARD: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows at places [begin, end) of the index list into the softmax state."""
    d = tl.arange(0, 512)
    k_range = tl.arange(0, BLOCK_K)
    index = load_indices(csr, begin, k_range, end)
    # Without a product at the top of its body a loop is pipelined only if it says so itself.
    for start in tl.range(begin, end, BLOCK_K, num_stages=GUARD if GUARD else None):
        # Indices come one tile ahead: the rows' loads wait for them.
        upcoming = load_indices(csr, start + BLOCK_K, k_range, end)
        live = named(index, rows.num_rows)
        offsets = (index.to(tl.int64) if WIDE_ADDRESS else index) * rows.stride_n
        kv = tl.load(
            rows.nope + offsets[:, None] + d[None, :], mask=live[:, None], other=0.0
        )  # [BLOCK_K, 512]
        if GUARD:
            # Always taken. What stands in a branch goes to the end of the pipelined loop's body, so that the
            # copy of the next tile is under way before this one is multiplied, not after.
            if start >= 0:
                acc, m, l = _step(q, acc, m, l, qk_scale, kv, live, start, True)
        else:
            acc, m, l = _step(q, acc, m, l, qk_scale, kv, live, start, False)
        index = upcoming
    return acc, m, l


@triton.jit
def _sparse_wide_kernel(
    q_ptr, out, partials, prefix, prefix_csr, extend, extend_csr,
    stride_qt, stride_qh, qk_scale, num_tokens, num_splits,
    NUM_HEADS: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_EXTEND: tl.constexpr,
    WIDE_PREFIX: tl.constexpr, WIDE_EXTEND: tl.constexpr, WIDE_HEADS: tl.constexpr,
    HAS_SINK: tl.constexpr, WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr, GUARD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program attends BLOCK_H heads of one token; programs run fastest over the heads of a token."""
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0) // HEAD_BLOCKS
    heads = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = heads < NUM_HEADS
    if WIDE_HEADS:
        heads = heads.to(tl.int64)
    split = tl.program_id(1)
    d = tl.arange(0, 512)
    wide_token = token.to(tl.int64)
    q = tl.load(
        q_ptr + wide_token * stride_qt + heads[:, None] * stride_qh + d[None, :],
        mask=mask[:, None],
        other=0.0,
    )  # [BLOCK_H, 512]
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, 512], tl.float32)
    prefix_begin, prefix_end, extend_begin, extend_end = 0, 0, 0, 0
    if HAS_PREFIX:
        prefix_begin, prefix_end = token_span(prefix_csr, token)
    if HAS_EXTEND:
        extend_begin, extend_end = token_span(extend_csr, token)
    if SPLIT:
        p_lo, p_hi, e_lo, e_hi = split_tiles(
            prefix_end - prefix_begin, extend_end - extend_begin, split, num_splits, BLOCK_K
        )
        prefix_begin, prefix_end = prefix_begin + p_lo, prefix_begin + p_hi
        extend_begin, extend_end = extend_begin + e_lo, extend_begin + e_hi
    if HAS_PREFIX:
        acc, m, l = _attend_wide(
            q, acc, m, l, qk_scale, prefix, prefix_csr, prefix_begin, prefix_end, WIDE_PREFIX, GUARD, BLOCK_K
        )
    if HAS_EXTEND:
        acc, m, l = _attend_wide(
            q, acc, m, l, qk_scale, extend, extend_csr, extend_begin, extend_end, WIDE_EXTEND, GUARD, BLOCK_K
        )
    slot = (split.to(tl.int64) * num_tokens + token) * NUM_HEADS
    share = row_share(out, m, l, heads, mask, HAS_SINK)
    store_columns(out, partials, acc, share, wide_token, slot, heads, mask, 0, SPLIT)
    if SPLIT:
        store_state(partials, m, l, slot, heads, mask)
    elif WRITE_LSE:
        store_lse(out, m, l, wide_token, heads, mask)

"""Sparse attention straight from FP8 rows: tiles of 64 columns are widened on the chip, no 16-bit copy.

QK over the seven NoPE tiles multiplies FP8 by FP8 and scales each product (Q in FP8), or multiplies 16-bit Q
by widened tiles; QK over RoPE is bf16. PV multiplies by the widened tiles.
"""

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
from narrowkv.sparse_fp8.kernels.rows import (
    as_fp8,
    load_indices,
    load_nope,
    load_rope,
    load_scale,
    locate,
    named,
    token_span,
    widen_tile,
)


@triton.jit
def _load_query(
    q, base, heads, mask, stride_qh,
    FP8_Q: tl.constexpr, FORMAT: tl.constexpr, ROUTE: tl.constexpr, EXPONENT: tl.constexpr,
    LAYOUT: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, FP8_QK: tl.constexpr,
):  # fmt: skip
    """Seven NoPE tiles of Q `[BLOCK_H, 64]` (bytes when FP8_QK, else bf16), their scales, and RoPE."""
    tiles, scales = (), ()
    if FP8_Q:
        nope, rope_at, scale_at = locate(q, base + heads, LAYOUT, PAGE_SIZE, True)
        for t in tl.static_range(7):
            x = load_nope(q, nope, mask, t)
            scale = load_scale(q, scale_at, mask, t, LAYOUT, GROUP)
            if FP8_QK:
                tiles = tiles + (as_fp8(x, FORMAT, ROUTE),)
                scales = scales + (scale * (2.0**EXPONENT),)
            else:
                tiles = tiles + (widen_tile(x, scale, FORMAT, ROUTE, EXPONENT, GROUP),)
        rope = load_rope(q, rope_at, mask)
    else:
        rows = q.nope + base * q.stride_n + heads[:, None] * stride_qh
        c = tl.arange(0, 64)
        for t in tl.static_range(7):
            tiles = tiles + (tl.load(rows + (t * 64 + c)[None, :], mask=mask[:, None], other=0.0),)
        rope = tl.load(rows + (448 + c)[None, :], mask=mask[:, None], other=0.0)
    return tiles, scales, rope


@triton.jit
def _attend_fused(
    q, q_scales, q_rope, acc, m, l, qk_scale, rows, csr, begin, end,
    LAYOUT: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, WIDE_ADDRESS: tl.constexpr,
    FORMAT: tl.constexpr, ROUTE: tl.constexpr, EXPONENT: tl.constexpr, FP8_QK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows at places [begin, end) of the index list into the softmax state; acc is eight tiles of 64."""
    k_range = tl.arange(0, BLOCK_K)
    index = load_indices(csr, begin + k_range, end)
    for start in range(begin, end, BLOCK_K):
        upcoming = load_indices(csr, start + BLOCK_K + k_range, end)
        live = named(index, rows.num_rows)
        nope_at, rope_at, scale_at = locate(rows, index, LAYOUT, PAGE_SIZE, WIDE_ADDRESS)
        rope = load_rope(rows, rope_at, live)  # [BLOCK_K, 64]
        stored, scales = (), ()
        for t in tl.static_range(7):
            stored = stored + (load_nope(rows, nope_at, live, t),)
            scales = scales + (load_scale(rows, scale_at, live, t, LAYOUT, GROUP),)
        # The branch is always taken; see the kernel over 16-bit rows.
        if start >= 0:
            s = tl.dot(q_rope, tl.trans(rope.to(q_rope.dtype)))  # [BLOCK_H, BLOCK_K]
            for t in tl.static_range(7):
                if FP8_QK:
                    product = tl.dot(q[t], tl.trans(as_fp8(stored[t], FORMAT, ROUTE)))
                    s += product * q_scales[t][:, None] * (scales[t] * (2.0**EXPONENT))[None, :]
                else:
                    k = widen_tile(stored[t], scales[t], FORMAT, ROUTE, EXPONENT, GROUP)
                    s = tl.dot(q[t], tl.trans(k.to(q[t].dtype)), s)
        else:
            s = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
        s = tl.where(live[None, :], s * qk_scale, float("-inf"))
        p, m, l, correction = softmax_step(s, m, l)
        p_narrow = p.to(tl.bfloat16)
        summed = ()
        # Widened again for PV: kept since QK, the tiles would take more registers than there are.
        for t in tl.static_range(7):
            v = widen_tile(stored[t], scales[t], FORMAT, ROUTE, EXPONENT, GROUP)
            summed = summed + (tl.dot(p_narrow, v, acc[t] * correction[:, None]),)
        summed = summed + (tl.dot(p_narrow, rope, acc[7] * correction[:, None]),)
        acc = summed
        index = upcoming
    return acc, m, l


@triton.jit
def _sparse_fused_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr,
    stride_qh, qk_scale, num_tokens, num_splits,
    NUM_HEADS: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_EXTEND: tl.constexpr,
    Q_LAYOUT: tl.constexpr, Q_PAGE_SIZE: tl.constexpr, Q_GROUP: tl.constexpr, FP8_Q: tl.constexpr,
    PREFIX_LAYOUT: tl.constexpr, PREFIX_PAGE_SIZE: tl.constexpr, PREFIX_GROUP: tl.constexpr,
    EXTEND_LAYOUT: tl.constexpr, EXTEND_PAGE_SIZE: tl.constexpr, EXTEND_GROUP: tl.constexpr,
    WIDE_PREFIX: tl.constexpr, WIDE_EXTEND: tl.constexpr,
    FORMAT: tl.constexpr, ROUTE: tl.constexpr, EXPONENT: tl.constexpr, FP8_QK: tl.constexpr,
    HAS_SINK: tl.constexpr, WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program attends BLOCK_H heads of one token; programs run fastest over the heads of a token."""
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0) // HEAD_BLOCKS
    heads = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = heads < NUM_HEADS
    split = tl.program_id(1)
    wide_token = token.to(tl.int64)
    # FP8 rows of Q are counted through all tokens; 16-bit Q has a stride between tokens.
    base = wide_token * NUM_HEADS if FP8_Q else wide_token
    q_tiles, q_scales, q_rope = _load_query(
        q, base, heads, mask, stride_qh,
        FP8_Q, FORMAT, ROUTE, EXPONENT, Q_LAYOUT, Q_PAGE_SIZE, Q_GROUP, FP8_QK,
    )  # fmt: skip
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc = ()
    for _ in tl.static_range(8):
        acc = acc + (tl.zeros([BLOCK_H, 64], tl.float32),)
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
        acc, m, l = _attend_fused(
            q_tiles, q_scales, q_rope, acc, m, l, qk_scale, prefix, prefix_csr, prefix_begin, prefix_end,
            PREFIX_LAYOUT, PREFIX_PAGE_SIZE, PREFIX_GROUP, WIDE_PREFIX,
            FORMAT, ROUTE, EXPONENT, FP8_QK, BLOCK_H, BLOCK_K,
        )  # fmt: skip
    if HAS_EXTEND:
        acc, m, l = _attend_fused(
            q_tiles, q_scales, q_rope, acc, m, l, qk_scale, extend, extend_csr, extend_begin, extend_end,
            EXTEND_LAYOUT, EXTEND_PAGE_SIZE, EXTEND_GROUP, WIDE_EXTEND,
            FORMAT, ROUTE, EXPONENT, FP8_QK, BLOCK_H, BLOCK_K,
        )  # fmt: skip
    slot = (split.to(tl.int64) * num_tokens + token) * NUM_HEADS
    share = row_share(out, m, l, heads, mask, HAS_SINK)
    for t in tl.static_range(8):
        store_columns(out, partials, acc[t], share, wide_token, slot, heads, mask, t * 64, SPLIT)
    if SPLIT:
        store_state(partials, m, l, slot, heads, mask)
    elif WRITE_LSE:
        store_lse(out, m, l, wide_token, heads, mask)

"""Sparse attention straight from quantised rows: tiles are widened on the chip, no 16-bit copy.

QK multiplies 16-bit Q by widened tiles of columns, or, over the seven NoPE tiles of DeepSeek-V4's rows, FP8
by FP8 and scales each product (Q in FP8). PV multiplies by the widened tiles. Tiles have 64 columns, or more
where that is faster: then RoPE columns are the end of the last, or, where K is longer than V, a tile of their
own. Scales in fp32 multiply scores and numerators and not values, whose product with them bf16 cannot hold.
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
    as_fp8,
    load_columns,
    load_indices,
    load_rope,
    locate,
    names_a_row,
    row_numbers,
    seen_keys,
    widen_columns,
    widen_rope,
)


@triton.jit
def _load_rows(rows, index, mask, WIDTH: tl.constexpr, STORED: tl.constexpr):
    """Rows as stored: tuples of the results of `load_columns`, and RoPE columns `[N, 64]`, or 0."""
    value_at, rope_at, scale_at = locate(rows, index, STORED)
    rope = 0
    if STORED.ROPE != "":
        rope = load_rope(rows, rope_at, mask, STORED)
    stored, scales = (), ()
    for t in tl.static_range((STORED.COLUMNS + WIDTH - 1) // WIDTH):
        x, scale = load_columns(rows, value_at, scale_at, mask, t, WIDTH, STORED)
        stored = stored + (x,)
        scales = scales + (scale,)
    return stored, scales, rope


@triton.jit
def _widen_rows(
    stored, scales, rope, WIDTH: tl.constexpr, STORED: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """All columns as a tuple of bf16 tiles: `[N, WIDTH]`, and RoPE columns `[N, 64]` that no such tile has.

    Without SCALED the values are still to be multiplied by their scales.
    """
    if STORED.ROPE != "":
        rope = widen_rope(rope, scales[0], STORED, SCALED)
    widened = ()
    for t in tl.static_range((STORED.COLUMNS + WIDTH - 1) // WIDTH):
        widened = widened + (widen_columns(stored[t], scales[t], rope, t, WIDTH, STORED, SCALED),)
    if STORED.ROPE != "":
        if STORED.COLUMNS % WIDTH == 0:
            widened = widened + (rope,)
    return widened


@triton.jit
def _load_query(
    q, base, heads, mask, WIDTH: tl.constexpr, QUERY: tl.constexpr, HEAD_DIM: tl.constexpr,
    FP8_QK: tl.constexpr,
):  # fmt: skip
    """Q as a tuple of tiles like those of rows, and NoPE's scales if FP8_QK leaves those tiles in FP8."""
    tiles, scales = (), ()
    if QUERY.VALUES != "":
        stored, scales, rope = _load_rows(q, base + heads, mask, WIDTH, QUERY)
        if FP8_QK:
            for t in tl.static_range(7):
                tiles = tiles + (as_fp8(stored[t], QUERY.FORMAT, QUERY.ROUTE),)
            tiles = tiles + (rope,)
        else:
            tiles = _widen_rows(stored, scales, rope, WIDTH, QUERY, True)
    else:
        rows = q.nope + base * q.stride_n + heads[:, None] * q.stride_h
        c = tl.arange(0, WIDTH)
        for t in tl.static_range(512 // WIDTH):
            tiles = tiles + (tl.load(rows + (t * WIDTH + c)[None, :], mask=mask[:, None], other=0.0),)
        if HEAD_DIM > 512:
            d = 512 + tl.arange(0, 64)
            tiles = tiles + (tl.load(rows + d[None, :], mask=mask[:, None], other=0.0),)
    return tiles, scales


@triton.jit
def _scores(
    q, q_scales, stored, scales, widened, WIDTH: tl.constexpr, STORED: tl.constexpr, HEAD_DIM: tl.constexpr,
    FP8_QK: tl.constexpr,
):  # fmt: skip
    """Q K^T before the softmax scale, fp32 `[BLOCK_H, BLOCK_K]`."""
    if FP8_QK:
        s = tl.dot(q[7], tl.trans(widened[7]))
        for t in tl.static_range(7):
            product = tl.dot(q[t], tl.trans(as_fp8(stored[t], STORED.FORMAT, STORED.ROUTE)))
            s += product * q_scales[t][:, None] * (scales[t] * (4.0**STORED.EXPONENT))[None, :]
    elif STORED.SCALE == "fp32":
        LAST: tl.constexpr = (HEAD_DIM - 64) // WIDTH  # the RoPE columns, or the last tile with a scale
        s = tl.dot(q[LAST], tl.trans(widened[LAST].to(q[0].dtype)))
        if HEAD_DIM == 512:
            s = s * scales[LAST][None, :]
        for t in tl.static_range(LAST):
            s += tl.dot(q[t], tl.trans(widened[t].to(q[t].dtype))) * scales[t][None, :]
    else:
        s = tl.dot(q[0], tl.trans(widened[0].to(q[0].dtype)))
        for t in tl.static_range(1, 512 // WIDTH + (HEAD_DIM - 512) // 64):
            s = tl.dot(q[t], tl.trans(widened[t].to(q[t].dtype)), s)
    return s


@triton.jit
def _attend_tile(
    q, q_scales, acc, m, l, qk_scale, descale, stored, scales, rope, live, start, unseen,
    WIDTH: tl.constexpr, STORED: tl.constexpr, HEAD_DIM: tl.constexpr, FP8_QK: tl.constexpr,
    GUARD: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """One tile of rows into the softmax state; `descale` is the scale of all values if SCALE is "tensor"."""
    SCALED: tl.constexpr = STORED.SCALE != "fp32" and STORED.SCALE != "tensor"
    widened = _widen_rows(stored, scales, rope, WIDTH, STORED, SCALED)
    if GUARD:
        if start >= -1:
            s = _scores(q, q_scales, stored, scales, widened, WIDTH, STORED, HEAD_DIM, FP8_QK)
        else:
            s = tl.zeros([q[0].shape[0], live.shape[0]], tl.float32)
    else:
        s = _scores(q, q_scales, stored, scales, widened, WIDTH, STORED, HEAD_DIM, FP8_QK)
    s = tl.where(seen_keys(live, start, unseen, PAGES), s * qk_scale, float("-inf"))
    p, m, l, correction = softmax_step(s, m, l, None, headroom(tl.bfloat16))
    if STORED.SCALE == "tensor":
        p = p * descale
    p_narrow = p.to(tl.bfloat16)
    summed = ()
    for t in tl.static_range(512 // WIDTH):
        if STORED.SCALE == "fp32":
            p_narrow = (p * scales[t][None, :]).to(tl.bfloat16)
        summed = summed + (tl.dot(p_narrow, widened[t], acc[t] * correction[:, None]),)
    return summed, m, l


@triton.jit
def _attend_fused(
    q, q_scales, acc, m, l, qk_scale, source, unseen, WIDTH: tl.constexpr,
    STORED: tl.constexpr, HEAD_DIM: tl.constexpr, FP8_QK: tl.constexpr, GUARD: tl.constexpr,
    BLOCK_K: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """The rows of a source, see `rows_of_program`, into the softmax state; acc is 512 // WIDTH tiles."""
    rows, lists, begin, end = source
    descale = 1.0
    if STORED.SCALE == "tensor":
        descale = tl.load(rows.scale).to(tl.float32, bitcast=True)
        qk_scale = qk_scale * descale
    k_range = tl.arange(0, BLOCK_K)
    loaded = load_indices(lists, begin, k_range, end, PAGES, BLOCK_K)
    for start in tl.range(begin, end, BLOCK_K, num_stages=GUARD if GUARD else None):
        upcoming = load_indices(lists, start + BLOCK_K, k_range, end, PAGES, BLOCK_K)
        index = row_numbers(loaded, lists, start, k_range, end, PAGES, BLOCK_K)
        live = names_a_row(index, rows.num_rows)
        stored, scales, rope = _load_rows(rows, index, live, WIDTH, STORED)
        if GUARD:
            # Always taken; see the kernel over 16-bit rows.
            if start >= 0:
                acc, m, l = _attend_tile(
                    q, q_scales, acc, m, l, qk_scale, descale, stored, scales, rope, live, start, unseen,
                    WIDTH, STORED, HEAD_DIM, FP8_QK, True, PAGES,
                )  # fmt: skip
        else:
            acc, m, l = _attend_tile(
                q, q_scales, acc, m, l, qk_scale, descale, stored, scales, rope, live, start, unseen, WIDTH,
                STORED, HEAD_DIM, FP8_QK, False, PAGES,
            )  # fmt: skip
        loaded = upcoming
    return acc, m, l


@triton.jit(do_not_specialize=SIZES)
def _sparse_fused_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale,
    num_tokens, num_splits, prefix_rows, prefix_nnz, extend_rows, extend_nnz,
    CALL: tl.constexpr, QUERY: tl.constexpr, PREFIX: tl.constexpr, EXTEND: tl.constexpr,
    FP8_QK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program attends BLOCK_H heads of one token; programs run fastest over the heads of a token.

    Grid: tokens times blocks of heads, splits. QUERY, PREFIX, EXTEND: `StoredRows`, or None for no source.
    """
    token, first_head = heads_of_program(CALL, TILES.BLOCK_H)
    heads = first_head + tl.arange(0, TILES.BLOCK_H)
    mask = heads < CALL.NUM_HEADS
    if CALL.INT64_HEADS:
        heads = heads.to(tl.int64)
    split = tl.program_id(1)
    token_64 = token.to(tl.int64)
    # Quantised rows of Q are counted through all tokens; 16-bit Q has a stride between tokens.
    base = token_64 * CALL.NUM_HEADS if QUERY.VALUES != "" else token_64
    q_tiles, q_scales = _load_query(q, base, heads, mask, TILES.WIDTH, QUERY, CALL.HEAD_DIM, FP8_QK)
    m = tl.full([TILES.BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([TILES.BLOCK_H], tl.float32)
    acc = ()
    for _ in tl.static_range(512 // TILES.WIDTH):
        acc = acc + (tl.zeros([TILES.BLOCK_H, TILES.WIDTH], tl.float32),)
    prefix, extend, unseen = rows_of_program(
        prefix, prefix_csr, extend, extend_csr, token, heads, split, num_tokens, num_splits,
        prefix_rows, prefix_nnz, extend_rows, extend_nnz,
        PREFIX, EXTEND, CALL.SPLIT, CALL.PAGES, TILES.BLOCK_K,
    )  # fmt: skip
    if PREFIX is not None:
        acc, m, l = _attend_fused(
            q_tiles, q_scales, acc, m, l, qk_scale, prefix, unseen,
            TILES.WIDTH, PREFIX, CALL.HEAD_DIM, FP8_QK, TILES.GUARD, TILES.BLOCK_K, CALL.PAGES,
        )  # fmt: skip
    if EXTEND is not None:
        acc, m, l = _attend_fused(
            q_tiles, q_scales, acc, m, l, qk_scale, extend, unseen,
            TILES.WIDTH, EXTEND, CALL.HEAD_DIM, FP8_QK, TILES.GUARD, TILES.BLOCK_K, None,
        )  # fmt: skip
    slot = (split.to(tl.int64) * num_tokens + token) * CALL.NUM_HEADS
    factor = row_factor(out, m, l, heads, mask, CALL)
    for t in tl.static_range(512 // TILES.WIDTH):
        store_columns(out, partials, acc[t], factor, token_64, slot, heads, mask, t * TILES.WIDTH, CALL.SPLIT)
    if CALL.SPLIT:
        store_state(partials, m, l, slot, heads, mask)
    elif CALL.WRITE_LSE:
        store_lse(out, m, l, token_64, heads, mask)

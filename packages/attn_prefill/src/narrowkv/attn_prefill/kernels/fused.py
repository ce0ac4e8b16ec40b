"""Prefill in one step: keys are gathered from their pages and widened inside the attention loop.

The scores of the next key tile are issued before the softmax of the current one, and the pages of the tile
after that are looked up meanwhile, so that gathering, widening and the matrix unit overlap. Keys may also go
to the FP8 matrix unit as they are stored.
"""

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.tiles import (
    accumulate,
    confine_nonfinite,
    load_query,
    scale_to_fp16,
    scores,
    split_query,
    widen_tile,
    zeros_in_parts,
)
from narrowkv.attn_prefill.kernels.arguments import Read
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    Queries,
    merge_splits,
    rows_of,
    softmax_step,
    tile_of,
    weigh_values,
)
from narrowkv.paged_cache.kernels.pages import (
    Descale,
    KVPointers,
    Table,
    first_id,
    kv_offsets,
    load_key_scale,
    load_words,
    locate_keys,
    sequence_length,
    times_head_descale,
)
from narrowkv.quant.device import join_parts
from narrowkv.runtime.attention.masks import key_range, share_of, visible_keys
from narrowkv.runtime.attention.results import write_rows
from narrowkv.runtime.attention.softmax import capped_logits


@triton.jit
def as_fp8(x, TYPE: tl.constexpr, CLEAN: tl.constexpr):
    """Stored bytes as the FP8 type of the matrix unit; OCP bytes read as FNUZ are half their value.

    CLEAN: no byte is OCP's negative zero or NaN, which FNUZ reads as NaN and as a number.
    """
    if x.dtype == tl.uint8:
        if not CLEAN:
            x = tl.where(x == 0x80, 0, x)
            x = tl.where((x & 0x7F) == 0x7F, 0x80, x).to(tl.uint8)
        x = x.to(TYPE, bitcast=True)
    return x


@triton.jit
def split_rows_fp8(q, TYPE: tl.constexpr, TOP: tl.constexpr):
    """Rows as two FP8 terms, the first with its largest element at TOP, and their descales."""
    q = q.to(tl.float32)
    descale = tl.maximum(tl.max(tl.abs(q), 1), 1.0e-30) * (1.0 / TOP)
    # The largest may round past TOP, which some casts turn into NaN.
    x = tl.minimum(tl.maximum(q / descale[:, None], -TOP), TOP)
    high = x.to(TYPE)
    return high, (x - high.to(tl.float32)).to(TYPE), descale


@triton.jit
def accumulate_fp8(acc, correction, p, v, TYPE: tl.constexpr):
    """Acc * correction + P @ V on the FP8 matrix unit, with P as two terms: one alone is a percent off."""
    high = p.to(TYPE)
    low = (p - high.to(tl.float32)).to(TYPE)
    return tl.dot(high, v, tl.dot(low, v, acc * correction[:, None]))


@triton.jit
def paged_keys(
    q, q_low, acc, m, l, logit_scale, soft_cap, k, v, k_descale, v_descale, table, read, query_pos,
    begin, end, full_end,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) of a sequence's pages; from `full_end` on with a mask.

    Two loops: a branch in one keeps the compiler from loading ahead (H200, 128 over 4k: 139 and 252 us).

    Args:
        q, q_low: Q as one or two terms, in parts; acc, m, l: the state of the softmax, `acc` in parts.
        read: `Read`, which bounds what is read of a table and a length that are wrong.
        SIZES, K, V, RULES, BLOCKS: `Sizes`, `Stored`, `Stored`, `Rules`, `Blocks`.
    """
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    WIDE_ADDRESS: tl.constexpr = RULES.wide_address
    BLOCK_N: tl.constexpr = BLOCKS.n
    v_unit = read.num_keys.to(tl.float32) * 0.0
    n = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    page, slot = locate_keys(table, read.row_base, n, read.first, read.last, PAGE_SIZE, WIDE_ADDRESS)
    s = paged_scores(q, q_low, k, k_descale, page, slot, read.kv_head, logit_scale, SIZES, K, RULES, BLOCKS)
    next_page, next_slot = locate_keys(
        table, read.row_base, n + BLOCK_N, read.first, read.last, PAGE_SIZE, WIDE_ADDRESS
    )
    if RULES.window_left < 0:
        for tile in range(begin, full_end):
            s, acc, m, l, v_unit, page, slot, next_page, next_slot = paged_step(
                tile, s, page, slot, next_page, next_slot,
                q, q_low, acc, m, l, v_unit, logit_scale, soft_cap, k, v, k_descale, v_descale, table,
                read, query_pos, SIZES, K, V, RULES, BLOCKS, False,
            )  # fmt: skip
        begin = full_end
    # Tiles follow one another, so a window on the left masks them all.
    for tile in range(begin, end):
        s, acc, m, l, v_unit, page, slot, next_page, next_slot = paged_step(
            tile, s, page, slot, next_page, next_slot,
            q, q_low, acc, m, l, v_unit, logit_scale, soft_cap, k, v, k_descale, v_descale, table,
            read, query_pos, SIZES, K, V, RULES, BLOCKS, True,
        )  # fmt: skip
    return acc, m, l, v_unit


@triton.jit
def paged_scores(
    q, q_low, k, k_descale, page, slot, kv_head, logit_scale,
    SIZES: tl.constexpr, K: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N] of the keys at these places, scaled unless `RULES.folded`."""
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    K_VEC: tl.constexpr = K.vec
    K_FORMAT: tl.constexpr = K.format
    K_ROUTE: tl.constexpr = K.route
    K_DESCALE: tl.constexpr = K.descale
    K_PARTS: tl.constexpr = K.parts
    COMPUTE: tl.constexpr = RULES.compute
    SPLIT_Q: tl.constexpr = RULES.split_q
    FP8: tl.constexpr = RULES.fp8
    CLEAN: tl.constexpr = RULES.clean
    BLOCK_D: tl.constexpr = BLOCKS.d
    d = tl.arange(0, BLOCK_D // K_PARTS)
    PER_KEY: tl.constexpr = K_DESCALE != "scalar" and K_DESCALE != "head"
    ZERO: tl.constexpr = 0 if K_ROUTE != "native" or K_PARTS > 1 else 0.0
    words = load_words(k, kv_offsets(page, slot, k, kv_head, d, K_VEC, False), d, ZERO, K_PARTS,
                       HEAD_DIM, BLOCK_D)  # fmt: skip
    scale = 1.0
    if PER_KEY:
        scale = load_key_scale(k_descale, page, slot, kv_head, K_DESCALE, False, HEAD_DIM, BLOCK_D)
    if FP8 is not None:
        stored = tl.trans(as_fp8(words, FP8, CLEAN))
        s = tl.dot(q[0], stored)
        if SPLIT_Q:
            s = tl.dot(q_low[0], stored, s)
        factor = scale
    else:
        wide, factor = widen_tile(words, scale, K_FORMAT, K_ROUTE, COMPUTE, K_PARTS, K_DESCALE)
        s = scores(q, q_low, wide, SPLIT_Q, K_PARTS)
    if not RULES.folded:
        s *= logit_scale[:, None]
        if PER_KEY:
            s *= factor[None, :]
    return s


@triton.jit
def paged_step(
    tile, s, page, slot, next_page, next_slot,
    q, q_low, acc, m, l, v_unit, logit_scale, soft_cap, k, v, k_descale, v_descale, table,
    read, query_pos,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax and values of `tile`, whose scores are `s`; before them the scores of the tile that follows."""
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    V_VEC: tl.constexpr = V.vec
    V_FORMAT: tl.constexpr = V.format
    V_ROUTE: tl.constexpr = V.route
    V_DESCALE: tl.constexpr = V.descale
    V_PARTS: tl.constexpr = V.parts
    COMPUTE: tl.constexpr = RULES.compute
    FP8: tl.constexpr = RULES.fp8
    CLEAN: tl.constexpr = RULES.clean
    P_SCALE: tl.constexpr = RULES.p_scale
    ACC_PARTS: tl.constexpr = RULES.acc_parts
    FOLDED: tl.constexpr = RULES.folded
    WINDOW_LEFT: tl.constexpr = RULES.window_left
    WINDOW_RIGHT: tl.constexpr = RULES.window_right
    WIDE_ADDRESS: tl.constexpr = RULES.wide_address
    BLOCK_N: tl.constexpr = BLOCKS.n
    BLOCK_D: tl.constexpr = BLOCKS.d
    kv_head = read.kv_head
    PER_KEY: tl.constexpr = V_DESCALE != "scalar" and V_DESCALE != "head"
    ZERO: tl.constexpr = 0 if V_ROUTE != "native" or V_PARTS > 1 else 0.0
    d = tl.arange(0, BLOCK_D // V_PARTS)
    words = load_words(v, kv_offsets(page, slot, v, kv_head, d, V_VEC, True), d, ZERO, V_PARTS,
                       HEAD_DIM, BLOCK_D)  # fmt: skip
    v_scale = 1.0
    if PER_KEY:
        v_scale = load_key_scale(v_descale, page, slot, kv_head, V_DESCALE, False, HEAD_DIM, BLOCK_D)
    # Past the last tile these are the last key's own place again.
    s_next = paged_scores(
        q, q_low, k, k_descale, next_page, next_slot, kv_head, logit_scale, SIZES, K, RULES, BLOCKS
    )
    n = tl.arange(0, BLOCK_N)
    after_page, after_slot = locate_keys(
        table, read.row_base, (tile + 2) * BLOCK_N + n, read.first, read.last, PAGE_SIZE, WIDE_ADDRESS
    )
    if RULES.soft_cap:
        s = capped_logits(s, soft_cap)
    if MASKED:
        keep = visible_keys(tile * BLOCK_N + n, query_pos, 0, read.num_keys, False, WINDOW_LEFT, WINDOW_RIGHT)
        s = tl.where(keep, s, float("-inf"))
    p, correction, m, l = softmax_step(s, m, l, logit_scale, FOLDED)
    if FP8 is not None:
        factor = v_scale
        values = (as_fp8(words, FP8, CLEAN),)
    else:
        values, factor = widen_tile(words, v_scale, V_FORMAT, V_ROUTE, COMPUTE, V_PARTS, V_DESCALE)
        if ACC_PARTS == 1:
            values = (join_parts(values, V_PARTS),)
    if PER_KEY:
        p, correction, v_unit = weigh_values(p, correction, factor, v_unit)
    if MASKED:
        p = tl.where(keep, p, 0.0)  # 0 * NaN
        p, values = confine_nonfinite(p, values, keep, ACC_PARTS)
    if FP8 is not None:
        acc = (accumulate_fp8(acc[0], correction, p * P_SCALE, values[0], FP8),)
    else:
        acc = accumulate(acc, correction, p, values, COMPUTE, ACC_PARTS)
    return s_next, acc, m, l, v_unit, next_page, next_slot, after_page, after_slot


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _fused_prefill_kernel(
    q, out, cache, table, workspace, qk_scale, out_scale, soft_cap,
    batch, num_tokens, max_q_len, table_row, num_ids, max_pages, num_splits,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head over the paged cache; programs run fastest over KV heads.

    Args:
        q, out: `Queries` without the sizes that follow, `Outputs`. cache: `Cache`. workspace: `Workspace`.
        table, table_row, num_ids, max_pages: `Table`, and what serving changes of it.
        qk_scale, out_scale: of the logits (in base 2 unless there is a soft cap) and of the output.
        SIZES, K, V, RULES, BLOCKS: `Sizes`, `Stored`, `Stored`, `Rules`, `Blocks`.
    """
    NUM_KV_HEADS: tl.constexpr = SIZES.num_kv_heads
    GQA_RATIO: tl.constexpr = SIZES.gqa_ratio
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    RAGGED: tl.constexpr = SIZES.ragged
    K_PARTS: tl.constexpr = K.parts
    K_DESCALE: tl.constexpr = K.descale
    V_DESCALE: tl.constexpr = V.descale
    COMPUTE: tl.constexpr = RULES.compute
    SPLIT_Q: tl.constexpr = RULES.split_q
    FP8: tl.constexpr = RULES.fp8
    ACC_PARTS: tl.constexpr = RULES.acc_parts
    WINDOW_LEFT: tl.constexpr = RULES.window_left
    WINDOW_RIGHT: tl.constexpr = RULES.window_right
    HAS_SINKS: tl.constexpr = RULES.sinks
    WRITE_LSE: tl.constexpr = RULES.lse
    SETTLE: tl.constexpr = RULES.settle
    NVIDIA: tl.constexpr = RULES.nvidia
    BLOCK_M: tl.constexpr = BLOCKS.m
    BLOCK_N: tl.constexpr = BLOCKS.n
    BLOCK_D: tl.constexpr = BLOCKS.d
    k = KVPointers(cache.k, cache.k_page, cache.k_token, cache.k_head, cache.k_outer)
    v = KVPointers(cache.v, cache.v_page, cache.v_token, cache.v_head, cache.v_outer)
    k_descale = Descale(cache.k_descale, cache.k_descale_major, cache.k_descale_token, cache.k_descale_head)
    v_descale = Descale(cache.v_descale, cache.v_descale_major, cache.v_descale_token, cache.v_descale_head)
    q = Queries(q.ptr, q.token, q.head, q.starts, num_tokens, max_q_len, q.descale)
    table = Table(
        table.page_ids, table.row if RAGGED else table_row, table.lens, num_ids, table.num_pages, max_pages,
        table.column, table.row_step, table.lens_step,
    )  # fmt: skip
    pid = tl.program_id(0)
    kv_head = pid % NUM_KV_HEADS
    seq, tile, q_start, q_len = tile_of(q, batch, pid // NUM_KV_HEADS, GQA_RATIO, BLOCK_M, NVIDIA)
    if seq < 0:
        return
    served = tl.minimum(q_len, q.max_len)
    tokens, heads, row_mask, within = rows_of(q_start, served, tile, kv_head, GQA_RATIO, BLOCK_M)
    kv_len = sequence_length(table, seq, seq >= 0, PAGE_SIZE, RAGGED)
    row_base = first_id(table, seq, RAGGED)
    query_pos = kv_len - q_len + within
    first_pos = kv_len - q_len + tile * BLOCK_M // GQA_RATIO
    last_pos = kv_len - q_len + tl.minimum(((tile + 1) * BLOCK_M - 1) // GQA_RATIO, served - 1)
    begin, end, full, full_end = key_range(
        first_pos, last_pos, kv_len * 0, kv_len, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N
    )
    first, last = begin * 0, tl.maximum(kv_len - 1, 0)
    if WINDOW_LEFT >= 0:
        # What lies before the window may have been given back.
        first = tl.minimum(tl.maximum(first_pos - WINDOW_LEFT, 0), last)
    if RULES.split:
        begin, end, full, full_end = share_of(begin, end, full, full_end, tl.program_id(2), num_splits)

    parts = load_query(q.ptr, tokens, heads, row_mask, q.token, q.head, HEAD_DIM, BLOCK_D, K_PARTS)
    logit_scale = tl.full([BLOCK_M], 1.0, tl.float32) * qk_scale
    if FP8 is not None:
        # Queries come from anywhere, so their bytes are never taken to be clean.
        high = (as_fp8(parts[0], FP8, False),)
        low = high
    else:
        if RULES.scale_q:
            parts, row_scale = scale_to_fp16(parts, K_PARTS)
            logit_scale *= row_scale
        high, low = split_query(parts, COMPUTE, SPLIT_Q, K_PARTS)
    o_scale = tl.full([BLOCK_M], 1.0, tl.float32) * out_scale
    if RULES.q_descale:
        logit_scale *= tl.load(q.descale)
    logit_scale = times_head_descale(logit_scale, k_descale, seq, kv_head, K_DESCALE)
    o_scale = times_head_descale(o_scale, v_descale, seq, kv_head, V_DESCALE)
    read = Read(row_base, kv_head, kv_len, first, last)
    acc, m, l, v_unit = paged_keys(
        high, low, zeros_in_parts(BLOCK_M, BLOCK_D, ACC_PARTS),
        tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
        logit_scale, soft_cap, k, v, k_descale, v_descale, table, read, query_pos,
        begin, end, full_end, SIZES, K, V, RULES, BLOCKS,
    )  # fmt: skip
    acc = join_parts(acc, ACC_PARTS)
    if V_DESCALE != "scalar" and V_DESCALE != "head":
        acc *= v_unit
    if RULES.split:
        last_one, acc, m, l = merge_splits(
            workspace, acc, m, l, pid, tl.program_id(2), num_splits, tl.num_programs(0), row_mask,
            SETTLE, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        if not last_one:
            return
    write_rows(
        out.ptr, out.lse, out.sinks, acc, m, l, o_scale, heads, tokens, row_mask, tl.arange(0, BLOCK_D),
        out.token, out.head, out.lse_token, HEAD_DIM, HAS_SINKS, WRITE_LSE,
    )  # fmt: skip

"""Prefill in one launch: keys are gathered from their pages and widened inside the attention loop.

The scores of the next key tile are issued before the softmax of the current one, and the pages of the tile
after that are looked up meanwhile, so that gathering, widening and the matrix unit overlap. Keys may also go
to the FP8 matrix unit as they are stored.
"""

import triton
import triton.language as tl

from narrowkv.attn_prefill.kernels.arguments import Read
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    query_terms,
    rows_of,
    shifted_maximum,
    sized_queries,
    soft_cap_of,
    tile_of,
)
from narrowkv.attn_prefill.kernels.shares import attend_to_share, find_share, merge_programs
from narrowkv.paged_cache.kernels.outputs import write_rows
from narrowkv.paged_cache.kernels.pages import (
    first_id,
    load_key_scale,
    locate_keys,
    sequence_length,
    sized_table,
    times_head_descale,
)
from narrowkv.paged_cache.kernels.queries import load_query
from narrowkv.paged_cache.kernels.tiles import (
    LEAST_FACTOR,
    attend_to_tile,
    computed_once,
    load_tile,
    tile_scores,
    zeros_in_parts,
)
from narrowkv.quant.device import join_parts
from narrowkv.runtime.attention.masks import key_range, key_range_of_split, visible_keys
from narrowkv.runtime.attention.softmax import capped_logits, multiply_values
from narrowkv.runtime.attention.xcds import program_on_its_xcd


@triton.jit
def attend_to_pages(
    q, q_low, logit_scale, soft_cap, k, v, k_descale, v_descale, table, read, query_pos,
    begin, end, full_end,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) of a sequence's pages; those from `full_end` on have a mask.

    There are two loops, because a branch in one keeps the compiler from loading ahead (H200, 128 new tokens
    over 4k: 139 and 252 us).

    Args:
        q, q_low: Q as one or two terms, in parts.
        logit_scale: of the scores, [BLOCK_M].
        read: `Read`, which bounds what is read where a table or a length is wrong.
        SIZES, K, V, RULES, BLOCKS: `Sizes`, `Stored`, `Stored`, `Rules`, `Blocks`.

    Returns:
        Sums of values [BLOCK_M, BLOCK_D], running maximum and running sum.
    """
    acc = zeros_in_parts(BLOCKS.m, BLOCKS.d, RULES.acc_parts)
    m = tl.full([BLOCKS.m], float("-inf"), tl.float32)
    l = tl.zeros([BLOCKS.m], tl.float32)
    v_largest = read.num_keys.to(tl.float32) * 0.0 + LEAST_FACTOR
    n = begin * BLOCKS.n + tl.arange(0, BLOCKS.n)
    page, slot = locate_keys(
        table, read.row_base, n, read.first_key, read.last_key, SIZES.page_size, RULES.int64_offsets
    )
    s = scores_at(q, q_low, k, k_descale, page, slot, read.kv_head, logit_scale, SIZES, K, RULES, BLOCKS)
    next_page, next_slot = locate_keys(
        table, read.row_base, n + BLOCKS.n, read.first_key, read.last_key, SIZES.page_size,
        RULES.int64_offsets,
    )  # fmt: skip
    if RULES.window_left < 0:
        for tile in range(begin, full_end):
            s, acc, m, l, v_largest, page, slot, next_page, next_slot = attend_with_next_scores(
                tile, s, page, slot, next_page, next_slot,
                q, q_low, acc, m, l, v_largest, logit_scale, soft_cap, k, v, k_descale, v_descale, table,
                read, query_pos, SIZES, K, V, RULES, BLOCKS, False,
            )  # fmt: skip
        begin = full_end
    # Tiles follow one another, so a window on the left masks them all.
    for tile in range(begin, end):
        s, acc, m, l, v_largest, page, slot, next_page, next_slot = attend_with_next_scores(
            tile, s, page, slot, next_page, next_slot,
            q, q_low, acc, m, l, v_largest, logit_scale, soft_cap, k, v, k_descale, v_descale, table,
            read, query_pos, SIZES, K, V, RULES, BLOCKS, True,
        )  # fmt: skip
    joined = join_parts(acc, RULES.acc_parts)
    if V.factors:
        joined, m, l = multiply_values(joined, m, l, v_largest)
    return joined, m, l


@triton.jit
def scores_at(
    q, q_low, k, k_descale, page, slot, kv_head, logit_scale,
    SIZES: tl.constexpr, K: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N] of the keys at these places, scaled unless `RULES.folded`."""
    PER_KEY: tl.constexpr = K.descale != "scalar" and K.descale != "head"
    words = load_tile(k, page, slot, kv_head, False, K.vec, K.parts, SIZES.head_dim, BLOCKS.dk)
    key_scale = 1.0
    if PER_KEY:
        key_scale = load_key_scale(
            k_descale, page, slot, kv_head, K.descale, False, SIZES.head_dim, BLOCKS.dk
        )
    s, factor = tile_scores(q, q_low, words, key_scale, K, RULES)
    if not RULES.folded:
        s *= logit_scale[:, None]
        if K.factors:
            s *= (computed_once(factor) if RULES.once else factor)[None, :]
    return s


@triton.jit
def attend_with_next_scores(
    tile, s, page, slot, next_page, next_slot,
    q, q_low, acc, m, l, v_largest, logit_scale, soft_cap, k, v, k_descale, v_descale, table,
    read, query_pos,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax and values of `tile`, whose scores are `s`; before them the scores of the tile that follows."""
    kv_head = read.kv_head
    words = load_tile(v, page, slot, kv_head, True, V.vec, V.parts, SIZES.v_head_dim, BLOCKS.d)
    v_scale = 1.0
    if V.descale != "scalar" and V.descale != "head":
        v_scale = load_key_scale(v_descale, page, slot, kv_head, V.descale, False, SIZES.v_head_dim, BLOCKS.d)
    # Past the last tile these are the last key's own place again.
    s_next = scores_at(
        q, q_low, k, k_descale, next_page, next_slot, kv_head, logit_scale, SIZES, K, RULES, BLOCKS
    )
    n = tl.arange(0, BLOCKS.n)
    after_page, after_slot = locate_keys(
        table, read.row_base, (tile + 2) * BLOCKS.n + n, read.first_key, read.last_key, SIZES.page_size,
        RULES.int64_offsets,
    )  # fmt: skip
    if RULES.soft_cap:
        s = capped_logits(s, soft_cap)
    keep = None
    if MASKED:
        keep = visible_keys(
            tile * BLOCKS.n + n, query_pos, 0, read.num_keys, False, RULES.window_left, RULES.window_right
        )
        s = tl.where(keep, s, float("-inf"))
    acc, m, l, v_largest = attend_to_tile(
        s, keep, None, words, v_scale, logit_scale if RULES.folded else None, acc, m, l, v_largest,
        V, RULES, RULES.acc_parts,
    )  # fmt: skip
    return s_next, acc, m, l, v_largest, next_page, next_slot, after_page, after_slot


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _fused_prefill_kernel(
    workspace, q, out, cache, table, qk_scale, out_scale, soft_cap,
    batch, num_tokens, max_q_len, least_len, most_len, table_row, num_ids, max_pages, num_splits,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head over the paged cache; programs run fastest over KV heads.

    With `q` and `out` in front, a scalar of INT8 caches with a scale a token leaves its register on gfx950
    (Triton 3.9.0): AMD keeps the first arguments in registers from the start.

    Args:
        cache: `Cache`. q, out: `Queries` without the sizes that follow, `Outputs`. workspace: `Workspace`.
        table, table_row, num_ids, max_pages: `Table`, and the sizes that serving changes.
        qk_scale, out_scale: of the logits (in base 2 unless there is a soft cap) and of the output.
        num_splits: programs that share a tile's keys; with `RULES.shares` see `find_share`.
        SIZES, K, V, RULES, BLOCKS: `Sizes`, `Stored`, `Stored`, `Rules`, `Blocks`.
    """
    NUM_HEADS: tl.constexpr = SIZES.num_kv_heads * SIZES.gqa_ratio
    k, v, k_descale, v_descale = cache
    q = sized_queries(q, num_tokens, max_q_len, least_len, most_len)
    table = sized_table(table, table_row, num_ids, max_pages, SIZES.ragged)
    pid = program_on_its_xcd(tl.program_id(0), tl.num_programs(0), RULES.order)
    kv_head = pid % SIZES.num_kv_heads
    share = None
    if RULES.shares:
        share = find_share(
            q, table, batch, pid // SIZES.num_kv_heads, num_splits, False, SIZES.gqa_ratio, RULES.window_left,
            SIZES.page_size, SIZES.ragged, BLOCKS.m, BLOCKS.n, not RULES.as_decode, RULES.nvidia,
        )  # fmt: skip
        seq, tile, q_start, q_len = share.seq, share.number, share.q_start, share.q_len
        split = share.split
        num_splits = share.num_splits
    else:
        seq, tile, q_start, q_len = tile_of(
            q, batch, pid // SIZES.num_kv_heads, SIZES.gqa_ratio, BLOCKS.m, RULES.nvidia
        )
        split = tl.program_id(2)
    if seq < 0:
        return
    served = tl.minimum(q_len, q.max_len)
    tokens, heads, row_mask, within = rows_of(q_start, served, tile, kv_head, SIZES.gqa_ratio, BLOCKS.m)
    kv_len = sequence_length(table, seq, seq >= 0, SIZES.page_size, SIZES.ragged)
    row_base = first_id(table, seq, SIZES.ragged)
    query_pos = kv_len - q_len + within
    first_pos = kv_len - q_len + tile * BLOCKS.m // SIZES.gqa_ratio
    last_pos = kv_len - q_len + tl.minimum(((tile + 1) * BLOCKS.m - 1) // SIZES.gqa_ratio, served - 1)
    begin, end, full, full_end = key_range(
        first_pos, last_pos, kv_len * 0, kv_len, RULES.window_left, RULES.window_right, BLOCKS.n
    )
    first, last = begin * 0, tl.maximum(kv_len - 1, 0)
    if RULES.window_left >= 0:
        # What lies before the window may have been given back.
        first = tl.minimum(tl.maximum(first_pos - RULES.window_left, 0), last)
    if RULES.split:
        begin, end, full, full_end = key_range_of_split(begin, end, full, full_end, split, num_splits)

    parts = load_query(q.ptr, tokens, heads, row_mask, q.token, q.head, SIZES.head_dim, BLOCKS.dk, K.parts)
    logit_scale = qk_scale
    high, low, logit_scale = query_terms(parts, logit_scale, RULES, K.parts)
    o_scale = tl.full([BLOCKS.m], 1.0, tl.float32) * out_scale
    if RULES.q_descale:
        logit_scale *= tl.load(q.descale)
    logit_scale = times_head_descale(logit_scale, k_descale, seq, kv_head, K.descale)
    o_scale = times_head_descale(o_scale, v_descale, seq, kv_head, V.descale)
    read = Read(row_base, kv_head, kv_len, first, last)
    soft_cap = soft_cap_of(q, soft_cap, tokens, heads, row_mask, NUM_HEADS, RULES.soft_cap)
    if RULES.as_decode:
        acc, m, l = attend_to_share(
            high, low, logit_scale, soft_cap, k, v, k_descale, v_descale, table, read, query_pos,
            begin, end, full, full_end, num_splits, SIZES, K, V, RULES, BLOCKS,
        )  # fmt: skip
    else:
        acc, m, l = attend_to_pages(
            high, low, tl.full([BLOCKS.m], 1.0, tl.float32) * logit_scale, soft_cap, k, v, k_descale,
            v_descale, table, read, query_pos, begin, end, full_end, SIZES, K, V, RULES, BLOCKS,
        )  # fmt: skip
    m = shifted_maximum(m, q.shift, tokens, heads, row_mask, NUM_HEADS, RULES.soft_cap)
    last_one, acc, m, l = merge_programs(
        workspace, share, acc, m, l, kv_head, pid, split, num_splits, tl.num_programs(0), row_mask,
        SIZES, RULES, BLOCKS,
    )  # fmt: skip
    if not last_one:
        return
    write_rows(
        out.ptr, out.scale, out.lse, out.sinks, acc, m, l, o_scale, heads, tokens, row_mask,
        tl.arange(0, BLOCKS.d), out.token, out.head, out.lse_token, SIZES.v_head_dim, RULES.sinks, RULES.lse,
    )  # fmt: skip

"""Prefill that appends, in one launch: a chunk attends to the cache and to itself and is quantised into it.

The first programs take a block of new tokens of one head each, quantise it and store it in the cache. The
others attend: they read old keys from their pages, which no program of the launch writes, and new keys from
the chunk.
"""

import triton
import triton.language as tl

from narrowkv.attn_prefill.kernels.append_store import store_new
from narrowkv.attn_prefill.kernels.arguments import Destination, Read
from narrowkv.attn_prefill.kernels.fused import attend_to_pages
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    find_block,
    query_terms,
    rows_of,
    shifted_maximum,
    sized_queries,
    soft_cap_of,
    tile_of,
)
from narrowkv.attn_prefill.kernels.shares import attend_to_share, find_share, merge_programs
from narrowkv.paged_cache.kernels.append import load_rotated
from narrowkv.paged_cache.kernels.outputs import write_rows
from narrowkv.paged_cache.kernels.pages import (
    first_id,
    sequence_length,
    sized_table,
    times_head_descale,
)
from narrowkv.paged_cache.kernels.queries import (
    load_query,
    split_rows_fp8,
)
from narrowkv.paged_cache.kernels.tiles import accumulate, confine_nonfinite
from narrowkv.runtime.attention.masks import key_range, key_range_of_split, visible_keys
from narrowkv.runtime.attention.softmax import (
    SoftCap,
    capped_logits,
    headroom,
    multiply_values,
    softmax_step,
)


@triton.jit
def attend_to_chunk(
    q, acc, m, l, scale, soft_cap, chunk, rope, kv_head, q_start, q_len, within, begin, end,
    SIZES: tl.constexpr, STORING: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to key tiles [begin, end) of the chunk itself, unquantised."""
    d, dk = tl.arange(0, BLOCKS.d), tl.arange(0, BLOCKS.dk)
    KIND: tl.constexpr = chunk.k.dtype.element_ty
    # That of the old keys, whose sums these are added to, where it is larger.
    HEADROOM: tl.constexpr = headroom(RULES.compute if RULES.compute.is_bf16() else KIND)
    for tile in range(begin, end):
        n = tile * BLOCKS.t + tl.arange(0, BLOCKS.t)
        inside = n < q_len
        tokens = (q_start + n).to(tl.int64)
        at = tokens * chunk.k_token + kv_head * chunk.k_head
        k = load_rotated(
            chunk.k, at, rope, tokens, inside, dk, SIZES.head_dim, STORING.rotary_dim, STORING.interleaved
        ).to(KIND)
        at = tokens * chunk.v_token + kv_head * chunk.v_head
        v = tl.load(
            chunk.v + at[:, None] + d[None, :],
            mask=inside[:, None] & (d < SIZES.v_head_dim)[None, :],
            other=0.0,
        )
        s = tl.dot(q, tl.trans(k)) * scale
        if RULES.soft_cap:
            s = capped_logits(s, SoftCap(soft_cap, None))
        keep = visible_keys(n, within, 0, q_len, False, RULES.window_left, 0)
        s = tl.where(keep, s, float("-inf"))
        p, m, l, correction = softmax_step(s, m, l, None, HEADROOM)
        p, clean = confine_nonfinite(p, (v,), keep, 1)
        if headroom(KIND) < HEADROOM:
            # Of such numerators float16 holds nothing: they are multiplied at 2**HEADROOM times their size.
            values = tl.dot((p * 2.0**HEADROOM).to(KIND), clean[0])
            acc = acc * correction[:, None] + values * 2.0**-HEADROOM
        else:
            acc = accumulate((acc,), correction, p, clean, KIND, 1)[0]
    return acc, m, l


@triton.jit
def load_own_queries(
    q, chunk, rope, tokens, heads, row_mask, columns,
    SIZES: tl.constexpr, STORING: tl.constexpr, CACHE: tl.constexpr = "",
):  # fmt: skip
    """These columns of rotated queries as the chunk's own keys see them, [BLOCK_M, columns].

    For a cache with a `key_transform`, `q.ptr` are the queries for stored keys.
    """
    if chunk.q is not None:
        own = chunk.q
        at = tokens * chunk.q_token + heads * chunk.q_head
    else:
        own = q.ptr
        at = tokens * q.token + heads * q.head
    return load_rotated(
        own, at, rope, tokens, row_mask, columns, SIZES.head_dim, STORING.rotary_dim, STORING.interleaved,
        CACHE,
    ).to(chunk.k.dtype.element_ty)  # fmt: skip


@triton.jit
def terms_for_old_keys(
    q, own_q, chunk, rope, tokens, heads, row_mask, scale,
    SIZES: tl.constexpr, K: tl.constexpr, STORING: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Q as the terms that are multiplied with keys of the cache, and the scale of their scores."""
    TRANSFORMED: tl.constexpr = chunk.q is not None
    if TRANSFORMED:
        parts = load_query(
            q.ptr, tokens, heads, row_mask, q.token, q.head, SIZES.head_dim, BLOCKS.dk, K.parts
        )
    if RULES.fp8 is not None:
        high, low, row_scale = split_rows_fp8(parts[0] if TRANSFORMED else own_q, RULES.fp8, RULES.p_scale)
        return (high,), (low,), scale * row_scale
    else:
        if not TRANSFORMED:
            parts = ()
            for i in tl.static_range(K.parts):
                c = tl.arange(0, BLOCKS.dk // K.parts) * K.parts + i
                part = load_own_queries(q, chunk, rope, tokens, heads, row_mask, c, SIZES, STORING)
                parts = parts + (part,)
        return query_terms(parts, scale, RULES, K.parts)


@triton.jit
def tiles_of_keys(
    old_len, first_row, last_row, split, num_splits,
    SIZES: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The key tiles that a program attends to.

    Returns:
        Old keys as `key_range` gives them; the first and the last old key that are read; the chunk's own key
        tiles, from the first to before the last.
    """
    begin, end, full, full_end = key_range(
        old_len + first_row, old_len + last_row, old_len * 0, old_len, RULES.window_left, -1, BLOCKS.n
    )
    first, last = begin * 0, tl.maximum(old_len - 1, 0)
    if RULES.window_left >= 0:
        first = tl.minimum(tl.maximum(old_len + first_row - RULES.window_left, 0), last)
    own_begin = first_row * 0
    if RULES.window_left >= 0:
        own_begin = tl.maximum(first_row - RULES.window_left, 0) // BLOCKS.t
    own_end = last_row // BLOCKS.t + 1
    if RULES.split:
        begin, end, full, full_end = key_range_of_split(begin, end, full, full_end, split, num_splits)
        # One of them takes the chunk's own keys.
        own_end = tl.where(split == num_splits - 1, own_end, own_begin)
    return begin, end, full, full_end, first, last, own_begin, own_end


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _prefill_append_kernel(
    q, out, chunk, rope, to, cache, table, workspace, scales,
    batch, num_tokens, max_q_len, least_len, most_len, table_row, num_ids, max_pages, num_blocks, num_tiles,
    num_splits,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr, RULES: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Programs of a launch of `prefill_append`; the table's lengths are those before it.

    Args:
        q, out, chunk, rope: `Queries`, `Outputs`, `Chunk`, `RopePointers`. to: `Destination`.
        cache, table: `Cache`, `Table`, without the sizes that follow. workspace, scales: `Workspace`,
            `AppendScales`.
        num_blocks, num_tiles: blocks of new tokens and tiles of rows of a head, at most.
        num_splits: programs that share a tile's keys; with `RULES.shares` see `find_share`.
        SIZES, K, V, STORING, RULES, BLOCKS: `Sizes`, `Stored`, `Stored`, `Storing`, `Rules`, `Blocks`.
    """
    NUM_HEADS: tl.constexpr = SIZES.num_kv_heads * SIZES.gqa_ratio
    k, v, k_descale, v_descale = cache
    # New tokens of all sequences are stored here, whichever launch attends.
    stored = sized_queries(q, num_tokens, max_q_len, 0, None)
    q = sized_queries(q, num_tokens, max_q_len, least_len, most_len)
    table = sized_table(table, table_row, num_ids, max_pages, False)
    store = Destination(*to[0:4], max_pages, table.num_pages)
    pid = tl.program_id(0)
    if pid < num_blocks * SIZES.num_kv_heads:
        kv_head = pid % SIZES.num_kv_heads
        seq, block, _, q_start, q_len, _ = find_block(
            stored, table, None, batch, pid // SIZES.num_kv_heads, 0, False, True, SIZES.page_size, False,
            BLOCKS.s, RULES.nvidia,
        )  # fmt: skip
        if seq < 0:
            return
        store_new(
            chunk, rope, store, table, seq, block * BLOCKS.s, kv_head, q_start, q_len, SIZES, K, V, STORING,
            BLOCKS, BLOCKS.s,
        )  # fmt: skip
        return

    pid -= num_blocks * SIZES.num_kv_heads
    kv_head = pid % SIZES.num_kv_heads
    share = None
    if RULES.shares:
        share = find_share(
            q, table, batch, pid // SIZES.num_kv_heads, num_splits, True, SIZES.gqa_ratio, RULES.window_left,
            SIZES.page_size, False, BLOCKS.m, BLOCKS.n, not RULES.as_decode, RULES.nvidia,
        )  # fmt: skip
        seq, tile, q_start, q_len = share.seq, share.number, share.q_start, share.q_len
        index, split, num_splits = 0, share.split, share.num_splits
    else:
        index = pid // SIZES.num_kv_heads // num_splits
        split = pid // SIZES.num_kv_heads % num_splits
        seq, tile, q_start, q_len = tile_of(q, batch, index, SIZES.gqa_ratio, BLOCKS.m, RULES.nvidia)
    if seq < 0:
        return
    q_len = tl.minimum(q_len, q.max_len)
    tokens, heads, row_mask, within = rows_of(q_start, q_len, tile, kv_head, SIZES.gqa_ratio, BLOCKS.m)
    old_len = sequence_length(table, seq, seq >= 0, SIZES.page_size, False)
    first_row = tile * BLOCKS.m // SIZES.gqa_ratio
    last_row = tl.minimum(((tile + 1) * BLOCKS.m - 1) // SIZES.gqa_ratio, q_len - 1)
    d, dk = tl.arange(0, BLOCKS.d), tl.arange(0, BLOCKS.dk)
    own_q = load_own_queries(q, chunk, rope, tokens, heads, row_mask, dk, SIZES, STORING)
    o_scale = tl.full([BLOCKS.m], 1.0, tl.float32) * scales.v
    o_scale = times_head_descale(o_scale, v_descale, seq, kv_head, V.descale)
    row_base = first_id(table, seq, False)
    begin, end, full, full_end, first, last, own_begin, own_end = tiles_of_keys(
        old_len, first_row, last_row, split, num_splits, SIZES, RULES, BLOCKS
    )
    old_scale = scales.logit * scales.k
    old_scale = times_head_descale(old_scale, k_descale, seq, kv_head, K.descale)
    high, low, old_scale = terms_for_old_keys(
        q, own_q, chunk, rope, tokens, heads, row_mask, old_scale, SIZES, K, STORING, RULES, BLOCKS
    )
    read = Read(row_base, kv_head, old_len, first, last)
    soft_cap = soft_cap_of(q, scales.soft_cap, tokens, heads, row_mask, NUM_HEADS, RULES.soft_cap)
    if RULES.as_decode:
        acc, m, l = attend_to_share(
            high, low, old_scale, soft_cap, k, v, k_descale, v_descale, table, read, old_len + within,
            begin, end, full, full_end, num_splits, SIZES, K, V, RULES, BLOCKS,
        )  # fmt: skip
    else:
        acc, m, l = attend_to_pages(
            high, low, tl.full([BLOCKS.m], 1.0, tl.float32) * old_scale, soft_cap, k, v, k_descale,
            v_descale, table, read, old_len + within, begin, end, full_end, SIZES, K, V, RULES, BLOCKS,
        )  # fmt: skip
    m = shifted_maximum(m, q.shift, tokens, heads, row_mask, NUM_HEADS, RULES.soft_cap)
    acc, m, l = multiply_values(acc, m, l, o_scale)
    if BLOCKS.dk > 256:
        # Beside the old keys' loop it would spill, so it is loaded once more.
        own_q = load_own_queries(q, chunk, rope, tokens, heads, row_mask, dk, SIZES, STORING, ".ca")
    acc, m, l = attend_to_chunk(
        own_q, acc, m, l, scales.logit, scales.soft_cap, chunk, rope, kv_head,
        q_start, q_len, within, own_begin, own_end, SIZES, STORING, RULES, BLOCKS,
    )  # fmt: skip
    write, acc, m, l = merge_programs(
        workspace, share, acc, m, l, kv_head, index * SIZES.num_kv_heads + kv_head, split, num_splits,
        num_tiles * SIZES.num_kv_heads, row_mask, SIZES, RULES, BLOCKS,
    )  # fmt: skip
    if write:
        write_rows(
            out.ptr, out.scale, out.lse, out.sinks, acc, m, l, tl.full([BLOCKS.m], 1.0, tl.float32), heads,
            tokens, row_mask, d, out.token, out.head, out.lse_token, SIZES.v_head_dim, RULES.sinks, RULES.lse,
        )  # fmt: skip

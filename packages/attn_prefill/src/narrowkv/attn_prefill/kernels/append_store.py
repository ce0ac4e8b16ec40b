"""The launch before an append's dense attention: it stores new tokens in the cache, all keys in the scratch.

Old keys are widened from their pages; new ones are left in the scratch unquantised.
"""

import triton
import triton.language as tl

from narrowkv.attn_prefill.kernels.arguments import (
    Destination,
    Scratch,
)
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    find_block,
    find_held_block,
    held_blocks,
    schedule_tiles,
    sized_queries,
)
from narrowkv.attn_prefill.kernels.widen import (
    finite_rows,
    keys_without_value,
    store_block,
    store_value_power,
    to_fp16_with_exponent,
    widen_block,
)
from narrowkv.paged_cache.kernels.append import load_rotated, quantise_rows, transform_keys
from narrowkv.paged_cache.kernels.pages import (
    first_id,
    sequence_length,
    sized_table,
    strided,
    times_head_descale,
)
from narrowkv.runtime.attention.handover import begin_next_launch


@triton.jit
def store_new(
    chunk, rope, store, table, seq, first, kv_head, q_start, q_len,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Quantises BLOCK_T new tokens of a sequence and head, from number `first` on, into the cache."""
    x, y, i, inside = load_new(chunk, rope, first, kv_head, q_start, q_len, SIZES, STORING, BLOCKS, BLOCK_T)
    position = sequence_length(table, seq, seq >= 0, SIZES.page_size, False) + i
    number = position // SIZES.page_size
    # Beyond the table, or in a page beyond the cache, nothing is written.
    fits = inside & (number < store.max_pages)
    where = first_id(table, seq, False) + strided(number, table.column)
    page = tl.load(table.page_ids + where, mask=fits, other=-1).to(tl.int64)
    fits = fits & (page >= 0) & (page < store.num_pages)
    slot = (position % SIZES.page_size).to(tl.int64)
    quantise_rows(
        x, store.k, store.k_descale, page, slot, kv_head, fits, K.format, STORING.k_scaling, SIZES.head_dim,
        STORING.k_max, STORING.k_group, STORING.rule, K.vec, False, BLOCK_T, BLOCKS.dk,
    )  # fmt: skip
    quantise_rows(
        y.to(tl.float32), store.v, store.v_descale, page, slot, kv_head, fits, V.format, STORING.v_scaling,
        SIZES.v_head_dim, STORING.v_max, STORING.v_group, STORING.rule, V.vec, True, BLOCK_T, BLOCKS.d,
    )  # fmt: skip


@triton.jit
def load_new(
    chunk, rope, first, kv_head, q_start, q_len,
    SIZES: tl.constexpr, STORING: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """New tokens of a sequence from number `first` on: K in fp32 as the cache stores it, V, numbers, mask."""
    d, dk = tl.arange(0, BLOCKS.d), tl.arange(0, BLOCKS.dk)
    i = first + tl.arange(0, BLOCK_T)
    inside = i < q_len
    tokens = (q_start + i).to(tl.int64)
    at = tokens * chunk.k_token + kv_head * chunk.k_head
    x = load_rotated(
        chunk.k, at, rope, tokens, inside, dk, SIZES.head_dim, STORING.rotary_dim, STORING.interleaved
    )
    x = transform_keys(x, chunk.k_offset, chunk.k_balance, kv_head, SIZES.head_dim, STORING.butterflies)
    at = tokens * chunk.v_token + kv_head * chunk.v_head
    y = tl.load(
        chunk.v + at[:, None] + d[None, :], mask=inside[:, None] & (d < SIZES.v_head_dim)[None, :], other=0.0
    )
    return x, y, i, inside


@triton.jit
def keep_new_block(
    chunk, rope, v_scale, scratch, first, block, kv_head, q_start, q_len,
    SIZES: tl.constexpr, STORING: tl.constexpr, K_HAS_FACTOR: tl.constexpr, V_PER_KEY: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Leaves a block of new tokens in the scratch, unquantised; V divided by `v_scale`, as old values are.

    Values beyond 2**151 times `v_scale` saturate there.
    """
    KIND: tl.constexpr = chunk.k.dtype.element_ty
    x, y, _i, inside = load_new(chunk, rope, first, kv_head, q_start, q_len, SIZES, STORING, BLOCKS, BLOCK_S)
    blocks = kv_head.to(tl.int64) * (scratch.rows // BLOCK_S) + block
    factors = kv_head.to(tl.int64) * scratch.rows + block * BLOCK_S + tl.arange(0, BLOCK_S)
    # V first: K stays in 16 bits meanwhile.
    finite, top = finite_rows(y, inside)
    # The product may be beyond float32 by what a bf16 value is multiplied by in the scratch.
    inverse = 1.0 / tl.maximum(v_scale, 1.2e-38) * (2.0**-24)
    y = tl.minimum(tl.maximum(y.to(tl.float32) * inverse, -3.4e38), 3.4e38)
    y, power = to_fp16_with_exponent(y, tl.minimum(top * inverse, 3.4e38), 24)
    store_block(scratch.v, y, kv_head, block, scratch.rows, finite, 0.0, SIZES.v_head_dim, BLOCKS.d, BLOCK_S)
    # Keys that were rotated or transformed are rounded to their own type, as queries are.
    store_block(
        scratch.k, x.to(KIND), kv_head, block, scratch.rows, finite, keys_without_value(inside, KIND),
        SIZES.head_dim, BLOCKS.dk, BLOCK_S,
    )  # fmt: skip
    tl.store(scratch.k_block_factor + blocks, 1.0)
    if K_HAS_FACTOR:
        tl.store(scratch.k_factor + factors, tl.full([BLOCK_S], 1.0, tl.float32))
    if V_PER_KEY:
        # Powers above 1 stand beside the factors of old keys, because P is kept in float16 in units of the
        # largest of these. Smaller powers would leave nothing of P.
        tl.store(scratch.v_factor + factors, tl.full([BLOCK_S], 1.0, tl.float32) * tl.maximum(power, 1.0))
        power = tl.minimum(power, 1.0)
    store_value_power(scratch, power, power != 1.0, blocks)


@triton.jit
def fill_block(
    q, chunk, rope, k, v, k_descale, v_descale, table, scratch, scales, found, block, kv_head,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr,
    K_IN_PAGES: tl.constexpr, FILLING: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Leaves block `block` of all sequences' keys, old or new, of one head in the scratch.

    found: where the block lies, the first five results of `find_block`.
    """
    BLOCK_S: tl.constexpr = BLOCKS.s
    K_TYPE: tl.constexpr = None if K_IN_PAGES else chunk.k.dtype.element_ty
    K_HAS_FACTOR: tl.constexpr = FILLING.k_per_key or K_IN_PAGES
    seq, in_seq, held, q_start, q_len = found
    k_scale = times_head_descale(scales.k, k_descale, seq, kv_head, K.descale)
    v_scale = times_head_descale(scales.v, v_descale, seq, kv_head, V.descale)
    old_blocks = tl.cdiv(held, BLOCK_S)
    if in_seq >= old_blocks:
        keep_new_block(
            chunk, rope, v_scale, scratch, (in_seq - old_blocks) * BLOCK_S, block, kv_head, q_start, q_len,
            SIZES, STORING, K_HAS_FACTOR, FILLING.v_per_key, BLOCKS, BLOCK_S,
        )  # fmt: skip
    else:
        # Old keys end where a block ends, so that new ones begin with one; or begin where one begins, as
        # those in pages do.
        first = in_seq * BLOCK_S
        if not K_IN_PAGES:
            first = (in_seq - old_blocks) * BLOCK_S + held
        widen_block(
            k, v, k_descale, v_descale, table, scratch, seq, block, first, kv_head, held, k_scale,
            SIZES, K, V, K_TYPE, True, FILLING, BLOCKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _produce_kernel(
    q, chunk, rope, to, cache, table, scratch, scales,
    batch, num_tokens, max_q_len, least_len, block_m, table_row, num_ids, max_pages, max_keys, key_blocks,
    num_groups, num_blocks, num_tiles,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr, FILLING: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Fills the scratch, stores the new tokens, and orders the tiles of the launch that attends.

    The programs that fill the scratch come first, because they take longest; those that order tiles last.

    Args:
        q, chunk, rope: `Queries`, `Chunk`, `RopePointers`. to: `Destination`. cache: `Cache`.
        table, scratch: `Table`, `Scratch`: without the sizes that follow. scales: `AppendScales`.
        num_blocks: programs of a head that fill the scratch, one for each block that there can be; where the
            launch loops, each takes every `num_blocks`th block.
        num_groups, num_tiles: programs of a head that quantise, and tiles, at most.
        SIZES, K, V, STORING, FILLING, BLOCKS: `Sizes`, `Stored`, `Stored`, `Storing`, `Filling`, `Blocks`.
    """
    K_IN_PAGES: tl.constexpr = FILLING.k_type is None
    if FILLING.early:
        begin_next_launch()
    k, v, k_descale, v_descale = cache
    # New tokens of all sequences are stored here, whichever launch attends.
    stored = sized_queries(q, num_tokens, max_q_len, 0, None)
    q = sized_queries(q, num_tokens, max_q_len, least_len, None)
    table = sized_table(table, table_row, num_ids, max_pages, False)
    scratch = Scratch(*scratch[0:9], max_keys, key_blocks)
    store = Destination(*to[0:4], max_pages, table.num_pages)
    pid = tl.program_id(0)
    first_group = num_blocks * SIZES.num_kv_heads
    first_order = first_group + num_groups * SIZES.num_kv_heads
    if (pid >= first_group) & (pid < first_order):
        kv_head = (pid - first_group) % SIZES.num_kv_heads
        group = (pid - first_group) // SIZES.num_kv_heads
        seq, in_seq, _, q_start, q_len, _ = find_block(
            stored, table, scratch, batch, group, 0, False, True, SIZES.page_size, False, BLOCKS.t,
            FILLING.nvidia,
        )  # fmt: skip
        if seq < 0:
            return
        store_new(
            chunk, rope, store, table, seq, in_seq * BLOCKS.t, kv_head, q_start, q_len, SIZES, K, V, STORING,
            BLOCKS, BLOCKS.t,
        )  # fmt: skip
        return
    if pid >= first_order:
        schedule_tiles(
            q, table, scratch, batch, num_tiles, pid - first_order, block_m,
            SIZES.page_size, False, True, SIZES.gqa_ratio, True, BLOCKS.s, BLOCKS.i,
        )  # fmt: skip
        return
    kv_head = pid % SIZES.num_kv_heads
    first = pid // SIZES.num_kv_heads
    if FILLING.loops:
        limit, total = held_blocks(q, table, scratch, batch, True, SIZES.page_size, False, BLOCKS.s)
        for block in range(first, total, num_blocks):
            found = find_block(
                q, table, scratch, batch, block, limit, True, True, SIZES.page_size, False, BLOCKS.s,
                FILLING.nvidia,
            )  # fmt: skip
            fill_block(
                q, chunk, rope, k, v, k_descale, v_descale, table, scratch, scales, found[0:5], block,
                kv_head, SIZES, K, V, STORING, K_IN_PAGES, FILLING, BLOCKS,
            )  # fmt: skip
    else:
        found = find_held_block(
            q, table, scratch, batch, first, True, SIZES.page_size, False, BLOCKS.s, FILLING.nvidia
        )
        if found[0] >= 0:
            fill_block(
                q, chunk, rope, k, v, k_descale, v_descale, table, scratch, scales, found, first, kv_head,
                SIZES, K, V, STORING, K_IN_PAGES, FILLING, BLOCKS,
            )  # fmt: skip

"""What a prefill that appends does before it attends: quantise new tokens, leave keys in scratch."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.attn_prefill.kernels.arguments import Scratch
from narrowkv.attn_prefill.kernels.dense import (
    finite_rows,
    keys_without_value,
    store_block,
    store_v_unit,
    to_fp16_in_units,
    widen_block,
)
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    Queries,
    begin_next_launch,
    find_block,
    longest_held,
    schedule_tiles,
)
from narrowkv.paged_cache.kernels.append import DescalePointers, load_rotated, quantise_rows
from narrowkv.paged_cache.kernels.pages import (
    Descale,
    KVPointers,
    Table,
    first_id,
    sequence_length,
    strided,
    times_head_descale,
)


class NewCache(NamedTuple):
    """Where new tokens are stored: bytes of K and V, their descales, pages a sequence, pages in all."""

    k: Any
    v: Any
    k_descale: Any
    v_descale: Any
    max_pages: Any
    num_pages: Any


@triton.jit
def store_new(
    chunk, rope, store, table, seq, first, kv_head, q_start, q_len,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantises BLOCK_T new tokens of a sequence and head, from `first` on, into the cache; returns them."""
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    RULE: tl.constexpr = STORING.rule
    K_FORMAT: tl.constexpr = K.format
    K_VEC: tl.constexpr = K.vec
    K_MAX: tl.constexpr = STORING.k_max
    K_SCALING: tl.constexpr = STORING.k_scaling
    K_GROUP: tl.constexpr = STORING.k_group
    V_FORMAT: tl.constexpr = V.format
    V_VEC: tl.constexpr = V.vec
    V_MAX: tl.constexpr = STORING.v_max
    V_SCALING: tl.constexpr = STORING.v_scaling
    V_GROUP: tl.constexpr = STORING.v_group
    x, y, i, inside = load_new(chunk, rope, first, kv_head, q_start, q_len, SIZES, STORING, BLOCK_T, BLOCK_D)
    position = sequence_length(table, seq, seq >= 0, PAGE_SIZE, False) + i
    number = position // PAGE_SIZE
    # Beyond the table, or in a page beyond the cache, nothing is written.
    fits = inside & (number < store.max_pages)
    where = first_id(table, seq, False) + strided(number, table.column)
    page = tl.load(table.page_ids + where, mask=fits, other=-1).to(tl.int64)
    fits = fits & (page >= 0) & (page < store.num_pages)
    slot = (position % PAGE_SIZE).to(tl.int64)
    quantise_rows(
        x, store.k, store.k_descale, page, slot, kv_head, fits, K_FORMAT, K_SCALING, HEAD_DIM, K_MAX,
        K_GROUP, RULE, K_VEC, False, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    quantise_rows(
        y.to(tl.float32), store.v, store.v_descale, page, slot, kv_head, fits, V_FORMAT, V_SCALING,
        HEAD_DIM, V_MAX, V_GROUP, RULE, V_VEC, True, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    return x, y, inside


@triton.jit
def load_new(
    chunk, rope, first, kv_head, q_start, q_len,
    SIZES: tl.constexpr, STORING: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """New tokens of a sequence from `first` on: K rotated in fp32, V, their numbers, and which there are."""
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    ROTARY_DIM: tl.constexpr = STORING.rotary_dim
    INTERLEAVED: tl.constexpr = STORING.interleaved
    d = tl.arange(0, BLOCK_D)
    i = first + tl.arange(0, BLOCK_T)
    inside = i < q_len
    tokens = (q_start + i).to(tl.int64)
    at = tokens * chunk.k_token + kv_head * chunk.k_head
    x = load_rotated(chunk.k, at, rope, tokens, inside, d, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    at = tokens * chunk.v_token + kv_head * chunk.v_head
    y = tl.load(chunk.v + at[:, None] + d[None, :], mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    return x, y, i, inside


@triton.jit
def stage_new(
    x, y, inside, v_scale, scratch, block, kv_head, KIND: tl.constexpr, HEAD_DIM: tl.constexpr,
    K_HAS_FACTOR: tl.constexpr, V_PER_KEY: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Leaves a block of new tokens in the scratch, unquantised; V in units of `v_scale`, as old ones are.

    Values beyond 2**151 times `v_scale` saturate there.
    """
    units = kv_head.to(tl.int64) * (scratch.rows // BLOCK_S) + block
    factors = kv_head.to(tl.int64) * scratch.rows + block * BLOCK_S + tl.arange(0, BLOCK_S)
    # V first: K stays in 16 bits meanwhile.
    finite, top = finite_rows(y, inside)
    # The product may be beyond float32 by what a bf16 value is multiplied by in the scratch.
    in_units = 1.0 / tl.maximum(v_scale, 1.2e-38) * (2.0**-24)
    y = tl.minimum(tl.maximum(y.to(tl.float32) * in_units, -3.4e38), 3.4e38)
    y, unit = to_fp16_in_units(y, tl.minimum(top * in_units, 3.4e38), 24)
    store_block(scratch.v, y, kv_head, block, scratch.rows, finite, 0.0, HEAD_DIM, BLOCK_D, BLOCK_S)
    # Rotated keys are rounded to their own type, as a separate rotation would leave them.
    store_block(
        scratch.k, x.to(KIND), kv_head, block, scratch.rows, finite, keys_without_value(inside, KIND),
        HEAD_DIM, BLOCK_D, BLOCK_S,
    )  # fmt: skip
    tl.store(scratch.k_unit + units, 1.0)
    store_v_unit(scratch, unit, unit != 1.0, units)
    if K_HAS_FACTOR:
        tl.store(scratch.k_factor + factors, tl.full([BLOCK_S], 1.0, tl.float32))
    if V_PER_KEY:
        tl.store(scratch.v_factor + factors, tl.full([BLOCK_S], 1.0, tl.float32))


@triton.jit
def produce_block(
    chunk, rope, store, k, v, k_descale, v_descale, k_scale, v_scale, table, scratch,
    seq, in_seq, held, q_start, q_len, block, kv_head,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr,
    WIDE_ADDRESS: tl.constexpr, K_IN_PAGES: tl.constexpr, STORED: tl.constexpr, STAGED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of one head: new tokens are quantised if STORED, all are left in the scratch if STAGED.

    K_IN_PAGES: old keys are not, but their values are, which begin with a block then. `seq` to `q_len`: see
    `find_block`.
    """
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    K_DESCALE: tl.constexpr = K.descale
    V_DESCALE: tl.constexpr = V.descale
    KIND: tl.constexpr = chunk.k.dtype.element_ty
    K_TYPE: tl.constexpr = None if K_IN_PAGES else KIND
    K_HAS_FACTOR: tl.constexpr = (K_DESCALE != "scalar" and K_DESCALE != "head") or K_IN_PAGES
    V_PER_KEY: tl.constexpr = V_DESCALE != "scalar" and V_DESCALE != "head"
    old_blocks = tl.cdiv(held, BLOCK_S)
    if STAGED:
        k_scale = times_head_descale(k_scale, k_descale, seq, kv_head, K_DESCALE)
        v_scale = times_head_descale(v_scale, v_descale, seq, kv_head, V_DESCALE)
    if in_seq >= old_blocks:
        first = (in_seq - old_blocks) * BLOCK_S
        if STORED:
            x, y, inside = store_new(
                chunk, rope, store, table, seq, first, kv_head, q_start, q_len, SIZES, K, V, STORING,
                BLOCK_S, BLOCK_D,
            )  # fmt: skip
        else:
            x, y, _i, inside = load_new(
                chunk, rope, first, kv_head, q_start, q_len, SIZES, STORING, BLOCK_S, BLOCK_D
            )
        if STAGED:
            stage_new(
                x, y, inside, v_scale, scratch, block, kv_head, KIND, HEAD_DIM, K_HAS_FACTOR, V_PER_KEY,
                BLOCK_S, BLOCK_D,
            )  # fmt: skip
    else:
        if STAGED:
            # Old keys end where a block ends, so that new ones begin with one; or begin where one begins, as
            # those in pages do.
            first = in_seq * BLOCK_S
            if not K_IN_PAGES:
                first = (in_seq - old_blocks) * BLOCK_S + held
            widen_block(
                k, v, k_descale, v_descale, table, scratch, seq, block, first, kv_head, held, k_scale,
                SIZES, K, V, K_TYPE, True, WIDE_ADDRESS, BLOCK_D, BLOCK_S,
            )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _produce_kernel(
    q, chunk, rope, to, cache, table, scratch, scales,
    batch, num_tokens, max_q_len, block_m, table_row, num_ids, max_pages, max_keys, key_blocks,
    num_groups, num_blocks, num_tiles,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr, FILLING: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The launch before the one that attends, of an append in two launches.

    The first programs leave a block in the scratch, which takes longest, the next quantise new tokens, the
    last order the tiles that attend.

    Args:
        q, chunk, rope: `Queries`, `Chunk`, `RopePointers`. to: `Destination`. cache: `Cache`.
        table, scratch: `Table`, `Scratch`: without the sizes that follow. scales: `AppendScales`.
        num_blocks, num_groups, num_tiles: programs of each kind for a head, and tiles, at most.
        SIZES, K, V, STORING, FILLING, BLOCKS: `Sizes`, `Stored`, `Stored`, `Storing`, `Filling`, `Blocks`.
    """
    NUM_KV_HEADS: tl.constexpr = SIZES.num_kv_heads
    GQA_RATIO: tl.constexpr = SIZES.gqa_ratio
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    K_IN_PAGES: tl.constexpr = FILLING.k_type is None
    WIDE_ADDRESS: tl.constexpr = FILLING.wide_address
    NVIDIA: tl.constexpr = FILLING.nvidia
    BLOCK_D: tl.constexpr = BLOCKS.d
    BLOCK_S: tl.constexpr = BLOCKS.s
    BLOCK_T: tl.constexpr = BLOCKS.t
    BLOCK_I: tl.constexpr = BLOCKS.i
    if FILLING.early:
        begin_next_launch()
    k = KVPointers(cache.k, cache.k_page, cache.k_token, cache.k_head, cache.k_outer)
    v = KVPointers(cache.v, cache.v_page, cache.v_token, cache.v_head, cache.v_outer)
    k_descale = Descale(cache.k_descale, cache.k_descale_major, cache.k_descale_token, cache.k_descale_head)
    v_descale = Descale(cache.v_descale, cache.v_descale_major, cache.v_descale_token, cache.v_descale_head)
    k_store = KVPointers(to.k, to.k_page, to.k_token, to.k_head, to.k_outer)
    v_store = KVPointers(to.v, to.v_page, to.v_token, to.v_head, to.v_outer)
    k_store_descale = DescalePointers(
        to.k_number, to.k_descale, to.k_descale_page, to.k_descale_slot, to.k_descale_head
    )
    v_store_descale = DescalePointers(
        to.v_number, to.v_descale, to.v_descale_page, to.v_descale_slot, to.v_descale_head
    )
    q = Queries(q.ptr, q.token, q.head, q.starts, num_tokens, max_q_len, q.descale)
    table = Table(
        table.page_ids, table_row, table.lens, num_ids, table.num_pages, max_pages,
        table.column, table.row_step, table.lens_step,
    )  # fmt: skip
    scratch = Scratch(
        scratch.k, scratch.v, scratch.k_factor, scratch.v_factor, scratch.k_unit, scratch.v_unit,
        scratch.unusual, scratch.starts, scratch.schedule, scratch.rows, max_keys, key_blocks,
    )  # fmt: skip
    store = NewCache(k_store, v_store, k_store_descale, v_store_descale, max_pages, table.num_pages)
    pid = tl.program_id(0)
    first_group = num_blocks * NUM_KV_HEADS
    first_order = first_group + num_groups * NUM_KV_HEADS
    if (pid >= first_group) & (pid < first_order):
        kv_head = (pid - first_group) % NUM_KV_HEADS
        group = (pid - first_group) // NUM_KV_HEADS
        seq, in_seq, _, q_start, q_len = find_block(
            q, table, scratch, batch, group, 0, False, True, PAGE_SIZE, False, BLOCK_T, NVIDIA
        )
        if seq < 0:
            return
        store_new(
            chunk, rope, store, table, seq, in_seq * BLOCK_T, kv_head, q_start, q_len, SIZES, K, V, STORING,
            BLOCK_T, BLOCK_D,
        )  # fmt: skip
        return
    if pid >= first_order:
        schedule_tiles(
            q, table, scratch, batch, num_tiles, pid - first_order, block_m,
            PAGE_SIZE, False, True, GQA_RATIO, True, BLOCK_S, BLOCK_I,
        )  # fmt: skip
        return
    kv_head = pid % NUM_KV_HEADS
    block = pid // NUM_KV_HEADS
    limit = longest_held(table, scratch, batch, PAGE_SIZE, False, BLOCK_S)
    seq, in_seq, held, q_start, q_len = find_block(
        q, table, scratch, batch, block, limit, True, True, PAGE_SIZE, False, BLOCK_S, NVIDIA
    )
    if seq < 0:
        return
    produce_block(
        chunk, rope, store, k, v, k_descale, v_descale, scales.k, scales.v, table, scratch,
        seq, in_seq, held, q_start, q_len, block, kv_head, SIZES, K, V, STORING,
        WIDE_ADDRESS, K_IN_PAGES, False, True, BLOCK_S, BLOCK_D,
    )  # fmt: skip

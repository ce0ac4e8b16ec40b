"""Prefill that appends: a chunk attends to the cache and to itself and is quantised into it, in one launch.

Programs play two parts. The first ones produce: each takes a block of 64 keys of one head, quantises and
scatters the new ones, and, where keys are staged, leaves the block widened in scratch (new keys unquantised).
The others attend. Staged, they wait until every block of their sequence and head has been announced; programs
are issued in order, so what they wait for is running or done. Otherwise they read old keys from their pages,
which no producer writes, and new ones from the chunk.
"""

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.tiles import (
    accumulate,
    confine_nonfinite,
    scale_to_fp16,
    split_query,
    zeros_in_parts,
)
from narrowkv.attn_prefill.kernels.arguments import Read, Scratch
from narrowkv.attn_prefill.kernels.dense import dense_tile
from narrowkv.attn_prefill.kernels.fused import paged_keys, split_rows_fp8
from narrowkv.attn_prefill.kernels.produce import NewCache, produce_block
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    Queries,
    find_block,
    held_keys,
    longest_held,
    merge_splits,
    rows_of,
    softmax_step,
    tile_of,
)
from narrowkv.paged_cache.kernels.append import DescalePointers, load_rotated
from narrowkv.paged_cache.kernels.pages import (
    Descale,
    KVPointers,
    Table,
    first_id,
    sequence_length,
    times_head_descale,
)
from narrowkv.quant.device import join_parts
from narrowkv.runtime.attention.masks import key_range, share_of, visible_keys
from narrowkv.runtime.attention.results import write_rows
from narrowkv.runtime.attention.softmax import capped_logits


@triton.jit
def order_proxies(value, NVIDIA: tl.constexpr):
    """Orders ordinary accesses with those of the bulk copy engine, which loads by descriptor."""
    if NVIDIA:
        value = tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return value


@triton.jit
def own_keys(
    q, acc, m, l, scale, soft_cap, chunk, rope, kv_head, q_start, q_len, within, begin, end,
    SIZES: tl.constexpr, STORING: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to key tiles [begin, end) of the chunk itself, unquantised."""
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    ROTARY_DIM: tl.constexpr = STORING.rotary_dim
    INTERLEAVED: tl.constexpr = STORING.interleaved
    WINDOW_LEFT: tl.constexpr = RULES.window_left
    BLOCK_N: tl.constexpr = BLOCKS.t
    BLOCK_D: tl.constexpr = BLOCKS.d
    d = tl.arange(0, BLOCK_D)
    KIND: tl.constexpr = chunk.k.dtype.element_ty
    for tile in range(begin, end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < q_len
        tokens = (q_start + n).to(tl.int64)
        at = tokens * chunk.k_token + kv_head * chunk.k_head
        k = load_rotated(chunk.k, at, rope, tokens, inside, d, HEAD_DIM, ROTARY_DIM, INTERLEAVED).to(KIND)
        at = tokens * chunk.v_token + kv_head * chunk.v_head
        v = tl.load(
            chunk.v + at[:, None] + d[None, :], mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0
        )
        s = tl.dot(q, tl.trans(k)) * scale
        if RULES.soft_cap:
            s = capped_logits(s, soft_cap)
        keep = visible_keys(n, within, 0, q_len, False, WINDOW_LEFT, 0)
        s = tl.where(keep, s, float("-inf"))
        p, correction, m, l = softmax_step(s, m, l, m, False)
        p, clean = confine_nonfinite(p, (v,), keep, 1)
        acc = accumulate((acc,), correction, p, clean, KIND, 1)[0]
    return acc, m, l


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _prefill_append_kernel(
    q, out, chunk, rope, to, cache, table, scratch, k_desc, v_desc, workspace, scales,
    batch, num_tokens, max_q_len, table_row, num_ids, max_pages, max_keys, key_blocks,
    num_blocks, num_tiles, num_splits,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STORING: tl.constexpr, RULES: tl.constexpr,
    WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Programs of a launch of `prefill_append`; the table's lengths are those before it.

    Args:
        q, out, chunk, rope: `Queries`, `Outputs`, `Chunk`, `RopePointers`. to: `Destination`.
        cache: `Cache`. table, scratch: `Table`, `Scratch`: without the sizes that follow.
        k_desc, v_desc: tensor descriptors of the scratch, or None.
        workspace, scales: `AppendWorkspace`, `AppendScales`.
        num_blocks, num_tiles: blocks of keys and tiles of rows of a head, at most.
        SIZES, K, V, STORING, RULES, WIDENED, BLOCKS: `Sizes`, `Stored`, `Stored`, `Storing`, `Rules`,
            `Widened`, `Blocks`. Where keys are staged, the rules are those of the scratch.
    """
    NUM_KV_HEADS: tl.constexpr = SIZES.num_kv_heads
    GQA_RATIO: tl.constexpr = SIZES.gqa_ratio
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    ROTARY_DIM: tl.constexpr = STORING.rotary_dim
    INTERLEAVED: tl.constexpr = STORING.interleaved
    K_PARTS: tl.constexpr = K.parts
    K_DESCALE: tl.constexpr = K.descale
    V_DESCALE: tl.constexpr = V.descale
    V_PER_KEY: tl.constexpr = V_DESCALE != "scalar" and V_DESCALE != "head"
    COMPUTE: tl.constexpr = RULES.compute
    SPLIT_Q: tl.constexpr = RULES.split_q
    FP8: tl.constexpr = RULES.fp8
    P_SCALE: tl.constexpr = RULES.p_scale
    ACC_PARTS: tl.constexpr = RULES.acc_parts
    WINDOW_LEFT: tl.constexpr = RULES.window_left
    HAS_SINKS: tl.constexpr = RULES.sinks
    WRITE_LSE: tl.constexpr = RULES.lse
    SETTLE: tl.constexpr = RULES.settle
    SPLIT: tl.constexpr = RULES.split
    WIDE_ADDRESS: tl.constexpr = RULES.wide_address
    NVIDIA: tl.constexpr = RULES.nvidia
    STAGED: tl.constexpr = WIDENED.staged
    TMA: tl.constexpr = WIDENED.tma
    BLOCK_M: tl.constexpr = BLOCKS.m
    BLOCK_N: tl.constexpr = BLOCKS.n
    BLOCK_D: tl.constexpr = BLOCKS.d
    BLOCK_S: tl.constexpr = BLOCKS.s
    OWN_N: tl.constexpr = BLOCKS.t
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
    if STAGED:
        scratch = Scratch(
            scratch.k, scratch.v, scratch.k_factor, scratch.v_factor, scratch.k_unit, scratch.v_unit,
            scratch.unusual, scratch.starts, scratch.schedule, scratch.rows, max_keys, key_blocks,
        )  # fmt: skip
    store = NewCache(k_store, v_store, k_store_descale, v_store_descale, max_pages, table.num_pages)
    KIND: tl.constexpr = chunk.k.dtype.element_ty
    pid = tl.program_id(0)
    limit = num_blocks * 0
    if STAGED:
        limit = longest_held(table, scratch, batch, PAGE_SIZE, False, BLOCK_S)
    if pid < num_blocks * NUM_KV_HEADS:
        kv_head = pid % NUM_KV_HEADS
        block = pid // NUM_KV_HEADS
        seq, in_seq, held, q_start, q_len = find_block(
            q, table, scratch, batch, block, limit, STAGED, True, PAGE_SIZE, False, BLOCK_S, NVIDIA
        )
        if seq < 0:
            return
        produce_block(
            chunk, rope, store, k, v, k_descale, v_descale, scales.k, scales.v, table, scratch,
            seq, in_seq, held, q_start, q_len, block, kv_head, SIZES, K, V, STORING,
            WIDE_ADDRESS, False, True, STAGED, BLOCK_S, BLOCK_D,
        )  # fmt: skip
        if STAGED:
            if in_seq == 0:
                tl.store(scratch.starts + seq, (block - in_seq) * BLOCK_S)
            order_proxies(pid, TMA)
            # Every thread's stores are done before the one thread that counts announces them.
            tl.debug_barrier()
            tl.atomic_add(workspace.ready + seq * NUM_KV_HEADS + kv_head, 1, sem="release")
        return

    pid -= num_blocks * NUM_KV_HEADS
    kv_head = pid % NUM_KV_HEADS
    index = pid // NUM_KV_HEADS // num_splits
    split = pid // NUM_KV_HEADS % num_splits
    seq, tile, q_start, q_len = tile_of(q, batch, index, GQA_RATIO, BLOCK_M, NVIDIA)
    if seq < 0:
        return
    unit = index * NUM_KV_HEADS + kv_head
    stride = num_tiles * NUM_KV_HEADS
    q_len = tl.minimum(q_len, q.max_len)
    tokens, heads, row_mask, within = rows_of(q_start, q_len, tile, kv_head, GQA_RATIO, BLOCK_M)
    if STAGED:
        old_len, _ = held_keys(table, scratch, seq, seq >= 0, limit, PAGE_SIZE, False, BLOCK_S)
    else:
        old_len = sequence_length(table, seq, seq >= 0, PAGE_SIZE, False)
    first_row = tile * BLOCK_M // GQA_RATIO
    last_row = tl.minimum(((tile + 1) * BLOCK_M - 1) // GQA_RATIO, q_len - 1)
    d = tl.arange(0, BLOCK_D)
    at = tokens * q.token + heads * q.head
    own_q = load_rotated(q.ptr, at, rope, tokens, row_mask, d, HEAD_DIM, ROTARY_DIM, INTERLEAVED).to(KIND)
    logit_scale = tl.full([BLOCK_M], 1.0, tl.float32) * scales.logit
    o_scale = tl.full([BLOCK_M], 1.0, tl.float32) * scales.v
    o_scale = times_head_descale(o_scale, v_descale, seq, kv_head, V_DESCALE)
    if STAGED:
        old_blocks = tl.cdiv(old_len, BLOCK_S)
        wanted = old_blocks + tl.cdiv(q_len, BLOCK_S)
        place = seq * NUM_KV_HEADS + kv_head
        while tl.atomic_add(workspace.ready + place, 0, sem="acquire") < wanted:
            pass
        tl.debug_barrier()
        waiting = tl.cdiv(q_len * GQA_RATIO, BLOCK_M) * num_splits
        if tl.atomic_add(workspace.left + place, 1, sem="acq_rel") == waiting - 1:
            tl.store(workspace.ready + place, 0)  # the next launch finds both as this one did
            tl.store(workspace.left + place, 0)
        order_proxies(pid, TMA)
        # In the scratch, old keys begin `pad` rows late.
        pad = old_blocks * BLOCK_S - old_len
        begin = old_len + pad
        dense_tile(
            (own_q,), row_mask, tokens, heads, out, scratch, k_desc, v_desc, workspace,
            tl.load(scratch.starts + seq), kv_head, unit,
            begin + within, pad, begin + q_len, begin + first_row, begin + last_row,
            logit_scale, o_scale, scales.soft_cap, split, num_splits, stride,
            SIZES, RULES, WIDENED, BLOCKS,
        )  # fmt: skip
    else:
        row_base = first_id(table, seq, False)
        begin, end, full, full_end = key_range(
            old_len + first_row, old_len + last_row, old_len * 0, old_len, WINDOW_LEFT, -1, BLOCK_N
        )
        first, last = begin * 0, tl.maximum(old_len - 1, 0)
        if WINDOW_LEFT >= 0:
            first = tl.minimum(tl.maximum(old_len + first_row - WINDOW_LEFT, 0), last)
        own_begin = first_row * 0
        if WINDOW_LEFT >= 0:
            own_begin = tl.maximum(first_row - WINDOW_LEFT, 0) // OWN_N
        own_end = last_row // OWN_N + 1
        if SPLIT:
            begin, end, full, full_end = share_of(begin, end, full, full_end, split, num_splits)
            # One of them takes the chunk's own keys.
            own_end = tl.where(split == num_splits - 1, own_end, own_begin)
        old_scale = logit_scale * scales.k
        old_scale = times_head_descale(old_scale, k_descale, seq, kv_head, K_DESCALE)
        if FP8 is not None:
            high, low, row_scale = split_rows_fp8(own_q, FP8, P_SCALE)
            old_scale *= row_scale
            high, low = (high,), (low,)
        else:
            parts = ()
            for i in tl.static_range(K_PARTS):
                c = tl.arange(0, BLOCK_D // K_PARTS) * K_PARTS + i
                part = load_rotated(q.ptr, at, rope, tokens, row_mask, c, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
                parts = parts + (part.to(KIND),)
            if RULES.scale_q:
                parts, row_scale = scale_to_fp16(parts, K_PARTS)
                old_scale *= row_scale
            high, low = split_query(parts, COMPUTE, SPLIT_Q, K_PARTS)
        read = Read(row_base, kv_head, old_len, first, last)
        acc, m, l, v_unit = paged_keys(
            high, low, zeros_in_parts(BLOCK_M, BLOCK_D, ACC_PARTS),
            tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
            old_scale, scales.soft_cap, k, v, k_descale, v_descale, table, read, old_len + within,
            begin, end, full_end, SIZES, K, V, RULES, BLOCKS,
        )  # fmt: skip
        joined = join_parts(acc, ACC_PARTS) * o_scale[:, None]
        if V_PER_KEY:
            joined *= v_unit
        joined, m, l = own_keys(
            own_q, joined, m, l, scales.logit, scales.soft_cap, chunk, rope, kv_head, q_start, q_len, within,
            own_begin, own_end, SIZES, STORING, RULES, BLOCKS,
        )  # fmt: skip
        write = True
        if SPLIT:
            write, joined, m, l = merge_splits(
                workspace, joined, m, l, unit, split, num_splits, stride, row_mask, SETTLE, BLOCK_M, BLOCK_D
            )
        if write:
            write_rows(
                out.ptr, out.lse, out.sinks, joined, m, l, tl.full([BLOCK_M], 1.0, tl.float32), heads, tokens,
                row_mask, d, out.token, out.head, out.lse_token, HEAD_DIM, HAS_SINKS, WRITE_LSE,
            )  # fmt: skip

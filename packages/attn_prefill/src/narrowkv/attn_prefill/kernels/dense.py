"""Prefill in two steps: gather and widen the cache once into contiguous scratch, then attend to the scratch.

Widening costs each key tile once instead of once for every tile of query rows, and what is left is a plain
16-bit attention over contiguous keys. K becomes Q's type and V float16, both exactly but for small elements
of V in bf16, see `to_fp16_in_units`. Beside FP8 queries K keeps its stored bytes, for the FP8 matrix unit.
"""

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.tiles import load_query, scale_to_fp16, split_query, widen_tile
from narrowkv.attn_prefill.kernels.arguments import Scratch
from narrowkv.attn_prefill.kernels.fused import as_fp8
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    Queries,
    begin_next_launch,
    find_block,
    longest_held,
    merge_splits,
    rows_of,
    schedule_tiles,
    scheduled_tile,
    softmax_step,
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
    times_head_descale,
)
from narrowkv.quant.device import join_parts
from narrowkv.runtime.attention.masks import key_range, share_of, visible_keys
from narrowkv.runtime.attention.results import write_rows
from narrowkv.runtime.attention.softmax import capped_logits

# V of a bf16 cache times 2**this is float16 without a factor of its own from 2**-17 to 2**10.
BF16_VALUE_EXPONENT = tl.constexpr(5)


@triton.jit
def to_fp16_in_units(wide, top, EXPONENT: tl.constexpr):
    """A float32 tile times 2**EXPONENT as float16 times a power of two, which comes with it.

    top: the largest magnitude of the rows that matter, finite; of other rows comes what may. The power is 1
    where that is from 2**-12 to 2**15 then, and what is too small to keep all its bits is off by 2**-13 of
    the largest at most. Elsewhere the largest comes to lie in [2**14, 2**15), or below if it was below
    2**-26.
    """
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127 + EXPONENT
    usual = (top == 0) | ((exponent >= -12) & (exponent < 15))
    exponent = tl.where(usual, 0, tl.maximum(exponent - 14, -40))
    down = ((127 - exponent + EXPONENT) << 23).to(tl.float32, bitcast=True)
    return (wide * down).to(tl.float16), ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite_rows(v, inside):
    """Which rows of a tile of V are inside and hold neither NaN nor Inf, and the largest magnitude in these.

    Other rows are stored as zeros, for 0 * NaN would reach every row of the output. The keys of those inside
    become NaN instead: the mask keeps them from rows that do not see them.
    """
    # As integers magnitudes are in the same order, Inf above what is finite, and NaN above Inf.
    bits = v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1)
    finite = inside & (largest < 0x7F800000)
    return finite, tl.max(tl.where(finite, largest, 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def store_v_unit(scratch, unit, unusual, at):
    """Notes what a block of V is short of, and, for whom it matters, whether the block is unusual."""
    tl.store(scratch.v_unit + at, unit)
    if scratch.unusual is not None:
        tl.store(scratch.unusual, 1, mask=unusual)


@triton.jit
def store_block(target, words, kv_head, block, rows, keep, rest, HEAD_DIM: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Rows of a block `[BLOCK_N, BLOCK_D]` into `[heads, rows, head_dim]`, `rest` for those not to `keep`."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at = ((kv_head.to(tl.int64) * rows + block * BLOCK_N) * HEAD_DIM) + n[:, None] * HEAD_DIM + d[None, :]
    value = tl.where(keep[:, None], words, rest).to(target.dtype.element_ty)
    if HEAD_DIM == BLOCK_D:
        tl.store(target + at, value)
    else:
        tl.store(target + at, value, mask=(d < HEAD_DIM)[None, :])


@triton.jit
def keys_without_value(inside, KIND: tl.constexpr):
    """What is stored for keys without a finite value, `[N, 1]`: NaN, or zero where there is no key."""
    if KIND.is_fp8():
        NAN: tl.constexpr = 0x80 if tl.float8e4b8 == KIND else 0x7F
        return tl.where(inside, NAN, 0).to(tl.uint8)[:, None]
    else:
        return tl.where(inside, float("nan"), 0.0).to(KIND)[:, None]


@triton.jit
def widen_block(
    k, v, k_descale, v_descale, table, scratch, seq, block, first_row, kv_head, kv_len, k_unit,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_TYPE: tl.constexpr, IN_UNITS: tl.constexpr,
    WIDE_ADDRESS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gathers, widens and stores one block of one head: keys from `first_row` of `seq` to block `block`.

    IN_UNITS: K is still to be multiplied by `k_unit`, which is noted. K_TYPE: what K becomes; the matrix
    unit's FP8 type for the bytes as stored; None leaves K where it is, and notes a factor of each key, which
    is NaN where its V is not finite.
    """
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    RAGGED: tl.constexpr = SIZES.ragged
    K_VEC: tl.constexpr = K.vec
    K_FORMAT: tl.constexpr = K.format
    K_ROUTE: tl.constexpr = K.route
    K_DESCALE: tl.constexpr = K.descale
    K_PARTS: tl.constexpr = K.parts
    V_VEC: tl.constexpr = V.vec
    V_FORMAT: tl.constexpr = V.format
    V_ROUTE: tl.constexpr = V.route
    V_DESCALE: tl.constexpr = V.descale
    V_PARTS: tl.constexpr = V.parts
    row_base = first_id(table, seq, RAGGED)
    n = first_row + tl.arange(0, BLOCK_N)
    inside = (n >= 0) & (n < kv_len)
    page, slot = locate_keys(table, row_base, n, 0, kv_len - 1, PAGE_SIZE, WIDE_ADDRESS)
    dk, dv = tl.arange(0, BLOCK_D // K_PARTS), tl.arange(0, BLOCK_D // V_PARTS)
    K_ZERO: tl.constexpr = 0 if K_ROUTE != "native" or K_PARTS > 1 else 0.0
    V_ZERO: tl.constexpr = 0 if V_ROUTE != "native" or V_PARTS > 1 else 0.0
    K_PER_KEY: tl.constexpr = K_DESCALE != "scalar" and K_DESCALE != "head"
    V_PER_KEY: tl.constexpr = V_DESCALE != "scalar" and V_DESCALE != "head"
    k_off = kv_offsets(page, slot, k, kv_head, dk, K_VEC, False)
    v_off = kv_offsets(page, slot, v, kv_head, dv, V_VEC, True)
    if K_TYPE is not None:
        k_words = load_words(k, k_off, dk, K_ZERO, K_PARTS, HEAD_DIM, BLOCK_D)
    v_words = load_words(v, v_off, dv, V_ZERO, V_PARTS, HEAD_DIM, BLOCK_D)
    k_scale = 1.0
    v_scale = 1.0
    if K_PER_KEY:
        k_scale = load_key_scale(k_descale, page, slot, kv_head, K_DESCALE, False, HEAD_DIM, BLOCK_D)
    if V_PER_KEY:
        v_scale = load_key_scale(v_descale, page, slot, kv_head, V_DESCALE, False, HEAD_DIM, BLOCK_D)
    factors = kv_head.to(tl.int64) * scratch.rows + block * BLOCK_N + tl.arange(0, BLOCK_N)
    units = kv_head.to(tl.int64) * (scratch.rows // BLOCK_N) + block
    if V_FORMAT == "bf16":
        wide_v = v_words
        v_factor = v_scale
    else:
        parts, v_factor = widen_tile(v_words, v_scale, V_FORMAT, V_ROUTE, tl.float16, V_PARTS, V_DESCALE)
        wide_v = join_parts(parts, V_PARTS)
    finite, top = finite_rows(wide_v, inside)
    unit = tl.full([], 1.0, tl.float32)
    if V_FORMAT == "bf16":
        wide_v, unit = to_fp16_in_units(wide_v.to(tl.float32), top, BF16_VALUE_EXPONENT)
    if V_PER_KEY:
        finite = finite & (tl.abs(v_factor) < float("inf"))
        tl.store(scratch.v_factor + factors, tl.where(finite, v_factor, 0.0))
    store_block(scratch.v, wide_v, kv_head, block, scratch.rows, finite, 0.0, HEAD_DIM, BLOCK_D, BLOCK_N)
    unusual = unit != 1.0
    if K_TYPE is None:
        bad = inside & ~finite
        tl.store(scratch.k_factor + factors, tl.where(bad, float("nan"), 1.0))
        unusual = unusual | (tl.max(bad.to(tl.int32), 0) > 0)
    else:
        if K_TYPE.is_fp8():
            wide_k = as_fp8(k_words, K_TYPE, False).to(tl.uint8, bitcast=True)
            k_factor = k_scale
        else:
            parts, k_factor = widen_tile(k_words, k_scale, K_FORMAT, K_ROUTE, K_TYPE, K_PARTS, K_DESCALE)
            wide_k = join_parts(parts, K_PARTS)
        store_block(
            scratch.k, wide_k, kv_head, block, scratch.rows, finite, keys_without_value(inside, K_TYPE),
            HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        if K_PER_KEY:
            tl.store(scratch.k_factor + factors, tl.where(inside, k_factor, 0.0))
        if IN_UNITS:
            tl.store(scratch.k_unit + units, k_unit)
    if scratch.v_unit is not None:
        store_v_unit(scratch, unit, unusual, units)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _widen_kernel(
    q, cache, table, scratch,
    batch, num_tokens, max_q_len, block_m, table_row, num_ids, max_pages, max_keys, key_blocks,
    num_blocks, num_tiles,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, FILLING: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The first programs widen a block of one head each, the last ones order the tiles that attend.

    Args:
        q: `Queries`; cache: `Cache`; table: `Table`; scratch: `Scratch`: without the sizes that follow.
        block_m: rows of a tile of the launch that attends. num_blocks, num_tiles: how many there are at most.
        SIZES, K, V, FILLING, BLOCKS: `Sizes`, `Stored`, `Stored`, `Filling`, `Blocks`.
    """
    NUM_KV_HEADS: tl.constexpr = SIZES.num_kv_heads
    GQA_RATIO: tl.constexpr = SIZES.gqa_ratio
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    RAGGED: tl.constexpr = SIZES.ragged
    K_TYPE: tl.constexpr = FILLING.k_type
    CAUSAL: tl.constexpr = FILLING.causal
    WIDE_ADDRESS: tl.constexpr = FILLING.wide_address
    NVIDIA: tl.constexpr = FILLING.nvidia
    BLOCK_D: tl.constexpr = BLOCKS.d
    BLOCK_N: tl.constexpr = BLOCKS.s
    BLOCK_I: tl.constexpr = BLOCKS.i
    if FILLING.early:
        begin_next_launch()
    k = KVPointers(cache.k, cache.k_page, cache.k_token, cache.k_head, cache.k_outer)
    v = KVPointers(cache.v, cache.v_page, cache.v_token, cache.v_head, cache.v_outer)
    k_descale = Descale(cache.k_descale, cache.k_descale_major, cache.k_descale_token, cache.k_descale_head)
    v_descale = Descale(cache.v_descale, cache.v_descale_major, cache.v_descale_token, cache.v_descale_head)
    q = Queries(q.ptr, q.token, q.head, q.starts, num_tokens, max_q_len, q.descale)
    table = Table(
        table.page_ids, table.row if RAGGED else table_row, table.lens, num_ids, table.num_pages, max_pages,
        table.column, table.row_step, table.lens_step,
    )  # fmt: skip
    scratch = Scratch(
        scratch.k, scratch.v, scratch.k_factor, scratch.v_factor, scratch.k_unit, scratch.v_unit,
        scratch.unusual, scratch.starts, scratch.schedule, scratch.rows, max_keys, key_blocks,
    )  # fmt: skip
    pid = tl.program_id(0)
    if pid >= num_blocks * NUM_KV_HEADS:
        schedule_tiles(
            q, table, scratch, batch, num_tiles, pid - num_blocks * NUM_KV_HEADS, block_m,
            PAGE_SIZE, RAGGED, False, GQA_RATIO, CAUSAL, BLOCK_N, BLOCK_I,
        )  # fmt: skip
        return
    kv_head = pid % NUM_KV_HEADS
    block = pid // NUM_KV_HEADS
    limit = longest_held(table, scratch, batch, PAGE_SIZE, RAGGED, BLOCK_N)
    seq, in_seq, kv_len, _, _ = find_block(
        q, table, scratch, batch, block, limit, True, False, PAGE_SIZE, RAGGED, BLOCK_N, NVIDIA
    )
    if seq < 0:
        return
    widen_block(
        k, v, k_descale, v_descale, table, scratch, seq, block, in_seq * BLOCK_N, kv_head, kv_len, 1.0,
        SIZES, K, V, K_TYPE, False, WIDE_ADDRESS, BLOCK_D, BLOCK_N,
    )  # fmt: skip


@triton.jit
def load_rows(target, desc, base, d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
              TMA: tl.constexpr):  # fmt: skip
    """Rows base..base + BLOCK_N of the scratch, [BLOCK_N, BLOCK_D]; columns past head_dim are zeros."""
    if TMA:
        return desc.load([base.to(tl.int32), 0])
    else:
        at = base.to(tl.int64) * HEAD_DIM + tl.arange(0, BLOCK_N)[:, None] * HEAD_DIM + d[None, :]
        if HEAD_DIM == BLOCK_D:
            return tl.load(target + at)
        else:
            ZERO: tl.constexpr = 0 if target.dtype.element_ty == tl.uint8 else 0.0
            return tl.load(target + at, mask=(d < HEAD_DIM)[None, :], other=ZERO)


@triton.jit
def masked_scores(
    s, n, query_pos, first, last, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr,
):  # fmt: skip
    """Scores of keys that a row does not see become -inf."""
    keep = visible_keys(n, query_pos, first, last, HAS_FIRST, WINDOW_LEFT, WINDOW_RIGHT)
    if HAS_LAST:
        keep = keep & (n < last)[None, :]
    return tl.where(keep, s, float("-inf"))


@triton.jit
def dense_range(
    q, q_low, acc, m, l, v_unit, v_largest, logit_scale, soft_cap, scratch, k_desc, v_desc, base,
    query_pos, first, num_keys, begin, rounds, end, full, full_end,
    SIZES: tl.constexpr, RULES: tl.constexpr, WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Rounds [begin, rounds) of `dense_keys`, each a key tile.

    `acc` is short of `v_unit`, what the last block of V was short of, and of `v_largest`, the largest factor
    of a key so far. MASK: "none"; "branch", past it where a tile needs none; "rest", only tiles that need
    one, of which those from round `full` on lie behind [full, full_end).
    """
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    WINDOW_LEFT: tl.constexpr = RULES.window_left
    WINDOW_RIGHT: tl.constexpr = RULES.window_right
    FOLDED: tl.constexpr = RULES.folded
    K_PER_KEY: tl.constexpr = WIDENED.k_per_key
    V_PER_KEY: tl.constexpr = WIDENED.v_per_key
    K_IN_UNITS: tl.constexpr = WIDENED.k_in_units
    V_IN_UNITS: tl.constexpr = WIDENED.v_in_units
    TMA: tl.constexpr = WIDENED.tma
    OVERLAP: tl.constexpr = WIDENED.overlap
    BLOCK_N: tl.constexpr = BLOCKS.n
    BLOCK_D: tl.constexpr = BLOCKS.d
    BLOCK_S: tl.constexpr = BLOCKS.s
    d = tl.arange(0, BLOCK_D)
    if OVERLAP:
        p = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        correction = l * 0.0 + 1.0
    for tile in range(begin, rounds):
        if MASK == "rest":
            tile += tl.where(tile < full, 0, full_end - full)
        row = base + tile * BLOCK_N
        if OVERLAP:
            row = base + tl.minimum(tile, end - 1) * BLOCK_N
        # What is small and comes by itself is asked for first: the matrix products hide its latency.
        scale = logit_scale
        if K_IN_UNITS:
            scale *= tl.load(scratch.k_unit + row // BLOCK_S)
        if K_PER_KEY:
            k_factor = tl.load(scratch.k_factor + row + tl.arange(0, BLOCK_N))
        if V_IN_UNITS:
            unit = tl.load(scratch.v_unit + row // BLOCK_S)
        if V_PER_KEY:
            v_factor = tl.load(scratch.v_factor + row + tl.arange(0, BLOCK_N))
        k = load_rows(scratch.k, k_desc, row, d, HEAD_DIM, BLOCK_D, BLOCK_N, TMA)  # [BLOCK_N, BLOCK_D]
        if RULES.fp8 is not None:
            k = k.to(RULES.fp8, bitcast=True)
        s = tl.dot(q, tl.trans(k))
        if RULES.split_q:
            s = tl.dot(q_low, tl.trans(k), s)
        if OVERLAP:
            previous = base + tl.maximum(tile - 1, begin) * BLOCK_N
            v = load_rows(scratch.v, v_desc, previous, d, HEAD_DIM, BLOCK_D, BLOCK_N, TMA)
            acc = tl.dot(p.to(tl.float16), v, acc * correction[:, None])
        if not FOLDED:
            s *= scale[:, None]
            if K_PER_KEY:
                s *= k_factor[None, :]
            if RULES.soft_cap:
                s = capped_logits(s, soft_cap)
        before = tile * BLOCK_N
        n = tl.arange(0, BLOCK_N)
        if MASK == "branch":
            n += before
            # And no second loop, whose pipeline would have to fill anew.
            if (tile < full) | (tile >= full_end):
                s = masked_scores(
                    s, n, query_pos, first, tl.minimum(num_keys, end * BLOCK_N), K_IN_UNITS, OVERLAP,
                    WINDOW_LEFT, WINDOW_RIGHT,
                )  # fmt: skip
        elif MASK == "rest":
            # Counted from the tile's first key, the keys are the same numbers in every tile.
            s = masked_scores(
                s, n, query_pos - before, first - before, num_keys - before, K_IN_UNITS, OVERLAP,
                WINDOW_LEFT, WINDOW_RIGHT,
            )  # fmt: skip
        p, correction, m, l = softmax_step(s, m, l, scale, FOLDED)
        if V_IN_UNITS:
            correction *= v_unit / unit
            v_unit = unit
        if V_PER_KEY:
            p, correction, v_largest = weigh_values(p, correction, v_factor, v_largest)
        if not OVERLAP:
            v = load_rows(scratch.v, v_desc, row, d, HEAD_DIM, BLOCK_D, BLOCK_N, TMA)
            acc = tl.dot(p.to(tl.float16), v, acc * correction[:, None])
    return acc, m, l, v_unit, v_largest


@triton.jit
def dense_keys(
    q, q_low, acc, m, l, logit_scale, soft_cap, scratch, k_desc, v_desc, base, query_pos,
    first, num_keys, begin, end, full, full_end,
    SIZES: tl.constexpr, RULES: tl.constexpr, WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) of a sequence's scratch, of which [full, full_end) need no mask.

    `base` is the row of the sequence's first key in this head. With `overlap` a tile's P @ V is issued after
    the scores of the next tile and runs during their softmax; one more round finishes the last. With `branch`
    tiles that need no mask branch past it. AMD's compiler no longer sees then that one product feeds the
    other; there they come first, in a loop of their own, which has no pipeline that would have to fill anew.
    """
    v_unit = num_keys.to(tl.float32) * 0.0 + 1.0
    v_largest = v_unit * 0.0
    rounds = end
    if WIDENED.overlap:
        rounds = tl.where(begin < end, end + 1, end)
    MASK: tl.constexpr = "branch" if WIDENED.branch else "rest"
    if not WIDENED.branch:
        acc, m, l, v_unit, v_largest = dense_range(
            q, q_low, acc, m, l, v_unit, v_largest, logit_scale, soft_cap, scratch, k_desc, v_desc, base,
            query_pos, first, num_keys, full, full_end, end, full, full_end,
            SIZES, RULES, WIDENED, BLOCKS, "none",
        )  # fmt: skip
        rounds -= full_end - full
    acc, m, l, v_unit, v_largest = dense_range(
        q, q_low, acc, m, l, v_unit, v_largest, logit_scale, soft_cap, scratch, k_desc, v_desc, base,
        query_pos, first, num_keys, begin, rounds, end, full, full_end,
        SIZES, RULES, WIDENED, BLOCKS, MASK,
    )  # fmt: skip
    if WIDENED.v_in_units:
        acc, m, l = multiplied(acc, m, l, v_unit)
    if WIDENED.v_per_key:
        acc, m, l = multiplied(acc, m, l, v_largest)
    return acc, m, l


@triton.jit
def multiplied(acc, m, l, factor):
    """The state of rows whose accumulators are still to be multiplied by a positive number.

    Where a sum of values could leave float32's range, the sums of weights are divided instead: a power of two
    moves from `acc` to `l` and `m`, which changes neither acc / l nor the log-sum-exp.
    """
    exponent = (factor.to(tl.int32, bitcast=True) >> 23) - 127
    moved = tl.maximum(exponent - 64, 0)
    down = ((127 - moved) << 23).to(tl.float32, bitcast=True)
    return acc * (factor * down), m + moved.to(tl.float32), l * down


@triton.jit
def dense_tile(
    parts, row_mask, tokens, heads, out, scratch, k_desc, v_desc, workspace, base, kv_head, unit,
    query_pos, first, num_keys, first_pos, last_pos, logit_scale, o_scale, soft_cap, split, num_splits,
    stride,
    SIZES: tl.constexpr, RULES: tl.constexpr, WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows over a sequence's scratch from row `base` on, written out; `parts` is Q as loaded."""
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    COMPUTE: tl.constexpr = RULES.compute
    SPLIT_Q: tl.constexpr = RULES.split_q
    WINDOW_LEFT: tl.constexpr = RULES.window_left
    WINDOW_RIGHT: tl.constexpr = RULES.window_right
    HAS_SINKS: tl.constexpr = RULES.sinks
    WRITE_LSE: tl.constexpr = RULES.lse
    SETTLE: tl.constexpr = RULES.settle
    BLOCK_M: tl.constexpr = BLOCKS.m
    BLOCK_N: tl.constexpr = BLOCKS.n
    BLOCK_D: tl.constexpr = BLOCKS.d
    begin, end, full, full_end = key_range(
        first_pos, last_pos, first, num_keys, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N
    )
    if RULES.split:
        begin, end, full, full_end = share_of(begin, end, full, full_end, split, num_splits)
    if RULES.fp8 is not None:
        # Queries come from anywhere, so their bytes are never taken to be clean.
        high = (as_fp8(parts[0], RULES.fp8, False),)
        low = high
    else:
        if RULES.scale_q:
            parts, row_scale = scale_to_fp16(parts, 1)
            logit_scale *= row_scale
        high, low = split_query(parts, COMPUTE, SPLIT_Q, 1)
    base += kv_head.to(tl.int64) * scratch.rows
    acc, m, l = dense_keys(
        high[0], low[0], tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
        logit_scale, soft_cap, scratch, k_desc, v_desc, base, query_pos, first, num_keys,
        begin, end, full, full_end, SIZES, RULES, WIDENED, BLOCKS,
    )  # fmt: skip
    write = True
    if RULES.split:
        write, acc, m, l = merge_splits(
            workspace, acc, m, l, unit, split, num_splits, stride, row_mask, SETTLE, BLOCK_M, BLOCK_D
        )
    if write:
        write_rows(
            out.ptr, out.lse, out.sinks, acc, m, l, o_scale, heads, tokens, row_mask, tl.arange(0, BLOCK_D),
            out.token, out.head, out.lse_token, HEAD_DIM, HAS_SINKS, WRITE_LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _dense_prefill_kernel(
    q, out, scratch, k_desc, v_desc, k_descale, v_descale, workspace,
    qk_scale, out_scale, soft_cap, num_splits,
    SIZES: tl.constexpr, K_DESCALE: tl.constexpr, V_DESCALE: tl.constexpr,
    RULES: tl.constexpr, WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head over the widened keys; programs run fastest over KV heads.

    Args:
        q, out, scratch: `Queries`, `Outputs`, `Scratch`. workspace: `Workspace`.
        k_desc, v_desc: tensor descriptors of the scratch, or None.
        k_descale, v_descale: `Descale`, used where K_DESCALE or V_DESCALE is "head"; see `Stored`.
        qk_scale, out_scale: of the logits (in base 2 unless there is a soft cap) and of the output.
        SIZES, RULES, WIDENED, BLOCKS: `Sizes`, `Rules`, `Widened`, `Blocks`.
    """
    GQA_RATIO: tl.constexpr = SIZES.gqa_ratio
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    BLOCK_M: tl.constexpr = BLOCKS.m
    BLOCK_D: tl.constexpr = BLOCKS.d
    pid = tl.program_id(0)
    kv_head = pid % SIZES.num_kv_heads
    tile = scheduled_tile(scratch.schedule, pid // SIZES.num_kv_heads)
    seq, kv_len, before = tile.seq, tile.kv_len, tile.before
    if seq < 0:
        return
    tokens, heads, row_mask, within = rows_of(
        tile.q_start, tile.q_len, tile.number, kv_head, GQA_RATIO, BLOCK_M
    )
    first = tile.padding if WIDENED.k_in_units else kv_len * 0
    first_pos = before + tile.number * BLOCK_M // GQA_RATIO
    last_pos = before + tl.minimum(((tile.number + 1) * BLOCK_M - 1) // GQA_RATIO, tile.q_len - 1)
    parts = load_query(q.ptr, tokens, heads, row_mask, q.token, q.head, HEAD_DIM, BLOCK_D, 1)
    logit_scale = tl.full([BLOCK_M], 1.0, tl.float32) * qk_scale
    o_scale = tl.full([BLOCK_M], 1.0, tl.float32) * out_scale
    if RULES.q_descale:
        logit_scale *= tl.load(q.descale)
    logit_scale = times_head_descale(logit_scale, k_descale, seq, kv_head, K_DESCALE)
    o_scale = times_head_descale(o_scale, v_descale, seq, kv_head, V_DESCALE)
    dense_tile(
        parts, row_mask, tokens, heads, out, scratch, k_desc, v_desc, workspace, tile.base, kv_head, pid,
        before + within, first, kv_len, first_pos, last_pos, logit_scale, o_scale, soft_cap,
        tl.program_id(2), num_splits, tl.num_programs(0), SIZES, RULES, WIDENED, BLOCKS,
    )  # fmt: skip

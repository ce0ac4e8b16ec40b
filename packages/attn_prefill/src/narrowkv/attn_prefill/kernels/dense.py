"""Attention over keys that an earlier launch left in contiguous scratch, of a prefill or an append.

Widening costs each key tile once instead of once for every tile of query rows, and what is left is a plain
16-bit attention over contiguous keys; see `narrowkv.attn_prefill.kernels.widen` and `...append_store`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    query_terms,
    rows_of,
    scheduled_tile,
    shifted_maximum,
    soft_cap_of,
    sum_of_held_keys,
)
from narrowkv.paged_cache.kernels.append import load_rotated
from narrowkv.paged_cache.kernels.outputs import write_rows
from narrowkv.paged_cache.kernels.pages import times_head_descale
from narrowkv.paged_cache.kernels.queries import load_query
from narrowkv.paged_cache.kernels.tiles import LEAST_FACTOR, apply_value_factors
from narrowkv.runtime.attention.masks import key_range, key_range_of_split, visible_keys
from narrowkv.runtime.attention.results import merge_splits
from narrowkv.runtime.attention.softmax import capped_logits, multiply_values, softmax_step
from narrowkv.runtime.attention.xcds import program_on_its_xcd


class QueryTile(NamedTuple):
    """A tile of query rows.

    Attributes:
        q, q_low: Q as one or two terms, [BLOCK_M, BLOCK_D].
        scale: of the logits; soft_cap: `SoftCap`.
        pos: positions of the rows among the keys.
    """

    q: Any
    q_low: Any
    scale: Any
    soft_cap: Any
    pos: Any


class WidenedKeys(NamedTuple):
    """A sequence's keys of one head in the scratch.

    Attributes:
        scratch: `Scratch`; k_desc, v_desc: tensor descriptors of it, or None.
        base: row of the first key.
        first, count: rows before `first` are no keys; keys end with row `count`.
    """

    scratch: Any
    k_desc: Any
    v_desc: Any
    base: Any
    first: Any
    count: Any


@triton.jit
def load_rows(target, desc, base, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
              TMA: tl.constexpr):  # fmt: skip
    """Rows base..base + BLOCK_N of the scratch, [BLOCK_N, BLOCK_D]; columns past head_dim are zeros."""
    if TMA:
        return desc.load([base.to(tl.int32), 0])
    else:
        d = tl.arange(0, BLOCK_D)
        at = base.to(tl.int64) * HEAD_DIM + tl.arange(0, BLOCK_N)[:, None] * HEAD_DIM + d[None, :]
        if HEAD_DIM == BLOCK_D:
            return tl.load(target + at)
        else:
            ZERO: tl.constexpr = 0 if target.dtype.element_ty == tl.uint8 else 0.0
            return tl.load(target + at, mask=(d < HEAD_DIM)[None, :], other=ZERO)


@triton.jit
def to_fp16(p, TOWARDS_ZERO: tl.constexpr):
    """P in float16, rounded to nearest or towards zero.

    CDNA3 rounds two numbers towards zero in one instruction, and to nearest in three. The result is 0.035%
    smaller on average.
    """
    if TOWARDS_ZERO:
        return p.to(tl.float16, fp_downcast_rounding="rtz")
    else:
        return p.to(tl.float16)


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
    rows, keys, acc, m, l, v_block_factor, v_largest, begin, rounds, end, full, full_end,
    SIZES: tl.constexpr, RULES: tl.constexpr, WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Rounds [begin, rounds) of `dense_keys`, each a key tile.

    `acc` is still to be multiplied by `v_block_factor`, the power of two of the last block of V, and by
    `v_largest`, the largest factor of a key so far. MASK: "none"; "branch", a branch skips it where a tile
    needs none; "rest", all rounds are tiles that need one, and those from round `full` on lie behind
    [full, full_end).
    """
    AHEAD: tl.constexpr = WIDENED.ahead and MASK == "none"
    scratch, k_desc, v_desc, base, first, num_keys = keys
    if WIDENED.overlap:
        p = tl.zeros([rows.q.shape[0], BLOCKS.n], tl.float32)
        correction = l * 0.0 + 1.0
    if AHEAD:
        # A range without tiles loads one all the same, somewhere in the scratch.
        last_row = scratch.rows.to(tl.int64) * SIZES.num_kv_heads - BLOCKS.n
        row = tl.minimum(base + begin * BLOCKS.n, last_row)
        next_k = load_rows(scratch.k, k_desc, row, SIZES.head_dim, BLOCKS.dk, BLOCKS.n, WIDENED.tma)
        next_v = load_rows(scratch.v, v_desc, row, SIZES.v_head_dim, BLOCKS.d, BLOCKS.n, WIDENED.tma)
    for tile in range(begin, rounds):
        if MASK == "rest":
            tile += tl.where(tile < full, 0, full_end - full)
        row = base + tile * BLOCKS.n
        if WIDENED.overlap:
            row = base + tl.minimum(tile, end - 1) * BLOCKS.n
        # Small loads are issued first: the matrix products hide their latency.
        scale = rows.scale
        if WIDENED.k_block_factors:
            scale *= tl.load(scratch.k_block_factor + row // BLOCKS.s)
        if WIDENED.k_per_key:
            k_factor = tl.load(scratch.k_factor + row + tl.arange(0, BLOCKS.n))
        if WIDENED.v_block_factors:
            factor = tl.load(scratch.v_block_factor + row // BLOCKS.s)
        if WIDENED.v_per_key:
            v_factor = tl.load(scratch.v_factor + row + tl.arange(0, BLOCKS.n))
        if AHEAD:
            k, v = next_k, next_v
        else:
            k = load_rows(
                scratch.k, k_desc, row, SIZES.head_dim, BLOCKS.dk, BLOCKS.n, WIDENED.tma
            )  # [BLOCK_N, BLOCK_D]
        if RULES.fp8 is not None:
            k = k.to(RULES.fp8, bitcast=True)
        s = tl.dot(rows.q, tl.trans(k))
        if RULES.split_q:
            s = tl.dot(rows.q_low, tl.trans(k), s)
        if AHEAD:
            upcoming = base + tl.minimum(tile + 1, rounds - 1) * BLOCKS.n
            next_k = load_rows(scratch.k, k_desc, upcoming, SIZES.head_dim, BLOCKS.dk, BLOCKS.n, WIDENED.tma)
        if WIDENED.overlap:
            previous = base + tl.maximum(tile - 1, begin) * BLOCKS.n
            v = load_rows(scratch.v, v_desc, previous, SIZES.v_head_dim, BLOCKS.d, BLOCKS.n, WIDENED.tma)
            acc = tl.dot(p.to(tl.float16), v, acc * correction[:, None])
        if not RULES.folded:
            s *= scale[:, None]
            if WIDENED.k_per_key:
                s *= k_factor[None, :]
            if RULES.soft_cap:
                s = capped_logits(s, rows.soft_cap)
        before = tile * BLOCKS.n
        n = tl.arange(0, BLOCKS.n)
        if MASK == "branch":
            n += before
            # A second loop would have to fill its pipeline again.
            if (tile < full) | (tile >= full_end):
                s = masked_scores(
                    s, n, rows.pos, first, tl.minimum(num_keys, end * BLOCKS.n), WIDENED.k_block_factors,
                    WIDENED.overlap, RULES.window_left, RULES.window_right,
                )  # fmt: skip
        elif MASK == "rest":
            # Counted from the tile's first key, the keys are the same numbers in every tile.
            s = masked_scores(
                s, n, rows.pos - before, first - before, num_keys - before, WIDENED.k_block_factors,
                WIDENED.overlap, RULES.window_left, RULES.window_right,
            )  # fmt: skip
        p, m, l, correction = softmax_step(s, m, l, scale if RULES.folded else None)
        if WIDENED.v_block_factors:
            correction *= v_block_factor / factor
            v_block_factor = factor
        if WIDENED.v_per_key:
            p, correction, v_largest = apply_value_factors(p, correction, v_factor, v_largest)
        if not WIDENED.overlap:
            if not AHEAD:
                v = load_rows(scratch.v, v_desc, row, SIZES.v_head_dim, BLOCKS.d, BLOCKS.n, WIDENED.tma)
            acc = tl.dot(to_fp16(p, AHEAD and RULES.fp8 is not None), v, acc * correction[:, None])
            if AHEAD:
                next_v = load_rows(
                    scratch.v, v_desc, upcoming, SIZES.v_head_dim, BLOCKS.d, BLOCKS.n, WIDENED.tma
                )
    return acc, m, l, v_block_factor, v_largest


@triton.jit
def dense_keys(
    rows, keys, acc, m, l, begin, end, full, full_end,
    SIZES: tl.constexpr, RULES: tl.constexpr, WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) of a sequence's scratch, of which [full, full_end) need no mask.

    With `overlap` a tile's P @ V is issued after the scores of the next tile and runs during their softmax;
    one more round finishes the last. With `branch` tiles that need no mask branch past it. AMD's compiler
    does not see then that one product feeds the other, so that there these tiles come first, in a loop of
    their own.

    Args:
        rows, keys: `QueryTile`, `WidenedKeys`.
    """
    v_block_factor = keys.count.to(tl.float32) * 0.0 + 1.0
    v_largest = v_block_factor * LEAST_FACTOR
    rounds = end
    if WIDENED.overlap:
        rounds = tl.where(begin < end, end + 1, end)
    MASK: tl.constexpr = "branch" if WIDENED.branch else "rest"
    if not WIDENED.branch:
        acc, m, l, v_block_factor, v_largest = dense_range(
            rows, keys, acc, m, l, v_block_factor, v_largest, full, full_end, end, full, full_end,
            SIZES, RULES, WIDENED, BLOCKS, "none",
        )  # fmt: skip
        rounds -= full_end - full
    acc, m, l, v_block_factor, v_largest = dense_range(
        rows, keys, acc, m, l, v_block_factor, v_largest, begin, rounds, end, full, full_end,
        SIZES, RULES, WIDENED, BLOCKS, MASK,
    )  # fmt: skip
    if WIDENED.v_block_factors:
        acc, m, l = multiply_values(acc, m, l, v_block_factor)
    if WIDENED.v_per_key:
        acc, m, l = multiply_values(acc, m, l, v_largest)
    return acc, m, l


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _dense_prefill_kernel(
    q, out, rope, scratch, k_desc, v_desc, k_descale, v_descale, workspace,
    qk_scale, out_scale, soft_cap, num_splits,
    SIZES: tl.constexpr, K_DESCALE: tl.constexpr, V_DESCALE: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    RULES: tl.constexpr, WIDENED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head over the widened keys; programs run fastest over KV heads.

    Args:
        q, out, scratch: `Queries`, `Outputs`, `Scratch`. workspace: `Workspace`.
        rope, ROTARY_DIM, INTERLEAVED: see `load_rotated`; only an append rotates, else ROTARY_DIM is 0.
        k_desc, v_desc: tensor descriptors of the scratch, or None.
        k_descale, v_descale: `Descale`, used where K_DESCALE or V_DESCALE is "head"; see `Stored`.
        qk_scale, out_scale: of the logits (in base 2 unless there is a soft cap) and of the output.
        SIZES, RULES, WIDENED, BLOCKS: `Sizes`, `Rules`, `Widened`, `Blocks`.
    """
    NUM_HEADS: tl.constexpr = SIZES.num_kv_heads * SIZES.gqa_ratio
    pid = program_on_its_xcd(tl.program_id(0), tl.num_programs(0), RULES.order)
    kv_head = pid % SIZES.num_kv_heads
    tile = scheduled_tile(scratch.schedule, pid // SIZES.num_kv_heads)
    seq, kv_len, before = tile.seq, tile.kv_len, tile.before
    if seq < 0:
        return
    tokens, heads, row_mask, within = rows_of(
        tile.q_start, tile.q_len, tile.number, kv_head, SIZES.gqa_ratio, BLOCKS.m
    )
    first = tile.padding if WIDENED.k_block_factors else kv_len * 0
    first_pos = before + tile.number * BLOCKS.m // SIZES.gqa_ratio
    last_pos = before + tl.minimum(((tile.number + 1) * BLOCKS.m - 1) // SIZES.gqa_ratio, tile.q_len - 1)
    if ROTARY_DIM > 0:
        d = tl.arange(0, BLOCKS.dk)
        at = tokens * q.token + heads * q.head
        rotated = load_rotated(q.ptr, at, rope, tokens, row_mask, d, SIZES.head_dim, ROTARY_DIM, INTERLEAVED)
        # Rounded to its own type, as a separate rotation would leave it.
        parts = (rotated.to(q.ptr.dtype.element_ty),)
    else:
        parts = load_query(q.ptr, tokens, heads, row_mask, q.token, q.head, SIZES.head_dim, BLOCKS.dk, 1)
    logit_scale = tl.full([BLOCKS.m], 1.0, tl.float32) * qk_scale
    o_scale = tl.full([BLOCKS.m], 1.0, tl.float32) * out_scale
    if RULES.q_descale:
        logit_scale *= tl.load(q.descale)
    logit_scale = times_head_descale(logit_scale, k_descale, seq, kv_head, K_DESCALE)
    o_scale = times_head_descale(o_scale, v_descale, seq, kv_head, V_DESCALE)
    begin, end, full, full_end = key_range(
        first_pos, last_pos, first, kv_len, RULES.window_left, RULES.window_right, BLOCKS.n
    )
    split = tl.program_id(2)
    if RULES.split:
        begin, end, full, full_end = key_range_of_split(begin, end, full, full_end, split, num_splits)
    high, low, logit_scale = query_terms(parts, logit_scale, RULES, 1)
    soft_cap = soft_cap_of(q, soft_cap, tokens, heads, row_mask, NUM_HEADS, RULES.soft_cap)
    acc = tl.zeros([BLOCKS.m, BLOCKS.d], tl.float32)
    m, l = tl.full([BLOCKS.m], float("-inf"), tl.float32), tl.zeros([BLOCKS.m], tl.float32)
    base = tile.base + kv_head.to(tl.int64) * scratch.rows
    rows = QueryTile(high[0], low[0], logit_scale, soft_cap, before + within)
    keys = WidenedKeys(scratch, k_desc, v_desc, base, first, kv_len)
    acc, m, l = dense_keys(rows, keys, acc, m, l, begin, end, full, full_end, SIZES, RULES, WIDENED, BLOCKS)
    m = shifted_maximum(m, q.shift, tokens, heads, row_mask, NUM_HEADS, RULES.soft_cap)
    write = True
    if RULES.split:
        write, acc, m, l = merge_splits(
            workspace, acc, m, l, pid, split, num_splits, tl.num_programs(0), row_mask,
            RULES.settle, BLOCKS.m, BLOCKS.d,
        )  # fmt: skip
    if write:
        l = sum_of_held_keys(l, tile, within, RULES.window_right)
        write_rows(
            out.ptr, out.scale, out.lse, out.sinks, acc, m, l, o_scale, heads, tokens, row_mask,
            tl.arange(0, BLOCKS.d), out.token, out.head, out.lse_token, SIZES.v_head_dim,
            RULES.sinks, RULES.lse,
        )  # fmt: skip

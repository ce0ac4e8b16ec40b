"""Tile mathematics of paged attention: addresses, scores, the softmax step, output rows."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.paged_cache.kernels.pages import sequence_length
from narrowkv.quant.device import e8m0_to_fp32, share_exponent, widen_parts


class Rows(NamedTuple):
    """Queries and results: `q` and `o` `[tokens, heads, head_dim]`, `lse` `[tokens, heads]` or None.

    `sinks` is a logit per query head, or None. `ranges` `[batch, q_len, 2]`: the keys [begin, end) that each
    query token attends to, or None where the sequence's length and the window say it. The last dimension of
    each is contiguous.
    """

    q: Any
    o: Any
    lse: Any
    sinks: Any
    q_token: Any
    q_head: Any
    o_token: Any
    o_head: Any
    lse_token: Any
    ranges: Any = None


class Workspace(NamedTuple):
    """Partial results of splits, and how many of them have arrived."""

    acc: Any
    ml: Any
    arrived: Any


class Sizes(NamedTuple):
    """Constants: the model's heads and the table's pages.

    Attributes:
        num_kv_heads, gqa_ratio, q_len, head_dim, page_size: sizes; `gqa_ratio` query heads share a KV head.
        ragged: whether the table is ragged.
    """

    num_kv_heads: int
    gqa_ratio: int
    q_len: int
    head_dim: int
    page_size: int
    ragged: bool


class Rules(NamedTuple):
    """Constants of the mathematics and of how keys are divided over programs.

    Attributes:
        compute: the 16-bit type of the matrix products.
        scale_q: Q is brought into float16's range by a power of two.
        split_q: Q is two terms in the compute type.
        native: FP4 keys go to the scaled matrix instruction as they are, with Q as terms in E4M3.
        soft_cap, sinks, lse: whether there are any.
        window_left: keys before itself that a row attends to, or -1.
        wide_address: element offsets in the cache need 64 bits.
        even: an even share of all keys a program, else a number of splits that the sequence alone decides.
        partial: whether a sequence can have several splits.
        can_merge: whether the last split to arrive can merge them in this launch.
    """

    compute: Any
    scale_q: bool
    split_q: bool
    native: bool
    soft_cap: bool
    sinks: bool
    lse: bool
    window_left: int
    wide_address: bool
    even: bool
    partial: bool
    can_merge: bool


class Blocks(NamedTuple):
    """Constants: rows and keys of a tile, `head_dim` rounded up for V, and for Q and K."""

    m: int
    n: int
    d: int
    dk: int


@triton.jit
def attended_span(ranges, seq, mask, kv_len, Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr):
    """The keys [first, end) that the query tokens of a sequence attend to together, within its length."""
    if ranges is None:
        if WINDOW_LEFT < 0:
            return kv_len * 0, kv_len
        else:
            return tl.maximum(kv_len - Q_LEN - WINDOW_LEFT, 0), kv_len
    else:
        at = ranges + seq.to(tl.int64) * (2 * Q_LEN)
        first = tl.maximum(tl.load(at, mask=mask, other=0), 0)
        end = tl.minimum(tl.load(at + (2 * Q_LEN - 1), mask=mask, other=0), kv_len)
        some = first < end
        return tl.where(some, first, 0), tl.where(some, end, 0)


@triton.jit
def row_limits(ranges, seq, token, row_mask, kv_len, first, end, Q_LEN: tl.constexpr,
               WINDOW_LEFT: tl.constexpr):  # fmt: skip
    """The first and the last key that rows of query tokens `token` attend to, and which keys all rows do.

    Returns:
        `(low, high, full_first, full_end)`: [M] both limits; keys [full_first, full_end) are every row's.
    """
    if ranges is None:
        high = kv_len - Q_LEN + token
        return high - WINDOW_LEFT, high, first + Q_LEN, kv_len - Q_LEN
    else:
        at = ranges + (seq.to(tl.int64) * Q_LEN + token) * 2
        low = tl.maximum(tl.load(at, mask=row_mask, other=0), first)
        high = tl.minimum(tl.load(at + 1, mask=row_mask, other=2**31 - 1), end) - 1
        return low, high, tl.max(low, 0), tl.min(high, 0) + 1


@triton.jit
def tiles_of(first, end, BLOCK_N: tl.constexpr):
    """The first of the key tiles that hold keys [first, end), and their number."""
    first = first // BLOCK_N
    return first, tl.cdiv(end, BLOCK_N) - first


# Sequences whose lengths a program reads at once.
_SEQUENCES = tl.constexpr(128)


@triton.jit
def tiles_of_some(
    table, ranges, first, batch, Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RAGGED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sequences from `first` on, and the key tiles of each; none past the batch."""
    seqs = first + tl.arange(0, _SEQUENCES)
    lens = sequence_length(table, seqs, seqs < batch, PAGE_SIZE, RAGGED)
    first_key, end = attended_span(ranges, seqs, seqs < batch, lens, Q_LEN, WINDOW_LEFT)
    _, tiles = tiles_of(first_key, end, BLOCK_N)
    return seqs, tiles


@triton.jit
def even_split(
    table, ranges, batch, num_units, wanted, BY_UNIT: tl.constexpr,
    Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sequence of a unit, or the `wanted` sequence itself: its first unit and its number of splits.

    Sequences are cut in splits of at most `size` tiles, and sum(ceil(t / size)) <= total / size + batch, so
    size = total / (num_units - batch) never needs more units than there are. Every program computes this
    alike. A unit past the last one has no splits.
    """
    total = batch * 0
    for first in range(0, batch, _SEQUENCES):
        _, tiles = tiles_of_some(table, ranges, first, batch, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N)
        total += tl.sum(tiles, 0)
    size = tl.maximum(tl.cdiv(total, tl.maximum(num_units - batch, 1)), 1)
    seq, first_unit, num_splits, units_before = batch * 0, batch * 0, batch * 0, batch * 0
    for first in range(0, batch, _SEQUENCES):
        seqs, tiles = tiles_of_some(
            table, ranges, first, batch, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N
        )
        # A sequence with no keys still gets one unit, which writes its zeros.
        splits = tl.where(seqs < batch, tl.maximum(tl.cdiv(tiles, size), 1), 0)
        ends = units_before + tl.cumsum(splits, 0)
        if BY_UNIT:
            own = (ends > wanted) & (ends - splits <= wanted)
        else:
            own = seqs == wanted
        seq += tl.sum(tl.where(own, seqs, 0), 0)
        first_unit += tl.sum(tl.where(own, ends - splits, 0), 0)
        num_splits += tl.sum(tl.where(own, splits, 0), 0)
        units_before += tl.sum(splits, 0)
    return seq, first_unit, num_splits


@triton.jit
def splits_of_sequence(num_tiles, tiles_per_split, max_splits):
    """Splits of a sequence where nothing but its own key tiles decides."""
    return tl.maximum(tl.minimum(tl.cdiv(num_tiles, tiles_per_split), max_splits), 1)


@triton.jit
def load_query(
    q_ptr, tokens, heads, row_mask, stride_qt, stride_qh,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Rows of Q as a tuple: part i holds columns i, i + PARTS, ... [M, BLOCK_D / PARTS], as `widen_parts`."""
    rows = tokens[:, None] * stride_qt + heads[:, None] * stride_qh
    parts = ()
    for i in tl.static_range(PARTS):
        d = tl.arange(0, BLOCK_D // PARTS) * PARTS + i
        parts = parts + (
            tl.load(q_ptr + rows + d[None, :], mask=row_mask[:, None] & (d < HEAD_DIM)[None, :], other=0.0),
        )
    return parts


@triton.jit
def _largest(q, PARTS: tl.constexpr):
    """The largest finite magnitude of a tile."""
    top = 0.0
    for i in tl.static_range(PARTS):
        magnitude = tl.abs(q[i].to(tl.float32))
        top = tl.maximum(top, tl.max(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1), 0))
    return top


@triton.jit
def _power_of_two_to(top, EXPONENT: tl.constexpr):
    """The power of two that brings `top` into [2**EXPONENT, 2**(EXPONENT + 1)), and its inverse."""
    exponent = top.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 16), 253)
    down = ((127 + EXPONENT + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    return down, ((exponent - EXPONENT) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_to_fp16(q, PARTS: tl.constexpr):
    """Q times the power of two that puts its largest element in [2**14, 2**15), and the inverse.

    One for the tile: a row 2**29 below the largest would begin to lose bits, and its logits are as small.
    """
    down, up = _power_of_two_to(_largest(q, PARTS), 14)
    scaled = ()
    for i in tl.static_range(PARTS):
        scaled = scaled + ((q[i].to(tl.float32) * down).to(tl.float16),)
    return scaled, up


@triton.jit
def split_to_e4m3(q, TERMS: tl.constexpr):
    """Q times a power of two as E4M3 terms, the sum of terms[i] * 2**(-5 * i), and the inverse of the power.

    Two terms hold all eight bits of bfloat16, three all eleven of float16. The largest element comes to lie
    in [2**7, 2**8), and every remainder times 32 at or below 2**8.
    """
    down, up = _power_of_two_to(_largest((q,), 1), 7)
    rest = q.to(tl.float32) * down
    terms = ()
    for _ in tl.static_range(TERMS):
        term = rest.to(tl.float8e4nv)
        terms = terms + (term,)
        rest = (rest - term.to(tl.float32)) * 32.0
    return terms, up


@triton.jit
def split_query(q, DTYPE: tl.constexpr, SPLIT_Q: tl.constexpr, PARTS: tl.constexpr):
    """Q in the compute type, and what that leaves of it where SPLIT_Q asks for a second term."""
    high, low = (), ()
    for i in tl.static_range(PARTS):
        high = high + (q[i].to(DTYPE),)
        if SPLIT_Q:
            low = low + ((q[i].to(tl.float32) - q[i].to(DTYPE).to(tl.float32)).to(DTYPE),)
        else:
            low = low + (high[i],)  # not used
    return high, low


@triton.jit
def widen_tile(words, scale, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr,
               PARTS: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """A stored tile as parts in DTYPE, and the factor [N] of each key that is still to be applied."""
    if KIND == "e8m0_group":
        shared, rest = share_exponent(scale)  # [N], [N, G]
        N: tl.constexpr = rest.shape[0]
        GROUPS: tl.constexpr = rest.shape[1]
        RUN: tl.constexpr = 32 // PARTS
        rest = tl.reshape(tl.broadcast_to(rest[:, :, None], [N, GROUPS, RUN]), [N, GROUPS * RUN])
        raw = widen_parts(words, FORMAT, ROUTE, tl.float16, PARTS)
        parts = ()
        for i in tl.static_range(PARTS):
            parts = parts + ((raw[i] * rest).to(DTYPE),)
        return parts, e8m0_to_fp32(shared)
    else:
        return widen_parts(words, FORMAT, ROUTE, DTYPE, PARTS), scale


@triton.jit
def scores(q, q_low, k, SPLIT_Q: tl.constexpr, PARTS: tl.constexpr):
    """Q @ K^T [M, N], summed over the parts."""
    s = tl.dot(q[0], tl.trans(k[0]))
    if SPLIT_Q:
        s = tl.dot(q_low[0], tl.trans(k[0]), s)
    for i in tl.static_range(1, PARTS):
        s = tl.dot(q[i], tl.trans(k[i]), s)
        if SPLIT_Q:
            s = tl.dot(q_low[i], tl.trans(k[i]), s)
    return s


@triton.jit
def scores_fp4_native(q_terms, k_words, k_scale, TERMS: tl.constexpr):
    """Q @ K^T [M, N] by the scaled matrix instruction: E4M3 rows by packed E2M1 keys, E8M0 scales per 32.

    q_terms: of `split_to_e4m3`; k_words: [N, D / 2]; k_scale: [N, D / 32].
    """
    M: tl.constexpr = q_terms[0].shape[0]
    GROUPS: tl.constexpr = k_scale.shape[1]
    k_words = tl.trans(k_words)
    # 127 is 2**0.
    s = tl.dot_scaled(q_terms[0], tl.full([M, GROUPS], 127, tl.uint8), "e4m3", k_words, k_scale, "e2m1")
    for i in tl.static_range(1, TERMS):
        scale = tl.full([M, GROUPS], 127 - 5 * i, tl.uint8)
        s = tl.dot_scaled(q_terms[i], scale, "e4m3", k_words, k_scale, "e2m1", s)
    return s


@triton.jit
def attended_keys(n, low, high, HAS_LOW: tl.constexpr):
    """[M, N]: keys of [low, high] of each row; without HAS_LOW all keys up to `high`."""
    keep = n[None, :] <= high[:, None]
    if HAS_LOW:
        keep = keep & (n[None, :] >= low[:, None])
    return keep


@triton.jit
def confine_nonfinite(p, v, attended, PARTS: tl.constexpr):
    """Moves NaN and Inf of V into P, as NaN, of the rows that attend: 0 * NaN would reach every row."""
    # [M, N], [N, D]; one in any column makes the whole output row NaN.
    bad = tl.zeros([p.shape[1]], tl.int32)
    clean = ()
    for i in tl.static_range(PARTS):
        finite = tl.abs(v[i].to(tl.float32)) < float("inf")
        bad += tl.max((~finite).to(tl.int32), 1)
        clean = clean + (tl.where(finite, v[i], 0.0).to(v[i].dtype),)
    return tl.where(attended & (bad > 0)[None, :], float("nan"), p), clean


@triton.jit
def accumulate(acc, correction, p, v, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """Acc * correction + P @ V of each part.

    Float16 keeps eleven bits of P, enough; bfloat16 takes two terms.
    """
    p_high = p.to(DTYPE)
    p_low = (p - p_high.to(tl.float32)).to(DTYPE)
    out = ()
    for i in tl.static_range(PARTS):
        kept = acc[i] * correction[:, None]
        if tl.bfloat16 == DTYPE:
            kept = tl.dot(p_low, v[i], kept)
        out = out + (tl.dot(p_high, v[i], kept),)
    return out


@triton.jit
def zeros_in_parts(M: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """PARTS accumulators [M, D / PARTS]."""
    out = ()
    for _ in tl.static_range(PARTS):
        out = out + (tl.zeros([M, D // PARTS], tl.float32),)
    return out

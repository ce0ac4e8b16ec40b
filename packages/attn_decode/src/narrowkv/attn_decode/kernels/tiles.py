"""Structs of decode's kernels, and which split of which sequence a program attends to."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.paged_cache.kernels.pages import sequence_length


class Rows(NamedTuple):
    """Queries and results.

    `q` is `[tokens, heads, head_dim]`, `o` `[tokens, heads, v_head_dim]`, `lse` `[tokens, heads]` or None.
    `sinks` is a logit per query head, or None. `ranges` `[batch, q_len, 2]`: the keys [begin, end) that each
    query token attends to, or None where the sequence's length and the window say it. `tree`
    `[batch, q_len]`: bits that say which of the last q_len keys a query token attends to, or None. The last
    dimension of each is contiguous.

    `k_balance` `[num_kv_heads, head_dim]`: what Q is multiplied by, or None. `k_offset`, of the same shape:
    what the stored keys lack, or None; logits are `offset_scale` times q.k_offset larger than those of the
    stored keys, natural ones with a soft cap, else in base 2. It is only given where a soft cap, sinks or an
    lse see that.

    `q_descale`: one number that FP8 queries are multiplied by, or None. `o_scale`: one number that FP8
    outputs are still to be multiplied by, or None.
    """

    q: Any
    q_token: Any
    q_head: Any
    o: Any
    lse: Any
    sinks: Any
    o_token: Any
    o_head: Any
    lse_token: Any
    ranges: Any = None
    tree: Any = None
    k_balance: Any = None
    k_offset: Any = None
    offset_scale: Any = None
    q_descale: Any = None
    o_scale: Any = None


class PartialResults(NamedTuple):
    """Partial results of splits, and how many of them have arrived."""

    acc: Any
    ml: Any
    arrived: Any


class Sizes(NamedTuple):
    """Constants: the model's heads and the table's pages.

    Attributes:
        num_kv_heads, gqa_ratio, q_len, head_dim, page_size: sizes; `gqa_ratio` query heads share a KV head.
        ragged: whether the table is ragged.
        v_head_dim: channels of V and of the output; `head_dim` is Q's and K's.
    """

    num_kv_heads: int
    gqa_ratio: int
    q_len: int
    head_dim: int
    page_size: int
    ragged: bool
    v_head_dim: int


class Rules(NamedTuple):
    """Constants of the mathematics and of how keys are divided over programs.

    Attributes:
        compute: the 16-bit type of the matrix products.
        scale_q: Q is brought into float16's range by a power of two.
        split_q: Q is two terms in the compute type.
        native: FP4 keys go to the scaled matrix instruction as they are, with Q as terms in E4M3.
        soft_cap, sinks, lse: whether there are any.
        window_left: how many keys before its own position a row attends to, or -1.
        int64_offsets: element offsets in the cache need 64 bits.
        even: an even share of all keys a program, else a number of splits that the sequence alone decides.
        partial: whether a sequence can have several splits.
        can_merge: whether the last split to arrive can merge them in this launch.
        early: the launch that merges begins before the one that attends has ended.
        q_in_shared: products take Q from shared memory, not from registers.
        acc_parts: parts that V is multiplied in, 1 or `Stored.parts`.
        fp8, clean, p_scale: as in the rules of prefill; decode widens every cache.
        lazy: sums of values are multiplied only in steps that raise a maximum.
        once: factors of keys are `computed_once`.
        prefetch: "pages", page ids are located one tile ahead where no row needs a mask of its own, too;
            "tile", keys, values and scales are loaded one tile ahead there; or "".
        butterflies: how Q is rotated, as keys were; see `rotate_parts`.
        registers: the loop is `attend_in_registers`, which loads the cache to registers without shared
            memory.
        lanes: the loop is `attend_in_lanes`, in which lanes load what they multiply.
        kept_parts: in how many parts of V's columns partial results are stored, one after the other; 1: the
            columns are in order.
        q_format: the FP8 format of Q, which is loaded as bytes; "" for 16-bit queries.
        order: see `program_on_its_xcd`; an `XcdOrder`, or None.
    """

    compute: Any
    scale_q: bool
    split_q: bool
    native: bool
    soft_cap: bool
    sinks: bool
    lse: bool
    window_left: int
    int64_offsets: bool
    even: bool
    partial: bool
    can_merge: bool
    acc_parts: int
    q_in_shared: bool = False
    fp8: Any = None
    clean: bool = False
    p_scale: float = 1.0
    early: bool = False
    lazy: bool = False
    once: bool = False
    prefetch: str = ""
    butterflies: int = 0
    registers: bool = False
    lanes: bool = False
    kept_parts: int = 1
    q_format: str = ""
    order: Any = None


class Blocks(NamedTuple):
    """Constants: rows and keys of a tile, `v_head_dim` rounded up, and `head_dim` rounded up for Q and K."""

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
def row_limits(io, seq, token, row_mask, kv_len, first, end, Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr):
    """The keys that rows of query tokens `token` attend to, and which keys all rows attend to.

    Returns:
        `(low, high, full_first, full_end)`: [M] the first and the last key, of which a tree may leave out
        some; keys [full_first, full_end) are every row's.
    """
    at = seq.to(tl.int64) * Q_LEN + token
    tail = kv_len - Q_LEN
    if io.ranges is None:
        low = tail + token - WINDOW_LEFT
        high = tail + token if io.tree is None else tl.zeros_like(token) + (kv_len - 1)
        full_first = first if WINDOW_LEFT < 0 else first + Q_LEN
        full_end = tail + 1 if io.tree is None else tail
    else:
        low = tl.maximum(tl.load(io.ranges + at * 2, mask=row_mask, other=0), first)
        high = tl.minimum(tl.load(io.ranges + at * 2 + 1, mask=row_mask, other=2**31 - 1), end) - 1
        full_first = tl.max(low, 0)
        full_end = tl.min(high, 0) + 1
        if io.tree is not None:
            full_end = tl.minimum(full_end, tail)
    return low, high, full_first, full_end


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
    RAGGED: tl.constexpr, BLOCK_N: tl.constexpr, zeros=None,
):  # fmt: skip
    """Sequences from `first` on, and the key tiles of each; none past the batch; zeros: see `even_split`."""
    seqs = first + tl.arange(0, _SEQUENCES)
    if zeros is not None:
        seqs += zeros
    lens = sequence_length(table, seqs, seqs < batch, PAGE_SIZE, RAGGED)
    first_key, end = attended_span(ranges, seqs, seqs < batch, lens, Q_LEN, WINDOW_LEFT)
    _, tiles = tiles_of(first_key, end, BLOCK_N)
    return seqs, tiles


# Sizes of a split that a program compares.
_CANDIDATES = tl.constexpr(8)
# What a program's start and its partial result take, in times of a key tile.
_START = tl.constexpr(3.0)


@triton.jit
def splits_in(tiles, per_tile):
    """Splits of sequences with so many key tiles, at least one; per_tile: one over a split's tiles.

    The margin makes up for the rounding of `per_tile`: exact multiples get no split more.
    """
    return tl.maximum(tl.ceil(tiles.to(tl.float32) * per_tile - 0.001), 1.0).to(tl.int32)


@triton.jit
def split_size(
    table, ranges, batch, num_items, slots, total, longest, Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr, zeros=None,
):  # fmt: skip
    """Of key tiles of a split that divide the longest sequence evenly, those with which splits end first.

    They make at most `num_items` splits, which are not fewer than the batch, and run in waves of `slots`.
    """
    most = tl.cdiv(longest, tl.maximum(tl.cdiv(total, num_items), 1))
    sizes = tl.cdiv(longest, 1 + tl.arange(0, _CANDIDATES) * (most - 1) // (_CANDIDATES - 1))
    per_tile = 1.0 / sizes.to(tl.float32)
    items = tl.zeros([_CANDIDATES], tl.int32)
    if zeros is not None:
        items = tl.sum(items[:, None] + zeros[None, :], 1)
    for first in range(0, batch, _SEQUENCES):
        seqs, tiles = tiles_of_some(
            table, ranges, first, batch, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N, zeros
        )
        splits = splits_in(tiles[None, :], per_tile[:, None])  # [_CANDIDATES, _SEQUENCES]
        items += tl.sum(tl.where((seqs < batch)[None, :], splits, 0), 1)
    cost = tl.cdiv(items, slots).to(tl.float32) * (sizes.to(tl.float32) + _START)
    cost = tl.where(items <= num_items, cost, float("inf"))
    return tl.min(tl.where(cost == tl.min(cost, 0), sizes, longest), 0)


@triton.jit
def even_split(
    table, ranges, batch, num_items, slots, wanted, BY_ITEM: tl.constexpr,
    Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr, zeros=None,
):  # fmt: skip
    """The sequence of an item, or the `wanted` sequence itself: its first item and its number of splits.

    Sequences are cut in splits of at most `size` tiles: `split_size`, or without `slots` a size that never
    needs more items than there are, since sum(ceil(t / size)) <= total / size + batch. Every program computes
    this alike. An item past the last one has no splits.

    zeros: Gluon names the layout of each tensor, so its kernels give two tensors of `_SEQUENCES` zeros, in
    the layouts of vectors and of rows of `[_CANDIDATES, _SEQUENCES]`; None in Triton.
    """
    line, columns = None, None
    if zeros is not None:
        line, columns = zeros
    total, longest = batch * 0, batch * 0
    for first in range(0, batch, _SEQUENCES):
        _, tiles = tiles_of_some(
            table, ranges, first, batch, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N, line
        )
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    if slots is None:
        size = tl.maximum(tl.cdiv(total, tl.maximum(num_items - batch, 1)), 1)
    else:
        size = split_size(
            table, ranges, batch, num_items, slots, total, tl.maximum(longest, 1), Q_LEN, WINDOW_LEFT,
            PAGE_SIZE, RAGGED, BLOCK_N, columns,
        )  # fmt: skip
    per_tile = 1.0 / size.to(tl.float32)
    seq, first_item, num_splits, items_before = batch * 0, batch * 0, batch * 0, batch * 0
    for first in range(0, batch, _SEQUENCES):
        seqs, tiles = tiles_of_some(
            table, ranges, first, batch, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N, line
        )
        # A sequence with no keys still gets one item, which writes its zeros.
        splits = tl.where(seqs < batch, splits_in(tiles, per_tile), 0)
        ends = items_before + tl.cumsum(splits, 0)
        if BY_ITEM:
            own = (ends > wanted) & (ends - splits <= wanted)
        else:
            own = seqs == wanted
        seq += tl.sum(tl.where(own, seqs, 0), 0)
        first_item += tl.sum(tl.where(own, ends - splits, 0), 0)
        num_splits += tl.sum(tl.where(own, splits, 0), 0)
        items_before += tl.sum(splits, 0)
    return seq, first_item, num_splits


@triton.jit
def splits_of_sequence(num_tiles, tiles_per_split, most_splits):
    """Splits of a sequence if only its own key tiles decide; `tiles_per_split` None is 1."""
    if tiles_per_split is not None:
        num_tiles = tl.cdiv(num_tiles, tiles_per_split)
    return tl.maximum(tl.minimum(num_tiles, most_splits), 1)

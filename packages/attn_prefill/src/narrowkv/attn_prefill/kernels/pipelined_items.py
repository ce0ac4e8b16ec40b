"""Which tiles, heads and splits a program of Hopper's prefill takes, and the order of its key tiles."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from narrowkv.attn_prefill.kernels import rows
from narrowkv.runtime.attention import masks
from narrowkv.runtime.launch.gluon import in_gluon

key_range = in_gluon(masks.key_range)
key_range_of_split = in_gluon(masks.key_range_of_split)
scheduled_tile = in_gluon(rows.scheduled_tile)


class Work(NamedTuple):
    """What all programs share: the schedule, its tiles, their splits, rows of the scratch in a head.

    factor_flag: whether a block of V or a key has a factor, and how many programs have handled that; or None.
    """

    schedule: Any
    num_tiles: Any
    num_splits: Any
    rows: Any
    factor_flag: Any


class WorkItem(NamedTuple):
    """A pair of a tile and a head, and a split of its keys."""

    pair: Any
    split: Any


class Order(NamedTuple):
    """Key tiles one after the other: the one at row `start`, then last - 1, last - 2, ... without `skipped`.

    stop: keys from this row on do not count in the first of them.
    """

    start: Any
    stop: Any
    last: Any
    skipped: Any


class Item(NamedTuple):
    """A place with what is there: a tile, a head, key tiles [begin, end), no mask for [full, full_end).

    order: how these come one after the other. usual: whether they are attended to here, and not by
    `attend_with_factors`.
    """

    tile: Any
    kv_head: Any
    place: Any
    begin: Any
    end: Any
    full: Any
    full_end: Any
    order: Any
    usual: Any


class PipelinedRules(NamedTuple):
    """Constants of `_pipelined_prefill_kernel`.

    Attributes:
        k_descale, v_descale: see `Stored`.
        pad: a sequence's keys of before a chunk begin ("first") or end ("last") with rows that are no keys,
            so that they take whole blocks; None: there is no chunk.
        two_scales: logits of the chunk's own keys are multiplied by `new_scale`.
        v_block_factors: blocks of V are still to be multiplied by `scratch.v_block_factor`; all are 1 unless
            `scratch.factor_flag` tells otherwise.
        window_left, window_right, sinks, lse, split: as in `Rules`.
        block_m, block_n, stages: rows and keys of a tile, and key tiles that are copied ahead.
    """

    k_descale: str
    v_descale: str
    pad: str | None
    two_scales: bool
    v_block_factors: bool
    window_left: int
    window_right: int
    sinks: bool
    lse: bool
    split: bool
    block_m: int
    block_n: int
    stages: int


@gluon.jit
def item_at(
    work, turn, NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, PAD: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The item that this program takes at a turn; there are `rounds_of` of them."""
    place, kv_head, tile = lookup(work, turn, NUM_KV_HEADS, SPLIT)
    usual = turn >= 0  # true, and of the type of what is loaded
    if work.factor_flag is not None:
        usual = gl.load(work.factor_flag) == 0
    begin, end, full, full_end = keys_of(tile, GQA_RATIO, PAD, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_M, BLOCK_N)
    if SPLIT:
        begin, end, full, full_end = key_range_of_split(
            begin, end, full, full_end, place.split, work.num_splits
        )
    # Places past the last tile hold none.
    end = gl.where((tile.seq >= 0) & usual, end, begin)
    order = order_of(tile, begin, end, PAD, BLOCK_N)
    full, full_end = gl.minimum(full, end), gl.minimum(full_end, end)
    return Item(tile, kv_head, place, begin, end, full, full_end, order, usual)


@gluon.jit
def order_of(tile, begin, end, PAD: gl.constexpr, BLOCK_N: gl.constexpr):
    """The last of key tiles [begin, end) first, which has the mask, then down.

    A tile with rows that are no keys comes before it, since only those rows need a mask there. If they are
    its first rows, it is read from its first key on, and keys of the next tile that are read too are masked.
    """
    order = Order((end - 1) * BLOCK_N, tile.kv_len, end - 1, -1)
    if PAD == "first":
        padded = (begin == 0) & (tile.padding > 0)
        order = Order(
            gl.where(padded, tile.padding, order.start),
            gl.where(padded, BLOCK_N, order.stop),
            gl.where(padded, end, order.last),
            -1,
        )
    if PAD == "last":
        stop = tile.before
        number = stop // BLOCK_N - 1
        padded = (begin <= number) & (number < end) & (tile.padding > 0)
        order = Order(
            gl.where(padded, number * BLOCK_N, order.start),
            gl.where(padded, stop - tile.padding, order.stop),
            gl.where(padded, end, order.last),
            gl.where(padded, number, -1),
        )
    return order


@gluon.jit
def row_of(order, i, PAD: gl.constexpr, BLOCK_N: gl.constexpr):
    """The first row of key tile number `i` in this order."""
    number = order.last - i
    if PAD == "last":
        number -= (number <= order.skipped).to(gl.int32)
    return gl.where(i == 0, order.start, number * BLOCK_N)


@gluon.jit
def keys_of(
    tile, GQA_RATIO: gl.constexpr, PAD: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Key tiles [begin, end) that a tile's rows see, and [full, full_end) that need no mask."""
    first = tile.padding
    if PAD != "first":
        first *= 0
    first_pos = tile.before + tile.number * BLOCK_M // GQA_RATIO
    last_pos = tile.before + gl.minimum(((tile.number + 1) * BLOCK_M - 1) // GQA_RATIO, tile.q_len - 1)
    return key_range(first_pos, last_pos, first, tile.kv_len, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N)


@gluon.jit
def lookup(work, turn, NUM_KV_HEADS: gl.constexpr, SPLIT: gl.constexpr):
    """The place that this program takes at a turn, its head and its tile; the longest tiles come first."""
    pair = item_number(turn)
    split = 0
    if SPLIT:
        pairs = work.num_tiles * NUM_KV_HEADS
        split = pair // pairs
        pair = pair % pairs
    return WorkItem(pair, split), pair % NUM_KV_HEADS, scheduled_tile(work.schedule, pair // NUM_KV_HEADS)


@gluon.jit
def rounds_of(work, NUM_KV_HEADS: gl.constexpr):
    """How many items this program takes."""
    programs = gl.num_programs(0)
    items = work.num_tiles * NUM_KV_HEADS * work.num_splits
    rounds = items // programs
    left = items - rounds * programs
    return rounds + (item_number(rounds) < rounds * programs + left).to(gl.int32)


@gluon.jit
def item_number(turn):
    """The item that this program takes at a turn; odd turns go the other way round, which levels the sums."""
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return turn * programs + place

"""The dense attention of Hopper: one warp copies keys, two warpgroups attend, each at its own pace.

Each warpgroup holds half a tile's rows. It issues the scores of the next key tile, then P @ V of the current
one, and computes the next softmax while the matrix unit works: the overlap of FlashAttention-3 (Shah et al.,
2024). Programs stay and take tile after tile, so that copies of a tile's first keys run during the end of the
tile before. Written in Gluon, since plain Triton schedules by itself; the functions around the loop are plain
Triton's own.
Where V is out of float16's range, one warpgroup attends to all of the launch instead, step by step.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from narrowkv.attn_prefill.kernels import rows
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.kernels import pages
from narrowkv.runtime.attention import masks, results, softmax
from narrowkv.runtime.launch.gluon import in_gluon

await_previous_launch = in_gluon(rows.await_previous_launch)
first_id = in_gluon(pages.first_id)
float_in_scalar_register = in_gluon(rows.float_in_scalar_register)
key_range = in_gluon(masks.key_range)
key_range_of_split = in_gluon(masks.key_range_of_split)
locate_keys = in_gluon(pages.locate_keys)
merge_splits = in_gluon(results.merge_splits)
rows_of = in_gluon(rows.rows_of)
scheduled_tile = in_gluon(rows.scheduled_tile)
softmax_step = in_gluon(softmax.softmax_step)
visible_range = in_gluon(masks.visible_range)
output_rows = in_gluon(results.output_rows)
times_head_descale = in_gluon(pages.times_head_descale)
write_lse = in_gluon(results.write_lse)

# The names of Triton 3.8 and later, and those before.
all_warps = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_lines = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class Ring(NamedTuple):
    """Key tiles in shared memory `[stages, BLOCK_N, head_dim]`, and who may use a stage next.

    pieces: the same memory as what one copy from a page fills, `[stages * pieces of a tile, rows, 64]`; where
    there are no pages, the tiles.
    """

    tiles: Any
    pieces: Any
    filled: Any
    emptied: Any


class Pages(NamedTuple):
    """Keys where the cache has them: its pages seen as one matrix, in which a head's keys are rows.

    page_ids to row_step: as in `Table`. page, head: rows from a page, or a head, to the next.
    columns: from a head to the next. (Flat, since Triton 3.6 takes no tuple in a tuple if a number in it is
    one.)
    """

    page_ids: Any
    row: Any
    num_ids: Any
    num_pages: Any
    max_pages: Any
    column: Any
    row_step: Any
    page: Any
    head: Any
    columns: Any


class Work(NamedTuple):
    """What all programs share: the schedule, its tiles, their splits, rows of the scratch in a head.

    unusual: whether any block of V is short of a factor, and how many programs have seen to it, or None.
    """

    schedule: Any
    num_tiles: Any
    num_splits: Any
    rows: Any
    unusual: Any


class Scales(NamedTuple):
    """What logits of keys in the cache and of the chunk's own keys, and the output, are short of.

    k_descale, v_descale: for each head of the cache besides, where there are any.
    """

    old: Any
    new: Any
    out: Any
    k_descale: Any
    v_descale: Any


class Place(NamedTuple):
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
    `attend_carefully`.
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
        v_in_units: blocks of V are still to be multiplied by `scratch.v_unit`; all are 1 unless
            `scratch.unusual` tells otherwise.
        window_left, window_right, sinks, lse, split: as in `Rules`.
        block_m, block_n, stages: rows and keys of a tile, and key tiles that are copied ahead.
    """

    k_descale: str
    v_descale: str
    pad: str | None
    two_scales: bool
    v_in_units: bool
    window_left: int
    window_right: int
    sinks: bool
    lse: bool
    split: bool
    block_m: int
    block_n: int
    stages: int


def key_descriptor(keys: torch.Tensor, block_n: int) -> TensorDescriptor:
    """How to copy `block_n` rows of `[heads, rows, head_dim]`, heads one after the other."""
    flat = keys.view(-1, keys.shape[-1])
    return _descriptor(flat, list(flat.shape), list(flat.stride()), [block_n, keys.shape[-1]])


class PageMatrix(NamedTuple):
    """A 16-bit cache's keys as one matrix, of which 64 columns of a page and head are copied at a time.

    Attributes:
        descriptor: how to copy them.
        page, head, columns: as in `Pages`.
    """

    descriptor: TensorDescriptor
    page: int
    head: int
    columns: int

    def pages(self, table: Any) -> Pages:
        """The pages that a table names; sizes that serving changes are arguments of their own."""
        return Pages(
            table.page_ids, table.row, None, table.num_pages, None, table.column, table.row_step, self.page,
            self.head, self.columns,
        )  # fmt: skip


def page_matrix(cache: PagedKVCache, block_n: int) -> PageMatrix | None:
    """How to copy a 16-bit cache's keys out of its pages.

    None where keys do not lie so; where a page is no whole units of eight rows, as shared memory is swizzled
    by; and where a tile of `block_n` keys is no whole pages, nor a page whole tiles.
    """
    keys, strides, heads = cache.k, cache.k_strides, cache.num_kv_heads
    rows, token = min(cache.page_size, block_n), strides.token
    whole = rows % 8 == 0 and block_n % rows == 0 and cache.page_size % rows == 0
    if strides.vec or not whole or token % 8 or strides.page % token or keys.data_ptr() % 16:
        return None
    if strides.head < token:  # heads lie side by side in a token's row
        head, columns = 0, strides.head
    elif strides.head % token == 0:  # each head has rows of its own
        head, columns = strides.head // token, 0
    else:
        return None
    page = strides.page // token
    height = (cache.num_pages - 1) * page + (heads - 1) * head + cache.page_size
    width = (heads - 1) * columns + cache.head_dim
    if not 0 < height < 2**31:
        return None
    return PageMatrix(_descriptor(keys, [height, width], [token, 1], [rows, 64]), page, head, columns)


def _descriptor(
    keys: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """How to copy blocks of 16-bit rows into shared memory as the matrix unit reads it."""
    dtype = gl.bfloat16 if keys.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(keys, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@gluon.constexpr_function
def product_layout(columns):
    """How a warpgroup holds a product of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def line_layout(head_dim):
    """How a warpgroup holds rows that come from memory, or go there, as whole lines."""
    return gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])


@gluon.jit
def item_at(
    work, turn, NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, PAD: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The item that this program takes at a turn; there are `rounds_of` of them."""
    place, kv_head, tile = lookup(work, turn, NUM_KV_HEADS, SPLIT)
    usual = turn >= 0  # true, and of the type of what is loaded
    if work.unusual is not None:
        usual = gl.load(work.unusual) == 0
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

    Before it comes a tile that has rows that are no keys, which is all that there needs a mask. Where they
    are its first ones it is read from its first key on, and what comes along of the next tile is masked.
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
    """The place that this program takes at a turn, its head and its tile; by the schedule work falls."""
    pair = item_number(turn)
    split = 0
    if SPLIT:
        pairs = work.num_tiles * NUM_KV_HEADS
        split = pair // pairs
        pair = pair % pairs
    return Place(pair, split), pair % NUM_KV_HEADS, scheduled_tile(work.schedule, pair // NUM_KV_HEADS)


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


@gluon.jit
def copy_keys(
    work, k_desc, v_desc, page_desc, pages, k_ring, v_ring,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, PAGE_SIZE: gl.constexpr, RAGGED: gl.constexpr,
    PAD: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the key tiles of all items in the order in which they are attended to."""
    count = 0
    for turn in range(rounds_of(work, NUM_KV_HEADS)):
        item = item_at(
            work, turn, NUM_KV_HEADS, GQA_RATIO, PAD, WINDOW_LEFT, WINDOW_RIGHT, SPLIT,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        base = item.kv_head * work.rows + item.tile.base
        if page_desc is not None:
            row = row_of(item.order, 0, PAD, BLOCK_N)
            places = places_of(
                pages, page_desc, item.tile, item.kv_head, row, PAGE_SIZE, RAGGED, PAD, BLOCK_N
            )
        for i in range(item.end - item.begin):
            row = row_of(item.order, i, PAD, BLOCK_N)
            if page_desc is None:
                copy_tile(k_desc, base + row, k_ring, count, STAGES)
            else:
                if row < rows_in_pages(item.tile, PAD):
                    copy_pieces(page_desc, places, item.kv_head * pages.columns, k_ring, count, STAGES)
                else:
                    copy_tile(k_desc, base + row, k_ring, count, STAGES)
                # Where the next tile's keys lie is asked for before the wait for room.
                row_ahead = row_of(item.order, i + 1, PAD, BLOCK_N)
                places = places_of(
                    pages, page_desc, item.tile, item.kv_head, row_ahead, PAGE_SIZE, RAGGED, PAD, BLOCK_N
                )
            copy_tile(v_desc, base + row, v_ring, count, STAGES)
            count += 1


@gluon.jit
def copy_tile(desc, row, ring, count, STAGES: gl.constexpr):
    """Starts the copy of rows from `row` on into the ring, as its tile number `count`, once there is room."""
    stage, filled = await_room(ring, count, desc.block_type.nbytes, STAGES)
    load_tile(desc, [row, 0], filled, ring.tiles.index(stage))


@gluon.jit
def await_room(ring, count, NBYTES: gl.constexpr, STAGES: gl.constexpr):
    """The stage of the ring's tile number `count`, once it is free, and the barrier that its bytes fill."""
    stage = count % STAGES
    filled = ring.filled.index(stage)
    mbarrier.wait(ring.emptied.index(stage), (count // STAGES) & 1 ^ 1)
    mbarrier.expect(filled, NBYTES)
    return stage, filled


@gluon.jit
def rows_in_pages(tile, PAD: gl.constexpr):
    """How many of a sequence's rows are not of keys that the call brings itself."""
    return tile.kv_len if PAD is None else tile.before


@gluon.jit
def places_of(
    pages, desc, tile, kv_head, row, PAGE_SIZE: gl.constexpr, RAGGED: gl.constexpr, PAD: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Where the pages of a key tile lie in their matrix; rows that are no keys are others that exist."""
    row_base = first_id(pages, gl.maximum(tile.seq, 0), RAGGED)
    last = rows_in_pages(tile, PAD) - 1
    if PAD is not None:
        last -= tile.padding
    PIECE: gl.constexpr = desc.block_shape[0]
    places = ()
    for i in gl.static_range(BLOCK_N // PIECE):
        page, slot = locate_keys(pages, row_base, row + i * PIECE, 0, last, PAGE_SIZE, False)
        places += (page * pages.page + kv_head * pages.head + slot,)
    return places


@gluon.jit
def copy_pieces(desc, places, column, ring, count, STAGES: gl.constexpr):
    """`copy_tile` of keys that lie in pages."""
    PIECES: gl.constexpr = ring.pieces.shape[0] // STAGES
    stage, filled = await_room(ring, count, PIECES * desc.block_type.nbytes, STAGES)
    load_pieces(desc, places, column, ring.pieces, stage, PIECES, filled)


@gluon.jit
def load_pieces(desc, places, column, pieces, stage, PIECES: gl.constexpr, filled):
    """Starts the copies of a tile's pieces: 64 columns of all its pages, then the next 64."""
    for i in gl.static_range(PIECES):
        at = [places[i % len(places)], column + i // len(places) * desc.block_shape[1]]
        load_tile(desc, at, filled, pieces.index(stage * PIECES + i))


@gluon.jit
def anew(x):
    """A number that the compiler takes for another: what comes of it is computed again, not kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lines_of(x, tile, kv_head, part, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Where a tile's part of ROWS rows lies in Q or O, in whole lines, and which of them are there.

    Counted from the part's first token everything but where that lies is small, and 32 bits do.
    """
    LINES: gl.constexpr = line_layout(HEAD_DIM)
    first = part * ROWS
    token = first // GQA_RATIO
    # Where the ratio divides ROWS, this is 0, and all that follows of it would be kept.
    rows = (anew(first - token * GQA_RATIO) + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))).to(gl.uint32)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
    begin = (tile.q_start + token).to(gl.int64) * x.token + (kv_head * GQA_RATIO).to(gl.int64) * x.head
    at = (rows // GQA_RATIO).to(gl.int32) * x.token + (rows % GQA_RATIO).to(gl.int32) * x.head
    left = gl.where(tile.seq >= 0, gl.maximum(tile.q_len - token, 0) * GQA_RATIO, 0)
    return x.ptr + begin + (at[:, None] + d[None, :]), (rows.to(gl.int32) < left)[:, None]


@gluon.jit
def copy_queries(q, tile, kv_head, there, q_tile, half, GQA_RATIO: gl.constexpr):
    """Starts the copy of a tile's rows into shared memory, if it is there; past the last row is anything."""
    at, mask = lines_of(q, tile, kv_head, tile.number * 2 + half, GQA_RATIO, q_tile.shape[0], q_tile.shape[1])
    load_lines(q_tile, at, mask=mask & there)
    async_copy.commit_group()


@gluon.jit
def issue_scores(q_tile, ring, count, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Q @ K^T of the ring's tile number `count`, still under way."""
    stage = count % STAGES
    S: gl.constexpr = product_layout(BLOCK_N)
    ROWS: gl.constexpr = q_tile.shape[0]
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    mbarrier.wait(ring.filled.index(stage), (count // STAGES) & 1)
    return warpgroup_mma(q_tile, ring.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def issue_values(p, acc, ring, count, STAGES: gl.constexpr):
    """Acc + P @ V of the ring's tile number `count`, still under way."""
    stage = count % STAGES
    mbarrier.wait(ring.filled.index(stage), (count // STAGES) & 1)
    return warpgroup_mma(p, ring.tiles.index(stage), acc, is_async=True)


@gluon.constexpr_function
def mask_code(columns, has_low):
    """PTX of `mask_scores` and its constraints, for a thread's part of a product `[64, columns]`.

    That part is two rows, eight apart, of two columns in every eight. A column is a constant in it but for
    the thread's own first one, which the limits are short of instead.
    """
    held = columns // 2
    # Operands: the scores as they go and as they come, then the limits.
    code = [".reg .b32 own, high0, high1, low0, low1; .reg .pred keep;"]
    code += ["mov.u32 own, %laneid; and.b32 own, own, 3; shl.b32 own, own, 1;"]
    for row in range(2):
        code += [f"sub.s32 high{row}, ${2 * held + 2 * row}, own;"]
        if has_low:
            code += [f"sub.s32 low{row}, ${3 * held + 2 * row}, own;"]
    for i in range(held):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        code += [f"setp.ge.s32 keep, high{row}, {column};"]
        if has_low:
            code += [f"setp.le.and.s32 keep, low{row}, {column}, keep;"]
        code += [f"selp.f32 ${i}, ${i}, 0fFF800000, keep;"]
    limits = ["r"] * held * (2 if has_low else 1)
    constraints = ["=f"] * held + [str(i) for i in range(held)] + limits
    return "{ " + " ".join(code) + " }", ",".join(constraints)


@gluon.jit
def mask_scores(s, low, high, HAS_LOW: gl.constexpr):
    """Scores [64, N] where low <= column <= high, and -inf elsewhere.

    Left to the compiler it is 360 instructions for 128 columns, not 130: ptxas compares while the products
    run, ahead of need, and packs what comes of it into bits.
    """
    CODE: gl.constexpr = mask_code(s.shape[1], HAS_LOW)
    _s, high = gl.broadcast(s, high[:, None])
    if HAS_LOW:
        _s, low = gl.broadcast(s, low[:, None])
        limits = (high, low)
    else:
        limits = (high,)
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], (s,) + limits, dtype=gl.float32, is_pure=True, pack=s.shape[1] // 2
    )


@gluon.jit
def weights(
    s, m, l, scale, query_pos, before, num_keys,
    MASKED: gl.constexpr, HAS_LAST: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Scores of keys from row `before` on as P, what is left of the sums so far, and the new m and l.

    HAS_LAST: the mask alone would show keys from `num_keys` on.
    """
    if MASKED:
        low, high = visible_range(query_pos, 0, num_keys, False, WINDOW_LEFT, WINDOW_RIGHT)
        if HAS_LAST:
            high = gl.minimum(high, num_keys - 1)
        s = mask_scores(s, low - before, high - before, WINDOW_LEFT >= 0)
    p, m, l, correction = softmax_step(s, m, l, gl.full_like(m, 1.0) * scale)
    return as_operand(p, HEAD_DIM), correction, m, l


@gluon.jit
def as_operand(p, HEAD_DIM: gl.constexpr):
    """P in 16 bits; the left operand from registers lies as the accumulator does, so nothing moves."""
    O: gl.constexpr = product_layout(HEAD_DIM)
    return gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, O, 2))


@gluon.jit
def attend_tiles(
    p, acc, m, l, q_tile, k_ring, v_ring, scale, new_scale, old, query_pos, num_keys, count, last,
    begin, stop,
    MASKED: gl.constexpr, TWO_SCALES: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Key tiles last - begin, ..., last - stop + 1; tile last - i is the ring's number `count` + i.

    TWO_SCALES: tiles from tile `old` on have `new_scale`.
    """
    for i in range(begin, stop):
        scores = issue_scores(q_tile, k_ring, count + i, BLOCK_N, STAGES)
        values = issue_values(p, acc, v_ring, count + i - 1, STAGES)
        s = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_ring.emptied.index((count + i) % STAGES))
        own_scale = scale
        if TWO_SCALES:
            own_scale = float_in_scalar_register(gl.where(last - i < old, scale, new_scale))
        p, correction, m, l = weights(
            s, m, l, own_scale, query_pos, (last - i) * BLOCK_N, num_keys,
            MASKED, False, WINDOW_LEFT, WINDOW_RIGHT, acc.shape[1],
        )  # fmt: skip
        # Named here, the softmax is not put off until after the wait.
        acc, p, correction, m, l = warpgroup_mma_wait(0, deps=(values, p, correction, m, l))
        mbarrier.arrive(v_ring.emptied.index((count + i - 1) % STAGES))
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m, l


@gluon.jit
def half_rows(tile, kv_head, half, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr):
    """Token, head and mask of a half tile's rows."""
    q_len = gl.where(tile.seq >= 0, tile.q_len, 0)
    return rows_of(tile.q_start, q_len, anew(tile.number * 2 + half), kv_head, GQA_RATIO, ROWS)


@gluon.jit
def write_half_tile(
    out, acc, m, l, o_scale, tile, kv_head, half, GQA_RATIO: gl.constexpr,
    HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """O and lse of a half tile's rows."""
    ROWS: gl.constexpr = acc.shape[0]
    HEAD_DIM: gl.constexpr = acc.shape[1]
    tokens, heads, row_mask, _within = half_rows(tile, kv_head, half, GQA_RATIO, ROWS)
    o = output_rows(out.sinks, acc, m, l, o_scale, heads, row_mask, HAS_SINKS)
    if WRITE_LSE:
        write_lse(out.lse, m, l, heads, tokens, row_mask, out.lse_token)
    o = gl.convert_layout(o.to(out.ptr.dtype.element_ty), line_layout(HEAD_DIM))
    at, mask = lines_of(out, tile, kv_head, tile.number * 2 + half, GQA_RATIO, ROWS, HEAD_DIM)
    gl.store(at, o, mask=mask)


@gluon.jit
def attend(
    work, q, out, scales, workspace, k_ring, v_ring, q_tile,
    HALF: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr,
    PAD: gl.constexpr, TWO_SCALES: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of all items: half number HALF of each tile."""
    ROWS: gl.constexpr = BLOCK_M // 2
    S: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    O: gl.constexpr = product_layout(HEAD_DIM)
    count = 0
    rounds = rounds_of(work, NUM_KV_HEADS)
    _place, kv_head, tile = lookup(work, 0, NUM_KV_HEADS, SPLIT)
    copy_queries(q, tile, kv_head, rounds > 0, q_tile, HALF, GQA_RATIO)
    for turn in range(rounds):
        item = item_at(
            work, turn, NUM_KV_HEADS, GQA_RATIO, PAD, WINDOW_LEFT, WINDOW_RIGHT, SPLIT,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        _place, next_head, next_tile = lookup(work, gl.minimum(turn + 1, rounds - 1), NUM_KV_HEADS, SPLIT)
        tile, kv_head, begin, end = item.tile, item.kv_head, item.begin, item.end
        async_copy.wait_group(0)
        fence_async_shared()
        rows = tile.number * BLOCK_M + HALF * ROWS + gl.arange(0, ROWS, S)
        query_pos = tile.before + rows // GQA_RATIO
        seq = gl.maximum(tile.seq, 0)
        scale = times_head_descale(scales.old, scales.k_descale, seq, kv_head, K_DESCALE)
        if K_DESCALE == "head":
            scale = float_in_scalar_register(scale)
        m = gl.full([ROWS], float("-inf"), gl.float32, S)
        l = gl.zeros([ROWS], gl.float32, S)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        if begin < end:
            scores = issue_scores(q_tile, k_ring, count, BLOCK_N, STAGES)
            last = item.order.last
            num_tiles = end - begin
            masked = gl.minimum(gl.maximum(last + 1 - item.full_end, 1), num_tiles)
            plain = gl.minimum(gl.maximum(last + 1 - item.full, masked), num_tiles)
            own_scale = scale
            # New keys begin with a block.
            old = tile.before // BLOCK_N
            if TWO_SCALES:
                own_scale = float_in_scalar_register(
                    gl.where(item.order.start < old * BLOCK_N, scale, scales.new)
                )
            s = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_ring.emptied.index(count % STAGES))
            p, _correction, m, l = weights(
                s, m, l, own_scale, query_pos, item.order.start, item.order.stop,
                True, PAD is not None, WINDOW_LEFT, WINDOW_RIGHT, HEAD_DIM,
            )  # fmt: skip
            p, acc, m, l = attend_tiles(
                p, acc, m, l, q_tile, k_ring, v_ring, scale, scales.new, old, query_pos, tile.kv_len,
                count, last, 1, masked,
                True, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
            )  # fmt: skip
            p, acc, m, l = attend_tiles(
                p, acc, m, l, q_tile, k_ring, v_ring, scale, scales.new, old, query_pos, tile.kv_len,
                count, last, masked, plain,
                False, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
            )  # fmt: skip
            if WINDOW_LEFT >= 0:
                p, acc, m, l = attend_tiles(
                    p, acc, m, l, q_tile, k_ring, v_ring, scale, scales.new, old, query_pos, tile.kv_len,
                    count, last, plain, num_tiles,
                    True, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
                )  # fmt: skip
            count += num_tiles
            acc = warpgroup_mma_wait(0, deps=(issue_values(p, acc, v_ring, count - 1, STAGES),))
            mbarrier.arrive(v_ring.emptied.index((count - 1) % STAGES))
        # The next rows come while these are written.
        copy_queries(q, next_tile, next_head, turn + 1 < rounds, q_tile, HALF, GQA_RATIO)
        m = gl.convert_layout(m, gl.SliceLayout(1, O))
        l = gl.convert_layout(l, gl.SliceLayout(1, O))
        o_scale = times_head_descale(scales.out, scales.v_descale, seq, kv_head, V_DESCALE)
        # Where V has no units always true, unknown to ptxas: with a plain True the code of the loops was 2 %
        # slower once.
        write = (count >= 0) & item.usual
        if SPLIT:
            row_mask = half_rows(tile, kv_head, HALF, GQA_RATIO, ROWS)[2]
            merged, acc, m, l = merge_splits(
                workspace, acc, m, l, item.place.pair * 2 + HALF, item.place.split, work.num_splits,
                work.num_tiles * NUM_KV_HEADS * 2, gl.set_auto_layout(row_mask, gl.SliceLayout(1, O)), False,
                ROWS, HEAD_DIM,
            )  # fmt: skip
            write &= merged
        if write:
            write_half_tile(out, acc, m, l, o_scale, tile, kv_head, HALF, GQA_RATIO, HAS_SINKS, WRITE_LSE)


@gluon.jit
def attend_carefully(
    work, q, out, scales, scratch, k_desc, v_desc, page_desc, pages, k_ring, v_ring, q_tile, copied,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, RAGGED: gl.constexpr, K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr,
    PAD: gl.constexpr, TWO_SCALES: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """All half tiles by one warpgroup, step by step: blocks of V have factors of their own.

    Keys in pages have one as well: NaN where their V is not finite.
    """
    ROWS: gl.constexpr = BLOCK_M // 2
    S: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    O: gl.constexpr = product_layout(HEAD_DIM)
    phase = 0
    async_copy.wait_group(0)
    for number in range(gl.program_id(0), 2 * work.num_tiles * NUM_KV_HEADS, gl.num_programs(0)):
        kv_head = number // 2 % NUM_KV_HEADS
        half = number % 2
        tile = scheduled_tile(work.schedule, number // 2 // NUM_KV_HEADS)
        begin, end, _full, _full_end = keys_of(
            tile, GQA_RATIO, PAD, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_M, BLOCK_N
        )
        end = gl.where(tile.seq >= 0, end, begin)
        order = order_of(tile, begin, end, PAD, BLOCK_N)
        copy_queries(q, tile, kv_head, True, q_tile, half, GQA_RATIO)
        async_copy.wait_group(0)
        rows = tile.number * BLOCK_M + half * ROWS + gl.arange(0, ROWS, S)
        query_pos = tile.before + rows // GQA_RATIO
        seq = gl.maximum(tile.seq, 0)
        scale = times_head_descale(scales.old, scales.k_descale, seq, kv_head, K_DESCALE)
        base = kv_head * work.rows + tile.base
        m = gl.full([ROWS], float("-inf"), gl.float32, S)
        l = gl.zeros([ROWS], gl.float32, S)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        unit = gl.to_tensor(1.0)
        for i in range(end - begin):
            row = row_of(order, i, PAD, BLOCK_N)
            # All warps are done with what lies there.
            fence_async_shared()
            all_warps()
            mbarrier.expect(copied, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_tile(v_desc, [base + row, 0], copied, v_ring.tiles.index(0))
            if page_desc is None:
                load_tile(k_desc, [base + row, 0], copied, k_ring.tiles.index(0))
            elif row < rows_in_pages(tile, PAD):
                places = places_of(pages, page_desc, tile, kv_head, row, PAGE_SIZE, RAGGED, PAD, BLOCK_N)
                PIECES: gl.constexpr = k_ring.pieces.shape[0] // k_ring.tiles.shape[0]
                load_pieces(page_desc, places, kv_head * pages.columns, k_ring.pieces, 0, PIECES, copied)
            else:
                load_tile(k_desc, [base + row, 0], copied, k_ring.tiles.index(0))
            mbarrier.wait(copied, phase)
            phase ^= 1
            zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, product_layout(BLOCK_N))
            s = warpgroup_mma(q_tile, k_ring.tiles.index(0).permute((1, 0)), zeros, use_acc=False)
            if page_desc is not None:
                n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, product_layout(BLOCK_N)))
                s *= gl.load(scratch.k_factor + base + row + n)[None, :]
            own_scale = scale
            if TWO_SCALES:
                own_scale = gl.where(row < tile.before, scale, scales.new)
            p, correction, m, l = weights(
                s, m, l, own_scale, query_pos, row, gl.where(i == 0, order.stop, tile.kv_len),
                True, PAD is not None, WINDOW_LEFT, WINDOW_RIGHT, HEAD_DIM,
            )  # fmt: skip
            own_unit = gl.load(scratch.v_unit + (base + row) // BLOCK_N)
            correction *= unit / own_unit
            unit = own_unit
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, O))[:, None]
            acc = warpgroup_mma(p, v_ring.tiles.index(0), acc)
        m = gl.convert_layout(m, gl.SliceLayout(1, O))
        l = gl.convert_layout(l, gl.SliceLayout(1, O))
        o_scale = times_head_descale(scales.out, scales.v_descale, seq, kv_head, V_DESCALE) * unit
        write_half_tile(out, acc, m, l, o_scale, tile, kv_head, half, GQA_RATIO, HAS_SINKS, WRITE_LSE)
    # Whoever is last leaves both numbers as the next launch expects them.
    all_warps()
    if gl.atomic_add(work.unusual + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(work.unusual, 0)
        gl.store(work.unusual + 1, 0)


@gluon.jit
def key_ring(desc, page_desc, STAGES: gl.constexpr):
    """An empty ring of STAGES tiles that two warpgroups read, filled by `desc` and pieces of `page_desc`."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout)
    pieces = tiles
    if page_desc is not None:
        # A tile is rows of 64 columns one after the other, then those of the next 64.
        COUNT: gl.constexpr = STAGES * desc.block_type.nbytes // page_desc.block_type.nbytes
        pieces = reinterpret(tiles, desc.dtype, [COUNT] + page_desc.block_shape, page_desc.layout)
    ring = Ring(
        tiles,
        pieces,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.filled.index(stage), count=1)
        mbarrier.init(ring.emptied.index(stage), count=2)
    return ring


@gluon.jit(do_not_specialize=rows.RUNTIME_SIZES)
def _pipelined_prefill_kernel(
    q, out, scratch, k_desc, v_desc, page_desc, pages, k_descale, v_descale, workspace,
    qk_scale, new_scale, out_scale, table_row, num_ids, max_pages, num_tiles, num_splits,
    SIZES: gl.constexpr, RULES: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M rows over the widened keys; see `_dense_prefill_kernel` for the arguments.

    An item is a (split, tile, head), by the schedule in the order of falling work; `item_number` says which
    of them a program takes. page_desc, pages: K is in the cache's pages, but for the chunk's own keys; None:
    all is in the scratch. new_scale: of logits of the chunk's own keys. SIZES, RULES: `Sizes`,
    `PipelinedRules`.
    """
    NUM_KV_HEADS: gl.constexpr = SIZES.num_kv_heads
    GQA_RATIO: gl.constexpr = SIZES.gqa_ratio
    HEAD_DIM: gl.constexpr = SIZES.head_dim
    PAGE_SIZE: gl.constexpr = SIZES.page_size
    RAGGED: gl.constexpr = SIZES.ragged
    K_DESCALE: gl.constexpr = RULES.k_descale
    V_DESCALE: gl.constexpr = RULES.v_descale
    PAD: gl.constexpr = RULES.pad
    TWO_SCALES: gl.constexpr = RULES.two_scales
    V_IN_UNITS: gl.constexpr = RULES.v_in_units
    WINDOW_LEFT: gl.constexpr = RULES.window_left
    WINDOW_RIGHT: gl.constexpr = RULES.window_right
    HAS_SINKS: gl.constexpr = RULES.sinks
    WRITE_LSE: gl.constexpr = RULES.lse
    SPLIT: gl.constexpr = RULES.split
    BLOCK_M: gl.constexpr = RULES.block_m
    BLOCK_N: gl.constexpr = RULES.block_n
    STAGES: gl.constexpr = RULES.stages
    if page_desc is not None:
        pages = Pages(
            pages.page_ids, pages.row if RAGGED else table_row, num_ids, pages.num_pages, max_pages,
            pages.column, pages.row_step, pages.page, pages.head, pages.columns,
        )  # fmt: skip
    work = Work(scratch.schedule, num_tiles, num_splits, scratch.rows, scratch.unusual)
    scales = Scales(qk_scale, new_scale, out_scale, k_descale, v_descale)
    KIND: gl.constexpr = q.ptr.dtype.element_ty
    if V_IN_UNITS:
        copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(copied, count=1)
    q_tiles = gl.allocate_shared_memory(
        KIND, [2, BLOCK_M // 2, HEAD_DIM],
        gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, HEAD_DIM], KIND),
    )  # fmt: skip
    k_ring = key_ring(k_desc, page_desc, STAGES)
    v_ring = key_ring(v_desc, None, STAGES)
    fence_async_shared()
    await_previous_launch()
    if V_IN_UNITS:
        careful = gl.load(scratch.unusual) != 0
    gl.warp_specialize(
        [
            (
                attend,
                (
                    work, q, out, scales, workspace, k_ring, v_ring,
                    q_tiles.index(0), 0, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM,
                    K_DESCALE, V_DESCALE, PAD, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT,
                    HAS_SINKS, WRITE_LSE, SPLIT,
                    BLOCK_M, BLOCK_N, STAGES,
                ),
            ),
            (
                attend,
                (
                    work, q, out, scales, workspace, k_ring, v_ring,
                    q_tiles.index(1), 1, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM,
                    K_DESCALE, V_DESCALE, PAD, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT,
                    HAS_SINKS, WRITE_LSE, SPLIT,
                    BLOCK_M, BLOCK_N, STAGES,
                ),
            ),
            (
                copy_keys,
                (
                    work, k_desc, v_desc, page_desc, pages, k_ring, v_ring, NUM_KV_HEADS, GQA_RATIO,
                    PAGE_SIZE, RAGGED, PAD, WINDOW_LEFT, WINDOW_RIGHT, SPLIT, BLOCK_M, BLOCK_N, STAGES,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 32],
    )  # fmt: skip
    if V_IN_UNITS:
        if careful:
            attend_carefully(
                work, q, out, scales, scratch, k_desc, v_desc, page_desc, pages, k_ring, v_ring,
                q_tiles.index(0), copied, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM, PAGE_SIZE, RAGGED,
                K_DESCALE, V_DESCALE, PAD, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT, HAS_SINKS, WRITE_LSE,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip

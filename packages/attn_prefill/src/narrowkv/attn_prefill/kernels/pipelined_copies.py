"""The producer warp of Hopper's prefill: it copies key tiles from scratch or pages to shared memory."""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from narrowkv.attn_prefill.kernels.pipelined_items import (
    item_at,
    rounds_of,
    row_of,
)
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.kernels import pages
from narrowkv.runtime.launch.gluon import in_gluon, reinterpret

first_id = in_gluon(pages.first_id)
locate_keys = in_gluon(pages.locate_keys)


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

    table: which pages a sequence has, a `Table` whose lengths are not read. page, head: rows from a page, or
    a head, to the next. columns: from a head to the next.
    """

    table: Any
    page: Any
    head: Any
    columns: Any


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
        """The pages that a `Table` names."""
        return Pages(table._replace(lens=None, lens_step=None), self.page, self.head, self.columns)


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
    tma.async_load(desc, [row, 0], filled, ring.tiles.index(stage))


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
    """How many of a sequence's rows hold keys from the cache, not new ones."""
    return tile.kv_len if PAD is None else tile.before


@gluon.jit
def places_of(
    pages, desc, tile, kv_head, row, PAGE_SIZE: gl.constexpr, RAGGED: gl.constexpr, PAD: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Where the pages of a key tile lie in their matrix; rows without a key get the place of another key."""
    row_base = first_id(pages.table, gl.maximum(tile.seq, 0), RAGGED)
    last = rows_in_pages(tile, PAD) - 1
    if PAD is not None:
        last -= tile.padding
    PIECE: gl.constexpr = desc.block_shape[0]
    places = ()
    for i in gl.static_range(BLOCK_N // PIECE):
        page, slot = locate_keys(pages.table, row_base, row + i * PIECE, 0, last, PAGE_SIZE, False)
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
        tma.async_load(desc, at, filled, pieces.index(stage * PIECES + i))

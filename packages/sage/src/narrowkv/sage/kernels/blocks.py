"""Block masks: lists of the key tiles that each block of queries attends to.

Attention walks such a list, so a tile that is masked costs nothing, not even a look at the mask.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)


class BlockFlags(NamedTuple):
    """A block mask `[batch, heads, query blocks, key blocks]` and its strides; 0 masks a block."""

    ptr: Any
    batch: Any
    head: Any
    q_block: Any
    k_block: Any


class TileLists(NamedTuple):
    """Key tiles that blocks of queries attend to, for each item, a head of a sequence.

    tiles: int32 `[items, q_blocks, k_tiles]`, the numbers of the tiles, ascending; the rest is undefined.
    before: int32 `[items, q_blocks, k_tiles + 1]`, how many entries of the list come before each tile.
    """

    tiles: Any
    before: Any
    q_blocks: Any
    k_tiles: Any


@triton.jit(do_not_specialize=["num_heads"])
def _tile_lists_kernel(flags, lists, num_heads, K_TILES: tl.constexpr):
    """One program lists the key tiles of one block of queries. Grid: items times q_blocks.

    K_TILES: tiles of a block of keys.
    """
    row = tl.program_id(0).to(tl.int64)
    item, q_block = row // lists.q_blocks, row % lists.q_blocks
    row_flags = flags.ptr + item // num_heads * flags.batch + item % num_heads * flags.head
    row_flags += q_block * flags.q_block
    tiles = lists.tiles + row * lists.k_tiles
    before = lists.before + row * (lists.k_tiles + 1)
    listed = tl.program_id(0) * 0
    for first in range(0, lists.k_tiles + 1, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        at = (tile // K_TILES).to(tl.int64) * flags.k_block
        shown = tl.load(row_flags + at, mask=tile < lists.k_tiles, other=0) != 0
        count = shown.to(tl.int32)
        place = listed + tl.cumsum(count, 0) - count
        tl.store(before + tile, place, mask=tile <= lists.k_tiles)
        tl.store(tiles + place, tile, mask=shown)
        listed += tl.sum(count, 0)


@triton.jit
def row_of(lists, item, q_block):
    """The list of one block of queries: its tiles, and how many of them come before each tile."""
    row = item.to(tl.int64) * lists.q_blocks + q_block
    return lists.tiles + row * lists.k_tiles, lists.before + row * (lists.k_tiles + 1)


@triton.jit
def places_of(before, lists, begin, end, full, full_end):
    """Ranges of key tiles as ranges of a list's entries; ranges may end past the last tile."""
    last = lists.k_tiles
    return (
        tl.load(before + tl.minimum(begin, last)),
        tl.load(before + tl.minimum(end, last)),
        tl.load(before + tl.minimum(full, last)),
        tl.load(before + tl.minimum(full_end, last)),
    )


@triton.jit
def entry_of(tiles, place, first, end):
    """The tile at a place in the list, at most the last one before `end`; 0 if there is none from `first`."""
    return tl.load(tiles + tl.minimum(place, end - 1), mask=first < end, other=0)

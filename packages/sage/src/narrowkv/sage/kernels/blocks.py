"""Block masks: lists of the key tiles that each block of queries attends to.

Attention walks such a list, so a tile that is masked costs nothing, not even a look at the mask.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)


class TileLists(NamedTuple):
    """Key tiles that blocks of queries attend to, for each item, a head of a sequence.

    tiles: int32 `[items, q_blocks, k_tiles]`, the numbers of the tiles, ascending; the rest is undefined.
    before: int32 `[items, q_blocks, k_tiles + 1]`, how many entries of the list come before each tile.
    """

    tiles: Any
    before: Any


_NUMBERS = ["mask_batch", "mask_head", "mask_q_block", "mask_k_block", "num_heads", "q_blocks", "k_tiles"]


@triton.jit(do_not_specialize=_NUMBERS)
def _tile_lists_kernel(
    mask_ptr, mask_batch, mask_head, mask_q_block, mask_k_block, lists, num_heads, q_blocks, k_tiles,
    K_TILES: tl.constexpr,
):  # fmt: skip
    """One program lists the key tiles of one block of queries. Grid: items times q_blocks.

    mask: `[batch, heads, query blocks, key blocks]`, 0 for a block that is masked, and its strides.
    K_TILES: tiles of a block of keys.
    """
    row = tl.program_id(0).to(tl.int64)
    item, q_block = row // q_blocks, row % q_blocks
    flags = mask_ptr + item // num_heads * mask_batch + item % num_heads * mask_head + q_block * mask_q_block
    tiles, before = row_of(lists, row, k_tiles)
    listed = tl.program_id(0) * 0
    for first in range(0, k_tiles + 1, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        at = (tile // K_TILES).to(tl.int64) * mask_k_block
        shown = tl.load(flags + at, mask=tile < k_tiles, other=0) != 0
        count = shown.to(tl.int32)
        place = listed + tl.cumsum(count, 0) - count
        tl.store(before + tile, place, mask=tile <= k_tiles)
        tl.store(tiles + place, tile, mask=shown)
        listed += tl.sum(count, 0)


@triton.jit
def row_of(lists, row, k_tiles):
    """The list of one block of queries: its tiles, and how many of them come before each tile."""
    return lists.tiles + row * k_tiles, lists.before + row * (k_tiles + 1)


@triton.jit
def places_of(before, k_tiles, begin, end, full, full_end):
    """Ranges of key tiles as ranges of a list's entries; ranges may end past the last tile."""
    return (
        tl.load(before + tl.minimum(begin, k_tiles)),
        tl.load(before + tl.minimum(end, k_tiles)),
        tl.load(before + tl.minimum(full, k_tiles)),
        tl.load(before + tl.minimum(full_end, k_tiles)),
    )


@triton.jit
def entry_of(tiles, place, first, end):
    """The tile at a place in the list, at most the last one before `end`; 0 if there is none from `first`."""
    return tl.load(tiles + tl.minimum(place, end - 1), mask=first < end, other=0)

"""Device functions for Hopper: which rows an item has; copies of rows and queries to shared memory.

An item is a token, a block of its heads and a split of its rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
)

from narrowkv.sparse_fp8.kernels.prologue import places_of_split
from narrowkv.sparse_fp8.kernels.rows import clamp_span, load_span, locate, names_a_row


class HopperCall(NamedTuple):
    """Constants that a kernel for Hopper is compiled with, besides `Call` and `Tiles`.

    PREFIX, EXTEND: how the rows of each source are stored, `Stored`; that of the other if it is absent.
    STAGES: tiles in shared memory. SLACK: how far numerators may pass one, in powers of two. HEADROOM: how
    far below one the largest lies when the reference of the logits is updated.
    SCORE_REGISTERS, GATHER_REGISTERS: registers of a thread, in the kernel for few heads.
    """

    NUM_HEADS: Any
    HEAD_BLOCKS: Any
    HAS_PREFIX: Any
    HAS_EXTEND: Any
    PREFIX: Any
    EXTEND: Any
    SPLIT: Any
    HAS_SINK: Any
    WRITE_LSE: Any
    BLOCK_H: Any
    BLOCK_K: Any
    STAGES: Any
    SLACK: Any
    HEADROOM: Any
    SCORE_REGISTERS: Any
    GATHER_REGISTERS: Any


@gluon.jit
def _load_spans(prefix_csr, extend_csr, token, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr):
    """The bounds of a token in both indptr."""
    prefix_begin, prefix_end, extend_begin, extend_end = 0, 0, 0, 0
    if HAS_PREFIX:
        prefix_begin, prefix_end = load_span(prefix_csr, token)
    if HAS_EXTEND:
        extend_begin, extend_end = load_span(extend_csr, token)
    return prefix_begin, prefix_end, extend_begin, extend_end


@gluon.jit
def _name_item(number, num_tokens, HEAD_BLOCKS: gl.constexpr):
    """Token, block of heads and split of an item."""
    return (number // HEAD_BLOCKS) % num_tokens, number % HEAD_BLOCKS, number // HEAD_BLOCKS // num_tokens


@gluon.jit
def _place_item(
    prefix_csr, extend_csr, spans, item, num_tokens, num_splits,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """An item, from what `_load_spans` read of its token."""
    token, head_block, split = _name_item(item, num_tokens, HEAD_BLOCKS)
    prefix_begin, prefix_end, extend_begin, extend_end = spans
    if HAS_PREFIX:
        prefix_begin, prefix_end = clamp_span(prefix_csr, prefix_begin, prefix_end)
    if HAS_EXTEND:
        extend_begin, extend_end = clamp_span(extend_csr, extend_begin, extend_end)
    if SPLIT:
        prefix_begin, prefix_end, extend_begin, extend_end = places_of_split(
            prefix_begin, prefix_end, extend_begin, extend_end, split, num_splits, BLOCK_K
        )
    prefix_tiles = (prefix_end - prefix_begin + BLOCK_K - 1) // BLOCK_K
    # An empty list is one tile without rows.
    num_tiles = gl.maximum(prefix_tiles + (extend_end - extend_begin + BLOCK_K - 1) // BLOCK_K, 1)
    return (
        token,
        head_block,
        split,
        num_tiles,
        prefix_begin,
        prefix_end,
        extend_begin,
        extend_end,
        prefix_tiles,
    )


@gluon.jit
def _item(
    prefix_csr, extend_csr, item, num_tokens, num_splits,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """An item: token, block of heads, split, tiles, the places of its indices and the tiles of the prefix."""
    token, _, _ = _name_item(item, num_tokens, HEAD_BLOCKS)
    spans = _load_spans(prefix_csr, extend_csr, token, HAS_PREFIX, HAS_EXTEND)
    return _place_item(
        prefix_csr, extend_csr, spans, item, num_tokens, num_splits,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip


@gluon.jit
def _tile_indices(
    prefix_csr, extend_csr, item, tile, r, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Row numbers of a tile of an item, prefix first; -1 past the end."""
    _, _, _, _, prefix_begin, prefix_end, extend_begin, extend_end, prefix_tiles = item
    if HAS_PREFIX and HAS_EXTEND:
        first = tile < prefix_tiles
        indices = gl.where(first, prefix_csr.indices, extend_csr.indices)
        begin = gl.where(first, prefix_begin + tile * BLOCK_K, extend_begin + (tile - prefix_tiles) * BLOCK_K)
        end = gl.where(first, prefix_end, extend_end)
    elif HAS_PREFIX:
        indices, begin, end = prefix_csr.indices, prefix_begin + tile * BLOCK_K, prefix_end
    else:
        indices, begin, end = extend_csr.indices, extend_begin + tile * BLOCK_K, extend_end
    return gl.load(indices + begin + r, mask=begin + r < end, other=-1)


@gluon.jit
def _select_source(first, prefix, extend, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr):
    """The value of the prefix or of the extend rows."""
    if HAS_PREFIX and HAS_EXTEND:
        return gl.where(first, prefix, extend)
    elif HAS_PREFIX:
        return prefix
    else:
        return extend


@gluon.jit
def _locate_one(rows, index, STORED: gl.constexpr):
    """Whether each index names a row; offsets of its values, RoPE and scales. 16-bit rows have the first."""
    live = names_a_row(index, rows.num_rows)
    if STORED.VALUES == "":
        value_at = (index.to(gl.int64) if STORED.INT64_OFFSETS else index) * rows.stride_n
        return live, value_at, value_at, value_at
    else:
        value_at, rope_at, scale_at = locate(rows, index, STORED)
        return live, value_at, rope_at, scale_at


@gluon.jit
def _locate_rows(
    prefix, extend, first, index, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
    PREFIX: gl.constexpr, EXTEND: gl.constexpr,
):  # fmt: skip
    """`_locate_one` in the source that a tile belongs to."""
    if HAS_PREFIX and HAS_EXTEND:
        a = _locate_one(prefix, index, PREFIX)
        b = _locate_one(extend, index, EXTEND)
        return (
            gl.where(first, a[0], b[0]),
            gl.where(first, a[1], b[1]),
            gl.where(first, a[2], b[2]),
            gl.where(first, a[3], b[3]),
        )
    elif HAS_PREFIX:
        return _locate_one(prefix, index, PREFIX)
    else:
        return _locate_one(extend, index, EXTEND)


@gluon.jit
def _copy_rows(target, base, offsets, mask, LAYOUT: gl.constexpr):
    """Copies 16-bit columns from memory to shared memory; masked rows become zero.

    Rows begin at multiples of 16 bytes, which Triton 3.8 and later do not see where a row is of two sources.
    """
    d = gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.multiple_of(base + (offsets[:, None] + d[None, :]), [16, 16])
    async_copy.async_load(target, at, mask=mask[:, None])


@gluon.jit
def _copy_query(query, q_ptr, stride_qt, stride_qh, token, head_block, NUM_HEADS: gl.constexpr):
    """Copies an item's heads to shared memory; heads past the last are zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    heads = head_block * query.shape[0] + gl.arange(0, query.shape[0], gl.SliceLayout(1, COPY))
    rows = q_ptr + token.to(gl.int64) * stride_qt
    _copy_rows(query, rows, heads * stride_qh, heads < NUM_HEADS, COPY)


@gluon.jit
def _make_writes_visible():
    """Makes these warps' writes to shared memory visible to the matrix unit and to all of them."""
    fence_async_shared()
    gl.barrier()

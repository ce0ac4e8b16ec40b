"""Sparse attention over 16-bit rows on CDNA4 (gfx950), in Gluon: rows go to LDS asynchronously, tiles ahead.

A tile of rows is copied from memory to LDS without passing through registers, while the tile before it is
multiplied; its indices are read one tile earlier still. The tile serves as K and, read transposed by the LDS
instructions for it, as V. Four waves share QK by halves of the heads and of the tile's rows, and PV by halves
of the heads and of the columns, so that no wave repeats another's products.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, cdna4

from narrowkv.runtime.attention.softmax import natural_lse, output_factor, softmax_step
from narrowkv.sparse_fp8.config import SparseConfig
from narrowkv.sparse_fp8.kernels.results import SIZES, Call, split_tiles
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers, as_row_number, named, token_span

async_copy = cdna4.async_copy


class Cdna4Call(NamedTuple):
    """What the kernel is compiled for.

    NUM_HEADS, HAS_SINK, WRITE_LSE, SPLIT: as in `Call`. BLOCK_H, BLOCK_K: heads of a program, rows of a tile.
    STAGES: tiles in LDS. SCORES, SUMS: matrix layouts of QK's and of PV's result. ROWS: how a tile of rows is
    copied. TILE: how it lies in LDS.
    """

    NUM_HEADS: Any
    HAS_SINK: Any
    WRITE_LSE: Any
    SPLIT: Any
    BLOCK_H: Any
    BLOCK_K: Any
    STAGES: Any
    SCORES: Any
    SUMS: Any
    ROWS: Any
    TILE: Any


def cdna4_call(call: Call, config: SparseConfig) -> Cdna4Call:
    """The constants of a configuration.

    Waves share QK by 16 heads and by rows, PV by 32 heads and by columns. A wave copies one row at a time,
    16 bytes a lane; rows in LDS are 16 elements further apart than they are long, against bank conflicts.
    """
    waves, heads = config.options.num_warps, config.block_h
    return Cdna4Call(
        call.NUM_HEADS, call.HAS_SINK, call.WRITE_LSE, call.SPLIT, heads, config.block_k, config.stages,
        SCORES=gl.amd.AMDMFMALayout(4, [16, 16, 32], True, [heads // 16, waves * 16 // heads]),
        SUMS=gl.amd.AMDMFMALayout(4, [32, 32, 16], True, [heads // 32, waves * 32 // heads]),
        ROWS=gl.BlockedLayout([1, 8], [1, 64], [waves, 1], [1, 0]),
        TILE=gl.PaddedSharedLayout.with_identity_for([[512, 16]], [config.block_k, 512], [1, 0]),
    )  # fmt: skip


@gluon.jit
def _tile_indices(csr, begin, end, places):
    """Row numbers at `places` after `begin`; from `end` on the last one again. `end` is not 0."""
    # Not masked: a choice between the answer and -1 would be waited for here, not where it is used.
    return as_row_number(cdna3.buffer_load(csr.indices, gl.minimum(begin + places, end - 1)))


@gluon.jit
def _copy_rows(tile, rows, index, columns):
    """Starts the copy of rows `index` to LDS; rows that are not named become zeros."""
    live = gl.expand_dims(named(index, rows.num_rows), 1)
    offsets = gl.expand_dims(index * rows.stride_n, 1) + gl.expand_dims(columns, 0)
    async_copy.buffer_load_to_shared(tile, rows.nope, offsets, mask=live)
    async_copy.commit_group()


@gluon.jit
def _attend(q, acc, m, l, qk_scale, rows, csr, begin, end, tiles, CALL: gl.constexpr):
    """Rows at places [begin, end) of the index list into the softmax state; `tiles` holds STAGES tiles."""
    BLOCK_K: gl.constexpr = CALL.BLOCK_K
    STAGES: gl.constexpr = CALL.STAGES
    SCORES: gl.constexpr = CALL.SCORES
    SUMS: gl.constexpr = CALL.SUMS
    ROWS: gl.constexpr = CALL.ROWS
    k_layout: gl.constexpr = gl.DotOperandLayout(1, SCORES, 8)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    v_layout: gl.constexpr = gl.DotOperandLayout(1, SUMS, 4)
    places = gl.arange(0, BLOCK_K, gl.SliceLayout(1, ROWS))
    columns = gl.arange(0, 512, gl.SliceLayout(0, ROWS))
    own = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    zeros = gl.full([CALL.BLOCK_H, BLOCK_K], 0.0, gl.float32, SCORES)
    index = _tile_indices(csr, begin, end, places)
    own_index = _tile_indices(csr, begin, end, own)
    for stage in gl.static_range(STAGES - 1):
        upcoming = _tile_indices(csr, begin + (stage + 1) * BLOCK_K, end, places)
        _copy_rows(tiles.index(stage), rows, index, columns)
        index = upcoming
    slot = 0
    for start in range(begin, end, BLOCK_K):
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        # Memory answers in order: what is asked for before the copy does not wait for the copy.
        upcoming = _tile_indices(csr, start + STAGES * BLOCK_K, end, places)
        own_upcoming = _tile_indices(csr, start + BLOCK_K, end, own)
        _copy_rows(tiles.index(free), rows, index, columns)
        async_copy.wait_group(STAGES - 1)
        tile = tiles.index(slot)
        s = cdna3.mfma(q, tile.permute([1, 0]).load(k_layout), zeros)
        live = named(own_index, rows.num_rows) & (start + own < end)
        s = gl.where(gl.expand_dims(live, 0), s * qk_scale, float("-inf"))
        p, m, l, correction = softmax_step(s, m, l)
        correction = gl.convert_layout(correction, gl.SliceLayout(1, SUMS))
        p = gl.convert_layout(p.to(q.dtype), p_layout)
        v = tile.load(v_layout)
        acc = cdna3.mfma(p, v, acc * gl.expand_dims(correction, 1))
        index, own_index = upcoming, own_upcoming
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    return acc, m, l


@gluon.jit(do_not_specialize=SIZES)
def _sparse_cdna4_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale,
    num_tokens, num_splits, prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL: gl.constexpr,
):  # fmt: skip
    """One program attends BLOCK_H heads of one token; programs run fastest over the heads of a token.

    Grid: tokens times blocks of heads, splits. A source without rows has `nope` None.
    """
    BLOCK_H: gl.constexpr = CALL.BLOCK_H
    BLOCK_K: gl.constexpr = CALL.BLOCK_K
    SCORES: gl.constexpr = CALL.SCORES
    SUMS: gl.constexpr = CALL.SUMS
    ROWS: gl.constexpr = CALL.ROWS
    HEAD_BLOCKS: gl.constexpr = (CALL.NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = gl.program_id(0) // HEAD_BLOCKS
    first_head = (gl.program_id(0) % HEAD_BLOCKS) * BLOCK_H
    split = gl.program_id(1)
    wide_token = token.to(gl.int64)
    heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, ROWS))
    columns = gl.arange(0, 512, gl.SliceLayout(0, ROWS))
    offsets = gl.expand_dims(heads * q.stride_h, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(heads < CALL.NUM_HEADS, 1)
    q_tile = cdna3.buffer_load(q.nope + wide_token * q.stride_n, offsets, mask=inside, other=0.0)
    q_tile = gl.convert_layout(q_tile, gl.DotOperandLayout(0, SCORES, 8))  # [BLOCK_H, 512]
    m = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.full([BLOCK_H], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.full([BLOCK_H, 512], 0.0, gl.float32, SUMS)
    tiles = gl.allocate_shared_memory(q.nope.dtype.element_ty, [CALL.STAGES, BLOCK_K, 512], CALL.TILE)
    prefix_begin, prefix_end, extend_begin, extend_end = 0, 0, 0, 0
    if prefix.nope is not None:
        prefix = RowPointers(prefix.nope, None, None, prefix.stride_n, 0, 0, 0, prefix_rows)
        prefix_csr = Csr(prefix_csr.indptr, prefix_csr.indices, prefix_nnz)
        prefix_begin, prefix_end = token_span(prefix_csr, token)
    if extend.nope is not None:
        extend = RowPointers(extend.nope, None, None, extend.stride_n, 0, 0, 0, extend_rows)
        extend_csr = Csr(extend_csr.indptr, extend_csr.indices, extend_nnz)
        extend_begin, extend_end = token_span(extend_csr, token)
    if CALL.SPLIT:
        p_lo, p_hi, e_lo, e_hi = split_tiles(
            prefix_end - prefix_begin, extend_end - extend_begin, split, num_splits, BLOCK_K
        )
        prefix_begin, prefix_end = prefix_begin + p_lo, prefix_begin + p_hi
        extend_begin, extend_end = extend_begin + e_lo, extend_begin + e_hi
    if prefix.nope is not None:
        acc, m, l = _attend(
            q_tile, acc, m, l, qk_scale, prefix, prefix_csr, prefix_begin, prefix_end, tiles, CALL
        )
    if extend.nope is not None:
        acc, m, l = _attend(
            q_tile, acc, m, l, qk_scale, extend, extend_csr, extend_begin, extend_end, tiles, CALL
        )
    heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES))
    mask = heads < CALL.NUM_HEADS
    of_sums = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, SUMS))
    stored = gl.expand_dims(of_sums < CALL.NUM_HEADS, 1)
    columns = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, SUMS)), 0)
    if CALL.SPLIT:
        slot = (split.to(gl.int64) * num_tokens + token) * CALL.NUM_HEADS
        places = gl.expand_dims(of_sums, 1) * 512 + columns
        cdna3.buffer_store(acc, partials.acc + slot * 512, places, mask=stored)
        gl.store(partials.m + slot + heads, m, mask=mask)
        gl.store(partials.l + slot + heads, l, mask=mask)
    else:
        if CALL.HAS_SINK:
            sink = gl.load(out.sink + heads, mask=mask, other=float("-inf"))
        else:
            sink = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        share = gl.convert_layout(output_factor(m, l, sink), gl.SliceLayout(1, SUMS))
        places = gl.expand_dims(of_sums * out.stride_h, 1) + columns
        o = (acc * gl.expand_dims(share, 1)).to(out.o.dtype.element_ty)
        cdna3.buffer_store(o, out.o + wide_token * out.stride_t, places, mask=stored)
        if CALL.WRITE_LSE:
            lse = out.lse + wide_token * out.stride_lt
            gl.store(lse + heads * out.stride_lh, natural_lse(m, l), mask=mask)

"""Sparse attention on CDNA3 and CDNA4 (gfx942, gfx950), in Gluon: a tile of rows lies in LDS in 16 bits.

The tile serves as K and as V. The next tile is loaded while the current one is multiplied: on CDNA4 16-bit
rows are copied to LDS asynchronously; otherwise they are held in registers, where FP8 rows are widened. QK is
divided over waves by heads and by the tile's rows, and PV by heads and by columns, so that no wave repeats
another's products.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, cdna4

from narrowkv.quant.device import e8m0_to_fp32, widen
from narrowkv.runtime.attention.softmax import headroom, natural_lse, output_factor, softmax_step
from narrowkv.runtime.launch.gluon import in_gluon, reinterpret
from narrowkv.runtime.targets import Target
from narrowkv.runtime.toolchain import TRITON
from narrowkv.sparse_fp8.config import SparseConfig
from narrowkv.sparse_fp8.kernels.prologue import heads_of_program, rows_of_program
from narrowkv.sparse_fp8.kernels.results import SIZES, SparseSpec
from narrowkv.sparse_fp8.kernels.rows import as_fp8, as_row_number, locate, names_a_row

async_copy = cdna4.async_copy
_widen = in_gluon(widen)
_heads_of_program = in_gluon(heads_of_program)


class CdnaSparseSpec(NamedTuple):
    """Constants that the kernel is compiled with.

    NUM_HEADS, HAS_SINK, WRITE_LSE, SPLIT: as in `SparseSpec`. BLOCK_H, BLOCK_K: heads of a program, rows of
    a tile.
    STAGES: tiles in LDS. ASYNC: rows go to LDS without passing through registers. UPCAST: an instruction
    converts FP8 and scales it. QUERY: how a token's query is loaded. ROWS: how rows are loaded: whole ones,
    or 64 columns of FP8 rows. SCORES, SUMS: matrix layouts of QK's and of PV's result. TILE: how a tile of
    rows lies in LDS. WORDS: the same bytes as words of two columns; VALUES: the same with V's columns in the
    order of `_columns`, which COLUMN_BITS describes: how many low bits of a column's number change places
    with how many high bits. LATE_SUM: the sum over a tile's rows is left for the end, since it takes a
    barrier; on gfx950 Triton 3.8 spills then where nothing is split, and otherwise where
    splits are.
    """

    NUM_HEADS: Any
    HAS_SINK: Any
    WRITE_LSE: Any
    SPLIT: Any
    BLOCK_H: Any
    BLOCK_K: Any
    STAGES: Any
    ASYNC: Any
    UPCAST: Any
    QUERY: Any
    ROWS: Any
    SCORES: Any
    SUMS: Any
    TILE: Any
    WORDS: Any
    VALUES: Any
    COLUMN_BITS: Any
    LATE_SUM: Any
    ORDER: Any


# Rows in LDS are padded by 16 elements against bank conflicts.
_PADDING = 16


def cdna_call(call: SparseSpec, config: SparseConfig, target: Target) -> CdnaSparseSpec:
    """The constants of a configuration, for 32 heads or more.

    Waves share QK by 16 heads and by rows, PV by 32 heads and by columns.
    """
    waves, heads, rows = config.options.num_warps, config.block_h, config.block_k
    gfx950, fp8 = target.name == "gfx950", config.kernel == "fused"
    version, k = (4, 32) if gfx950 else (3, 16)
    per_lane = rows // waves
    padding = [[512, _PADDING]]
    tile = gl.PaddedSharedLayout.with_identity_for(padding, [rows, 512], [1, 0])
    values, column_bits = tile, (0, 0)
    if not gfx950:
        # CDNA3 cannot read a tile transposed, so a lane reads several columns of a row at once. The columns
        # that the matrix layout gives a lane (one of each 32 of all waves) are therefore adjacent.
        low_bits = 5 + (waves * 32 // heads).bit_length() - 1
        order = [*range(low_bits, 9), *range(low_bits)]
        bases = [[0, 1 << bit] for bit in order] + [[1 << bit, 0] for bit in range(rows.bit_length() - 1)]
        values = gl.PaddedSharedLayout(padding, bases, [], [rows, 512])
        column_bits = (low_bits, 9 - low_bits)
    query = gl.BlockedLayout([1, 8], [1, 64], [waves, 1], [1, 0])
    parts = gl.BlockedLayout([1, per_lane], [per_lane, 64 // per_lane], [waves, 1], [1, 0])
    return CdnaSparseSpec(
        call.NUM_HEADS, call.HAS_SINK, call.WRITE_LSE, call.SPLIT, heads, rows, config.stages,
        ASYNC=gfx950 and not fp8,
        UPCAST=gfx950 and fp8,
        QUERY=query,
        ROWS=parts if fp8 else query,
        SCORES=gl.amd.AMDMFMALayout(version, [16, 16, k], True, [heads // 16, waves * 16 // heads]),
        SUMS=gl.amd.AMDMFMALayout(version, [32, 32, k // 2], True, [heads // 32, waves * 32 // heads]),
        TILE=tile,
        WORDS=gl.PaddedSharedLayout.with_identity_for([[256, _PADDING // 2]], [rows, 256], [1, 0]),
        VALUES=values,
        COLUMN_BITS=column_bits,
        LATE_SUM=TRITON >= (3, 9) or not gfx950 or call.SPLIT,
        ORDER=call.ORDER,
    )  # fmt: skip


@gluon.jit
def _tile_indices(csr, begin, end, places):
    """Row numbers at `places` after `begin`; from `end` on the last one again. `end` is not 0."""
    # Not masked: a choice between the answer and -1 would be waited for here, not where it is used.
    return as_row_number(cdna3.buffer_load(csr.indices, gl.minimum(begin + places, end - 1)))


@gluon.jit
def _load_rows(tile, rows, index, STORED: gl.constexpr, CALL: gl.constexpr):
    """Starts to load rows `index`, into `tile` or into the registers that it returns.

    Rows that are not named become zeros: a buffer load that is masked off gives zeros.
    """
    columns = gl.expand_dims(
        gl.arange(0, 512 if STORED.VALUES == "" else 64, gl.SliceLayout(0, CALL.ROWS)), 0
    )
    live = gl.expand_dims(names_a_row(index, rows.num_rows), 1)
    if STORED.VALUES == "":
        offsets = gl.expand_dims(index * rows.stride_n, 1) + columns
        if CALL.ASYNC:
            async_copy.buffer_load_to_shared(tile, rows.nope, offsets, mask=live)
            async_copy.commit_group()
            return ()
        else:
            return (cdna3.buffer_load(rows.nope, offsets, mask=live),)
    else:
        nope_at, rope_at, scale_at = locate(rows, index, STORED)
        stored, scales = (), ()
        for t in gl.static_range(7):
            x = cdna3.buffer_load(rows.nope, gl.expand_dims(nope_at, 1) + (t * 64 + columns), mask=live)
            stored = stored + (x,)
            for g in gl.static_range(64 // STORED.GROUP):
                place = scale_at + (t * (64 // STORED.GROUP) + g) * STORED.STEP
                scales = scales + (
                    cdna3.buffer_load(rows.scale, place, mask=names_a_row(index, rows.num_rows)),
                )
        rope = cdna3.buffer_load(rows.rope, gl.expand_dims(rope_at, 1) + columns, mask=live)
        return stored, scales, rope


@gluon.jit
def _store_rows(tile, loaded, STORED: gl.constexpr, CALL: gl.constexpr):
    """Stores the values that `_load_rows` returned in a tile in LDS."""
    if STORED.VALUES == "":
        if not CALL.ASYNC:
            tile.store(loaded[0])
    else:
        PARTS: gl.constexpr = 64 // STORED.GROUP
        stored, scales, rope = loaded
        words = reinterpret(tile, gl.int32, [CALL.BLOCK_K, 256], CALL.WORDS)
        columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, CALL.ROWS)), 0)
        for t in gl.static_range(7):
            scale = gl.expand_dims(scales[t * PARTS], 1)
            if PARTS == 2:
                scale = gl.where(columns < 32, scale, gl.expand_dims(scales[t * PARTS + 1], 1))
            if CALL.UPCAST:
                if STORED.SCALE == "pow2":
                    scale = (scale >> 23).to(gl.uint8)
                scale, x = gl.broadcast(scale, as_fp8(stored[t], STORED.FORMAT, STORED.ROUTE))
                tile.slice(t * 64, 64, dim=1).store(cdna4.scaled_upcast(x, scale, gl.bfloat16))
            else:
                if STORED.ROUTE == "bits":
                    widened = _widen(stored[t], STORED.FORMAT, STORED.ROUTE, gl.float16, False).to(gl.float32)
                else:
                    widened = as_fp8(stored[t], STORED.FORMAT, STORED.ROUTE).to(gl.float32)
                scale = _as_fp32(scale, STORED) * (2.0**STORED.EXPONENT)
                # The low halves of the float32 are zero: four bits times a power of two.
                even, odd = gl.split(
                    gl.reshape((widened * scale).to(gl.int32, bitcast=True), [CALL.BLOCK_K, 32, 2])
                )
                words.slice(t * 32, 32, dim=1).store(((even >> 16) & 0xFFFF) | (odd & -65536))
        tile.slice(448, 64, dim=1).store(rope)
    if not CALL.ASYNC:
        # Triton 3.8.0 places none between stores and loads in different views of a tile.
        gl.barrier()


@gluon.jit
def _as_fp32(scale, STORED: gl.constexpr):
    """Scales as loaded, as float32."""
    if STORED.SCALE == "pow2":
        return scale.to(gl.float32, bitcast=True)
    else:
        return e8m0_to_fp32(scale)


@gluon.jit
def _columns(CALL: gl.constexpr):
    """The row's columns in the order in which PV's result has them."""
    LOW: gl.constexpr = CALL.COLUMN_BITS[0]
    HIGH: gl.constexpr = CALL.COLUMN_BITS[1]
    c = gl.arange(0, 512, gl.SliceLayout(0, CALL.SUMS))
    if HIGH:
        c = ((c & ((1 << LOW) - 1)) << HIGH) | (c >> LOW)
    return gl.expand_dims(c, 0)


@gluon.jit
def _attend(
    q, acc, m, l, qk_scale, source, tiles, STORED: gl.constexpr, CALL: gl.constexpr
):  # fmt: skip
    """The rows of a source, see `rows_of_program`, into the softmax state; `tiles` holds STAGES tiles."""
    rows, csr, begin, end = source
    k_layout: gl.constexpr = gl.DotOperandLayout(1, CALL.SCORES, 8)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CALL.SUMS, 4)
    v_layout: gl.constexpr = gl.DotOperandLayout(1, CALL.SUMS, 4)
    places = gl.arange(0, CALL.BLOCK_K, gl.SliceLayout(1, CALL.ROWS))
    own = gl.arange(0, CALL.BLOCK_K, gl.SliceLayout(0, CALL.SCORES))
    zeros = gl.full([CALL.BLOCK_H, CALL.BLOCK_K], 0.0, gl.float32, CALL.SCORES)
    index = _tile_indices(csr, begin, end, places)
    own_index = _tile_indices(csr, begin, end, own)
    if CALL.ASYNC:
        for stage in gl.static_range(CALL.STAGES - 1):
            upcoming = _tile_indices(csr, begin + (stage + 1) * CALL.BLOCK_K, end, places)
            _load_rows(tiles.index(stage), rows, index, STORED, CALL)
            index = upcoming
    else:
        upcoming = _tile_indices(csr, begin + CALL.BLOCK_K, end, places)
        loaded = _load_rows(tiles.index(0), rows, index, STORED, CALL)
        _store_rows(tiles.index(0), loaded, STORED, CALL)
        index = upcoming
    slot = 0
    for start in range(begin, end, CALL.BLOCK_K):
        if CALL.ASYNC:
            free = gl.where(slot == 0, CALL.STAGES - 1, slot - 1)
            # Loads complete in order: a load that is issued before the copy does not wait for the copy.
            upcoming = _tile_indices(csr, start + CALL.STAGES * CALL.BLOCK_K, end, places)
        else:
            free = gl.where(slot == CALL.STAGES - 1, 0, slot + 1)
            upcoming = _tile_indices(csr, start + 2 * CALL.BLOCK_K, end, places)
        own_upcoming = _tile_indices(csr, start + CALL.BLOCK_K, end, own)
        loaded = _load_rows(tiles.index(free), rows, index, STORED, CALL)
        if CALL.ASYNC:
            async_copy.wait_group(CALL.STAGES - 1)
        tile = tiles.index(slot)
        s = cdna3.mfma(q, tile.permute([1, 0]).load(k_layout), zeros)
        live = names_a_row(own_index, rows.num_rows) & (start + own < end)
        s = gl.where(gl.expand_dims(live, 0), s * qk_scale, float("-inf"))
        if CALL.LATE_SUM:
            p, m, _, correction = softmax_step(s, m, m, None, headroom(q.dtype))
            l = l * gl.expand_dims(correction, 1) + p
        else:
            p, m, l, correction = softmax_step(s, m, l, None, headroom(q.dtype))
        correction = gl.convert_layout(correction, gl.SliceLayout(1, CALL.SUMS))
        p = gl.convert_layout(p.to(q.dtype), p_layout)
        if CALL.COLUMN_BITS[1]:
            tile = reinterpret(tile, q.dtype, [CALL.BLOCK_K, 512], CALL.VALUES)
        v = tile.load(v_layout)
        acc = cdna3.mfma(p, v, acc * gl.expand_dims(correction, 1))
        if not CALL.ASYNC:
            _store_rows(tiles.index(free), loaded, STORED, CALL)
        index, own_index = upcoming, own_upcoming
        slot = gl.where(slot == CALL.STAGES - 1, 0, slot + 1)
    if CALL.ASYNC:
        async_copy.wait_group(0)
    return acc, m, l


@gluon.jit(do_not_specialize=SIZES)
def _sparse_cdna_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale,
    num_tokens, num_splits, prefix_rows, prefix_nnz, extend_rows, extend_nnz,
    CALL: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
):  # fmt: skip
    """One program attends BLOCK_H heads of one token; programs run fastest over the heads of a token.

    Grid: tokens times blocks of heads, splits. PREFIX, EXTEND: `StoredRows`, or None for no source.
    """
    token, first_head = _heads_of_program(CALL, CALL.BLOCK_H)
    split = gl.program_id(1)
    token_64 = token.to(gl.int64)
    heads = first_head + gl.arange(0, CALL.BLOCK_H, gl.SliceLayout(1, CALL.QUERY))
    columns = gl.arange(0, 512, gl.SliceLayout(0, CALL.QUERY))
    offsets = gl.expand_dims(heads * q.stride_h, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(heads < CALL.NUM_HEADS, 1)
    q_tile = cdna3.buffer_load(q.nope + token_64 * q.stride_n, offsets, mask=inside, other=0.0)
    q_tile = gl.convert_layout(q_tile, gl.DotOperandLayout(0, CALL.SCORES, 8))  # [BLOCK_H, 512]
    m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, CALL.SCORES))
    if CALL.LATE_SUM:
        l = gl.full([CALL.BLOCK_H, CALL.BLOCK_K], 0.0, gl.float32, CALL.SCORES)
    else:
        l = gl.full([CALL.BLOCK_H], 0.0, gl.float32, gl.SliceLayout(1, CALL.SCORES))
    acc = gl.full([CALL.BLOCK_H, 512], 0.0, gl.float32, CALL.SUMS)
    tiles = gl.allocate_shared_memory(q.nope.dtype.element_ty, [CALL.STAGES, CALL.BLOCK_K, 512], CALL.TILE)
    prefix, extend, _ = rows_of_program(
        prefix, prefix_csr, extend, extend_csr, token, heads, split, num_tokens, num_splits,
        prefix_rows, prefix_nnz, extend_rows, extend_nnz,
        PREFIX, EXTEND, CALL.SPLIT, None, CALL.BLOCK_K,
    )  # fmt: skip
    if PREFIX is not None:
        acc, m, l = _attend(q_tile, acc, m, l, qk_scale, prefix, tiles, PREFIX, CALL)
    if EXTEND is not None:
        acc, m, l = _attend(q_tile, acc, m, l, qk_scale, extend, tiles, EXTEND, CALL)
    if CALL.LATE_SUM:
        l = gl.sum(l, 1)
    heads = first_head + gl.arange(0, CALL.BLOCK_H, gl.SliceLayout(1, CALL.SCORES))
    mask = heads < CALL.NUM_HEADS
    of_sums = first_head + gl.arange(0, CALL.BLOCK_H, gl.SliceLayout(1, CALL.SUMS))
    stored = gl.expand_dims(of_sums < CALL.NUM_HEADS, 1)
    columns = _columns(CALL)
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
            sink = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, CALL.SCORES))
        factor = gl.convert_layout(output_factor(m, l, sink), gl.SliceLayout(1, CALL.SUMS))
        places = gl.expand_dims(of_sums * out.stride_h, 1) + columns
        o = (acc * gl.expand_dims(factor, 1)).to(out.o.dtype.element_ty)
        cdna3.buffer_store(o, out.o + token_64 * out.stride_t, places, mask=stored)
        if CALL.WRITE_LSE:
            lse = out.lse + token_64 * out.stride_lt
            gl.store(lse + heads * out.stride_lh, natural_lse(m, l), mask=mask)

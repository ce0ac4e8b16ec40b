"""Attention over widened keys on CDNA4 (gfx950), in Gluon: two groups of waves take turns at the matrix unit.

While four waves of a compute unit multiply, the other four compute the softmax of their last scores. Tiles of
keys are copied to LDS asynchronously, two tiles ahead. Packed float32 instructions, which the matrix unit
delays, are switched off by the launch options (`tiles.cdna_config`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna3, cdna4, warp_pipeline_stage

from narrowkv.attn_prefill.kernels import dense, rows
from narrowkv.paged_cache.kernels import outputs, pages, queries
from narrowkv.runtime.attention import masks, softmax, xcds
from narrowkv.runtime.launch.gluon import in_gluon

async_copy = cdna4.async_copy
scheduled_tile = in_gluon(rows.scheduled_tile)
rows_of = in_gluon(rows.rows_of)
shifted_maximum = in_gluon(rows.shifted_maximum)
sum_of_held_keys = in_gluon(rows.sum_of_held_keys)
times_head_descale = in_gluon(pages.times_head_descale)
as_fp8 = in_gluon(queries.as_fp8)
key_range = in_gluon(masks.key_range)
masked_scores = in_gluon(dense.masked_scores)
program_on_its_xcd = in_gluon(xcds.program_on_its_xcd)
multiply_values = in_gluon(softmax.multiply_values)
softmax_step = in_gluon(softmax.softmax_step)
write_rows = in_gluon(outputs.write_rows)


class CdnaCall(NamedTuple):
    """What the kernel is compiled for.

    BLOCK_M, BLOCK_N, STAGES: rows and keys of a tile, key tiles in LDS. FP8: whether Q and K are FP8.
    K_BLOCK_FACTORS, V_BLOCK_FACTORS: whether tiles of K or V have a factor; see `Scratch`.
    SCORES, SUMS: layouts of Q @ K^T and of P @ V. WIDTH: adjacent channels of Q and K in a lane.
    QUERY, KEYS, VALUES: how lanes load Q and copy K and V. KEY_TILE, VALUE_TILE: K and V in LDS.
    """

    BLOCK_M: Any
    BLOCK_N: Any
    STAGES: Any
    FP8: Any
    K_BLOCK_FACTORS: Any
    V_BLOCK_FACTORS: Any
    SCORES: Any
    SUMS: Any
    WIDTH: Any
    QUERY: Any
    KEYS: Any
    VALUES: Any
    KEY_TILE: Any
    VALUE_TILE: Any


def cdna_call(
    block_m: int,
    block_n: int,
    head_dim: int,
    warps: int,
    fp8: bool,
    k_block_factors: bool,
    v_block_factors: bool,
) -> CdnaCall:
    """The constants of a tile shape: 32 rows for each wave."""
    sums = AMDMFMALayout(4, [32, 32, 16], True, [warps, 1])
    scores = AMDMFMALayout(4, [32, 32, 64], True, [warps, 1]) if fp8 else sums
    width, stored = (16, gl.float8e4nv) if fp8 else (8, gl.float16)
    padded = cdna4.compute_efficient_padded_shared_layout.fn
    key_tile = padded(gl.DotOperandLayout(1, scores, width), [head_dim, block_n], stored, True)
    value_tile = padded(gl.DotOperandLayout(1, sums, 4), [block_n, head_dim], gl.float16, False)
    lanes = head_dim // width
    return CdnaCall(
        block_m, block_n, 3, fp8, k_block_factors, v_block_factors, scores, sums, width,
        QUERY=gl.BlockedLayout([1, width], [64 // lanes, lanes], [warps, 1], [1, 0]),
        KEYS=_in_order(key_tile, width, warps),
        VALUES=_in_order(value_tile, 8, warps),
        KEY_TILE=key_tile,
        VALUE_TILE=value_tile,
    )  # fmt: skip


def _in_order(tile: Any, vector: int, warps: int) -> Any:
    """The layout whose lanes, then waves, then registers write a tile in LDS in the order of its offsets."""
    bases = [list(basis) for basis in tile.offset_bases]
    lanes = vector.bit_length() - 1
    waves, rest = lanes + 6, lanes + 6 + warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        bases[:lanes] + bases[rest:], bases[lanes:waves], bases[waves:rest], [], list(tile.shape)
    )


class _Keys(NamedTuple):
    """K and V of a sequence and head in the scratch, offsets of a tile's elements, and tiles in LDS.

    k_block_factor, v_block_factor: factors of tiles, read if K_BLOCK_FACTORS or V_BLOCK_FACTORS.
    """

    k: Any
    v: Any
    k_block_factor: Any
    v_block_factor: Any
    k_offsets: Any
    v_offsets: Any
    k_tiles: Any
    v_tiles: Any


@gluon.jit
def _load_query(
    q, tile, kv_head, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr, FP8: gl.constexpr,
    CALL: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    """Rows of a tile of Q as the operand of Q @ K^T; zeros past the last row."""
    line = tile.number * CALL.BLOCK_M + gl.arange(0, CALL.BLOCK_M, gl.SliceLayout(1, CALL.QUERY))
    token = (tile.q_start + line // GQA_RATIO).to(gl.int64)
    head = kv_head * GQA_RATIO + line % GQA_RATIO
    at = gl.expand_dims(token * q.token + head * q.head, 1)
    at += gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, CALL.QUERY)), 0)
    there = gl.expand_dims(line < tile.q_len * GQA_RATIO, 1)
    x = gl.load(q.ptr + at, mask=there, other=0.0, cache_modifier=CACHE)
    if FP8 is not None:
        # The caller's bytes may be any, NaN and negative zero of OCP included.
        x = as_fp8(x, FP8, False)
    return gl.convert_layout(x, gl.DotOperandLayout(0, CALL.SCORES, CALL.WIDTH))


@gluon.jit
def _copy_keys(keys, slot, tile, CALL: gl.constexpr):
    """Starts to copy tile `tile` of K."""
    step = keys.k_tiles.shape[1] * CALL.BLOCK_N
    async_copy.buffer_load_to_shared(keys.k_tiles.index(slot), keys.k + tile * step, keys.k_offsets)


@gluon.jit
def _copy_values(keys, slot, tile, CALL: gl.constexpr):
    """Starts to copy tile `tile` of V."""
    step = keys.v_tiles.shape[2] * CALL.BLOCK_N
    async_copy.buffer_load_to_shared(keys.v_tiles.index(slot), keys.v + tile * step, keys.v_offsets)


@gluon.jit
def _load_block_factors(keys, tile, CALL: gl.constexpr):
    """The factors of tile `tile` of K and of V, or 1; V's are powers of two."""
    k_block_factor, v_block_factor = gl.to_tensor(1.0), gl.to_tensor(1.0)
    if CALL.K_BLOCK_FACTORS:
        k_block_factor = gl.load(keys.k_block_factor + tile)
    if CALL.V_BLOCK_FACTORS:
        v_block_factor = gl.load(keys.v_block_factor + tile)
    return k_block_factor, v_block_factor


@gluon.jit
def _quotient(a, b):
    """A / b of two powers of two: 0 below 2**-126, Inf from 2**128 on.

    A division takes ten vector instructions.
    """
    exponent = (a.to(gl.int32, bitcast=True) - b.to(gl.int32, bitcast=True)) >> 23
    exponent = gl.minimum(gl.maximum(exponent, -127), 128)
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _scores(q, keys, slot, CALL: gl.constexpr):
    """Q @ K^T of the tile in a slot, [BLOCK_M, BLOCK_N]."""
    k = keys.k_tiles.index(slot).load(gl.DotOperandLayout(1, CALL.SCORES, CALL.WIDTH))
    zeros = gl.full([CALL.BLOCK_M, CALL.BLOCK_N], 0.0, gl.float32, CALL.SCORES)
    if CALL.FP8:
        return cdna4.mfma_scaled(q, None, "e4m3", k.to(q.dtype, bitcast=True), None, "e4m3", zeros)
    else:
        return cdna3.mfma(q, k, zeros)


@gluon.jit
def _add_values(p, keys, slot, acc, CALL: gl.constexpr):
    """Acc + P @ V of the tile in a slot."""
    return cdna3.mfma(p, keys.v_tiles.index(slot).load(gl.DotOperandLayout(1, CALL.SUMS, 4)), acc)


@gluon.jit
def _numerators(s, m, l, scale, k_block_factor, before, v_block_factor, CALL: gl.constexpr):
    """The softmax step, with P as the operand of P @ V and the correction of each row of `acc`.

    `acc` must still be multiplied by V's factor: by `before`, that of the previous tile, and after the
    correction by `v_block_factor`, that of this one.
    """
    if CALL.K_BLOCK_FACTORS:
        scale = scale * k_block_factor
    p, m, l, correction = softmax_step(s, m, l, scale)
    if CALL.V_BLOCK_FACTORS:
        correction = correction * _quotient(before, v_block_factor)
    p = gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, CALL.SUMS, 4))
    return p, m, l, gl.convert_layout(correction, gl.SliceLayout(1, CALL.SUMS))


@gluon.jit
def _full_tiles(q, acc, m, l, scale, keys, first, end, CALL: gl.constexpr):
    """Attends to the key tiles [first, end), which need no mask; there is at least one.

    Args:
        acc: zeros.

    Returns:
        `(acc, m, l, v_block_factor)`; `acc` must still be multiplied by the factor, of V's last tile.
    """
    last = end - 1
    k_block_factor, v_block_factor = _load_block_factors(keys, first, CALL)
    # A group of copies is K of one tile and V of the tile before. Two groups are in flight at any time.
    _copy_keys(keys, 0, first, CALL)
    async_copy.commit_group()
    _copy_keys(keys, 1, gl.minimum(first + 1, last), CALL)
    _copy_values(keys, 0, first, CALL)
    async_copy.commit_group()
    async_copy.wait_group(1)
    s = _scores(q, keys, 0, CALL)
    _copy_keys(keys, 2, gl.minimum(first + 2, last), CALL)
    _copy_values(keys, 1, gl.minimum(first + 1, last), CALL)
    async_copy.commit_group()
    p, m, l, _correction = _numerators(s, m, l, scale, k_block_factor, v_block_factor, v_block_factor, CALL)
    async_copy.wait_group(1)
    slot = 0
    for tile in range(first + 1, end):
        own = gl.where(slot == 2, 0, slot + 1)
        free = gl.where(slot == 0, 2, slot - 1)
        before = v_block_factor
        with warp_pipeline_stage("products", priority=1):
            # These loads complete at the wait for copies below.
            k_block_factor, v_block_factor = _load_block_factors(keys, tile, CALL)
            s = _scores(q, keys, own, CALL)
            acc = _add_values(p, keys, slot, acc, CALL)
        # The two groups of waves are half a pass apart. Each waits here for the copies that it issued, which
        # the other reads as well.
        async_copy.wait_group(0)
        with warp_pipeline_stage("softmax", priority=0):
            _copy_keys(keys, slot, gl.minimum(tile + 2, last), CALL)
            _copy_values(keys, free, gl.minimum(tile + 1, last), CALL)
            async_copy.commit_group()
            p, m, l, correction = _numerators(s, m, l, scale, k_block_factor, before, v_block_factor, CALL)
            acc = acc * gl.expand_dims(correction, 1)
        slot = own
    async_copy.wait_group(0)
    acc = _add_values(p, keys, slot, acc, CALL)
    return acc, m, l, v_block_factor


@gluon.jit
def _masked_tiles(
    q, acc, m, l, v_block_factor, scale, keys, query_pos, first, num_keys, begin, end, full, full_end,
    RULES: gl.constexpr, CALL: gl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) outside [full, full_end).

    On entry and on return `acc` must still be multiplied by `v_block_factor`, of the last tile of V.
    """
    n = gl.arange(0, CALL.BLOCK_N, gl.SliceLayout(0, CALL.SCORES))
    for tile in range(begin, end - (full_end - full)):
        tile += gl.where(tile < full, 0, full_end - full)
        last_factor = v_block_factor
        k_block_factor, v_block_factor = _load_block_factors(keys, tile, CALL)
        _copy_keys(keys, 0, tile, CALL)
        _copy_values(keys, 0, tile, CALL)
        async_copy.commit_group()
        async_copy.wait_group(0)
        s = _scores(q, keys, 0, CALL)
        before = tile * CALL.BLOCK_N
        s = masked_scores(
            s, n, query_pos - before, first - before, num_keys - before, CALL.K_BLOCK_FACTORS, False,
            RULES.window_left, RULES.window_right,
        )  # fmt: skip
        p, m, l, correction = _numerators(s, m, l, scale, k_block_factor, last_factor, v_block_factor, CALL)
        acc = _add_values(p, keys, 0, acc * gl.expand_dims(correction, 1), CALL)
    return acc, m, l, v_block_factor


@gluon.jit(do_not_specialize=rows.RUNTIME_SIZES)
def _cdna_prefill_kernel(
    q, out, rope, scratch, k_desc, v_desc, k_descale, v_descale, workspace,
    qk_scale, out_scale, soft_cap, num_splits,
    SIZES: gl.constexpr, K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr, RULES: gl.constexpr,
    CALL: gl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head over the widened keys; arguments of `_dense_prefill_kernel`.

    It serves calls without soft caps, splits, rotation, a second term of Q, and factors of single keys.
    """
    NUM_HEADS: gl.constexpr = SIZES.num_kv_heads * SIZES.gqa_ratio
    pid = program_on_its_xcd(gl.program_id(0), gl.num_programs(0), RULES.order)
    kv_head = pid % SIZES.num_kv_heads
    tile = scheduled_tile(scratch.schedule, pid // SIZES.num_kv_heads)
    seq, kv_len, before = tile.seq, tile.kv_len, tile.before
    if seq < 0:
        return
    q_tile = _load_query(q, tile, kv_head, SIZES.gqa_ratio, SIZES.head_dim, RULES.fp8, CALL, "")
    row_layout: gl.constexpr = gl.SliceLayout(1, CALL.SCORES)
    scale = gl.full([CALL.BLOCK_M], 1.0, gl.float32, row_layout) * qk_scale
    if RULES.q_descale:
        scale *= gl.load(q.descale)
    scale = times_head_descale(scale, k_descale, seq, kv_head, K_DESCALE)
    first_pos = before + tile.number * CALL.BLOCK_M // SIZES.gqa_ratio
    last_pos = before + gl.minimum(((tile.number + 1) * CALL.BLOCK_M - 1) // SIZES.gqa_ratio, tile.q_len - 1)
    first = tile.padding if CALL.K_BLOCK_FACTORS else kv_len * 0
    begin, end, full, full_end = key_range(
        first_pos, last_pos, first, kv_len, RULES.window_left, RULES.window_right, CALL.BLOCK_N
    )
    block = (tile.base + kv_head.to(gl.int64) * scratch.rows) // CALL.BLOCK_N
    row = block * (CALL.BLOCK_N * SIZES.head_dim)
    k_column = gl.expand_dims(gl.arange(0, SIZES.head_dim, gl.SliceLayout(1, CALL.KEYS)), 1)
    k_row = gl.expand_dims(gl.arange(0, CALL.BLOCK_N, gl.SliceLayout(0, CALL.KEYS)), 0)
    v_row = gl.expand_dims(gl.arange(0, CALL.BLOCK_N, gl.SliceLayout(1, CALL.VALUES)), 1)
    v_column = gl.expand_dims(gl.arange(0, SIZES.head_dim, gl.SliceLayout(0, CALL.VALUES)), 0)
    keys = _Keys(
        scratch.k + row, scratch.v + row, scratch.k_block_factor + block if CALL.K_BLOCK_FACTORS else block,
        scratch.v_block_factor + block if CALL.V_BLOCK_FACTORS else block, k_row * SIZES.head_dim + k_column,
        v_row * SIZES.head_dim + v_column, gl.allocate_shared_memory(scratch.k.dtype.element_ty, [CALL.STAGES,
        SIZES.head_dim, CALL.BLOCK_N], CALL.KEY_TILE), gl.allocate_shared_memory(scratch.v.dtype.element_ty,
        [CALL.STAGES, CALL.BLOCK_N, SIZES.head_dim], CALL.VALUE_TILE),
    )  # fmt: skip
    m = gl.full([CALL.BLOCK_M], float("-inf"), gl.float32, row_layout)
    l = gl.full([CALL.BLOCK_M], 0.0, gl.float32, row_layout)
    acc = gl.full([CALL.BLOCK_M, SIZES.head_dim], 0.0, gl.float32, CALL.SUMS)
    v_block_factor = gl.to_tensor(1.0)
    if full < full_end:
        acc, m, l, v_block_factor = _full_tiles(q_tile, acc, m, l, scale, keys, full, full_end, CALL)
    query_pos = (
        before + (tile.number * CALL.BLOCK_M + gl.arange(0, CALL.BLOCK_M, row_layout)) // SIZES.gqa_ratio
    )
    if RULES.fp8 is not None:
        # Q is loaded again: the compiler would hold its bytes in registers through the first loop, and spill.
        # The cache modifier keeps it from merging the two loads.
        q_tile = _load_query(q, tile, kv_head, SIZES.gqa_ratio, SIZES.head_dim, RULES.fp8, CALL, ".cg")
    acc, m, l, v_block_factor = _masked_tiles(
        q_tile, acc, m, l, v_block_factor, scale, keys, query_pos, first, kv_len, begin, end, full, full_end,
        RULES, CALL,
    )  # fmt: skip
    m = gl.convert_layout(m, gl.SliceLayout(1, CALL.SUMS))
    l = gl.convert_layout(l, gl.SliceLayout(1, CALL.SUMS))
    if CALL.V_BLOCK_FACTORS:
        acc, m, l = multiply_values(acc, m, l, v_block_factor)
    o_scale = gl.full([CALL.BLOCK_M], 1.0, gl.float32, gl.SliceLayout(1, CALL.SUMS)) * out_scale
    o_scale = times_head_descale(o_scale, v_descale, seq, kv_head, V_DESCALE)
    tokens, heads, row_mask, within = rows_of(
        tile.q_start, tile.q_len, tile.number, kv_head, SIZES.gqa_ratio, CALL.BLOCK_M
    )
    m = shifted_maximum(m, q.shift, tokens, heads, row_mask, NUM_HEADS, False)
    l = sum_of_held_keys(l, tile, within, RULES.window_right)
    write_rows(
        out.ptr, out.scale, out.lse, out.sinks, acc, m, l, o_scale, heads, tokens, row_mask,
        gl.arange(0, SIZES.head_dim, gl.SliceLayout(0, CALL.SUMS)), out.token, out.head, out.lse_token,
        SIZES.head_dim, RULES.sinks, RULES.lse,
    )  # fmt: skip

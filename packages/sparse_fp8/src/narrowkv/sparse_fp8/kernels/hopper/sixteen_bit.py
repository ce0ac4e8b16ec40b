"""Sparse attention on Hopper (sm90) by warps with different tasks, in Gluon.

The kernels in plain Triton gather, multiply and normalise a tile in turn. Here a warpgroup gathers rows into
two tiles in shared memory, multiplies them by Q and computes the softmax; two more multiply P by V meanwhile,
a tile behind, with half of the 512 columns each. A program works through items (token, block of heads, split)
of the whole call, so that one item's end overlaps with the next one's beginning. This is the kernel for
16-bit rows; `hopper_fp8` widens FP8 rows, with what both share from here.

ptxas holds a product 256 columns wide to the registers of a thread at launch: 12 warps have 168, 13 have
152, of which 154 are needed for 64 x 256 sums. Hence three warpgroups, and no fourth that only gathers.

Source of the structure: warp specialisation as in FlashAttention-3 (Shah et al., 2024).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from narrowkv.runtime.attention.softmax import natural_lse, output_factor
from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _copy_query,
    _copy_rows,
    _item,
    _locate_rows,
    _make_writes_visible,
    _select_source,
    _tile_indices,
)
from narrowkv.sparse_fp8.kernels.results import SIZES
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers


@gluon.jit
def _softmax_tile(
    s, masked, m, l, qk_scale, numerators, corrections, changes, SLACK: gl.constexpr, HEADROOM: gl.constexpr
):  # fmt: skip
    """A tile's numerators and what earlier sums shrink by, to shared memory; the new state.

    The reference m of a row follows only a tile that passes it by more than SLACK, in powers of two, and then
    lies HEADROOM above it: so sums rarely have to shrink, and `changes` (one for each warp's rows) says when.
    """
    s = s * qk_scale + masked[None, :]
    top = gl.max(s, 1)
    m_new = gl.where(top > m + SLACK, top + HEADROOM, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - m_safe[:, None])
    correction = gl.exp2(m - m_safe)
    numerators.store(p.to(numerators.dtype))
    corrections.store(correction)
    changed = gl.reshape((m_new > m).to(gl.int32), [changes.shape[0], m.shape[0] // changes.shape[0]])
    changes.store(gl.max(changed, 1))
    return m_new, l * correction + gl.sum(p, 1)


@gluon.jit
def _multiply(query, tile, zeros):
    """Issues Q K^T of one tile; the caller waits for the result."""
    return warpgroup_mma(query, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _finish_scores(
    m, l, out, partials, token, head_block, split, num_tokens, turn, factors, finished, released,
    NUM_HEADS: gl.constexpr, SPLIT: gl.constexpr, HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """Passes an item's factors to the warps that compute PV, and stores its lse, or a split's state."""
    heads = head_block * m.shape[0] + gl.arange(0, m.shape[0], ROW)
    mask = heads < NUM_HEADS
    if HAS_SINK:
        sink = gl.load(out.sink + heads, mask=mask, other=float("-inf"))
    else:
        sink = gl.full([m.shape[0]], float("-inf"), gl.float32, ROW)
    mbarrier.wait(released, (turn & 1) ^ 1)
    factors.store(output_factor(m, l, sink))
    gl.barrier()
    mbarrier.arrive(finished, count=1)
    if SPLIT:
        slot = (split.to(gl.int64) * num_tokens + token) * NUM_HEADS
        gl.store(partials.m + slot + heads, m, mask=mask)
        gl.store(partials.l + slot + heads, l, mask=mask)
    elif WRITE_LSE:
        gl.store(
            out.lse + token.to(gl.int64) * out.stride_lt + heads * out.stride_lh, natural_lse(m, l), mask=mask
        )


@gluon.jit
def _copy_tile(
    prefix, extend, first, index, number, tiles, bias, empty,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
    STAGES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Starts to copy 16-bit rows into buffer `number` of the ring, once that is free."""
    live, at, _, _ = _locate_rows(prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND)
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)
    bias.index(stage).store(gl.where(live, 0.0, float("-inf")))
    _copy_rows(
        tiles.index(stage),
        _select_source(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND),
        at,
        live,
        COPY,
    )


@gluon.jit
def _score_warps(
    q, qk_scale, out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits,
    num_items, query, tiles, numerators, bias, corrections, changes, factors, scored, empty, finished,
    released, CALL: gl.constexpr,
):  # fmt: skip
    """16-bit rows into the tile buffers; QK; the softmax."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CALL.BLOCK_K, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, CALL.BLOCK_K, gl.SliceLayout(1, COPY))
    zeros = gl.full([CALL.BLOCK_H, CALL.BLOCK_K], 0.0, gl.float32, SCORES)
    count, turn = 0, 0
    upcoming = _item(
        prefix_csr, extend_csr, gl.program_id(0), num_tokens, num_splits,
        CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
    )  # fmt: skip
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = upcoming
        token, head_block, split, num_tiles = item[0], item[1], item[2], item[3]
        _copy_query(query, q.nope, q.stride_n, q.stride_h, token, head_block, CALL.NUM_HEADS)
        index = _tile_indices(
            prefix_csr, extend_csr, item, 0, r, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.BLOCK_K
        )
        _copy_tile(
            prefix, extend, item[8] > 0, index, count, tiles, bias, empty,
            CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX, CALL.EXTEND, CALL.STAGES, COPY,
        )  # fmt: skip
        async_copy.commit_group()
        index = _tile_indices(
            prefix_csr, extend_csr, item, 1, r, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.BLOCK_K
        )
        upcoming = _item(
            prefix_csr, extend_csr, gl.minimum(number + gl.num_programs(0), num_items - 1),
            num_tokens, num_splits, CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT,
            CALL.BLOCK_K,
        )  # fmt: skip
        m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, ROW)
        l = gl.full([CALL.BLOCK_H], 0.0, gl.float32, ROW)
        for tile in range(num_tiles):
            stage = count % CALL.STAGES
            # Indices come one tile ahead of the rows that wait for them.
            next_index = _tile_indices(
                prefix_csr, extend_csr, item, tile + 2, r, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.BLOCK_K
            )
            async_copy.wait_group(0)
            _make_writes_visible()
            s = _multiply(query, tiles.index(stage), zeros)
            if tile + 1 < num_tiles:
                _copy_tile(
                    prefix, extend, tile + 1 < item[8], index, count + 1, tiles, bias, empty,
                    CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX, CALL.EXTEND, CALL.STAGES, COPY,
                )  # fmt: skip
            async_copy.commit_group()
            masked = bias.index(stage).load(gl.SliceLayout(0, SCORES))
            scores = warpgroup_mma_wait(0, deps=[s])
            m, l = _softmax_tile(
                scores, masked, m, l, qk_scale,
                numerators.index(stage), corrections.index(stage), changes.index(stage),
                CALL.SLACK, CALL.HEADROOM,
            )  # fmt: skip
            _make_writes_visible()
            mbarrier.arrive(scored.index(stage), count=1)
            index = next_index
            count += 1
        async_copy.wait_group(0)
        _finish_scores(
            m, l, out, partials, token, head_block, split, num_tokens, turn, factors, finished, released,
            CALL.NUM_HEADS, CALL.SPLIT, CALL.HAS_SINK, CALL.WRITE_LSE, ROW,
        )  # fmt: skip
        turn += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _exchange_lanes(a, b, second, LANES: gl.constexpr):
    """Exchanges b of the first and a of the second of two lanes whose numbers differ by LANES."""
    ASM: gl.constexpr = (
        "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;" if LANES == 1 else "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"
    )
    sent = gl.where(second, a, b)
    taken = gl.inline_asm_elementwise(ASM, "=r,r", [sent], dtype=gl.int32, is_pure=False, pack=1)
    return gl.where(second, taken, a), gl.where(second, b, taken)


@gluon.jit
def _gather_lines(x, DTYPE: gl.constexpr):
    """A product's float32 results as 16-bit ones, with eight adjacent columns in each thread.

    A product leaves a thread two of eight columns. The four lanes of a row, each with its pairs of four
    times eight columns, transpose them, and store 16 bytes at once.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    low, high = gl.split(gl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    BF16: gl.constexpr = DTYPE == gl.bfloat16  # noqa: SIM300 - no constant
    PACK: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if BF16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    pairs = gl.inline_asm_elementwise(PACK, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    # Two bits say which eight columns, two more the lane: the lane goes before them.
    pairs = gl.permute(gl.reshape(pairs, [ROWS, COLUMNS // 32, 2, 2, 4]), (0, 1, 4, 2, 3))
    even, odd = gl.split(pairs)
    eight_0, eight_2 = gl.split(even)
    eight_1, eight_3 = gl.split(odd)
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, eight_0.type.layout)))[None, None, :]
    eight_0, eight_1 = _exchange_lanes(eight_0, eight_1, lane % 2 == 1, 1)
    eight_2, eight_3 = _exchange_lanes(eight_2, eight_3, lane % 2 == 1, 1)
    eight_0, eight_2 = _exchange_lanes(eight_0, eight_2, lane >= 2, 2)
    eight_1, eight_3 = _exchange_lanes(eight_1, eight_3, lane >= 2, 2)
    pairs = gl.join(gl.join(eight_0, eight_2), gl.join(eight_1, eight_3))
    pairs = gl.reshape(pairs, [ROWS, COLUMNS // 2])
    low, high = pairs.to(gl.int16), (pairs >> 16).to(gl.int16)
    # The same numbers in the same threads, in the order of the columns.
    LINES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]]
        + ([[0, 128]] if gl.num_warps() == 8 else []),
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]] + ([[0, 256]] if gl.num_warps() == 8 else []),
        block_bases=[],
        shape=x.shape,
    )
    lines = gl.convert_layout(gl.reshape(gl.join(low, high), [ROWS, COLUMNS]), LINES)
    return lines.to(DTYPE, bitcast=True)


@gluon.jit
def _store_results(
    out, partials, acc, factor, item, num_tokens, first_column, NUM_HEADS: gl.constexpr, SPLIT: gl.constexpr
):
    """Stores an item's sums of columns from the first on: the results, or a split's partial results."""
    token, head_block, split = item[0], item[1], item[2]
    if SPLIT:
        target = partials.acc + (split.to(gl.int64) * num_tokens + token) * NUM_HEADS * 512
        _store_heads(target + first_column, 512, acc, head_block, NUM_HEADS)
    else:
        result = acc * factor[:, None]
        if out.o.dtype.element_ty.primitive_bitwidth == 16:
            result = _gather_lines(result, out.o.dtype.element_ty)
        target = out.o + token.to(gl.int64) * out.stride_t + first_column
        _store_heads(target, out.stride_h, result, head_block, NUM_HEADS)


@gluon.jit
def _take_factors(factors, turn, finished, released, ROW: gl.constexpr):
    """The factors of an item's sums that `_finish_scores` stored."""
    mbarrier.wait(finished, turn & 1)
    factor = factors.load(ROW)
    gl.barrier()
    mbarrier.arrive(released, count=1)
    return factor


@gluon.jit
def _store_heads(target, stride_h, x, head_block, NUM_HEADS: gl.constexpr):
    """Stores columns of BLOCK_H heads of one token, from the address of its first head on."""
    LAYOUT: gl.constexpr = x.type.layout
    heads = head_block * x.shape[0] + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(target + (heads[:, None] * stride_h + d[None, :]), x, mask=(heads < NUM_HEADS)[:, None])


@gluon.jit
def _sum_warps(
    out, partials, prefix_csr, extend_csr, num_tokens, num_splits, num_items, tiles, numerators,
    corrections, changes, factors, scored, empty, finished, released, CALL: gl.constexpr,
):  # fmt: skip
    """PV: sums the tiles' rows by their numerators, and stores the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    count, turn = 0, 0
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = _item(
            prefix_csr, extend_csr, number, num_tokens, num_splits,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
        )  # fmt: skip
        acc = gl.full([CALL.BLOCK_H, 512], 0.0, gl.float32, SUMS)
        for _ in range(item[3]):
            stage = count % CALL.STAGES
            mbarrier.wait(scored.index(stage), count // CALL.STAGES & 1)
            if gl.max(changes.index(stage).load(EVERYWHERE), 0) > 0:
                acc = acc * corrections.index(stage).load(ROW)[:, None]
            acc = warpgroup_mma(numerators.index(stage), tiles.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        factor = _take_factors(factors, turn, finished, released, ROW)
        _store_results(out, partials, acc, factor, item, num_tokens, 0, CALL.NUM_HEADS, CALL.SPLIT)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit(do_not_specialize=[*SIZES, "num_items"])
def _sparse_hopper_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale, num_tokens, num_splits,
    num_items, prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; each works through items in steps of the grid."""
    DTYPE: gl.constexpr = q.nope.dtype.element_ty
    if CALL.HAS_PREFIX:
        prefix = RowPointers(
            prefix.nope, prefix.rope, prefix.scale, prefix.stride_n, prefix.stride_r, prefix.stride_s,
            prefix.stride_h, prefix_rows,
        )  # fmt: skip
        prefix_csr = Csr(prefix_csr.indptr, prefix_csr.indices, prefix_nnz)
    if CALL.HAS_EXTEND:
        extend = RowPointers(
            extend.nope, extend.rope, extend.scale, extend.stride_n, extend.stride_r, extend.stride_s,
            extend.stride_h, extend_rows,
        )  # fmt: skip
        extend_csr = Csr(extend_csr.indptr, extend_csr.indices, extend_nnz)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 512], SWIZZLED)
    tiles = gl.allocate_shared_memory(DTYPE, [CALL.STAGES, CALL.BLOCK_K, 512], SWIZZLED)
    numerators = gl.allocate_shared_memory(
        DTYPE,
        [CALL.STAGES, CALL.BLOCK_H, CALL.BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([CALL.BLOCK_H, CALL.BLOCK_K], DTYPE),
    )
    bias = gl.allocate_shared_memory(gl.float32, [CALL.STAGES, CALL.BLOCK_K], LINE)
    corrections = gl.allocate_shared_memory(gl.float32, [CALL.STAGES, CALL.BLOCK_H], LINE)
    changes = gl.allocate_shared_memory(gl.int32, [CALL.STAGES, 4], LINE)
    factors = gl.allocate_shared_memory(gl.float32, [CALL.BLOCK_H], LINE)
    # For each tile buffer: its numerators are there; it has been summed and may be overwritten.
    scored = gl.allocate_shared_memory(gl.int64, [CALL.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CALL.STAGES, 1], mbarrier.MBarrierLayout())
    # For the factors of an item, likewise.
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CALL.STAGES):
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(finished, count=1)
    mbarrier.init(released, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _sum_warps,
                (
                    out, partials, prefix_csr, extend_csr, num_tokens, num_splits, num_items,
                    tiles, numerators, corrections, changes, factors, scored, empty,
                    finished, released,
                    CALL,
                ),
            ),
            (
                _score_warps,
                (
                    q, qk_scale, out, partials,
                    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    query, tiles, numerators, bias, corrections, changes, factors, scored, empty,
                    finished, released,
                    CALL,
                ),
            ),
        ],
        [4],
        [168],
    )  # fmt: skip

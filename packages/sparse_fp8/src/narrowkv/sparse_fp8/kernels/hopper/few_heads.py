"""Sparse attention on Hopper (sm90) for few heads, in Gluon: both products swapped, so no head is padded.

Up to 32 heads over 16-bit rows, up to 16 over FP8 rows.

wgmma multiplies 64 rows of A at least. With few heads those are rows of the pool, not heads: QK is K Q^T,
`[64 rows, heads]`, and PV is V^T P, `[512 columns, heads]`, each with a tile in shared memory as A. Such an
instruction takes 20 cycles, 16 of them to read A, and a warp waits for the products that it issued. So every
task has its own warps: producer warps gather rows into a ring of tiles and widen FP8; one warpgroup computes
QK and the softmax; one computes PV of the tile before.

A value that a loop loads for its next pass is not used in the current pass, not even to clamp or unpack it:
the loads share a scoreboard, and the use of one waits for all. So spans, indices and rows are carried in the
form in which they were read.

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
from narrowkv.sparse_fp8.kernels.hopper.few_heads_gather import _first_tile, _gather_warps, _item, _spans
from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _copy_query,
    _make_writes_visible,
)
from narrowkv.sparse_fp8.kernels.results import SIZES
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers


@gluon.jit
def _column_maxima(s, tops):
    """The maxima of s `[rows, heads]` over all rows: within each of four warps, then through `tops` once.

    A plain reduction would hand the result round through shared memory a second time.
    """
    HEADS: gl.constexpr = s.shape[1]
    WIDTH: gl.constexpr = [[0, 1], [0, 8]] if HEADS == 16 else [[0, 1], [0, 8], [0, 16]]
    # Every thread has the four warps' maxima of the heads that it has scores of.
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0]] + WIDTH, [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, HEADS]
    )
    tops.store(gl.max(gl.reshape(s, [4, s.shape[0] // 4, HEADS]), 1))
    gl.barrier()
    return gl.convert_layout(gl.max(tops.load(ALL), 0), gl.SliceLayout(0, s.type.layout))


@gluon.jit
def _softmax_columns(
    s, m, parts, tops, numerators, corrections, SLACK: gl.constexpr, HEADROOM: gl.constexpr
):  # fmt: skip
    """Stores a tile's numerators and the correction factors of earlier sums in shared memory; the new state.

    `parts` are the denominators before they are summed over the rows of a tile. The reference of a
    head follows a tile as in the kernel for more heads.
    """
    top = _column_maxima(s, tops)
    m_new = gl.where(top > m + SLACK, top + HEADROOM, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - m_safe[None, :])
    correction = gl.exp2(m - m_safe)
    numerators.store(p.to(numerators.dtype))
    corrections.store(correction)
    return m_new, parts * correction[None, :] + p


@gluon.jit
def _score_warps(
    q, qk_scale, prefix_csr, extend_csr, num_tokens, num_splits, num_items, query, tiles, bias, tops,
    numerators, corrections, states, full, scored, finished, released, CALL: gl.constexpr,
):  # fmt: skip
    """QK and the softmax."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CALL.BLOCK_H, 16])
    zeros = gl.full([CALL.BLOCK_K, CALL.BLOCK_H], 0.0, gl.float32, SCORES)
    count, turn = 0, 0
    item, spans = _first_tile(
        prefix_csr, extend_csr, num_tokens, num_splits, num_items,
        CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
    )  # fmt: skip
    _copy_query(query, q.nope, q.stride_n, q.stride_h, item[0], item[1], CALL.NUM_HEADS)
    async_copy.commit_group()
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        # Not a range: Triton 3.6 dropped a number that an outer range carries if it only bounds an inner one.
        last = count + item[3]
        following = number + gl.num_programs(0)
        item = _item(
            prefix_csr, extend_csr, spans, following, num_tokens, num_splits, num_items,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
        )  # fmt: skip
        spans = _spans(
            prefix_csr, extend_csr, following + gl.num_programs(0), num_tokens, num_items,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND,
        )  # fmt: skip
        m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
        parts = zeros
        async_copy.wait_group(0)
        _make_writes_visible()
        while count < last:
            stage = count % CALL.STAGES
            mbarrier.wait(full.index(stage), count // CALL.STAGES & 1)
            # Also for the warps that wrote the rows: their own fence would wait for their outstanding loads.
            fence_async_shared()
            s = warpgroup_mma(tiles.index(stage), query.permute((1, 0)), zeros, use_acc=False, is_async=True)
            masked = bias.index(stage).load(gl.SliceLayout(1, SCORES))
            s = warpgroup_mma_wait(0, deps=[s])
            m, parts = _softmax_columns(
                s * qk_scale + masked[:, None], m, parts,
                tops, numerators.index(stage), corrections.index(stage), CALL.SLACK, CALL.HEADROOM,
            )  # fmt: skip
            _make_writes_visible()
            mbarrier.arrive(scored.index(stage), count=1)
            count += 1
        # All of these warps have read the last scores: the next item's Q may be copied.
        _copy_query(query, q.nope, q.stride_n, q.stride_h, item[0], item[1], CALL.NUM_HEADS)
        async_copy.commit_group()
        l = gl.sum(parts, 0)
        mbarrier.wait(released, (turn & 1) ^ 1)
        states.index(0).store(m)
        states.index(1).store(l)
        gl.barrier()
        mbarrier.arrive(finished, count=1)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
    async_copy.wait_group(0)


@gluon.jit
def _store_item(
    acc, m, l, out, partials, token, head_block, split, num_tokens,
    NUM_HEADS: gl.constexpr, SPLIT: gl.constexpr, HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """An item's results, or a split's partial results, from the sums `[512, heads]` and the softmax state."""
    # A warp keeps its columns of `acc`; a thread gets 8 adjacent ones by exchanges within the warp.
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [gl.num_warps(), 1], [0, 1])
    d = gl.arange(0, 512, gl.SliceLayout(1, OUT))
    columns = head_block * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, OUT))
    stored = (columns < NUM_HEADS)[None, :]
    heads = head_block * acc.shape[1] + gl.arange(0, acc.shape[1], m.type.layout)
    mask = heads < NUM_HEADS
    if SPLIT:
        slot = (split.to(gl.int64) * num_tokens + token) * NUM_HEADS
        gl.store(partials.m + slot + heads, m, mask=mask)
        gl.store(partials.l + slot + heads, l, mask=mask)
        places = partials.acc + ((slot + columns)[None, :] * 512 + d[:, None])
        gl.store(places, gl.convert_layout(acc, OUT), mask=stored)
    else:
        if HAS_SINK:
            sink = gl.load(out.sink + heads, mask=mask, other=float("-inf"))
        else:
            sink = gl.full([m.shape[0]], float("-inf"), gl.float32, m.type.layout)
        if WRITE_LSE:
            gl.store(
                out.lse + token.to(gl.int64) * out.stride_lt + heads * out.stride_lh,
                natural_lse(m, l),
                mask=mask,
            )
        result = (acc * output_factor(m, l, sink)[None, :]).to(out.o.dtype.element_ty)
        places = out.o + token.to(gl.int64) * out.stride_t + (columns[None, :] * out.stride_h + d[:, None])
        gl.store(places, gl.convert_layout(result, OUT), mask=stored)


@gluon.jit
def _sum_warps(
    out, partials, prefix_csr, extend_csr, num_tokens, num_splits, num_items, tiles, numerators,
    corrections, states, scored, empty, finished, released, CALL: gl.constexpr,
):  # fmt: skip
    """PV: sums the tiles' rows by their numerators, and stores the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CALL.BLOCK_H, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, SUMS)
    count, turn = 0, 0
    upcoming, spans = _first_tile(
        prefix_csr, extend_csr, num_tokens, num_splits, num_items,
        CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
    )  # fmt: skip
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        token, head_block, split = upcoming[0], upcoming[1], upcoming[2]
        # Not a range, as in `_score_warps`.
        last = count + upcoming[3]
        following = number + gl.num_programs(0)
        upcoming = _item(
            prefix_csr, extend_csr, spans, following, num_tokens, num_splits, num_items,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
        )  # fmt: skip
        spans = _spans(
            prefix_csr, extend_csr, following + gl.num_programs(0), num_tokens, num_items,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND,
        )  # fmt: skip
        acc = gl.full([512, CALL.BLOCK_H], 0.0, gl.float32, SUMS)
        while count < last:
            stage = count % CALL.STAGES
            mbarrier.wait(scored.index(stage), count // CALL.STAGES & 1)
            correction = corrections.index(stage).load(HEAD)
            if gl.min(correction, 0) < 1.0:
                acc = acc * correction[None, :]
            acc = warpgroup_mma(
                tiles.index(stage).permute((1, 0)), numerators.index(stage), acc, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        mbarrier.wait(finished, turn & 1)
        m = states.index(0).load(HEAD)
        l = states.index(1).load(HEAD)
        gl.barrier()
        mbarrier.arrive(released, count=1)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
        _store_item(
            acc, m, l, out, partials, token, head_block, split, num_tokens,
            CALL.NUM_HEADS, CALL.SPLIT, CALL.HAS_SINK, CALL.WRITE_LSE,
        )  # fmt: skip


@gluon.jit(do_not_specialize=[*SIZES, "num_items"])
def _sparse_few_heads_kernel(
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
    # Two groups of warps gather half of each tile's rows each, independently. Widening FP8 takes twice as
    # many warps. PV gets the registers that the other warps leave.
    GATHER_WARPS: gl.constexpr = 2 if CALL.PREFIX.VALUES == "" else 4
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 512], SWIZZLED)
    tiles = gl.allocate_shared_memory(DTYPE, [CALL.STAGES, CALL.BLOCK_K, 512], SWIZZLED)
    numerators = gl.allocate_shared_memory(
        DTYPE,
        [CALL.STAGES, CALL.BLOCK_K, CALL.BLOCK_H],
        gl.NVMMASharedLayout.get_default_for([CALL.BLOCK_K, CALL.BLOCK_H], DTYPE),
    )
    bias = gl.allocate_shared_memory(gl.float32, [CALL.STAGES, CALL.BLOCK_K], LINE)
    corrections = gl.allocate_shared_memory(gl.float32, [CALL.STAGES, CALL.BLOCK_H], LINE)
    states = gl.allocate_shared_memory(gl.float32, [2, CALL.BLOCK_H], LINE)
    tops = gl.allocate_shared_memory(gl.float32, [4, CALL.BLOCK_H], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # For each tile of the ring: it is there; its numerators are; it has been summed and may be overwritten.
    full = gl.allocate_shared_memory(gl.int64, [CALL.STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [CALL.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CALL.STAGES, 1], mbarrier.MBarrierLayout())
    # For the softmax state of an item: it is there; it has been read.
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CALL.STAGES):
        mbarrier.init(full.index(i), count=2)
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
                    tiles, numerators, corrections, states, scored, empty, finished, released,
                    CALL,
                ),
            ),
            (
                _score_warps,
                (
                    q, qk_scale, prefix_csr, extend_csr,
                    num_tokens, num_splits, num_items, query, tiles, bias, tops, numerators, corrections,
                    states, full, scored, finished, released,
                    CALL,
                ),
            ),
            (
                _gather_warps,
                (
                    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    tiles, bias, full, empty,
                    0, CALL.BLOCK_K // 2, CALL,
                ),
            ),
            (
                _gather_warps,
                (
                    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    tiles, bias, full, empty,
                    CALL.BLOCK_K // 2, CALL.BLOCK_K // 2, CALL,
                ),
            ),
        ],
        [4, GATHER_WARPS, GATHER_WARPS],
        [CALL.SCORE_REGISTERS, CALL.GATHER_REGISTERS, CALL.GATHER_REGISTERS],
    )  # fmt: skip

"""Sparse attention on Hopper (sm90) by warps with different tasks, in Gluon.

The kernels in plain Triton gather, multiply and normalise a tile in turn. Here a warpgroup gathers rows into
two tiles in shared memory, multiplies them by Q and computes the softmax; two more multiply P by V meanwhile,
a tile behind, with half of the 512 columns each. A program works through items (token, block of heads, split)
of the whole call, so that one item's end overlaps with the next one's beginning. This is the kernel for
16-bit rows; the one in `fp8.py` widens FP8 rows. `frame.py` has what all kernels for Hopper share.

ptxas holds a product 256 columns wide to the registers of a thread at launch: 12 warps have 168, 13 have
152, of which 154 are needed for 64 x 256 sums. Hence three warpgroups, and no fourth that only gathers.

Source of the structure: warp specialisation as in FlashAttention-3 (Shah et al., 2024).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _arguments,
    _causal,
    _copy_query,
    _copy_rows,
    _finish_scores,
    _item,
    _item_rows,
    _locate_rows,
    _make_writes_visible,
    _next_item,
    _select_source,
    _softmax_tile,
    _store_results,
    _take_factors,
    _tile_indices,
)
from narrowkv.sparse_fp8.kernels.results import SIZES


class WideShared(NamedTuple):
    """Shared memory and barriers of the kernel for 16-bit rows; tiles have stages of all but `numerators`.

    Attributes:
        query, query_rope: Q of an item, its first 512 columns and those behind them (None without such).
        tiles, rope: the same of the rows.
        numerators: exponentials of the scores of the last scored tile, the left operand of PV.
        bias: 0 for a row that the index list names, -inf for others.
        corrections: what earlier sums are multiplied by as the maximum rises; changes: for each warp, whether
            any of its rows has one that is not 1.
        factors: what the sums of an item are multiplied by at its end.
        scored: barriers, the numerators of a tile are there. empty: a tile has been summed and may be
            overwritten. finished: an item's factors are there. released: they have been read.
    """

    query: Any
    query_rope: Any
    tiles: Any
    rope: Any
    numerators: Any
    bias: Any
    corrections: Any
    changes: Any
    factors: Any
    scored: Any
    empty: Any
    finished: Any
    released: Any


@gluon.jit
def _multiply(shared, stage, zeros, CALL: gl.constexpr):
    """Issues Q K^T of one tile; the caller waits for the result."""
    tile = shared.tiles.index(stage)
    s = warpgroup_mma(shared.query, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if CALL.HEAD_DIM > 512:
        s = warpgroup_mma(shared.query_rope, shared.rope.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _copy_tile(args, item, tile, r, index, number, shared, COPY: gl.constexpr, CALL: gl.constexpr):
    """Starts to copy a tile of 16-bit rows into buffer `number` of the ring, once that is free."""
    first = tile < item[8]
    live, at, _, _ = _locate_rows(args, first, _item_rows(args, item, tile, r, index, CALL), CALL)
    stage = number % CALL.STAGES
    mbarrier.wait(shared.empty.index(stage), (number // CALL.STAGES & 1) ^ 1)
    shared.bias.index(stage).store(gl.where(live, 0.0, float("-inf")))
    base = _select_source(first, args.prefix.nope, args.extend.nope, CALL)
    _copy_rows(shared.tiles.index(stage), base, at, live, COPY)
    if CALL.HEAD_DIM > 512:
        _copy_rows(shared.rope.index(stage), base + 512, at, live, COPY)


@gluon.jit
def _score_warps(args, shared, CALL: gl.constexpr):
    """16-bit rows into the tile buffers; QK; the softmax."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CALL.BLOCK_K, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, CALL.BLOCK_K, gl.SliceLayout(1, COPY))
    zeros = gl.full([CALL.BLOCK_H, CALL.BLOCK_K], 0.0, gl.float32, SCORES)
    count, turn = 0, 0
    upcoming = _item(args, gl.program_id(0), CALL)
    for number in range(gl.program_id(0), args.num_items, gl.num_programs(0)):
        item = upcoming
        _copy_query(shared.query, args.q, item, 0, CALL)
        if CALL.HEAD_DIM > 512:
            _copy_query(shared.query_rope, args.q, item, 512, CALL)
        index = _tile_indices(args, item, 0, r, CALL)
        _copy_tile(args, item, 0, r, index, count, shared, COPY, CALL)
        async_copy.commit_group()
        index = _tile_indices(args, item, 1, r, CALL)
        upcoming = _next_item(args, number, CALL)
        m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, ROW)
        l = gl.full([CALL.BLOCK_H], 0.0, gl.float32, ROW)
        for tile in range(item[3]):
            stage = count % CALL.STAGES
            # Indices come one tile ahead of the rows that wait for them.
            next_index = _tile_indices(args, item, tile + 2, r, CALL)
            async_copy.wait_group(0)
            _make_writes_visible()
            s = _multiply(shared, stage, zeros, CALL)
            if tile + 1 < item[3]:
                _copy_tile(args, item, tile + 1, r, index, count + 1, shared, COPY, CALL)
            async_copy.commit_group()
            masked = shared.bias.index(stage).load(gl.SliceLayout(0, SCORES))
            scores = warpgroup_mma_wait(0, deps=[s])
            # The numerators of the tile before have been read.
            before = count + CALL.STAGES - 1
            mbarrier.wait(shared.empty.index(before % CALL.STAGES), before // CALL.STAGES & 1 ^ 1)
            m, l = _softmax_tile(
                _causal(scores, item, tile, 0, CALL), masked, m, l, args.qk_scale, shared.numerators, None,
                shared.corrections.index(stage), shared.changes.index(stage), CALL,
            )  # fmt: skip
            _make_writes_visible()
            mbarrier.arrive(shared.scored.index(stage), count=1)
            index = next_index
            count += 1
        async_copy.wait_group(0)
        _finish_scores(m, l, args, item, turn, shared, CALL)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _sum_warps(args, shared, CALL: gl.constexpr):
    """PV: sums the tiles' rows by their numerators, and stores the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    count, turn = 0, 0
    for number in range(gl.program_id(0), args.num_items, gl.num_programs(0)):
        item = _item(args, number, CALL)
        acc = gl.full([CALL.BLOCK_H, 512], 0.0, gl.float32, SUMS)
        for _ in range(item[3]):
            stage = count % CALL.STAGES
            mbarrier.wait(shared.scored.index(stage), count // CALL.STAGES & 1)
            if gl.max(shared.changes.index(stage).load(EVERYWHERE), 0) > 0:
                acc = acc * shared.corrections.index(stage).load(ROW)[:, None]
            acc = warpgroup_mma(shared.numerators, shared.tiles.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.barrier()
            mbarrier.arrive(shared.empty.index(stage), count=1)
            count += 1
        factor = _take_factors(shared, turn, ROW)
        _store_results(acc, factor, args, item, 0, CALL)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit(do_not_specialize=[*SIZES, "num_items"])
def _sparse_hopper_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale, num_tokens, num_splits,
    num_items, prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; each works through items in steps of the grid."""
    args = _arguments(
        q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale, num_tokens, num_splits, num_items,
        prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL,
    )  # fmt: skip
    DTYPE: gl.constexpr = q.nope.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 512], SWIZZLED)
    tiles = gl.allocate_shared_memory(DTYPE, [CALL.STAGES, CALL.BLOCK_K, 512], SWIZZLED)
    query_rope: gl.constexpr = None
    rope: gl.constexpr = None
    if CALL.HEAD_DIM > 512:
        query_rope = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 64], SWIZZLED)
        rope = gl.allocate_shared_memory(DTYPE, [CALL.STAGES, CALL.BLOCK_K, 64], SWIZZLED)
    numerators = gl.allocate_shared_memory(
        DTYPE,
        [CALL.BLOCK_H, CALL.BLOCK_K],
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
    shared = WideShared(
        query,
        query_rope,
        tiles,
        rope,
        numerators,
        bias,
        corrections,
        changes,
        factors,
        scored,
        empty,
        finished,
        released,
    )
    gl.warp_specialize([(_sum_warps, (args, shared, CALL)), (_score_warps, (args, shared, CALL))], [4], [168])

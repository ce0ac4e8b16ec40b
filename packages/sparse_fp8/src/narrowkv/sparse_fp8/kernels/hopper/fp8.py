"""Sparse attention over FP8 rows on Hopper (sm90), in Gluon: bytes wait on the chip until they are widened.

A program works through the tiles of its items (token, block of heads, split) as one stream. For tile n:

    scoring warpgroup         QK(n); softmax(n); copies: RoPE of tile n + 1, NoPE of n + 2 and some of n + 3
    two summing warpgroups    PV(n); widen tile n + 2, where PV(n) has left
    the second of them, too   scales of tile n + 4, indices of n + 5

A summing warpgroup has 256 of the 512 columns: it widens them for itself and for QK, and sums them. A warp is
blocked while it issues products, so other work does not overlap with them: the tasks are divided such that no
warpgroup has much more to do than another. Two widened tiles, one as stored, and Q fill the shared memory; a
quarter of Q is in registers.

A part is 64 columns as stored. Parts 0 to 3 are the first summing warpgroup's, 4 to 6 and RoPE the second's.
RoPE is a part, too, in DeepSeek-V4.1's rows, whose parts have two scales each. Those parts that are
widened first, 0 and 4, are copied a tile ahead of the others.

Sources: warp specialisation as in FlashAttention-3 (Shah et al., 2024); a widened tile that QK and PV share
as in FlashMLA's kernels for an FP8 cache (DeepSeek, 2025).
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

from narrowkv.sparse_fp8.kernels.hopper.fp8_rows import (
    _allocate_each,
    _as_bf16,
    _begin_stream,
    _copy_first_parts,
    _copy_rope,
    _copy_tile,
    _last_tile,
    _look_up,
    _next_indices,
    _widen_half,
)
from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _copy_query,
    _item,
    _make_writes_visible,
    _name_item,
)
from narrowkv.sparse_fp8.kernels.hopper.sixteen_bit import (
    _finish_scores,
    _softmax_tile,
    _store_results,
    _take_factors,
)
from narrowkv.sparse_fp8.kernels.results import SIZES
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers


@gluon.jit
def _sum_fp8_warps(
    out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items, slots,
    tiles, stored, scales, numerators, corrections, changes, factors, looked_up, first_filled, filled,
    widened, scored, summed, finished, released, HALF: gl.constexpr, CALL: gl.constexpr,
):  # fmt: skip
    """Computes PV of half of the columns, widens them for the tile after the next, stores the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    # The second warpgroup has less to widen. What it writes to `slots` and `scales`, for four tiles ahead, is
    # there for the others by what they wait for anyway: `widened` of two tiles ahead comes after it.
    LOOKS_UP: gl.constexpr = HALF == 1
    if LOOKS_UP:
        r = gl.arange(0, CALL.BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        stream = _begin_stream(
            prefix_csr, extend_csr, num_tokens, num_splits, num_items,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
        )  # fmt: skip
        for number in range(4):
            ahead, stream = _next_indices(
                prefix_csr, extend_csr, num_tokens, num_splits, num_items, stream, r,
                CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
            )  # fmt: skip
            scale = _look_up(
                prefix, extend, ahead, slots, number, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX,
                CALL.EXTEND,
            )  # fmt: skip
            scales.index(number).store(_as_bf16(scale))
        ahead, stream = _next_indices(
            prefix_csr, extend_csr, num_tokens, num_splits, num_items, stream, r,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
        )  # fmt: skip
        gl.barrier()
        mbarrier.arrive(looked_up, count=1)
    else:
        mbarrier.wait(looked_up, 0)
    for number in range(2):
        _widen_half(number, tiles, stored, scales, first_filled, filled, HALF, CALL.PREFIX)
        _make_writes_visible()
        mbarrier.arrive(widened.index(number), count=1)
    count, turn = 0, 0
    # Known an item ahead. A while loop: Triton 3.6 lost a carried number that only bounds a range.
    last = _last_tile(
        prefix_csr, extend_csr, gl.program_id(0), num_tokens, num_splits,
        CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
    )  # fmt: skip
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        next_last = _last_tile(
            prefix_csr, extend_csr, gl.minimum(number + gl.num_programs(0), num_items - 1),
            num_tokens, num_splits, CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT,
            CALL.BLOCK_K,
        )  # fmt: skip
        acc_a = gl.full([CALL.BLOCK_H, 128], 0.0, gl.float32, SUMS)
        acc_b = gl.full([CALL.BLOCK_H, 128], 0.0, gl.float32, SUMS)
        done = 0
        while done <= last:
            stage = count % 2
            mbarrier.wait(scored, count & 1)
            if gl.max(changes.load(EVERYWHERE), 0) > 0:
                correction = corrections.load(ROW)[:, None]
                acc_a = acc_a * correction
                acc_b = acc_b * correction
            acc_a = warpgroup_mma(numerators, tiles[2 * HALF].index(stage), acc_a, is_async=True)
            acc_b = warpgroup_mma(numerators, tiles[2 * HALF + 1].index(stage), acc_b, is_async=True)
            if LOOKS_UP:
                # Tile count + 4, in the place of tile `count`.
                scale = _look_up(
                    prefix, extend, ahead, slots, count, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX,
                    CALL.EXTEND,
                )  # fmt: skip
            acc_a, acc_b = warpgroup_mma_wait(0, deps=[acc_a, acc_b])
            gl.barrier()
            mbarrier.arrive(summed, count=1)
            if LOOKS_UP:
                ahead, stream = _next_indices(
                    prefix_csr, extend_csr, num_tokens, num_splits, num_items, stream, r,
                    CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
                )  # fmt: skip
            _widen_half(count + 2, tiles, stored, scales, first_filled, filled, HALF, CALL.PREFIX)
            if LOOKS_UP:
                scales.index(count % 4).store(_as_bf16(scale))
            _make_writes_visible()
            mbarrier.arrive(widened.index(stage), count=1)
            count += 1
            done += 1
        last = next_last
        factor = _take_factors(factors, turn, finished, released, ROW)
        item = _name_item(number, num_tokens, CALL.HEAD_BLOCKS)
        _store_results(out, partials, acc_a, factor, item, num_tokens, HALF * 256, CALL.NUM_HEADS, CALL.SPLIT)
        _store_results(
            out, partials, acc_b, factor, item, num_tokens, HALF * 256 + 128, CALL.NUM_HEADS, CALL.SPLIT
        )
        turn += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _load_query(
    place, stride_h, head_block, NUM_HEADS: gl.constexpr, BLOCK_H: gl.constexpr, LAYOUT: gl.constexpr
):
    """64 columns of an item's heads; heads past the last are zeros."""
    heads = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    mask = (heads < NUM_HEADS)[:, None]
    return gl.load(place + (heads[:, None] * stride_h + d[None, :]), mask=mask, other=0.0)


@gluon.jit
def _change_layout(buffer, x, LAYOUT: gl.constexpr):
    """Converts to another layout through a buffer in shared memory."""
    buffer.store(x)
    gl.barrier()
    moved = buffer.load(LAYOUT)
    gl.barrier()
    return moved


@gluon.jit
def _score_fp8_warps(
    q, qk_scale, out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits,
    num_items, slots, query_a, query_b, tiles, stored, numerators, corrections, changes, factors,
    looked_up, first_filled, filled, widened, scored, summed, finished, released, CALL: gl.constexpr,
):  # fmt: skip
    """Copies the rows; QK; the softmax."""
    ALL_STORED: gl.constexpr = CALL.PREFIX.ROPE == ""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CALL.BLOCK_K, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERY: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    zeros = gl.full([CALL.BLOCK_H, CALL.BLOCK_K], 0.0, gl.float32, SCORES)
    count, turn = 0, 0
    mbarrier.wait(looked_up, 0)
    if not ALL_STORED:
        _copy_rope(
            prefix, extend, slots, 0, tiles, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX, CALL.EXTEND
        )
    _copy_first_parts(
        prefix, extend, slots, 0, stored, first_filled,
        CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX, CALL.EXTEND,
    )  # fmt: skip
    for number in range(2):
        _copy_tile(
            prefix, extend, slots, number, stored, widened, first_filled, filled,
            CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX, CALL.EXTEND,
        )  # fmt: skip
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = _item(
            prefix_csr, extend_csr, number, num_tokens, num_splits,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
        )  # fmt: skip
        token, head_block, split, num_tiles = item[0], item[1], item[2], item[3]
        _copy_query(query_a, q.nope, q.stride_n, q.stride_h, token, head_block, CALL.NUM_HEADS)
        _copy_query(query_b, q.nope + 256, q.stride_n, q.stride_h, token, head_block, CALL.NUM_HEADS)
        async_copy.commit_group()
        rows = q.nope + token.to(gl.int64) * q.stride_n
        if ALL_STORED:
            part_b = _load_query(rows + 320, q.stride_h, head_block, CALL.NUM_HEADS, CALL.BLOCK_H, COPY)
        part_c = _load_query(rows + 384, q.stride_h, head_block, CALL.NUM_HEADS, CALL.BLOCK_H, COPY)
        part_d = _load_query(rows + 448, q.stride_h, head_block, CALL.NUM_HEADS, CALL.BLOCK_H, COPY)
        mbarrier.wait(summed, count & 1 ^ 1)
        if ALL_STORED:
            query_b_last = _change_layout(numerators, part_b, QUERY)
        query_c = _change_layout(numerators, part_c, QUERY)
        query_d = _change_layout(numerators, part_d, QUERY)
        m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, ROW)
        l = gl.full([CALL.BLOCK_H], 0.0, gl.float32, ROW)
        for _ in range(num_tiles):
            stage = count % 2
            # RoPE has come, and Q before the first tile.
            async_copy.wait_group(0)
            _make_writes_visible()
            k_a = tiles[0].index(stage).permute((1, 0))
            k_b = tiles[1].index(stage).permute((1, 0))
            k_c = tiles[2].index(stage).permute((1, 0))
            k_d = tiles[3].index(stage).slice(0, 64, dim=1).permute((1, 0))
            k_e = tiles[3].index(stage).slice(64, 64, dim=1).permute((1, 0))
            s = warpgroup_mma(query_a.slice(0, 128, dim=1), k_a, zeros, use_acc=False, is_async=True)
            s = warpgroup_mma(query_a.slice(128, 128, dim=1), k_b, s, is_async=True)
            if ALL_STORED:
                k_c_first = tiles[2].index(stage).slice(0, 64, dim=1).permute((1, 0))
                k_c_last = tiles[2].index(stage).slice(64, 64, dim=1).permute((1, 0))
                s = warpgroup_mma(query_b, k_c_first, s, is_async=True)
                s = warpgroup_mma(query_b_last, k_c_last, s, is_async=True)
            else:
                s = warpgroup_mma(query_b, k_c, s, is_async=True)
            s = warpgroup_mma(query_c, k_d, s, is_async=True)
            s = warpgroup_mma(query_d, k_e, s, is_async=True)
            named = slots.index(count % 4).load(gl.SliceLayout(0, SCORES)) != -1
            scores = warpgroup_mma_wait(0, deps=[s])
            mbarrier.wait(summed, count & 1 ^ 1)
            if not ALL_STORED:
                _copy_rope(
                    prefix, extend, slots, count + 1, tiles, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX,
                    CALL.EXTEND,
                )  # fmt: skip
            m, l = _softmax_tile(
                scores, gl.where(named, 0.0, float("-inf")), m, l, qk_scale,
                numerators, corrections, changes, CALL.SLACK, CALL.HEADROOM,
            )  # fmt: skip
            _make_writes_visible()
            mbarrier.arrive(scored, count=1)
            count += 1
            _copy_tile(
                prefix, extend, slots, count + 1, stored, widened, first_filled, filled,
                CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.PREFIX, CALL.EXTEND,
            )  # fmt: skip
        _finish_scores(
            m, l, out, partials, token, head_block, split, num_tokens, turn, factors, finished, released,
            CALL.NUM_HEADS, CALL.SPLIT, CALL.HAS_SINK, CALL.WRITE_LSE, ROW,
        )  # fmt: skip
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
    # Tiles past the end, too.
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=[*SIZES, "num_items"])
def _sparse_hopper_fp8_kernel(
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
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    query_a = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 256], SWIZZLED)
    # RoPE among the values takes a part of its own as stored, and parts have two scales: Q makes room.
    ALL_STORED: gl.constexpr = CALL.PREFIX.ROPE == ""
    query_b = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 64 if ALL_STORED else 128], SWIZZLED)
    tiles = _allocate_each(DTYPE, (2, CALL.BLOCK_K, 128), SWIZZLED, 4)
    first_parts = _allocate_each(gl.int32, (2, CALL.BLOCK_K, 16), ROWS, 2)
    parts = _allocate_each(gl.int32, (CALL.BLOCK_K, 16), ROWS, 6 if ALL_STORED else 5)
    stored = (first_parts[0],) + parts[0:3] + (first_parts[1],) + parts[3:]
    scales = gl.allocate_shared_memory(gl.bfloat16, [4, CALL.BLOCK_K, 16 if ALL_STORED else 8], ROWS)
    slots = gl.allocate_shared_memory(gl.int32, [4, CALL.BLOCK_K], LINE)
    numerators = gl.allocate_shared_memory(
        DTYPE,
        [CALL.BLOCK_H, CALL.BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([CALL.BLOCK_H, CALL.BLOCK_K], DTYPE),
    )
    corrections = gl.allocate_shared_memory(gl.float32, [CALL.BLOCK_H], LINE)
    changes = gl.allocate_shared_memory(gl.int32, [4], LINE)
    factors = gl.allocate_shared_memory(gl.float32, [CALL.BLOCK_H], LINE)
    # The first four tiles are looked up. Parts 0 and 4 of a tile are there as stored; so are the others.
    looked_up = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    first_filled = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    # A tile is there as bf16, both halves; its numerators are; it is summed.
    widened = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    scored = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    # The factors of an item are there; they have been read.
    finished = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    released = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(looked_up, count=1)
    for i in gl.static_range(2):
        mbarrier.init(first_filled.index(i), count=128)
        mbarrier.init(widened.index(i), count=2)
    mbarrier.init(filled, count=128)
    mbarrier.init(scored, count=1)
    mbarrier.init(summed, count=2)
    mbarrier.init(finished, count=1)
    mbarrier.init(released, count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _sum_fp8_warps,
                (
                    out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    slots, tiles, stored, scales, numerators, corrections, changes, factors,
                    looked_up, first_filled, filled, widened, scored, summed, finished, released,
                    0, CALL,
                ),
            ),
            (
                _sum_fp8_warps,
                (
                    out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    slots, tiles, stored, scales, numerators, corrections, changes, factors,
                    looked_up, first_filled, filled, widened, scored, summed, finished, released,
                    1, CALL,
                ),
            ),
            (
                _score_fp8_warps,
                (
                    q, qk_scale, out, partials,
                    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    slots, query_a, query_b, tiles, stored, numerators, corrections, changes, factors,
                    looked_up, first_filled, filled, widened, scored, summed, finished, released,
                    CALL,
                ),
            ),
        ],
        [4, 4],
        [184, 160],
    )  # fmt: skip

"""Sparse attention on Hopper (sm90) for up to 32 heads, in Gluon: both products swapped, no head padded.

wgmma multiplies 64 rows of A at least. With few heads those are rows of the pool, not heads: QK is
K Q^T, `[64 rows, heads]`, and PV is V^T P, `[512 columns, heads]`, each with the tile in shared memory as A.
Scores and sums then have one layout, heads along its columns, and one warpgroup holds both: it computes QK of
a tile beside PV of the one before. The other warps do nothing but gather rows into a ring of tiles (and
widen FP8 on the way), as far ahead as the ring allows.

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

from narrowkv.quant.softmax import natural_lse, output_share
from narrowkv.sparse_fp8.kernels.hopper import (
    _barrier,
    _choose,
    _copy_query,
    _copy_rows,
    _item,
    _locate_rows,
    _publish,
    _tile_indices,
)


@gluon.jit
def _some_item(
    prefix_csr, extend_csr, number, num_tokens, num_splits, num_items,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """`_item`, its tiles counted in groups of GROUP: one at least, the last filled up by rows that no one names."""
    item = _item(
        prefix_csr, extend_csr, gl.minimum(number, num_items - 1), num_tokens, num_splits,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    groups = gl.maximum((item[3] + GROUP - 1) // GROUP, 1)
    return item[0], item[1], item[2], groups, item[4], item[5], item[6], item[7], item[8]


@gluon.jit
def _following(
    prefix_csr, extend_csr, number, group, item, upcoming, num_tokens, num_splits, num_items,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The group of tiles after one: the item's number, the group's in it, the item and the one after that.

    Scalars are chosen and not branched on: what gathers goes from group to group in a single loop, whatever
    item they belong to.
    """
    ends = group + 1 >= item[3]
    number = gl.where(ends, number + gl.num_programs(0), number)
    group = gl.where(ends, 0, group + 1)
    item = (
        gl.where(ends, upcoming[0], item[0]),
        gl.where(ends, upcoming[1], item[1]),
        gl.where(ends, upcoming[2], item[2]),
        gl.where(ends, upcoming[3], item[3]),
        gl.where(ends, upcoming[4], item[4]),
        gl.where(ends, upcoming[5], item[5]),
        gl.where(ends, upcoming[6], item[6]),
        gl.where(ends, upcoming[7], item[7]),
        gl.where(ends, upcoming[8], item[8]),
    )
    upcoming = _some_item(
        prefix_csr, extend_csr, number + gl.num_programs(0), num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, GROUP,
    )  # fmt: skip
    return number, group, item, upcoming


@gluon.jit
def _indices(
    prefix_csr, extend_csr, number, tile, item, r, num_items,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The row numbers of a tile, -1 past the last item, and whether it is of the prefix."""
    index = _tile_indices(prefix_csr, extend_csr, item, tile, r, HAS_PREFIX, HAS_EXTEND, BLOCK_K)
    return gl.where(number < num_items, index, -1), tile < item[8]


@gluon.jit
def _gather_warps(
    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items, tiles, bias, full, empty,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
    WIDE_ADDRESS: gl.constexpr, SPLIT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """16-bit rows into the ring, by copies that nobody waits for but who multiplies."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, BLOCK_K, gl.SliceLayout(1, COPY))
    number, tile = gl.program_id(0), 0
    item = _some_item(
        prefix_csr, extend_csr, number, num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 1,
    )  # fmt: skip
    upcoming = _some_item(
        prefix_csr, extend_csr, number + gl.num_programs(0), num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 1,
    )  # fmt: skip
    index, first = _indices(
        prefix_csr, extend_csr, number, tile, item, r, num_items, HAS_PREFIX, HAS_EXTEND, BLOCK_K
    )
    count = 0
    while number < num_items:
        live, at, _, _ = _locate_rows(
            prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, "", 1, 1, WIDE_ADDRESS
        )
        base = _choose(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND)
        number, tile, item, upcoming = _following(
            prefix_csr, extend_csr, number, tile, item, upcoming, num_tokens, num_splits, num_items,
            HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 1,
        )  # fmt: skip
        index, first = _indices(
            prefix_csr, extend_csr, number, tile, item, r, num_items, HAS_PREFIX, HAS_EXTEND, BLOCK_K
        )
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
        bias.index(stage).store(gl.where(live, 0.0, float("-inf")))
        _copy_rows(tiles.index(stage), base, at, live, COPY)
        # Counts the copies under way; the phase ends when they have, and this thread with the bias.
        async_copy.mbarrier_arrive(full.index(stage))
        _barrier()
        mbarrier.arrive(full.index(stage), count=1)
        count += 1


@gluon.jit
def _scores(tile, query, zeros):
    """K Q^T of one tile, to be waited for."""
    return warpgroup_mma(tile, query.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _softmax_columns(s, masked, m, parts, qk_scale, numerators, SLACK: gl.constexpr):
    """A tile's numerators to shared memory; the new maxima, denominators and what earlier sums shrink by.

    `parts` are the denominators before they are summed over the rows of a tile. The maximum of a head
    follows only a tile that passes it by more than SLACK, in powers of two, as in the kernel for more heads.
    """
    s = s * qk_scale + masked[:, None]
    top = gl.max(s, 0)
    m_new = gl.where(top > m + SLACK, top, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - m_safe[None, :])
    correction = gl.exp2(m - m_safe)
    numerators.store(p.to(numerators.dtype))
    return m_new, parts * correction[None, :] + p, correction


@gluon.jit
def _store_item(
    acc, m, l, out, partials, token, head_block, split, num_tokens,
    NUM_HEADS: gl.constexpr, SPLIT: gl.constexpr, HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """An item's results, or a split's share of them, from the sums `[512, heads]` and the softmax state."""
    # A warp has the columns that it has in `acc`, a thread 8 in a row: they change hands within the warp.
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
            gl.store(out.lse + token.to(gl.int64) * out.stride_l + heads, natural_lse(m, l), mask=mask)
        result = (acc * output_share(m, l, sink)[None, :]).to(out.o.dtype.element_ty)
        places = out.o + token.to(gl.int64) * out.stride_t + (columns[None, :] * out.stride_h + d[:, None])
        gl.store(places, gl.convert_layout(result, OUT), mask=stored)


@gluon.jit
def _attend_warps(
    q_ptr, stride_qt, stride_qh, qk_scale, out, partials, prefix_csr, extend_csr,
    num_tokens, num_splits, num_items, query, tiles, numerators, bias, full, empty,
    NUM_HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """QK, the softmax and PV; the results."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    zeros = gl.full([BLOCK_K, BLOCK_H], 0.0, gl.float32, LAYOUT)
    count = 0
    upcoming = _some_item(
        prefix_csr, extend_csr, gl.program_id(0), num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 1,
    )  # fmt: skip
    _copy_query(query, q_ptr, stride_qt, stride_qh, upcoming[0], upcoming[1], NUM_HEADS)
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        token, head_block, split, num_tiles = upcoming[0], upcoming[1], upcoming[2], upcoming[3]
        upcoming = _some_item(
            prefix_csr, extend_csr, number + gl.num_programs(0), num_tokens, num_splits, num_items,
            HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 1,
        )  # fmt: skip
        async_copy.wait_group(0)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        _publish()
        s = _scores(tiles.index(stage), query, zeros)
        masked = bias.index(stage).load(gl.SliceLayout(1, LAYOUT))
        s = warpgroup_mma_wait(0, deps=[s])
        acc = gl.full([512, BLOCK_H], 0.0, gl.float32, LAYOUT)
        m, parts, correction = _softmax_columns(
            s, masked, gl.full([BLOCK_H], float("-inf"), gl.float32, HEAD), zeros, qk_scale,
            numerators.index(count & 1), SLACK,
        )  # fmt: skip
        _publish()
        # Not a range: Triton 3.6 takes what only bounds an inner range for unused, and drops it from the outer.
        last = count + num_tiles - 1
        while count < last:
            stage = count % STAGES
            ahead = (count + 1) % STAGES
            mbarrier.wait(full.index(ahead), (count + 1) // STAGES & 1)
            fence_async_shared()
            s = _scores(tiles.index(ahead), query, zeros)
            acc = acc * correction[None, :]
            acc = warpgroup_mma(
                tiles.index(stage).permute((1, 0)), numerators.index(count & 1), acc, is_async=True
            )
            masked = bias.index(ahead).load(gl.SliceLayout(1, LAYOUT))
            s = warpgroup_mma_wait(1, deps=[s])
            m, parts, correction = _softmax_columns(
                s, masked, m, parts, qk_scale, numerators.index(count + 1 & 1), SLACK
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            _publish()
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        # All warps have the last scores: the next item's query may come while the last tile is summed.
        _copy_query(query, q_ptr, stride_qt, stride_qh, upcoming[0], upcoming[1], NUM_HEADS)
        stage = count % STAGES
        acc = acc * correction[None, :]
        acc = warpgroup_mma(
            tiles.index(stage).permute((1, 0)), numerators.index(count & 1), acc, is_async=True
        )
        l = gl.sum(parts, 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
        _store_item(
            acc, m, l, out, partials, token, head_block, split, num_tokens,
            NUM_HEADS, SPLIT, HAS_SINK, WRITE_LSE,
        )  # fmt: skip
    async_copy.wait_group(0)


@gluon.jit
def _sparse_few_wide_kernel(
    q_ptr, out, partials, prefix, prefix_csr, extend, extend_csr,
    stride_qt, stride_qh, qk_scale, num_tokens, num_splits, num_items,
    NUM_HEADS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
    HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; each works through items in steps of the grid."""
    HEAD_BLOCKS: gl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    query = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 512], WIDE)
    tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_K, 512], WIDE)
    numerators = gl.allocate_shared_memory(
        DTYPE, [2, BLOCK_K, BLOCK_H], gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_H], DTYPE)
    )
    bias = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # For each tile of the ring: it is there; it has been summed and may be overwritten.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend_warps,
                (
                    q_ptr, stride_qt, stride_qh, qk_scale, out, partials, prefix_csr, extend_csr,
                    num_tokens, num_splits, num_items, query, tiles, numerators, bias, full, empty,
                    NUM_HEADS, HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, HAS_SINK, WRITE_LSE,
                    BLOCK_H, BLOCK_K, STAGES, SLACK,
                ),
            ),
            (
                _gather_warps,
                (
                    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    tiles, bias, full, empty,
                    HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, WIDE_ADDRESS, SPLIT, BLOCK_K, STAGES,
                ),
            ),
        ],
        [4],
        [168],
    )  # fmt: skip

"""The dense attention of Hopper: one warp copies keys, two warpgroups attend, and nobody waits for the others.

Each warpgroup holds half a tile's rows. It issues the scores of the next key tile, then P @ V of the current
one, and computes the next softmax while the matrix unit works: the overlap of FlashAttention-3 (Shah et al.,
2024). Programs stay and take tile after tile, so that copies of a tile's first keys run during the end of the
tile before. Written in Gluon, which plain Triton's scheduling cannot express; the functions around the loop
are plain Triton's own.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from narrowkv.attn_decode.kernels import tiles
from narrowkv.attn_prefill.kernels import rows
from narrowkv.quant.launch.gluon import in_gluon

key_range = in_gluon(rows.key_range)
merge_splits = in_gluon(rows.merge_splits)
rows_of = in_gluon(rows.rows_of)
scheduled_tile = in_gluon(rows.scheduled_tile)
share_of = in_gluon(rows.share_of)
softmax_step = in_gluon(rows.softmax_step)
visible_keys = in_gluon(rows.visible_keys)
weigh_values = in_gluon(rows.weigh_values)
write_rows = in_gluon(tiles.write_rows)


class Ring(NamedTuple):
    """Key tiles in shared memory `[stages, BLOCK_N, head_dim]`, and who may use a stage next."""

    tiles: Any
    filled: Any
    emptied: Any


class Work(NamedTuple):
    """What a program's tiles have in common: the schedule and how many items it makes."""

    schedule: Any
    items: Any
    num_tiles: Any
    num_splits: Any
    rows: Any  # of the scratch, per head


def key_descriptor(keys: torch.Tensor, block_n: int) -> TensorDescriptor:
    """How to copy `block_n` rows of `[heads, rows, head_dim]`, heads one after the other."""
    flat = keys.view(-1, keys.shape[-1])
    block = [block_n, keys.shape[-1]]
    dtype = gl.bfloat16 if keys.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), block, layout)


@gluon.jit
def key_tiles_of(
    work, item, NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """An item's tile, head and split, and the key tiles [begin, end) of it, [full, full_end) without a mask."""
    kv_head = item % NUM_KV_HEADS
    index = item // NUM_KV_HEADS
    split = index // work.num_tiles
    index = index % work.num_tiles
    tile = scheduled_tile(work.schedule, index)
    before = tile.kv_len - tile.q_len
    first_pos = before + tile.number * BLOCK_M // GQA_RATIO
    last_pos = before + gl.minimum(((tile.number + 1) * BLOCK_M - 1) // GQA_RATIO, tile.q_len - 1)
    begin, end, full, full_end = key_range(
        first_pos, last_pos, 0, tile.kv_len, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N
    )
    if SPLIT:
        begin, end, full, full_end = share_of(begin, end, full, full_end, split, work.num_splits)
    # Places past the last tile hold none.
    used = tile.seq >= 0
    end = gl.where(used, end, begin)
    return tile, kv_head, index, split, begin, end, gl.minimum(full, end), gl.minimum(full_end, end)


@gluon.jit
def copy_keys(
    work, k_desc, v_desc, k_ring, v_ring,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the key tiles of all items, the last tile of each first."""
    count = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        tile, kv_head, _, _, begin, end, _, _ = key_tiles_of(
            work, item, NUM_KV_HEADS, GQA_RATIO, WINDOW_LEFT, WINDOW_RIGHT, SPLIT, BLOCK_M, BLOCK_N
        )
        base = kv_head * work.rows + tile.base
        for i in range(end - begin):
            stage = count % STAGES
            parity = (count // STAGES) & 1
            row = base + (end - 1 - i) * BLOCK_N
            mbarrier.wait(k_ring.emptied.index(stage), parity ^ 1)
            mbarrier.expect(k_ring.filled.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [row, 0], k_ring.filled.index(stage), k_ring.tiles.index(stage))
            mbarrier.wait(v_ring.emptied.index(stage), parity ^ 1)
            mbarrier.expect(v_ring.filled.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [row, 0], v_ring.filled.index(stage), v_ring.tiles.index(stage))
            count += 1


@gluon.jit
def issue_scores(q_tile, ring, count, zeros, STAGES: gl.constexpr):
    """Q @ K^T of the ring's tile number `count`, still under way."""
    stage = count % STAGES
    mbarrier.wait(ring.filled.index(stage), (count // STAGES) & 1)
    return warpgroup_mma(q_tile, ring.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def issue_values(p, acc, ring, count, STAGES: gl.constexpr):
    """Acc + P @ V of the ring's tile number `count`, still under way."""
    stage = count % STAGES
    mbarrier.wait(ring.filled.index(stage), (count // STAGES) & 1)
    return warpgroup_mma(p, ring.tiles.index(stage), acc, is_async=True)


@gluon.jit
def weights(
    s, m, l, v_unit, scale, v_units, tile, query_pos, num_keys,
    MASKED: gl.constexpr, V_IN_UNITS: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Scores of a key tile as P, what is left of the sums so far, and the new m, l and unit of V."""
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    if MASKED:
        keys = tile * BLOCK_N + n
        keep = visible_keys(keys, query_pos, 0, num_keys, False, WINDOW_LEFT, WINDOW_RIGHT)
        s = gl.where(keep & (keys < num_keys)[None, :], s, float("-inf"))
    p, correction, m, l = softmax_step(s, m, l, scale, True)
    if V_IN_UNITS:
        factor = gl.load(v_units + (tile * BLOCK_N + n) // BLOCK_S)
        p, correction, v_unit = weigh_values(p, correction, factor, v_unit)
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    # The left operand from registers lies as the accumulator does, so nothing moves.
    return gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, O, 2)), correction, m, l, v_unit


@gluon.jit
def attend_tiles(
    p, acc, m, l, v_unit, q_tile, k_ring, v_ring, zeros, scale, v_units, query_pos, num_keys, count, last,
    first, stop,
    MASKED: gl.constexpr, V_IN_UNITS: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Key tiles last - first, last - first - 1, ... of an item whose first tile is the ring's number `count`."""
    for i in range(first, stop):
        scores = issue_scores(q_tile, k_ring, count + i, zeros, STAGES)
        values = issue_values(p, acc, v_ring, count + i - 1, STAGES)
        s = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_ring.emptied.index((count + i) % STAGES))
        p, correction, m, l, v_unit = weights(
            s, m, l, v_unit, scale, v_units, last - i, query_pos, num_keys,
            MASKED, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, BLOCK_S, acc.shape[1],
        )  # fmt: skip
        # Named here, the softmax is not put off until after the wait.
        acc, p, correction, m, l = warpgroup_mma_wait(0, deps=(values, p, correction, m, l))
        mbarrier.arrive(v_ring.emptied.index((count + i - 1) % STAGES))
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m, l, v_unit


@gluon.jit
def anew(x):
    """A number that the compiler takes for another: what comes of it is computed again, not kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def attend(
    work, q, out, k_descale, v_descale, v_units, workspace, k_ring, v_ring, q_tile, qk_scale, out_scale,
    HALF: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr, V_IN_UNITS: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of all items: half number HALF of each tile."""
    ROWS: gl.constexpr = BLOCK_M // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    # As rows lie in memory.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    count = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        tile, kv_head, index, split, begin, end, full, full_end = key_tiles_of(
            work, item, NUM_KV_HEADS, GQA_RATIO, WINDOW_LEFT, WINDOW_RIGHT, SPLIT, BLOCK_M, BLOCK_N
        )
        q_len = gl.where(tile.seq >= 0, tile.q_len, 0)
        seq = gl.maximum(tile.seq, 0)
        number = tile.number * 2 + HALF
        tokens, heads, row_mask, within = rows_of(tile.q_start, q_len, number, kv_head, GQA_RATIO, ROWS)
        tokens = gl.set_auto_layout(tokens, gl.SliceLayout(1, LINES))
        d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
        at = tokens[:, None] * q.token + heads[:, None] * q.head + d[None, :]
        q_tile.store(gl.load(q.ptr + at, mask=row_mask[:, None], other=0.0))
        fence_async_shared()
        r = gl.arange(0, ROWS, gl.SliceLayout(1, S))
        query_pos = tile.kv_len - q_len + (number * ROWS + r) // GQA_RATIO
        scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S)) * qk_scale
        if K_DESCALE == "head":
            scale *= gl.load(k_descale.ptr + seq * k_descale.major + kv_head * k_descale.head)
        units = v_units
        if V_IN_UNITS:
            units = v_units + (kv_head * work.rows + tile.base) // BLOCK_S
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        v_unit = qk_scale * 0.0
        if begin < end:
            s = warpgroup_mma_wait(0, deps=(issue_scores(q_tile, k_ring, count, zeros, STAGES),))
            mbarrier.arrive(k_ring.emptied.index(count % STAGES))
            p, correction, m, l, v_unit = weights(
                s, m, l, v_unit, scale, units, end - 1, query_pos, tile.kv_len,
                True, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, BLOCK_S, HEAD_DIM,
            )  # fmt: skip
            masked = gl.maximum(end - full_end, 1)
            plain = gl.maximum(end - full, masked)
            p, acc, m, l, v_unit = attend_tiles(
                p, acc, m, l, v_unit, q_tile, k_ring, v_ring, zeros, scale, units, query_pos, tile.kv_len,
                count, end - 1, 1, masked,
                True, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, BLOCK_S, STAGES,
            )  # fmt: skip
            p, acc, m, l, v_unit = attend_tiles(
                p, acc, m, l, v_unit, q_tile, k_ring, v_ring, zeros, scale, units, query_pos, tile.kv_len,
                count, end - 1, masked, plain,
                False, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, BLOCK_S, STAGES,
            )  # fmt: skip
            if WINDOW_LEFT >= 0:
                p, acc, m, l, v_unit = attend_tiles(
                    p, acc, m, l, v_unit, q_tile, k_ring, v_ring, zeros, scale, units, query_pos, tile.kv_len,
                    count, end - 1, plain, end - begin,
                    True, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, BLOCK_S, STAGES,
                )  # fmt: skip
            count += end - begin
            acc = warpgroup_mma_wait(0, deps=(issue_values(p, acc, v_ring, count - 1, STAGES),))
            mbarrier.arrive(v_ring.emptied.index((count - 1) % STAGES))
        if V_IN_UNITS:
            acc *= v_unit
        tokens, heads, row_mask, within = rows_of(tile.q_start, q_len, anew(number), kv_head, GQA_RATIO, ROWS)
        tokens = gl.set_auto_layout(tokens, gl.SliceLayout(1, LINES))
        acc = gl.convert_layout(acc, LINES)
        m = gl.convert_layout(m, gl.SliceLayout(1, LINES))
        l = gl.convert_layout(l, gl.SliceLayout(1, LINES))
        o_scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, LINES)) * out_scale
        if V_DESCALE == "head":
            o_scale *= gl.load(v_descale.ptr + seq * v_descale.major + kv_head * v_descale.head)
        write = True
        if SPLIT:
            write, acc, m, l = merge_splits(
                workspace, acc, m, l, (index * NUM_KV_HEADS + kv_head) * 2 + HALF, split, work.num_splits,
                work.num_tiles * NUM_KV_HEADS * 2, row_mask, ROWS, HEAD_DIM,
            )  # fmt: skip
        if write:
            write_rows(
                out.ptr, out.lse, out.sinks, acc, m, l, o_scale, heads, tokens, row_mask, d,
                out.token, out.head, out.lse_token, HEAD_DIM, HAS_SINKS, WRITE_LSE,
            )  # fmt: skip


@gluon.jit
def _pipelined_prefill_kernel(
    q, out, v_units, k_desc, v_desc, k_descale, v_descale, schedule, workspace,
    qk_scale, out_scale, items, num_tiles, num_splits, scratch_rows,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr,
    V_IN_UNITS: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M rows over the widened keys; see `_dense_prefill_kernel` for the arguments.

    An item is a (split, tile, head); program i takes items i, i + programs, and so on, which the schedule has
    in the order of falling work.
    """
    work = Work(schedule, items, num_tiles, num_splits, scratch_rows)
    q_tiles = gl.allocate_shared_memory(
        q.ptr.dtype.element_ty, [2, BLOCK_M // 2, HEAD_DIM],
        gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, HEAD_DIM], q.ptr.dtype.element_ty),
    )  # fmt: skip
    k_ring = Ring(
        gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    v_ring = Ring(
        gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ring.filled.index(stage), count=1)
        mbarrier.init(v_ring.filled.index(stage), count=1)
        mbarrier.init(k_ring.emptied.index(stage), count=2)
        mbarrier.init(v_ring.emptied.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend,
                (
                    work, q, out, k_descale, v_descale, v_units, workspace, k_ring, v_ring, q_tiles.index(0),
                    qk_scale, out_scale, 0, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM, K_DESCALE, V_DESCALE,
                    V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, HAS_SINKS, WRITE_LSE, SPLIT,
                    BLOCK_M, BLOCK_N, BLOCK_S, STAGES,
                ),
            ),
            (
                attend,
                (
                    work, q, out, k_descale, v_descale, v_units, workspace, k_ring, v_ring, q_tiles.index(1),
                    qk_scale, out_scale, 1, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM, K_DESCALE, V_DESCALE,
                    V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, HAS_SINKS, WRITE_LSE, SPLIT,
                    BLOCK_M, BLOCK_N, BLOCK_S, STAGES,
                ),
            ),
            (
                copy_keys,
                (
                    work, k_desc, v_desc, k_ring, v_ring, NUM_KV_HEADS, GQA_RATIO, WINDOW_LEFT, WINDOW_RIGHT,
                    SPLIT, BLOCK_M, BLOCK_N, STAGES,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip

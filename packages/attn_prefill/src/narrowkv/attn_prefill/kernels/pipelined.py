"""The dense attention of Hopper: one warp copies keys, two warpgroups attend, each at its own pace.

Each warpgroup holds half a tile's rows. It issues the scores of the next key tile, then P @ V of the current
one, and computes the next softmax while the matrix unit works: the overlap of FlashAttention-3 (Shah et al.,
2024). Programs stay and take tile after tile, so that copies of a tile's first keys run during the end of the
tile before. Written in Gluon, since plain Triton schedules by itself; the functions around the loop are plain
Triton's own.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
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
write_rows = in_gluon(tiles.write_rows)

# The names of Triton 3.8 and later, and those before.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_lines = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class Ring(NamedTuple):
    """Key tiles in shared memory `[stages, BLOCK_N, head_dim]`, and who may use a stage next."""

    tiles: Any
    filled: Any
    emptied: Any


class Work(NamedTuple):
    """What all programs share: the schedule, how many items it makes, rows of the scratch in a head."""

    schedule: Any
    items: Any
    num_tiles: Any
    num_splits: Any
    rows: Any


class Item(NamedTuple):
    """A tile of rows, a head, a split of its keys: key tiles [begin, end), no mask for [full, full_end)."""

    tile: Any
    kv_head: Any
    index: Any
    split: Any
    begin: Any
    end: Any
    full: Any
    full_end: Any


def key_descriptor(keys: torch.Tensor, block_n: int) -> TensorDescriptor:
    """How to copy `block_n` rows of `[heads, rows, head_dim]`, heads one after the other."""
    flat = keys.view(-1, keys.shape[-1])
    block = [block_n, keys.shape[-1]]
    dtype = gl.bfloat16 if keys.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), block, layout)


@gluon.constexpr_function
def product_layout(columns):
    """How a warpgroup holds a product of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def line_layout(head_dim):
    """How a warpgroup holds rows that come from memory, or go there, as whole lines."""
    return gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])


@gluon.jit
def item_at(
    work, turn, NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The item that this program takes at a turn; there are `rounds_of` of them."""
    number = item_number(turn)
    kv_head = number % NUM_KV_HEADS
    index = number // NUM_KV_HEADS
    split = index // work.num_tiles
    index = index % work.num_tiles
    tile = scheduled_tile(work.schedule, index)
    before = tile.kv_len - tile.q_len
    first_pos = before + tile.number * BLOCK_M // GQA_RATIO
    last_pos = before + gl.minimum(((tile.number + 1) * BLOCK_M - 1) // GQA_RATIO, tile.q_len - 1)
    begin, end, full, full_end = key_range(
        first_pos, last_pos, tile.first, tile.kv_len, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N
    )
    if SPLIT:
        begin, end, full, full_end = share_of(begin, end, full, full_end, split, work.num_splits)
    # Places past the last tile hold none.
    end = gl.where(tile.seq >= 0, end, begin)
    return Item(tile, kv_head, index, split, begin, end, gl.minimum(full, end), gl.minimum(full_end, end))


@gluon.jit
def rounds_of(work):
    """How many items this program takes."""
    programs = gl.num_programs(0)
    rounds = work.items // programs
    left = work.items - rounds * programs
    return rounds + (item_number(rounds) < rounds * programs + left).to(gl.int32)


@gluon.jit
def item_number(turn):
    """The item that this program takes at a turn; odd turns go the other way round, which levels the sums."""
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return turn * programs + place


@gluon.jit
def copy_keys(
    work, k_desc, v_desc, k_ring, v_ring,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the key tiles of all items, the last tile of each first."""
    count = 0
    for turn in range(rounds_of(work)):
        item = item_at(
            work, turn, NUM_KV_HEADS, GQA_RATIO, WINDOW_LEFT, WINDOW_RIGHT, SPLIT, BLOCK_M, BLOCK_N
        )
        base = item.kv_head * work.rows + item.tile.base
        for i in range(item.end - item.begin):
            row = base + (item.end - 1 - i) * BLOCK_N
            copy_tile(k_desc, row, k_ring, count, STAGES)
            copy_tile(v_desc, row, v_ring, count, STAGES)
            count += 1


@gluon.jit
def copy_tile(desc, row, ring, count, STAGES: gl.constexpr):
    """Starts the copy of rows from `row` on into the ring, as its tile number `count`, once there is room."""
    stage = count % STAGES
    filled = ring.filled.index(stage)
    mbarrier.wait(ring.emptied.index(stage), (count // STAGES) & 1 ^ 1)
    mbarrier.expect(filled, desc.block_type.nbytes)
    load_tile(desc, [row, 0], filled, ring.tiles.index(stage))


@gluon.jit
def copy_queries(q, item, q_tile, HALF: gl.constexpr, GQA_RATIO: gl.constexpr):
    """Starts the copy of an item's rows into shared memory; what lies past the last row is undefined."""
    ROWS: gl.constexpr = q_tile.shape[0]
    HEAD_DIM: gl.constexpr = q_tile.shape[1]
    LINES: gl.constexpr = line_layout(HEAD_DIM)
    tile = item.tile
    q_len = gl.where(tile.seq >= 0, tile.q_len, 0)
    tokens, heads, row_mask, _within = rows_of(
        tile.q_start, q_len, tile.number * 2 + HALF, item.kv_head, GQA_RATIO, ROWS
    )
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
    at = (tokens * q.token + heads * q.head)[:, None] + d[None, :]
    load_lines(q_tile, q.ptr + at, mask=row_mask[:, None])
    async_copy.commit_group()


@gluon.jit
def issue_scores(q_tile, ring, count, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Q @ K^T of the ring's tile number `count`, still under way."""
    stage = count % STAGES
    S: gl.constexpr = product_layout(BLOCK_N)
    ROWS: gl.constexpr = q_tile.shape[0]
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
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
    s, m, l, scale, tile, query_pos, first, num_keys,
    MASKED: gl.constexpr, HAS_FIRST: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Scores of a key tile as P, what is left of the sums so far, and the new m and l."""
    if MASKED:
        n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        keep = visible_keys(n, query_pos, first, num_keys, HAS_FIRST, WINDOW_LEFT, WINDOW_RIGHT)
        s = gl.where(keep, s, float("-inf"))
    p, correction, m, l = softmax_step(s, m, l, scale, True)
    O: gl.constexpr = product_layout(HEAD_DIM)
    # The left operand from registers lies as the accumulator does, so nothing moves.
    return gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, O, 2)), correction, m, l


@gluon.jit
def factors_of(k_units, v_units, tile, K_IN_UNITS: gl.constexpr, V_IN_UNITS: gl.constexpr):
    """What a tile of K and of V is short of; tiles before the first have the first one's."""
    k_unit = 1.0
    v_unit = 1.0
    if K_IN_UNITS:
        k_unit = gl.load(k_units + gl.maximum(tile, 0))
    if V_IN_UNITS:
        v_unit = gl.load(v_units + gl.maximum(tile, 0))
    return k_unit, v_unit


@gluon.jit
def attend_tiles(
    p, acc, m, l, unit, k_unit, v_unit, q_tile, k_ring, v_ring, scale, k_units, v_units,
    query_pos, first, num_keys, count, last, begin, stop,
    MASKED: gl.constexpr, K_IN_UNITS: gl.constexpr, V_IN_UNITS: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Key tiles last - begin, ..., last - stop + 1 of an item; tile `last` is the ring's number `count`.

    Keys lie in rows [first, num_keys) of the scratch. `unit` is what `acc` is short of, `k_unit` and `v_unit`
    what the next tile is; those of the one after it are asked for a round ahead.
    """
    for i in range(begin, stop):
        scores = issue_scores(q_tile, k_ring, count + i, BLOCK_N, STAGES)
        values = issue_values(p, acc, v_ring, count + i - 1, STAGES)
        next_k_unit, next_v_unit = factors_of(k_units, v_units, last - i - 1, K_IN_UNITS, V_IN_UNITS)
        s = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_ring.emptied.index((count + i) % STAGES))
        p, correction, m, l = weights(
            s, m, l, scale * k_unit if K_IN_UNITS else scale, last - i, query_pos, first, num_keys,
            MASKED, K_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, acc.shape[1],
        )  # fmt: skip
        if V_IN_UNITS:
            correction *= unit / v_unit
            unit = v_unit
        # Named here, the softmax is not put off until after the wait.
        acc, p, correction, m, l = warpgroup_mma_wait(0, deps=(values, p, correction, m, l))
        mbarrier.arrive(v_ring.emptied.index((count + i - 1) % STAGES))
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
        k_unit, v_unit = next_k_unit, next_v_unit
    return p, acc, m, l, unit, k_unit, v_unit


@gluon.jit
def anew(x):
    """A number that the compiler takes for another: what comes of it is computed again, not kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def attend(
    work, q, out, k_descale, v_descale, k_units, v_units, workspace, k_ring, v_ring, q_tile,
    qk_scale, out_scale,
    HALF: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr,
    K_IN_UNITS: gl.constexpr, V_IN_UNITS: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of all items: half number HALF of each tile."""
    ROWS: gl.constexpr = BLOCK_M // 2
    S: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    O: gl.constexpr = product_layout(HEAD_DIM)
    count = 0
    for turn in range(rounds_of(work)):
        item = item_at(
            work, turn, NUM_KV_HEADS, GQA_RATIO, WINDOW_LEFT, WINDOW_RIGHT, SPLIT, BLOCK_M, BLOCK_N
        )
        tile, kv_head, begin, end = item.tile, item.kv_head, item.begin, item.end
        copy_queries(q, item, q_tile, HALF, GQA_RATIO)
        async_copy.wait_group(0)
        fence_async_shared()
        rows = tile.number * BLOCK_M + HALF * ROWS + gl.arange(0, ROWS, S)
        query_pos = tile.kv_len - tile.q_len + rows // GQA_RATIO
        seq = gl.maximum(tile.seq, 0)
        scale = gl.full([ROWS], 1.0, gl.float32, S) * qk_scale
        if K_DESCALE == "head":
            scale *= gl.load(k_descale.ptr + seq * k_descale.major + kv_head * k_descale.head)
        m = gl.full([ROWS], float("-inf"), gl.float32, S)
        l = gl.zeros([ROWS], gl.float32, S)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        unit = qk_scale * 0.0 + 1.0
        if begin < end:
            scores = issue_scores(q_tile, k_ring, count, BLOCK_N, STAGES)
            # Where blocks have factors, those of the sequence's first block.
            block = (kv_head * work.rows + tile.base) // BLOCK_N
            k_own, v_own = k_units, v_units
            if K_IN_UNITS:
                k_own = k_units + block
            if V_IN_UNITS:
                v_own = v_units + block
            k_unit, unit = factors_of(k_own, v_own, end - 1, K_IN_UNITS, V_IN_UNITS)
            next_k_unit, next_v_unit = factors_of(k_own, v_own, end - 2, K_IN_UNITS, V_IN_UNITS)
            s = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_ring.emptied.index(count % STAGES))
            p, _correction, m, l = weights(
                s, m, l, scale * k_unit if K_IN_UNITS else scale, end - 1, query_pos, tile.first,
                tile.kv_len, True, K_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, HEAD_DIM,
            )  # fmt: skip
            masked = gl.maximum(end - item.full_end, 1)
            plain = gl.maximum(end - item.full, masked)
            p, acc, m, l, unit, next_k_unit, next_v_unit = attend_tiles(
                p, acc, m, l, unit, next_k_unit, next_v_unit, q_tile, k_ring, v_ring, scale, k_own, v_own,
                query_pos, tile.first, tile.kv_len, count, end - 1, 1, masked,
                True, K_IN_UNITS, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
            )  # fmt: skip
            p, acc, m, l, unit, next_k_unit, next_v_unit = attend_tiles(
                p, acc, m, l, unit, next_k_unit, next_v_unit, q_tile, k_ring, v_ring, scale, k_own, v_own,
                query_pos, tile.first, tile.kv_len, count, end - 1, masked, plain,
                False, K_IN_UNITS, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
            )  # fmt: skip
            if WINDOW_LEFT >= 0 or K_IN_UNITS:
                p, acc, m, l, unit, next_k_unit, next_v_unit = attend_tiles(
                    p, acc, m, l, unit, next_k_unit, next_v_unit, q_tile, k_ring, v_ring, scale, k_own, v_own,
                    query_pos, tile.first, tile.kv_len, count, end - 1, plain, end - begin,
                    True, K_IN_UNITS, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
                )  # fmt: skip
            count += end - begin
            acc = warpgroup_mma_wait(0, deps=(issue_values(p, acc, v_ring, count - 1, STAGES),))
            mbarrier.arrive(v_ring.emptied.index((count - 1) % STAGES))
        if V_IN_UNITS:
            acc *= unit
        # Whole rows are written at once.
        LINES: gl.constexpr = line_layout(HEAD_DIM)
        acc = gl.convert_layout(acc, LINES)
        q_len = gl.where(tile.seq >= 0, tile.q_len, 0)
        tokens, heads, row_mask, _within = rows_of(
            tile.q_start, q_len, anew(tile.number * 2 + HALF), kv_head, GQA_RATIO, ROWS
        )
        tokens = gl.set_auto_layout(tokens, gl.SliceLayout(1, LINES))
        m = gl.convert_layout(m, gl.SliceLayout(1, LINES))
        l = gl.convert_layout(l, gl.SliceLayout(1, LINES))
        o_scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, LINES)) * out_scale
        if V_DESCALE == "head":
            o_scale *= gl.load(v_descale.ptr + seq * v_descale.major + kv_head * v_descale.head)
        write = True
        if SPLIT:
            write, acc, m, l = merge_splits(
                workspace, acc, m, l, (item.index * NUM_KV_HEADS + kv_head) * 2 + HALF, item.split,
                work.num_splits, work.num_tiles * NUM_KV_HEADS * 2, row_mask, False, ROWS, HEAD_DIM,
            )  # fmt: skip
        if write:
            write_rows(
                out.ptr, out.lse, out.sinks, acc, m, l, o_scale, heads, tokens, row_mask,
                gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)),
                out.token, out.head, out.lse_token, HEAD_DIM, HAS_SINKS, WRITE_LSE,
            )  # fmt: skip


@gluon.jit
def key_ring(desc, STAGES: gl.constexpr):
    """An empty ring of STAGES tiles that two warpgroups read."""
    ring = Ring(
        gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.filled.index(stage), count=1)
        mbarrier.init(ring.emptied.index(stage), count=2)
    return ring


@gluon.jit
def _pipelined_prefill_kernel(
    q, out, k_units, v_units, k_desc, v_desc, k_descale, v_descale, schedule, workspace,
    qk_scale, out_scale, items, num_tiles, num_splits, scratch_rows,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr,
    K_IN_UNITS: gl.constexpr, V_IN_UNITS: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M rows over the widened keys; see `_dense_prefill_kernel` for the arguments.

    An item is a (split, tile, head), by the schedule in the order of falling work; `item_number` says which
    of them a program takes. `k_units`, `v_units`: what blocks of BLOCK_N keys are short of,
    `[heads, rows / BLOCK_N]`, or None.
    """
    work = Work(schedule, items, num_tiles, num_splits, scratch_rows)
    KIND: gl.constexpr = q.ptr.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(
        KIND, [2, BLOCK_M // 2, HEAD_DIM],
        gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, HEAD_DIM], KIND),
    )  # fmt: skip
    k_ring = key_ring(k_desc, STAGES)
    v_ring = key_ring(v_desc, STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend,
                (
                    work, q, out, k_descale, v_descale, k_units, v_units, workspace, k_ring, v_ring,
                    q_tiles.index(0), qk_scale, out_scale, 0, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM,
                    K_DESCALE, V_DESCALE, K_IN_UNITS, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT,
                    HAS_SINKS, WRITE_LSE, SPLIT,
                    BLOCK_M, BLOCK_N, STAGES,
                ),
            ),
            (
                attend,
                (
                    work, q, out, k_descale, v_descale, k_units, v_units, workspace, k_ring, v_ring,
                    q_tiles.index(1), qk_scale, out_scale, 1, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM,
                    K_DESCALE, V_DESCALE, K_IN_UNITS, V_IN_UNITS, WINDOW_LEFT, WINDOW_RIGHT,
                    HAS_SINKS, WRITE_LSE, SPLIT,
                    BLOCK_M, BLOCK_N, STAGES,
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

"""The consumer warpgroups of Hopper's prefill: scores, softmax and values of half a tile's rows.

A warpgroup issues the scores of the next key tile, then P @ V of the current one, and computes the next
softmax while the matrix unit works: the overlap of FlashAttention-3 (Shah et al., 2024).
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

from narrowkv.attn_prefill.kernels import rows
from narrowkv.attn_prefill.kernels.pipelined_items import (
    item_at,
    lookup,
    rounds_of,
)
from narrowkv.attn_prefill.kernels.pipelined_rows import (
    copy_queries,
    half_rows,
    product_layout,
    write_half_tile,
)
from narrowkv.paged_cache.kernels import pages
from narrowkv.runtime.attention import masks, results, softmax
from narrowkv.runtime.launch.gluon import in_gluon

float_in_scalar_register = in_gluon(rows.float_in_scalar_register)
merge_splits = in_gluon(results.merge_splits)
capped_logits = in_gluon(softmax.capped_logits)
SoftCap = softmax.SoftCap
softmax_step = in_gluon(softmax.softmax_step)
visible_range = in_gluon(masks.visible_range)
times_head_descale = in_gluon(pages.times_head_descale)


class Scales(NamedTuple):
    """Factors of the logits of keys in the cache, of those of the chunk's own keys, and of the output.

    k_descale, v_descale: further factors of each head of the cache, where there are any.
    soft_cap: the cap of the scaled logits, or None.
    """

    old: Any
    new: Any
    out: Any
    k_descale: Any
    v_descale: Any
    soft_cap: Any


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


@gluon.constexpr_function
def mask_code(columns, has_low):
    """PTX of `mask_scores` and its constraints, for a thread's part of a product `[64, columns]`.

    That part is two rows, eight apart, of two columns in every eight. Columns are constants, counted from the
    thread's own first column: the caller subtracts that column from the limits.
    """
    held = columns // 2
    # Operands: the scores as they go and as they come, then the limits.
    code = [".reg .b32 own, high0, high1, low0, low1; .reg .pred keep;"]
    code += ["mov.u32 own, %laneid; and.b32 own, own, 3; shl.b32 own, own, 1;"]
    for row in range(2):
        code += [f"sub.s32 high{row}, ${2 * held + 2 * row}, own;"]
        if has_low:
            code += [f"sub.s32 low{row}, ${3 * held + 2 * row}, own;"]
    for i in range(held):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        code += [f"setp.ge.s32 keep, high{row}, {column};"]
        if has_low:
            code += [f"setp.le.and.s32 keep, low{row}, {column}, keep;"]
        code += [f"selp.f32 ${i}, ${i}, 0fFF800000, keep;"]
    limits = ["r"] * held * (2 if has_low else 1)
    constraints = ["=f"] * held + [str(i) for i in range(held)] + limits
    return "{ " + " ".join(code) + " }", ",".join(constraints)


@gluon.jit
def mask_scores(s, low, high, HAS_LOW: gl.constexpr):
    """Scores [64, N] where low <= column <= high, and -inf elsewhere.

    Left to the compiler it is 360 instructions for 128 columns, not 130: ptxas compares while the products
    run, ahead of need, and packs the results into bits.
    """
    CODE: gl.constexpr = mask_code(s.shape[1], HAS_LOW)
    _s, high = gl.broadcast(s, high[:, None])
    if HAS_LOW:
        _s, low = gl.broadcast(s, low[:, None])
        limits = (high, low)
    else:
        limits = (high,)
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], (s,) + limits, dtype=gl.float32, is_pure=True, pack=s.shape[1] // 2
    )


@gluon.jit
def softmax_of_tile(
    s, m, l, scale, soft_cap, query_pos, before, num_keys,
    MASKED: gl.constexpr, HAS_LAST: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """P of keys from row `before` on, the correction factor of earlier sums, and the new m and l.

    scale: what the scores are still to be multiplied by, positive unless there is a soft cap, which comes
    after it. HAS_LAST: the mask alone would show keys from `num_keys` on.
    """
    if soft_cap is not None:
        s = capped_logits(s * scale, SoftCap(soft_cap, None))
    if MASKED:
        low, high = visible_range(query_pos, 0, num_keys, False, WINDOW_LEFT, WINDOW_RIGHT)
        if HAS_LAST:
            high = gl.minimum(high, num_keys - 1)
        s = mask_scores(s, low - before, high - before, WINDOW_LEFT >= 0)
    if soft_cap is None:
        p, m, l, correction = softmax_step(s, m, l, gl.full_like(m, 1.0) * scale)
    else:
        p, m, l, correction = softmax_step(s, m, l)
    return as_operand(p, HEAD_DIM), correction, m, l


@gluon.jit
def as_operand(p, HEAD_DIM: gl.constexpr):
    """P in 16 bits; the left operand from registers lies as the accumulator does, so nothing moves."""
    O: gl.constexpr = product_layout(HEAD_DIM)
    return gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, O, 2))


@gluon.jit
def attend_tiles(
    p, acc, m, l, q_tile, k_ring, v_ring, scale, new_scale, soft_cap, old, query_pos, num_keys, count, last,
    begin, stop,
    MASKED: gl.constexpr, TWO_SCALES: gl.constexpr, WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Key tiles last - begin, ..., last - stop + 1; tile last - i is the ring's number `count` + i.

    TWO_SCALES: tiles from tile `old` on have `new_scale`.
    """
    for i in range(begin, stop):
        scores = issue_scores(q_tile, k_ring, count + i, BLOCK_N, STAGES)
        values = issue_values(p, acc, v_ring, count + i - 1, STAGES)
        s = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_ring.emptied.index((count + i) % STAGES))
        own_scale = scale
        if TWO_SCALES:
            own_scale = float_in_scalar_register(gl.where(last - i < old, scale, new_scale))
        p, correction, m, l = softmax_of_tile(
            s, m, l, own_scale, soft_cap, query_pos, (last - i) * BLOCK_N, num_keys,
            MASKED, False, WINDOW_LEFT, WINDOW_RIGHT, acc.shape[1],
        )  # fmt: skip
        # Named here, the softmax is not put off until after the wait.
        acc, p, correction, m, l = warpgroup_mma_wait(0, deps=(values, p, correction, m, l))
        mbarrier.arrive(v_ring.emptied.index((count + i - 1) % STAGES))
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m, l


@gluon.jit
def attend(
    work, q, out, scales, workspace, k_ring, v_ring, q_tile,
    HALF: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr,
    PAD: gl.constexpr, TWO_SCALES: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of all items: half number HALF of each tile."""
    ROWS: gl.constexpr = BLOCK_M // 2
    S: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    O: gl.constexpr = product_layout(HEAD_DIM)
    count = 0
    rounds = rounds_of(work, NUM_KV_HEADS)
    _place, kv_head, tile = lookup(work, 0, NUM_KV_HEADS, SPLIT)
    copy_queries(q, tile, kv_head, rounds > 0, q_tile, HALF, GQA_RATIO)
    for turn in range(rounds):
        item = item_at(
            work, turn, NUM_KV_HEADS, GQA_RATIO, PAD, WINDOW_LEFT, WINDOW_RIGHT, SPLIT,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        _place, next_head, next_tile = lookup(work, gl.minimum(turn + 1, rounds - 1), NUM_KV_HEADS, SPLIT)
        tile, kv_head, begin, end = item.tile, item.kv_head, item.begin, item.end
        async_copy.wait_group(0)
        fence_async_shared()
        rows = tile.number * BLOCK_M + HALF * ROWS + gl.arange(0, ROWS, S)
        query_pos = tile.before + rows // GQA_RATIO
        seq = gl.maximum(tile.seq, 0)
        scale = times_head_descale(scales.old, scales.k_descale, seq, kv_head, K_DESCALE)
        if K_DESCALE == "head":
            scale = float_in_scalar_register(scale)
        m = gl.full([ROWS], float("-inf"), gl.float32, S)
        l = gl.zeros([ROWS], gl.float32, S)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        if begin < end:
            scores = issue_scores(q_tile, k_ring, count, BLOCK_N, STAGES)
            last = item.order.last
            num_tiles = end - begin
            masked = gl.minimum(gl.maximum(last + 1 - item.full_end, 1), num_tiles)
            plain = gl.minimum(gl.maximum(last + 1 - item.full, masked), num_tiles)
            own_scale = scale
            # New keys begin with a block.
            old = tile.before // BLOCK_N
            if TWO_SCALES:
                own_scale = float_in_scalar_register(
                    gl.where(item.order.start < old * BLOCK_N, scale, scales.new)
                )
            s = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_ring.emptied.index(count % STAGES))
            p, _correction, m, l = softmax_of_tile(
                s, m, l, own_scale, scales.soft_cap, query_pos, item.order.start, item.order.stop,
                True, PAD is not None, WINDOW_LEFT, WINDOW_RIGHT, HEAD_DIM,
            )  # fmt: skip
            p, acc, m, l = attend_tiles(
                p, acc, m, l, q_tile, k_ring, v_ring, scale, scales.new, scales.soft_cap, old, query_pos,
                tile.kv_len, count, last, 1, masked,
                True, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
            )  # fmt: skip
            p, acc, m, l = attend_tiles(
                p, acc, m, l, q_tile, k_ring, v_ring, scale, scales.new, scales.soft_cap, old, query_pos,
                tile.kv_len, count, last, masked, plain,
                False, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
            )  # fmt: skip
            if WINDOW_LEFT >= 0:
                p, acc, m, l = attend_tiles(
                    p, acc, m, l, q_tile, k_ring, v_ring, scale, scales.new, scales.soft_cap, old, query_pos,
                    tile.kv_len, count, last, plain, num_tiles,
                    True, TWO_SCALES, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_N, STAGES,
                )  # fmt: skip
            count += num_tiles
            acc = warpgroup_mma_wait(0, deps=(issue_values(p, acc, v_ring, count - 1, STAGES),))
            mbarrier.arrive(v_ring.emptied.index((count - 1) % STAGES))
        # The next rows come while these are written.
        copy_queries(q, next_tile, next_head, turn + 1 < rounds, q_tile, HALF, GQA_RATIO)
        m = gl.convert_layout(m, gl.SliceLayout(1, O))
        l = gl.convert_layout(l, gl.SliceLayout(1, O))
        o_scale = times_head_descale(scales.out, scales.v_descale, seq, kv_head, V_DESCALE)
        # Where V has no units always true, unknown to ptxas: with a plain True the code of the loops was 2 %
        # slower once.
        write = (count >= 0) & item.usual
        if SPLIT:
            row_mask = half_rows(tile, kv_head, HALF, GQA_RATIO, ROWS)[2]
            merged, acc, m, l = merge_splits(
                workspace, acc, m, l, item.place.pair * 2 + HALF, item.place.split, work.num_splits,
                work.num_tiles * NUM_KV_HEADS * 2, gl.set_auto_layout(row_mask, gl.SliceLayout(1, O)), "",
                ROWS, HEAD_DIM,
            )  # fmt: skip
            write &= merged
        if write:
            write_half_tile(
                q,
                out,
                acc,
                m,
                l,
                o_scale,
                tile,
                kv_head,
                HALF,
                NUM_KV_HEADS,
                GQA_RATIO,
                WINDOW_RIGHT,
                HAS_SINKS,
                WRITE_LSE,
            )

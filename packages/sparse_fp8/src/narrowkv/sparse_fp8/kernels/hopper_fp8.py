"""Sparse attention over FP8 rows on Hopper (sm90), in Gluon: bytes wait on the chip until they are widened.

A program works through the tiles of its items (token, block of heads, split) as one stream. For tile n:

    scoring warpgroup         QK(n); softmax(n); copies: RoPE of tile n + 1, NoPE of n + 2 and some of n + 3
    two summing warpgroups    PV(n); widen tile n + 2, where PV(n) has left
    the second of them, too   scales of tile n + 4, indices of n + 5

A summing warpgroup has 256 of the 512 columns: it widens them for itself and for QK, and sums them. A warp is
held while it issues products, so that nothing comes free beside them: the tasks are shared out such that no
warpgroup has much more to do than another. Two wide tiles, one as stored, and Q fill the shared memory; a
quarter of Q is in registers.

A part is 64 columns of NoPE, those of one scale. Parts 0 to 3 are the first summing warpgroup's, 4 to 6 and
RoPE the second's. Those that are widened first, 0 and 4, are copied a tile ahead of the others.

Sources: warp specialisation as in FlashAttention-3 (Shah et al., 2024); a wide tile that QK and PV share as
in FlashMLA's kernels for an FP8 cache (DeepSeek, 2025).
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

from narrowkv.quant.device import e8m0_to_fp32
from narrowkv.sparse_fp8.kernels.hopper import (
    _barrier,
    _choose,
    _copy_async,
    _copy_query,
    _finish_scores,
    _item,
    _locate_rows,
    _name_item,
    _publish,
    _reinterpret,
    _softmax_tile,
    _store_results,
    _take_shares,
    _tile_indices,
)
from narrowkv.sparse_fp8.kernels.results import SIZES
from narrowkv.sparse_fp8.kernels.rows import ONE_AS_WORD, Csr, RowPointers


@gluon.jit
def _widen_words(words, scale):
    """int32 words of four E4M3 times bf16 powers of two: int32 words of two bf16, the low and the high."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 p, q, a, b, c, d;
            .reg .b32 x, y, u, v, s;
            .reg .f32 f, g;
            mov.b32 s, {$3, $3};
            mov.b32 {p, q}, $2;
            cvt.rn.f16x2.e4m3x2 x, p;
            cvt.rn.f16x2.e4m3x2 y, q;
            mov.b32 {a, b}, x;
            mov.b32 {c, d}, y;
            cvt.f32.f16 f, a;
            cvt.f32.f16 g, b;
            mov.b32 u, f;
            mov.b32 v, g;
            prmt.b32 x, u, v, 0x7632;
            mul.bf16x2 $0, x, s;
            cvt.f32.f16 f, c;
            cvt.f32.f16 g, d;
            mov.b32 u, f;
            mov.b32 v, g;
            prmt.b32 y, u, v, 0x7632;
            mul.bf16x2 $1, y, s;
        }
        """,
        "=&r,=r,r,h",
        [words, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _widen(words, scale):
    """int32 words `[rows, 16]` of four E4M3 times bf16 powers of two: words `[rows, 32]` of two bf16."""
    low, high = _widen_words(words, scale.to(gl.int16, bitcast=True))
    return gl.reshape(gl.join(low, high), [words.shape[0], 32])


@gluon.jit
def _words(pointer):
    """A pointer to 16-bit or 8-bit numbers as one to int32."""
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.constexpr_function
def _bytes_layout():
    """How a warpgroup holds words of four bytes, 16 a row: four lanes have a row, a thread two rows."""
    return gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])


@gluon.jit
def _locate_tile(
    prefix, extend, slots, number,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, LAYOUT: gl.constexpr,
    PREFIX_PAGE_SIZE: gl.constexpr, EXTEND_PAGE_SIZE: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Where the rows of tile `number` are: pointers to words of NoPE, and to RoPE; which rows are named."""
    index = slots.index(number % 4).load(gl.SliceLayout(1, LANES))
    first, index = _decode(index, HAS_PREFIX, HAS_EXTEND)
    live, nope_at, rope_at, _ = _locate_rows(
        prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, LAYOUT,
        PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS,
    )  # fmt: skip
    return (
        _words(_choose(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND)) + nope_at // 4,
        _choose(first, prefix.rope, extend.rope, HAS_PREFIX, HAS_EXTEND) + rope_at,
        live,
    )


@gluon.jit
def _allocate_each(DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """COUNT buffers of their own: the compiler puts a barrier between two accesses to parts of one."""
    buffers = ()
    for _ in gl.static_range(COUNT):
        buffers = buffers + (gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT),)
    return buffers


@gluon.jit
def _part(stored, number, t: gl.constexpr):
    """Where part `t` of tile `number` is as stored; two tiles' parts 0 and 4 are there."""
    if t % 4 == 0:
        return stored[t].index(number % 2)
    else:
        return stored[t]


@gluon.jit
def _copy_part(stored, rows, number, t: gl.constexpr):
    """64 NoPE columns, as stored, on their way to shared memory; zeros for rows not named."""
    BYTES: gl.constexpr = _bytes_layout()
    nope, _, live = rows
    w = t * 16 + gl.arange(0, 16, gl.SliceLayout(0, BYTES))
    _copy_async(_part(stored, number, t), nope[:, None] + w[None, :], mask=live[:, None])


@gluon.jit
def _copy_first_parts(
    prefix, extend, slots, number, stored, first_filled,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, LAYOUT: gl.constexpr,
    PREFIX_PAGE_SIZE: gl.constexpr, EXTEND_PAGE_SIZE: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
):  # fmt: skip
    """Parts 0 and 4 of tile `number`, where those of tile `number - 2` have been widened."""
    rows = _locate_tile(
        prefix, extend, slots, number, HAS_PREFIX, HAS_EXTEND, LAYOUT,
        PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS, _bytes_layout(),
    )  # fmt: skip
    _copy_part(stored, rows, number, 0)
    _copy_part(stored, rows, number, 4)
    # An arrival of each thread, when its copies have.
    async_copy.mbarrier_arrive(first_filled.index(number % 2), increment_count=False)


@gluon.jit
def _copy_tile(
    prefix, extend, slots, number, stored, widened, first_filled, filled,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, LAYOUT: gl.constexpr,
    PREFIX_PAGE_SIZE: gl.constexpr, EXTEND_PAGE_SIZE: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
):  # fmt: skip
    """The other parts of tile `number`, once the tile before is widened; then the first ones of the next."""
    rows = _locate_tile(
        prefix, extend, slots, number, HAS_PREFIX, HAS_EXTEND, LAYOUT,
        PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS, _bytes_layout(),
    )  # fmt: skip
    mbarrier.wait(widened.index((number + 1) % 2), (number + 1) // 2 & 1 ^ 1)
    # In the order in which they are widened.
    _copy_part(stored, rows, number, 2)
    _copy_part(stored, rows, number, 6)
    _copy_part(stored, rows, number, 1)
    _copy_part(stored, rows, number, 5)
    _copy_part(stored, rows, number, 3)
    async_copy.mbarrier_arrive(filled, increment_count=False)
    _copy_first_parts(
        prefix, extend, slots, number + 1, stored, first_filled,
        HAS_PREFIX, HAS_EXTEND, LAYOUT, PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS,
    )  # fmt: skip


@gluon.jit
def _copy_rope(
    prefix, extend, slots, number, wide,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, LAYOUT: gl.constexpr,
    PREFIX_PAGE_SIZE: gl.constexpr, EXTEND_PAGE_SIZE: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
):  # fmt: skip
    """RoPE of tile `number` to where it is multiplied, once PV has left that."""
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    _, rope, live = _locate_tile(
        prefix, extend, slots, number, HAS_PREFIX, HAS_EXTEND, LAYOUT,
        PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS, ROPE,
    )  # fmt: skip
    d = gl.arange(0, 64, gl.SliceLayout(0, ROPE))
    target = wide[3].index(number % 2).slice(64, 64, dim=1)
    _copy_async(target, rope[:, None] + d[None, :], mask=live[:, None])
    async_copy.commit_group()


@gluon.jit
def _widen_part(number, wide, stored, scales, t: gl.constexpr):
    """64 NoPE columns to bf16."""
    BYTES: gl.constexpr = _bytes_layout()
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    scale = scales.index(number % 4).slice(t, 1, dim=1).load(BYTES)
    words = _part(stored, number, t).load(BYTES)
    pairs = _reinterpret(wide[t // 2].index(number % 2), gl.int32, [words.shape[0], 64], PAIRS)
    pairs.slice(t % 2 * 32, 32, dim=1).store(_widen(words, scale))


@gluon.jit
def _widen_half(number, wide, stored, scales, first_filled, filled, HALF: gl.constexpr):
    """Half of the columns of tile `number` to bf16, but for RoPE."""
    mbarrier.wait(first_filled.index(number % 2), number // 2 & 1)
    _widen_part(number, wide, stored, scales, 4 * HALF)
    mbarrier.wait(filled, number & 1)
    # The two wide buffers by turns: between two stores to one there is a barrier, for which all wait.
    _widen_part(number, wide, stored, scales, 4 * HALF + 2)
    _widen_part(number, wide, stored, scales, 4 * HALF + 1)
    if HALF == 0:
        _widen_part(number, wide, stored, scales, 3)


@gluon.jit
def _last_tile(
    prefix_csr, extend_csr, number, num_tokens, num_splits,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Number of an item's last tile."""
    item = _item(
        prefix_csr, extend_csr, number, num_tokens, num_splits,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    return item[3] - 1


@gluon.jit
def _begin_stream(
    prefix_csr, extend_csr, num_tokens, num_splits, num_items,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """A program's first tile: its item's number, its place in the item, the item, and the program's next one.

    Items come one ahead, so that nobody waits for where their lists lie.
    """
    number = gl.program_id(0)
    item = _item(
        prefix_csr, extend_csr, number, num_tokens, num_splits,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    item_after = _item(
        prefix_csr, extend_csr, gl.minimum(number + gl.num_programs(0), num_items - 1),
        num_tokens, num_splits, HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    return number, 0, item, item_after


@gluon.jit
def _next_indices(
    prefix_csr, extend_csr, num_tokens, num_splits, num_items, stream, r,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The stream's next indices, if they are of the prefix and if of an item; the stream after them."""
    number, tile, item, item_after = stream
    index = _tile_indices(prefix_csr, extend_csr, item, tile, r, HAS_PREFIX, HAS_EXTEND, BLOCK_K)
    ahead = index, tile < item[8], number < num_items
    tile += 1
    if tile == item[3]:
        tile = 0
        number += gl.num_programs(0)
        item = item_after
        item_after = _item(
            prefix_csr, extend_csr, gl.minimum(number + gl.num_programs(0), num_items - 1),
            num_tokens, num_splits, HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
        )  # fmt: skip
    return ahead, (number, tile, item, item_after)


@gluon.jit
def _row_codes(prefix, extend, ahead, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr):
    """-1 where no row is named; -2 - i for row i of the extend rows beside a prefix."""
    index, first, exists = ahead
    rows = _choose(first, prefix.num_rows, extend.num_rows, HAS_PREFIX, HAS_EXTEND)
    code = index
    if HAS_PREFIX and HAS_EXTEND:
        code = gl.where(first, index, -2 - index)
    return gl.where((index >= 0) & (index < rows) & exists, code, -1)


@gluon.jit
def _look_up(
    prefix, extend, ahead, slots, number,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, LAYOUT: gl.constexpr,
    PREFIX_PAGE_SIZE: gl.constexpr, EXTEND_PAGE_SIZE: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
):  # fmt: skip
    """Names the rows of tile `number`; their scales, as stored `[BLOCK_K, 8]`, one where there is none."""
    SCALES: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [gl.num_warps(), 1], [1, 0])
    slots.index(number % 4).store(_row_codes(prefix, extend, ahead, HAS_PREFIX, HAS_EXTEND))
    index = slots.index(number % 4).load(gl.SliceLayout(1, SCALES))
    first, index = _decode(index, HAS_PREFIX, HAS_EXTEND)
    live, _, _, scale_at = _locate_rows(
        prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, LAYOUT,
        PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS,
    )  # fmt: skip
    t = gl.arange(0, 8, gl.SliceLayout(0, SCALES))
    # row512 has a byte for every 32 columns.
    STEP: gl.constexpr = 2 if LAYOUT == "row512" else 1
    rows = _choose(first, prefix.scale, extend.scale, HAS_PREFIX, HAS_EXTEND) + scale_at
    mask = live[:, None] & (t < 7)[None, :]
    ONE: gl.constexpr = ONE_AS_WORD if LAYOUT == "split" else 127
    return gl.load(rows[:, None] + (t * STEP)[None, :], mask=mask, other=ONE)


@gluon.jit
def _as_bf16(scale):
    """Powers of two, words of float32 or E8M0, in bf16."""
    if scale.dtype == gl.uint8:
        scale = e8m0_to_fp32(scale)
    else:
        scale = scale.to(gl.float32, bitcast=True)
    return scale.to(gl.bfloat16)


@gluon.jit
def _decode(code, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr):
    """Of `_row_codes`: whether a row is of the prefix, and its number there or among the extend rows."""
    first = code >= 0
    if HAS_PREFIX and HAS_EXTEND:
        code = gl.where(first, code, -2 - code)
    return first, code


@gluon.jit
def _sum_fp8_warps(
    out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items, slots,
    wide, stored, scales, numerators, corrections, changes, shares, looked_up, first_filled, filled,
    widened, scored, summed, finished, released, HALF: gl.constexpr, CALL: gl.constexpr,
):  # fmt: skip
    """PV of half of the columns, and these widened for the tile after the next; stores the results."""
    # Triton 3.6 passes only numbers of a struct on.
    LAYOUT: gl.constexpr = CALL.LAYOUT
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
                prefix, extend, ahead, slots, number, CALL.HAS_PREFIX, CALL.HAS_EXTEND, LAYOUT,
                CALL.PREFIX_PAGE_SIZE, CALL.EXTEND_PAGE_SIZE, CALL.WIDE_ADDRESS,
            )  # fmt: skip
            scales.index(number).store(_as_bf16(scale))
        ahead, stream = _next_indices(
            prefix_csr, extend_csr, num_tokens, num_splits, num_items, stream, r,
            CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
        )  # fmt: skip
        _barrier()
        mbarrier.arrive(looked_up, count=1)
    else:
        mbarrier.wait(looked_up, 0)
    for number in range(2):
        _widen_half(number, wide, stored, scales, first_filled, filled, HALF)
        _publish()
        mbarrier.arrive(widened.index(number), count=1)
    count, turn = 0, 0
    # Known an item ahead. A while loop: Triton 3.6 loses a carried number that only bounds a range.
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
            acc_a = warpgroup_mma(numerators, wide[2 * HALF].index(stage), acc_a, is_async=True)
            acc_b = warpgroup_mma(numerators, wide[2 * HALF + 1].index(stage), acc_b, is_async=True)
            if LOOKS_UP:
                # Tile count + 4, in the place of tile `count`.
                scale = _look_up(
                    prefix, extend, ahead, slots, count, CALL.HAS_PREFIX, CALL.HAS_EXTEND, LAYOUT,
                    CALL.PREFIX_PAGE_SIZE, CALL.EXTEND_PAGE_SIZE, CALL.WIDE_ADDRESS,
                )  # fmt: skip
            acc_a, acc_b = warpgroup_mma_wait(0, deps=[acc_a, acc_b])
            _barrier()
            mbarrier.arrive(summed, count=1)
            if LOOKS_UP:
                ahead, stream = _next_indices(
                    prefix_csr, extend_csr, num_tokens, num_splits, num_items, stream, r,
                    CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND, CALL.SPLIT, CALL.BLOCK_K,
                )  # fmt: skip
            _widen_half(count + 2, wide, stored, scales, first_filled, filled, HALF)
            if LOOKS_UP:
                scales.index(count % 4).store(_as_bf16(scale))
            _publish()
            mbarrier.arrive(widened.index(stage), count=1)
            count += 1
            done += 1
        last = next_last
        share = _take_shares(shares, turn, finished, released, ROW)
        item = _name_item(number, num_tokens, CALL.HEAD_BLOCKS)
        _store_results(out, partials, acc_a, share, item, num_tokens, HALF * 256, CALL.NUM_HEADS, CALL.SPLIT)
        _store_results(
            out, partials, acc_b, share, item, num_tokens, HALF * 256 + 128, CALL.NUM_HEADS, CALL.SPLIT
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
def _through(buffer, x, LAYOUT: gl.constexpr):
    """The same numbers in another layout, by way of a buffer."""
    buffer.store(x)
    _barrier()
    moved = buffer.load(LAYOUT)
    _barrier()
    return moved


@gluon.jit
def _score_fp8_warps(
    q, qk_scale, out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits,
    num_items, slots, query_a, query_b, wide, stored, numerators, corrections, changes, shares,
    looked_up, first_filled, filled, widened, scored, summed, finished, released, CALL: gl.constexpr,
):  # fmt: skip
    """Copies the rows; QK; the softmax."""
    # Triton 3.6 passes only numbers of a struct on.
    LAYOUT: gl.constexpr = CALL.LAYOUT
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CALL.BLOCK_K, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERY: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    zeros = gl.full([CALL.BLOCK_H, CALL.BLOCK_K], 0.0, gl.float32, SCORES)
    count, turn = 0, 0
    mbarrier.wait(looked_up, 0)
    _copy_rope(
        prefix, extend, slots, 0, wide,
        CALL.HAS_PREFIX, CALL.HAS_EXTEND, LAYOUT, CALL.PREFIX_PAGE_SIZE, CALL.EXTEND_PAGE_SIZE,
        CALL.WIDE_ADDRESS,
    )  # fmt: skip
    _copy_first_parts(
        prefix, extend, slots, 0, stored, first_filled,
        CALL.HAS_PREFIX, CALL.HAS_EXTEND, LAYOUT, CALL.PREFIX_PAGE_SIZE, CALL.EXTEND_PAGE_SIZE,
        CALL.WIDE_ADDRESS,
    )  # fmt: skip
    for number in range(2):
        _copy_tile(
            prefix, extend, slots, number, stored, widened, first_filled, filled,
            CALL.HAS_PREFIX, CALL.HAS_EXTEND, LAYOUT, CALL.PREFIX_PAGE_SIZE, CALL.EXTEND_PAGE_SIZE,
            CALL.WIDE_ADDRESS,
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
        part_c = _load_query(rows + 384, q.stride_h, head_block, CALL.NUM_HEADS, CALL.BLOCK_H, COPY)
        part_d = _load_query(rows + 448, q.stride_h, head_block, CALL.NUM_HEADS, CALL.BLOCK_H, COPY)
        mbarrier.wait(summed, count & 1 ^ 1)
        query_c = _through(numerators, part_c, QUERY)
        query_d = _through(numerators, part_d, QUERY)
        m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, ROW)
        l = gl.full([CALL.BLOCK_H], 0.0, gl.float32, ROW)
        for _ in range(num_tiles):
            stage = count % 2
            # RoPE has come, and Q before the first tile.
            async_copy.wait_group(0)
            _publish()
            k_a = wide[0].index(stage).permute((1, 0))
            k_b = wide[1].index(stage).permute((1, 0))
            k_c = wide[2].index(stage).permute((1, 0))
            k_d = wide[3].index(stage).slice(0, 64, dim=1).permute((1, 0))
            k_e = wide[3].index(stage).slice(64, 64, dim=1).permute((1, 0))
            s = warpgroup_mma(query_a.slice(0, 128, dim=1), k_a, zeros, use_acc=False, is_async=True)
            s = warpgroup_mma(query_a.slice(128, 128, dim=1), k_b, s, is_async=True)
            s = warpgroup_mma(query_b, k_c, s, is_async=True)
            s = warpgroup_mma(query_c, k_d, s, is_async=True)
            s = warpgroup_mma(query_d, k_e, s, is_async=True)
            named = slots.index(count % 4).load(gl.SliceLayout(0, SCORES)) != -1
            scores = warpgroup_mma_wait(0, deps=[s])
            mbarrier.wait(summed, count & 1 ^ 1)
            _copy_rope(
                prefix, extend, slots, count + 1, wide,
                CALL.HAS_PREFIX, CALL.HAS_EXTEND, LAYOUT, CALL.PREFIX_PAGE_SIZE, CALL.EXTEND_PAGE_SIZE,
                CALL.WIDE_ADDRESS,
            )  # fmt: skip
            m, l = _softmax_tile(
                scores, gl.where(named, 0.0, float("-inf")), m, l, qk_scale,
                numerators, corrections, changes, CALL.SLACK,
            )  # fmt: skip
            _publish()
            mbarrier.arrive(scored, count=1)
            count += 1
            _copy_tile(
                prefix, extend, slots, count + 1, stored, widened, first_filled, filled,
                CALL.HAS_PREFIX, CALL.HAS_EXTEND, LAYOUT, CALL.PREFIX_PAGE_SIZE, CALL.EXTEND_PAGE_SIZE,
                CALL.WIDE_ADDRESS,
            )  # fmt: skip
        _finish_scores(
            m, l, out, partials, token, head_block, split, num_tokens, turn, shares, finished, released,
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
    # Triton 3.6 takes only some numbers straight from a struct.
    BLOCK_H: gl.constexpr = CALL.BLOCK_H
    BLOCK_K: gl.constexpr = CALL.BLOCK_K
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
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    query_a = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 256], WIDE)
    query_b = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 128], WIDE)
    wide = _allocate_each(DTYPE, (2, BLOCK_K, 128), WIDE, 4)
    first_parts = _allocate_each(gl.int32, (2, BLOCK_K, 16), ROWS, 2)
    parts = _allocate_each(gl.int32, (BLOCK_K, 16), ROWS, 5)
    stored = first_parts[0], parts[0], parts[1], parts[2], first_parts[1], parts[3], parts[4]
    scales = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_K, 8], ROWS)
    slots = gl.allocate_shared_memory(gl.int32, [4, BLOCK_K], LINE)
    numerators = gl.allocate_shared_memory(
        DTYPE,
        [BLOCK_H, BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([BLOCK_H, BLOCK_K], DTYPE),
    )
    corrections = gl.allocate_shared_memory(gl.float32, [BLOCK_H], LINE)
    changes = gl.allocate_shared_memory(gl.int32, [4], LINE)
    shares = gl.allocate_shared_memory(gl.float32, [BLOCK_H], LINE)
    # The first four tiles are looked up. Parts 0 and 4 of a tile are there as stored; so are the others.
    looked_up = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    first_filled = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    # A tile is there as bf16, both halves; its numerators are; it is summed.
    widened = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    scored = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    # The shares of an item are there; they have been read.
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
                    slots, wide, stored, scales, numerators, corrections, changes, shares,
                    looked_up, first_filled, filled, widened, scored, summed, finished, released,
                    0, CALL,
                ),
            ),
            (
                _sum_fp8_warps,
                (
                    out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    slots, wide, stored, scales, numerators, corrections, changes, shares,
                    looked_up, first_filled, filled, widened, scored, summed, finished, released,
                    1, CALL,
                ),
            ),
            (
                _score_fp8_warps,
                (
                    q, qk_scale, out, partials,
                    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    slots, query_a, query_b, wide, stored, numerators, corrections, changes, shares,
                    looked_up, first_filled, filled, widened, scored, summed, finished, released,
                    CALL,
                ),
            ),
        ],
        [4, 4],
        [184, 160],
    )  # fmt: skip

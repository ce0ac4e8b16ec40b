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

RoPE columns behind 512 others have a buffer for one tile, which only QK reads: the scoring warpgroup fills
it after QK of the tile before. V3.2's rows have a scale in fp32 for 128 columns, see the kernel for few
heads: their four buffers of numerators, and Q, which is not in registers then, fit beside tiles of 32 rows.

Sources: warp specialisation as in FlashAttention-3 (Shah et al., 2024); a widened tile that QK and PV share
as in FlashMLA's kernels for an FP8 cache (DeepSeek, 2025).
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

from narrowkv.quant.device import e8m0_to_fp32
from narrowkv.runtime.launch.gluon import reinterpret
from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _arguments,
    _causal,
    _copy_query,
    _finish_scores,
    _item,
    _locate_rows,
    _make_writes_visible,
    _name_item,
    _next_item,
    _one_scale,
    _select_source,
    _softmax_tile,
    _store_results,
    _take_factors,
    _tile_indices,
    _tile_rows,
)
from narrowkv.sparse_fp8.kernels.results import SIZES
from narrowkv.sparse_fp8.kernels.rows import ONE_AS_E8M0, ONE_AS_WORD


class Fp8Shared(NamedTuple):
    """Shared memory and barriers of the kernel for FP8 rows.

    slots, scales: row codes (see `_row_codes`) and scales of four tiles. query_a, query_b: Q of an item, but
    for what is in registers. tiles: the widened columns of two tiles, 128 in each of four buffers. stored:
    parts as stored. corrections, changes, factors: as in `WideShared`.
    looked_up: the first four tiles are looked up. first_filled: parts 0 and 4 of a tile are there as stored;
    filled: so are the others. widened: both halves of a tile are there as bf16. scored: its numerators are.
    summed: it is summed. finished: an item's factors are there. released: they have been read.
    """

    slots: Any
    query_a: Any
    query_b: Any
    query_rope: Any
    tiles: Any
    rope: Any
    stored: Any
    scales: Any
    numerators: Any
    corrections: Any
    changes: Any
    factors: Any
    looked_up: Any
    first_filled: Any
    filled: Any
    widened: Any
    scored: Any
    summed: Any
    finished: Any
    released: Any


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
    """A pointer to 16-bit or 8-bit numbers as a pointer to int32."""
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.constexpr_function
def _bytes_layout():
    """A warpgroup's layout of words of four bytes, 16 per row: four lanes share a row, a thread has two."""
    return gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])


@gluon.jit
def _locate_tile(args, shared, number, LANES: gl.constexpr, CALL: gl.constexpr):
    """Where the rows of tile `number` are: pointers to words of NoPE, and to RoPE; which rows are named."""
    index = shared.slots.index(number % 4).load(gl.SliceLayout(1, LANES))
    first, index = _decode(index, CALL)
    live, nope_at, rope_at, _ = _locate_rows(args, first, index, CALL)
    return (
        _words(_select_source(first, args.prefix.nope, args.extend.nope, CALL)) + nope_at // 4,
        _select_source(first, args.prefix.rope, args.extend.rope, CALL) + rope_at,
        live,
    )


@gluon.jit
def _allocate_each(DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """COUNT separate buffers: the compiler puts a barrier between two accesses to parts of one buffer."""
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
    """Starts to copy 64 NoPE columns, as stored, to shared memory; zeros for indices without a row."""
    BYTES: gl.constexpr = _bytes_layout()
    nope, _, live = rows
    w = t * 16 + gl.arange(0, 16, gl.SliceLayout(0, BYTES))
    at = gl.multiple_of(nope[:, None] + w[None, :], [16, 16])  # see `_copy_rows`
    async_copy.async_load(_part(stored, number, t), at, mask=live[:, None])


@gluon.jit
def _copy_first_parts(args, shared, number, CALL: gl.constexpr):
    """Copies parts 0 and 4 of tile `number` over those of tile `number - 2`, which have been widened."""
    rows = _locate_tile(args, shared, number, _bytes_layout(), CALL)
    _copy_part(shared.stored, rows, number, 0)
    _copy_part(shared.stored, rows, number, 4)
    # An arrival of each thread, when its copies have.
    async_copy.mbarrier_arrive(shared.first_filled.index(number % 2), increment_count=False)


@gluon.jit
def _copy_tile(args, shared, number, CALL: gl.constexpr):
    """Copies the other parts of tile `number` once the tile before is widened, then the first of the next."""
    rows = _locate_tile(args, shared, number, _bytes_layout(), CALL)
    mbarrier.wait(shared.widened.index((number + 1) % 2), (number + 1) // 2 & 1 ^ 1)
    # In the order in which they are widened.
    _copy_part(shared.stored, rows, number, 2)
    _copy_part(shared.stored, rows, number, 6)
    _copy_part(shared.stored, rows, number, 1)
    _copy_part(shared.stored, rows, number, 5)
    _copy_part(shared.stored, rows, number, 3)
    if CALL.PREFIX.COLUMNS == 512:
        _copy_part(shared.stored, rows, number, 7)
    async_copy.mbarrier_arrive(shared.filled, increment_count=False)
    _copy_first_parts(args, shared, number + 1, CALL)


@gluon.jit
def _copy_rope(args, shared, number, CALL: gl.constexpr):
    """Copies RoPE of tile `number` to its place in the widened tile, once PV has read that tile."""
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    _, rope, live = _locate_tile(args, shared, number, ROPE, CALL)
    d = gl.arange(0, 64, gl.SliceLayout(0, ROPE))
    if CALL.HEAD_DIM > 512:
        target = shared.rope
    else:
        target = shared.tiles[3].index(number % 2).slice(64, 64, dim=1)
    at = gl.multiple_of(rope[:, None] + d[None, :], [16, 16])
    async_copy.async_load(target, at, mask=live[:, None])
    async_copy.commit_group()


@gluon.jit
def _load_rope(args, shared, number, CALL: gl.constexpr):
    """Words of the RoPE columns of tile `number`, which are in FP8."""
    BYTES: gl.constexpr = _bytes_layout()
    _, rope, live = _locate_tile(args, shared, number, BYTES, CALL)
    w = gl.arange(0, 16, gl.SliceLayout(0, BYTES))
    at = gl.multiple_of(_words(rope)[:, None] + w[None, :], [16, 16])  # see `_copy_rows`
    return gl.load(at, mask=live[:, None], other=0)


@gluon.jit
def _widen_part(number, shared, t: gl.constexpr, STORED: gl.constexpr):
    """Widens 64 stored columns to bf16."""
    BYTES: gl.constexpr = _bytes_layout()
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    words = _part(shared.stored, number, t).load(BYTES)
    if STORED.SCALE == "tensor" or STORED.SCALE == "fp32":
        # Fp32 scales do not fit bf16: scores are multiplied by them, and numerators or results.
        scale = gl.full([words.shape[0], 1], 1.0, gl.bfloat16, BYTES)
    elif STORED.GROUP == 64:
        scale = shared.scales.index(number % 4).slice(t, 1, dim=1).load(BYTES)
    else:
        # Bit 3 of a word's number is the same in all words of a thread.
        second = (gl.arange(0, 16, gl.SliceLayout(0, BYTES)) & 8) != 0
        own = shared.scales.index(number % 4)
        first_scale = own.slice(2 * t, 1, dim=1).load(BYTES)
        second_scale = own.slice(2 * t + 1, 1, dim=1).load(BYTES)
        scale = gl.where(second[None, :], second_scale, first_scale)
    pairs = reinterpret(shared.tiles[t // 2].index(number % 2), gl.int32, [words.shape[0], 64], PAIRS)
    pairs.slice(t % 2 * 32, 32, dim=1).store(_widen(words, scale))


@gluon.jit
def _widen_half(number, shared, HALF: gl.constexpr, STORED: gl.constexpr):
    """Widens half of the columns of tile `number` to bf16, without RoPE columns, which are stored in bf16."""
    mbarrier.wait(shared.first_filled.index(number % 2), number // 2 & 1)
    _widen_part(number, shared, 4 * HALF, STORED)
    mbarrier.wait(shared.filled, number & 1)
    # The two widened buffers by turns: between two stores to one there is a barrier, for which all wait.
    _widen_part(number, shared, 4 * HALF + 2, STORED)
    _widen_part(number, shared, 4 * HALF + 1, STORED)
    if HALF == 0:
        _widen_part(number, shared, 3, STORED)
    elif STORED.COLUMNS == 512:
        _widen_part(number, shared, 7, STORED)


@gluon.jit
def _begin_stream(args, CALL: gl.constexpr):
    """A program's first tile: its item's number, its place in the item, the item, and the program's next one.

    Items are looked up one ahead, so that no warp waits for the bounds of their lists.
    """
    number = gl.program_id(0)
    return number, 0, _item(args, number, CALL), _next_item(args, number, CALL)


@gluon.jit
def _next_indices(args, stream, r, CALL: gl.constexpr):
    """The stream's next indices, if they are of the prefix and if of an item, and where; the stream after."""
    number, tile, item, item_after = stream
    index = _tile_indices(args, item, tile, r, CALL)
    ahead = index, tile < item[8], number < args.num_items, item[4] + tile * CALL.BLOCK_K, item[5]
    tile += 1
    if tile == item[3]:
        tile = 0
        number += gl.num_programs(0)
        item = item_after
        item_after = _next_item(args, number, CALL)
    return ahead, (number, tile, item, item_after)


@gluon.jit
def _row_codes(args, ahead, CALL: gl.constexpr):
    """-1 where no row is named; -2 - i for row i of the extend rows beside a prefix."""
    index, first, exists, begin, end = ahead
    r = gl.arange(0, CALL.BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    index = _tile_rows(args, index, begin, end, r, CALL)
    rows = _select_source(first, args.prefix.num_rows, args.extend.num_rows, CALL)
    code = index
    if CALL.HAS_PREFIX and CALL.HAS_EXTEND:
        code = gl.where(first, index, -2 - index)
    return gl.where((index >= 0) & (index < rows) & exists, code, -1)


@gluon.jit
def _look_up(args, shared, ahead, number, CALL: gl.constexpr):
    """Stores the row codes of tile `number`; its scales `[BLOCK_K, 8]` or `[.., 16]`, 1 without a row."""
    # Seven scales are read as eight.
    STORED: gl.constexpr = CALL.PREFIX
    COUNT: gl.constexpr = STORED.COLUMNS // STORED.GROUP
    PLACES: gl.constexpr = 8 if COUNT == 7 else COUNT
    SCALES: gl.constexpr = gl.BlockedLayout([1, PLACES // 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    shared.slots.index(number % 4).store(_row_codes(args, ahead, CALL))
    if STORED.SCALE == "tensor":
        return 0
    else:
        index = shared.slots.index(number % 4).load(gl.SliceLayout(1, SCALES))
        first, index = _decode(index, CALL)
        live, _, _, scale_at = _locate_rows(args, first, index, CALL)
        t = gl.arange(0, PLACES, gl.SliceLayout(0, SCALES))
        rows = _select_source(first, args.prefix.scale, args.extend.scale, CALL) + scale_at
        mask = live[:, None] & (t < COUNT)[None, :]
        ONE: gl.constexpr = ONE_AS_E8M0 if STORED.SCALE == "e8m0" else ONE_AS_WORD
        return gl.load(rows[:, None] + (t * STORED.STEP)[None, :], mask=mask, other=ONE)


@gluon.jit
def _as_bf16(scale):
    """Powers of two, words of float32 or E8M0, in bf16."""
    if scale.dtype == gl.uint8:
        scale = e8m0_to_fp32(scale)
    else:
        scale = scale.to(gl.float32, bitcast=True)
    return scale.to(gl.bfloat16)


@gluon.jit
def _store_scales(shared, number, scale, CALL: gl.constexpr):
    """Stores what `_look_up` loaded for tile `number`."""
    if CALL.GROUPS > 1:
        shared.scales.index(number % 4).permute((1, 0)).store(scale.to(gl.float32, bitcast=True))
    elif CALL.PREFIX.SCALE != "tensor":
        shared.scales.index(number % 4).store(_as_bf16(scale))


@gluon.jit
def _decode(code, CALL: gl.constexpr):
    """Decodes `_row_codes`: whether a row is of the prefix, and its number there or among the extend rows."""
    first = code >= 0
    if CALL.HAS_PREFIX and CALL.HAS_EXTEND:
        code = gl.where(first, code, -2 - code)
    return first, code


@gluon.jit
def _sum_fp8_warps(args, shared, HALF: gl.constexpr, CALL: gl.constexpr):
    """Computes PV of half of the columns, widens them for the tile after the next, stores the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    # The second warpgroup has less to widen. What it writes to `slots` and `scales`, for four tiles ahead, is
    # there for the others by what they wait for anyway: `widened` of two tiles ahead comes after it.
    LOOKS_UP: gl.constexpr = HALF == 1
    if LOOKS_UP:
        r = gl.arange(0, CALL.BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        stream = _begin_stream(args, CALL)
        for number in range(4):
            ahead, stream = _next_indices(args, stream, r, CALL)
            _store_scales(shared, number, _look_up(args, shared, ahead, number, CALL), CALL)
        ahead, stream = _next_indices(args, stream, r, CALL)
        gl.barrier()
        mbarrier.arrive(shared.looked_up, count=1)
    else:
        mbarrier.wait(shared.looked_up, 0)
    for number in range(2):
        _widen_half(number, shared, HALF, CALL.PREFIX)
        _make_writes_visible()
        mbarrier.arrive(shared.widened.index(number), count=1)
    count, turn = 0, 0
    # The next item's last tile is read an item ahead. The loop over tiles is a while loop: Triton 3.6 lost a
    # loop-carried number whose only use is the bound of an inner range.
    last = _item(args, gl.program_id(0), CALL)[3] - 1
    for number in range(gl.program_id(0), args.num_items, gl.num_programs(0)):
        next_last = _next_item(args, number, CALL)[3] - 1
        acc_a = gl.full([CALL.BLOCK_H, 128], 0.0, gl.float32, SUMS)
        acc_b = gl.full([CALL.BLOCK_H, 128], 0.0, gl.float32, SUMS)
        done = 0
        while done <= last:
            stage = count % 2
            mbarrier.wait(shared.scored, count & 1)
            if gl.max(shared.changes.load(EVERYWHERE), 0) > 0:
                correction = shared.corrections.load(ROW)[:, None]
                acc_a = acc_a * correction
                acc_b = acc_b * correction
            p_a = shared.numerators.index(2 * HALF % CALL.GROUPS)
            p_b = shared.numerators.index((2 * HALF + 1) % CALL.GROUPS)
            acc_a = warpgroup_mma(p_a, shared.tiles[2 * HALF].index(stage), acc_a, is_async=True)
            acc_b = warpgroup_mma(p_b, shared.tiles[2 * HALF + 1].index(stage), acc_b, is_async=True)
            if LOOKS_UP:
                # Tile count + 4, in the place of tile `count`.
                scale = _look_up(args, shared, ahead, count, CALL)
            acc_a, acc_b = warpgroup_mma_wait(0, deps=[acc_a, acc_b])
            gl.barrier()
            mbarrier.arrive(shared.summed, count=1)
            if LOOKS_UP:
                ahead, stream = _next_indices(args, stream, r, CALL)
            _widen_half(count + 2, shared, HALF, CALL.PREFIX)
            if LOOKS_UP:
                _store_scales(shared, count, scale, CALL)
            _make_writes_visible()
            mbarrier.arrive(shared.widened.index(stage), count=1)
            count += 1
            done += 1
        last = next_last
        factor = _take_factors(shared, turn, ROW)
        item = _name_item(args, number, CALL)
        if CALL.PREFIX.SCALE == "tensor":
            acc_a, acc_b = acc_a * _one_scale(args, CALL), acc_b * _one_scale(args, CALL)
        _store_results(acc_a, factor, args, item, HALF * 256, CALL)
        _store_results(acc_b, factor, args, item, HALF * 256 + 128, CALL)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _load_query(place, stride_h, head_block, LAYOUT: gl.constexpr, CALL: gl.constexpr):
    """64 columns of an item's heads; heads past the last are zeros."""
    heads = head_block * CALL.BLOCK_H + gl.arange(0, CALL.BLOCK_H, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    mask = (heads < CALL.NUM_HEADS)[:, None]
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
def _score_fp8_warps(args, shared, CALL: gl.constexpr):
    """Copies the rows; QK; the softmax."""
    ALL_STORED: gl.constexpr = CALL.PREFIX.COLUMNS == 512
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CALL.BLOCK_K, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERY: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    BYTES: gl.constexpr = _bytes_layout()
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    zeros = gl.full([CALL.BLOCK_H, CALL.BLOCK_K], 0.0, gl.float32, SCORES)
    count, turn = 0, 0
    qk_scale = args.qk_scale * _one_scale(args, CALL)
    mbarrier.wait(shared.looked_up, 0)
    if CALL.PREFIX.ROPE == "bf16":
        _copy_rope(args, shared, 0, CALL)
    elif CALL.PREFIX.ROPE == "fp8":
        rope = _load_rope(args, shared, 0, CALL)
    _copy_first_parts(args, shared, 0, CALL)
    for number in range(2):
        _copy_tile(args, shared, number, CALL)
    for number in range(gl.program_id(0), args.num_items, gl.num_programs(0)):
        item = _item(args, number, CALL)
        _copy_query(shared.query_a, args.q, item, 0, CALL)
        _copy_query(shared.query_b, args.q, item, 256, CALL)
        if CALL.GROUPS > 1:
            _copy_query(shared.query_rope, args.q, item, 512, CALL)
        async_copy.commit_group()
        if CALL.GROUPS == 1:
            rows = args.q.nope + item[0].to(gl.int64) * args.q.stride_n
            if ALL_STORED:
                part_b = _load_query(rows + 320, args.q.stride_h, item[1], COPY, CALL)
            part_c = _load_query(rows + 384, args.q.stride_h, item[1], COPY, CALL)
            part_d = _load_query(rows + 448, args.q.stride_h, item[1], COPY, CALL)
            mbarrier.wait(shared.summed, count & 1 ^ 1)
            # Numerators are still to come: Q takes its way through their place.
            exchange = shared.numerators.index(0)
            if ALL_STORED:
                query_b_last = _change_layout(exchange, part_b, QUERY)
                if CALL.HEAD_DIM > 512:
                    part_e = _load_query(rows + 512, args.q.stride_h, item[1], COPY, CALL)
            query_c = _change_layout(exchange, part_c, QUERY)
            query_d = _change_layout(exchange, part_d, QUERY)
            if CALL.HEAD_DIM > 512:
                query_e = _change_layout(exchange, part_e, QUERY)
        m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, ROW)
        l = gl.full([CALL.BLOCK_H], 0.0, gl.float32, ROW)
        for tile in range(item[3]):
            stage = count % 2
            # RoPE has come, and Q before the first tile.
            async_copy.wait_group(0)
            if CALL.PREFIX.ROPE == "fp8":
                target = reinterpret(shared.rope, gl.int32, [CALL.BLOCK_K, 32], PAIRS)
                target.store(_widen(rope, gl.full([CALL.BLOCK_K, 1], 1.0, gl.bfloat16, BYTES)))
            _make_writes_visible()
            k_a = shared.tiles[0].index(stage).permute((1, 0))
            k_b = shared.tiles[1].index(stage).permute((1, 0))
            query_a = shared.query_a.slice(0, 128, dim=1)
            query_b = shared.query_a.slice(128, 128, dim=1)
            if CALL.GROUPS > 1:
                k_rope = shared.rope.permute((1, 0))
                query_c = shared.query_b.slice(0, 128, dim=1)
                query_d = shared.query_b.slice(128, 128, dim=1)
                k_c = shared.tiles[2].index(stage).permute((1, 0))
                k_d = shared.tiles[3].index(stage).permute((1, 0))
                s = warpgroup_mma(shared.query_rope, k_rope, zeros, use_acc=False, is_async=True)
                s_a = warpgroup_mma(query_a, k_a, zeros, use_acc=False, is_async=True)
                s_b = warpgroup_mma(query_b, k_b, zeros, use_acc=False, is_async=True)
                s_c = warpgroup_mma(query_c, k_c, zeros, use_acc=False, is_async=True)
                s_d = warpgroup_mma(query_d, k_d, zeros, use_acc=False, is_async=True)
            else:
                k_d = shared.tiles[3].index(stage).slice(0, 64, dim=1).permute((1, 0))
                k_e = shared.tiles[3].index(stage).slice(64, 64, dim=1).permute((1, 0))
                s = warpgroup_mma(query_a, k_a, zeros, use_acc=False, is_async=True)
                s = warpgroup_mma(query_b, k_b, s, is_async=True)
                if ALL_STORED:
                    k_c_first = shared.tiles[2].index(stage).slice(0, 64, dim=1).permute((1, 0))
                    k_c_last = shared.tiles[2].index(stage).slice(64, 64, dim=1).permute((1, 0))
                    s = warpgroup_mma(shared.query_b, k_c_first, s, is_async=True)
                    s = warpgroup_mma(query_b_last, k_c_last, s, is_async=True)
                else:
                    k_c = shared.tiles[2].index(stage).permute((1, 0))
                    s = warpgroup_mma(shared.query_b, k_c, s, is_async=True)
                s = warpgroup_mma(query_c, k_d, s, is_async=True)
                s = warpgroup_mma(query_d, k_e, s, is_async=True)
                if CALL.HEAD_DIM > 512:
                    s = warpgroup_mma(query_e, shared.rope.permute((1, 0)), s, is_async=True)
            named = shared.slots.index(count % 4).load(gl.SliceLayout(0, SCORES)) != -1
            if CALL.GROUPS > 1:
                scores, s_a, s_b, s_c, s_d = warpgroup_mma_wait(0, deps=[s, s_a, s_b, s_c, s_d])
                numerators, scales = shared.numerators, shared.scales.index(count % 4)
                scores += s_a * scales.slice(0, 1, dim=0).load(SCORES)
                scores += s_b * scales.slice(1, 1, dim=0).load(SCORES)
                scores += s_c * scales.slice(2, 1, dim=0).load(SCORES)
                scores += s_d * scales.slice(3, 1, dim=0).load(SCORES)
            else:
                scores = warpgroup_mma_wait(0, deps=[s])
                numerators, scales = shared.numerators.index(0), None
            mbarrier.wait(shared.summed, count & 1 ^ 1)
            if CALL.PREFIX.ROPE == "bf16":
                _copy_rope(args, shared, count + 1, CALL)
            m, l = _softmax_tile(
                _causal(scores, item, tile, 0, CALL), gl.where(named, 0.0, float("-inf")), m, l,
                qk_scale, numerators, scales, shared.corrections, shared.changes, CALL,
            )  # fmt: skip
            _make_writes_visible()
            mbarrier.arrive(shared.scored, count=1)
            count += 1
            _copy_tile(args, shared, count + 1, CALL)
            if CALL.PREFIX.ROPE == "fp8":
                rope = _load_rope(args, shared, count, CALL)
        _finish_scores(m, l, args, item, turn, shared, CALL)
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
    args = _arguments(
        q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale, num_tokens, num_splits, num_items,
        prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL,
    )  # fmt: skip
    DTYPE: gl.constexpr = q.nope.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    query_a = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 256], SWIZZLED)
    # RoPE among the values takes a part of its own as stored, and parts have two scales: Q makes room.
    ALL_STORED: gl.constexpr = CALL.PREFIX.COLUMNS == 512
    COLUMNS: gl.constexpr = 256 if CALL.GROUPS > 1 else 64 if ALL_STORED else 128
    query_b = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, COLUMNS], SWIZZLED)
    query_rope: gl.constexpr = None
    if CALL.GROUPS > 1:
        query_rope = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 64], SWIZZLED)
    tiles = _allocate_each(DTYPE, (2, CALL.BLOCK_K, 128), SWIZZLED, 4)
    first_parts = _allocate_each(gl.int32, (2, CALL.BLOCK_K, 16), ROWS, 2)
    parts = _allocate_each(gl.int32, (CALL.BLOCK_K, 16), ROWS, 6 if ALL_STORED else 5)
    stored = (first_parts[0],) + parts[0:3] + (first_parts[1],) + parts[3:]
    scales: gl.constexpr = None
    if CALL.GROUPS > 1:
        scales = gl.allocate_shared_memory(gl.float32, [4, CALL.GROUPS, CALL.BLOCK_K], ROWS)
    elif CALL.PREFIX.SCALE != "tensor":
        scales = gl.allocate_shared_memory(gl.bfloat16, [4, CALL.BLOCK_K, 16 if ALL_STORED else 8], ROWS)
    rope: gl.constexpr = None
    if CALL.HEAD_DIM > 512:
        rope = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_K, 64], SWIZZLED)
    slots = gl.allocate_shared_memory(gl.int32, [4, CALL.BLOCK_K], LINE)
    numerators = gl.allocate_shared_memory(
        DTYPE,
        [CALL.GROUPS, CALL.BLOCK_H, CALL.BLOCK_K],
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
    shared = Fp8Shared(
        slots, query_a, query_b, query_rope, tiles, rope, stored, scales, numerators, corrections, changes,
        factors, looked_up, first_filled, filled, widened, scored, summed, finished, released,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_fp8_warps, (args, shared, 0, CALL)),
            (_sum_fp8_warps, (args, shared, 1, CALL)),
            (_score_fp8_warps, (args, shared, CALL)),
        ],
        [4, 4],
        [168, 176] if CALL.HEAD_DIM > 512 or CALL.PREFIX.SCALE == "tensor" else [184, 160],
    )

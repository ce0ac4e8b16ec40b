"""Sparse attention on Hopper (sm90) for few heads, in Gluon: both products swapped, so no head is padded.

It serves at most 16 heads, or at most 32 in some layouts of rows; the rows of `sparse_fp8.config` say which.

V3.2's rows have a scale in fp32 for 128 columns, more bits than a widened value can hold: such groups have
products of their own, K Q^T that the scales multiply, and numerators that they have multiplied.

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
from narrowkv.runtime.attention.softmax import natural_lse, output_factor
from narrowkv.runtime.launch.gluon import reinterpret
from narrowkv.sparse_fp8.kernels.hopper.fp8 import _widen, _words
from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _arguments,
    _causal,
    _copy_query,
    _copy_rows,
    _item_rows,
    _load_spans,
    _locate_rows,
    _make_writes_visible,
    _one_scale,
    _place_item,
    _select_source,
    _sinks,
    _tile_indices,
)
from narrowkv.sparse_fp8.kernels.results import SIZES
from narrowkv.sparse_fp8.kernels.rows import ONE_AS_WORD


class FewHeadsShared(NamedTuple):
    """Shared memory and barriers of the kernel for few heads; a tile of the ring has a stage of each.

    As in `WideShared`. query_rope, rope: columns of Q and of the rows from 512 on, None without such. tops:
    maxima of four warps. scales: of a tile's groups of columns, where they multiply products; None where
    widened values are multiplied by their scales.
    numerators: CALL.GROUPS buffers a stage. states: an item's maxima and denominators. full: a tile is there.
    """

    query: Any
    query_rope: Any
    tiles: Any
    rope: Any
    bias: Any
    tops: Any
    scales: Any
    numerators: Any
    corrections: Any
    states: Any
    full: Any
    scored: Any
    finished: Any
    released: Any
    empty: Any


@gluon.jit
def _spans(args, number, CALL: gl.constexpr):
    """The bounds in indptr of item `number`, or of the last item, in the form in which they are read."""
    token = (gl.minimum(number, args.num_items - 1) // CALL.HEAD_BLOCKS) % args.num_tokens
    return _load_spans(args, token, CALL)


@gluon.jit
def _item(args, spans, number, CALL: gl.constexpr):
    """An item, from its spans; past the last item it is the last one, without rows."""
    token, head_block, split, tiles, prefix, prefix_end, extend, extend_end, prefix_tiles = _place_item(
        args, spans, gl.minimum(number, args.num_items - 1), CALL
    )
    prefix_end = gl.where(number < args.num_items, prefix_end, prefix)
    extend_end = gl.where(number < args.num_items, extend_end, extend)
    return token, head_block, split, tiles, prefix, prefix_end, extend, extend_end, prefix_tiles


@gluon.jit
def _next_tile(args, number, tile, item, spans, r, CALL: gl.constexpr):
    """The tile after one: its item's number, its own in the item, the item, and the next item's spans.

    Then whether it is of the prefix, and its indices. Scalars are chosen and not branched on: what gathers
    goes from tile to tile in a single loop, whatever item they belong to.
    """
    ends = tile + 1 >= item[3]
    upcoming = _item(args, spans, number + gl.num_programs(0), CALL)
    number = gl.where(ends, number + gl.num_programs(0), number)
    tile = gl.where(ends, 0, tile + 1)
    chosen = ()
    for i in gl.static_range(9):
        chosen = chosen + (gl.where(ends, upcoming[i], item[i]),)
    spans = _spans(args, number + gl.num_programs(0), CALL)
    first = tile < chosen[8]
    return number, tile, chosen, spans, first, _tile_indices(args, chosen, tile, r, CALL)


@gluon.jit
def _first_item(args, CALL: gl.constexpr):
    """A program's first item, and the spans of its second."""
    number = gl.program_id(0)
    item = _item(args, _spans(args, number, CALL), number, CALL)
    return item, _spans(args, number + gl.num_programs(0), CALL)


@gluon.jit
def _copy_rope(
    shared, stage, base, at, live, FIRST_ROW: gl.constexpr, NUM_ROWS: gl.constexpr, CALL: gl.constexpr
):  # fmt: skip
    """Copies rows' 64 columns in 16 bits to their place behind the others, or among them."""
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ROPE)
    if CALL.HEAD_DIM > 512:
        target = shared.rope.index(stage).slice(FIRST_ROW, NUM_ROWS)
    else:
        target = shared.tiles.index(stage).slice(FIRST_ROW, NUM_ROWS).slice(448, 64, dim=1)
    _copy_rows(target, base, gl.convert_layout(at, ROW), gl.convert_layout(live, ROW), ROPE)


@gluon.jit
def _gather_wide_warps(
    args, shared, FIRST_ROW: gl.constexpr, NUM_ROWS: gl.constexpr, CALL: gl.constexpr
):  # fmt: skip
    """Copies some rows of each 16-bit tile into the ring; only the warps that multiply wait for this."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = FIRST_ROW + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, COPY))
    number, tile = gl.program_id(0), 0
    item, spans = _first_item(args, CALL)
    first = item[8] > 0
    index = _tile_indices(args, item, tile, r, CALL)
    count = 0
    while number < args.num_items:
        live, at, _, _ = _locate_rows(args, first, _item_rows(args, item, tile, r, index, CALL), CALL)
        base = _select_source(first, args.prefix.nope, args.extend.nope, CALL)
        number, tile, item, spans, first, index = _next_tile(args, number, tile, item, spans, r, CALL)
        stage = count % CALL.STAGES
        mbarrier.wait(shared.empty.index(stage), (count // CALL.STAGES & 1) ^ 1)
        shared.bias.index(stage).slice(FIRST_ROW, NUM_ROWS).store(gl.where(live, 0.0, float("-inf")))
        _copy_rows(shared.tiles.index(stage).slice(FIRST_ROW, NUM_ROWS), base, at, live, COPY)
        if CALL.HEAD_DIM > 512:
            _copy_rope(shared, stage, base + 512, at, live, FIRST_ROW, NUM_ROWS, CALL)
        # Counts the copies under way; the phase ends when they have, and this thread with the bias.
        async_copy.mbarrier_arrive(shared.full.index(stage))
        gl.barrier()
        mbarrier.arrive(shared.full.index(stage), count=1)
        count += 1


@gluon.jit
def _join_columns(a, b):
    """Two blocks of columns as one."""
    columns = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.reshape(columns, [a.shape[0], 2 * a.shape[1]])


@gluon.jit
def _load_words(base, at, live, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """16 int32 words of rows of bytes from word FIRST on."""
    d = FIRST + gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    words = gl.multiple_of(_words(base) + ((at // 4)[:, None] + d[None, :]), [16, 16])  # see `_copy_rows`
    return gl.load(words, mask=live[:, None], other=0)


@gluon.jit
def _load_scales(base, at, live, STORED: gl.constexpr):
    """Scales of rows' tiles of 64 columns, in words: a tuple, see `_scale`."""
    scales = ()
    if STORED.SCALE == "tensor":
        scales = (live,)
    elif STORED.SCALE == "e8m0":
        words = _words(base)
        BYTES: gl.constexpr = STORED.COLUMNS // STORED.GROUP * STORED.STEP
        for i in gl.static_range((BYTES + 3) // 4):
            scales = scales + (gl.load(words + (at // 4 + i), mask=live, other=0x7F7F7F7F),)
    else:
        for t in gl.static_range(STORED.COLUMNS // STORED.GROUP):
            scales = scales + (gl.load(base + (at + t), mask=live, other=ONE_AS_WORD),)
    return scales


@gluon.jit
def _scale(scales, TILE: gl.constexpr, STORED: gl.constexpr, WORDS: gl.constexpr):
    """The scales of a tile of 64 columns: bf16 `[rows, 1]`, or `[rows, 16]`, one for each word of values."""
    BYTE: gl.constexpr = TILE * 64 // STORED.GROUP * STORED.STEP
    if STORED.SCALE == "tensor" or STORED.SCALE == "fp32":
        # Fp32 scales do not fit bf16: scores are multiplied by them, and numerators or results.
        scale = gl.full([scales[0].shape[0], 1], 1.0, gl.bfloat16, WORDS)
    elif STORED.SCALE != "e8m0":
        scale = scales[TILE].to(gl.float32, bitcast=True)[:, None]
    elif STORED.GROUP == 64:
        scale = e8m0_to_fp32(scales[BYTE // 4] >> (BYTE % 4 * 8) & 0xFF)[:, None]
    else:
        # Bit 3 of a word's number is the same in all words of a thread.
        second = (gl.arange(0, 16, gl.SliceLayout(0, WORDS)) & 8) != 0
        pair = scales[BYTE // 4] >> (BYTE % 4 * 8)
        byte = gl.where(second[None, :], (pair >> 8)[:, None], pair[:, None]) & 0xFF
        scale = e8m0_to_fp32(byte)
    return scale.to(gl.bfloat16)


@gluon.jit
def _widen_part(narrow, scales, TILE: gl.constexpr, STORED: gl.constexpr, WORDS: gl.constexpr):
    """64 columns as stored, int32 words `[rows, 16]`, times their scales: words `[rows, 32]` of two bf16."""
    return _widen(narrow[TILE], _scale(scales, TILE, STORED, WORDS))


@gluon.jit
def _load_rows(args, first, index, WORDS: gl.constexpr, CALL: gl.constexpr):
    """FP8 rows as stored: tiles of 64 columns, scales, addresses of RoPE, and which indices name a row."""
    STORED: gl.constexpr = CALL.PREFIX
    live, nope_at, rope_at, scale_at = _locate_rows(args, first, index, CALL)
    nope = _select_source(first, args.prefix.nope, args.extend.nope, CALL)
    narrow = ()
    for t in gl.static_range(STORED.COLUMNS // 64):
        narrow = narrow + (_load_words(nope, nope_at, live, 16 * t, WORDS),)
    if STORED.ROPE == "fp8":
        rope = _select_source(first, args.prefix.rope, args.extend.rope, CALL)
        narrow = narrow + (_load_words(rope, rope_at, live, 0, WORDS),)
    base = _select_source(first, args.prefix.scale, args.extend.scale, CALL)
    return narrow, _load_scales(base, scale_at, live, STORED), rope_at, live


@gluon.jit
def _gather_fp8_warps(
    args, shared, FIRST_ROW: gl.constexpr, NUM_ROWS: gl.constexpr, CALL: gl.constexpr
):  # fmt: skip
    """Widens some rows of each tile from FP8 to bf16 into the ring, while the next tile's rows are loaded."""
    STORED: gl.constexpr = CALL.PREFIX
    # A thread has 16 adjacent columns: its stores of 16 bytes have no bank conflicts.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    r = FIRST_ROW + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, WORDS))
    number, tile = gl.program_id(0), 0
    item, spans = _first_item(args, CALL)
    first = item[8] > 0
    index = _tile_indices(args, item, tile, r, CALL)
    index = _item_rows(args, item, tile, r, index, CALL)
    narrow, scales, rope_at, live = _load_rows(args, first, index, WORDS, CALL)
    rope = _select_source(first, args.prefix.rope, args.extend.rope, CALL)
    loaded = number
    number, tile, item, spans, first, index = _next_tile(args, number, tile, item, spans, r, CALL)
    count = 0
    while loaded < args.num_items:
        index = _item_rows(args, item, tile, r, index, CALL)
        next_narrow, next_scales, next_rope_at, next_live = _load_rows(args, first, index, WORDS, CALL)
        next_rope = _select_source(first, args.prefix.rope, args.extend.rope, CALL)
        loaded = number
        number, tile, item, spans, first, index = _next_tile(args, number, tile, item, spans, r, CALL)
        stage = count % CALL.STAGES
        mbarrier.wait(shared.empty.index(stage), (count // CALL.STAGES & 1) ^ 1)
        shared.bias.index(stage).slice(FIRST_ROW, NUM_ROWS).store(gl.where(live, 0.0, float("-inf")))
        if CALL.GROUPS > 1:
            for g in gl.static_range(CALL.GROUPS):
                target = shared.scales.index(stage * CALL.GROUPS + g).slice(FIRST_ROW, NUM_ROWS)
                target.store(scales[g].to(gl.float32, bitcast=True))
        if STORED.ROPE == "bf16":
            _copy_rope(shared, stage, rope, rope_at, live, FIRST_ROW, NUM_ROWS, CALL)
            async_copy.mbarrier_arrive(shared.full.index(stage))
        if STORED.ROPE == "fp8":
            words = reinterpret(shared.rope.index(stage), gl.int32, [CALL.BLOCK_K, 32], PAIRS)
            words.slice(FIRST_ROW, NUM_ROWS).store(_widen_part(narrow, scales, 8, STORED, WORDS))
        words = reinterpret(shared.tiles.index(stage), gl.int32, [CALL.BLOCK_K, 256], PAIRS)
        target = words.slice(FIRST_ROW, NUM_ROWS)
        pairs = ()
        for t in gl.static_range(STORED.COLUMNS // 128):
            pairs = pairs + (
                _join_columns(
                    _widen_part(narrow, scales, 2 * t, STORED, WORDS),
                    _widen_part(narrow, scales, 2 * t + 1, STORED, WORDS),
                ),
            )
        target.slice(0, 128, dim=1).store(_join_columns(pairs[0], pairs[1]))
        if STORED.COLUMNS == 512:
            target.slice(128, 128, dim=1).store(_join_columns(pairs[2], pairs[3]))
        else:
            target.slice(128, 64, dim=1).store(pairs[2])
            target.slice(192, 32, dim=1).store(_widen_part(narrow, scales, 6, STORED, WORDS))
        # No fence here: it would wait for the loads. The warps that multiply have one.
        gl.barrier()
        mbarrier.arrive(shared.full.index(stage), count=1)
        narrow, scales, rope_at, rope, live = next_narrow, next_scales, next_rope_at, next_rope, next_live
        count += 1


@gluon.jit
def _gather_warps(
    args, shared, FIRST_ROW: gl.constexpr, NUM_ROWS: gl.constexpr, CALL: gl.constexpr
):  # fmt: skip
    """Fills some rows of each tile of the ring, from 16-bit rows or from FP8 rows."""
    if CALL.PREFIX.VALUES == "":
        _gather_wide_warps(args, shared, FIRST_ROW, NUM_ROWS, CALL)
    else:
        _gather_fp8_warps(args, shared, FIRST_ROW, NUM_ROWS, CALL)


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
    s, m, parts, scales, stage, shared, CALL: gl.constexpr
):  # fmt: skip
    """Stores a tile's numerators and the correction factors of earlier sums in shared memory; the new state.

    `parts` are the denominators before they are summed over the rows of a tile. The reference of a
    head follows a tile as in the kernel for more heads. Each group of columns whose scales are not in the
    widened values has numerators of its own, times those scales.
    """
    top = _column_maxima(s, shared.tops)
    m_new = gl.where(top > m + CALL.SLACK, top + CALL.HEADROOM, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - m_safe[None, :])
    correction = gl.exp2(m - m_safe)
    for g in gl.static_range(CALL.GROUPS):
        weighted = p * scales[g][:, None] if CALL.GROUPS > 1 else p
        numerators = shared.numerators.index(stage * CALL.GROUPS + g)
        numerators.store(weighted.to(numerators.dtype))
    shared.corrections.index(stage).store(correction)
    return m_new, parts * correction[None, :] + p


@gluon.jit
def _copy_all_of_query(shared, args, item, CALL: gl.constexpr):
    """Starts to copy an item's Q."""
    _copy_query(shared.query, args.q, item, 0, CALL)
    if CALL.HEAD_DIM > 512:
        _copy_query(shared.query_rope, args.q, item, 512, CALL)


@gluon.jit
def _scores_of_group(tile, shared, g: gl.constexpr, zeros, CALL: gl.constexpr):
    """Issues K Q^T of a group's columns; the caller waits for the result."""
    WIDTH: gl.constexpr = 512 // CALL.GROUPS
    columns = tile.slice(g * WIDTH, WIDTH, dim=1)
    query = shared.query.slice(g * WIDTH, WIDTH, dim=1)
    return warpgroup_mma(columns, query.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _scores(shared, stage, zeros, CALL: gl.constexpr):
    """K Q^T of a tile; and the scales of its groups, () without such, which have a product each."""
    ROW: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    tile, scales = shared.tiles.index(stage), ()
    s = zeros
    if CALL.HEAD_DIM > 512:
        s = warpgroup_mma(
            shared.rope.index(stage), shared.query_rope.permute((1, 0)), zeros, use_acc=False, is_async=True
        )
    if CALL.GROUPS == 1:
        s = warpgroup_mma(tile, shared.query.permute((1, 0)), s, use_acc=CALL.HEAD_DIM > 512, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        # Two at a time: the sums of all groups do not fit in the registers.
        for g in gl.static_range(0, CALL.GROUPS, 2):
            low = _scores_of_group(tile, shared, g, zeros, CALL)
            high = _scores_of_group(tile, shared, g + 1, zeros, CALL)
            low_scale = shared.scales.index(stage * CALL.GROUPS + g).load(ROW)
            high_scale = shared.scales.index(stage * CALL.GROUPS + g + 1).load(ROW)
            s, low, high = warpgroup_mma_wait(0, deps=[s, low, high])
            s += low * low_scale[:, None] + high * high_scale[:, None]
            scales = scales + (low_scale, high_scale)
    return s, scales


@gluon.jit
def _score_warps(args, shared, CALL: gl.constexpr):
    """QK and the softmax."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CALL.BLOCK_H, 16])
    zeros = gl.full([CALL.BLOCK_K, CALL.BLOCK_H], 0.0, gl.float32, SCORES)
    count, turn = 0, 0
    item, spans = _first_item(args, CALL)
    qk_scale = args.qk_scale * _one_scale(args, CALL)
    _copy_all_of_query(shared, args, item, CALL)
    async_copy.commit_group()
    for number in range(gl.program_id(0), args.num_items, gl.num_programs(0)):
        # The loop over tiles is a while loop: Triton 3.6 lost a loop-carried number whose only use is the
        # bound of an inner range.
        begun, last, current = count, count + item[3], item
        following = number + gl.num_programs(0)
        item = _item(args, spans, following, CALL)
        spans = _spans(args, following + gl.num_programs(0), CALL)
        m = gl.full([CALL.BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
        parts = zeros
        async_copy.wait_group(0)
        _make_writes_visible()
        while count < last:
            stage = count % CALL.STAGES
            mbarrier.wait(shared.full.index(stage), count // CALL.STAGES & 1)
            # Also for the warps that wrote the rows: their own fence would wait for their outstanding loads.
            fence_async_shared()
            masked = shared.bias.index(stage).load(gl.SliceLayout(1, SCORES))
            s, scales = _scores(shared, stage, zeros, CALL)
            s = _causal(s * qk_scale + masked[:, None], current, count - begun, 1, CALL)
            m, parts = _softmax_columns(s, m, parts, scales, stage, shared, CALL)
            _make_writes_visible()
            mbarrier.arrive(shared.scored.index(stage), count=1)
            count += 1
        # All of these warps have read the last scores: the next item's Q may be copied.
        _copy_all_of_query(shared, args, item, CALL)
        async_copy.commit_group()
        l = gl.sum(parts, 0)
        mbarrier.wait(shared.released, (turn & 1) ^ 1)
        shared.states.index(0).store(m)
        shared.states.index(1).store(l)
        gl.barrier()
        mbarrier.arrive(shared.finished, count=1)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
    async_copy.wait_group(0)


@gluon.jit
def _store_item(acc, m, l, args, item, FIRST: gl.constexpr, CALL: gl.constexpr):
    """An item's results, or a split's partial results, from sums `[columns, heads]` and the softmax state.

    FIRST: the sums' first column; with those from column 0 on the state is stored, too.
    """
    token, head_block, split = item[0], item[1], item[2]
    out, partials = args.out, args.partials
    # A warp keeps its columns of `acc`; a thread gets 8 adjacent ones by exchanges within the warp.
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [gl.num_warps(), 1], [0, 1])
    d = FIRST + gl.arange(0, acc.shape[0], gl.SliceLayout(1, OUT))
    columns = head_block * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, OUT))
    stored = (columns < CALL.NUM_HEADS)[None, :]
    heads = head_block * acc.shape[1] + gl.arange(0, acc.shape[1], m.type.layout)
    mask = heads < CALL.NUM_HEADS
    if CALL.SPLIT:
        slot = (split.to(gl.int64) * args.num_tokens + token) * CALL.NUM_HEADS
        if FIRST == 0:
            gl.store(partials.m + slot + heads, m, mask=mask)
            gl.store(partials.l + slot + heads, l, mask=mask)
        places = partials.acc + ((slot + columns)[None, :] * 512 + d[:, None])
        gl.store(places, gl.convert_layout(acc, OUT), mask=stored)
    else:
        sink = _sinks(out, heads, mask, CALL)
        if CALL.WRITE_LSE and FIRST == 0:
            gl.store(
                out.lse + token.to(gl.int64) * out.stride_lt + heads * out.stride_lh,
                natural_lse(m, l),
                mask=mask,
            )
        result = (acc * output_factor(m, l, sink)[None, :]).to(out.o.dtype.element_ty)
        places = out.o + token.to(gl.int64) * out.stride_t + (columns[None, :] * out.stride_h + d[:, None])
        gl.store(places, gl.convert_layout(result, OUT), mask=stored)


@gluon.jit
def _multiply_each(acc, factor):
    """The sums of each group of columns times a factor."""
    multiplied = ()
    for g in gl.static_range(len(acc)):
        multiplied = multiplied + (acc[g] * factor,)
    return multiplied


@gluon.jit
def _add_products(acc, shared, stage, CALL: gl.constexpr):
    """The sums of each group of columns with V^T P of a tile added."""
    WIDTH: gl.constexpr = 512 // CALL.GROUPS
    tile, issued = shared.tiles.index(stage), ()
    for g in gl.static_range(CALL.GROUPS):
        columns = tile.slice(g * WIDTH, WIDTH, dim=1).permute((1, 0))
        numerators = shared.numerators.index(stage * CALL.GROUPS + g)
        issued = issued + (warpgroup_mma(columns, numerators, acc[g], is_async=True),)
    if CALL.GROUPS > 1:
        return warpgroup_mma_wait(0, deps=issued)
    else:
        return (warpgroup_mma_wait(0, deps=issued),)


@gluon.jit
def _sum_warps(args, shared, CALL: gl.constexpr):
    """PV: sums the tiles' rows by their numerators, and stores the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CALL.BLOCK_H, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, SUMS)
    WIDTH: gl.constexpr = 512 // CALL.GROUPS
    count, turn = 0, 0
    upcoming, spans = _first_item(args, CALL)
    for number in range(gl.program_id(0), args.num_items, gl.num_programs(0)):
        item = upcoming
        # Not a range, as in `_score_warps`.
        last = count + item[3]
        following = number + gl.num_programs(0)
        upcoming = _item(args, spans, following, CALL)
        spans = _spans(args, following + gl.num_programs(0), CALL)
        acc = ()
        for _ in gl.static_range(CALL.GROUPS):
            acc = acc + (gl.full([WIDTH, CALL.BLOCK_H], 0.0, gl.float32, SUMS),)
        while count < last:
            stage = count % CALL.STAGES
            mbarrier.wait(shared.scored.index(stage), count // CALL.STAGES & 1)
            correction = shared.corrections.index(stage).load(HEAD)
            if gl.min(correction, 0) < 1.0:
                acc = _multiply_each(acc, correction[None, :])
            acc = _add_products(acc, shared, stage, CALL)
            gl.barrier()
            mbarrier.arrive(shared.empty.index(stage), count=1)
            count += 1
        mbarrier.wait(shared.finished, turn & 1)
        m = shared.states.index(0).load(HEAD)
        l = shared.states.index(1).load(HEAD)
        gl.barrier()
        mbarrier.arrive(shared.released, count=1)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
        if CALL.PREFIX.SCALE == "tensor":
            acc = _multiply_each(acc, _one_scale(args, CALL))
        for g in gl.static_range(CALL.GROUPS):
            _store_item(acc[g], m, l, args, item, g * WIDTH, CALL)


@gluon.jit(do_not_specialize=[*SIZES, "num_items"])
def _sparse_few_heads_kernel(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale, num_tokens, num_splits,
    num_items, prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; each works through items in steps of the grid."""
    args = _arguments(
        q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale, num_tokens, num_splits, num_items,
        prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL,
    )  # fmt: skip
    DTYPE: gl.constexpr = q.nope.dtype.element_ty
    # Two groups of warps gather half of each tile's rows each, independently. Widening FP8 takes twice as
    # many warps. PV gets the registers that the other warps leave.
    GATHER_WARPS: gl.constexpr = 2 if CALL.PREFIX.VALUES == "" else 4
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 512], SWIZZLED)
    tiles = gl.allocate_shared_memory(DTYPE, [CALL.STAGES, CALL.BLOCK_K, 512], SWIZZLED)
    query_rope: gl.constexpr = None
    rope: gl.constexpr = None
    if CALL.HEAD_DIM > 512:
        query_rope = gl.allocate_shared_memory(DTYPE, [CALL.BLOCK_H, 64], SWIZZLED)
        rope = gl.allocate_shared_memory(DTYPE, [CALL.STAGES, CALL.BLOCK_K, 64], SWIZZLED)
    scales: gl.constexpr = None
    if CALL.GROUPS > 1:
        scales = gl.allocate_shared_memory(gl.float32, [CALL.STAGES * CALL.GROUPS, CALL.BLOCK_K], LINE)
    numerators = gl.allocate_shared_memory(
        DTYPE,
        [CALL.STAGES * CALL.GROUPS, CALL.BLOCK_K, CALL.BLOCK_H],
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
    shared = FewHeadsShared(
        query, query_rope, tiles, rope, bias, tops, scales, numerators, corrections, states, full, scored,
        finished, released, empty,
    )  # fmt: skip
    HALF: gl.constexpr = CALL.BLOCK_K // 2
    gl.warp_specialize(
        [
            (_sum_warps, (args, shared, CALL)),
            (_score_warps, (args, shared, CALL)),
            (_gather_warps, (args, shared, 0, HALF, CALL)),
            (_gather_warps, (args, shared, HALF, HALF, CALL)),
        ],
        [4, GATHER_WARPS, GATHER_WARPS],
        [CALL.SCORE_REGISTERS, CALL.GATHER_REGISTERS, CALL.GATHER_REGISTERS],
    )

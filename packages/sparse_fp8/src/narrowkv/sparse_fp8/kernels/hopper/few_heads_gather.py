"""The warps of the kernel for few heads that gather rows into a ring of tiles, and widen FP8 rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
)

from narrowkv.quant.device import e8m0_to_fp32
from narrowkv.runtime.launch.gluon import reinterpret
from narrowkv.sparse_fp8.kernels.hopper.fp8_rows import _widen, _words
from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _copy_rows,
    _load_spans,
    _locate_rows,
    _place_item,
    _select_source,
    _tile_indices,
)
from narrowkv.sparse_fp8.kernels.rows import ONE_AS_WORD


@gluon.jit
def _spans(
    prefix_csr, extend_csr, number, num_tokens, num_items,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
):  # fmt: skip
    """The bounds in indptr of item `number`, or of the last item, in the form in which they are read."""
    token = (gl.minimum(number, num_items - 1) // HEAD_BLOCKS) % num_tokens
    return _load_spans(prefix_csr, extend_csr, token, HAS_PREFIX, HAS_EXTEND)


@gluon.jit
def _item(
    prefix_csr, extend_csr, spans, number, num_tokens, num_splits, num_items,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """An item, from its spans; past the last item it is the last one, without rows."""
    token, head_block, split, tiles, prefix, prefix_end, extend, extend_end, prefix_tiles = _place_item(
        prefix_csr, extend_csr, spans, gl.minimum(number, num_items - 1), num_tokens, num_splits,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    prefix_end = gl.where(number < num_items, prefix_end, prefix)
    extend_end = gl.where(number < num_items, extend_end, extend)
    return (
        token,
        head_block,
        split,
        tiles,
        prefix,
        prefix_end,
        extend,
        extend_end,
        prefix_tiles,
    )


@gluon.jit
def _next_tile(
    prefix_csr, extend_csr, number, tile, item, spans, num_tokens, num_splits, num_items, r,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The tile after one: its item's number, its own in the item, the item, and the next item's spans.

    Then whether it is of the prefix, and its indices. Scalars are chosen and not branched on: what gathers
    goes from tile to tile in a single loop, whatever item they belong to.
    """
    ends = tile + 1 >= item[3]
    upcoming = _item(
        prefix_csr, extend_csr, spans, number + gl.num_programs(0), num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    number = gl.where(ends, number + gl.num_programs(0), number)
    tile = gl.where(ends, 0, tile + 1)
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
    spans = _spans(
        prefix_csr, extend_csr, number + gl.num_programs(0), num_tokens, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND,
    )  # fmt: skip
    first = tile < item[8]
    index = _tile_indices(prefix_csr, extend_csr, item, tile, r, HAS_PREFIX, HAS_EXTEND, BLOCK_K)
    return number, tile, item, spans, first, index


@gluon.jit
def _first_tile(
    prefix_csr, extend_csr, num_tokens, num_splits, num_items,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """A program's first item, and the spans of its second."""
    number = gl.program_id(0)
    spans = _spans(prefix_csr, extend_csr, number, num_tokens, num_items, HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND)
    item = _item(
        prefix_csr, extend_csr, spans, number, num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    spans = _spans(
        prefix_csr, extend_csr, number + gl.num_programs(0), num_tokens, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND,
    )  # fmt: skip
    return item, spans


@gluon.jit
def _gather_wide_warps(
    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items, tiles, bias, full, empty,
    FIRST_ROW: gl.constexpr, NUM_ROWS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
    PREFIX: gl.constexpr, EXTEND: gl.constexpr, SPLIT: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copies some rows of each 16-bit tile into the ring; only the warps that multiply wait for this."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = FIRST_ROW + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, COPY))
    number, tile = gl.program_id(0), 0
    item, spans = _first_tile(
        prefix_csr, extend_csr, num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    first = item[8] > 0
    index = _tile_indices(prefix_csr, extend_csr, item, tile, r, HAS_PREFIX, HAS_EXTEND, BLOCK_K)
    count = 0
    while number < num_items:
        live, at, _, _ = _locate_rows(prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND)
        base = _select_source(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND)
        number, tile, item, spans, first, index = _next_tile(
            prefix_csr, extend_csr, number, tile, item, spans, num_tokens, num_splits, num_items, r,
            HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
        )  # fmt: skip
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
        bias.index(stage).slice(FIRST_ROW, NUM_ROWS).store(gl.where(live, 0.0, float("-inf")))
        _copy_rows(tiles.index(stage).slice(FIRST_ROW, NUM_ROWS), base, at, live, COPY)
        # Counts the copies under way; the phase ends when they have, and this thread with the bias.
        async_copy.mbarrier_arrive(full.index(stage))
        gl.barrier()
        mbarrier.arrive(full.index(stage), count=1)
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
    if STORED.SCALE == "e8m0":
        words = _words(base)
        BYTES: gl.constexpr = STORED.COLUMNS // STORED.GROUP * STORED.STEP
        for i in gl.static_range((BYTES + 3) // 4):
            scales = scales + (gl.load(words + (at // 4 + i), mask=live, other=0x7F7F7F7F),)
    else:
        for t in gl.static_range(7):
            scales = scales + (gl.load(base + (at + t), mask=live, other=ONE_AS_WORD),)
    return scales


@gluon.jit
def _scale(scales, TILE: gl.constexpr, STORED: gl.constexpr, WORDS: gl.constexpr):
    """The scales of a tile of 64 columns: bf16 `[rows, 1]`, or `[rows, 16]`, one for each word of values."""
    BYTE: gl.constexpr = TILE * 64 // STORED.GROUP * STORED.STEP
    if STORED.SCALE != "e8m0":
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
def _load_rows(
    prefix, extend, first, index,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    """FP8 rows as stored: tiles of 64 columns, scales, addresses of RoPE, and which indices name a row."""
    live, nope_at, rope_at, scale_at = _locate_rows(
        prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND,
    )  # fmt: skip
    nope = _select_source(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND)
    narrow = ()
    for t in gl.static_range(PREFIX.COLUMNS // 64):
        narrow = narrow + (_load_words(nope, nope_at, live, 16 * t, WORDS),)
    scales = _load_scales(
        _select_source(first, prefix.scale, extend.scale, HAS_PREFIX, HAS_EXTEND), scale_at, live, PREFIX
    )
    return narrow, scales, rope_at, live


@gluon.jit
def _gather_fp8_warps(
    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items, tiles, bias, full, empty,
    FIRST_ROW: gl.constexpr, NUM_ROWS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
    PREFIX: gl.constexpr, EXTEND: gl.constexpr, SPLIT: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Widens some rows of each tile from FP8 to bf16 into the ring, while the next tile's rows are loaded."""
    # A thread has 16 adjacent columns: its stores of 16 bytes have no bank conflicts.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ROPE)
    r = FIRST_ROW + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, WORDS))
    number, tile = gl.program_id(0), 0
    item, spans = _first_tile(
        prefix_csr, extend_csr, num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    first = item[8] > 0
    index = _tile_indices(prefix_csr, extend_csr, item, tile, r, HAS_PREFIX, HAS_EXTEND, BLOCK_K)
    narrow, scales, rope_at, live = _load_rows(
        prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND, WORDS,
    )  # fmt: skip
    rope = _select_source(first, prefix.rope, extend.rope, HAS_PREFIX, HAS_EXTEND)
    loaded = number
    number, tile, item, spans, first, index = _next_tile(
        prefix_csr, extend_csr, number, tile, item, spans, num_tokens, num_splits, num_items, r,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
    )  # fmt: skip
    count = 0
    while loaded < num_items:
        next_narrow, next_scales, next_rope_at, next_live = _load_rows(
            prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND, WORDS,
        )  # fmt: skip
        next_rope = _select_source(first, prefix.rope, extend.rope, HAS_PREFIX, HAS_EXTEND)
        loaded = number
        number, tile, item, spans, first, index = _next_tile(
            prefix_csr, extend_csr, number, tile, item, spans, num_tokens, num_splits, num_items, r,
            HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K,
        )  # fmt: skip
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
        bias.index(stage).slice(FIRST_ROW, NUM_ROWS).store(gl.where(live, 0.0, float("-inf")))
        if PREFIX.ROPE != "":
            _copy_rows(
                tiles.index(stage).slice(FIRST_ROW, NUM_ROWS).slice(448, 64, dim=1), rope,
                gl.convert_layout(rope_at, ROW), gl.convert_layout(live, ROW), ROPE,
            )  # fmt: skip
            async_copy.mbarrier_arrive(full.index(stage))
        words = reinterpret(tiles.index(stage), gl.int32, [BLOCK_K, 256], gl.NVMMASharedLayout(128, 32))
        target = words.slice(FIRST_ROW, NUM_ROWS)
        pairs = ()
        for t in gl.static_range(PREFIX.COLUMNS // 128):
            pairs = pairs + (
                _join_columns(
                    _widen(narrow[2 * t], _scale(scales, 2 * t, PREFIX, WORDS)),
                    _widen(narrow[2 * t + 1], _scale(scales, 2 * t + 1, PREFIX, WORDS)),
                ),
            )
        target.slice(0, 128, dim=1).store(_join_columns(pairs[0], pairs[1]))
        if PREFIX.COLUMNS == 512:
            target.slice(128, 128, dim=1).store(_join_columns(pairs[2], pairs[3]))
        else:
            target.slice(128, 64, dim=1).store(pairs[2])
            target.slice(192, 32, dim=1).store(_widen(narrow[6], _scale(scales, 6, PREFIX, WORDS)))
        # No fence here: it would wait for the loads. The warps that multiply have one.
        gl.barrier()
        mbarrier.arrive(full.index(stage), count=1)
        narrow, scales, rope_at, rope, live = next_narrow, next_scales, next_rope_at, next_rope, next_live
        count += 1


@gluon.jit
def _gather_warps(
    prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items, tiles, bias, full, empty,
    FIRST_ROW: gl.constexpr, NUM_ROWS: gl.constexpr, CALL: gl.constexpr,
):  # fmt: skip
    """Fills some rows of each tile of the ring, from 16-bit rows or from FP8 rows."""
    if CALL.PREFIX.VALUES == "":
        _gather_wide_warps(
            prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
            tiles, bias, full, empty, FIRST_ROW, NUM_ROWS, CALL.HEAD_BLOCKS, CALL.HAS_PREFIX, CALL.HAS_EXTEND,
            CALL.PREFIX, CALL.EXTEND, CALL.SPLIT, CALL.BLOCK_K, CALL.STAGES,
        )  # fmt: skip
    else:
        _gather_fp8_warps(
            prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
            tiles, bias, full, empty, FIRST_ROW, NUM_ROWS, CALL.HEAD_BLOCKS, CALL.HAS_PREFIX,
            CALL.HAS_EXTEND, CALL.PREFIX, CALL.EXTEND, CALL.SPLIT, CALL.BLOCK_K,
            CALL.STAGES,
        )  # fmt: skip

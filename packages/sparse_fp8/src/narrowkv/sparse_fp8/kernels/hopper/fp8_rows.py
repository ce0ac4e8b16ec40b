"""Tiles of FP8 rows on Hopper: where they lie, how parts of them are copied, and how parts are widened."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
)

from narrowkv.quant.device import e8m0_to_fp32
from narrowkv.runtime.launch.gluon import reinterpret
from narrowkv.sparse_fp8.kernels.hopper.frame import (
    _item,
    _locate_rows,
    _select_source,
    _tile_indices,
)
from narrowkv.sparse_fp8.kernels.rows import ONE_AS_E8M0, ONE_AS_WORD


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
def _locate_tile(
    prefix, extend, slots, number,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Where the rows of tile `number` are: pointers to words of NoPE, and to RoPE; which rows are named."""
    index = slots.index(number % 4).load(gl.SliceLayout(1, LANES))
    first, index = _decode(index, HAS_PREFIX, HAS_EXTEND)
    live, nope_at, rope_at, _ = _locate_rows(
        prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND,
    )  # fmt: skip
    return (
        _words(_select_source(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND)) + nope_at // 4,
        _select_source(first, prefix.rope, extend.rope, HAS_PREFIX, HAS_EXTEND) + rope_at,
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
def _copy_first_parts(
    prefix, extend, slots, number, stored, first_filled,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
):  # fmt: skip
    """Copies parts 0 and 4 of tile `number` over those of tile `number - 2`, which have been widened."""
    rows = _locate_tile(
        prefix, extend, slots, number, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND, _bytes_layout(),
    )  # fmt: skip
    _copy_part(stored, rows, number, 0)
    _copy_part(stored, rows, number, 4)
    # An arrival of each thread, when its copies have.
    async_copy.mbarrier_arrive(first_filled.index(number % 2), increment_count=False)


@gluon.jit
def _copy_tile(
    prefix, extend, slots, number, stored, widened, first_filled, filled,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
):  # fmt: skip
    """Copies the other parts of tile `number` once the tile before is widened, then the first of the next."""
    rows = _locate_tile(
        prefix, extend, slots, number, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND, _bytes_layout(),
    )  # fmt: skip
    mbarrier.wait(widened.index((number + 1) % 2), (number + 1) // 2 & 1 ^ 1)
    # In the order in which they are widened.
    _copy_part(stored, rows, number, 2)
    _copy_part(stored, rows, number, 6)
    _copy_part(stored, rows, number, 1)
    _copy_part(stored, rows, number, 5)
    _copy_part(stored, rows, number, 3)
    if PREFIX.ROPE == "":
        _copy_part(stored, rows, number, 7)
    async_copy.mbarrier_arrive(filled, increment_count=False)
    _copy_first_parts(
        prefix, extend, slots, number + 1, stored, first_filled,
        HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND,
    )  # fmt: skip


@gluon.jit
def _copy_rope(
    prefix, extend, slots, number, tiles,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
):  # fmt: skip
    """Copies RoPE of tile `number` to its place in the widened tile, once PV has read that tile."""
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    _, rope, live = _locate_tile(
        prefix, extend, slots, number, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND, ROPE,
    )  # fmt: skip
    d = gl.arange(0, 64, gl.SliceLayout(0, ROPE))
    target = tiles[3].index(number % 2).slice(64, 64, dim=1)
    at = gl.multiple_of(rope[:, None] + d[None, :], [16, 16])
    async_copy.async_load(target, at, mask=live[:, None])
    async_copy.commit_group()


@gluon.jit
def _widen_part(number, tiles, stored, scales, t: gl.constexpr, STORED: gl.constexpr):
    """Widens 64 stored columns to bf16."""
    BYTES: gl.constexpr = _bytes_layout()
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    own = scales.index(number % 4)
    if STORED.GROUP == 64:
        scale = own.slice(t, 1, dim=1).load(BYTES)
    else:
        # Bit 3 of a word's number is the same in all words of a thread.
        second = (gl.arange(0, 16, gl.SliceLayout(0, BYTES)) & 8) != 0
        first_scale = own.slice(2 * t, 1, dim=1).load(BYTES)
        second_scale = own.slice(2 * t + 1, 1, dim=1).load(BYTES)
        scale = gl.where(second[None, :], second_scale, first_scale)
    words = _part(stored, number, t).load(BYTES)
    pairs = reinterpret(tiles[t // 2].index(number % 2), gl.int32, [words.shape[0], 64], PAIRS)
    pairs.slice(t % 2 * 32, 32, dim=1).store(_widen(words, scale))


@gluon.jit
def _widen_half(
    number, tiles, stored, scales, first_filled, filled, HALF: gl.constexpr, STORED: gl.constexpr
):
    """Widens half of the columns of tile `number` to bf16, without RoPE columns, which are stored in bf16."""
    mbarrier.wait(first_filled.index(number % 2), number // 2 & 1)
    _widen_part(number, tiles, stored, scales, 4 * HALF, STORED)
    mbarrier.wait(filled, number & 1)
    # The two widened buffers by turns: between two stores to one there is a barrier, for which all wait.
    _widen_part(number, tiles, stored, scales, 4 * HALF + 2, STORED)
    _widen_part(number, tiles, stored, scales, 4 * HALF + 1, STORED)
    if HALF == 0:
        _widen_part(number, tiles, stored, scales, 3, STORED)
    elif STORED.ROPE == "":
        _widen_part(number, tiles, stored, scales, 7, STORED)


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

    Items are looked up one ahead, so that no warp waits for the bounds of their lists.
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
    rows = _select_source(first, prefix.num_rows, extend.num_rows, HAS_PREFIX, HAS_EXTEND)
    code = index
    if HAS_PREFIX and HAS_EXTEND:
        code = gl.where(first, index, -2 - index)
    return gl.where((index >= 0) & (index < rows) & exists, code, -1)


@gluon.jit
def _look_up(
    prefix, extend, ahead, slots, number,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, PREFIX: gl.constexpr, EXTEND: gl.constexpr,
):  # fmt: skip
    """Stores the row codes of tile `number`; its scales `[BLOCK_K, 8]` or `[.., 16]`, 1 without a row."""
    # Seven scales are read as eight.
    COUNT: gl.constexpr = PREFIX.COLUMNS // PREFIX.GROUP
    PLACES: gl.constexpr = 16 if COUNT == 16 else 8
    SCALES: gl.constexpr = gl.BlockedLayout([1, PLACES // 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    slots.index(number % 4).store(_row_codes(prefix, extend, ahead, HAS_PREFIX, HAS_EXTEND))
    index = slots.index(number % 4).load(gl.SliceLayout(1, SCALES))
    first, index = _decode(index, HAS_PREFIX, HAS_EXTEND)
    live, _, _, scale_at = _locate_rows(
        prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, PREFIX, EXTEND,
    )  # fmt: skip
    t = gl.arange(0, PLACES, gl.SliceLayout(0, SCALES))
    rows = _select_source(first, prefix.scale, extend.scale, HAS_PREFIX, HAS_EXTEND) + scale_at
    mask = live[:, None] & (t < COUNT)[None, :]
    ONE: gl.constexpr = ONE_AS_E8M0 if PREFIX.SCALE == "e8m0" else ONE_AS_WORD
    return gl.load(rows[:, None] + (t * PREFIX.STEP)[None, :], mask=mask, other=ONE)


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
    """Decodes `_row_codes`: whether a row is of the prefix, and its number there or among the extend rows."""
    first = code >= 0
    if HAS_PREFIX and HAS_EXTEND:
        code = gl.where(first, code, -2 - code)
    return first, code

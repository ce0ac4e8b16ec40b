"""What the kernels for Hopper share: arguments, items and their rows, copies, the softmax, results.

An item is a token, a block of its heads and a split of its rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from narrowkv.paged_cache.kernels.pages import first_id_of, length_of, load_length
from narrowkv.runtime.attention.softmax import natural_lse, output_factor
from narrowkv.sparse_fp8.kernels.prologue import places_of_split
from narrowkv.sparse_fp8.kernels.rows import (
    Csr,
    PagesOfSequence,
    bounded,
    clamp_span,
    first_unseen,
    load_indices,
    load_span,
    locate,
    names_a_row,
    page_table,
    row_numbers,
)


class HopperCall(NamedTuple):
    """Constants that a kernel for Hopper is compiled with: those of `SparseSpec`, `Tiles` and its own.

    PREFIX, EXTEND: how the rows of each source are stored, `StoredRows`; that of the other if it is absent.
    STAGES: tiles in shared memory. SLACK: how far numerators may pass one, in powers of two. HEADROOM: how
    far below one the largest lies when the reference of the logits is updated.
    SCORE_REGISTERS, GATHER_REGISTERS: registers of a thread, in the kernel for few heads.
    PAGES: `PagedForm` if rows are found by a page table, None if by index lists. With a page table there is
    no EXTEND source.
    HEAD_DIM: columns of Q and K.
    GROUPS: groups of a row's columns whose scales multiply products and not the widened values; 1 for none.
    """

    NUM_HEADS: Any
    HEAD_BLOCKS: Any
    HAS_PREFIX: Any
    HAS_EXTEND: Any
    PREFIX: Any
    EXTEND: Any
    SPLIT: Any
    HAS_SINK: Any
    WRITE_LSE: Any
    BLOCK_H: Any
    BLOCK_K: Any
    STAGES: Any
    SLACK: Any
    HEADROOM: Any
    SCORE_REGISTERS: Any
    GATHER_REGISTERS: Any
    PAGES: Any
    HEAD_DIM: Any
    GROUPS: Any


class HopperArguments(NamedTuple):
    """Arguments of a kernel for Hopper, which all of its warps take. The rows have their numbers."""

    q: Any
    qk_scale: Any
    out: Any
    partials: Any
    prefix: Any
    prefix_csr: Any
    extend: Any
    extend_csr: Any
    num_tokens: Any
    num_splits: Any
    num_items: Any


@gluon.jit
def _arguments(
    q, out, partials, prefix, prefix_csr, extend, extend_csr, qk_scale, num_tokens, num_splits, num_items,
    prefix_rows, prefix_nnz, extend_rows, extend_nnz, CALL: gl.constexpr,
):  # fmt: skip
    """The arguments of a kernel as `HopperArguments`."""
    if CALL.HAS_PREFIX:
        prefix = bounded(prefix, prefix_rows)
        if CALL.PAGES is None:
            prefix_csr = Csr(prefix_csr.indptr, prefix_csr.indices, prefix_nnz)
        else:
            prefix_csr = page_table(prefix_csr, prefix_nnz, prefix_rows, num_tokens, CALL.PAGES)
    if CALL.HAS_EXTEND:
        extend = bounded(extend, extend_rows)
        extend_csr = Csr(extend_csr.indptr, extend_csr.indices, extend_nnz)
    return HopperArguments(
        q, qk_scale, out, partials, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items
    )


@gluon.jit
def _load_spans(args, token, CALL: gl.constexpr):
    """The bounds of a token in both indptr; over a page table what that says of its length."""
    prefix_begin, prefix_end, extend_begin, extend_end = 0, 0, 0, 0
    if CALL.PAGES is not None:
        prefix_end, prefix_begin, extend_end = load_length(
            args.prefix_csr, token, token >= 0, CALL.PAGES.RAGGED
        )
    elif CALL.HAS_PREFIX:
        prefix_begin, prefix_end = load_span(args.prefix_csr, token)
    if CALL.HAS_EXTEND:
        extend_begin, extend_end = load_span(args.extend_csr, token)
    return prefix_begin, prefix_end, extend_begin, extend_end


@gluon.jit
def _name_item(args, number, CALL: gl.constexpr):
    """Token, block of heads and split of an item."""
    block = number // CALL.HEAD_BLOCKS
    return block % args.num_tokens, number % CALL.HEAD_BLOCKS, block // args.num_tokens


@gluon.jit
def _place_item(args, spans, number, CALL: gl.constexpr):
    """An item, from what `_load_spans` read of its token.

    Over a page table those of the extend rows are where the sequence's page ids begin, and its length.
    """
    token, head_block, split = _name_item(args, number, CALL)
    prefix_begin, prefix_end, extend_begin, extend_end = spans
    if CALL.PAGES is not None:
        pages = args.prefix_csr
        length = length_of(
            pages, (prefix_end, prefix_begin, extend_end), CALL.PAGES.PAGE_SIZE, CALL.PAGES.RAGGED
        )
        extend_begin = first_id_of(pages, token, prefix_begin, CALL.PAGES.RAGGED)
        extend_end = extend_begin
        prefix_begin, prefix_end = token * 0, length
    elif CALL.HAS_PREFIX:
        prefix_begin, prefix_end = clamp_span(args.prefix_csr, prefix_begin, prefix_end)
    if CALL.HAS_EXTEND:
        extend_begin, extend_end = clamp_span(args.extend_csr, extend_begin, extend_end)
    if CALL.SPLIT:
        prefix_begin, prefix_end, extend_begin, extend_end = places_of_split(
            prefix_begin, prefix_end, extend_begin, extend_end, split, args.num_splits, CALL.BLOCK_K
        )
    prefix_tiles = (prefix_end - prefix_begin + CALL.BLOCK_K - 1) // CALL.BLOCK_K
    # An empty list is one tile without rows.
    num_tiles = gl.maximum(prefix_tiles + (extend_end - extend_begin + CALL.BLOCK_K - 1) // CALL.BLOCK_K, 1)
    if CALL.PAGES is not None:
        extend_end = length
    return (
        token, head_block, split, num_tiles, prefix_begin, prefix_end, extend_begin, extend_end, prefix_tiles
    )  # fmt: skip


@gluon.jit
def _item(args, number, CALL: gl.constexpr):
    """An item: token, block of heads, split, tiles, the places of its indices and the tiles of the prefix."""
    token, _, _ = _name_item(args, number, CALL)
    return _place_item(args, _load_spans(args, token, CALL), number, CALL)


@gluon.jit
def _next_item(args, number, CALL: gl.constexpr):
    """The program's item after item `number`, or the last item of the call."""
    return _item(args, gl.minimum(number + gl.num_programs(0), args.num_items - 1), CALL)


@gluon.jit
def _list_indices(args, item, tile, r, CALL: gl.constexpr):
    """Indices of a tile of an item, prefix first, -1 past the end."""
    _, _, _, _, prefix_begin, prefix_end, extend_begin, extend_end, prefix_tiles = item
    prefix, extend = args.prefix_csr, args.extend_csr
    if CALL.HAS_PREFIX and CALL.HAS_EXTEND:
        first = tile < prefix_tiles
        indices = gl.where(first, prefix.indices, extend.indices)
        begin = gl.where(
            first, prefix_begin + tile * CALL.BLOCK_K, extend_begin + (tile - prefix_tiles) * CALL.BLOCK_K
        )
        end = gl.where(first, prefix_end, extend_end)
    elif CALL.HAS_PREFIX:
        indices, begin, end = prefix.indices, prefix_begin + tile * CALL.BLOCK_K, prefix_end
    else:
        indices, begin, end = extend.indices, extend_begin + tile * CALL.BLOCK_K, extend_end
    return gl.load(indices + begin + r, mask=begin + r < end, other=-1)


@gluon.jit
def _tile_indices(args, item, tile, r, CALL: gl.constexpr):
    """Indices or page ids of a tile of an item, for `_tile_rows`."""
    if CALL.PAGES is None:
        return _list_indices(args, item, tile, r, CALL)
    else:
        begin = item[4] + tile * CALL.BLOCK_K
        pages = PagesOfSequence(args.prefix_csr, item[6], gl.maximum(item[5] - 1, 0))
        return load_indices(pages, begin, r, item[5], CALL.PAGES, CALL.BLOCK_K)


@gluon.jit
def _tile_rows(args, index, begin, end, r, CALL: gl.constexpr):
    """Row numbers of a tile at places [begin, end) of the prefix, from what `_tile_indices` loaded."""
    if CALL.PAGES is None:
        return index
    else:
        pages = PagesOfSequence(args.prefix_csr, 0, gl.maximum(end - 1, 0))
        return row_numbers(index, pages, begin, r, end, CALL.PAGES, CALL.BLOCK_K)


@gluon.jit
def _item_rows(args, item, tile, r, index, CALL: gl.constexpr):
    """`_tile_rows` of a tile of an item."""
    return _tile_rows(args, index, item[4] + tile * CALL.BLOCK_K, item[5], r, CALL)


@gluon.jit
def _select_source(first, prefix, extend, CALL: gl.constexpr):
    """The value of the prefix or of the extend rows."""
    if CALL.HAS_PREFIX and CALL.HAS_EXTEND:
        return gl.where(first, prefix, extend)
    elif CALL.HAS_PREFIX:
        return prefix
    else:
        return extend


@gluon.jit
def _locate_one(rows, index, STORED: gl.constexpr):
    """Whether each index names a row; offsets of its values, RoPE and scales. 16-bit rows have the first."""
    live = names_a_row(index, rows.num_rows)
    if STORED.VALUES == "":
        value_at = (index.to(gl.int64) if STORED.INT64_OFFSETS else index) * rows.stride_n
        return live, value_at, value_at, value_at
    else:
        value_at, rope_at, scale_at = locate(rows, index, STORED)
        return live, value_at, rope_at, scale_at


@gluon.jit
def _locate_rows(args, first, index, CALL: gl.constexpr):
    """`_locate_one` in the source that a tile belongs to."""
    if CALL.HAS_PREFIX and CALL.HAS_EXTEND:
        a = _locate_one(args.prefix, index, CALL.PREFIX)
        b = _locate_one(args.extend, index, CALL.EXTEND)
        return (
            gl.where(first, a[0], b[0]),
            gl.where(first, a[1], b[1]),
            gl.where(first, a[2], b[2]),
            gl.where(first, a[3], b[3]),
        )
    elif CALL.HAS_PREFIX:
        return _locate_one(args.prefix, index, CALL.PREFIX)
    else:
        return _locate_one(args.extend, index, CALL.EXTEND)


@gluon.jit
def _copy_rows(target, base, offsets, mask, LAYOUT: gl.constexpr):
    """Copies 16-bit columns from memory to shared memory; masked rows become zero.

    Rows begin at multiples of 16 bytes, which Triton 3.8 and later do not see where a row is of two sources.
    """
    d = gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.multiple_of(base + (offsets[:, None] + d[None, :]), [16, 16])
    async_copy.async_load(target, at, mask=mask[:, None])


@gluon.jit
def _copy_query(target, q, item, FIRST: gl.constexpr, CALL: gl.constexpr):
    """Copies columns of an item's heads, from column FIRST on, to shared memory; padded heads are zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    heads = item[1] * target.shape[0] + gl.arange(0, target.shape[0], gl.SliceLayout(1, COPY))
    rows = q.nope + FIRST + item[0].to(gl.int64) * q.stride_n
    _copy_rows(target, rows, heads * q.stride_h, heads < CALL.NUM_HEADS, COPY)


@gluon.jit
def _causal(s, item, tile, HEADS: gl.constexpr, CALL: gl.constexpr):
    """Scores of an item's tile, whose axis HEADS is heads: -inf where a row stands after the query token."""
    if CALL.PAGES is None or CALL.PAGES.Q_LEN == 1:
        return s
    else:
        heads = gl.arange(0, s.shape[HEADS], gl.SliceLayout(1 - HEADS, s.type.layout))
        unseen = first_unseen(item[1] * s.shape[HEADS] + heads, item[7], CALL.PAGES)
        n = gl.arange(0, s.shape[1 - HEADS], gl.SliceLayout(HEADS, s.type.layout))
        n = item[4] + tile * CALL.BLOCK_K + n
        seen = gl.expand_dims(n, HEADS) < gl.expand_dims(unseen, 1 - HEADS)
        return gl.where(seen, s, float("-inf"))


@gluon.jit
def _sinks(out, heads, mask, CALL: gl.constexpr):
    """The sinks of an item's heads; -inf for none."""
    if CALL.HAS_SINK:
        if CALL.PAGES is not None:
            heads = heads % CALL.PAGES.HEADS
        return gl.load(out.sink + heads, mask=mask, other=float("-inf"))
    else:
        return gl.full([heads.shape[0]], float("-inf"), gl.float32, heads.type.layout)


@gluon.jit
def _one_scale(args, CALL: gl.constexpr):
    """The scale that all values have in common; 1 if they have others."""
    if CALL.PREFIX.SCALE == "tensor":
        return gl.load(args.prefix.scale).to(gl.float32, bitcast=True)
    else:
        return 1.0


@gluon.jit
def _make_writes_visible():
    """Makes these warps' writes to shared memory visible to the matrix unit and to all of them."""
    fence_async_shared()
    gl.barrier()


@gluon.jit
def _softmax_tile(
    s, masked, m, l, qk_scale, numerators, scales, corrections, changes, CALL: gl.constexpr
):  # fmt: skip
    """A tile's numerators and what earlier sums shrink by, to shared memory; the new state.

    `scales`: None or, for each buffer of `numerators`, a row of what multiplies those in it.

    The reference m of a row follows only a tile that passes it by more than SLACK, in powers of two, and then
    lies HEADROOM above it: so sums rarely have to shrink, and `changes` (one for each warp's rows) says when.
    """
    s = s * qk_scale + masked[None, :]
    top = gl.max(s, 1)
    m_new = gl.where(top > m + CALL.SLACK, top + CALL.HEADROOM, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - m_safe[:, None])
    correction = gl.exp2(m - m_safe)
    if scales is None:
        numerators.store(p.to(numerators.dtype))
    else:
        for g in gl.static_range(CALL.GROUPS):
            scale = scales.slice(g, 1, dim=0).load(p.type.layout)
            numerators.index(g).store((p * scale).to(numerators.dtype))
    corrections.store(correction)
    changed = gl.reshape((m_new > m).to(gl.int32), [changes.shape[0], m.shape[0] // changes.shape[0]])
    changes.store(gl.max(changed, 1))
    return m_new, l * correction + gl.sum(p, 1)


@gluon.jit
def _finish_scores(m, l, args, item, turn, shared, CALL: gl.constexpr):
    """Passes an item's factors to the warps that compute PV, and stores its lse, or a split's state."""
    ROW: gl.constexpr = m.type.layout
    token, head_block, split = item[0], item[1], item[2]
    heads = head_block * m.shape[0] + gl.arange(0, m.shape[0], ROW)
    mask = heads < CALL.NUM_HEADS
    sink = _sinks(args.out, heads, mask, CALL)
    mbarrier.wait(shared.released, (turn & 1) ^ 1)
    shared.factors.store(output_factor(m, l, sink))
    gl.barrier()
    mbarrier.arrive(shared.finished, count=1)
    if CALL.SPLIT:
        slot = (split.to(gl.int64) * args.num_tokens + token) * CALL.NUM_HEADS
        gl.store(args.partials.m + slot + heads, m, mask=mask)
        gl.store(args.partials.l + slot + heads, l, mask=mask)
    elif CALL.WRITE_LSE:
        gl.store(
            args.out.lse + token.to(gl.int64) * args.out.stride_lt + heads * args.out.stride_lh,
            natural_lse(m, l),
            mask=mask,
        )


@gluon.jit
def _exchange_lanes(a, b, second, LANES: gl.constexpr):
    """Exchanges b of the first and a of the second of two lanes whose numbers differ by LANES."""
    ASM: gl.constexpr = (
        "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;" if LANES == 1 else "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"
    )
    sent = gl.where(second, a, b)
    taken = gl.inline_asm_elementwise(ASM, "=r,r", [sent], dtype=gl.int32, is_pure=False, pack=1)
    return gl.where(second, taken, a), gl.where(second, b, taken)


@gluon.jit
def _gather_lines(x, DTYPE: gl.constexpr):
    """A product's float32 results as 16-bit ones, with eight adjacent columns in each thread.

    A product leaves a thread two of eight columns. The four lanes of a row, each with its pairs of four
    times eight columns, transpose them, and store 16 bytes at once.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    low, high = gl.split(gl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    BF16: gl.constexpr = DTYPE == gl.bfloat16  # noqa: SIM300 - no constant
    PACK: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if BF16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    pairs = gl.inline_asm_elementwise(PACK, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    # Two bits say which eight columns, two more the lane: the lane goes before them.
    pairs = gl.permute(gl.reshape(pairs, [ROWS, COLUMNS // 32, 2, 2, 4]), (0, 1, 4, 2, 3))
    even, odd = gl.split(pairs)
    eight_0, eight_2 = gl.split(even)
    eight_1, eight_3 = gl.split(odd)
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, eight_0.type.layout)))[None, None, :]
    eight_0, eight_1 = _exchange_lanes(eight_0, eight_1, lane % 2 == 1, 1)
    eight_2, eight_3 = _exchange_lanes(eight_2, eight_3, lane % 2 == 1, 1)
    eight_0, eight_2 = _exchange_lanes(eight_0, eight_2, lane >= 2, 2)
    eight_1, eight_3 = _exchange_lanes(eight_1, eight_3, lane >= 2, 2)
    pairs = gl.join(gl.join(eight_0, eight_2), gl.join(eight_1, eight_3))
    pairs = gl.reshape(pairs, [ROWS, COLUMNS // 2])
    low, high = pairs.to(gl.int16), (pairs >> 16).to(gl.int16)
    # The same numbers in the same threads, in the order of the columns.
    LINES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]]
        + ([[0, 128]] if gl.num_warps() == 8 else []),
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]] + ([[0, 256]] if gl.num_warps() == 8 else []),
        block_bases=[],
        shape=x.shape,
    )
    lines = gl.convert_layout(gl.reshape(gl.join(low, high), [ROWS, COLUMNS]), LINES)
    return lines.to(DTYPE, bitcast=True)


@gluon.jit
def _store_results(acc, factor, args, item, first_column, CALL: gl.constexpr):
    """Stores an item's sums of columns from the first on: the results, or a split's partial results."""
    token, head_block, split = item[0], item[1], item[2]
    out = args.out
    if CALL.SPLIT:
        target = args.partials.acc + (split.to(gl.int64) * args.num_tokens + token) * CALL.NUM_HEADS * 512
        _store_heads(target + first_column, 512, acc, head_block, CALL.NUM_HEADS)
    else:
        result = acc * factor[:, None]
        if out.o.dtype.element_ty.primitive_bitwidth == 16:
            result = _gather_lines(result, out.o.dtype.element_ty)
        target = out.o + token.to(gl.int64) * out.stride_t + first_column
        _store_heads(target, out.stride_h, result, head_block, CALL.NUM_HEADS)


@gluon.jit
def _take_factors(shared, turn, ROW: gl.constexpr):
    """The factors of an item's sums that `_finish_scores` stored."""
    mbarrier.wait(shared.finished, turn & 1)
    factor = shared.factors.load(ROW)
    gl.barrier()
    mbarrier.arrive(shared.released, count=1)
    return factor


@gluon.jit
def _store_heads(target, stride_h, x, head_block, NUM_HEADS: gl.constexpr):
    """Stores columns of BLOCK_H heads of one token, from the address of its first head on."""
    LAYOUT: gl.constexpr = x.type.layout
    heads = head_block * x.shape[0] + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(target + (heads[:, None] * stride_h + d[None, :]), x, mask=(heads < NUM_HEADS)[:, None])

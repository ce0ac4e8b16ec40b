"""Reads and widens a tile of rows of any layout; the places of its parts are data (`StoredRows`)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.paged_cache.kernels.pages import (
    Table,
    first_id,
    load_page_ids,
    place_of,
    sequence_length,
    strided,
)
from narrowkv.quant.device import e8m0_to_fp32, widen, widen_parts

# 1.0 as each kind of scale is stored: float32 is read as words.
ONE_AS_WORD = tl.constexpr(0x3F800000)
ONE_AS_E8M0 = tl.constexpr(127)
ONE_AS_E4M3 = tl.constexpr(0x38)


class RowPointers(NamedTuple):
    """Rows of one source, or of a query. Strides are in elements of each pointer.

    nope: FP8 NoPE columns, or all 512 columns of 16-bit rows, which have neither `rope` nor `scale`.
    stride_n, stride_r, stride_s: between rows or, packed584, pages; between tokens of a 16-bit query.
    stride_h: between heads of a 16-bit query.
    num_rows: rows that an index may name; 0 at the launch, set by the kernel.
    """

    nope: Any
    rope: Any
    scale: Any
    stride_n: Any
    stride_r: Any
    stride_s: Any
    stride_h: Any
    num_rows: Any


class Csr(NamedTuple):
    """Which rows each token attends to; `nnz` bounds what `indptr` may claim, set by the kernel."""

    indptr: Any
    indices: Any
    nnz: Any


class PageList(NamedTuple):
    """The page table of sequences that attend to all their rows; fields as in `Table`, which adds sizes."""

    page_ids: Any
    row: Any
    lens: Any
    column: Any
    row_step: Any
    lens_step: Any


class PagesOfSequence(NamedTuple):
    """A sequence's pages in a kernel: the table, where its page ids begin, and its last position."""

    table: Any
    first_id: Any
    last: Any


class PagedForm(NamedTuple):
    """Constants of a call over a page table. A "token" of such a call is a sequence with all its queries.

    PAGE_SIZE, RAGGED: of the table. Q_LEN, HEADS: query tokens of a sequence and their heads; its rows of Q
    are (query token, head) pairs, the kernels' heads.
    """

    PAGE_SIZE: Any
    RAGGED: Any
    Q_LEN: Any
    HEADS: Any


class StoredRows(NamedTuple):
    """Constants of a layout that a kernel is compiled with. VALUES "": 16-bit rows, without other fields.

    VALUES: "fp8" or "fp4". COLUMNS: columns that are stored so. ROPE, SCALE: as in `RowLayout`.
    GROUP: columns that a scale is for. STEP: stored scales from one that is read to the next.
    SCALE_STRIDE_IN_ROW: as `RowLayout.scale_stride`.
    PAGE_SIZE: tokens of a page. VALUE_STRIDE, ROPE_STRIDE, SCALE_STRIDE: from a token of a page to the next.
    ROPE_AT, SCALE_AT: of a page's first token. All in elements of the pointers.
    ONE_BUFFER: whether values and scales lie in one buffer of bytes, with one stride between pages.
    INT64_OFFSETS: offsets take 64 bits.
    IN_HALVES: whether FP8 is widened in two halves that are joined. The compiler then widens values once,
    where they were loaded, not in every warp that multiplies them, as it does with RoPE columns in a tile.
    FORMAT, ROUTE: of the values and how the target widens them; EXPONENT: the power of two it leaves out.
    """

    VALUES: Any
    COLUMNS: Any
    ROPE: Any
    SCALE: Any
    GROUP: Any
    STEP: Any
    PAGE_SIZE: Any
    VALUE_STRIDE: Any
    ROPE_STRIDE: Any
    SCALE_STRIDE: Any
    ROPE_AT: Any
    SCALE_AT: Any
    ONE_BUFFER: Any
    INT64_OFFSETS: Any
    IN_HALVES: Any
    FORMAT: Any
    ROUTE: Any
    EXPONENT: Any
    SCALE_STRIDE_IN_ROW: Any = 1


@triton.jit
def bounded(rows, num_rows):
    """Rows and their number, which is an argument of its own, so that no kernel is compiled for it."""
    return RowPointers(
        rows.nope, rows.rope, rows.scale, rows.stride_n, rows.stride_r, rows.stride_s, rows.stride_h, num_rows
    )


@triton.jit
def load_span(csr, token):
    """The bounds of a token's indices in indptr, int32 or int64."""
    return tl.load(csr.indptr + token), tl.load(csr.indptr + token + 1)


@triton.jit
def clamp_span(csr, begin, end):
    """First and one past the last place of a token's indices, inside the buffer whatever indptr says."""
    begin = tl.minimum(tl.maximum(begin, 0), csr.nnz)
    end = tl.minimum(tl.maximum(end, begin), csr.nnz)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def as_row_number(index):
    """Indices as int32; an int64 one that is no int32 becomes -1 instead of wrapping to another row."""
    if index.dtype == tl.int64:
        index = tl.where((index >= 0) & (index < 2147483647), index, -1).to(tl.int32)
    return index


@triton.jit
def token_span(csr, token):
    """The bounds that `load_span` reads, clamped by `clamp_span`."""
    begin, end = load_span(csr, token)
    return clamp_span(csr, begin, end)


@triton.jit
def page_table(lists, size, num_rows, num_tokens, PAGES: tl.constexpr):
    """A `PageList` with its sizes, as a `Table`; arguments as for `rows_of_token`."""
    num_ids = strided(tl.maximum(size, 1) - 1, lists.column) + 1
    if not PAGES.RAGGED:
        num_ids += (num_tokens - 1) * lists.row
    return Table(
        lists.page_ids, lists.row, lists.lens, num_ids, num_rows // PAGES.PAGE_SIZE, size, lists.column,
        lists.row_step, lists.lens_step,
    )  # fmt: skip


@triton.jit
def rows_of_token(lists, size, num_rows, token, num_tokens, PAGES: tl.constexpr):
    """The rows that a token attends to, for `load_indices`, and the places [begin, end) that are its own.

    Args:
        lists: a `Csr`, or with PAGES a `PageList`.
        size: indices of all tokens; with PAGES page ids, see `Table.max_pages`.
    """
    if PAGES is None:
        lists = Csr(lists.indptr, lists.indices, size)
        begin, end = token_span(lists, token)
        return lists, begin, end
    else:
        table = page_table(lists, size, num_rows, num_tokens, PAGES)
        length = sequence_length(table, token, token >= 0, PAGES.PAGE_SIZE, PAGES.RAGGED)
        pages = PagesOfSequence(table, first_id(table, token, PAGES.RAGGED), tl.maximum(length - 1, 0))
        return pages, token * 0, length


@triton.jit
def load_indices(lists, begin, places, end, PAGES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Indices or page ids of the rows at `places` after `begin`, for `row_numbers`.

    They are loaded a tile ahead and not used before: the use would wait for the load. A tile, BLOCK_K rows
    from `begin` on, that lies within one page has one page id: without it each thread of a tile would look
    up, and compute, the pages of all rows that it copies a part of.
    """
    # Values that are equal in all lanes stay scalar: a tensor of places would take registers in every layout.
    if PAGES is None:
        return tl.load(lists.indices + begin + places, mask=places < end - begin, other=-1)
    elif PAGES.PAGE_SIZE % BLOCK_K == 0:
        return load_page_ids(lists.table, lists.first_id, begin, 0, lists.last, PAGES.PAGE_SIZE)
    else:
        return load_page_ids(lists.table, lists.first_id, begin + places, 0, lists.last, PAGES.PAGE_SIZE)


@triton.jit
def row_numbers(loaded, lists, begin, places, end, PAGES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Row numbers from what `load_indices` loaded, -1 from the end on."""
    if PAGES is None:
        return as_row_number(loaded)
    elif PAGES.PAGE_SIZE % BLOCK_K == 0:
        page, slot = place_of(lists.table, loaded, begin, 0, lists.last, PAGES.PAGE_SIZE, False)
        return tl.where(places < end - begin, page * PAGES.PAGE_SIZE + slot + places, -1)
    else:
        n = begin + places
        page, slot = place_of(lists.table, loaded, n, 0, lists.last, PAGES.PAGE_SIZE, False)
        return tl.where(places < end - begin, page * PAGES.PAGE_SIZE + slot, -1)


@triton.jit
def first_unseen(heads, end, PAGES: tl.constexpr):
    """The position [BLOCK_H] from which on a row of Q attends to nothing; 0 where all rows are alike."""
    if PAGES is None or PAGES.Q_LEN == 1:
        return 0
    else:
        return end - PAGES.Q_LEN + 1 + heads // PAGES.HEADS


@triton.jit
def seen_keys(live, start, unseen, PAGES: tl.constexpr):
    """Which rows of a tile, from position `start` on, each row of Q attends to."""
    seen = live[None, :]
    if PAGES is not None:
        if PAGES.Q_LEN > 1:
            seen = seen & ((start + tl.arange(0, live.shape[0]))[None, :] < unseen[:, None])
    return seen


@triton.jit
def names_a_row(index, num_rows):
    """Which indices name a row: not -1 and not out of range."""
    return (index >= 0) & (index < num_rows)


@triton.jit
def locate(rows, index, STORED: tl.constexpr):
    """Offsets `[N]` of the values, the RoPE columns and the scales of rows `index`, in elements."""
    if STORED.INT64_OFFSETS:
        index = index.to(tl.int64)
    page = index
    if STORED.PAGE_SIZE > 1:
        page, slot = index // STORED.PAGE_SIZE, index % STORED.PAGE_SIZE
    values = page * rows.stride_n
    # One product serves both where they are bytes of one buffer.
    scale = (values if STORED.ONE_BUFFER else page * rows.stride_s) + STORED.SCALE_AT
    rope = page * rows.stride_r + STORED.ROPE_AT
    if STORED.PAGE_SIZE > 1:
        values += slot * STORED.VALUE_STRIDE
        rope += slot * STORED.ROPE_STRIDE
        scale += slot * STORED.SCALE_STRIDE
    return values, rope, scale


@triton.jit
def load_rope(rows, offsets, mask, STORED: tl.constexpr):
    """The RoPE columns that are not among the values, as stored `[N, 64]`; rows not named are zero."""
    c = tl.arange(0, 64)
    if STORED.ROPE == "fp8":
        rope = tl.load(rows.rope + offsets[:, None] + c[None, :], mask=mask[:, None], other=0)
    else:
        rope = tl.load(rows.rope + offsets[:, None] + c[None, :], mask=mask[:, None], other=0.0)
    return rope


@triton.jit
def widen_rope(rope, scale, STORED: tl.constexpr, SCALED: tl.constexpr):
    """The result of `load_rope` in bf16; FP8 has no scale, or with FP8 values the one of all rows `[N]`."""
    if STORED.ROPE == "fp8" and STORED.VALUES == "fp8":
        rope = _widen_fp8(rope, STORED.FORMAT, STORED.ROUTE) * (2.0**STORED.EXPONENT)
        if SCALED:
            rope = rope * scale[:, None]
        rope = rope.to(tl.bfloat16)
    elif STORED.ROPE == "fp8":
        rope = (widen(rope, "fp8_e4m3fn", "bits", tl.float16, False).to(tl.float32) * 256.0).to(tl.bfloat16)
    return rope


@triton.jit
def load_columns(
    rows, value_at, scale_at, mask, TILE: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    """The stored values of columns from TILE * WIDTH on, and their scales in fp32.

    Values are bytes `[N, WIDTH]` of FP8 or `[N, WIDTH // 2]` of FP4; scales `[N]` where one is for the whole
    tile, else `[N, WIDTH // GROUP]`. Rows that are not named and columns past the quantised ones are zeros
    with scale one.
    """
    PER_BYTE: tl.constexpr = 2 if STORED.VALUES == "fp4" else 1
    BYTES: tl.constexpr = WIDTH // PER_BYTE
    c = TILE * BYTES + tl.arange(0, BYTES)
    inside = mask[:, None]
    if (TILE + 1) * WIDTH > STORED.COLUMNS:
        inside = inside & (c < STORED.COLUMNS // PER_BYTE)[None, :]
    x = tl.load(rows.nope + value_at[:, None] + c[None, :], mask=inside, other=0)
    if WIDTH <= STORED.GROUP:
        places = rows.scale + scale_at + TILE * WIDTH // STORED.GROUP * STORED.STEP
        scaled = mask
    else:
        g = TILE * (WIDTH // STORED.GROUP) + tl.arange(0, WIDTH // STORED.GROUP)
        place = g * STORED.STEP
        if STORED.SCALE_STRIDE_IN_ROW > 1:
            APART: tl.constexpr = STORED.SCALE_STRIDE_IN_ROW
            place = g % APART * (STORED.COLUMNS // STORED.GROUP // APART) + g // APART
        places = rows.scale + scale_at[:, None] + place[None, :]
        scaled = mask[:, None] & (g < STORED.COLUMNS // STORED.GROUP)[None, :]
    # Float32 as words: Triton 3.6 branched around each load of float32 in a kernel with products.
    if STORED.SCALE == "e8m0":
        scale = e8m0_to_fp32(tl.load(places, mask=scaled, other=ONE_AS_E8M0))
    elif STORED.SCALE == "e4m3":
        byte = tl.load(places, mask=scaled, other=ONE_AS_E4M3)
        scale = widen(byte, "fp8_e4m3fn", "bits", tl.float16, False).to(tl.float32) * 256.0
    else:
        scale = tl.load(places, mask=scaled, other=ONE_AS_WORD).to(tl.float32, bitcast=True)
    return x, scale


@triton.jit
def as_fp8(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr):
    """Bytes seen as the FP8 type that the route multiplies or converts; other routes take the bytes."""
    if ROUTE == "fnuz_alias":
        x = x.to(tl.float8e4b8, bitcast=True)
    elif ROUTE == "native":
        if FORMAT == "fp8_e4m3fnuz":
            x = x.to(tl.float8e4b8, bitcast=True)
        else:
            x = x.to(tl.float8e4nv, bitcast=True)
    return x


@triton.jit
def _widen_fp8(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr):
    """FP8 bytes in fp32, still to be multiplied by 2**EXPONENT."""
    if ROUTE == "bits":
        widened = widen(x, FORMAT, ROUTE, tl.float16, False).to(tl.float32)
    else:
        widened = as_fp8(x, FORMAT, ROUTE).to(tl.float32)
    return widened


@triton.jit
def _widen_values(x, STORED: tl.constexpr):
    """Stored values in fp32, still to be multiplied by 2**EXPONENT."""
    if STORED.VALUES == "fp4":
        even, odd = widen_parts(x, STORED.FORMAT, STORED.ROUTE, tl.float16, 2)
        widened = tl.interleave(even, odd).to(tl.float32)
    elif STORED.IN_HALVES:
        N: tl.constexpr = x.shape[0]
        FOURS: tl.constexpr = x.shape[1] // 8
        low, high = tl.split(tl.permute(tl.reshape(x, [N, FOURS, 2, 4]), (0, 1, 3, 2)))
        fours = tl.join(
            _widen_fp8(low, STORED.FORMAT, STORED.ROUTE), _widen_fp8(high, STORED.FORMAT, STORED.ROUTE)
        )
        widened = tl.reshape(tl.permute(fours, (0, 1, 3, 2)), [N, FOURS * 8])
    else:
        widened = _widen_fp8(x, STORED.FORMAT, STORED.ROUTE)
    return widened


@triton.jit
def widen_columns(
    x, scale, rope, TILE: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """What `load_columns` gave as bf16 `[N, WIDTH]`, RoPE columns in their place if the tile ends with them.

    Exact, values of four bits times scales of four, but for SCALED by scales in fp32. Without SCALED the
    values are still to be multiplied by their scales.
    """
    widened = _widen_values(x, STORED)
    N: tl.constexpr = x.shape[0]
    scale = scale * (2.0**STORED.EXPONENT)
    if not SCALED:
        widened = widened * (2.0**STORED.EXPONENT)
    elif WIDTH <= STORED.GROUP:
        widened = widened * scale[:, None]
    else:
        widened = tl.reshape(
            tl.reshape(widened, [N, WIDTH // STORED.GROUP, STORED.GROUP]) * scale[:, :, None], [N, WIDTH]
        )
    if SCALED and (STORED.SCALE == "fp32" or STORED.SCALE == "tensor"):
        widened = widened.to(tl.bfloat16)
    else:
        # The low half of the float32 is zero: dropping it rounds nothing and costs no rounding instructions.
        widened = (widened.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if (TILE + 1) * WIDTH > STORED.COLUMNS:
        first = TILE * WIDTH + tl.arange(0, WIDTH // 64) * 64
        tiles = tl.reshape(widened, [N, WIDTH // 64, 64])
        widened = tl.reshape(
            tl.where((first == STORED.COLUMNS)[None, :, None], rope[:, None, :], tiles), [N, WIDTH]
        )
    return widened

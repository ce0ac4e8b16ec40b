"""Where a paged cache holds keys and values: page tables, addresses, loads and descales of stored tiles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import e8m0_to_fp32
from narrowkv.quant.device_e4m3 import e4m3_to_fp32


class KVPointers(NamedTuple):
    """One of K or V: where element [page, token, head, dim] lies. Strides are in words as they are loaded."""

    ptr: Any
    page: Any
    token: Any
    head: Any
    outer: Any  # vectorised layout: stride of the outer part of the split axis (dim for K, token for V)


class Descale(NamedTuple):
    """What stored numbers are multiplied by: one per (sequence, head), or one per (page, token, head).

    Float32, or E8M0 or E4M3 bytes; those of a (page, token, head)'s groups are adjacent.
    """

    ptr: Any
    major: Any  # stride over sequences, or over pages
    token: Any
    head: Any


class Table(NamedTuple):
    """Page table, ragged or a block table, int32 or int64. The three sizes bound what is read if it is wrong.

    Attributes:
        page_ids: page ids of all sequences.
        row: ragged: indptr. Block table: stride from a sequence's page ids to the next sequence's.
        lens: ragged: tokens in each sequence's last page. Block table: tokens of each sequence.
        num_ids: elements that `page_ids` spans.
        num_pages: pages of the cache.
        max_pages: ragged: page ids in all. Block table: page ids of a sequence. 0 if the cache has no pages.
        column: stride of a sequence's page ids, or None for 1.
        row_step: ragged: stride of indptr, or None for 1.
        lens_step: stride of `lens`, or None for 1.
    """

    page_ids: Any
    row: Any
    lens: Any
    num_ids: Any
    num_pages: Any
    max_pages: Any
    column: Any = None
    row_step: Any = None
    lens_step: Any = None


class TableSteps(NamedTuple):
    """What stays the same from one page table of an engine to the next; see `Table`."""

    num_pages: Any
    column: Any
    row_step: Any
    lens_step: Any


class Stored(NamedTuple):
    """Constants of K or of V as the cache holds it.

    Attributes:
        format, route: the format, and how it is converted to the compute type.
        parts: elements per loaded word; see `widen_parts`. Parts are separate terms of the scores, and
            separate columns of the output.
        vec: of the vectorised layout; see `KVStrides`.
        descale: "scalar" (folded into the scales of logits and output), "head" (per sequence and head),
            "token" (float32 per page, slot and head), "token_zero" (the same with INT4's zero points in the
            lowest bits, loaded as int32), "e8m0" or "e4m3" (bytes of those), or "e8m0_16",
            "e8m0_32", "e4m3_16", "e4m3_32" (a byte for each 16 or 32 channels).
        factors: whether each key has a factor of its own once it is widened; see `widen_tile`.
        aligned: whether the scales of a key's groups can be read as one word.
        token, scale_token: strides of a token of the words and of the scales where a kernel has them as
            constants, because it reads FP4 with scales of groups straight to registers; else 0.
    """

    format: str
    route: str
    parts: int
    vec: int
    descale: str
    factors: bool
    aligned: bool
    token: int = 0
    scale_token: int = 0


@triton.jit
def sized_table(table, row, num_ids, max_pages, RAGGED: tl.constexpr):
    """A `Table` with the sizes that serving changes, which kernels take as arguments of their own."""
    return Table(
        table.page_ids, table.row if RAGGED else row, table.lens, num_ids, table.num_pages, max_pages,
        table.column, table.row_step, table.lens_step,
    )  # fmt: skip


@triton.jit
def strided(index, step):
    """Offset of an element; a `step` of None is 1, without a multiplication."""
    if step is None:
        return index
    else:
        return index * step


@triton.jit
def sequence_length(table, seq, mask, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr):
    """Tokens of a sequence: what the table says, brought into [0, what the table's pages hold]."""
    return length_of(table, load_length(table, seq, mask, RAGGED), PAGE_SIZE, RAGGED)


@triton.jit
def load_length(table, seq, mask, RAGGED: tl.constexpr):
    """What a table says of a sequence's length, as it has it: `lens`; ragged: also both bounds in `row`."""
    lens = tl.load(table.lens + strided(seq, table.lens_step), mask=mask, other=0)
    begin, end = lens, lens
    if RAGGED:
        begin = tl.load(table.row + strided(seq, table.row_step), mask=mask, other=0)
        end = tl.load(table.row + strided(seq + 1, table.row_step), mask=mask, other=0)
    return lens, begin, end


@triton.jit
def length_of(table, loaded, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr):
    """`sequence_length` from what `load_length` loaded."""
    # Positions fit int32, also in the tile that follows the last key.
    MOST: tl.constexpr = (2**31 - 2**17) // PAGE_SIZE
    lens, begin, end = loaded
    if RAGGED:
        # Both are brought into the page list before one is subtracted: the difference of others may wrap.
        begin = tl.minimum(tl.maximum(begin, 0), table.max_pages)
        end = tl.minimum(tl.maximum(end, 0), table.max_pages)
        pages = tl.minimum(end - begin, MOST)
        last = tl.minimum(tl.maximum(lens, 0), PAGE_SIZE)
        return tl.where(pages > 0, (pages - 1) * PAGE_SIZE + last, 0).to(tl.int32)
    else:
        most = tl.minimum(table.max_pages, MOST) * PAGE_SIZE
        return tl.minimum(tl.maximum(lens, 0), most).to(tl.int32)


@triton.jit
def first_id(table, seq, RAGGED: tl.constexpr):
    """Where the page ids of a sequence begin: `row_base` of `locate_keys`."""
    begin = seq
    if RAGGED:
        begin = tl.load(table.row + strided(seq, table.row_step))
    return first_id_of(table, seq, begin, RAGGED)


@triton.jit
def first_id_of(table, seq, begin, RAGGED: tl.constexpr):
    """`first_id` from what `row` has at the sequence's place in a ragged table."""
    if RAGGED:
        begin = tl.minimum(tl.maximum(begin, 0), table.max_pages).to(tl.int32)
        return strided(begin, table.column)
    else:
        return seq * table.row


@triton.jit
def locate_keys(table, row_base, n, first, last, PAGE_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Page and slot [N] of keys `n`; keys outside [first, last] take their places, which are used ones."""
    page = load_page_ids(table, row_base, n, first, last, PAGE_SIZE)
    return place_of(table, page, n, first, last, PAGE_SIZE, INT64_OFFSETS)


@triton.jit
def load_page_ids(table, row_base, n, first, last, PAGE_SIZE: tl.constexpr):
    """Page ids [N] of keys `n` as the table has them, for `place_of`."""
    n = tl.maximum(tl.minimum(n, last), first)
    where = row_base + strided(n // PAGE_SIZE, table.column)
    return tl.load(table.page_ids + tl.maximum(tl.minimum(where, table.num_ids - 1), 0))


@triton.jit
def place_of(table, page, n, first, last, PAGE_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Page and slot [N] of keys `n` from their page ids as the table has them; see `locate_keys`."""
    n = tl.maximum(tl.minimum(n, last), first)
    page = tl.maximum(tl.minimum(page, table.num_pages - 1), 0)
    return page.to(tl.int64 if INT64_OFFSETS else tl.int32), n % PAGE_SIZE


@triton.jit
def kv_offsets(page, slot, kv, head, d, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr):
    """Offsets [N, D] of words `d` of one head at these places."""
    if VEC > 0 and VEC_ON_TOKENS:
        rows = page * kv.page + (slot // VEC) * kv.outer + slot % VEC
        cols = head * kv.head + d * VEC
    elif VEC > 0:
        rows = page * kv.page + slot * VEC
        cols = head * kv.head + (d // VEC) * kv.outer + d % VEC
    else:
        rows = page * kv.page + slot * kv.token
        cols = head * kv.head + d
    return rows[:, None] + cols[None, :]


@triton.jit
def times_head_descale(scale, descale, seq, kv_head, DESCALE: tl.constexpr):
    """Scale times the descale that all keys of a sequence's head share, where `DESCALE` is "head"."""
    if DESCALE == "head":
        scale *= tl.load(descale.ptr + seq * descale.major + kv_head * descale.head)
    return scale


@triton.jit
def load_key_scale(descale, page, slot, head, KIND: tl.constexpr, SPREAD: tl.constexpr,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr = False,
                   STORED: tl.constexpr = False):  # fmt: skip
    """What belongs to each key: a float32 factor [N], or as stored INT4's scale [N] or groups' scales [N, G].

    SPREAD reads the one E8M0 byte of a key for every group: the compiler cannot broadcast the scale of a
    matrix instruction. STORED returns the byte of a key, for `scale_as_number`.
    """
    at = descale.ptr + page * descale.major + slot * descale.token + head * descale.head
    GROUPED: tl.constexpr = KIND == "e8m0_16" or KIND == "e8m0_32" or KIND == "e4m3_16" or KIND == "e4m3_32"
    if GROUPED or (KIND == "e8m0" and SPREAD):
        GROUP: tl.constexpr = 16 if KIND == "e8m0_16" or KIND == "e4m3_16" else 32
        g = tl.arange(0, BLOCK_D // GROUP)
        step = g if GROUPED else g * 0
        if ALIGNED:
            at = tl.multiple_of(at, HEAD_DIM // GROUP)
        if HEAD_DIM == BLOCK_D:
            return tl.load(at[:, None] + step[None, :])
        else:
            return tl.load(at[:, None] + step[None, :], mask=(g * GROUP < HEAD_DIM)[None, :], other=0)
    elif STORED:
        return tl.load(at)
    else:
        return scale_as_number(tl.load(at), KIND, SPREAD)


@triton.jit
def load_group_scales(descale, page, slot, head, GROUPS: tl.constexpr):
    """The scales of all groups of each key as one integer [N], whose lowest byte is the first group's."""
    WORD: tl.constexpr = tl.int16 if GROUPS == 2 else tl.int32 if GROUPS == 4 else tl.int64
    at = descale.ptr + page * descale.major + slot * descale.token + head * descale.head
    return tl.load(at.to(tl.pointer_type(WORD)))


@triton.jit
def scale_as_number(scale, KIND: tl.constexpr, SPREAD: tl.constexpr):
    """The float32 factor of what `load_key_scale` loads with STORED; other kinds of scales unchanged."""
    if KIND == "e8m0" and not SPREAD:
        return e8m0_to_fp32(scale)
    elif KIND == "e4m3":
        return e4m3_to_fp32(scale)
    else:
        return scale

"""The largest logits of each token: an exact threshold by bisection, then columns in ascending order."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.sparse_fp8.indexer.kernels.logits import span_of_token

# Arguments that change from call to call in serving.
SIZES = ["first_token", "num_tokens", "num_columns", "num_candidates", "max_pages"]
_INT32_MIN = tl.constexpr(-(2**31))
_INT32_MAX = tl.constexpr(2**31 - 1)


class Candidates(NamedTuple):
    """What an earlier launch has chosen of chunks of a row: fp32 logits, -inf for none, and their columns."""

    logits: Any
    columns: Any


class BlockSpec(NamedTuple):
    """Constants of the kernels that read blocks of columns.

    SIZE: columns of a block, a power of two. BLOCKS: blocks of a program. HAS_BOUNDS, BY_LENGTH, Q_LEN: as in
    `TopkSpec`.
    """

    SIZE: Any
    BLOCKS: Any
    HAS_BOUNDS: Any
    BY_LENGTH: Any
    Q_LEN: Any


class RowMap(NamedTuple):
    """Page ids that turn a column into a row of a pool; `table` None leaves columns as they are."""

    table: Any
    stride_seq: Any
    stride_page: Any


class TopkSpec(NamedTuple):
    """Constants that a kernel is compiled with.

    TOPK: columns that are chosen; BLOCK_K: padded to a power of two. BLOCK: logits of a chunk, one program's,
    which it reads again in tiles of TILE.
    FIRST: whether the logits are the caller's, with bounds; later launches read candidates. LAST: whether
    columns go to the caller; other launches leave candidates. BY_LENGTH: whether `bounds.ends` are lengths of
    sequences. HAS_BOUNDS: whether there are any. Q_LEN: tokens of a sequence. PAGE_SIZE: of `RowMap`.
    """

    TOPK: Any
    BLOCK_K: Any
    BLOCK: Any
    TILE: Any
    FIRST: Any
    LAST: Any
    HAS_BOUNDS: Any
    BY_LENGTH: Any
    Q_LEN: Any
    PAGE_SIZE: Any


@triton.jit
def in_order(x):
    """Logits as int32 in the same order, 0 and -0 alike; -inf and NaN are the least of all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ _INT32_MAX, bits)
    return tl.where(x > float("-inf"), bits, _INT32_MIN)


@triton.jit
def threshold(number, TOPK: tl.constexpr):
    """The largest number that TOPK or more of `number` reach; the least of all if fewer are logits."""
    low = tl.min(tl.where(number > _INT32_MIN, number, _INT32_MAX), 0)
    high = tl.max(number, 0)
    if tl.sum((number > _INT32_MIN).to(tl.int32), 0) <= TOPK:
        low = high * 0 + _INT32_MIN
        high = low
    else:
        high += 1
    # TOPK or more reach `low`; fewer reach `high`.
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # does not overflow
        count = tl.sum((number >= middle).to(tl.int32), 0)
        low = tl.where(count >= TOPK, middle, low)
        high = tl.where(count < TOPK, middle, tl.where(count == TOPK, middle + 1, high))
    return low


@triton.jit
def rows_of_columns(column, taken, rows, seq, max_pages, PAGE_SIZE: tl.constexpr):
    """Rows of a pool of columns; -1 of a page that has none."""
    place = column // PAGE_SIZE
    ids = rows.table + seq.to(tl.int64) * rows.stride_seq + place * rows.stride_page
    page = tl.load(ids, mask=taken & (place < max_pages), other=-1)
    exists = (page >= 0) & (page <= _INT32_MAX // PAGE_SIZE - 1)
    return tl.where(exists, page * PAGE_SIZE + column % PAGE_SIZE, -1).to(tl.int32)


@triton.jit
def load_logits(source, n, begin, end):
    """Logits at places n of a row; -inf outside of [begin, end)."""
    return tl.load(source + n, mask=(n >= begin) & (n < end), other=float("-inf"))


@triton.jit
def columns_of_token(bounds, token, num_tokens, num_columns, SPEC: tl.constexpr):
    """The first column of a token, and the column after its last."""
    first, last = num_columns * 0, num_columns
    if SPEC.HAS_BOUNDS:
        first, last = span_of_token(
            bounds, token, num_tokens, num_columns, num_columns, num_columns, SPEC.BY_LENGTH, SPEC.Q_LEN
        )
    return first, last


@triton.jit(do_not_specialize=SIZES)
def _block_maxima_kernel(
    logits, stride_logits, left, bounds, first_token, num_tokens, num_columns, num_candidates,
    SPEC: tl.constexpr,
):  # fmt: skip
    """The largest logit of each block, +inf for that of a token's last column. Grid: tokens, runs."""
    row = tl.program_id(0)
    token = first_token + row
    first, last = columns_of_token(bounds, token, num_tokens, num_columns, SPEC)
    block = tl.program_id(1) * SPEC.BLOCKS + tl.arange(0, SPEC.BLOCKS)
    n = block[:, None] * SPEC.SIZE + tl.arange(0, SPEC.SIZE)[None, :]  # [BLOCKS, SIZE]
    x = load_logits(logits + token.to(tl.int64) * stride_logits, n, first, last)
    largest = tl.max(tl.where(x == x, x, float("-inf")), 1)
    newest = (last > first) & (block == (last - 1) // SPEC.SIZE)
    at = row.to(tl.int64) * num_candidates + block
    tl.store(left.logits + at, tl.where(newest, float("inf"), largest), mask=block < num_candidates)
    tl.store(left.columns + at, block, mask=block < num_candidates)


@triton.jit(do_not_specialize=[*SIZES, "num_blocks"])
def _block_logits_kernel(
    logits, stride_logits, blocks, stride_blocks, stride_block, left, bounds, first_token, num_tokens,
    num_columns, num_blocks, SPEC: tl.constexpr,
):  # fmt: skip
    """The logits of a token's blocks and their columns, -inf outside. Grid: tokens, runs."""
    row = tl.program_id(0)
    token = first_token + row
    first, last = columns_of_token(bounds, token, num_tokens, num_columns, SPEC)
    place = tl.program_id(1) * SPEC.BLOCKS + tl.arange(0, SPEC.BLOCKS)
    number = blocks + token.to(tl.int64) * stride_blocks + place * stride_block
    block = tl.load(number, mask=place < num_blocks, other=-1)
    exists = (block >= 0) & (block < tl.cdiv(num_columns, SPEC.SIZE))
    n = tl.arange(0, SPEC.SIZE)[None, :]
    at = (row.to(tl.int64) * num_blocks + place)[:, None] * SPEC.SIZE + n  # [BLOCKS, SIZE]
    n += tl.where(exists, block, 0).to(tl.int32)[:, None] * SPEC.SIZE
    x = load_logits(logits + token.to(tl.int64) * stride_logits, n, first, tl.where(exists, last, 0)[:, None])
    tl.store(left.logits + at, x, mask=(place < num_blocks)[:, None])
    tl.store(left.columns + at, n, mask=(place < num_blocks)[:, None])


@triton.jit(do_not_specialize=SIZES)
def _index_topk_kernel(
    logits, stride_logits, candidates, chosen, out, stride_out, bounds, rows,
    first_token, num_tokens, num_columns, num_candidates, max_pages, SPEC: tl.constexpr,
):  # fmt: skip
    """The TOPK largest logits of a chunk of a token's row. Grid: tokens, chunks.

    candidates, chosen: `Candidates` that this launch reads and leaves, for the tokens of this launch.
    """
    row = tl.program_id(0)
    token = first_token + row
    chunk = tl.program_id(1)
    begin, end = chunk * SPEC.BLOCK, chunk * SPEC.BLOCK + SPEC.BLOCK
    columns = candidates.columns
    if SPEC.FIRST:
        source = logits + token.to(tl.int64) * stride_logits
        end = tl.minimum(end, num_columns)
        if SPEC.HAS_BOUNDS:
            first, last = columns_of_token(bounds, token, num_tokens, num_columns, SPEC)
            begin, end = tl.maximum(begin, first), tl.minimum(end, last)
    else:
        source = candidates.logits + row.to(tl.int64) * num_candidates
        columns += row.to(tl.int64) * num_candidates
        end = tl.minimum(end, num_candidates)
    number = in_order(load_logits(source, chunk * SPEC.BLOCK + tl.arange(0, SPEC.BLOCK), begin, end))
    least = threshold(number, SPEC.TOPK)
    wanted = SPEC.TOPK - tl.sum((number > least).to(tl.int32), 0)  # of the equal ones, the first
    to_row = out + token.to(tl.int64) * stride_out
    to_chunk = (row.to(tl.int64) * tl.num_programs(1) + chunk) * SPEC.TOPK
    above_before, equal_before = begin * 0, begin * 0
    for start in range(chunk * SPEC.BLOCK, end, SPEC.TILE):
        n = start + tl.arange(0, SPEC.TILE)
        x = load_logits(source, n, begin, end)
        again = in_order(x)
        above = (again > least).to(tl.int32)
        equal = ((again == least) & (again > _INT32_MIN)).to(tl.int32)
        # Both counts in one sum: each is less than 2**16 in a tile.
        counts = tl.cumsum((above << 16) + equal, 0)
        equals = equal_before + (counts & 0xFFFF) - equal
        taken = (above > 0) | ((equal > 0) & (equals < wanted))
        to = above_before + (counts >> 16) - above + tl.minimum(equals, wanted)
        column = n
        if not SPEC.FIRST:
            column = tl.load(columns + n, mask=taken, other=0)
        if SPEC.LAST:
            if rows.table is not None:
                column = rows_of_columns(column, taken, rows, token // SPEC.Q_LEN, max_pages, SPEC.PAGE_SIZE)
            tl.store(to_row + to, column, mask=taken)
        else:
            tl.store(chosen.logits + to_chunk + to, x, mask=taken)
            tl.store(chosen.columns + to_chunk + to, column, mask=taken)
        above_before += tl.sum(above, 0)
        equal_before += tl.sum(equal, 0)
    pad = above_before + tl.minimum(equal_before, wanted) + tl.arange(0, SPEC.BLOCK_K)
    if SPEC.LAST:
        tl.store(to_row + pad, tl.full([SPEC.BLOCK_K], -1, tl.int32), mask=pad < SPEC.TOPK)
    else:
        minus = tl.full([SPEC.BLOCK_K], float("-inf"), tl.float32)
        tl.store(chosen.logits + to_chunk + pad, minus, mask=pad < SPEC.TOPK)

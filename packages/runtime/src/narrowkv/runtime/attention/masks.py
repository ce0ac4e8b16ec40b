"""Device helpers (`@triton.jit`): the query tokens of a sequence, and the keys that a row attends to."""

from typing import Any, NamedTuple  # noqa: I001

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
import triton
import triton.language as tl

# Sequences that a program looks at together.
SEQUENCES = tl.constexpr(32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def query_ranges(q, seqs, batch, claimed, SCANS: tl.constexpr = False):
    """First query token and number of query tokens of sequences, and `claimed` for those that follow.

    A token belongs to the first sequence that claims it, and a sequence with an entry of cu_seqlens_q outside
    [0, tokens] has none, so ranges lie in the tensor and do not overlap, whatever the entries are.

    Args:
        seqs: neighbours, [SEQUENCES]; those from `batch` on have no tokens.
        claimed: the token behind all that earlier sequences claim.
        SCANS: put starts in order by a scan, which the interpreter is slow at and Gluon needs no layout for.
    """
    inside = seqs < batch
    begin = tl.load(q.starts + seqs, mask=inside, other=0)
    end = tl.load(q.starts + seqs + 1, mask=inside, other=0)
    begins = (begin >= 0) & (begin <= q.num_tokens)
    known = begins & (end >= 0) & (end <= q.num_tokens)
    # Of 64 bits, too: what passes the test fits in 32.
    begin = tl.maximum(tl.where(begins, begin, 0).to(tl.int32), claimed)
    end = end.to(tl.int32)
    # Starts in order are their own running maximum, for the end of a sequence is the next one's start.
    unordered = inside & ~(known & (end >= begin))
    if SCANS:
        begin = tl.associative_scan(begin, 0, _larger)
    elif tl.max(unordered.to(tl.int32), 0) > 0:
        begin = tl.max(tl.where(seqs[:, None] <= seqs[None, :], begin[:, None], 0), 0)
    return begin, tl.where(known, tl.maximum(end - begin, 0), 0), tl.max(begin, 0)


@triton.jit
def key_range(first_pos, last_pos, first, num_keys,
              WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Key tiles [begin, end) that rows at positions first_pos..last_pos see, and [full, full_end) unmasked.

    Keys lie in [first, num_keys).
    """
    low = first
    low_full = first
    if WINDOW_LEFT >= 0:
        low = tl.maximum(first_pos - WINDOW_LEFT, first)
        low_full = tl.maximum(last_pos - WINDOW_LEFT, first)
    high = num_keys
    high_full = num_keys
    if WINDOW_RIGHT >= 0:
        high = tl.minimum(last_pos + WINDOW_RIGHT + 1, num_keys)
        high_full = tl.minimum(first_pos + WINDOW_RIGHT + 1, num_keys)
    begin = low // BLOCK_N
    end = tl.maximum(tl.cdiv(tl.maximum(high, 0), BLOCK_N), begin)
    full = tl.minimum(tl.cdiv(low_full, BLOCK_N), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(high_full, 0) // BLOCK_N, full), end)
    return begin, end, full, full_end


@triton.jit
def key_range_of_split(begin, end, full, full_end, split, num_splits):
    """The part of a key range, see `key_range`, that one split of `num_splits` attends to."""
    count = end - begin
    first = begin + (split * count) // num_splits
    last = begin + ((split + 1) * count) // num_splits
    full = tl.minimum(tl.maximum(full, first), last)
    return first, last, full, tl.maximum(tl.minimum(full_end, last), full)


@triton.jit
def visible_keys(n, query_pos, first, num_keys,
                 HAS_FIRST: tl.constexpr, WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr):  # fmt: skip
    """[M, N]: keys of [first, num_keys) in the row's window; without HAS_FIRST there is none before 0."""
    if WINDOW_RIGHT == 0:
        # A row is itself a key, and none lies beyond the last row.
        keep = n[None, :] <= query_pos[:, None]
    else:
        keep = tl.broadcast_to((n < num_keys)[None, :], [query_pos.shape[0], n.shape[0]])
        if WINDOW_RIGHT > 0:
            keep = keep & (n[None, :] <= query_pos[:, None] + WINDOW_RIGHT)
    if HAS_FIRST:
        keep = keep & (n >= first)[None, :]
    if WINDOW_LEFT >= 0:
        keep = keep & (n[None, :] >= query_pos[:, None] - WINDOW_LEFT)
    return keep


@triton.jit
def visible_range(query_pos, first, num_keys, HAS_FIRST: tl.constexpr,
                  WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr):  # fmt: skip
    """The first and the last key that `visible_keys` shows each row, [M] both."""
    low = tl.zeros_like(query_pos)
    if HAS_FIRST:
        low += first
    if WINDOW_LEFT >= 0:
        low = tl.maximum(low, query_pos - WINDOW_LEFT)
    if WINDOW_RIGHT == 0:
        high = query_pos
    else:
        high = tl.zeros_like(query_pos) + (num_keys - 1)
        if WINDOW_RIGHT > 0:
            high = tl.minimum(high, query_pos + WINDOW_RIGHT)
    return low, high


class SeenKeys(NamedTuple):
    """The keys that rows attend to.

    Attributes:
        low, high: [M], the first and the last key of each row; `low` None for key 0.
        tree, tail: [M] integers and the first of the keys that they are for: bit j says whether the row
            attends to key `tail + j`. None for no such bits.
    """

    low: Any
    high: Any
    tree: Any
    tail: Any


@triton.jit
def seen_keys(n, rows, COMPARE_ONCE: tl.constexpr = False):
    """[M, N]: the keys `n` that `rows`, which are `SeenKeys`, attend to.

    COMPARE_ONCE: test both bounds of a key with one unsigned comparison. On AMD GPUs the result of each
        comparison occupies a pair of scalar registers, and two results a key are more than Sage's kernel has
        registers for: it would spill.
    """
    if COMPARE_ONCE and rows.low is not None:
        # `high - n` is negative for a key past `high`; read as unsigned, it exceeds every count.
        count = tl.maximum(rows.high - rows.low + 1, 0)
        keep = (rows.high[:, None] - n[None, :]).to(tl.uint32) < count[:, None].to(tl.uint32)
    else:
        keep = n[None, :] <= rows.high[:, None]
        if rows.low is not None:
            keep = keep & (n[None, :] >= rows.low[:, None])
    if rows.tree is not None:
        # A shift by more than the width is undefined, so it is bounded; keys past the bits are past `high`.
        bit = tl.minimum(tl.maximum(n - rows.tail, 0), rows.tree.dtype.primitive_bitwidth - 1)
        allowed = (rows.tree[:, None] >> bit[None, :].to(rows.tree.dtype)) & 1
        keep = keep & ((n < rows.tail)[None, :] | (allowed != 0))
    return keep

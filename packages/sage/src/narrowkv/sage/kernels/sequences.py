"""The places of sequences: their tokens in the caller's tensors, and their rows in the quantised scratch.

Scratch holds sequences one after the other, each beginning at a multiple of ALIGN rows: tiles of at most
ALIGN rows never straddle two sequences, groups of tokens never straddle two tiles, and loads need no mask.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.runtime.attention.masks import SEQUENCES, query_ranges

ALIGN: tl.constexpr = tl.constexpr(128)


class Starts(NamedTuple):
    """cu_seqlens `[batch + 1]`, int32 or int64, and the tokens that the tensor holds."""

    starts: Any
    num_tokens: Any


class Sequences(NamedTuple):
    """`batch` sequences: `bounds` from `_sequence_bounds_kernel`, or None and `length` tokens each."""

    bounds: Any
    batch: Any
    length: Any


class Strided(NamedTuple):
    """A tensor `[batch, tokens, heads, head_dim]`, or `[tokens, heads, head_dim]` with batch stride 0."""

    ptr: Any
    batch: Any
    token: Any
    head: Any


@triton.jit(do_not_specialize=["num_tokens", "batch"])
def _sequence_bounds_kernel(starts_ptr, bounds_ptr, num_tokens, batch):
    """First token and number of tokens of each sequence, int32 `[batch, 2]`, by one program.

    Sequences lie in the tensor, one after the other, whatever the starts are; see `query_ranges`.
    """
    claimed = batch * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        start, length, claimed = query_ranges(Starts(starts_ptr, num_tokens), seqs, batch, claimed)
        tl.store(bounds_ptr + 2 * seqs, start.to(tl.int32), mask=seqs < batch)
        tl.store(bounds_ptr + 2 * seqs + 1, length.to(tl.int32), mask=seqs < batch)


@triton.jit
def extent_of(seqs, seq, RAGGED: tl.constexpr):
    """First scratch row, first token and number of tokens of a sequence."""
    if RAGGED:
        start = tl.load(seqs.bounds + 2 * seq)
        return (start // ALIGN + seq) * ALIGN, start, tl.load(seqs.bounds + 2 * seq + 1)
    else:
        return seq * (tl.cdiv(seqs.length, ALIGN) * ALIGN), seq * 0, seqs.length


@triton.jit
def sequence_at(seqs, row, RAGGED: tl.constexpr):
    """The sequence whose scratch holds `row`."""
    if RAGGED:
        begun = row * 0
        for first in range(0, seqs.batch, SEQUENCES):
            i = first + tl.arange(0, SEQUENCES)
            start = tl.load(seqs.bounds + 2 * i, mask=i < seqs.batch, other=0)
            begun += tl.sum(((i < seqs.batch) & ((start // ALIGN + i) * ALIGN <= row)).to(tl.int32), 0)
        return tl.maximum(begun - 1, 0)
    else:
        return row // (tl.cdiv(seqs.length, ALIGN) * ALIGN)


@triton.jit
def descale_of(row, SPAN: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr):
    """The descale of scratch rows; see `narrowkv.quant.sage.TokenGroups`. SPAN 0: one for everything."""
    if SPAN == 0:
        return row * 0
    else:
        return row // SPAN * GROUPS + row % (GROUPS * RUN) // RUN

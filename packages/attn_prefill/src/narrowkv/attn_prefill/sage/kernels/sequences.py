"""Where sequences lie: their tokens in the caller's tensors, and their rows in the quantised scratch.

Scratch holds sequences one after the other, each beginning at a multiple of ALIGN rows: tiles of at most
ALIGN rows never straddle two sequences, groups of tokens never straddle two tiles, and loads need no mask.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

ALIGN: tl.constexpr = tl.constexpr(128)


class Sequences(NamedTuple):
    """`batch` sequences: tokens starts[i]..starts[i + 1], or `length` tokens each without starts.

    `tokens` is a bound of the tensor's tokens, whatever `starts` says.
    """

    starts: Any
    batch: Any
    length: Any
    tokens: Any


class Strided(NamedTuple):
    """A tensor `[batch, tokens, heads, head_dim]`, or `[tokens, heads, head_dim]` with batch stride 0."""

    ptr: Any
    batch: Any
    token: Any
    head: Any


@triton.jit
def extent_of(seqs, seq, RAGGED: tl.constexpr):
    """First scratch row, first token and number of tokens of a sequence."""
    if RAGGED:
        start = tl.minimum(tl.maximum(tl.load(seqs.starts + seq), 0), seqs.tokens)
        end = tl.minimum(tl.load(seqs.starts + seq + 1), seqs.tokens)
        return (start // ALIGN + seq) * ALIGN, start, tl.maximum(end - start, 0)
    else:
        return seq * (tl.cdiv(seqs.length, ALIGN) * ALIGN), seq * 0, seqs.length


@triton.jit
def sequence_at(seqs, row, RAGGED: tl.constexpr, BLOCK_B: tl.constexpr):
    """The sequence whose scratch holds `row`."""
    if RAGGED:
        i = tl.arange(0, BLOCK_B)
        starts = tl.load(seqs.starts + i, mask=i < seqs.batch, other=0)
        begun = (i < seqs.batch) & ((starts // ALIGN + i) * ALIGN <= row)
        return tl.maximum(tl.sum(begun.to(tl.int32), 0) - 1, 0)
    else:
        return row // (tl.cdiv(seqs.length, ALIGN) * ALIGN)


@triton.jit
def descale_of(row, SPAN: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr):
    """The descale of scratch rows; see `narrowkv.quant.sage.TokenGroups`. SPAN 0: one for everything."""
    if SPAN == 0:
        return row * 0
    else:
        return row // SPAN * GROUPS + row % (GROUPS * RUN) // RUN

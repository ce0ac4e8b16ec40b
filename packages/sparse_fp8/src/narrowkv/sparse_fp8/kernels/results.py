"""The results of a program: a finished row, or a partial result for the merge."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.runtime.attention.softmax import merge_step, natural_lse, output_factor

# Arguments of the attention kernels that change from call to call in serving.
SIZES = ["num_tokens", "num_splits", "prefix_rows", "prefix_nnz", "extend_rows", "extend_nnz"]


class Output(NamedTuple):
    """Results, and the sink that they are scaled by. `lse` and `sink` may be None.

    o: `[tokens, heads, 512]` with strides per token and head. lse: fp32 `[tokens, heads]`, likewise.
    """

    o: Any
    lse: Any
    sink: Any
    stride_t: Any
    stride_h: Any
    stride_lt: Any
    stride_lh: Any


class Partials(NamedTuple):
    """Results of splits: acc fp32 [split, token, head, 512], m and l fp32 [split, token, head]."""

    acc: Any
    m: Any
    l: Any


class SparseSpec(NamedTuple):
    """Constants of the call that a kernel is compiled with.

    NUM_HEADS: heads of a token; over a page table the rows of Q of a sequence, see `PagedForm`.
    INT64_HEADS: offsets of heads are computed in int64. HEAD_DIM: columns of Q and K; V has 512.
    PAGES: `PagedForm` if a page table names the rows, None if index lists do. ORDER: `XcdOrder`, or None.
    """

    NUM_HEADS: Any
    HAS_SINK: Any
    WRITE_LSE: Any
    SPLIT: Any
    INT64_HEADS: Any
    HEAD_DIM: Any
    PAGES: Any = None
    ORDER: Any = None


class Tiles(NamedTuple):
    """Tile sizes of a kernel; see `SparseConfig`."""

    BLOCK_H: Any
    BLOCK_K: Any
    WIDTH: Any
    GUARD: Any


@triton.jit
def row_factor(out, m, l, heads, mask, CALL: tl.constexpr):
    """The factor of the accumulators of `heads`."""
    if CALL.HAS_SINK:
        if CALL.PAGES is not None:
            heads = heads % CALL.PAGES.HEADS
        sink = tl.load(out.sink + heads, mask=mask, other=float("-inf"))
    else:
        sink = tl.full(m.shape, float("-inf"), tl.float32)
    return output_factor(m, l, sink)


@triton.jit
def store_lse(out, m, l, token, heads, mask):
    """The natural-log lse of one token's `heads`."""
    tl.store(out.lse + token * out.stride_lt + heads * out.stride_lh, natural_lse(m, l), mask=mask)


@triton.jit
def store_columns(
    out, partials, acc, factor, token, slot, heads, mask, FIRST: tl.constexpr, SPLIT: tl.constexpr
):
    """Stores columns from FIRST on of one token's heads: the result, or a split's partial result.

    slot: (split * tokens + token) * heads of the call, int64.
    """
    d = FIRST + tl.arange(0, acc.shape[1])
    if SPLIT:
        tl.store(partials.acc + (slot + heads)[:, None] * 512 + d[None, :], acc, mask=mask[:, None])
    else:
        places = out.o + token * out.stride_t + heads[:, None] * out.stride_h + d[None, :]
        tl.store(places, (acc * factor[:, None]).to(out.o.dtype.element_ty), mask=mask[:, None])


@triton.jit
def store_state(partials, m, l, slot, heads, mask):
    """A split's maximum and denominator."""
    tl.store(partials.m + slot + heads, m, mask=mask)
    tl.store(partials.l + slot + heads, l, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _merge_sparse_kernel(out, partials, num_tokens, num_splits, CALL: tl.constexpr, BLOCK_S: tl.constexpr):
    """One (token, head) a program, over all splits; a split that had no keys has m = -inf."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // CALL.NUM_HEADS, row % CALL.NUM_HEADS
    d = tl.arange(0, 512)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, 512], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        i = start + tl.arange(0, BLOCK_S)
        inside = i < num_splits
        slot = i.to(tl.int64) * num_tokens * CALL.NUM_HEADS + row
        m_i = tl.load(partials.m + slot, mask=inside, other=float("-inf"))
        l_i = tl.load(partials.l + slot, mask=inside, other=0.0)
        live = inside & (m_i > float("-inf"))
        acc_i = tl.load(partials.acc + slot[:, None] * 512 + d[None, :], mask=live[:, None], other=0.0)
        acc, m, l = merge_step(acc, m, l, acc_i, m_i, l_i)
    heads = head + tl.arange(0, 1)
    everywhere = heads >= 0
    factor = row_factor(out, m, l, heads, everywhere, CALL)
    store_columns(out, partials, acc, factor, token, row, heads, everywhere, 0, False)
    if CALL.WRITE_LSE:
        store_lse(out, m, l, token, heads, everywhere)

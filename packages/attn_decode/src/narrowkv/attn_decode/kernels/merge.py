"""Merging of partial results: of a decode's splits, and of any states with their lse."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.registers_cdna import stored_columns
from narrowkv.attn_decode.kernels.tiles import attended_span, even_split, splits_of_sequence, tiles_of
from narrowkv.paged_cache.kernels.outputs import write_rows
from narrowkv.paged_cache.kernels.pages import Table, sequence_length, times_head_descale
from narrowkv.runtime.attention.handover import await_previous_launch
from narrowkv.runtime.attention.softmax import merge_step, output_factor

_WEIGHT = tl.constexpr(2.0**-16)  # the largest weight of a state in sums


@triton.jit(
    do_not_specialize=["row", "num_ids", "max_pages", "batch", "most_splits", "tiles_per_split", "slots"],
    do_not_specialize_on_alignment=["page_ids", "lens"],
)
def _merge_splits_kernel(
    page_ids, lens, row, num_ids, max_pages, batch, most_splits, tiles_per_split, steps, slots,
    workspace, io, v_descale, out_scale,
    SIZES: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One output row per program, merged from all its splits; a row of one split is there already.

    The arguments are those of `_paged_decode_kernel`. BLOCK_S: splits that are merged at once; the bits of
    the result depend on it.
    """
    ROWS: tl.constexpr = SIZES.q_len * SIZES.gqa_ratio
    HEAD_PROGRAMS: tl.constexpr = SIZES.num_kv_heads * ((ROWS + BLOCKS.m - 1) // BLOCKS.m)
    table = Table(page_ids, row, lens, num_ids, steps.num_pages, max_pages, *steps[1:4])
    seq = tl.program_id(0) // (SIZES.num_kv_heads * ROWS)
    kv_head = tl.program_id(0) // ROWS % SIZES.num_kv_heads
    row_of_head = tl.program_id(0) % ROWS
    if RULES.even:
        _, first_item, num_splits = even_split(
            table, io.ranges, batch, most_splits, slots, seq, False, SIZES.q_len, RULES.window_left,
            SIZES.page_size, SIZES.ragged, BLOCKS.n,
        )  # fmt: skip
    else:
        kv_len = sequence_length(table, seq, seq < batch, SIZES.page_size, SIZES.ragged)
        first, end_key = attended_span(io.ranges, seq, seq < batch, kv_len, SIZES.q_len, RULES.window_left)
        _, num_tiles = tiles_of(first, end_key, BLOCKS.n)
        num_splits = splits_of_sequence(num_tiles, tiles_per_split, most_splits)
        first_item = seq * most_splits
    if RULES.early:
        await_previous_launch()
    if num_splits == 1:
        return
    head_program = (row_of_head // BLOCKS.m) * SIZES.num_kv_heads + kv_head
    r = row_of_head % BLOCKS.m
    d = tl.arange(0, BLOCKS.d)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCKS.d], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        i = start + tl.arange(0, BLOCK_S)
        inside = i < num_splits
        slot = (first_item + i).to(tl.int64) * HEAD_PROGRAMS + head_program
        m_i = tl.load(workspace.ml + slot * (2 * BLOCKS.m) + r, mask=inside, other=float("-inf"))
        l_i = tl.load(workspace.ml + slot * (2 * BLOCKS.m) + BLOCKS.m + r, mask=inside, other=0.0)
        part = (slot * (BLOCKS.m * BLOCKS.d) + r * BLOCKS.d)[:, None] + d[None, :]
        acc_i = tl.load(workspace.acc + part, mask=inside[:, None], other=0.0)  # [BLOCK_S, BLOCK_D]
        acc, m, l = merge_step(acc, m, l, acc_i, m_i, l_i)
    if RULES.kept_parts > 1:
        d = stored_columns(BLOCKS.d, V.parts, V.route == "cdna4", RULES.lanes)
    one = tl.arange(0, 1)
    heads = kv_head * SIZES.gqa_ratio + row_of_head % SIZES.gqa_ratio + one
    tokens = (seq * SIZES.q_len + row_of_head // SIZES.gqa_ratio + one).to(tl.int64)
    scale = tl.full([1], 1.0, tl.float32) * out_scale
    scale = times_head_descale(scale, v_descale, seq, kv_head, V.descale)
    write_rows(
        io.o, io.o_scale, io.lse, io.sinks, acc, m, l, scale, heads, tokens, one == 0, d,
        io.o_token, io.o_head, io.lse_token, SIZES.v_head_dim, RULES.sinks, RULES.lse,
    )  # fmt: skip


class States(NamedTuple):
    """O `[states, tokens, heads, head_dim]` or lse `[states, tokens, heads]`; `ptr` None is not written."""

    ptr: Any
    state: Any
    token: Any
    head: Any


@triton.jit(do_not_specialize=["num_states", "begin", "end"])
def _merge_states_kernel(
    o, lse, out, out_lse, sinks_ptr, num_states, begin, end, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LSE_UNIT: tl.constexpr
):  # fmt: skip
    """One row of the union of `num_states` partial results: the share of states [begin, end) of its O.

    States are added in their order, so that the result has the same bits every time.

    Args:
        o, lse, out, out_lse: `States`; of the last two there is one state. sinks_ptr: `[heads]` or None.
        LSE_UNIT: natural logits in one of lse: 1, or log 2 where its base is 2.
    """
    token = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    lse_ptr = lse.ptr + token * lse.token + head * lse.head
    o_ptr = o.ptr + token * o.token + head * o.head
    m = token.to(tl.float32) * 0.0 - float("inf")
    for i in range(num_states):
        m = tl.maximum(m, tl.load(lse_ptr + i * lse.state) * LSE_UNIT)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    total = m_safe * 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(num_states):
        weight = tl.exp(tl.load(lse_ptr + i * lse.state) * LSE_UNIT - m_safe)
        total += weight
        # Smaller by a power of two, so that sums of finite values stay finite.
        weight = tl.where((i >= begin) & (i < end), weight * _WEIGHT, 0.0)
        values = tl.load(o_ptr + i * o.state + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        # A state that attended to nothing may hold anything, NaN too.
        acc += tl.where(weight > 0.0, weight * values, 0.0)
    empty = total == 0.0
    if sinks_ptr is None:
        row = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total * _WEIGHT))
    else:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        row = acc * (output_factor(m * 1.4426950408889634, total, sink) / _WEIGHT)
    to = out.ptr + token * out.token + head * out.head + d
    tl.store(to, row.to(out.ptr.dtype.element_ty), mask=d < HEAD_DIM)
    if out_lse.ptr is not None:
        sum_of_logs = (m_safe + tl.log(tl.where(empty, 1.0, total))) / LSE_UNIT
        to = out_lse.ptr + token * out_lse.token + head * out_lse.head
        tl.store(to, tl.where(empty, float("-inf"), sum_of_logs))

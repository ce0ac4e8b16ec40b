"""Merging of partial results: of a decode's splits, and of any states with their lse."""

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.tiles import even_split, splits_of_sequence, tiles_of
from narrowkv.paged_cache.kernels.pages import Table, sequence_length, times_head_descale
from narrowkv.runtime.attention.results import write_rows
from narrowkv.runtime.attention.softmax import merge_step

_BLOCK_S = tl.constexpr(16)  # partial results that are merged at once


@triton.jit(
    do_not_specialize=["row", "num_ids", "max_pages", "batch", "num_units", "tiles_per_split"],
    do_not_specialize_on_alignment=["page_ids", "lens"],
)
def _merge_splits_kernel(
    io, v_descale, workspace, page_ids, row, lens, num_ids, max_pages, steps,
    out_scale, batch, num_units, tiles_per_split,
    SIZES: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One output row per program, merged from all its splits; a row of one split is there already.

    The arguments are those of `_paged_decode_kernel`.
    """
    NUM_KV_HEADS: tl.constexpr = SIZES.num_kv_heads
    GQA_RATIO: tl.constexpr = SIZES.gqa_ratio
    Q_LEN: tl.constexpr = SIZES.q_len
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    PAGE_SIZE: tl.constexpr = SIZES.page_size
    RAGGED: tl.constexpr = SIZES.ragged
    WINDOW_LEFT: tl.constexpr = RULES.window_left
    V_DESCALE: tl.constexpr = V.descale
    BLOCK_M: tl.constexpr = BLOCKS.m
    BLOCK_N: tl.constexpr = BLOCKS.n
    BLOCK_D: tl.constexpr = BLOCKS.d
    ROWS: tl.constexpr = Q_LEN * GQA_RATIO
    HEAD_PROGRAMS: tl.constexpr = NUM_KV_HEADS * ((ROWS + BLOCK_M - 1) // BLOCK_M)
    table = Table(
        page_ids,
        row,
        lens,
        num_ids,
        steps.num_pages,
        max_pages,
        steps.column,
        steps.row_step,
        steps.lens_step,
    )
    seq = tl.program_id(0) // (NUM_KV_HEADS * ROWS)
    kv_head = tl.program_id(0) // ROWS % NUM_KV_HEADS
    row_of_head = tl.program_id(0) % ROWS
    if RULES.even:
        _, first_unit, num_splits = even_split(
            table, batch, num_units, seq, False, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N
        )
    else:
        max_splits = num_units // batch
        kv_len = sequence_length(table, seq, seq < batch, PAGE_SIZE, RAGGED)
        _, num_tiles = tiles_of(kv_len, Q_LEN, WINDOW_LEFT, BLOCK_N)
        num_splits = splits_of_sequence(num_tiles, tiles_per_split, max_splits)
        first_unit = seq * max_splits
    if num_splits == 1:
        return
    head_program = (row_of_head // BLOCK_M) * NUM_KV_HEADS + kv_head
    r = row_of_head % BLOCK_M
    d = tl.arange(0, BLOCK_D)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, num_splits, _BLOCK_S):
        i = start + tl.arange(0, _BLOCK_S)
        inside = i < num_splits
        slot = (first_unit + i).to(tl.int64) * HEAD_PROGRAMS + head_program
        m_i = tl.load(workspace.ml + slot * (2 * BLOCK_M) + r, mask=inside, other=float("-inf"))
        l_i = tl.load(workspace.ml + slot * (2 * BLOCK_M) + BLOCK_M + r, mask=inside, other=0.0)
        part = (slot * (BLOCK_M * BLOCK_D) + r * BLOCK_D)[:, None] + d[None, :]
        acc_i = tl.load(workspace.acc + part, mask=inside[:, None], other=0.0)  # [_BLOCK_S, BLOCK_D]
        acc, m, l = merge_step(acc, m, l, acc_i, m_i, l_i)
    one = tl.arange(0, 1)
    heads = kv_head * GQA_RATIO + row_of_head % GQA_RATIO + one
    tokens = (seq * Q_LEN + row_of_head // GQA_RATIO + one).to(tl.int64)
    scale = tl.full([1], 1.0, tl.float32) * out_scale
    scale = times_head_descale(scale, v_descale, seq, kv_head, V_DESCALE)
    write_rows(
        io.o, io.lse, io.sinks, acc, m, l, scale, heads, tokens, one == 0, d,
        io.o_token, io.o_head, io.lse_token, HEAD_DIM, RULES.sinks, RULES.lse,
    )  # fmt: skip


@triton.jit
def _merge_states_kernel(
    o_ptr, lse_ptr, out_ptr, out_lse_ptr, num_states, stride_os, stride_ls,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Merges `num_states` partial results of one row, lse in natural log."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    m = row.to(tl.float32) * 0.0 - float("inf")
    for i in range(num_states):
        m = tl.maximum(m, tl.load(lse_ptr + i * stride_ls + row))
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    total = m_safe * 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(num_states):
        lse = tl.load(lse_ptr + i * stride_ls + row)
        weight = tl.exp(lse - m_safe)
        o = tl.load(o_ptr + i * stride_os + row * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        # A state that attended to nothing may hold anything, NaN too.
        acc += tl.where(weight > 0.0, weight * o.to(tl.float32), 0.0)
        total += weight
    empty = total == 0.0
    o = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(out_ptr + row * HEAD_DIM + d, o.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(out_lse_ptr + row, tl.where(empty, float("-inf"), m_safe + tl.log(tl.where(empty, 1.0, total))))

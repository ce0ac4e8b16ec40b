"""Merging of partial results: of a decode's splits, and of any states with their lse."""

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.tiles import split_counts, times_head_descale, write_rows
from narrowkv.quant.softmax import merge_step


@triton.jit
def _merge_splits_kernel(
    o_ptr, lse_ptr, sinks_ptr, v_descale, table, workspace,
    stride_ot, stride_oh, stride_lse, out_scale, batch, num_units, tiles_per_split,
    NUM_KV_HEADS: tl.constexpr, GQA_RATIO: tl.constexpr, Q_LEN: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, V_DESCALE: tl.constexpr, WINDOW_LEFT: tl.constexpr,
    HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One output row per program, merged from all its splits; a row of one split is there already."""
    ROWS: tl.constexpr = Q_LEN * GQA_RATIO
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    seq = tl.program_id(1)
    if SPLIT == "even":
        splits = split_counts(
            table, batch, num_units, tiles_per_split, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N, BLOCK_B
        )
        seqs = tl.arange(0, BLOCK_B)
        first_unit = tl.sum(tl.where(seqs < seq, splits, 0), 0)
        num_splits = tl.sum(tl.where(seqs == seq, splits, 0), 0)
    else:
        num_splits = num_units // batch
        first_unit = seq * num_splits
    if num_splits == 1:
        return
    head_program = (row // BLOCK_M) * NUM_KV_HEADS + kv_head
    r = row % BLOCK_M
    d = tl.arange(0, BLOCK_D)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        i = start + tl.arange(0, BLOCK_S)
        inside = i < num_splits
        slot = (first_unit + i).to(tl.int64) * (NUM_KV_HEADS * ROW_BLOCKS) + head_program
        m_i = tl.load(workspace.ml + slot * (2 * BLOCK_M) + r, mask=inside, other=float("-inf"))
        l_i = tl.load(workspace.ml + slot * (2 * BLOCK_M) + BLOCK_M + r, mask=inside, other=0.0)
        part = (slot * (BLOCK_M * BLOCK_D) + r * BLOCK_D)[:, None] + d[None, :]
        acc_i = tl.load(workspace.acc + part, mask=inside[:, None], other=0.0)  # [BLOCK_S, BLOCK_D]
        acc, m, l = merge_step(acc, m, l, acc_i, m_i, l_i)
    one = tl.arange(0, 1)
    heads = kv_head * GQA_RATIO + row % GQA_RATIO + one
    tokens = (seq * Q_LEN + row // GQA_RATIO + one).to(tl.int64)
    scale = tl.full([1], 1.0, tl.float32) * out_scale
    scale = times_head_descale(scale, v_descale, seq, kv_head, V_DESCALE)
    write_rows(
        o_ptr, lse_ptr, sinks_ptr, acc, m, l, scale, heads, tokens, one == 0, d,
        stride_ot, stride_oh, stride_lse, HEAD_DIM, HAS_SINKS, WRITE_LSE,
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

"""Split-KV paged decode: one program attends one group of query heads to one split of one sequence.

Online softmax in base 2 (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), split over the keys
and merged by the last program to arrive (Flash-Decoding, Dao et al. 2023; arrival counting as in stream-K
reductions).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import widen, widen_pairs


class KVPointers(NamedTuple):
    """One of K or V: where element [page, token, head, dim] lies. Strides are in elements."""

    ptr: Any
    page: Any
    token: Any
    head: Any
    outer: Any  # vectorised layout: stride of the outer part of the split axis (dim for K, token for V)


class Descale(NamedTuple):
    """What stored numbers are multiplied by: one per (sequence, head), or one per (page, token, head)."""

    ptr: Any
    major: Any  # stride over sequences, or over pages
    token: Any
    head: Any


class Table(NamedTuple):
    """Page table. Ragged: `row` is indptr, `lens` last-page lengths. Block table: row stride, seq_lens."""

    page_ids: Any
    row: Any
    lens: Any


class Workspace(NamedTuple):
    """Partial results of splits, and how many of them have arrived."""

    acc: Any
    ml: Any
    arrived: Any


@triton.jit
def _seq_len(table, seq, mask, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr):
    if RAGGED:
        pages = tl.load(table.row + seq + 1, mask=mask, other=0) - tl.load(
            table.row + seq, mask=mask, other=0
        )
        last = tl.load(table.lens + seq, mask=mask, other=0)
        return tl.where(pages > 0, (pages - 1) * PAGE_SIZE + last, 0)
    else:
        return tl.load(table.lens + seq, mask=mask, other=0)


@triton.jit
def _first_key(kv_len, Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr):
    if WINDOW_LEFT < 0:
        return kv_len * 0
    else:
        return tl.maximum(kv_len - Q_LEN - WINDOW_LEFT, 0)


@triton.jit
def _tiles_of(kv_len, Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Key tiles a sequence needs, and the first of them."""
    first = _first_key(kv_len, Q_LEN, WINDOW_LEFT) // BLOCK_N
    return first, tl.cdiv(kv_len, BLOCK_N) - first


@triton.jit
def _split_counts(
    table, batch, num_units, tiles_per_split,
    Q_LEN: tl.constexpr, WINDOW_LEFT: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Splits of every sequence, [BLOCK_B]: an even share of all key tiles, computed by every program alike.

    Sequences are cut in splits of at most `size` tiles, and sum(ceil(t / size)) <= total / size + batch, so
    size = total / (num_units - batch) never needs more units than there are.
    """
    seqs = tl.arange(0, BLOCK_B)
    lens = _seq_len(table, seqs, seqs < batch, PAGE_SIZE, RAGGED)
    _, tiles = _tiles_of(lens, Q_LEN, WINDOW_LEFT, BLOCK_N)
    # A select, not an if: the compiler's alignment analysis gives up on what follows a branch here, and loads
    # turn bytewise.
    even_share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), tl.maximum(num_units - batch, 1)), 1)
    size = tl.where(tiles_per_split > 0, tiles_per_split, even_share)
    # A sequence with no keys still gets one unit, which writes its zeros.
    return tl.where(seqs < batch, tl.maximum(tl.cdiv(tiles, size), 1), 0)


@triton.jit
def _scale_rows_to_fp16(q):
    """Each row times the power of two that puts its largest element in [2**14, 2**15); the inverses."""
    q = q.to(tl.float32)
    exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 16), 253)
    down = ((127 + 14 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (q * down[:, None]).to(tl.float16), up


@triton.jit
def _kv_offsets(
    table, row_base, n, first, last, kv, head, d,
    PAGE_SIZE: tl.constexpr, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Offsets [n, d] of keys `n`; keys outside [first, last] take their addresses, which are used ones."""
    n = tl.maximum(tl.minimum(n, last), first)
    page = tl.load(table.page_ids + row_base + n // PAGE_SIZE)
    slot = n % PAGE_SIZE
    if WIDE:
        page = page.to(tl.int64)
    if VEC > 0 and VEC_ON_TOKENS:
        rows = page * kv.page + (slot // VEC) * kv.outer + slot % VEC
        cols = head * kv.head + d * VEC
    elif VEC > 0:
        rows = page * kv.page + slot * VEC
        cols = head * kv.head + (d // VEC) * kv.outer + d % VEC
    else:
        rows = page * kv.page + slot * kv.token
        cols = head * kv.head + d
    return rows[:, None] + cols[None, :], page, slot


@triton.jit
def _attended(n, query_pos, WINDOW_LEFT: tl.constexpr):
    """[M, N]: keys at or before the query and inside its window."""
    keep = n[None, :] <= query_pos[:, None]
    if WINDOW_LEFT >= 0:
        keep = keep & (n[None, :] >= query_pos[:, None] - WINDOW_LEFT)
    return keep


@triton.jit
def _confine_nan(p, v, v_odd, attended):
    """Moves NaNs of V into P of the rows that attend to them: 0 * NaN would reach every row of the tile."""
    # [M, N], [N, D]; a NaN in any column makes the whole output row NaN.
    bad = (tl.max((v != v).to(tl.int32), 1) + tl.max((v_odd != v_odd).to(tl.int32), 1)) > 0
    p = tl.where(attended & bad[None, :], float("nan"), p)
    return p, tl.where(v != v, 0.0, v).to(v.dtype), tl.where(v_odd != v_odd, 0.0, v_odd).to(v.dtype)


@triton.jit
def _accumulate(acc, p, v, COMPUTE: tl.constexpr):
    """Acc + p @ v. Float16 keeps eleven bits of P, enough; with bfloat16 a second term restores them."""
    p_high = p.to(COMPUTE)
    if tl.bfloat16 == COMPUTE:
        acc = tl.dot((p - p_high.to(tl.float32)).to(COMPUTE), v, acc)
    return tl.dot(p_high, v, acc)


@triton.jit
def _soft_cap(s, cap):
    """Cap * tanh(s / cap), natural logits in and base-2 logits out."""
    # tanh by exp2, saturating: exp2 of a large negative number is 0 and of a large positive one never occurs.
    x = s / cap
    e = tl.exp2(-2.885390081777927 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t) * (cap * 1.4426950408889634)


@triton.jit
def _store_partial(workspace, slot, acc, m, l, row_mask, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Workspace layout: acc [slot, BLOCK_M, BLOCK_D], ml [slot, 2, BLOCK_M]; slot = (unit, head program)."""
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    part = slot * (BLOCK_M * BLOCK_D) + r[:, None] * BLOCK_D + d[None, :]
    tl.store(workspace.acc + part, acc, mask=row_mask[:, None])
    tl.store(workspace.ml + slot * (2 * BLOCK_M) + r, m)
    tl.store(workspace.ml + slot * (2 * BLOCK_M) + BLOCK_M + r, l)


@triton.jit
def _write_rows(o_ptr, lse_ptr, sinks_ptr, acc, m, l, out_scale, heads, tokens, row_mask, d,
                stride_ot, stride_oh, stride_lse,
                HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr):  # fmt: skip
    """O = acc / (l + sink) and the natural-log lse, which leaves the sink out."""
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    empty = m == float("-inf")
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=row_mask, other=float("-inf")).to(tl.float32) * LOG2E
        # The larger of the two is taken out of both, so that neither overflows.
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        kept = tl.where(empty, 0.0, tl.exp2(m - top))
        share = kept / (l * kept + tl.where(sink == float("-inf"), 0.0, tl.exp2(sink - top)))
        share = tl.where(empty | (sink == float("inf")), 0.0, share)
    else:
        share = tl.where(empty, 0.0, 1.0 / l)
    o = acc * (share * out_scale)[:, None]
    o_off = tokens[:, None] * stride_ot + heads[:, None] * stride_oh + d[None, :]
    tl.store(o_ptr + o_off, o.to(o_ptr.dtype.element_ty), mask=row_mask[:, None] & (d < HEAD_DIM)[None, :])
    if WRITE_LSE:
        lse = tl.where(empty, float("-inf"), m * LN2 + tl.log(l))
        tl.store(lse_ptr + tokens * stride_lse + heads, lse, mask=row_mask)


@triton.jit
def _paged_decode_kernel(
    q_ptr, o_ptr, lse_ptr, sinks_ptr,
    k, v, k_descale, v_descale, table, workspace,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lse,
    qk_scale, out_scale, soft_cap,
    batch, num_units, tiles_per_split,
    NUM_KV_HEADS: tl.constexpr, GQA_RATIO: tl.constexpr, Q_LEN: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    WIDE_ADDRESS: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_ROUTE: tl.constexpr, V_ROUTE: tl.constexpr,
    COMPUTE: tl.constexpr, SCALE_Q: tl.constexpr, SPLIT_Q: tl.constexpr,
    K_DESCALE: tl.constexpr, V_DESCALE: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr, MERGE_IN_LAUNCH: tl.constexpr, V_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Rows of a tile are (query token, head of the group); programs run fastest over KV heads.

    SPLIT: "none" (a unit is a sequence), "uniform" (num_units // batch splits each) or "even"
    (`_split_counts`).
    V_PAIRS: V is read as 16-bit pairs of columns, and even and odd columns are accumulated apart. K_DESCALE,
    V_DESCALE: "scalar" (folded into qk_scale and out_scale), "head" (per sequence and head) or "token" (per
    page, slot and head).
    """
    ROWS: tl.constexpr = Q_LEN * GQA_RATIO
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    head_program = tl.program_id(0)
    kv_head = head_program % NUM_KV_HEADS
    row_block = head_program // NUM_KV_HEADS
    unit = tl.program_id(1)
    if SPLIT == "even":
        splits = _split_counts(
            table, batch, num_units, tiles_per_split, Q_LEN, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_N, BLOCK_B
        )
        seqs = tl.arange(0, BLOCK_B)
        seq = tl.sum((tl.cumsum(splits, 0) <= unit).to(tl.int32), 0)
        if seq >= batch:
            return
        first_unit = tl.sum(tl.where(seqs < seq, splits, 0), 0)
        num_splits = tl.sum(tl.where(seqs == seq, splits, 0), 0)
    else:
        num_splits = num_units // batch
        seq = unit // num_splits
        first_unit = seq * num_splits
    kv_len = _seq_len(table, seq, seq < batch, PAGE_SIZE, RAGGED)
    if RAGGED:
        row_base = tl.load(table.row + seq)
    else:
        row_base = seq * table.row
    first_tile, num_tiles = _tiles_of(kv_len, Q_LEN, WINDOW_LEFT, BLOCK_N)
    split = unit - first_unit
    begin = first_tile + (split * num_tiles) // num_splits
    end = first_tile + ((split + 1) * num_tiles) // num_splits

    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < ROWS
    heads = kv_head * GQA_RATIO + rows % GQA_RATIO
    tokens = (seq * Q_LEN + rows // GQA_RATIO).to(tl.int64)
    query_pos = kv_len - Q_LEN + rows // GQA_RATIO
    d = tl.arange(0, BLOCK_D)
    q_off = tokens[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :]
    q = tl.load(
        q_ptr + q_off, mask=row_mask[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )  # [BLOCK_M, BLOCK_D]
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALE_Q:
        q, row_scale = _scale_rows_to_fp16(q)
    if SPLIT_Q:
        # float16 queries over a bfloat16 cache: two bfloat16 terms hold all eleven bits.
        q_low = (q.to(tl.float32) - q.to(COMPUTE).to(tl.float32)).to(COMPUTE)
    q = q.to(COMPUTE)
    logit_scale = row_scale * qk_scale
    o_scale = tl.full([BLOCK_M], 1.0, tl.float32) * out_scale
    if K_DESCALE == "head":
        logit_scale *= tl.load(k_descale.ptr + seq * k_descale.major + kv_head * k_descale.head)
    if V_DESCALE == "head":
        o_scale *= tl.load(v_descale.ptr + seq * v_descale.major + kv_head * v_descale.head)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    BLOCK_DV: tl.constexpr = BLOCK_D // 2 if V_PAIRS else BLOCK_D
    dv = tl.arange(0, BLOCK_DV)
    V_ZERO: tl.constexpr = 0 if V_PAIRS or V_ROUTE != "native" else 0.0
    K_ZERO: tl.constexpr = 0 if K_ROUTE != "native" else 0.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    first, last = _first_key(kv_len, Q_LEN, WINDOW_LEFT), tl.maximum(kv_len - 1, 0)
    for tile in range(begin, end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        n_end = (tile + 1) * BLOCK_N
        k_off, page, slot = _kv_offsets(
            table, row_base, n, first, last, k, kv_head, d, PAGE_SIZE, K_VEC, False, WIDE_ADDRESS
        )
        v_off, _, _ = _kv_offsets(
            table, row_base, n, first, last, v, kv_head, dv, PAGE_SIZE, V_VEC, True, WIDE_ADDRESS
        )
        if HEAD_DIM == BLOCK_D:
            k_tile = tl.load(k.ptr + k_off)  # [BLOCK_N, BLOCK_D]
            v_tile = tl.load(v.ptr + v_off)  # [BLOCK_N, BLOCK_DV]
        else:
            k_tile = tl.load(k.ptr + k_off, mask=(d < HEAD_DIM)[None, :], other=K_ZERO)
            v_tile = tl.load(
                v.ptr + v_off, mask=(dv * (BLOCK_D // BLOCK_DV) < HEAD_DIM)[None, :], other=V_ZERO
            )
        k_wide = tl.trans(widen(k_tile, K_FORMAT, K_ROUTE, COMPUTE))
        s = tl.dot(q, k_wide)  # [BLOCK_M, BLOCK_N]
        if SPLIT_Q:
            s = tl.dot(q_low, k_wide, s)
        s *= logit_scale[:, None]
        if K_DESCALE == "token":
            s *= tl.load(
                k_descale.ptr + page * k_descale.major + slot * k_descale.token + kv_head * k_descale.head
            )[None, :]
        if HAS_SOFT_CAP:
            s = _soft_cap(s, soft_cap)
        attended = _attended(n, query_pos, WINDOW_LEFT)
        s = tl.where(attended, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        correction = tl.exp2(m - m_safe)
        l = l * correction + tl.sum(p, 1)
        m = m_new
        if V_DESCALE == "token":
            p *= tl.load(
                v_descale.ptr + page * v_descale.major + slot * v_descale.token + kv_head * v_descale.head
            )[None, :]
        if V_PAIRS:
            v_wide, v_odd = widen_pairs(v_tile, V_FORMAT, V_ROUTE, COMPUTE)
        else:
            v_wide, v_odd = widen(v_tile, V_FORMAT, V_ROUTE, COMPUTE), tl.zeros([BLOCK_N, 1], COMPUTE)
        if Q_LEN > 1:
            # Where rows attend to different keys, a NaN in V must not reach the others through 0 * NaN.
            if (n_end > kv_len - Q_LEN) | (tile * BLOCK_N < first + Q_LEN):
                p, v_wide, v_odd = _confine_nan(p, v_wide, v_odd, attended)
        acc = _accumulate(acc * correction[:, None], p, v_wide, COMPUTE)
        if V_PAIRS:
            acc_odd = _accumulate(acc_odd * correction[:, None], p, v_odd, COMPUTE)

    if V_PAIRS:
        acc = tl.interleave(acc, acc_odd)

    if SPLIT != "none":
        if num_splits > 1:
            slot0 = unit.to(tl.int64) * (NUM_KV_HEADS * ROW_BLOCKS) + head_program
            r = tl.arange(0, BLOCK_M)
            _store_partial(workspace, slot0, acc, m, l, row_mask, BLOCK_M, BLOCK_D)
            if not MERGE_IN_LAUNCH:
                return
            # Every thread's stores are done before the one thread that counts announces them.
            tl.debug_barrier()
            counter = workspace.arrived + seq * (NUM_KV_HEADS * ROW_BLOCKS) + head_program
            if tl.atomic_add(counter, 1, sem="acq_rel") != num_splits - 1:
                return
            tl.store(counter, 0)  # the next launch finds it as this one did
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for i in range(num_splits):
                slot0 = (first_unit + i).to(tl.int64) * (NUM_KV_HEADS * ROW_BLOCKS) + head_program
                m = tl.maximum(m, tl.load(workspace.ml + slot0 * (2 * BLOCK_M) + r, cache_modifier=".cg"))
            m_safe = tl.where(m == float("-inf"), 0.0, m)
            l = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            # With the maximum known, the terms are independent and their loads overlap.
            for i in tl.range(0, num_splits, loop_unroll_factor=4):
                slot0 = (first_unit + i).to(tl.int64) * (NUM_KV_HEADS * ROW_BLOCKS) + head_program
                m_i = tl.load(workspace.ml + slot0 * (2 * BLOCK_M) + r, cache_modifier=".cg")
                l_i = tl.load(workspace.ml + slot0 * (2 * BLOCK_M) + BLOCK_M + r, cache_modifier=".cg")
                part = slot0 * (BLOCK_M * BLOCK_D) + r[:, None] * BLOCK_D + d[None, :]
                acc_i = tl.load(workspace.acc + part, mask=row_mask[:, None], other=0.0, cache_modifier=".cg")
                weight = tl.exp2(m_i - m_safe)
                l += l_i * weight
                acc += acc_i * weight[:, None]
    _write_rows(
        o_ptr, lse_ptr, sinks_ptr, acc, m, l, o_scale, heads, tokens, row_mask, d,
        stride_ot, stride_oh, stride_lse, HEAD_DIM, HAS_SINKS, WRITE_LSE,
    )  # fmt: skip


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
        splits = _split_counts(
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
        m_new = tl.maximum(m, tl.max(m_i, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(m_i - m_safe)
        ours = tl.exp2(m - m_safe)
        l = l * ours + tl.sum(l_i * weight, 0)
        acc = acc * ours[:, None] + tl.sum(acc_i * weight[:, None], 0)[None, :]
        m = m_new
    one = tl.arange(0, 1)
    heads = kv_head * GQA_RATIO + row % GQA_RATIO + one
    tokens = (seq * Q_LEN + row // GQA_RATIO + one).to(tl.int64)
    scale = tl.full([1], 1.0, tl.float32) * out_scale
    if V_DESCALE == "head":
        scale *= tl.load(v_descale.ptr + seq * v_descale.major + kv_head * v_descale.head)
    _write_rows(
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

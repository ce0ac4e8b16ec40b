"""Geometry of a prefill tile: which rows it holds, which keys they see, in which order tiles run.

Rows are (query token, head of the group) pairs of one sequence and one KV head, so that a key tile is read
and widened once for all heads of a group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.tiles import sequence_length, store_partial
from narrowkv.quant.device import settle_stores
from narrowkv.quant.softmax import softmax_step as unscaled_step


class Queries(NamedTuple):
    """Q `[tokens, heads, head_dim]` and where each sequence's rows begin."""

    ptr: Any
    token: Any
    head: Any
    starts: Any  # cu_seqlens_q
    num_tokens: Any
    descale: Any  # one float32, or None


class Outputs(NamedTuple):
    """O `[tokens, heads, head_dim]`, lse `[tokens, heads]` or None, sinks `[heads]` or None."""

    ptr: Any
    token: Any
    head: Any
    lse: Any
    lse_token: Any
    sinks: Any


class Tile(NamedTuple):
    """A tile of packed rows: its sequence (-1: none) and number there, and what the sequence is."""

    seq: Any
    number: Any
    q_start: Any
    q_len: Any
    kv_len: Any  # keys up to the last one, those before the first included
    base: Any  # the sequence's first row in the scratch
    padding: Any  # rows of that part which are no keys: its first ones, or those between old and new keys


@triton.jit
def query_range(q, seq, mask):
    """First token and number of query tokens of sequences; nothing past the tensor whatever the metadata."""
    begin = tl.load(q.starts + seq, mask=mask, other=0)
    end = tl.load(q.starts + seq + 1, mask=mask, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), q.num_tokens)
    return begin, tl.maximum(tl.minimum(end, q.num_tokens) - begin, 0)


@triton.jit
def uniform(x, NVIDIA: tl.constexpr):
    """A number that every lane has, made known to be so: the compiler sees a reduction as lanes' own values.

    What branches and addresses come of it stay in scalar registers then (of 587 instructions of a staged
    append's loop 66 go).
    """
    if NVIDIA:
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def uniform_scale(x):
    """The same for a number by which a warp multiplies: a scalar register is read beside all others.

    A scale in an ordinary one cost a pipelined append 58 clocks a tile of 64 x 128.
    """
    return uniform(x.to(tl.int32, bitcast=True), True).to(tl.float32, bitcast=True)


@triton.jit
def begin_next_launch():
    """Lets the launch behind this one begin, as soon as all programs of this one have come here."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_launch_ahead():
    """Waits until the launch ahead has ended, and all that it leaves is there to be read."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tile_of(q, batch, index, GQA_RATIO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr,
            NVIDIA: tl.constexpr):  # fmt: skip
    """Sequence and tile that program `index` takes, last tiles first (they are longest); seq -1: none."""
    seqs = tl.arange(0, BLOCK_B)
    _, q_len = query_range(q, seqs, seqs < batch)
    tiles = tl.cdiv(q_len * GQA_RATIO, BLOCK_M)
    index = tl.sum(tiles, 0) - 1 - index
    seq = tl.sum((tl.cumsum(tiles, 0) <= index).to(tl.int32), 0)
    tile = index - tl.sum(tl.where(seqs < seq, tiles, 0), 0)
    return uniform(tl.where(index >= 0, seq, -1), NVIDIA), uniform(tile, NVIDIA)


@triton.jit
def scheduled_tile(schedule, index):
    """The tile that the schedule `[tiles, 8]` gives to program `index`; its fields come in one access."""
    at = schedule + index * 8
    return Tile(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6),
    )  # fmt: skip


@triton.jit
def schedule_tiles(
    q, schedule, padding, kv_len, ends, batch, num_tiles, block,
    GQA_RATIO: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Places BLOCK_I tiles in the order of falling work, over all sequences alike.

    Keys of a sequence lie in the first kv_len rows of its part of the scratch, but for `padding` of them. It
    ends after `ends` blocks of BLOCK_N rows, [BLOCK_B] all three.

    A tile's work is its last row's number of keys, linear in the tile's number within a sequence, so how many
    tiles of each sequence come before it has a closed form and nothing is sorted.
    """
    seqs = tl.arange(0, BLOCK_B)
    inside = seqs < batch
    q_start, q_len = query_range(q, seqs, inside)
    tiles = tl.cdiv(q_len * GQA_RATIO, BLOCK_M)
    index = block * BLOCK_I + tl.arange(0, BLOCK_I)
    seq = tl.sum((tl.cumsum(tiles, 0)[None, :] <= index[:, None]).to(tl.int32), 1)  # [BLOCK_I]
    own = seqs[None, :] == seq[:, None]  # [BLOCK_I, BLOCK_B]
    earlier = seqs[None, :] < seq[:, None]
    tile = index - tl.sum(tl.where(earlier, tiles[None, :], 0), 1)
    if CAUSAL:
        base = (kv_len - q_len) * GQA_RATIO
        work = tl.sum(tl.where(own, base[None, :], 0), 1) + (tile + 1) * BLOCK_M
        # Tile t of a sequence has work base + (t + 1) * BLOCK_M: those with more than `work`, and ties.
        ahead = work[:, None] - base[None, :]
        floor = tl.where(ahead >= 0, ahead // BLOCK_M, -1)
        before = tiles[None, :] - tl.minimum(tl.maximum(floor, 0), tiles[None, :])
        tie = (ahead > 0) & (ahead % BLOCK_M == 0) & (floor <= tiles[None, :]) & earlier
        before += tie.to(tl.int32)
    else:
        work = tl.sum(tl.where(own, kv_len[None, :], 0), 1)
        more = (kv_len[None, :] > work[:, None]) | ((kv_len[None, :] == work[:, None]) & earlier)
        before = tl.where(more, tiles[None, :], 0) + tl.where(own, tile[:, None], 0)
    rank = tl.sum(tl.where(inside[None, :], before, 0), 1)
    used = index < tl.sum(tiles, 0)
    # Places past the last tile hold none.
    at = schedule + tl.where(used, rank, index) * 8
    kept = index < num_tiles
    tl.store(at, tl.where(used, seq, -1), mask=kept)
    tl.store(at + 1, tile, mask=kept)
    tl.store(at + 2, tl.sum(tl.where(own, q_start[None, :], 0), 1), mask=kept)
    tl.store(at + 3, tl.sum(tl.where(own, q_len[None, :], 0), 1), mask=kept)
    tl.store(at + 4, tl.sum(tl.where(own, kv_len[None, :], 0), 1), mask=kept)
    begin = ends - tl.cdiv(tl.maximum(kv_len, 0), BLOCK_N)
    tl.store(at + 5, tl.sum(tl.where(own, begin[None, :], 0), 1) * BLOCK_N, mask=kept)
    tl.store(at + 6, tl.sum(tl.where(own, padding[None, :], 0), 1), mask=kept)


@triton.jit
def key_blocks(table, batch, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_B: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """Blocks of BLOCK_N keys of each sequence and their running total, [BLOCK_B]."""
    seqs = tl.arange(0, BLOCK_B)
    lens = sequence_length(table, seqs, seqs < batch, PAGE_SIZE, RAGGED)
    blocks = tl.cdiv(tl.maximum(lens, 0), BLOCK_N)
    return blocks, tl.cumsum(blocks, 0)


@triton.jit
def place_of(block, blocks, ends, BLOCK_B: tl.constexpr):
    """The sequence that a block belongs to, and its number there; `blocks` of each and `ends`, [BLOCK_B]."""
    seq = tl.sum((ends <= block).to(tl.int32), 0)
    return seq, block - tl.sum(tl.where(tl.arange(0, BLOCK_B) < seq, blocks, 0), 0)


@triton.jit
def rows_of(q_start, q_len, number, kv_head, GQA_RATIO: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows of tile `number` of a sequence: token (int64), head, mask and index in the sequence [BLOCK_M]."""
    rows = number * BLOCK_M + tl.arange(0, BLOCK_M)
    within = rows // GQA_RATIO
    heads = kv_head * GQA_RATIO + rows % GQA_RATIO
    return (q_start + within).to(tl.int64), heads, rows < q_len * GQA_RATIO, within


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
def share_of(begin, end, full, full_end, split, num_splits):
    """The part of a key range that one split takes."""
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


@triton.jit
def softmax_step(s, m, l, scale, FOLDED: tl.constexpr):
    """One step of the online softmax: P [M, N], what is left of the sums so far, the new m and l.

    FOLDED: `s` is short of the positive `scale` [M], which a multiply-add applies together with the maximum.
    """
    if FOLDED:
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale[:, None] - m_safe[:, None])
        correction = tl.exp2(m - m_safe)
        l = l * correction + tl.sum(p, 1)
    else:
        p, m_new, l, correction = unscaled_step(s, m, l)
    return p, correction, m_new, l


@triton.jit
def weigh_values(p, correction, factor, unit):
    """P times each key's factor, in units of the largest so far, so that it stays in float16's range."""
    numbers = tl.where(factor == factor, factor, 1.2e-38)
    larger = tl.maximum(tl.maximum(unit, tl.max(numbers, 0)), 1.2e-38)
    return p * (factor / larger)[None, :], correction * (unit / larger), larger


@triton.jit
def merge_splits(workspace, acc, m, l, unit, split, num_splits, stride, row_mask,
                 SETTLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Leaves a split's partial result; for the last split to arrive, returns True and all of them merged.

    Slots of the splits are `unit + i * stride`; `unit` also numbers the tile's arrival counter. SETTLE: see
    `settle_stores`.
    """
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    store_partial(workspace, (unit + split * stride).to(tl.int64), acc, m, l, row_mask, BLOCK_M, BLOCK_D)
    # Every thread's stores are done before the one thread that counts announces them.
    unit = settle_stores(unit, SETTLE)
    tl.debug_barrier()
    last = tl.atomic_add(workspace.arrived + unit, 1, sem="acq_rel") == num_splits - 1
    if last:
        tl.store(workspace.arrived + unit, 0)  # the next launch finds it as this one did
        m = tl.zeros_like(m) + float("-inf")
        for i in range(num_splits):
            slot = (unit + i * stride).to(tl.int64)
            m = tl.maximum(m, tl.load(workspace.ml + slot * (2 * BLOCK_M) + r, cache_modifier=".cg"))
        m_safe = tl.where(m == float("-inf"), 0.0, m)
        l = tl.zeros_like(l)
        acc = tl.zeros_like(acc)
        for i in range(num_splits):
            slot = (unit + i * stride).to(tl.int64)
            weight = tl.exp2(tl.load(workspace.ml + slot * (2 * BLOCK_M) + r, cache_modifier=".cg") - m_safe)
            l += tl.load(workspace.ml + slot * (2 * BLOCK_M) + BLOCK_M + r, cache_modifier=".cg") * weight
            part = slot * (BLOCK_M * BLOCK_D) + r[:, None] * BLOCK_D + d[None, :]
            acc_i = tl.load(workspace.acc + part, mask=row_mask[:, None], other=0.0, cache_modifier=".cg")
            acc += acc_i * weight[:, None]
    return last, acc, m, l

"""Geometry of a prefill tile: which rows it holds, which keys they see, in which order tiles run.

Rows are (query token, head of the group) pairs of one sequence and one KV head, so that a key tile is read
and widened once for all heads of a group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.paged_cache.kernels.pages import sequence_length
from narrowkv.quant.device import settle_stores
from narrowkv.runtime.attention.masks import SEQUENCES, query_ranges
from narrowkv.runtime.attention.results import store_partial
from narrowkv.runtime.attention.softmax import softmax_step as unscaled_step

# Numbers that a server changes from call to call: kernels are not compiled anew for their values. Within a
# tuple they would be, so kernels take them by themselves and put the tuples together.
RUNTIME_SIZES = [
    "batch", "num_tokens", "max_q_len", "block_m", "table_row", "num_ids", "max_pages", "max_keys",
    "key_blocks", "num_tiles", "num_groups", "num_blocks", "num_splits",
]  # fmt: skip


class Queries(NamedTuple):
    """Q `[tokens, heads, head_dim]` and where each sequence's rows begin."""

    ptr: Any
    token: Any
    head: Any
    starts: Any  # cu_seqlens_q
    num_tokens: Any
    max_len: Any  # query tokens of a sequence beyond this number are left out
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
    q_len: Any  # query tokens that are served
    kv_len: Any  # rows of keys up to the last one, padding included
    base: Any  # the sequence's first row in the scratch
    padding: Any  # rows of that part which are no keys: its first ones, or those between old and new keys
    before: Any  # the position of the sequence's first query token among its keys


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
def tile_of(q, batch, index, GQA_RATIO: tl.constexpr, BLOCK_M: tl.constexpr, NVIDIA: tl.constexpr):
    """The tile of program `index`: its sequence (-1: none), its number there, the sequence's query range.

    A sequence's last tiles come first: they see the most keys.
    """
    seq = index * 0 - 1
    number, q_start, q_len = index * 0, index * 0, index * 0
    before, claimed = index * 0, index * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        start, length, claimed = query_ranges(q, seqs, batch, claimed)
        tiles = tl.cdiv(tl.minimum(length, q.max_len) * GQA_RATIO, BLOCK_M)
        ends = before + tl.cumsum(tiles, 0)
        own = (ends > index) & (ends - tiles <= index)
        seq = tl.maximum(seq, tl.max(tl.where(own, seqs, -1), 0))
        number += tl.sum(tl.where(own, ends - 1 - index, 0), 0)
        q_start += tl.sum(tl.where(own, start, 0), 0)
        q_len += tl.sum(tl.where(own, length, 0), 0)
        before = tl.max(ends, 0)
    return uniform(seq, NVIDIA), uniform(number, NVIDIA), uniform(q_start, NVIDIA), uniform(q_len, NVIDIA)


@triton.jit
def scheduled_tile(schedule, index):
    """The tile that the schedule `[tiles, 8]` gives to program `index`; its fields come in one access."""
    at = schedule + index * 8
    return Tile(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7),
    )  # fmt: skip


@triton.jit
def schedule_tiles(
    q, table, scratch, batch, num_tiles, block, block_m,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, APPENDS: tl.constexpr,
    GQA_RATIO: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Places BLOCK_I tiles in the order of falling work, over all sequences alike.

    A tile's work is its last row's number of keys, linear in the tile's number within a sequence, so how many
    tiles of each sequence come before it has a closed form and nothing is sorted.
    """
    limit = longest_held(table, scratch, batch, PAGE_SIZE, RAGGED, BLOCK_N)
    index = block * BLOCK_I + tl.arange(0, BLOCK_I)
    zero = index * 0
    seq, tile, q_start, served = zero - 1, zero, zero, zero
    kv_len, base, padding, position = zero, zero, zero, zero
    tiles_before, blocks_before, claimed = batch * 0, batch * 0, batch * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        start, rows, keys, pad, before, blocks, claimed = sequences_of(
            q, table, scratch, seqs, batch, claimed, limit, PAGE_SIZE, RAGGED, APPENDS, BLOCK_N
        )
        tiles = tl.cdiv(rows * GQA_RATIO, block_m)
        ends = tiles_before + tl.cumsum(tiles, 0)
        begin = (blocks_before + tl.cumsum(blocks, 0) - blocks) * BLOCK_N
        number = index[:, None] - (ends - tiles)[None, :]
        own = (number >= 0) & (number < tiles[None, :])  # [BLOCK_I, SEQUENCES]
        seq = tl.maximum(seq, tl.max(tl.where(own, seqs[None, :], -1), 1))
        tile += tl.sum(tl.where(own, number, 0), 1)
        q_start += tl.sum(tl.where(own, start[None, :], 0), 1)
        served += tl.sum(tl.where(own, rows[None, :], 0), 1)
        kv_len += tl.sum(tl.where(own, keys[None, :], 0), 1)
        base += tl.sum(tl.where(own, begin[None, :], 0), 1)
        padding += tl.sum(tl.where(own, pad[None, :], 0), 1)
        position += tl.sum(tl.where(own, before[None, :], 0), 1)
        tiles_before = tl.max(ends, 0)
        blocks_before += tl.sum(blocks, 0)
    work = position * GQA_RATIO + (tile + 1) * block_m if CAUSAL else kv_len
    rank = zero
    claimed = batch * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        start, rows, keys, pad, before, blocks, claimed = sequences_of(
            q, table, scratch, seqs, batch, claimed, limit, PAGE_SIZE, RAGGED, APPENDS, BLOCK_N
        )
        tiles = tl.cdiv(rows * GQA_RATIO, block_m)[None, :]
        earlier = seqs[None, :] < seq[:, None]
        if CAUSAL:
            # Tile t of a sequence has work before * GQA_RATIO + (t + 1) * block_m: those with more, and ties.
            ahead = work[:, None] - (before * GQA_RATIO)[None, :]
            floor = tl.where(ahead >= 0, ahead // block_m, -1)
            more = tiles - tl.minimum(tl.maximum(floor, 0), tiles)
            tie = (ahead > 0) & (ahead % block_m == 0) & (floor <= tiles) & earlier
            rank += tl.sum(more + tie.to(tl.int32), 1)
        else:
            more = (keys[None, :] > work[:, None]) | ((keys[None, :] == work[:, None]) & earlier)
            rank += tl.sum(tl.where(more, tiles, 0), 1)
    if not CAUSAL:
        rank += tile
    # Places past the last tile hold none.
    place = tl.where(seq >= 0, rank, index)
    at = scratch.schedule + place * 8
    kept = place < num_tiles
    tl.store(at, seq, mask=kept)
    tl.store(at + 1, tile, mask=kept)
    tl.store(at + 2, q_start, mask=kept)
    tl.store(at + 3, served, mask=kept)
    tl.store(at + 4, kv_len, mask=kept)
    tl.store(at + 5, base, mask=kept)
    tl.store(at + 6, padding, mask=kept)
    tl.store(at + 7, position, mask=kept)


@triton.jit
def sequences_of(
    q, table, scratch, seqs, batch, claimed, limit,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, APPENDS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a schedule says of sequences, [N] each, and `claimed` for those that follow.

    The first query token, query tokens that are served, rows of keys, those of them that are no keys, the
    position of the first query token, and blocks of scratch.
    """
    start, length, claimed = query_ranges(q, seqs, batch, claimed)
    rows = tl.minimum(length, q.max_len)
    held, lens = held_keys(table, scratch, seqs, seqs < batch, limit, PAGE_SIZE, RAGGED, BLOCK_N)
    if APPENDS:
        # A sequence without new tokens attends to nothing.
        held = tl.where(rows > 0, held, 0)
        before = tl.cdiv(held, BLOCK_N) * BLOCK_N
        blocks = tl.cdiv(held, BLOCK_N) + tl.cdiv(rows, BLOCK_N)
        return start, rows, before + rows, before - held, before, blocks, claimed
    else:
        return start, rows, held, held * 0, lens - length, tl.cdiv(held, BLOCK_N), claimed


@triton.jit
def held_keys(
    table, scratch, seqs, mask, limit, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """How many keys of each sequence the scratch holds, and how many there are.

    `limit`: see `longest_held`.
    """
    lens = sequence_length(table, seqs, mask, PAGE_SIZE, RAGGED)
    held = tl.minimum(lens, scratch.max_keys)
    return tl.where(tl.cdiv(held, BLOCK_N) <= limit, held, 0), lens


@triton.jit
def longest_held(
    table, scratch, batch, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The most blocks of keys that a sequence may have to be held in the scratch.

    Where a plan's bound on all keys together is too low, the longest sequences are left out.
    """
    most = tl.cdiv(scratch.max_keys, BLOCK_N)
    low = most * 0
    if batch * most > scratch.key_blocks:
        high, probe = most + 1, most
        while low < high - 1:
            total = most * 0
            for first in range(0, batch, SEQUENCES):
                seqs = first + tl.arange(0, SEQUENCES)
                held, _ = held_keys(table, scratch, seqs, seqs < batch, probe, PAGE_SIZE, RAGGED, BLOCK_N)
                total += tl.sum(tl.cdiv(held, BLOCK_N), 0)
            fits = total <= scratch.key_blocks
            low, high = tl.where(fits, probe, low), tl.where(fits, high, probe)
            probe = (low + high) // 2
    else:
        low = most
    return low


@triton.jit
def find_block(
    q, table, scratch, batch, block, limit, OLD: tl.constexpr, NEW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Where block `block` of all sequences' keys lies: those in the cache (OLD), then new ones (NEW).

    Returns its sequence (-1: none), its number there, the sequence's keys that the scratch holds, its first
    query token and how many of these are served.
    """
    seq = block * 0 - 1
    number, old_len, q_start, q_len = block * 0, block * 0, block * 0, block * 0
    blocks_before, claimed = block * 0, block * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        blocks = seqs * 0
        if NEW:
            start, length, claimed = query_ranges(q, seqs, batch, claimed)
            length = tl.minimum(length, q.max_len)
            blocks += tl.cdiv(length, BLOCK_N)
        if OLD:
            held, _ = held_keys(table, scratch, seqs, seqs < batch, limit, PAGE_SIZE, RAGGED, BLOCK_N)
            if NEW:
                held = tl.where(length > 0, held, 0)
            blocks += tl.cdiv(held, BLOCK_N)
        ends = blocks_before + tl.cumsum(blocks, 0)
        own = (ends > block) & (ends - blocks <= block)
        seq = tl.maximum(seq, tl.max(tl.where(own, seqs, -1), 0))
        number += tl.sum(tl.where(own, block - (ends - blocks), 0), 0)
        if OLD:
            old_len += tl.sum(tl.where(own, held, 0), 0)
        if NEW:
            q_start += tl.sum(tl.where(own, start, 0), 0)
            q_len += tl.sum(tl.where(own, length, 0), 0)
        blocks_before = tl.max(ends, 0)
    seq, number = uniform(seq, NVIDIA), uniform(number, NVIDIA)
    if OLD:
        old_len = uniform(old_len, NVIDIA)
    if NEW:
        q_start, q_len = uniform(q_start, NVIDIA), uniform(q_len, NVIDIA)
    return seq, number, old_len, q_start, q_len


@triton.jit
def rows_of(q_start, q_len, number, kv_head, GQA_RATIO: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows of tile `number` of a sequence: token (int64), head, mask and index in the sequence [BLOCK_M]."""
    rows = number * BLOCK_M + tl.arange(0, BLOCK_M)
    within = rows // GQA_RATIO
    heads = kv_head * GQA_RATIO + rows % GQA_RATIO
    return (q_start + within).to(tl.int64), heads, rows < q_len * GQA_RATIO, within


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

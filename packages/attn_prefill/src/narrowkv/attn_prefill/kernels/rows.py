"""Geometry of a prefill tile: which rows it holds, which keys they see, in which order tiles run.

Rows are (query token, head of the group) pairs of one sequence and one KV head, so that a key tile is read
and widened once for all heads of a group.
"""

import triton
import triton.language as tl

from narrowkv.attn_prefill.kernels.arguments import Queries, Tile
from narrowkv.paged_cache.kernels.pages import sequence_length
from narrowkv.paged_cache.kernels.queries import as_fp8, scale_to_fp16, split_query
from narrowkv.runtime.attention.masks import SEQUENCES, query_ranges
from narrowkv.runtime.attention.softmax import SoftCap

# Numbers that a server changes from call to call: kernels are not compiled again for their values. Within a
# tuple they would be, so kernels take them as arguments of their own and put the tuples together.
RUNTIME_SIZES = [
    "batch", "num_tokens", "max_q_len", "block_m", "table_row", "num_ids", "max_pages", "max_keys",
    "key_blocks", "num_tiles", "num_groups", "num_blocks", "num_splits", "least_len", "most_len",
]  # fmt: skip


@triton.jit
def sized_queries(q, num_tokens, max_q_len, least_len, most_len):
    """`Queries` with the sizes that serving changes, which kernels take as arguments of their own."""
    return Queries(*q[0:4], num_tokens, max_q_len, q.descale, least_len, most_len, q.shift)


@triton.jit
def in_scalar_register(x, NVIDIA: tl.constexpr):
    """The int32 `x`, which all lanes of a warp hold, in a uniform register on NVIDIA.

    The compiler takes the result of a reduction for a value of each lane. Branches and addresses that depend
    on this one need no vector registers.
    """
    if NVIDIA:
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def float_in_scalar_register(x):
    """`in_scalar_register` of a float32, on NVIDIA.

    A scale in an ordinary register cost a pipelined append 58 clocks a tile of 64 x 128.
    """
    return in_scalar_register(x.to(tl.int32, bitcast=True), True).to(tl.float32, bitcast=True)


@triton.jit
def served_tokens(q, length):
    """How many of a sequence's `length` query tokens this launch serves; none if another launch does."""
    served = tl.minimum(length, q.max_len)
    return tl.where(served >= q.least_len, served, 0)


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
        tiles = tl.cdiv(served_tokens(q, length) * GQA_RATIO, BLOCK_M)
        ends = before + tl.cumsum(tiles, 0)
        own = (ends > index) & (ends - tiles <= index)
        seq = tl.maximum(seq, tl.max(tl.where(own, seqs, -1), 0))
        number += tl.sum(tl.where(own, ends - 1 - index, 0), 0)
        q_start += tl.sum(tl.where(own, start, 0), 0)
        q_len += tl.sum(tl.where(own, length, 0), 0)
        before = tl.max(ends, 0)
    return (
        in_scalar_register(seq, NVIDIA),
        in_scalar_register(number, NVIDIA),
        in_scalar_register(q_start, NVIDIA),
        in_scalar_register(q_len, NVIDIA),
    )


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
    limit, _ = held_blocks(q, table, scratch, batch, False, PAGE_SIZE, RAGGED, BLOCK_N)
    index = block * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    # Sums over sequences are taken after the loop: carried through it they would change lanes in every pass.
    zero = tl.zeros([BLOCK_I, SEQUENCES], tl.int32)
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
        number = index - (ends - tiles)[None, :]
        own = (number >= 0) & (number < tiles[None, :])  # [BLOCK_I, SEQUENCES]
        seq = tl.where(own, seqs[None, :], seq)
        tile += tl.where(own, number, 0)
        q_start += tl.where(own, start[None, :], 0)
        served += tl.where(own, rows[None, :], 0)
        kv_len += tl.where(own, keys[None, :], 0)
        base += tl.where(own, begin[None, :], 0)
        padding += tl.where(own, pad[None, :], 0)
        position += tl.where(own, before[None, :], 0)
        tiles_before = tl.max(ends, 0)
        blocks_before += tl.sum(blocks, 0)
    seq = tl.max(seq, 1, keep_dims=True)  # [BLOCK_I, 1]
    tile = tl.sum(tile, 1, keep_dims=True)
    kv_len = tl.sum(kv_len, 1, keep_dims=True)
    position = tl.sum(position, 1, keep_dims=True)
    work = position * GQA_RATIO + (tile + 1) * block_m if CAUSAL else kv_len
    rank = zero
    claimed = batch * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        start, rows, keys, pad, before, blocks, claimed = sequences_of(
            q, table, scratch, seqs, batch, claimed, limit, PAGE_SIZE, RAGGED, APPENDS, BLOCK_N
        )
        tiles = tl.cdiv(rows * GQA_RATIO, block_m)[None, :]
        earlier = seqs[None, :] < seq
        if CAUSAL:
            # Tile t of a sequence has work before * GQA_RATIO + (t + 1) * block_m: those with more, and ties.
            ahead = work - (before * GQA_RATIO)[None, :]
            floor = tl.where(ahead >= 0, ahead // block_m, -1)
            more = tiles - tl.minimum(tl.maximum(floor, 0), tiles)
            tie = (ahead > 0) & (ahead % block_m == 0) & (floor <= tiles) & earlier
            rank += more + tie.to(tl.int32)
        else:
            more = (keys[None, :] > work) | ((keys[None, :] == work) & earlier)
            rank += tl.where(more, tiles, 0)
    rank = tl.sum(rank, 1, keep_dims=True)
    if not CAUSAL:
        rank += tile
    # Places past the last tile hold none.
    place = tl.where(seq >= 0, rank, index)
    field = tl.arange(0, SEQUENCES)[None, :]
    entry = tl.where(field == 0, seq, tile)
    entry = tl.where(field == 2, tl.sum(q_start, 1, keep_dims=True), entry)
    entry = tl.where(field == 3, tl.sum(served, 1, keep_dims=True), entry)
    entry = tl.where(field == 4, kv_len, entry)
    entry = tl.where(field == 5, tl.sum(base, 1, keep_dims=True), entry)
    entry = tl.where(field == 6, tl.sum(padding, 1, keep_dims=True), entry)
    entry = tl.where(field == 7, position, entry)
    tl.store(scratch.schedule + place * 8 + field, entry, mask=(place < num_tiles) & (field < 8))


@triton.jit
def sequences_of(
    q, table, scratch, seqs, batch, claimed, limit,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, APPENDS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a schedule says of sequences, [N] each, and `claimed` for those that follow.

    The first query token, query tokens that are served, rows of keys, those of them that are no keys, the
    position of the first query token, and blocks of scratch.
    """
    held, lens = held_keys(table, scratch, seqs, seqs < batch, limit, PAGE_SIZE, RAGGED, BLOCK_N)
    start, length, claimed = query_ranges(q, seqs, batch, claimed)
    rows = served_tokens(q, length)
    # A sequence of another launch, or without query tokens, has no keys here.
    held = tl.where(rows > 0, held, 0)
    if APPENDS:
        before = tl.cdiv(held, BLOCK_N) * BLOCK_N
        blocks = tl.cdiv(held, BLOCK_N) + tl.cdiv(rows, BLOCK_N)
        # No key of a sequence whose old keys are not all held: see `sum_of_held_keys`.
        keys = tl.where((rows > 0) & (held < lens), 0, before + rows)
        return start, rows, keys, before - held, before, blocks, claimed
    else:
        return start, rows, held, held * 0, lens - length, tl.cdiv(held, BLOCK_N), claimed


@triton.jit
def held_keys(
    table, scratch, seqs, mask, limit, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """How many keys of each sequence the scratch holds, and how many there are.

    `limit`: see `held_blocks`.
    """
    lens = sequence_length(table, seqs, mask, PAGE_SIZE, RAGGED)
    held = tl.minimum(lens, scratch.max_keys)
    return tl.where(tl.cdiv(held, BLOCK_N) <= limit, held, 0), lens


@triton.jit
def held_blocks(
    q, table, scratch, batch, NEW: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The most blocks of keys that a sequence may have to be held in the scratch, and the blocks of all.

    If a plan's bound on all keys together is too low, the longest sequences are left out. NEW: blocks of
    new keys count too.
    """
    limit = tl.cdiv(scratch.max_keys, BLOCK_N)
    total, new = count_blocks(q, table, scratch, batch, limit, NEW, PAGE_SIZE, RAGGED, BLOCK_N)
    if total > scratch.key_blocks:
        high, probe = limit + 1, limit
        limit *= 0
        while limit < high - 1:
            blocks, _ = count_blocks(q, table, scratch, batch, probe, False, PAGE_SIZE, RAGGED, BLOCK_N)
            fits = blocks <= scratch.key_blocks
            total = tl.where(fits, blocks, total)
            limit, high = tl.where(fits, probe, limit), tl.where(fits, high, probe)
            probe = (limit + high) // 2
        # With a limit of zero no sequence is held.
        total = tl.where(limit > 0, total, 0)
    return limit, total + new


@triton.jit
def count_blocks(
    q, table, scratch, batch, limit, NEW: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Blocks of the cache's keys that are held with this limit, and with NEW blocks of new keys."""
    total, new, claimed = batch * 0, batch * 0, batch * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        held, _ = held_keys(table, scratch, seqs, seqs < batch, limit, PAGE_SIZE, RAGGED, BLOCK_N)
        _, length, claimed = query_ranges(q, seqs, batch, claimed)
        length = served_tokens(q, length)
        total += tl.sum(tl.where(length > 0, tl.cdiv(held, BLOCK_N), 0), 0)
        if NEW:
            new += tl.sum(tl.cdiv(length, BLOCK_N), 0)
    return total, new


@triton.jit
def find_block(
    q, table, scratch, batch, block, limit, OLD: tl.constexpr, NEW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Where block `block` of all sequences' keys lies: those in the cache (OLD), then new ones (NEW).

    Returns its sequence (-1: none), its number there, the sequence's keys that the scratch holds, its first
    query token and how many of these are served, and the blocks of all old keys that `limit` allows.
    """
    seq = block * 0 - 1
    number, old_len, q_start, q_len = block * 0, block * 0, block * 0, block * 0
    old_blocks = batch * 0
    blocks_before, claimed = block * 0, block * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        blocks = seqs * 0
        if OLD:
            held, _ = held_keys(table, scratch, seqs, seqs < batch, limit, PAGE_SIZE, RAGGED, BLOCK_N)
        start, length, claimed = query_ranges(q, seqs, batch, claimed)
        length = served_tokens(q, length)
        if NEW:
            blocks += tl.cdiv(length, BLOCK_N)
        if OLD:
            held = tl.where(length > 0, held, 0)
            old_blocks += tl.sum(tl.cdiv(held, BLOCK_N), 0)
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
    seq, number = in_scalar_register(seq, NVIDIA), in_scalar_register(number, NVIDIA)
    if OLD:
        old_len = in_scalar_register(old_len, NVIDIA)
    if NEW:
        q_start, q_len = in_scalar_register(q_start, NVIDIA), in_scalar_register(q_len, NVIDIA)
    return seq, number, old_len, q_start, q_len, old_blocks


@triton.jit
def find_held_block(
    q, table, scratch, batch, block, NEW: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """`find_block` within the limit of `held_blocks`, which is sought only if not all blocks fit."""
    limit = tl.cdiv(scratch.max_keys, BLOCK_N)
    seq, number, old_len, q_start, q_len, old_blocks = find_block(
        q, table, scratch, batch, block, limit, True, NEW, PAGE_SIZE, RAGGED, BLOCK_N, NVIDIA
    )
    if old_blocks > scratch.key_blocks:
        limit, _ = held_blocks(q, table, scratch, batch, NEW, PAGE_SIZE, RAGGED, BLOCK_N)
        seq, number, old_len, q_start, q_len, _ = find_block(
            q, table, scratch, batch, block, limit, True, NEW, PAGE_SIZE, RAGGED, BLOCK_N, NVIDIA
        )
    return seq, number, old_len, q_start, q_len


@triton.jit
def load_shift(shift, tokens, heads, row_mask, NUM_HEADS: tl.constexpr):
    """The natural logits [M] that are added to all logits of each row; see `Queries.shift`."""
    return tl.load(shift + tokens * NUM_HEADS + heads, mask=row_mask, other=0.0)


@triton.jit
def soft_cap_of(q, soft_cap, tokens, heads, row_mask, NUM_HEADS: tl.constexpr, CAPPED: tl.constexpr):
    """The cap of logits as `capped_logits` takes it, with the shifts of rows."""
    shift = None
    if q.shift is not None and CAPPED:
        shift = load_shift(q.shift, tokens, heads, row_mask, NUM_HEADS)
    return SoftCap(soft_cap, shift)


@triton.jit
def query_terms(parts, logit_scale, RULES: tl.constexpr, PARTS: tl.constexpr):
    """Q as the one or two terms that matrix units multiply, each in parts, and the scale of the scores."""
    if RULES.fp8 is not None:
        # Queries come from anywhere, so their bytes may be any.
        high = (as_fp8(parts[0], RULES.fp8, False),)
        low = high
    else:
        if RULES.scale_q:
            parts, row_scale = scale_to_fp16(parts, PARTS)
            logit_scale *= row_scale
        high, low = split_query(parts, RULES.compute, RULES.split_q, PARTS)
    return high, low, logit_scale


@triton.jit
def shifted_maximum(m, shift, tokens, heads, row_mask, NUM_HEADS: tl.constexpr, CAPPED: tl.constexpr):
    """The running maximum of rows, in base 2, after adding the shift; with CAPPED logits have it already."""
    if shift is not None and not CAPPED:
        m += load_shift(shift, tokens, heads, row_mask, NUM_HEADS) * 1.4426950408889634
    return m


@triton.jit
def sum_of_held_keys(l, tile, within, WINDOW_RIGHT: tl.constexpr):
    """The running sum of rows: NaN where a row sees keys that the scratch lacks beyond a plan's bounds.

    within: of each row the query token in its sequence.
    """
    last = tile.before + tile.q_len - 1
    if WINDOW_RIGHT >= 0:
        last = tl.minimum(tile.before + within + WINDOW_RIGHT, last)
    return tl.where(last >= tile.kv_len, float("nan"), l)


@triton.jit
def rows_of(q_start, q_len, number, kv_head, GQA_RATIO: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows of tile `number` of a sequence: token (int64), head, mask and index in the sequence [BLOCK_M]."""
    rows = number * BLOCK_M + tl.arange(0, BLOCK_M)
    within = rows // GQA_RATIO
    heads = kv_head * GQA_RATIO + rows % GQA_RATIO
    return (q_start + within).to(tl.int64), heads, rows < q_len * GQA_RATIO, within

"""Even shares of keys: sequences with few rows each, over caches of any lengths, by one launch.

A program attends one tile of rows to one split of its keys. A sequence has as many splits as its share of all
keys of the launch asks for, so a long sequence takes no longer than a short one. Every program finds its own
share from the lengths, which stay on the device. Splits are merged by the last program to arrive
(Flash-Decoding, Dao et al. 2023; arrival counting as in stream-K reductions).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.loop import Keys, State, attend_to_rows
from narrowkv.attn_prefill.kernels.rows import in_scalar_register
from narrowkv.paged_cache.kernels.pages import sequence_length
from narrowkv.paged_cache.kernels.queries import times_sign
from narrowkv.paged_cache.kernels.tiles import LEAST_FACTOR, zeros_in_parts
from narrowkv.quant.device import join_parts
from narrowkv.runtime.attention.masks import SEQUENCES, SeenKeys, query_ranges, visible_range
from narrowkv.runtime.attention.results import (
    merge_partial_results,
    merge_splits,
    splits_to_merge,
    store_partial_result,
)
from narrowkv.runtime.attention.softmax import multiply_values

# Splits of a tile at most where the last program to arrive reads the partial results of all of them.
_MOST_SPLITS = tl.constexpr(32)
# Key tiles of a split at least: with fewer a program spends most of its time on its start.
_LEAST_TILES = tl.constexpr(4)


class Share(NamedTuple):
    """What a program attends to.

    Attributes:
        seq, number, q_start, q_len: as in `Tile`; seq is -1 for a program without a share.
        split, num_splits: which of the tile's splits, and how many there are.
        first_item, step: the tile's first split is item `first_item`, the next one `step` items later.
    """

    seq: Any
    number: Any
    q_start: Any
    q_len: Any
    split: Any
    num_splits: Any
    first_item: Any
    step: Any


@triton.jit
def count_tiles(
    q, table, seqs, batch, claimed, APPENDS: tl.constexpr, GQA_RATIO: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SCANS: tl.constexpr,
):  # fmt: skip
    """First query token, query tokens, tiles of rows and key tiles of each sequence that this launch serves.

    Key tiles are those that the first row's window and the last row's own key span.
    """
    start, length, claimed = query_ranges(q, seqs, batch, claimed, SCANS)
    served = tl.minimum(length, q.max_len)
    served = tl.where((served >= q.least_len) & (served <= q.most_len), served, 0)
    keys = sequence_length(table, seqs, seqs < batch, PAGE_SIZE, RAGGED)
    low = keys * 0
    if WINDOW_LEFT >= 0:
        before = keys if APPENDS else keys - length
        low = tl.minimum(tl.maximum(before - WINDOW_LEFT, 0), keys) // BLOCK_N
    return start, length, tl.cdiv(served * GQA_RATIO, BLOCK_M), tl.cdiv(keys, BLOCK_N) - low, claimed


@triton.jit
def find_share(
    q, table, batch, item, slots, APPENDS: tl.constexpr, GQA_RATIO: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAPPED: tl.constexpr, NVIDIA: tl.constexpr, zeros=None,
):  # fmt: skip
    """The share of item `item` of all splits of all tiles of rows, a `Share`.

    Splits have at most `size` key tiles. All tiles of rows together have at most total / size splits, and one
    more each, so size = total / (items - tiles of rows) gives at most that many items: as many as run at
    once, the `slots`, or twice the tiles of rows if these are many. `most_work_items` bounds that number.

    CAPPED: a tile has no more splits than one program merges. zeros: of Gluon, `SEQUENCES` zeros in the
    layout of vectors; None in Triton.
    """
    SCANS: tl.constexpr = zeros is not None
    total, row_tiles, claimed = batch * 0, batch * 0, batch * 0
    for first in range(0, batch, SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        if SCANS:
            seqs += zeros
        _, _, tiles, keys, claimed = count_tiles(
            q, table, seqs, batch, claimed, APPENDS, GQA_RATIO, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_M,
            BLOCK_N, SCANS,
        )  # fmt: skip
        total += tl.sum(tiles * keys, 0)
        row_tiles += tl.sum(tiles, 0)
    most = tl.maximum(slots, row_tiles + tl.minimum(row_tiles, slots))
    size = tl.maximum(tl.cdiv(total, tl.maximum(most - row_tiles, 1)), _LEAST_TILES)
    seq = batch * 0 - 1
    q_start, q_len, within, own_tiles, num_splits = batch * 0, batch * 0, batch * 0, batch * 0, batch * 0
    items_before, claimed = batch * 0, batch * 0
    # Without tiles of rows nothing is left to find: the launch may have no sequence at all.
    for first in range(0, tl.where(row_tiles > 0, batch, 0), SEQUENCES):
        seqs = first + tl.arange(0, SEQUENCES)
        if SCANS:
            seqs += zeros
        start, length, tiles, keys, claimed = count_tiles(
            q, table, seqs, batch, claimed, APPENDS, GQA_RATIO, WINDOW_LEFT, PAGE_SIZE, RAGGED, BLOCK_M,
            BLOCK_N, SCANS,
        )  # fmt: skip
        splits = tl.maximum(tl.cdiv(keys, size), 1)
        if CAPPED:
            splits = tl.minimum(splits, _MOST_SPLITS)
        items = tiles * splits
        ends = items_before + tl.cumsum(items, 0)
        own = (ends > item) & (ends - items <= item)
        seq = tl.maximum(seq, tl.max(tl.where(own, seqs, -1), 0))
        q_start += tl.sum(tl.where(own, start, 0), 0)
        q_len += tl.sum(tl.where(own, length, 0), 0)
        within += tl.sum(tl.where(own, item - (ends - items), 0), 0)
        own_tiles += tl.sum(tl.where(own, tiles, 0), 0)
        num_splits += tl.sum(tl.where(own, splits, 0), 0)
        items_before = tl.max(ends, 0)
    # Through float32, exact below 2**24: Triton 3.8 fails to compile a division by the plain sum for AMD
    # (TritonGPUCoalesce ends without a message).
    own_tiles = own_tiles.to(tl.float32).to(tl.int32)
    seq, within = in_scalar_register(seq, NVIDIA), in_scalar_register(within, NVIDIA)
    q_start, q_len = in_scalar_register(q_start, NVIDIA), in_scalar_register(q_len, NVIDIA)
    step = tl.maximum(in_scalar_register(own_tiles, NVIDIA), 1)
    num_splits = in_scalar_register(num_splits, NVIDIA)
    # Tiles of rows of one split are neighbours, since they read the same keys.
    number, split = within % step, within // step
    return Share(seq, number, q_start, q_len, split, num_splits, item - within + number, step)


@triton.jit
def attend_to_share(
    q, q_low, logit_scale, soft_cap, k, v, k_descale, v_descale, table, read, query_pos,
    begin, end, full, full_end, num_splits,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`attend_to_pages` by the loop of decode, whose loads the compiler pipelines.

    Args:
        logit_scale: of the scores, one number.
        full, full_end: the key tiles that all rows see whole.
    """
    # The softmax of unmasked tiles takes the maximum before it scales, so the scale must be positive.
    q = times_sign(q, logit_scale, K.parts)
    q_low = times_sign(q_low, logit_scale, K.parts)
    logit_scale = tl.abs(logit_scale)
    state = State(
        zeros_in_parts(BLOCKS.m, BLOCKS.d, RULES.acc_parts),
        tl.full([BLOCKS.m], float("-inf"), tl.float32),
        tl.zeros([BLOCKS.m], tl.float32),
        logit_scale * 0.0 + LEAST_FACTOR,
    )
    keys = Keys(read.row_base, read.kv_head, read.first_key, read.last_key)
    low, high = visible_range(query_pos, 0, read.num_keys, False, RULES.window_left, RULES.window_right)
    seen = SeenKeys(low if RULES.window_left >= 0 else None, tl.minimum(high, read.num_keys - 1), None, 0)
    acc, m, l, largest = attend_to_rows(
        num_splits, begin, end, full, full_end, q, q_low, logit_scale, soft_cap, state, k, v, k_descale,
        v_descale, table, keys, seen, SIZES, K, V, RULES, BLOCKS, BLOCKS.m >= 64,
    )  # fmt: skip
    joined = join_parts(acc, RULES.acc_parts)
    if V.factors:
        joined, m, l = multiply_values(joined, m, l, largest)
    return joined, m, l


@triton.jit
def merge_shares(
    workspace, share, acc, m, l, kv_head, row_mask, NUM_KV_HEADS: tl.constexpr, SETTLE: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores the partial result of a share; for the last of a tile, returns True and all splits merged.

    A tile with one split has nothing to merge.
    """
    write = share.num_splits == 1
    if share.num_splits > 1:
        first_slot = share.first_item * NUM_KV_HEADS + kv_head
        step = share.step * NUM_KV_HEADS
        slot = (first_slot + share.split * step).to(tl.int64)
        store_partial_result(workspace, slot, acc, m, l, row_mask, BLOCK_M, BLOCK_D)
        size = splits_to_merge(
            workspace, acc, m, l, first_slot, step, share.split, share.num_splits, 1, row_mask, BLOCK_M,
            BLOCK_D, GROUPS, SETTLE,
        )  # fmt: skip
        write = size > 0
        if write:
            acc, m, l = merge_partial_results(
                workspace, acc, m, l, first_slot, size * step, tl.cdiv(share.num_splits, size), row_mask,
                BLOCK_M, BLOCK_D,
            )  # fmt: skip
    return write, acc, m, l


@triton.jit
def merge_programs(
    workspace, share, acc, m, l, kv_head, tile, split, num_splits, num_tiles, row_mask,
    SIZES: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Merges what the programs of a tile have found; True for the one that writes the result.

    Args:
        share: the program's `Share`, or None without `RULES.shares`.
        tile, num_tiles: without `RULES.shares` the tile's number among all heads' tiles, and how many there
            are.
    """
    write = True
    if RULES.shares:
        write, acc, m, l = merge_shares(
            workspace, share, acc, m, l, kv_head, row_mask, SIZES.num_kv_heads, RULES.settle,
            RULES.as_decode, BLOCKS.m, BLOCKS.d,
        )  # fmt: skip
    elif RULES.split:
        write, acc, m, l = merge_splits(
            workspace, acc, m, l, tile, split, num_splits, num_tiles, row_mask, RULES.settle, BLOCKS.m,
            BLOCKS.d,
        )  # fmt: skip
    return write, acc, m, l

"""The loop of decode over key tiles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.paged_cache.kernels.pages import (
    kv_offsets,
    load_group_scales,
    load_key_scale,
    load_page_ids,
    locate_keys,
    place_of,
    scale_as_number,
)
from narrowkv.paged_cache.kernels.tiles import attend_to_tile, computed_once, load_words, tile_scores
from narrowkv.runtime.attention.masks import seen_keys
from narrowkv.runtime.attention.softmax import capped_logits


class Keys(NamedTuple):
    """Where a program's keys lie.

    Attributes:
        row_base, kv_head: the sequence's first page id, see `first_id`, and the head.
        first_key, last_key: keys outside are not read.
    """

    row_base: Any
    kv_head: Any
    first_key: Any
    last_key: Any


class State(NamedTuple):
    """Sums of values in parts, running maximum, running sum, and the largest factor of a value."""

    acc: Any
    m: Any
    l: Any
    largest: Any


@triton.jit
def tile_after_gap(i, gap_at, gap):
    """The number of the i-th tile where `gap` tiles from `gap_at` on are left out."""
    return tl.where(i < gap_at, i, i + gap)


@triton.jit
def load_scales(
    k_descale, v_descale, page, slot, keys, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, NATIVE_QK: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """`load_key_scale` of K's keys and of V's; 1 where a side has one descale for all keys of a head."""
    K_GROUP: tl.constexpr = 16 if K.descale == "e8m0_16" or K.descale == "e4m3_16" else 32
    V_GROUP: tl.constexpr = 16 if V.descale == "e8m0_16" or V.descale == "e4m3_16" else 32
    k_scale = 1.0
    v_scale = 1.0
    if K.route == "cdna4" and K.descale != "e8m0" and K.descale != "e4m3":
        k_scale = load_group_scales(k_descale, page, slot, keys.kv_head, BLOCKS.dk // K_GROUP)
    elif K.descale != "scalar" and K.descale != "head":
        k_scale = load_key_scale(
            k_descale, page, slot, keys.kv_head, K.descale, NATIVE_QK, HEAD_DIM, BLOCKS.dk, K.aligned, STORED
        )
    if V.route == "cdna4" and V.descale != "e8m0" and V.descale != "e4m3":
        v_scale = load_group_scales(v_descale, page, slot, keys.kv_head, BLOCKS.d // V_GROUP)
    elif V.descale != "scalar" and V.descale != "head":
        v_scale = load_key_scale(
            v_descale, page, slot, keys.kv_head, V.descale, False, HEAD_DIM, BLOCKS.d, V.aligned, STORED
        )
    return k_scale, v_scale


@triton.jit
def load_tiles(
    page, slot, k, v, kv_head, dk, dv, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    SIZES: tl.constexpr, K_WORD: tl.constexpr,
):  # fmt: skip
    """Words dk of a tile of K, [BLOCK_N, BLOCK_DK / K_WORD], and dv of V, [BLOCK_N, BLOCK_D / V's parts]."""
    # Both offsets before both loads: the compiler spilled scalars on gfx942 otherwise (Triton 3.6).
    k_off = kv_offsets(page, slot, k, kv_head, dk, K.vec, False)
    v_off = kv_offsets(page, slot, v, kv_head, dv, V.vec, True)
    k_words = load_words(k, k_off, K_WORD, SIZES.head_dim, BLOCKS.dk)
    return k_words, load_words(v, v_off, V.parts, SIZES.v_head_dim, BLOCKS.d)


@triton.jit
def in_span(n, keys):
    """Whether keys `n` are among those from `keys.first_key` to `keys.last_key`."""
    return (n >= keys.first_key) & (n <= keys.last_key)


@triton.jit
def key_bias(n, keys):
    """0 for the keys from `keys.first_key` to `keys.last_key`, -inf for others."""
    return tl.where(in_span(n, keys), 0.0, float("-inf"))


@triton.jit
def load_first_tiles(
    begin, k, v, k_descale, v_descale, table, keys,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scales and words of tile `begin` and page ids of the next: a loop that loads tiles ahead begins so."""
    K_WORD: tl.constexpr = 2 if RULES.native else K.parts
    n = begin * BLOCKS.n + tl.arange(0, BLOCKS.n)
    page, slot = locate_keys(
        table, keys.row_base, n, keys.first_key, keys.last_key, SIZES.page_size, RULES.int64_offsets
    )
    # Before the words: loads return in order, and the loop waits for the ids first.
    page_ids = load_page_ids(
        table, keys.row_base, n + BLOCKS.n, keys.first_key, keys.last_key, SIZES.page_size
    )
    k_scale, v_scale = load_scales(
        k_descale, v_descale, page, slot, keys, K, V, BLOCKS, SIZES.head_dim, RULES.native, True
    )
    dk, dv = tl.arange(0, BLOCKS.dk // K_WORD), tl.arange(0, BLOCKS.d // V.parts)
    k_words, v_words = load_tiles(page, slot, k, v, keys.kv_head, dk, dv, K, V, BLOCKS, SIZES, K_WORD)
    return k_scale, v_scale, k_words, v_words, page_ids


@triton.jit
def attend_to_tiles(
    begin, end, gap_at, gap, q, q_low, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table, keys,
    rows, loaded,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
    MASK: tl.constexpr, SHARE: tl.constexpr = 1,
):  # fmt: skip
    """Attends to the key tiles [begin, end), counted without the `gap` tiles from `gap_at` on.

    Args:
        q, q_low: Q as one term or two, in parts.
        logit_scale: of the scores; positive with MASK "none".
        state: `State` before the first tile.
        k, v, k_descale, v_descale, table, keys: pointers and `Table` and `Keys`.
        rows: `SeenKeys` of the rows with MASK "rows", else None.
        loaded: of `load_first_tiles`, or None.
        MASK: which keys of a tile rows attend to: "none", all; "keys", those from `keys.first_key` to
            `keys.last_key`; "rows", as `rows` says.
        SHARE: the number of equal shares in which a tile is loaded and scored.

    Returns:
        The new `(acc, m, l, largest)`.
    """
    BLOCK_N: tl.constexpr = BLOCKS.n // SHARE
    K_PER_KEY: tl.constexpr = K.descale != "scalar" and K.descale != "head"
    V_PER_KEY: tl.constexpr = V.descale != "scalar" and V.descale != "head"
    # The scaled matrix instruction applies E8M0 scales itself.
    KEY_FACTORS: tl.constexpr = K.factors and (K.descale == "e4m3" or not RULES.native)
    # The softmax applies the scale with its own multiply-add.
    FOLDED: tl.constexpr = MASK == "none" and not (KEY_FACTORS or RULES.soft_cap or RULES.native)
    # Keys, values and scales are loaded one tile ahead and page ids two, so that no load waits for another.
    # They are widened only when they are used, because widening waits for the load.
    PREFETCH: tl.constexpr = RULES.prefetch == "tile" and MASK != "rows"
    # Page ids are located one tile ahead, so that the loads of keys do not wait for them.
    AHEAD: tl.constexpr = MASK != "keys" or RULES.prefetch != ""
    # Words of a native K tile hold two elements each, whatever the parts of Q.
    K_WORD: tl.constexpr = 2 if RULES.native else K.parts
    dk, dv = tl.arange(0, BLOCKS.dk // K_WORD), tl.arange(0, BLOCKS.d // V.parts)
    acc, m, l, v_largest = state
    begin, end, gap_at, gap = begin * SHARE, end * SHARE, gap_at * SHARE, gap * SHARE
    if SHARE > 1:
        end = tl.minimum(end, keys.last_key // BLOCK_N + 1 - gap)  # shares past the last key are empty
    if FOLDED:
        row_scale = tl.zeros_like(m) + logit_scale
    # What belongs to single keys is read one tile ahead: nothing else hides the time such small loads take.
    k_next = 1.0
    v_next = 1.0
    if PREFETCH:
        if loaded is None:
            loaded = load_first_tiles(
                begin, k, v, k_descale, v_descale, table, keys, SIZES, K, V, RULES, BLOCKS
            )
        k_next, v_next, k_ahead, v_ahead, page_ids = loaded
    elif K_PER_KEY or V_PER_KEY or AHEAD:
        n = tile_after_gap(begin, gap_at, gap) * BLOCK_N + tl.arange(0, BLOCK_N)
        page, slot = locate_keys(
            table, keys.row_base, n, keys.first_key, keys.last_key, SIZES.page_size, RULES.int64_offsets
        )
        k_next, v_next = load_scales(
            k_descale, v_descale, page, slot, keys, K, V, BLOCKS, SIZES.head_dim, RULES.native, False
        )
    for i in range(begin, end):
        n = tile_after_gap(i, gap_at, gap) * BLOCK_N + tl.arange(0, BLOCK_N)
        if PREFETCH:
            k_words = k_ahead
            v_words = v_ahead
            following = tile_after_gap(i + 1, gap_at, gap) * BLOCK_N + tl.arange(0, BLOCK_N)
            page, slot = place_of(
                table, page_ids, following, keys.first_key, keys.last_key, SIZES.page_size,
                RULES.int64_offsets,
            )  # fmt: skip
            later = tile_after_gap(i + 2, gap_at, gap) * BLOCK_N + tl.arange(0, BLOCK_N)
            page_ids = load_page_ids(
                table, keys.row_base, later, keys.first_key, keys.last_key, SIZES.page_size
            )
            k_off = kv_offsets(page, slot, k, keys.kv_head, dk, K.vec, False)
            v_off = kv_offsets(page, slot, v, keys.kv_head, dv, V.vec, True)
        else:
            if not AHEAD:
                page, slot = locate_keys(
                    table, keys.row_base, n, keys.first_key, keys.last_key, SIZES.page_size,
                    RULES.int64_offsets,
                )  # fmt: skip
            k_words, v_words = load_tiles(page, slot, k, v, keys.kv_head, dk, dv, K, V, BLOCKS, SIZES, K_WORD)
            if K_PER_KEY or V_PER_KEY or AHEAD:
                following = tile_after_gap(i + 1, gap_at, gap) * BLOCK_N + tl.arange(0, BLOCK_N)
                page, slot = locate_keys(
                    table, keys.row_base, following, keys.first_key, keys.last_key, SIZES.page_size,
                    RULES.int64_offsets,
                )  # fmt: skip
        k_scale = k_next
        v_scale = v_next
        k_next, v_next = load_scales(
            k_descale, v_descale, page, slot, keys, K, V, BLOCKS, SIZES.head_dim, RULES.native, PREFETCH
        )
        if PREFETCH:
            k_scale = scale_as_number(k_scale, K.descale, RULES.native)
            v_scale = scale_as_number(v_scale, V.descale, False)
        s, k_factor = tile_scores(q, q_low, k_words, k_scale, K, RULES)  # [BLOCK_M, BLOCK_N]
        if PREFETCH:
            k_ahead = load_words(k, k_off, K_WORD, SIZES.head_dim, BLOCKS.dk)
        if KEY_FACTORS:
            k_factor *= logit_scale
            if RULES.once:
                k_factor = computed_once(k_factor)
            s *= k_factor[None, :]
        elif not FOLDED:
            s *= logit_scale
        if RULES.soft_cap:
            s = capped_logits(s, soft_cap)
        attended = None
        if MASK == "keys":
            # All rows attend to the same keys, so one bias per key masks the scores. With loads in flight,
            # tiles inside the span skip it by a branch.
            if PREFETCH:
                start = tile_after_gap(i, gap_at, gap) * BLOCK_N
                if (start < keys.first_key) | (start + BLOCK_N - 1 > keys.last_key):
                    s += key_bias(n, keys)[None, :]
            else:
                s += key_bias(n, keys)[None, :]
        elif MASK == "rows":
            attended = seen_keys(n, rows)
            s = tl.where(attended, s, float("-inf"))
        acc, m, l, v_largest = attend_to_tile(
            s, attended, None, v_words, v_scale, row_scale if FOLDED else None, acc, m, l, v_largest,
            V, RULES, RULES.acc_parts,
        )  # fmt: skip
        if PREFETCH:
            v_ahead = load_words(v, v_off, V.parts, SIZES.v_head_dim, BLOCKS.d)
    return acc, m, l, v_largest


@triton.jit
def _attend_to_rows(
    begin, end, full, full_end, q, q_low, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table,
    keys, rows,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`attend_to_rows` without the choice of where Q is.

    The tiles without a mask have a loop of their own: a branch inside one loop would keep the compiler from
    prefetching tiles.
    """
    # Masks take registers that tiles of many rows do not leave, so those have fewer keys.
    CROWDED: tl.constexpr = K.route == "cdna4" or (K.descale == "e4m3_16" and SIZES.head_dim == 96)
    HALVED: tl.constexpr = (BLOCKS.m >= 32 and BLOCKS.n > 16) or (CROWDED and BLOCKS.n == 64)
    SHARES: tl.constexpr = BLOCKS.n // 16 if BLOCKS.m >= 128 else 2 if HALVED else 1
    acc, m, l, largest = attend_to_tiles(
        full, full_end, full_end, 0, q, q_low, logit_scale, soft_cap, state, k, v, k_descale, v_descale,
        table, keys, None, None, SIZES, K, V, RULES, BLOCKS, "none",
    )  # fmt: skip
    return attend_to_tiles(
        begin, end - (full_end - full), full, full_end - full, q, q_low, logit_scale, soft_cap,
        (acc, m, l, largest), k, v, k_descale, v_descale, table, keys, rows, None, SIZES, K, V, RULES,
        BLOCKS, "rows", SHARES,
    )  # fmt: skip


@triton.jit
def _unless_zero(number, q, PARTS: tl.constexpr):
    """Parts of Q, and zeros if `number` is zero."""
    kept = ()
    for i in tl.static_range(PARTS):
        kept = kept + (tl.where(number == 0, 0.0, q[i]).to(q[i].dtype),)
    return kept


@triton.jit
def attend_to_rows(
    num_splits, begin, end, full, full_end, q, q_low, logit_scale, soft_cap, state, k, v, k_descale,
    v_descale, table, keys, rows,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
    Q_IN_SHARED: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end); those in [full, full_end) need no mask in any row.

    Q_IN_SHARED: the compiler is to read Q from shared memory instead of registers. It does so if Q is
    carried by a loop, so an outer loop of one iteration carries it. With Q in registers a multiprocessor
    would hold one program instead of two (128 rows x 64 keys, 8 warps: 208 registers instead of 128).
    num_splits: of the sequence; 0 if the program has no work. The other arguments and the result are those of
    `attend_to_tiles`.
    """
    if Q_IN_SHARED:
        once = tl.minimum(num_splits, 1)
        for _ in range(once):
            state = _attend_to_rows(
                begin, end, full, full_end, q, q_low, logit_scale, soft_cap, state, k, v, k_descale,
                v_descale, table, keys, rows, SIZES, K, V, RULES, BLOCKS,
            )  # fmt: skip
            q = _unless_zero(once, q, K.parts)
    else:
        state = _attend_to_rows(
            begin, end, full, full_end, q, q_low, logit_scale, soft_cap, state, k, v, k_descale, v_descale,
            table, keys, rows, SIZES, K, V, RULES, BLOCKS,
        )  # fmt: skip
    return state

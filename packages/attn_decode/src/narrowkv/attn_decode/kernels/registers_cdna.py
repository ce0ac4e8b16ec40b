"""Decode's loop over FP4 tiles for CDNA: each lane loads what it multiplies, and nothing passes through LDS.

A matrix product may sum its channels in any order, the keys of a tile may come in any order, and the columns
of the output are put in order at the end. So a lane loads its share of an operand of the matrix instruction
as it lies in the cache, and widens it in registers. A wave has a tile of 64 keys; head_dim is 128, which is
32 words of four elements.

Lane 16 * g + c reads words 8 * g to 8 * g + 7 of keys K, 16 * i + c for i below 4, and words 2 * c and
2 * c + 1 of values V, 16 * i + 4 * g + r for i and r below 4. Tensors have an axis [64] of lanes and an axis
of what a lane holds.
"""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.loop import key_bias, load_scales
from narrowkv.attn_decode.kernels.registers import join_four
from narrowkv.paged_cache.kernels.pages import load_page_ids, locate_keys, place_of, scale_as_number
from narrowkv.paged_cache.kernels.tiles import accumulate, apply_value_factors
from narrowkv.quant.device import widen_parts
from narrowkv.runtime.attention.softmax import capped_logits, softmax_step

_TILE = tl.constexpr(64)  # keys of a tile
_WORDS = tl.constexpr(32)  # of a key


@triton.jit
def load_lanes(k, v, page, slot, kv_head, K: tl.constexpr, V: tl.constexpr):
    """Words of a tile by lanes, int16 [64, 32] each, from page and slot [64] of its keys.

    K: word of a lane, then i. V: word of a lane, then r, then i; the fastest first.
    """
    lane = tl.arange(0, 64)
    # In rows of eight words: the compiler then knows that addresses are multiples of 16 bytes.
    k_at = (page * k.page + slot * K.token + kv_head * k.head) // 8
    v_at = (page * v.page + (slot & -4) * V.token + kv_head * v.head) // 8
    k_words, v_words = (), ()
    for i in tl.static_range(4):
        at = tl.gather(k_at, 16 * i + lane % 16, 0) * 8 + lane // 16 * 8
        k_words = k_words + (tl.load(k.ptr + (at[:, None] + tl.arange(0, 8)[None, :])),)
    for i in tl.static_range(4):
        # Four keys whose first has a multiple of 4 as its number lie in one page.
        at = tl.gather(v_at, 16 * i + lane // 16 * 4, 0) * 8 + lane % 16 * 2
        four = ()
        for r in tl.static_range(4):
            four = four + (tl.load(v.ptr + (at[:, None] + (r * V.token + tl.arange(0, 2)[None, :]))),)
        v_words = v_words + (join_four(four),)
    k_words = tl.reshape(tl.permute(join_four(k_words), (0, 3, 2, 1)), [64, _WORDS])
    v_words = tl.reshape(tl.permute(join_four(v_words), (0, 5, 4, 3, 2, 1)), [64, _WORDS])
    return k_words, v_words


@triton.jit
def key_operand(x):
    """A part of K of `load_lanes` as an operand [32 words, 64 keys]."""
    x = tl.reshape(x, [4, 16, 4, 2, 4])  # g, c, i, half, word
    return tl.reshape(tl.permute(x, (3, 0, 4, 2, 1)), [_WORDS, _TILE])


@triton.jit
def value_operand(x):
    """A part of V of `load_lanes` as an operand [64 keys, 32 words]."""
    x = tl.reshape(x, [4, 16, 4, 4, 2])  # g, c, i, r, word
    return tl.reshape(tl.permute(x, (2, 0, 3, 4, 1)), [_TILE, _WORDS])


@triton.jit
def query_operand(q):
    """A part of Q [M, 32] with its columns in the order of the rows of `key_operand`."""
    x = tl.reshape(q, [q.shape[0], 4, 2, 4])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), [q.shape[0], _WORDS])


@triton.jit
def ordered_columns(acc):
    """Parts of the output [M, 32] with their columns in the order of the words."""
    out = ()
    for i in tl.static_range(4):
        x = tl.reshape(acc[i], [acc[i].shape[0], 2, 16])
        out = out + (tl.reshape(tl.permute(x, (0, 2, 1)), [acc[i].shape[0], _WORDS]),)
    return out


@triton.jit
def load_first_lanes(
    begin, k, v, k_descale, v_descale, table, keys,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scales and words of tile `begin` by lanes, and page ids of the next: as `load_first_tiles`."""
    n = begin * _TILE + tl.arange(0, _TILE)
    page, slot = locate_keys(
        table, keys.row_base, n, keys.first_key, keys.last_key, SIZES.page_size, RULES.int64_offsets
    )
    page_ids = load_page_ids(table, keys.row_base, n + _TILE, keys.first_key, keys.last_key, SIZES.page_size)
    k_scale, v_scale = load_scales(
        k_descale, v_descale, page, slot, keys, K, V, BLOCKS, SIZES.head_dim, False, True
    )
    k_words, v_words = load_lanes(k, v, page, slot, keys.kv_head, K, V)
    return k_scale, v_scale, k_words, v_words, page_ids


@triton.jit
def attend_in_lanes(
    begin, end, q, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table, keys,
    loaded,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) as `attend_to_tiles` does where all rows attend to the same keys.

    Words, scales and page ids are loaded ahead as there with `RULES.prefetch` "tile".
    """
    acc, m, l, v_largest = state
    ordered = ()
    for i in tl.static_range(4):
        ordered = ordered + (query_operand(q[i]),)
    k_next, v_next, k_ahead, v_ahead, page_ids = loaded
    for i in range(begin, end):
        n = i * _TILE + tl.arange(0, _TILE)
        k_words, v_words = k_ahead, v_ahead
        k_scale = scale_as_number(k_next, K.descale, False)
        v_scale = scale_as_number(v_next, V.descale, False)
        page, slot = place_of(
            table, page_ids, n + _TILE, keys.first_key, keys.last_key, SIZES.page_size, RULES.int64_offsets
        )
        page_ids = load_page_ids(
            table, keys.row_base, n + 2 * _TILE, keys.first_key, keys.last_key, SIZES.page_size
        )
        k_next, v_next = load_scales(
            k_descale, v_descale, page, slot, keys, K, V, BLOCKS, SIZES.head_dim, False, True
        )
        k_ahead, v_ahead = load_lanes(k, v, page, slot, keys.kv_head, K, V)
        parts = widen_parts(k_words, K.format, K.route, tl.float16, 4)
        s = tl.dot(ordered[0], key_operand(parts[0]))
        for part in tl.static_range(1, 4):
            s = tl.dot(ordered[part], key_operand(parts[part]), s)
        s *= (k_scale * logit_scale)[None, :]
        if RULES.soft_cap:
            s = capped_logits(s, soft_cap)
        if (i * _TILE < keys.first_key) | (i * _TILE + (_TILE - 1) > keys.last_key):
            s += key_bias(n, keys)[None, :]
        p, m, l, correction = softmax_step(s, m, l)
        p, correction, v_largest = apply_value_factors(p, correction, v_scale, v_largest)
        parts = widen_parts(v_words, V.format, V.route, tl.float16, 4)
        values = ()
        for part in tl.static_range(4):
            values = values + (value_operand(parts[part]),)
        acc = accumulate(acc, correction, p, values, tl.float16, 4)
    return ordered_columns(acc), m, l, v_largest

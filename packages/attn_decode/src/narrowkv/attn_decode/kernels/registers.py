"""Decode's loop over FP4 tiles with scales of groups for Hopper: words are loaded to registers directly.

A matrix product may sum its channels in any order, the keys of a tile may come in any order, and the columns
of the output are put in order at the end. So each lane loads 16 adjacent bytes of each of its keys, or 8
bytes of eight adjacent keys, and these are its share of an operand of the matrix instruction. Nothing goes
through shared memory, and a lane needs the scales of one or two groups only.

Lane number 4 * l + t reads words 8 * t to 8 * t + 7 of keys K, 8 * (l // 2) + 4 * (l % 2) + r for r below 4,
and words 4 * l to 4 * l + 3 of V, keys 8 * t + r and 8 * t + r + 4. Tensors have an axis [32] of lanes, an
axis of what a lane reads at once, and r as two axes of bits, the lower one first. head_dim is 128, which is
32 words of four elements.
"""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.loop import in_span
from narrowkv.paged_cache.kernels.pages import locate_keys
from narrowkv.paged_cache.kernels.tiles import scaled_parts
from narrowkv.quant.device import e8m0_to_fp32
from narrowkv.quant.device_fp4_registers import (
    e4m3_pair_to_fp16,
    e4m3_pair_to_fp16_twice,
    exponent_to_fp16,
    widen_keys,
    widen_values,
)
from narrowkv.runtime.attention.softmax import capped_logits, softmax_step

_TILE = tl.constexpr(32)  # keys of a tile
_LEAST_SCALE = tl.constexpr(1.1754944e-38)  # so that -inf times a scale is -inf
_BLOCK = tl.constexpr(8)  # adjacent keys of which a lane reads V; they lie in one page


@triton.jit
def join_four(x):
    """Four tensors as one, with two new last axes: the lower and the upper bit of a tensor's index."""
    return tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3]))


@triton.jit
def load_query_registers(q_ptr, token, kv_head, stride_qt, stride_qh, ROWS: tl.constexpr):
    """The rows of Q of one token as four parts [16, 32], channels in the order of `key_operand`."""
    lane = tl.arange(0, 32)[:, None]
    at = q_ptr + token * stride_qt + lane % 4 * 32 + tl.arange(0, 8)[None, :]
    halves = ()
    for half in tl.static_range(2):
        row = lane // 4 + 8 * half
        row_at = at + (kv_head * ROWS + row) * stride_qh
        chunks = ()
        for i in tl.static_range(4):
            chunks = chunks + (tl.load(row_at + 8 * i, mask=row < ROWS, other=0.0),)
        halves = halves + (join_four(chunks),)
    # l, t, parity of a word, two of the part, two of the pair of words, half of the rows
    x = tl.reshape(tl.join(halves[0], halves[1]), [8, 4, 2, 2, 2, 2, 2, 2])
    even, odd = tl.split(tl.permute(x, (0, 1, 2, 5, 6, 7, 3, 4)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return _query_part(a), _query_part(b), _query_part(c), _query_part(d)


@triton.jit
def _query_part(x):
    """[8 l, 4 t, word, pair of words as two bits, half] as [16, 32]."""
    return tl.reshape(tl.permute(x, (5, 0, 4, 1, 3, 2)), [16, 32])


@triton.jit
def key_operand(even, odd):
    """Even and odd words of keys, [32, 4, 2, 2] each, as an operand [32 words, 32 keys]."""
    x = tl.reshape(tl.join(even, odd), [8, 4, 2, 2, 2, 2, 2])  # l, t, pair of words, r, parity
    return tl.reshape(tl.permute(x, (2, 1, 3, 6, 5, 4, 0)), [32, _TILE])


@triton.jit
def value_operand(even, odd, even_next, odd_next):
    """Even and odd words of keys, and of keys four further, [32, 2, 2, 2] each, as [32 keys, 32 words]."""
    x = tl.join(tl.join(even, odd), tl.join(even_next, odd_next))
    x = tl.reshape(x, [8, 4, 2, 2, 2, 2, 2])  # l, t, pair of words, r, parity, next
    return tl.reshape(tl.permute(x, (4, 1, 3, 6, 2, 5, 0)), [_TILE, 32])


@triton.jit
def weight_operand(p):
    """P [16, 32] with its columns in the order of the rows of `value_operand`."""
    return tl.reshape(tl.permute(tl.reshape(p, [16, 2, 2, 4, 2]), (0, 1, 3, 2, 4)), [16, _TILE])


@triton.jit
def restore_columns(acc):
    """Parts of the output [16, 32] with their columns in the order of the words."""
    out = ()
    for i in tl.static_range(4):
        out = out + (tl.reshape(tl.permute(tl.reshape(acc[i], [16, 4, 8]), (0, 2, 1)), [16, 32]),)
    return out


@triton.jit
def column_keys():
    """The keys [32] of a tile in the order of the columns of its scores."""
    i = tl.arange(0, _TILE)
    return i % 8 // 2 * 8 + i % 2 * 4 + i // 8


@triton.jit
def _four():
    return tl.arange(0, 2)[None, :, None] + 2 * tl.arange(0, 2)[None, None, :]


@triton.jit
def key_registers():
    """The keys [32, 2, 2] of a tile whose words `load_keys` reads."""
    l = tl.arange(0, 32)[:, None, None] // 4
    return l // 2 * 8 + l % 2 * 4 + _four()


@triton.jit
def value_registers():
    """The keys [32, 2, 2] of a tile whose words `load_values` reads first; the second are four further."""
    return tl.arange(0, 32)[:, None, None] % 4 * 8 + _four()


@triton.jit
def locate_block(table, keys, tile, block, PAGE_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Page and first slot [32] of blocks of eight keys of a tile; each block lies in one page."""
    n = tile * _TILE + block * _BLOCK
    page, slot = locate_keys(table, keys.row_base, n, keys.first_key, keys.last_key, PAGE_SIZE, INT64_OFFSETS)
    return page, slot & -_BLOCK


@triton.jit
def load_keys(k, descale, at, keys, K: tl.constexpr):
    """K of a tile: pairs of words int32 [32, 4] of four keys, and int16 scales [32] of both halves of each.

    at: of `locate_block` for block l // 2.
    """
    lane = tl.arange(0, 32)
    page, slot = at
    slot += lane // 4 % 2 * 4
    scale_at = descale.ptr + (page * descale.major + slot * K.scale_token + keys.kv_head * descale.head)
    at = k.ptr + (page * k.page + slot * K.token + keys.kv_head * k.head + lane % 4 * 8)
    at = tl.multiple_of(at.to(tl.pointer_type(tl.int32), bitcast=True)[:, None], [16, 16])
    words, scales = (), ()
    for r in tl.static_range(4):
        words = words + (tl.load(at + (r * (K.token // 2) + tl.arange(0, 4)[None, :])),)
        if K.descale == "e8m0_16" or K.descale == "e4m3_16":
            pair_at = (scale_at + lane % 4 * 2).to(tl.pointer_type(tl.int16), bitcast=True)
            scales = scales + (tl.load(pair_at + r * (K.scale_token // 2)),)
        else:
            scales = scales + (tl.load(scale_at + (lane % 4 + r * K.scale_token)).to(tl.int16) * 257,)
    return words, scales


@triton.jit
def load_values(v, descale, at, keys, V: tl.constexpr):
    """V of a tile: pairs of words int32 [32, 2] of eight keys, and their int32 scales [32].

    at: of `locate_block` for block t.
    """
    GROUPS: tl.constexpr = 8 if V.descale == "e8m0_16" or V.descale == "e4m3_16" else 4
    l = tl.arange(0, 32) // 4
    page, slot = at
    scale_at = descale.ptr + (page * descale.major + slot * V.scale_token + keys.kv_head * descale.head)
    scale_at += l * GROUPS // 8
    at = v.ptr + (page * v.page + slot * V.token + keys.kv_head * v.head + 4 * l)
    at = tl.multiple_of(at.to(tl.pointer_type(tl.int32), bitcast=True)[:, None], [8, 8])
    words, scales = (), ()
    for r in tl.static_range(8):
        words = words + (tl.load(at + (r * (V.token // 2) + tl.arange(0, 2)[None, :])),)
        scales = scales + (tl.load(scale_at + r * V.scale_token).to(tl.int32),)
    return words, scales


@triton.jit
def branch(number):
    """The int32 `number` through inline assembly, so that the compiler keeps the branch that uses it."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def largest_byte(a, b):
    """The largest number of two int32 tensors [32, 2, 2]."""
    return tl.max(tl.max(tl.max(tl.maximum(a, b), 2), 1), 0)


@triton.jit
def attend_in_registers(
    begin, end, q, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table, keys,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) as `attend_to_tiles` does where all rows attend to the same keys.

    E8M0 bytes become factors relative to the largest exponent: of the tile's keys, and of all values so far.
    If that exponent is NaN, all sums are NaN.

    Args:
        q: of `load_query_registers`, in float16.
        logit_scale, soft_cap, state, k, v, k_descale, v_descale, table, keys: as there; `logit_scale` is not
            negative.

    Returns:
        The new `(acc, m, l, largest)`.
    """
    K_EXPONENTS: tl.constexpr = K.descale == "e8m0_16" or K.descale == "e8m0_32"
    V_EXPONENTS: tl.constexpr = V.descale == "e8m0_16" or V.descale == "e8m0_32"
    acc, m, l, largest = state
    top = begin * 0  # the largest exponent of V so far, which `acc` is still to be multiplied by
    k_block, v_block = tl.arange(0, 32) // 8, tl.arange(0, 32) % 4
    # The next tile's words and scales are loaded once this tile's are in use, its page ids a tile earlier.
    k_words, k_bytes = load_keys(
        k, k_descale, locate_block(table, keys, begin, k_block, SIZES.page_size, RULES.int64_offsets), keys, K
    )
    v_words, v_bytes = load_values(
        v, v_descale, locate_block(table, keys, begin, v_block, SIZES.page_size, RULES.int64_offsets), keys, V
    )
    k_at = locate_block(table, keys, begin + 1, k_block, SIZES.page_size, RULES.int64_offsets)
    v_at = locate_block(table, keys, begin + 1, v_block, SIZES.page_size, RULES.int64_offsets)
    for i in tl.range(begin, end, num_stages=1):
        # Keys outside the span are read too, and their scales may hold any byte.
        partly = (i * _TILE < keys.first_key) | (i * _TILE + (_TILE - 1) > keys.last_key)
        scales = join_four(k_bytes)  # [32, 2, 2]
        if K_EXPONENTS:
            if partly:
                n = branch(i * _TILE) + key_registers()
                scales = tl.where(in_span(n, keys), scales, 0)
            low = scales.to(tl.int32) & 255
            high = low if K.descale == "e8m0_32" else (scales.to(tl.int32) >> 8) & 255
            k_top = largest_byte(low, high)
            low, high = exponent_to_fp16(low, k_top) * 65537, exponent_to_fp16(high, k_top) * 65537
            scale = logit_scale * e8m0_to_fp32(k_top) + _LEAST_SCALE
        else:
            low, high = e4m3_pair_to_fp16_twice(scales)
            scale = logit_scale + _LEAST_SCALE
        second = tl.arange(0, 4)[None, :, None, None] >= 2
        factor = tl.where(second, high[:, None, :, :], low[:, None, :, :])
        a, a_odd, b, b_odd, c, c_odd, d, d_odd = widen_keys(join_four(k_words), factor)
        s = tl.dot(q[0], key_operand(a, a_odd))
        s = tl.dot(q[1], key_operand(b, b_odd), s)
        s = tl.dot(q[2], key_operand(c, c_odd), s)
        s = tl.dot(q[3], key_operand(d, d_odd), s)
        k_words, k_bytes = load_keys(k, k_descale, k_at, keys, K)
        k_at = locate_block(table, keys, i + 2, k_block, SIZES.page_size, RULES.int64_offsets)
        if RULES.soft_cap:
            s = capped_logits(s * scale, soft_cap)
        v_low, v_high = join_four(v_bytes[:4]), join_four(v_bytes[4:])
        if partly:
            first_key = branch(i * _TILE)
            n = first_key + column_keys()
            s = tl.where(in_span(n, keys)[None, :], s, float("-inf"))
            n = first_key + value_registers()
            v_low = tl.where(in_span(n, keys), v_low, 0)
            v_high = tl.where(in_span(n + 4, keys), v_high, 0)
        p, m, l, correction = softmax_step(s, m, l, None if RULES.soft_cap else tl.zeros_like(m) + scale)
        if V_EXPONENTS:
            earlier = top
            top = tl.maximum(top, largest_byte(v_low, v_high))
            factors = exponent_to_fp16(v_low, top) + (exponent_to_fp16(v_high, top) << 16)
            correction *= (tl.maximum(127 + earlier - top, 0) << 23).to(tl.float32, bitcast=True)
        else:
            factors = e4m3_pair_to_fp16((v_low + v_high * 256).to(tl.int16))
        factors = tl.broadcast_to(factors[:, None, :, :], [32, 2, 2, 2])
        a, a1, b, b1, c, c1, d, d1, e, e1, f, f1, g, g1, h, h1 = widen_values(
            join_four(v_words[:4]), join_four(v_words[4:]), factors
        )
        # In every step: behind a branch, these products would not run beside the widening above.
        acc = scaled_parts(acc, correction, 4)
        p = weight_operand(p.to(tl.float16))
        acc = (
            tl.dot(p, value_operand(a, e, a1, e1), acc[0]),
            tl.dot(p, value_operand(b, f, b1, f1), acc[1]),
            tl.dot(p, value_operand(c, g, c1, g1), acc[2]),
            tl.dot(p, value_operand(d, h, d1, h1), acc[3]),
        )
        v_words, v_bytes = load_values(v, v_descale, v_at, keys, V)
        v_at = locate_block(table, keys, i + 2, v_block, SIZES.page_size, RULES.int64_offsets)
    if V_EXPONENTS:
        largest = e8m0_to_fp32(top)
    return restore_columns(acc), m, l, largest

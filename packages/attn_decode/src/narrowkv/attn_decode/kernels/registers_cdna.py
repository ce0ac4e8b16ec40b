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

from narrowkv.attn_decode.kernels.loop import key_bias, load_first_tiles, load_scales
from narrowkv.attn_decode.kernels.registers import join_four
from narrowkv.paged_cache.kernels.pages import load_page_ids, locate_keys, place_of, scale_as_number
from narrowkv.paged_cache.kernels.tiles import accumulate, accumulate_fp8, apply_value_factors, scores
from narrowkv.quant.device import both_halves, element_of_part, fp4_bytes_cdna4, join_halves, widen_parts
from narrowkv.quant.device_fp4_e4m3 import as_bytes, fp4_to_e4m3, select_bytes
from narrowkv.runtime.attention.softmax import capped_logits, softmax_step

_TILE = tl.constexpr(64)  # keys of a tile
_WORDS = tl.constexpr(32)  # of a key


@triton.jit
def load_key_lanes(k, page, slot, kv_head, K: tl.constexpr):
    """Words of K by lanes, int16 [64, 32], from page and slot [64] of its keys: word of a lane, then i."""
    lane = tl.arange(0, 64)
    # In rows of eight words: the compiler then knows that addresses are multiples of 16 bytes.
    k_at = (page * k.page + slot * K.token + kv_head * k.head) >> 3
    words = ()
    for i in tl.static_range(4):
        at = tl.gather(k_at, 16 * i + lane % 16, 0) * 8 + lane // 16 * 8
        words = words + (tl.load(k.ptr + (at[:, None] + tl.arange(0, 8)[None, :])),)
    return tl.reshape(tl.permute(join_four(words), (0, 3, 2, 1)), [64, _WORDS])


@triton.jit
def load_value_lanes(v, page, slot, kv_head, V: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Words of V by lanes, int16 [64, 32], as `load_key_lanes`: word of a lane, then r, then i."""
    # Four keys whose first has a multiple of 4 as its number lie in one page, unless pages are smaller.
    TOGETHER: tl.constexpr = PAGE_SIZE % 4 == 0
    lane = tl.arange(0, 64)
    v_at = (page * v.page + (slot & -4 if TOGETHER else slot) * V.token + kv_head * v.head) >> 3
    words = ()
    for i in tl.static_range(4):
        key = 16 * i + lane // 16 * 4
        at = tl.gather(v_at, key, 0) * 8 + lane % 16 * 2
        four = ()
        for r in tl.static_range(4):
            if TOGETHER:
                row = at + r * V.token
            else:
                row = tl.gather(v_at, key + r, 0) * 8 + lane % 16 * 2
            four = four + (tl.load(v.ptr + (row[:, None] + tl.arange(0, 2)[None, :])),)
        words = words + (join_four(four),)
    return tl.reshape(tl.permute(join_four(words), (0, 5, 4, 3, 2, 1)), [64, _WORDS])


@triton.jit
def widened_keys(words, K: tl.constexpr):
    """K of `load_key_lanes` as four parts [64 keys, 32 words], with columns in the order of the lanes."""
    out = ()
    if K.route == "cdna4":
        # A lane has eight adjacent columns of each matrix instruction.
        pairs = pairs_of_words(words)
        parts = fp4_bytes_cdna4(pairs, tl.full(pairs.shape, 2.0**-13, tl.float32), True, 8)
        for i in tl.static_range(4):
            x = tl.reshape(both_halves(parts[i]), [4, 16, 4, 8])  # g, c, i, word
            out = out + (tl.reshape(tl.permute(x, (2, 1, 0, 3)), [_TILE, _WORDS]),)
    else:
        parts = widen_parts(words, K.format, K.route, tl.float16, 4)
        for i in tl.static_range(4):
            x = tl.reshape(parts[i], [4, 16, 4, 2, 4])  # g, c, i, half, word
            out = out + (tl.reshape(tl.permute(x, (2, 1, 3, 0, 4)), [_TILE, _WORDS]),)
    return out


@triton.jit
def widened_values(words, V: tl.constexpr):
    """V of `load_value_lanes` as four parts [64 keys, 32 words]; gfx950's keys are as in `weight_operand`."""
    out = ()
    if V.route == "cdna4":
        # Nibbles of two keys come beside each other before they are widened, in half as many instructions
        # as their float16 would take.
        a, b = tl.split(tl.reshape(pairs_of_words(words), [64, 8, 2]))
        low = (a & 0x0F0F0F0F) | ((b << 4) & -0x0F0F0F10)
        high = ((a >> 4) & 0x0F0F0F0F) | (b & -0x0F0F0F10)
        scale = tl.full(a.shape, 2.0**-13, tl.float32)
        low, high = fp4_bytes_cdna4(low, scale, True, 8), fp4_bytes_cdna4(high, scale, True, 8)
        for i in tl.static_range(4):
            x = tl.join(both_halves(low[i]), both_halves(high[i]))
            x = tl.reshape(x, [4, 16, 2, 2, 4, 2])  # g, c, i as two, r, word
            out = out + (tl.reshape(tl.permute(x, (2, 0, 3, 4, 5, 1)), [_TILE, _WORDS]),)
    else:
        parts = widen_parts(words, V.format, V.route, tl.float16, 4)
        for i in tl.static_range(4):
            x = tl.reshape(parts[i], [4, 16, 4, 4, 2])  # g, c, i, r, word
            out = out + (tl.reshape(tl.permute(x, (2, 0, 3, 4, 1)), [_TILE, _WORDS]),)
    return out


@triton.jit
def pairs_of_words(words):
    """Int16 words [64, 32] as int32 of two adjacent ones."""
    low, high = tl.split(tl.reshape(words, [64, 16, 2]))
    return join_halves(low, high)


@triton.jit
def query_operand(q):
    """A part of Q with its columns in the order of `widened_keys` or of the rows of `key_operand_fp8`."""
    x = tl.reshape(q, [q.shape[0], 4, 2, q.shape[1] // 8])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), q.shape)


@triton.jit
def weight_operand(p):
    """P [M, 64] with columns in the order of keys of gfx950's `widened_values` and `value_operand_fp8`."""
    x = tl.reshape(p, [p.shape[0], 2, 2, 4, 4])
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), p.shape)


@triton.jit
def ordered_columns(acc, PARTS: tl.constexpr):
    """Parts of the output with their columns in the order of the words."""
    out = ()
    for i in tl.static_range(PARTS):
        x = tl.reshape(acc[i], [acc[i].shape[0], acc[i].shape[1] // 16, 16])
        out = out + (tl.reshape(tl.permute(x, (0, 2, 1)), acc[i].shape),)
    return out


@triton.jit
def stored_columns(
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Which elements of a row of the output the columns [COLUMNS] of parts, one after the other, are."""
    PART: tl.constexpr = COLUMNS // PARTS
    i = tl.arange(0, COLUMNS)
    c = i % PART
    if LANES:
        c = c % 16 * (PART // 16) + c // 16  # see `ordered_columns`
    return element_of_part(i // PART, c, PARTS, PAIRS)


@triton.jit
def load_lanes_as_bytes(k, v, page, slot, kv_head, K: tl.constexpr, V: tl.constexpr):
    """`load_key_lanes` and `load_value_lanes` as int32 [64, 16] of eight elements.

    K: i, then the word of a lane. V: i, then r. The second is the fastest.
    """
    lane = tl.arange(0, 64)
    k_at = (page * k.page + slot * K.token + kv_head * k.head) >> 3
    v_at = (page * v.page + (slot & -4) * V.token + kv_head * v.head) >> 3
    k_ptr = k.ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    v_ptr = v.ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    k_words, v_words = (), ()
    for i in tl.static_range(4):
        at = tl.gather(k_at, 16 * i + lane % 16, 0) * 4 + lane // 16 * 4
        k_words = k_words + (tl.load(k_ptr + (at[:, None] + tl.arange(0, 4)[None, :])),)
    for i in tl.static_range(4):
        at = tl.gather(v_at, 16 * i + lane // 16 * 4, 0) * 4 + lane % 16
        four = ()
        for r in tl.static_range(4):
            four = four + (tl.load(v_ptr + (at + r * (V.token // 2))),)
        v_words = v_words + (join_four(four),)
    k_words = tl.reshape(tl.permute(join_four(k_words), (0, 3, 2, 1)), [64, 16])
    return k_words, tl.reshape(tl.permute(join_four(v_words), (0, 4, 3, 2, 1)), [64, 16])


@triton.jit
def four_of(x):
    """The four tensors [64, 4] of [64, 16] whose fastest axis has four places."""
    even, odd = tl.split(tl.reshape(x, [64, 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def bytes_across_keys(x):
    """V of `load_lanes_as_bytes` with byte b of keys r as byte r of word b."""
    a, b, c, d = four_of(x)
    ab, cd = select_bytes(b, a, 0x05010400), select_bytes(d, c, 0x05010400)
    ab_high, cd_high = select_bytes(b, a, 0x07030602), select_bytes(d, c, 0x07030602)
    words = (
        select_bytes(cd, ab, 0x05040100), select_bytes(cd, ab, 0x07060302),
        select_bytes(cd_high, ab_high, 0x05040100), select_bytes(cd_high, ab_high, 0x07060302),
    )  # fmt: skip
    return tl.reshape(tl.permute(join_four(words), (0, 1, 3, 2)), [64, 16])


@triton.jit
def key_operand_fp8(x, TYPE: tl.constexpr):
    """Words of FP8 of K, int32 [64, 16], as an operand [64 bytes, 64 keys] of the matrix unit."""
    x = tl.reshape(as_bytes(x), [4, 16, 4, 2, 8])  # g, c, i, half, byte
    return tl.reshape(tl.permute(x, (3, 0, 4, 2, 1)), [64, _TILE]).to(TYPE, bitcast=True)


@triton.jit
def value_operand_fp8(x, TYPE: tl.constexpr):
    """Words of FP8 of `bytes_across_keys` as an operand [64 keys, 64 bytes]."""
    x = tl.reshape(as_bytes(x), [4, 16, 2, 2, 4, 4])  # g, c, i, byte, r
    return tl.reshape(tl.permute(x, (2, 0, 3, 5, 4, 1)), [_TILE, 64]).to(TYPE, bitcast=True)


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
    if RULES.fp8 is None:
        k_words = load_key_lanes(k, page, slot, keys.kv_head, K)
        v_words = load_value_lanes(v, page, slot, keys.kv_head, V, SIZES.page_size)
    else:
        k_words, v_words = load_lanes_as_bytes(k, v, page, slot, keys.kv_head, K, V)
    return k_scale, v_scale, k_words, v_words, page_ids


@triton.jit
def load_first(
    begin, k, v, k_descale, v_descale, table, keys,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What the first pass of the loop takes: of `load_first_lanes` or `load_first_tiles`."""
    if RULES.lanes:
        loaded = load_first_lanes(begin, k, v, k_descale, v_descale, table, keys, SIZES, K, V, RULES, BLOCKS)
    else:
        loaded = load_first_tiles(begin, k, v, k_descale, v_descale, table, keys, SIZES, K, V, RULES, BLOCKS)
    # The compiler would move the loads to where the loop begins, behind the work on Q.
    tl.debug_barrier()
    return loaded


@triton.jit
def attend_in_lanes(
    begin, end, q, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table, keys,
    loaded,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles [begin, end) as `attend_to_tiles` does where all rows attend to the same keys.

    Words, scales and page ids are loaded ahead as there with `RULES.prefetch` "tile". Sums of values have the
    columns that `ordered_columns` takes.
    """
    DEEP: tl.constexpr = RULES.fp8 is None and K.route == "cdna4"
    acc, m, l, v_largest = state
    ordered = ()
    for i in tl.static_range(K.parts):
        ordered = ordered + (q[i] if DEEP else query_operand(q[i]),)
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
        if RULES.fp8 is None:
            # gfx942 has room for both tiles. On gfx950 one set of registers serves them, without copies.
            if not DEEP:
                k_ahead = load_key_lanes(k, page, slot, keys.kv_head, K)
                v_ahead = load_value_lanes(v, page, slot, keys.kv_head, V, SIZES.page_size)
            s = scores(ordered, ordered, widened_keys(k_words, K), False, 4)
            if DEEP:
                k_ahead = load_key_lanes(k, page, slot, keys.kv_head, K)
        else:
            k_ahead, v_ahead = load_lanes_as_bytes(k, v, page, slot, keys.kv_head, K, V)
            low, high = fp4_to_e4m3(k_words)
            s = tl.dot(ordered[0], key_operand_fp8(low, RULES.fp8))
            s = tl.dot(ordered[1], key_operand_fp8(high, RULES.fp8), s)
        s *= (k_scale * logit_scale)[None, :]
        if RULES.soft_cap:
            s = capped_logits(s, soft_cap)
        if (i * _TILE < keys.first_key) | (i * _TILE + (_TILE - 1) > keys.last_key):
            s += key_bias(n, keys)[None, :]
        p, m, l, correction = softmax_step(s, m, l)
        p, correction, v_largest = apply_value_factors(p, correction, v_scale, v_largest)
        if RULES.fp8 is None:
            p = weight_operand(p) if DEEP else p
            acc = accumulate(acc, correction, p, widened_values(v_words, V), tl.float16, 4)
            if DEEP:
                v_ahead = load_value_lanes(v, page, slot, keys.kv_head, V, SIZES.page_size)
        else:
            low, high = fp4_to_e4m3(bytes_across_keys(v_words))
            p = weight_operand(p * RULES.p_scale)
            acc = (
                accumulate_fp8(acc[0], correction, p, value_operand_fp8(low, RULES.fp8), RULES.fp8),
                accumulate_fp8(acc[1], correction, p, value_operand_fp8(high, RULES.fp8), RULES.fp8),
            )
    return acc, m, l, v_largest

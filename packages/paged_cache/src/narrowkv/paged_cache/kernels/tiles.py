"""What one pass of a loop over pages does: load a tile of keys or values, score it, and sum the values up.

Decode, fused prefill and the old keys of a fused append are loops of these functions.
"""

import triton
import triton.language as tl

from narrowkv.paged_cache.kernels.pages import kv_offsets
from narrowkv.paged_cache.kernels.queries import as_fp8
from narrowkv.quant.device import e8m0_to_fp32, join_parts, widen_parts
from narrowkv.quant.device_e4m3 import e4m3_to_fp16
from narrowkv.quant.device_fp4 import exponents_to_fp16, share_exponent, tile_exponent
from narrowkv.quant.device_fp4_cdna4 import widen_groups_cdna4
from narrowkv.quant.device_int import widen_int4, zero_point_and_scale
from narrowkv.runtime.attention.softmax import headroom, softmax_step

# Where the largest factor of a key begins: not zero, so that it can be divided by, and below any other.
LEAST_FACTOR = tl.constexpr(1.2e-38)


@triton.jit
def load_tile(kv, page, slot, head, IS_VALUE: tl.constexpr, VEC: tl.constexpr, PARTS: tl.constexpr,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr = 16):  # fmt: skip
    """The words [N, BLOCK_D / PARTS] of K or V at these places, as stored; columns past head_dim are zeros.

    PARTS: elements of a word. VEC: x of the vectorised layout, else 0. MOST: neighbouring words that a lane
    loads, at most.
    """
    d = tl.max_contiguous(tl.arange(0, BLOCK_D // PARTS), MOST)
    return load_words(kv, kv_offsets(page, slot, kv, head, d, VEC, IS_VALUE), PARTS, HEAD_DIM, BLOCK_D)


@triton.jit
def load_words(kv, offsets, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`load_tile` where the offsets are known."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(kv.ptr + offsets)
    else:
        ZERO: tl.constexpr = 0 if kv.ptr.dtype.element_ty.is_int() else 0.0
        d = tl.arange(0, BLOCK_D // PARTS)
        return tl.load(kv.ptr + offsets, mask=(d * PARTS < HEAD_DIM)[None, :], other=ZERO)


@triton.jit
def tile_scores(q, q_low, words, key_scale, K: tl.constexpr, RULES: tl.constexpr):
    """Scores [M, N] of a tile of K as stored, and the factor [N] of each key that they still lack.

    Args:
        q, q_low: Q as one term or two, in parts; with `RULES.native` the terms of `split_to_e4m3`.
        key_scale: of `load_key_scale`, or 1.
        K: `Stored`. RULES: compute, split_q, native, fp8 and clean of the caller's `Rules`.
    """
    if RULES.native and K.descale == "e4m3":
        # A scale with a mantissa is a factor of the key; the instruction's own scales are 2**0.
        GROUPS: tl.constexpr = words.shape[1] // 16
        s = scores_fp4_native(q, words, tl.full([words.shape[0], GROUPS], 127, tl.uint8))
        factor = key_scale
    elif RULES.native:
        s = scores_fp4_native(q, words, key_scale)
        factor = 1.0
    elif RULES.fp8 is not None:
        stored = tl.trans(as_fp8(words, RULES.fp8, RULES.clean))
        s = tl.dot(q[0], stored)
        if RULES.split_q:
            s = tl.dot(q_low[0], stored, s)
        factor = key_scale
    else:
        widened, factor = widen_tile(words, key_scale, K.format, K.route, RULES.compute, K.parts, K.descale)
        s = scores(q, q_low, widened, RULES.split_q, K.parts)
    return s, factor


@triton.jit
def attend_to_tile(
    s, keep, confine, words, value_scale, scale, acc, m, l, largest,
    V: tl.constexpr, RULES: tl.constexpr, ACC_PARTS: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax and of the sum of values, for a tile's masked scores [M, N].

    Args:
        keep: [M, N], the keys that each row attends to; None where all rows attend to the same ones.
        confine: whether some row does not attend to all keys, so that a NaN in V must not reach it through
            0 * NaN; None: take it that some do not.
        words, value_scale: a tile of V as stored, and what `load_key_scale` gives for it, or 1.
        scale: what the scores are still to be multiplied by, see `softmax_step`, or None.
        acc: sums of values in ACC_PARTS parts, still to be multiplied by `largest`. m, l: the running maximum
            and sum.
        largest: the largest factor of a value so far, `LEAST_FACTOR` at first; 1 without such factors. In
            units of it P times a factor stays in float16's range.
        V: `Stored`. RULES: compute, fp8, clean, p_scale, lazy and once of the caller's `Rules`.

    Returns:
        The new `(acc, m, l, largest)`.
    """
    p, m, l, correction = softmax_step(s, m, l, scale, headroom(RULES.compute))
    if RULES.fp8 is not None:
        values, factor = (as_fp8(words, RULES.fp8, RULES.clean),), value_scale
    else:
        values, factor = widen_tile(words, value_scale, V.format, V.route, RULES.compute, V.parts, V.descale)
        if ACC_PARTS == 1:
            values = (join_parts(values, V.parts, V.route == "cdna4"),)
    if V.factors:
        p, correction, largest = apply_value_factors(p, correction, factor, largest, RULES.once)
        if keep is not None:
            p = tl.where(keep, p, 0.0)  # 0 * NaN
    # Widened FP4 is finite with one scale a head; the factor of each key is masked above. Scales of groups
    # may be NaN.
    ONE_SCALE: tl.constexpr = V.descale == "e8m0" or V.descale == "e4m3"
    FINITE: tl.constexpr = V.format == "fp4_e2m1" and ONE_SCALE and V.route != "ptx8"
    if keep is not None and not FINITE:
        if confine is None:
            p, values = confine_nonfinite(p, values, keep, ACC_PARTS)
        else:
            if confine:
                p, values = confine_nonfinite(p, values, keep, ACC_PARTS)
    if RULES.fp8 is not None:
        acc = (accumulate_fp8(acc[0], correction, p * RULES.p_scale, values[0], RULES.fp8),)
    else:
        if RULES.lazy:
            if tl.min(correction, 0) < 1.0:
                acc = scaled_parts(acc, correction, ACC_PARTS)
            correction = None
        acc = accumulate(acc, correction, p, values, RULES.compute, ACC_PARTS)
    return acc, m, l, largest


@triton.jit
def scaled_parts(acc, factor, PARTS: tl.constexpr):
    """The parts [M, D] times a factor of each row."""
    out = ()
    for i in tl.static_range(PARTS):
        out = out + (acc[i] * factor[:, None],)
    return out


@triton.jit
def computed_once(x):
    """Numbers [N] that one thread each computes, where the compiler would have every thread compute all.

    Triton lays numbers out as their user needs them, and with them the loads that they come from, where a
    tile has fewer keys than the program has threads. It does not see through a maximum.
    """
    return tl.max(tl.broadcast_to(x[:, None], [x.shape[0], 2]), 1)


@triton.jit
def apply_value_factors(p, correction, factor, largest, ONCE: tl.constexpr = False):
    """P and the correction of earlier sums, for sums that are still to be multiplied by the largest factor.

    Args:
        factor: of each key [N]. largest: of all factors so far; `LEAST_FACTOR` at first.
        ONCE: see `computed_once`.

    Returns:
        `(p, correction, largest)`.
    """
    numbers = tl.where(factor == factor, factor, LEAST_FACTOR)
    larger = tl.maximum(largest, tl.max(numbers, 0))
    factor *= 1.0 / larger
    if ONCE:
        factor = computed_once(factor)
    return p * factor[None, :], correction * (largest / larger), larger


@triton.jit
def widen_tile(words, scale, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr,
               PARTS: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """A stored tile as parts in DTYPE, and the factor [N] of each key that is still to be applied."""
    GROUPED: tl.constexpr = KIND == "e8m0_16" or KIND == "e8m0_32" or KIND == "e4m3_16" or KIND == "e4m3_32"
    if GROUPED and ROUTE == "cdna4":
        GROUP: tl.constexpr = 16 if KIND == "e8m0_16" or KIND == "e4m3_16" else 32
        E4M3: tl.constexpr = KIND == "e4m3_16" or KIND == "e4m3_32"
        parts, largest = widen_groups_cdna4(words, scale, DTYPE, words.shape[1] * PARTS // GROUP, E4M3)
        if E4M3:
            return parts, tl.full([words.shape[0]], 1.0, tl.float32)
        else:
            return parts, e8m0_to_fp32(largest)
    elif GROUPED:
        if (KIND == "e8m0_16" or KIND == "e8m0_32") and ROUTE == "ptx8":
            top = tile_exponent(scale)
            rest = exponents_to_fp16(scale, top)
            factor = tl.zeros([scale.shape[0]], tl.float32) + e8m0_to_fp32(top)
        elif KIND == "e8m0_16" or KIND == "e8m0_32":
            shared, rest = share_exponent(scale)  # [N], [N, G]
            factor = e8m0_to_fp32(shared)
        else:
            # A multiple of 2**-1 times one of 2**-9, both times 2**-14: exact in float16.
            rest = e4m3_to_fp16(scale, ROUTE != "bits")
            factor = tl.full([scale.shape[0]], 1.0, tl.float32)
        N: tl.constexpr = rest.shape[0]
        GROUPS: tl.constexpr = rest.shape[1]
        RUN: tl.constexpr = words.shape[1] // GROUPS
        rest = tl.reshape(tl.broadcast_to(rest[:, :, None], [N, GROUPS, RUN]), [N, GROUPS * RUN])
        raw = widen_parts(words, FORMAT, ROUTE, tl.float16, PARTS)
        parts = ()
        for i in tl.static_range(PARTS):
            parts = parts + ((raw[i] * rest).to(DTYPE),)
        return parts, factor
    elif KIND == "token_zero":
        zero, factor = zero_point_and_scale(scale)
        return widen_int4(words, zero, ROUTE, DTYPE, PARTS), factor
    else:
        return widen_parts(words, FORMAT, ROUTE, DTYPE, PARTS), scale


@triton.jit
def scores(q, q_low, k, SPLIT_Q: tl.constexpr, PARTS: tl.constexpr):
    """Q @ K^T [M, N], summed over the parts."""
    s = tl.dot(q[0], tl.trans(k[0]))
    if SPLIT_Q:
        s = tl.dot(q_low[0], tl.trans(k[0]), s)
    for i in tl.static_range(1, PARTS):
        s = tl.dot(q[i], tl.trans(k[i]), s)
        if SPLIT_Q:
            s = tl.dot(q_low[i], tl.trans(k[i]), s)
    return s


@triton.jit
def scores_fp4_native(q_terms, k_words, k_scale):
    """Q @ K^T [M, N] by the scaled matrix instruction: E4M3 rows by packed E2M1 keys, E8M0 scales per 32.

    q_terms: of `split_to_e4m3`; k_words: [N, D / 2]; k_scale: [N, D / 32].
    """
    M: tl.constexpr = q_terms[0].shape[0]
    GROUPS: tl.constexpr = k_scale.shape[1]
    k_words = tl.trans(k_words)
    # 127 is 2**0.
    s = tl.dot_scaled(q_terms[0], tl.full([M, GROUPS], 127, tl.uint8), "e4m3", k_words, k_scale, "e2m1")
    for i in tl.static_range(1, len(q_terms)):
        scale = tl.full([M, GROUPS], 127 - 5 * i, tl.uint8)
        s = tl.dot_scaled(q_terms[i], scale, "e4m3", k_words, k_scale, "e2m1", s)
    return s


@triton.jit
def confine_nonfinite(p, v, attended, PARTS: tl.constexpr):
    """Moves NaN and Inf of V into P, as NaN, of the rows that attend: 0 * NaN would reach every row."""
    # [M, N], [N, D]; one in any column makes the whole output row NaN.
    bad = tl.zeros([p.shape[1]], tl.int32)
    clean = ()
    for i in tl.static_range(PARTS):
        finite = tl.abs(v[i].to(tl.float32)) < float("inf")
        bad += tl.max((~finite).to(tl.int32), 1)
        clean = clean + (tl.where(finite, v[i], 0.0).to(v[i].dtype),)
    return tl.where(attended & (bad > 0)[None, :], float("nan"), p), clean


@triton.jit
def accumulate(acc, correction, p, v, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """Acc * correction + P @ V of each part.

    Float16 keeps eleven bits of P, enough; bfloat16 takes two terms.
    """
    p_high = p.to(DTYPE)
    p_low = (p - p_high.to(tl.float32)).to(DTYPE)
    out = ()
    for i in tl.static_range(PARTS):
        kept = acc[i]
        if correction is not None:
            kept *= correction[:, None]
        if tl.bfloat16 == DTYPE:
            kept = tl.dot(p_low, v[i], kept)
        out = out + (tl.dot(p_high, v[i], kept),)
    return out


@triton.jit
def accumulate_fp8(acc, correction, p, v, TYPE: tl.constexpr):
    """Acc * correction + P @ V on the FP8 matrix unit, with P as two terms: one alone is a percent off."""
    high = p.to(TYPE)
    low = (p - high.to(tl.float32)).to(TYPE)
    return tl.dot(high, v, tl.dot(low, v, acc * correction[:, None]))


@triton.jit
def zeros_in_parts(M: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """PARTS accumulators [M, D / PARTS]."""
    out = ()
    for _ in tl.static_range(PARTS):
        out = out + (tl.zeros([M, D // PARTS], tl.float32),)
    return out

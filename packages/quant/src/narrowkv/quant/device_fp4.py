"""Device helpers (`@triton.jit`) for FP4 with E8M0 scales: storing groups, and their factors."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.quant.device import round_magnitude
from narrowkv.quant.e8m0 import ABOVE_SQRT2, ULTRAQUANT_FACTOR, largest_exponent

_ULTRAQUANT_FACTOR = tl.constexpr(ULTRAQUANT_FACTOR)
_ABOVE_SQRT2 = tl.constexpr(ABOVE_SQRT2)
_LARGEST_EXPONENT = tl.constexpr(largest_exponent("fp4_e2m1"))


@triton.jit
def share_exponent(scales):
    """Splits E8M0 bytes `[N, groups]` into a byte per row, uint8 `[N]`, and float16 factors, at most 2**14.

    The value of an element is the widened FP4 number times its group's factor times its row's scale; the
    factor includes the 2**14 of `widening_exponent`. A group whose scale is less than 2**-28 of the row's
    largest becomes zero. A NaN scale stays with its group.
    """
    exponent = scales.to(tl.int32)
    nan = exponent == 255
    top = tl.max(tl.where(nan, 0, exponent), 1)
    field = 15 + 14 + exponent - top[:, None]
    bits = tl.where(field > 0, field << 10, 0)
    rest = tl.where(nan, 0x7E00, bits).to(tl.int16).to(tl.float16, bitcast=True)
    return top.to(tl.uint8), rest


@triton.jit
def tile_exponent(scales):
    """The largest E8M0 byte of a tile, as uint8; NaN bytes are left out."""
    numbers = tl.where(scales == 255, 0, scales.to(tl.int32))
    return tl.max(tl.max(numbers, 1), 0).to(tl.uint8)


@triton.jit
def exponents_to_fp16(scales, top):
    """E8M0 bytes `[N, groups]` as float16 factors 2**(15 + scale - top), for NVIDIA; NaN for 255.

    What is less than 2**-29 of the tile's largest becomes zero. Two bytes at a time are the exponents of two
    numbers, 30 - top added without a carry between them, and doubled: 63 is then a NaN.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 x, t, zero, base, most;
            mov.b32 zero, 0;
            mov.b32 base, 0x001F001F;
            mov.b32 most, 0x003F003F;
            prmt.b32 t, $3, 0, 0x4140;
            not.b32 t, t;
            add.s16x2 t, t, base;
            prmt.b32 x, $2, 0, 0x4140;
            add.s16x2 x, x, t;
            max.s16x2 x, x, zero;
            add.s16x2 x, x, x;
            min.s16x2 x, x, most;
            shl.b32 $0, x, 9;
            prmt.b32 x, $2, 0, 0x4342;
            add.s16x2 x, x, t;
            max.s16x2 x, x, zero;
            add.s16x2 x, x, x;
            min.s16x2 x, x, most;
            shl.b32 $1, x, 9;
        }
        """,
        "=&r,=r,r,r",
        [scales, top],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _exp2_int(exponent):
    """2**exponent for integers in [-127, 127], exactly."""
    return tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_fp4(x):
    """E2M1 codes of float32 numbers, saturating at 6; what rounds to zero has code 0 whatever its sign."""
    code = round_magnitude(tl.minimum(tl.abs(x), 6.0), 1, 1)
    return code | tl.where((x < 0) & (code != 0), 8, 0)


@triton.jit
def _round_fp4_by_rule(x, RULE: tl.constexpr):
    """E2M1 codes as an engine's rule rounds halfway numbers; see `narrowkv.quant.fp4.FP4_TIES`."""
    magnitude = tl.abs(x)
    negative = x < 0
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(7):
        midpoint = 0.25 + 0.5 * i if i < 4 else (2.5 + (i - 4) if i < 6 else 5.0)
        if RULE == "ultraquant":
            above = (magnitude > midpoint) | ((magnitude == midpoint) & negative)
        else:
            above = magnitude >= midpoint
        code += above.to(tl.int32)
    if RULE == "ultraquant":
        negative = negative & (code > 0)
    return code | tl.where(negative, 8, 0)


@triton.jit
def fp4_magnitude(code):
    """The magnitudes of E2M1 codes, float32."""
    # Exponent and mantissa in float16's place, where the exponent bias is 14 larger.
    return ((code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def narrow_fp4(x, RULE: tl.constexpr):
    """Float32 groups to E2M1 codes and E8M0 scales; bit for bit `quantize_per_group(..., exponent=RULE)`.

    Args:
        x: `[groups, size]`. A NaN makes its group's scale NaN; Inf saturates.
        RULE: "floor", "ceil", "mse", "ultraquant" or "sglang"; see `narrowkv.quant.e8m0`.

    Returns:
        int32 codes `[groups, size]` and uint8 scales `[groups]`.
    """
    LARGEST: tl.constexpr = 3.4028234663852886e38
    nan = tl.max((x != x).to(tl.int32), 1) > 0
    x = tl.where(x == x, x, 0.0)
    finite = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    amax = tl.max(tl.abs(finite), 1)
    # frexp, subnormals included: the mantissa field, and the exponent for a mantissa in [0.5, 1).
    tiny = amax < 1.1754943508222875e-38
    bits = tl.where(tiny, amax * 4294967296.0, amax).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 - tl.where(tiny, 32, 0)
    # 6 is 0.75 * 2**3.
    best = tl.where(amax == 0.0, 0, exponent - 3)
    if RULE == "ceil" or RULE == "sglang":
        best += tl.where((amax > 0.0) & ((bits & 0x7FFFFF) > 0x400000), 1, 0)
    if RULE == "sglang":
        best = tl.where(amax == 0.0, -33, tl.maximum(best, -33))
    if RULE == "ultraquant":
        product = (amax * _ULTRAQUANT_FACTOR).to(tl.int32, bitcast=True)
        best = (product >> 23) - 127 + ((product & 0x7FFFFF) >= _ABOVE_SQRT2).to(tl.int32)
        best = tl.where(amax == 0.0, -127, tl.maximum(best, -126))
    if RULE == "mse":
        floor = best
        half = floor >> 1
        unit = finite * _exp2_int(-half)[:, None] * _exp2_int(half - floor)[:, None]
        # In float64 the order of the sum does not matter, so every target chooses the same exponent.
        least = tl.full(floor.shape, float("inf"), tl.float64)
        for i in tl.static_range(4):
            tried = tl.minimum(tl.maximum(floor + (i if i < 2 else 1 - i), -127), _LARGEST_EXPONENT)
            scaled = unit * _exp2_int(floor - tried)[:, None]
            rounded = fp4_magnitude(round_fp4(scaled)) * _exp2_int(tried - floor)[:, None]
            error = (rounded - tl.abs(unit)).to(tl.float64)
            error = tl.sum(error * error, 1)
            best = tl.where(error < least, tried, best)
            least = tl.minimum(error, least)
    best = tl.minimum(tl.maximum(best, -127), _LARGEST_EXPONENT)
    scaled = tl.div_rn(x, tl.broadcast_to(_exp2_int(best)[:, None], x.shape))
    if RULE == "ultraquant" or RULE == "sglang":
        code = _round_fp4_by_rule(scaled, RULE)
    else:
        code = round_fp4(scaled)
    scale = tl.where(nan, 255, best + 127).to(tl.uint8)
    return tl.where(nan[:, None], 0, code), scale

"""Arithmetic that numpy lacks: fused multiply-add, bit fields, helpers of division.

Source: pseudo-code of the CDNA3 and CDNA4 ISA documents.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from .state import Array

_ROUNDING_BITS = np.uint64(0x1FFFFFFF)
_HALFWAY = np.uint64(0x10000000)
_SPLIT = np.float64(2**27 + 1)  # splits 53 bits into halves
_ONE = 1 << 1400  # of fractions of pi


def _sum(x: Array, y: Array) -> tuple[Array, Array]:
    """The fp64 sum of two numbers, and its error, which is exact."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def _sum_to_odd(x: Array, y: Array) -> Array:
    """The fp64 sum, of the two neighbours of an inexact one that whose last bit is set.

    Rounding it to at most 51 bits gives what rounding the exact sum gives.
    """
    total, error = _sum(x, y)
    nudge = (error != 0) & np.isfinite(error) & (total.view(np.uint64) & np.uint64(1) == 0)
    result: Array = np.where(nudge, np.nextafter(total, np.copysign(np.inf, error)), total)
    return result


def fma(x: Array, y: Array, z: Array) -> Array:
    """fp32 x * y + z with one rounding.

    The product is exact in fp64. Rounding the sum to fp64 and then to fp32 differs from one rounding only if
    the fp64 sum falls halfway between two fp32 values and was itself rounded; then all are rounded to odd.
    """
    product = np.multiply(x, y, dtype=np.float64)
    total = product + z
    if ((total.view(np.uint64) & _ROUNDING_BITS) == _HALFWAY).any():
        total = _sum_to_odd(product, np.broadcast_to(z, total.shape).astype(np.float64))
    return total.astype(np.float32)


def fma16(x: Array, y: Array, z: Array) -> Array:
    """fp16 x * y + z: product and sum fit fp64 exactly."""
    wide = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    return wide.astype(np.float16)


_exact_fma = np.frompyfunc(
    lambda x, y, z, scale: float((Fraction(x) * Fraction(y) + Fraction(z)) * Fraction(2) ** scale), 4, 1
)


def fma64(x: Array, y: Array, z: Array, scale: Array | int = 0) -> Array:
    """fp64 (x * y + z) * 2**scale with one rounding; infinite where x * y + z is.

    The product of the mantissas is the sum of two fp64 numbers (Dekker), and so are the sums with z; the last
    but one is rounded to odd (Boldo and Melquiond). Subnormal results are computed with fractions.
    """
    x, y, z, scale = np.broadcast_arrays(x, y, z, np.int32(scale))
    (a, a_exponent), (b, b_exponent), (c, c_exponent) = np.frexp(x), np.frexp(y), np.frexp(z)
    exponent = a_exponent + b_exponent
    high = a * b
    (a_top, b_top) = (v * _SPLIT - (v * _SPLIT - v) for v in (a, b))
    low = ((a_top * b_top - high) + a_top * (b - b_top) + (a - a_top) * b_top) + (a - a_top) * (b - b_top)
    above = c_exponent - exponent
    middle, low = _sum(np.ldexp(c, np.clip(above, -300, 300)), low)
    high, middle = _sum(high, middle)
    total = high + _sum_to_odd(low, middle)
    unscaled = np.ldexp(total, exponent)
    result = np.where(np.isinf(unscaled), unscaled, np.ldexp(total, exponent + scale))
    result = np.where((above > 300) & (z != 0), np.ldexp(z, scale), result)
    product_is_finite = np.isfinite(x) & np.isfinite(y)
    special = (x == 0) | (y == 0) | ~(product_is_finite & np.isfinite(z))
    plain = np.where(product_is_finite & np.isinf(z), z, np.ldexp(x * y + z, scale))
    result = np.where(special, plain, result)
    subnormal = ~special & (np.abs(result) <= np.finfo(np.float64).tiny)
    if subnormal.any():
        result[subnormal] = _exact_fma(*(v[subnormal] for v in (x, y, z)), scale[subnormal].astype(object))
    return result


def fraction(x: Array) -> Array:
    """X - floor(x), kept below 1."""
    below_one = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    result: Array = np.minimum(x - np.floor(x), below_one)
    return result


def exponent_of(x: Array) -> Array:
    """Exponent such that the mantissa is in [0.5, 1); 0 for zero, infinity and NaN."""
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32)


def to_integer(x: Array, dtype: type[np.integer[Any]]) -> Array:
    """Float to integer: out of range saturates, NaN gives 0."""
    info = np.iinfo(dtype)
    wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=float(info.max), neginf=float(info.min))
    return np.clip(wide, info.min, info.max).astype(dtype)


def _extreme(function: Any, zeros: Any, x: Array, y: Array) -> Array:
    result: Array = function(x, y)
    unsigned: Any = {2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    zero = result == 0
    if zero.any():
        both = zero & (x == 0) & (y == 0)
        bits = zeros(np.ascontiguousarray(x).view(unsigned), np.ascontiguousarray(y).view(unsigned))
        result = np.where(both, bits.view(x.dtype), result)
    nan = np.isnan(x) | np.isnan(y)
    if nan.any():
        quiet = unsigned(1 << {2: 9, 4: 22, 8: 51}[x.dtype.itemsize])
        for source in (y, x):
            signals = np.isnan(source) & ((np.ascontiguousarray(source).view(unsigned) & quiet) == 0)
            result = np.where(signals, x.dtype.type(np.nan), result)
    return result


def largest(x: Array, y: Array) -> Array:
    """v_max: +0 is above -0; of a number and a quiet NaN the number, of a signalling NaN a quiet one."""
    return _extreme(np.fmax, np.bitwise_and, x, y)


def smallest(x: Array, y: Array) -> Array:
    """v_min: as `largest`."""
    return _extreme(np.fmin, np.bitwise_or, x, y)


def maximum(x: Array, y: Array) -> Array:
    """v_maximum: +0 is above -0, and a NaN stays a NaN."""
    return _extreme(np.maximum, np.bitwise_and, x, y)


def minimum(x: Array, y: Array) -> Array:
    """v_minimum: as `maximum`."""
    return _extreme(np.minimum, np.bitwise_or, x, y)


def median(x: Array, y: Array, z: Array) -> Array:
    """Middle of three integers."""
    return np.maximum(np.minimum(x, y), np.minimum(np.maximum(x, y), z))


def median_float(x: Array, y: Array, z: Array) -> Array:
    """Middle of three; with a NaN among them, the least of the others."""
    top = largest(largest(x, y), z)
    middle = np.where(top == x, largest(y, z), np.where(top == y, largest(x, z), largest(x, y)))
    return np.where(np.isnan(x) | np.isnan(y) | np.isnan(z), smallest(smallest(x, y), z), middle)


def multiply_high(x: Array, y: Array) -> Array:
    """Upper 32 bits of the 64-bit product."""
    wide = np.int64 if x.dtype == np.int32 else np.uint64
    return ((x.astype(wide) * y.astype(wide)) >> wide(32)).astype(x.dtype)


def shift_add_64(x: Array, amount: Array, y: Array) -> Array:
    """(x << amount) + y on 64 bits."""
    result: Array = (x << (amount & np.uint32(7)).astype(np.uint64)) + y
    return result


def multiply_add_wide(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z with 16-bit factors and a 32-bit addend."""
    result: Array = x.astype(z.dtype) * y.astype(z.dtype) + z
    return result


def scale_f16(x: Array, exponent: Array) -> Array:
    """Return x * 2**exponent in fp16."""
    return np.ldexp(x.astype(np.float32), exponent).astype(np.float16)


def byte_to_f32(x: Array, byte: int) -> Array:
    """One byte of a word as a number."""
    return ((x >> np.uint32(8 * byte)) & np.uint32(255)).astype(np.float32)


def low24(x: Array) -> Array:
    """The low 24 bits, sign-extended."""
    return (x << np.int32(8)) >> np.int32(8)


def bit_field(x: Array, offset: Array, width: Array) -> Array:
    """Bits [offset, offset + width), sign-extended for int32."""
    offset, width = offset & np.uint32(31), width & np.uint32(31)
    keep = (np.uint32(1) << width) - np.uint32(1)
    field = (x >> offset.astype(x.dtype)).view(np.uint32) & keep
    if x.dtype == np.int32:
        sign = (np.uint32(1) << width) >> np.uint32(1)
        field = ((field ^ sign) - sign).view(np.int32)
    result: Array = field
    return result


def align(high: Array, low: Array, shift: Array) -> Array:
    """Low 32 bits of the 64-bit value (high:low) shifted right."""
    wide = (high.astype(np.uint64) << np.uint64(32)) | low
    return (wide >> shift.astype(np.uint64)).astype(np.uint32)


def count_bits(x: Array) -> Array:
    """Number of bits set, in the argument's type."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, -1)
    result: Array = np.unpackbits(octets, axis=-1).sum(axis=-1).astype(x.dtype)
    return result


def reverse_bits(x: Array) -> Array:
    """The 32 bits in reverse order."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, 4)
    bits = np.unpackbits(octets, axis=-1, bitorder="little")[..., ::-1]
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)[..., 0]


def leading_zeros(x: Array) -> Array:
    """Zeros before the highest set bit of 32; all ones if there is none."""
    exponent = np.frexp(x.astype(np.float64))[1]
    return np.where(x == 0, np.uint32(0xFFFFFFFF), (32 - exponent).astype(np.uint32))


def trailing_zeros(x: Array) -> Array:
    """Index of the lowest set bit; all ones if there is none."""
    return np.where(x == 0, np.uint32(0xFFFFFFFF), count_bits((x & (~x + np.uint32(1))) - np.uint32(1)))


def leading_sign_bits(x: Array) -> Array:
    """Bits equal to the sign bit, counted from the top; all ones for 0 and -1."""
    return leading_zeros(np.where(x < 0, ~x, x).astype(np.uint32))


def prng(x: Array) -> Array:
    """One step of the gfx950 linear feedback shift register."""
    return (x << np.uint32(1)) ^ np.where(x >> np.uint32(31), np.uint32(0xC5), np.uint32(0))


@lru_cache(maxsize=4096)
def _byte_plan(selector: int) -> tuple[tuple[tuple[bool, int, int], ...], int] | None:
    """Byte selector as terms (from the high source?, mask, left shift) and constant bits."""
    terms: dict[tuple[bool, int], int] = {}
    constant = 0
    for position in range(4):
        choice = (selector >> (8 * position)) & 0xFF
        if choice < 8:
            shift = 8 * (position - (choice & 3))
            key = (choice >= 4, shift)
            terms[key] = terms.get(key, 0) | (0xFF << (8 * position))
        elif choice >= 13:
            constant |= 0xFF << (8 * position)
        elif choice < 12:
            return None
    return tuple((high, mask, shift) for (high, shift), mask in terms.items()), constant


def permute_bytes(high: Array, low: Array, selector: Array) -> Array:
    """v_perm_b32: each selector byte picks a byte of (high:low), a replicated sign, 0x00 or 0xFF."""
    plan = None
    if selector.shape[-1] == 1 and (selector == selector[0]).all():
        plan = _byte_plan(int(selector.flat[0]))
    if plan is None:
        return _permute_bytes_by_lane(high, low, selector)
    result: Array | None = None
    for from_high, mask, shift in plan[0]:
        value = high if from_high else low
        if shift > 0:
            value = value << np.uint32(shift)
        elif shift < 0:
            value = value >> np.uint32(-shift)
        value = value & np.uint32(mask)
        result = value if result is None else result | value
    constant = np.array([[plan[1]]], np.uint32)
    return constant if result is None else result | constant


def _permute_bytes_by_lane(high: Array, low: Array, selector: Array) -> Array:
    high, low, selector = np.broadcast_arrays(high, low, selector)
    wide = (high.astype(np.uint64) << np.uint64(32)) | low
    result = np.zeros(high.shape, np.uint32)
    for position in range(4):
        choice = (selector >> np.uint32(8 * position)) & np.uint32(0xFF)
        picked = (wide >> (np.uint64(8) * (choice & np.uint32(7)))) & np.uint64(0xFF)
        sign = (wide >> (np.uint64(16) * (choice & np.uint32(3)) + np.uint64(15))) & np.uint64(1)
        byte = np.where(choice < 8, picked, np.where(choice < 12, sign * np.uint64(0xFF), np.uint64(0)))
        byte = np.where(choice > 12, np.uint64(0xFF), byte)
        result = result | (byte.astype(np.uint32) << np.uint32(8 * position))
    return result


def two_over_pi(x: Array, segment: Array) -> Array:
    """v_trig_preop_f64: 53 bits of 2 / pi, for the reduction of x to a multiple of pi / 2 and a rest."""
    exponent = _biased_exponent(x)
    shift = 53 * (segment & np.uint32(31)).astype(np.int32) + np.maximum(exponent - 1077, 0)
    result: Array = np.ldexp(_two_over_pi()[shift], np.where(exponent >= 1968, 75, -53) - shift)
    return result


@lru_cache(maxsize=1)
def _two_over_pi() -> Array:
    """53 bits of 2 / pi, of which 1201 are kept, from each position on."""

    def arc_tangent(n: int) -> int:  # of 1 / n
        terms = ((-1) ** k * (_ONE // n ** (2 * k + 1)) // (2 * k + 1) for k in range(1300))
        return sum(terms)

    pi = 16 * arc_tangent(5) - 4 * arc_tangent(239)
    bits = (2 * _ONE << 1201) // pi << 4096
    return np.array([bits >> (4096 + 1201 - 53 - k) & ((1 << 53) - 1) for k in range(4096)], np.float64)


def _biased_exponent(x: Array) -> Array:
    unsigned, mantissa, mask = (np.uint32, 23, 255) if x.dtype == np.float32 else (np.uint64, 52, 2047)
    bits: Array = np.ascontiguousarray(x).view(unsigned)
    return (bits >> unsigned(mantissa) & unsigned(mask)).astype(np.int32)


def div_scale(x: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """v_div_scale: x scaled so that the division neither overflows nor loses bits, and the VCC lanes."""
    x, denominator, numerator = (
        np.ascontiguousarray(v) for v in np.broadcast_arrays(x, denominator, numerator)
    )
    tiny = np.finfo(x.dtype).tiny
    apart, least, scale = (96, 23, 64) if x.dtype == np.float32 else (768, 53, 128)
    en, ed = _biased_exponent(numerator), _biased_exponent(denominator)
    quotient = numerator.astype(np.float64) / denominator
    zero = (numerator == 0) | (denominator == 0)
    far = ~zero & (en - ed >= apart)
    denormal_denominator = ~zero & ~far & (np.abs(denominator) < tiny)
    rest = ~zero & ~far & ~denormal_denominator
    denormal_reciprocal = np.abs(1.0 / denominator.astype(np.float64)) < tiny
    denormal_quotient = np.abs(quotient) < tiny
    small_numerator = rest & ~denormal_reciprocal & ~denormal_quotient & (en <= least)
    vcc = far | (rest & denormal_quotient)
    up = (
        denormal_denominator | (far & (x == denominator)) | small_numerator
        | (rest & ~denormal_reciprocal & denormal_quotient & (x == numerator))
    )  # fmt: skip
    # The ISA document scales the denominator up where the quotient is
    # denormal too, which would overflow; down is what gives the quotient.
    down = rest & denormal_reciprocal & (~denormal_quotient | (x == denominator))
    result = np.ldexp(x, np.where(up, scale, np.where(down, -scale, 0)).astype(np.int32))
    return np.where(zero, x.dtype.type(np.nan), result), vcc


def div_fmas(x: Array, y: Array, z: Array, scaled: Array) -> Array:
    """v_div_fmas: x * y + z, divided by v_div_scale's factor in lanes where VCC is set; rounded once.

    Two would round some subnormal quotients wrongly.
    """
    single = z.dtype == np.float32
    if not scaled.any():
        return fma(x, y, z) if single else fma64(x, y, z)
    scale, bias = (64, 127) if single else (128, 1023)
    shift = np.where(scaled, np.where(_biased_exponent(z) > bias, scale, -scale), 0).astype(np.int32)
    if not single:
        return fma64(x, y, z, shift)
    total = _sum_to_odd(np.multiply(x, y, dtype=np.float64), z.astype(np.float64))
    return np.ldexp(total, shift).astype(np.float32)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """v_div_fixup: the special cases of numerator / denominator.

    The ISA documents do not say that a NaN as the quotient of two numbers is an overflow. The division of a
    large number by a subnormal one needs it, and tinygrad found it on hardware.
    """
    kind = quotient.dtype.type
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    signed = np.where(negative, kind(-1), kind(1))
    result: Array = np.copysign(quotient, signed)
    zero = np.isinf(denominator) | (numerator == 0)
    result = np.where(zero, np.copysign(kind(0), signed), result)
    infinite = (denominator == 0) | np.isinf(numerator) | (np.isnan(quotient) & ~zero)
    result = np.where(infinite, np.copysign(kind(np.inf), signed), result)
    invalid = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    invalid = invalid | np.isnan(denominator) | np.isnan(numerator)
    np.copyto(result, kind(np.nan), where=invalid)
    return result


def classify(x: Array, wanted: Array) -> Array:
    """v_cmp_class: is x in one of the classes whose bits are set?

    Bits: 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal,
    9 +inf.
    """
    size = x.dtype.itemsize
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    quiet_bit = {2: 9, 4: 22, 8: 51}[size]
    quiet = ((np.ascontiguousarray(x).view(unsigned) >> unsigned(quiet_bit)) & unsigned(1)).astype(bool)
    tiny = np.finfo(x.dtype).tiny
    negative = np.signbit(x)
    bit = np.where(np.abs(x) < tiny, np.where(negative, 4, 7), np.where(negative, 3, 8))
    bit = np.where(x == 0, np.where(negative, 5, 6), bit)
    bit = np.where(np.isinf(x), np.where(negative, 2, 9), bit)
    bit = np.where(np.isnan(x), np.where(quiet, 1, 0), bit)
    return ((wanted >> bit.astype(np.uint32)) & np.uint32(1)).astype(bool)

"""Device helpers (`@triton.jit`): from a stored format to a compute type and back.

FP4 is always widened by integer arithmetic: E2M1 moved to the right bits *is* a float16 with a smaller bias.
Two routes widen FP8. **native** uses the compiler's conversion and is for targets with an instruction for the
format. **bits** takes the bytes as uint8 and builds float16 by integer arithmetic on packed pairs: E4M3
shifted by seven bits is a float16 with a smaller exponent bias, subnormals included. The result is exact up
to a power of two that the caller folds into a scale (`widening_exponent`). It converts every code, including
-0 and NaN.
"""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.quant.e8m0 import ABOVE_SQRT2, ULTRAQUANT_FACTOR
from narrowkv.runtime.targets import Target

_ULTRAQUANT_FACTOR = tl.constexpr(ULTRAQUANT_FACTOR)
_ABOVE_SQRT2 = tl.constexpr(ABOVE_SQRT2)
NATIVE = "native"
BITS = "bits"
# Bytes of an OCP cache reinterpreted as FNUZ: half the value. Wrong for 0x80 and NaN, so only for caches free
# of both.
FNUZ_ALIAS = "fnuz_alias"


def widening_exponent(format_name: str, route: str) -> int:
    """The exponent of the factor that `widen` does not apply: value = widened * 2**exponent."""
    if format_name == "fp4_e2m1":
        return 6 if route == "ptx8" else 14
    if route == FNUZ_ALIAS:
        return 1
    if route == BITS:
        return {"fp8_e4m3fn": 8, "fp8_e4m3fnuz": 7, "fp8_e5m2": 0}[format_name]
    return 0


def widen_route(target: Target, format_name: str, *, negative_zero_free: bool = False) -> str:
    """The fastest way to widen a stored format on a target: "native", "bits" or "fnuz_alias".

    gfx942 converts and multiplies FNUZ only. OCP bytes that hold no negative zero can be read there as FNUZ
    of half the value. That serves a caller who multiplies FP8 by FP8. For widening alone, bit arithmetic on
    16-bit words costs the same (issue over memory time of decode: 0.44 and 0.45) and reads any byte.

    Args:
        target: what the kernel runs on.
        format_name: the stored format.
        negative_zero_free: whether the bytes hold no 0x80 and no NaN, and may be read as FNUZ.
    """
    if format_name == "fp4_e2m1":
        return BITS
    if not format_name.startswith("fp8_"):
        return NATIVE
    if format_name in target.fp8_formats and (format_name == target.native_fp8 or not target.is_amd):
        return NATIVE
    if target.name == "gfx942" and format_name == "fp8_e4m3fn" and negative_zero_free:
        return FNUZ_ALIAS
    return BITS


@triton.jit
def _e4m3fn_bits_to_fp16(high):
    # Shifted right once with its sign: s s eeee mmm 0000000; the copy of the sign is cleared.
    bits = (high >> 1) & -16385
    # Adding one to the mantissa carries into bit 14 for the NaN code only; that bit sets the exponent to all
    # ones.
    return (bits | ((bits + 128) & 16384)).to(tl.float16, bitcast=True)


@triton.jit
def _e4m3fnuz_bits_to_fp16(high, COMPARE: tl.constexpr):
    bits = (high >> 1) & -16385
    if COMPARE:
        nan = tl.full(high.shape, 0x7E00, tl.int16)
        bits = tl.where(high == -32768, nan, bits)
    else:
        # Only in the NaN code is the sign the lowest bit that is set; it is copied into the exponent.
        bits |= (high & -high & -32768) >> 6
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _fp8_bits_to_fp16(high, FORMAT: tl.constexpr, COMPARE: tl.constexpr = True):
    """FP8 codes in the high bytes of int16 as float16, still to be multiplied by 2**widening_exponent."""
    if FORMAT == "fp8_e4m3fn":
        y = _e4m3fn_bits_to_fp16(high)
    elif FORMAT == "fp8_e4m3fnuz":
        y = _e4m3fnuz_bits_to_fp16(high, COMPARE)
    else:
        y = high.to(tl.float16, bitcast=True)
    return y


@triton.jit
def widen(
    x, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr, COMPARE: tl.constexpr = True
):  # fmt: skip
    """A stored tile as float16 or bfloat16, still to be multiplied by 2**widening_exponent(FORMAT, ROUTE).

    Args:
        x: the tile as loaded: the FP8 element type for "native", uint8 for the other routes, or a 16-bit
            type.
        FORMAT: format name; ROUTE: "native", "bits" or "fnuz_alias"; DTYPE: tl.float16 or tl.bfloat16.
        COMPARE: whether "bits" finds an FNUZ NaN by comparing. On AMD that takes a pair of scalar registers
            for every element of a lane, more than there are beside a large tile; NVIDIA is slower without.
    """
    if ROUTE == "bits":
        y = _fp8_bits_to_fp16((x.to(tl.uint16) << 8).to(tl.int16, bitcast=True), FORMAT, COMPARE)
    elif ROUTE == "fnuz_alias":
        y = x.to(tl.float8e4b8, bitcast=True).to(DTYPE)
    elif FORMAT == "fp8_e5m2" and tl.bfloat16 == DTYPE:
        # Not all compilers keep NaN on the direct way; every E5M2 number is a float16.
        y = x.to(tl.float16)
    else:
        y = x
    return y.to(DTYPE)


@triton.jit
def _fp8_pairs(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr):
    """Even and odd columns of int16 pairs of FP8."""
    if ROUTE == "ptx":
        # Two pairs a register: gather the even and the odd bytes, convert each two at once. The compiler
        # takes eight.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 t;
                .reg .b16 even, odd;
                prmt.b32 t, $2, 0, 0x3120;
                mov.b32 {even, odd}, t;
                cvt.rn.f16x2.e4m3x2 $0, even;
                cvt.rn.f16x2.e4m3x2 $1, odd;
            }
            """,
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    if ROUTE == "bits":
        return _fp8_bits_to_fp16(x << 8, FORMAT).to(DTYPE), _fp8_bits_to_fp16(x & -256, FORMAT).to(DTYPE)
    even = (x & 0xFF).to(tl.uint8)
    odd = ((x >> 8) & 0xFF).to(tl.uint8)
    if ROUTE == "native":
        if FORMAT == "fp8_e4m3fn":
            even, odd = even.to(tl.float8e4nv, bitcast=True), odd.to(tl.float8e4nv, bitcast=True)
        elif FORMAT == "fp8_e4m3fnuz":
            even, odd = even.to(tl.float8e4b8, bitcast=True), odd.to(tl.float8e4b8, bitcast=True)
        else:
            even, odd = even.to(tl.float8e5, bitcast=True), odd.to(tl.float8e5, bitcast=True)
    return widen(even, FORMAT, ROUTE, DTYPE), widen(odd, FORMAT, ROUTE, DTYPE)


@triton.jit
def _fp4_nibble(word, INDEX: tl.constexpr):
    """Nibble INDEX of int16 words as float16, still to be multiplied by 2**14.

    The sign goes to bit 15, exponent and mantissa to bits 11..9, where E2M1 is a float16 of a smaller bias.
    """
    TO_SIGN: tl.constexpr = 12 - 4 * INDEX
    sign = (word << TO_SIGN) & -32768
    if TO_SIGN >= 3:
        magnitude = (word << (TO_SIGN - 3)) & 0x0E00
    else:
        magnitude = (word >> 3) & 0x0E00
    return (sign | magnitude).to(tl.float16, bitcast=True)


@triton.jit
def _fp4_quads(x, ROUTE: tl.constexpr):
    """The four nibbles of int16 words as float16, still to be multiplied by 2**14."""
    if ROUTE == "ptx":
        # Two words a register, so that a shift and a mask serve two elements; the compiler takes each apart.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 s, m;
                shl.b32 s, $4, 12;
                shl.b32 m, $4, 9;
                and.b32 m, m, 0x0E000E00;
                lop3.b32 $0, s, 0x80008000, m, 0xEA;
                shl.b32 s, $4, 8;
                shl.b32 m, $4, 5;
                and.b32 m, m, 0x0E000E00;
                lop3.b32 $1, s, 0x80008000, m, 0xEA;
                shl.b32 s, $4, 4;
                shl.b32 m, $4, 1;
                and.b32 m, m, 0x0E000E00;
                lop3.b32 $2, s, 0x80008000, m, 0xEA;
                shr.b32 m, $4, 3;
                and.b32 m, m, 0x0E000E00;
                lop3.b32 $3, $4, 0x80008000, m, 0xEA;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ROUTE == "ptx8":
        # A byte of E4M3 holds E2M1 with a smaller bias, and the target converts two at once: 2**6 is left.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 x, s, m;
                .reg .b16 lo, hi;
                prmt.b32 x, $4, 0, 0x3120;
                shl.b32 s, x, 4;
                shl.b32 m, x, 2;
                and.b32 m, m, 0x1C1C1C1C;
                lop3.b32 s, s, 0x80808080, m, 0xEA;
                mov.b32 {lo, hi}, s;
                cvt.rn.f16x2.e4m3x2 $0, lo;
                cvt.rn.f16x2.e4m3x2 $2, hi;
                shr.b32 m, x, 2;
                and.b32 m, m, 0x1C1C1C1C;
                lop3.b32 s, x, 0x80808080, m, 0xEA;
                mov.b32 {lo, hi}, s;
                cvt.rn.f16x2.e4m3x2 $1, lo;
                cvt.rn.f16x2.e4m3x2 $3, hi;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return _fp4_nibble(x, 0), _fp4_nibble(x, 1), _fp4_nibble(x, 2), _fp4_nibble(x, 3)


@triton.jit
def widen_parts(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """A tile of packed words as a tuple of PARTS tiles: element `c * PARTS + i` lies in column c of tile i.

    Every tile is still to be multiplied by 2**widening_exponent(FORMAT, ROUTE). No elements are shuffled: a
    dot product may sum its columns in any order, and `join_parts` restores the order of columns of a result.

    Args:
        x: PARTS 1: stored elements, as `widen` takes them. PARTS 2: int16 pairs of FP8 (LDS can transpose
            16-bit elements only), or uint8 bytes of FP4. PARTS 4: int16 words of FP4.
        FORMAT, ROUTE, DTYPE: as for `widen`; ROUTE may also be "ptx" for 16-bit words on NVIDIA, in float16.
    """
    if FORMAT == "fp4_e2m1":
        if PARTS == 4:
            a, b, c, d = _fp4_quads(x, ROUTE)
            return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)
        else:
            word = x.to(tl.int16)
            return _fp4_nibble(word, 0).to(DTYPE), _fp4_nibble(word, 1).to(DTYPE)
    elif PARTS == 2:
        return _fp8_pairs(x, FORMAT, ROUTE, DTYPE)
    else:
        return (widen(x, FORMAT, ROUTE, DTYPE),)


@triton.jit
def join_parts(parts, PARTS: tl.constexpr):
    """Undoes the column order of `widen_parts`: tile i's column c becomes column `c * PARTS + i`."""
    if PARTS == 4:
        joined = tl.interleave(tl.interleave(parts[0], parts[2]), tl.interleave(parts[1], parts[3]))
    elif PARTS == 2:
        joined = tl.interleave(parts[0], parts[1])
    else:
        joined = parts[0]
    return joined


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
def _round_magnitude(magnitude, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
    """Code of a float32 magnitude within a small format's range: nearest even, subnormals included."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = magnitude.to(tl.int32, bitcast=True)
    # Adding just under half of the last kept place, plus the lowest kept bit, rounds to nearest even. A carry
    # increments the exponent.
    rounded = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Subnormals are multiples of the smallest one: in multiples of it, adding 2**23 leaves the rounded count
    # in the low mantissa bits.
    UNITS: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    subnormal = (magnitude * UNITS + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    return tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def narrow_fp8(x, FORMAT: tl.constexpr):
    """Float32 to the bytes of an FP8 format: nearest even, saturating, NaN kept, never 0x80 for a zero.

    Integer arithmetic, the same on every target: casts differ between targets in saturation and in what they
    do with -0.
    """
    if FORMAT == "fp8_e4m3fn":
        MAX: tl.constexpr = 448.0
        BIAS: tl.constexpr = 7
        MANTISSA: tl.constexpr = 3
        NAN: tl.constexpr = 0x7F
    elif FORMAT == "fp8_e4m3fnuz":
        MAX: tl.constexpr = 240.0
        BIAS: tl.constexpr = 8
        MANTISSA: tl.constexpr = 3
        NAN: tl.constexpr = 0x80
    else:
        MAX: tl.constexpr = 57344.0
        BIAS: tl.constexpr = 15
        MANTISSA: tl.constexpr = 2
        NAN: tl.constexpr = 0x7F
    code = _round_magnitude(tl.minimum(tl.abs(x), MAX), BIAS, MANTISSA)
    sign = tl.where((x < 0) & (code != 0), 0x80, 0)
    return tl.where(x != x, NAN, code | sign).to(tl.uint8)


@triton.jit
def cast_fp8(x, FORMAT: tl.constexpr):
    """`narrow_fp8` of E4M3 by the target's own cast: one instruction for two numbers of a native format."""
    if FORMAT == "fp8_e4m3fn":
        TYPE: tl.constexpr = tl.float8e4nv
        MAX: tl.constexpr = 448.0
        TINY: tl.constexpr = 2.0**-10
    else:
        TYPE: tl.constexpr = tl.float8e4b8
        MAX: tl.constexpr = 240.0
        TINY: tl.constexpr = 2.0**-11
    # Not every cast saturates, and a negative number that rounds to zero must not become 0x80.
    x = tl.where(x != x, x, tl.minimum(tl.maximum(x, -MAX), MAX))
    return tl.where(tl.abs(x) <= TINY, 0.0, x).to(TYPE).to(tl.uint8, bitcast=True)


@triton.jit
def e8m0_to_fp32(byte):
    """E8M0 scale bytes to float32: 2**(byte - 127); 0x00 is 2**-127 (a subnormal), 0xFF is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.maximum(exponent << 23, 0x00400000)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def tile_exponent(scales):
    """The largest E8M0 byte of a tile, as uint8; NaN bytes are left out."""
    numbers = tl.where(scales == 255, 0, scales.to(tl.int32))
    return tl.max(tl.max(numbers, 1), 0).to(tl.uint8)


@triton.jit
def exponents_to_fp16(scales, top):
    """E8M0 bytes `[N, groups]` as float16 factors 2**(15 + scale - top), for NVIDIA; NaN for 255.

    What is less than 2**-29 of the tile's largest becomes zero. Two bytes at a time are the exponents of two
    numbers, doubled: 63 is then a NaN.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 x, t, zero, most;
            mov.b32 zero, 0;
            mov.b32 most, 0x003F003F;
            prmt.b32 t, $3, 0, 0x4140;
            sub.u32 t, 0x001E001E, t;
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
def _round_fp4(x):
    """E2M1 codes of float32 numbers, saturating at 6; what rounds to zero has code 0 whatever its sign."""
    code = _round_magnitude(tl.minimum(tl.abs(x), 6.0), 1, 1)
    return code | tl.where((x < 0) & (code != 0), 8, 0)


@triton.jit
def _round_fp4_as(x, RULE: tl.constexpr):
    """E2M1 codes as an engine's rule rounds halfway numbers; see `narrowkv.quant.fp4.FP4_TIES`."""
    magnitude = tl.abs(x)
    negative = x < 0
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(7):
        MIDPOINT: tl.constexpr = 0.25 + 0.5 * i if i < 4 else (2.5 + (i - 4) if i < 6 else 5.0)
        if RULE == "ultraquant":
            above = (magnitude > MIDPOINT) | ((magnitude == MIDPOINT) & negative)
        else:
            above = magnitude >= MIDPOINT
        code += above.to(tl.int32)
    if RULE == "ultraquant":
        negative = negative & (code > 0)
    return code | tl.where(negative, 8, 0)


@triton.jit
def _fp4_magnitude(code):
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
            tried = tl.minimum(tl.maximum(floor + (i if i < 2 else 1 - i), -127), 127)
            scaled = unit * _exp2_int(floor - tried)[:, None]
            rounded = _fp4_magnitude(_round_fp4(scaled)) * _exp2_int(tried - floor)[:, None]
            error = (rounded - tl.abs(unit)).to(tl.float64)
            error = tl.sum(error * error, 1)
            best = tl.where(error < least, tried, best)
            least = tl.minimum(error, least)
    best = tl.minimum(tl.maximum(best, -127), 127)
    scaled = tl.div_rn(x, tl.broadcast_to(_exp2_int(best)[:, None], x.shape))
    if RULE == "ultraquant" or RULE == "sglang":
        code = _round_fp4_as(scaled, RULE)
    else:
        code = _round_fp4(scaled)
    scale = tl.where(nan, 255, best + 127).to(tl.uint8)
    return tl.where(nan[:, None], 0, code), scale

"""Device helpers (`@triton.jit`): from a stored format to a compute type and back.

Two routes widen FP8. **native** asks the compiler for the conversion and suits targets with an instruction
for the format. **bits** takes the bytes as uint8 and builds float16 by integer arithmetic on packed pairs:
E4M3 shifted by
seven *is* a float16 with a smaller exponent bias, subnormals included, so the result is exact up to a power
of two that
the caller folds into a scale (`widening_exponent`). It reads every code rightly, -0 and NaN among them.
"""

import narrowkv.quant.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.quant.targets import Target

NATIVE = "native"
BITS = "bits"
# Bytes of an OCP cache reinterpreted as FNUZ: half the value. Wrong for 0x80 and NaN, so only for caches free
# of both.
FNUZ_ALIAS = "fnuz_alias"


def widening_exponent(format_name: str, route: str) -> int:
    """The power of two that `widen` leaves out: real value = widened * 2**exponent."""
    if route == FNUZ_ALIAS:
        return 1
    if route == BITS:
        return {"fp8_e4m3fn": 8, "fp8_e4m3fnuz": 7, "fp8_e5m2": 0}[format_name]
    return 0


def widen_route(target: Target, format_name: str, *, negative_zero_free: bool) -> str:
    """How a stored format is best read on a target: "native", "bits" or "fnuz_alias"."""
    if not format_name.startswith("fp8_"):
        return NATIVE
    if format_name in target.fp8_formats and (format_name == target.native_fp8 or not target.is_amd):
        return NATIVE
    if target.name == "gfx942" and format_name == "fp8_e4m3fn" and negative_zero_free:
        return FNUZ_ALIAS
    return BITS


@triton.jit
def _e4m3fn_bits_to_fp16(x):
    # The byte in the high half, shifted right once with its sign: s s eeee mmm 0000000; the copy of the sign
    # is cleared.
    high = (x.to(tl.uint16) << 8).to(tl.int16, bitcast=True)
    bits = (high >> 1) & -16385
    # Only the NaN code carries into bit 14 when one mantissa unit is added; that bit makes the exponent all
    # ones.
    return (bits | ((bits + 128) & 16384)).to(tl.float16, bitcast=True)


@triton.jit
def _e4m3fnuz_bits_to_fp16(x):
    high = (x.to(tl.uint16) << 8).to(tl.int16, bitcast=True)
    bits = (high >> 1) & -16385
    nan = tl.full(x.shape, 0x7E00, tl.int16)
    return tl.where(x == 128, nan, bits).to(tl.float16, bitcast=True)


@triton.jit
def _e5m2_bits_to_fp16(x):
    return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def widen(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr):
    """A stored tile as float16 or bfloat16, short of 2**widening_exponent(FORMAT, ROUTE).

    Args:
        x: the tile as loaded: the FP8 element type for "native", uint8 for the other routes, or a 16-bit
            type.
        FORMAT: format name; ROUTE: "native", "bits" or "fnuz_alias"; DTYPE: tl.float16 or tl.bfloat16.
    """
    if ROUTE == "bits":
        if FORMAT == "fp8_e4m3fn":
            y = _e4m3fn_bits_to_fp16(x)
        elif FORMAT == "fp8_e4m3fnuz":
            y = _e4m3fnuz_bits_to_fp16(x)
        else:
            y = _e5m2_bits_to_fp16(x)
    elif ROUTE == "fnuz_alias":
        y = x.to(tl.float8e4b8, bitcast=True).to(DTYPE)
    else:
        y = x
    return y.to(DTYPE)


@triton.jit
def widen_pairs(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr):
    """Even and odd columns of a tile read as 16-bit pairs of FP8: LDS can transpose 16-bit elements only."""
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
    DROPPED: tl.constexpr = 23 - MANTISSA
    magnitude = tl.minimum(tl.abs(x), MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Adding just under half a unit, plus the kept low bit, rounds to nearest even; the carry moves the
    # exponent.
    rounded = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Subnormals are multiples of one unit: adding 2**23 in units leaves the rounded count in the low mantissa
    # bits.
    UNITS: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    subnormal = (magnitude * UNITS + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    sign = tl.where((x < 0) & (code != 0), 0x80, 0)
    return tl.where(x != x, NAN, code | sign).to(tl.uint8)


@triton.jit
def e8m0_to_fp32(byte):
    """E8M0 scale bytes to float32: 2**(byte - 127); 0x00 is 2**-127 (a subnormal), 0xFF is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)

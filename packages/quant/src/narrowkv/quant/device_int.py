"""Device helpers (`@triton.jit`) for INT8 and INT4 with a scale per token and head; see `int_tokens`."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.quant.formats import INT8_EXPONENT
from narrowkv.quant.int_tokens import LEAST_SCALE, MOST_FINITE

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_MOST_FINITE = tl.constexpr(MOST_FINITE)
_SIGN_OF_INT8 = tl.constexpr(128 * 2.0**-INT8_EXPONENT)
# PTX for two words in a register, so that one instruction serves two elements. Each text has one result, as
# in `narrowkv.quant.device`.
_BYTES_OF_INT8 = """
    {
        .reg .b32 t, sign;
        mov.b32 sign, 0x00800080;
        xor.b32 t, $1, 0x80808080;
        shr.b32 t, t, %d;
        and.b32 t, t, 0x00FF00FF;
        sub.f16x2 $0, t, sign;
    }
"""
_BYTES_OF_INT8_EVEN, _BYTES_OF_INT8_ODD = (tl.constexpr(_BYTES_OF_INT8 % bits) for bits in (0, 8))
_NIBBLES_OF_INT4 = """
    {
        .reg .b32 w;
        %s.b32 w, $1, %d;
        and.b32 w, w, 0x00F000F0;
        sub.f16x2 $0, w, $2;
    }
"""
_INT4_0, _INT4_1, _INT4_2, _INT4_3 = (
    tl.constexpr(_NIBBLES_OF_INT4 % move) for move in (("shl", 4), ("shr", 0), ("shr", 4), ("shr", 8))
)


@triton.jit
def _fp16_from_128(code, DTYPE: tl.constexpr):
    """INT8 plus 128, in uint16, as numbers in DTYPE that are still to be multiplied by 2**INT8_EXPONENT."""
    return (code.to(tl.float16, bitcast=True) - _SIGN_OF_INT8).to(DTYPE)


@triton.jit
def widen_int8(x, ROUTE: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """Bytes (uint8, PARTS 1) or int16 pairs of bytes (PARTS 2) as PARTS tiles in DTYPE; see `widen_parts`."""
    if PARTS == 1:
        return (_fp16_from_128((x ^ 0x80).to(tl.uint16), DTYPE),)
    elif ROUTE == "ptx":
        even = tl.inline_asm_elementwise(
            _BYTES_OF_INT8_EVEN, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
        odd = tl.inline_asm_elementwise(
            _BYTES_OF_INT8_ODD, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
        return even.to(DTYPE), odd.to(DTYPE)
    else:
        # The sign bit flipped is the number plus 128.
        pair = x.to(tl.uint16, bitcast=True) ^ 0x8080
        return _fp16_from_128(pair & 0xFF, DTYPE), _fp16_from_128(pair >> 8, DTYPE)


@triton.jit
def zero_point_and_scale(word):
    """Splits float32 scales as int32 into zero points, float16 times 2**-INT4_EXPONENT, and scales."""
    zero = ((word << 4) & 0xF0).to(tl.int16).to(tl.float16, bitcast=True)
    return zero, (word & -16).to(tl.float32, bitcast=True)


@triton.jit
def _nibble(word, INDEX: tl.constexpr):
    """Nibble INDEX of int16 words, unsigned, as float16 times 2**-INT4_EXPONENT."""
    if INDEX == 0:
        moved = word << 4
    else:
        moved = word >> (4 * INDEX - 4)
    return (moved & 0xF0).to(tl.float16, bitcast=True)


@triton.jit
def _nibbles_by_assembly(words, zeros, PTX: tl.constexpr):
    """A nibble of each int16 word minus its zero point, as float16."""
    return tl.inline_asm_elementwise(PTX, "=r,r,r", [words, zeros], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def widen_int4(words, zero, ROUTE: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """INT4 codes minus their key's zero point as PARTS tiles in DTYPE; see `widen_parts`.

    They are still to be multiplied by 2**INT4_EXPONENT, for route "ptx", too.

    Args:
        words: `[N, D / PARTS]`, int16 words of four codes (PARTS 4), or uint8 bytes of two (PARTS 2).
        zero: `[N]`, of `zero_point_and_scale`.
    """
    zeros = tl.broadcast_to(zero[:, None], words.shape)
    if PARTS == 4 and ROUTE == "ptx":
        a, b = _nibbles_by_assembly(words, zeros, _INT4_0), _nibbles_by_assembly(words, zeros, _INT4_1)
        c, d = _nibbles_by_assembly(words, zeros, _INT4_2), _nibbles_by_assembly(words, zeros, _INT4_3)
        return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)
    word = words.to(tl.int16)
    a, b = (_nibble(word, 0) - zeros).to(DTYPE), (_nibble(word, 1) - zeros).to(DTYPE)
    if PARTS == 4:
        return a, b, (_nibble(word, 2) - zeros).to(DTYPE), (_nibble(word, 3) - zeros).to(DTYPE)
    else:
        return a, b


@triton.jit
def round_half_away(x):
    """Float32 to int32: nearest, halfway numbers away from zero."""
    return (x + tl.where(x >= 0, 0.5, -0.5)).to(tl.int32)


@triton.jit
def saturated_int8(x):
    """Float32 to INT8 codes as uint8 bytes, saturating at +-127; NaN gives 0."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
    return round_half_away(x).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def _finite_rows(x):
    """Rows with Inf brought to finite numbers and NaN to zero, and which rows `[N]` held a NaN."""
    nan = tl.max((x != x).to(tl.int32), 1) > 0
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -_MOST_FINITE), _MOST_FINITE), nan


@triton.jit
def narrow_int8(x):
    """Float32 rows [N, D] to INT8 bytes and float32 scales [N]; bit for bit `quantize_tokens_int8`."""
    x, nan = _finite_rows(x)
    amax = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 127.0, tl.float32)), _LEAST_SCALE)
    inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    codes = saturated_int8(x * inverse[:, None])
    return tl.where(nan[:, None], 0, codes).to(tl.uint8), tl.where(nan, float("nan"), scale)


@triton.jit
def narrow_int4(x):
    """Float32 rows [N, D] to INT4 codes (int32) and float32 scales [N] with zero points in their low bits.

    Bit for bit `quantize_tokens_int4`. Columns that pad a row are zeros, which change neither.
    """
    x, nan = _finite_rows(x)
    low, high = tl.minimum(tl.min(x, 1), 0.0), tl.maximum(tl.max(x, 1), 0.0)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32)), _LEAST_SCALE)
    zero = round_half_away(tl.div_rn(-low, scale)).to(tl.float32)
    inverse = tl.div_rn(tl.full(low.shape, 1.0, tl.float32), scale)
    # A product that is rounded by itself: the compiler must not fuse it with the sum.
    scaled = tl.fma(x, tl.broadcast_to(inverse[:, None], x.shape), tl.zeros_like(x)) + zero[:, None]
    codes = round_half_away(tl.minimum(tl.maximum(scaled, 0.0), 15.0))
    word = scale.to(tl.int32, bitcast=True) & -16 | zero.to(tl.int32)
    word = tl.where(nan, 0x7FC00000, word)
    return tl.where(nan[:, None], 0, codes), word.to(tl.float32, bitcast=True)

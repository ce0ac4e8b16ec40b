"""Device helpers (`@triton.jit`) for Hopper: FP4 words with scales of groups to float16, in inline PTX."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

_REGISTERS = "{ .reg .b32 x, y, s, m, f, a, b, c, d; .reg .b16 lo, hi;\n"
# Four bytes x of two words each to four pairs of float16 times the pair f. A byte of E4M3 holds E2M1 with a
# smaller exponent bias, and the target converts two at once: 2**6 is left.
_WIDEN = """
    shl.b32 s, x, 4;
    shl.b32 m, x, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 s, s, 0x80808080, m, 0xEA;
    mov.b32 {lo, hi}, s;
    cvt.rn.f16x2.e4m3x2 a, lo;
    cvt.rn.f16x2.e4m3x2 c, hi;
    shr.b32 m, x, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 s, x, 0x80808080, m, 0xEA;
    mov.b32 {lo, hi}, s;
    cvt.rn.f16x2.e4m3x2 b, lo;
    cvt.rn.f16x2.e4m3x2 d, hi;
    mul.f16x2 a, a, f;
    mul.f16x2 b, b, f;
    mul.f16x2 c, c, f;
    mul.f16x2 d, d, f;
"""


def _store(first: int) -> str:
    pairs = (f"mov.b32 {{${first + 2 * i}, ${first + 2 * i + 1}}}, {x};\n" for i, x in enumerate("abcd"))
    return "".join(pairs)


_KEYS = tl.constexpr(_REGISTERS + "mov.b32 f, $9;\nprmt.b32 x, $8, 0, 0x3120;\n" + _WIDEN + _store(0) + "}")
_VALUES = tl.constexpr(
    _REGISTERS
    + "mov.b32 f, $18;\nprmt.b32 x, $16, $17, 0x5140;\nprmt.b32 y, $16, $17, 0x7362;\n"
    + _WIDEN
    + _store(0)
    + "mov.b32 x, y;\n"
    + _WIDEN
    + _store(8)
    + "}"
)
# Eight nibbles of a word to four pairs of neighbours, by E4M3 as above.
_NEIGHBOURS = tl.constexpr(
    """
    {
        .reg .b32 e, o, m;
        .reg .b16 lo, hi;
        shl.b32 e, $4, 4;
        shl.b32 m, $4, 2;
        and.b32 m, m, 0x1C1C1C1C;
        lop3.b32 e, e, 0x80808080, m, 0xEA;
        shr.b32 m, $4, 2;
        and.b32 m, m, 0x1C1C1C1C;
        lop3.b32 o, $4, 0x80808080, m, 0xEA;
        prmt.b32 m, e, o, 0x5140;
        mov.b32 {lo, hi}, m;
        cvt.rn.f16x2.e4m3x2 $0, lo;
        cvt.rn.f16x2.e4m3x2 $1, hi;
        prmt.b32 m, e, o, 0x7362;
        mov.b32 {lo, hi}, m;
        cvt.rn.f16x2.e4m3x2 $2, lo;
        cvt.rn.f16x2.e4m3x2 $3, hi;
        mul.f16x2 $0, $0, $5;
        mul.f16x2 $1, $1, $5;
        mul.f16x2 $2, $2, $5;
        mul.f16x2 $3, $3, $5;
    }
    """
)
_KEYS_CONSTRAINTS = tl.constexpr("=&h," * 8 + "r,r")
_VALUES_CONSTRAINTS = tl.constexpr("=&h," * 16 + "r,r,r")


@triton.jit
def widen_keys(words, factor):
    """Widens pairs of FP4 words (int32) and multiplies them by a factor; results are 2**-6 of the values.

    Args:
        words: the pairs.
        factor: the factor as float16, in both halves of an int32.

    Returns:
        Float16 elements 0 of the even and of the odd word, elements 1 of both, 2, and 3.
    """
    return tl.inline_asm_elementwise(
        _KEYS,
        _KEYS_CONSTRAINTS,
        [words, factor],
        dtype=(
            tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def widen_values(words, words_next, factors):
    """Widens pairs of FP4 words (int32) of two keys and multiplies each key by its factor.

    Results are 2**-6 of the values.

    Args:
        words, words_next: the pairs of the first and of the second key.
        factors: both factors as float16 in one int32, the factor of `words` in the lower half.

    Returns:
        Float16 elements 0 of the even word of both keys, elements 1, 2 and 3, then those of the odd word.
    """
    return tl.inline_asm_elementwise(
        _VALUES,
        _VALUES_CONSTRAINTS,
        [words, words_next, factors],
        dtype=(
            tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
            tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def widen_words(words, factor):
    """Widens FP4 words (int32) and multiplies them by a factor; results are 2**-6 of the values.

    Args:
        words: eight elements each.
        factor: the factor as float16, in both halves of an int32.

    Returns:
        Int32 of two float16 each: elements 0 and 1, 2 and 3, 4 and 5, 6 and 7.
    """
    return tl.inline_asm_elementwise(
        _NEIGHBOURS,
        "=&r,=&r,=&r,=&r,r,r",
        [words, factor],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def e4m3_pair_to_fp16(pair):
    """Converts two E4M3FN bytes (an int16) exactly to two float16 numbers (an int32); NaN stays NaN."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [pair], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def e4m3_pair_to_fp16_twice(pair):
    """Converts two E4M3FN bytes (an int16) to float16, each in both halves of an int32; lower byte first."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 x;
            cvt.rn.f16x2.e4m3x2 x, $2;
            prmt.b32 $0, x, x, 0x1010;
            prmt.b32 $1, x, x, 0x3232;
        }
        """,
        "=&r,=r,h",
        [pair],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def exponent_to_fp16(byte, top):
    """The float16 bits (int32) of 2**(15 + byte - top) for E8M0 bytes up to `top`; 0 below 2**-14."""
    return tl.maximum(byte + (30 - top), 0) << 10

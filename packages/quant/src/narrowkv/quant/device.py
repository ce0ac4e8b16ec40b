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

from narrowkv.quant.device_int import widen_int8


@triton.jit
def e4m3fn_bits_to_fp16(high):
    """E4M3FN codes in the high bytes of int16 as float16, still to be multiplied by 2**8."""
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
        y = e4m3fn_bits_to_fp16(high)
    elif FORMAT == "fp8_e4m3fnuz":
        y = _e4m3fnuz_bits_to_fp16(high, COMPARE)
    else:
        y = high.to(tl.float16, bitcast=True)
    return y


@triton.jit
def fp8_in_type(y, DTYPE: tl.constexpr):
    """Numbers of FP8, given as float16, in DTYPE. bfloat16 holds them, so no bits are rounded off.

    gfx942 takes 1.5 instructions an element for it, and 7 to round.
    """
    if tl.bfloat16 == DTYPE:
        high = y.to(tl.float32).to(tl.int32, bitcast=True) >> 16
        return high.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return y.to(DTYPE)


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
        return fp8_in_type(y, DTYPE)
    elif ROUTE == "fnuz_alias":
        y = x.to(tl.float8e4b8, bitcast=True).to(DTYPE)
    elif FORMAT == "fp8_e5m2" and tl.bfloat16 == DTYPE:
        # Not all compilers keep NaN on the direct way; every E5M2 number is a float16.
        y = x.to(tl.float16)
    else:
        y = x
    return y.to(DTYPE)


# PTX of `by_assembly`. Each text gives one tile, although tiles of one word share instructions, which ptxas
# merges. Of assembly with several results Triton 3.8 lays out one as a matrix instruction reads it, and
# passes the others through shared memory in each iteration. H200, FP8, B64 ctx8192 page 16: 384 us with two
# results, 278 us under Triton 3.6, which laid out both.
_BYTES_OF_FP8 = """
    {
        .reg .b32 t;
        .reg .b16 even, odd;
        prmt.b32 t, $1, 0, 0x3120;
        mov.b32 {even, odd}, t;
        cvt.rn.f16x2.e4m3x2 $0, %s;
    }
"""
_EVEN_OF_FP8, _ODD_OF_FP8 = (tl.constexpr(_BYTES_OF_FP8 % name) for name in ("even", "odd"))
# The sign, and exponent with mantissa, of a nibble of each half of a register; see `_fp4_nibble`.
_NIBBLES_OF_FP4 = """
    {
        .reg .b32 s, m;
        shl.b32 s, $1, %d;
        %s.b32 m, $1, %d;
        and.b32 m, m, 0x0E000E00;
        lop3.b32 $0, s, 0x80008000, m, 0xEA;
    }
"""
_FP4_0, _FP4_1, _FP4_2, _FP4_3 = (
    tl.constexpr(_NIBBLES_OF_FP4 % moves)
    for moves in ((12, "shl", 9), (8, "shl", 5), (4, "shl", 1), (0, "shr", 3))
)
_NIBBLES_OF_FP4_AS_E4M3 = """
    {
        .reg .b32 x, s, m;
        .reg .b16 lo, hi;
        prmt.b32 x, $1, 0, 0x3120;
        shl.b32 s, x, %d;
        %s.b32 m, x, 2;
        and.b32 m, m, 0x1C1C1C1C;
        lop3.b32 s, s, 0x80808080, m, 0xEA;
        mov.b32 {lo, hi}, s;
        cvt.rn.f16x2.e4m3x2 $0, %s;
    }
"""
_FP4_AS_E4M3_0, _FP4_AS_E4M3_1, _FP4_AS_E4M3_2, _FP4_AS_E4M3_3 = (
    tl.constexpr(_NIBBLES_OF_FP4_AS_E4M3 % values)
    for values in ((4, "shl", "lo"), (0, "shr", "lo"), (4, "shl", "hi"), (0, "shr", "hi"))
)


@triton.jit
def by_assembly(x, PTX: tl.constexpr):
    """A float16 of each int16 word: PTX takes two words in register $1 and gives two numbers in $0."""
    return tl.inline_asm_elementwise(PTX, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _fp8_pairs(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr):
    """Even and odd columns of int16 pairs of FP8."""
    if ROUTE == "ptx":
        return by_assembly(x, _EVEN_OF_FP8), by_assembly(x, _ODD_OF_FP8)
    if ROUTE == "bits":
        even, odd = _fp8_bits_to_fp16(x << 8, FORMAT), _fp8_bits_to_fp16(x & -256, FORMAT)
        return fp8_in_type(even, DTYPE), fp8_in_type(odd, DTYPE)
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
    # The arithmetic shift copies the sign down; the copies between sign and exponent are cleared.
    return (((word << (12 - 4 * INDEX)) >> 3) & -29184).to(tl.float16, bitcast=True)


@triton.constexpr_function
def _fp4_bytes(pack: int) -> str:
    """Assembly that converts `pack` words: byte i of word w to operand `i * pack + w`."""
    name = "v_cvt_scalef32_pk_f16_fp4"
    converts = [
        f"{name} ${i * pack + w}, ${4 * pack + w}, ${5 * pack + w} op_sel:[{i % 2},{i // 2},0]"
        for w in range(pack)
        for i in range(4)
    ]
    return "\n".join(["s_nop 2", *converts, "s_nop 1"])


@triton.constexpr_function
def _operands_of_fp4_bytes(pack: int, uniform: bool) -> str:
    return ",".join(["=&v"] * (4 * pack) + ["v"] * pack + ["s" if uniform else "v"] * pack)


@triton.jit
def fp4_bytes_cdna4(words, scale, UNIFORM: tl.constexpr, PACK: tl.constexpr):
    """The four bytes of int32 words of FP4 as pairs of float16 in an int32, times a power of two.

    gfx950's instruction converts the two nibbles of a byte. The assembly works on elements of 32 bits, each
    on its own, because the compiler may give a lane the elements of a tile in any order.

    The compiler inserts no wait states around inline assembly, so the `s_nop`s do: 3 before, because a matrix
    instruction of 4 passes may still read a register that is written here; 2 after, before a matrix
    instruction may read a result.

    Args:
        words: int32 of eight nibbles.
        scale: float32, the factor of a word; see `widen_parts`, route "cdna4".
        UNIFORM: whether all factors are one number.
        PACK: words of a lane between wait states.
    """
    return tl.inline_asm_elementwise(
        _fp4_bytes(PACK),
        _operands_of_fp4_bytes(PACK, UNIFORM),
        [words, scale],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=PACK,
    )


@triton.jit
def fp4_quads_cdna4(x, scale, UNIFORM: tl.constexpr):
    """FP4 as float16 in four tiles of pairs, times a power of two; see `widen_parts`, route "cdna4".

    Args:
        x: int16 words `[N, W]` of four nibbles.
        scale: float32 `[N, W / 2]`, the factor of two adjacent words.
        UNIFORM: whether all factors are one number.

    Returns:
        Four tiles `[N, W]`: columns `2 * c` and `2 * c + 1` of tile i are byte i of the words `2 * c` and
        `2 * c + 1` as one 32-bit number.
    """
    N: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.reshape(x, [N, W // 2, 2]))
    words = join_halves(low, high)
    bytes_of_pairs = fp4_bytes_cdna4(words, scale, UNIFORM, 2)
    tiles = ()
    for i in tl.static_range(4):
        # Triton's language does not unpack tuples.
        tiles = tiles + (tl.reshape(both_halves(bytes_of_pairs[i]), [N, W]),)  # noqa: RUF005
    return tiles


@triton.jit
def join_halves(low, high):
    """Int32 of two int16 each; see `both_halves`."""
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def both_halves(pairs):
    """The two float16 of each int32, as a new last axis."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def _fp4_quads(x, ROUTE: tl.constexpr):
    """The four nibbles of int16 words as float16, still to be multiplied by 2**14."""
    if ROUTE == "ptx":
        return (
            by_assembly(x, _FP4_0), by_assembly(x, _FP4_1), by_assembly(x, _FP4_2), by_assembly(x, _FP4_3),
        )  # fmt: skip
    elif ROUTE == "ptx8":
        # A byte of E4M3 holds E2M1 with a smaller bias, and the target converts two at once: 2**6 is left.
        return (
            by_assembly(x, _FP4_AS_E4M3_0), by_assembly(x, _FP4_AS_E4M3_1),
            by_assembly(x, _FP4_AS_E4M3_2), by_assembly(x, _FP4_AS_E4M3_3),
        )  # fmt: skip
    elif ROUTE == "cdna4":
        # With this factor every result is a normal float16.
        return fp4_quads_cdna4(x, tl.full([x.shape[0], x.shape[1] // 2], 2.0**-13, tl.float32), True)
    else:
        return _fp4_nibble(x, 0), _fp4_nibble(x, 1), _fp4_nibble(x, 2), _fp4_nibble(x, 3)


@triton.jit
def columns_of_part(INDEX: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr):
    """Which elements the columns of part INDEX are, int32 `[COLUMNS]`; see `widen_parts`."""
    return element_of_part(INDEX, tl.arange(0, COLUMNS), PARTS, PAIRS)


@triton.jit
def element_of_part(index, c, PARTS: tl.constexpr, PAIRS: tl.constexpr):
    """Which elements columns `c` of parts `index` are; see `widen_parts`."""
    return (c // 2) * (2 * PARTS) + 2 * index + c % 2 if PAIRS else c * PARTS + index


@triton.jit
def widen_parts(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """A tile of packed words as a tuple of PARTS tiles: element `c * PARTS + i` lies in column c of tile i.

    Every tile is still to be multiplied by 2**widening_exponent(FORMAT, ROUTE). No elements are shuffled: a
    dot product may sum its columns in any order, and `join_parts` restores the order of columns of a result.
    With the route "cdna4" pairs of elements stay together: element `2 * (c * PARTS + i)` and the one after
    it lie in columns `2 * c` and `2 * c + 1` of tile i.

    Args:
        x: PARTS 1: stored elements, as `widen` takes them. PARTS 2: int16 pairs of FP8 or INT8 (LDS can
            transpose 16-bit elements only), or uint8 bytes of FP4. PARTS 4: int16 words of FP4.
        FORMAT, ROUTE, DTYPE: as for `widen`; ROUTE may also be "ptx" for 16-bit words on NVIDIA, in float16.
    """
    if FORMAT == "fp4_e2m1":
        if PARTS == 4:
            a, b, c, d = _fp4_quads(x, ROUTE)
            return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)
        else:
            word = x.to(tl.int16)
            return _fp4_nibble(word, 0).to(DTYPE), _fp4_nibble(word, 1).to(DTYPE)
    elif FORMAT == "int8":
        return widen_int8(x, ROUTE, DTYPE, PARTS)
    elif PARTS == 2:
        return _fp8_pairs(x, FORMAT, ROUTE, DTYPE)
    else:
        return (widen(x, FORMAT, ROUTE, DTYPE),)


@triton.jit
def join_parts(parts, PARTS: tl.constexpr, PAIRS: tl.constexpr = False):
    """Undoes the column order of `widen_parts`: tile i's column c becomes column `c * PARTS + i`.

    PAIRS: the tiles are those of the route "cdna4".
    """
    if PAIRS:
        M: tl.constexpr = parts[0].shape[0]
        D: tl.constexpr = parts[0].shape[1]
        split: tl.constexpr = [M, D // 2, 2]
        even = tl.join(tl.reshape(parts[0], split), tl.reshape(parts[2], split))
        odd = tl.join(tl.reshape(parts[1], split), tl.reshape(parts[3], split))
        # [M, D / 2, element of the pair, high bit of the part, low bit]
        joined = tl.reshape(tl.permute(tl.join(even, odd), [0, 1, 3, 4, 2]), [M, 4 * D])
    elif PARTS == 4:
        joined = tl.interleave(tl.interleave(parts[0], parts[2]), tl.interleave(parts[1], parts[3]))
    elif PARTS == 2:
        joined = tl.interleave(parts[0], parts[1])
    else:
        joined = parts[0]
    return joined


@triton.jit
def round_magnitude(magnitude, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
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
    code = round_magnitude(tl.minimum(tl.abs(x), MAX), BIAS, MANTISSA)
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

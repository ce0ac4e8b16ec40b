"""Device helpers (`@triton.jit`) for FP4 with scales of groups on gfx950."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.quant.device import fp4_quads_cdna4
from narrowkv.quant.device_e4m3 import e4m3_to_fp16


@triton.jit
def _byte(rows, INDEX: tl.constexpr):
    """Byte INDEX of integers of 16, 32 or 64 bits, as int32."""
    word = rows if INDEX < 4 else rows >> 32
    return (word.to(tl.int32) >> (8 * (INDEX % 4))) & 255


@triton.jit
def _bytes_of_rows(rows, COUNT: tl.constexpr):
    """The COUNT lowest bytes of integers `[N]` as int32 `[N, COUNT]`."""
    low = rows.to(tl.int32)
    if COUNT <= 4:
        return (low[:, None] >> (8 * tl.arange(0, COUNT))[None, :]) & 255
    else:
        words = tl.join(low, (rows >> 32).to(tl.int32))
        pieces = (words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255
        return tl.reshape(pieces, [rows.shape[0], COUNT])


@triton.jit
def _relative_fields(scales, GROUPS: tl.constexpr):
    """Exponent fields of float32, one byte for each group, and the largest scale of a row, int32 `[N]`.

    With a factor of 2**13 for the largest scale, the largest E2M1 number is just within float16.
    """
    top = tl.zeros([scales.shape[0]], tl.int32)
    for i in tl.static_range(GROUPS):
        byte = _byte(scales, i)
        top = tl.maximum(top, tl.where(byte == 255, 0, byte))
    low = tl.zeros_like(top)
    high = tl.zeros_like(top)
    for i in tl.static_range(GROUPS):
        byte = _byte(scales, i)
        field = tl.where(byte == 255, 255, tl.maximum(byte - top + (127 + 13), 0))
        if i < 4:
            low |= field << (8 * i)
        else:
            high |= field << (8 * (i - 4))
    fields = low if GROUPS <= 4 else (low.to(tl.uint32).to(tl.int64) | (high.to(tl.int64) << 32))
    return fields, top


@triton.jit
def widen_groups_cdna4(
    words, scales, DTYPE: tl.constexpr, GROUPS: tl.constexpr, E4M3: tl.constexpr
):  # fmt: skip
    """Widens int16 words of FP4 with the scales of their groups by gfx950's own instruction.

    Lanes exchange the scale bytes of a row packed into one integer, and convert them afterwards.

    Args:
        words: `[N, D / 4]`.
        scales: the bytes of GROUPS scales of each row as one integer `[N]`.
        DTYPE: tl.float16 or tl.bfloat16.
        E4M3: whether the scales are E4M3, else E8M0.

    Returns:
        `(parts, largest)`: tiles in four parts, see `widen_parts`, still to be multiplied by 2**13
        with E4M3; else by 2**-13 and by the largest scale of their row, uint8 `[N]`. A group whose E8M0 scale
        is less than 2**-36 of that becomes zero. A NaN scale stays with its group.
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if E4M3:
        largest = tl.zeros([N], tl.uint8)
        factor = tl.full([N, W // 2], 2.0**-13, tl.float32)
        times = e4m3_to_fp16(_bytes_of_rows(scales, GROUPS).to(tl.uint8), True)
        times = tl.reshape(tl.broadcast_to(times[:, :, None], [N, GROUPS, W // GROUPS]), [N, W])
    else:
        # The instruction multiplies by the power of two in the exponent field of a float32.
        fields, top = _relative_fields(scales, GROUPS)
        largest = top.to(tl.uint8)
        factor = (_bytes_of_rows(fields, GROUPS) << 23).to(tl.float32, bitcast=True)
        factor = tl.broadcast_to(factor[:, :, None], [N, GROUPS, W // 2 // GROUPS])
        factor = tl.reshape(factor, [N, W // 2])
    quads = fp4_quads_cdna4(words, factor, E4M3)
    parts = ()
    for i in tl.static_range(4):
        part = quads[i] * times if E4M3 else quads[i]
        # Triton's language does not unpack tuples.
        parts = parts + (part.to(DTYPE),)  # noqa: RUF005
    return parts, largest

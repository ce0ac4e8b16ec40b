"""Device helpers (`@triton.jit`) for FP4 with E4M3 scales; see `narrowkv.quant.e4m3`."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.quant.device import e4m3fn_bits_to_fp16, narrow_fp8
from narrowkv.quant.device_fp4 import fp4_magnitude, round_fp4
from narrowkv.quant.e4m3 import E4M3_NAN, E4M3_STEPS

_STEPS = tl.constexpr(E4M3_STEPS)
_NUM_STEPS = tl.constexpr(len(E4M3_STEPS))
_NAN = tl.constexpr(E4M3_NAN)


@triton.jit
def e4m3_to_fp32(byte):
    """E4M3FN bytes (uint8) to float32, exactly, on every target; 0x7F and 0xFF are NaN."""
    high = (byte.to(tl.uint16) << 8).to(tl.int16, bitcast=True)
    return e4m3fn_bits_to_fp16(high).to(tl.float32) * 256.0


@triton.jit
def e4m3_to_fp16(byte, NATIVE: tl.constexpr):
    """E4M3FN bytes (uint8) to float16, exactly; 0x7F and 0xFF are NaN. NATIVE: by the target's own cast."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        high = (byte.to(tl.uint16) << 8).to(tl.int16, bitcast=True)
        return e4m3fn_bits_to_fp16(high) * 256.0


@triton.jit
def narrow_fp4_e4m3(x):
    """Float32 groups to E2M1 codes and E4M3 scales.

    Bit for bit `quantize_per_group(..., scale="e4m3", exponent="search")`.

    Args:
        x: `[groups, size]`. A NaN makes its group's scale NaN; Inf saturates.

    Returns:
        int32 codes `[groups, size]` and uint8 scales `[groups]`.
    """
    LARGEST: tl.constexpr = 3.4028234663852886e38
    nan = tl.max((x != x).to(tl.int32), 1) > 0
    x = tl.where(x == x, x, 0.0)
    finite = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    amax = tl.max(tl.abs(finite), 1)
    wanted = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 0.001953125)
    start = narrow_fp8(tl.where(amax == 0.0, 1.0, wanted), "fp8_e4m3fn").to(tl.int32)
    best = start
    # In float64 the order of the sum decides nothing, so that every target chooses alike.
    least = tl.full(amax.shape, float("inf"), tl.float64)
    for i in tl.static_range(_NUM_STEPS):
        code = tl.minimum(tl.maximum(start + _STEPS[i], 1), 0x7E)
        scale = e4m3_to_fp32(code.to(tl.uint8))
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        rounded = fp4_magnitude(round_fp4(finite * inverse[:, None])) * scale[:, None]
        error = (rounded - tl.abs(finite)).to(tl.float64)
        error = tl.sum(error * error, 1)
        best = tl.where(error < least, code, best)
        least = tl.minimum(error, least)
    divisor = e4m3_to_fp32(best.to(tl.uint8))
    code = round_fp4(tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape)))
    return tl.where(nan[:, None], 0, code), tl.where(nan, _NAN, best).to(tl.uint8)

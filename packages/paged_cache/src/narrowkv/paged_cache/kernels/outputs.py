"""Rows of attention's output on their way into memory."""

import triton
import triton.language as tl

from narrowkv.quant.device import narrow_fp8
from narrowkv.runtime.attention.results import output_rows, write_lse


@triton.jit
def narrow_output(o, o_ptr, scale_ptr):
    """Float32 numbers of O as `o_ptr` holds them; FP8 ones are divided by the number at `scale_ptr`."""
    if scale_ptr is None:
        stored = o.to(o_ptr.dtype.element_ty)
    else:
        FORMAT: tl.constexpr = "fp8_e4m3fn" if o_ptr.dtype.element_ty == tl.float8e4nv else "fp8_e4m3fnuz"
        # Finite, so that zeros stay zeros over a subnormal scale.
        inverse = tl.minimum(1.0 / tl.load(scale_ptr), 3.4028234663852886e38)
        stored = narrow_fp8(o * inverse, FORMAT).to(o_ptr.dtype.element_ty, bitcast=True)
    return stored


@triton.jit
def write_rows(o_ptr, o_scale_ptr, lse_ptr, sinks_ptr, acc, m, l, out_scale, heads, tokens, row_mask, d,
                stride_ot, stride_oh, stride_lse,
                HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr):  # fmt: skip
    """Rows of O and of lse into memory; `o_scale_ptr`: see `narrow_output`."""
    o = output_rows(sinks_ptr, acc, m, l, out_scale, heads, row_mask, HAS_SINKS)
    o_off = tokens[:, None] * stride_ot + heads[:, None] * stride_oh + d[None, :]
    o = narrow_output(o, o_ptr, o_scale_ptr)
    tl.store(o_ptr + o_off, o, mask=row_mask[:, None] & (d < HEAD_DIM)[None, :])
    if WRITE_LSE:
        write_lse(lse_ptr, m, l, heads, tokens, row_mask, stride_lse)

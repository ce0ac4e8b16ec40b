"""INT8 and INT4 of a token and head: one scale for each, and for INT4 a zero point, as vLLM stores them.

With a scale for each token and head::

    int8    stored = round(x / scale), scale = max(|x|) / 127
    int4    stored = round(x / scale) + zero, scale = (max - min) / 15, codes and zero points 0..15

An INT4 scale is fp32 with its zero point in its four lowest mantissa bits::

    bit     31      30..23     22..4       3..0
            sign    exponent   mantissa    zero point          x = (code - zero) * (scale without these bits)

Two codes share a byte, element 2i in the low nibble. Halfway numbers are rounded away from zero, products are
by the reciprocal of the scale, and no scale is below 1e-6: the rules of vLLM's `int8_per_token_head` and
`int4_per_token_head` (vllm/v1/attention/ops), so that the bytes are equal. The range of INT4 includes zero,
so that no number saturates; vLLM's does not, and it saturates rows whose numbers all have one sign.

Example:
    >>> import torch
    >>> stored, scale = quantize_tokens_int4(torch.tensor([[-1.0, 2.0, 0.0, 0.5]]))
    >>> stored.tolist(), (scale.view(torch.int32) & 15).tolist()
    ([[240, 133]], [5])
    >>> dequantize_tokens_int4(stored, scale)
    tensor([[-1.0000,  2.0000,  0.0000,  0.6000]])
"""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import check_dtype

from .fp4 import pack_nibbles, unpack_nibbles
from .rounding import to_fp32

__all__ = [
    "dequantize_tokens_int4",
    "quantize_tokens_int4",
    "quantize_tokens_int8",
    "round_half_away",
    "split_zero_point",
]

LEAST_SCALE = 1e-6
MOST_FINITE = float(2.0**127 - 2.0**103)  # the difference of two such numbers is finite, too


def round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 numbers to integers: nearest, halfway numbers away from zero."""
    return (x + torch.where(x >= 0, 0.5, -0.5)).trunc()


def _finite_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in fp32 with Inf brought to finite numbers and NaN to zero, and which rows held a NaN."""
    values = to_fp32("x", x)
    nan = values.isnan().any(-1)
    return torch.nan_to_num(values, nan=0.0).clamp(-MOST_FINITE, MOST_FINITE), nan


def _quotient(x: torch.Tensor, number: float) -> torch.Tensor:
    """Division by a tensor: on a GPU that by a number multiplies by its reciprocal."""
    return x / torch.full_like(x, number)


def quantize_tokens_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 with a scale for each row of the last dimension, by vLLM's rule.

    Args:
        x: fp32, bf16 or fp16 `[..., n]`. Inf saturates; a NaN makes its row's scale NaN.

    Returns:
        int8 `[..., n]` in -127..127, and fp32 scales `[...]`.

    Raises:
        TypeError: another dtype.

    Example:
        >>> stored, scale = quantize_tokens_int8(torch.tensor([[127.0, -12.5, 0.4]]))
        >>> stored.tolist(), scale.tolist()
        ([[127, -13, 0]], [1.0])
    """
    values, nan = _finite_rows(x)
    scale = _quotient(values.abs().amax(-1), 127.0).clamp(min=LEAST_SCALE)
    codes = round_half_away((values * (1.0 / scale)[..., None]).clamp(-127, 127))
    return codes.masked_fill(nan[..., None], 0).to(torch.int8), scale.masked_fill(nan, torch.nan)


def quantize_tokens_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT4 with a scale and a zero point for each row of the last dimension, by vLLM's rule.

    Args:
        x: fp32, bf16 or fp16 `[..., n]`, n even. Inf saturates; a NaN makes its row's scale NaN.

    Returns:
        uint8 `[..., n / 2]`, and fp32 scales `[...]` with the zero points in their four lowest bits.

    Raises:
        TypeError: another dtype.
        ValueError: n is odd.
    """
    values, nan = _finite_rows(x)
    low, high = values.amin(-1).clamp(max=0.0), values.amax(-1).clamp(min=0.0)
    scale = _quotient(high - low, 15.0).clamp(min=LEAST_SCALE)
    zero = round_half_away(-low / scale)
    codes = round_half_away((values * (1.0 / scale)[..., None] + zero[..., None]).clamp(0, 15))
    packed = pack_nibbles(codes.masked_fill(nan[..., None], 0).to(torch.uint8))
    word = (scale.view(torch.int32) & -16) | zero.to(torch.int32)
    return packed, word.view(torch.float32).masked_fill(nan, torch.nan)


def split_zero_point(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of INT4 without their zero points, and the zero points.

    Args:
        scale: fp32, any shape.

    Returns:
        fp32 scales, and fp32 zero points 0..15, of that shape.

    Raises:
        TypeError: another dtype.
    """
    check_dtype("scale", scale, torch.float32)
    word = scale.view(torch.int32)
    return (word & -16).view(torch.float32), (word & 15).float()


def dequantize_tokens_int4(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Undoes `quantize_tokens_int4`, up to its rounding.

    Args:
        stored: uint8 `[..., n]`.
        scale: fp32 `[...]`, with zero points.

    Returns:
        fp32 `[..., 2 * n]`.

    Raises:
        TypeError: another dtype.
    """
    factor, zero = split_zero_point(scale)
    return (unpack_nibbles(stored).float() - zero[..., None]) * factor[..., None]

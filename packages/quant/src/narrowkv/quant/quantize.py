"""Host quantisers: each gives `(stored, descale)` with `x ~ stored * descale`, and each has its inverse.

| function | one descale per | x | descale |
|---|---|---|---|
| `quantize_per_tensor` | tensor | any | `[1]` |
| `quantize_per_head` | head | `[..., heads, dim]` | `[heads]` |
| `quantize_per_token_head` | token and head | `[..., heads, dim]` | `[..., heads]` |
| `quantize_per_page_head` | page and head | `[pages, page, heads, dim]` | `[pages, heads]` |
| `quantize_per_block` | run of tokens, head | `[..., tokens, heads, dim]` | `[..., blocks, heads]` |
| `quantize_per_channel` | head and channel | `[..., tokens, heads, dim]` | `[..., heads, dim]` |
| `quantize_per_group` | run of channels | `[..., dim]` | `[..., dim / group]` |

Common to all of them:
- The scaled number is `x / descale` in fp32, rounded to nearest even; what is out of range saturates, Inf
  too.
- A group of zeros is stored as zeros with descale 1. No descale is below 2^-126, the smallest normal fp32
  number.
- NaN stays in its group. FP8 has a NaN, so only that element is NaN and its group's descale comes from the
  others. FP4, INT8 and INT4 have none, so the group's descale is NaN.
- FP8 never holds a negative zero (see `cast_fp8`).

Example:
    >>> import torch
    >>> k = torch.tensor([[[1.0, -2.0], [30.0, 60.0]]])  # [tokens 1, heads 2, dim 2]
    >>> stored, descale = quantize_per_head(k, "fp8_e4m3fn")
    >>> descale
    tensor([0.0045, 0.1339])
    >>> dequantize_per_head(stored, descale)
    tensor([[[ 1., -2.],
             [30., 60.]]])
"""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import (
    check_dtype,
    check_positive_int,
    check_shape,
)

from .descales import FormatLike, Quantized, check_ndim, descale_of, given_descale, largest_magnitude
from .groups import dequantize_per_group, nvfp4_global_descale, quantize_per_group
from .rounding import cast_fp8, decode, encode, get_narrow_format, to_fp32

__all__ = [
    "Quantized",
    "cast_fp8",
    "dequantize_per_block",
    "dequantize_per_channel",
    "dequantize_per_group",
    "dequantize_per_head",
    "dequantize_per_page_head",
    "dequantize_per_tensor",
    "dequantize_per_token_head",
    "dequantize_with_descale",
    "nvfp4_global_descale",
    "quantize_per_block",
    "quantize_per_channel",
    "quantize_per_group",
    "quantize_per_head",
    "quantize_per_page_head",
    "quantize_per_tensor",
    "quantize_per_token_head",
    "quantize_with_descale",
]

_E4M3 = "fp8_e4m3fn"


def quantize_with_descale(x: torch.Tensor, format: FormatLike, descale: torch.Tensor) -> torch.Tensor:
    """Quantises with descales that are already known (a static cache descale, say).

    Args:
        x: fp32, bf16 or fp16 `[..., n]`.
        format: FP8, FP4, INT8 or INT4.
        descale: fp32, finite and above zero, broadcastable to `x`.

    Returns:
        Storage of `round(x / descale)`: `[..., n]`, or uint8 `[..., n / 2]` for FP4 and INT4.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: the shapes do not broadcast, or n is odd for a packed format.
        UnsupportedError: `format` is a 16-bit one.

    Example:
        >>> quantize_with_descale(torch.tensor([3.0, -1.0]), "int8", torch.tensor(0.5))
        tensor([ 6, -2], dtype=torch.int8)
    """
    fmt = get_narrow_format(format)
    check_dtype("descale", descale, torch.float32)
    values = to_fp32("x", x)
    sizes = zip(reversed(descale.shape), reversed(x.shape), strict=False)
    if descale.dim() > x.dim() or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"descale must broadcast to the shape of x {list(x.shape)}, got {list(descale.shape)}"
        )
    return encode(values / descale, fmt)


def dequantize_with_descale(
    stored: torch.Tensor, descale: torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_with_descale`, up to its rounding.

    Args:
        stored: storage `[..., n]`, or uint8 `[..., n / 2]` for FP4 and INT4.
        descale: fp32, broadcastable to `[..., n]`.
        format: the stored format; may be left out where the dtype tells it.

    Returns:
        fp32 `[..., n]`.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: the dtype of `stored` does not tell its format.
    """
    check_dtype("descale", descale, torch.float32)
    return decode(stored, format) * descale


def quantize_per_tensor(
    x: torch.Tensor, format: FormatLike, *, descale: float | torch.Tensor | None = None
) -> Quantized:
    """One descale for the whole tensor.

    Args:
        x: fp32, bf16 or fp16, any shape.
        format: FP8, FP4, INT8 or INT4.
        descale: a static descale instead of the one from the largest element: a number, or fp32 with one
            element.

    Returns:
        `(stored, descale)`; descale is fp32 `[1]`.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a given descale is zero, negative, NaN, Inf, or has more than one element.
        UnsupportedError: `format` is a 16-bit one.

    Example:
        >>> stored, descale = quantize_per_tensor(torch.tensor([0.5, -2.0]), "int8", descale=0.25)
        >>> stored, descale
        (tensor([ 2, -8], dtype=torch.int8), tensor([0.2500]))
    """
    fmt = get_narrow_format(format)
    values = to_fp32("x", x)
    if descale is None:
        scale = descale_of(largest_magnitude(values.reshape(1, -1), fmt, (-1,)), fmt.max_value)
    else:
        scale = given_descale(descale, values)
    return encode(values / (scale if x.dim() else scale[0]), fmt), scale


def dequantize_per_tensor(
    stored: torch.Tensor, descale: float | torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_tensor`, up to its rounding.

    `descale` is a number or fp32 with one element. Returns fp32.
    """
    values = decode(stored, format)
    scale = given_descale(descale, values)
    return values * (scale if values.dim() else scale[0])


def quantize_per_head(x: torch.Tensor, format: FormatLike) -> Quantized:
    """One descale per head, over all tokens.

    Args:
        x: fp32, bf16 or fp16 `[..., heads, dim]`, `[tokens, heads, dim]` for one.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        `(stored, descale)`; descale is fp32 `[heads]`.

    Raises:
        TypeError: the dtype of `x` is not as above.
        ValueError: `x` has fewer than two dimensions, or dim is odd for a packed format.
        UnsupportedError: `format` is a 16-bit one.
    """
    fmt = get_narrow_format(format)
    values = to_fp32("x", x)
    check_ndim("x", x, 2, "[..., heads, dim]")
    flat = values.reshape(-1, *x.shape[-2:]) if x.numel() else values.new_zeros(1, *x.shape[-2:])
    scale = descale_of(largest_magnitude(flat, fmt, (0, -1)), fmt.max_value)
    return encode(values / scale[:, None], fmt), scale


def dequantize_per_head(
    stored: torch.Tensor, descale: torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_head`, up to its rounding.

    `descale` is fp32 `[heads]`. Returns fp32 `[..., heads, dim]`.
    """
    check_shape("descale", descale, ("heads",))
    return dequantize_with_descale(stored, descale[:, None], format)


def quantize_per_token_head(x: torch.Tensor, format: FormatLike) -> Quantized:
    """One descale per token and head.

    Args:
        x: fp32, bf16 or fp16 `[..., heads, dim]`.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        `(stored, descale)`; descale is fp32 `[..., heads]`.

    Raises:
        TypeError: the dtype of `x` is not as above.
        ValueError: `x` has fewer than two dimensions, or dim is odd for a packed format.
        UnsupportedError: `format` is a 16-bit one.
    """
    fmt = get_narrow_format(format)
    values = to_fp32("x", x)
    check_ndim("x", x, 2, "[..., heads, dim]")
    scale = descale_of(largest_magnitude(values, fmt, (-1,)), fmt.max_value)
    return encode(values / scale[..., None], fmt), scale


def dequantize_per_token_head(
    stored: torch.Tensor, descale: torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_token_head`, up to its rounding.

    `descale` is fp32 `[..., heads]`. Returns fp32 `[..., heads, dim]`.
    """
    return dequantize_with_descale(stored, descale[..., None], format)


def quantize_per_page_head(x: torch.Tensor, format: FormatLike) -> Quantized:
    """One descale per page and head.

    Args:
        x: fp32, bf16 or fp16 `[pages, page, heads, dim]`.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        `(stored, descale)`; descale is fp32 `[pages, heads]`.

    Raises:
        TypeError: the dtype of `x` is not as above.
        ValueError: `x` has not four dimensions, or dim is odd for a packed format.
        UnsupportedError: `format` is a 16-bit one.
    """
    fmt = get_narrow_format(format)
    values = to_fp32("x", x)
    check_shape("x", x, ("pages", "page", "heads", "dim"))
    scale = descale_of(largest_magnitude(values, fmt, (1, 3)), fmt.max_value)
    return encode(values / scale[:, None, :, None], fmt), scale


def dequantize_per_page_head(
    stored: torch.Tensor, descale: torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_page_head`, up to its rounding.

    `descale` is fp32 `[pages, heads]`. Returns fp32 `[pages, page, heads, dim]`.
    """
    check_shape("descale", descale, ("pages", "heads"))
    return dequantize_with_descale(stored, descale[:, None, :, None], format)


def _spread(descale: torch.Tensor, block: int, tokens: int) -> torch.Tensor:
    """`[..., blocks, heads]` to `[..., tokens, heads, 1]`."""
    return descale.repeat_interleave(block, dim=-2)[..., :tokens, :].unsqueeze(-1)


def quantize_per_block(x: torch.Tensor, block: int, format: FormatLike = _E4M3) -> Quantized:
    """One descale per run of `block` tokens and head; the last run may be short.

    With the block sizes of SageAttention's granularities (128 per block; Q 32 and K 64 per warp; Q 4 and K 16
    per thread) this is its quantiser over consecutive tokens.

    Args:
        x: fp32, bf16 or fp16 `[..., tokens, heads, dim]`.
        block: tokens per descale, at least 1.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        `(stored, descale)`; descale is fp32 `[..., ceil(tokens / block), heads]`.

    Raises:
        TypeError: the dtype of `x` is not as above, or `block` is not an int.
        ValueError: `block` is below 1, `x` has fewer than three dimensions, or dim is odd for a packed
            format.
        UnsupportedError: `format` is a 16-bit one.

    Example:
        >>> quantize_per_block(torch.ones(10, 2, 8), 4, "int8")[1].shape
        torch.Size([3, 2])
    """
    fmt = get_narrow_format(format)
    check_positive_int("block", block)
    values = to_fp32("x", x)
    check_ndim("x", x, 3, "[..., tokens, heads, dim]")
    tokens = x.shape[-3]
    padded = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, -tokens % block))
    blocks = padded.reshape(
        *x.shape[:-3], -(-tokens // block), block, *x.shape[-2:]
    )  # [..., blocks, block, heads, dim]
    scale = descale_of(largest_magnitude(blocks, fmt, (-3, -1)), fmt.max_value)
    return encode(values / _spread(scale, block, tokens), fmt), scale


def dequantize_per_block(
    stored: torch.Tensor, descale: torch.Tensor, block: int, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_block`, up to its rounding.

    `descale` is fp32 `[..., blocks, heads]`. Returns fp32 `[..., tokens, heads, dim]`.
    """
    check_positive_int("block", block)
    check_ndim("stored", stored, 3, "[..., tokens, heads, dim]")
    check_ndim("descale", descale, 2, "[..., blocks, heads]")
    tokens = stored.shape[-3]
    if descale.shape[-2] != -(-tokens // block):
        raise ValueError(
            f"descale must have {-(-tokens // block)} blocks for {tokens} tokens, got {descale.shape[-2]}"
        )
    return dequantize_with_descale(stored, _spread(descale, block, tokens), format)


def quantize_per_channel(v: torch.Tensor, format: FormatLike = _E4M3) -> Quantized:
    """One descale per head and channel, over the tokens.

    For V: such a descale can be taken out of the sum over tokens.

    Args:
        v: fp32, bf16 or fp16 `[..., tokens, heads, dim]`.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        `(stored, descale)`; descale is fp32 `[..., heads, dim]`.

    Raises:
        TypeError: the dtype of `v` is not as above.
        ValueError: `v` has fewer than three dimensions, or dim is odd for a packed format.
        UnsupportedError: `format` is a 16-bit one.
    """
    fmt = get_narrow_format(format)
    values = to_fp32("v", v)
    check_ndim("v", v, 3, "[..., tokens, heads, dim]")
    scale = descale_of(largest_magnitude(values, fmt, (-3,)), fmt.max_value)
    return encode(values / scale.unsqueeze(-3), fmt), scale


def dequantize_per_channel(
    stored: torch.Tensor, descale: torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_channel`, up to its rounding.

    `descale` is fp32 `[..., heads, dim]`. Returns fp32 `[..., tokens, heads, dim]`.
    """
    check_ndim("descale", descale, 2, "[..., heads, dim]")
    return dequantize_with_descale(stored, descale.unsqueeze(-3), format)

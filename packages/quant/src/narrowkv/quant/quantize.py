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

What holds for all of them:
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
    check_choice,
    check_descale_float,
    check_dtype,
    check_positive_int,
    check_shape,
)

from .e4m3 import search_e4m3
from .e8m0 import E8M0_NAN, ceil_exponent, e8m0_decode, e8m0_from_exponent, floor_exponent, mse_exponent
from .formats import Format
from .rounding import cast_fp8, decode, encode, get_narrow_format, round_to_format, to_fp32

__all__ = [
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

FormatLike = str | torch.dtype | Format
Quantized = tuple[torch.Tensor, torch.Tensor]

_FP32_MAX = torch.finfo(torch.float32).max
_MIN_DESCALE = torch.finfo(torch.float32).tiny  # GPUs may flush anything smaller to zero
_E4M3 = "fp8_e4m3fn"
_E4M3_MAX = 448.0
_E4M3_SMALLEST = 2.0**-9
_FP4_SECOND = 4.0  # the magnitude below E2M1's largest, to which NVFP4 may scale a group's largest element


def _check_ndim(name: str, x: torch.Tensor, least: int, layout: str) -> None:
    if x.dim() < least:
        raise ValueError(f"{name} must have shape {layout}, got {list(x.shape)}")


def _amax(x: torch.Tensor, fmt: Format, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitude; Inf counts as the largest finite number, NaN counts if the format has none."""
    magnitude = x.abs().clamp(max=_FP32_MAX)
    if fmt.has_nan:
        magnitude = magnitude.nan_to_num(nan=0.0)
    if magnitude.numel() == 0:  # amax has no identity
        return magnitude.sum(dims)
    return magnitude.amax(dims)


def _descale(amax: torch.Tensor, max_value: float) -> torch.Tensor:
    # torch on a GPU divides by a number as it multiplies by the reciprocal, which rounds otherwise.
    return torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, max_value)).clamp(min=_MIN_DESCALE))


def _given_descale(descale: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(descale, torch.Tensor):
        check_dtype("descale", descale, torch.float32)
        if descale.numel() != 1:
            raise ValueError(f"descale must have one element, got shape {list(descale.shape)}")
        return descale.reshape(1).to(like.device)
    return torch.full((1,), check_descale_float("descale", descale), dtype=torch.float32, device=like.device)


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
    wide = to_fp32("x", x)
    sizes = zip(reversed(descale.shape), reversed(x.shape), strict=False)
    if descale.dim() > x.dim() or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"descale must broadcast to the shape of x {list(x.shape)}, got {list(descale.shape)}"
        )
    return encode(wide / descale, fmt)


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
    wide = to_fp32("x", x)
    if descale is None:
        scale = _descale(_amax(wide.reshape(1, -1), fmt, (-1,)), fmt.max_value)
    else:
        scale = _given_descale(descale, wide)
    return encode(wide / (scale if x.dim() else scale[0]), fmt), scale


def dequantize_per_tensor(
    stored: torch.Tensor, descale: float | torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_tensor`, up to its rounding.

    `descale` is a number or fp32 with one element. Returns fp32.
    """
    values = decode(stored, format)
    scale = _given_descale(descale, values)
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
    wide = to_fp32("x", x)
    _check_ndim("x", x, 2, "[..., heads, dim]")
    flat = wide.reshape(-1, *x.shape[-2:]) if x.numel() else wide.new_zeros(1, *x.shape[-2:])
    scale = _descale(_amax(flat, fmt, (0, -1)), fmt.max_value)
    return encode(wide / scale[:, None], fmt), scale


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
    wide = to_fp32("x", x)
    _check_ndim("x", x, 2, "[..., heads, dim]")
    scale = _descale(_amax(wide, fmt, (-1,)), fmt.max_value)
    return encode(wide / scale[..., None], fmt), scale


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
    wide = to_fp32("x", x)
    check_shape("x", x, ("pages", "page", "heads", "dim"))
    scale = _descale(_amax(wide, fmt, (1, 3)), fmt.max_value)
    return encode(wide / scale[:, None, :, None], fmt), scale


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
    wide = to_fp32("x", x)
    _check_ndim("x", x, 3, "[..., tokens, heads, dim]")
    tokens = x.shape[-3]
    padded = torch.nn.functional.pad(wide, (0, 0, 0, 0, 0, -tokens % block))
    blocks = padded.reshape(
        *x.shape[:-3], -(-tokens // block), block, *x.shape[-2:]
    )  # [..., blocks, block, heads, dim]
    scale = _descale(_amax(blocks, fmt, (-3, -1)), fmt.max_value)
    return encode(wide / _spread(scale, block, tokens), fmt), scale


def dequantize_per_block(
    stored: torch.Tensor, descale: torch.Tensor, block: int, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_block`, up to its rounding.

    `descale` is fp32 `[..., blocks, heads]`. Returns fp32 `[..., tokens, heads, dim]`.
    """
    check_positive_int("block", block)
    _check_ndim("stored", stored, 3, "[..., tokens, heads, dim]")
    _check_ndim("descale", descale, 2, "[..., blocks, heads]")
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
    wide = to_fp32("v", v)
    _check_ndim("v", v, 3, "[..., tokens, heads, dim]")
    scale = _descale(_amax(wide, fmt, (-3,)), fmt.max_value)
    return encode(wide / scale.unsqueeze(-3), fmt), scale


def dequantize_per_channel(
    stored: torch.Tensor, descale: torch.Tensor, format: FormatLike | None = None
) -> torch.Tensor:
    """Undoes `quantize_per_channel`, up to its rounding.

    `descale` is fp32 `[..., heads, dim]`. Returns fp32 `[..., tokens, heads, dim]`.
    """
    _check_ndim("descale", descale, 2, "[..., heads, dim]")
    return dequantize_with_descale(stored, descale.unsqueeze(-3), format)


def nvfp4_global_descale(x: torch.Tensor) -> torch.Tensor:
    """The second-level descale of NVFP4: amax / (448 * 6), so that the group scales use all of E4M3's range.

    Args:
        x: fp32, bf16 or fp16, any shape. NaN is left out; zeros give 1.

    Returns:
        fp32 `[1]`.
    """
    magnitude = to_fp32("x", x).abs().nan_to_num(nan=0.0, posinf=_FP32_MAX).reshape(1, -1)
    amax = magnitude.amax(-1) if magnitude.numel() else magnitude.sum(-1)
    return _descale(amax, _E4M3_MAX * 6.0)


def _e8m0_scale(groups: torch.Tensor, amax: torch.Tensor, fmt: Format, exponent: str) -> torch.Tensor:
    if exponent == "mse":
        chosen = mse_exponent(groups, fmt)
    else:
        finite = amax.nan_to_num(nan=0.0)
        chosen = floor_exponent(finite, fmt) if exponent == "floor" else ceil_exponent(finite, fmt)
    return e8m0_from_exponent(chosen).masked_fill(torch.isnan(amax), E8M0_NAN)


def _e4m3_scale(groups: torch.Tensor, amax: torch.Tensor, fmt: Format, exponent: str) -> torch.Tensor:
    def scale_for(top: float) -> torch.Tensor:
        wanted = torch.where(amax == 0, 1.0, (amax / top).clamp(min=_E4M3_SMALLEST))
        return cast_fp8(wanted, _E4M3)

    def squared_error(scale: torch.Tensor) -> torch.Tensor:
        wide = scale.float().unsqueeze(-1)
        return (round_to_format(groups / wide, fmt) * wide - groups).square().sum(-1)

    scale = scale_for(fmt.max_value)
    if exponent == "mse" and fmt.kind == "fp4":
        other = scale_for(_FP4_SECOND)
        better = squared_error(other) < squared_error(scale)
        scale = torch.where(better, other.view(torch.uint8), scale.view(torch.uint8)).view(scale.dtype)
    return scale


_RULES = {"e8m0": ("mse", "floor", "ceil"), "e4m3": ("mse", "amax", "search"), "fp32": ("amax",)}


def quantize_per_group(
    x: torch.Tensor,
    group: int,
    *,
    scale: str = "e8m0",
    exponent: str | None = None,
    format: FormatLike = "fp4_e2m1",
    global_descale: float | torch.Tensor = 1.0,
) -> Quantized:
    """One scale per run of `group` channels.

    `scale="e8m0"` with groups of 32 is OCP MX; `scale="e4m3"` with groups of 16 is NVFP4.

    Args:
        x: fp32, bf16 or fp16 `[..., dim]`.
        group: channels per scale; must divide dim.
        scale: how a scale is stored: "e8m0" (uint8 bytes), "e4m3" (float8_e4m3fn) or "fp32".
        exponent: how it is chosen; None is the first of these. For "e8m0": "mse" (the power of two with the
            least squared error in the group), "floor" (OCP MX: the largest element may saturate) or "ceil"
            (nothing saturates). For "e4m3": "mse" (in FP4 the better of two scales: the largest element
            becomes 6, or 4), "amax" (always 6) or "search" (the least squared error of nine codes, for groups
            of 64 and more; see `narrowkv.quant.e4m3`). For "fp32": "amax".
        format: the element format: FP4, FP8, INT8 or INT4.
        global_descale: a second descale for the whole tensor, for "e4m3" only (`nvfp4_global_descale` finds
            it): a number, or fp32 with one element.

    Returns:
        `(stored, descale)`; descale is `[..., dim / group]` in the dtype that `scale` says.
        `x ~ stored * descale * global_descale`.

    Raises:
        TypeError: the dtype of `x` is not as above, or `group` is not an int.
        ValueError: `group` does not divide dim, dim is odd for a packed format, `scale` or `exponent` is
            unknown, or `global_descale` is invalid or given for another scale than "e4m3".
        UnsupportedError: `format` is a 16-bit one.

    Example:
        >>> stored, descale = quantize_per_group(torch.full((2, 64), 6.0), 32)
        >>> stored.shape, descale
        (torch.Size([2, 32]), tensor([[127, 127],
                [127, 127]], dtype=torch.uint8))
    """
    fmt = get_narrow_format(format)
    check_choice("scale", scale, tuple(_RULES))
    rule = _RULES[scale][0] if exponent is None else check_choice("exponent", exponent, _RULES[scale])
    check_positive_int("group", group)
    wide = to_fp32("x", x)
    _check_ndim("x", x, 1, "[..., dim]")
    if x.shape[-1] % group:
        raise ValueError(f"group must divide the last dimension of x ({x.shape[-1]}), got {group}")
    groups = wide.reshape(*x.shape[:-1], x.shape[-1] // group, group)  # [..., dim / group, group]
    if scale == "e4m3":
        groups = groups / _given_descale(global_descale, wide)
    elif isinstance(global_descale, torch.Tensor) or global_descale != 1.0:
        raise ValueError(f'global_descale is for scale="e4m3" only, got it with scale={scale!r}')
    amax = _amax(groups, fmt, (-1,))
    if scale == "e8m0":
        descale = _e8m0_scale(groups, amax, fmt, rule)
    elif rule == "search":
        descale = search_e4m3(groups, fmt)
    elif scale == "e4m3":
        descale = _e4m3_scale(groups, amax, fmt, rule)
    else:
        descale = _descale(amax, fmt.max_value)
    return encode((groups / _scale_value(descale).unsqueeze(-1)).flatten(-2), fmt), descale


def _scale_value(descale: torch.Tensor) -> torch.Tensor:
    return e8m0_decode(descale) if descale.dtype == torch.uint8 else descale.float()


def dequantize_per_group(
    stored: torch.Tensor,
    descale: torch.Tensor,
    group: int,
    *,
    format: FormatLike = "fp4_e2m1",
    global_descale: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Undoes `quantize_per_group`, up to its rounding.

    Args:
        stored: storage `[..., dim]`, or uint8 `[..., dim / 2]` for FP4 and INT4.
        descale: `[..., dim / group]`: uint8 is E8M0, float8_e4m3fn is NVFP4's scale, fp32 is a plain descale.
        group: channels per scale.
        format: the element format.
        global_descale: the second descale that was given to the quantiser.

    Returns:
        fp32 `[..., dim]`.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: the shapes do not fit each other.
    """
    check_positive_int("group", group)
    check_dtype("descale", descale, (torch.uint8, torch.float8_e4m3fn, torch.float32))
    values = decode(stored, format)
    _check_ndim("stored", values, 1, "[..., dim]")
    if values.shape[-1] % group:
        raise ValueError(
            f"group must divide the last dimension of the values ({values.shape[-1]}), got {group}"
        )
    check_shape("descale", descale, (*values.shape[:-1], values.shape[-1] // group))
    spread = _scale_value(descale).unsqueeze(-1) * _given_descale(global_descale, values)
    return (values.reshape(*descale.shape, group) * spread).flatten(-2)

"""Quantisers with one scale per run of channels: OCP MX, NVFP4, and plain fp32 scales."""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import check_choice, check_dtype, check_positive_int, check_shape

from .descales import (
    FP32_MAX,
    FormatLike,
    Quantized,
    check_ndim,
    descale_of,
    given_descale,
    largest_magnitude,
)
from .e4m3 import search_e4m3
from .e8m0 import (
    E8M0_NAN,
    ceil_exponent,
    e8m0_decode,
    e8m0_from_exponent,
    floor_exponent,
    mse_exponent,
    sglang_exponent,
    ultraquant_exponent,
)
from .formats import Format
from .fp4 import pack_fp4, round_fp4
from .rounding import cast_fp8, decode, encode, get_narrow_format, round_to_format, to_fp32

__all__ = ["EXPONENT_RULES", "dequantize_per_group", "nvfp4_global_descale", "quantize_per_group"]

_E4M3 = "fp8_e4m3fn"
_E4M3_MAX = 448.0
_E4M3_SMALLEST = 2.0**-9
_FP4_SECOND = 4.0  # the magnitude below E2M1's largest, to which NVFP4 may scale a group's largest element
# How the exponent of an E8M0 scale is chosen; the last two are those of engines, and of FP4 only.
EXPONENT_RULES = ("mse", "floor", "ceil", "ultraquant", "sglang")
_ENGINE_TIES = {"ultraquant": "down", "sglang": "away"}
_RULES = {"e8m0": EXPONENT_RULES, "e4m3": ("mse", "amax", "search"), "fp32": ("amax",)}


def nvfp4_global_descale(x: torch.Tensor) -> torch.Tensor:
    """The second-level descale of NVFP4: amax / (448 * 6), so that the group scales use all of E4M3's range.

    Args:
        x: fp32, bf16 or fp16, any shape. NaN is left out; zeros give 1.

    Returns:
        fp32 `[1]`.
    """
    magnitude = to_fp32("x", x).abs().nan_to_num(nan=0.0, posinf=FP32_MAX).reshape(1, -1)
    amax = magnitude.amax(-1) if magnitude.numel() else magnitude.sum(-1)
    return descale_of(amax, _E4M3_MAX * 6.0)


def _e8m0_scale(groups: torch.Tensor, amax: torch.Tensor, fmt: Format, exponent: str) -> torch.Tensor:
    if exponent == "mse":
        chosen = mse_exponent(groups, fmt)
    else:
        finite = amax.nan_to_num(nan=0.0)
        if exponent == "ultraquant":
            chosen = ultraquant_exponent(finite)
        elif exponent == "sglang":
            chosen = sglang_exponent(finite)
        else:
            chosen = floor_exponent(finite, fmt) if exponent == "floor" else ceil_exponent(finite, fmt)
    return e8m0_from_exponent(chosen).masked_fill(torch.isnan(amax), E8M0_NAN)


def _e4m3_scale(groups: torch.Tensor, amax: torch.Tensor, fmt: Format, exponent: str) -> torch.Tensor:
    def scale_for(top: float) -> torch.Tensor:
        wanted = torch.where(amax == 0, 1.0, (amax / top).clamp(min=_E4M3_SMALLEST))
        return cast_fp8(wanted, _E4M3)

    def squared_error(scale: torch.Tensor) -> torch.Tensor:
        factor = scale.float().unsqueeze(-1)
        return (round_to_format(groups / factor, fmt) * factor - groups).square().sum(-1)

    scale = scale_for(fmt.max_value)
    if exponent == "mse" and fmt.kind == "fp4":
        other = scale_for(_FP4_SECOND)
        better = squared_error(other) < squared_error(scale)
        scale = torch.where(better, other.view(torch.uint8), scale.view(torch.uint8)).view(scale.dtype)
    return scale


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
            (nothing saturates); for FP4 also "ultraquant" (vLLM's cache of that name) and "sglang" (its FP4
            pool), which round halfway numbers as these engines do. For "e4m3": "mse" (in FP4 the better of
            two scales: the largest element becomes 6, or 4), "amax" (always 6) or "search" (the least squared
            error of nine codes; see `narrowkv.quant.e4m3`). For "fp32": "amax".
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
    if rule in _ENGINE_TIES and fmt.kind != "fp4":
        raise ValueError(f"exponent {rule!r} is for fp4_e2m1 only, got it for {fmt.name}")
    check_positive_int("group", group)
    values = to_fp32("x", x)
    check_ndim("x", x, 1, "[..., dim]")
    if x.shape[-1] % group:
        raise ValueError(f"group must divide the last dimension of x ({x.shape[-1]}), got {group}")
    groups = values.reshape(*x.shape[:-1], x.shape[-1] // group, group)  # [..., dim / group, group]
    if scale == "e4m3":
        groups = groups / given_descale(global_descale, values)
    elif isinstance(global_descale, torch.Tensor) or global_descale != 1.0:
        raise ValueError(f'global_descale is for scale="e4m3" only, got it with scale={scale!r}')
    amax = largest_magnitude(groups, fmt, (-1,))
    if scale == "e8m0":
        descale = _e8m0_scale(groups, amax, fmt, rule)
    elif rule == "search":
        descale = search_e4m3(groups, fmt)
    elif scale == "e4m3":
        descale = _e4m3_scale(groups, amax, fmt, rule)
    else:
        descale = descale_of(amax, fmt.max_value)
    scaled = (groups / _scale_value(descale).unsqueeze(-1)).flatten(-2)
    if rule in _ENGINE_TIES:
        return pack_fp4(round_fp4(scaled, _ENGINE_TIES[rule])), descale
    return encode(scaled, fmt), descale


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
    check_ndim("stored", values, 1, "[..., dim]")
    if values.shape[-1] % group:
        raise ValueError(
            f"group must divide the last dimension of the values ({values.shape[-1]}), got {group}"
        )
    check_shape("descale", descale, (*values.shape[:-1], values.shape[-1] // group))
    spread = _scale_value(descale).unsqueeze(-1) * given_descale(global_descale, values)
    return (values.reshape(*descale.shape, group) * spread).flatten(-2)

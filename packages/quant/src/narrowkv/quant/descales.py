"""Shared by all quantisers: the largest magnitude of a group, and the descale computed from it."""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import check_descale_float, check_dtype

from .formats import Format

__all__ = ["FormatLike", "Quantized", "check_ndim", "descale_of", "given_descale", "largest_magnitude"]

FormatLike = str | torch.dtype | Format
Quantized = tuple[torch.Tensor, torch.Tensor]

FP32_MAX = torch.finfo(torch.float32).max
_MIN_DESCALE = torch.finfo(torch.float32).tiny  # GPUs may flush anything smaller to zero


def check_ndim(name: str, x: torch.Tensor, least: int, layout: str) -> None:
    """Refuses a tensor with fewer than `least` dimensions.

    Raises:
        ValueError: naming the argument and the layout that it must have.
    """
    if x.dim() < least:
        raise ValueError(f"{name} must have shape {layout}, got {list(x.shape)}")


def largest_magnitude(x: torch.Tensor, fmt: Format, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitude; Inf counts as the largest finite number, NaN counts if the format has none."""
    magnitude = x.abs().clamp(max=FP32_MAX)
    if fmt.has_nan:
        magnitude = magnitude.nan_to_num(nan=0.0)
    if magnitude.numel() == 0:  # amax has no identity
        return magnitude.sum(dims)
    return magnitude.amax(dims)


def descale_of(amax: torch.Tensor, max_value: float) -> torch.Tensor:
    """The descale that maps the largest magnitude of each group to `max_value`; 1 for a group of zeros.

    `max_value` times it is finite, also where the quotient was rounded up.
    """
    # torch on a GPU divides by a Python number by multiplying with its reciprocal, which rounds differently.
    descale = amax / torch.full_like(amax, max_value)
    most = FP32_MAX / max_value * (1 - 2.0**-23)
    return torch.where(amax == 0, 1.0, descale.clamp(_MIN_DESCALE, most))


def given_descale(descale: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A static descale as fp32 `[1]` on the device of `like`.

    Raises:
        TypeError: a tensor that is not fp32.
        ValueError: a number that is zero, negative, NaN or infinite, or a tensor of several elements.
    """
    if isinstance(descale, torch.Tensor):
        check_dtype("descale", descale, torch.float32)
        if descale.numel() != 1:
            raise ValueError(f"descale must have one element, got shape {list(descale.shape)}")
        return descale.reshape(1).to(like.device)
    return torch.full((1,), check_descale_float("descale", descale), dtype=torch.float32, device=like.device)

"""Tokens and pages in another storage format, in plain torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from narrowkv.paged_cache.descales import CacheSide
from narrowkv.paged_cache.layouts import from_logical
from narrowkv.quant.formats import get_format
from narrowkv.quant.groups import quantize_per_group
from narrowkv.quant.int_tokens import quantize_tokens_int4, quantize_tokens_int8, round_half_away
from narrowkv.quant.rounding import cast_fp8

_CHUNK_ELEMENTS = 1 << 24  # of K and of V that are in fp32 at a time: 64 MiB each


def page_chunks(num_pages: int, page_elements: int) -> list[slice]:
    """Ranges of pages that are converted together; `page_elements` is the elements of K in a page."""
    step = max(1, _CHUNK_ELEMENTS // page_elements)
    return [slice(at, min(at + step, num_pages)) for at in range(0, num_pages, step)]


def largest_per_head(
    chunks: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest finite magnitudes of K and of V, each `[num_kv_heads]`.

    Args:
        chunks: K and V of some pages each, fp32 `[pages, page_size, num_kv_heads, head_dim]`.
    """
    found = [[torch.where(x.isfinite(), x.abs(), 0.0).amax((0, 1, 3)) for x in chunk] for chunk in chunks]
    k, v = (torch.stack(side).amax(0) for side in zip(*found, strict=True))
    return k, v


def descale_for(largest: torch.Tensor, format_name: str) -> torch.Tensor | None:
    """The descale that makes `largest` the largest number of an FP8 format; None for other formats."""
    fmt = get_format(format_name)
    if fmt.kind != "fp8":
        return None
    descale = largest / fmt.max_value
    return torch.where(descale < torch.finfo(torch.float32).tiny, torch.ones_like(descale), descale)


def store_pages(x: torch.Tensor, side: CacheSide, pages: slice, layout: str, exponent: str) -> None:
    """Quantises pages and writes them, and the scales that belong to them, into one side of a cache.

    Args:
        x: fp32 `[pages, page_size, num_kv_heads, head_dim]`.
        side: where to write.
        pages: which pages `x` is for.
        layout: of the cache.
        exponent: FP4: see `append`.
    """
    rows, scales = quantise_tokens(x.flatten(0, 1), side, exponent)
    rows = from_logical(rows.view(*x.shape[:2], *rows.shape[1:]), layout, is_key=side.is_key)
    stored = side.stored
    if stored.element_size() == 1:
        stored, rows = stored.view(torch.uint8), rows.view(torch.uint8)
    stored[pages] = rows
    if scales is not None:
        assert isinstance(side.descale, torch.Tensor)
        side.descale[pages] = scales.view(*x.shape[:2], *scales.shape[1:])


def quantise_tokens(
    x: torch.Tensor, side: CacheSide, exponent: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens in storage, with the bytes that `append` writes, and the scales that it computes.

    Args:
        x: `[tokens, heads, head_dim]` fp32.
        side: K or V of the cache; of its tensors only the descale's values are read, if they are static.
        exponent: FP4: see `append`.

    Returns:
        Stored elements `[tokens, heads, stored elements]`; and scales `[tokens, heads]` or, for FP4's groups,
        `[tokens, heads, groups]`, None where the descale is static.
    """
    fmt, descale, kind = get_format(side.format), side.descale, side.granularity
    if fmt.kind == "fp4":
        group = side.group or x.shape[-1]
        if isinstance(descale, torch.Tensor) and descale.dtype == torch.float8_e4m3fn:
            stored, scales = quantize_per_group(
                x, group, scale="e4m3", exponent="search", global_descale=side.tensor_scale
            )
        else:
            stored, scales = quantize_per_group(x, group, exponent=exponent)
        return stored, scales if side.group else scales[..., 0]
    if fmt.name == "int4":
        return quantize_tokens_int4(x)
    if kind == "token_head" and fmt.name == "int8":
        return quantize_tokens_int8(x)
    if kind == "token_head" and fmt.kind == "float":
        return x.to(fmt.storage_dtype), torch.ones(x.shape[:2], device=x.device)
    if kind == "token_head":
        # A tensor divisor: dividing by a number multiplies by its reciprocal on a GPU, which rounds
        # differently.
        amax = x.abs().amax(-1)
        scale = amax / torch.full_like(amax, fmt.max_value)
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
        return cast_fp8(x / scale[..., None], fmt), scale
    x = x / (descale.view(-1, 1) if isinstance(descale, torch.Tensor) else torch.full_like(x, descale))
    if fmt.name == "int8":
        codes = round_half_away(torch.nan_to_num(x, nan=0.0).clamp(-fmt.max_value, fmt.max_value))
        return codes.to(torch.int8), None
    return x.to(fmt.storage_dtype) if fmt.kind == "float" else cast_fp8(x, fmt), None

"""From one storage format to another, in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowkv.paged_cache.append import check_exponent
from narrowkv.paged_cache.cache import CacheFormat, PagedKVCache
from narrowkv.paged_cache.descales import SCALE_GROUP
from narrowkv.paged_cache.layouts import from_logical
from narrowkv.quant.formats import get_format
from narrowkv.quant.quantize import cast_fp8, quantize_per_group

_CHUNK_ELEMENTS = 1 << 24  # of K and of V that are in fp32 at a time: 64 MiB each


def convert(
    cache: PagedKVCache,
    format: str | CacheFormat,
    layout: str | None,
    k_descale: float | torch.Tensor | None,
    v_descale: float | torch.Tensor | None,
    scale_group: int | None,
    exponent: str,
    scale_format: str,
) -> PagedKVCache:
    """See `PagedKVCache.convert`."""
    parsed = CacheFormat.parse(format)
    step = max(1, _CHUNK_ELEMENTS // (cache.page_size * cache.num_kv_heads * cache.head_dim))
    chunks = [slice(at, min(at + step, cache.num_pages)) for at in range(0, cache.num_pages, step)]
    if None in (k_descale, v_descale) and "fp8" in {get_format(parsed.k).kind, get_format(parsed.v).kind}:
        own_k, own_v = _largest_per_head(cache, chunks)
        k_descale = _descale_of(own_k, parsed.k) if k_descale is None else k_descale
        v_descale = _descale_of(own_v, parsed.v) if v_descale is None else v_descale
    made = PagedKVCache.empty(
        cache.num_pages,
        cache.page_size,
        cache.num_kv_heads,
        cache.head_dim,
        format=parsed,
        layout=cache.layout if layout is None else layout,
        k_descale=1.0 if k_descale is None else k_descale,
        v_descale=1.0 if v_descale is None else v_descale,
        scale_group=scale_group,
        scale_format=scale_format,
        device=cache.k.device,
    )
    check_exponent(exponent, made.k_descale, made.v_descale)
    for pages in chunks:
        k, v = cache.dequantized_pages(pages)
        for x, stored, name, descale, kind in (
            (k, made.k, parsed.k, made.k_descale, made.k_granularity),
            (v, made.v, parsed.v, made.v_descale, made.v_granularity),
        ):
            rows, scales = quantise_tokens(x.flatten(0, 1), name, descale, kind, exponent)
            rows = from_logical(rows.view(*x.shape[:2], *rows.shape[1:]), made.layout, is_key=x is k)
            if stored.element_size() == 1:
                stored, rows = stored.view(torch.uint8), rows.view(torch.uint8)
            stored[pages] = rows
            if scales is not None:
                assert isinstance(descale, torch.Tensor)
                descale[pages] = scales.view(*x.shape[:2], *scales.shape[1:])
    return replace(made, negative_zero_free=cache.negative_zero_free)


def _largest_per_head(cache: PagedKVCache, chunks: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest finite magnitudes of K and of V, each `[num_kv_heads]`."""
    found = [
        [torch.where(x.isfinite(), x.abs(), 0.0).amax((0, 1, 3)) for x in cache.dequantized_pages(pages)]
        for pages in chunks
    ]
    k, v = (torch.stack(side).amax(0) for side in zip(*found, strict=True))
    return k, v


def _descale_of(largest: torch.Tensor, format_name: str) -> torch.Tensor | float:
    """The descale that makes `largest` the format's largest number; 1.0 for a format that needs none."""
    fmt = get_format(format_name)
    if fmt.kind != "fp8":
        return 1.0
    descale = largest / fmt.max_value
    return torch.where(descale < torch.finfo(torch.float32).tiny, torch.ones_like(descale), descale)


def quantise_tokens(
    x: torch.Tensor, name: str, descale: float | torch.Tensor, kind: str, exponent: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens in storage, with the bytes that `append` writes, and the scales that it computes.

    Args:
        x: `[tokens, heads, head_dim]` fp32.
        name: a storage format.
        descale, kind: the cache's descale and its granularity.
        exponent: FP4: see `append`.

    Returns:
        Stored elements `[tokens, heads, stored elements]`; and scales `[tokens, heads]` or, for FP4's groups,
        `[tokens, heads, groups]`, None where the descale is static.
    """
    fmt = get_format(name)
    if fmt.kind == "fp4":
        if isinstance(descale, torch.Tensor) and descale.dtype == torch.float8_e4m3fn:
            stored, scales = quantize_per_group(x, x.shape[-1], scale="e4m3", exponent="search")
            return stored, scales[..., 0]
        group = SCALE_GROUP if kind == "token_head_group" else x.shape[-1]
        stored, scales = quantize_per_group(x, group, exponent=exponent)
        return stored, scales if kind == "token_head_group" else scales[..., 0]
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
    return x.to(fmt.storage_dtype) if fmt.kind == "float" else cast_fp8(x, fmt), None

"""Large caches, drawn on the device: one storage for all page sizes, page ids shuffled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.quant.formats import get_format
from narrowkv.quant.int_tokens import quantize_tokens_int4, quantize_tokens_int8
from narrowkv.quant.quantize import cast_fp8, quantize_per_group
from narrowkv.runtime.targets import CACHE_LINE

__all__ = ["CacheSizes", "LargeCache"]

# Gaussian numbers beyond 4.5 are rare; they are clipped, for the reference too.
_SPREAD = 4.5
_CHUNK_TOKENS = 65536


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of a cache whose sequences have one length.

    Attributes:
        batch, context: sequences, and tokens of each, a multiple of `page_size`.
        page_size, num_kv_heads, head_dim: of the cache.
        format: "K" or "K/V". FP4 has one E8M0 scale per token and head unless a colon follows: then the
            channels that share a scale, "e4m3" for E4M3 scales, or both, as in "fp4_e2m1:16+e4m3".
        layout: "NHD" or "HND"; empty is HND for FP4 and NHD for other formats, as engines store them.
    """

    batch: int
    context: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    format: str
    layout: str = ""

    def __post_init__(self) -> None:
        if not self.layout:
            is_fp4 = any(self._is_fp4(name) for name in self._formats)
            object.__setattr__(self, "layout", "HND" if is_fp4 else "NHD")

    @property
    def cache_format(self) -> CacheFormat:
        """Formats of K and V."""
        k, slash, v = self.format.partition(":")[0].partition("/")
        return CacheFormat(k, v if slash else k)

    @property
    def scale_group(self) -> int:
        """Channels that share a scale of FP4; 0 for one scale per token and head."""
        channels = self._scales.partition("+")[0]
        return int(channels) if channels.isdigit() else 0

    @property
    def scale_format(self) -> str:
        """How scales of FP4 are stored."""
        return "e4m3" if self._scales.endswith("e4m3") else "e8m0"

    @property
    def _scales(self) -> str:
        return self.format.partition(":")[2]

    @property
    def num_bytes(self) -> float:
        """Bytes of K, V and scales, and of the page ids."""
        row = sum(self._row_bytes(name) for name in self._formats)
        pages = self.batch * -(-self.context // self.page_size)
        return self.batch * self.context * self.num_kv_heads * row + 4 * pages

    @property
    def hbm_share(self) -> float:
        """Cache lines that HBM serves, over the lines that all programs load, each those of one KV head.

        HBM serves a line once, however many programs load it. Heads share lines where a head's row fills only
        part of one, and those of scales.

        Example:
            >>> CacheSizes(1, 64, page_size=1, num_kv_heads=8, head_dim=128, format="fp4_e2m1").hbm_share
            0.3125
            >>> CacheSizes(1, 64, page_size=1, num_kv_heads=8, head_dim=128, format="fp8_e4m3fn").hbm_share
            1.0
        """
        loaded = served = 0.0
        for name in self._formats:
            row = self.head_dim * get_format(name).bits / 8
            scales = self._row_bytes(name) - row
            heads = self.num_kv_heads
            for size, step in ((row, row * (heads if self.layout == "NHD" else 1)), (scales, scales * heads)):
                if size:  # lines of a page that programs load, and those that the page has
                    lines_of_token = max(size / CACHE_LINE, min(step / CACHE_LINE, 1.0))
                    loaded += heads * max(self.page_size * lines_of_token, 1.0)
                    served += max(self.page_size * heads * size / CACHE_LINE, 1.0)
        return served / loaded

    @property
    def _formats(self) -> tuple[str, str]:
        return self.cache_format.k, self.cache_format.v

    @staticmethod
    def _is_fp4(name: str) -> bool:
        return get_format(name).kind == "fp4"

    def _row_bytes(self, name: str) -> float:
        fmt = get_format(name)
        scales = self.head_dim // (self.scale_group or self.head_dim) if self._is_fp4(name) else 0
        return self.head_dim * fmt.bits / 8 + (4 if fmt.kind == "int" else scales)


class LargeCache:
    """K and V of one format, batch and context, which `view` gives at any page size.

    Args:
        sizes: what to draw.
        seed: of the numbers.
        device: where they are drawn and stored.

    Example:
        >>> sizes = CacheSizes(batch=2, context=64, page_size=16, num_kv_heads=1, head_dim=64, format="bf16")
        >>> cache, table = LargeCache(sizes, device="cpu").view(sizes)
        >>> cache.num_pages, table.page_ids.shape
        (8, torch.Size([2, 4]))
    """

    def __init__(self, sizes: CacheSizes, seed: int = 0, device: str = "cuda") -> None:
        self._made_for = self.key(sizes)
        self._device = device
        self._random = torch.Generator(device).manual_seed(seed)
        tokens = sizes.batch * sizes.context
        self._k, self._k_descale = self._fill(sizes.cache_format.k, tokens, sizes)
        self._v, self._v_descale = self._fill(sizes.cache_format.v, tokens, sizes)

    @staticmethod
    def key(sizes: CacheSizes) -> tuple[Any, ...]:
        """What sizes have in common that one cache gives views of."""
        return sizes.format, sizes.batch, sizes.context, sizes.num_kv_heads, sizes.head_dim

    def fits(self, sizes: CacheSizes) -> bool:
        """Whether `view` takes these sizes."""
        return self._made_for == self.key(sizes)

    def _fill(self, name: str, tokens: int, sizes: CacheSizes) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Rows of one side, and their scales or the descale of all."""
        fmt, rows, head_dim = get_format(name), (tokens, sizes.num_kv_heads), sizes.head_dim
        width = fmt.storage_bytes(head_dim) if fmt.is_packed else head_dim
        stored = torch.empty((*rows, width), dtype=fmt.storage_dtype, device=self._device)
        group, scale = sizes.scale_group or head_dim, sizes.scale_format
        scales: float | torch.Tensor = 1.0
        if fmt.kind == "fp4":
            dtype = torch.float8_e4m3fn if scale == "e4m3" else torch.uint8
            scales = torch.empty((*rows, head_dim // group), dtype=dtype, device=self._device)
        elif fmt.kind == "int":
            scales = torch.empty((*rows, 1), device=self._device)
        elif fmt.kind == "fp8":
            scales = _SPREAD / fmt.max_value
        for begin in range(0, tokens, _CHUNK_TOKENS):
            part = slice(begin, begin + _CHUNK_TOKENS)
            size = (*stored[part].shape[:2], head_dim)
            x = torch.randn(size, generator=self._random, device=self._device)
            if not isinstance(scales, torch.Tensor):
                stored[part].copy_(cast_fp8(x / scales, name) if fmt.kind == "fp8" else x.to(stored.dtype))
            elif fmt.kind == "int":
                quantise = quantize_tokens_int4 if fmt.is_packed else quantize_tokens_int8
                stored[part], scales[part, :, 0] = quantise(x)
            else:
                # The rules that choose scales by default are slow, and times do not depend on scales.
                rule = "amax" if scale == "e4m3" else "floor"
                stored[part], scales[part] = quantize_per_group(x, group, scale=scale, exponent=rule)
        return stored, scales

    def _side(
        self, stored: torch.Tensor, descale: float | torch.Tensor, sizes: CacheSizes
    ) -> tuple[torch.Tensor, float | torch.Tensor]:
        """K or V as pages of the layout; the numbers are random, so their order does not matter."""
        heads, page = sizes.num_kv_heads, sizes.page_size
        order = (heads, page) if sizes.layout == "HND" else (page, heads)
        if isinstance(descale, torch.Tensor):
            descale = descale.view(-1, page, heads, descale.shape[-1])
            descale = descale if descale.shape[-1] > 1 else descale[..., 0]
        return stored.view(-1, *order, stored.shape[-1]), descale

    def view(self, sizes: CacheSizes) -> tuple[PagedKVCache, PageTable]:
        """The cache, and a page table of full sequences; `sizes` may differ in its page size."""
        k, k_descale = self._side(self._k, self._k_descale, sizes)
        v, v_descale = self._side(self._v, self._v_descale, sizes)
        cache = PagedKVCache.from_tensors(
            k, v, format=sizes.cache_format, layout=sizes.layout, k_descale=k_descale, v_descale=v_descale,
            negative_zero_free=True,
        )  # fmt: skip
        order = torch.randperm(cache.num_pages, generator=self._random, device=self._device)
        lens = torch.full((sizes.batch,), sizes.context, dtype=torch.int32, device=self._device)
        ids = order.int().view(sizes.batch, -1)
        return cache, PageTable.from_block_table(ids, lens, page_size=sizes.page_size)

"""Large decode inputs on a GPU, made there: one storage for all page sizes of a shape, page ids shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from narrowkv.cli.cases import parse_format
from narrowkv.cli.names import FP4
from narrowkv.cli.report import UsageError
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.quant.formats import get_format
from narrowkv.quant.quantize import cast_fp8, quantize_per_group

# Gaussian numbers beyond 4.5 are rare; what is clipped is clipped for the reference too.
_SPREAD = 4.5
_CHUNK_TOKENS = 65536


@dataclass(frozen=True)
class DecodeShape:
    """One row of a bench."""

    batch: int
    context: int
    page_size: int
    num_kv_heads: int
    ratio: int
    head_dim: int
    q: str
    format: str

    @property
    def cache_format(self) -> CacheFormat:
        """K's and V's formats."""
        return parse_format(self.format)[0]

    @property
    def scale_group(self) -> int:
        """Channels that share a scale of FP4; 0 for one scale a token and head."""
        return parse_format(self.format)[1]

    @property
    def layout(self) -> str:
        """FP4's usual layout is HND, and NHD that of the others; the cache takes either."""
        return "HND" if FP4 in (self.cache_format.k, self.cache_format.v) else "NHD"

    @property
    def bytes_touched(self) -> float:
        """Every byte that the call must touch, once: K, V, scales, q, o and page ids."""
        row = sum(self._row_bytes(name) for name in (self.cache_format.k, self.cache_format.v))
        kv = self.batch * self.context * self.num_kv_heads * row
        q_and_o = 2 * self.batch * self.num_kv_heads * self.ratio * self.head_dim * 2
        return kv + q_and_o + 4 * self.batch * -(-self.context // self.page_size)

    def _row_bytes(self, name: str) -> float:
        scales = self.head_dim // (self.scale_group or self.head_dim) if name == FP4 else 0
        return self.head_dim * get_format(name).bits / 8 + scales

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV."""
        return 4.0 * self.batch * self.context * self.num_kv_heads * self.ratio * self.head_dim

    def as_row(self) -> dict[str, Any]:
        """The fields that identify a row."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def shapes(
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    page_sizes: Sequence[int],
    num_kv_heads: int,
    ratios: Sequence[int],
    head_dim: int,
    q: str,
    formats: Sequence[str],
) -> list[DecodeShape]:
    """Every combination, such that rows with the same storage are neighbours.

    Raises:
        UsageError: a context that is no multiple of a page size.
    """
    for context, page_size in product(contexts, page_sizes):
        if context % page_size:
            raise UsageError(
                f"--context must be multiples of every --page-size, got {context} and {page_size}"
            )
    return [
        DecodeShape(batch, context, page_size, num_kv_heads, ratio, head_dim, q, fmt)
        for fmt, batch, context, ratio, page_size in product(formats, batches, contexts, ratios, page_sizes)
    ]


class Storage:
    """K and V of one (format, batch, context), seen at any page size."""

    def __init__(self, shape: DecodeShape, seed: int = 0, device: str = "cuda") -> None:
        self._made_for = self._key(shape)
        self._device = device
        self._random = torch.Generator(device).manual_seed(seed)
        tokens = shape.batch * shape.context
        self._k, self._k_descale = self._fill(shape.cache_format.k, tokens, shape)
        self._v, self._v_descale = self._fill(shape.cache_format.v, tokens, shape)

    @staticmethod
    def _key(shape: DecodeShape) -> tuple[Any, ...]:
        return shape.format, shape.batch, shape.context, shape.num_kv_heads, shape.head_dim

    def fits(self, shape: DecodeShape) -> bool:
        """Whether it holds the storage of `shape`."""
        return self._made_for == self._key(shape)

    def _fill(self, name: str, tokens: int, shape: DecodeShape) -> tuple[torch.Tensor, float | torch.Tensor]:
        fmt = get_format(name)
        if fmt.kind == "fp4":
            return self._fill_fp4(tokens, shape)
        descale = 1.0 if fmt.kind == "float" else _SPREAD / fmt.max_value
        stored = torch.empty(
            (tokens, shape.num_kv_heads, shape.head_dim), dtype=fmt.storage_dtype, device=self._device
        )
        for begin in range(0, tokens, _CHUNK_TOKENS):
            part = stored[begin : begin + _CHUNK_TOKENS]
            x = torch.randn(part.shape, generator=self._random, device=self._device) / descale
            part.copy_(x.to(part.dtype) if fmt.kind == "float" else cast_fp8(x, name))
        return stored, descale

    def _fill_fp4(self, tokens: int, shape: DecodeShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed rows and their E8M0 scales, token by token and head by head."""
        rows, group = (tokens, shape.num_kv_heads), shape.scale_group or shape.head_dim
        stored = torch.empty((*rows, shape.head_dim // 2), dtype=torch.uint8, device=self._device)
        scales = torch.empty((*rows, shape.head_dim // group), dtype=torch.uint8, device=self._device)
        for begin in range(0, tokens, _CHUNK_TOKENS):
            part = slice(begin, begin + _CHUNK_TOKENS)
            size = (*stored[part].shape[:2], shape.head_dim)
            x = torch.randn(size, generator=self._random, device=self._device)
            # The least-squares rule would take longer than the rows do, and moves no other bytes.
            stored[part], scales[part] = quantize_per_group(x, group, exponent="floor")
        return stored, scales

    def _side(
        self, stored: torch.Tensor, descale: float | torch.Tensor, shape: DecodeShape
    ) -> tuple[torch.Tensor, float | torch.Tensor]:
        """One side as pages of the row's layout: any order of random rows is as good as another."""
        heads, page = shape.num_kv_heads, shape.page_size
        order = (heads, page) if shape.layout == "HND" else (page, heads)
        if isinstance(descale, torch.Tensor):
            descale = descale.view(-1, page, heads, descale.shape[-1])
            descale = descale if shape.scale_group else descale[..., 0]
        return stored.view(-1, *order, stored.shape[-1]), descale

    def inputs(self, shape: DecodeShape) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        """q, cache and page table of a row."""
        k, k_descale = self._side(self._k, self._k_descale, shape)
        v, v_descale = self._side(self._v, self._v_descale, shape)
        cache = PagedKVCache.from_tensors(
            k,
            v,
            format=shape.cache_format,
            layout=shape.layout,
            k_descale=k_descale,
            v_descale=v_descale,
            negative_zero_free=True,
        )
        ids = (
            torch.randperm(cache.num_pages, generator=self._random, device=self._device)
            .int()
            .view(shape.batch, -1)
        )
        lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=self._device)
        table = PageTable.from_block_table(ids, lens, page_size=shape.page_size)
        dtype = torch.bfloat16 if shape.q == "bf16" else torch.float16
        size = (shape.batch, shape.num_kv_heads * shape.ratio, shape.head_dim)
        q = torch.randn(size, generator=self._random, device=self._device).to(dtype)
        return q, cache, table

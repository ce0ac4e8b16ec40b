"""Large decode inputs on a GPU, made there: one storage for all page sizes of a shape, page ids shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from narrowkv.cli.report import UsageError
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.quant.formats import get_format
from narrowkv.quant.quantize import cast_fp8

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
        """K's and V's formats; `format` joins two by a slash."""
        k, _, v = self.format.partition("/")
        return CacheFormat(k, v or k)

    @property
    def bytes_touched(self) -> float:
        """Every byte that the call must touch, once: K, V, q, o and page ids."""
        heads = self.cache_format
        bits = get_format(heads.k).bits + get_format(heads.v).bits
        kv = self.batch * self.context * self.num_kv_heads * self.head_dim * bits / 8
        q_and_o = 2 * self.batch * self.num_kv_heads * self.ratio * self.head_dim * 2
        return kv + q_and_o + 4 * self.batch * -(-self.context // self.page_size)

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
        UsageError: a format that a cache does not have, or a context that is no multiple of a page size.
    """
    if q not in ("bf16", "fp16"):
        raise UsageError(f"--q must be bf16 or fp16, got {q!r}")
    for name in formats:
        k, _, v = name.partition("/")
        try:
            CacheFormat.parse(CacheFormat(k, v or k))
        except ValueError as error:
            raise UsageError(f"--format {name}: {error}") from None
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

    def _fill(self, name: str, tokens: int, shape: DecodeShape) -> tuple[torch.Tensor, float]:
        fmt = get_format(name)
        descale = 1.0 if fmt.kind == "float" else _SPREAD / fmt.max_value
        stored = torch.empty(
            (tokens, shape.num_kv_heads, shape.head_dim), dtype=fmt.storage_dtype, device=self._device
        )
        for begin in range(0, tokens, _CHUNK_TOKENS):
            part = stored[begin : begin + _CHUNK_TOKENS]
            x = torch.randn(part.shape, generator=self._random, device=self._device) / descale
            part.copy_(x.to(part.dtype) if fmt.kind == "float" else cast_fp8(x, name))
        return stored, descale

    def inputs(self, shape: DecodeShape) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        """q, cache and page table of a row."""
        sizes = (-1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        cache = PagedKVCache.from_tensors(
            self._k.view(sizes),
            self._v.view(sizes),
            format=shape.cache_format,
            k_descale=self._k_descale,
            v_descale=self._v_descale,
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

"""Named decode shapes and seeded inputs; tests, benchmarks and examples draw from here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, append_reference

_I32 = torch.int32
_STALE_PAGE_ID = 2**30
_NAN_BYTE = {"fp8_e4m3fn": 0x7F, "fp8_e4m3fnuz": 0x80, "fp8_e5m2": 0x7F}
_INF_BYTE = {"fp8_e5m2": 0x7C}


@dataclass(frozen=True)
class DecodeWorkload:
    """A decode step to build.

    Attributes:
        seq_lens: tokens of each sequence, the query tokens included.
        name: what a table calls it.
        q_len: query tokens of each sequence.
        num_kv_heads, gqa_ratio, head_dim: heads.
        page_size, layout, format: the cache; `format` is a format name or a `CacheFormat`.
        q_dtype: bf16 or fp16.
        granularity: of both descales: "float", or one of the cache's granularities.
        ragged: ragged metadata (indptr, indices, last page lengths) instead of a block table.
        negative_zero_free: tag the cache as written by narrowkv, which it is: no 0x80 and no NaN code among
            the bytes that are read.
        unused: what fills the bytes that must never be read: "nan", or "inf" where the format has one.

    Example:
        >>> q, cache, table = DecodeWorkload(seq_lens=(20, 9)).build()
        >>> tuple(q.shape), table.batch_size
        ((2, 24, 64), 2)
    """

    seq_lens: tuple[int, ...] = (70, 5, 130)
    name: str = "small"
    q_len: int = 1
    num_kv_heads: int = 2
    gqa_ratio: int = 12
    head_dim: int = 64
    page_size: int = 16
    layout: str = "NHD"
    format: str | CacheFormat = "fp8_e4m3fn"
    q_dtype: torch.dtype = torch.bfloat16
    granularity: str = "float"
    ragged: bool = False
    negative_zero_free: bool = False
    unused: str = "nan"

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seq_lens)

    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.gqa_ratio

    @property
    def pages_per_seq(self) -> tuple[int, ...]:
        """Pages that each sequence occupies."""
        return tuple(-(-n // self.page_size) for n in self.seq_lens)

    @property
    def max_pages(self) -> int:
        """Columns of the block table."""
        return max(self.pages_per_seq, default=0) or 1

    @property
    def num_pages(self) -> int:
        """Pages of the cache: room for every row of the block table, and two that nobody owns."""
        return self.batch * self.max_pages + 2

    def build(
        self, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        """Seeded random inputs, the same on every device, in which nothing may be read that is not used.

        Pages are shuffled; page ids past a sequence's end are far out of range; pages that nobody owns and
        the tail of each last page hold NaN (or Inf).

        Args:
            device: where the tensors go.
            seed: of the random numbers; the global generator is left alone.

        Returns:
            q `[batch * q_len, num_qo_heads, head_dim]`, the cache, the page table.
        """
        random = torch.Generator().manual_seed(seed)
        descales = [self._descale(random, device) for _ in range(2)]
        cache = PagedKVCache.empty(
            self.num_pages, self.page_size, self.num_kv_heads, self.head_dim,
            format=self.format, layout=self.layout, device=device,
        )  # fmt: skip
        _poison(cache.k, cache.format.k, self.unused)
        _poison(cache.v, cache.format.v, self.unused)
        ids = torch.randperm(self.num_pages, generator=random)[: self.batch * self.max_pages]
        ids = ids.view(self.batch, self.max_pages).to(_I32)
        for seq, (n, pages) in enumerate(zip(self.seq_lens, self.pages_per_seq, strict=True)):
            token = torch.arange(n)
            slots = ids[seq, token // self.page_size] * self.page_size + token % self.page_size
            k, v = (
                torch.randn(n, self.num_kv_heads, self.head_dim, generator=random).to(device)
                for _ in range(2)
            )
            append_reference(cache, k, v, slots.to(device, _I32))
            ids[seq, pages:] = _STALE_PAGE_ID
        kind = None if self.granularity == "float" else self.granularity
        cache = PagedKVCache.from_tensors(
            cache.k, cache.v, format=self.format, layout=self.layout,
            k_descale=descales[0], v_descale=descales[1], k_granularity=kind, v_granularity=kind,
            negative_zero_free=self.negative_zero_free,
        )  # fmt: skip
        q = torch.randn(self.batch * self.q_len, self.num_qo_heads, self.head_dim, generator=random)
        return q.to(device, self.q_dtype), cache, self._page_table(ids, device)

    def _page_table(self, ids: torch.Tensor, device: torch.device | str) -> PageTable:
        size, used = self.page_size, self.pages_per_seq
        if not self.ragged:
            lens = torch.tensor(self.seq_lens, dtype=_I32, device=device)
            return PageTable.from_block_table(ids.to(device), lens, page_size=size)
        indptr = torch.tensor([0, *used]).cumsum(0)
        indices = [ids[seq, :n] for seq, n in enumerate(used)]
        last = [n - (pages - 1) * size if pages else 0 for n, pages in zip(self.seq_lens, used, strict=True)]
        return PageTable.from_ragged(
            indptr.to(device, _I32),
            torch.cat([*indices, ids.new_zeros(0)]).to(device),
            torch.tensor(last, dtype=_I32, device=device),
            page_size=size,
        )

    def _descale(self, random: torch.Generator, device: torch.device | str) -> float | torch.Tensor:
        if self.granularity == "float":
            return 0.5
        shapes: dict[str, tuple[int, ...]] = {
            "tensor": (1,),
            "head": (self.num_kv_heads,),
            "sequence_head": (self.batch, self.num_kv_heads),
            "page_head": (self.num_pages, self.num_kv_heads),
            "token_head": (self.num_pages, self.page_size, self.num_kv_heads),
        }
        return (torch.rand(shapes[self.granularity], generator=random) + 0.5).to(device)


def _poison(stored: torch.Tensor, format_name: str, kind: str) -> None:
    if stored.element_size() == 1:
        byte = _INF_BYTE.get(format_name) if kind == "inf" else None
        stored.view(torch.uint8).fill_(_NAN_BYTE[format_name] if byte is None else byte)
    else:
        stored.fill_(float(kind))


GLM_GQA12 = DecodeWorkload(name="glm-gqa12", seq_lens=(1024,) * 4, num_kv_heads=8, gqa_ratio=12, head_dim=128)
"""The probe: 96 query heads over 8 KV heads, batch 4, context 1024."""

WORKLOADS: dict[str, DecodeWorkload] = {
    workload.name: workload
    for workload in (
        DecodeWorkload(),
        GLM_GQA12,
        replace(GLM_GQA12, name="glm-gqa12-long", seq_lens=(16384,)),
        replace(GLM_GQA12, name="glm-gqa12-skewed", seq_lens=(16384, 1, 300, 1024, 0, 2048)),
        replace(GLM_GQA12, name="glm-gqa12-mtp", q_len=4),
        replace(GLM_GQA12, name="glm-gqa12-batch", seq_lens=(8192,) * 128, page_size=64),
    )
}
"""Workloads by name. The last one is a gigabyte of cache; it is for a GPU."""

"""Named prefill shapes and seeded inputs; tests and examples draw from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.attn_decode.workloads import DecodeWorkload
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable

_I32 = torch.int32


@dataclass(frozen=True)
class PrefillWorkload:
    """A prefill to build.

    Attributes:
        q_lens: query tokens of each sequence; lens: keys of each, the new ones included.
        num_kv_heads, gqa_ratio, head_dim: heads.
        page_size, layout, format, scale_group: the cache.
        q_dtype: bf16 or fp16, or FP8.
        granularity: of the descales that are not FP4's: "float" or one of the cache's.
        ragged: FlashInfer-style metadata instead of a block table.
    """

    q_lens: tuple[int, ...] = (9, 1, 30)
    lens: tuple[int, ...] = (70, 5, 130)
    num_kv_heads: int = 2
    gqa_ratio: int = 3
    head_dim: int = 64
    page_size: int = 16
    layout: str = "NHD"
    format: str | CacheFormat = "fp8_e4m3fn"
    scale_group: int | None = None
    q_dtype: torch.dtype = torch.bfloat16
    granularity: str = "float"
    ragged: bool = False

    def build(
        self, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable, torch.Tensor]:
        """q, cache, page table, cu_seqlens_q; the cache as `DecodeWorkload` makes it."""
        _, cache, table = DecodeWorkload(
            lens=self.lens,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            layout=self.layout,
            format=self.format,
            scale_group=self.scale_group,
            granularity=self.granularity,
            ragged=self.ragged,
        ).build(device, seed)
        q = torch.randn(sum(self.q_lens), self.num_kv_heads * self.gqa_ratio, self.head_dim)
        starts = torch.tensor([0, *self.q_lens], dtype=_I32).cumsum(0).to(device, _I32)
        return q.to(self.q_dtype).to(device), cache, table, starts

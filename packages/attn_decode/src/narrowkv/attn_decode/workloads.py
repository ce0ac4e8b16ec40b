"""Named decode shapes and seeded inputs; tests and examples draw from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, append_reference
from narrowkv.quant.e8m0 import E8M0_NAN

_I32 = torch.int32


@dataclass(frozen=True)
class DecodeWorkload:
    """A decode step to build.

    Attributes:
        lens: tokens of each sequence.
        q_len: query tokens a sequence.
        num_kv_heads, gqa_ratio, head_dim: heads.
        page_size, layout, format: the cache; scale_group: channels per scale of FP4, None for one a head.
        q_dtype: bf16 or fp16.
        granularity: of the descales that are not FP4's: "float" or one of the cache's.
        ragged: FlashInfer-style metadata instead of a block table.
    """

    lens: tuple[int, ...] = (70, 5, 130)
    q_len: int = 1
    num_kv_heads: int = 2
    gqa_ratio: int = 12
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
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        """q, cache, page table: pages shuffled, stale ids far out of range, every unused byte NaN."""
        torch.manual_seed(seed)
        batch, size = len(self.lens), self.page_size
        most = max([-(-n // size) for n in self.lens] or [0]) or 1
        num_pages = batch * most + 2
        descales = [self._descale(num_pages) for _ in range(2)]
        cache = PagedKVCache.empty(
            num_pages,
            size,
            self.num_kv_heads,
            self.head_dim,
            format=self.format,
            layout=self.layout,
            scale_group=self.scale_group,
        )
        sides = ((cache.k, cache.format.k, cache.k_descale), (cache.v, cache.format.v, cache.v_descale))
        for stored, name, scales in sides:
            if name == "fp4_e2m1":
                assert isinstance(scales, torch.Tensor)
                stored.fill_(0x77)
                scales.fill_(E8M0_NAN)
            elif stored.element_size() == 1:
                stored.view(torch.uint8).fill_(0x80 if name == "fp8_e4m3fnuz" else 0x7F)
            else:
                stored.fill_(float("nan"))
        ids = torch.randperm(num_pages)[: batch * most].view(batch, most).to(_I32)
        used = [-(-n // size) for n in self.lens]
        for seq, n in enumerate(self.lens):
            token = torch.arange(n)
            slots = (ids[seq].long()[token // size] * size + token % size).to(_I32)
            k, v = (torch.randn(n, self.num_kv_heads, self.head_dim) for _ in range(2))
            append_reference(cache, k, v, slots)
            ids[seq, used[seq] :] = 2**30
        used_descales = [
            scales if name == "fp4_e2m1" else given
            for (_, name, scales), given in zip(sides, descales, strict=True)
        ]
        kinds = [
            None if name == "fp4_e2m1" or self.granularity == "float" else self.granularity
            for _, name, _ in sides
        ]
        cache = PagedKVCache.from_tensors(
            cache.k.to(device),
            cache.v.to(device),
            format=cache.format,
            layout="NHD" if self.layout == "concat" else self.layout,
            k_descale=_to(used_descales[0], device),
            v_descale=_to(used_descales[1], device),
            k_granularity=kinds[0],
            v_granularity=kinds[1],
        )
        if self.ragged:
            table = PageTable.from_ragged(
                torch.tensor([0, *used]).cumsum(0).to(device, _I32),
                torch.cat([ids[seq, :n] for seq, n in enumerate(used)]).to(device),
                torch.tensor(
                    [n - (p - 1) * size if p else 0 for n, p in zip(self.lens, used, strict=True)]
                ).to(device, _I32),
                page_size=size,
            )
        else:
            table = PageTable.from_block_table(
                ids.to(device), torch.tensor(self.lens, dtype=_I32, device=device), page_size=size
            )
        q = torch.randn(batch * self.q_len, self.num_kv_heads * self.gqa_ratio, self.head_dim)
        return q.to(device, self.q_dtype), cache, table

    def _descale(self, num_pages: int) -> float | torch.Tensor:
        shapes: dict[str, tuple[int, ...]] = {
            "tensor": (1,),
            "head": (self.num_kv_heads,),
            "sequence_head": (len(self.lens), self.num_kv_heads),
            "page_head": (num_pages, self.num_kv_heads),
            "token_head": (num_pages, self.page_size, self.num_kv_heads),
        }
        if self.granularity == "float":
            return 0.5
        return torch.rand(shapes[self.granularity]) + 0.5


def _to(descale: float | torch.Tensor, device: torch.device | str) -> float | torch.Tensor:
    return descale.to(device) if isinstance(descale, torch.Tensor) else descale


GLM_GQA12 = DecodeWorkload(lens=(1024,) * 4, num_kv_heads=8, head_dim=128)
"""The probe: GLM-4.5-Air's attention, batch 4, context 1024."""
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")
"""Keys in FP8, values in FP4: most of FP4's capacity at a third of its error."""

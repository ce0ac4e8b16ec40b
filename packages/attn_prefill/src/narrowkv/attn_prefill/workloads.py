"""Named prefill shapes and seeded inputs; tests and examples draw from here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowkv.attn_decode.workloads import DecodeWorkload
from narrowkv.attn_prefill.plan import PrefillPlan
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, Rope

_I32 = torch.int32


@dataclass(frozen=True)
class PrefillWorkload:
    """A prefill to build.

    Attributes:
        q_lens: query tokens of each sequence; lens: keys of each, the new ones included.
        num_kv_heads, gqa_ratio, head_dim: heads.
        page_size, layout, format, scale_group, scale_format: the cache.
        q_dtype: bf16 or fp16, or FP8.
        granularity: of the descales that are not FP4's: "float" or one of the cache's.
        ragged: FlashInfer-style metadata instead of a block table.
        clean: whether the cache is declared free of negative zeros and NaN; otherwise unused slots hold NaN.
    """

    q_lens: tuple[int, ...] = (5, 1, 25)
    lens: tuple[int, ...] = (20, 5, 70)
    num_kv_heads: int = 2
    gqa_ratio: int = 3
    head_dim: int = 64
    page_size: int = 16
    layout: str = "NHD"
    format: str | CacheFormat = "fp8_e4m3fn"
    scale_group: int | None = None
    scale_format: str = "e8m0"
    q_dtype: torch.dtype = torch.bfloat16
    granularity: str = "float"
    ragged: bool = False
    clean: bool = False

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
            scale_format=self.scale_format,
            granularity=self.granularity,
            ragged=self.ragged,
            clean=self.clean,
        ).build(device, seed)
        q = torch.randn(sum(self.q_lens), self.num_kv_heads * self.gqa_ratio, self.head_dim)
        starts = torch.tensor([0, *self.q_lens], dtype=_I32).cumsum(0).to(device, _I32)
        return q.to(self.q_dtype).to(device), cache, table, starts


@dataclass(frozen=True)
class AppendWorkload(PrefillWorkload):
    """A prefill that appends: `lens` are keys *before* it, `q_lens` the new tokens of each sequence.

    Attributes:
        rope: "neox", "gptj" or None; rotary_dim: the columns that it turns.
    """

    rope: str | None = None
    rotary_dim: int = 32

    def build_append(
        self, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedKVCache, PageTable, torch.Tensor, Rope | None]:
        """q, k_new, v_new, cache, page table, cu_seqlens_q and the rotary embedding.

        Pages are shuffled, every byte of the cache that is not an old token's is NaN unless it is clean.
        """
        full = tuple(old + new for old, new in zip(self.lens, self.q_lens, strict=True))
        q, cache, table, starts = replace(self, lens=full).build(device, seed)
        before = torch.tensor(self.lens, dtype=_I32, device=device)
        table = PageTable.from_block_table(table.page_ids, cached_lens=before, page_size=self.page_size)
        if not self.clean:
            poison_from(cache, table, full)
        random = torch.Generator().manual_seed(seed)
        shape = (q.shape[0], self.num_kv_heads, self.head_dim)
        k_new, v_new = (torch.randn(shape, generator=random).to(self.q_dtype).to(device) for _ in range(2))
        rope = None
        if self.rope is not None:
            angle = torch.rand(max(full) + 1, self.rotary_dim // 2, generator=random) * 6
            positions = torch.cat(
                [old + torch.arange(n) for old, n in zip(self.lens, self.q_lens, strict=True)]
            )
            rope = Rope(
                angle.cos().to(device), angle.sin().to(device), positions.to(device, _I32), style=self.rope
            )
        return q, k_new, v_new, cache, table, starts, rope


def poison_from(cache: PagedKVCache, table: PageTable, full: tuple[int, ...]) -> None:
    """Makes the tokens between the table's lengths and `full` NaN again."""
    k, v = cache.logical()
    assert table.seq_lens is not None
    for seq, old in enumerate(table.seq_lens.tolist()):
        positions = torch.arange(old, full[seq])
        pages = table.page_ids[seq].cpu()[positions // table.page_size].long()
        slots = positions % table.page_size
        for stored, name in ((k, cache.format.k), (v, cache.format.v)):
            if stored.element_size() == 1:
                code = {"fp8_e4m3fnuz": 0x80, "fp4_e2m1": 0x77}.get(name, 0x7F)
                stored.view(torch.uint8)[pages.to(stored.device), slots.to(stored.device)] = code
            else:
                stored[pages.to(stored.device), slots.to(stored.device)] = float("nan")


_STORED = ("k", "v", "k_descale", "v_descale")


def poison_plan(plan: PrefillPlan) -> None:
    """Makes a plan's scratch and partial results NaN, so that reading what was not written shows."""
    if plan.workspace is not None:
        (memory,) = plan.workspace.carve([((plan.workspace.num_bytes,), torch.uint8)])
        memory.fill_(0xFF)


def copy_cache(cache: PagedKVCache) -> PagedKVCache:
    """A cache that stores the same in memory of its own."""

    def own(x: Any) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) else x

    return replace(cache, **{name: own(getattr(cache, name)) for name in _STORED})


def differing_bytes(a: PagedKVCache, b: PagedKVCache) -> dict[str, int]:
    """How many bytes two caches of the same shape differ in, by "k", "v", "k_descale" and "v_descale"."""
    found = {}
    for name in _STORED:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor):
            differ = x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)
            found[name] = int(differ.sum())
    return {name: count for name, count in found.items() if count}

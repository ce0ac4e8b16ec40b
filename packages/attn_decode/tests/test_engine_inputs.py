"""Inputs as engines have them: planned calls give the same bits for each form of the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope, append

SMALL = DecodeCase.small(lens=(20, 5), format="fp8_e4m3fn", num_kv_heads=1, gqa_ratio=2, head_dim=64)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with a stride in every dimension."""
    wide = torch.full([3 * size + 1 for size in x.shape], -7, dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(0, 3 * size, 3) for size in x.shape)]
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("strided", [False, True])
def test_page_tables_of_either_width_and_any_stride(dtype: torch.dtype, strided: bool, device: str) -> None:
    q, cache, table = SMALL.build(device)
    plan = plan_decode(q, cache, table, max_batch=4)
    expected, expected_lse = paged_decode(q, cache, table, plan=plan, return_lse=True)
    assert table.seq_lens is not None
    form = _apart if strided else torch.clone
    ids, lens = form(table.page_ids.to(dtype)), form(table.seq_lens.to(dtype))
    other = PageTable.from_block_table(ids, lens, page_size=table.page_size)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    paged_decode(q, cache, other, plan=plan, out=out, lse=lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_scales_without_dimension_are_scales_of_one_element(device: str) -> None:
    q, cache, table = SMALL.build(device)
    results = []
    for shape in ((), (1,)):
        scales: Any = {name: torch.full(shape, 0.5, device=device) for name in ("k_descale", "v_descale")}
        other = PagedKVCache.from_tensors(cache.k, cache.v, format=cache.format, **scales)
        results.append(paged_decode(q, other, table, plan=plan_decode(q, other, table)))
    assert torch.equal(*results)


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_and_positions_of_either_width_and_any_stride(
    dtype: torch.dtype, table_dtype: torch.dtype, device: str
) -> None:
    """With cos and sin as the halves of an engine's one table."""
    both = torch.rand(50, 64, generator=torch.Generator().manual_seed(1)).to(device, table_dtype)
    cos, sin = both.chunk(2, dim=1)
    k, v = (torch.rand(3, 1, 64, device=device).bfloat16() for _ in range(2))
    caches = [PagedKVCache.empty(4, 16, 1, 64, format="bf16", device=device) for _ in range(3)]
    slots, positions = torch.tensor([17, -1, 3]).to(device), torch.tensor([7, 8, 49]).to(device)
    append(caches[0], k, v, slots.int(), rope=Rope(cos, sin, positions.int()))
    append(caches[1], k, v, slots.to(dtype), rope=Rope(cos, sin, positions.to(dtype)))
    append(caches[2], k, v, _apart(slots.to(dtype)), rope=Rope(cos, sin, _apart(positions.to(dtype))))
    for other in caches[1:]:
        assert torch.equal(other.k, caches[0].k)
        assert torch.equal(other.v, caches[0].v)

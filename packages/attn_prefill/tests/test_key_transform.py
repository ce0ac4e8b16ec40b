"""Prefill over a cache whose key_transform moves, balances and rotates keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, batch_prefill_reference, plan_prefill, prefill_append
from narrowkv.paged_cache import PagedKVCache, PagePool, PageTable, append
from narrowkv.quant import KeyTransform, lse_correction
from narrowkv.quant.accuracy import relative_l1

HEADS, RATIO, PAGE, DIM = 2, 2, 16, 64
LENS, NEW = (37, 20, 9), (20, 20, 1)
F4, F8 = "fp4_e2m1", "fp8_e4m3fn"


def _call(fmt: str, device: str, *, offset: bool = True) -> tuple[torch.Tensor, PagedKVCache, Any, Any]:
    """Q, a cache of keys that have a bias, its page table and where queries begin."""
    torch.manual_seed(0)
    transform = KeyTransform(
        (2.0 + 0.3 * torch.randn(HEADS, DIM)).to(device) if offset else None,
        (0.5 * torch.randn(HEADS, DIM)).exp().to(device),
    )
    cache = PagedKVCache.empty(
        16, PAGE, HEADS, DIM, format=fmt, k_descale=0.02, v_descale=0.02, device=device,
        scale_format="e4m3" if fmt == F4 else "e8m0",
    )  # fmt: skip
    cache = replace(cache, key_transform=transform, k_tensor_scale=1.0, v_tensor_scale=1.0)
    pool = PagePool(16, PAGE, caches=[cache])
    seqs = [pool.allocate(length) for length in LENS]
    for seq, length in zip(seqs, LENS, strict=True):
        k, v = (torch.randn(length, HEADS, DIM, device=device).bfloat16() for _ in range(2))
        append(cache, k + 2.0, v, pool.slot_mapping(seq, 0, length))
    q = torch.randn(sum(NEW), HEADS * RATIO + 2, DIM, device=device).bfloat16()[:, 1:-1]
    starts = torch.tensor([0, *torch.tensor(NEW).cumsum(0)], dtype=torch.int32, device=device)
    return q, cache, pool.page_table(seqs), starts


@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize("fmt", [F8, F4])
def test_prefill_balances_and_rotates_queries(fmt: str, kernel: str, device: str) -> None:
    q, cache, table, starts = _call(fmt, device)
    plan = plan_prefill(q, cache, table, starts, kernel=kernel)
    o, lse = batch_prefill(q, cache, table, starts, plan=plan, out_dtype=torch.float32, return_lse=True)
    wanted, wanted_lse = batch_prefill_reference(q, cache, table, starts, return_lse=True)
    assert relative_l1(o, wanted) <= 0.002
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-3)
    assert cache.key_transform is not None
    assert cache.key_transform.offset is not None
    assert float(lse_correction(q, cache.key_transform.offset, DIM**-0.5).abs().max()) > 1.0
    assert torch.equal(batch_prefill(q, cache, table, starts, plan=plan, out_dtype=torch.float32), o)


def test_one_query_of_each_sequence_goes_to_decode(device: str) -> None:
    q, cache, table, _ = _call(F8, device)
    starts = torch.arange(4, dtype=torch.int32, device=device)
    o, lse = batch_prefill(q[:3], cache, table, starts, out_dtype=torch.float32, return_lse=True)
    wanted, wanted_lse = batch_prefill_reference(q[:3], cache, table, starts, return_lse=True)
    assert relative_l1(o, wanted) <= 0.004  # the reference rounds the rotated queries
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-2)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("kernel", ["fused", "split", "dense"])
def test_soft_caps_and_sinks_see_the_keys_before_they_lost_their_offset(
    kernel: str, soft_cap: float, device: str
) -> None:
    q, cache, table, starts = _call(F8, device)
    sinks = torch.linspace(-2.0, 6.0, HEADS * RATIO, device=device)
    options: dict[str, Any] = {"sinks": sinks, "logits_soft_cap": soft_cap, "return_lse": True}
    plan = plan_prefill(q, cache, table, starts, kernel=kernel, num_splits=2 if kernel == "dense" else None)
    o, lse = batch_prefill(q, cache, table, starts, plan=plan, out_dtype=torch.float32, **options)
    wanted, wanted_lse = batch_prefill_reference(q, cache, table, starts, **options)
    assert relative_l1(o, wanted) <= 0.002
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-3)
    assert cache.key_transform is not None
    without = replace(cache, key_transform=replace(cache.key_transform, offset=None))
    alone = batch_prefill(q, without, table, starts, sinks=sinks, logits_soft_cap=soft_cap)
    assert relative_l1(alone, wanted) > 0.02  # type: ignore[arg-type]


def test_prefill_refuses_queries_that_were_quantised_before_the_transform(device: str) -> None:
    q, cache, table, starts = _call(F8, device)
    with pytest.raises(ValueError, match="q must be bf16 or fp16"):
        batch_prefill(q.contiguous().to(torch.float8_e4m3fn), cache, table, starts)


def test_prefill_that_appends_refuses_a_transform(device: str) -> None:
    q, cache, _, starts = _call(F8, device)
    ids = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    table = PageTable.from_block_table(ids, cached_lens=ids[:, 0] * 0 + 5, page_size=PAGE)
    new = torch.zeros(q.shape[0], HEADS, DIM, device=device, dtype=q.dtype)
    with pytest.raises(ValueError, match="call append, then batch_prefill"):
        prefill_append(q, new, new, cache, table, starts)

"""Prefill over a cache whose key_transform moves, balances and rotates keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import (
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
    prefill_append_reference,
)
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.paged_cache import (
    CacheFormat,
    PagedKVCache,
    PagePool,
    PageTable,
    append,
    apply_rope_reference,
)
from narrowkv.paged_cache.cases import copy_cache, differing_bytes
from narrowkv.quant import KeyTransform, lse_correction
from narrowkv.quant.accuracy import relative_l1

HEADS, RATIO, PAGE, DIM = 2, 2, 16, 64
LENS, NEW = (37, 20, 9), (20, 20, 1)
F4, F8 = "fp4_e2m1", "fp8_e4m3fn"
A = PrefillCase.append


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


APPENDS: dict[str, tuple[PrefillCase, dict[str, Any]]] = {
    "fp8": (A(), {}),
    "fp8, a descale of each token, fp16 queries": (A(granularity="token_head", q_dtype=torch.float16), {}),
    "fp8, rope neox": (A(rope="neox"), {}),
    "fp8, rope gptj, a window": (A(rope="gptj"), {"window_left": 9}),
    "fp8, rope, a soft cap": (A(rope="neox"), {"logits_soft_cap": 3.0}),
    "fnuz": (A(format="fp8_e4m3fnuz"), {}),
    "fp4, e4m3": (A(format=F4, scale_format="e4m3"), {}),
    "fp4 of 32, rope": (A(format=F4, scale_group=32, rope="neox"), {}),
    "k8v4, e4m3, rope": (A(format=CacheFormat(F8, F4), scale_format="e4m3", rope="neox"), {}),
    "int8": (A(format="int8"), {}),
    "int4, rope": (A(format="int4", rope="gptj"), {}),
    "fp16": (A(format="fp16", q_dtype=torch.float16), {}),
    "head_dim 80": (A(head_dim=80), {}),
}  # fmt: skip


@pytest.mark.sampled(always=[{"name": "fnuz", "kernel": "fused"}])
@pytest.mark.parametrize("kernel", ["fused", "split", "append_then_attend"])
@pytest.mark.parametrize("name", APPENDS)
def test_an_append_transforms_what_it_stores_and_what_it_reads(name: str, kernel: str, device: str) -> None:
    """Bytes are those of `append`, results those of the reference, near those of append, then prefill."""
    case, options = APPENDS[name]
    q, k, v, cache, table, starts, rope = case.build_append(device)
    random = torch.Generator().manual_seed(1)
    size = (case.num_kv_heads, case.head_dim)
    offset = (2.0 + 0.3 * torch.randn(size, generator=random)).to(device)
    balance = (0.3 * torch.randn(size, generator=random)).exp().to(device)
    cache = replace(cache, key_transform=KeyTransform(offset, balance))
    k = k + 2.0
    sinks = torch.linspace(-2.0, 6.0, q.shape[1], device=device)
    options = {**options, "sinks": sinks, "return_lse": True}
    apart, wanted, before = (copy_cache(cache) for _ in range(3))
    expected, expected_lse = prefill_append_reference(q, k, v, wanted, table, starts, rope=rope, **options)
    plan = plan_append(q, cache, table, starts, kernel=kernel)
    o, lse = prefill_append(q, k, v, cache, table, starts, plan=plan, rope=rope, **options)
    assert not differing_bytes(cache, wanted)
    if kernel == "append_then_attend":
        assert relative_l1(o, expected) <= 0.002
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    # The other kernels do not round the chunk's own keys once they are transformed, as the reference does.
    full = (x.float() for x in (q, k, v))
    exact, exact_lse = prefill_append_reference(*full, before, table, starts, rope=rope, **options)
    assert relative_l1(o, exact) <= relative_l1(expected, exact) + 0.002
    assert float((lse - exact_lse).abs().max()) <= float((expected_lse - exact_lse).abs().max()) + 1e-3
    # The same in two calls, over keys that are quantised by then.
    turned = q if rope is None else apply_rope_reference(q, rope).to(q.dtype)
    new_lens = starts.diff()
    lens = table.seq_lens_tensor()
    after = PageTable.from_block_table(table.page_ids, lens + new_lens, page_size=table.page_size)
    positions = torch.cat([lens[i] + torch.arange(int(n), device=device) for i, n in enumerate(new_lens)])
    rows = torch.arange(len(new_lens), device=device).repeat_interleave(new_lens)
    pages = table.page_ids[rows, positions // table.page_size]
    append(apart, k, v, pages * table.page_size + positions % table.page_size, rope=rope)
    assert not differing_bytes(cache, apart)
    second, second_lse = batch_prefill_reference(turned, apart, after, starts, **options)
    # They differ by the format's error of the new tokens.
    assert relative_l1(o, second) <= relative_l1(exact, second) + relative_l1(expected, exact) + 0.002
    assert relative_l1(lse, second_lse) <= relative_l1(exact_lse, second_lse) + 0.002


def test_a_transform_in_the_memory_that_an_append_writes_is_refused(device: str) -> None:
    q, k, v, cache, table, starts, _ = A(format="fp16").build_append(device)
    heads, dim = cache.num_kv_heads, cache.head_dim
    inside = cache.k.flatten()[: 2 * heads * dim].view(torch.float32).view(heads, dim)
    cache = replace(cache, key_transform=KeyTransform(inside))
    with pytest.raises(ValueError, match=r"cache\.k must not.*key_transform\.offset"):
        prefill_append(q, k, v, cache, table, starts)

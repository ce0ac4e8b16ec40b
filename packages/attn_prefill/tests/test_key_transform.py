"""Prefill over a cache whose key_transform moves, balances and rotates keys."""

from __future__ import annotations

from dataclasses import replace

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
from narrowkv.paged_cache import (
    CacheFormat,
    PagedKVCache,
    PagePool,
    PageTable,
    append,
    apply_rope_reference,
)
from narrowkv.quant import KeyTransform, lse_correction
from narrowkv.quant.accuracy import relative_l1
from narrowkv.testing.cases.cache import copy_cache, differing_bytes
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.checking import assert_agrees

pytestmark = pytest.mark.sampled

HEADS, RATIO, PAGE, DIM = 2, 2, 16, 64
LENS, NEW = (37, 9), (20, 1)
F4, F8 = "fp4_e2m1", "fp8_e4m3fn"
A = PrefillCase.append


def _call(fmt, device):
    """Q, a cache of keys that have a bias, its page table and where queries begin."""
    torch.manual_seed(0)
    transform = KeyTransform(
        (2.0 + 0.3 * torch.randn(HEADS, DIM)).to(device), (0.5 * torch.randn(HEADS, DIM)).exp().to(device)
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


def _agrees(call, plan=None, bound=0.002, lse_bound=1e-3, **options):
    """Compares a call with the reference; returns both `o`."""
    o, lse = batch_prefill(*call, plan=plan, out_dtype=torch.float32, return_lse=True, **options)
    expected, expected_lse = batch_prefill_reference(*call, return_lse=True, **options)
    assert_agrees((o, lse), (expected, expected_lse), bound=bound, lse_bound=lse_bound)
    return o, expected


@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize("fmt", [F8, F4])
def test_prefill_balances_and_rotates_queries(fmt, kernel, device):
    call = q, cache, _, _ = _call(fmt, device)
    plan = plan_prefill(*call, kernel=kernel)
    o, _ = _agrees(call, plan)
    assert float(lse_correction(q, cache.key_transform.offset, DIM**-0.5).abs().max()) > 1.0
    assert torch.equal(batch_prefill(*call, plan=plan, out_dtype=torch.float32), o)


def test_one_query_of_each_sequence_goes_to_decode(device):
    q, cache, table, _ = _call(F8, device)
    starts = torch.arange(len(LENS) + 1, dtype=torch.int32, device=device)
    # The reference rounds the rotated queries.
    _agrees((q[: len(LENS)], cache, table, starts), bound=0.004, lse_bound=1e-2)


@pytest.mark.sampled("kernel")
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("kernel", ["fused", "split", "dense"])
def test_soft_caps_and_sinks_see_the_keys_before_they_lost_their_offset(kernel, soft_cap, device):
    call = q, cache, table, starts = _call(F8, device)
    sinks = torch.linspace(-2.0, 6.0, HEADS * RATIO, device=device)
    options = {"sinks": sinks, "logits_soft_cap": soft_cap}
    plan = plan_prefill(*call, kernel=kernel, num_splits=2 if kernel == "dense" else None)
    _, expected = _agrees(call, plan, **options)
    without = replace(cache, key_transform=replace(cache.key_transform, offset=None))
    assert relative_l1(batch_prefill(q, without, table, starts, **options), expected) > 0.02


def test_prefill_refuses_queries_that_were_quantised_before_the_transform(device):
    q, *rest = _call(F8, device)
    with pytest.raises(ValueError, match="q must be bf16 or fp16"):
        batch_prefill(q.contiguous().to(torch.float8_e4m3fn), *rest)


APPENDS = {
    "fp8": (A(), {}),
    "fp8, a descale of each token, fp16 queries": (A(granularity="token_head", q_dtype=torch.float16), {}),
    "fp8, rope gptj, a window": (A(rope="gptj"), {"window_left": 9}),
    "fp8, rope neox, a soft cap": (A(rope="neox"), {"logits_soft_cap": 3.0}),
    "fnuz": (A(format="fp8_e4m3fnuz"), {}),
    "fp4, e4m3": (A(format=F4, scale_format="e4m3"), {}),
    "fp4 of 32, rope": (A(format=F4, scale_group=32, rope="neox"), {}),
    "k8v4, e4m3, rope": (A(format=CacheFormat(F8, F4), scale_format="e4m3", rope="neox"), {}),
    "int8, head_dim 80": (A(format="int8", head_dim=80), {}),
    "int4, rope": (A(format="int4", rope="gptj"), {}),
    "fp16": (A(format="fp16", q_dtype=torch.float16), {}),
}  # fmt: skip


def _append_then_attend(q, k, v, cache, table, starts, rope, **options):
    """The same in two calls, over keys that are quantised by then."""
    new, lens = starts.diff(), table.seq_lens_tensor()
    positions = torch.cat([lens[i] + torch.arange(int(n), device=q.device) for i, n in enumerate(new)])
    rows = torch.arange(len(new), device=q.device).repeat_interleave(new)
    pages = table.page_ids[rows, positions // table.page_size]
    append(cache, k, v, pages * table.page_size + positions % table.page_size, rope=rope)
    turned = q if rope is None else apply_rope_reference(q, rope).to(q.dtype)
    after = PageTable.from_block_table(table.page_ids, lens + new, page_size=table.page_size)
    return batch_prefill_reference(turned, cache, after, starts, **options)


@pytest.mark.sampled(always=[{"name": "fnuz", "kernel": "fused"}])
@pytest.mark.parametrize("kernel", ["fused", "split", "append_then_attend"])
@pytest.mark.parametrize("name", APPENDS)
def test_an_append_transforms_what_it_stores_and_what_it_reads(name, kernel, device):
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
    options = {**options, "rope": rope, "sinks": sinks, "return_lse": True}
    apart, wanted, before = (copy_cache(cache) for _ in range(3))
    expected, expected_lse = prefill_append_reference(q, k, v, wanted, table, starts, **options)
    plan = plan_append(q, cache, table, starts, kernel=kernel)
    o, lse = prefill_append(q, k, v, cache, table, starts, plan=plan, **options)
    assert not differing_bytes(cache, wanted)
    if kernel == "append_then_attend":
        assert_agrees((o, lse), (expected, expected_lse))
    # The other kernels do not round the chunk's own keys once they are transformed, as the reference does.
    full = (x.float() for x in (q, k, v))
    exact, exact_lse = prefill_append_reference(*full, before, table, starts, **options)
    assert relative_l1(o, exact) <= relative_l1(expected, exact) + 0.002
    assert float((lse - exact_lse).abs().max()) <= float((expected_lse - exact_lse).abs().max()) + 1e-3
    second, second_lse = _append_then_attend(q, k, v, apart, table, starts, **options)
    assert not differing_bytes(cache, apart)
    # They differ by the format's error of the new tokens.
    assert relative_l1(o, second) <= relative_l1(exact, second) + relative_l1(expected, exact) + 0.002
    assert relative_l1(lse, second_lse) <= relative_l1(exact_lse, second_lse) + 0.002


def test_a_transform_in_the_memory_that_an_append_writes_is_refused(device):
    q, k, v, cache, table, starts, _ = A(format="fp16").build_append(device)
    heads, dim = cache.num_kv_heads, cache.head_dim
    inside = cache.k.flatten()[: 2 * heads * dim].view(torch.float32).view(heads, dim)
    cache = replace(cache, key_transform=KeyTransform(inside))
    with pytest.raises(ValueError, match=r"cache\.k must not.*key_transform\.offset"):
        prefill_append(q, k, v, cache, table, starts)

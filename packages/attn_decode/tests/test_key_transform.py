"""A cache whose key_transform moves, balances and rotates keys: append, decode and the references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import merge_states, paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.torch_ops import traced_decode
from narrowkv.paged_cache import PagedKVCache, PagePool, append, append_reference
from narrowkv.paged_cache.key_transform import transform_queries
from narrowkv.paged_cache.torch_ops import traced_append
from narrowkv.quant import KeyTransform, hadamard, lse_correction
from narrowkv.quant.accuracy import relative_l1
from narrowkv.testing.cases.cache import differing_bytes
from narrowkv.testing.checking import assert_agrees

pytestmark = pytest.mark.sampled

HEADS, RATIO, PAGE = 2, 3, 16
F4, F8 = "fp4_e2m1", "fp8_e4m3fn"
FP32 = torch.float32
ALL = ("offset", "balance", "rotation")


def _transform(head_dim, device, *parts):
    """Near the mean of `_call`'s keys; parts: which of offset, balance and rotation."""
    torch.manual_seed(head_dim)
    offset = 2.0 + 0.3 * torch.randn(HEADS, head_dim)
    balance = (0.5 * torch.randn(HEADS, head_dim)).exp()
    return KeyTransform(
        offset.to(device) if "offset" in parts else None,
        balance.to(device) if "balance" in parts else None,
        "rotation" in parts,
    )


def _empty(fmt, head_dim, device, pages=16, **options):
    """A cache without tokens; FP8 has a descale of each key."""
    if fmt == F8 and "k_descale" not in options:
        options |= {"k_descale": torch.ones(pages, PAGE, HEADS, device=device), "v_descale": 0.02}
    return PagedKVCache.empty(pages, PAGE, HEADS, head_dim, format=fmt, device=device, **options)


def _call(
    head_dim, fmt, transform, device, lens=(37, 0), q_len=1, **options
) -> tuple[torch.Tensor, Any, Any]:
    """Q, a cache of keys that have a bias, and its page table."""
    torch.manual_seed(0)
    cache = replace(_empty(fmt, head_dim, device, **options), key_transform=transform)
    pool = PagePool(16, PAGE, caches=[cache])
    seqs = []
    for length in lens:
        seqs.append(pool.allocate(length))
        k, v = (torch.randn(length, HEADS, head_dim, device=device).bfloat16() for _ in range(2))
        append(cache, k + 2.0, v, pool.slot_mapping(seqs[-1], 0, length).to(device))
    q = torch.randn(len(lens) * q_len, HEADS * RATIO, head_dim, device=device).bfloat16()
    return q, cache, pool.page_table(seqs)


def _agrees(q, cache, table, *, bound=0.002, lse_bound=1e-3, plan=None, **options):
    """Compares a call with the reference, whose `(o, lse)` it returns."""
    expected = paged_decode_reference(q, cache, table, return_lse=True, **options)
    got = paged_decode(q, cache, table, out_dtype=FP32, return_lse=True, plan=plan, **options)
    assert_agrees(got, expected, bound=bound, lse_bound=lse_bound)
    return expected


@pytest.mark.parametrize("parts", [("rotation",), ("balance",), ALL], ids="+".join)
@pytest.mark.parametrize(
    ("head_dim", "fmt", "scales"),
    [(64, F8, {}), (96, F8, {}), (128, F4, {"scale_format": "e4m3"}), (80, "bf16", {})],
    ids=["fp8", "fp8 96", "fp4", "bf16 80"],
)
def test_append_stores_the_bytes_of_the_reference(head_dim, fmt, scales, parts, device):
    transform = _transform(head_dim, device, *parts)
    caches = []
    for store in (append, append_reference):
        caches.append(replace(_empty(fmt, head_dim, device, pages=4, **scales), key_transform=transform))
        torch.manual_seed(1)
        k, v = (torch.randn(9, HEADS, head_dim, device=device) for _ in range(2))
        store(caches[-1], k, v, torch.arange(3, 12, device=device))
    assert not differing_bytes(*caches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "fmt", "options"),
    [(64, F8, {}), (96, F4, {"scale_group": 32}), (128, F4, {"scale_format": "e4m3"}), (128, "bf16", {})],
    ids=["fp8", "fp4 groups 96", "fp4", "bf16"],
)
def test_decode_balances_and_rotates_queries(head_dim, fmt, options, dtype, device):
    q, cache, table = _call(head_dim, fmt, _transform(head_dim, device, *ALL), device, **options)
    # Once rotated, Q takes more than the eight bits that a bfloat16 cache is multiplied with.
    rounds = 8 if (fmt, dtype) == ("bf16", torch.bfloat16) else 1
    _agrees(q.to(dtype), cache, table, bound=rounds * 0.001, lse_bound=rounds * 1e-3)


def test_results_are_those_of_the_keys_before_they_were_transformed(device):
    """The lse, too, in which stored keys alone would lack the queries' products with the offset."""
    transform = _transform(64, device, *ALL)
    q, cache, table = _call(64, "fp16", transform, device, lens=(37,))
    _, plain, _ = _call(64, "fp16", None, device, lens=(37,))
    got, expected = (paged_decode(q, each, table, out_dtype=FP32, return_lse=True) for each in (cache, plain))
    assert float(lse_correction(q, transform.offset, 64**-0.5).abs().max()) > 1.0
    assert_agrees(got, expected, bound=0.01, lse_bound=0.05)


def test_an_offset_saves_fp8_keys_with_a_bias_under_one_scale(device):
    """The bias would take the codes, and the rest of each key what is left of them."""
    q, plain, table = _call(64, "fp16", None, device, lens=(60,))
    k, v = (x[:60] for x in plain.gather(table, 0))
    offset = torch.full((HEADS, 64), 60.0, device=device)
    expected = paged_decode(q, plain, table, out_dtype=FP32)
    slots = (table.page_ids[:4, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:60]
    errors = []
    for transform in (None, KeyTransform(offset, rotated=False)):
        cache = replace(_empty(F8, 64, device, k_descale=0.15, v_descale=0.02), key_transform=transform)
        append(cache, k + 58.0, v, slots)  # the keys have a mean of 2
        errors.append(relative_l1(paged_decode(q, cache, table, out_dtype=FP32), expected))
    assert errors[1] < 0.1 * errors[0]


@pytest.mark.parametrize("split", ["none", "per_sequence", "even"])
def test_splits_and_sinks_see_the_shift_once(split, device):
    q, cache, table = _call(64, F8, _transform(64, device, *ALL), device, lens=(50, 3), q_len=2)
    sinks = torch.linspace(-2.0, 6.0, HEADS * RATIO, device=device)
    _agrees(q, cache, table, plan=plan_decode(q, cache, table, split=split), sinks=sinks, lse_bound=2e-3)


def _keys_before(cache, table):
    """Keys of the first sequence as they were before `append` took them."""
    transform = cache.key_transform
    return hadamard(cache.gather(table, 0)[0]) * transform.balance + transform.offset


def test_states_of_caches_with_other_offsets_merge(device):
    calls = [_call(64, F8, made, device, lens=(20,)) for made in (_transform(64, device, *ALL), None)]
    states = [paged_decode(*call, out_dtype=FP32, return_lse=True) for call in calls]
    o, _ = merge_states(*(torch.stack(results) for results in zip(*states, strict=True)))
    (q, cache, table), (_, plain, plain_table) = calls
    keys = torch.cat([_keys_before(cache, table), plain.gather(plain_table, 0)[0]])
    values = torch.cat([cache.gather(table, 0)[1], plain.gather(plain_table, 0)[1]])
    s = torch.einsum("qhrd,khd->qhrk", q.float().view(1, HEADS, RATIO, 64), keys) * 64**-0.5
    assert_agrees(o, torch.einsum("qhrk,khd->qhrd", s.softmax(-1), values).flatten(1, 2))


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("fmt", [F8, F4])
def test_a_soft_cap_sees_the_logits_of_the_keys_before_they_lost_their_offset(fmt, q_len, device):
    scales = {"scale_format": "e4m3"} if fmt == F4 else {}
    q, cache, table = _call(64, fmt, _transform(64, device, *ALL), device, (37, 5), q_len, **scales)
    transform = cache.key_transform
    sinks = torch.linspace(-2.0, 2.0, HEADS * RATIO, device=device)
    expected, expected_lse = _agrees(q, cache, table, sinks=sinks, logits_soft_cap=3.0)
    # The reference itself is right: keys as they were before append took them.
    rows = q[:q_len].float().view(q_len, HEADS, RATIO, 64)
    s = torch.einsum("qhrd,khd->qhrk", rows, _keys_before(cache, table)) * 64**-0.5
    s = 3.0 * torch.tanh(s / 3.0)
    s = torch.stack([s[i, ..., : 37 - q_len + 1 + i].logsumexp(-1) for i in range(q_len)])
    torch.testing.assert_close(expected_lse[:q_len], s.flatten(1), rtol=0, atol=1e-3)
    # A cap of the stored keys' logits would be another function.
    assert float((lse_correction(q, transform.offset, 64**-0.5)).abs().max()) > 3.0
    without = replace(cache, key_transform=replace(transform, offset=None))
    assert relative_l1(paged_decode(q, without, table, logits_soft_cap=3.0), expected) > 0.05


def test_transforms_that_a_cache_cannot_have_are_refused(device):
    cache = replace(_empty(F8, 64, device), key_transform=_transform(64, device, *ALL))
    k = torch.zeros(1, HEADS, 64, device=device)
    with pytest.raises(ValueError, match="k_offset must be None"):
        append(cache, k, k, torch.zeros(1, dtype=torch.int32, device=device), k_offset=k[0].contiguous())
    with pytest.raises(ValueError, match=r"key_transform\.balance must have shape"):
        replace(cache, key_transform=KeyTransform(balance=torch.ones(HEADS, 32)))
    with pytest.raises(TypeError, match="key_transform"):
        replace(cache, key_transform=torch.ones(HEADS, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_in_a_launch_of_their_own(dtype, device):
    transform = _transform(96, device, *ALL)
    q = torch.randn(11, HEADS * RATIO + 4, 96, device=device).to(dtype)[:, 2:-2]
    got, shift = transform_queries(q, transform, HEADS, 0.5)
    # Sums in another order may round to the next number.
    torch.testing.assert_close(got, transform.queries(q).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
    torch.testing.assert_close(shift, lse_correction(q, transform.offset, 0.5), rtol=1e-5, atol=1e-4)


def test_operators_carry_the_transform(device):
    q, cache, table = _call(64, F8, _transform(64, device, *ALL), device, lens=(37,))
    expected = paged_decode(q, cache, table, return_lse=True)
    for got, wanted in zip(traced_decode(q, cache, table, return_lse=True), expected, strict=True):
        assert torch.equal(got, wanted)
    k, v = (torch.randn(3, HEADS, 64, device=device).bfloat16() for _ in range(2))
    slots = torch.tensor([0, 1, 5], dtype=torch.int32, device=device)
    caches = [replace(_empty(F8, 64, device), key_transform=cache.key_transform) for _ in range(2)]
    for store, mine in zip((append, traced_append), caches, strict=True):
        store(mine, k, v, slots)
    assert not differing_bytes(*caches)

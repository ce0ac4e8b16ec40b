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

HEADS, RATIO, PAGE = 2, 3, 16
F4, F8 = "fp4_e2m1", "fp8_e4m3fn"
BOUND = 0.002


def _transform(head_dim: int, device: str, *parts: str) -> KeyTransform:
    """Near the mean of `_call`'s keys; parts: which of offset, balance and rotation."""
    torch.manual_seed(head_dim)
    offset = 2.0 + 0.3 * torch.randn(HEADS, head_dim)
    balance = (0.5 * torch.randn(HEADS, head_dim)).exp()
    return KeyTransform(
        offset.to(device) if "offset" in parts else None,
        balance.to(device) if "balance" in parts else None,
        "rotation" in parts,
    )


ALL = ("offset", "balance", "rotation")


def _call(
    head_dim: int, fmt: str, transform: KeyTransform | None, device: str, lens: tuple[int, ...] = (37, 5, 0),
    q_len: int = 1, **options: Any,
) -> tuple[torch.Tensor, PagedKVCache, Any]:  # fmt: skip
    """Q, a cache of keys that have a bias, and its page table."""
    torch.manual_seed(0)
    descale: Any = {}
    if fmt == F8 and "k_descale" not in options:
        descale = {"k_descale": torch.ones(16, PAGE, HEADS, device=device), "v_descale": 0.02}
    cache = PagedKVCache.empty(
        16, PAGE, HEADS, head_dim, format=fmt, device=device, **descale, **options
    )  # fmt: skip
    cache = replace(cache, key_transform=transform)
    pool = PagePool(16, PAGE, caches=[cache])
    seqs = []
    for length in lens:
        seqs.append(pool.allocate(length))
        k, v = (torch.randn(length, HEADS, head_dim, device=device).bfloat16() for _ in range(2))
        append(cache, k + 2.0, v, pool.slot_mapping(seqs[-1], 0, length).to(device))
    q = torch.randn(len(lens) * q_len, HEADS * RATIO, head_dim, device=device).bfloat16()
    return q, cache, pool.page_table(seqs)


@pytest.mark.parametrize("parts", [("rotation",), ("balance",), ALL], ids="+".join)
@pytest.mark.parametrize(
    ("head_dim", "fmt", "scales"),
    [(64, F8, {}), (96, F8, {}), (128, F4, {"scale_format": "e4m3"}), (80, "bf16", {})],
    ids=["fp8", "fp8 96", "fp4", "bf16 80"],
)  # fmt: skip
def test_append_stores_the_bytes_of_the_reference(
    head_dim: int, fmt: str, scales: dict[str, str], parts: tuple[str, ...], device: str
) -> None:
    transform = _transform(head_dim, device, *parts)
    caches = []
    for store in (append, append_reference):
        descale = {"k_descale": torch.ones(4, PAGE, HEADS, device=device)} if fmt == F8 else {}
        cache = PagedKVCache.empty(4, PAGE, HEADS, head_dim, format=fmt, device=device, **descale, **scales)
        caches.append(replace(cache, key_transform=transform))
        torch.manual_seed(1)
        k, v = (torch.randn(9, HEADS, head_dim, device=device) for _ in range(2))
        store(caches[-1], k, v, torch.arange(3, 12, device=device))
    for stored, wanted in zip(caches[0].logical(), caches[1].logical(), strict=True):
        assert torch.equal(stored.view(torch.uint8), wanted.view(torch.uint8))
    if isinstance(caches[0].k_descale, torch.Tensor) and isinstance(caches[1].k_descale, torch.Tensor):
        assert torch.equal(caches[0].k_descale.view(torch.uint8), caches[1].k_descale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "fmt", "options"),
    [(64, F8, {}), (96, F4, {"scale_group": 32}), (128, F4, {"scale_format": "e4m3"}), (128, "bf16", {})],
    ids=["fp8", "fp4 groups 96", "fp4", "bf16"],
)  # fmt: skip
def test_decode_balances_and_rotates_queries(
    head_dim: int, fmt: str, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    q, cache, table = _call(head_dim, fmt, _transform(head_dim, device, *ALL), device, **options)
    q = q.to(dtype)
    o, lse = paged_decode(q, cache, table, out_dtype=torch.float32, return_lse=True)
    wanted, wanted_lse = paged_decode_reference(q, cache, table, return_lse=True)
    # Once rotated, Q takes more than the eight bits that a bfloat16 cache is multiplied with.
    rounds = 8 if (fmt, dtype) == ("bf16", torch.bfloat16) else 1
    assert relative_l1(o, wanted) <= rounds * BOUND / 2
    kept = wanted_lse.isfinite()
    assert torch.equal(kept, lse.isfinite())
    torch.testing.assert_close(lse[kept], wanted_lse[kept], rtol=0, atol=rounds * 1e-3)


def test_results_are_those_of_the_keys_before_they_were_transformed(device: str) -> None:
    """The lse, too, in which stored keys alone would lack the queries' products with the offset."""
    transform = _transform(64, device, *ALL)
    q, cache, table = _call(64, "fp16", transform, device, lens=(37,))
    _, plain, _ = _call(64, "fp16", None, device, lens=(37,))
    (o, lse), (wanted, wanted_lse) = (
        paged_decode(q, each, table, out_dtype=torch.float32, return_lse=True) for each in (cache, plain)
    )
    assert relative_l1(o, wanted) <= 0.01
    assert transform.offset is not None
    shift = lse_correction(q, transform.offset, 64**-0.5)
    assert float(shift.abs().max()) > 1.0
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=0.05)


def test_an_offset_saves_fp8_keys_with_a_bias_under_one_scale(device: str) -> None:
    """The bias would take the codes, and the rest of each key what is left of them."""
    q, plain, table = _call(64, "fp16", None, device, lens=(60,))
    k, v = (x[:60] for x in plain.gather(table, 0))
    offset = torch.full((HEADS, 64), 60.0, device=device)
    wanted = paged_decode(q, plain, table, out_dtype=torch.float32)
    errors = []
    for transform in (None, KeyTransform(offset, rotated=False)):
        cache = PagedKVCache.empty(
            16, PAGE, HEADS, 64, format=F8, k_descale=0.15, v_descale=0.02, device=device
        )
        cache = replace(cache, key_transform=transform)
        slots = (table.page_ids[:4, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:60]
        append(cache, k + 58.0, v, slots)  # the keys have a mean of 2
        errors.append(relative_l1(paged_decode(q, cache, table, out_dtype=torch.float32), wanted))
    assert errors[1] < 0.1 * errors[0]


@pytest.mark.parametrize("split", ["none", "uniform", "even"])
def test_splits_and_sinks_see_the_shift_once(split: str, device: str) -> None:
    q, cache, table = _call(64, F8, _transform(64, device, *ALL), device, lens=(100, 3), q_len=2)
    sinks = torch.linspace(-2.0, 6.0, HEADS * RATIO, device=device)
    plan = plan_decode(q, cache, table, split=split)
    o, lse = paged_decode(q, cache, table, sinks=sinks, out_dtype=torch.float32, return_lse=True, plan=plan)
    wanted, wanted_lse = paged_decode_reference(q, cache, table, sinks=sinks, return_lse=True)
    assert relative_l1(o, wanted) <= BOUND
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-3)


def test_states_of_caches_with_other_offsets_merge(device: str) -> None:
    transforms = [_transform(64, device, *ALL), None]
    calls = [_call(64, F8, transform, device, lens=(20,)) for transform in transforms]
    states = [paged_decode(q, c, t, out_dtype=torch.float32, return_lse=True) for q, c, t in calls]
    o, _ = merge_states(torch.stack([o for o, _ in states]), torch.stack([lse for _, lse in states]))
    k, v = zip(*(c.gather(t, 0) for _, c, t in calls), strict=True)
    transform, q = transforms[0], calls[0][0].float()
    assert transform is not None
    assert transform.offset is not None
    assert transform.balance is not None
    keys = torch.cat([hadamard(k[0]) * transform.balance + transform.offset, k[1]])
    s = torch.einsum("qhrd,khd->qhrk", q.view(1, HEADS, RATIO, 64), keys) * 64**-0.5
    wanted = torch.einsum("qhrk,khd->qhrd", s.softmax(-1), torch.cat(v)).flatten(1, 2)
    assert relative_l1(o, wanted) <= BOUND


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("fmt", [F8, F4])
def test_a_soft_cap_sees_the_logits_of_the_keys_before_they_lost_their_offset(
    fmt: str, q_len: int, device: str
) -> None:
    transform = _transform(64, device, *ALL)
    scales: dict[str, Any] = {"scale_format": "e4m3"} if fmt == F4 else {}
    q, cache, table = _call(64, fmt, transform, device, lens=(37, 5), q_len=q_len, **scales)
    sinks = torch.linspace(-2.0, 2.0, HEADS * RATIO, device=device)
    options: dict[str, Any] = {"logits_soft_cap": 3.0, "return_lse": True}
    o, lse = paged_decode(q, cache, table, sinks=sinks, out_dtype=torch.float32, **options)
    wanted, wanted_lse = paged_decode_reference(q, cache, table, sinks=sinks, **options)
    assert relative_l1(o, wanted) <= BOUND
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-3)
    # The reference itself is right: keys as they were before append took them.
    assert transform.balance is not None
    assert transform.offset is not None
    keys = hadamard(cache.gather(table, 0)[0]) * transform.balance + transform.offset
    rows = q[:q_len].float().view(q_len, HEADS, RATIO, 64)
    s = 3.0 * torch.tanh(torch.einsum("qhrd,khd->qhrk", rows, keys) * 64**-0.5 / 3.0)
    s = torch.stack([s[i, ..., : 37 - q_len + 1 + i].logsumexp(-1) for i in range(q_len)])
    torch.testing.assert_close(wanted_lse[:q_len], s.flatten(1), rtol=0, atol=1e-3)
    # A cap of the stored keys' logits would be another function.
    assert float((lse_correction(q, transform.offset, 64**-0.5)).abs().max()) > 3.0
    without = replace(cache, key_transform=replace(transform, offset=None))
    assert relative_l1(paged_decode(q, without, table, logits_soft_cap=3.0), wanted) > 0.05


def test_an_offset_refuses_a_second_one(device: str) -> None:
    _, cache, _ = _call(64, F8, _transform(64, device, *ALL), device)
    k = torch.zeros(1, HEADS, 64, device=device)
    with pytest.raises(ValueError, match="k_offset must be None"):
        append(cache, k, k, torch.zeros(1, dtype=torch.int32, device=device), k_offset=k[0].contiguous())


def test_a_transform_of_another_model_is_refused() -> None:
    cache = PagedKVCache.empty(4, PAGE, HEADS, 64, format=F8)
    with pytest.raises(ValueError, match=r"key_transform\.balance must have shape"):
        replace(cache, key_transform=KeyTransform(balance=torch.ones(HEADS, 32)))
    with pytest.raises(TypeError, match="key_transform"):
        replace(cache, key_transform=torch.ones(HEADS, 64))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_in_a_launch_of_their_own(dtype: torch.dtype, device: str) -> None:
    transform = _transform(96, device, *ALL)
    q = torch.randn(11, HEADS * RATIO + 4, 96, device=device).to(dtype)[:, 2:-2]
    got, shift = transform_queries(q, transform, HEADS, 0.5)
    assert transform.offset is not None
    # Sums in another order may round to the next number.
    torch.testing.assert_close(got, transform.queries(q).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert shift is not None
    torch.testing.assert_close(shift, lse_correction(q, transform.offset, 0.5), rtol=1e-5, atol=1e-4)


def test_operators_carry_the_transform(device: str) -> None:
    q, cache, table = _call(64, F8, _transform(64, device, *ALL), device, lens=(37,))
    o, lse = paged_decode(q, cache, table, return_lse=True)
    again = replace(cache, k=torch.zeros_like(cache.k.view(torch.uint8)).view(cache.k.dtype))
    k, v = (torch.randn(3, HEADS, 64, device=device).bfloat16() for _ in range(2))
    slots = torch.tensor([0, 1, 5], dtype=torch.int32, device=device)
    stored = []
    for store in (append, traced_append):
        mine = replace(
            again, k=again.k.clone(), v=again.v.clone(), k_descale=torch.ones_like(cache.k_descale)
        )
        store(mine, k, v, slots)
        stored.append(mine.dequantize()[0])
    assert torch.equal(*stored)
    traced, traced_lse = traced_decode(q, cache, table, return_lse=True)
    assert torch.equal(traced, o)
    assert torch.equal(traced_lse, lse)

"""FP4 caches with scales of E8M0 and E4M3: storage, capacity, append, convert, gather and page copies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.paged_cache import (
    CacheFormat,
    PagedKVCache,
    PagePool,
    PageTable,
    PoolExhausted,
    Rope,
    append,
    append_reference,
)
from narrowkv.runtime.errors import UnsupportedError

pytestmark = pytest.mark.sampled

I32 = torch.int32
F4 = "fp4_e2m1"
K8V4 = CacheFormat(k="fp8_e4m3fn", v=F4)
HEADS, PAGES = 2, 5
# The sixteen codes by hand: sign, two exponent bits, one mantissa bit.
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LAYOUTS = [("NHD", 3), ("HND", 16), ("tokens", 1), ("concat", 7)]


def _cache(
    fmt: str | CacheFormat, layout: str, size: int, dim: int, group: int | None, device: str,
    scale_format: str = "e8m0", number: float = 1.0,
) -> PagedKVCache:  # fmt: skip
    numbers = {"k_descale": number, "v_descale": number} if scale_format == "e4m3" else {}
    cache = PagedKVCache.empty(
        PAGES, size, HEADS, dim, format=fmt, layout=layout, scale_group=group, scale_format=scale_format,
        device=device, **numbers,
    )  # fmt: skip
    torch.manual_seed(1)
    for t in (cache.k, cache.v, cache.k_descale, cache.v_descale):  # poison: what is not appended must stay
        if isinstance(t, torch.Tensor):
            t.view(torch.uint8).copy_(torch.randint(0, 127, t.shape, device=device))
    return cache


def _bytes(cache: PagedKVCache) -> dict[str, torch.Tensor]:
    fields = {name: getattr(cache, name) for name in ("k", "v", "k_descale", "v_descale")}
    return {
        name: t.contiguous().view(torch.uint8).clone()
        for name, t in fields.items()
        if isinstance(t, torch.Tensor)
    }


def _tokens(dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Six tokens: ordinary, zeros, subnormal and near fp32's end, NaN and Inf, ties, far apart in size."""
    torch.manual_seed(2)
    k, v = (torch.randn(6, HEADS, dim, device=device) for _ in range(2))
    k[1] = 0
    k[2, 0], k[2, 1] = 1e-40, 1e30
    k[3, 0, 3], k[3, 1, 5] = math.nan, math.inf
    k[4, :, 0], k[4, :, 1:] = 7.5, 0.5
    k[5] *= torch.logspace(-3, 3, dim, device=device)
    return k, v


STORES = [
    (fmt, layout, size, group, scale_format, number, rule)
    for fmt in (F4, K8V4)
    for layout, size in LAYOUTS
    for group in (None, 16, 32)
    for scale_format, number in (("e8m0", 1.0), ("e4m3", 1.0), ("e4m3", 0.3), ("e4m3", 0.01))
    for rule in (("mse", "floor", "ceil") if (layout, scale_format) == ("NHD", "e8m0") else ("mse",))
    if (fmt, layout) != (K8V4, "concat")  # a row of both has one format
]


@pytest.mark.sampled("scale_format")
@pytest.mark.parametrize(
    ("fmt", "layout", "page_size", "group", "scale_format", "number", "exponent"), STORES
)
def test_bytes_and_scales_equal_the_host_quantiser(
    fmt: str | CacheFormat, layout: str, page_size: int, group: int | None, scale_format: str, number: float,
    exponent: str, device: str,
) -> None:  # fmt: skip
    k, v = _tokens(96 if layout == "NHD" else 64, device)
    slots = torch.tensor([4, 0, 1, -1, 3, 2], dtype=I32, device=device)
    made = (fmt, layout, page_size, k.shape[-1], group, device, scale_format, number)
    got, want = _cache(*made), _cache(*made)
    before = _bytes(got)
    append(got, k, v, slots, exponent=exponent)
    append_reference(want, k, v, slots, exponent=exponent)
    for name, stored in _bytes(want).items():
        assert torch.equal(_bytes(got)[name], stored), name
        assert not torch.equal(before[name], stored), name
    free = [slot for slot in range(PAGES * page_size) if slot > 4]
    if layout == "NHD":
        for name in ("k", "v", "k_descale", "v_descale"):
            if name not in before:
                continue
            flat = [b[name].view(PAGES * page_size, -1)[free] for b in (before, _bytes(got))]
            assert torch.equal(*flat), f"{name}: a slot that was not named was written"


@pytest.mark.parametrize(("scale_format", "group"), [("e8m0", 32), ("e4m3", None)])
def test_rope_and_an_offset_come_before_fp4(scale_format: str, group: int | None, device: str) -> None:
    k, v = _tokens(64, device)
    k[3] = 1.0
    angle = torch.rand(9, 32, device=device) * 6
    rope = Rope(angle.cos(), angle.sin(), torch.tensor([0, 8, 3, 1, 2, 5], dtype=I32, device=device))
    offset = torch.randn(HEADS, 64, device=device)
    slots = torch.arange(6, dtype=I32, device=device)
    got, want = (_cache(F4, "HND", 16, 64, group, device, scale_format) for _ in range(2))
    append(got, k, v, slots, rope=rope, k_offset=offset)
    append_reference(want, k, v, slots, rope=rope, k_offset=offset)
    for name, stored in _bytes(want).items():
        assert torch.equal(_bytes(got)[name], stored), name


def test_the_even_element_lies_in_the_low_nibble_and_every_code_is_its_value() -> None:
    cache = PagedKVCache.empty(1, 1, 1, 64, format=F4)
    codes = torch.arange(64, dtype=torch.uint8) % 16
    cache.k[0, 0, 0] = codes[0::2] | codes[1::2] << 4
    k, v = cache.dequantize()
    assert k[0, 0, 0].tolist() == [CODES[i % 16] for i in range(64)]
    assert torch.equal(torch.signbit(k[0, 0, 0, :16]), torch.tensor([i > 7 for i in range(16)]))
    assert not bool(v.any())


def test_scales_at_their_edges() -> None:
    cache = PagedKVCache.empty(1, 4, 1, 64, format=F4)
    assert isinstance(cache.k_descale, torch.Tensor)
    cache.k.fill_(0x22)
    cache.k_descale[0, :, 0] = torch.tensor([0x00, 0x7F, 0xFE, 0xFF], dtype=torch.uint8)
    k, _ = cache.dequantize()
    assert k[0, :3, 0, 0].tolist() == [2.0**-127, 1.0, 2.0**127]
    assert bool(k[0, 3].isnan().all())


def test_zeros_tiny_and_huge_rows_are_kept_or_saturated(device: str) -> None:
    cache = PagedKVCache.empty(1, 4, 1, 64, format=F4, device=device)
    k = torch.zeros(4, 1, 64, device=device)
    k[1], k[2], k[3] = 2.0**-125, 1.0e38, math.inf
    append(cache, k, k, torch.arange(4, dtype=I32, device=device))
    back, _ = cache.dequantize()
    assert back[0, 0].abs().max() == 0
    assert torch.equal(back[0, 1].cpu(), k[1].cpu())
    assert float((back[0, 2] / k[2] - 1).abs().max()) < 0.2
    assert float(back[0, 3].min()) > 1e38


def test_capacity_is_twice_fp8s_and_a_pool_in_a_fixed_budget_shows_it() -> None:
    """At least 1.96 times FP8's tokens in the same bytes, with one scale a position and head."""
    shape = (16, HEADS, 128)
    budget = 1 << 20
    tokens = {}
    for name, fmt, group in (
        ("fp8", "fp8_e4m3fn", None),
        ("fp4", F4, None),
        ("fp4 per 32", F4, 32),
        ("k8v4", K8V4, None),
    ):
        one = PagedKVCache.empty(1, *shape, format=fmt, scale_group=group)
        page_bytes = sum(t.numel() for t in _bytes(one).values())
        assert page_bytes == 16 * one.bytes_per_token()
        cache = PagedKVCache.empty(budget // page_bytes, *shape, format=fmt, scale_group=group)
        assert sum(t.numel() for t in _bytes(cache).values()) <= budget
        pool = PagePool(cache.num_pages, 16)
        count = 0
        while True:
            try:
                pool.allocate(16)
            except PoolExhausted:
                break
            count += 16
        tokens[name] = count
    assert tokens["fp4"] >= 1.96 * tokens["fp8"]
    assert tokens["fp4 per 32"] >= 1.87 * tokens["fp8"]
    assert tokens["k8v4"] >= 1.3 * tokens["fp8"]
    assert one.tokens_per_gib() == int(2**30 / one.bytes_per_token())


@pytest.mark.parametrize("group", [None, 32])
def test_gather_and_copies_take_the_scales_along(group: int | None) -> None:
    cache = PagedKVCache.empty(6, 4, 1, 64, format=F4, scale_group=group)
    pool = PagePool(6, 4, caches=[cache])
    parent = pool.allocate(6)
    tokens = (2.0 ** torch.arange(6.0))[:, None, None].repeat(1, 1, 64)
    append(cache, tokens, -tokens, pool.slot_mapping(parent, 0, 6))
    child = pool.fork(parent)
    pool.extend(child, 1)
    append(cache, tokens[:1] * 64, tokens[:1], pool.slot_mapping(child, 6, 1))
    table = pool.page_table([parent, child])
    assert cache.gather(table, 0)[0][:, 0, 0].tolist() == [1, 2, 4, 8, 16, 32]
    k, v = cache.gather(table, 1)
    assert k[:, 0, 63].tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert v[:, 0, 0].tolist() == [-1, -2, -4, -8, -16, -32, 1]


def test_a_mantissa_takes_no_more_bytes_and_lowers_the_error() -> None:
    k, v = (torch.randn(12, HEADS, 128, generator=torch.manual_seed(s)) for s in (0, 1))
    source = PagedKVCache.empty(3, 4, HEADS, 128, format="bf16")
    append(source, k, v, torch.arange(12))
    e8m0, e4m3 = (source.convert(F4, scale_format=name) for name in ("e8m0", "e4m3"))
    assert e4m3.bytes_per_token() == e8m0.bytes_per_token() == 260.0
    assert e4m3.k_granularity == "token_head"
    exact = source.dequantize()[0]
    errors = [float((cache.dequantize()[0] - exact).square().mean()) for cache in (e8m0, e4m3)]
    assert errors[1] < 0.9 * errors[0]
    appended = PagedKVCache.empty(3, 4, HEADS, 128, format=F4, scale_format="e4m3")
    append(appended, k.bfloat16(), v.bfloat16(), torch.arange(12))
    for name, stored in _bytes(e4m3).items():
        assert torch.equal(_bytes(appended)[name], stored), name


def _from(k_descale: Any, *, k: torch.Tensor | None = None, **options: Any) -> PagedKVCache:
    stored = torch.zeros(2, 4, HEADS, 32, dtype=torch.uint8)
    scale = torch.full((2, 4, HEADS), 127, dtype=torch.uint8)
    return PagedKVCache.from_tensors(
        stored if k is None else k, stored, format=F4, k_descale=k_descale, v_descale=scale, **options
    )


def _empty(head_dim: int, **options: Any) -> PagedKVCache:
    return PagedKVCache.empty(2, 16, HEADS, head_dim, **{"format": F4, **options})


def _e4m3(scale: torch.Tensor, **options: Any) -> PagedKVCache:
    stored = torch.zeros(2, 4, HEADS, 32, dtype=torch.uint8)
    return PagedKVCache.from_tensors(stored, stored, format=F4, k_descale=scale, v_descale=scale, **options)


_ONES = torch.ones(2, 4, HEADS).to(torch.float8_e4m3fn)
_E8M0 = torch.full((2, 4, HEADS), 127, dtype=torch.uint8)
_SIGNED = torch.zeros(2, 4, HEADS, 32, dtype=torch.int8)
REFUSED = [
    ("scales missing", lambda: _from(1.0), (ValueError, TypeError), "k_descale"),
    ("scales in fp32", lambda: _from(torch.ones(2, 4, HEADS)), (ValueError, TypeError), "k_descale.*uint8"),
    ("scales per head", lambda: _from(_E8M0[0, 0]), ValueError, "k_descale"),
    ("data in int8", lambda: _from(_E8M0, k=_SIGNED), (TypeError, ValueError), "k .*uint8"),
    ("odd head", lambda: _empty(65), ValueError, "head_dim"),
    ("head no multiple of the group", lambda: _empty(80, scale_group=32), ValueError, "80.*32|32.*80"),
    ("another group", lambda: _empty(64, scale_group=8), ValueError, "scale_group"),
    ("group without FP4", lambda: _empty(64, format="fp8_e4m3fn", scale_group=32), ValueError, "scale_group"),
    ("vectorised", lambda: _empty(64, layout="vectorised"), (ValueError, UnsupportedError), "vectorised"),
    ("a number for E8M0", lambda: replace(_empty(64), k_tensor_scale=0.5), ValueError,
     "k_tensor_scale must be 1.0 without E4M3 scales, got 0.5"),
    ("a negative number", lambda: replace(_e4m3(_ONES), v_tensor_scale=-1.0), ValueError, "v_tensor_scale"),
    ("E4M3 without FP4", lambda: _empty(64, format="fp8_e4m3fn", scale_format="e4m3"), ValueError,
     "scale_format 'e4m3' is for an fp4_e2m1 cache"),
    ("unknown scales", lambda: _empty(64, scale_format="e5m2"), ValueError, "scale_format"),
    ("groups of 8", lambda: _e4m3(torch.ones(2, 4, HEADS, 8).to(_ONES.dtype)), ValueError, "must have shape"),
    ("a scale of zero", lambda: _e4m3(torch.zeros(2, 4, HEADS).to(_ONES.dtype), validate=True), ValueError,
     "k_descale must hold E4M3 scales above zero, got 16"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "match"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_an_fp4_cache_that_cannot_be_is_refused(make: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        make()
    assert _e4m3(_ONES, validate=True).k_granularity == "token_head"


@pytest.mark.parametrize(("scale_format", "exponent"), [("e8m0", "round"), ("e4m3", "floor")])
def test_an_unknown_exponent_rule_is_refused_and_changes_nothing(scale_format: str, exponent: str) -> None:
    cache = _cache(F4, "NHD", 4, 64, None, "cpu", scale_format)
    before = _bytes(cache)
    k, v = _tokens(64, "cpu")
    with pytest.raises(ValueError, match="exponent must be"):
        append(cache, k, v, torch.arange(6, dtype=I32), exponent=exponent)
    with pytest.raises(ValueError, match="exponent must be"):
        cache.convert(F4, scale_format=scale_format, exponent=exponent)
    assert all(torch.equal(before[name], t) for name, t in _bytes(cache).items())


def test_page_tables_do_not_depend_on_the_format() -> None:
    cache = PagedKVCache.empty(3, 4, 1, 64, format=F4)
    table = PageTable.from_block_table(
        torch.tensor([[2, 0]], dtype=I32), torch.tensor([5], dtype=I32), page_size=4
    )
    assert [x.shape for x in cache.gather(table, 0)] == [(5, 1, 64)] * 2

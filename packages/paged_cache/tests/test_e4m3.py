"""FP4 caches with E4M3 scales, of heads or groups: append, gather, convert, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, Rope, append, append_reference

F4 = "fp4_e2m1"
K8V4 = CacheFormat(k="fp8_e4m3fn", v=F4)
HEADS, PAGES = 2, 3


def _empty(
    fmt: str | CacheFormat, layout: str, dim: int, device: str, group: int | None = None, number: float = 1.0
) -> PagedKVCache:
    return PagedKVCache.empty(
        PAGES, 4, HEADS, dim, format=fmt, layout=layout, scale_group=group, scale_format="e4m3",
        k_descale=number, v_descale=number, device=device,
    )  # fmt: skip


def _bytes(cache: PagedKVCache) -> list[torch.Tensor]:
    tensors = (cache.k, cache.v, cache.k_descale, cache.v_descale)
    return [x.contiguous().view(torch.uint8) for x in tensors if isinstance(x, torch.Tensor)]


def _tokens(dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Six tokens: ordinary, zeros, tiny and huge, NaN and Inf, a tie, and far apart in size."""
    torch.manual_seed(2)
    k, v = (torch.randn(6, HEADS, dim, device=device) for _ in range(2))
    k[1] = 0
    k[2, 0], k[2, 1] = 1e-40, 1e30
    k[3, 0, 3], k[3, 1, 5] = math.nan, math.inf
    k[4, :, 0], k[4, :, 1:] = 7.5, 0.5
    k[5] *= torch.logspace(-3, 3, dim, device=device)
    return k, v


@pytest.mark.parametrize("fmt", [F4, K8V4], ids=["fp4", "k8v4"])
@pytest.mark.parametrize(("group", "number"), [(None, 1.0), (None, 0.3), (16, 0.01), (32, 1.0)])
@pytest.mark.parametrize(("layout", "dim"), [("NHD", 64), ("HND", 96), ("NHD", 128)])
def test_bytes_and_scales_equal_the_host_quantiser(
    fmt: str | CacheFormat, layout: str, dim: int, group: int | None, number: float, device: str
) -> None:
    k, v = _tokens(dim, device)
    slots = torch.tensor([4, 0, 1, -1, 3, 2], dtype=torch.int32, device=device)
    got, want = (_empty(fmt, layout, dim, device, group, number) for _ in range(2))
    append(got, k, v, slots)
    append_reference(want, k, v, slots)
    for mine, theirs in zip(_bytes(got), _bytes(want), strict=True):
        assert torch.equal(mine, theirs)
        assert bool(mine.any())


def test_rope_and_an_offset_come_before_the_scale(device: str) -> None:
    k, v = _tokens(64, device)
    angle = torch.rand(9, 32, device=device) * 6
    positions = torch.tensor([0, 8, 3, 1, 2, 5], dtype=torch.int32, device=device)
    rope, offset = Rope(angle.cos(), angle.sin(), positions), torch.randn(HEADS, 64, device=device)
    slots = torch.arange(6, dtype=torch.int32, device=device)
    got, want = (_empty(F4, "NHD", 64, device) for _ in range(2))
    append(got, k, v, slots, rope=rope, k_offset=offset)
    append_reference(want, k, v, slots, rope=rope, k_offset=offset)
    assert all(torch.equal(a, b) for a, b in zip(_bytes(got), _bytes(want), strict=True))


def test_a_mantissa_takes_no_more_bytes_and_lowers_the_error() -> None:
    k, v = (torch.randn(12, HEADS, 128, generator=torch.manual_seed(s)) for s in (0, 1))
    source = PagedKVCache.empty(PAGES, 4, HEADS, 128, format="bf16")
    append(source, k, v, torch.arange(12))
    e8m0, e4m3 = (source.convert(F4, scale_format=name) for name in ("e8m0", "e4m3"))
    assert e4m3.bytes_per_token() == e8m0.bytes_per_token() == 260.0
    assert e4m3.k_granularity == "token_head"
    exact = source.dequantize()[0]
    errors = [float((cache.dequantize()[0] - exact).square().mean()) for cache in (e8m0, e4m3)]
    assert errors[1] < 0.9 * errors[0]
    appended = _empty(F4, "NHD", 128, "cpu")
    append(appended, k.bfloat16(), v.bfloat16(), torch.arange(12))
    assert all(torch.equal(a, b) for a, b in zip(_bytes(appended), _bytes(e4m3), strict=True))


def _wrap(scale: torch.Tensor, **options: Any) -> PagedKVCache:
    stored = torch.zeros(2, 4, HEADS, 32, dtype=torch.uint8)
    return PagedKVCache.from_tensors(stored, stored, format=F4, k_descale=scale, v_descale=scale, **options)


_ONES = torch.ones(2, 4, HEADS).to(torch.float8_e4m3fn)
REFUSED = [
    ("a group of 8", lambda: PagedKVCache.empty(2, 4, 1, 64, format=F4, scale_group=8, scale_format="e4m3"),
     "scale_group must be None, or 16 or 32"),
    ("a number for E8M0", lambda: replace(PagedKVCache.empty(2, 4, 1, 64, format=F4), k_tensor_scale=0.5),
     "k_tensor_scale must be 1.0 without E4M3 scales, got 0.5"),
    ("a negative number", lambda: replace(_wrap(_ONES), v_tensor_scale=-1.0), "v_tensor_scale"),
    ("no FP4", lambda: PagedKVCache.empty(2, 4, 1, 64, format="fp8_e4m3fn", scale_format="e4m3"),
     "scale_format 'e4m3' is for an fp4_e2m1 cache"),
    ("unknown", lambda: PagedKVCache.empty(2, 4, 1, 64, format=F4, scale_format="e5m2"), "scale_format"),
    ("groups of 8", lambda: _wrap(torch.ones(2, 4, HEADS, 8).to(torch.float8_e4m3fn)), "must have shape"),
    ("a scale of zero", lambda: _wrap(torch.zeros(2, 4, HEADS).to(torch.float8_e4m3fn), validate=True),
     "k_descale must hold E4M3 scales above zero, got 16"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "match"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_cache_that_cannot_be_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
    assert _wrap(_ONES, validate=True).k_granularity == "token_head"


def test_rules_for_powers_of_two_are_refused() -> None:
    cache = _empty(F4, "NHD", 64, "cpu")
    k, v = _tokens(64, "cpu")
    with pytest.raises(ValueError, match="exponent must be 'mse' for a cache with E4M3 scales, got 'floor'"):
        append(cache, k, v, torch.arange(6), exponent="floor")
    with pytest.raises(ValueError, match="exponent must be 'mse'"):
        cache.convert(F4, scale_format="e4m3", exponent="ceil")

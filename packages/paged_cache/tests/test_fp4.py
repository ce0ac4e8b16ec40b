"""FP4 caches with scales of E8M0 and E4M3: codes, scales, capacity and error.

Bytes that an append writes are in test_append, copies of pages in test_pool, refusals in test_cache.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PagePool, append
from narrowkv.testing.cases.cache import copy_cache, differing_bytes

F4 = "fp4_e2m1"
K8V4 = CacheFormat(k="fp8_e4m3fn", v=F4)
HEADS = 2
# The sixteen codes by hand: sign, two exponent bits, one mantissa bit.
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
    append(cache, k, k, torch.arange(4, device=device))
    back, _ = cache.dequantize()
    assert back[0, 0].abs().max() == 0
    assert torch.equal(back[0, 1].cpu(), k[1].cpu())
    assert float((back[0, 2] / k[2] - 1).abs().max()) < 0.2
    assert float(back[0, 3].min()) > 1e38


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("how", "least"),
    [
        ({"format": F4}, 1.5e38),
        ({"format": F4, "scale_group": 32}, 1.5e38),
        # An E4M3 scale ends at 448, a code at 6.
        ({"format": F4, "scale_format": "e4m3"}, 2600.0),
        ({"format": F4, "scale_format": "e4m3", "scale_group": 16}, 2600.0),
        ({"format": "int8"}, 1.3e38),
        ({"format": "int4"}, 1.3e38),
    ],
    ids=str,
)
def test_the_largest_numbers_are_stored_as_finite_ones(
    how: dict[str, Any], least: float, dtype: torch.dtype, device: str
) -> None:
    cache = PagedKVCache.empty(1, 4, 1, 64, device=device, **how)
    x = torch.zeros(4, 1, 64, device=device, dtype=dtype)
    x[0], x[1, 0, ::2], x[1, 0, 1::2], x[2, 0, 5], x[3] = 3e38, 3e38, -3e38, -3e38, torch.finfo(dtype).max
    append(cache, x, x, torch.arange(4, device=device))
    for back in (side.cpu()[0, :, 0] for side in cache.dequantize()):
        assert bool(back.isfinite().all())
        large = x.cpu()[:, 0].abs() > 0
        assert bool((back[large] * x.cpu()[:, 0].sign()[large] >= least).all())


def test_capacity_is_twice_fp8s_and_a_pool_in_a_fixed_budget_shows_it() -> None:
    """At least 1.96 times FP8's tokens in the same bytes, with one scale a position and head."""
    shape, budget = (16, HEADS, 128), 1 << 20

    def tokens(fmt: str | CacheFormat, group: int | None = None) -> int:
        def stored_bytes(cache: PagedKVCache) -> int:
            fields = (cache.k, cache.v, cache.k_descale, cache.v_descale)
            return sum(x.nbytes for x in fields if isinstance(x, torch.Tensor))

        one = PagedKVCache.empty(1, *shape, format=fmt, scale_group=group)
        assert stored_bytes(one) == 16 * one.bytes_per_token()
        assert one.tokens_per_gib() == int(2**30 / one.bytes_per_token())
        cache = PagedKVCache.empty(budget // stored_bytes(one), *shape, format=fmt, scale_group=group)
        assert stored_bytes(cache) <= budget
        pool = PagePool(cache.num_pages, 16)
        while pool.free_pages:
            pool.allocate(16)
        return 16 * cache.num_pages

    fp8 = tokens("fp8_e4m3fn")
    assert tokens(F4) >= 1.96 * fp8
    assert tokens(F4, 32) >= 1.87 * fp8
    assert tokens(K8V4) >= 1.3 * fp8


def test_a_mantissa_takes_no_more_bytes_and_lowers_the_error() -> None:
    k, v = (torch.randn(12, HEADS, 128, generator=torch.manual_seed(seed)) for seed in (0, 1))
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
    assert not differing_bytes(e4m3, appended)


@pytest.mark.parametrize(("scale_format", "exponent"), [("e8m0", "round"), ("e4m3", "floor")])
def test_an_unknown_exponent_rule_is_refused_and_changes_nothing(scale_format: str, exponent: str) -> None:
    cache = PagedKVCache.empty(2, 4, HEADS, 64, format=F4, scale_format=scale_format)
    before, new = copy_cache(cache), torch.ones(6, HEADS, 64)
    with pytest.raises(ValueError, match="exponent must be"):
        append(cache, new, new, torch.arange(6), exponent=exponent)
    with pytest.raises(ValueError, match="exponent must be"):
        cache.convert(F4, scale_format=scale_format, exponent=exponent)
    assert not differing_bytes(cache, before)

"""INT8 and INT4 caches: storage, append, conversion, page copies and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PagePool, Rope, append, append_reference
from narrowkv.paged_cache.cases import copy_cache, differing_bytes
from narrowkv.paged_cache.pool import apply_copies
from narrowkv.quant import dequantize_tokens_int4, quantize_tokens_int4, quantize_tokens_int8
from narrowkv.runtime.errors import UnsupportedError

K8V4 = CacheFormat(k="int8", v="int4")
HEADS, PAGES = 2, 4
LAYOUTS = [("NHD", 3), ("HND", 5), ("tokens", 1), ("concat", 4), ("vectorised", 16)]
CASES = [
    (fmt, layout, size)
    for fmt in ("int8", "int4", K8V4, CacheFormat(k="int8", v="fp4_e2m1"), CacheFormat(k="bf16", v="int4"))
    for layout, size in LAYOUTS
    if layout not in ("concat", "vectorised") or fmt == "int8" or (fmt, layout) == ("int4", "concat")
]


def tokens(head_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary tokens, zeros, one sign, NaN and Inf."""
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 6, HEADS, head_dim, generator=random)
    k[1], v[2], k[3, 0, 5], v[4, 1, 7] = 0.0, v[2].abs() + 1, math.nan, math.inf
    return k.to(device), v.to(device)


@pytest.mark.parametrize(("fmt", "layout", "page_size"), CASES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_append_writes_the_bytes_of_the_host(
    fmt: str | CacheFormat, layout: str, page_size: int, head_dim: int, device: str
) -> None:
    got = PagedKVCache.empty(PAGES, page_size, HEADS, head_dim, format=fmt, layout=layout, device=device)
    for stored in (got.k, got.v):
        stored.view(torch.uint8).fill_(0x5A)
    want = copy_cache(got)
    slots = torch.tensor([3, 0, -1, 2, 1, PAGES * page_size], device=device)
    angle = torch.rand(6, 32, generator=torch.Generator().manual_seed(1)).to(device)
    rope = Rope(angle.cos(), angle.sin(), torch.arange(6, dtype=torch.int32, device=device))
    append(got, *tokens(head_dim, device), slots, rope=rope)
    append_reference(want, *tokens(head_dim, device), slots, rope=rope)
    assert not differing_bytes(got, want)
    assert differing_bytes(got, PagedKVCache.empty(
        PAGES, page_size, HEADS, head_dim, format=fmt, layout=layout, device=device
    ))  # fmt: skip


def test_a_static_descale_of_int8_rounds_and_saturates(device: str) -> None:
    cache = PagedKVCache.empty(1, 16, 1, 64, format="int8", k_descale=0.5, v_descale=2.0, device=device)
    new = torch.zeros(1, 1, 64, device=device)
    new[0, 0, :6] = torch.tensor([0.25, -0.25, 1e9, -1e9, math.nan, 3.0])
    append(cache, new, new, torch.tensor([2], device=device))
    assert cache.k[0, 2, 0, :6].tolist() == [1, -1, 127, -127, 0, 6]
    assert cache.v[0, 2, 0, :6].tolist() == [0, 0, 127, -127, 0, 2]
    assert cache.k_granularity == "tensor"


def test_scales_are_per_token_unless_given() -> None:
    cache = PagedKVCache.empty(PAGES, 16, HEADS, 128, format=K8V4)
    assert (cache.k_granularity, cache.v_granularity) == ("token_head", "token_head")
    assert cache.bytes_per_token() == HEADS * (128 + 4 + 64 + 4)
    assert not cache.dequantize()[1].any()
    mixed = PagedKVCache.empty(PAGES, 16, HEADS, 128, format=CacheFormat("fp8_e4m3fn", "int4"), k_descale=0.5)
    assert (mixed.k_descale, mixed.v_granularity) == (0.5, "token_head")


def test_convert_and_back() -> None:
    random = torch.Generator().manual_seed(0)
    new = torch.randn(2, 32, HEADS, 64, generator=random).bfloat16()
    source = PagedKVCache.empty(2, 16, HEADS, 64, format="bf16")
    append(source, new[0], new[1], torch.arange(32))
    cache = source.convert(K8V4)
    stored, scale = quantize_tokens_int8(new[0])
    assert torch.equal(cache.k.flatten(0, 1), stored)
    assert torch.equal(cache.k_descale.flatten(0, 1), scale)
    packed, scale = quantize_tokens_int4(new[1])
    assert torch.equal(cache.v.flatten(0, 1), packed)
    expected = dequantize_tokens_int4(packed, scale)
    assert torch.equal(cache.dequantize()[1].flatten(0, 1), expected)
    back = cache.convert("bf16", layout="HND")
    assert torch.equal(back.dequantize()[1], cache.dequantize()[1].bfloat16().float())


def test_a_page_takes_its_scales_and_zero_points_along() -> None:
    cache = PagedKVCache.empty(PAGES, 2, HEADS, 64, format="int4")
    pool = PagePool(PAGES, 2)
    first = pool.allocate(3)
    k, v = torch.randn(2, 3, HEADS, 64, generator=torch.Generator().manual_seed(0))
    append(cache, k, v, torch.tensor([0, 1, 2]))
    second = pool.fork(first)
    copies = pool.extend(second, 1)
    apply_copies(cache, copies)
    (copy,) = copies
    assert torch.equal(cache.dequantize()[0][copy.destination], cache.dequantize()[0][copy.source])
    assert cache.dequantize()[0][copy.source].any()


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="'vectorised' is not defined for int4"):
        PagedKVCache.empty(1, 16, 1, 64, format="int4", layout="vectorised")
    with pytest.raises(ValueError, match=r"zero point in their four lowest bits, got 0\.5"):
        PagedKVCache.empty(1, 16, 1, 64, format="int4", k_descale=0.5)
    packed = torch.zeros(2, 16, 1, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"k_descale must be fp32 \[2, 16, 1\] for int4"):
        PagedKVCache.from_tensors(packed, packed, format="int4", k_descale=torch.ones(1), v_descale=1.0)
    numbers = torch.zeros(2, 16, 1, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="k_descale must be given for int8"):
        PagedKVCache.from_tensors(numbers, numbers, format="int8")
    with pytest.raises(TypeError, match="int8"):
        PagedKVCache.from_tensors(numbers.half(), numbers, format="int8", k_descale=1.0, v_descale=1.0)

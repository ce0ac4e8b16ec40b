"""INT8 and INT4 caches: numbers, scales and conversion; bytes are in test_append, refusals in test_cache."""

from __future__ import annotations

import math

import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, append
from narrowkv.quant import dequantize_tokens_int4, quantize_tokens_int4, quantize_tokens_int8

K8V4 = CacheFormat(k="int8", v="int4")
HEADS, PAGES = 2, 4


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
    new = torch.randn(2, 32, HEADS, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    source = PagedKVCache.empty(2, 16, HEADS, 64, format="bf16")
    append(source, new[0], new[1], torch.arange(32))
    cache = source.convert(K8V4)
    stored, scale = quantize_tokens_int8(new[0])
    assert torch.equal(cache.k.flatten(0, 1), stored)
    assert torch.equal(cache.k_descale.flatten(0, 1), scale)
    packed, scale = quantize_tokens_int4(new[1])
    assert torch.equal(cache.v.flatten(0, 1), packed)
    assert torch.equal(cache.dequantize()[1].flatten(0, 1), dequantize_tokens_int4(packed, scale))
    back = cache.convert("bf16", layout="HND")
    assert torch.equal(back.dequantize()[1], cache.dequantize()[1].bfloat16().float())

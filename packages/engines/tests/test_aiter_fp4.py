"""FP4 caches through AITER's paged functions: codes in the last dimension, scales of tokens and heads."""

from __future__ import annotations

import pytest
import torch
from test_aiter import DIM, HEADS, KV_HEADS, PAGE, PAGES, Q_LENS, SEQ_LENS, batch, close, exact, queries

from narrowkv.engines import aiter
from narrowkv.paged_cache import PagedKVCache, append
from narrowkv.runtime.errors import UnsupportedError

SCALES = {
    "E8M0 a head": {},
    "OCP MX": {"scale_group": 32},
    "NVFP4": {"scale_group": 16, "scale_format": "e4m3"},
}


def _stored(page, **options):
    """A filled FP4 cache `[pages, page, heads, dim / 2]`, and what it holds in fp32."""
    cache = PagedKVCache.empty(PAGES * PAGE // page, page, KV_HEADS, DIM, format="fp4_e2m1", **options)
    slots = torch.arange(PAGES * PAGE, dtype=torch.int32)
    k, v = (
        torch.randn(len(slots), KV_HEADS, DIM, generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    )
    append(cache, k.bfloat16(), v.bfloat16(), slots)
    return cache, [side.numbers_of(side.stored, slice(None)) for side in cache.sides()]


def _with_torchs_dtypes(cache):
    """Codes as `float4_e2m1fn_x2`, powers of two as `float8_e8m0fnu`."""
    scales = [cache.k_descale, cache.v_descale]
    scales = [x.view(torch.float8_e8m0fnu) if x.dtype == torch.uint8 else x for x in scales]
    return (cache.k.view(torch.float4_e2m1fn_x2), cache.v.view(torch.float4_e2m1fn_x2)), scales


@pytest.mark.parametrize("dtypes", ["uint8", "torch's"])
@pytest.mark.parametrize("scales", SCALES)
def test_mha_batch_prefill_and_unified_attention(scales, dtypes):
    cache, real = _stored(PAGE, **SCALES[scales])
    table, ids, indptr, last, starts, lens = batch()
    q, (k, v), descales = queries(sum(Q_LENS)), (cache.k, cache.v), (cache.k_descale, cache.v_descale)
    if dtypes != "uint8":
        (k, v), descales = _with_torchs_dtypes(cache)
    o = aiter.mha_batch_prefill_func(
        q, k, v, starts, indptr, ids, max(Q_LENS), max(SEQ_LENS), causal=True, kv_last_page_lens=last,
        k_descale=descales[0], v_descale=descales[1],
    )  # fmt: skip
    expected, _ = exact(q, *real, table, starts)
    close(o, expected)
    out = torch.empty_like(q)
    aiter.unified_attention(
        q, k, v, out, starts, max(Q_LENS), lens, max(SEQ_LENS), DIM**-0.5, True, (-1, -1), table, 0.0, None,
        *descales,
    )  # fmt: skip
    close(out, expected)


@pytest.mark.parametrize("scales", ["E8M0 a head", "NVFP4"])
@pytest.mark.parametrize("layout", ["HND", "NHD", "tokens"])
def test_paged_attention(layout, scales):
    page = 1 if layout == "tokens" else PAGE
    cache, real = _stored(page, **SCALES[scales])
    table, ids, indptr, last, starts, lens = batch(page, q_lens=(1, 1))
    k, v, k_scale, v_scale = cache.k, cache.v, cache.k_descale, cache.v_descale
    if layout == "HND":
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    if layout == "tokens":  # slots without pages, and their scales
        k, v, k_scale, v_scale = (x[:, 0] for x in (k, v, k_scale, v_scale))
    q = queries(2)
    expected, _ = exact(q, *real, table, starts)
    common = (None, "fp4", "HND" if layout == "HND" else "NHD", 0.0, k_scale, v_scale)
    out = torch.empty_like(q)
    paged = (out, None, q, k, v, DIM**-0.5)
    aiter.paged_attention_ragged(*paged, indptr, ids, last, page, 1, *common)
    close(out, expected)
    aiter.paged_attention_v1(*paged, table, None, lens, max(SEQ_LENS), *common)
    close(out, expected)


def test_fp8_keys_beside_fp4_values():
    cache, (_, v) = _stored(PAGE)
    k = (torch.randn(PAGES, PAGE, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)) * 20).to(
        torch.float8_e4m3fn
    )
    table, ids, indptr, last, starts, _ = batch()
    q = queries(sum(Q_LENS))
    o = aiter.mha_batch_prefill_func(
        q, k, cache.v, starts, indptr, ids, max(Q_LENS), max(SEQ_LENS), causal=True, kv_last_page_lens=last,
        k_descale=torch.tensor([0.05]), v_descale=cache.v_descale,
    )  # fmt: skip
    close(o, exact(q, k.float() * 0.05, v, table, starts)[0])


def test_layouts_that_are_not_read_are_refused_with_the_reason():
    cache, _ = _stored(PAGE)
    table, ids, indptr, last, starts, lens = batch()
    q, out = queries(sum(Q_LENS)), torch.empty(sum(Q_LENS), HEADS, DIM).bfloat16()
    descales = (cache.k_descale, cache.v_descale)
    # A page of NVFP4 holds its scales, so descales are those of the tensor.
    nvfp4, one = torch.zeros(PAGES, KV_HEADS, PAGE, DIM // 2 + DIM // 16, dtype=torch.uint8), torch.ones(1)
    shuffled = (q, nvfp4, nvfp4, out, starts, 3, lens, 33, 1.0, True, (-1, -1), table, 0.0, None, one, one)
    with pytest.raises(UnsupportedError, match="gfx1250's matrix instructions"):
        aiter.unified_attention(*shuffled, shuffled_kv_cache=True)
    arguments = (starts, indptr, ids, 3, 33)
    named = {"kv_last_page_lens": last, "k_descale": descales[0], "v_descale": descales[1]}
    vectorised = cache.k.unflatten(3, (2, 16)).permute(0, 2, 3, 1, 4)
    with pytest.raises(UnsupportedError, match="k in FP4 must be linear"):
        aiter.mha_batch_prefill_func(q, vectorised, vectorised, *arguments, **named)
    codes = cache.k.view(torch.float4_e2m1fn_x2)
    with pytest.raises(TypeError, match="k's descale must be a tensor of scales for FP4, got NoneType"):
        aiter.mha_batch_prefill_func(q, codes, codes, *arguments, kv_last_page_lens=last)
    with pytest.raises(ValueError, match="kv_cache_dtype must be"):
        aiter.paged_attention_ragged(
            out[:2], None, q[:2], cache.k, cache.v, 1.0, indptr, ids, last, PAGE, 1, None, "fp8", "NHD", 0.0,
            *descales,
        )  # fmt: skip

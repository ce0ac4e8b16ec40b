"""The bytes that narrowkv stores for SGLang beside those of SGLang's own writers (`make test-engines`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: make test-engines", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

from interpreted import Interpreted

from narrowkv.engines import trial_sglang  # noqa: F401  # first: it declares operators of torchvision

# isort: split
from sglang.kernels.ops.attention import decode_attention
from sglang.kernels.ops.attention.dsa import dequant_k_cache
from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as reference
from sglang.test.kernels.deepseek_v4 import k_cache_reference

from narrowkv.attn_decode import paged_decode_reference
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.engines.deepseek import LAYOUTS, RECORDS
from narrowkv.sparse_fp8 import DSV4Rows
from narrowkv.testing.backends import sglang_call


def rows(count):
    random = torch.Generator().manual_seed(0)
    return (torch.randn(count, 512, generator=random) * torch.logspace(-1, 2, count)[:, None]).bfloat16()


def without_negative_zero(stored, *, fp4=False):
    """SGLang stores -0 as 0x80, and 8 in FP4; narrowkv 0."""
    if fp4:
        low, high = stored & 15, stored >> 4
        return low.masked_fill(low == 8, 0) | (high.masked_fill(high == 8, 0) << 4)
    return stored.masked_fill(stored == 0x80, 0)


def test_deepseek_v4_pages_are_sglangs_byte_for_byte(monkeypatch):
    kernel = Interpreted(k_cache_reference._quant_k_cache_fused_kernel)
    monkeypatch.setattr(k_cache_reference, "_quant_k_cache_fused_kernel", kernel)
    x, page_size = rows(40), 16
    pack = k_cache_reference.quant_to_nope_fp8_rope_bf16_pack_triton(x)
    mine = DSV4Rows.quantize(x, layout="packed584", page_size=page_size)
    pages = torch.zeros_like(mine.data.view(torch.uint8)).flatten(1)
    k_cache_reference.set_k_and_s_torch(pages, torch.arange(40), pack, page_size)
    # The RoPE part is 16-bit: a byte 0x80 is part of a number there.
    found = mine.data.view(torch.uint8).flatten(1)
    nope = torch.zeros(pages.shape[1], dtype=torch.bool)
    nope[: page_size * 576] = (torch.arange(page_size * 576) % 576) < 448
    assert torch.equal(found[:, ~nope], pages[:, ~nope])
    assert torch.equal(found[:, nope], without_negative_zero(pages[:, nope]))
    assert found.any(1).all()


@pytest.mark.parametrize("interleaved", [False, True], ids=["planar", "interleaved"])
@pytest.mark.parametrize(("width", "data"), [(528, 512), (288, 256)])
def test_deepseek_v41_pages_are_sglangs_byte_for_byte(width, data, interleaved):
    page_size = 16
    x = rows(2 * page_size)
    pack = reference.quantize_k_cache_v41 if width == 528 else reference.quantize_k_cache_v41_fp4
    pages = pack(x.view(2, page_size, 512))
    if interleaved:
        pages = reference.interleave_pages(pages, page_size, data, width - data)
    layouts = RECORDS if interleaved else LAYOUTS
    mine = DSV4Rows.quantize(x, layout=layouts[width], page_size=page_size)
    found = mine.data.view(torch.uint8).flatten(1)[:, : page_size * width]
    expected = pages[:, : page_size * width]
    if interleaved:
        (codes, scales), (their_codes, their_scales) = (
            x.view(2, page_size, width).split([data, width - data], -1) for x in (found, expected)
        )
    else:
        (codes, scales), (their_codes, their_scales) = (
            x.split([page_size * data, page_size * (width - data)], -1) for x in (found, expected)
        )
    assert torch.equal(codes, without_negative_zero(their_codes, fp4=width == 288))
    assert torch.equal(scales, their_scales)


def test_deepseek_v32_rows_are_read_by_sglang(monkeypatch):
    """SGLang's writer of 656 bytes needs a GPU; its reader gives the numbers that were stored."""
    kernel = Interpreted(dequant_k_cache._dequantize_k_cache_fast_kernel)
    monkeypatch.setattr(dequant_k_cache, "_dequantize_k_cache_fast_kernel", kernel)
    x = torch.cat([rows(32), rows(32)[:, :64]], 1)
    mine = DSV4Rows.quantize(x, layout="record656", page_size=16)
    records = mine.data.view(torch.float8_e4m3fn).view(2, 16, 1, 656)
    read = dequant_k_cache.dequantize_k_cache(records).view(32, 576)
    assert torch.equal(read, mine.dequantize().bfloat16())
    assert (read.float() - x.float()).norm() / x.float().norm() < 0.03


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("form", ["bf16", "fp8_e4m3fn"])
def test_the_probes_call_of_sglangs_kernel_is_attention(form, ratio, monkeypatch):
    for name in ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"):
        monkeypatch.setattr(decode_attention, name, Interpreted(getattr(decode_attention, name)))
    inputs = DecodeCase(
        lens=(37, 20), num_kv_heads=1, gqa_ratio=ratio, head_dim=64, page_size=16, format=form
    ).inputs("cpu")
    found = sglang_call(decode_attention.decode_attention_fwd, inputs)()
    exact = paged_decode_reference(inputs.q, inputs.cache, inputs.table, out_dtype=torch.float32)
    bound = 0.005 if form == "bf16" or ratio == 1 else 0.05  # its grouped kernel rounds P to the cache's FP8
    assert (found.float() - exact).abs().sum() / exact.abs().sum() < bound

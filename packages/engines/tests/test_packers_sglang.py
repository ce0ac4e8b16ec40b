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
from sglang.test.kernels.deepseek_v4 import k_cache_reference

from narrowkv.attn_decode import paged_decode_reference
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.sparse_fp8 import DSV4Rows
from narrowkv.testing.backends import sglang_call


def rows(count):
    random = torch.Generator().manual_seed(0)
    return (torch.randn(count, 512, generator=random) * torch.logspace(-1, 2, count)[:, None]).bfloat16()


def without_negative_zero(stored):
    """SGLang stores -0 as 0x80, narrowkv as 0."""
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

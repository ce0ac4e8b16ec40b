"""Sage attention over quantised tensors: the bits of the operation that quantises them itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowkv.quant.quantize import quantize_per_channel
from narrowkv.quant.sage import SAGE_GRANULARITIES, quantize_per_token_group, token_groups
from narrowkv.runtime.launch import active_target
from narrowkv.sage import SageOperands, plan_sage, sage_attention, sage_attention_quantized
from narrowkv.testing.cases.sage import PRECISIONS

pytestmark = pytest.mark.sampled

B, Q_LEN, K_LEN, HEADS, KV_HEADS, DIM = 2, 70, 130, 4, 2, 64


def tensors(device):
    random = torch.Generator().manual_seed(0)
    sizes = (B, Q_LEN, HEADS, DIM), (B, K_LEN, KV_HEADS, DIM), (B, K_LEN, KV_HEADS, DIM)
    return [torch.randn(size, generator=random).bfloat16().to(device) for size in sizes]


def quantised(q, k, v, qk_dtype, granularity):
    plan = plan_sage(q, k, qk_dtype=qk_dtype, q_granularity=granularity, k_granularity=granularity)
    sides = [
        quantize_per_token_group(x, token_groups(side, granularity), plan.qk_format)
        for side, x in (("q", q), ("k", k))
    ]
    values = [quantize_per_channel(x, plan.config.fp8) for x in v]
    v_stored, v_descale = (torch.stack(part) for part in zip(*values, strict=True))
    return SageOperands(sides[0][0], sides[1][0], v_stored, sides[0][1], sides[1][1], v_descale)


@pytest.mark.parametrize("granularity", SAGE_GRANULARITIES)
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
def test_the_result_is_that_of_the_quantising_operation(qk_dtype, granularity, device):
    q, k, v = tensors(device)
    how = {"qk_dtype": qk_dtype, "q_granularity": granularity, "k_granularity": granularity}
    how |= {"causal": "bottom_right", "return_lse": True}
    o, lse = sage_attention(q, k, v, smooth_k=False, **how)
    found, found_lse = sage_attention_quantized(quantised(q, k, v, qk_dtype, granularity), **how)
    assert torch.equal(found, o)
    assert torch.equal(found_lse, lse)


@pytest.mark.parametrize("qk_dtype", ["int8", "fp8"])
def test_a_block_mask_masks_what_it_masks_of_the_quantising_operation(qk_dtype, device):
    q, k, v = tensors(device)
    flags = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool, device=device)
    how = {"qk_dtype": qk_dtype, "return_lse": True, "block_sizes": (128, 64)}
    how |= {"block_mask": flags[:, None, None].expand(B, HEADS, 1, 3)}
    expected = sage_attention(q, k, v, smooth_k=False, **how)
    operands = quantised(q, k, v, qk_dtype, "per_thread")
    assert all(map(torch.equal, sage_attention_quantized(operands, **how), expected))
    plain = sage_attention_quantized(operands, qk_dtype=qk_dtype)
    assert not torch.equal(plain, expected[0])
    with pytest.raises(ValueError, match="block_mask must have shape"):
        sage_attention_quantized(operands, block_mask=flags)


def test_padding_layouts_and_column_major_values_change_nothing(device):
    q, k, v = tensors(device)
    given = quantised(q, k, v, "int8", "per_thread")
    o = sage_attention_quantized(given)

    def padded(x, tokens, filler):
        more = list(x.shape)
        more[1] = tokens - x.shape[1]
        return torch.cat([x, torch.full(more, filler, dtype=x.dtype, device=x.device)], 1)

    longer = replace(
        given, q=padded(given.q, 128, 77), k=padded(given.k, 256, 77), q_len=Q_LEN, k_len=K_LEN,
        q_descale=padded(given.q_descale, 32, 9.0), k_descale=padded(given.k_descale, 16, 9.0),
        v=padded(given.v.view(torch.uint8), 256, 77).view(given.v.dtype),
    )  # fmt: skip
    assert torch.equal(sage_attention_quantized(longer), o)
    heads_first = replace(
        given, layout="BHSD", q=given.q.transpose(1, 2), k=given.k.transpose(1, 2), column_major_v=True,
        v=given.v.permute(0, 2, 3, 1).view(torch.uint8).contiguous().view(given.v.dtype),
    )  # fmt: skip
    assert torch.equal(sage_attention_quantized(heads_first).transpose(1, 2), o)
    narrow = replace(given, v=given.v[..., :40], v_descale=given.v_descale[..., :40])
    assert torch.equal(sage_attention_quantized(narrow), o[..., :40])


def test_operands_that_do_not_belong_together_are_refused():
    given = quantised(*tensors("cpu"), "int8", "per_thread")
    fp8 = active_target(torch.device("cpu")).native_fp8 or "fp8_e4m3fn"
    assert given.v.dtype == getattr(torch, fp8.replace("fp8", "float8"))
    for change, message in (
        ({"q": given.q.float()}, "q must have dtype"),
        ({"k": given.k[:, :, :, :32]}, r"k must have shape"),
        ({"v": given.v[:, :100]}, "v must have k's batch, tokens and heads"),
        ({"q_descale": given.q_descale[:, :-1]}, "q_descale must have shape"),
        ({"v_descale": given.v_descale.double()}, "v_descale must have dtype"),
        ({"k_len": 131}, "k_len must be at most the 130 tokens"),
        ({"layout": "SBHD"}, "layout must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            sage_attention_quantized(replace(given, **change))
    with pytest.raises(TypeError, match="q must have dtype"):
        sage_attention_quantized(given, qk_dtype="fp8")

"""Sage's host quantisers: which tokens share a descale, and that the means change no softmax."""

from __future__ import annotations

import pytest
import torch

from narrowkv.quant import dequantize_with_descale, quantize_per_tensor
from narrowkv.quant.sage import (
    SAGE_GRANULARITIES,
    block_mean,
    dequantize_per_token_group,
    quantize_per_token_group,
    token_groups,
    token_mean,
)

SIZES = {("q", "per_block"): 128, ("k", "per_block"): 128, ("q", "per_warp"): 32, ("k", "per_warp"): 64,
         ("q", "per_thread"): 4, ("k", "per_thread"): 16}  # fmt: skip


@pytest.mark.parametrize(("side", "granularity"), SIZES)
def test_every_group_has_its_size(side: str, granularity: str) -> None:
    groups = token_groups(side, granularity)
    assert groups is not None
    assert groups.size == SIZES[side, granularity]
    counts = torch.bincount(groups.of(256))
    assert counts.tolist() == [groups.size] * (256 // groups.size)


def test_per_thread_groups_are_the_published_ones() -> None:
    """What a thread holds of a 16x8 result: rows of q 8 apart, pairs of columns of k 8 apart."""
    q, k = token_groups("q", "per_thread"), token_groups("k", "per_thread")
    assert q is not None
    assert k is not None
    assert [t for t in range(64) if int(q.of(64)[t]) == 3] == [3, 11, 19, 27]
    assert [t for t in range(128) if int(k.of(128)[t]) == 5] == [t for t in range(64, 128) if t % 8 in (2, 3)]


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("granularity", SAGE_GRANULARITIES)
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3fn", "fp8_e4m3fnuz"])
def test_each_group_is_quantised_as_alone(side: str, granularity: str, fmt: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 150, 3, 8) * torch.rand(2, 150, 3, 1) * 5
    groups = token_groups(side, granularity)
    stored, descale = quantize_per_token_group(x, groups, fmt)
    back = dequantize_per_token_group(stored, descale, groups, fmt)
    index = torch.zeros(150, dtype=torch.long) if groups is None else groups.of(150)
    for group in index.unique().tolist():
        members = index == group
        for seq in range(2):
            for head in range(3):
                if groups is None:
                    alone, scale = quantize_per_tensor(x, fmt)
                    expected = dequantize_with_descale(alone, scale, fmt)[seq, members, head]
                else:
                    alone, scale = quantize_per_tensor(x[seq, members, head], fmt)
                    expected = dequantize_with_descale(alone, scale, fmt)
                    assert float(descale[seq, group, head]) == float(scale)
                assert torch.equal(back[seq, members, head], expected)


def test_finer_groups_are_closer() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 2, 64) * torch.exp(torch.randn(256, 1, 1))
    errors = []
    for granularity in SAGE_GRANULARITIES:
        groups = token_groups("k", granularity)
        back = dequantize_per_token_group(*quantize_per_token_group(x, groups, "int4"), groups, "int4")
        errors.append(float((back - x).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 2


def test_means_are_those_of_float64() -> None:
    torch.manual_seed(0)
    x = (torch.randn(300, 2, 8) + 100).bfloat16()
    torch.testing.assert_close(token_mean(x), x.double().mean(0).float(), rtol=2e-7, atol=0)
    means = block_mean(x)
    assert means.shape == (3, 2, 8)
    torch.testing.assert_close(means[2], x[256:].double().mean(0).float(), rtol=2e-7, atol=0)
    assert torch.equal(token_mean(x[:0]), torch.zeros(2, 8))
    assert block_mean(x[:0]).shape == (0, 2, 8)

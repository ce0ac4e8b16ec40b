"""Sums of decode over several key tiles of one program: terms of probabilities, and descales that grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import DecodeCase


def _relative_l1(o: torch.Tensor, expected: torch.Tensor) -> float:
    return float((o.float() - expected).abs().sum() / expected.abs().sum())


def test_probabilities_over_a_bf16_cache_are_two_terms(device: str) -> None:
    q, cache, table = DecodeCase.small(format="bf16", lens=(70, 200), gqa_ratio=4).build(device)
    plan = plan_decode(q, cache, table, split="none")
    o = paged_decode(q, cache, table, plan=plan, out_dtype=torch.float32)
    # One bf16 term is 1.5e-3 off; two keep 16 bits.
    assert _relative_l1(o, paged_decode_reference(q, cache, table)) <= 1e-4


@pytest.mark.parametrize("grows", [True, False])
def test_v_descales_of_tokens_that_change_from_tile_to_tile(grows: bool, device: str) -> None:
    workload = DecodeCase.small(lens=(300,), granularity="token_head", gqa_ratio=4)
    q, cache, table = workload.build(device)
    assert isinstance(cache.v_descale, torch.Tensor)
    factor = 2.0 ** (torch.arange(320, device=device) / 40)
    pages, _ = table.pages_of(0)
    descale = cache.v_descale.clone()
    descale[pages] *= (factor if grows else factor.flip(0))[: 16 * len(pages)].view(-1, 16, 1)
    cache = replace(cache, v_descale=descale)
    plan = plan_decode(q, cache, table, split="none")
    assert (
        _relative_l1(paged_decode(q, cache, table, plan=plan), paged_decode_reference(q, cache, table))
        <= 0.002
    )

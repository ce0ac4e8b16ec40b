"""The shipped kernels' own gfx942 and gfx950 machine code, run on the CPU, against the fp32 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import (
    merge_states,
    merge_states_reference,
    paged_decode,
    paged_decode_reference,
    plan_decode,
)
from narrowkv.cli.emulation import EmulateExecutor
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope, append, append_reference
from narrowkv.quant.launch import executing

TARGETS = ["gfx942", "gfx950"]
I32 = torch.int32


def _decode_inputs(
    fmt: str = "fp8_e4m3fn",
    *,
    lens: tuple[int, ...] = (70, 5, 130),
    ratio: int = 12,
    heads: int = 2,
    head_dim: int = 128,
    page_size: int = 16,
    layout: str = "NHD",
    q_len: int = 1,
    q_dtype: torch.dtype = torch.bfloat16,
    clean: bool = True,
) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
    """Values written by `append`, pages shuffled, the rest of the cache poisoned with NaN codes."""
    torch.manual_seed(0)
    batch, pages = len(lens), max(-(-n // page_size) for n in lens)
    cache = PagedKVCache.empty(
        batch * pages + 2, page_size, heads, head_dim, format=fmt, layout=layout, k_descale=0.5, v_descale=2.0
    )
    for stored in (cache.k, cache.v):
        if stored.element_size() == 1:
            stored.view(torch.uint8).fill_(0x7F)
        else:
            stored.fill_(float("nan"))
    ids = torch.randperm(batch * pages + 2)[: batch * pages].view(batch, pages).to(I32)
    for seq, n in enumerate(lens):
        token = torch.arange(n)
        slots = (ids[seq].long()[token // page_size] * page_size + token % page_size).to(I32)
        append_reference(cache, torch.randn(n, heads, head_dim), torch.randn(n, heads, head_dim), slots)
        ids[seq, -(-n // page_size) :] = 2**30
    table = PageTable.from_block_table(ids, torch.tensor(lens, dtype=I32), page_size=page_size)
    q = torch.randn(batch * q_len, heads * ratio, head_dim).to(q_dtype)
    return q, replace(cache, negative_zero_free=clean), table


def _relative_l1(o: torch.Tensor, expected: torch.Tensor) -> float:
    assert not bool(o.isnan().any())
    return float((o.float() - expected).abs().sum() / expected.abs().sum())


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OCP that narrowkv wrote": ({}, {}),
    "OCP from elsewhere": ({"clean": False}, {}),
    "FNUZ": ({"fmt": "fp8_e4m3fnuz"}, {}),
    "E5M2": ({"fmt": "fp8_e5m2"}, {}),
    "bf16": ({"fmt": "bf16"}, {}),
    "fp16 queries over bf16": ({"fmt": "bf16", "q_dtype": torch.float16}, {}),
    "page size 1": ({"page_size": 1, "layout": "tokens"}, {}),
    "page size 3, head_dim 80": ({"page_size": 3, "head_dim": 80, "ratio": 3}, {}),
    "head_dim 256": ({"head_dim": 256, "ratio": 2}, {}),
    "vectorised layout": ({"layout": "vectorised"}, {}),
    "ratio 71": ({"ratio": 71, "head_dim": 64, "heads": 1}, {}),
    "speculative tokens in a window": ({"q_len": 2, "ratio": 5}, {"window_left": 20}),
    "soft cap and sinks": ({}, {"logits_soft_cap": 5.0, "sinks": torch.linspace(-1, 1, 24)}),
    "an empty sequence": ({"lens": (33, 0, 1)}, {}),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_decode_machine_code_agrees_with_the_reference(case: str, target: str) -> None:
    shape, options = CASES[case]
    q, cache, table = _decode_inputs(**shape)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    executor = EmulateExecutor(target, detect_races=True)
    with executing(executor):
        _, lse = paged_decode(q, cache, table, out=out, return_lse=True, **options)
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True, **options)
    assert _relative_l1(out, expected) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert sum(run.result.counts.mfma_flops for run in executor.runs) > 0


@pytest.mark.parametrize("target", TARGETS)
def test_both_ways_of_merging_agree(target: str) -> None:
    q, cache, table = _decode_inputs()
    results = []
    for in_launch in (False, True):
        with executing(EmulateExecutor(target)):
            plan = plan_decode(q, cache, table, tokens_per_split=32)
            plan = replace(plan, config=replace(plan.config, merge_in_launch=in_launch))
            results.append(paged_decode(q, cache, table, plan=plan))
    expected = paged_decode_reference(q, cache, table)
    assert all(_relative_l1(o, expected) <= 0.002 for o in results)


@pytest.mark.parametrize("target", TARGETS)
def test_a_wrong_descale_is_noticed(target: str) -> None:
    q, cache, table = _decode_inputs()
    with executing(EmulateExecutor(target)):
        o = paged_decode(q, replace(cache, v_descale=1.9), table)
    assert _relative_l1(o, paged_decode_reference(q, cache, table)) > 0.04


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"])
def test_append_machine_code_is_byte_exact(fmt: str, target: str) -> None:
    torch.manual_seed(3)
    made = [PagedKVCache.empty(4, 3, 2, 64, format=fmt, k_descale=0.03, v_descale=0.7) for _ in range(2)]
    angle = torch.rand(11, 32) * 6
    rope = Rope(angle.cos(), angle.sin(), torch.tensor([0, 10, 3], dtype=I32))
    k, v = torch.randn(3, 2, 64).bfloat16() * 3, torch.randn(3, 2, 64).bfloat16()
    slots = torch.tensor([7, -1, 2], dtype=I32)
    with executing(EmulateExecutor(target)):
        append(made[0], k, v, slots, rope=rope)
    append_reference(made[1], k, v, slots, rope=rope)
    for got, want in ((made[0].k, made[1].k), (made[0].v, made[1].v)):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
def test_merge_states_machine_code(target: str) -> None:
    torch.manual_seed(4)
    o, lse = torch.randn(3, 2, 4, 64), torch.randn(3, 2, 4) * 5
    lse[0, 0], lse[:, 1, 2] = -torch.inf, -torch.inf
    o[0, 0] = torch.nan
    with executing(EmulateExecutor(target)):
        merged, total = merge_states(o, lse)
    expected, expected_total = merge_states_reference(o, lse)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, expected_total, rtol=1e-5, atol=1e-5)

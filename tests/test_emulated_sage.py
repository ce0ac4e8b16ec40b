"""Sage attention's own gfx942 and gfx950 machine code, run on the CPU, against fp32 and the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generated_code import both_targets

from narrowkv.quant import compare, max_abs, relative_l1
from narrowkv.runtime.launch import executing, run_as
from narrowkv.sage import plan_sage, sage_attention_reference
from narrowkv.sage.reference import narrow_p_reference
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.emulation import EmulateExecutor

W = SageCase.small

RAGGED = W(q_lens=(70, 0, 7), k_lens=(1, 130, 80), gqa_ratio=1, ragged=True)
SMALL = W(q_lens=(70,), k_lens=(150,))
PRECISE, COARSE = ({"q_granularity": name, "k_granularity": name} for name in ("per_thread", "per_tensor"))
CASES: dict[str, tuple[SageCase, dict[str, Any]]] = {
    "int8": (SMALL, {"causal": "bottom_right"}),
    "int4, a descale for each thread": (SMALL, {"qk_dtype": "int4", **PRECISE}),
    "FP8, a descale for everything": (SMALL, {"qk_dtype": "fp8", **COARSE}),
    "no keys": (W(q_lens=(70,), k_lens=(0,), gqa_ratio=1), {}),
}
SLOW: dict[str, tuple[SageCase, dict[str, Any]]] = {
    "FP8, blocks, no mean": (
        SMALL,
        {"qk_dtype": "fp8", "q_granularity": "per_block", "k_granularity": "per_block", "smooth_k": False},
    ),
    "head_dim 128, fp16": (
        W(q_lens=(70,), k_lens=(70,), head_dim=128, gqa_ratio=1, dtype=torch.float16), {"causal": "top_left"},
    ),
    "int4 head_dim 128, both means, a window": (
        W(q_lens=(140,), k_lens=(140,), head_dim=128, gqa_ratio=1),
        {"qk_dtype": "int4", "smooth_q": True, "window": (40, 9), "k_granularity": "per_thread"},
    ),
    "ragged": (RAGGED, {"causal": "bottom_right", "smooth_q": True}),
}  # fmt: skip


@pytest.mark.sampled(most=2)
@both_targets
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_machine_code_agrees_with_the_reference(name: str, target: str) -> None:
    workload, options = (CASES | SLOW)[name]
    q, k, v, starts_q, starts_k = workload.build()
    options = {**options, "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    executor = EmulateExecutor(target, detect_hazards=True)
    out = torch.full_like(q, torch.nan)
    with executing(executor):
        plan = plan_sage(q, k, **options)
        _, lse = plan.attend(q, plan.quantize_kv(k, v), out=out, return_lse=True)
    with run_as(target):
        expected, expected_lse = sage_attention_reference(q, k, v, return_lse=True, **options)
        rounded = narrow_p_reference(q, k, v, **options)
    attention = executor.runs[-1]
    assert attention.artifact.name == "_sage_attention_kernel"
    assert (attention.result.counts.mfma_flops > 0) == (k.shape[1] > 0)
    report = compare(out, expected)
    assert report.passes(relative_l1=1.25 * relative_l1(rounded, expected) + 2e-3), str(report)
    assert max_abs(lse, expected_lse) <= 1e-3


@pytest.mark.sampled(most=2)
@both_targets
@pytest.mark.parametrize("qk_dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("granularity", [pytest.param("per_tensor", marks=pytest.mark.slow), "per_thread"])
def test_the_pre_pass_stores_what_the_interpreted_one_does(
    qk_dtype: str, granularity: str, target: str
) -> None:
    """And that is, bit for bit, what the host's quantisers give (the package's own tests)."""
    q, k, v, *_ = W(q_lens=(40,), k_lens=(140,), gqa_ratio=1).build()
    v[..., 3] = 0.0
    k[:, 5] = 2.0
    stored = []
    for context in (run_as(target), executing(EmulateExecutor(target, detect_hazards=True))):
        with context:
            plan = plan_sage(q, k, qk_dtype=qk_dtype, q_granularity=granularity, k_granularity=granularity)
            plan = plan.with_workspace()
            kv = plan.quantize_kv(k, v)
            plan.attend(q, kv)
        rows = 256
        assert kv.k.shape[1] == rows
        stored.append([kv.k, kv.k_descale, kv.k_mean, kv.v, kv.v_descale])
        stored[-1] += [plan._scratch[name].clone() for name in ("q_codes", "q_descale")]
    for interpreted, emulated in zip(*stored, strict=True):
        assert torch.equal(interpreted.view(torch.uint8), emulated.view(torch.uint8))

"""The pre-pass of sage attention as gfx942 and gfx950 machine code, run on the CPU, against the interpreter.

Attention itself is run as machine code by its package's own tests.
"""

from __future__ import annotations

import pytest
import torch
from generated_code import both_targets, emulate

from narrowkv.runtime.attention.xcds import xcd_order
from narrowkv.runtime.launch import executing, run_as
from narrowkv.runtime.targets import TARGETS
from narrowkv.sage import plan_sage
from narrowkv.sage.config import choose_config
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.emulation import EmulateExecutor

W = SageCase.small


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


@pytest.mark.slow
@both_targets
def test_programs_ordered_for_eight_xcds(target: str) -> None:
    """Six heads of eight tiles of rows: one period of the shipped order."""
    case = W(q_lens=(1000,), k_lens=(1000,), num_kv_heads=3, causal="bottom_right")
    order = xcd_order(TARGETS[target].xcds, 6, choose_config(TARGETS[target]).xcd_rows)
    assert order is not None
    assert order.rows * order.columns == 6 * 8
    result, _ = emulate(case, target)
    assert result.passed, result.detail

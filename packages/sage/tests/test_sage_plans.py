"""Plans of Sage attention: made from sizes, they serve every smaller call and allocate nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import Workspace, compile_for, executing
from narrowkv.sage import SageShape, plan_sage, sage_attention
from narrowkv.sage.cases import SageCase
from narrowkv.testing.calls import LaunchRecorder, functions_entered

W = SageCase.small
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"causal": "bottom_right"},
    "both means": {"qk_dtype": "int4", "smooth_q": True},
    "one descale, FP8": {"qk_dtype": "fp8", "q_granularity": "per_tensor", "k_granularity": "per_tensor"},
    "no mean": {"smooth_k": False, "window": (40, 3)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_dense_plan_serves_every_smaller_call_and_allocates_nothing(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_sage(SageShape(3, 150, 200, 4, 2, 64, False), device=device, **OPTIONS[name]).with_workspace()
    assert plan.workspace is not None
    for batch, q_len, k_len in ((1, 150, 200), (3, 20, 130), (2, 129, 1)):
        q, k, v, *_ = W(q_lens=(q_len,) * batch, k_lens=(k_len,) * batch, num_kv_heads=2).build(device)
        expected = sage_attention(q, k, v, return_lse=True, **OPTIONS[name])
        plan.workspace._buffer.fill_(0xFF)
        kv = plan.quantize_kv(k, v)
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan, device=device)
        with monkeypatch.context() as patch:
            for function in ("empty", "zeros", "empty_like"):
                patch.setattr(torch, function, None)
            plan.attend(q, kv, out=out, lse=lse)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_a_ragged_plan_takes_lengths_with_each_call(device: str) -> None:
    shape = SageShape(5, 200, 300, 2, 1, 64, True)
    plan = plan_sage(shape, device=device).with_workspace()
    for q_lens, k_lens in (((70, 0, 7), (1, 130, 80)), ((5,), (300,)), ((1, 2, 3, 4, 5), (9, 8, 7, 6, 0))):
        q, k, v, starts_q, starts_k = W(q_lens=q_lens, k_lens=k_lens, ragged=True).build(device)
        kv = plan.quantize_kv(k, v, cu_seqlens_k=starts_k)
        expected = sage_attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
        assert torch.equal(plan.attend(q, kv, cu_seqlens_q=starts_q), expected)
    with pytest.raises(ValueError, match="cu_seqlens_q must be given"):
        plan.attend(q, kv)


def test_plans_share_a_workspace_and_say_what_they_need(device: str) -> None:
    q, k, v, *_ = W().build(device)
    plans = [plan_sage(q, k, **options) for options in OPTIONS.values()]
    workspace = Workspace(max(plan.workspace_bytes() for plan in plans), device)
    for plan, options in zip(plans, OPTIONS.values(), strict=True):
        shared = plan.with_workspace(workspace)
        assert torch.equal(shared.attend(q, shared.quantize_kv(k, v)), sage_attention(q, k, v, **options))
    with pytest.raises(ValueError, match=f"workspace must have at least {plans[0].workspace_bytes()} bytes"):
        _ = plans[0].with_workspace(Workspace(64, device)).launches


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_are_those_that_calls_launch(name: str, ragged: bool) -> None:
    q, k, v, starts_q, starts_k = W(ragged=ragged).build()
    recorder = LaunchRecorder("gfx950")
    with executing(recorder):
        plan = plan_sage(q, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **OPTIONS[name])
        kv = plan.quantize_kv(k, v)
        for lse in (False, True):
            plan.attend(q, kv, return_lse=lse)
    listed = [(launch.kernel, launch.constexprs, launch.options) for launch in plan.kernels()]
    seen = [(launch.kernel, launch.constexprs, launch.options) for launch in recorder.launches]
    assert all(launch in listed for launch in seen)
    assert all(launch in seen for launch in listed)


def test_a_planned_call_enters_few_python_functions() -> None:
    """Beside the launches themselves, whose cost is the executor's."""
    q, k, v, *_ = W().build()
    with executing(LaunchRecorder("gfx942")):
        plan = plan_sage(q, k).with_workspace()
        kv = plan.quantize_kv(k, v)
        out = torch.empty_like(q)
        assert len(functions_entered(lambda: plan.attend(q, kv, out=out))) <= 26
        assert len(functions_entered(lambda: plan.quantize_kv(k, v))) <= 36


def test_nothing_is_compiled_for_the_size_of_a_call() -> None:
    """Batches, lengths and numbers of tiles that Triton would make constants of or divide by 16."""
    with compile_for("gfx942") as artifacts:
        plan = plan_sage(SageShape(64, 300, 300, 2, 2, 64, True), device="cpu")
        for lens in ((1,), (16,) * 16, (7, 20, 1)):
            q, k, v, starts_q, starts_k = W(q_lens=lens, k_lens=lens, num_kv_heads=2, gqa_ratio=1,
                                            ragged=True).build()  # fmt: skip
            kv = plan.quantize_kv(k, v, cu_seqlens_k=starts_k)
            plan.attend(q, kv, cu_seqlens_q=starts_q, return_lse=True)
    names = {artifact.name for artifact in artifacts}
    assert len(names) == 6
    for name in names:
        assert len({a.assembly for a in artifacts if a.name == name}) == 1, name


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
def test_a_captured_plan_replays_with_other_lengths_and_values(ragged: bool) -> None:
    lens = (70, 7, 73) if ragged else (150,)
    q, k, v, starts_q, starts_k = W(q_lens=lens, k_lens=lens, ragged=ragged).build("cuda")
    plan = plan_sage(q, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, causal="bottom_right")
    plan = plan.with_workspace()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], device="cuda")
    plan.attend(q, plan.quantize_kv(k, v), out=out, lse=lse)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.attend(q, plan.quantize_kv(k, v), out=out, lse=lse)
    for starts in ((0, 70, 77, 150), (0, 1, 150, 150), (0, 0, 60, 150)):
        if starts_q is not None and starts_k is not None:
            starts_q.copy_(torch.tensor(starts))
            starts_k.copy_(torch.tensor(starts))
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        out.fill_(math.nan)
        graph.replay()
        expected = sage_attention(
            q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, causal="bottom_right", return_lse=True
        )
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])

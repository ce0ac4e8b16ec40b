"""Plans of sparse attention: one serves every call up to its size and allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import Workspace, compile_for, executing
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    RowsFormat,
    SparsePlan,
    plan_sparse,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.sparse_fp8.cases import SparseCase, SparseInputs
from narrowkv.testing.calls import LaunchRecorder, functions_entered

W = SparseCase.small
MOST_TOKENS, MOST_INDICES = 6, 300
LARGEST: dict[str, Any] = {"max_num_tokens": MOST_TOKENS, "max_indices": MOST_INDICES}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "16bit": ("bf16", {"mode": "16bit"}),
    "fused": ("packed584", {"mode": "fused"}),
    "prepass": ("split", {"mode": "prepass"}),
    "splits": ("row512", {"mode": "fused", "num_splits": 3}),
    "batch invariant": ("bf16", {"mode": "16bit", "batch_invariant": True}),
}
every_way = pytest.mark.parametrize("way", WAYS)


def _inputs(way: str, lens: tuple[int, ...], device: str = "cpu") -> SparseInputs:
    return W(
        layout=WAYS[way][0], prefix_lens=lens, extend_lens=(3,) * len(lens), num_qo_heads=8, pool_rows=64,
        extend_rows=16,
    ).build(device)  # fmt: skip


def _plan(inputs: SparseInputs, **options: Any) -> SparsePlan:
    assert inputs.prefix is not None
    assert inputs.extend is not None
    options = {"device": inputs.q.device, "has_sink": True, "return_lse": True, **options}
    return plan_sparse(num_qo_heads=8, prefix=inputs.prefix.format, extend=inputs.extend.format, **options)


def _unplanned(way: str, inputs: SparseInputs) -> Any:
    options: dict[str, Any] = dict(WAYS[way][1])
    mode = options.pop("mode")
    given = (inputs.q, inputs.prefix, inputs.extend)
    if options:
        return sparse_decode(*given, attn_sink=inputs.attn_sink, return_lse=True, **options)
    if mode == "16bit":
        return sparse_prefill(*given, attn_sink=inputs.attn_sink, return_lse=True)
    return sparse_prefill_fp8(*given, attn_sink=inputs.attn_sink, return_lse=True, mode=mode)


@every_way
def test_a_plan_serves_every_call_up_to_its_size_and_allocates_nothing(
    way: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(_inputs(way, (70, 0), device), **WAYS[way][1], **LARGEST)
    assert plan.workspace is not None
    for lens in ((70, 0), (9,), (5, 130, 64, 1, 0, 33)):
        inputs = _inputs(way, lens, device)
        expected = _unplanned(way, inputs)
        out = torch.full(inputs.q.shape, math.nan, dtype=inputs.q.dtype, device=device)
        lse = torch.full(inputs.q.shape[:2], math.nan, device=device)
        plan.workspace._buffer.fill_(0xFF)  # NaN in every type
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", None)
            got = plan.run(
                inputs.q, inputs.prefix, inputs.extend, attn_sink=inputs.attn_sink, out=out, lse=lse
            )
        assert got[0] is out
        assert got[1] is lse
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_plans_share_a_workspace(device: str) -> None:
    inputs = {way: _inputs(way, (70, 0, 9), device) for way in WAYS}
    sizes = {way: _plan(inputs[way], **WAYS[way][1], **LARGEST).workspace_bytes() for way in WAYS}
    assert sizes["prepass"] > sizes["fused"]
    workspace = Workspace(max(sizes.values()), device)
    for way, (_, options) in WAYS.items():
        plan = _plan(inputs[way], **options, **LARGEST, workspace=workspace)
        assert plan.workspace is workspace
        o, _ = plan.run(
            inputs[way].q, inputs[way].prefix, inputs[way].extend, attn_sink=inputs[way].attn_sink
        )
        assert torch.equal(o, _unplanned(way, inputs[way])[0])
    with pytest.raises(ValueError, match=f"workspace must have at least {sizes['prepass']} bytes"):
        _plan(inputs["prepass"], **WAYS["prepass"][1], **LARGEST, workspace=Workspace(64, device))


def test_splits_of_any_call_fit_the_workspace(device: str) -> None:
    """The number of splits is chosen by the call; what they leave must fit what the plan asked for."""
    for target in ("gfx942", "gfx950", "sm90", "cpu"):
        recorder = LaunchRecorder(target)
        with executing(recorder):
            for heads in (8, 64, 128):
                rows = RowsFormat("packed584", page_size=64, format="fp8_e4m3fn", negative_zero_free=True)
                plan = plan_sparse(
                    num_qo_heads=heads, prefix=rows, device="cpu", max_num_tokens=40, max_indices=10**6
                )
                room = plan._scratch[6].numel()
                pool = DSV4Rows.quantize(torch.zeros(64, 512), layout="packed584")
                for tokens in range(1, 41):
                    indptr = torch.arange(0, tokens * 2048 + 1, 2048, dtype=torch.int32)
                    source = KVSource(pool, indptr, torch.zeros(tokens * 2048, dtype=torch.int32))
                    recorder.clear()
                    plan.run(torch.zeros(tokens, heads, 512).bfloat16(), source)
                    splits = recorder.launches[0].grid[1] if len(recorder.launches) > 1 else 0
                    assert splits * tokens * heads <= room


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@every_way
def test_kernels_are_those_that_calls_launch(way: str, target: str) -> None:
    recorder = LaunchRecorder(target)
    with executing(recorder):
        plan = _plan(_inputs(way, (70, 0)), **WAYS[way][1])
        for lens in ((250,), (5, 130, 64, 1, 0, 33), (1,) * 80):
            inputs = _inputs(way, lens)
            plan.run(inputs.q, inputs.prefix, inputs.extend, attn_sink=inputs.attn_sink)
    listed = [(launch.kernel, launch.constexprs, launch.options) for launch in plan.kernels()]
    assert all((seen.kernel, seen.constexprs, seen.options) in listed for seen in recorder.launches)
    assert len(listed) <= 7


def test_a_planned_call_enters_few_python_functions() -> None:
    """Beside the launch itself, whose cost is the executor's."""
    with executing(LaunchRecorder("gfx942")):
        for way, most in (("16bit", 13), ("fused", 13), ("splits", 14)):
            inputs = _inputs(way, (70, 0, 9))
            plan = _plan(inputs, **WAYS[way][1], **LARGEST)
            out = torch.empty_like(inputs.q)

            def planned(plan: SparsePlan = plan, inputs: SparseInputs = inputs, out: Any = out) -> None:
                plan.run(inputs.q, inputs.prefix, inputs.extend, attn_sink=inputs.attn_sink, out=out)

            def unplanned(way: str = way, inputs: SparseInputs = inputs) -> None:
                _unplanned(way, inputs)

            assert len(functions_entered(planned)) <= most
            assert len(functions_entered(unplanned)) <= 75


@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_nothing_is_compiled_for_the_size_of_a_call(layout: str) -> None:
    """Numbers of tokens, indices, rows and splits that Triton would make constants of or divide by 16."""
    with compile_for("gfx950") as artifacts:
        for tokens, rows in ((1, 64), (16, 256), (7, 33)):
            inputs = W(layout=layout, prefix_lens=(16,) * tokens, pool_rows=rows, page_size=1).build()
            plan = plan_sparse(num_qo_heads=16, prefix=inputs.prefix.format, device="cpu", num_splits=2)  # type: ignore[union-attr]
            plan.run(inputs.q, inputs.prefix)
    for name in {artifact.name for artifact in artifacts}:
        assert len({a.assembly for a in artifacts if a.name == name}) == 1, name


REFUSED: dict[str, tuple[str, Callable[[SparsePlan, SparseInputs], Any]]] = {
    "more tokens": (
        "at most 6 tokens as planned, got 7",
        lambda plan, i: plan.run(*_of("16bit", (1,) * 7), attn_sink=i.attn_sink),
    ),
    "more indices": (
        "prefix.indices must have at most 300 as planned, got 301",
        lambda plan, i: plan.run(*_of("16bit", (301,)), attn_sink=i.attn_sink),
    ),
    "other rows": (
        "prefix.rows must be stored as planned",
        lambda plan, i: plan.run(*_of("fused", (9, 9)), attn_sink=i.attn_sink),
    ),
    "no second source": (
        "extend must be a KVSource as planned",
        lambda plan, i: plan.run(i.q, i.prefix, attn_sink=i.attn_sink),
    ),
    "no sink": ("attn_sink must be a tensor", lambda plan, i: plan.run(i.q, i.prefix, i.extend)),
    "another operation": (
        "plan must have mode fused or prepass", lambda plan, i: sparse_prefill_fp8(i.q, i.prefix, plan=plan),
    ),
    "a scale beside the plan": (
        "sm_scale must be None with a plan",
        lambda plan, i: sparse_prefill(i.q, i.prefix, i.extend, sm_scale=1.0, plan=plan),
    ),
    "one maximum": ("both be given or both be None", lambda plan, i: _plan(i, max_num_tokens=3)),
    "three heads": (
        "num_qo_heads must be one of",
        lambda plan, i: plan_sparse(num_qo_heads=3, prefix=RowsFormat("bf16"), device="cpu"),
    ),
    "FP8 rows to the wide kernel": (
        "must be a bf16 or fp16 tensor here",
        lambda plan, i: plan_sparse(
            num_qo_heads=8, prefix=RowsFormat("split", format="fp8_e4m3fn"), device="cpu", mode="16bit"
        ),
    ),
}  # fmt: skip


def _of(way: str, lens: tuple[int, ...]) -> tuple[Any, ...]:
    inputs = _inputs(way, lens)
    return inputs.q, inputs.prefix, inputs.extend


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_plan_is_not_for_is_refused(what: str) -> None:
    message, call = REFUSED[what]
    inputs = _inputs("16bit", (9, 9))
    plan = _plan(inputs, mode="16bit", **LARGEST)
    with pytest.raises(ValueError, match=message):
        call(plan, inputs)


@pytest.mark.gpu
@every_way
def test_a_captured_plan_replays_with_other_lists_rows_and_queries(way: str) -> None:
    inputs = _inputs(way, (40, 3, 33), "cuda")
    assert inputs.prefix is not None
    plan = _plan(inputs, **WAYS[way][1], **LARGEST)
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:2], device="cuda")
    given = (inputs.q, inputs.prefix, inputs.extend)
    plan.run(*given, attn_sink=inputs.attn_sink, out=out, lse=lse)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(*given, attn_sink=inputs.attn_sink, out=out, lse=lse)
    for lens in ((40, 3, 33), (0, 76, 0), (1, 0, 2)):
        indptr = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
        inputs.prefix.indptr.copy_(indptr)
        inputs.prefix.indices.copy_(inputs.prefix.indices.roll(5))
        inputs.q.copy_(torch.randn_like(inputs.q))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        expected = plan.run(*given, attn_sink=inputs.attn_sink)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])

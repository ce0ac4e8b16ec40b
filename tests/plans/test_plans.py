"""What every plan promises: one for all calls up to its size, shared memory, few kernels, little to do."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from planned_operations import (
    BY_NAME,
    CAPTURED,
    OF_MANY_SIZES,
    ONE_EACH,
    OPERATIONS,
    Arguments,
    Operation,
    mapped,
    same_bits,
    tensors_in,
)

from narrowkv.quant.accuracy import compare
from narrowkv.runtime.launch import Workspace, executing, recording
from narrowkv.testing.calls import LaunchRecorder, TorchOperations, functions_entered

pytestmark = pytest.mark.sampled

# What they run, others run too, and these take seconds.
SLOW = {"append, rope", "append, first", "append, fused, rope", "sage, no mean", "sparse, batch invariant"}
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=str)
one_of_each = pytest.mark.parametrize("operation", ONE_EACH, ids=str)
with_a_cache = pytest.mark.parametrize(
    "operation", [each for each in ONE_EACH if each.kind in ("decode", "prefill", "append")], ids=str
)


def results(arguments: Arguments) -> dict[str, torch.Tensor]:
    """Results to write into, which hold NaN."""
    q = arguments["q"]
    return {
        "out": torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device),
        "lse": torch.full(q.shape[:-1], math.nan, device=q.device),
    }


def check_results(operation: Operation, found: Any, expected: Any) -> None:
    """Compares `(o, lse)` as exactly as the operation's case allows."""
    o, lse = found
    expected_o, expected_lse = expected
    if operation.is_exact:
        assert torch.equal(o, expected_o)
        assert torch.equal(lse, expected_lse)
        return
    rows = torch.isfinite(expected_lse)
    assert torch.equal(torch.isfinite(lse), rows)
    assert compare(o, expected_o).relative_l1 <= operation.case.bound
    assert float((lse - expected_lse)[rows].abs().max()) <= operation.case.lse_bound


def check_call(operation: Operation, plan: Any, arguments: Arguments) -> None:
    """A planned call gives what is expected, and leaves its inputs as they must be."""
    wanted = mapped(arguments, torch.clone)
    expected = operation.expected(wanted)
    given = results(arguments)
    operation.prepare(plan, arguments)(**given)
    check_results(operation, given.values(), expected)
    assert same_bits(arguments, wanted)


# ---------------------------------------------------------------------------- sizes and memory


@pytest.mark.parametrize(
    "operation",
    [pytest.param(each, marks=[pytest.mark.slow] if each.name in SLOW else []) for each in OPERATIONS],
    ids=str,
)
def test_one_plan_from_sizes_serves_every_smaller_call(operation: Operation, device: str) -> None:
    """Outputs and scratch hold NaN before each call."""
    plan = operation.plan(device)
    for size in (*operation.sizes, operation.sizes[0]):
        if plan.workspace is not None:
            (memory,) = plan.workspace.carve([((plan.workspace.num_bytes,), torch.uint8)])
            memory.fill_(0xFF)
        check_call(operation, plan, operation.arguments(size, device))


@one_of_each
def test_a_larger_call_is_refused(operation: Operation) -> None:
    plan = operation.plan()
    for size in operation.larger:
        with pytest.raises(ValueError, match=operation.refusal):
            operation.prepare(plan, operation.arguments(size))()


@pytest.mark.parametrize("kinds", ["decode", "prefill and append", "sage", "sparse"])
def test_plans_share_a_workspace_and_say_what_they_need(kinds: str, device: str) -> None:
    operations = [each for each in OPERATIONS if each.kind in kinds and each.name not in SLOW]
    needed = [each.plan(device).workspace_bytes() for each in operations]
    assert max(needed) > min(needed) >= 0
    shared = Workspace(max(needed), device)
    plans = [each.plan(device, workspace=shared) for each in operations]
    planned = list(zip(operations, plans, strict=True))
    for operation, plan in (*planned, planned[0]):
        assert plan.workspace is shared
        check_call(operation, plan, operation.arguments(operation.sizes[1], device))
    largest = operations[needed.index(max(needed))]
    with pytest.raises(ValueError, match=f"workspace must have at least {max(needed)} bytes"):
        largest.plan(device, workspace=Workspace(max(needed) - 256, device))
    with pytest.raises(TypeError, match="workspace must be a Workspace"):
        largest.plan(device, workspace=7)


@with_a_cache
def test_plans_and_their_copies_are_equal_only_to_themselves(operation: Operation) -> None:
    plan, other = (operation.plan(workspace=Workspace(2**20, "cpu")) for _ in range(2))
    assert plan != other
    assert plan != "a plan"
    assert len({plan, other}) == 2
    for copied in (copy.copy(plan), copy.deepcopy(plan), replace(plan)):
        check_call(operation, copied, operation.arguments(operation.sizes[0]))
    assert copy.deepcopy(plan).workspace is not plan.workspace
    assert "workspace" not in repr(plan)


@with_a_cache
def test_a_plan_serves_every_layer_with_any_options(operation: Operation) -> None:
    plan, arguments = operation.plan(), operation.arguments(operation.sizes[0])
    cache = arguments["cache"]
    other = replace(cache, k_descale=2 * float(cache.k_descale or 1), v_descale=0.5)
    for layer, options in (
        (cache, {}), (other, {}), (cache, {"window_left": 9}), (other, {"sm_scale": -0.5}),
        (cache, {"logits_soft_cap": 2.0}), (other, {}),
    ):  # fmt: skip
        check_call(operation, plan, {**arguments, "cache": layer, **options})


@one_of_each
def test_what_is_gone_is_not_kept_by_plans(operation: Operation) -> None:
    plan, arguments = operation.plan(), operation.arguments(operation.sizes[1])
    for made in (plan, None):
        operation.prepare(made, arguments)()
    held = [each for each in arguments.values() if is_dataclass(each)]
    gone = [weakref.ref(each) for each in (*held, *tensors_in(arguments))]
    held.clear()
    arguments.clear()
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


# ---------------------------------------------------------------------------- kernels and host work


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("operation", OF_MANY_SIZES, ids=str)
def test_every_launch_is_one_that_the_plan_lists(operation: Operation, target: str) -> None:
    with executing(LaunchRecorder(target)) as recorder:
        plan = operation.plan()
        for arguments in operation.calls():
            for outputs in operation.outputs_of_kernels:
                operation.prepare(plan, arguments)(**outputs)
        listed = plan.kernels(*([arguments["cache"]] if "cache" in arguments else []))
    assert len(listed) <= operation.most_kernels
    listed = {(bound.kernel, tuple(bound.constexprs.values()), bound.options) for bound in listed}
    seen = {launch.specialisation for launch in recorder.launches}
    assert seen == listed if operation.reaches_all_kernels else set() < seen <= listed


@pytest.mark.parametrize("target", ["gfx942", "sm90"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("operation", [each for each in ONE_EACH if each.kind != "sparse"], ids=str)
def test_a_planned_call_enters_few_python_functions(operation: Operation, given: bool, target: str) -> None:
    """Beside the launches themselves, whose cost is the executor's."""
    arguments = operation.arguments(operation.sizes[0])
    outputs = results(arguments) if given else {}
    with executing(LaunchRecorder(target)) as recorder:
        call = operation.prepare(operation.plan(), arguments)
        recorder.clear()
        entered = functions_entered(lambda: call(**outputs))
    assert 2 <= len(recorder.launches) <= 4, "two calls"
    assert len(entered) <= operation.most_functions, entered


def test_sage_attention_without_a_plan_enters_no_more_functions_than_a_planned_call() -> None:
    """It finds its plan and its prepared call in one look-up, and takes one block for all between kernels."""
    operation = BY_NAME["sage, int8"]
    arguments = operation.arguments(operation.sizes[0])
    with executing(LaunchRecorder("gfx942")):
        plan = operation.plan()
        q, k, v = (arguments[name] for name in ("q", "k", "v"))
        planned = functions_entered(lambda: plan.run(q, k, v))
        call = operation.prepare(None, arguments)
        entered = functions_entered(lambda: call())
    assert len(entered) <= len(planned), entered


def test_quantising_keys_and_values_enters_few_python_functions() -> None:
    operation = BY_NAME["sage, int8"]
    arguments = operation.arguments(operation.sizes[0])
    with executing(LaunchRecorder("gfx942")):
        plan = operation.plan()
        assert len(functions_entered(lambda: plan.quantize_kv(arguments["k"], arguments["v"]))) <= 12


def test_a_ragged_plan_from_sizes_asks_for_lengths() -> None:
    operation = BY_NAME["sage, ragged"]
    q, k, v, _, starts = operation.arguments(operation.sizes[0]).values()
    plan = operation.plan()
    with pytest.raises(ValueError, match="cu_seqlens_q must be given"):
        plan.attend(q, plan.quantize_kv(k, v, cu_seqlens_k=starts))


@pytest.mark.parametrize("target", ["gfx942", "sm90"])
@every_operation
def test_a_planned_call_allocates_nothing_but_outputs(operation: Operation, target: str) -> None:
    arguments = operation.arguments(operation.sizes[0])
    with executing(LaunchRecorder(target)):
        plan = operation.plan()
        # The operation itself would go through its operator.
        call = operation.prepare(plan, arguments)
        if operation.kind != "sage":
            call = partial(plan.run, **arguments)
        for outputs, made in ((results(arguments), 0), ({"return_lse": True}, 2)):
            if operation.kind == "sparse":
                outputs.pop("return_lse", None)  # its plan says so
            call(**outputs)  # the first call prepares its launches
            with TorchOperations() as seen:
                call(**outputs)
            made_by = [
                name for name in seen.names if name not in ("aten.transpose.int", "aten.zero_.default")
            ]
            assert made_by == ["aten.empty.memory_format"] * made


@pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if each.kind in ("sage", "sparse")], ids=str
)
def test_nothing_is_compiled_for_the_size_of_a_call(operation: Operation) -> None:
    """Numbers of sequences and tokens that Triton would make constants of or divide by 16."""
    with recording("gfx942") as recorder:
        plan = operation.plan()
        for size in operation.sizes:
            operation.prepare(plan, operation.arguments(size))(**operation.outputs_of_kernels[-1])
    kernels = [
        (bound.kernel, tuple(bound.constexprs.values()), bound.options)
        for bound, _ in recorder.found.values()
    ]
    assert len(set(kernels)) == len(kernels) > 0


# ---------------------------------------------------------------------------- results


def _overlapping(out: torch.Tensor, lse: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "out must not overlap itself": {"out": out[:1].expand(out.shape)},
        "lse must not overlap itself": {"lse": lse[:1].expand(lse.shape)},
        r"must not share memory with (lse|o|out)\b": {
            "out": out, "lse": out.view(-1).view(torch.float32)[: lse.numel()].view(lse.shape)
        },
    }  # fmt: skip


@one_of_each
def test_results_overlap_neither_themselves_nor_each_other(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    with executing(LaunchRecorder("gfx942")) as recorder:
        call = operation.prepare(operation.plan(), arguments)
        for _ in range(2):
            recorder.clear()
            for message, given in _overlapping(**results(arguments)).items():
                with pytest.raises(ValueError, match=message):
                    call(**given)
            assert not recorder.launches
            call(**results(arguments))  # accepts the same strides where they are apart


@pytest.mark.parametrize("operation", [each for each in ONE_EACH if each.kind != "sage"], ids=str)
def test_results_do_not_overlap_an_input(operation: Operation) -> None:
    """In a second call: the first one, whose results are apart, has the same shapes and strides."""
    arena = torch.zeros(1 << 18, dtype=torch.uint8)
    used = 0

    def place(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal used
        used += -used % 256
        view = arena[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
        used += tensor.nbytes
        return view

    if operation.kind != "sparse":
        operation = replace(operation, case=replace(operation.case, granularity="token_head"))
    arguments = operation.arguments(operation.sizes[0])
    if operation.kind != "sparse":
        arguments["sinks"] = torch.zeros(arguments["q"].shape[1])
    arguments = mapped(arguments, place)
    inputs = tensors_in(arguments)
    assert len(inputs) >= 7
    apart = results(arguments)
    with executing(LaunchRecorder("gfx942")) as recorder:
        call = operation.prepare(operation.plan(), arguments)
        call(**apart)
        recorder.clear()
        for tensor, (name, result) in itertools.product(inputs, apart.items()):
            begin = tensor.data_ptr() - arena.data_ptr()
            on_input = arena[begin : begin + result.nbytes].view(result.dtype).view(result.shape)
            with pytest.raises(ValueError, match=rf"{name} must not share memory with"):
                call(**{**apart, name: on_input})
        assert not recorder.launches


# ---------------------------------------------------------------------------- graphs


@pytest.mark.gpu
@pytest.mark.parametrize("operation", CAPTURED, ids=str)
def test_a_captured_graph_replays_with_other_lengths_pages_and_values(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0], "cuda")
    plan, given = operation.plan("cuda"), results(arguments)

    def call(into: dict[str, torch.Tensor]) -> None:
        operation.prepare(plan, arguments)(**into)

    call(given)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(given)
    for turn in range(3):
        operation.change(arguments, turn)
        before = mapped(arguments, torch.clone)
        eager = results(arguments)
        call(eager)
        torch.cuda.synchronize()
        stored = mapped(arguments, torch.clone)
        for tensor, old in zip(tensors_in(arguments), tensors_in(before), strict=True):
            tensor.view(torch.uint8).copy_(old.view(torch.uint8))
        for result in given.values():
            result.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(given, eager)
        assert same_bits(arguments, stored)
        if operation.kind != "append":
            check_results(operation, given.values(), operation.expected(before))

"""Runs a case and compares it with its reference: the results, or for tests an assertion."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from narrowkv.quant.accuracy import ErrorReport, compare, max_abs, relative_l1
from narrowkv.runtime.launch import executing
from narrowkv.testing.cases import Case, Inputs, Results
from narrowkv.testing.emulation import EmulatedLaunch, EmulateExecutor
from narrowkv.testing.operations import sample
from narrowkv.testing.places import find_place

__all__ = [
    "CaseResult", "CaseTask", "Sample", "SampleResult", "assert_agrees", "assert_right", "check",
    "check_sample", "reason_of", "run_case", "run_task",
]  # fmt: skip


@dataclass(frozen=True)
class CaseResult:
    """How a case went.

    Attributes:
        case: the line that repeats it.
        error: of `o` against the fp32 reference; None if the call was refused or raised.
        lse_error: largest difference of `lse`.
        passed: within both bounds, and nothing stored wrongly.
        detail: why not.
        bound: of the relative L1 error.
        place: where it ran: "cpu", "gpu" or an emulated target.
        total: error of `o` against attention without quantisation; None if the operation does not quantise.
    """

    case: str
    error: ErrorReport | None
    lse_error: float
    passed: bool
    detail: str = ""
    bound: float = math.nan
    place: str = ""
    total: ErrorReport | None = None


def check(
    case: Case, inputs: Inputs, results: Results | None = None, *, bound: float | None = None
) -> CaseResult:
    """Compares the results of a call, which it makes if it is given none, with the reference.

    If figures were published for the case, the error against attention without quantisation must reach them.

    A few outputs can be unlucky enough that rounding the exact result to the output's dtype alone exceeds
    the bound; then the bound is that rounding and a tenth of the bound.

    Args:
        case: says the bounds.
        inputs: its tensors.
        results: `(o, lse)` of the call.
        bound: of the relative L1 error, instead of the case's.
    """
    o, lse = results or inputs.call()
    expected, expected_lse = inputs.reference()
    bound = case.bound if bound is None else bound
    bound = max(bound, relative_l1(expected.to(o.dtype), expected) + bound / 10)
    error, lse_error = compare(o, expected), max_abs(lse, expected_lse)
    problems = []
    if not error.passes(relative_l1=bound):
        problems.append(f"{error} (bound {bound:.3g})")
    if not lse_error <= (lse_bound := case.lse_bound + inputs.lse_slack()):
        problems.append(f"lse differs by {lse_error:.3g} (bound {lse_bound:.3g})")
    if stored := inputs.wrong_bytes():
        problems.append(stored)
    exact, goal = inputs.exact(), case.published
    total = None if exact is None else compare(o, exact)
    if total is not None and goal is not None and not total.passes(cosine=goal[0], relative_l1=goal[1]):
        problems.append(f"{total} is worse than published (cosine {goal[0]}, relative L1 {goal[1]})")
    return CaseResult(str(case), error, lse_error, not problems, "; ".join(problems), bound, total=total)


def run_case(
    case: Case,
    device: str = "cpu",
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> CaseResult:
    """Makes a case's tensors on a device, runs it inside a context, and checks it."""
    inputs = case.inputs(device)
    with context():
        results = inputs.call()
    return check(case, inputs, results)


@dataclass(frozen=True)
class Sample:
    """How much of a call was emulated.

    Attributes:
        workgroups, launched: workgroups that ran, of those that the call launches.
        rows, all_rows: rows of the output that they finished and that were compared, of all.
        wave_instructions: instructions that their waves executed.
        seconds: how long it took, the reference included.
    """

    workgroups: int
    launched: int
    rows: int
    all_rows: int
    wave_instructions: int
    seconds: float


@dataclass(frozen=True)
class SampleResult:
    """How a sample of a call's workgroups went.

    Attributes:
        error: of the rows that they finished against the fp32 reference.
        sample: how much was emulated.
        detail: what is wrong; empty if nothing is.
        runs: the launches.
    """

    error: ErrorReport
    sample: Sample
    detail: str
    runs: tuple[EmulatedLaunch, ...]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among some values and in their attributes."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif is_dataclass(value):
            yield from _tensors(getattr(value, field.name) for field in fields(value))


def check_sample(target: str, inputs: Inputs, call: Callable[[], torch.Tensor], bound: float) -> SampleResult:
    """Runs a sample of a call's workgroups as a target's machine code and compares the rows that they own.

    Bounds, alignment and uninitialised values are checked in every workgroup of it; the tensors of `inputs`
    are read-only, but for an append's.

    Args:
        target: "gfx942" or "gfx950".
        inputs: of the call, on the CPU; they have the reference.
        call: gives `o`.
        bound: of the relative L1 error.
    """
    begun = time.perf_counter()
    appends = bool(getattr(inputs, "new", ()))
    read = () if appends else _tensors(vars(inputs).values())
    executor = EmulateExecutor(target, workgroups=sample, checked=0, inputs=read)
    with executing(executor):
        o = call()
    stored = executor.written(o)
    complete = stored.all(-1)
    expected, _ = inputs.reference()
    error = compare(o[complete], expected[complete])
    problems = [] if error.passes(relative_l1=bound) else [f"{error} (bound {bound:g})"]
    if not bool(complete.any()):
        problems = ["the sample finished no row of the output"]
    elif not torch.equal(complete, stored.any(-1)):
        problems.append("the sample left rows of the output half written")
    taken = Sample(
        workgroups=sum(run.result.workgroups for run in executor.runs),
        launched=sum(run.launched for run in executor.runs),
        rows=int(complete.sum()),
        all_rows=complete.numel(),
        wave_instructions=round(sum(run.result.counts.wave_instructions for run in executor.runs)),
        seconds=time.perf_counter() - begun,
    )
    return SampleResult(error, taken, "; ".join(problems), tuple(executor.runs))


def reason_of(error: BaseException) -> str:
    """The class of an error, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True)
class CaseTask:
    """A case, where to run it, and what an emulated place watches."""

    case: Case
    place: str
    detect_races: bool = False
    detect_hazards: bool = False


def run_task(task: CaseTask) -> CaseResult:
    """Runs one case; what goes wrong, a race too, is its result."""
    try:
        place = find_place(task.place, detect_races=task.detect_races, detect_hazards=task.detect_hazards)
        return replace(run_case(task.case, place.device, place.context), place=task.place)
    except Exception as error:
        return CaseResult(str(task.case), None, math.nan, False, reason_of(error), place=task.place)


def assert_agrees(
    results: Any, expected: Any, *, bound: float = 0.002, lse_bound: float = 1e-3, detail: object = ""
) -> None:
    """Fails unless every number is finite and within the bounds.

    Args:
        results: `o`, or `(o, lse)`.
        expected: the same of the reference.
        bound: of the relative L1 error of `o`.
        lse_bound: of the largest difference of `lse`; equal infinities agree.
        detail: what a failure says besides the errors.

    Raises:
        AssertionError: they differ by more, or a value of `o` is not finite.
    """
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    error = compare(results[0], expected[0])
    assert error.passes(relative_l1=bound), f"{error} (bound {bound:.3g}) {detail}"
    for lse, expected_lse in zip(results[1:], expected[1:], strict=True):
        difference = max_abs(lse, expected_lse)
        assert difference <= lse_bound, f"lse differs by {difference:.3g} (bound {lse_bound:.3g}) {detail}"


def assert_right(
    case: Case, device: str = "cpu", *, inputs: Any = None, plan: Any = None, bound: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Calls a case's operation and compares its results, and the bytes that it stored, with the reference.

    Args:
        case: says the bounds.
        device: of the tensors.
        inputs: the case's tensors, changed; without them, as the case makes them.
        plan: of the call; without one, what the case asks for.
        bound: of the relative L1 error, instead of the case's.
        **options: of the call, besides those of the case.

    Returns:
        `(o, lse)`.

    Raises:
        AssertionError: a number or a stored byte is wrong.
    """
    inputs = case.inputs(device) if inputs is None else inputs
    inputs.options.update(options)
    results: tuple[torch.Tensor, torch.Tensor] = inputs.call(*([] if plan is None else [plan]))
    bound = case.bound if bound is None else bound
    assert_agrees(results, inputs.reference(), bound=bound, lse_bound=case.lse_bound, detail=case)
    assert not (wrong := inputs.wrong_bytes()), f"{wrong} {case}"
    return results

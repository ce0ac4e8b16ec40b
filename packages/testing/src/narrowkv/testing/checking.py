"""Runs a case and compares it with its reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from narrowkv.quant.accuracy import ErrorReport, compare, max_abs, relative_l1
from narrowkv.runtime.cases import Case, Inputs, Results


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
    """

    case: str
    error: ErrorReport | None
    lse_error: float
    passed: bool
    detail: str = ""
    bound: float = math.nan
    place: str = ""


def check(
    case: Case, inputs: Inputs, results: Results | None = None, *, bound: float | None = None
) -> CaseResult:
    """Compares the results of a call, which it makes if it is given none, with the reference.

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
    if not lse_error <= case.lse_bound:
        problems.append(f"lse differs by {lse_error:.3g} (bound {case.lse_bound:g})")
    if stored := inputs.wrong_bytes():
        problems.append(stored)
    return CaseResult(str(case), error, lse_error, not problems, "; ".join(problems), bound)


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

"""`narrowkv validate sage`: what precision, granularity and smoothing cost, beside published figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from narrowkv.cli.cases import LSE_BOUND
from narrowkv.cli.contracts import BOUND_FP8_P as BOUND
from narrowkv.cli.environment import versions
from narrowkv.cli.places import find_place, find_places
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sage.cases import SageCase, build
from narrowkv.cli.sheet import Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.quant.accuracy import ErrorReport, compare, max_abs
from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.testing.records import jsonable

PUBLISHED: dict[str, tuple[float, float, float]] = {
    "per_thread": (0.9945, 0.062, 0.031),
    "per_block": (0.980, 0.149, 0.074),
    "per_tensor": (0.972, 0.180, 0.087),
}
"""Cosine, relative L1 and RMSE of the published method: INT4 Q and K with both means taken out, on a model's
own activations. RMSE is in units of that model's output, so it is shown and not compared."""

_SMOOTHINGS = ((False, False), (True, False), (True, True))


def sweep(*, full: bool, seed: int) -> list[SageCase]:
    """Every precision, granularity and smoothing where channels have offsets; all data when `full`."""
    data = ("offset", "outlier", "gaussian") if full else ("offset",)
    return [
        SageCase(qk, granularity, smooth_k, smooth_q, data=kind, seed=seed)
        for kind, qk, granularity, (smooth_k, smooth_q) in product(
            data, ("int8", "int4", "fp8"), SAGE_GRANULARITIES, _SMOOTHINGS
        )
    ]


@dataclass(frozen=True)
class SageResult:
    """How a case went.

    Attributes:
        case: what was asked.
        place: where it ran.
        total: of `o` against attention that quantises nothing; None if the call broke.
        kernel_l1: relative L1 of `o` against fp32 over the stored numbers.
        lse_error: largest difference of `lse` from that.
        passed: kernel error and lse within their bounds and, where there are published figures, no worse.
        detail: why not.
    """

    case: SageCase
    place: str
    total: ErrorReport | None = None
    kernel_l1: float = float("nan")
    lse_error: float = float("nan")
    passed: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Task:
    """A case, where to run it, and whether to watch LDS for races there."""

    case: SageCase
    place: str
    detect_races: bool = False
    detect_hazards: bool = False


def published(case: SageCase) -> tuple[float, float, float] | None:
    """The figures that a case answers to, if any."""
    method = case.qk == "int4" and case.smooth_k and case.smooth_q and case.data == "offset"
    return PUBLISHED.get(case.granularity) if method else None


def run_task(task: Task) -> SageResult:
    """Runs one case; what goes wrong is its result."""
    result = SageResult(task.case, task.place)
    try:
        place = find_place(task.place, detect_races=task.detect_races, detect_hazards=task.detect_hazards)
        call = build(task.case, place.device)
        with place.context():
            o, lse = call.call()
            expected, expected_lse = call.reference()
        kernel, total, lse_error = compare(o, expected), compare(o, call.exact()), max_abs(lse, expected_lse)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return replace(result, detail=f"{type(error).__name__}: {lines[0] if lines else ''}")
    problems = []
    if not kernel.passes(relative_l1=BOUND):
        problems.append(f"kernel error {kernel} (bound {BOUND:g})")
    if not lse_error <= (bound := call.lse_bound()):
        problems.append(f"lse differs by {lse_error:.3g} (bound {bound:.3g})")
    goal = published(task.case)
    if goal is not None and not total.passes(cosine=goal[0], relative_l1=goal[1]):
        problems.append(f"{total} is worse than published (cosine {goal[0]}, relative L1 {goal[1]})")
    return replace(
        result, total=total, kernel_l1=kernel.relative_l1, lse_error=lse_error, passed=not problems,
        detail="; ".join(problems),
    )  # fmt: skip


def validate_sage(
    cases: Sequence[SageCase],
    report: Report,
    *,
    on: Sequence[str] | None,
    jobs: int,
    seed: int,
    detect_races: bool = False,
    detect_hazards: bool = False,
) -> ExitCode:
    """Runs cases at every place and shows cosine, relative L1 and RMSE; Ctrl-C keeps what was finished."""
    places = tuple(find_places(on, detect_races=detect_races, detect_hazards=detect_hazards))
    tasks = [Task(case, place.name, detect_races, detect_hazards) for place in places for case in cases]
    found: dict[Task, SageResult] = {}

    def take(task: Task, result: SageResult) -> str:
        found[task] = result
        return "" if result.passed else f"failed: {result.case}"

    interrupted = run_all(report, tasks, run_task, SageResult, take, jobs=jobs)
    results = [found[task] for task in tasks if task in found]
    report.say(
        f"sage_attention against attention that quantises nothing, {'; '.join(p.description for p in places)}"
    )
    report.say("figures: cosine / relative L1 / RMSE, by what was taken out of K and Q first")
    for place in places:
        for data in dict.fromkeys(case.data for case in cases):
            shown = [r for r in results if r.place == place.name and r.case.data == data]
            report.say(f"\n{place.name}, data {data}")
            report.show(_table(shown))
    failures = [result for result in results if not result.passed]
    for result in failures:
        report.line(f"FAILED {result.place} {result.case}: {result.detail}", "bold red")
    colour = "bold red" if failures else "green"
    report.say(
        f"[{colour}]{len(results) - len(failures)} of {len(results)} cases pass[/] "
        f"(kernel error <= {BOUND:g}, lse within {LSE_BOUND:g}, no worse than published)"
    )
    body = {
        "operation": "sage_attention",
        "ran_on": "; ".join(place.description for place in places),
        "places": [place.name for place in places],
        "detect_races": detect_races,
        "detect_hazards": detect_hazards,
        "seed": seed,
        "versions": versions(),
        "bounds": {"kernel_relative_l1": BOUND, "lse": LSE_BOUND},
        "published": PUBLISHED,
        "planned": len(tasks),
        "passed": len(results) - len(failures),
        "cases": (records := [jsonable(result) for result in results]),
    }
    code = ExitCode.NUMERICAL if failures else ExitCode.OK
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=partial(_plot, results))


def _plot(results: Sequence[SageResult], path: Path) -> None:
    """Every case's error against attention that quantises nothing."""
    from narrowkv.cli.plot import plot_dots

    dots = [
        (f"{r.case.qk}, {r.case.granularity}, {r.case.data}", f"mean of {r.case.smoothing} out, {r.place}",
         r.total.relative_l1)
        for r in results
        if r.total is not None
    ]  # fmt: skip
    plot_dots(dots, path, title="sage_attention against fp32, nothing quantised", label="relative L1 error")


def _table(results: Sequence[SageResult]) -> Sheet:
    """Figures by precision and granularity, a column for each smoothing."""
    found = {(r.case.qk, r.case.granularity, r.case.smoothing): r for r in results}
    smoothings = list(dict.fromkeys(r.case.smoothing for r in results))
    means = [f"mean of {s} out" for s in smoothings]
    sheet = Sheet([*keys("Q and K", "granularity"), *numbers(*means, "published", "kernel", "lse")])
    for qk, granularity in dict.fromkeys((r.case.qk, r.case.granularity) for r in results):
        row = [found.get((qk, granularity, s)) for s in smoothings]
        ran = [r for r in row if r is not None and r.total is not None]
        cells = ["-" if r is None or r.total is None else _figures(r.total) for r in row]
        goal = next((g for r in ran if (g := published(r.case)) is not None), None)
        sheet.add(
            qk, granularity, *cells, "" if goal is None else f"{goal[0]:.4f} / {goal[1]:.3f} / {goal[2]:.3f}",
            f"{max((r.kernel_l1 for r in ran), default=float('nan')):.4f}",
            f"{max((r.lse_error for r in ran), default=float('nan')):.1e}",
            style="" if all(r is None or r.passed for r in row) else "bold red",
        )  # fmt: skip
    return sheet


def _figures(error: ErrorReport) -> str:
    return f"{error.cosine:.4f} / {error.relative_l1:.3f} / {error.rmse:.3f}"

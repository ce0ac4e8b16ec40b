"""`narrowkv validate sage`: what precision, granularity and smoothing cost, beside published figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from narrowkv.cli.environment import versions
from narrowkv.cli.places import find_place, find_places
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sheet import Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.quant.accuracy import ErrorReport
from narrowkv.sage.cases import BOUND, LSE_BOUND, PUBLISHED, SageCase
from narrowkv.testing.checking import SageResult, check_sage
from narrowkv.testing.records import jsonable

Found = tuple[SageCase, SageResult]


@dataclass(frozen=True)
class Task:
    """A case, where to run it, and whether to watch LDS for races there."""

    case: SageCase
    place: str
    detect_races: bool = False
    detect_hazards: bool = False


def run_task(task: Task) -> SageResult:
    """Runs one case; what goes wrong is its result."""
    try:
        place = find_place(task.place, detect_races=task.detect_races, detect_hazards=task.detect_hazards)
        return replace(check_sage(task.case, place.device, place.context), place=task.place)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return SageResult(task.place, detail=f"{type(error).__name__}: {lines[0] if lines else ''}")


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
        return "" if result.passed else f"failed: {task.case}"

    interrupted = run_all(report, tasks, run_task, SageResult, take, jobs=jobs)
    results = [(task.case, found[task]) for task in tasks if task in found]
    report.say(
        f"sage_attention against attention that quantises nothing, {'; '.join(p.description for p in places)}"
    )
    report.say("figures: cosine / relative L1 / RMSE, by what was taken out of K and Q first")
    for place in places:
        for data in dict.fromkeys(case.data for case in cases):
            shown = [(c, r) for c, r in results if r.place == place.name and c.data == data]
            report.say(f"\n{place.name}, data {data}")
            report.show(_table(shown))
    failures = [(case, result) for case, result in results if not result.passed]
    for case, result in failures:
        report.line(f"FAILED {result.place} {case}: {result.detail}", "bold red")
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
        "cases": (records := [{"case": str(case), **jsonable(result)} for case, result in results]),
    }
    code = ExitCode.NUMERICAL if failures else ExitCode.OK
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=partial(_plot, results))


def _plot(results: Sequence[Found], path: Path) -> None:
    """Every case's error against attention that quantises nothing."""
    from narrowkv.cli.plot import plot_dots

    dots = [
        (f"{c.qk_dtype}, {c.granularity}, {c.data}", f"mean of {c.smoothing} out, {r.place}",
         r.total.relative_l1)
        for c, r in results
        if r.total is not None
    ]  # fmt: skip
    plot_dots(dots, path, title="sage_attention against fp32, nothing quantised", label="relative L1 error")


def _table(results: Sequence[Found]) -> Sheet:
    """Figures by precision and granularity, a column for each smoothing."""
    found = {(c.qk_dtype, c.granularity, c.smoothing): (c, r) for c, r in results}
    smoothings = list(dict.fromkeys(c.smoothing for c, _ in results))
    means = [f"mean of {s} out" for s in smoothings]
    sheet = Sheet([*keys("Q and K", "granularity"), *numbers(*means, "published", "kernel", "lse")])
    for qk, granularity in dict.fromkeys((c.qk_dtype, c.granularity) for c, _ in results):
        row = [found.get((qk, granularity, s)) for s in smoothings]
        ran = [r for _, r in filter(None, row) if r.total is not None]
        cells = ["-" if one is None or one[1].total is None else _figures(one[1].total) for one in row]
        goal = next((g for c, _ in filter(None, row) if (g := c.published) is not None), None)
        sheet.add(
            qk, granularity, *cells, "" if goal is None else f"{goal[0]:.4f} / {goal[1]:.3f} / {goal[2]:.3f}",
            f"{max((r.kernel_l1 for r in ran), default=float('nan')):.4f}",
            f"{max((r.lse_error for r in ran), default=float('nan')):.1e}",
            style="" if all(one is None or one[1].passed for one in row) else "bold red",
        )  # fmt: skip
    return sheet


def _figures(error: ErrorReport) -> str:
    return f"{error.cosine:.4f} / {error.relative_l1:.3f} / {error.rmse:.3f}"

"""`narrowkv validate`: cases of an operation against its reference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from narrowkv.attn_decode.cases import LSE_BOUND
from narrowkv.cli.cases import DECODE, Kind
from narrowkv.cli.environment import versions
from narrowkv.cli.places import Place, find_place, find_places
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sheet import Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.runtime.cases import Case
from narrowkv.testing.checking import CaseResult, run_case
from narrowkv.testing.records import jsonable

_WORST_SHOWN = 5
_FAILURES_SHOWN = 20


@dataclass(frozen=True)
class Task:
    """A case, where to run it, and whether to watch LDS for races there."""

    case: Case
    place: str
    detect_races: bool = False
    detect_hazards: bool = False


def run_task(task: Task) -> CaseResult:
    """Runs one case; what goes wrong, a race too, is its result."""
    try:
        place = find_place(task.place, detect_races=task.detect_races, detect_hazards=task.detect_hazards)
        return run_case(task.case, place.device, place.context)
    except Exception as error:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return CaseResult(str(task.case), None, float("nan"), False, text)


@dataclass(frozen=True)
class Setting:
    """What the cases of a run have in common.

    Attributes:
        places: where they ran.
        default: the place that a command without --on takes.
        detect_races: whether LDS was watched.
        detect_hazards: whether waits and wait states were, too.
        kind: the operation.
    """

    places: tuple[Place, ...]
    default: str
    detect_races: bool = False
    detect_hazards: bool = False
    kind: Kind = DECODE

    def repro(self, result: CaseResult) -> str:
        """The command that repeats a case where it ran."""
        where = "" if result.place in ("", self.default) else f" --on {result.place}"
        races = " --detect-races" if self.detect_races else ""
        races += " --detect-hazards" if self.detect_hazards else ""
        operation = f" {self.kind.argument}" if self.kind.argument else ""
        return f"narrowkv validate{operation}{where}{races} --case {result.case}"

    def __str__(self) -> str:
        watched = "; LDS watched for races" if self.detect_races or self.detect_hazards else ""
        watched += ", waits for hazards" if self.detect_hazards else ""
        return "; ".join(place.description for place in self.places) + watched


def validate(
    cases: Sequence[Case] | Callable[[Place], Sequence[Case]],
    report: Report,
    *,
    on: Sequence[str] | None,
    jobs: int,
    seed: int,
    detect_races: bool = False,
    detect_hazards: bool = False,
    kind: Kind = DECODE,
) -> ExitCode:
    """Runs cases at every place and reports; Ctrl-C keeps those that were finished.

    `cases` may be a function of the place, for a sweep that not every target serves whole.
    """
    places = tuple(find_places(on, detect_races=detect_races, detect_hazards=detect_hazards))
    setting = Setting(places, find_place(None).name, detect_races, detect_hazards, kind)
    tasks = [
        Task(case, place.name, detect_races, detect_hazards)
        for place in places
        for case in (cases(place) if callable(cases) else cases)
    ]
    found: dict[Task, CaseResult] = {}

    def take(task: Task, result: CaseResult) -> str:
        found[task] = replace(result, place=task.place)
        return "" if result.passed else f"failed: {result.case}"

    interrupted = run_all(report, tasks, run_task, CaseResult, take, jobs=jobs)
    groups = _groups((task.case, found[task]) for task in tasks if task in found)
    results = [found[task] for task in tasks if task in found]
    failures = [result for result in results if not result.passed]
    report.say(f"{kind.operation} against fp32 on the same numbers, {setting}")
    if len(tasks) == len(places):
        for result in results:
            text = f"{result.error}; lse {result.lse_error:.3g}" if result.error else result.detail
            report.line(f"{result.place}: {text}" if len(places) > 1 else text)
    else:
        report.show(_table(groups))
        _show_worst(report, results, setting)
    for result in failures[:_FAILURES_SHOWN]:
        report.line(f"FAILED {result.detail}", "bold red")
        report.line(f"  {setting.repro(result)}")
    if len(failures) > _FAILURES_SHOWN:
        report.say(f"and {len(failures) - _FAILURES_SHOWN} more failures; --json lists all")
    colour = "bold red" if failures else "green"
    report.say(
        f"[{colour}]{len(results) - len(failures)} of {len(results)} cases pass[/] "
        f"(relative L1 <= {kind.bound})"
    )
    body = {
        "operation": kind.operation,
        "ran_on": "; ".join(place.description for place in places),
        "places": [place.name for place in places],
        "detect_races": detect_races,
        "detect_hazards": detect_hazards,
        "seed": seed,
        "versions": versions(),
        "bounds": {**kind.bounds, "lse": LSE_BOUND},
        "planned": len(tasks),
        "passed": len(results) - len(failures),
        "cases": (records := [{**jsonable(r), "command": setting.repro(r)} for r in results]),
    }
    code = ExitCode.NUMERICAL if failures else ExitCode.OK
    plot = partial(_plot, groups, kind)
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=plot)


Groups = dict[tuple[str, str, str], list[CaseResult]]
"""Results by place, query, and cache or rows."""


def _groups(found: Iterable[tuple[Case, CaseResult]]) -> Groups:
    groups: Groups = {}
    for case, result in found:
        groups.setdefault((result.place, *case.kind), []).append(result)
    return dict(sorted(groups.items()))


def _plot(groups: Groups, kind: Kind, path: Path) -> None:
    """Every case's error, a row for each query and cache, a colour for each place."""
    from narrowkv.cli.plot import plot_dots

    dots = [
        (f"{q} over {cache}", where, r.error.relative_l1)
        for (where, q, cache), group in groups.items()
        for r in group
        if r.error is not None
    ]
    plot_dots(
        dots, path, title=f"{kind.operation} against fp32", label="relative L1 error", bounds=kind.bounds
    )


def _table(groups: Groups) -> Sheet:
    """Errors by place and formats of query and cache."""
    sheet = Sheet(
        [
            *keys("ran on", "Q", "cache"),
            *numbers("cases", "pass", "median rel. L1", "worst rel. L1", "worst max", "worst lse"),
        ]
    )
    for (where, q, cache), group in groups.items():
        errors = [r.error.relative_l1 for r in group if r.error is not None]
        largest = [r.error.max_abs for r in group if r.error is not None]
        lse = [r.lse_error for r in group if r.error is not None]
        figures = (
            [f"{f:.2e}" for f in (statistics.median(errors), max(errors), max(largest), max(lse))]
            if errors
            else ["-"] * 4
        )
        passed = sum(r.passed for r in group)
        style = "" if passed == len(group) else "bold red"
        sheet.add(where, q, cache, len(group), passed, *figures, style=style)
    return sheet


def _show_worst(report: Report, results: Sequence[CaseResult], setting: Setting) -> None:
    passed = [r for r in results if r.passed and r.error is not None]
    worst = sorted(passed, key=lambda r: r.error.relative_l1 if r.error else 0.0, reverse=True)[:_WORST_SHOWN]
    if worst:
        report.say("worst of those that pass:")
    for result in worst:
        assert result.error is not None
        report.line(f"  {result.error.relative_l1:.2e}  {setting.repro(result)}")

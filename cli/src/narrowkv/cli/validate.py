"""`narrowkv validate`: cases of an operation against its reference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from narrowkv.cli.command_line import DecodeByDefault, Where, jobs
from narrowkv.cli.report import Column, ExitCode, Report, Sheet, keys, numbers
from narrowkv.cli.running import find_places, run_all
from narrowkv.testing import format_errors
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.decode import LSE_BOUND
from narrowkv.testing.checking import CaseResult, CaseTask, run_task
from narrowkv.testing.format_errors import SETS, Errors, FormatError, Goal, InputSizes
from narrowkv.testing.machine import versions
from narrowkv.testing.operation import Cases, OperationEntry
from narrowkv.testing.places import Place, find_place
from narrowkv.testing.plot import plot_cases, plot_recipes
from narrowkv.testing.records import jsonable

Asked = Sequence[Case] | Callable[[Place], Sequence[Case]]
_WORST_SHOWN = 5
_FAILURES_SHOWN = 20


@dataclass(frozen=True)
class CasesRun:
    """Results of the cases of a command.

    Attributes:
        where: places, and which checks were on there.
        places: where they ran.
        results: each finished case with its result, in order.
        planned: how many cases there were.
        interrupted: whether Ctrl-C ended it.
    """

    where: Where
    places: tuple[Place, ...]
    results: list[tuple[Any, CaseResult]]
    planned: int
    interrupted: bool

    @property
    def ran_on(self) -> str:
        """The places, for people."""
        return "; ".join(place.description for place in self.places)

    @property
    def failures(self) -> list[tuple[Any, CaseResult]]:
        """The cases that did not pass."""
        return [(case, result) for case, result in self.results if not result.passed]

    def say_passed(self, report: Report, bounds: str) -> None:
        """The last line."""
        passed = len(self.results) - len(self.failures)
        colour = "bold red" if self.failures else "green"
        report.say(f"[{colour}]{passed} of {len(self.results)} cases pass[/] ({bounds})")

    def finish(
        self,
        report: Report,
        body: dict[str, Any],
        records: list[dict[str, Any]],
        plot: Callable[[Path], None],
    ) -> ExitCode:  # fmt: skip
        """Writes the document: `body`, and the fields that all commands have."""
        document = {
            "ran_on": self.ran_on,
            "places": [place.name for place in self.places],
            "detect_races": self.where.detect_races,
            "detect_hazards": self.where.detect_hazards,
            "versions": versions(),
            "planned": self.planned,
            "passed": len(self.results) - len(self.failures),
            **body,
            "cases": records,
        }
        code = ExitCode.NUMERICAL if self.failures else ExitCode.OK
        return report.finish(document, code, interrupted=self.interrupted, rows=records, plot=plot)


def run_cases(cases: Asked, report: Report, where: Where) -> CasesRun:
    """Runs cases at every place; Ctrl-C keeps those that were finished.

    `cases` may be a function of the place, for sweeps that differ between targets.
    """
    races, hazards = where.detect_races, where.detect_hazards
    places = tuple(find_places(where.on, races=races, hazards=hazards))
    tasks = [
        CaseTask(case, place.name, races, hazards)
        for place in places
        for case in (cases(place) if callable(cases) else cases)
    ]
    done, interrupted = run_all(
        report, tasks, run_task, CaseResult, what="validating", jobs=jobs(where.jobs),
        said=lambda task, result: "" if result.passed else f"failed: {task.case}",
    )  # fmt: skip
    found = dict(done)
    results = [(task.case, found[task]) for task in tasks if task in found]
    return CasesRun(where, places, results, len(tasks), interrupted)


def validate(operation: OperationEntry, cases: Asked, report: Report, where: Where, *, seed: int) -> ExitCode:
    """Runs cases of an operation at every place and reports."""
    known = operation.cases
    run = run_cases(cases, report, where)
    places, results = run.places, [result for _, result in run.results]
    repro = partial(_repro, where, find_place(None).name, operation.name)
    watched = "; LDS watched for races" if where.detect_races or where.detect_hazards else ""
    watched += ", waits for hazards" if where.detect_hazards else ""
    groups = _groups(run.results)
    report.say(f"{operation.title} against fp32 on the same numbers, {run.ran_on}{watched}")
    if run.planned == len(places):
        for result in results:
            text = f"{result.error}; lse {result.lse_error:.3g}" if result.error else result.detail
            report.line(f"{result.place}: {text}" if len(places) > 1 else text)
    else:
        report.show(_table(groups))
        _show_worst(report, results, repro)
        _show_accuracy(report, known, run.results)
    for _, result in run.failures[:_FAILURES_SHOWN]:
        report.line(f"FAILED {result.detail}", "bold red")
        report.line(f"  {repro(result)}")
    if (more := len(run.failures) - _FAILURES_SHOWN) > 0:
        report.say(f"and {more} more failures; --json lists all")
    run.say_passed(report, f"relative L1 <= {known.bound}")
    body = {"operation": operation.title, "seed": seed, "bounds": {**known.bounds, "lse": LSE_BOUND}}
    records = [{**jsonable(r), "command": repro(r)} for r in results]
    return run.finish(report, body, records, partial(plot_cases, run.results, operation))


def _repro(where: Where, default: str, name: str, result: CaseResult) -> str:
    """The command that repeats a case where it ran; `default` is the place of a command without --on."""
    operation = "" if name == DecodeByDefault.default else f" {name}"
    place = "" if result.place in ("", default) else f" --on {result.place}"
    watched = " --detect-races" if where.detect_races else ""
    watched += " --detect-hazards" if where.detect_hazards else ""
    return f"narrowkv validate{operation}{place}{watched} --case {result.case}"


Groups = dict[tuple[str, str, str], list[CaseResult]]
"""Results by place, query, and cache or rows."""


def _groups(found: Iterable[tuple[Case, CaseResult]]) -> Groups:
    groups: Groups = {}
    for case, result in found:
        groups.setdefault((result.place, *case.kind), []).append(result)
    return dict(sorted(groups.items()))


def _table(groups: Groups) -> Sheet:
    """Errors by place and formats of query and cache."""
    names = ("cases", "pass", "median rel. L1", "worst rel. L1", "worst max", "worst lse")
    sheet = Sheet([*keys("ran on", "Q", "cache"), *numbers(*names)])
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


def _show_worst(report: Report, results: Sequence[CaseResult], repro: Callable[[CaseResult], str]) -> None:
    passed = [r for r in results if r.passed and r.error is not None]
    worst = sorted(passed, key=lambda r: r.error.relative_l1 if r.error else 0.0, reverse=True)[:_WORST_SHOWN]
    if worst:
        report.say("worst of those that pass:")
    for result in worst:
        assert result.error is not None
        report.line(f"  {result.error.relative_l1:.2e}  {repro(result)}")


def _show_accuracy(report: Report, known: Cases, results: Sequence[tuple[Any, CaseResult]]) -> None:
    """Tables of errors against attention without quantisation, beside the published figures."""
    tables: dict[str, dict[tuple[str, str], tuple[Case, str, bool]]] = {}
    for case, result in results:
        if known.accuracy is not None and result.total is not None:
            table, row, column = known.accuracy(case)
            total = result.total
            cell = case, _figures(total.cosine, total.relative_l1, total.rmse), result.passed
            tables.setdefault(f"{result.place}, {table}", {})[row, column] = cell
    for name, cells in tables.items():
        columns = list(dict.fromkeys(column for _, column in cells))
        if len(columns) == 1:
            continue
        report.say(f"\n{name}: cosine / relative L1 / RMSE against attention that quantises nothing")
        sheet = Sheet([*keys("quantised to"), *numbers(*columns, "published")])
        for row in dict.fromkeys(row for row, _ in cells):
            found = [cells.get((row, column)) for column in columns]
            goals = [case.published for case, *_ in filter(None, found) if case.published is not None]
            sheet.add(
                row, *("-" if one is None else one[1] for one in found),
                _figures(*goals[0]) if goals else "",
                style="" if all(passed for *_, passed in filter(None, found)) else "bold red",
            )  # fmt: skip
        report.show(sheet)


def _figures(cosine: float, relative_l1: float, rmse: float) -> str:
    return f"{cosine:.4f} / {relative_l1:.3f} / {rmse:.3f}"


def validate_fp4(
    report: Report, *, seeds: int, sizes: InputSizes, on: str | None = None, jobs: int = 1
) -> ExitCode:
    """Measures and shows the table; at the goals' sizes, compares it with the goals.

    Ctrl-C keeps the means over the seeds that were measured.
    """
    place = find_place(on)
    tasks = format_errors.tasks(range(seeds), sizes, place.device)
    done, interrupted = run_all(
        report, tasks, format_errors.run_task, Errors, what="measuring", jobs=jobs,
        said=lambda task, _: f"{task.inputs}, seed {task.seed}",
    )  # fmt: skip
    found = dict(done)
    measured = format_errors.mean_errors({task: found[task] for task in tasks if task in found})
    report.say("format error: attention on the stored cache against attention on the bf16 tensors, in fp32")
    report.say(f"{sizes}, mean of {seeds} seeds on {place.description}")
    report.show(_format_table(measured))
    judged = sizes == InputSizes() and seeds >= format_errors.GOAL_SEEDS
    goals = []
    if len(found) == len(tasks):
        by_name = {error.recipe: error for error in measured}
        goals = [_goal(goal, goal.reached(by_name), report, judged) for goal in format_errors.GOALS]
        if not judged:
            least = f"{InputSizes()}, {format_errors.GOAL_SEEDS} seeds or more"
            report.say(f"[yellow]goals do not decide here[/]: they are of {least}")
    body: dict[str, Any] = {
        "sizes": sizes,
        "seeds": seeds,
        "ran_on": place.description,
        "versions": versions(),
        "recipes": measured,
        "goals": goals,
    }
    failed = judged and not all(goal["pass"] for goal in goals)
    code = ExitCode.NUMERICAL if failed else ExitCode.OK
    records = [asdict(error) for error in measured] if found else []
    plot = partial(plot_recipes, measured)
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=plot)


def _goal(goal: Goal, by: float, report: Report, judged: bool) -> dict[str, Any]:
    """Shows how far a goal was reached, and returns that for the document."""
    good = by >= goal.less_by
    colour = "green" if good else "bold red" if judged else "yellow"
    report.say(
        f"[{colour}]{by:.0%} less {goal.figure.replace('_', ' ')} on outlier (goal {goal.less_by:.0%})[/]: "
        f"{goal.recipe}, against {goal.than}"
    )
    return {**vars(goal), "reached": by, "judged": judged, "pass": good}


def _format_table(errors: Sequence[FormatError]) -> Sheet:
    figures = [f"{figure} {name}" for figure in ("rel. L1", "RMSE") for name in SETS]
    sheet = Sheet([*keys("recipe"), *numbers("bits", *figures), Column("decode reads it")])
    for e in errors:
        l1 = [f"{e.relative_l1[s]:.4f}" if s in e.relative_l1 else "-" for s in SETS]
        square = [f"{e.rmse[s]:.5f}" if s in e.rmse else "-" for s in SETS]
        sheet.add(e.recipe, f"{e.bits:.2f}", *l1, *square, "yes" if e.kernel else "no")
    return sheet

"""`narrowkv validate fp4`: a table of what each cache recipe costs in accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.testing import format_errors
from narrowkv.testing.format_errors import SETS, Errors, ErrorTask, FormatError, Goal, InputSizes
from narrowkv.testing.machine import versions
from narrowkv.testing.places import find_place
from narrowkv.testing.result_plots import plot_recipes


def validate_fp4(
    report: Report, *, seeds: int, sizes: InputSizes, on: str | None = None, jobs: int = 1
) -> ExitCode:
    """Measures and shows the table; at the goals' sizes, compares it with the goals.

    Ctrl-C keeps the means over the seeds that were measured.
    """
    place = find_place(on)
    tasks = format_errors.tasks(range(seeds), sizes, place.device)
    found: dict[ErrorTask, Errors] = {}

    def take(task: ErrorTask, errors: Errors) -> str:
        found[task] = errors
        return f"{task.inputs}, seed {task.seed}"

    interrupted = run_all(report, tasks, format_errors.run_task, Errors, take, jobs=jobs, what="measuring")
    measured = format_errors.mean_errors({task: found[task] for task in tasks if task in found})
    report.say("format error: attention on the stored cache against attention on the bf16 tensors, in fp32")
    report.say(f"{sizes}, mean of {seeds} seeds on {place.description}")
    report.show(_table(measured))
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


def _table(errors: Sequence[FormatError]) -> Sheet:
    figures = [f"{figure} {name}" for figure in ("rel. L1", "RMSE") for name in SETS]
    sheet = Sheet([*keys("recipe"), *numbers("bits", *figures), Column("decode reads it")])
    for e in errors:
        l1 = [f"{e.relative_l1[s]:.4f}" if s in e.relative_l1 else "-" for s in SETS]
        square = [f"{e.rmse[s]:.5f}" if s in e.rmse else "-" for s in SETS]
        sheet.add(e.recipe, f"{e.bits:.2f}", *l1, *square, "yes" if e.kernel else "no")
    return sheet

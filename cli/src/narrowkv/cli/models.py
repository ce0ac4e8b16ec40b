"""`narrowkv probe models`: calls of each model's attention on a rank, and whether they are exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from narrowkv.cli.report import ExitCode, Report, Sheet, keys, numbers, own_command
from narrowkv.cli.running import find_places, run_all
from narrowkv.testing.machine import versions
from narrowkv.testing.models import (
    EXACT,
    MODELS,
    RANKS,
    REFUSED,
    WRONG,
    Model,
    ModelAnswer,
    ModelTask,
    Need,
    all_tasks,
    answer,
    tasks_of,
)
from narrowkv.testing.places import Place

_ORDER = (EXACT, REFUSED, WRONG)  # from the best to the worst
_STYLES = {EXACT: "green", REFUSED: "yellow", WRONG: "bold red"}


@dataclass
class Answers:
    """What came of the calls at some places."""

    places: tuple[Place, ...]
    found: dict[ModelTask, ModelAnswer] = field(default_factory=dict)

    def of(self, need: Need, ranks: int) -> list[tuple[ModelTask, ModelAnswer]]:
        """The answers at every place; none where the ranks do not divide the heads, or it was not run."""
        tasks = [tasks_of(need, place.name).get(ranks) for place in self.places]
        return [(task, self.found[task]) for task in tasks if task in self.found and task is not None]

    def worst(self, need: Need, ranks: int) -> ModelAnswer | None:
        """The worst answer of any place, by status and error; None without one."""
        answers = [one for _, one in self.of(need, ranks)]
        return max(answers, key=lambda a: (_ORDER.index(a.status), a.relative_l1 or 0.0), default=None)

    def statuses(self, model: Model, ranks: int) -> list[str]:
        """The worst status of each call of a model."""
        answers = [self.worst(need, ranks) for need in model.needs]
        return [one.status for one in answers if one is not None]

    def reasons(self) -> Iterator[tuple[str, str, str]]:
        """Status, reason and who made the calls, of what is not exact; each reason once."""
        who: dict[tuple[str, str], dict[str, None]] = {}
        for model in MODELS:
            for need in model.needs:
                for ranks in RANKS:
                    found = self.worst(need, ranks)
                    if found is not None and found.status != EXACT:
                        calls = who.setdefault((found.status, found.detail), {})
                        calls[f"{model.name} ({need.what})"] = None
        for (status, why), calls in who.items():
            yield status, why, ", ".join(calls)

    def records(self) -> list[dict[str, Any]]:
        """A row for each call of each model, on each number of ranks, at each place."""
        return [
            {"model": model.name, "call": need.what, "ranks": ranks, **asdict(task), **asdict(found)}
            for model in MODELS
            for need in model.needs
            for ranks in RANKS
            for task, found in self.of(need, ranks)
        ]


def probe_models(report: Report, *, on: Sequence[str] | None, jobs: int, full: bool) -> ExitCode:
    """Makes every call of every model on one rank of 1, 2, 4 and 8, and shows a row for each model.

    Args:
        report: where it goes.
        on: where to run; None is the GPU or the CPU.
        jobs: processes.
        full: also show a row for each call, with its error.
    """
    answers = Answers(tuple(find_places(on)))
    gpu = {place.name for place in answers.places if place.is_gpu}

    tasks = [task for place in answers.places for task in all_tasks(MODELS, place.name)]
    done, interrupted = run_all(
        report, tasks, answer, ModelAnswer, what="probing", jobs=jobs,
        said=lambda task, _: f"{task.operation} {task.line}", on_gpu=lambda task: task.place in gpu,
    )  # fmt: skip
    answers.found.update(done)
    if full:
        report.show(_calls(answers))
    report.say("Calls of a rank that are exact here, of those that the model's attention makes:")
    report.show(_models(answers))
    for status, why, who in answers.reasons():
        report.line(f"{status}: {who}: {why}", _STYLES[status])
    for label, name in (("not checked", "unsure"), ("not attention over a cache", "beside")):
        for model in MODELS:
            if text := getattr(model, name):
                report.line(f"{label}: {model.name}: {text}")
    statuses = [found.status for found in answers.found.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in _ORDER if status in statuses)
    report.say(f"{len(statuses)} different calls: {counts}")
    if not full:
        report.line(f"next        {own_command()} probe models --full", "bold")
    body = {
        "set": "models",
        "ran_on": "; ".join(place.description for place in answers.places),
        "places": [place.name for place in answers.places],
        "versions": versions(),
        "models": [{**asdict(model), "needs": len(model.needs)} for model in MODELS],
        "rows": answers.records(),
    }
    code = ExitCode.NUMERICAL if WRONG in statuses else ExitCode.OK
    return report.finish(body, code, interrupted=interrupted, rows=answers.records())


def _models(answers: Answers) -> Sheet:
    """A row for each model: calls that are exact, of all, by number of ranks."""
    sheet = Sheet([*keys("model", "heads"), *numbers(*(f"TP {ranks}" for ranks in RANKS))])
    for model in MODELS:
        by_ranks = [answers.statuses(model, ranks) for ranks in RANKS]
        worst = max((status for found in by_ranks for status in found), key=_ORDER.index, default=REFUSED)
        cells = [f"{found.count(EXACT)}/{len(found)}" if found else "-" for found in by_ranks]
        sheet.add(model.name, model.heads, *cells, style=_STYLES[worst])
    return sheet


def _calls(answers: Answers) -> Sheet:
    """A row for each call of each model: its relative L1 error by number of ranks."""
    sheet = Sheet([*keys("model", "call"), *numbers(*(f"TP {ranks}" for ranks in RANKS))])
    for model in MODELS:
        for need in model.needs:
            found = [answers.worst(need, ranks) for ranks in RANKS]
            worst = max((a.status for a in found if a is not None), key=_ORDER.index, default=REFUSED)
            cells = ["-" if a is None else _error(a) for a in found]
            sheet.add(model.name, need.what, *cells, style=_STYLES[worst])
    return sheet


def _error(found: ModelAnswer) -> str:
    return found.status if found.relative_l1 is None else f"{found.status} {found.relative_l1:.1e}"

"""Makes the calls of `narrowkv.testing.models`: on one rank, at a small context, beside the reference."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.testing.cases import CaseError, parse_case
from narrowkv.testing.checking import run_case
from narrowkv.testing.models import MODELS, RANKS, Model, Need
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.places import find_place

__all__ = ["EXACT", "REFUSED", "WRONG", "ModelAnswer", "ModelTask", "all_tasks", "answer", "tasks_of"]

EXACT, REFUSED, WRONG = "exact", "refused", "wrong"


@dataclass(frozen=True)
class ModelTask:
    """One call: the case of an operation, at a place. Calls that models have in common are one task."""

    operation: str
    line: str
    place: str


@dataclass(frozen=True)
class ModelAnswer:
    """What came of a call.

    Attributes:
        status: "exact", within the operation's bound of its reference; "refused"; or "wrong".
        detail: why not exact.
        relative_l1: the error; None where there is no result.
    """

    status: str
    detail: str = ""
    relative_l1: float | None = None


def tasks_of(need: Need, place: str) -> dict[int, ModelTask]:
    """The calls of a need by number of ranks, without those that do not divide its heads."""
    lines = {ranks: need.line(ranks) for ranks in RANKS}
    return {
        ranks: ModelTask(need.operation, line, place) for ranks, line in lines.items() if line is not None
    }


def all_tasks(models: tuple[Model, ...] = MODELS, place: str = "cpu") -> list[ModelTask]:
    """Every call of some models, each once."""
    found = [task for model in models for need in model.needs for task in tasks_of(need, place).values()]
    return list(dict.fromkeys(found))


def answer(task: ModelTask) -> ModelAnswer:
    """Makes the call. What goes wrong is an answer: refusals are those that name an argument."""
    entry = OPERATIONS.get(task.operation)
    if entry is None:
        return ModelAnswer(REFUSED, f"narrowkv has no operation {task.operation}")
    try:
        case = parse_case(entry.cases.case, task.line)
        place = find_place(task.place)
        result = (entry.cases.check or run_case)(case, place.device, place.context)
    except CaseError as error:
        wrong = str(error).partition(" must be one of ")[0].removeprefix("a name ").strip("()")
        return ModelAnswer(REFUSED, f"{entry.name} has no {wrong}")
    except (TypeError, ValueError, NotImplementedError) as error:
        lines = str(error).strip().splitlines()
        return ModelAnswer(REFUSED, lines[0] if lines else type(error).__name__)
    except Exception as error:
        return ModelAnswer(WRONG, f"{type(error).__name__}: {error}")
    error_l1 = None if result.error is None else result.error.relative_l1
    return ModelAnswer(EXACT if result.passed else WRONG, result.detail, error_l1)

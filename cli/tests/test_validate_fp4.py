"""`validate fp4`: what the command prints, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.testing import format_errors
from narrowkv.testing.format_errors import FP4_BEST, GOALS, RECIPES, Sizes, make_inputs, measure

SMALL = Sizes(batch=1, context=48)
I32 = torch.int32


def run(*arguments: str) -> tuple[Any, dict[str, Any]]:
    result = CliRunner().invoke(
        app, ["validate", "fp4", "--batch", "1", "--context", "48", "--json", *arguments]
    )
    return result, json.loads(result.stdout)


def test_the_command_holds_the_table_against_its_goals(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "table.json", tmp_path / "errors.png"
    result, document = run(
        "--seeds", "1", "--on", "cpu", "--jobs", "1", "--out", str(out), "--plot", str(plot)
    )
    assert [r["recipe"] for r in document["recipes"]] == [r.name for r in RECIPES]
    assert [g["recipe"] for g in document["goals"]] == [g.recipe for g in GOALS]
    assert result.exit_code == 0
    assert json.loads(out.read_text()) == document
    assert "OCP MX" in result.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def missed_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = format_errors.Goal("FP4, a scale per head, ceil", FP4_BEST, "rmse", 0.5)
    monkeypatch.setattr(format_errors, "GOALS", (goal,))


@pytest.mark.usefixtures("missed_goal")
def test_a_goal_that_is_missed_at_its_own_sizes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = format_errors.make_inputs
    monkeypatch.setattr(format_errors, "make_inputs", lambda name, _, *rest: right(name, SMALL, *rest))
    result = CliRunner().invoke(app, ["validate", "fp4", "--on", "cpu", "--jobs", "1", "--json"])
    goal = json.loads(result.stdout)["goals"][0]
    assert (goal["judged"], goal["pass"], result.exit_code) == (True, False, 1)


@pytest.mark.usefixtures("missed_goal")
def test_other_sizes_than_the_goals_do_not_fail() -> None:
    result, document = run("--on", "cpu", "--jobs", "1", "--seeds", "1")
    goal = document["goals"][0]
    assert (goal["judged"], goal["pass"], result.exit_code) == (False, False, 0)
    assert "goals do not decide here" in result.stderr


def test_ctrl_c_keeps_the_seeds_that_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, kept, table = format_errors.run_task, tmp_path / "kept", tmp_path / "errors.csv"

    def until_second_seed(task: format_errors.Task) -> format_errors.Errors:
        if task.seed == 1:
            raise KeyboardInterrupt
        return right(task)

    monkeypatch.setattr(format_errors, "run_task", until_second_seed)
    options = ["--seeds", "2", "--on", "cpu", "--jobs", "1", "--resume", str(kept)]
    result, document = run(*options)
    assert result.exit_code == 130
    assert document["interrupted"] is True
    assert document["goals"] == []
    first = {error.recipe: error for error in measure((0,), SMALL, "cpu")}
    assert {r["recipe"]: r["rmse"] for r in document["recipes"]} == {n: e.rmse for n, e in first.items()}
    monkeypatch.undo()
    measured: list[int] = []
    monkeypatch.setattr(
        format_errors, "make_inputs",
        lambda name, sizes, seed, device: measured.append(seed) or make_inputs(name, sizes, seed, device),
    )  # fmt: skip
    result, document = run(*options, "--csv", str(table))
    assert result.exit_code == 0
    assert measured == [1, 1], "the first seed is not measured again"
    both = {error.recipe: error for error in measure((0, 1), SMALL, "cpu")}
    assert {r["recipe"]: r["rmse"] for r in document["recipes"]} == {n: e.rmse for n, e in both.items()}
    assert len(table.read_text().splitlines()) == 1 + len(RECIPES)

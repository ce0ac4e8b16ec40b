"""`narrowkv probe cp` and `narrowkv bench cp`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.names import COMMS
from narrowkv.context_parallel import exchange


def test_names_that_are_known_without_torch_are_those_of_the_package() -> None:
    assert COMMS == exchange.COMMS


def test_a_world_of_one_passes_every_case() -> None:
    result = CliRunner().invoke(app, ["probe", "cp", "--ranks", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ranks"] == 1
    assert len(found["cases"]) >= 17
    assert all(case["passed"] and case["error"] > 0 for case in found["cases"])


def test_the_model_serves_many_gpus() -> None:
    arguments = ["bench", "cp", "--model", "--gpus", "8,72", "--context", "1048576", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--target", "gfx950"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["world"], row["batch"]) for row in rows] == [(8, 1), (8, 8), (72, 1), (72, 8)]
    assert all(1 < row["speedup"] < row["world"] for row in rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "cp", "--heads", "96"],
        ["bench", "cp", "--comm", "mail"],
        ["bench", "cp", "--gpus", "8"],
        ["bench", "cp", "--model", "--ranks", "4"],
        ["bench", "cp", "--model", "--link", "ether"],
        ["probe", "cp", "--full"],
        ["probe", "glm-gqa12", "--ranks", "3"],
    ],
)
def test_options_that_do_nothing_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output

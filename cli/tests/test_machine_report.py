"""`narrowkv report`: what it runs where, measured beside modelled rows, and its two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowkv.cli import machine_report
from narrowkv.cli.app import app
from narrowkv.testing.bench import comparison

SHAPE = {"batch": 4, "context": 1024}
MEASURED = {
    "bench": "decode",
    "rows": [
        {"backend": "narrowkv", **SHAPE, "median_us": 30.0, "status": "pass", "relative_l1": 1e-3},
        {"backend": "sdpa", **SHAPE, "median_us": 90.0, "status": "pass", "relative_l1": 1e-3},
    ],
}
MODELLED = {
    "bench": "decode",
    "model_rows": [{"name": "decode", "shape": SHAPE, "model_us": 20.0, "model_bound": "memory"}],
}


def test_what_is_run() -> None:
    on_amd, on_nvidia, rehearsed = map(machine_report.commands, ("gfx942", "sm90", None))
    assert any(line.startswith("bench decode") and line.endswith("--on gfx942") for line in on_amd)
    assert not any("--on gfx" in line for line in on_nvidia)
    assert not any("--on gpu" in line or "--samples" in line for line in rehearsed)
    assert any(line.startswith("probe") for line in on_nvidia)


def test_measured_rows_stand_beside_the_models() -> None:
    (row,) = comparison.compare([MEASURED, MODELLED])
    assert row["measured_over_model"] == 1.5
    text = comparison.markdown({"device": "x", "versions": {}, "rows": [row], "steps": []})
    assert "1 of 1 rows differ from the model" in text
    (alone,) = comparison.compare([MEASURED])
    assert alone["model_us"] is None
    (rehearsed,) = comparison.compare([MODELLED])
    assert rehearsed["measured_us"] is None


def test_a_fault_of_one_command_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_report, "commands", lambda target: ["nothing", "env"])
    result = CliRunner().invoke(app, ["report", "--folder", str(tmp_path)])
    assert result.exit_code == 1, result.output
    document: dict[str, Any] = json.loads((tmp_path / "narrowkv-report.json").read_text())
    broken, worked = document["steps"]
    assert "No such command" in broken["said"]
    assert worked["document"]["environment"]
    assert {"device", "versions", "commands", "shape"} <= set(document)  # what benchmarks/results/ needs
    assert "`narrowkv nothing`" in (tmp_path / "narrowkv-report.md").read_text()


def test_nothing_runs_when_time_is_up(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", "--folder", str(tmp_path), "--minutes", "0"])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "narrowkv-report.json").read_text())
    assert {step["said"] for step in document["steps"]} == {"time was up"}


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", "--folder", str(tmp_path / "missing")])
    assert result.exit_code == 2
    assert "--folder" in result.output

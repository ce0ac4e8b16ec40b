"""`narrowkv bench traffic`: its rehearsal on a CPU, and whole runs with a stand-in for the GPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.cli import bench
from narrowkv.cli.app import app
from narrowkv.testing import traffic
from narrowkv.testing.bench import traffic as benches

run = CliRunner().invoke
SMALL = traffic.Step("llama-70b-tp8", "mixed", (1, 1, 20), (30, 9, 40))
ALIKE = traffic.Step("llama-70b-tp8", "speculative", (2, 2), (30, 9), capacity=64)


def _on_cpu(made: Any, *peers: Any, **_: str) -> Any:
    return made(*peers[:1], device="cpu")


@pytest.fixture
def small_steps(stand_in_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose GPU is the CPU, and steps that it runs in a moment."""
    for name in ("TrafficBench", "ChoicesBench"):
        made = getattr(benches, name)
        monkeypatch.setattr(bench, name, partial(_on_cpu, made))
    monkeypatch.setattr(traffic, "serving_steps", lambda *_: [SMALL, ALIKE])
    monkeypatch.setattr(traffic, "grid", lambda: [SMALL])
    forced = ({"kernel": "dense"}, {"kernel": "fused", "num_splits": 4})
    monkeypatch.setitem(benches.FORCED, "batch_prefill", forced)
    return stand_in_gpu


def test_without_a_gpu_every_call_is_checked_and_none_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ["--model", "llama-70b-tp8", "--traffic", "decode,mixed", "--batch", "2,8", "--json"]
    result = run(app, ["bench", "traffic", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["traffic"], row["call"] or row["backend"]) for row in rows] == [
        ("decode", "paged_decode"), ("decode", "batch_prefill"), ("decode", "torch sdpa"),
        ("mixed", "batch_prefill"), ("mixed", "torch sdpa"), ("mixed", "prefill_append"),
    ]  # fmt: skip
    assert all(row["status"] == "pass" and row["relative_l1"] > 0 for row in rows)
    assert all(row["median_us"] is None for row in rows)


def test_a_rehearsal_finds_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    right = benches.paged_decode
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(benches, "paged_decode", lambda *a, **k: right(*a, **k).mul_(1.01))
    result = run(app, ["bench", "traffic", "--model", "llama-70b-tp8", "--traffic", "decode", "--json"])
    assert result.exit_code == 1
    assert {row["call"]: row["status"] for row in json.loads(result.stdout)["rows"]} == {
        "paged_decode": "fail", "batch_prefill": "pass", "": "pass",
    }  # fmt: skip


def test_a_run_compares_with_the_fastest_peer(small_steps: Any, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = run(app, ["bench", "traffic", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "x best peer" in result.stdout
    rows = json.loads(out.read_text())["rows"]
    ours = [row for row in rows if row["backend"] == "narrowkv"]
    assert [(row["batch"], row["ratio_to_peer"]) for row in ours] == [(3, 1.0), (2, 1.0), (2, 1.0)]


def test_choices_show_automatic_beside_the_best_of_all_forced_ones(
    small_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([120.0, 100.0])
    measured = small_steps.replay
    monkeypatch.setattr(
        small_steps, "replay", lambda g: partial(type(measured(g)), next(times, 150.0), 1.0, 2.0, 10)()
    )
    result = run(app, ["bench", "traffic", "--choices", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert rows[0]["choice"] == "automatic"
    assert rows[0]["ratio_to_best"] == pytest.approx(1.2)
    forced = [row["choice"] for row in rows[1:]]
    assert forced == ["kernel=dense", "kernel=fused, num_splits=4", "the caller's"]
    table = [line for line in result.stderr.splitlines() if line.startswith("llama")]
    assert len(table) == 2, "automatic and the best one"
    assert "1.20" in table[0]


def test_options_of_the_grid_are_its_own() -> None:
    result = run(app, ["bench", "traffic", "--choices", "--batch", "8"])
    assert result.exit_code == 2
    assert "--batch does not apply with --choices" in result.stderr

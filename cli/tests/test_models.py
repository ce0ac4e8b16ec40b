"""`narrowkv engines`, `accuracy`, `inspect model` and `report`: documents about more than one operation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import document, narrowkv

from narrowkv.cli import machine_report
from narrowkv.cli.modelled import parse_call
from narrowkv.quant import Calibration
from narrowkv.testing.accuracy import Score
from narrowkv.testing.accuracy.evaluate import frontier
from narrowkv.testing.accuracy.tiny_lm import TinySizes
from narrowkv.testing.bench import comparison
from narrowkv.testing.codegen import compile_call
from narrowkv.testing.model import model_call
from narrowkv.testing.operations import OPERATIONS


def test_a_trial_compares_with_the_engines_own_attention() -> None:
    line = "engines try transformers --model llama-3-tiny --tokens 2 --cache bf16,fp8_e4m3fn"
    own, exact, narrow = document(line)["trials"]
    assert own["calls"] == {}
    # Two layers: a prompt and one step after it.
    assert exact["calls"] == narrow["calls"] == {"append": 4, "batch_prefill": 2, "paged_decode": 2}
    assert exact["difference"] < 0.1
    assert exact["difference"] < narrow["difference"] < 1
    assert set(narrow["spent"]) == set(narrow["calls"])


def test_a_language_model_is_trained_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "narrowkv.cli.accuracy.TinySizes",
        lambda steps, context: TinySizes(1, 64, 2, 1, 64, context=context, batch=2, steps=steps),
    )
    folder, plot, calibration = (tmp_path / name for name in ("model", "kl.svg", "c.npz"))
    trained = narrowkv(f"accuracy train-tiny {folder} --steps 2 --context 128")
    assert "nats a byte" in trained.stdout
    result = narrowkv(
        f"accuracy --model {folder} --tokens 96 --context 64 --needles 1 --recipe fp8,fp4-e4m3 "
        f"--plot {plot} --save-calibration {calibration} --json"
    )
    exact, fp8, fp4 = recipes = json.loads(result.stdout)["recipes"]
    assert [row["recipe"] for row in recipes] == ["bf16", "fp8", "fp4-e4m3"]
    assert (exact["kl"], exact["tokens"], exact["needles"]) == (0.0, 94, 1)
    assert 0 < fp8["kl"] < fp4["kl"]
    assert fp4["frontier"]
    assert "fp4-e4m3" in plot.read_text()
    assert len(Calibration.load(calibration).layers) == 1
    assert "no kernel ran" in result.stderr


def test_the_frontier_has_no_recipe_that_another_of_as_few_bits_beats() -> None:
    figures = {"a": (16, 0.0), "b": (8, 0.1), "c": (8, 0.2), "d": (9, 0.1), "e": (4, 1)}
    scores = [
        Score(name, "", bits, "torch", kl, 1.0, 0.0, 1.0, 0, 0, 1) for name, (bits, kl) in figures.items()
    ]
    # d costs what b costs, with more bits.
    assert frontier(scores) == {"a", "b", "e"}


def test_a_case_and_the_assembly_of_another_kernel_are_modelled(tmp_path: Path) -> None:
    line = "lens=512,head_dim=64,kv_heads=1,split=none,format=bf16"
    family = parse_call(f"decode:{line}")
    (launch,) = model_call("gfx942", family.call, hbm_share=family.hbm_share)
    assert launch.prediction.has_addresses
    assert launch.full.loop is not None
    assert launch.full.loop.passes >= 8
    assert launch.full.seconds > launch.prediction.seconds  # this call leaves most of the chip idle
    (artifact,) = compile_call("gfx942", family.call)
    peer = tmp_path / "peer.amdgcn"
    peer.write_text(artifact.assembly)
    result = narrowkv(f"inspect model --target gfx942 --case decode:{line} --peer {peer} --json")
    by_peer, by_case = json.loads(result.stdout)["model"]
    assert "peer.amdgcn" in by_peer["call"]
    (one,) = by_case["launches"]
    assert one["model"]["loop"]["clocks"] == pytest.approx(launch.prediction.loop.clocks)  # type: ignore[union-attr]
    assert {key for key in one if "model" not in key} == {"name"}  # every time is under a model's key
    assert "not a measurement" in result.stderr


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


def test_measured_rows_stand_beside_the_models() -> None:
    (row,) = comparison.compare([MEASURED, MODELLED])
    assert row["measured_over_model"] == 1.5
    text = comparison.markdown({"device": "x", "versions": {}, "rows": [row], "steps": []})
    assert "1 of 1 rows differ from the model" in text
    (alone,) = comparison.compare([MEASURED])
    assert alone["model_us"] is None
    (rehearsed,) = comparison.compare([MODELLED])
    assert rehearsed["measured_us"] is None


def test_a_report_runs_what_its_machine_can() -> None:
    on_amd, on_nvidia, rehearsed = map(machine_report.commands, ("gfx942", "sm90", None))
    assert any(line.startswith("bench decode") and line.endswith("--on gfx942") for line in on_amd)
    assert not any("--on gfx" in line for line in on_nvidia)
    assert not any("--on gpu" in line or "--samples" in line for line in rehearsed)
    assert any(line.startswith("probe") for line in on_nvidia)


def reported(folder: Path, *options: object, ends: int = 0) -> dict[str, Any]:
    narrowkv(f"report --folder {folder}", *options, ends=ends)
    found: dict[str, Any] = json.loads((folder / "narrowkv-report.json").read_text())
    return found


def test_a_fault_of_one_command_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_report, "commands", lambda target, quick: ["nothing", "env"])
    found = reported(tmp_path, ends=1)
    broken, worked = found["steps"]
    assert "No such command" in broken["said"]
    assert worked["document"]["environment"]
    assert {"device", "versions", "commands", "shape"} <= set(found)  # what benchmarks/results/ needs
    assert "`narrowkv nothing`" in (tmp_path / "narrowkv-report.md").read_text()


def test_a_report_runs_whole_where_only_the_gpu_is_a_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = Path(__file__).with_name("gpu_stand_in")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (stand_in, *filter(None, sys.path)))))
    program = [sys.executable, "-m", "narrowkv.cli", "report", "--quick", "--minutes", "60"]
    done = subprocess.run([*program, "--folder", tmp_path], capture_output=True, text=True, check=False)
    found = json.loads((tmp_path / "narrowkv-report.json").read_text())
    assert {step["command"]: step["said"] for step in found["steps"] if step["exit_code"] != 0} == {}
    assert done.returncode == 0, done.stderr
    assert found["device"] == "stand-in for an MI300X (gfx942)"
    assert [step["command"] for step in found["steps"]] == machine_report.commands("gfx942", quick=True)
    validated = [step["document"] for step in found["steps"] if step["command"].startswith("validate ")]
    cases = [case["case"] for document in validated for case in document["cases"]]
    assert cases == [line for entry in OPERATIONS.values() for line in entry.report.cases]
    assert {(row["bench"], row["call"]) for row in found["rows"]} == {
        ("decode", "decode"), ("prefill", "batch_prefill"), ("prefill", "prefill_append"), ("sparse", "bf16"),
        ("sparse", "fused"), ("sage", "int8, per_thread"),
    }  # fmt: skip
    for row in found["rows"]:
        assert row["status"] == "pass"
        assert row["measured_us"] > 0, row
        assert row["model_us"] > 0, row
    text = (tmp_path / "narrowkv-report.md").read_text()
    last = f"of {len(found['rows'])} rows differ from the model"
    for part in ("# narrowkv report: ", "- torch: ", "| command | exit code |", "| bench | call |", last):
        assert part in text


def test_nothing_runs_when_time_is_up(tmp_path: Path) -> None:
    assert {step["said"] for step in reported(tmp_path, "--minutes", 0)["steps"]} == {"time was up"}

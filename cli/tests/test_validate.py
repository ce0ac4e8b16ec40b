"""`narrowkv validate`: what it runs, what it reports, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.attn_decode.cases import DecodeInputs
from narrowkv.attn_prefill.cases import PrefillInputs
from narrowkv.cli import validate
from narrowkv.cli.app import app
from narrowkv.runtime.cases import Case, parse_case
from narrowkv.sparse_fp8.cases import SparseCall
from narrowkv.testing import emulation
from narrowkv.testing.checking import CaseResult
from narrowkv.testing.kinds import DECODE

run = CliRunner().invoke


@dataclass(frozen=True)
class Operation:
    """What `validate` is asked about one operation.

    Attributes:
        inputs: the class that makes the call.
        is_first: whether its inputs are those of the first case.
        lines: the cases.
        says: a word of the report.
        bounds: of each case's error.
    """

    inputs: type[Any]
    is_first: Callable[[Any], bool]
    lines: tuple[str, ...]
    says: str
    bounds: tuple[float, ...]


OPERATIONS = {
    "decode": Operation(
        DecodeInputs, lambda inputs: inputs.table.batch_size == 2,
        ("lens=20+3,ratio=3,head_dim=64", "lens=9,format=bf16,q=fp16,head_dim=64,q_len=2"),
        "paged_decode", (0.002, 0.002),
    ),
    "prefill": Operation(
        PrefillInputs, lambda inputs: not inputs.case.appends,
        ("lens=20,q_lens=3", "operation=append,q_lens=3+9,lens=20+30,format=fp4_e2m1", "q=fp8_e4m3fn"),
        "prefill_append", (0.002, 0.002, 0.02),
    ),
    "sparse": Operation(
        SparseCall, lambda inputs: inputs.case.mode == "fused",
        ("lens=20+3", "mode=16bit,layout=bf16,lens=9"), "sparse_prefill", (0.004, 0.004),
    ),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cases_that_pass_end_with_0_and_are_all_in_the_document(operation: str) -> None:
    asked = OPERATIONS[operation]
    cases = [word for line in asked.lines for word in ("--case", line)]
    result = run(app, ["validate", operation, "--on", "cpu", "--jobs", "1", "--json", *cases])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["planned"] == document["passed"] == len(document["cases"]) == len(asked.lines)
    assert asked.says in document["operation"]
    assert document["bounds"]["relative_l1"] == asked.bounds[0]
    for case, bound in zip(document["cases"], asked.bounds, strict=True):
        assert case["passed"]
        assert case["bound"] == bound
        assert 0 < case["error"]["relative_l1"] <= bound
    assert f"{len(asked.lines)} of {len(asked.lines)} cases pass" in result.stderr


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_kernel_ends_with_1_and_a_command_that_repeats_it(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = OPERATIONS[operation]
    first, second = asked.lines[:2]
    right = asked.inputs.call

    def wrong(self: Any, **options: Any) -> Any:
        o, lse = right(self, **options)
        return (o * 1.02 if asked.is_first(self) else o), lse

    monkeypatch.setattr(asked.inputs, "call", wrong)
    options = ["validate", operation, "--on", "cpu", "--jobs", "1"]
    result = run(app, [*options, "--case", first, "--case", second])
    assert result.exit_code == 1
    assert "1 of 2 cases pass" in result.stdout
    (line,) = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("narrowkv ")]
    again = [*line.split()[1:], "--jobs", "1"]
    assert run(app, again).exit_code == 1
    monkeypatch.undo()
    assert run(app, again).exit_code == 0


def test_a_case_that_raises_is_a_failure_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("the kernel fell over\nat some length")

    monkeypatch.setattr(DecodeInputs, "call", broken)
    result = run(
        app, ["validate", "--on", "cpu", "--jobs", "1", "--json", "--case", OPERATIONS["decode"].lines[0]]
    )
    assert result.exit_code == 1
    (case,) = json.loads(result.stdout)["cases"]
    assert case["detail"] == "RuntimeError: the kernel fell over"
    assert case["error"] is None


def test_ctrl_c_keeps_what_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Case] = []

    def until_third(task: validate.CaseTask) -> CaseResult:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(task.case)
        return CaseResult(str(task.case), None, 0.0, True)

    monkeypatch.setattr(validate, "run_task", until_third)
    result = run(app, ["validate", "--on", "cpu", "--jobs", "1", "--json"])
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert document["interrupted"] is True
    assert [case["case"] for case in document["cases"]] == [str(case) for case in done]
    assert document["planned"] > 2
    assert "interrupted" in result.stderr


def running_in_group(group: int) -> list[str]:
    """Processes of a process group that are more than a line in the process table."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = file.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(of_group) == group and state != "Z":
            found.append(file.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")
def test_a_real_ctrl_c_ends_all_processes_and_leaves_the_document(tmp_path: Path) -> None:
    out = tmp_path / "partial.json"
    line = [
        sys.executable,
        "-m",
        "narrowkv.cli",
        "validate",
        "--full",
        "--on",
        "cpu",
        "--jobs",
        "2",
        "--out",
        str(out),
    ]
    child = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    time.sleep(25)
    assert len(running_in_group(child.pid)) >= 3
    os.killpg(child.pid, signal.SIGINT)
    _, stderr = child.communicate(timeout=30)
    document = json.loads(out.read_text())
    failed = not all(case["passed"] for case in document["cases"])
    assert child.returncode == (1 if failed else 130), stderr
    assert document["interrupted"] is True
    assert 0 < len(document["cases"]) < document["planned"]
    assert not running_in_group(child.pid)


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_a_case_can_run_as_a_targets_machine_code(target: str) -> None:
    line = "lens=18,ratio=12,head_dim=64,kv_heads=1,page_size=7"
    result = run(app, ["validate", "--on", target, "--json", "--case", line])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert target in document["ran_on"]
    assert (
        document["cases"][0]["command"]
        == f"narrowkv validate --on {target} --case {parse_case(DECODE.case, line)}"
    )


def test_several_places_and_the_race_detector() -> None:
    line = "lens=18,ratio=3,head_dim=64,kv_heads=1"
    options = ["--on", "gfx942,gfx950", "--detect-races", "--jobs", "1", "--json"]
    result = run(app, ["validate", *options, "--case", line])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["places"] == [case["place"] for case in document["cases"]] == ["gfx942", "gfx950"]
    assert document["detect_races"] is True
    assert document["planned"] == document["passed"] == 2
    for case in document["cases"]:
        again = f"narrowkv validate --on {case['place']} --detect-races --case {case['case']}"
        assert case["command"] == again


def test_a_race_is_a_failure_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulation.load_program
    monkeypatch.setattr(
        emulation, "load_program", lambda text, **o: right(text.replace("s_barrier", "s_nop 0", 1), **o)
    )
    # A ratio above 32 runs on four waves, which share K and V through LDS.
    options = ["--on", "gfx942", "--detect-races", "--jobs", "1", "--json"]
    result = run(app, ["validate", *options, "--case", "lens=40,ratio=40,head_dim=64,kv_heads=1,split=none"])
    assert result.exit_code == 1
    (case,) = json.loads(result.stdout)["cases"]
    assert case["detail"].startswith("RaceError: LDS race")
    assert "_paged_decode_kernel" in case["detail"]


@pytest.mark.slow
def test_the_quick_sweep_passes() -> None:
    result = run(app, ["validate", "--quick", "--on", "cpu", "--json"])
    document = json.loads(result.stdout)
    failed = [case["command"] + ": " + case["detail"] for case in document["cases"] if not case["passed"]]
    assert not failed, "\n".join(failed)
    assert result.exit_code == 0


@pytest.mark.gpu
def test_the_quick_sweep_passes_on_a_gpu() -> None:
    result = run(app, ["validate", "--quick", "--on", "gpu", "--json"])
    document = json.loads(result.stdout)
    failed = [case["command"] + ": " + case["detail"] for case in document["cases"] if not case["passed"]]
    assert not failed, "\n".join(failed)

"""Ctrl-C keeps what was finished; `--resume` goes on from there, and results come back as they were."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_support import FP8, SMALL_BENCH, counted, document, narrowkv

from narrowkv.cli import validate
from narrowkv.quant.accuracy import ErrorReport
from narrowkv.testing import format_errors
from narrowkv.testing.bench.measure import Bench, Row
from narrowkv.testing.checking import CaseResult, Sample
from narrowkv.testing.codegen import CallCode, KernelCode
from narrowkv.testing.probing import PASS, Answer, Compiled, Outcome
from narrowkv.testing.records import jsonable, revive

KERNEL = KernelCode("_kernel", 128, 0, 40, 0, 0, 0, 8192, 2, 4, 0, {"v_mfma": 8}, {"valu": 3}, 0.25)
ERROR = ErrorReport(
    cosine=0.9, relative_l1=0.001, rmse=0.5, max_abs=0.25, worst_index=(0, 3), not_finite=0, count=9
)
OUTCOME = (
    (Answer(FP8, "narrowkv", "cpu", PASS, time_us={"median": 1.5}, sample=Sample(1, 2, 3, 4, 5, 0.5)),),
    Compiled("gfx942", PASS, "", (KERNEL,), {"bound_by": "memory"}),
)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Outcome, OUTCOME),
        (CaseResult, CaseResult("lens=1", ERROR, 0.5, True, bound=0.25)),
        (CaseResult, CaseResult("qk=fp8", ERROR, 0.5, True, place="cpu", total=ERROR)),
        (tuple[Row, ...], (Row({"mode": "x"}, {"batch": 1}, median_us=1.5, extra={"a_us": None}),)),
        (CallCode, CallCode("gfx942", (KERNEL,), "plan")),
        (dict[str, tuple[float, float]], {"a": (1.0, 2.0)}),
        (list[int], [1, 2]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_result_comes_back_as_it_was(kind: Any, value: Any) -> None:
    text = json.dumps(jsonable(value), allow_nan=False)
    assert revive(kind, json.loads(text)) == value


def test_nan_comes_back_as_nan() -> None:
    value = revive(CaseResult, json.loads(json.dumps(jsonable(CaseResult("x", None, math.nan, False)))))
    assert math.isnan(value.lse_error)
    assert value.error is None


@dataclass(frozen=True)
class Interruptible:
    """A command of several tasks.

    Attributes:
        line: of the command, for the tasks before `stop` alone.
        where, name: where the function that does one task is looked up.
        all, stop: how many tasks there are, and how many are done before Ctrl-C.
        rows: of the document.
        needs: a fixture.
        more: words that, added to the line, ask for the tasks after `stop` too.
    """

    line: str
    where: Any
    name: str
    all: int
    stop: int
    rows: str
    more: str
    needs: str = "tmp_path"


LINES = {
    "validate": Interruptible(
        "validate --on cpu --jobs 1 --case lens=1,head_dim=64 --case lens=2,head_dim=64",
        validate, "run_task", 3, 2, "cases", "--case lens=3,head_dim=64",
    ),
    "validate fp4": Interruptible(
        "validate fp4 --on cpu --jobs 1 --batch 1 --context 48 --seeds 1",
        format_errors, "run_task", 4, 2, "recipes", "--seeds 2", needs="few_recipes",
    ),
    "bench decode": Interruptible(
        f"{SMALL_BENCH} --format fp8_e4m3fn",
        Bench, "measure", 4, 2, "rows", "--format fp8_e4m3fn,bf16", needs="stand_in_gpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", LINES)
def test_a_command_goes_on_where_ctrl_c_stopped_it(
    command: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = LINES[command]
    request.getfixturevalue(asked.needs)
    line, more = asked.line, asked.more
    part, whole = document(line)[asked.rows], document(f"{line} {more}")[asked.rows]
    right = getattr(asked.where, asked.name)
    stopping, _ = counted(right, most=asked.stop)
    monkeypatch.setattr(asked.where, asked.name, stopping)
    line = f"{line} {more} --resume {tmp_path / 'kept'} --csv {tmp_path / 'rows.csv'}"
    result = narrowkv(f"{line} --json", ends=130)
    found = json.loads(result.stdout)
    assert found["interrupted"] is True
    assert found[asked.rows] == part
    assert "to go on, give the same command again" in result.stderr
    counting, done = counted(right)
    monkeypatch.setattr(asked.where, asked.name, counting)
    result = narrowkv(f"{line} --json")
    assert json.loads(result.stdout)[asked.rows] == whole
    assert len(done) == asked.all - asked.stop
    assert f"{asked.stop} of {asked.all} finished before" in result.stderr
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(whole)


def test_a_file_of_another_run_is_refused(tmp_path: Path, stand_in_gpu: Any) -> None:
    kept = tmp_path / "kept"
    line = f"{SMALL_BENCH} --format bf16 --resume {kept}"
    narrowkv(line)
    assert "--resume: " in narrowkv(f"{line} --samples 7", ends=2).stderr
    kept.write_text("my notes\n")
    assert "--resume: " in narrowkv(line, ends=2).stderr


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
    options = ["--full", "--on", "cpu", "--jobs", "2", "--out", str(out)]
    line = [sys.executable, "-m", "narrowkv.cli", "validate", *options]
    child = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    time.sleep(25)
    assert len(running_in_group(child.pid)) >= 3
    os.killpg(child.pid, signal.SIGINT)
    _, stderr = child.communicate(timeout=30)
    found = json.loads(out.read_text())
    failed = not all(case["passed"] for case in found["cases"])
    assert child.returncode == (1 if failed else 130), stderr
    assert found["interrupted"] is True
    assert 0 < len(found["cases"]) < found["planned"]
    assert not running_in_group(child.pid)

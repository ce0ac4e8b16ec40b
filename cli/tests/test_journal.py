"""`--resume`: finished cases come back as they were, and those of another run are refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from typer.testing import CliRunner

from narrowkv.cli import journal, validate
from narrowkv.cli.answers import PASS, Answer, Compiled, Outcome, Sample
from narrowkv.cli.app import app
from narrowkv.cli.bench.decode import Row
from narrowkv.cli.bench.workload import DecodeShape
from narrowkv.cli.contracts import CONTRACT_SETS
from narrowkv.cli.journal import Journal, revive
from narrowkv.cli.report import UsageError, jsonable
from narrowkv.cli.sage.accuracy import SageResult
from narrowkv.cli.shipped_code import CallCode
from narrowkv.quant.accuracy import ErrorReport
from narrowkv.testing.checking import CaseResult
from narrowkv.testing.codegen import KernelCode

run = CliRunner().invoke
KERNEL = KernelCode("_kernel", 128, 0, 40, 0, 0, 0, 8192, 2, 4, {"v_mfma": 8}, {"valu": 3}, 0.25)
CONTRACT = CONTRACT_SETS["glm-gqa12"].contracts[0]
ERROR = ErrorReport(
    cosine=0.9, relative_l1=0.001, rmse=0.5, max_abs=0.25, worst_index=(0, 3), not_finite=0, count=9
)
OUTCOME = Outcome(
    (Answer(CONTRACT, "narrowkv", "cpu", PASS, time_us={"median": 1.5}, sample=Sample(1, 2, 3, 4, 5, 0.5)),),
    Compiled("gfx942", PASS, "", (KERNEL,), {"bound_by": "memory"}),
)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Outcome, OUTCOME),
        (CaseResult, CaseResult("lens=1", ERROR, 0.5, True, bound=0.25)),
        (SageResult, SageResult("cpu", ERROR, 0.5, 0.25, True)),
        (
            tuple[Row, ...],
            (Row(DecodeShape(1, 2, 3, 4, 5, 6, "bf16", "fp4_e2m1"), "narrowkv", median_us=1.5),),
        ),
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


T = TypeVar("T")


@dataclass(frozen=True)
class Case(Generic[T]):
    size: T


def test_what_was_kept_is_not_run_again_and_a_cut_line_is(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    first = Journal(path, {"command": "x"}, float)
    first.add(Case(1), 0.5)
    first.add(Case(2), math.nan)
    with path.open("a") as file:
        file.write('{"case": {"size": 3}, "resul')
    second = Journal(path, {"command": "x"}, float)
    assert [Case(n) in second for n in (1, 2, 3)] == [True, True, False]
    assert second.result(Case(1)) == 0.5
    assert math.isnan(second.result(Case(2)))
    second.add(Case(3), 3.5)
    assert Journal(path, {"command": "x"}, float).result(Case(3)) == 3.5


def test_a_file_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    Journal(path, {"command": "x", "gpu": None}, float)
    with pytest.raises(UsageError, match="of a run with gpu None, and this one has 'H100'; give a new file"):
        Journal(path, {"command": "x", "gpu": "H100"}, float)
    with pytest.raises(UsageError, match="one that --resume wrote"):
        Journal(path, {"command": "x"}, float)
    monkeypatch.setattr(journal, "source_digest", lambda: "other")
    with pytest.raises(UsageError, match="narrowkv has changed since"):
        Journal(path, {"command": "x", "gpu": None}, float)
    path.write_text("my notes\n")
    with pytest.raises(UsageError, match="one that --resume wrote"):
        Journal(path, {"command": "x", "gpu": None}, float)
    assert path.read_text() == "my notes\n"


def test_the_digest_is_of_the_sources() -> None:
    assert len(journal.source_digest()) == 16
    assert journal.source_digest() == journal.source_digest.__wrapped__()


def test_validate_goes_on_where_ctrl_c_stopped_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def until_third(task: validate.Task) -> CaseResult:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(str(task.case))
        return CaseResult(str(task.case), ERROR, 0.0, True)

    monkeypatch.setattr(validate, "run_task", until_third)
    cases = [option for n in (1, 2, 3) for option in ("--case", f"lens={n}")]
    command = ["validate", "--on", "cpu", "--jobs", "1", "--resume", str(tmp_path / "kept"), "--json", *cases]
    result = run(app, command)
    assert result.exit_code == 130
    assert "to go on, give the same command again" in result.stderr
    ran.clear()
    result = run(app, command)
    assert result.exit_code == 0, result.stderr
    assert ran == ["lens=3"]
    document = json.loads(result.stdout)
    assert [case["case"] for case in document["cases"]] == ["lens=1", "lens=2", "lens=3"]
    assert document["cases"][0]["error"] == jsonable(ERROR)
    assert "2 of 3 finished before" in result.stderr

"""`--resume`: finished cases come back as they were, and those of another run are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowkv.cli import validate
from narrowkv.cli.app import app
from narrowkv.quant.accuracy import ErrorReport
from narrowkv.testing.bench.measure import Row
from narrowkv.testing.checking import CaseResult, SageResult, Sample
from narrowkv.testing.codegen import CallCode, KernelCode
from narrowkv.testing.contracts import CONTRACT_SETS
from narrowkv.testing.probing import PASS, Answer, Compiled, Outcome
from narrowkv.testing.records import jsonable, revive

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


def test_validate_goes_on_where_ctrl_c_stopped_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def until_third(task: validate.CaseTask) -> CaseResult:
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
    (tmp_path / "kept").write_text("my notes\n")
    result = run(app, command)
    assert result.exit_code == 2
    assert "--resume: " in result.stderr

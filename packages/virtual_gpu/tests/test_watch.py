"""`watch`: what it compares, what it refuses, and that it finds what releases of Triton changed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton

from narrowkv.virtual_gpu import __main__ as command
from narrowkv.virtual_gpu.watch import Run, compare, distance, triton_folder

HERE = Path(__file__).parent
OWN = str(Path(triton.__file__).parent.parent)

LAUNCH = {
    "kernel": "attend", "registers": 100, "spills": 0, "scratch": 0, "lds": 4096, "waves": 4,
    "modelled_us": 10.0,
}  # fmt: skip

ADD = """
import torch, triton, triton.language as tl

@triton.jit
def add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < n) + 1, at < n)

def case_add():
    x = torch.arange(100.0, device="cuda")
    y = torch.empty_like(x)
    add_one[(1,)](x, y, 100, BLOCK=128)
    return {"sum": y}

def case_refused():
    raise ValueError("not here")
"""


def a_run(
    output: list[float], *, error: str | None = None, expected: list[float] | None = None, **launch: Any
) -> Run:
    records = {"case": {"error": error, "launches": [LAUNCH | launch]}}
    right = {} if expected is None else {"case": [np.array(expected)]}
    return Run("1.0", "gfx942", records, {"case": [np.array(output)]}, right)


@pytest.mark.parametrize(
    ("changed", "what", "worse"),
    [
        ({"spills": 3}, "spills", True),
        ({"scratch": 16}, "scratch", True),
        ({"registers": 128}, "registers", False),
        ({"lds": 8192}, "lds", False),
        ({"waves": 2}, "waves", True),
        ({"waves": 8}, "waves", False),
        ({"modelled_us": 12.0}, "modelled time", True),
        ({"modelled_us": 8.0}, "modelled time", False),
        ({"kernel": "other"}, "launches", False),
        ({"error": "OutOfResources"}, "error", True),
    ],
)
def test_each_difference_is_one_change(changed: dict[str, Any], what: str, worse: bool) -> None:
    (change,) = compare(a_run([1.0, 2.0]), a_run([1.0, 2.0], **changed))
    assert (change.what, change.worse) == (what, worse)


def test_what_is_alike_is_no_change() -> None:
    assert not list(compare(a_run([1.0, 2.0]), a_run([1.0, 2.0001], modelled_us=10.5)))


@pytest.mark.parametrize(
    ("before", "after", "expected", "worse"),
    [
        ([1.0], [2.0], None, [True]),
        ([1.0], [2.0], [1.0], [True]),
        ([1.0], [2.0], [2.0], [False]),
        ([1.0], [2.0], [3.0], []),
        ([1.0], [float("nan")], [1.0], [True]),
        ([float("nan")], [float("nan")], None, []),
    ],
)
def test_results_are_held_against_what_is_right(
    before: list[float], after: list[float], expected: list[float] | None, worse: list[bool]
) -> None:
    found = compare(a_run(before, expected=expected), a_run(after, expected=expected))
    assert [change.worse for change in found] == worse


def test_results_of_other_shapes_differ() -> None:
    assert distance([np.ones(2)], [np.ones(3)]) == float("inf")


def test_the_same_triton_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "cases.py"
    cases.write_text(ADD)
    assert command.main(["watch", str(cases), "--triton", OWN, OWN, "--target", "gfx950", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == []


@pytest.mark.parametrize(
    ("text", "versions", "message"),
    [
        ("x = 1", (OWN, OWN), "no function whose name begins with case_"),
        ("def expected_a(): ...\ndef case_b(): ...", (OWN, OWN), "expected_a, but no case_a"),
        (ADD, ("missing.whl", OWN), r"there is no wheel missing\.whl"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    text: str, versions: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = tmp_path / "cases.py"
    cases.write_text(text)
    assert command.main(["watch", str(cases), "--triton", *versions, "--target", "gfx942"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_folder_without_triton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no package triton"):
        triton_folder(str(tmp_path), tmp_path)


@pytest.mark.slow
def test_it_finds_what_releases_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three public reports: a masked copy that is wrong, attention that spills, LDS beyond the limit."""
    arguments = ["watch", str(HERE / "watched_cases.py"), "--target", "gfx950", "--json"]
    assert command.main([*arguments, "--triton", "3.7.1", "3.8.0"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    found = {(c["case"], c["what"]): c for c in changes}
    assert not found["masked_copy", "result"]["worse"]  # 3.8.0 has the repair
    assert "Hardware limit: 163840" in found["pipelined_attention", "error"]["after"]
    assert command.main([*arguments, "--triton", "3.6.0", "3.7.1"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    found = {(c["case"], c["what"]): c for c in changes}
    assert found["wide_attention", "spills"]["worse"]
    assert found["wide_attention", "modelled time"]["worse"]

"""The document, the files, and the processes behind them."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from narrowkv.cli.report import ExitCode, Report, UsageError, check_writable, jsonable, number, to_csv
from narrowkv.cli.workers import default_jobs, in_processes


@dataclass(frozen=True)
class Point:
    x: float
    tags: tuple[str, ...]


def test_jsonable_turns_dataclasses_to_objects_and_what_json_lacks_to_null() -> None:
    value = {"p": Point(math.nan, ("a",)), 3: [math.inf, 1.5], "file": Path("x")}
    assert jsonable(value) == {"p": {"x": None, "tags": ["a"]}, "3": [None, 1.5], "file": "x"}
    json.dumps(jsonable(value), allow_nan=False)


def test_finish_says_that_a_run_was_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("probe", as_json=True)
    assert report.finish({"rows": [1]}, ExitCode.OK, interrupted=True) is ExitCode.INTERRUPTED
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["interrupted"] is True
    assert document["exit_code"] == 130
    assert document["rows"] == [1]
    assert "interrupted" in captured.err


def test_an_interrupted_run_that_had_failed_stays_failed() -> None:
    assert Report("probe").finish({}, ExitCode.NUMERICAL, interrupted=True) is ExitCode.NUMERICAL


def test_a_folder_is_no_output_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--csv must be a file that can be written"):
        check_writable("--csv", tmp_path)


def test_csv_has_every_column_in_order() -> None:
    assert to_csv([{"a": 1, "b": "x"}, {"b": "y", "c": 2.5}]) == "a,b,c\n1,x,\n,y,2.5\n"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1.23456, "1.23"), (12345.6, "12346"), (0.00012, "0.00012")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def _square(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def _slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_tasks_run_in_other_processes_and_all_come_back() -> None:
    results = dict(in_processes(_square, [1, 2, 3, 4], jobs=2))
    assert {task: square for task, (square, _) in results.items()} == {1: 1, 2: 4, 3: 9, 4: 16}
    assert os.getpid() not in {process for _, process in results.values()}


def test_one_job_runs_right_here() -> None:
    assert {process for _, (_, process) in in_processes(_square, [1, 2], jobs=1)} == {os.getpid()}


def test_leaving_early_ends_the_processes() -> None:
    begin = time.perf_counter()
    for _, seconds in in_processes(_slow, [0.01, 60.0, 60.0], jobs=2):
        assert seconds == 0.01
        break
    deadline = time.perf_counter() + 10
    while multiprocessing.active_children() and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    assert time.perf_counter() - begin < 40


def test_default_jobs_is_sensible() -> None:
    assert 1 <= default_jobs() <= 8

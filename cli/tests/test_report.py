"""The document and the files of a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowkv.cli.report import ExitCode, Report, UsageError, check_writable
from narrowkv.testing.records import number, to_csv


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

"""What every command writes: tables, numbers, colours, the document, files."""

from __future__ import annotations

import json
import os
import pty
import re
from pathlib import Path

import pytest

from narrowkv.cli import report
from narrowkv.cli.report import (
    Column,
    ExitCode,
    Report,
    Sheet,
    UsageError,
    check_writable,
    filled,
    keys,
    numbers,
)
from narrowkv.testing.records import number, to_csv


def sheet() -> Sheet:
    table = Sheet([*keys("operation", "KV cache"), *numbers("rel. L1", "tokens/GiB"), Column("")])
    table.add("paged_decode", "fp8_e4m3fn/fp4_e2m1", "1.44e-03", 694736, "")
    table.add(
        "batch_prefill", "bf16", "-", "", "refused: a reason of some words that is longer than the rest"
    )
    return table


def lines(table: Sheet, width: int) -> list[str]:
    return [line.plain for line in table.lines(width)]


def test_a_table_that_fits_has_a_line_for_each_row() -> None:
    head, rule, first, second = lines(sheet(), 200)
    assert head.split() == ["operation", "KV", "cache", "rel.", "L1", "tokens/GiB"]
    assert set(rule) == {"-", " "}
    assert first == "paged_decode   fp8_e4m3fn/fp4_e2m1  1.44e-03      694736"
    assert second.endswith("than the rest")
    with pytest.raises(ValueError, match="a row must have 5 cells, got 1"):
        sheet().add("alone")


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_table_that_does_not_fit_is_blocks_without_a_cell_lost(width: int) -> None:
    found = lines(sheet(), width)
    assert found[0].startswith("operation paged_decode")
    text = "\n".join(found)
    for pair in ("KV cache fp8_e4m3fn/fp4_e2m1", "rel. L1 1.44e-03", "tokens/GiB 694736", "rel. L1 -"):
        assert pair in text
    assert "refused: a reason of some words that is longer than the rest" in text
    longest = max(len(pair) for pair in ("KV cache fp8_e4m3fn/fp4_e2m1", "refused: a reason")) + 4
    assert all(len(line) <= max(width, longest) for line in found if "reason" not in line)


def test_parts_stay_whole() -> None:
    assert list(filled(["ab cd", "ef", "gh"], 9, first=" ", then="  ")) == [" ab cd", "  ef  gh"]
    assert list(filled(["longer than that"], 4)) == ["longer than that"]
    assert list(filled([], 4)) == []


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1.23456, "1.23"), (12345.6, "12346"), (0.00012, "0.00012")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_csv_has_every_column_in_order() -> None:
    assert to_csv([{"a": 1, "b": "x"}, {"b": "y", "c": 2.5}]) == "a,b,c\n1,x,\n,y,2.5\n"


def test_finish_says_that_a_run_was_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert Report("probe").finish({}, ExitCode.NUMERICAL, interrupted=True) is ExitCode.NUMERICAL
    capsys.readouterr()
    cut_short = Report("probe", as_json=True)
    assert cut_short.finish({"rows": [1]}, ExitCode.OK, interrupted=True) is ExitCode.INTERRUPTED
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["interrupted"], document["exit_code"], document["rows"]) == (True, 130, [1])
    assert "interrupted" in captured.err


def test_a_folder_is_no_output_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--csv must be a file that can be written"):
        check_writable("--csv", tmp_path)


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_a_terminal_has_colours_unless_no_color_is_set(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(report.sys, "stdout", terminal)
        shown = Report("env")
        shown.say("[bold red]wrong[/]")
        shown.line("right", "green")
        terminal.flush()
        seen = os.read(leader, 65536).decode()
    os.close(leader)
    styles = [code.split(";") for code in re.findall(r"\x1b\[([0-9;]*)m", seen)]
    colours = [part for style in styles for part in style if re.fullmatch(r"[39][0-7]", part)]
    assert bool(colours) is not bool(variables)
    assert "wrong" in seen

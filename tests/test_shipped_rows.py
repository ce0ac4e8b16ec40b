"""Rows of users' tune files among the shipped configurations: how they come there, and which come first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import triton
from tool_modules import load_tool

from narrowkv.runtime import get_target, tuned
from narrowkv.runtime.tuned import TunedRow, TuneFile, read_tuned, shipped_only, tuned_row

GFX942 = get_target("gfx942")
ROW = TunedRow(
    "decode", "a class", {"block": 32}, "block 16", (10.0, 7.5), (8.0, 7.0), 0.02, ("1 x 64",), 3, 1, 0, 1
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    block: int


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of an MI300X, which NARROWKV_TUNED names."""
    path = tmp_path / "tuned.json"
    TuneFile.of(GFX942, "MI300X", [ROW, replace(ROW, shape="another", choice=None)]).write(path)
    monkeypatch.setenv("NARROWKV_TUNED", str(path))
    tuned._read.cache_clear()
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of shipped rows."""
    monkeypatch.setattr(tuned, "SHIPPED_ROWS", tmp_path / "rows")
    tuned._shipped_rows.cache_clear()
    yield tmp_path / "rows"
    tuned._shipped_rows.cache_clear()


def test_a_report_becomes_shipped_rows(
    file: Path, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"device": "MI300X", "steps": [], "tuned": json.loads(file.read_text())}))
    assert read_tuned(report).rows.keys() == read_tuned(file).rows.keys()
    monkeypatch.delenv("NARROWKV_TUNED")
    assert tuned_row(GFX942, "decode", "a class") is None
    tuned._shipped_rows.cache_clear()
    written = load_tool("shipped_rows").ship(report)
    assert written.parent == shipped
    assert written.name == f"gfx942-304-triton-{triton.__version__}.json"
    found = tuned_row(GFX942, "decode", "a class")
    assert found == replace(ROW, file="")
    assert found.explain() == "tuned on such a GPU: 8.0 us instead of 10.0, 7.0 us instead of 7.5"
    assert tuned_row(GFX942, "decode", "another") is None  # the shipped configuration was faster there
    assert tuned_row(replace(GFX942, compute_units=38), "decode", "a class") is None
    assert read_tuned(written).device == "MI300X"


def test_a_users_file_comes_before_shipped_rows_unless_it_found_nothing_faster(
    file: Path, shipped: Path
) -> None:
    shipped.mkdir()
    rows = [replace(ROW, choice={"block": 16}), replace(ROW, shape="another", choice={"block": 16})]
    made = TuneFile.of(GFX942, "MI300X", rows)
    made.write(shipped / made.shipped_name)
    for shape, block in (("a class", 32), ("another", 16)):
        row = tuned_row(GFX942, "decode", shape)
        assert row is not None
        assert row.read_choice(Choice) == Choice(block)
    with shipped_only():
        row = tuned_row(GFX942, "decode", "a class")
    assert row is not None
    assert row.read_choice(Choice) == Choice(16)


def test_a_report_without_a_faster_configuration_ships_nothing(shipped: Path, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    TuneFile.of(GFX942, "MI300X", [replace(ROW, choice=None)]).write(path)
    assert load_tool("shipped_rows").ship(path) is None
    assert not shipped.exists()


def test_shipped_rows_are_of_the_chips_and_versions_that_their_names_say() -> None:
    for path in tuned.SHIPPED_ROWS.glob("*"):
        found = read_tuned(path)
        assert path.name == found.shipped_name
        assert all(row.choice is not None for row in found.rows.values())

"""Tune files: what is written is read back, and what is not of this GPU and Triton is refused by one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import triton

from narrowkv.runtime import get_target, tuned
from narrowkv.runtime.tuned import TunedRow, TuneFile, read_tuned, shipped_only, tuned_row

GFX942 = get_target("gfx942")


@dataclass(frozen=True)
class Choice:
    block: int

    def __post_init__(self) -> None:
        if self.block not in (16, 32):
            raise ValueError(f"block must be 16 or 32, got {self.block!r}")


ROW = TunedRow(
    "decode", "a class", {"block": 32}, "block 16", (10.0, 7.5), (8.0, 7.0), 0.02, ("1 x 64",), 3, 1, 0, 1
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of an MI300X, which NARROWKV_TUNED names."""
    path = tmp_path / "tuned.json"
    TuneFile.of(GFX942, "MI300X", [ROW, replace(ROW, shape="another", choice=None)]).write(path)
    monkeypatch.setenv("NARROWKV_TUNED", str(path))
    tuned._read.cache_clear()
    return path


def test_a_row_comes_back_as_it_was(file: Path) -> None:
    row = tuned_row(GFX942, "decode", "a class")
    assert row == replace(ROW, file=str(file))
    assert row.read_choice(Choice) == Choice(32)
    assert row.explain() == (f"tuned on this GPU ({file}): 8.0 us instead of 10.0, 7.0 us instead of 7.5")
    other = tuned_row(GFX942, "decode", "another")
    assert other is not None
    assert other.read_choice(Choice) is None
    assert tuned_row(GFX942, "sage", "a class") is None
    assert read_tuned(file).device == "MI300X"


def test_the_file_is_ignored_where_only_shipped_rows_are_asked_for(file: Path) -> None:
    with shipped_only():
        assert tuned_row(GFX942, "decode", "a class") is None
    assert tuned_row(GFX942, "decode", "a class") is not None


def test_a_file_is_read_once(file: Path) -> None:
    assert tuned_row(GFX942, "decode", "a class") is not None
    file.unlink()
    assert tuned_row(GFX942, "decode", "a class") is not None


def _edited(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        document = json.loads(path.read_text())
        path.write_text(json.dumps(change(document) or document))

    return edit


_TRITON = f"of Triton 3.8.0.git1, and this is {triton.__version__}"
REFUSALS = {
    "another chip": (_edited(lambda d: d.update(target="gfx950")), "is of gfx950 with 304 compute units"),
    "a partition": (
        _edited(lambda d: d.update(compute_units=38)),
        "38 compute units, and this is .* with 304",
    ),
    "another Triton": (_edited(lambda d: d.update(triton="3.8.0+git1")), _TRITON),
    "an unknown field": (_edited(lambda d: d.update(colour=1)), "unknown or missing fields: colour"),
    "an unknown field of a row": (
        _edited(lambda d: d["rows"][0].update(colour=1)),
        "row has .* fields: colour",
    ),
    "a lost field of a row": (_edited(lambda d: d["rows"][0].pop("tried") and None), "missing fields: tried"),
    "another format": (_edited(lambda d: d.update(format=1)), "its format is not 2"),
    "another document": (_edited(lambda d: [1]), "its format is not 2"),
    "no JSON": (lambda path: path.write_text("{"), "cannot be read"),
    "no file": (os.remove, "cannot be read"),
}


@pytest.mark.parametrize("which", REFUSALS)
def test_a_stale_or_foreign_file_is_refused_by_one_line_that_says_what_to_run(which: str, file: Path) -> None:
    change, words = REFUSALS[which]
    change(file)
    with pytest.raises(ValueError, match=words) as refused:
        tuned_row(GFX942, "decode", "a class")
    said = str(refused.value)
    assert said.endswith("; run `narrowkv tune` again, or unset NARROWKV_TUNED")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"block": 32, "colour": 1}, "unknown or missing fields: colour"),
        ({}, "unknown or missing fields: block"),
        ({"block": 48}, "not one that is tried: block must be 16 or 32, got 48"),
        ({"block": "32"}, "not one that is tried: block must be 16 or 32, got '32'"),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_tried_is_refused(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(ROW, choice=choice).read_choice(Choice)

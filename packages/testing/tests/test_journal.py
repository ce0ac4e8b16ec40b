"""Finished results in a file: they come back as they were, and a file of another run is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from narrowkv.testing import records
from narrowkv.testing.records import Journal, jsonable

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
    with pytest.raises(ValueError, match="of a run with gpu None, and this one has 'H100'; give a new file"):
        Journal(path, {"command": "x", "gpu": "H100"}, float)
    with pytest.raises(ValueError, match="one that an earlier run kept"):
        Journal(path, {"command": "x"}, float)
    monkeypatch.setattr(records, "source_digest", lambda: "other")
    with pytest.raises(ValueError, match="narrowkv has changed since"):
        Journal(path, {"command": "x", "gpu": None}, float)
    path.write_text("my notes\n")
    with pytest.raises(ValueError, match="one that an earlier run kept"):
        Journal(path, {"command": "x", "gpu": None}, float)
    assert path.read_text() == "my notes\n"


def test_the_digest_is_of_the_sources() -> None:
    assert len(records.source_digest()) == 16
    assert records.source_digest() == records.source_digest.__wrapped__()


@dataclass(frozen=True)
class Point:
    x: float
    tags: tuple[str, ...]


def test_jsonable_turns_dataclasses_to_objects_and_what_json_lacks_to_null() -> None:
    value = {"p": Point(math.nan, ("a",)), 3: [math.inf, 1.5], "file": Path("x")}
    assert jsonable(value) == {"p": {"x": None, "tags": ["a"]}, "3": [None, 1.5], "file": "x"}
    json.dumps(jsonable(value), allow_nan=False)

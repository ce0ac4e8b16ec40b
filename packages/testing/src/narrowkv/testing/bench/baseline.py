"""Compares a run with an earlier one by ratios to the floor, which depend less on the run than times do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowkv.testing.records import SCHEMA_VERSION

KEYS = ("backend", "batch", "context", "page_size", "num_kv_heads", "ratio", "head_dim", "q", "format")
_FIGURE = "ratio_to_floor"


def baseline_file(folder: Path, device: str) -> Path:
    """The file of a device's baseline: its name in lower case, joined by dashes."""
    return folder / ("-".join(re.findall(r"[a-z0-9]+", device.lower())) + ".json")


@dataclass(frozen=True)
class Change:
    """One row that both runs have.

    Attributes:
        row: the row's values of `KEYS`.
        before, now: time over the floor.
    """

    row: dict[str, Any]
    before: float
    now: float

    @property
    def by(self) -> float:
        """By which share the row became slower; 0.05 is five per cent."""
        return self.now / self.before - 1.0


def load_baseline(path: Path) -> dict[str, Any]:
    """The document of an earlier run of `narrowkv bench decode`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a document; the message says what is wrong.
    """
    try:
        document: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON document of `narrowkv bench`: {error}") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if rows is None or document.get("command") != "bench" or not isinstance(rows, list):
        raise ValueError(f"{path} must be a document of `narrowkv bench` with rows")
    if document.get("schema_version") != SCHEMA_VERSION:
        version = document.get("schema_version")
        raise ValueError(f"{path} must have schema_version {SCHEMA_VERSION}, got {version!r}")
    for row in rows:
        figure = row.get(_FIGURE) if isinstance(row, dict) else None
        if not isinstance(row, dict) or any(key not in row for key in KEYS):
            raise ValueError(f"{path} must have rows with {', '.join(KEYS)}")
        if figure is not None and not (isinstance(figure, int | float) and figure > 0):
            raise ValueError(f"{path} must have rows whose {_FIGURE} is positive, got {figure!r}")
    return dict(document)


def changes(baseline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Compares every row that both runs measured."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in KEYS)

    before = {key(row): row[_FIGURE] for row in baseline["rows"] if row.get(_FIGURE) is not None}
    return [
        Change({name: row[name] for name in KEYS}, float(before[key(row)]), float(row[_FIGURE]))
        for row in rows
        if row.get(_FIGURE) is not None and key(row) in before
    ]


def regressions(found: Sequence[Change], threshold: float) -> list[Change]:
    """The changes that are slower by more than `threshold`, worst first."""
    return sorted((c for c in found if c.by > threshold), key=lambda c: c.by, reverse=True)

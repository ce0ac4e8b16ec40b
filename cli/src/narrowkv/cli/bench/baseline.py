"""Comparing a run with an earlier one. Ratios to the floor travel between runs; absolute times do not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowkv.cli.report import SCHEMA_VERSION, UsageError

KEYS = ("backend", "batch", "context", "page_size", "num_kv_heads", "ratio", "head_dim", "q", "format")
_FIGURE = "ratio_to_floor"


def baseline_file(folder: Path, device: str) -> Path:
    """Where a device's baseline is kept: its name in lower case, joined by dashes."""
    return folder / ("-".join(re.findall(r"[a-z0-9]+", device.lower())) + ".json")


@dataclass(frozen=True)
class Change:
    """One row that both runs have.

    Attributes:
        row: what it is, by `KEYS`.
        before, now: time over the floor.
    """

    row: dict[str, Any]
    before: float
    now: float

    @property
    def by(self) -> float:
        """How much slower it became; 0.05 is five per cent."""
        return self.now / self.before - 1.0


def load_baseline(path: Path) -> dict[str, Any]:
    """An earlier run's document.

    Raises:
        UsageError: the file cannot be read, is no JSON, or is no document of a bench.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"--against must be a readable file, got {path}: {error.strerror or error}"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"--against must be a JSON document of `narrowkv bench`, got {path}: {error}"
        ) from None
    if (
        not isinstance(document, dict)
        or document.get("command") != "bench"
        or not isinstance(document.get("rows"), list)
    ):
        raise UsageError(f"--against must be a document of `narrowkv bench` with rows, got {path}")
    if document.get("schema_version") != SCHEMA_VERSION:
        version = document.get("schema_version")
        raise UsageError(f"--against must have schema_version {SCHEMA_VERSION}, got {version!r} in {path}")
    for row in document["rows"]:
        figure = row.get(_FIGURE) if isinstance(row, dict) else None
        if not isinstance(row, dict) or any(key not in row for key in KEYS):
            raise UsageError(f"--against has a row without {', '.join(KEYS)}: {path}")
        if figure is not None and not (isinstance(figure, int | float) and figure > 0):
            raise UsageError(f"--against has a row whose {_FIGURE} is {figure!r}: {path}")
    return document


def changes(baseline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Every row that both runs measured."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in KEYS)

    before = {key(row): row[_FIGURE] for row in baseline["rows"] if row.get(_FIGURE) is not None}
    return [
        Change({name: row[name] for name in KEYS}, float(before[key(row)]), float(row[_FIGURE]))
        for row in rows
        if row.get(_FIGURE) is not None and key(row) in before
    ]


def regressions(found: Sequence[Change], threshold: float) -> list[Change]:
    """Those that became slower by more than `threshold`, worst first."""
    return sorted((c for c in found if c.by > threshold), key=lambda c: c.by, reverse=True)

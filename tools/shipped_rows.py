"""Puts the configurations of users' reports among the shipped ones.

    python tools/shipped_rows.py narrowkv-report.json    # a report, or a file of `narrowkv tune`

Each chip and version of Triton has a file in the folder of `narrowkv.runtime.tuned`. A row is taken where its
configuration was faster than the shipped one; it replaces an older row of its shape class.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from narrowkv.runtime import tuned


def ship(report: Path) -> Path | None:
    """Adds the rows of a report; returns the file that they went to, None if the report has no faster rows.

    Raises:
        ValueError: the file cannot be read, or has unknown fields.
    """
    found = tuned.read_tuned(report)
    faster = {key: replace(row, file="") for key, row in found.rows.items() if row.choice is not None}
    if not faster:
        return None
    path = tuned.SHIPPED_ROWS / found.shipped_name
    older = tuned.read_tuned(path).rows if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    replace(found, rows={**older, **faster}).write(path)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {ship(Path(name)) or 'no configuration is faster than the shipped one'}")

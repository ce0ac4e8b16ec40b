"""Compares documents of benches: a run with an earlier one, and measured with modelled rows.

A run is compared with its baseline by ratios to the floor, which depend less on the run than times do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowkv.testing.records import SCHEMA_VERSION, number

KEYS = ("backend", "batch", "context", "page_size", "num_kv_heads", "ratio", "head_dim", "q", "format")
_FIGURE = "ratio_to_floor"


def baseline_file(folder: Path, device: str) -> Path:
    """The file of a device's baseline: its name in lower case, joined by dashes."""
    return folder / ("-".join(re.findall(r"[a-z0-9]+", device.lower())) + ".json")


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


def changes(baseline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares every row that both runs measured.

    Returns:
        Of each row its values of `KEYS`; before, now: time over the floor; change: by which share it became
        slower, 0.05 is five per cent.
    """

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in KEYS)

    before = {key(row): float(row[_FIGURE]) for row in baseline["rows"] if row.get(_FIGURE) is not None}
    found = []
    for row in rows:
        now, was = row.get(_FIGURE), before.get(key(row))
        if now is not None and was is not None:
            same = dict(zip(KEYS, key(row), strict=True))
            found.append({**same, "before": was, "now": float(now), "change": now / was - 1.0})
    return found


def regressions(found: Sequence[dict[str, Any]], threshold: float) -> list[dict[str, Any]]:
    """The changes that are slower by more than `threshold`, worst first."""
    return sorted((c for c in found if c["change"] > threshold), key=lambda c: c["change"], reverse=True)


_DIFFERS = 1.25  # a row whose measured time is this factor from the model's is listed


def _measured(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], float | None]]:
    """Name of the call, row and microseconds of what a bench measured of narrowkv."""
    for row in document.get("rows", ()):
        if row.get("backend", "narrowkv") != "narrowkv":
            continue
        if document["bench"] == "prefill":
            yield "batch_prefill", row, row["median_us"]
            yield "prefill_append", row, row["append_us"]
        elif document["bench"] == "sage":
            yield f"{row['qk']}, {row['granularity']}", row, row["median_us"]
        else:
            yield row.get("mode", document["bench"]), row, row["median_us"]


def _same(bench: str, call: str, row: dict[str, Any], other: str, model: dict[str, Any]) -> bool:
    """Whether a modelled row is of the call that was measured."""
    shape = model["shape"].items()
    return bench == other and call == model["name"] and all(row.get(key) == size for key, size in shape)


def compare(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measured beside modelled rows of benches' documents; what one of them lacks is None."""
    modelled = [(d["bench"], row) for d in documents for row in d.get("model_rows", ())]
    rows: list[dict[str, Any]] = []
    for document in documents:
        for call, row, us in _measured(document):
            model = next((m for bench, m in modelled if _same(document["bench"], call, row, bench, m)), None)
            shape = model["shape"] if model else {k: v for k, v in row.items() if isinstance(v, int)}
            model_us = model["model_us"] if model else None
            rows.append({
                "bench": document["bench"], "call": call, **shape, "status": row["status"],
                "relative_l1": row["relative_l1"], "differing_replays": row.get("differing_replays"),
                "measured_us": us, "model_us": model_us,
                "measured_over_model": us / model_us if us and model_us else None,
                "model_bound": model["model_bound"] if model else "",
            })  # fmt: skip
    if not rows:
        rows = [
            {"bench": bench, "call": m["name"], **m["shape"], "measured_us": None,
             "model_us": m["model_us"], "model_bound": m["model_bound"]}
            for bench, m in modelled
        ]  # fmt: skip
    return rows


def markdown(document: Mapping[str, Any]) -> str:
    """The report as text to paste into an issue."""
    rows, steps = document["rows"], document["steps"]
    lines = [f"# narrowkv report: {document['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in document["versions"].items() if value]
    if tuned := document.get("tuned"):
        said = f"- configurations of a tune file: {len(tuned['rows'])} shape classes"
        lines.append(f"{said}; {tuned['refused']}" if "refused" in tuned else said)
    lines += ["", "| command | exit code | seconds |", "|---|---|---|"]
    for step in steps:
        code = "not finished" if step["exit_code"] is None else step["exit_code"]
        lines.append(f"| `narrowkv {step['command']}` | {code} | {step['seconds']:.0f} |")
    for step in steps:
        if step["said"]:
            lines += ["", f"`narrowkv {step['command']}`:", "", "```", step["said"], "```"]
    heads = ("bench", "call", "sizes", "status", "measured us", "model us", "ratio", "model: bound")
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    known = {
        "bench", "call", "status", "relative_l1", "differing_replays", "measured_us", "model_us",
        "measured_over_model", "model_bound",
    }  # fmt: skip
    for row in rows:
        sizes = ", ".join(f"{key} {value}" for key, value in row.items() if key not in known)
        times = (number(row.get(key), 4) for key in ("measured_us", "model_us", "measured_over_model"))
        cells = (row["bench"], row["call"], sizes, row.get("status", "-"), *times, row["model_bound"] or "-")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if unstable := [row for row in rows if row.get("differing_replays")]:
        lines += ["", f"{len(unstable)} of {len(rows)} rows have replays of their graph with other bits."]
    ratios = [(row, row["measured_over_model"]) for row in rows if row.get("measured_over_model")]
    differing = [row for row, ratio in ratios if not 1 / _DIFFERS <= ratio <= _DIFFERS]
    if ratios:
        count = f"{len(differing)} of {len(ratios)} rows"
        lines += ["", f"{count} differ from the model by more than a factor of {_DIFFERS}."]
    return "\n".join([*lines, ""])

"""`narrowkv report`: its commands, and measured beside modelled rows of their documents.

On an Instinct GPU the timing model's prediction stands beside each measured row; on other GPUs there is none;
without a GPU it is a rehearsal: the emulator runs in the GPU's place, and nothing is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowkv.runtime.tuned import read_tuned
from narrowkv.testing.machine import versions
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.records import number
from narrowkv.testing.words import AMD_TARGETS

__all__ = ["ReportCommand", "commands", "compare", "markdown", "report_document", "run_step", "run_steps"]

_LINES = 12  # shown of the output of a command that failed


@dataclass(frozen=True)
class ReportCommand:
    """One command of the report, and its result.

    Attributes:
        command: its arguments.
        exit_code: None if it did not end in time, or time was up before it.
        seconds: that it took.
        document: its JSON; None without one.
        said: the end of its output, if it failed.
    """

    command: str
    exit_code: int | None
    seconds: float
    document: dict[str, Any] | None = None
    said: str = ""


def commands(target: str | None, *, quick: bool = False) -> list[str]:
    """The commands: for a GPU of that target, or for a rehearsal without one.

    Args:
        target: of the GPU; None without one.
        quick: with the smallest sizes, to see in a minute whether everything runs.
    """
    place = "gpu" if target else AMD_TARGETS[0]
    one = " --jobs 1" if quick else ""  # another process would start for longer than it works
    own = f" --target {target}" if quick and target in AMD_TARGETS else ""
    found = [f"probe {'batch-prefill' if quick else 'glm-gqa12'} --on {place}{own}{one}"] if target else []
    benches = {}
    for name, operation in OPERATIONS.items():
        if cases := operation.report_cases if target else operation.report_cases[:1]:
            found.append(f"validate {name} --on {place}{one} {' '.join(f'--case {case}' for case in cases)}")
        full = operation.report_measured if target else operation.report_rehearsed
        if rows := operation.report_quick if quick else full:
            benches[name] = rows
    if target in AMD_TARGETS:
        found.append("env --probe")
    if target:
        found += [f"bench {name} {rows} --samples 20" for name, rows in benches.items()]
    if target is None or target in AMD_TARGETS:
        found += [f"bench {name} {rows} --on {target or place}" for name, rows in benches.items()]
    return found


def run_step(program: Sequence[str], command: str, seconds: float) -> ReportCommand:
    """Runs one command in its own process, so that a fault leaves the others; ends it after `seconds`."""
    begun = time.monotonic()
    line = [*program, *command.split(), "--json"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=max(seconds, 1), check=False)
    except subprocess.TimeoutExpired:
        return ReportCommand(command, None, time.monotonic() - begun, said="did not end in time")
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = None
    said = "\n".join(done.stderr.strip().splitlines()[-_LINES:]) if done.returncode else ""
    return ReportCommand(command, done.returncode, time.monotonic() - begun, document, said)


def run_steps(program: Sequence[str], planned: Sequence[str], seconds: float) -> Iterator[ReportCommand]:
    """Runs the commands one after the other; those that no time is left for are not run."""
    end = time.monotonic() + seconds
    for command in planned:
        left = end - time.monotonic()
        if left > 0:
            yield run_step(program, command, left)
        else:
            yield ReportCommand(command, None, 0.0, said="time was up")


def report_document(environment: Mapping[str, Any], steps: Sequence[ReportCommand]) -> dict[str, Any]:
    """The report's JSON document, in the form of the files in benchmarks/results/."""
    gpu = next(iter(environment["gpus"]), None)
    rehearsal = "rehearsal without a GPU: nothing was measured"
    return {
        "device": f"{gpu['name']} ({gpu['target']})" if gpu else rehearsal,
        "versions": versions(),
        "commands": ["narrowkv report"],
        "shape": "the benches' main rows",
        "environment": environment,
        "rows": compare([step.document for step in steps if step.document and "bench" in step.document]),
        "tuned": _tuned(),
        "steps": [asdict(step) for step in steps],
    }


def _tuned() -> dict[str, Any] | None:
    """The file that NARROWKV_TUNED names, whose configurations the steps took; None without one."""
    name = os.environ.get("NARROWKV_TUNED")
    if not name:
        return None
    try:
        return read_tuned(Path(name)).document()
    except ValueError as error:
        return {"refused": str(error), "rows": []}


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

"""The commands of `narrowkv report`.

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
from narrowkv.testing.bench.comparison import compare
from narrowkv.testing.machine import versions
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.words import AMD_TARGETS

__all__ = ["ReportCommand", "commands", "report_document", "run_step", "run_steps"]

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

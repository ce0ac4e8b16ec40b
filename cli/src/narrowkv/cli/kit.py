"""`narrowkv report`: probe, a sample of validate and the benches' main rows, in two files to share."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from narrowkv.cli.report import ExitCode, Report, UsageError, check_writable
from narrowkv.testing.bench.comparison import compare, markdown
from narrowkv.testing.machine import describe, versions
from narrowkv.testing.machine_report import Step, commands, run_step

_PROGRAM = (sys.executable, "-m", "narrowkv.cli")


def write_report(report: Report, *, folder: Path, minutes: float) -> ExitCode:
    """Runs every step that time is left for, and writes the two files.

    Args:
        report: where progress goes.
        folder: of the files.
        minutes: after which nothing more is run.

    Raises:
        UsageError: the folder is none, or cannot be written.
    """
    if not folder.is_dir():
        raise UsageError(f"--folder must be a folder that exists, got {folder}")
    files = [folder / f"narrowkv-report{suffix}" for suffix in (".json", ".md")]
    for path in files:
        check_writable("--folder", path)
    environment = describe()
    gpu = next(iter(environment["gpus"]), None)
    target = None if gpu is None else str(gpu["target"])
    end = time.monotonic() + 60 * minutes
    steps: list[Step] = []
    planned = commands(target)
    with report.progress(len(planned), "report") as line:
        for command in planned:
            left = end - time.monotonic()
            late = Step(command, None, 0.0, said="time was up")
            step = run_step(_PROGRAM, command, left) if left > 0 else late
            steps.append(step)
            line.advance(command)
    device = f"{gpu['name']} ({target})" if gpu else "rehearsal without a GPU: nothing was measured"
    document = {
        "device": device,
        "versions": versions(),
        "commands": ["narrowkv report"],
        "shape": "the benches' main rows",
        "environment": environment,
        "rows": compare([s.document for s in steps if s.document and "bench" in s.document]),
        "steps": [asdict(step) for step in steps],
    }
    files[1].write_text(markdown(document))
    faulty = [step for step in steps if step.exit_code]
    report.files = type(report.files)(out=files[0])
    report.line(f"written: {files[0]} and {files[1]}; {len(faulty)} of {len(steps)} commands failed")
    return report.finish(document, ExitCode.NUMERICAL if faulty else ExitCode.OK)

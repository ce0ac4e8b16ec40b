"""`narrowkv report`: probe, a sample of validate and the benches' main rows, in two files to share.

Every part is another command, run in a process of its own so that a fault of one leaves the others. On an
Instinct GPU the timing model's prediction stands beside each measured row; on other GPUs there is none;
without a GPU it is a rehearsal: the emulator runs in the GPU's place, and nothing is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowkv.cli.names import AMD_TARGETS
from narrowkv.cli.report import ExitCode, Report, UsageError, check_writable
from narrowkv.testing.bench.comparison import compare, markdown
from narrowkv.testing.machine import describe, versions

BENCHES = {
    "decode": "--batch 1,64 --context 8192 --page-size 16",
    "prefill": "--new 1024,4096 --prefix 0,4096 --heads 96/8 --format fp8_e4m3fn",
    "sparse": "--tokens 4096 --heads 64,128 --topk 2048 --mode bf16,fused",
    "sage": "--context 16384 --granularity per_thread",
}
"""The main rows of each bench."""
REHEARSED = {
    "decode": "--batch 64 --context 8192 --page-size 16 --format fp8_e4m3fn",
    "prefill": "--new 1024 --prefix 4096 --heads 96/8 --format fp8_e4m3fn",
}
_CASES = {
    "decode": ("lens=70+5,clean=1", "lens=33,k=bf16,v=bf16", "split=uniform,lens=300+37+1,sinks=1"),
    "prefill": ("kernel=dense", "kernel=fused,format=bf16", "operation=append"),
    "sparse": ("lens=37+0,sink=1", "mode=decode,lens=37"),
}
_LINES = 12  # of what a command that failed said


@dataclass(frozen=True)
class Step:
    """One command of the report, and what came of it.

    Attributes:
        command: its arguments.
        exit_code: None if it did not end in time, or time was up before it.
        seconds: that it took.
        document: its JSON; None without one.
        said: the end of what it said, where it failed.
    """

    command: str
    exit_code: int | None
    seconds: float
    document: dict[str, Any] | None = None
    said: str = ""


def commands(target: str | None) -> list[str]:
    """What is run: on a GPU of that target, or as a rehearsal without one."""
    place = "gpu" if target else "gfx942"
    cases = {name: lines if target else lines[:1] for name, lines in _CASES.items()}
    benches = BENCHES if target else REHEARSED
    found = [f"probe glm-gqa12 --on {place}"] if target else []
    found += [
        f"validate {name} --on {place} {' '.join(f'--case {line}' for line in lines)}"
        for name, lines in cases.items()
    ]
    if target:
        found += [f"bench {name} {rows} --samples 20" for name, rows in benches.items()]
    if target is None or target in AMD_TARGETS:
        found += [f"bench {name} {rows} --on {target or place}" for name, rows in benches.items()]
    return found


def run_step(command: str, seconds: float) -> Step:
    """Runs one command; after so many seconds it is ended."""
    begun = time.monotonic()
    line = [sys.executable, "-m", "narrowkv.cli", *command.split(), "--json"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=max(seconds, 1), check=False)
    except subprocess.TimeoutExpired:
        return Step(command, None, time.monotonic() - begun, said="did not end in time")
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = None
    said = "\n".join(done.stderr.strip().splitlines()[-_LINES:]) if done.returncode else ""
    return Step(command, done.returncode, time.monotonic() - begun, document, said)


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
            step = run_step(command, left) if left > 0 else Step(command, None, 0.0, said="time was up")
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

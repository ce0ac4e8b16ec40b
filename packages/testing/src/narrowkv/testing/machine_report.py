"""The commands of `narrowkv report`.

On an Instinct GPU the timing model's prediction stands beside each measured row; on other GPUs there is none;
without a GPU it is a rehearsal: the emulator runs in the GPU's place, and nothing is measured.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowkv.testing.bench.comparison import compare
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.contracts import CONTRACT_SETS
from narrowkv.testing.machine import versions
from narrowkv.testing.places import AMD_TARGETS

__all__ = ["Step", "commands", "report_document", "run_step", "run_steps"]

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
QUICK = {
    "decode": "--batch 2 --context 64 --page-size 16 --num-kv-heads 1 --format fp8_e4m3fn",
    "prefill": "--new 32 --prefix 32 --heads 12/1 --format fp8_e4m3fn",
    "sparse": "--tokens 4 --heads 64 --topk 64 --pool 256 --mode bf16,fused",
    "sage": "--batch 1 --context 128 --heads 2 --granularity per_thread",
}
"""Rows that only show whether everything runs."""
CASES: dict[str, tuple[Case, ...]] = {
    "decode": (
        DecodeCase(lens=(70, 5), clean=True),
        DecodeCase(lens=(33,), format="bf16"),
        DecodeCase(lens=(300, 37, 1), split="per_sequence", sinks=True),
    ),
    "prefill": (
        PrefillCase(kernel="dense"),
        PrefillCase(kernel="fused", format="bf16"),
        PrefillCase(operation="append"),
    ),
    "sparse": (
        SparseCase(prefix_lens=(37, 0), sink=True),
        SparseCase(mode="decode", prefix_lens=(37,)),
    ),
}
"""The validated cases of each operation; a rehearsal has the first."""
_LINES = 12  # shown of the output of a command that failed


@dataclass(frozen=True)
class Step:
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
    cases = {name: some if target else some[:1] for name, some in CASES.items()}
    benches = QUICK if quick else BENCHES if target else REHEARSED
    contracts = CONTRACT_SETS["batch-prefill" if quick else "glm-gqa12"]
    found = [f"probe {contracts.name} --on {place}"] if target else []
    found += [
        f"validate {name} --on {place} {' '.join(f'--case {case}' for case in some)}"
        for name, some in cases.items()
    ]
    if target:
        found += [f"bench {name} {rows} --samples 20" for name, rows in benches.items()]
    if target is None or target in AMD_TARGETS:
        found += [f"bench {name} {rows} --on {target or place}" for name, rows in benches.items()]
    return found


def run_step(program: Sequence[str], command: str, seconds: float) -> Step:
    """Runs one command in its own process, so that a fault leaves the others; ends it after `seconds`."""
    begun = time.monotonic()
    line = [*program, *command.split(), "--json"]
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


def run_steps(program: Sequence[str], planned: Sequence[str], seconds: float) -> Iterator[Step]:
    """Runs the commands one after the other; those that no time is left for are not run."""
    end = time.monotonic() + seconds
    for command in planned:
        left = end - time.monotonic()
        if left > 0:
            yield run_step(program, command, left)
        else:
            yield Step(command, None, 0.0, said="time was up")


def report_document(environment: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
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
        "steps": [asdict(step) for step in steps],
    }

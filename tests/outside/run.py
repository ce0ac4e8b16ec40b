"""Runs the outside suites that a folder has, unchanged, and prints a table of what ran.

A suite calls narrowkv in place of the library that it tests, or runs its own kernels on the virtual GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from suites import FETCH, SUITES, Suite

HERE = Path(__file__).parent


def run_suite(suite: Suite, folder: Path, options: list[str]) -> dict[str, Any] | None:
    """Runs one suite in a process of its own.

    Returns:
        How many tests passed, failed and were skipped, how many were left out for each reason, and the CPU
        time in seconds; None where pytest could not begin.
    """
    file = folder / suite.file
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        paths = [str(HERE), str(folder / "python"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "OUTSIDE_SUITE": suite.name, "OUTSIDE": str(folder), "OUTSIDE_FILE": str(file),
            "OUTSIDE_REPORT": str(report), "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip
        if suite.chip:
            environment |= {"TRITON_VIRTUAL_GPU": suite.chip, "TRITON_VIRTUAL_GPU_SKIP_BENCHMARKS": "1"}
        target = HERE / suite.driver if suite.driver else file
        # Triton's tests need their conftest.py, the others one that they cannot have here.
        own_conftest = suite.chip and not suite.driver
        root = (
            ["--rootdir", str(folder)] if own_conftest else ["--rootdir", str(target.parent), "--noconftest"]
        )
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "outside_plugin", "-p", "no:cacheprovider", "-c",
            os.devnull, *root, str(target), *options,
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {**json.loads(report.read_text()), "seconds": seconds} if report.exists() else None


def row_of(suite: Suite, folder: Path, found: dict[str, Any] | None) -> str:
    """The suite's line of the table."""
    digest = hashlib.sha256((folder / suite.file).read_bytes()).hexdigest()[:12]
    if found is None:
        return f"| {suite.name} | `{Path(suite.file).name}` {digest} | could not begin | | | | |"
    counts = [found["counts"].get(name, 0) for name in ("passed", "failed", "skipped")]
    reasons = "; ".join(f"{count}: {reason}" for reason, count in found["left_out"].items())
    cells = [suite.name, f"`{Path(suite.file).name}` {digest}", *counts, f"{found['seconds']:.0f}", reasons]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Returns 0 if every suite that was found passed, or none was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="", help="where the suites lie")
    parser.add_argument("--only", default="", help="suites whose name has this text")
    arguments, options = parser.parse_known_args()
    folder = Path(arguments.folder).resolve()
    there = [suite for suite in SUITES if arguments.folder and (folder / suite.file).exists()]
    if not there:
        print(FETCH)
        return 0
    chosen = [suite for suite in there if arguments.only in suite.name]
    found = [(suite, run_suite(suite, folder, options)) for suite in chosen]
    print("\n| suite | file | passed | failed | skipped by itself | CPU time, s | left out |")
    print("|---|---|---|---|---|---|---|")
    for suite, result in found:
        print(row_of(suite, folder, result))
    for suite in SUITES:
        if suite not in there:
            print(f"| {suite.name} | `{suite.file}` is not in the folder | | | | | |")
    counts = [result["counts"] if result else {} for _, result in found]
    return 0 if all(count.get("passed") and not count.get("failed") for count in counts) else 1


if __name__ == "__main__":
    raise SystemExit(main())

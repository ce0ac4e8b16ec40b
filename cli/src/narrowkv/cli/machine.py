"""`narrowkv env`, and `narrowkv report`: what this machine is, and what was measured on it, to share."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.text import Text

from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError, check_writable
from narrowkv.testing.machine import describe, masked_load_errors
from narrowkv.testing.machine_report import ReportCommand, commands, markdown, report_document, run_steps


def report_environment(report: Report, probe: bool = False) -> ExitCode:
    """Shows the report.

    Args:
        report: where it goes.
        probe: also run kernels that show faults of the compiler.

    Raises:
        UnsupportedHereError: there is no GPU to probe.
    """
    found = describe()
    if probe:
        if not torch.cuda.is_available():
            raise UnsupportedHereError(f"--probe needs a GPU; torch {torch.__version__} sees none")
        found["probes"] = {"wrong elements of masked loads": masked_load_errors()}
    for section, content in found.items():
        if not content:
            report.line(f"{section}: none")
        for index, part in enumerate(content if isinstance(content, list) else [content]):
            name = section if part is content else f"{section}[{index}]"
            for key, value in part.items():
                text = ", ".join(value) if isinstance(value, list) else str(value)
                report.line(Text.assemble((f"{name}.{key}", "cyan"), f": {text}"))
    wrong = any(found.get("probes", {}).values())
    return report.finish({"environment": found}, ExitCode.NUMERICAL if wrong else ExitCode.OK)


_PROGRAM = (sys.executable, "-m", "narrowkv.cli")


def write_report(report: Report, *, folder: Path, minutes: float, quick: bool = False) -> ExitCode:
    """Runs the steps until the time is up, and writes the two files.

    Args:
        report: where progress goes.
        folder: of the files.
        minutes: after which nothing more is run.
        quick: with the smallest sizes.

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
    planned = commands(gpu and str(gpu["target"]), quick=quick)
    steps: list[ReportCommand] = []
    with report.progress(len(planned), "report") as line:
        for step in run_steps(_PROGRAM, planned, 60 * minutes):
            steps.append(step)
            line.advance(step.command)
    document = report_document(environment, steps)
    files[1].write_text(markdown(document))
    faulty = [step for step in steps if step.exit_code]
    report.out = files[0]
    report.line(f"written: {files[0]} and {files[1]}; {len(faulty)} of {len(steps)} commands failed")
    return report.finish(document, ExitCode.NUMERICAL if faulty else ExitCode.OK)

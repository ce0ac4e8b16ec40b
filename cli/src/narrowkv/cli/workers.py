"""Runs a command's tasks, and skips those whose result the file of `--resume` holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from narrowkv.cli.report import Report, UsageError
from narrowkv.testing.journal import Journal
from narrowkv.testing.machine import versions
from narrowkv.testing.processes import in_processes

T = TypeVar("T")
R = TypeVar("R")


def run_all(
    report: Report,
    tasks: Sequence[T],
    work: Callable[[T], R],
    kind: Any,
    take: Callable[[T, R], str],
    *,
    jobs: int = 1,
    what: str = "validating",
    on_gpu: Callable[[T], bool] = lambda task: False,
    settings: dict[str, Any] | None = None,
) -> bool:
    """Does every task that the report's --resume file does not have, and says whether Ctrl-C cut it short.

    Args:
        report: shows progress, and names the file.
        tasks: what to do.
        work: does one.
        kind: type of its result.
        take: is called with each result, also with one kept from an earlier run; returns the text of the
            progress line.
        jobs: processes.
        what: names the work for the progress line.
        on_gpu: tasks that are timed. They run first, one at a time, in this process, so that no other task
            disturbs their times.
        settings: everything except their task that results depend on.
    """
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    depends = {"command": report.command, "versions": versions(), "gpu": gpu, "settings": settings}
    try:
        journal = Journal(report.files.resume, depends, kind)
    except ValueError as error:
        raise UsageError(f"--resume: {error}") from None
    kept = [task for task in tasks if task in journal]
    left = [task for task in tasks if task not in journal]
    with report.progress(len(tasks), what) as line:
        try:
            for task in kept:
                line.advance(take(task, journal.result(task)))
            if kept:
                report.note(f"{len(kept)} of {len(tasks)} finished before, by {report.files.resume}")
            for part, count in (
                ([task for task in left if on_gpu(task)], 1),
                ([task for task in left if not on_gpu(task)], jobs),
            ):
                for task, result in in_processes(work, part, count):
                    journal.add(task, result)
                    line.advance(take(task, result))
        except KeyboardInterrupt:
            return True
    return False

"""Runs independent tasks in a few processes; skips those whose result a file holds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from narrowkv.cli.environment import versions
from narrowkv.cli.journal import Journal
from narrowkv.cli.report import Report

T = TypeVar("T")
R = TypeVar("R")

_SECONDS_TO_END = 5.0
_MOST_WORKERS = 8  # each imports torch and triton: about 0.5 GB


def default_jobs() -> int:
    """Processes to use when nobody says: one for each core, up to eight."""
    return max(1, min(os.cpu_count() or 1, _MOST_WORKERS))


def _begin() -> None:
    # Ctrl-C reaches the whole process group; only the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)


def in_processes(work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[tuple[T, R]]:
    """Yields (task, result) in the order in which they finish; one process and few tasks run right here.

    Leaving the iteration early, by an exception too, ends the processes.
    """
    if jobs <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, work(task)
        return
    context = multiprocessing.get_context("spawn")  # torch and triton do not survive a fork
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin)
    finished = False
    try:
        futures: dict[Future[R], T] = {pool.submit(work, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
        finished = True
    finally:
        pool.shutdown(wait=finished, cancel_futures=True)
        if not finished:
            running = multiprocessing.active_children()
            for process in running:
                process.terminate()
            for process in running:
                process.join(_SECONDS_TO_END)


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
        on_gpu: tasks that run one by one in this process, before the others, which their times need.
        settings: what results depend on besides their task.
    """
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    depends = {"command": report.command, "versions": versions(), "gpu": gpu, "settings": settings}
    journal = Journal(report.files.resume, depends, kind)
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

"""Runs independent tasks in several processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

from narrowkv.runtime.launch.warmup import usable_cores

T = TypeVar("T")
R = TypeVar("R")

_SECONDS_TO_END = 5.0
_MOST_WORKERS = 8  # each imports torch and triton: about 0.5 GB


def default_jobs() -> int:
    """One process for each core, up to eight."""
    return min(usable_cores(), _MOST_WORKERS)


def _begin() -> None:
    # Ctrl-C reaches every process of the group; only the parent acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)


def in_processes(work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[tuple[T, R]]:
    """Yields (task, result) in the order in which tasks finish.

    With one job, or fewer than two tasks, everything runs in this process. Leaving the iteration early, also
    by an exception, ends the other processes.
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

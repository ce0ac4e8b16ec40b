"""Tasks in several processes."""

from __future__ import annotations

import multiprocessing
import os
import time

from narrowkv.cli.command_line import jobs
from narrowkv.cli.running import in_processes


def _square(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def _slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_tasks_run_in_other_processes_and_all_come_back() -> None:
    results = dict(in_processes(_square, [1, 2, 3, 4], jobs=2))
    assert {task: square for task, (square, _) in results.items()} == {1: 1, 2: 4, 3: 9, 4: 16}
    assert os.getpid() not in {process for _, process in results.values()}
    # With one job everything runs right here.
    assert {process for _, (_, process) in in_processes(_square, [1, 2], jobs=1)} == {os.getpid()}
    assert 1 <= jobs(None) <= 8


def test_leaving_early_ends_the_processes() -> None:
    begin = time.perf_counter()
    for _, seconds in in_processes(_slow, [0.01, 60.0, 60.0], jobs=2):
        assert seconds == 0.01
        break
    deadline = time.perf_counter() + 10
    while multiprocessing.active_children() and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    assert time.perf_counter() - begin < 40

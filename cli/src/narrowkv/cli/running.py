"""What commands share that run cases: those of --case, the places of --on, tasks in processes, --resume."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from narrowkv.cli.command_line import choices
from narrowkv.cli.report import Report, UnsupportedHereError, UsageError
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing import places
from narrowkv.testing.cases import CaseError
from narrowkv.testing.cases import parse_case as parse
from narrowkv.testing.codegen import amd_backend_missing
from narrowkv.testing.machine import versions
from narrowkv.testing.operation import OperationEntry
from narrowkv.testing.places import Place
from narrowkv.testing.records import Journal
from narrowkv.testing.words import AMD_TARGETS


def parse_case(operation: OperationEntry, line: str) -> Any:
    """The case of an operation that a line of --case is.

    Raises:
        UsageError: naming the part that is wrong and what is known.
    """
    try:
        return parse(operation.cases.case, line)
    except CaseError as error:
        raise UsageError(f"--case {error}") from None


def find_places(names: Sequence[str] | None, *, races: bool = False, hazards: bool = False) -> list[Place]:
    """The places named, each once, in the order given; names may also be joined by commas.

    Args:
        names: without any, the GPU if it can be used and the CPU otherwise.
        races, hazards: checks that only emulated targets have.

    Raises:
        UsageError: a name is unknown, or what only an emulated target can is asked of another place.
        UnsupportedHereError: this machine does not have a place.
    """
    # All names are checked before any is looked for: a wrong name is a wrong name on every machine.
    found = choices("--on", names, places.PLACES) if names else [places.find_place(None).name]
    if (races or hazards) and not set(found) <= set(AMD_TARGETS):
        option = "--detect-hazards" if hazards else "--detect-races"
        wrong = next(name for name in found if name not in AMD_TARGETS)
        raise UsageError(f"{option} must be with --on {' or '.join(AMD_TARGETS)}; got {wrong}")
    try:
        return [places.find_place(name, detect_races=races, detect_hazards=hazards) for name in found]
    except UnsupportedError as error:
        raise UnsupportedHereError(f"--on {error}") from None


def check_amd_backend() -> None:
    """Refuses a Triton that cannot compile for AMD.

    Raises:
        UnsupportedHereError: it cannot.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)


T = TypeVar("T")
R = TypeVar("R")

_SECONDS_TO_END = 5.0


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


def run_all(
    report: Report, tasks: Sequence[T], work: Callable[[T], R], kind: Any, *,
    what: str, said: Callable[[T, R], str] = lambda task, result: str(task), jobs: int = 1,
    on_gpu: Callable[[T], bool] = lambda task: False, settings: dict[str, Any] | None = None,
) -> tuple[list[tuple[T, R]], bool]:  # fmt: skip
    """Does every task that the report's --resume file does not have.

    Args:
        report: shows progress, and names the file.
        tasks: what to do.
        work: does one.
        kind: type of its result.
        what: names the work for the progress line.
        said: the text of the progress line after a task.
        jobs: processes.
        on_gpu: tasks that are timed. They run first, one at a time, in this process, so that no other task
            disturbs their times.
        settings: everything except their task that results depend on.

    Returns:
        Tasks with their results as they finished, after those that the file had; and whether Ctrl-C cut it
        short.
    """
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    depends = {"command": report.command, "versions": versions(), "gpu": gpu, "settings": settings}
    try:
        journal = Journal(report.resume, depends, kind)
    except ValueError as error:
        raise UsageError(f"--resume: {error}") from None
    kept = [task for task in tasks if task in journal]
    left = [task for task in tasks if task not in journal]
    found: list[tuple[T, R]] = []
    with report.progress(len(tasks), what) as line:

        def take(task: T, result: R) -> None:
            found.append((task, result))
            line.advance(said(task, result))

        try:
            for task in kept:
                take(task, journal.result(task))
            if kept:
                report.note(f"{len(kept)} of {len(tasks)} finished before, by {report.resume}")
            for part, count in (
                ([task for task in left if on_gpu(task)], 1),
                ([task for task in left if not on_gpu(task)], jobs),
            ):
                for task, result in in_processes(work, part, count):
                    journal.add(task, result)
                    take(task, result)
        except KeyboardInterrupt:
            return found, True
    return found, False

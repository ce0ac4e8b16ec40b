"""The search of `narrowkv tune`: times the configurations of each shape class and keeps the fastest.

A class is measured at two of its shapes. Kernels are compiled in other processes. Each configuration is
compared with the reference first; those that spill registers, are wrong, do not run or crash the compiler are
dropped and counted. The fastest few and the shipped one are then timed in turns. A configuration takes the
place of the shipped one only if it is faster by more than the noise, and slower at no measured shape.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch

from narrowkv.runtime.launch import KernelSpec, recording
from narrowkv.runtime.launch.gpu import gpu_launch
from narrowkv.runtime.launch.warmup import CompileResult, Compilers
from narrowkv.runtime.tuned import TunedRow
from narrowkv.testing.bench.timing import GraphTimer, Timing

__all__ = ["Gpu", "Search", "Shapes", "TunedCall", "check_shapes", "tune_shapes"]

Choice = TypeVar("Choice", bound=Hashable)
_FINALISTS, _ROUNDS = 3, 4
_SLOWER_AT_FIRST = 1.3  # than the fastest so far: not measured at the class's other shape
_GAIN, _NOISE = 0.02, 0.01


@dataclass(frozen=True)
class TunedCall:
    """One call by one configuration at one shape.

    Attributes:
        run: makes the call, and gives its output, which stays in one place.
        error: relative L1 error of an output.
        bound: the largest that passes.
    """

    run: Callable[..., torch.Tensor]
    error: Callable[[torch.Tensor], float]
    bound: float


@dataclass(frozen=True)
class Shapes(Generic[Choice]):
    """A shape class, and how its shapes are called.

    Attributes:
        family: of kernels.
        name: of the class, as its rows have it.
        measured: shapes of it, in words; shipped: the shipped configuration of the first of them, likewise.
        choices: configurations to try; refined: further ones like the fastest of them.
        trials: for each measured shape, makes a call by a configuration, or by the shipped one for None.
    """

    family: str
    name: str
    measured: tuple[str, ...]
    shipped: str
    choices: Sequence[Choice]
    refined: Callable[[Choice], Sequence[Choice]]
    trials: tuple[Callable[[Choice | None], TunedCall], ...]


class Gpu:
    """What only a GPU can do: compile in parallel, count spilled registers and time.

    Args:
        samples: of a call, at first and in each of the last rounds.
        compilers: compile its kernels.
        until: the time, as `time.monotonic` gives it, after which nothing further is compiled or tried.
    """

    def __init__(self, samples: int, compilers: Compilers, until: float = math.inf) -> None:
        self.timer = GraphTimer(samples=samples, seconds=0.05)
        self.until = until
        self.seconds_compiling = 0.0
        self._compilers = compilers
        # By their bytes: tensor descriptors among arguments have no hash.
        self._compiled: dict[bytes, CompileResult] = {}

    def check_time(self) -> None:
        """Raises TimeoutError if no time is left."""
        if time.monotonic() > self.until:
            raise TimeoutError("no time is left")

    def compile(self, shapes: Shapes[Choice], choices: Iterable[Choice | None]) -> None:
        """Compiles kernels of configurations, in processes of their own, which a compiler that crashes ends.

        A kernel that does not compile fails again where its configuration is tried.

        Raises:
            TimeoutError: not all were compiled in time.
        """
        noted: dict[bytes, KernelSpec] = {}
        begun = time.monotonic()
        for choice, make in product(choices, shapes.trials):
            noted |= {pickle.dumps(spec): spec for spec in _specs(partial(make, choice))}
        new = [spec for key, spec in noted.items() if key not in self._compiled]
        for done in self._compilers.compile(new, until=self.until):
            self._compiled[pickle.dumps(done.spec)] = done
        self.seconds_compiling += time.monotonic() - begun

    def crashes(self, call: TunedCall) -> bool:
        """Whether the compiler crashed on a kernel of a call."""
        crashed = {key for key, done in self._compiled.items() if done.crashed}
        if not crashed:
            return False
        with recording() as recorder:
            call.run()
        return not crashed.isdisjoint(map(pickle.dumps, recorder.specs()))

    def spills(self, call: TunedCall) -> int:
        """Registers that the kernels of a call spill, the most of one kernel; the call has been made."""
        with recording() as recorder:
            call.run()
        launches = (
            gpu_launch(bound.kernel, bound.constexprs, bound.options) for bound, _ in recorder.found.values()
        )
        return max((launch.spills for launch in launches), default=0)


def _specs(make: Callable[[], TunedCall]) -> list[KernelSpec]:
    """The kernels that a call launches; none for a configuration that is refused."""
    with recording() as recorder:
        try:
            make().run()
        except ValueError:
            return []
    return recorder.specs()


@dataclass
class Search:
    """Counts of a class's search.

    Attributes:
        tried, spilled, wrong, failed, crashed: as in `TunedRow`.
    """

    tried: int = 0
    spilled: int = 0
    wrong: int = 0
    failed: int = 0
    crashed: int = 0
    spills_shipped: int = field(default=0, repr=False)


def _checked(trial: TunedCall, gpu: Gpu) -> Any:
    """The graph of a call whose output passes; None if the output is wrong."""
    graph = gpu.timer.capture(trial.run)
    out = trial.run()
    out.fill_(math.nan)
    graph.replay()
    gpu.timer.wait()
    right = bool(torch.isfinite(out).all()) and trial.error(out) <= trial.bound
    return graph if right else None


def _first_times(
    shapes: Shapes[Choice], choice: Choice | None, gpu: Gpu, counts: Search, fastest: float
) -> list[float]:
    """Microseconds at each measured shape; empty for a configuration that is dropped."""
    times: list[float] = []
    for make in shapes.trials:
        try:
            trial = make(choice)  # lives as long as its graph, which uses its plan's memory
            if gpu.crashes(trial):
                if choice is None:
                    raise RuntimeError("the compiler crashes on the shipped configuration")
                counts.crashed += 1
                return []
            graph = _checked(trial, gpu)
            spills = gpu.spills(trial)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:
            # Triton's own errors, of tiles that do not fit or do not compile, have no common class.
            if choice is None:
                raise
            counts.failed += 1
            return []
        if choice is None:
            counts.spills_shipped = max(counts.spills_shipped, spills)
            if graph is None:
                raise RuntimeError(f"{shapes.family}, {shapes.name}: the shipped configuration is wrong")
        elif spills > counts.spills_shipped:
            counts.spilled += 1
            return []
        elif graph is None:
            counts.wrong += 1
            return []
        times.append(gpu.timer.replay(graph).median_us)
        if times[0] > _SLOWER_AT_FIRST * fastest:
            return []
    return times


def check_shapes(shapes: Shapes[Choice], gpu: Gpu) -> Search:
    """Counts the configurations of a class that are dropped, where a GPU has no device times."""
    counts = Search()
    gpu.compile(shapes, (None, *shapes.choices))
    for choice in (None, *shapes.choices):
        counts.tried += choice is not None
        _first_times(shapes, choice, gpu, counts, math.inf)
    return counts


def _in_turns(
    shapes: Shapes[Choice], finalists: Sequence[Choice | None], gpu: Gpu
) -> tuple[dict[Choice | None, tuple[float, ...]], float]:
    """Median times of each finalist at each shape, timed in turns, and the largest spread."""
    found: dict[Choice | None, tuple[float, ...]] = dict.fromkeys(finalists, ())
    spread = 0.0
    for make in shapes.trials:
        trials = {choice: make(choice) for choice in finalists}
        graphs = {choice: gpu.timer.capture(trial.run) for choice, trial in trials.items()}
        rounds: dict[Choice | None, list[Timing]] = {choice: [] for choice in finalists}
        for _ in range(_ROUNDS):
            gpu.check_time()
            for choice, graph in graphs.items():
                rounds[choice].append(gpu.timer.replay(graph))
        for choice, timings in rounds.items():
            median = sorted(timing.median_us for timing in timings)[len(timings) // 2]
            found[choice] = (*found[choice], median)
            spread = max(spread, *((t.p90_us - t.p10_us) / t.median_us for t in timings))
    return found, spread


def _ratio(times: Sequence[float], shipped: Sequence[float]) -> float:
    return fmean(mine / base for mine, base in zip(times, shipped, strict=True))


def tune_shapes(
    shapes: Shapes[Choice], gpu: Gpu, tell: Callable[[int, int], None] = lambda *_: None
) -> TunedRow:
    """The row of a class.

    Args:
        shapes: the class.
        gpu: times its calls.
        tell: is called with how many configurations were tried, and of how many.

    Raises:
        RuntimeError: the shipped configuration is wrong.
        TimeoutError: the time of `gpu` is over.
    """
    counts = Search()
    gpu.compile(shapes, (None, *shapes.choices))
    shipped = _first_times(shapes, None, gpu, counts, math.inf)
    found: dict[Choice, list[float]] = {}

    def search(choices: Sequence[Choice]) -> None:
        for choice in choices:
            gpu.check_time()
            fastest = min((times[0] for times in found.values()), default=shipped[0])
            counts.tried += 1
            tell(counts.tried, len(shapes.choices))
            if times := _first_times(shapes, choice, gpu, counts, fastest):
                found[choice] = times

    def order() -> list[Choice]:
        return sorted(found, key=lambda choice: _ratio(found[choice], shipped))

    search(shapes.choices)
    if found:
        refined = shapes.refined(order()[0])
        gpu.compile(shapes, refined)
        search(refined)
    finalists: list[Choice | None] = [None, *order()[:_FINALISTS]]
    times, spread = _in_turns(shapes, finalists, gpu)
    shipped_us = times.pop(None)
    faster = {
        choice: mine
        for choice, mine in times.items()
        if _ratio(mine, shipped_us) <= 1 - _GAIN
        and all(us <= (1 + _NOISE) * base for us, base in zip(mine, shipped_us, strict=True))
    }
    best = min(faster, key=lambda choice: _ratio(faster[choice], shipped_us), default=None)
    kept: Mapping[str, Any] | None = None if best is None else asdict(best)  # type: ignore[call-overload]
    return TunedRow(
        shapes.family, shapes.name, kept, shapes.shipped, shipped_us,
        shipped_us if best is None else faster[best], round(spread, 3), shapes.measured,
        counts.tried, counts.spilled, counts.wrong, counts.failed, counts.crashed,
    )  # fmt: skip


def inner(size: int, eighths: int) -> Iterator[int]:
    """A size, and one of the same class that is smaller if there is one."""
    yield size
    smaller = -(-size * eighths // 8)
    if size // 2 < smaller < size:
        yield smaller

"""Compiles prepared launches in parallel processes, before a server takes requests.

A plan's launch is described by a `KernelSpec`, which can be pickled: where the kernel is imported from, its
constants and options, and what a specialisation depends on of its arguments. Every process compiles into the
cache folder of Triton (TRITON_CACHE_DIR), from which the calling process then loads in milliseconds.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from triton.runtime.jit import JITFunction

from narrowkv.runtime.errors import UnsupportedError, check_positive_int
from narrowkv.runtime.launch.kernel_cache import count_compiles
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.launch.path import BoundLaunch
from narrowkv.runtime.targets import compile_target, device_target

_TWO_GIB = 2**31


@dataclass(frozen=True)
class TensorSpec:
    """The properties of a tensor that Triton's compiler may use.

    Attributes:
        dtype: of its elements.
        aligned: whether its first element is at a multiple of 16 bytes.
        large: whether its storage has 2 GiB or more.
    """

    dtype: torch.dtype
    aligned: bool
    large: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The description of a tensor."""
        return cls(tensor.dtype, tensor.data_ptr() % 16 == 0, tensor.untyped_storage().nbytes() >= _TWO_GIB)

    def example(self) -> torch.Tensor:
        """A CPU tensor of this description, whose memory is never touched."""
        storage = torch.UntypedStorage(_TWO_GIB if self.large else 64)  # type: ignore[no-untyped-call]
        offset = 0 if self.aligned else 1
        return torch.empty(0, dtype=self.dtype).set_(storage, offset, (1,), (1,))


@dataclass(frozen=True)
class _Function:
    """A `@triton.jit` function, by where it is imported from."""

    module: str
    name: str

    @classmethod
    def of(cls, function: Any) -> _Function:
        found = cls(function.fn.__module__, function.fn.__qualname__)
        try:
            there = found.load()
        except (ImportError, AttributeError):
            there = None
        if there is not function:
            raise ValueError(
                f"kernel must be what its module has under its name, to be imported in another process; "
                f"{found.module}.{found.name} is not"
            )
        return found

    def load(self) -> Any:
        value: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part)
        return value


def _map(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value with `leaf` applied to what nested tuples and tensor descriptors hold."""
    if isinstance(value, tuple):
        parts = [_map(part, leaf) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if hasattr(value, "block_shape"):
        twin = copy.copy(value)
        object.__setattr__(twin, "base", leaf(value.base))
        return twin
    return leaf(value)


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    return _Function.of(value) if isinstance(value, JITFunction) else value


def _describe_argument(value: Any) -> Any:
    """As `_describe`, with one int for all that Triton specialises alike: equal kernels compile once."""
    if type(value) is not int or value == 1:
        return _describe(value)
    width = 0 if -_TWO_GIB <= value < _TWO_GIB else 2**32 if value < 2**63 else 2**63
    return width + (16 if value % 16 == 0 else 17)


def _restore(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.example()
    return value.load() if isinstance(value, _Function) else value


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel, as another process can compile it.

    Attributes:
        kernel: where the kernel is imported from.
        args: runtime arguments, with a `TensorSpec` for each tensor. Of an int only what the compiler
            specialises on is kept: whether it is 1, a multiple of 16 and within 32 bits.
        constexprs: `tl.constexpr` arguments by name.
        options: compiler options.
    """

    kernel: _Function
    args: tuple[Any, ...]
    constexprs: tuple[tuple[str, Any], ...]
    options: LaunchOptions

    @classmethod
    def of(cls, launch: BoundLaunch, args: tuple[Any, ...]) -> KernelSpec:
        """The description of a prepared launch that is called with such arguments.

        Args:
            launch: a plan's launch. Its kernel must be importable: a global variable of its module.
            args: runtime arguments; of tensors only dtype, alignment and size of the storage are read.

        Raises:
            ValueError: the kernel, or a function among the constants, is not found in its module.
        """
        constexprs = tuple((name, _map(value, _describe)) for name, value in launch.constexprs.items())
        found = _map(args, _describe_argument)
        return cls(_Function.of(launch.kernel), found, constexprs, launch.options)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    def compile(self, target: str | None = None) -> Any:
        """Compiles it in this process, for the current GPU or a named AMD target.

        Returns:
            What Triton keeps for launches on the current GPU; None for a named target.
        """
        kernel, args = self.kernel.load(), _map(self.args, _restore)
        constexprs = {name: _map(value, _restore) for name, value in self.constexprs}
        if target is not None:
            from narrowkv.runtime.launch.compiler import compile_launch

            compile_launch(compile_target(target), kernel, (1,), args, constexprs, self.options)
            return None
        options = self.options.for_target(device_target("cuda"))
        compiled = kernel.warmup(*args, grid=(1,), **constexprs, **options)
        return compiled.result() if hasattr(compiled, "result") else compiled


@dataclass(frozen=True)
class Warmup:
    """Result of `warmup`.

    Attributes:
        compiled: names of the kernels that were compiled.
        cached: names of those that Triton's cache held already.
    """

    compiled: tuple[str, ...]
    cached: tuple[str, ...]


@dataclass(frozen=True)
class CompileResult:
    """What became of one kernel.

    Attributes:
        spec: the kernel.
        error: what the compiler said; empty if it compiled.
        cached: whether Triton's cache held it already.
        crashed: whether the compiler ended its process.
    """

    spec: KernelSpec
    error: str = ""
    cached: bool = False
    crashed: bool = False


def warmup(
    launches: Iterable[KernelSpec],
    target: str | None = None,
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Warmup:
    """Compiles kernels into Triton's cache folder, in parallel processes.

    A kernel that is launched later loads from the folder, which takes milliseconds once a process.

    Args:
        launches: what to compile, as `plan.kernels()` lists it; what is listed twice is compiled once.
        target: an AMD target to compile for without a GPU; None is the current GPU.
        processes: number of processes; None is the number of cores or of kernels, whichever is smaller.
        progress: called in the calling thread with how many are done and how many there are, first with 0.

    Raises:
        UnsupportedError: there is no GPU, and no target is named.
        RuntimeError: a kernel did not compile; the message has its name and what the compiler said. The
            others are compiled all the same.

    Example:
        >>> warmup([])
        Warmup(compiled=(), cached=())
    """
    results = compile_apart(launches, target, processes=processes, progress=progress)
    failed = [f"{done.spec.name} did not compile:\n{done.error}" for done in results if done.error]
    if failed:
        raise RuntimeError("\n".join(failed))
    return Warmup(
        compiled=tuple(done.spec.name for done in results if not done.cached),
        cached=tuple(done.spec.name for done in results if done.cached),
    )


def compile_apart(
    launches: Iterable[KernelSpec],
    target: str | None = None,
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[CompileResult]:
    """Compiles kernels as `warmup` does, and returns the outcome of each kernel.

    A kernel whose compiler ends its process has failed alone: another process compiles the next one.

    Args:
        launches, target, processes, progress: as for `warmup`.

    Returns:
        The results, in the order in which compilations ended.

    Raises:
        UnsupportedError: there is no GPU, and no target is named.
    """
    specs = list({pickle.dumps(spec): spec for spec in launches}.values())
    if processes is not None:
        check_positive_int("processes", processes)
    if target is not None:
        compile_target(target)
    elif specs and not torch.cuda.is_available():
        raise UnsupportedError("there is no GPU to compile for: name a target, for example target='gfx942'")
    with Compilers(min(len(specs), processes or usable_cores()), target) as compilers:
        return compilers.compile(specs, progress=progress)


def usable_cores() -> int:
    """Cores that this process may use: fewer than the machine has, in a container with a limit."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one without a limit ("max")
        limit, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, -(-limit // period))
    return max(1, cores)


class Compilers:
    """Processes that compile kernels into Triton's cache folder, batch after batch.

    Args:
        processes: their number. They begin at once, and a first batch waits until they have imported Triton.
        target: as for `warmup`.
    """

    def __init__(self, processes: int, target: str | None = None) -> None:
        self._todo: queue.SimpleQueue[KernelSpec | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
        self._workers = [_Worker(target, self._todo, self._done) for _ in range(processes)]

    def __enter__(self) -> Compilers:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the processes, whatever they do."""
        for _ in self._workers:
            self._todo.put(None)
        for worker in self._workers:
            worker.stop()

    def compile(
        self,
        specs: Sequence[KernelSpec],
        *,
        until: float = math.inf,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[CompileResult]:
        """Compiles kernels, each listed once.

        Args:
            specs: what to compile.
            until: the time, as `time.monotonic` gives it, after which the rest is left.
            progress: as for `warmup`.

        Returns:
            The results, in the order in which compilations ended.

        Raises:
            TimeoutError: not all were compiled in time. No further batch can be compiled.
        """
        for spec in specs:
            self._todo.put(spec)
        results: list[CompileResult] = []
        for count in range(len(specs) + 1):
            if count:
                left = None if until == math.inf else max(0.0, until - time.monotonic())
                try:
                    results.append(self._done.get(timeout=left))
                except queue.Empty:
                    raise TimeoutError(f"{len(specs) - count + 1} kernels are not compiled yet") from None
            if progress is not None:
                progress(count, len(specs))
        return results


def load_kernels(launches: Iterable[KernelSpec]) -> None:
    """Loads kernels onto the current GPU, in this process: a first call then waits for no file and no module.

    Kernels that Triton's cache folder does not hold are compiled.

    Args:
        launches: what to load, as for `warmup`.

    Example:
        >>> load_kernels([])
    """
    for spec in launches:
        _ = spec.compile().run  # Triton loads a module when its launcher is asked for


class _Worker(threading.Thread):
    """A process that compiles what it is sent, and the thread that sends it."""

    def __init__(
        self,
        target: str | None,
        todo: queue.SimpleQueue[KernelSpec | None],
        done: queue.SimpleQueue[CompileResult],
    ) -> None:
        super().__init__(daemon=True)
        self._target, self._todo, self._done = target, todo, done
        self._lock, self._stopped = threading.Lock(), False
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        # Not multiprocessing: its processes import the caller's main module, or are forks, which a GPU
        # forbids.
        return subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import _work; _work({self._target!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
        )

    def run(self) -> None:
        """Sends one kernel after another, until there is None."""
        while (spec := self._todo.get()) is not None:
            try:
                assert self._process.stdin is not None
                assert self._process.stdout is not None
                pickle.dump(spec, self._process.stdin)
                self._process.stdin.flush()
                result = CompileResult(spec, *pickle.load(self._process.stdout))
            except (EOFError, OSError, ValueError, pickle.PickleError) as lost:
                with self._lock:
                    if self._stopped:
                        return
                    self._end()
                    said = f"its process ended with exit status {self._process.returncode}: {lost!r}"
                    result = CompileResult(spec, said, crashed=True)
                    self._process = self._begin()
            self._done.put(result)

    def stop(self) -> None:
        """Ends the process, whatever it does."""
        with self._lock:
            self._stopped = True
            self._end()

    def _end(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):  # what was to be sent to a process that has ended
            self._process.communicate()


def _work(target: str | None) -> None:
    """Compiles what standard input names, and answers on standard output: an error, whether it was cached."""
    # The compiler's output must not mix with the answers.
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            spec = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error = ""
        with count_compiles() as compiles:
            try:
                spec.compile(target)
            except Exception:
                error = traceback.format_exc()
        pickle.dump((error, not compiles.compiled), answers)
        answers.flush()

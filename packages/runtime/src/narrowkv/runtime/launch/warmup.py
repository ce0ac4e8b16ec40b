"""Compiles prepared launches in parallel processes, before a server takes requests.

A plan's launch is described by a `KernelSpec`, which can be pickled: where the kernel is imported from, its
constants and options, and what a specialisation depends on of its arguments. Every process compiles into the
cache folder of Triton (TRITON_CACHE_DIR), from which the calling process then loads in milliseconds.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


def _restore(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.example()
    return value.load() if isinstance(value, _Function) else value


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel, as another process can compile it.

    Attributes:
        kernel: where the kernel is imported from.
        args: runtime arguments, with a `TensorSpec` for each tensor. An int that the kernel is specialised
            on matters only by whether it is 1, a multiple of 16 and within 32 bits.
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
        return cls(_Function.of(launch.kernel), _map(args, _describe), constexprs, launch.options)

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
    todo: queue.SimpleQueue[KernelSpec] = queue.SimpleQueue()
    for spec in specs:
        todo.put(spec)
    done: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    workers = [_Worker(target, todo, done) for _ in range(min(len(specs), processes or os.cpu_count() or 1))]
    results: list[CompileResult] = []
    try:
        for worker in workers:
            worker.start()
        for count in range(len(specs) + 1):
            if count:
                results.append(done.get())
            if progress is not None:
                progress(count, len(specs))
    finally:
        for worker in workers:
            worker.stop()
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
        todo: queue.SimpleQueue[KernelSpec],
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
        """Sends one kernel after another."""
        while True:
            try:
                spec = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                assert self._process.stdin is not None
                assert self._process.stdout is not None
                pickle.dump(spec, self._process.stdin)
                self._process.stdin.flush()
                result = CompileResult(spec, *pickle.load(self._process.stdout))
            except (EOFError, OSError, pickle.PickleError) as lost:
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

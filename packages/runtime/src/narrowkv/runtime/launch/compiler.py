"""Compiles a launch for an AMD target on any machine, with no GPU and no AMD software.

Triton asks its active driver which target to compile for. A stand-in driver that answers with the named
target lets the ordinary `kernel.warmup` compile the specialisation a real launch would use (divisibility,
pointer ranges).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.launch.kernel_cache import explained_cache_errors
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.launch.parsing import one_thread_parses
from narrowkv.runtime.targets import Target


class _TargetDriver:
    """Answers Triton's questions about the device as a machine with the target would."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget("hip", target.name, target.wave_size)
        # JITFunction keeps the backend per device id, so each target needs its own id.
        self._device = int(target.name.removeprefix("gfx"), 16)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


_target_driver: ContextVar[_TargetDriver | None] = ContextVar("narrowkv_target_driver", default=None)


class _DriverPerThread(type(driver)):  # type: ignore[misc]
    """Triton's choice of a driver, but for a thread that compiles for a named target."""

    @property
    def active(self) -> Any:
        """The driver that the calling thread's compilations ask."""
        return _target_driver.get() or super().active


driver.__class__ = _DriverPerThread


@contextlib.contextmanager
def _active_driver(target: Target) -> Iterator[None]:
    token = _target_driver.set(_TargetDriver(target))
    try:
        yield
    finally:
        _target_driver.reset(token)


def compile_launch(
    target: Target,
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constexprs: dict[str, Any],
    options: LaunchOptions,
) -> CompiledArtifact:
    """Compiles one launch for `target` and returns the artifact; nothing is run.

    Raises:
        OSError: Triton's cache folder cannot be written; the message says which variable names another.
        UnsupportedError: the kernel was made while TRITON_INTERPRET was set.
    """
    if isinstance(kernel, InterpretedFunction):
        raise UnsupportedError(
            f"{kernel.__name__} cannot be compiled for {target}: TRITON_INTERPRET was set when it was made; "
            "start the process without it (narrowkv interprets CPU tensors by itself)"
        )
    with one_thread_parses, _active_driver(target), explained_cache_errors():
        compiled = kernel.warmup(*args, **constexprs, grid=grid, **options.for_target(target))
        if hasattr(compiled, "result"):
            compiled = compiled.result()
    return CompiledArtifact.from_triton(compiled, target=target, grid=grid, args=args)


class CompileExecutor:
    """Records the compiled artifact of every launch."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.artifacts: list[CompiledArtifact] = []

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Compiles the launch and appends its artifact."""
        self.artifacts.append(compile_launch(self.target, kernel, grid, args, constexprs, options))

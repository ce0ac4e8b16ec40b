"""What a call launches, which Python functions it enters, which torch operations it runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import get_target


class RecordedLaunch(NamedTuple):
    """One launch, with what an executor is given.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: its extents.
        args: its runtime arguments.
        constexprs: its constants by name.
        options: warps, stages and hints.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    options: LaunchOptions

    @property
    def specialisation(self) -> tuple[Any, ...]:
        """What is compiled: the kernel, the values of its constants and its options."""
        return self.kernel, tuple(self.constexprs.values()), self.options


class LaunchRecorder:
    """Notes every launch and runs none.

    Args:
        target: the name of the target that plans are made for.

    Example:
        >>> from narrowkv.runtime.launch import executing
        >>> with executing(LaunchRecorder("gfx942")) as recorder:
        ...     pass
        >>> recorder.launches
        []
    """

    def __init__(self, target: str) -> None:
        self.target = get_target(target)
        self._seen: list[tuple[Any, ...]] = []

    def launch(self, *launch: Any) -> None:
        """Notes the launch."""
        self._seen.append(launch)

    @property
    def launches(self) -> list[RecordedLaunch]:
        """The launches so far."""
        return [RecordedLaunch(*launch) for launch in self._seen]

    def clear(self) -> None:
        """Forgets them."""
        self._seen.clear()


def trace_functions(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """File and name of each Python function that a call enters, in order."""
    entered: list[tuple[str, str]] = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            entered.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def functions_entered(call: Callable[[], Any]) -> list[str]:
    """Names of the Python functions that the second of two calls enters.

    The functions of the caller's file and those of the launch path do not count.
    """
    call()
    ignored = {__file__, call.__code__.co_filename}
    gc.disable()  # a collection would enter the callbacks of tables that hold tensors by identity
    try:
        entered = trace_functions(call)
    finally:
        gc.enable()
    return [name for file, name in entered if file not in ignored and Path(file).parent.name != "launch"]


class TorchOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the torch operations of a block.

    Attributes:
        names: of the operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the operation and runs it."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

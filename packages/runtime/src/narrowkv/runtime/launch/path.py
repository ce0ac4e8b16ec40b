"""The one launch path: a kernel is launched, interpreted or compiled by the same call.

`launch` looks at the tensors it is given. GPU tensors are launched; CPU tensors are interpreted in this
process. Inside `with compile_for("gfx942") as artifacts:` the very specialisation that a launch would use is
compiled
for that target, recorded and not run. Any other way to run a kernel (an emulator, say) is one more
`Executor`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from narrowkv.runtime.launch.gpu import GpuLaunch, gpu_launch
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.targets import Target, compile_target, device_target, get_target


class Executor(Protocol):
    """One way to run a kernel; `target` is what configurations are chosen for."""

    target: Target

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Runs (or records) one launch."""


# A fork waits until no thread imports the interpreter: the child could never finish another thread's import.
_import_lock = threading.Lock()
os.register_at_fork(
    before=_import_lock.acquire,
    after_in_parent=_import_lock.release,
    after_in_child=_import_lock.release,
)

_executor: ContextVar[Executor | None] = ContextVar("narrowkv_executor", default=None)
# Executes the launches of the calling context instead of their tensors' device. Every call reads it, so the
# method itself is bound, without a function around it.
executor: Callable[[], Executor | None] = _executor.get


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Every tensor of nested tuples of arguments, outer ones first, and those of tensor descriptors.

    Raises:
        TypeError: one has no memory that a kernel can read: a fake, functional, meta or sparse tensor, or one
            that `torch.func` transforms.
    """
    found: list[torch.Tensor] = []
    pending = list(args)
    for arg in pending:  # grows as it goes
        if isinstance(arg, tuple):
            pending += arg
            continue
        tensor = arg.base if hasattr(arg, "block_shape") else arg
        if not isinstance(tensor, torch.Tensor):
            continue
        found.append(tensor)
        dispatch = type(tensor).__torch_dispatch__
        if type(tensor) in _PLAIN or dispatch is torch._C._disabled_torch_dispatch_impl:
            try:
                if tensor.data_ptr() or not tensor.numel():
                    continue
            except RuntimeError:
                pass  # no storage, or none that may be looked at
        kind = "FunctionalTensor" if torch._is_functional_tensor(tensor) else type(tensor).__name__
        raise TypeError(
            f"a kernel needs tensors that have memory, got a {kind} on device {tensor.device}: call the "
            "operation with real tensors, and outside of what torch traces (torch.compiler.disable)"
        )
    return found


class HostCopies:
    """Copies of GPU tensors on the CPU, for kernels that run there; CPU tensors are passed unchanged."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, value: Any) -> Any:
        """The value with every GPU tensor replaced; tensors that share a storage share its copy."""
        if isinstance(value, tuple):
            parts = map(self.of, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        storage = value.untyped_storage()
        _, copy = self._storages.setdefault(storage.data_ptr(), (storage, storage.cpu()))  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=value.dtype).set_(
            copy, value.storage_offset(), value.size(), value.stride()
        )

    def write_back(self) -> None:
        """Copies to the GPU what kernels stored."""
        for storage, copy in self._storages.values():
            storage.copy_(copy)


class InterpretExecutor:
    """Interprets on the CPU, with the code paths and configuration that `target` would take."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Interprets every program of the grid; tensors on a GPU are copied to the CPU and back."""
        with _import_lock:
            from narrowkv.runtime.launch.interpreter import interpret
        copies = HostCopies()
        interpret(kernel, grid, copies.of(args), constexprs)
        copies.write_back()


@contextlib.contextmanager
def executing(executor: Executor) -> Iterator[Executor]:
    """Sends every launch inside the block to `executor`."""
    token = _executor.set(executor)
    try:
        yield executor
    finally:
        _executor.reset(token)


@contextlib.contextmanager
def run_as(target: str) -> Iterator[None]:
    """Interprets CPU launches with the configuration and code paths of a named target.

    Example:
        >>> with run_as("gfx942"):          # doctest: +SKIP
        ...     o = paged_decode(q, cache, table)
    """
    with executing(InterpretExecutor(get_target(target))):
        yield


@contextlib.contextmanager
def compile_for(target: str) -> Iterator[list[Any]]:
    """Compiles every launch inside the block for a named AMD target instead of running it.

    Outputs of operations called inside the block are not computed and must not be read.

    Args:
        target: "gfx942", "gfx950" or "gfx90a"; or "gfx1201" or "gfx1250", which nothing has run.

    Yields:
        The list that receives one `CompiledArtifact` per launch.

    Raises:
        UnsupportedError: for a target that Triton's AMD backend does not serve.

    Example:
        >>> with compile_for("gfx950") as artifacts:          # doctest: +SKIP
        ...     paged_decode(q, cache, table)
        >>> artifacts[0].registers.vgpr_spills                # doctest: +SKIP
        0
    """
    from narrowkv.runtime.launch.compiler import CompileExecutor

    executor = CompileExecutor(compile_target(target))
    with executing(executor):
        yield executor.artifacts


def active_target(device: torch.device) -> Target:
    """The target that configurations are chosen for: a named one inside a context, else the device's own."""
    executor = _executor.get()
    return executor.target if executor is not None else device_target(device)


def is_compiled(tensor: torch.Tensor) -> bool:
    """Whether a launch over the tensor is compiled here, and not interpreted.

    The interpreter knows neither Gluon nor a target's assembly.
    """
    executor = _executor.get()
    if executor is None:
        return tensor.is_cuda and not triton.knobs.runtime.interpret
    return not isinstance(executor, InterpretExecutor)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constexprs: dict[str, Any],
    options: LaunchOptions,
) -> GpuLaunch | None:
    """Launches, interprets or compiles `kernel`; an empty grid launches nothing.

    Args:
        kernel: a `@triton.jit` function.
        grid: one to three extents.
        args: runtime arguments in the kernel's order: tensors, numbers, None, or tuples of those.
        constexprs: `tl.constexpr` arguments by name.
        options: compiler options.

    Returns:
        The launcher of the kernel if it was launched on a GPU, else None.

    Raises:
        TypeError: there is no tensor, or one that has no memory: a fake, functional, meta or sparse tensor.
    """
    if 0 in grid:
        return None
    tensors = tensors_of(args)
    if not tensors:
        raise TypeError("a launch needs at least one tensor argument, got none")
    executor = _executor.get()
    if executor is not None:
        executor.launch(kernel, grid, args, constexprs, options)
        return None
    device = tensors[0].device
    # TRITON_INTERPRET makes kernels that Triton cannot compile.
    if device.type == "cpu" or isinstance(kernel, InterpretedFunction):
        InterpretExecutor(device_target(device)).launch(kernel, grid, args, constexprs, options)
        return None
    launcher = gpu_launch(kernel, constexprs, options)
    if device.index == torch.cuda.current_device():
        launcher.launch(grid, args, device)
    else:
        # Triton launches on the current device and stream; the tensors' device decides, not the caller's
        # default.
        with torch.cuda.device(device):
            launcher.launch(grid, args, device)
    return launcher


class BoundLaunch:
    """A kernel with its `tl.constexpr` arguments and compiler options.

    Attributes:
        kernel: a `@triton.jit` function.
        constexprs: its `tl.constexpr` arguments by name; not to be changed.
        options: compiler options.

    Example:
        >>> bound = BoundLaunch(kernel, {"BLOCK": 64}, LaunchOptions())   # doctest: +SKIP
        >>> bound((batch, heads), (q, out, q.stride(0)))                  # doctest: +SKIP
    """

    __slots__ = ("_gpu", "constexprs", "kernel", "options")

    def __init__(self, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> None:
        self.kernel, self.constexprs, self.options = kernel, constexprs, options
        self._gpu: GpuLaunch | None = None

    def __call__(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Launches, interprets or compiles the kernel; an empty grid launches nothing.

        On a GPU a call whose arguments specialise like those of an earlier one takes a few microseconds.

        Args:
            grid: one to three extents.
            args: runtime arguments in the kernel's order: tensors, numbers, None, or tuples of those.

        Raises:
            TypeError: there is no tensor, or one without memory: a fake, functional, meta or sparse tensor.
        """
        gpu = self._gpu
        if gpu is not None and 0 not in grid and executor() is None and gpu.again(grid, args):
            return
        self._gpu = launch(self.kernel, grid, args, self.constexprs, self.options) or gpu

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundLaunch):
            return NotImplemented
        mine = (self.kernel, self.constexprs, self.options)
        return mine == (other.kernel, other.constexprs, other.options)

    __hash__ = None  # type: ignore[assignment]  # constexprs is a dict

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundLaunch:
        return self

    def __repr__(self) -> str:
        return f"BoundLaunch({self.kernel!r}, {self.constexprs!r}, {self.options!r})"

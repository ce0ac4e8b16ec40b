"""torch.cuda.CUDAGraph: records launches and torch's operations, and repeats them over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .runtime import Runtime

__all__ = ["Graph", "new_pool"]

_pools = 0
_WAITS = "HIP error: operation not permitted when stream is capturing: {} waits for the device"


def new_pool() -> tuple[int, int]:
    """A name for a memory pool. Each graph keeps its own memory, whatever pool it is given."""
    global _pools
    _pools += 1
    return 0, _pools


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation on GPU tensors, and keeps the memory of its results for the replays.

    It is also run, because its results give later operations shapes and addresses. What it overwrites is put
    back: a capture changes nothing that existed before. Launches are recorded by the runtime.
    """

    captures_launches = True  # narrowkv's operations need not be operators of torch here

    def __init__(self, steps: list[Callable[[], Any]], memory: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps, self._memory = steps, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name, on_device = func.name(), any(t.is_cuda for t in inputs)
        if name == "aten::_local_scalar_dense" or (on_device and any(map(_is_host_memory, inputs))):
            raise RuntimeError(_WAITS.format(name))
        before = [(t, t.clone()) for t in _overwritten(func, args, kwargs)]
        recorded = len(self._steps)
        key = _key_of_custom_kernel(func) if on_device else None
        if key is None:
            results = func(*args, **kwargs)
        else:
            with self:  # a graph holds what the operator does: its Python is not run again
                results = func._op_dk(key, *args, **kwargs)
        for tensor, values in before:
            if tensor.shape == values.shape:
                tensor.copy_(values)
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        if on_device and any(map(_is_host_memory, outputs)):
            raise RuntimeError(_WAITS.format(name))
        self._memory += [t for t in outputs if t.is_cuda]
        inside = len(self._steps) > recorded
        if any(t.is_cuda for t in [*inputs, *outputs]) and not name.startswith("aten::empty") and not inside:
            self._steps.append(lambda: _repeat(func, args, kwargs, outputs))
        return results


def _key_of_custom_kernel(func: Any) -> Any:
    """Under which key an operator has a kernel for GPUs that is not torch's own; None if it has none."""
    if func.namespace in ("aten", "prims"):
        return None
    keys = (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CompositeExplicitAutograd)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return next((key for key in keys if has_kernel(func.name(), key)), None)


def _is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether a copy to or from it waits; a tensor without dimensions may be a number of the program."""
    return not tensor.is_cuda and tensor.dim() > 0 and not tensor.is_pinned()


def _overwritten(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments of an operation that it writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    given = [(a, value) for a, value in named] + [(a, kwargs.get(a.name)) for a in func._schema.arguments]
    written = [value for a, value in given if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _repeat(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
    """Runs an operation again and puts its results where the captured ones are."""
    fresh = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    for new, old in zip(fresh, outputs, strict=True):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)


class Graph:
    """A captured sequence of launches and operations; `torch.cuda.CUDAGraph` on the virtual GPU."""

    _runtime: Runtime

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[Callable[[], Any]] = []
        self._memory: list[torch.Tensor] = []
        self._recorder: _Recorder | None = None
        self._pool = new_pool()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        """Begins to record; the options, of what CUDA checks, have no effect."""
        if self._runtime.capture is not None:
            raise RuntimeError("HIP error: a graph is already being captured")
        self._pool = pool or self._pool
        self._steps = self._runtime.capture = []
        self._memory = []
        self._recorder = _Recorder(self._steps, self._memory)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Ends recording."""
        if self._recorder is None:
            raise RuntimeError("HIP error: capture_end without capture_begin")
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recorder = self._runtime.capture = None

    def instantiate(self) -> None:
        """Does nothing: a graph is ready when it is captured."""

    def replay(self) -> None:
        """Repeats what was recorded."""
        with torch.no_grad():
            for step in self._steps:
                step()

    def reset(self) -> None:
        """Forgets what was recorded, and gives its memory back."""
        self._steps, self._memory = [], []

    def pool(self) -> Any:
        """The name of its memory pool."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """Does nothing."""

    def debug_dump(self, path: str) -> None:
        """Is refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the virtual GPU cannot draw a graph")

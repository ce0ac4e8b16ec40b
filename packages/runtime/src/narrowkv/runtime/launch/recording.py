"""Notes the specialisations that calls reach, without compiling or running anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from narrowkv.runtime.launch.gpu import key_function
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.launch.path import BoundLaunch, executing
from narrowkv.runtime.launch.warmup import KernelSpec
from narrowkv.runtime.targets import Target, compile_target, device_target


class RecordExecutor:
    """Notes each launch once for each specialisation of its kernel.

    Attributes:
        target: what configurations are chosen for.
        found: the launch of each specialisation, with the arguments of the first call that needed it.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.found: dict[Any, tuple[BoundLaunch, tuple[Any, ...]]] = {}

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Notes the launch."""
        read = key_function(kernel.params, args, storage_sizes=self.target.is_amd)
        # Which arguments are None is part of a specialisation, and of the function that was written.
        kinds = tuple(value is None for value in _leaves(args))
        key = (kernel.fn, options, tuple(constexprs.items()), kinds, read(args))
        if key not in self.found:
            self.found[key] = BoundLaunch(kernel, constexprs, options), args

    def specs(self) -> list[KernelSpec]:
        """The kernels that `warmup` compiles."""
        return [KernelSpec.of(bound, args) for bound, args in self.found.values()]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


@contextlib.contextmanager
def recording(target: str | None = None) -> Iterator[RecordExecutor]:
    """Notes what the launches inside the block would compile; nothing runs, outputs are not computed.

    Args:
        target: an AMD target; None is the current GPU.

    Example:
        >>> with recording("gfx942") as recorder:              # doctest: +SKIP
        ...     paged_decode(q, cache, table, plan=plan)
        >>> warmup(recorder.specs(), "gfx942")                 # doctest: +SKIP
    """
    where = device_target(torch.device("cuda")) if target is None else compile_target(target)
    with executing(RecordExecutor(where)) as recorder:
        yield recorder  # type: ignore[misc]

"""Finds reads and writes outside a call's tensors: guard zones around them, and a check of every address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from narrowkv.runtime.launch import InterpretExecutor, Workspace
from narrowkv.runtime.launch.interpreter import memory_watched
from narrowkv.runtime.targets import get_target


class GuardZones:
    """Copies of tensors, each between two guard zones of its own.

    Example:
        >>> zones = GuardZones()
        >>> x = zones.place("x", torch.ones(3))
        >>> x.as_strided((4,), (1,))[3] = 2.0
        >>> zones.damaged()
        ['x']
    """

    ZONE = 4096
    PATTERN = 0xA5

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[torch.Tensor, int]] = {}

    def place(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The same values, dtype and strides, between guard zones."""
        elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        size = elements * x.element_size() if x.numel() else 0
        padded = -(-size // 16) * 16
        buffer = torch.full((padded + 2 * self.ZONE,), self.PATTERN, dtype=torch.uint8, device=x.device)
        self._buffers[name] = buffer, size
        start = self.ZONE // x.element_size()
        placed = torch.as_strided(buffer.view(x.dtype), x.shape, x.stride(), start)
        source, target = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (x, placed))
        target.copy_(source)
        return placed

    def workspace(self, num_bytes: int, device: torch.device | str) -> Workspace:
        """A workspace for one plan, each of whose blocks lies between guard zones of its own."""
        return _GuardedWorkspace(self, num_bytes, device)

    def damaged(self) -> list[str]:
        """Names of tensors with a changed byte in a guard zone."""
        found = []
        for name, (buffer, size) in self._buffers.items():
            zones = torch.cat([buffer[: self.ZONE], buffer[self.ZONE + size :]])
            if bool((zones != self.PATTERN).any()):
                found.append(name)
        return found


class _GuardedWorkspace(Workspace):
    def __init__(self, zones: GuardZones, num_bytes: int, device: torch.device | str) -> None:
        super().__init__(num_bytes, device)
        self._zones = zones

    def carve(self, blocks: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[torch.Tensor, ...]:
        return tuple(
            self._zones.place(f"workspace block {number}", block)
            for number, block in enumerate(super().carve(blocks))
        )

    def counters(self, count: int) -> torch.Tensor:
        return self._zones.place("workspace counters", super().counters(count))


class CheckedInterpreter(InterpretExecutor):
    """Interprets launches and refuses an access outside the tensors that the launch was given."""

    def __init__(self) -> None:
        super().__init__(get_target("cpu"))

    def launch(self, kernel: Any, grid: Any, args: Any, constexprs: Any, options: Any) -> None:
        """Interprets the launch with every address checked."""
        spans = list(_spans(args))
        with memory_watched(lambda primitives: _CheckedMemory(primitives, spans)):
            super().launch(kernel, grid, args, constexprs, options)


def _spans(args: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.numel():
                steps = zip(arg.shape, arg.stride(), strict=True)
                last = sum((size - 1) * stride for size, stride in steps)
                yield arg.data_ptr(), arg.data_ptr() + (last + 1) * arg.element_size()
        elif isinstance(arg, tuple):
            yield from _spans(arg)


class _CheckedMemory:
    """Triton's memory primitives behind a check of every active address."""

    def __init__(self, primitives: Any, spans: list[tuple[int, int]]) -> None:
        self._primitives = primitives
        ordered = sorted(spans) or [(0, 0)]
        self._begins = np.array([begin for begin, _ in ordered], dtype=np.uint64)
        # Views of one buffer overlap: an address counts if any span that begins before it reaches it.
        self._ends = np.maximum.accumulate(np.array([end for _, end in ordered], dtype=np.uint64))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._primitives, name)

    def _check(self, what: str, pointers: Any, mask: Any, size: int) -> None:
        active = np.asarray(pointers).ravel()[np.broadcast_to(mask, np.shape(pointers)).ravel().astype(bool)]
        if active.size == 0:
            return
        active = active.astype(np.uint64)
        span = np.searchsorted(self._begins, active, side="right") - 1
        inside = (span >= 0) & (active + np.uint64(size) <= self._ends[np.maximum(span, 0)])
        if not inside.all():
            count = int((~inside).sum())
            raise AssertionError(f"{what} outside every tensor of the launch: {count} addresses")

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Reads what lies inside."""
        self._check("load", pointers, mask, np.dtype(dtype).itemsize)
        return self._primitives.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        """Writes what lies inside."""
        self._check("store", pointers, mask, value.dtype.itemsize)
        return self._primitives.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any) -> Any:
        """Changes what lies inside."""
        self._check("atomic", pointers, mask, value.dtype.itemsize)
        return self._primitives.atomic_rmw(op, pointers, value, mask, sem)

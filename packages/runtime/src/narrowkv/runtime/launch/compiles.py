"""Counts what Triton compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton


@dataclass
class Compiles:
    """The kernels that Triton was asked to compile.

    Attributes:
        compiled: names of the kernels that were compiled: seconds each.
        loaded: names of the kernels that Triton's cache folder held: milliseconds each.
    """

    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.compiled) + len(self.loaded)


@contextlib.contextmanager
def count_compiles() -> Iterator[Compiles]:
    """Counts the specialisations that are compiled, or loaded from the cache folder, inside the block.

    All threads count, on a GPU and inside `compile_for`. Other processes do not, and neither do
    specialisations that this process has used before. Interpreting compiles nothing.

    Example:
        >>> with count_compiles() as compiles:
        ...     pass
        >>> len(compiles)
        0
    """
    found = Compiles()
    knobs = triton.knobs.compilation
    before = knobs.listener

    def listen(*args: Any, **told: Any) -> None:
        (found.loaded if told["cache_hit"] else found.compiled).append(str(told["metadata"]["name"]))
        if before is not None:
            before(*args, **told)

    knobs.listener = listen
    try:
        yield found
    finally:
        knobs.listener = before

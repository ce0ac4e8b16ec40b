"""Triton's cache of compiled kernels: what its key depends on, errors of its folder, what was compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars


def cache_variables() -> dict[str, str]:
    """The environment variables that are set here and are part of Triton's cache key.

    Triton gives "true" or "false" for those that are switches. A process in which they have other values, or
    in which others are set, compiles its kernels again.
    """
    found = dict(get_cache_invalidating_env_vars())
    if knobs.runtime.debug:
        found["TRITON_DEBUG"] = "1"
    if knobs.compilation.instrumentation_mode:
        found["TRITON_INSTRUMENTATION_MODE"] = knobs.compilation.instrumentation_mode
    return found


@contextlib.contextmanager
def explained_cache_errors() -> Iterator[None]:
    """Errors of Triton's cache folder say which variable names another folder; other errors pass.

    Raises:
        OSError: of the same kind and number as the one that Triton caused.
    """
    try:
        yield
    except OSError as error:
        folder = Path(knobs.cache.dir)
        culprit = Path(str(error.filename))
        if culprit not in (folder, *folder.parents) and folder not in culprit.parents:
            raise
        raise type(error)(
            error.errno,
            f"compiled kernels cannot be kept in {folder}: {error.strerror}; set the environment variable "
            "TRITON_CACHE_DIR to a folder that can be written",
            str(culprit),
        ) from error


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
    before = knobs.compilation.listener

    def listen(*args: Any, **told: Any) -> None:
        (found.loaded if told["cache_hit"] else found.compiled).append(str(told["metadata"]["name"]))
        if before is not None:
            before(*args, **told)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before

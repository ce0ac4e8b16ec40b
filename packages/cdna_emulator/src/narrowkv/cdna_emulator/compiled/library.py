"""The engine's C library: it is built at first use, and gives the addresses of its operations."""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache
from pathlib import Path

from .building import build_library

_SOURCES = sorted((Path(__file__).parent / "c").glob("*.c"))
# Sums and products must round as written, except where the source asks for fused operations.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
)


def _flags() -> tuple[str, ...]:
    if platform.machine() in ("x86_64", "AMD64"):
        return (*_FLAGS, "-march=native", "-mprefer-vector-width=512", "-lm")
    return (*_FLAGS, "-lm")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The library, loaded.

    Raises:
        BuildError: if it cannot be built.
    """
    loaded = ctypes.CDLL(str(build_library("cdna_engine", _SOURCES, "c", _flags())))
    for name in ("size_of_op", "size_of_launch", "size_of_worker"):
        getattr(loaded, name).restype = ctypes.c_size_t
    return loaded


@lru_cache(maxsize=4096)
def address_of(operation: str) -> int | None:
    """Address of the C function of an operation, or None if there is none."""
    try:
        function = library()[f"op_{operation}"]
    except AttributeError:
        return None
    return ctypes.cast(function, ctypes.c_void_p).value

"""The engine's C library, which a wheel brings or the first use builds, and the addresses of its operations.

This module and `building` need nothing but Python: the wheel is built with them.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from .building import BuildError, build_library, processor_flags, text_of

__all__ = ["BuildError", "address_of", "library", "prebuild"]

_PREBUILT = Path(__file__).parent / "prebuilt"
# The processors that a wheel has a library for, best first, with the flags that the next one lacks.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}
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


def _built(level: str = "native") -> Path:
    machine = (f"-march={level}", "-mprefer-vector-width=512") if _is_x86() else ()
    return build_library("cdna_engine", _SOURCES, "c", (*_FLAGS, *machine, "-lm"))


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _prebuilt_name(level: str) -> str:
    """The file name, with a hash of everything that is compiled."""
    key = hashlib.sha256("\0".join([*_FLAGS, *text_of(_SOURCES)]).encode()).hexdigest()[:20]
    return f"libcdna_engine-{level}-{key}.so"


def prebuild() -> dict[str, Path]:
    """Builds the libraries of a wheel: their paths in the package's folder, and where they were built.

    Raises:
        BuildError: if there is no compiler or it fails.
    """
    names = {level: f"{_PREBUILT.name}/{_prebuilt_name(level)}" for level in (_LEVELS if _is_x86() else ())}
    return {name: _built(level) for level, name in names.items()}


def _load() -> ctypes.CDLL:
    needed: set[str] = set().union(*_LEVELS.values())
    for level, flags in _LEVELS.items():
        path = _PREBUILT / _prebuilt_name(level)
        if path.exists() and needed <= processor_flags():
            with suppress(OSError):  # built for a newer libc
                return ctypes.CDLL(str(path))
        needed -= flags
    return ctypes.CDLL(str(_built()))


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The library, loaded: the wheel's if it fits the sources and the processor, otherwise one that is built.

    Raises:
        BuildError: if it cannot be built.
    """
    loaded = _load()
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

"""The versions of engines that the adapters were tested with, and what a user of another one is told."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterator

__all__ = ["TESTED", "EngineVersionError", "adapting", "check_version", "is_tested"]

TESTED: dict[str, tuple[str, ...]] = {
    "sglang": ("0.5.23",),
    "transformers": ("5.17", "5.19", "5.23", "5.24"),
    "vllm": ("0.32", "0.33"),
}
"""Releases by the engine's module; "0.32" stands for all that begin with it."""


class EngineVersionError(ImportError):
    """An engine lacks what its adapter imports: the adapter was written for another version."""


def _version(engine: str) -> str:
    return str(getattr(importlib.import_module(engine), "__version__", "of unknown version"))


def is_tested(engine: str, version: str) -> bool:
    """Whether `TESTED` has the release of a version.

    Example:
        >>> is_tested("vllm", "0.32.1+cpu"), is_tested("vllm", "0.320")
        (True, False)
    """
    parts = version.partition("+")[0].split(".")
    return any(parts[: len(known.split("."))] == known.split(".") for known in TESTED[engine])


@functools.cache
def check_version(engine: str) -> None:
    """Warns if the installed version of an engine was not tested; once in a process.

    Args:
        engine: the name of its module, a key of `TESTED`.
    """
    version = _version(engine)
    if not is_tested(engine, version):
        warnings.warn(
            f"narrowkv's adapter was tested with {engine} {' and '.join(TESTED[engine])}; this is {version}",
            stacklevel=2,
        )


@contextlib.contextmanager
def adapting(engine: str) -> Iterator[None]:
    """Says which version is wanted if an import inside the block finds that the engine has moved a name.

    Args:
        engine: the name of its module, a key of `TESTED`.

    Raises:
        EngineVersionError: instead of an ImportError for a name or a module inside the engine. That the
            engine is not installed stays what it is.

    Example:
        >>> with adapting("transformers"):  # doctest: +IGNORE_EXCEPTION_DETAIL
        ...     from transformers import no_such_name
        Traceback (most recent call last):
        narrowkv.engines.versions.EngineVersionError: narrowkv's adapter does not fit transformers ...
    """
    try:
        yield
    except EngineVersionError:
        raise
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == engine
        if absent or (error.name or "").partition(".")[0] != engine:
            raise
        raise EngineVersionError(
            f"narrowkv's adapter does not fit {engine} {_version(engine)} ({error.msg}): install a version "
            f"that it was tested with ({', '.join(TESTED[engine])}), or a newer narrowkv",
            name=error.name,
        ) from error
    check_version(engine)

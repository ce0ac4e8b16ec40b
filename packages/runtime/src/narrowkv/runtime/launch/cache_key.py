"""Gives every process the same key of Triton's cache for the same kernel, and says what else it depends on.

Triton before 3.8 hashes a kernel with the global constants of the functions that it calls, but only of those
functions that were hashed before: the key depends on which kernel a process compiles first, and what one
process compiled is compiled again by another. Hashing what a kernel calls before the kernel itself gives one
key, with all constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.jit import JITCallable

# Functions whose key is settled, by `id`: they are of modules, and live as long as the process.
_settled: dict[int, JITCallable] = {}


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


def settle_cache_key(kernel: Any, constexprs: dict[str, Any]) -> None:
    """Hashes a kernel, after all functions that it calls and those among its constants.

    A hash that was asked for before, by a dictionary with the kernel as a key for example, is made again.

    Args:
        kernel: a `@triton.jit` function, or the interpreter's counterpart of one, which is not changed.
        constexprs: its constants by name.
    """
    for value in (kernel, *constexprs.values()):
        _settle(value)


def _settle(value: Any) -> None:
    if isinstance(value, tuple):
        for part in value:
            _settle(part)
    if not isinstance(value, JITCallable) or id(value) in _settled:
        return
    _settled[id(value)] = value
    for callee in _referenced(value.fn):
        _settle(callee)
    value.hash = None
    value.cache_key  # noqa: B018 (a property that computes the hash and keeps it)


def _referenced(function: Any) -> Iterator[Any]:
    """The variables that a function's code uses: globals, attributes of modules, closure cells."""
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            yield from (vars(value).get(attribute) for attribute in names)
        yield from getattr(value, "hash_attrs", ())  # functions of Triton's aggregates
        yield value
    for cell in function.__closure__ or ():
        yield cell.cell_contents

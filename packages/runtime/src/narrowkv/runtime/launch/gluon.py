"""Gluon beside plain Triton: device functions that both use, and names that differ between versions."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

# The name of Triton 3.9, and that of 3.8.
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)


@cache
def _language() -> types.ModuleType:
    """`triton.language` as Gluon has it: ranges and constants take the layout of what they meet."""
    renamed = {"debug_barrier": "barrier"}  # names that plain Triton spells differently
    module = types.ModuleType(tl.__name__)
    for name, value in vars(tl).items():
        if not name.startswith("__"):
            setattr(module, name, getattr(gl, renamed.get(name, name), value))
    return module


@cache
def in_gluon(function: Any) -> Any:
    """A `@triton.jit` function, and what it calls, compiled from the same source as Gluon functions.

    Gluon infers the layouts of what the function makes itself from those of its arguments. Triton takes its
    own standard library into Gluon in the same way. A function that makes no ranges and no constants needs
    no such attribute: Gluon calls it unchanged.

    Args:
        function: a device function, not a kernel, that multiplies no matrices.

    Raises:
        TypeError: it is not a `@triton.jit` function.
    """
    if not isinstance(function, JITFunction):
        raise TypeError(f"function must be a @triton.jit function, got {type(function).__name__}")
    source = function.fn
    names = {}
    for name, value in source.__globals__.items():
        if value is tl:
            value = _language()
        elif isinstance(value, JITFunction) and name in source.__code__.co_names and value is not function:
            value = in_gluon(value)
        names[name] = value
    twin = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    twin.__annotations__ = source.__annotations__
    twin.__kwdefaults__ = source.__kwdefaults__
    twin.__module__, twin.__qualname__ = source.__module__, source.__qualname__
    return gluon.jit(twin)

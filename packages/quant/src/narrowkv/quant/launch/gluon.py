"""Device functions shared by plain Triton kernels and Gluon ones."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

# What plain Triton calls by another name.
_RENAMED = {"debug_barrier": "barrier" if hasattr(gl, "barrier") else "thread_barrier"}


def _language() -> types.ModuleType:
    """`triton.language` as Gluon has it: ranges and constants take the layout of what they meet."""
    module = types.ModuleType(tl.__name__)
    for name, value in vars(tl).items():
        if not name.startswith("__"):
            setattr(module, name, getattr(gl, _RENAMED.get(name, name), value))
    return module


_LANGUAGE = _language()


@cache
def in_gluon(function: Any) -> Any:
    """A `@triton.jit` function, and what it calls, compiled from the same source as Gluon functions.

    Gluon infers the layouts of what the function makes itself from those of its arguments. Triton's own
    standard library is taken into Gluon in the same way.

    Args:
        function: a device function, not a kernel, that multiplies no matrices.
    """
    if not isinstance(function, JITFunction):
        raise TypeError(f"function must be a @triton.jit function, got {type(function).__name__}")
    source = function.fn
    names = {}
    for name, value in source.__globals__.items():
        if value is tl:
            value = _LANGUAGE
        elif isinstance(value, JITFunction) and name in source.__code__.co_names and value is not function:
            value = in_gluon(value)
        names[name] = value
    twin = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    twin.__annotations__ = source.__annotations__
    twin.__kwdefaults__ = source.__kwdefaults__
    twin.__module__, twin.__qualname__ = source.__module__, source.__qualname__
    return gluon.jit(twin)

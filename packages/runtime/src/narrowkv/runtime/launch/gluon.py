"""Gluon beside plain Triton: whether it is there, and device functions that both use."""

from __future__ import annotations

import importlib
import types
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

# Parts of Gluon that kernels use. Triton added them one by one, so each is looked up instead of a version.
_WANTED = {
    "hopper": (
        "triton.experimental.gluon.language.nvidia.hopper",
        ("async_copy", "fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"),
    ),
    "cdna": ("triton.experimental.gluon.language.amd.cdna4", ("async_copy",)),
    # With Triton 3.8, which also has the launch option `llvm_fn_attrs`.
    "cdna_turns": ("triton.experimental.gluon.language.amd", ("warp_pipeline_stage", "cdna5")),
}


@cache
def has_gluon(family: str = "hopper") -> bool:
    """Whether this Triton has what kernels for a family of targets are written in; asked once.

    Args:
        family: "hopper", "cdna", or "cdna_turns" for kernels whose waves take turns.
    """
    module, names = _WANTED[family]
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return all(hasattr(found, name) for name in names)


@cache
def _language() -> types.ModuleType:
    """`triton.language` as Gluon has it: ranges and constants take the layout of what they meet."""
    from triton.experimental.gluon import language as gl

    # Names that plain Triton spells differently.
    renamed = {"debug_barrier": "barrier" if hasattr(gl, "barrier") else "thread_barrier"}
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
    from triton.experimental import gluon

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

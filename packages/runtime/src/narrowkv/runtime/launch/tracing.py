"""Operations that torch can trace: which calls are traced, and how an operator is told their options.

A kernel reads memory, which tensors do not have while torch traces (torch.compile, export, make_fx,
FakeTensorMode, functionalisation). A traced call goes through an operator of `torch.ops.narrowkv` instead:
tensors are its arguments, and a string and lists of numbers say everything else. Other calls never meet the
dispatcher.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


_traced: dict[str, Callable[..., Any]] = {}


def traceable(operation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Sends an operation's traced calls to the function that `traces` registers under its name.

    The operation's first argument tells whether a call is traced: a tensor, or a cache whose `k` is one.
    """
    name = operation.__name__

    @functools.wraps(operation)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first: object = args[0] if args else next(iter(kwargs.values()), None)
        tensor = first if isinstance(first, torch.Tensor) else getattr(first, "k", None)
        # Written out here, because every call pays for it.
        if (
            torch.compiler.is_dynamo_compiling()
            or torch._C._len_torch_dispatch_stack()
            or (type(tensor) is not torch.Tensor and _intercepts(tensor))
            or (isinstance(tensor, torch.Tensor) and torch._is_functional_tensor(tensor))
        ):
            traced: Callable[_P, _R] = _traced[name]
            return traced(*args, **kwargs)
        return operation(*args, **kwargs)

    return call


def _intercepts(tensor: object) -> bool:
    """Whether a tensor's class takes torch's operations over, as fake tensors do."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def traces(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function take the traced calls of the operation of that name, with the same arguments."""

    def register(function: Callable[_P, _R]) -> Callable[_P, _R]:
        _traced[name] = function
        return function

    return register


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of FP8 numbers as uint8: torch's compilers know few operations on FP8."""
    if tensor.element_size() == 1 and tensor.is_floating_point():
        return tensor.view(torch.uint8)
    return tensor


OPTIONS_SCHEMA = "str options, SymInt[] ints, float[] floats"


def spell(**options: object) -> tuple[str, list[int], list[float]]:
    """Options (strings, numbers, booleans, dtypes, None) as the three arguments that `spelled` reads.

    Example:
        >>> spelled(*spell(layout="NHD", window_left=-1, sm_scale=0.5, sinks=None))
        {'layout': 'NHD', 'window_left': -1, 'sm_scale': 0.5, 'sinks': None}
    """
    # torch.compile traces this. What enters the string becomes a guard; numbers may be symbols.
    parts: list[str] = []
    ints: list[int] = []
    floats: list[float] = []
    for name, value in options.items():
        if value is None or isinstance(value, bool):
            parts.append(f"{name}={value}")
        elif isinstance(value, int):
            parts.append(f"{name}=int")
            ints.append(value)
        elif isinstance(value, float):
            parts.append(f"{name}=float")
            floats.append(value)
        else:
            parts.append(f"{name}='{value}'")
    return ";".join(parts), ints, floats


def spelled(options: str, ints: list[int], floats: list[float]) -> dict[str, Any]:
    """The options that `spell` wrote; dtypes are dtypes again."""
    found: dict[str, Any] = {}
    next_int, next_float = iter(ints), iter(floats)
    for part in options.split(";"):
        name, _, text = part.partition("=")
        if text in ("int", "float"):
            found[name] = next(next_int) if text == "int" else next(next_float)
        elif text.startswith("'torch."):
            found[name] = getattr(torch, text.strip("'").removeprefix("torch."))
        else:
            found[name] = ast.literal_eval(text)
    return found

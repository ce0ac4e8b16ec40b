"""Operations that torch can trace: which calls are traced, and how an operator is told their options.

A kernel reads memory, which tensors do not have while torch traces (torch.compile, export, make_fx,
FakeTensorMode, functionalisation). A traced call goes through an operator of `torch.ops.narrowkv` instead:
tensors are its arguments, and a string and lists of numbers say everything else. Other calls never meet the
dispatcher.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


_traced: dict[str, Callable[..., Any]] = {}


def traceable(operation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Sends an operation's traced calls to the function that `traces` registers under its name.

    The operation's first argument tells whether a call is traced: a tensor, a cache whose `k` is one, or rows
    whose `data` is one.
    """
    name = operation.__name__

    @functools.wraps(operation)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first: object = args[0] if args else next(iter(kwargs.values()), None)
        tensor = first if isinstance(first, torch.Tensor) else _tensor_of(first)
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


def _tensor_of(value: object) -> object:
    return getattr(value, "k", None) if hasattr(value, "k") else getattr(value, "data", None)


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


def wide_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of a new output: a query's own, or bf16 for FP8 queries, also where they are bytes."""
    return q.dtype if q.dtype.itemsize == 2 else torch.bfloat16


def register_attention(
    name: str, schema: str, call: Callable[..., Any], *, written: Sequence[str] = (), aliases: str = "ab",
    columns: int | None = None,
) -> None:  # fmt: skip
    """Registers the operators of an operation whose results are `o` like its query and `lse` like its rows.

    `torch.ops.narrowkv.<name>` returns both; `<name>_out` writes into `out` and, unless it is None, `lse`.

    Args:
        name: of the operation.
        schema: of the inputs: the query first, `OPTIONS_SCHEMA` last, with `out_dtype` among the options.
        call: the operation, with the operator's inputs and the keywords `out`, `lse` and `return_lse`.
        written: inputs that the operation writes to.
        aliases: letters for `out` and `lse` that the schema does not have.
        columns: of `o`; None for those of its query.
    """

    @torch.library.custom_op(
        f"narrowkv::{name}", mutates_args=written, schema=f"({schema}) -> (Tensor, Tensor)"
    )
    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = call(*args, return_lse=True)
        return o, lse

    @run.register_fake
    def fake(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = spelled(*rest[-3:])["out_dtype"] or wide_dtype(q)
        shape = (*q.shape[:-1], columns or q.shape[-1])
        return q.new_empty(shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=torch.float32)

    @torch.library.custom_op(
        f"narrowkv::{name}_out",
        mutates_args=(*written, "out", "lse"),
        schema=f"({schema}, Tensor({aliases[0]}!) out, Tensor({aliases[1]}!)? lse) -> ()",
    )
    def run_out(*args: Any) -> None:
        *inputs, out, lse = args
        call(*inputs, out=out, lse=lse, return_lse=lse is not None)

    @run_out.register_fake
    def fake_out(*args: object) -> None:
        """Writes into its arguments, and returns nothing."""


def call_attention(
    functional: Any, with_outputs: Any, q: torch.Tensor, inputs: tuple[Any, ...], *, out: torch.Tensor | None,
    lse: torch.Tensor | None, return_lse: bool, out_dtype: torch.dtype | None, columns: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Calls one of the operators of `register_attention`: the first, unless results are given."""
    if out is None and lse is None:
        o, sums = functional(*inputs)
    else:
        o = out
        if o is None:
            o = q.new_empty((*q.shape[:-1], columns or q.shape[-1]), dtype=out_dtype or wide_dtype(q))
        if lse is None and return_lse:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        sums = lse
        with_outputs(*inputs, o, lse)
    return (o, sums) if return_lse else o


_plans: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()


def handle_of(plan: object) -> str:
    """A name that operators find a new plan by as long as it lives: a trace holds strings, not plans."""
    handle = f"{type(plan).__name__} {next(_numbers)}"
    _plans[handle] = plan
    return handle


def plan_of(handle: str | None) -> Any:
    """The plan that a handle was made for, None for None.

    Raises:
        ValueError: it lives no more, or lived in another process.
    """
    if handle is None:
        return None
    plan = _plans.get(handle)
    if plan is None:
        raise ValueError(
            f"plan {handle!r} must be alive in the process that runs the traced call, and it is not: keep a "
            "reference to it, and for a program that is exported leave plan out"
        )
    return plan


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
    next_int, next_float = iter(ints), iter(floats)
    return {
        name: next(next_int) if kind == "int" else next(next_float) if kind == "float" else value
        for name, kind, value in _parsed(options)
    }


@functools.lru_cache(maxsize=1024)
def _parsed(options: str) -> list[tuple[str, str, Any]]:
    """Name, kind and value of each option; "int" and "float" have theirs elsewhere."""
    found: list[tuple[str, str, Any]] = []
    for part in options.split(";"):
        name, _, text = part.partition("=")
        if text in ("int", "float"):
            found.append((name, text, None))
        elif text.startswith("'torch."):
            found.append((name, "", getattr(torch, text.strip("'").removeprefix("torch."))))
        else:
            found.append((name, "", ast.literal_eval(text)))
    return found

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from narrowkv.runtime.errors import wide_dtype

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
            or (torch._C._len_torch_dispatch_stack() and _mode_traces())
            or (type(tensor) is not torch.Tensor and _intercepts(tensor))
            or (isinstance(tensor, torch.Tensor) and torch._is_functional_tensor(tensor))
        ):
            traced: Callable[_P, _R] = _traced[name]
            return traced(*args, **kwargs)
        return operation(*args, **kwargs)

    return call


def _mode_traces() -> bool:
    """Whether the innermost mode takes operations over; the one of a virtual GPU's graph records launches."""
    return not getattr(_get_current_dispatch_mode(), "captures_launches", False)


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


Tensors = Sequence[torch.Tensor | None]
# Shapes and dtypes of an operation's results.
Results = Sequence[tuple[Sequence[int], torch.dtype]]


def like_query(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    """Empty results of attention: the output, and the log-sum-exp.

    The output has the shape of q and the dtype `out_dtype`; where the option `v_head_dim` is given, it has
    that many channels instead of q's. The log-sum-exp has one number for each query token and head.
    """
    q = tensors[0]
    assert q is not None
    shape = (*q.shape[:-1], options.get("v_head_dim", q.shape[-1]))
    return (shape, options["out_dtype"] or wide_dtype(q)), (q.shape[:2], torch.float32)


def register(
    name: str, schema: str, call: Callable[..., Any],
    results: Callable[[Tensors, Mapping[str, Any]], Results] | None = None, *,
    outputs: Sequence[str] = ("out", "lse"), into: bool = True, written: Sequence[str] = (),
    aliases: str = "ab",
) -> Callable[..., Any]:  # fmt: skip
    """Registers the operators of an operation.

    `torch.ops.narrowkv.<name>` returns new results; `<name>_out` writes into given ones, of which "lse" may
    be None. An operation without results has the first operator only.

    Args:
        name: of the operation.
        schema: of the tensors, `Tensor q` first where there are results; `OPTIONS_SCHEMA` is added.
        call: the operation, with the operator's tensors, a dictionary of options, and as keywords the outputs
            that are given. With an "lse" among them it is also given `return_lse`.
        results: shapes and dtypes of new results, by tensors and options; None for an operation without.
        outputs: keywords of the one or two results; into: whether a caller may give them.
        written: tensors of the schema that the operation writes to.
        aliases: letters for outputs that the schema does not have.

    Returns:
        A function that calls the operators: with the tensors, a dictionary of options (strings, numbers,
        booleans, dtypes, None, and a plan under "plan"), and the outputs that are given or None. Its keywords
        are `return_lse`, whether the last result is returned, and `allocates`, whether the first operator may
        be taken.
    """
    schema, returned = f"{schema}, {OPTIONS_SCHEMA}", "()"
    one = len(outputs) == 1
    if results is not None:
        returned = "Tensor" if one else "(Tensor, Tensor)"

    def run(*args: Any) -> Any:
        given = _given(args)
        found = call(*args[:-3], given, **{"return_lse": True} if results and "lse" in outputs else {})
        return found if one or results is None else tuple(found)

    def fake(*args: Any) -> Any:
        if results is None:
            return None
        made = results(args[:-3], spelled(*args[-3:]))
        empty = tuple(args[0].new_empty(shape, dtype=dtype) for shape, dtype in made)
        return empty[0] if one else empty

    operator = torch.library.custom_op(
        f"narrowkv::{name}", run, mutates_args=written, schema=f"({schema}) -> {returned}"
    )
    operator.register_fake(fake)
    if results is not None and into:

        def run_out(*args: Any) -> None:
            count = len(outputs)
            found = dict(zip(outputs, args[-count:], strict=True))
            wants = {"return_lse": found["lse"] is not None} if "lse" in found else {}
            call(*args[: -count - 3], _given(args[:-count]), **found, **wants)

        declared = ", ".join(
            f"Tensor({letter}!){'?' if output == 'lse' else ''} {output}"
            for letter, output in zip(aliases, outputs, strict=True)
        )
        operator_out = torch.library.custom_op(
            f"narrowkv::{name}_out", run_out, mutates_args=(*written, *outputs),
            schema=f"({schema}, {declared}) -> ()",
        )  # fmt: skip
        operator_out.register_fake(lambda *args: None)

    def dispatch(
        tensors: Tensors, options: Mapping[str, Any], *given: torch.Tensor | None, return_lse: bool = True,
        allocates: bool = True,
    ) -> Any:  # fmt: skip
        plan = options.get("plan")
        inputs = (*tensors, *spell(**(options if plan is None else {**options, "plan": plan.handle})))
        if results is None:
            return getattr(torch.ops.narrowkv, name)(*inputs)
        if allocates and all(x is None for x in given):
            found = getattr(torch.ops.narrowkv, name)(*inputs)
            if one:
                return found
        else:
            first, found = tensors[0], list(given)
            assert first is not None
            for at, (shape, dtype) in enumerate(results(tensors, options)):
                if found[at] is None and (at == 0 or return_lse):
                    found[at] = first.new_empty(shape, dtype=dtype)
            getattr(torch.ops.narrowkv, f"{name}_out")(*inputs, *found)
        return found[0] if one or not return_lse or found[1] is None else (found[0], found[1])

    return dispatch


def _given(args: Sequence[Any]) -> dict[str, Any]:
    """The options of an operator's call, with a plan in place of its handle."""
    given = spelled(*args[-3:])
    if "plan" in given:
        given["plan"] = plan_of(given["plan"])
    return given


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

"""Runs a Triton kernel on CPU tensors, in this process, without any environment variable.

Triton ships an interpreter that is normally chosen for a whole process, before `triton` is imported, and that
replaces functions of `triton.language` while a kernel runs. Here an ordinary `@triton.jit` function is
interpreted on demand, and nothing that others import is touched: the interpreter lives in a private copy of
Triton's Python modules (`private_triton`). The body of a kernel, and of each function that it calls, runs
with globals in which what is Triton's is replaced by its counterpart in the copy. Threads may interpret and
compile at once, and a launch can be interrupted or forked at any instant.

The stock interpreter computes some things wrongly (seen in Triton 3.8 and 3.9); `RepairedBuilder` mends them:

* bfloat16 values are held as raw 16-bit integers, and both arithmetic and `tl.dot` use those integers;
* float32 and bfloat16 to FP8 rounds half away from zero on the truncated tail and does not saturate;
* a fused multiply-add rounds twice;
* FP8 E4M3FNUZ reads its NaN (0x80) as -0, and E4M3FN its NaN (0x7F, 0xFF) as 480.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, mangle_type

from narrowkv.runtime.launch.interpreter_types import call_builtins_directly, share_types
from narrowkv.runtime.launch.parsing import one_thread_parses
from narrowkv.runtime.launch.private_triton import PrivateTriton

# Triton's compiled library looks up its Python classes at the first call, by the importer of the calling
# function: it must not be one of the copy.
mangle_type(0)

_copy = PrivateTriton()
tl: Any = _copy.module("triton.language")
stock: Any = _copy.module("triton.runtime.interpreter")

_TORCH_FP8 = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}


def _fp8_table(dtype: torch.dtype) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).numpy()


_FP8_TABLES = {name: _fp8_table(dtype) for name, dtype in _TORCH_FP8.items()}


def _bf16_to_f32(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32)


def _f32_to_bf16(data: np.ndarray) -> np.ndarray:
    flat = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    return flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(data))


def _decode(data: np.ndarray, dtype: Any) -> np.ndarray:
    """Stored bits of any floating type to float32 (float64 stays)."""
    if dtype in _FP8_TABLES:
        return np.asarray(_FP8_TABLES[dtype][data])
    if dtype == tl.bfloat16:
        return _bf16_to_f32(data)
    return data


def _encode(data: np.ndarray, dtype: Any) -> np.ndarray:
    """Float32 to the stored bits of `dtype`: round to nearest even; FP8 saturates."""
    if dtype in _TORCH_FP8:
        wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        limit = torch.finfo(_TORCH_FP8[dtype]).max
        return (
            wide.clamp(-limit, limit).to(_TORCH_FP8[dtype]).view(torch.uint8).numpy().reshape(np.shape(data))
        )
    if dtype == tl.bfloat16:
        return _f32_to_bf16(data)
    return data.astype(stock._get_np_dtype(dtype))


_CODED = {dtype.name for dtype in (tl.bfloat16, *_FP8_TABLES)}


def _is_coded(dtype: Any) -> bool:
    return dtype.name in _CODED


_E2M1 = np.array([sign * x for sign in (1, -1) for x in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


class RepairedBuilder(stock.InterpreterBuilder):
    """The stock builder with bfloat16 and FP8 computed as the hardware does, and a grid for each thread."""

    _grid = threading.local()

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        """Sets the extents of this thread's launch."""
        self._grid.dim = (nx, ny, nz)

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        """Sets which program of the launch this thread runs."""
        self._grid.idx = (x, y, z)

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        """The extents of this thread's launch."""
        return self._grid.dim  # type: ignore[no-any-return]

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        """Which program of the launch this thread runs."""
        return self._grid.idx  # type: ignore[no-any-return]

    def create_inline_asm(self, asm: str, *arguments: Any) -> Any:
        """Nothing for instructions that order launches, which run in turn here; FP4 as float16."""
        if "v_cvt_scalef32_pk_f16_fp4" in asm:
            words, scale = (each.data for each in arguments[1])
            codes = (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
            numbers = (_E2M1[codes] * scale[..., None]).astype(np.float16)
            # Result i has the two nibbles of byte i of each word, as one int32.
            pairs = np.moveaxis(numbers.view(np.int32), -1, 0)
            results = [stock.TensorHandle(np.ascontiguousarray(each), tl.int32) for each in pairs]
            return types.SimpleNamespace(get_result=lambda i: results[i])
        if not asm.startswith("griddepcontrol"):
            return super().create_inline_asm(asm, *arguments)
        zero = stock.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32)
        return types.SimpleNamespace(get_result=lambda _: zero)

    def _decoded(self, handle: Any) -> Any:
        dtype = handle.dtype.scalar
        if not _is_coded(dtype):
            return handle
        return stock.TensorHandle(_decode(handle.data, dtype), tl.float32)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Any conversion to or from bfloat16 or FP8, rounded to nearest even; FP8 saturates."""
        src_dtype, dst_dtype = src.dtype.scalar, dst_type.scalar
        if _is_coded(src_dtype) or _is_coded(dst_dtype):
            return stock.TensorHandle(_encode(_decode(src.data, src_dtype), dst_dtype), dst_dtype)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
        """Float to float; every target rounds to nearest even unless asked otherwise."""
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        """Arithmetic and comparisons on decoded values."""
        dtype = lhs.dtype.scalar
        if not _is_coded(dtype) and not _is_coded(rhs.dtype.scalar):
            return super().binary_op(lhs, rhs, op)
        # Only arithmetic sees decoded values: bitwise operations never arrive with a floating dtype.
        result = super().binary_op(self._decoded(lhs), self._decoded(rhs), op)
        if _is_coded(dtype) and result.data.dtype != np.bool_:
            return stock.TensorHandle(_encode(result.data, dtype), dtype)
        return result

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        """Unary mathematics on decoded values."""
        dtype = arg.dtype.scalar
        result = super().unary_op(self._decoded(arg), op)
        if _is_coded(dtype):
            return stock.TensorHandle(_encode(result.data, dtype), dtype)
        return result

    def get_bf16(self, value: float) -> Any:
        """A constant; Triton 3.8 has none in bfloat16."""
        return stock.TensorHandle(_f32_to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        """In float64, which holds products of all other types, and then in the type of the sum."""
        dtype = z.dtype.scalar
        x, y, z = (self._decoded(each).data for each in (x, y, z))
        result = (x.astype(np.float64) * y + z).astype(z.dtype)
        return stock.TensorHandle(_encode(result, dtype) if _is_coded(dtype) else result, dtype)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """A matrix product of decoded operands."""
        # Products of 16-bit operands are exact in float32, as they are in the matrix unit.
        out = d.data.dtype
        lhs = _decode(a.data, a.dtype.scalar).astype(out)
        rhs = _decode(b.data, b.dtype.scalar).astype(out)
        return stock.TensorHandle(np.matmul(lhs, rhs, dtype=out) + d.data, d.dtype.scalar)

    # A masked store that covers nothing, or a select, keeps raw bits: nothing to mend there.


_rewritten: dict[Any, Callable[..., Any]] = {}
_functions: dict[Any, _Function] = {}


def _body(fn: Any) -> Callable[..., Any]:
    """A function of the copy with the interpreter's assignment and comparison rewriting."""
    if fn not in _rewritten:
        with one_thread_parses:
            _rewritten[fn] = stock.FunctionRewriter(fn).rewrite_ast()
    return _rewritten[fn]


class _Function:
    """A jit function of a caller, as interpreted functions call it."""

    def __init__(self, source: Any) -> None:
        self._fn = types.FunctionType(
            source.__code__, {}, source.__name__, _counterpart(source.__defaults__), source.__closure__
        )
        self._fn.__kwdefaults__ = _counterpart(source.__kwdefaults__)
        self._fn.__module__, self._fn.__qualname__ = source.__module__, source.__qualname__
        self._source = source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_semantic", None)
        return self.body(*args, **kwargs)

    @property
    def fn(self) -> Callable[..., Any]:
        """The function as it was written; the interpreter's reductions and scans call this one.

        Its globals are looked up at the first call, when all of them exist.
        """
        if not self._fn.__globals__:
            names = {name: _counterpart(value) for name, value in _globals_of(self._source).items()}
            self._fn.__globals__.update(names)
        return self._fn

    @property
    def body(self) -> Callable[..., Any]:
        """The rewritten function."""
        return _body(self.fn)


def _globals_of(source: Any) -> dict[str, Any]:
    """Every global and closure variable that the function, or a function within it, may look up.

    Those of its defaults, too: the rewritten source is executed, and evaluates them again.
    """
    with one_thread_parses:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(source))).body
    defaults = [
        node for node in ast.walk(getattr(definition, "args", definition)) if isinstance(node, ast.Name)
    ]
    names = {node.id for node in defaults}
    codes = [source.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    closure = inspect.getclosurevars(source).nonlocals
    return {name: value for name, value in source.__globals__.items() if name in names} | dict(closure)


def _function(source: Any) -> _Function:
    return _functions.get(source) or _functions.setdefault(source, _Function(source))


@contextmanager
def replaced(functions: Mapping[Any, Any]) -> Iterator[None]:
    """Interprets jit functions in the places of others, such as plain arithmetic for inline assembly."""
    global _functions
    before, _functions = _functions, {old.fn: _Function(new.fn) for old, new in functions.items()}
    try:
        yield
    finally:
        _functions = before


@contextmanager
def memory_watched(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Interprets loads, stores and atomics through `wrap` of the object whose methods they are."""
    before = stock._interpreter
    stock._interpreter = wrap(before)
    try:
        yield
    finally:
        stock._interpreter = before


def _counterpart(value: Any) -> Any:
    """The interpreter's counterpart of a value of the caller."""
    if isinstance(value, tuple):
        parts = map(_counterpart, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {name: _counterpart(part) for name, part in value.items()}
    if isinstance(value, JITFunction | InterpretedFunction):
        if PrivateTriton.owns(value.fn.__module__):
            return _copy.counterpart(value.fn)
        return _function(value.fn)
    return _copy.counterpart(value)


def _call_standard(self: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_semantic", None)
    return _body(self.fn)(*args, **kwargs)


def _interpret_language() -> None:
    """Makes the copy's language compute with numpy, for good."""
    builder = stock.interpreter_builder
    scope_of = type("Scope", (), {"__globals__": {"tl": tl, "core": tl.core}})
    call_builtins_directly(stock)
    stock._patch_lang(scope_of)
    # Functions of the standard library are the one or, where TRITON_INTERPRET is set, the other.
    for kind in (_copy.module("triton.runtime.jit").JITFunction, stock.InterpretedFunction):
        kind.__call__ = _call_standard
    # The one builder object is referred to from many places; changing its class repairs it for all of them.
    builder.__class__ = RepairedBuilder
    share_types(tl, stock)
    # Its overflow check ends in an assertion that it drops unless it debugs, and takes half of the time.
    builder.options = replace(builder.options, sanitize_overflow=False)
    # Not by assignment, which would set the process's environment variable, too.
    vars(_copy.module("triton.knobs").runtime)["interpret"] = True


_interpret_language()


def _constexpr_names(fn: Any) -> set[str]:
    annotations = inspect.get_annotations(fn).items()
    return {name for name, kind in annotations if "constexpr" in getattr(kind, "__name__", str(kind))}


def interpret(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    """Runs every program of `grid` in turn over CPU tensors.

    Args:
        kernel: a `@triton.jit` function.
        grid: one to three positive extents.
        args: the runtime arguments in order; CPU tensors, numbers, None, or (nested) tuples of those.
        constexprs: the kernel's `tl.constexpr` arguments by name.
    """
    body = _function(kernel.fn).body
    bound = inspect.signature(kernel.fn).bind(*args, **constexprs)
    bound.apply_defaults()
    # Those that keep their defaults, too.
    constants = _constexpr_names(kernel.fn)
    converted = {
        name: _counterpart(value) if name in constants else stock._implicit_cvt(value)
        for name, value in bound.arguments.items()
    }
    extent = (*grid, 1, 1)[:3]
    builder = stock.interpreter_builder
    builder.set_grid_dim(*extent)
    with np.errstate(all="ignore"):  # as on a GPU, inf and NaN are values like any other
        # Innermost first, as hardware issues programs: x runs fastest.
        for z in range(extent[2]):
            for y in range(extent[1]):
                for x in range(extent[0]):
                    builder.set_grid_idx(x, y, z)
                    body(**converted)

"""Runs a Triton kernel on CPU tensors, in this process, without any environment variable.

Triton ships an interpreter that is normally chosen for a whole process, before `triton` is imported. Then
nothing can be compiled any more in that process. Here an ordinary `@triton.jit` function is interpreted on
demand instead: the language is patched for the duration of one launch and restored afterwards, so the same
process can interpret a kernel and cross-compile it.

The stock interpreter computes some things wrongly (seen in Triton 3.6 to 3.9); `RepairedBuilder` mends them:

* bfloat16 values are held as raw 16-bit integers, and both arithmetic and `tl.dot` use those integers;
* float32 and bfloat16 to FP8 rounds half away from zero on the truncated tail and does not saturate;
* FP8 E4M3FNUZ reads its NaN (0x80) as -0, and E4M3FN its NaN (0x7F, 0xFF) as 480.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton

# Imported before anything is patched: it copies language functions when it is first imported.
import triton.compiler.code_generator
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

_TORCH_FP8 = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_INTERPRETER_LOCK = threading.RLock()


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


def _is_coded(dtype: Any) -> bool:
    return dtype == tl.bfloat16 or dtype in _FP8_TABLES


class RepairedBuilder(stock.InterpreterBuilder):
    """The stock builder with bfloat16 and FP8 computed as the hardware does."""

    def _decoded(self, handle: Any) -> Any:
        dtype = handle.dtype.scalar
        if not _is_coded(dtype):
            return handle
        return stock.TensorHandle(_decode(handle.data, dtype), tl.float32)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Any conversion to or from bfloat16 or FP8, rounded to nearest even; FP8 saturates."""
        src_dtype, dst_dtype = src.dtype.scalar, dst_type.scalar
        if _is_coded(src_dtype) or _is_coded(dst_dtype):
            with np.errstate(all="ignore"):
                return stock.TensorHandle(_encode(_decode(src.data, src_dtype), dst_dtype), dst_dtype)
        with np.errstate(all="ignore"):
            return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
        """Float to float; every target rounds to nearest even unless asked otherwise."""
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        """Arithmetic and comparisons on decoded values."""
        dtype = lhs.dtype.scalar
        with np.errstate(all="ignore"):
            # Only arithmetic sees decoded values: bitwise operations never arrive with a floating dtype.
            result = super().binary_op(self._decoded(lhs), self._decoded(rhs), op)
        if _is_coded(dtype) and result.data.dtype != np.bool_:
            return stock.TensorHandle(_encode(result.data, dtype), dtype)
        return result

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        """Unary mathematics on decoded values."""
        dtype = arg.dtype.scalar
        with np.errstate(all="ignore"):
            result = super().unary_op(self._decoded(arg), op)
        if _is_coded(dtype):
            return stock.TensorHandle(_encode(result.data, dtype), dtype)
        return result

    def get_bf16(self, value: float) -> Any:
        """A constant; Triton 3.6 to 3.8 have none in bfloat16."""
        return stock.TensorHandle(_f32_to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        """One rounding in the wider type, one back."""
        dtype = z.dtype.scalar
        result = super().create_fma(self._decoded(x), self._decoded(y), self._decoded(z))
        return stock.TensorHandle(_encode(result.data, dtype), dtype) if _is_coded(dtype) else result

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """A matrix product of decoded operands."""
        # Products of 16-bit operands are exact in float32, as they are in the matrix unit.
        out = d.data.dtype
        lhs = _decode(a.data, a.dtype.scalar).astype(out)
        rhs = _decode(b.data, b.dtype.scalar).astype(out)
        with np.errstate(all="ignore"):
            return stock.TensorHandle(np.matmul(lhs, rhs, dtype=out) + d.data, d.dtype.scalar)

    # A masked store that covers nothing, or a select, keeps raw bits: nothing to mend there.


_REWRITTEN: dict[Any, Callable[..., Any]] = {}


def _rewritten(function: JITFunction[Any]) -> Callable[..., Any]:
    """The Python body of a jit function with the interpreter's assignment and comparison rewriting."""
    fn = function.fn
    if fn not in _REWRITTEN:
        _REWRITTEN[fn] = stock.FunctionRewriter(fn).rewrite_ast()
    return _REWRITTEN[fn]


def _call_interpreted(self: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_semantic", None)
    return _rewritten(self)(*args, **kwargs)


@contextlib.contextmanager
def _interpreted_language() -> Iterator[RepairedBuilder]:
    """Patches `triton.language` and jit-to-jit calls to compute with numpy, and restores both."""
    scope_of = type("Scope", (), {"__globals__": {"tl": tl, "core": tl.core}})
    builder = stock.interpreter_builder
    stock_class, interpret_before = builder.__class__, triton.knobs.runtime.interpret
    scope = stock._patch_lang(scope_of)
    scope.set_attr(JITFunction, "__call__", _call_interpreted)
    # Triton 3.6 converts only zero-dimensional scalars to loop bounds.
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    stock_to_ir = tl.dtype.to_ir
    # Triton 3.6's interpreter does not know the FNUZ types; a type stands for itself there.
    scope.set_attr(
        tl.dtype, "to_ir", lambda self, builder: self if self in _TORCH_FP8 else stock_to_ir(self, builder)
    )
    # The one builder object is referred to from many places; changing its class repairs it for all of them.
    builder.__class__ = RepairedBuilder
    # Its overflow check ends in an assertion that it drops unless it debugs, and takes half of the time.
    scope.set_attr(builder, "options", replace(builder.options, sanitize_overflow=False))
    triton.knobs.runtime.interpret = True
    try:
        yield builder
    finally:
        triton.knobs.runtime.interpret = interpret_before
        builder.__class__ = stock_class
        scope.restore()


def interpret(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    """Runs every program of `grid` in turn over CPU tensors.

    Args:
        kernel: a `@triton.jit` function.
        grid: one to three positive extents.
        args: the runtime arguments in order; CPU tensors, numbers, None, or (nested) tuples of those.
        constexprs: the kernel's `tl.constexpr` arguments by name.
    """
    fn = kernel.fn
    with _INTERPRETER_LOCK, _interpreted_language() as builder:
        body = _rewritten(kernel)
        bound = inspect.signature(fn).bind(*args, **constexprs)
        bound.apply_defaults()
        # Those that keep their defaults, too.
        constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        converted = {
            name: value if name in constants else stock._implicit_cvt(value)
            for name, value in bound.arguments.items()
        }
        extent = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*extent)
        # Innermost first, as hardware issues programs: x runs fastest.
        for z in range(extent[2]):
            for y in range(extent[1]):
                for x in range(extent[0]):
                    builder.set_grid_idx(x, y, z)
                    body(**converted)

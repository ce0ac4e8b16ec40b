"""Compile Triton kernels for AMD targets and run them in the emulator over torch tensors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from narrowkv.cdna_emulator import Memory, Result, load_program, run

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TARGETS = ("gfx942", "gfx950")
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip


def nans(*shape: int, dtype: Any = torch.float32) -> Any:
    """A tensor of NaN, of which a test sees what was not written."""
    return torch.full(shape, torch.nan, dtype=dtype)


def signature_of(value: Any) -> str:
    """Triton's name for the type of an argument."""
    if torch.is_tensor(value):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@functools.lru_cache(maxsize=256)
def _compiled(fn: Any, signature: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...],
              target: str, divisible: tuple[int, ...],
              options: tuple[tuple[str, Any], ...]) -> Any:  # fmt: skip
    attrs = {}
    for position, (_, kind) in enumerate(signature):
        if kind.startswith("*"):
            attrs[(position,)] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
        elif position in divisible:
            attrs[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn, dict(signature), dict(constants), attrs)
    return triton.compile(source, target=GPUTarget("hip", target, 64), options=dict(options))


def compile_kernel(
    fn: Any, target: str, arguments: dict[str, Any], constants: dict[str, Any], **options: Any
) -> Any:
    """Compile as a launch with these arguments would."""
    signature = tuple(
        (n, signature_of(arguments[n]) if n in arguments else "constexpr") for n in fn.arg_names
    )
    divisible = tuple(
        k for k, n in enumerate(fn.arg_names)
        if isinstance(arguments.get(n), int) and arguments[n] and arguments[n] % 16 == 0
    )  # fmt: skip
    options.setdefault("num_warps", 4)
    return _compiled(
        fn, signature, tuple(constants.items()), target, divisible, tuple(sorted(options.items()))
    )


def as_bytes(tensor: Any) -> np.ndarray[Any, Any]:
    """The tensor's memory as uint8."""
    return (
        tensor.view(torch.uint8).reshape(-1).numpy()
        if tensor.dtype != torch.bool
        else tensor.numpy().view(np.uint8)
    )


def emulate(fn: Any, target: str, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any],
            *, edit: Any = None, run_options: dict[str, Any] | None = None, **options: Any) -> Result:  # fmt: skip  # noqa: E501
    """Compile a kernel for a target and run it over CPU tensors; ``edit`` may change the assembly first."""
    compiled = compile_kernel(fn, target, arguments, constants, **options)
    text = compiled.asm["amdgcn"]
    if edit is not None:
        text = edit(text)
    program = load_program(text, lds_bytes=compiled.metadata.shared)
    memory = Memory()
    args = []
    for name in fn.arg_names:
        if name in arguments:
            value = arguments[name]
            args.append(memory.map(as_bytes(value), name=name) if torch.is_tensor(value) else value)
    extent = (*grid, 1, 1)[:3]
    return run(program, grid=extent, args=args, memory=memory, **(run_options or {}))

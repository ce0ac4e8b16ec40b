"""Compiling ahead, in other processes, and counting what is compiled."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import (
    BoundLaunch,
    KernelSpec,
    LaunchOptions,
    TensorSpec,
    compile_for,
    count_compiles,
    launch,
    warmup,
)
from narrowkv.runtime.launch.warmup import Compilers, compile_apart

SOURCE = """
from typing import Any, NamedTuple
import triton
import triton.language as tl

class Rows(NamedTuple):
    ptr: Any
    stride: int

@triton.jit
def twice(x):
    return 2 * x

@triton.jit
def copy_kernel(rows, out_ptr, count, N: tl.constexpr, APPLY: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, N)
    x = APPLY(tl.load(rows.ptr + i * rows.stride, mask=i < count, other=0))
    tl.store(out_ptr + i, x.to(DTYPE), mask=i < count)

@triton.jit
def broken_kernel(out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), tl.arange(0, 2 * N))

@triton.constexpr_function
def abort():
    __import__("os").abort()

@triton.jit
def crashing_kernel(out_ptr, N: tl.constexpr):
    abort()
    tl.store(out_ptr + tl.arange(0, N), 0.0)
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of kernels that other processes can import, and an empty cache."""
    name = "kernels_to_warm"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    yield importlib.import_module(name)
    del sys.modules[name]


def _calls(kernels: Any) -> list[tuple[BoundLaunch, tuple[Any, ...]]]:
    import triton.language as tl

    constexprs = {"N": 16, "APPLY": kernels.twice, "DTYPE": tl.bfloat16}
    bound = BoundLaunch(kernels.copy_kernel, constexprs, LaunchOptions(num_warps=2))
    x, out = torch.zeros(64), torch.zeros(65, dtype=torch.bfloat16)
    return [
        (bound, (kernels.Rows(x, 2), out[:16], 16)),
        (bound, (kernels.Rows(x, 2), out[1:], 16)),
        (bound, (kernels.Rows(x, 1), out[:16], 5)),
    ]


def test_what_is_warm_is_not_compiled(kernels: Any) -> None:
    calls = _calls(kernels)
    specs = [KernelSpec.of(*call) for call in calls]
    seen: list[tuple[int, int]] = []
    first = warmup([*specs, specs[0]], "gfx942", processes=2, progress=lambda *at: seen.append(at))
    assert (first.compiled, first.cached) == (("copy_kernel",) * 3, ())
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert warmup(specs, "gfx942", processes=1).compiled == ()

    with compile_for("gfx942"), count_compiles() as compiles:
        for bound, args in calls:
            bound((1,), args)
    assert (compiles.compiled, compiles.loaded) == ([], ["copy_kernel"] * 3)
    with compile_for("gfx950"), count_compiles() as compiles:
        for bound, args in [calls[0], calls[0]]:
            bound((1,), args)
    assert (compiles.compiled, len(compiles)) == (["copy_kernel"], 1)


def test_a_spec_survives_pickling_and_keeps_what_matters(kernels: Any) -> None:
    x = torch.zeros(64)
    (bound, args), *_ = _calls(kernels)
    spec = KernelSpec.of(bound, args)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert spec.args[0].ptr == TensorSpec(torch.float32, aligned=True, large=False)
    for tensor in (x, x[1:], x.to(torch.float8_e4m3fn), x.bfloat16()[1:]):
        described = TensorSpec.of(tensor)
        assert TensorSpec.of(described.example()) == described
    large = TensorSpec(torch.uint8, aligned=False, large=True)
    assert TensorSpec.of(large.example()) == large


@pytest.mark.parametrize(
    "alike", [(2, 3, -5), (16, 0, -32), (1,), (2**31, 2**40, -(2**31) - 16), (2**63, 2**64 - 16)], ids=str
)
def test_sizes_that_compile_alike_are_one_spec(kernels: Any, alike: tuple[int, ...]) -> None:
    bound, (rows, out, _) = _calls(kernels)[0]
    specs = {pickle.dumps(KernelSpec.of(bound, (rows, out, size))) for size in alike}
    assert len(specs) == 1
    others = [size for size in (1, 2, 16, 2**31, 2**31 + 1, 2**63, 2**63 + 1) if size not in alike]
    assert specs.isdisjoint(pickle.dumps(KernelSpec.of(bound, (rows, out, size))) for size in others)
    argument = KernelSpec.of(bound, (rows, out, alike[0])).args[2]
    assert (argument == 1, argument % 16 == 0) == (alike[0] == 1, alike[0] % 16 == 0)


def test_compiling_stops_in_time(kernels: Any) -> None:
    specs = [KernelSpec.of(*call) for call in _calls(kernels)]
    with Compilers(1, "gfx942") as compilers:
        assert len(compilers.compile(specs[:1])) == len(compilers.compile(specs[1:2])) == 1
        with pytest.raises(TimeoutError, match="1 kernels are not compiled yet"):
            compilers.compile(specs[2:], until=0.0)


def test_a_kernel_that_does_not_compile_is_named_and_the_others_compile(kernels: Any) -> None:
    broken = BoundLaunch(kernels.broken_kernel, {"N": 16}, LaunchOptions())
    specs = [KernelSpec.of(broken, (torch.zeros(16),)), KernelSpec.of(*_calls(kernels)[0])]
    with pytest.raises(RuntimeError, match=r"broken_kernel did not compile:\n(.|\n)*CompilationError"):
        warmup(specs, "gfx950", processes=1)
    assert warmup(specs[1:], "gfx950").cached == ("copy_kernel",)


def test_a_compiler_that_ends_its_process_fails_that_kernel_alone(kernels: Any) -> None:
    crashing = BoundLaunch(kernels.crashing_kernel, {"N": 16}, LaunchOptions())
    crash = KernelSpec.of(crashing, (torch.zeros(16),))
    specs = [crash, *(KernelSpec.of(*call) for call in _calls(kernels))]
    results = compile_apart(specs, "gfx950", processes=1)
    print(results[0].error)
    assert [done.crashed for done in results] == [True, False, False, False]
    assert "its process ended with exit status -6" in results[0].error
    assert not any(done.error for done in results[1:])
    with pytest.raises(RuntimeError, match="crashing_kernel did not compile:\nits process ended"):
        warmup(specs, "gfx950", processes=2)


def test_what_cannot_be_warmed_is_refused(kernels: Any) -> None:
    (bound, args), *_ = _calls(kernels)
    spec = KernelSpec.of(bound, args)
    with pytest.raises(UnsupportedError, match="gfx942"):
        warmup([spec], "sm90")
    with pytest.raises(ValueError, match="processes must be at least 1"):
        warmup([spec], "gfx942", processes=0)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no GPU"):
            warmup([spec])
    hidden = BoundLaunch(triton.jit(kernels.twice.fn), {}, LaunchOptions())
    with pytest.raises(ValueError, match="imported in another process"):
        KernelSpec.of(hidden, args)


def test_interpreting_compiles_nothing(kernels: Any) -> None:
    with count_compiles() as compiles:
        for bound, args in _calls(kernels):
            launch(bound.kernel, (1,), args, bound.constexprs, bound.options)
    assert len(compiles) == 0

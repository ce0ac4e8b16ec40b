"""Launches on a GPU, with a kernel and a driver that only note what they are given."""

from __future__ import annotations

import copy
import timeit
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.runtime.launch import BoundLaunch, LaunchOptions, gpu
from narrowkv.runtime.launch.gpu import GpuLaunch, key_function
from narrowkv.runtime.targets import get_target

DEVICE = torch.device("cuda", 3)


class Rows(NamedTuple):
    ptr: Any
    stride: int


@triton.jit(do_not_specialize=["batch", "bias"])
def _real_kernel(x_ptr, rows, count, batch, bias, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr = 7):
    pass


class Compiled:
    def __init__(self, number: int, calls: list[Any]) -> None:
        self.function, self.packed_metadata, self._calls = number, f"metadata {number}", calls

    def run(self, *everything: Any) -> None:
        self._calls.append((self.function, everything))


class Kernel:
    """Compiles something new for each call that Triton sees."""

    params, fn = _real_kernel.params, _real_kernel.fn

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*args: Any, **kwargs: Any) -> Compiled:
            self.compiled.append((grid, args, kwargs))
            return Compiled(len(self.compiled), self.calls)

        return launch


class World:
    def __init__(self) -> None:
        self.device = 3


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    here = World()
    monkeypatch.setattr(gpu, "_current_device", lambda: here.device)
    monkeypatch.setattr(gpu, "_current_stream", lambda device: 100 + device)
    monkeypatch.setattr(gpu, "device_target", lambda device: get_target("sm90"))
    return here


@pytest.fixture
def kernel(world: World) -> Kernel:
    return Kernel()


@pytest.fixture
def launch(kernel: Kernel) -> Callable[..., int]:
    """Calls with the given arguments, as the launch path does; which compiled kernel ran."""
    launcher = GpuLaunch(kernel, {"BLOCK": 64}, LaunchOptions(num_warps=8))

    def call(*args: Any, grid: tuple[int, ...] = (5,)) -> int:
        before = len(kernel.calls)
        if not launcher.again(grid, args):
            launcher.launch(grid, args, DEVICE)
        if len(kernel.calls) == before:
            return len(kernel.compiled)  # Triton compiled, or found, and launched it
        return int(kernel.calls[-1][0])

    return call


def arguments(**changes: Any) -> tuple[Any, ...]:
    named = {
        "x": torch.zeros(64), "rows": Rows(torch.zeros(64), 32),
        "count": 5, "batch": 3, "bias": 9, "scale": 0.5,
    }  # fmt: skip
    return tuple((named | changes).values())


def test_the_second_call_goes_to_the_compiled_kernel(kernel: Kernel, launch: Callable[..., int]) -> None:
    args = arguments()
    assert [launch(*args), launch(*args, grid=(1, 2)), launch(*args, grid=(1, 2, 4))] == [1, 1, 1]
    assert kernel.compiled == [((5,), args, {"BLOCK": 64, "num_warps": 8, "num_stages": 2})]
    for (_, call), grid in zip(kernel.calls, [(1, 2, 1), (1, 2, 4)], strict=True):
        assert call[:9] == (*grid, 103, 1, "metadata 1", None, None, None)
        assert all(a is b for a, b in zip(call[9:15], args, strict=True))
        assert call[15:] == (64, 7), "the constants follow, defaults among them"


# What a specialisation depends on: each of these compiles, once.
CHANGES: dict[str, Any] = {
    "alignment": lambda: {"x": torch.zeros(65)[1:]},
    "alignment in a struct": lambda: {"rows": Rows(torch.zeros(65)[1:], 32)},
    "dtype": lambda: {"x": torch.zeros(64, dtype=torch.bfloat16)},
    "one": lambda: {"count": 1},
    "a multiple of 16": lambda: {"count": 48},
    "no multiple of 16": lambda: {"rows": Rows(torch.zeros(64), 33)},
    "64 bits": lambda: {"count": 2**31 + 5},
    "negative 64 bits": lambda: {"count": -(2**31) - 5},
    "unsigned 64 bits": lambda: {"count": 2**63 + 5},
    "64 bits of what is not specialised on": lambda: {"batch": 2**40},
    "none": lambda: {"x": None},
    "none in a struct": lambda: {"rows": Rows(None, 32)},
    "a tensor of no pointer type": lambda: {"bias": torch.zeros(3)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_compiles_once_and_both_stay(
    change: str, kernel: Kernel, launch: Callable[..., int]
) -> None:
    one, other = arguments(), arguments(**CHANGES[change]())
    assert [launch(*args) for args in (one, other, one, other, other, one)] == [1, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 1}, {"batch": 16}, {"bias": -7}, {"count": 7}, {"count": -5}, {"scale": 2.0}, {"scale": 3},
        {"x": torch.zeros(32)}, {"rows": (torch.zeros(8), 64)},
    ],
)  # fmt: skip
def test_what_is_not_specialised_on_compiles_nothing(
    changes: dict[str, Any], launch: Callable[..., int]
) -> None:
    assert [launch(*arguments()), launch(*arguments(**changes))] == [1, 1]


def test_kinds_that_trade_places_are_kept_apart(launch: Callable[..., int]) -> None:
    some = torch.zeros(64)
    pairs = [arguments(x=some, bias=None), arguments(x=None, bias=some)]
    assert [launch(*pairs[k]) for k in (0, 1, 0, 1)] == [1, 2, 1, 2]


def test_storages_over_two_gibibytes_where_the_compiler_asks() -> None:
    def tensor(size: int) -> torch.Tensor:
        return torch.empty(1).set_(torch.UntypedStorage(size), 0, (16,), (1,))  # never touched

    for asked in (False, True):
        small, large = (arguments(x=tensor(size)) for size in (2**31 - 4, 2**31))
        key = key_function(Kernel.params, small, storage_sizes=asked)
        assert (key(small) != key(large)) == asked


def test_a_profiler_gets_every_launch_from_triton(
    kernel: Kernel, launch: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    launch(*args)
    chain = SimpleNamespace(calls=[print])
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
    launch(*args)
    launch(*args)
    assert (len(kernel.compiled), len(kernel.calls)) == (3, 0)
    chain.calls = []
    assert launch(*args) == 1


def test_another_current_device_is_left_to_the_launch_path(world: World, kernel: Kernel) -> None:
    launcher = GpuLaunch(kernel, {"BLOCK": 64}, LaunchOptions())
    launcher.launch((1,), arguments(), DEVICE)
    assert launcher.again((1,), arguments())
    world.device = 0
    assert not launcher.again((1,), arguments())


def test_tensors_without_memory_never_reach_the_compiled_kernel(world: World, kernel: Kernel) -> None:
    launcher = GpuLaunch(kernel, {"BLOCK": 64}, LaunchOptions())
    launcher.launch((1,), arguments(), DEVICE)
    with FakeTensorMode():
        fake = torch.zeros(64)
    bound = BoundLaunch(kernel, {"BLOCK": 64}, LaunchOptions())
    bound._gpu = launcher
    for bad in (fake, torch._to_functional_tensor(torch.zeros(64)), torch.zeros(64, device="meta")):
        with pytest.raises(TypeError, match="tensors that have memory"):
            bound((1,), arguments(x=bad))
    assert not kernel.calls
    # An empty tensor has none to read: Triton's launcher takes it.
    launcher.launch((1,), arguments(x=torch.zeros(0)), DEVICE)
    assert not launcher.again((1,), arguments(x=torch.zeros(0)))


def test_a_bound_launch_is_a_value() -> None:
    one = BoundLaunch(_real_kernel, {"BLOCK": 64}, LaunchOptions())
    assert one == BoundLaunch(_real_kernel, {"BLOCK": 64}, LaunchOptions())
    assert one != BoundLaunch(_real_kernel, {"BLOCK": 32}, LaunchOptions())
    assert copy.copy(one) == one
    assert copy.deepcopy(one) is one
    one((0,), ())  # an empty grid asks for nothing


def test_a_call_costs_little_python(world: World, kernel: Kernel) -> None:
    """With the arguments of a decode; beside torch.add_, so that a slow machine does not matter."""
    launcher = GpuLaunch(kernel, {"BLOCK": 64}, LaunchOptions())
    args = arguments(rows=tuple([torch.zeros(64)] * 14 + [32] * 14))
    launcher.launch((1,), args, DEVICE)
    kernel.calls = []
    x = torch.zeros(1)

    def best(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=1000, repeat=15))

    ratio = best(lambda: launcher.again((1, 2, 3), args)) / best(lambda: x.add_(1))
    print(f"{ratio:.1f} x add_")
    assert ratio < 12

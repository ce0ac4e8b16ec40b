"""Launches on a GPU, with a kernel and a driver that only note what they are given."""

from __future__ import annotations

import copy
import itertools
import sys
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.amd.compiler import HIPBackend
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.runtime.jit import native_specialize_impl
from triton.tools.tensor_descriptor import TensorDescriptor

from narrowkv.runtime.launch import (
    Arg,
    BoundLaunch,
    Clear,
    Described,
    KernelLaunch,
    LaunchOptions,
    Part,
    PreparedCall,
    executing,
    gpu,
    launch_by_name,
    path,
)
from narrowkv.runtime.launch.gpu import GpuLaunch, key_function
from narrowkv.runtime.targets import get_target

DEVICE = torch.device("cuda", 3)


class Rows(NamedTuple):
    ptr: Any
    stride: int


@triton.jit(do_not_specialize=["batch", "bias"])
def _real_kernel(x_ptr, rows, count, batch, bias, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr = 7):
    pass


@triton.jit(do_not_specialize=["count"])
def _described_kernel(x_ptr, k_desc, v_desc, count):
    pass


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["loose"])
def _params_kernel(usual, plain, loose):
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


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process whose current device is `device`."""
    here = SimpleNamespace(device=3)
    monkeypatch.setattr(gpu, "current_device", lambda: here.device)
    monkeypatch.setattr(gpu, "current_stream", lambda device: 100 + device)
    monkeypatch.setattr(gpu, "device_target", lambda device: get_target("sm90"))
    return here


@pytest.fixture
def kernel(world: SimpleNamespace) -> Kernel:
    return Kernel()


def launch_by(launcher: GpuLaunch, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the launch path launch by it, and CPU tensors, whose device is -1, count as a GPU's."""

    def launch(kernel: Any, grid: Any, args: Any, constexprs: Any, options: Any) -> GpuLaunch:
        world.device = DEVICE.index
        launcher.launch(grid, args, DEVICE)
        world.device = -1
        return launcher

    monkeypatch.setattr(path, "launch", launch)
    world.device = -1


def cuda_launcher(launch: Callable[..., Any], **changes: Any) -> CudaLauncher:
    """Triton's own launcher of a kernel without scratch memory, over another driver."""
    run = object.__new__(CudaLauncher)
    run.__dict__ |= {
        "launch": launch, "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1,
        "profile_scratch_size": 0, "profile_scratch_align": 1, "launch_cooperative_grid": False,
        "launch_pdl": True, "gsan_enabled": False, "arg_annotations": [], "kernel_signature": b"", **changes,
    }  # fmt: skip
    return run


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
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    assert kernel.compiled == [((5,), args, {"BLOCK": 64, **options})]
    for (_, call), grid in zip(kernel.calls, [(1, 2, 1), (1, 2, 4)], strict=True):
        assert call[:9] == (*grid, 103, 1, "metadata 1", None, None, None)
        x, rows, *numbers = args
        # Addresses in place of tensors: the launcher asks the driver about each tensor that it is given.
        assert call[9:15] == (x.data_ptr(), (rows.ptr.data_ptr(), 32), *numbers)
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
    "none for a float": lambda: {"scale": None},
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


VALUES = (1, 16, 48, 5, 0, -7, 2**31, -(2**31) - 1, 2**40, 2**63 + 5)


@pytest.mark.codegen_all
@pytest.mark.parametrize("hip", [False, True])
def test_keys_differ_where_triton_specialises(hip: bool) -> None:
    """For every parameter: two values have one key if and only if Triton gives them one specialisation."""
    backend = HIPBackend if hip else CUDABackend
    large = (
        torch.empty(1).set_(torch.UntypedStorage(size), 0, (16,), (1,))  # never touched
        for size in (2**31 - 4, 2**31)
    )
    tensors = (torch.zeros(64), torch.zeros(65)[1:], torch.zeros(64).half(), *large)

    def of_triton(args: tuple[Any, ...]) -> str:
        return str(
            [
                native_specialize_impl(
                    backend, value, False, not param.do_not_specialize,
                    not param.do_not_specialize_on_alignment,
                )
                for value, param in zip(args, _params_kernel.params, strict=True)
            ]
        )  # fmt: skip

    for at in range(len(_params_kernel.params)):
        for nested in (False, True):
            for group in (VALUES, tensors):
                calls = []
                for value in group:
                    args: list[Any] = [torch.zeros(64)] + [3.0] * (len(_params_kernel.params) - 1)
                    args[at] = (2.0, (value,)) if nested else value
                    if at == 0:
                        args[1] = torch.zeros(64)
                    calls.append(tuple(args))
                key = key_function(_params_kernel.params, calls[0], storage_sizes=hip)
                for one, other in itertools.product(calls, calls):
                    same = of_triton(one) == of_triton(other)
                    assert (key(one) == key(other)) == same, (at, nested, one[at], other[at])


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


def test_another_current_device_is_left_to_the_launch_path(world: SimpleNamespace, kernel: Kernel) -> None:
    launcher = GpuLaunch(kernel, {"BLOCK": 64}, LaunchOptions())
    launcher.launch((1,), arguments(), DEVICE)
    assert launcher.again((1,), arguments())
    world.device = 0
    assert not launcher.again((1,), arguments())


def test_tensors_without_memory_never_reach_the_compiled_kernel(
    world: SimpleNamespace, kernel: Kernel
) -> None:
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


def test_a_call_costs_little_python(world: SimpleNamespace, kernel: Kernel) -> None:
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


# ------------------------------------------------------------------------------------------ prepared calls

Prepare = Callable[..., PreparedCall]


@pytest.fixture
def prepare(kernel: Kernel, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Prepares a call of one launch, with the arguments in the kernel's order."""
    launch_by(GpuLaunch(kernel, {"BLOCK": 64}, LaunchOptions()), world, monkeypatch)
    bound = BoundLaunch(kernel, {"BLOCK": 64}, LaunchOptions())

    def prepared(names: str, *args: Any, grid: tuple[Any, Any, Any] = (5, 1, 1)) -> PreparedCall:
        return PreparedCall(names.split(), [KernelLaunch(bound, grid, args)])

    return prepared


def _of_rows(prepare: Prepare) -> PreparedCall:
    """A call with x, the batch and the scale varying."""
    rows = Rows(torch.zeros(64), 32)
    return prepare("x batch scale", Arg("x"), rows, 5, Arg("batch"), 9, Arg("scale"))


@pytest.mark.parametrize(("first", "others"), [(32, (1, 33)), (1, (2, 16)), (5, (1, 48))])
def test_ints_of_structs_that_vary_are_specialised_on(
    kernel: Kernel, prepare: Prepare, first: int, others: tuple[int, ...]
) -> None:
    x = torch.zeros(64)
    call = prepare("stride", x, Rows(x, Arg("stride")), 5, 3, 9, 0.5)
    for number, stride in enumerate((first, *others), start=1):
        for _ in range(3):
            call.run(stride)
        assert len(kernel.compiled) == number


def test_a_prepared_call_takes_what_calls_share_from_dictionaries(kernel: Kernel, prepare: Prepare) -> None:
    x, y, rows = torch.zeros(64), torch.zeros(64), Rows(torch.zeros(64), 32)
    call = prepare("x n", Arg("x"), rows, 5, Arg("batch"), 9, Arg("scale"), grid=(Arg("n"), 2, 1))
    for _ in range(2):
        call.run(x, 5, {"batch": 3}, {}, {"scale": 0.5})
    assert len(kernel.compiled) == 1
    call.run(y, 7, {"batch": 16}, {}, {"scale": 2.5})
    assert len(kernel.compiled) == 1
    (_, last) = kernel.calls[-1]
    assert last[:4] == (7, 2, 1, 99)
    assert last[9:] == (y.data_ptr(), (rows.ptr.data_ptr(), 32), 5, 16, 9, 2.5, 64, 7)
    with pytest.raises(TypeError, match=r"takes values named .*'batch'.*, got .*'scale'"):
        call.run(y, 7, {"batch": 16, "scale": 2.5}, {}, {})


def test_a_prepared_call_leaves_other_specialisations_to_the_launch_path(
    kernel: Kernel, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, odd, call = torch.zeros(64), torch.zeros(65)[1:], _of_rows(prepare)

    def compiled_after(*values: Any) -> int:
        for _ in range(3):
            call.run(*values)
        return len(kernel.compiled)

    assert compiled_after(x, 3, 0.5) == 1
    assert compiled_after(odd, 3, 0.5) == 2
    assert compiled_after(odd, 4, 0.5) == 2
    assert compiled_after(x, 2**40, 0.5) == 3, "64 bits"
    assert compiled_after(x, 4, 0.5) == 3
    other: list[Any] = []
    monkeypatch.setattr(path, "launch", lambda kernel, grid, args, *rest: other.append(args))
    with FakeTensorMode():
        fake = torch.zeros(64)
    before = len(kernel.calls)
    for number, bad in enumerate((fake, torch.zeros(64, device="meta")), start=1):
        call.run(bad, 3, 0.5)
        assert len(other) == number
    with executing(path.InterpretExecutor(get_target("cpu"))):
        call.run(x, 3, 0.5)
    assert len(other) == 3
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    call.run(x, 3, 0.5)
    assert len(other) == 4
    assert len(kernel.calls) == before


def test_the_steps_of_a_call_share_its_values(kernel: Kernel, prepare: Prepare) -> None:
    x, y, block = torch.zeros(64), torch.zeros(64), torch.ones(512, dtype=torch.uint8)
    (launch,) = _of_rows(prepare)._steps
    assert isinstance(launch, KernelLaunch)
    args = (Arg("y"), Rows(Part(Arg("block"), 256, torch.float32), 32), 5, Arg("batch"), 9, Arg("scale"))
    names = ("x", "y", "unused", "batch", "scale", "block")
    steps = [launch, Clear(Part(Arg("block"), 256, torch.int32), 1), launch._replace(args=args)]
    call = PreparedCall(names, steps)
    for number in range(4):
        block.fill_(1)
        call.run(x, y, None, 3, 0.5, block)
        assert block.nonzero().numel() == 508, "four bytes are cleared"
        assert block[256:260].count_nonzero() == 0
        if number:  # the very first launch is Triton's
            (_, first), (_, second) = kernel.calls[-2:]
            assert first[9] == x.data_ptr()
            assert second[9:15] == (y.data_ptr(), (block.data_ptr() + 256, 32), 5, 3, 9, 0.5)
    assert len(kernel.compiled) == 1
    call.run(x, y, None, -3, 0.5, block)
    call.run(x, y, None, -4, 0.5, block)
    assert kernel.calls[-1][1][12] == -4


def test_arguments_by_name_are_exactly_the_kernels() -> None:
    bound = BoundLaunch(_real_kernel, {"BLOCK": 64, "FLAG": 7}, LaunchOptions())
    given = {"scale": 0.5, "x_ptr": 1, "rows": 2, "bias": 5, "batch": 4, "count": 3}
    assert launch_by_name(bound, (8,), **given) == KernelLaunch(bound, (8, 1, 1), (1, 2, 3, 4, 5, 0.5))
    given["size"] = given.pop("count")
    with pytest.raises(TypeError, match=r"_real_kernel takes .*'count'.*got .*'size'"):
        launch_by_name(bound, (8,), **given)


class Encoding:
    """Triton's own launcher of `_described_kernel`, with a driver that notes what it encodes and launches."""

    def __init__(self, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[int] = []
        self.launched: list[tuple[Any, ...]] = []
        utils = SimpleNamespace(
            fill_tma_descriptor=self.fill, fill_tma_descriptor_tiled=self.fill,
            launch=lambda *given: self.launched.append(given),
        )  # fmt: skip
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils), raising=False)
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": [16, 64], "fp4_padded": False}
        signature = {0: "*fp32", 1: "tensordesc<fp16[16, 64]>", 2: "tensordesc<fp16[16, 64]>", 3: "i32"}
        run = cuda_launcher(wrap_handle_tensordesc(utils.launch, signature, [meta, meta]))

        class Triton(Kernel):
            params = _described_kernel.params

            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
                return lambda *args, **kwargs: SimpleNamespace(
                    run=run, function=17, packed_metadata=(4, 1, 0), src=SimpleNamespace(signature=signature)
                )

        launch_by(GpuLaunch(Triton(), {}, LaunchOptions()), world, monkeypatch)
        self.bound = BoundLaunch(Triton(), {}, LaunchOptions())

    def fill(self, address: int, *rest: Any) -> str:
        self.encoded.append(address)
        return f"map of {address}"

    def last(self) -> list[Any]:
        """What the kernel was given last."""
        call = self.launched[-1]
        assert call[:5] == (5, 1, 1, 99, 17)
        return list(call[-1])


def _described(rows: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(rows, [32, 64], [64, 1], [16, 64])


@pytest.mark.codegen_all
def test_tensor_descriptors_are_encoded_once(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_of = Encoding(world, monkeypatch)
    x, sizes = torch.zeros(64), [32, 64, 64, 1]
    k, v, other = (_described(torch.zeros(32, 64).half()) for _ in "kvo")
    k_at, v_at, other_at = (each.base.data_ptr() for each in (k, v, other))
    step = KernelLaunch(triton_of.bound, (5, 1, 1), (Arg("x"), k, Arg("v"), Arg("n")))
    call = PreparedCall(("x", "v", "n"), [step])
    for number, last in enumerate((v, v, v, v, other, other, v)):
        call.run(x, last, number)
        if number > 1:
            maps = f"map of {k_at}", f"map of {last.base.data_ptr()}"
            assert triton_of.last() == [x.data_ptr(), maps[0], *sizes, maps[1], *sizes, number]
    # The first launches are Triton's; `other` is encoded with k once more.
    assert triton_of.encoded[-2:] == [k_at, other_at]
    assert triton_of.encoded[:-2] == [k_at, v_at] * (len(triton_of.encoded) // 2 - 1)
    assert triton_of.encoded.count(other_at) == 1
    assert len(triton_of.launched) == 6, "all but the first"


@pytest.mark.codegen_all
def test_parts_of_a_block_are_addresses(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_of = Encoding(world, monkeypatch)
    made: list[int] = []

    def make(part: torch.Tensor, rows: int) -> TensorDescriptor:
        made.append(part.data_ptr())
        return _described(part[: rows * 64].view(rows, 64))

    block, rows = Arg("block"), Arg("rows")
    k, v = (Described(Part(block, Arg(name), torch.float16), rows, make) for name in ("k_at", "v_at"))
    args = (Part(block, Arg("x_at"), torch.float32), k, v, rows)
    names = ("block", "x_at", "k_at", "v_at", "rows")
    call = PreparedCall(names, [KernelLaunch(triton_of.bound, (5, 1, 1), args)])
    sizes = [32, 64, 64, 1]
    blocks = [torch.zeros(16384, dtype=torch.uint8) for _ in range(2)]
    for number, (at, shift) in enumerate(((0, 0), (0, 0), (0, 0), (1, 0), (0, 0), (0, 256), (1, 0))):
        offsets = (0, 256 + shift, 4352 + shift)
        call.run(blocks[at], *offsets, 32)
        if number > 1:
            x, k_at, v_at = (blocks[at].data_ptr() + offset for offset in offsets)
            assert triton_of.last() == [x, f"map of {k_at}", *sizes, f"map of {v_at}", *sizes, 32]
    # For Triton twice, then once for each of three addresses.
    assert len(made) == 2 * (2 + 3)


@pytest.mark.codegen_all
def test_tritons_own_launcher_gets_what_its_wrapper_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel without scratch memory the wrapper is left out, and nothing that it does is lost."""
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(), raising=False)
    calls: list[tuple[Any, ...]] = []
    run = cuda_launcher(
        lambda *given: calls.append(given), arg_annotations=["annotation"], kernel_signature=b"signature"
    )
    compiled = SimpleNamespace(run=run, function=17, packed_metadata=(4, 1, 0))
    call = gpu.launcher_of(compiled, (64, "constant"))
    assert not calls, "nothing was launched"
    args = (0x1000, (0x2000, 32), 5)
    call(1, 2, 3, 99, args)
    run(1, 2, 3, 99, 17, (4, 1, 0), None, None, None, *args, 64, "constant")
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert call.__name__ == "call"
    # With scratch memory the wrapper stays.
    run.__dict__["global_scratch_size"] = 8
    assert gpu.launcher_of(compiled, ()).__name__ == "whole"


@pytest.mark.codegen_all
def test_a_later_launch_passes_what_the_compiled_kernel_takes_and_no_constants(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuples are flat, and what the kernel was specialised on is left out, but still looked at."""
    launched: list[tuple[Any, ...]] = []
    module = sys.modules[CudaLauncher.__module__]
    monkeypatch.setattr(module, "annotate_arguments", lambda types: [f"kernel's {each}" for each in types])
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(), raising=False)
    signature = {
        "x_ptr": "*fp32", "rows": ("*fp32", "constexpr"), "count": "i32", "batch": "i32", "bias": "constexpr",
        "scale": "fp32", "BLOCK": "constexpr", "FLAG": "constexpr",
    }  # fmt: skip
    run = cuda_launcher(lambda *given: launched.append(given), kernel_signature=b"12345")

    class Triton(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                self.compiled.append(args)
                return SimpleNamespace(
                    run=run, function=17, packed_metadata=(4, 1, 0), src=SimpleNamespace(signature=signature)
                )

            return launch

    kernel = Triton()
    launch_by(GpuLaunch(kernel, {"BLOCK": 64}, LaunchOptions()), world, monkeypatch)
    x, y = torch.zeros(64), torch.zeros(64)
    args = (Arg("x"), Rows(Arg("y"), Arg("stride")), Arg("count"), 5, None, 0.5)
    bound = BoundLaunch(kernel, {"BLOCK": 64}, LaunchOptions())
    call = PreparedCall(("x", "y", "stride", "count"), [KernelLaunch(bound, (5, 1, 1), args)])
    for _ in range(3):
        call.run(x, y, 1, 48)
    *_, annotations, types, passed = launched[-1]
    assert passed == (x.data_ptr(), y.data_ptr(), 48, 5, 0.5)
    assert annotations == ["kernel's i32"] * 5
    assert types == b"12345"
    assert len(kernel.compiled) == 1
    call.run(x, y, 2, 48)
    assert len(kernel.compiled) == 2, "a stride of 1 is a constant of the kernel, another is not"


def test_a_part_lies_bytes_from_the_beginning_of_its_block_whatever_the_blocks_dtype() -> None:
    counters = torch.arange(128, dtype=torch.int32)
    part = Part(Arg("block"), Arg("offset"), torch.int32).of({"block": counters, "offset": 256})
    assert part.data_ptr() == counters.data_ptr() + 256
    assert part.tolist() == list(range(64, 128))

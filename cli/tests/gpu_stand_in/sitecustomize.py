"""Makes every Python process that has this folder on its path one with a GPU: an MI300X, on the CPU.

Only the GPU is replaced: what `torch.cuda` says of it, the memory of its tensors, which is the CPU's, its
launches, which the interpreter runs with gfx942's configurations, and the clock. Times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from narrowkv.runtime.launch import InterpretExecutor, executing
from narrowkv.runtime.targets import get_target
from narrowkv.testing.bench import timing

NAME = "stand-in for an MI300X"
_Generator = torch.Generator


def _there(value: Any) -> Any:
    """A device that holds what would be on the GPU."""
    if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
        return torch.device("cpu")
    return value


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # a device is described, nothing is made there
            return func(*args, **(kwargs or {}))
        named = {name: _there(value) for name, value in (kwargs or {}).items()}
        return func(*map(_there, args), **named)


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Generator)


class _GeneratorThere(metaclass=_AnyGenerator):
    """`torch.Generator`, but for its device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator(_there(device))


_PROPERTIES = SimpleNamespace(
    name=NAME, gcnArchName="gfx942:sramecc+:xnack-", total_memory=192 * 2**30, multi_processor_count=304
)


class _Graph:
    def __init__(self, replay: Callable[[], Any]) -> None:
        self.replay = replay


class _Timer:
    """A `GraphTimer` whose graph is the call, and which takes one sample."""

    checked_replays = 1

    def __init__(self, samples: int = 50, seconds: float = 0.5) -> None:
        self.samples = samples

    def capture(self, call: Callable[[], Any]) -> _Graph:
        call()
        return _Graph(call)

    def replay(self, graph: _Graph) -> timing.Timing:
        begun = time.perf_counter()
        graph.replay()
        return timing.Timing.of([(time.perf_counter() - begun) * 1e6])

    def measure(self, call: Callable[[], Any]) -> timing.Timing:
        return self.replay(self.capture(call))

    def wait(self) -> None:
        pass


torch.version.hip = "7.0"
torch.Generator = _GeneratorThere
for name, answer in {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": NAME,
    "get_device_properties": _PROPERTIES, "synchronize": None, "is_current_stream_capturing": False,
}.items():  # fmt: skip
    setattr(torch.cuda, name, lambda *_, answer=answer: answer)
timing.GraphTimer = _Timer
timing.measure_ceilings = lambda timer: timing.Ceilings(4e12, 4e12, 6e14)
_OnTheCpu().__enter__()
executing(InterpretExecutor(get_target("gfx942"))).__enter__()

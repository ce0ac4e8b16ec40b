"""Times calls on a GPU by replaying graphs with a cold L2, and measures the ceilings to compare them with.

Each sample first reads a buffer larger than any L2. Afterwards L2 holds neither the call's data nor modified
lines, whose write-back would be counted as time of the call; a flush that writes would leave such lines. Two
events then enclose one replay of a graph that holds exactly one call, so host time does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from narrowkv.runtime.launch import LaunchOptions, launch
from narrowkv.testing.bench.kernels import _read_kernel

__all__ = ["FLUSH_BYTES", "Ceilings", "GraphTimer", "Timing", "measure_ceilings", "read_ceiling"]

FLUSH_BYTES = 256 * 2**20
_WARM_UP_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """Device times of one call, in microseconds.

    Attributes:
        median_us: the median of the samples.
        p10_us, p90_us: the 10th and 90th percentile.
        samples: number of samples.
    """

    median_us: float
    p10_us: float
    p90_us: float
    samples: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        """Summarises samples; percentiles are interpolated linearly.

        Raises:
            ValueError: `samples_us` is empty.
        """
        if not samples_us:
            raise ValueError("samples_us must hold at least one sample, got none")
        median, p10, p90 = np.quantile(samples_us, (0.5, 0.1, 0.9)).tolist()
        return cls(median, p10, p90, len(samples_us))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GraphTimer:
    """Times calls on the current GPU.

    Args:
        samples: largest number of samples of a call.
        seconds: device time after which no further sample of a call is taken; at least ten are.

    Attributes:
        checked_replays: replays of a graph, after it was timed, whose bits are compared with the first one's.
    """

    checked_replays = 50

    def __init__(self, samples: int = 50, seconds: float = 0.5) -> None:
        self.samples = samples
        self.seconds = seconds
        self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._sink = torch.zeros((), dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        """Fills L2 with unmodified lines of a buffer that no call uses."""
        torch.sum(self._flush, dim=0, out=self._sink)

    def wait(self) -> None:
        """Waits until the GPU has finished."""
        torch.cuda.synchronize()

    def capture(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """A graph of one call, captured on a side stream after the call has compiled and run there."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    def sample(self, graph: torch.cuda.CUDAGraph) -> float:
        """Device time in microseconds of one replay with a cold L2."""
        begin, end = _event(), _event()
        self.flush()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def warm_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replays the graph three times without counting, or once if one replay is long."""
        for _ in range(3):
            if self.sample(graph) * 1e-6 > _WARM_UP_SECONDS:
                break

    def replay(self, graph: torch.cuda.CUDAGraph) -> Timing:
        """Samples a captured graph."""
        self.warm_up(graph)
        times: list[float] = []
        while len(times) < self.samples and (sum(times) < self.seconds * 1e6 or len(times) < 10):
            times.append(self.sample(graph))
        return Timing.of(times)

    def measure(self, call: Callable[[], Any]) -> Timing:
        """Captures and samples a call."""
        return self.replay(self.capture(call))


_COPY_BYTES = 2**30
_READ_BYTES = 2**31
_MATRIX = 8192
_READ_BLOCK = 4096
_PROGRAMS_PER_UNIT = 8


@dataclass(frozen=True)
class Ceilings:
    """Measured rates.

    Attributes:
        copy_bytes_per_s: device-to-device copy, bytes read plus bytes written.
        read_bytes_per_s: the faster of a reduction by torch and a reading kernel, bytes read.
        bf16_flops_per_s: a large matrix product.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    bf16_flops_per_s: float

    def floor_us(self, bytes_touched: float, flops: float) -> float:
        """Lower bound, in microseconds, of a call that touches these bytes once and does these flops."""
        return 1e6 * max(bytes_touched / self.read_bytes_per_s, flops / self.bf16_flops_per_s)

    def __str__(self) -> str:
        copy, read = self.copy_bytes_per_s / 1e9, self.read_bytes_per_s / 1e9
        return f"copy {copy:.0f} GB/s, read {read:.0f} GB/s, bf16 {self.bf16_flops_per_s / 1e12:.0f} TFLOP/s"


def _rate(amount: float, timing: Timing) -> float:
    return amount / (timing.median_us * 1e-6)


def read_ceiling(timer: GraphTimer) -> float:
    """Bytes per second of the fastest large read."""
    x = torch.ones(_READ_BYTES // 4, dtype=torch.int32, device="cuda")
    sink = torch.zeros((), device="cuda")
    floats = x.view(torch.float32)
    by_torch = timer.measure(lambda: torch.sum(floats, dim=0, out=sink))
    units = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = units * _PROGRAMS_PER_UNIT
    out = torch.zeros(programs, dtype=torch.int32, device="cuda")
    constexprs = {"BLOCK": _READ_BLOCK, "STRIDE": programs}

    def read() -> None:
        launch(
            _read_kernel,
            (programs,),
            (x, out, x.numel() // _READ_BLOCK),
            constexprs,
            LaunchOptions(num_warps=8),
        )

    by_kernel = timer.measure(read)
    # The sum of ones in int32 shows that every element was read.
    if int(out.sum()) != x.numel():
        raise RuntimeError(f"the reading kernel saw {int(out.sum())} of {x.numel()} elements")
    return max(_rate(_READ_BYTES, by_torch), _rate(_READ_BYTES, by_kernel))


def measure_ceilings(timer: GraphTimer) -> Ceilings:
    """Measures all three; takes about a second of device time and at most 2 GiB of memory at a time."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    copied = torch.empty_like(source)
    copy = _rate(2 * _COPY_BYTES, timer.measure(partial(copied.copy_, source)))
    del source, copied
    read = read_ceiling(timer)
    a = torch.randn(_MATRIX, _MATRIX, device="cuda").bfloat16()
    b = torch.randn(_MATRIX, _MATRIX, device="cuda").bfloat16()
    product = torch.empty_like(a)
    flops = _rate(2.0 * _MATRIX**3, timer.measure(lambda: torch.mm(a, b, out=product)))
    return Ceilings(copy, read, flops)

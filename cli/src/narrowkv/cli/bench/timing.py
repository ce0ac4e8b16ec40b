"""Device time of a call: a captured graph, replayed with a cold L2 between two events.

Each sample first reads a buffer larger than any L2, so that neither the call's data nor dirty lines of an
earlier write are left there: write-backs of a flush that writes would be charged to the call. Events then
bracket one replay of a graph that holds exactly one call; host time is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20
_WARM_UP_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """Device times of one call, in microseconds.

    Attributes:
        median_us: the middle sample.
        p10_us, p90_us: a tenth of the samples are below, above.
        samples: how many there are.
    """

    median_us: float
    p10_us: float
    p90_us: float
    samples: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        """Summarises samples, interpolating between neighbours.

        Raises:
            ValueError: there are none.
        """
        if not samples_us:
            raise ValueError("samples_us must hold at least one sample, got none")
        ordered = sorted(samples_us)
        median, p10, p90 = (_quantile(ordered, share) for share in (0.5, 0.1, 0.9))
        return cls(median, p10, p90, len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GraphTimer:
    """Times calls on the current GPU.

    Args:
        samples: the most samples of a call.
        seconds: stop sampling a call after this much device time, but not before ten samples.
    """

    def __init__(self, samples: int = 50, seconds: float = 0.5) -> None:
        self.samples = samples
        self.seconds = seconds
        self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._sink = torch.zeros((), dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        """Fills the L2 with clean lines that nobody wants."""
        torch.sum(self._flush, dim=0, out=self._sink)

    def wait(self) -> None:
        """Until the GPU has done all that was asked."""
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
        """A few replays that do not count; one where it is long."""
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

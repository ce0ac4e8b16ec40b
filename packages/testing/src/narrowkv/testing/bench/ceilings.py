"""The rates of this GPU, measured in the run that uses them: copy, read, bf16 matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from narrowkv.runtime.launch import LaunchOptions, launch
from narrowkv.testing.bench.kernels import _read_kernel
from narrowkv.testing.bench.timing import GraphTimer, Timing

__all__ = ["Ceilings", "measure_ceilings", "read_ceiling"]

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

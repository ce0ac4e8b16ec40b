"""Modelled times of a bench's calls on gfx942 and gfx950. Nothing here is measured.

Each call is planned at its full size. A smaller call with the same kernels and the same split of the keys is
traced, and its workgroups and passes are multiplied by a `Scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowkv.cdna_emulator import EmulatorError
from narrowkv.cdna_emulator.timing import PeakError
from narrowkv.runtime.launch import executing
from narrowkv.runtime.targets import get_target
from narrowkv.testing.model import ModelExecutor, main_kernel, waits

__all__ = ["ModelCall", "ModelRow", "model_row"]


@dataclass(frozen=True)
class ModelCall:
    """One call for the timing model.

    Attributes:
        name: tells it from other calls of the same sizes.
        shape: a dataclass of its sizes.
        flops: multiplications and additions of its matrix products.
        hbm_share: see `narrowkv.cdna_emulator.timing.predict`.
        trace: makes a smaller call, after it has set the executor's scale.
        bytes_touched: bytes that the call must read or write, each counted once; None if they depend on the
            data.
    """

    name: str
    shape: Any
    flops: float
    hbm_share: float
    trace: Callable[[ModelExecutor], object]
    bytes_touched: float | None = None


@dataclass(frozen=True)
class ModelRow:
    """One call on one target under the timing model; every figure is a model's.

    Attributes:
        target, name, shape: which call.
        model_us: time of all its launches.
        model_bytes_per_s: bytes touched over it; model_flops_per_s: flops over it.
        model_bound: what bounds the kernel with the matrix instructions.
        model_waits: what its waves wait for.
        model_kernels_us: time of each launch.
        refused: why there are no figures.
    """

    target: str
    name: str
    shape: dict[str, Any]
    model_us: float | None = None
    model_bytes_per_s: float | None = None
    model_flops_per_s: float | None = None
    model_bound: str = ""
    model_waits: str = ""
    model_kernels_us: dict[str, float] | None = None
    refused: str = ""


def model_row(call: ModelCall, target: str) -> ModelRow:
    """The row of a call on a target."""
    row = ModelRow(target, call.name, asdict(call.shape))
    executor = ModelExecutor(target, call.hbm_share)
    try:
        with executing(executor):
            call.trace(executor)
    except (ValueError, TypeError, EmulatorError) as error:
        return replace(row, refused=f"{type(error).__name__}: {error}")
    seconds = sum(launch.prediction.seconds for launch in executor.modelled)
    main = main_kernel(executor.modelled).prediction
    try:
        _check_peaks(call, target, seconds)
    except PeakError as error:
        return replace(row, refused=f"PeakError: {error}")
    return replace(
        row, model_us=1e6 * seconds,
        model_bytes_per_s=None if call.bytes_touched is None else call.bytes_touched / seconds,
        model_flops_per_s=call.flops / seconds, model_bound=main.bound.split(" (")[0],
        model_waits=waits(main),
        model_kernels_us={launch.name: 1e6 * launch.prediction.seconds for launch in executor.modelled},
    )  # fmt: skip


def _check_peaks(call: ModelCall, target: str, seconds: float) -> None:
    figures = get_target(target).figures
    assert figures is not None
    most = max(figures.bf16_flops_per_clk, figures.fp8_flops_per_clk, figures.fp4_flops_per_clk)
    rates = {
        "bytes/s of HBM": ((call.bytes_touched or 0.0) / seconds, figures.hbm_bytes_per_s),
        "flops of the matrix units": (call.flops / seconds, most * figures.compute_units * figures.clock_hz),
    }
    for what, (rate, peak) in rates.items():
        if rate > peak:
            raise PeakError(
                f"{1e6 * seconds:.2f} us would be {rate:.3g} {what}, above the peak of {peak:.3g}: the "
                "traced workgroups do not stand for the call"
            )

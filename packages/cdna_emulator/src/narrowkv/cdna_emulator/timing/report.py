"""Predicts the time of a launch from a trace, and what bounds it. Results are a model's."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from narrowkv.cdna_emulator.state import Array

from .errors import IdleTraceError, PeakError
from .machine import MACHINES, Machine
from .pipeline import SteadyLoop, simulate
from .survey import Survey, WorkgroupClass
from .trace import Trace


@dataclass(frozen=True)
class Prediction:
    """The timing model's prediction for a kernel. Nothing here was measured.

    Attributes:
        target: the target.
        kernel: the kernel's name.
        workgroups_per_unit: workgroups that a compute unit holds at a time, by registers and LDS.
        waves_per_unit: waves of those workgroups.
        clocks: clocks of the launch from its first to its last workgroup.
        clock_hz: the clock under this load.
        seconds: clocks over clock_hz.
        flops: matrix flops of the launch.
        loop: the hot loop in its steady state, or None.
        matrix_share: share of the loop's clocks (else of the whole) in which a matrix unit is busy.
        bound: the hardware unit that bounds it, or what its waves wait for.
        has_addresses: whether bank conflicts and cache hits were computed from addresses, not assumed ideal.
        workgroups, working: workgroups of the launch, and those of them that do its work.
    """

    target: str
    kernel: str
    workgroups_per_unit: int
    waves_per_unit: int
    clocks: float
    clock_hz: float
    seconds: float
    flops: float
    loop: SteadyLoop | None
    matrix_share: float
    bound: str
    has_addresses: bool
    workgroups: int = 0
    working: int = 0

    @property
    def flops_per_second(self) -> float:
        """Matrix flops a second of the launch."""
        return self.flops / self.seconds

    @property
    def loop_flops_per_second(self) -> float:
        """Matrix flops a second of a chip that runs the hot loop only; 0 without one."""
        if self.loop is None:
            return 0.0
        units = MACHINES[self.target].compute_units
        return self.loop.flops * self.workgroups_per_unit * units * self.clock_hz / self.loop.clocks

    @property
    def loop_flops_at_peak_clock(self) -> float:
        """The same at the data sheet's clock: a figure of the loop's clocks alone, and not a prediction."""
        return self.loop_flops_per_second * MACHINES[self.target].clock_peak * 1e9 / self.clock_hz

    def bandwidth(self, num_bytes: float) -> float:
        """Bytes a second of a launch that moves ``num_bytes``."""
        return num_bytes / self.seconds

    @property
    def summary(self) -> str:
        """One line for a person, which says that it is a model."""
        parts = [f"model: {1e6 * self.seconds:.1f} us at {self.clock_hz / 1e9:.2f} GHz"]
        if self.flops:
            parts.append(f"{self.flops_per_second / 1e12:.0f} TFLOP/s")
        if self.loop is not None:
            parts.append(
                f"{self.loop.clocks:.0f} clocks a pass, matrix unit busy {100 * self.matrix_share:.0f}%"
            )
            waits = [f"{why} {100 * share:.0f}%" for why, share in self.loop.stalls.items() if why != "issue"]
            parts.append("waves wait for " + ", ".join(waits[:3]) if waits else "waves never wait")
        return "; ".join([*parts, f"bound by {self.bound}"])


def _bound(busy: dict[str, float], stalls: dict[str, float]) -> str:
    """The unit that is busy nearly always; without one, what the waves wait for most."""
    unit, share = max(busy.items(), key=lambda item: item[1])
    if share >= 0.8:
        return unit
    waits = {reason: lost for reason, lost in stalls.items() if reason != "issue"}
    if not waits:
        return "instruction issue"
    return f"waits for {max(waits, key=lambda reason: waits[reason])} ({unit} busy {100 * share:.0f}%)"


def predict(
    trace: Trace,
    *,
    registers: int | None = None,
    lds_bytes: int | None = None,
    workgroups: int | None = None,
    passes: float | None = None,
    pass_factor: float = 1.0,
    hbm_share: float = 1.0,
    l2_misses: float | None = None,
    workgroups_per_unit: int | None = None,
    machine: Machine | None = None,
) -> Prediction:
    """Predict a launch from what one of its workgroups executes.

    Args:
        trace: from `trace_workgroup` or `trace_text`.
        registers: vector registers of a wave. Default: the program's.
        lds_bytes: LDS of a workgroup. Default: the program's.
        workgroups: workgroups of the launch, all assumed to execute the same. Default: as many as the chip
            holds at a time.
        passes: iterations of the hot loop of each wave in the launch to predict. Default: those of the trace,
            times ``pass_factor``.
        pass_factor: see ``passes``; for a trace of a call with fewer keys than the launch to predict.
        hbm_share: share of the bytes that miss the vector cache that come from HBM, not from L2: 1 where
            every workgroup reads its own, near 0 where many read the same at the same time.
        l2_misses: share of the same bytes that L2 does not hold either, so that the Infinity Cache or HBM
            gives them; see `cache_shares`. Default: ``hbm_share``.
        workgroups_per_unit: overrides what registers and LDS allow.
        machine: overrides the figures of the program's target.

    Returns:
        The prediction.

    Example:
        >>> import numpy as np
        >>> from narrowkv.cdna_emulator import Memory, load_program
        >>> from narrowkv.cdna_emulator.sample import DOUBLE  # the text of a kernel
        >>> from narrowkv.cdna_emulator.timing import trace_workgroup
        >>> memory = Memory()
        >>> args = [memory.map(np.zeros(256, np.uint8)) for _ in range(2)]
        >>> trace = trace_workgroup(load_program(DOUBLE), grid=(1, 1, 1), args=args, memory=memory)
        >>> print(predict(trace, workgroups=1024).summary)
        model: ... us at ... GHz; bound by instruction issue
    """
    program = trace.program
    machine = machine or MACHINES[program.target]
    warps = len(trace.waves)
    most = workgroups_per_unit or machine.workgroups_per_unit(
        warps, program.vgprs if registers is None else registers,
        program.lds_bytes if lds_bytes is None else lds_bytes,
    )  # fmt: skip
    if workgroups is None:
        workgroups = most * machine.compute_units
    alike = Survey((WorkgroupClass(trace),), np.zeros(workgroups, np.int64))
    return predict_launch(
        alike, registers=registers, lds_bytes=lds_bytes, passes=passes, pass_factor=pass_factor,
        hbm_share=hbm_share, l2_misses=l2_misses, workgroups_per_unit=workgroups_per_unit, machine=machine,
    )  # fmt: skip


def predict_launch(
    surveyed: Survey,
    *,
    registers: int | None = None,
    lds_bytes: int | None = None,
    workgroup_factor: float = 1.0,
    passes: float | None = None,
    pass_factor: float = 1.0,
    hbm_share: float = 1.0,
    l2_misses: float | None = None,
    workgroups_per_unit: int | None = None,
    machine: Machine | None = None,
) -> Prediction:
    """Predict a launch whose workgroups do not all do the same.

    XCDs take workgroups in turns, and a compute unit the next one of its XCD when one of those it holds ends.
    The loop and the bound are those of the share that takes most of the time.

    Args:
        surveyed: from `survey`.
        workgroup_factor: how many times as many workgroups the launch has, in the same shares.
        registers, lds_bytes, passes, pass_factor, hbm_share, l2_misses, workgroups_per_unit, machine: as for
            `predict`.

    Raises:
        IdleTraceError: no workgroup works.
        PeakError: a unit would have to do more than it can in the time that was found.
    """
    if not surveyed.working:
        raise IdleTraceError("none of the traced workgroups does the work of the launch")
    trace = next(share.trace for share in surveyed.shares if not share.is_idle)
    program, warps = trace.program, len(trace.waves)
    machine = machine or MACHINES[program.target]
    working = max(round(surveyed.working * workgroup_factor), 1)
    most = workgroups_per_unit or machine.workgroups_per_unit(
        warps, program.vgprs if registers is None else registers,
        program.lds_bytes if lds_bytes is None else lds_bytes,
    )  # fmt: skip
    units = machine.compute_units
    resident = max(min(most, -(-working // units)), 1)
    caches = (hbm_share, l2_misses)
    spans = [
        _span(share.trace, machine, resident, caches, min(working, units), passes, pass_factor)
        for share in surveyed.shares
    ]
    count = len(surveyed.classes)
    classes = surveyed.classes[(np.arange(round(count * workgroup_factor)) / workgroup_factor).astype(int)]
    clocks = np.array([span.clocks for span in spans])[classes]
    time = np.bincount(classes, clocks, len(spans))
    main = spans[int(np.argmax(time))]
    total = until_the_last_ends(clocks, most * units, machine.xcds)
    share = float(np.array([span.matrix_share for span in spans]) @ time / time.sum())
    _check_peaks(program.kernel_name, surveyed, workgroup_factor, total, machine)
    hz = machine.clock(min(share, 1.0))
    flops = float(np.array([span.flops for span in spans])[classes].sum())
    return Prediction(
        program.target, program.kernel_name, resident, resident * warps, total, hz, total / hz, flops,
        main.loop, main.matrix_share, main.bound, trace.has_addresses, len(classes), working,
    )  # fmt: skip


@dataclass(frozen=True)
class _Span:
    """One workgroup beside others of its kind: its clocks, matrix flops, loop and bound."""

    clocks: float
    flops: float
    loop: SteadyLoop | None
    matrix_share: float
    bound: str


def _span(
    trace: Trace, machine: Machine, resident: int, caches: tuple[float, float | None], units: int,
    passes: float | None, pass_factor: float,
) -> _Span:  # fmt: skip
    hbm_share, l2_misses = caches
    result = simulate(
        trace, machine, workgroups=resident, hbm_share=hbm_share, l2_misses=l2_misses, units=units
    )
    clocks, flops, loop = result.clocks, result.flops / resident, result.loop
    if loop is not None:
        passes = loop.passes * pass_factor if passes is None else passes
        clocks += (passes - loop.passes) * loop.clocks
        flops += (passes - loop.passes) * loop.flops
    busy = {unit: used / result.clocks for unit, used in result.busy.items()}
    for unit in ("matrix", "vector ALU"):
        busy[unit] /= machine.simds
    if loop is not None:
        busy = loop.busy
    return _Span(clocks, flops, loop, busy["matrix"], _bound(busy, loop.stalls if loop is not None else {}))


def until_the_last_ends(clocks: Array, slots: int, xcds: int) -> float:
    """Clocks until every workgroup of a launch has ended.

    Args:
        clocks: of each workgroup, in the order of the launch.
        slots: workgroups that the chip holds at a time.
        xcds: dies that it is made of. Workgroup n goes to die n % xcds, whether others are idle or not, and
            there to the place that is free first.
    """
    latest = 0.0
    for die in range(min(xcds, len(clocks))):
        own = clocks[die::xcds]
        ends = [0.0] * min(max(slots // xcds, 1), len(own))
        for needed in own.tolist():
            heapq.heapreplace(ends, ends[0] + needed)
        latest = max(latest, *ends)
    return latest


def _check_peaks(kernel: str, surveyed: Survey, factor: float, clocks: float, machine: Machine) -> None:
    needs = {
        "the matrix units": surveyed.matrix_clocks / machine.simds,
        "the vector ALUs": surveyed.vector_clocks / machine.simds,
        "LDS": surveyed.lds_clocks,
    }
    for unit, needed in needs.items():
        least = needed * factor / machine.compute_units
        if least > clocks:
            raise PeakError(
                f"{kernel} would end after {clocks:.0f} clocks, but keeps {unit} of {machine.chip} busy for "
                f"{least:.0f}: the traced workgroups do not stand for the launch"
            )

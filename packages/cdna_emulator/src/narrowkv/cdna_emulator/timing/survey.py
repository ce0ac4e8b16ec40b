"""How much each workgroup of a launch does, so that the timing model traces workgroups that work.

Workgroups run in an order that spreads over the grid until a budget of instructions is spent. Idle ones cost
next to nothing, so a launch of which most are idle is surveyed whole. A workgroup that did not run counts as
the nearest one before it that did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowkv.cdna_emulator.launch import count_blocks
from narrowkv.cdna_emulator.matrix import mfma_shape
from narrowkv.cdna_emulator.memory import Memory
from narrowkv.cdna_emulator.program import Program
from narrowkv.cdna_emulator.state import Array

from .errors import IdleTraceError
from .machine import MACHINES
from .trace import Trace, static_ops, trace_workgroup

_BATCH = 32
_SHARES = 4  # classes of workgroups that work unequally long


@dataclass(frozen=True)
class WorkgroupClass:
    """Workgroups that do about the same, and the trace of one of them.

    Attributes:
        trace: of the one whose number of instructions is nearest to their mean.
        is_idle: they leave at once, while others of the launch work.
    """

    trace: Trace
    is_idle: bool = False


@dataclass(frozen=True)
class Survey:
    """The workgroups of a launch.

    Attributes:
        shares: the classes.
        classes: of each workgroup in the order of the launch, the number of its share.
        matrix_clocks, vector_clocks, lds_clocks: least clocks that all workgroups together keep matrix units,
            vector ALUs and LDS busy, by the instructions that they execute.
    """

    shares: tuple[WorkgroupClass, ...]
    classes: Array
    matrix_clocks: float = 0.0
    vector_clocks: float = 0.0
    lds_clocks: float = 0.0

    @property
    def working(self) -> int:
        """Number of workgroups that work."""
        idle = [number for number, share in enumerate(self.shares) if share.is_idle]
        return int(np.count_nonzero(~np.isin(self.classes, idle)))


def spread(count: int) -> list[int]:
    """The numbers below `count`, each as far from those before it as can be: 0, the middle, the quarters."""
    bits = max(count - 1, 1).bit_length()
    order = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in order if number < count]


def survey(
    program: Program, *, grid: tuple[int, int, int], args: Sequence[Any], memory: Memory,
    budget: float = 2e6,
) -> Survey:  # fmt: skip
    """Count what the workgroups of a launch execute, and trace one of each share.

    Buffers hold afterwards what they held before.

    Args:
        program, grid, args, memory: as for `run`.
        budget: wave instructions to execute before workgroups that did not run are assumed alike.

    Raises:
        IdleTraceError: every workgroup leaves without doing what the kernel is for.
        EmulatorError: the kernel makes an error.
    """
    before = [(buffer.data, buffer.data.copy()) for buffer in memory.buffers if not buffer.readonly]

    def restore() -> None:
        for data, held in before:
            data[...] = held

    positions = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    sizes = np.array([len(block.instructions) for block in program.blocks])
    order = spread(len(positions))
    ran: list[int] = []
    counts: list[Array] = []
    spent = 0.0
    while order and (spent < budget or not ran):
        batch, order = order[:_BATCH], order[_BATCH:]
        found = count_blocks(program, grid=grid, args=args, memory=memory,
                             workgroups=[positions[k] for k in batch])  # fmt: skip
        spent += float((found * sizes).sum())
        ran += batch
        counts.append(found)
    restore()
    at = np.argsort(ran)
    numbers, executed = np.array(ran)[at], np.concatenate(counts)[at]
    groups = _groups(program, executed, executed @ sizes)
    nearest = np.searchsorted(numbers, np.arange(len(positions)), side="right") - 1
    shares = []
    for chosen, idle in groups:
        work = executed[chosen] @ sizes
        example = chosen[np.argmin(np.abs(work - work.mean()))]
        trace = trace_workgroup(
            program, grid=grid, args=args, memory=memory, workgroup=positions[numbers[example]]
        )
        restore()
        shares.append(WorkgroupClass(trace, idle))
    member = np.zeros(len(numbers), np.int64)
    for number, (chosen, _) in enumerate(groups):
        member[chosen] = number
    classes = member[nearest]
    total = np.bincount(nearest, minlength=len(numbers)) @ executed
    return Survey(tuple(shares), classes, *_least_clocks(program, total))


def _groups(program: Program, executed: Array, work: Array) -> list[tuple[Array, bool]]:
    """Indices of workgroups that do about the same, and whether they are idle."""
    purpose = _blocks_with(program, matrix=True)
    if not purpose.any():
        purpose = _blocks_with(program, matrix=False)
    works = (executed[:, purpose] > 0).any(axis=1)
    if not works.any():
        raise IdleTraceError(
            f"every workgroup of {program.kernel_name} that ran leaves without a "
            f"{'matrix instruction' if _blocks_with(program, matrix=True).any() else 'store'}: "
            "there is nothing to model"
        )
    busy = np.flatnonzero(works)
    busy = busy[np.argsort(work[busy], kind="stable")]
    bounds = work[busy[0]] * (work[busy[-1]] / work[busy[0]]) ** (np.arange(1, _SHARES) / _SHARES)
    parts = np.split(busy, np.searchsorted(work[busy], bounds, side="right"))
    groups = [(part, False) for part in parts if part.size]
    idle = np.flatnonzero(~works)
    return [*groups, *([(idle, True)] if idle.size else [])]


def _blocks_with(program: Program, *, matrix: bool) -> Array:
    """Which blocks hold a matrix instruction, or a store to device memory."""
    return np.array([
        any(mfma_shape(inst) is not None if matrix else "_store_" in inst.name or "_atomic_" in inst.name
            for inst in block.instructions)
        for block in program.blocks
    ])  # fmt: skip


def _least_clocks(program: Program, executed: Array) -> tuple[float, float, float]:
    """Clocks of the matrix units, vector ALUs and LDS of all workgroups, without any conflict."""
    busy = dict.fromkeys(("mfma", "valu", "lds"), 0.0)
    for times, ops in zip(executed, static_ops(program, MACHINES[program.target]), strict=True):
        for op in ops:
            if op.kind in busy:
                busy[op.kind] += times * op.clocks
    return busy["mfma"], busy["valu"], busy["lds"]

"""Traces of the instructions that the waves of a workgroup execute, for the timing model.

`trace_workgroup` runs a workgroup in the emulator and keeps, for each wave, its instructions in order, with
the LDS clocks and cache lines that its addresses give. `trace_text` reads the hot loop from the text alone,
for code whose arguments are not available: then LDS has no bank conflicts and every load is coalesced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from narrowkv.cdna_emulator.hazards import wait_counts
from narrowkv.cdna_emulator.launch import record
from narrowkv.cdna_emulator.matrix import mfma_shape
from narrowkv.cdna_emulator.memory import Memory
from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.profile import loop_bodies
from narrowkv.cdna_emulator.program import Program
from narrowkv.cdna_emulator.state import Array
from narrowkv.cdna_emulator.usage import usage
from narrowkv.cdna_emulator.wait_states import matrix_clocks

from .machine import MACHINES, Machine

_MULTIPLY = re.compile(r"^v_(mul_(lo|hi)_[ui]32|mad_[ui]64_[ui]32)$")
_PACKED = re.compile(r"^v_pk_(fma|mul|add)_f32$")

# Lanes that LDS serves together, for 8- and 16-byte accesses; the second half of the wave follows likewise.
_READ_16 = {
    "gfx942": ((0, 1, 2, 3, 20, 21, 22, 23), (4, 5, 6, 7, 16, 17, 18, 19), (8, 9, 10, 11, 28, 29, 30, 31),
               (12, 13, 14, 15, 24, 25, 26, 27)),
    "gfx950": ((0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27),
               (4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TracedInstruction:
    """One executed instruction.

    Attributes:
        kind: ``valu``, ``mfma``, ``salu``, ``smem``, ``lds``, ``load``, ``store``, ``wait``, ``barrier``,
            ``nop``, ``branch``, ``priority`` or ``end``.
        clocks: clocks that its unit is busy: the vector ALU, the matrix unit, LDS, or the vector cache.
        issue: clocks that its SIMD's port is busy.
        bytes: bytes that come back from LDS, or that a load or store moves.
        lines: cache lines of a load or store.
        vector, local: counts of an s_waitcnt, or -1.
        packed: packed fp32 arithmetic.
        to_lds: a load that writes LDS.
        level: of s_setprio.
        head: number of the loop that begins here, or -1.
        flops: of a matrix instruction.
    """

    kind: str
    clocks: float = 4
    issue: int = 4
    bytes: int = 0
    lines: tuple[int, ...] = ()
    vector: int = -1
    local: int = -1
    packed: bool = False
    to_lds: bool = False
    level: int = 0
    head: int = -1
    flops: int = 0


@dataclass(frozen=True)
class Trace:
    """The instructions that a workgroup executes.

    Attributes:
        program: its kernel.
        waves: the instructions of each wave.
        heads: whether loops are known by their first instruction (`TracedInstruction.head`); 0 is the hot
            loop.
        has_addresses: whether LDS clocks and cache lines come from addresses.
    """

    program: Program
    waves: tuple[tuple[TracedInstruction, ...], ...]
    has_addresses: bool


def bank_clocks(offsets: Array, size: int, target: str, *, is_write: bool) -> int:
    """Clocks that LDS needs for one access of a wave.

    Lanes are served in groups; a group takes as many clocks as there are different words in its busiest bank.

    Args:
        offsets: byte offsets of the lanes that are on, with lane numbers as the index; -1 where a lane is
        off. size: bytes of each lane. target: ``gfx942`` or ``gfx950``. is_write: writes are served by 32
        banks on both targets, reads by 64 on gfx950.
    """
    banks = 64 if target == "gfx950" and not is_write else 32
    total = 0
    for group in _groups(size, target, is_write):
        at = offsets[group]
        words = at[at >= 0] >> 2
        if not words.size:
            continue
        words = np.unique((words[:, None] + np.arange(max(size // 4, 1))).ravel())
        total += int(np.bincount(words % banks).max())
    return max(total, 1)


def _groups(size: int, target: str, is_write: bool) -> Array:
    wide = target == "gfx950" and not is_write
    if size > 8 and not is_write:
        first = np.array(_READ_16[target])
        return np.concatenate([first, first + 32])
    lanes = {False: 32, True: 64}[wide] // {1: 1, 2: 2, 3: 4, 4: 4}[max(size // 4, 1)]
    return np.arange(64).reshape(-1, lanes)


class _Recorder:
    """Keeps blocks and the figures of accesses, wave by wave."""

    def __init__(self, program: Program, machine: Machine, buffers: Memory) -> None:
        self.program, self.machine, self.buffers = program, machine, buffers
        self.blocks: dict[int, list[int]] = {}
        self.accesses: dict[int, list[tuple[int, float, int, tuple[int, ...]]]] = {}
        self._known: dict[tuple[int, bool, bytes], int] = {}

    def block(self, wave: int, index: int) -> None:
        self.blocks.setdefault(wave, []).append(index)

    def lds(self, wave: int, inst: Instruction, offsets: Array, active: Array | None, size: int) -> None:
        if not inst.name.startswith("ds_"):
            return
        at = np.where(True if active is None else active, offsets, -1)
        key = (size, "write" in inst.name, at.tobytes())
        clocks = self._known.get(key)
        if clocks is None:
            clocks = bank_clocks(at, size, self.program.target, is_write=key[1])
            self._known[key] = clocks
        lanes = int(np.count_nonzero(at >= 0))
        self.accesses.setdefault(wave, []).append((id(inst), clocks, lanes * size, ()))

    def memory(self, wave: int, inst: Instruction, addresses: Array, active: Array | None, size: int) -> None:
        if len(addresses) != 64:
            return  # a scalar load
        chosen = addresses if active is None else addresses[active]
        if not chosen.size:
            self.accesses.setdefault(wave, []).append((id(inst), 0.0, 0, ()))
            return
        line, low = self.machine.l1_line, int(chosen.min())
        buffer = self.buffers.find(low, low + 1)
        if buffer is not None:  # on a device, buffers begin with a line
            chosen = chosen + -buffer.base % line
        lines = np.unique(np.concatenate([chosen // line, (chosen + (size - 1)) // line]))
        self.accesses.setdefault(wave, []).append(
            (id(inst), float(len(lines)), len(chosen) * size, tuple(lines.tolist()))
        )


def _static_op(inst: Instruction, program: Program, machine: Machine) -> TracedInstruction:
    """The instruction's op, with the accesses of a conflict-free and coalesced wave."""
    use, name = usage(inst, program), inst.name
    kind = use.kind
    if kind == "valu":
        slow = machine.transcendental if use.is_transcendental else machine.valu
        if _MULTIPLY.match(name):
            slow = machine.multiply
        return TracedInstruction("valu", slow, packed=bool(_PACKED.match(name)) and machine.packed_waits)
    if kind == "mfma":
        shape = mfma_shape(inst)
        assert shape is not None
        return TracedInstruction("mfma", matrix_clocks(shape, program.target), flops=shape.flops)
    if kind == "wait":
        counts = wait_counts(inst)
        return TracedInstruction("wait", vector=counts.get("vmcnt", -1), local=counts.get("lgkmcnt", -1))
    if kind == "nop":
        return TracedInstruction("nop", machine.issue * (int(inst.operands[0], 0) + 1))
    if kind == "ds":
        return _lds_op(name, machine)
    if kind in ("load", "store", "atomic", "to_lds"):
        size = _width(name)
        moved = "store" if kind == "store" else "load"
        issue = machine.issue * (1 + (max(size // 4, 1) if kind == "store" else 0))
        op = TracedInstruction(moved, 0, issue, 64 * size, to_lds=kind == "to_lds")
        return replace(op, clocks=_cache_clocks(size, 64 * size / machine.l1_line, machine))
    if name == "s_setprio":
        return TracedInstruction("priority", level=int(inst.operands[0], 0))
    known = {"smem", "barrier", "branch", "end"}
    return TracedInstruction(kind if kind in known else "salu")


def _width(name: str) -> int:
    wide = re.search(r"(?:dwordx|b)(\d+)", name.rsplit("_", 1)[-1])
    if wide:
        number = int(wide.group(1))
        return number // 8 if "b" in wide.group(0) else 4 * number
    return 2 if "short" in name else 1 if "byte" in name else 4


def _cache_clocks(size: int, lines: float, machine: Machine) -> float:
    """Clocks of the vector cache: by the register data, or by its lines."""
    least = {4: 4, 8: 16, 12: 16, 16: 16}.get(size, 4)
    return max(least, lines * machine.l1_line / machine.l1)


def _lds_op(name: str, machine: Machine) -> TracedInstruction:
    found = re.search(r"_(?:b|u|i)(\d+)", name)
    size = max(int(found.group(1)) // 8, 4) if found else 4
    size *= 2 if name.startswith(("ds_read2", "ds_write2")) else 1
    if name.startswith("ds_write"):
        issue = machine.issue * (1 + size // 4)
        return TracedInstruction("lds", 64 * size / machine.lds_write, issue)
    rate = machine.lds_read if size >= 4 else machine.lds_write
    return TracedInstruction("lds", 64 * size / rate, bytes=64 * size)


def static_ops(program: Program, machine: Machine) -> list[list[TracedInstruction]]:
    """The ops of each block's instructions, with conflict-free and coalesced accesses."""
    return [[_static_op(inst, program, machine) for inst in block.instructions] for block in program.blocks]


class _Flattener:
    """Converts recorded blocks to ops."""

    def __init__(self, program: Program, machine: Machine, heads: dict[int, int]) -> None:
        self.program, self.machine, self.heads = program, machine, heads
        self.static = [
            list(zip(block.instructions, ops, strict=True))
            for block, ops in zip(program.blocks, static_ops(program, machine), strict=True)
        ]

    def wave(
        self, blocks: Sequence[int], accesses: Iterable[tuple[int, float, int, tuple[int, ...]]] | None
    ) -> tuple[TracedInstruction, ...]:
        """The ops of one wave; without accesses, as `_static_op` assumes."""
        result: list[TracedInstruction] = []
        records = list(accesses or ())
        at = 0
        for position, index in enumerate(blocks):
            first = len(result)
            for inst, op in self.static[index]:
                if accesses is not None and op.kind in ("lds", "load", "store"):
                    own: list[tuple[int, float, int, tuple[int, ...]]] = []
                    while at < len(records) and records[at][0] == id(inst) and len(own) < _calls(inst):
                        own.append(records[at])
                        at += 1
                    if own:
                        op = self._measured(inst, op, own)
                elif op.kind == "branch":
                    following = blocks[position + 1] if position + 1 < len(blocks) else index + 1
                    op = replace(
                        op, clocks=self.machine.branch if following != index + 1 else self.machine.issue
                    )
                result.append(op)
            if index in self.heads and first < len(result):
                result[first] = replace(result[first], head=self.heads[index])
        return tuple(result)

    def _measured(
        self, inst: Instruction, op: TracedInstruction, own: list[tuple[int, float, int, tuple[int, ...]]]
    ) -> TracedInstruction:
        moved = sum(access[2] for access in own)
        if op.kind == "lds":
            return replace(op, clocks=sum(access[1] for access in own), bytes=moved if op.bytes else 0)
        clocks = _cache_clocks(_width(inst.name), own[0][1], self.machine)
        return replace(op, clocks=clocks, bytes=moved, lines=own[0][3])


def _calls(inst: Instruction) -> int:
    return 2 if inst.name.startswith(("ds_read2", "ds_write2")) else 1


def trace_workgroup(
    program: Program,
    *,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    memory: Memory,
    workgroup: tuple[int, int, int] = (0, 0, 0),
) -> Trace:
    """Run one workgroup and keep what its waves executed.

    Args:
        program, grid, args, memory: as for `run`. Stores write through.
        workgroup: which one.

    Raises:
        EmulatorError: if the kernel does what it must not do.
    """
    machine = MACHINES[program.target]
    recorder = _Recorder(program, machine, memory)
    record(program, grid=grid, args=args, memory=memory, workgroup=workgroup, recorder=recorder)
    counts = [0.0] * len(program.blocks)
    for blocks in recorder.blocks.values():
        for index in blocks:
            counts[index] += 1
    flatten = _Flattener(program, machine, _heads(program, counts))
    waves = tuple(
        flatten.wave(recorder.blocks[wave], recorder.accesses.get(wave, []))
        for wave in sorted(recorder.blocks)
    )
    return Trace(program, waves, has_addresses=True)


def trace_text(program: Program, *, passes: int = 8) -> Trace:
    """The hot loop of a program as its text shows it, some passes of it, for every wave of a workgroup.

    Every branch inside the loop but the one that closes it is taken to fall through.

    Raises:
        ValueError: if the program has no loop.
    """
    machine = MACHINES[program.target]
    bodies = loop_bodies(program, [1.0] * len(program.blocks))
    if not bodies:
        raise ValueError(f"{program.kernel_name} has no loop")

    def weight(body: tuple[int, set[int]]) -> tuple[float, float, int]:
        code = [inst for index in body[1] for inst in program.blocks[index].instructions]
        inner = sum(1 for _, other in bodies if other < body[1])
        return -inner, sum(mfma_shape(inst) is not None for inst in code), len(code)

    _, blocks = max(bodies, key=weight)
    order = sorted(blocks)
    flatten = _Flattener(program, machine, {order[0]: 0})
    wave = flatten.wave(order * passes + order[:1], None)
    return Trace(program, (wave,) * program.num_warps, has_addresses=False)


def _heads(program: Program, counts: list[float]) -> dict[int, int]:
    """Block of the hot loop's head: of the loops with the most matrix instructions, the innermost."""
    bodies = [(head, body) for head, body in loop_bodies(program, counts) if counts[head]]

    def weight(body: set[int]) -> tuple[float, float, int]:
        code = [(counts[index], inst) for index in body for inst in program.blocks[index].instructions]
        matrix = sum(times for times, inst in code if inst.name.startswith("v_mfma_"))
        return matrix, sum(times for times, _ in code) if not matrix else 0, -len(body)

    if not bodies:
        return {}
    head, _ = max(bodies, key=lambda item: weight(item[1]))
    return {head: 0}

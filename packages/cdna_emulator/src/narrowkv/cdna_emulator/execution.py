"""Execution of a batch of workgroups: groups of waves in lockstep, barriers, LDS, and who to blame for errors.

All waves of a batch start in one group (or one for each wave index, see ``wave_order``). A group runs block by
block; where a branch divides its waves it splits, and the group that is behind runs first, so that groups meet
again and are joined. A wave at a barrier waits until all waves of its workgroup have come to one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .atomics import Atomic, apply_atomic
from .errors import (
    DeadlockError,
    EmulatorError,
    MisalignedError,
    OutOfRangeError,
    RaceError,
    UninitialisedError,
)
from .launch import initial_registers
from .memory import AccessError, Memory
from .parser import Instruction
from .program import Block, Program
from .races import RaceDetector
from .state import EXEC, LANES, POISON, POISON_COPY, SGPR_PAIRS, VCC, Array, Waves

_QUANTUM = 4096  # blocks that a group may run while others are ready, so that spinning waves cannot starve them


class Group:
    """Waves in lockstep: their state, the block they are at, and the wave index they have (0 in lockstep order)."""

    __slots__ = ("block", "order", "waves")

    def __init__(self, waves: Waves, block: int, order: int) -> None:
        self.waves, self.block, self.order = waves, block, order


class Execution:
    """One batch of workgroups of a launch.

    Args:
        program: what to run.
        memory: the buffers.
        kernarg: device address of the argument block.
        dispatch: device address of the dispatch packet.
        grid: workgroups of the launch.
        workgroups: those of this batch.
        copies: 2 to track uninitialised values, else 1.
        detect_races: watch LDS.
        turns: run wave 0 of all workgroups up to a barrier, then wave 1, and so on.
        limit: blocks that may run before the batch is taken to hang.
    """

    def __init__(
        self, program: Program, memory: Memory, kernarg: int, dispatch: int, grid: tuple[int, int, int],
        workgroups: list[tuple[int, int, int]], *, copies: int, detect_races: bool, turns: bool, limit: int,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.copies, self.limit = program, memory, copies, limit
        self.workgroups = workgroups
        self.warps = program.num_warps
        self.lds_bytes = program.lds_bytes
        self.stride = (program.lds_bytes + 15) // 16 * 16 + 16
        slots = len(workgroups) * copies
        self.lds = np.empty(slots * self.stride, np.uint8)
        words = self.lds.view(np.uint32)
        words[...] = POISON
        if copies == 2:
            words[len(words) // 2 :] = POISON_COPY
        self._lds_views: dict[int, Array] = {1: self.lds, 2: self.lds.view(np.uint16), 4: words}
        count = slots * self.warps
        self.lds_base = np.repeat(np.arange(slots, dtype=np.int64) * self.stride, self.warps)
        self.scratch: Array | None = None
        if program.scratch_bytes:
            self.scratch = np.zeros(count * LANES * program.scratch_bytes, np.uint8)
            self._scratch_pointer = memory.map(self.scratch, name="scratch")
        self.races = RaceDetector(len(self.lds)) if detect_races else None
        self.bytes: Counter[str] = Counter()
        self.block_counts = [0] * len(program.blocks)
        self.ready = self._start(kernarg, dispatch, grid, count, turns)
        self.waiting: list[Group] = []
        self.alive = np.full(slots, self.warps)
        self._at = Instruction("", "", (), {}, 0, "")

    def _start(self, kernarg: int, dispatch: int, grid: tuple[int, int, int], count: int, turns: bool) -> list[Group]:
        program, half = self.program, count // self.copies
        ids = np.arange(count)
        v = np.full((program.vgprs, count, LANES), POISON, np.uint32)
        s = np.full((SGPR_PAIRS, count), (POISON << 32) | POISON, np.uint64)
        if self.copies == 2:
            v[:, half:] = POISON_COPY
            s[:, half:] = (POISON_COPY << 32) | POISON_COPY
        s[EXEC >> 1] = 0xFFFFFFFFFFFFFFFF
        s[VCC >> 1] = 0
        position = np.array([self.workgroups[i % half // self.warps] for i in ids], np.int64).reshape(count, 3)
        wave = ids % self.warps
        initial_registers(program, self.memory, v, s, kernarg, dispatch, position, wave)
        scc = np.zeros((count, 1), bool)
        everyone = Waves(self, ids, self.copies, v, s, scc)
        if not turns or self.warps == 1:
            return [Group(everyone, program.entry, 0)]
        return [Group(everyone.select(ids[wave == k]), program.entry, k) for k in range(self.warps)]

    # ------------------------------------------------------------------ scheduling

    def run(self) -> None:
        """Run every wave to its end.

        Raises:
            EmulatorError: see `errors`.
        """
        budget = self.limit
        while self.ready or self.waiting:
            if not self.ready:
                self._release()
            group = min(self.ready, key=lambda g: (g.order, g.block))
            quantum = min(budget, _QUANTUM)
            used = self._run_group(group, quantum)
            budget -= used
            if budget <= 0:
                raise self._error(
                    DeadlockError, f"no end after {self.limit} blocks: waves wait for each other, or a loop is endless",
                    self._at, group.waves, 0,
                )  # fmt: skip
            if used >= quantum:  # let the others run: this one may be spinning on what they will write
                self._release()
                if group in self.ready:
                    self.ready.remove(group)
                    others = self.ready
                    if others:
                        other = max(others, key=lambda g: (g.order, g.block))
                        budget -= self._run_group(other, quantum)
                    self.ready.append(group)

    def _run_group(self, group: Group, quantum: int) -> int:
        """Run a group until it ends, waits, splits, falls in with another, or has used its quantum."""
        blocks, counts = self.program.blocks, self.block_counts
        used = 0
        while used < quantum:
            used += 1
            block = blocks[group.block]
            waves = group.waves
            counts[group.block] += waves.n
            for step in block.steps:
                step(waves)
            end = block.end
            if end == "fall":
                group.block += 1
            elif end == "always":
                group.block = block.target
            elif end == "exit":
                self.ready.remove(group)
                np.subtract.at(self.alive, waves.ids // self.warps, 1)
                return used
            elif end == "barrier":
                group.block += 1
                if self.warps > 1:
                    self.ready.remove(group)
                    self.waiting.append(group)
                    return used
            elif not self._branch(group, block):
                return used
            if len(self.ready) > 1 and self._meets(group):
                return used
        return used

    def _branch(self, group: Group, block: Block) -> bool:
        """Follow a conditional branch; False if the group had to split."""
        waves, end = group.waves, block.end
        if end[:3] == "scc":
            taken = waves.scc
        elif end[:3] == "vcc":
            taken = waves.sq[VCC >> 1] != 0
        else:
            taken = waves.sq[EXEC >> 1] != 0
        count = int(np.count_nonzero(taken))
        if end[-1] == "0" or end[-2:] in ("cz", "ez"):  # scc0, vccz, execz
            taken = ~taken
            count = waves.n - count
        if count == 0:
            group.block += 1
            return True
        if count == waves.n:
            group.block = block.target
            return True
        lanes = taken[:, 0]
        if self.copies == 2 and (lanes[: waves.n // 2] != lanes[waves.n // 2 :]).any():
            wave = int(np.flatnonzero(lanes[: waves.n // 2] != lanes[waves.n // 2 :])[0])
            raise self._error(UninitialisedError, "an uninitialised value decides a branch", block.last, waves, wave)
        self.ready.remove(group)
        self.ready.append(Group(waves.select(np.flatnonzero(lanes)), block.target, group.order))
        self.ready.append(Group(waves.select(np.flatnonzero(~lanes)), group.block + 1, group.order))
        return False

    def _meets(self, group: Group) -> bool:
        """Join groups at the same block; True if another one is now behind and should run."""
        for other in self.ready:
            if other is not group and other.order == group.order:
                if other.block == group.block:
                    group.waves = group.waves.joined(other.waves)
                    self.ready.remove(other)
                    return True
                if other.block < group.block:
                    return True
        return False

    def _release(self) -> None:
        """Let those workgroups pass the barrier of which every live wave has come to one."""
        arrived = np.zeros_like(self.alive)
        for group in self.waiting:
            np.add.at(arrived, group.waves.ids // self.warps, 1)
        complete = arrived == self.alive
        still = []
        for group in self.waiting:
            passes = complete[group.waves.ids // self.warps]
            if passes.all():
                self.ready.append(group)
            elif passes.any():
                self.ready.append(Group(group.waves.select(np.flatnonzero(passes)), group.block, group.order))
                rest = Group(group.waves.select(np.flatnonzero(~passes)), group.block, group.order)
                still.append(rest)
            else:
                still.append(group)
        self.waiting = still
        if self.races is not None:
            for slot in np.flatnonzero(complete & (arrived > 0)):
                self.races.barrier(int(slot) * self.stride, (int(slot) + 1) * self.stride)

    # ------------------------------------------------------------------ errors

    def _error(
        self, kind: type[EmulatorError], message: str, inst: Instruction, w: Waves, wave: int,
        lane: int | None = None, address: int | None = None,
    ) -> EmulatorError:  # fmt: skip
        total = len(self.workgroups) * self.warps
        index = int(w.ids[wave]) % total
        return kind(
            message, kernel=self.program.kernel_name, line=inst.line, source=inst.text,
            workgroup=self.workgroups[index // self.warps], wave=index % self.warps, lane=lane, address=address,
        )  # fmt: skip

    def _access_error(self, error: AccessError, inst: Instruction, w: Waves, flat: int, width: int) -> EmulatorError:
        kind = MisalignedError if error.kind == "align" else OutOfRangeError
        lane = flat % width if width > 1 else None
        return self._error(kind, str(error), inst, w, flat // width, lane, error.address)

    # ------------------------------------------------------------------ device memory

    def scratch_base(self, w: Waves) -> Array:
        """Address of each lane's private segment, ``[n, 64]``."""
        lanes = w.ids.astype(np.int64)[:, None] * LANES + np.arange(LANES)
        return self._scratch_pointer + lanes * self.program.scratch_bytes

    def load(self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, size: int) -> Array:
        """Load for each lane (or, with one column, each wave); see `Memory.load`."""
        try:
            words = self.memory.load(addresses, active, size)
        except AccessError as error:
            raise self._access_error(error, inst, w, error.flat, addresses.shape[1]) from None
        if addresses.shape[1] == LANES:
            lanes = addresses.size if active is None else int(np.count_nonzero(active))
            self.bytes["vmem_bytes_loaded"] += lanes * size
        return words

    def _once(self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, words: Array) -> Array:
        """Lanes that really store: those of the first copy, after comparing the copies; else the active ones."""
        if active is None:
            active = np.ones(addresses.shape, bool)
        if self.copies == 1:
            poisoned = (words == POISON).any(axis=0) & active
            if poisoned.any():
                self._uninitialised(poisoned, "an uninitialised register is stored", inst, w, addresses)
            return active
        half = w.n // 2
        differ = active[:half] != active[half:]
        differ |= active[:half] & (addresses[:half] != addresses[half:])
        if differ.any():
            self._uninitialised(differ, "an uninitialised value decides where to store", inst, w, addresses)
        differ = active[:half] & (words[:, :half] != words[:, half:]).any(axis=0)
        if differ.any():
            self._uninitialised(differ, "the value stored depends on something uninitialised", inst, w, addresses)
        first = active.copy()
        first[half:] = False
        return first

    def _uninitialised(self, lanes: Array, message: str, inst: Instruction, w: Waves, addresses: Array) -> None:
        wave, lane = (int(i) for i in np.argwhere(lanes)[0])
        raise self._error(UninitialisedError, message, inst, w, wave, lane, int(addresses[wave, lane]))

    def store(
        self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, words: Array, size: int
    ) -> None:
        """Store for each lane; see `Memory.store`."""
        if size < 4:
            words = words & np.uint32((1 << (8 * size)) - 1)
        if self.scratch is not None and inst.name.startswith("scratch"):
            lanes = np.ones(addresses.shape, bool) if active is None else active
        else:
            lanes = self._once(w, inst, addresses, active, words)
        try:
            self.memory.store(addresses[lanes], words[:, lanes], size)
        except AccessError as error:
            flat = int(np.flatnonzero(lanes)[error.flat])
            raise self._access_error(error, inst, w, flat, LANES) from None
        self.bytes["vmem_bytes_stored"] += int(np.count_nonzero(lanes)) * size * (self.copies if self.copies == 2 else 1)

    def atomic(
        self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, words: Array, atomic: Atomic
    ) -> Array:
        """Read-modify-write lane by lane; returns what was there, as register words ``[size / 4, n, 64]``."""
        lanes = self._once(w, inst, addresses, active, words)
        count = atomic.size // 4
        old = np.zeros((count, w.n, LANES), np.uint32)
        where = np.argwhere(lanes)
        elements = [
            np.ascontiguousarray(words[k : k + count].transpose(1, 2, 0)).view(atomic.dtype)[..., 0]
            for k in range(0, len(words), count)
        ]
        for wave, lane in where:
            address = int(addresses[wave, lane])
            buffer = self.memory.find(address, address + atomic.size)
            flat = int(wave) * LANES + int(lane)
            if buffer is None or buffer.readonly:
                what = self.memory.describe(address) if buffer is None else f"buffer {buffer.name!r} is read-only"
                raise self._access_error(AccessError(f"atomic out of range: {what}", flat, address), inst, w, flat, LANES)
            if address % atomic.size:
                raise self._access_error(AccessError("misaligned atomic", flat, address, "align"), inst, w, flat, LANES)
            start = address - buffer.base
            cell = buffer.data[start : start + atomic.size].view(atomic.dtype)
            comparand = elements[1][wave, lane : lane + 1] if atomic.compares else None
            before = apply_atomic(atomic, cell, np.zeros(1, np.int64), elements[0][wave, lane : lane + 1], comparand)
            old[:, wave, lane] = before.view(np.uint32)
        if self.copies == 2:
            half = w.n // 2
            old[:, half:] = old[:, :half]
        self.bytes["vmem_bytes_stored"] += len(where) * self.copies * atomic.size
        return old

    # ------------------------------------------------------------------ LDS

    def _lds_offsets(self, w: Waves, inst: Instruction, offsets: Array, size: int, active: Array | None) -> Array:
        """Check offsets in LDS and turn them into indices of bytes of the batch's LDS."""
        wrong = (offsets < 0) | (offsets + size > self.lds_bytes)
        unit = min(size, 4)
        if active is not None:
            wrong &= active
        if wrong.any():
            wave, lane = (int(i) for i in np.argwhere(wrong)[0])
            message = f"LDS access of {size} bytes past the {self.lds_bytes} bytes of the workgroup"
            raise self._error(OutOfRangeError, message, inst, w, wave, lane, int(offsets[wave, lane]))
        if unit > 1:
            wrong = (offsets & (unit - 1)) != 0
            if active is not None:
                wrong &= active
            if wrong.any():
                wave, lane = (int(i) for i in np.argwhere(wrong)[0])
                message = f"misaligned LDS access of {size} bytes"
                raise self._error(MisalignedError, message, inst, w, wave, lane, int(offsets[wave, lane]))
        at = offsets + w.lds_base
        return at if active is None else np.where(active, at, 0)

    def _watch(self, w: Waves, inst: Instruction, at: Array, size: int, active: Array | None, writes: bool) -> None:
        assert self.races is not None
        lanes = np.ones(at.shape, bool) if active is None else active
        if self.copies == 2:
            lanes = lanes.copy()
            lanes[w.n // 2 :] = False
        waves = np.broadcast_to((w.ids % self.warps)[:, None], at.shape)
        conflict = self.races.access(at[lanes], waves[lanes], size, writes=writes)
        if conflict is not None:
            index, other = conflict
            wave, lane = (int(i) for i in np.argwhere(lanes)[index])
            whom = "several waves" if other < 0 else f"wave {other}"
            verb = "writes" if writes else "reads"
            message = f"LDS race: this wave {verb} a byte that {whom} touched since the last barrier"
            raise self._error(RaceError, message, inst, w, wave, lane, int(at[wave, lane] - w.lds_base[wave, 0]))

    def lds_load(self, w: Waves, inst: Instruction, offsets: Array, size: int) -> Array:
        """Read LDS: uint32 ``[max(size // 4, 1), n, 64]``."""
        active = None if w.full else w.exec_mask
        at = self._lds_offsets(w, inst, offsets, size, active)
        if self.races is not None:
            self._watch(w, inst, at, size, active, writes=False)
        lanes = at.size if active is None else int(np.count_nonzero(active))
        self.bytes["lds_bytes_read"] += lanes * size
        if size <= 2:
            return self._lds_views[size].take(at >> (size - 1), mode="clip").astype(np.uint32)[None]
        index = (at >> 2)[None] if size == 4 else (at >> 2)[None] + np.arange(size // 4)[:, None, None]
        return self._lds_views[4].take(index, mode="clip")

    def lds_store(self, w: Waves, inst: Instruction, offsets: Array, words: Array, size: int) -> None:
        """Write LDS from register words ``[max(size // 4, 1), n, 64]`` or ``[n, 64]``."""
        active = None if w.full else w.exec_mask
        at = self._lds_offsets(w, inst, offsets, size, active)
        if self.races is not None:
            self._watch(w, inst, at, size, active, writes=True)
        words = words.reshape(-1, w.n, LANES)
        if active is not None:
            at, words = at[active], words[:, active]
        self.bytes["lds_bytes_written"] += at.size * size
        view = self._lds_views[min(size, 4)]
        at = at >> {1: 0, 2: 1}.get(size, 2)
        for k in range(len(words)):
            view[at + k] = words[k]

    def lds_atomic(self, w: Waves, inst: Instruction, offsets: Array, words: Array, atomic: Atomic) -> Array:
        """Read-modify-write LDS; returns what was there as register words."""
        active = None if w.full else w.exec_mask
        at = self._lds_offsets(w, inst, offsets, atomic.size, active)
        lanes = np.ones(at.shape, bool) if active is None else active
        count = atomic.size // 4
        data = np.ascontiguousarray(words.transpose(1, 2, 0)).view(atomic.dtype)[..., 0]
        memory: Any = self.lds.view(atomic.dtype)
        before = apply_atomic(atomic, memory, at[lanes] // atomic.size, data[lanes], None)
        old = np.zeros((count, w.n, LANES), np.uint32)
        old[:, lanes] = before.view(np.uint32).reshape(-1, count).T
        self.bytes["lds_bytes_read"] += before.nbytes
        self.bytes["lds_bytes_written"] += before.nbytes
        return old

"""Execution of a batch of workgroups: lockstep groups of waves, barriers, LDS, and the place of errors.

All waves of a batch start in one group (or one for each wave index, see ``wave_order``). A group runs block
by block. If a branch divides its waves, the group is split, and the group that is behind runs first, so that
groups meet again and are joined. A wave at a barrier waits until all waves of its workgroup have reached
one.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .accesses import Accesses
from .dispatch import initial_registers
from .errors import DeadlockError, EmulatorError, HazardError, UninitialisedError
from .hazards import HazardModel
from .memory import Memory
from .parser import Instruction
from .pending_lds import PendingLds
from .program import Block, Program
from .races import RaceDetector
from .recorder import Recorder
from .stale_reads import StaleReads
from .state import EXEC, LANES, POISON, POISON_COPY, SGPR_PAIRS, VCC, Array, Waves

_QUANTUM = (
    4096  # blocks that a group may run while others are ready, so that spinning waves cannot starve them
)


class Group:
    """Waves in lockstep: their state, their block, and their wave index (0 in lockstep order).

    ``hazards`` are the numbers of the states of `hazards.HazardModel` that its waves may be in.
    """

    __slots__ = ("block", "hazards", "order", "waves")

    def __init__(self, waves: Waves, block: int, order: int, hazards: tuple[int, ...] = (0,)) -> None:
        self.waves, self.block, self.order, self.hazards = waves, block, order, hazards


class Execution(Accesses):
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
        hazards: the rules of waiting, or None; it needs ``detect_races``.
        stale: finds loads that lack an acquire, or None.
        recorder: called for blocks and accesses; it needs one workgroup, one copy and turns.
        turns: run wave 0 of all workgroups up to a barrier, then wave 1, and so on.
        limit: blocks that may run before the batch is considered to hang.
    """

    def __init__(
        self, program: Program, memory: Memory, kernarg: int, dispatch: int, grid: tuple[int, int, int],
        workgroups: list[tuple[int, int, int]], *, copies: int, detect_races: bool, turns: bool, limit: int,
        hazards: HazardModel | None = None, stale: StaleReads | None = None, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        program.bind()
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
        self._lds_views = {1: self.lds, 2: self.lds.view(np.uint16), 4: words}
        count = slots * self.warps
        self.lds_base = np.repeat(np.arange(slots, dtype=np.int64) * self.stride, self.warps)
        self.scratch = None
        if program.scratch_bytes:
            self.scratch = np.zeros(count * LANES * program.scratch_bytes, np.uint8)
            self.memory = Memory.sharing(memory)  # a batch's scratch is gone with the batch
            self._scratch_pointer = self.memory.map(self.scratch, name="scratch")
        self.races = RaceDetector(len(self.lds)) if detect_races else None
        self.pending = None
        if hazards is not None and self.races is not None:
            self.pending = PendingLds(hazards, self.races, self.warps, count, len(self.lds))
        self.stale = stale
        self.numbers = np.array([] if stale is None else [stale.numbers[w] for w in workgroups], np.int64)
        self.recorder = recorder
        self.bytes = Counter()
        self.block_counts = [0] * len(program.blocks)
        self.workgroup_counts: Array | None = None  # [workgroups, blocks] if they are to be counted
        self.ready = self._start(kernarg, dispatch, grid, count, turns)
        self.waiting: list[Group] = []
        self.alive = np.full(slots, self.warps)
        self._at = Instruction("", "", (), {}, 0, "")

    def _start(
        self, kernarg: int, dispatch: int, grid: tuple[int, int, int], count: int, turns: bool
    ) -> list[Group]:
        program, half = self.program, count // self.copies
        ids = np.arange(count)
        v = np.full((program.vgprs, count, LANES), POISON, np.uint32)
        s = np.full((SGPR_PAIRS, count), (POISON << 32) | POISON, np.uint64)
        if self.copies == 2:
            v[:, half:] = POISON_COPY
            s[:, half:] = (POISON_COPY << 32) | POISON_COPY
        s[EXEC >> 1] = 0xFFFFFFFFFFFFFFFF
        s[VCC >> 1] = 0
        position = np.array([self.workgroups[i % half // self.warps] for i in ids], np.int64).reshape(
            count, 3
        )
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
                    DeadlockError, f"no end after {self.limit} blocks: waves wait for each other or loop",
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
        """Run a group until it ends, waits, splits, joins another, or has used its quantum."""
        blocks, counts = self.program.blocks, self.block_counts
        pending, recorder = self.pending, self.recorder
        used = 0
        while used < quantum:
            used += 1
            block = blocks[group.block]
            waves = group.waves
            counts[group.block] += waves.n
            if recorder is not None:
                recorder.block(group.order, group.block)
            if self.workgroup_counts is not None:
                np.add.at(self.workgroup_counts[:, group.block], waves.ids // self.warps, 1)
            if pending is not None:
                try:
                    group.hazards = pending.enter(group.block, group.hazards)
                except HazardError as error:
                    raise self._with_wave(error, waves) from None
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

    def _with_wave(self, error: HazardError, waves: Waves) -> EmulatorError:
        """The same error with the workgroup and wave that caused it."""
        inst = Instruction("", "", (), {}, error.line, error.source)
        return self._error(type(error), error.message, inst, waves, 0)

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
            raise self._error(
                UninitialisedError, "an uninitialised value decides a branch", block.last, waves, wave
            )
        self.ready.remove(group)
        order, hazards = group.order, group.hazards
        self.ready.append(Group(waves.select(np.flatnonzero(lanes)), block.target, order, hazards))
        self.ready.append(Group(waves.select(np.flatnonzero(~lanes)), group.block + 1, order, hazards))
        return False

    def _meets(self, group: Group) -> bool:
        """Join groups at the same block; True if another one is now behind and should run."""
        for other in self.ready:
            if other is not group and other.order == group.order:
                if other.block == group.block:
                    group.waves = group.waves.joined(other.waves)
                    if group.hazards != other.hazards:
                        group.hazards = tuple(sorted({*group.hazards, *other.hazards}))
                    self.ready.remove(other)
                    return True
                if other.block < group.block:
                    return True
        return False

    def _release(self) -> None:
        """Release the workgroups whose live waves are all at a barrier."""
        arrived = np.zeros_like(self.alive)
        for group in self.waiting:
            np.add.at(arrived, group.waves.ids // self.warps, 1)
        complete = arrived == self.alive
        arrivals = [(group.waves.ids, group.hazards) for group in self.waiting]
        still: list[Group] = []
        before = len(self.ready)
        for group in self.waiting:
            passes = complete[group.waves.ids // self.warps]
            if passes.all():
                self.ready.append(group)
            elif passes.any():
                at, order, hazards = group.block, group.order, group.hazards
                self.ready.append(Group(group.waves.select(np.flatnonzero(passes)), at, order, hazards))
                still.append(Group(group.waves.select(np.flatnonzero(~passes)), at, order, hazards))
            else:
                still.append(group)
        self.waiting = still
        if self.races is not None:
            for slot in np.flatnonzero(complete & (arrived > 0)):
                self.races.barrier(int(slot) * self.stride, (int(slot) + 1) * self.stride)
        if self.pending is not None and arrivals:
            self.pending.barrier(arrivals, complete & (arrived > 0))
            self._share_stores(self.pending.model, self.ready[before:])

    def _share_stores(self, model: HazardModel, passed: list[Group]) -> None:
        """Note for each wave which stores the others of its workgroup have in flight at this barrier."""
        owners: dict[tuple[int, int], set[int]] = {}  # of a workgroup and a store
        for group in passed:
            for store in model.stores(group.hazards):
                for wave in group.waves.ids.tolist():
                    owners.setdefault((wave // self.warps, store), set()).add(wave)
        for group in passed:
            ids = set(group.waves.ids.tolist()) if owners else set()
            shared = {
                store for (slot, store), waves in owners.items()
                if any(waves - {wave} for wave in ids if wave // self.warps == slot)
            }  # fmt: skip
            group.hazards = tuple(sorted({model.behind_barrier(n, shared) for n in group.hazards}))

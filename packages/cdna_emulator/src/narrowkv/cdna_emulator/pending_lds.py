"""LDS accesses in flight: reads, writes and loads to LDS that their wave has not waited for.

A barrier orders only accesses that were waited for. An access that is in flight when its wave passes a
barrier still races with accesses of other waves after that barrier, until the next barrier that the wave
reaches after waiting. A load to LDS is not visible to its own wave either before it has waited, because vmcnt
and lgkmcnt are separate counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .hazards import HazardModel
from .parser import Instruction
from .races import RaceDetector
from .state import Array


@dataclass(frozen=True)
class _Access:
    """One access: whose, where (byte indices of the batch's LDS, ``[lanes]``), its size, what was written."""

    inst: Instruction
    ids: Array
    at: Array
    lane_ids: Array
    size: int
    values: Array | None


class PendingLds:
    """Accesses since the last barrier, and older ones that were not waited for.

    Args:
        model: the program's hazards.
        races: the race detector; accesses that pass a barrier are reported to it again.
        warps: waves of a workgroup.
        waves: waves of the batch.
        lds_bytes: LDS bytes of all workgroups of the batch together.
    """

    def __init__(
        self, model: HazardModel, races: RaceDetector, warps: int, waves: int, lds_bytes: int
    ) -> None:
        self.model, self.races, self.warps = model, races, warps
        self.under_way: dict[int, int] = {}
        self._log: list[_Access] = []
        words = lds_bytes // 4 if model.has_loads_to_lds else 0
        self._number = np.zeros(words, np.int64)
        self._owner = np.full(words, -1, np.int32)
        self._issued = np.zeros(waves, np.int64)

    def enter(self, block: int, states: tuple[int, ...]) -> tuple[int, ...]:
        """The states after a block that is about to run.

        Raises:
            HazardError: see `HazardModel.passage`.
        """
        if len(states) == 1:
            passage = self.model.passage(block, states[0])
            self.under_way = passage.to_lds
            return (passage.state,)
        passages = [self.model.passage(block, state) for state in states]
        self.under_way = {}
        for passage in passages:
            for inst, count in passage.to_lds.items():
                self.under_way[inst] = max(count, self.under_way.get(inst, 0))
        return tuple(sorted({passage.state for passage in passages}))

    def record(
        self, inst: Instruction, ids: Array, at: Array, lane_ids: Array, size: int, values: Array | None
    ) -> None:
        """Records an access of waves ``ids``; ``at`` and ``lane_ids`` are ``[lanes]``."""
        if self.warps > 1:
            self._log.append(_Access(inst, ids, at, lane_ids, size, values))

    def loaded(self, ids: Array, at: Array, lane_ids: Array) -> None:
        """A load to LDS writes words at ``at``."""
        self._issued[ids] += 1
        self._number[at >> 2] = self._issued[lane_ids]
        self._owner[at >> 2] = lane_ids

    def first_unfinished(self, inst: Instruction, at: Array, lane_ids: Array, size: int) -> int | None:
        """Index of the first lane that reads bytes that its wave has still to load into LDS, or None."""
        count = self.under_way.get(id(inst))
        if count is None:
            return None
        words = (at >> 2)[:, None] + np.arange(max(size // 4, 1))
        late = (self._owner[words] == lane_ids[:, None]) & (
            self._number[words] > self._issued[lane_ids][:, None] - count
        )
        return int(np.argwhere(late)[0, 0]) if late.any() else None

    def barrier(self, groups: Iterable[tuple[Array, tuple[int, ...]]], complete: Array) -> None:
        """Workgroups pass a barrier; the race detector has forgotten what they did before.

        Args:
            groups: waves that wait at a barrier, with their states.
            complete: ``[workgroups]`` bool, which of them pass.
        """
        kept: list[_Access] = []
        for ids, states in groups:
            local, to_lds = self.model.pending_lds(states)
            for queue in (local, to_lds):
                if queue:
                    for wave in ids[complete[ids // self.warps]]:
                        kept += self._latest(int(wave), queue)
        for access in kept:
            self.races.access(access.at, access.lane_ids % self.warps, access.size, access.values)
        self._log = [a for a in self._log if not complete[a.ids // self.warps].all()] + kept

    def _latest(self, wave: int, queue: list[Instruction]) -> list[_Access]:
        """The accesses of a wave that belong to its latest instructions ``queue``, oldest first."""
        wanted = [inst for inst in queue for _ in range(self.model.lds_calls(inst))]
        found: list[_Access] = []
        for access in reversed(self._log):
            if not wanted:
                break
            if access.inst is wanted[-1] and wave in access.ids:
                own = access.lane_ids == wave
                values = None if access.values is None else access.values[own]
                found.append(_Access(
                    access.inst, np.array([wave]), access.at[own], access.lane_ids[own], access.size, values
                ))  # fmt: skip
                wanted.pop()
        return found[::-1]

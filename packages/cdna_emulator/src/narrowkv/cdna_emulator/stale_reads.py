"""Loads that may return old values: another workgroup has stored there since the cache was invalidated.

A load may be served by the cache of its compute unit, which does not see what other workgroups of the launch
store. A workgroup that reads what another one published must invalidate that cache first (buffer_inv sc1), by
any of its waves. The start of the launch invalidates it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .memory import Buffer, Memory
from .state import Array


class StaleReads:
    """Remembers for a launch which workgroup stored each byte last, and who has invalidated its cache since.

    Args:
        memory: the buffers.
        workgroups: ids of the workgroups that run.

    Attributes:
        ids: the same; a workgroup's number is its place among them.
        numbers: the numbers by id.
    """

    def __init__(self, memory: Memory, workgroups: Sequence[tuple[int, int, int]]) -> None:
        self.ids = list(workgroups)
        self.numbers = {position: number for number, position in enumerate(self.ids)}
        self._memory = memory
        self._now = 0
        self._invalidated = np.zeros(len(self.ids), np.int32)  # when
        # By base of the buffer: who stored each byte, plus 1, and when.
        self._stored: dict[int, tuple[Buffer, Array, Array]] = {}

    def invalidate(self, workgroups: Array) -> None:
        """Workgroups, by number, have invalidated their caches."""
        self._now += 1
        self._invalidated[workgroups] = self._now

    def store(self, addresses: Array, workgroups: Array, size: int) -> None:
        """Workgroups, by number, store ``size`` bytes at addresses; both arrays are ``[lanes]``."""
        self._now += 1
        while len(addresses):
            first = int(addresses[0])
            buffer = self._memory.find(first, first + size)
            if buffer is None:  # the store itself is refused
                return
            inside = (addresses >= buffer.base) & (addresses < buffer.end)
            if buffer.base not in self._stored:
                count = buffer.end - buffer.base
                self._stored[buffer.base] = buffer, np.zeros(count, np.int32), np.zeros(count, np.int32)
            _, owners, times = self._stored[buffer.base]
            at = (addresses[inside] - buffer.base)[:, None] + np.arange(size)
            owners[at], times[at] = workgroups[inside][:, None] + 1, self._now
            addresses, workgroups = addresses[~inside], workgroups[~inside]

    def find(self, addresses: Array, workgroups: Array, size: int) -> tuple[int, int] | None:
        """Index of a load that may return an old value, and the number of the workgroup that stored there."""
        for buffer, owners, times in self._stored.values():
            inside = np.flatnonzero((addresses >= buffer.base) & (addresses + size <= buffer.end))
            if not len(inside):
                continue
            at = (addresses[inside] - buffer.base)[:, None] + np.arange(size)
            reader = workgroups[inside][:, None]
            stale = (owners[at] != 0) & (owners[at] != reader + 1) & (times[at] > self._invalidated[reader])
            if stale.any():
                lane, byte = (int(k) for k in np.argwhere(stale)[0])
                return int(inside[lane]), int(owners[at][lane, byte]) - 1
        return None

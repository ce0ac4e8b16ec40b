"""Which share of loads the L2 of each XCD, the Infinity Cache and HBM serve, by the order of workgroups.

Workgroup n of a launch runs on XCD n modulo the number of XCDs. An XCD takes its workgroups in the order of
the launch, as many at a time as its compute units hold. Each reads its keys tile by tile at its own pace.
Caches drop what was used longest ago. Not modelled: sets and channels of the caches, Q and the output.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from narrowkv.cdna_emulator.state import Array

from .machine import Machine

_GOLDEN = 0.6180339887498949
_PACES = 0.1  # assumed: paces of workgroups differ by up to so much on both sides of their mean


@dataclass(frozen=True)
class Reads:
    """What each workgroup of a launch reads, in the order in which the hardware takes workgroups.

    Attributes:
        streams: which keys it reads; workgroups of one number read the same.
        first, last: the tiles that it reads are [first, last) of the stream, in this order; it reads none
            where they are equal.
        tile_bytes: of a tile.
    """

    streams: Array
    first: Array
    last: Array
    tile_bytes: int


@dataclass(frozen=True)
class CacheShares:
    """Shares of the bytes that workgroups read.

    Attributes:
        l2_misses: of what L2 does not hold.
        hbm: of what the Infinity Cache does not hold either.
    """

    l2_misses: float
    hbm: float

    @property
    def l2_hits(self) -> float:
        """Share that L2 holds."""
        return 1.0 - self.l2_misses


class _Cache:
    """Least recently used entries of one size."""

    def __init__(self, entries: int) -> None:
        self.entries, self.held = max(entries, 1), OrderedDict[Hashable, None]()

    def holds(self, key: Hashable) -> bool:
        """Whether it does; it does afterwards."""
        if key in self.held:
            self.held.move_to_end(key)
            return True
        self.held[key] = None
        if len(self.held) > self.entries:
            self.held.popitem(last=False)
        return False


def cache_shares(reads: Reads, machine: Machine, *, workgroups_per_unit: int = 1) -> CacheShares:
    """Simulates the caches of a launch.

    Args:
        reads: what its workgroups read.
        machine: the chip.
        workgroups_per_unit: workgroups that a compute unit holds at a time.

    Example:
        >>> import numpy as np
        >>> from narrowkv.cdna_emulator.timing import MACHINES
        >>> pairs = np.arange(64) // 2  # neighbours read the same keys, on two XCDs
        >>> reads = Reads(pairs, np.zeros(64, int), np.full(64, 8), 2**16)
        >>> cache_shares(reads, MACHINES["gfx942"]).l2_hits
        0.0
    """
    count, dies = len(reads.streams), machine.xcds
    streams, first, last = (each.tolist() for each in (reads.streams, reads.first, reads.last))
    slots = max(workgroups_per_unit * machine.compute_units // dies, 1)
    waiting = [iter(range(die, count, dies)) for die in range(dies)]
    l2 = [_Cache(machine.l2_bytes // reads.tile_bytes) for _ in range(dies)]
    mall = _Cache(machine.mall_bytes // reads.tile_bytes)
    running: list[tuple[float, int, int, int]] = []

    def take(die: int, now: float) -> None:
        for number in waiting[die]:
            if first[number] < last[number]:
                heapq.heappush(running, (now, number, die, first[number]))
                return

    for _ in range(slots):
        for die in range(dies):
            take(die, 0.0)
    read = l2_misses = hbm = 0
    while running:
        now, number, die, tile = heapq.heappop(running)
        key = (streams[number], tile)
        read += 1
        if not l2[die].holds(key):
            l2_misses += 1
            hbm += not mall.holds(key)
        now += 1.0 + _PACES * (2 * (number * _GOLDEN % 1.0) - 1)
        if tile + 1 < last[number]:
            heapq.heappush(running, (now, number, die, tile + 1))
        else:
            take(die, now)
    return CacheShares(l2_misses / max(read, 1), hbm / max(read, 1))

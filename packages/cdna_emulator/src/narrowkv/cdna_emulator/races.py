"""The LDS race detector: who touched which byte since the last barrier, and what was written there."""

from __future__ import annotations

import numpy as np

from .state import Array


class RaceDetector:
    """Remembers, for each LDS byte of each workgroup, which waves wrote and read it since the last barrier.

    Waves that write the same value to the same place do not race: the result is the same in any order.
    Compilers do that with what every wave has, such as a maximum that was found over all of them.

    Args:
        lds_bytes: LDS bytes of all workgroups of the batch together.
    """

    def __init__(self, lds_bytes: int) -> None:
        self._writers = np.zeros(lds_bytes, np.int32)  # a bit for each wave
        self._readers = np.zeros(lds_bytes, np.int32)
        self._value = np.zeros(lds_bytes, np.uint8)
        self._changed = np.zeros(lds_bytes, np.bool_)  # by a second, different write

    def barrier(self, start: int, stop: int) -> None:
        """All waves of the workgroup that owns these bytes have met."""
        self._writers[start:stop] = 0
        self._readers[start:stop] = 0
        self._changed[start:stop] = False

    def access(
        self, offsets: Array, waves: Array, size: int, values: Array | None = None
    ) -> tuple[int, int] | None:
        """Record accesses of ``size`` bytes at ``offsets`` by ``waves``, both ``[lanes]``.

        Args:
            values: what is written, uint8 ``[lanes, size]``; None for reads.

        Returns:
            None, or (index of the lane in ``offsets``, the other wave or -2 for several) of a conflict.
        """
        for wave in np.unique(waves):
            lanes = np.flatnonzero(waves == wave)
            at = (offsets[lanes][:, None] + np.arange(size)).ravel()
            own = np.int32(1 << int(wave))
            writers = self._writers[at]
            if values is None:
                others = np.where(writers & own, 0, writers)
                self._readers[at] |= own
            else:
                new = values[lanes].ravel()
                differs = (new != self._value[at]) & (writers != 0)
                others = np.where(differs | self._changed[at], writers & ~own, 0)
                others |= self._readers[at] & ~own
                self._changed[at] |= differs
                self._writers[at] |= own
                self._value[at] = new
            if others.any():
                first = int(np.flatnonzero(others)[0])
                whom = int(others[first])
                return int(lanes[first // size]), whom.bit_length() - 1 if whom & (whom - 1) == 0 else -2
        return None

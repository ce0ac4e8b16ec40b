"""The LDS race detector: who touched which byte since the last barrier."""

from __future__ import annotations

import numpy as np

from .state import Array

_NOBODY, _SEVERAL = -1, -2


class RaceDetector:
    """Remembers, for each LDS byte of each workgroup, the wave that wrote it and the waves that read it.

    Args:
        lds_bytes: LDS bytes of all workgroups of the batch together.
    """

    def __init__(self, lds_bytes: int) -> None:
        self._writer = np.full(lds_bytes, _NOBODY, np.int32)
        self._reader = np.full(lds_bytes, _NOBODY, np.int32)

    def barrier(self, start: int, stop: int) -> None:
        """All waves of the workgroup that owns these bytes have met."""
        self._writer[start:stop] = _NOBODY
        self._reader[start:stop] = _NOBODY

    def access(self, offsets: Array, waves: Array, size: int, *, writes: bool) -> tuple[int, int] | None:
        """Record accesses of ``size`` bytes at ``offsets`` by ``waves``, both ``[lanes]``.

        Returns:
            None, or (index of the lane in ``offsets``, the other wave or -2 for several) of a conflict.
        """
        at = (offsets[:, None] + np.arange(size)).ravel()
        who = np.repeat(waves, size).astype(np.int32)
        if writes:
            # Two waves of one batch may write the same byte in this very instruction.
            self._writer[at] = np.where(self._writer[at] == _NOBODY, who, self._writer[at])
        others = self._writer[at]
        conflict = (others != _NOBODY) & (others != who)
        if not conflict.any() and writes:
            others = self._reader[at]
            conflict = (others != _NOBODY) & (others != who)
        if conflict.any():
            first = int(np.flatnonzero(conflict)[0])
            return first // size, int(others[first])
        if not writes:
            known = self._reader[at]
            self._reader[at] = np.where((known == _NOBODY) | (known == who), who, _SEVERAL)
            mixed = self._reader[at] != who
            self._reader[at[mixed]] = _SEVERAL
        return None

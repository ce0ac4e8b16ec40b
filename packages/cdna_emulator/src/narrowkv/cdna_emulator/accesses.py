"""Memory and LDS accesses of a batch: checks, counts, comparison of copies, and errors with their place."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .atomics import Atomic, apply_atomic
from .errors import (
    AcquireError,
    EmulatorError,
    HazardError,
    MisalignedError,
    OutOfRangeError,
    RaceError,
    UninitialisedError,
)
from .memory import AccessError, Memory
from .parser import Instruction
from .pending_lds import PendingLds
from .program import Program
from .races import RaceDetector
from .recorder import Recorder
from .stale_reads import StaleReads
from .state import LANES, POISON, Array, Waves


class Accesses:
    """Loads, stores and atomics of a batch's waves; `Execution` sets the attributes and runs the waves.

    Attributes:
        program, memory: the kernel and the mapped buffers.
        copies: 2 when every wave runs twice to find uninitialised values, else 1.
        workgroups: ids of the batch's workgroups.
        warps: waves of a workgroup.
        lds_bytes: LDS of a workgroup.
        lds, lds_base: LDS of all workgroups, and where each wave's begins.
        scratch: private memory of all lanes, or None.
        races: the race detector, or None.
        pending: LDS accesses that their wave has not waited for, or None.
        stale: who stored where and whose caches were invalidated, or None.
        numbers: the workgroups' numbers of `stale`.
        recorder: called for every access; then each group has one wave.
        bytes: bytes moved, by name of the count.
    """

    program: Program
    memory: Memory
    copies: int
    workgroups: list[tuple[int, int, int]]
    warps: int
    lds_bytes: int
    lds: Array
    lds_base: Array
    scratch: Array | None
    races: RaceDetector | None
    pending: PendingLds | None
    stale: StaleReads | None
    numbers: Array
    recorder: Recorder | None
    bytes: Counter[str]
    _lds_views: dict[int, Array]
    _scratch_pointer: int

    # ------------------------------------------------------------------ errors

    def _error(
        self, kind: type[EmulatorError], message: str, inst: Instruction, w: Waves, wave: int,
        lane: int | None = None, address: int | None = None,
    ) -> EmulatorError:  # fmt: skip
        total = len(self.workgroups) * self.warps
        index = int(w.ids[wave]) % total
        return kind(
            message, kernel=self.program.kernel_name, line=inst.line, source=inst.text,
            workgroup=self.workgroups[index // self.warps], wave=index % self.warps, lane=lane,
            address=address,
        )  # fmt: skip

    def _access_error(
        self, error: AccessError, inst: Instruction, w: Waves, flat: int, width: int
    ) -> EmulatorError:
        lane = flat % width if width > 1 else None
        return self._error(OutOfRangeError, str(error), inst, w, flat // width, lane, error.address)

    # ------------------------------------------------------------------ device memory

    def scratch_base(self, w: Waves) -> Array:
        """Address of each lane's private segment, ``[n, 64]``."""
        lanes = w.ids.astype(np.int64)[:, None] * LANES + np.arange(LANES)
        return self._scratch_pointer + lanes * self.program.scratch_bytes

    def _record(self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, size: int) -> None:
        if self.recorder is not None:
            lanes = None if active is None else active[0]
            self.recorder.memory(int(w.ids[0]), inst, addresses[0], lanes, size)

    def _workgroups(self, w: Waves, lanes: Array) -> Array:
        """Numbers in the launch of the workgroups of some lanes, bools ``[n, lanes]``."""
        slots = w.ids % (len(self.workgroups) * self.warps) // self.warps
        return np.broadcast_to(self.numbers[slots][:, None], lanes.shape)[lanes]

    def invalidate(self, w: Waves) -> None:
        """Note that the caches which these waves read through were invalidated."""
        if self.stale is not None:
            self.stale.invalidate(self._workgroups(w, np.ones((w.n, 1), np.bool_)))

    def _check_stale(
        self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, size: int
    ) -> None:
        if self.stale is None or "sc1" in inst.modifiers:  # sc1 reads past the caches
            return
        lanes = np.ones(addresses.shape, np.bool_) if active is None else active
        found = self.stale.find(addresses[lanes], self._workgroups(w, lanes), size)
        if found is not None:
            flat, other = int(np.flatnonzero(lanes)[found[0]]), found[1]
            wave, lane = divmod(flat, addresses.shape[1])
            raise self._error(
                AcquireError,
                f"{inst.name} may return an old value: workgroup {self.stale.ids[other]} has stored "
                "here since this one's cache was last invalidated (buffer_inv sc1)",
                inst, w, wave, lane if addresses.shape[1] > 1 else None, int(addresses[wave, lane]),
            )  # fmt: skip

    def load(self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, size: int) -> Array:
        """Load for each lane (or, with one column, each wave); see `Memory.load`."""
        self._record(w, inst, addresses, active, size)
        self._check_stale(w, inst, addresses, active, size)
        try:
            words = self.memory.load(addresses, active, size)
        except AccessError as error:
            raise self._access_error(error, inst, w, error.flat, addresses.shape[1]) from None
        if addresses.shape[1] == LANES:
            lanes = addresses.size if active is None else int(np.count_nonzero(active))
            self.bytes["vmem_bytes_loaded"] += lanes * size
        return words

    def _once(
        self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, words: Array
    ) -> Array:
        """The lanes that store: those of the first copy after comparing the copies, else the active ones."""
        if active is None:
            active = np.ones(addresses.shape, bool)
        if self.recorder is not None:  # it asks for addresses, of a workgroup whose inputs may be missing
            return active
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
            self._uninitialised(
                differ, "the value stored depends on something uninitialised", inst, w, addresses
            )
        first = active.copy()
        first[half:] = False
        return first

    def _uninitialised(
        self, lanes: Array, message: str, inst: Instruction, w: Waves, addresses: Array
    ) -> None:
        wave, lane = (int(i) for i in np.argwhere(lanes)[0])
        raise self._error(UninitialisedError, message, inst, w, wave, lane, int(addresses[wave, lane]))

    def store(
        self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, words: Array, size: int
    ) -> None:
        """Store for each lane; see `Memory.store`."""
        self._record(w, inst, addresses, active, size)
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
        if self.stale is not None:
            self.stale.store(addresses[lanes], self._workgroups(w, lanes), size)
        self.bytes["vmem_bytes_stored"] += (
            int(np.count_nonzero(lanes)) * size * (self.copies if self.copies == 2 else 1)
        )

    def atomic(
        self,
        w: Waves,
        inst: Instruction,
        addresses: Array,
        active: Array | None,
        words: Array,
        atomic: Atomic,
    ) -> Array:
        """Read-modify-write lane by lane; returns the old values as register words ``[size / 4, n, 64]``."""
        self._record(w, inst, addresses, active, atomic.size)
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
                what = (
                    self.memory.describe(address)
                    if buffer is None
                    else f"buffer {buffer.name!r} is read-only"
                )
                raise self._access_error(
                    AccessError(f"atomic out of range: {what}", flat, address), inst, w, flat, LANES
                )
            if address % atomic.size:
                raise self._error(
                    MisalignedError, "misaligned atomic", inst, w, int(wave), int(lane), address
                )
            start = address - buffer.base
            cell = buffer.data[start : start + atomic.size].view(atomic.dtype)
            comparand = elements[1][wave, lane : lane + 1] if atomic.compares else None
            before = apply_atomic(
                atomic, cell, np.zeros(1, np.int64), elements[0][wave, lane : lane + 1], comparand
            )
            old[:, wave, lane] = before.view(np.uint32)
            buffer.mark(start, start + atomic.size)
        if self.copies == 2:
            half = w.n // 2
            old[:, half:] = old[:, :half]
        self.bytes["vmem_bytes_stored"] += len(where) * self.copies * atomic.size
        return old

    # ------------------------------------------------------------------ LDS

    def _lds_offsets(
        self, w: Waves, inst: Instruction, offsets: Array, size: int, active: Array | None
    ) -> Array:
        """Check offsets in LDS and turn them into indices of bytes of the batch's LDS."""
        if self.recorder is not None:
            self.recorder.lds(int(w.ids[0]), inst, offsets[0], None if active is None else active[0], size)
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

    def _watch(
        self, w: Waves, inst: Instruction, at: Array, size: int, active: Array | None,
        words: Array | None = None,
    ) -> None:  # fmt: skip
        """Reports a read, or a write of register words ``[count, n, 64]``, to the race detector."""
        assert self.races is not None
        lanes = np.ones(at.shape, bool) if active is None else active
        if self.copies == 2:
            lanes = lanes.copy()
            lanes[w.n // 2 :] = False
        waves = np.broadcast_to((w.ids % self.warps)[:, None], at.shape)
        values = None
        if words is not None:
            values = np.ascontiguousarray(words[:, lanes].T).view(np.uint8)[:, :size]
        conflict = self.races.access(at[lanes], waves[lanes], size, values)
        since = "since the last barrier"
        if self.pending is not None:
            self._watch_pending(w, inst, at, lanes, size, values)
            since += ", or before it without having waited for the access"
        if conflict is not None:
            index, other = conflict
            wave, lane = (int(i) for i in np.argwhere(lanes)[index])
            whom = "several waves" if other < 0 else f"wave {other}"
            verb = "reads" if words is None else "writes"
            message = f"LDS race: this wave {verb} a byte that {whom} touched {since}"
            raise self._error(
                RaceError, message, inst, w, wave, lane, int(at[wave, lane] - w.lds_base[wave, 0])
            )

    def _watch_pending(
        self, w: Waves, inst: Instruction, at: Array, lanes: Array, size: int, values: Array | None
    ) -> None:
        """Records an access until it is waited for, and checks that it reads nothing still being written."""
        pending = self.pending
        assert pending is not None
        ids = w.ids if self.copies == 1 else w.ids[: w.n // 2]
        lane_ids = np.broadcast_to(w.ids[:, None], at.shape)[lanes]
        chosen = at[lanes]
        if values is not None and not inst.name.startswith("ds_"):
            pending.loaded(ids, chosen, lane_ids)
        elif values is None:
            index = pending.first_unfinished(inst, chosen, lane_ids, size)
            if index is not None:
                wave, lane = (int(i) for i in np.argwhere(lanes)[index])
                raise self._error(
                    HazardError, "LDS is read before this wave's load to LDS has written it: wait for vmcnt",
                    inst, w, wave, lane, int(at[wave, lane] - w.lds_base[wave, 0]),
                )  # fmt: skip
        pending.record(inst, ids, chosen, lane_ids, size, values)

    def lds_load(self, w: Waves, inst: Instruction, offsets: Array, size: int) -> Array:
        """Read LDS: uint32 ``[max(size // 4, 1), n, 64]``."""
        active = None if w.full else w.exec_mask
        at = self._lds_offsets(w, inst, offsets, size, active)
        if self.races is not None:
            self._watch(w, inst, at, size, active)
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
        words = words.reshape(-1, w.n, LANES)
        if self.races is not None:
            self._watch(w, inst, at, size, active, words)
        if active is not None:
            at, words = at[active], words[:, active]
        self.bytes["lds_bytes_written"] += at.size * size
        view = self._lds_views[min(size, 4)]
        at = at >> {1: 0, 2: 1}.get(size, 2)
        for k in range(len(words)):
            view[at + k] = words[k]

    def lds_atomic(self, w: Waves, inst: Instruction, offsets: Array, words: Array, atomic: Atomic) -> Array:
        """Read-modify-write LDS; returns the old values as register words."""
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

"""The registers of a batch of waves that run in lockstep.

A batch is ``n`` waves that are at the same instruction. Each vector register is a row ``[n, 64]`` of 32-bit
words and each scalar register a column ``[n, 1]``, so that one numpy call executes an instruction for the
whole batch and scalar operands broadcast over lanes. Rows are also kept as float32 and int32 views of the
same memory, because making a view costs as much as a small numpy call.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .parser import Instruction

Array = NDArray[Any]

LANES = 64
SGPR_PAIRS = 64
VCC, M0, EXEC = 106, 124, 126  # scalar register numbers, CDNA3 ISA, table "Scalar Data Sources"
ALL_LANES = np.uint64(0xFFFFFFFFFFFFFFFF)
# A NaN as fp32 and in both halves as fp16 and bf16, so that an uninitialised value is conspicuous.
POISON = 0x7FF97FFB
# The second copy of a checked wave starts with an ordinary number instead: see `Waves.copies`.
POISON_COPY = 0x3F9D3C65


def pack_mask(lanes: Array) -> Array:
    """Lane booleans ``[n, 64]`` as 64-bit masks ``[n, 1]``; lane 0 is bit 0."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint64)


def unpack_mask(mask: Array) -> Array:
    """64-bit masks ``[n, 1]`` as lane booleans ``[n, 64]``."""
    octets = np.ascontiguousarray(mask).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_)


class MemorySystem(Protocol):
    """The state outside a wave's registers: memory, LDS and private memory.

    Attributes:
        lds_base: where the LDS of each wave's workgroup begins.
    """

    lds_base: Array

    def scratch_base(self, w: Waves) -> Array:
        """Address of each lane's private segment, ``[n, 64]``."""

    def invalidate(self, w: Waves) -> None:
        """Note that the caches which these waves read through were invalidated."""

    def load(self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, size: int) -> Array:
        """Loads for each lane, or, with one column, for each wave."""

    def store(
        self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, words: Array, size: int
    ) -> None:
        """Stores for each lane."""

    def atomic(
        self, w: Waves, inst: Instruction, addresses: Array, active: Array | None, words: Array, atomic: Any
    ) -> Array:
        """Reads, modifies and writes memory; returns what was there."""

    def lds_load(self, w: Waves, inst: Instruction, offsets: Array, size: int) -> Array:
        """Reads LDS: uint32 ``[max(size // 4, 1), n, 64]``."""

    def lds_store(self, w: Waves, inst: Instruction, offsets: Array, words: Array, size: int) -> None:
        """Writes LDS from register words."""

    def lds_atomic(self, w: Waves, inst: Instruction, offsets: Array, words: Array, atomic: Any) -> Array:
        """Reads, modifies and writes LDS; returns what was there."""


class Waves:
    """State of ``n`` waves in lockstep.

    Attributes:
        n: number of waves.
        ids: ``[n]`` index of each wave among all waves of the execution.
        copies: 1, or 2 when uninitialised values are tracked. Then the second half of the batch repeats the
            waves of the first half with other initial contents of registers and LDS: whatever differs between
            the halves depends on something that was never written.
        v: ``[registers, n, 64]`` uint32; AGPRs follow at the descriptor's ``accum_offset``.
        u, i, f: rows of ``v`` as uint32, int32, float32.
        s: ``[64, n]`` uint64 register pairs; su, si, sf, sq, sqi: columns ``[n, 1]`` of it, by type.
        scc: ``[n, 1]`` bool.
        full: True when EXEC has all lanes of all waves on.
        exec_mask: ``[n, 64]`` bool, EXEC by lane.
    """

    __slots__ = (
        "copies", "exec_mask", "execution", "f", "fp16_overflow", "full", "i", "ids", "lds_base", "masks",
        "n", "s", "scc", "sf", "si", "sq", "sqi", "su", "u", "v",
    )  # fmt: skip

    def __init__(
        self, execution: MemorySystem, ids: Array, copies: int, v: Array, s: Array, scc: Array
    ) -> None:
        self.execution, self.ids, self.copies = execution, ids, copies
        self.v, self.s, self.scc = v, s, scc
        self.n = n = len(ids)
        self.u: list[Array] = list(v)
        self.i: list[Array] = list(v.view(np.int32))
        self.f: list[Array] = list(v.view(np.float32))
        words = s.view(np.uint32).reshape(SGPR_PAIRS, n, 2)
        columns = [words[k >> 1, :, k & 1 : (k & 1) + 1] for k in range(2 * SGPR_PAIRS)]
        self.su: list[Array] = columns
        self.si: list[Array] = [c.view(np.int32) for c in columns]
        self.sf: list[Array] = [c.view(np.float32) for c in columns]
        self.sq: list[Array] = [pair.reshape(n, 1) for pair in s]
        self.sqi: list[Array] = [q.view(np.int64) for q in self.sq]
        self.masks: list[Array | None] = [None] * SGPR_PAIRS
        self.lds_base: Array = execution.lds_base[ids].reshape(n, 1)
        self.fp16_overflow = False
        self.full = True
        self.exec_mask: Array = np.ones((n, LANES), np.bool_)
        self.refresh_exec()

    def refresh_exec(self) -> None:
        """Bring ``full`` and ``exec_mask`` up to date after EXEC was written."""
        mask = self.sq[EXEC >> 1]
        self.masks[EXEC >> 1] = None
        self.full = bool((mask == ALL_LANES).all())
        self.exec_mask = unpack_mask(mask)

    def lanes(self, pair: int) -> Array:
        """Lane booleans of a scalar register pair; kept until the pair is written."""
        known = self.masks[pair]
        if known is None:
            known = self.masks[pair] = unpack_mask(self.sq[pair])
        return known

    def set_lanes(self, pair: int, lanes: Array) -> None:
        """Write a scalar register pair from lane booleans; inactive lanes write 0."""
        if not self.full:
            lanes = lanes & self.exec_mask
        self.sq[pair][...] = pack_mask(lanes)
        if pair == EXEC >> 1:
            self.refresh_exec()
        else:
            self.masks[pair] = lanes

    def scalar_written(self, register: int, count: int = 1) -> None:
        """Forget what was derived from scalar registers that have just been written."""
        for pair in range(register >> 1, (register + count + 1) >> 1):
            self.masks[pair] = None
            if pair == EXEC >> 1:
                self.refresh_exec()

    def select(self, keep: Array) -> Waves:
        """A new batch with the waves at indices ``keep``."""
        part = Waves(
            self.execution, self.ids[keep], self.copies,
            np.ascontiguousarray(self.v[:, keep]), np.ascontiguousarray(self.s[:, keep]), self.scc[keep],
        )  # fmt: skip
        part.fp16_overflow = self.fp16_overflow
        return part

    def joined(self, other: Waves) -> Waves:
        """A new batch of the waves of both; the copies of a checked run stay in the second half."""
        order = np.arange(self.n + other.n)
        if self.copies == 2:
            a, b = self.n // 2, other.n // 2
            halves = order[:a], order[2 * a : 2 * a + b], order[a : 2 * a], order[2 * a + b :]
            order = np.concatenate(halves)
        whole = Waves(
            self.execution, np.concatenate([self.ids, other.ids])[order], self.copies,
            np.ascontiguousarray(np.concatenate([self.v, other.v], 1)[:, order]),
            np.ascontiguousarray(np.concatenate([self.s, other.s], 1)[:, order]),
            np.concatenate([self.scc, other.scc])[order],
        )  # fmt: skip
        whole.fp16_overflow = self.fp16_overflow
        return whole

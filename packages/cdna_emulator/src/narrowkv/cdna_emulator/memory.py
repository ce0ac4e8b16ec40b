"""Device memory: host buffers at device addresses, with the bounds of each."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .state import Array


class AccessError(Exception):
    """A wrong access by the lane with this flat index; the caller adds wave and workgroup."""

    def __init__(self, message: str, flat: int, address: int) -> None:
        super().__init__(message)
        self.flat, self.address = flat, address


@dataclass(frozen=True)
class Buffer:
    """One mapped host buffer."""

    name: str
    base: int
    data: NDArray[np.uint8]
    readonly: bool
    written: NDArray[np.bool_] | None = None

    def mark(self, start: int, stop: int) -> None:
        """Marks bytes [start, stop) as stored in the array that `Memory.map` was given, if any."""
        if self.written is not None:
            self.written[start:stop] = True

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.base + self.data.size


class Memory:
    """The buffers that a kernel may touch.

    Loads and stores may be at any address, as in the unaligned access mode that AMD's driver sets
    (SH_MEM_CONFIG.alignment_mode).

    Example:
        >>> memory = Memory()
        >>> host = np.arange(64, dtype=np.float32)
        >>> pointer = memory.map(host.view(np.uint8), name="x")
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._bases: list[int] = []
        self._words: dict[int, Array] = {}

    @classmethod
    def sharing(cls, other: Memory) -> Memory:
        """A copy of the list of buffers: buffers added to it do not appear in the original."""
        copy = cls()
        copy._buffers, copy._bases = list(other._buffers), list(other._bases)
        return copy

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The mapped buffers, by address."""
        return tuple(self._buffers)

    def map(
        self,
        view: NDArray[np.uint8],
        *,
        name: str = "buffer",
        readonly: bool = False,
        written: NDArray[np.bool_] | None = None,
    ) -> int:
        """Make a host buffer visible to kernels.

        Args:
            view: one-dimensional contiguous uint8 array; stores write through to it.
            name: its name in error messages.
            readonly: refuse stores.
            written: bool array of the same size; True is set for every byte that a kernel stores.

        Returns:
            The device address of its first byte, which is the host address. Mapping the same bytes again
            returns the same address.

        Raises:
            TypeError: if ``view`` is not a numpy uint8 array.
            ValueError: if it is not one-dimensional and contiguous, or is read-only without
            ``readonly=True``.
        """
        if not isinstance(view, np.ndarray) or view.dtype != np.uint8:
            raise TypeError(f"view must be a numpy uint8 array, got {getattr(view, 'dtype', type(view))}")
        if view.ndim != 1 or not view.flags.c_contiguous:
            raise ValueError(f"view must be one-dimensional and contiguous, got shape {view.shape}")
        if not view.flags.writeable and not readonly:
            raise ValueError(f"view {name!r} must be writeable unless readonly=True")
        if written is not None and (written.dtype != np.bool_ or written.shape != view.shape):
            raise ValueError(
                f"written must be a bool array of shape {view.shape}, got {written.dtype} {written.shape}"
            )
        base = int(view.ctypes.data)
        at = bisect_right(self._bases, base)
        self._buffers.insert(at, Buffer(name, base, view, readonly, written))
        self._bases.insert(at, base)
        return base

    def find(self, low: int, high: int) -> Buffer | None:
        """The buffer that holds all of [low, high)."""
        at = bisect_right(self._bases, low)
        for buffer in reversed(self._buffers[:at]):
            if high <= buffer.end:
                return buffer
        return None

    def describe(self, address: int) -> str:
        """The position of an address relative to the nearest buffer."""
        if not self._buffers:
            return "no buffer is mapped"
        near = min(self._buffers, key=lambda b: max(b.base - address, address - b.end, 0))
        side = (
            f"{near.base - address} bytes before"
            if address < near.base
            else f"{address - near.base} bytes into"
        )
        return f"{side} buffer {near.name!r} of {near.data.size} bytes"

    def _view(self, buffer: Buffer, unit: int) -> Array:
        """The buffer as unsigned integers of 1, 2 or 4 bytes, if its base is aligned to them."""
        key = buffer.base * 8 + unit
        known = self._words.get(key)
        if known is None or known.size != buffer.data.size // unit:
            dtype: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32}[unit]
            whole = buffer.data[: buffer.data.size // unit * unit]
            known = self._words[key] = whole.view(dtype)
        return known

    def load(self, addresses: Array, active: Array | None, size: int) -> Array:
        """Load ``size`` bytes at each address.

        Args:
            addresses: int64, any shape.
            active: bool of the same shape, or None for all.
            size: 1, 2 or a multiple of 4.

        Returns:
            uint32 ``[max(size // 4, 1), *shape]``; lanes that are not active read 0.

        Raises:
            AccessError: naming the first lane whose access is out of range.
        """
        words = max(size // 4, 1)
        if active is not None:
            if not active.any():
                return np.zeros((words, *addresses.shape), np.uint32)
            inside = addresses[active]
            addresses = np.where(active, addresses, inside[0])
        low = int(addresses.min())
        buffer = self.find(low, int(addresses.max()) + size)
        if buffer is None:
            result = self._load_scattered(addresses, size)
        else:
            result = self._gather(buffer, addresses, size)
        if active is not None:
            result = np.where(active, result, np.uint32(0))
        return result

    def _gather(self, buffer: Buffer, addresses: Array, size: int) -> Array:
        unit = min(size, 4)
        offsets = addresses - buffer.base
        if unit > 1:
            if buffer.base % unit or (addresses & (unit - 1)).any():
                return self._gather_bytes(buffer, offsets, size)
            offsets >>= 1 if unit == 2 else 2
        view = self._view(buffer, unit)
        if size <= 4:
            return view.take(offsets, mode="clip").astype(np.uint32)[None]
        steps = np.arange(size // 4).reshape(-1, *([1] * offsets.ndim))
        return view.take(offsets[None] + steps, mode="clip")

    @staticmethod
    def _gather_bytes(buffer: Buffer, offsets: Array, size: int) -> Array:
        """Loads that are not aligned, or from a buffer whose base is not."""
        octets = np.zeros((*offsets.shape, max(size, 4)), np.uint8)
        octets[..., :size] = buffer.data[offsets[..., None] + np.arange(size)]
        return np.moveaxis(octets.view(np.uint32), -1, 0)

    def _load_scattered(self, addresses: Array, size: int) -> Array:
        """Lanes that read from several buffers."""
        result = np.zeros((max(size // 4, 1), *addresses.shape), np.uint32)
        for buffer, lanes in self._split(addresses, size, "load"):
            result[:, lanes] = self._gather(buffer, addresses[lanes], size)
        return result

    def _split(self, addresses: Array, size: int, what: str) -> list[tuple[Buffer, Array]]:
        todo = np.ones(addresses.shape, bool)
        parts = []
        for buffer in reversed(self._buffers):
            inside = todo & (addresses >= buffer.base) & (addresses + size <= buffer.end)
            if inside.any():
                parts.append((buffer, inside))
                todo &= ~inside
        if todo.any():
            flat = int(np.flatnonzero(todo)[0])
            address = int(addresses.flat[flat])
            raise AccessError(f"{what} of {size} bytes out of range: {self.describe(address)}", flat, address)
        return parts

    def store(self, addresses: Array, words: Array, size: int) -> None:
        """Store ``size`` bytes at each address; where lanes collide the last one wins.

        Args:
            addresses: int64 ``[lanes]``.
            words: uint32 ``[max(size // 4, 1), lanes]``.
            size: 1, 2 or a multiple of 4.
        """
        if not addresses.size:
            return
        for buffer, lanes in self._split_fast(addresses, size):
            part = addresses if lanes is None else addresses[lanes]
            data = words if lanes is None else words[:, lanes]
            unit = min(size, 4)
            if buffer.readonly:
                raise AccessError(f"store to read-only buffer {buffer.name!r}", 0, int(part[0]))
            offsets = (part - buffer.base)[:, None]
            octets = offsets + np.arange(size)
            if buffer.written is not None:
                buffer.written[octets] = True
            if buffer.base % unit or (part & (unit - 1)).any():
                buffer.data[octets] = np.ascontiguousarray(data.T).view(np.uint8)[:, :size]
            else:
                self._view(buffer, unit)[offsets // unit + np.arange(len(data))] = data.T

    def _split_fast(self, addresses: Array, size: int) -> list[tuple[Buffer, Array | None]]:
        buffer = self.find(int(addresses.min()), int(addresses.max()) + size)
        if buffer is not None:
            return [(buffer, None)]
        return list(self._split(addresses, size, "store"))

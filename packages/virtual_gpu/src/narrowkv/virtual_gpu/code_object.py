"""What a HIP runtime reads of an AMD code object: the machine code, and the metadata of each kernel.

A code object is an ELF file with a note of MessagePack ("Code object V5 metadata" in LLVM's AMDGPU user guide).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

__all__ = ["Argument", "CodeObjectError", "Kernel", "machine_code", "read_code_object"]

_NT_AMDGPU_METADATA = 32
_EM_AMDGPU = 224


class CodeObjectError(ValueError):
    """The bytes are not a code object."""


@dataclass(frozen=True)
class Argument:
    """An explicit argument of a kernel: its place in the argument block."""

    offset: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """The metadata of one kernel.

    Attributes:
        name: its symbol.
        arguments: those that the caller passes, in order.
        kernarg_bytes: size of the argument block.
        max_threads: of a workgroup.
        registers: vector registers of a lane.
        private_bytes: private memory of a lane (spilled registers).
        lds_bytes: LDS that is fixed in the code object.
    """

    name: str
    arguments: tuple[Argument, ...]
    kernarg_bytes: int
    max_threads: int
    registers: int
    private_bytes: int
    lds_bytes: int


@dataclass(frozen=True)
class CodeObject:
    """What a loaded code object has.

    Attributes:
        arch: "gfx942".
        kernels: by name.
    """

    arch: str
    kernels: dict[str, Kernel]


def read_code_object(elf: bytes) -> CodeObject:
    """Reads the metadata of a code object.

    Raises:
        CodeObjectError: it is not an AMD code object with metadata.
    """
    try:
        if elf[:4] != b"\x7fELF" or struct.unpack_from("<H", elf, 18)[0] != _EM_AMDGPU:
            raise CodeObjectError("the code object is not an ELF file for AMD GPUs")
        metadata = _metadata(elf)
        arch = re.findall(r"gfx\w+", metadata["amdhsa.target"])[-1]  # amdgcn-amd-amdhsa--gfx942
        return CodeObject(arch, {k[".name"]: _kernel(k) for k in metadata["amdhsa.kernels"]})
    except (IndexError, KeyError, StopIteration, TypeError, UnicodeDecodeError, struct.error) as error:
        raise CodeObjectError(f"the code object's metadata cannot be read: {error!r}") from error


def machine_code(elf: bytes) -> bytes:
    """The bytes of section .text."""
    offset, size = _sections(elf)[".text"]
    return elf[offset : offset + size]


def _kernel(entry: dict[str, Any]) -> Kernel:
    explicit = [a for a in entry.get(".args", []) if not a[".value_kind"].startswith("hidden_")]
    return Kernel(
        name=entry[".name"],
        arguments=tuple(Argument(a[".offset"], a[".size"]) for a in explicit),
        kernarg_bytes=entry[".kernarg_segment_size"],
        max_threads=entry[".max_flat_workgroup_size"],
        registers=entry[".vgpr_count"],
        private_bytes=entry[".private_segment_fixed_size"],
        lds_bytes=entry[".group_segment_fixed_size"],
    )


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Offset and size of each section."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + k * entry_size) for k in range(count)]
    strings = headers[names][4]

    def name_at(offset: int) -> str:
        return elf[strings + offset : elf.index(b"\0", strings + offset)].decode()

    return {name_at(header[0]): (header[4], header[5]) for header in headers}


def _metadata(elf: bytes) -> dict[str, Any]:
    at, size = _sections(elf)[".note"]
    end = at + size
    while at < end:
        name_bytes, body_bytes, kind = struct.unpack_from("<III", elf, at)
        body = at + 12 + (name_bytes + 3 & ~3)
        if kind == _NT_AMDGPU_METADATA:
            return _MessagePack(elf[body : body + body_bytes]).value()  # type: ignore[no-any-return]
        at = body + (body_bytes + 3 & ~3)
    raise CodeObjectError("the code object has no metadata")


class _MessagePack:
    """Reads the part of MessagePack that LLVM writes: maps, arrays, strings, integers, booleans, nil."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "big", signed=signed)

    def value(self) -> Any:
        """The next value."""
        kind = self._number(1)
        if kind < 0x80 or kind >= 0xE0:  # small integers
            return kind if kind < 0x80 else kind - 0x100
        if kind < 0x90 or kind in (0xDE, 0xDF):
            count = kind & 15 if kind < 0x90 else self._number(2 if kind == 0xDE else 4)
            return {self.value(): self.value() for _ in range(count)}
        if kind < 0xA0 or kind in (0xDC, 0xDD):
            count = kind & 15 if kind < 0xA0 else self._number(2 if kind == 0xDC else 4)
            return [self.value() for _ in range(count)]
        if kind < 0xC0 or kind in (0xD9, 0xDA, 0xDB):
            count = kind & 31 if kind < 0xC0 else self._number({0xD9: 1, 0xDA: 2, 0xDB: 4}[kind])
            return self._take(count).decode()
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        if 0xCC <= kind <= 0xD3:
            return self._number(1 << (kind & 3), signed=kind >= 0xD0)
        raise CodeObjectError(
            f"the code object's metadata has a MessagePack type {kind:#x} that LLVM does not write"
        )

"""A program as it is translated: operations, and rows and scalars for temporary and constant values.

A vector operand becomes a row of 64 words: the register itself if it is plain, otherwise a temporary row that
operations of its own fill (scalars in all lanes, negation, parts of words). So each instruction needs one C
function of plain rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowkv.cdna_emulator.operands import DTYPES, Operand, constant_bits, parse_operand
from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.program import Program
from narrowkv.cdna_emulator.state import EXEC, LANES, POISON, Array

# Mirrors struct Op of c/wave.h.
OPERATION = np.dtype(
    [
        ("run", "u8"),
        ("d", "i4"),
        ("a", "i4"),
        ("b", "i4"),
        ("c", "i4"),
        ("x", "i4"),
        ("y", "i4"),
        ("z", "i4"),
        ("instruction", "i4"),
        ("p", "u8"),
    ]
)
TEMPORARIES = 24
_SELECT = {
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
}
SCALARS = 128


class UntranslatableError(Exception):
    """The engine has no operation for an instruction, or for one of its modifiers."""


def signed(value: int) -> int:
    """32 bits as the signed number that a field of an operation holds."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


class Code:
    """The operations of a program.

    Attributes:
        program: what is translated.
        operations: as tuples in the order of `OPERATION`'s fields, with the operation's name, and with a
            table, the number of a block, or None as ``p``.
        first_constant: the row behind the temporaries.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.operations: list[tuple[Any, ...]] = []
        self.first_constant = program.vgprs + TEMPORARIES
        self._constants: dict[bytes, int] = {}
        self._constant_rows: list[Array] = []
        self._scalars: dict[tuple[int, int], int] = {}
        self._scalar_words: list[int] = []
        self._next = program.vgprs
        self.instruction = 0

    def begin(self, number: int) -> None:
        """Start the instruction of this number: its temporaries are free."""
        self.instruction, self._next = number, self.program.vgprs

    def emit(
        self,
        name: str,
        d: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        x: int = 0,
        y: int = 0,
        z: int = 0,
        p: Any = None,
    ) -> None:
        """Append an operation on rows: d, a, b, c are rows, or -1."""
        rows = (64 * row if row >= 0 else row for row in (d, a, b, c))
        self.operations.append((name, *rows, signed(x), signed(y), signed(z), self.instruction, p))

    def emit_scalar(
        self,
        name: str,
        d: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        x: int = 0,
        y: int = 0,
        z: int = 0,
        p: Any = None,
    ) -> None:
        """Append an operation with d, a, b, c as they are: scalar registers or multiples of 64."""
        self.operations.append((name, d, a, b, c, signed(x), signed(y), signed(z), self.instruction, p))

    # ------------------------------------------------------------------ rows and scalars

    def temporary(self, count: int = 1) -> int:
        """The first of some rows that are free until the next instruction."""
        row = self._next
        self._next += count
        if self._next > self.first_constant:
            raise UntranslatableError("too many operands with modifiers")
        return row

    def constant_rows(self, rows: Array) -> int:
        """The first of some rows with these words, uint32 ``[count, 64]``."""
        key = rows.tobytes()
        if key not in self._constants:
            self._constants[key] = self.first_constant + len(self._constant_rows)
            self._constant_rows += list(rows)
        return self._constants[key]

    def constant(self, bits: int, words: int = 1) -> int:
        """The row, or the first of two, with a number in every lane."""
        values = [[(bits >> (32 * k)) & 0xFFFFFFFF] * LANES for k in range(words)]
        return self.constant_rows(np.array(values, np.uint32))

    def scalar_constant(self, bits: int, words: int = 1) -> int:
        """The scalar that holds a number."""
        key = bits & ((1 << (32 * words)) - 1), words
        if key not in self._scalars:
            self._scalars[key] = SCALARS + len(self._scalar_words)
            self._scalar_words += [(key[0] >> (32 * k)) & 0xFFFFFFFF for k in range(words)]
        return self._scalars[key]

    def all_constant_rows(self) -> Array:
        """uint32 ``[count, 64]``: the rows from `first_constant` on."""
        return np.array(self._constant_rows, np.uint32).reshape(-1, LANES)

    def initial_scalars(self) -> Array:
        """uint32: scalar registers, then constants."""
        return np.array([POISON] * SCALARS + self._scalar_words, np.uint32)

    # ------------------------------------------------------------------ operands

    def operand(self, inst: Instruction, position: int) -> Operand:
        """The operand at a position."""
        return parse_operand(inst.operands[position], inst, self.program)

    def scalar(self, operand: Operand, kind: str) -> int:
        """The scalar with an operand's value."""
        words = 2 if DTYPES[kind]().itemsize == 8 else 1
        if operand.is_constant:
            return self.scalar_constant(constant_bits(operand, kind), words)
        if operand.kind == "scc":
            slot = SCALARS + len(self._scalar_words)
            self._scalar_words += [0, 0]
            self.emit_scalar("read_scc", d=slot)
            return slot
        if operand.kind != "s":
            raise UntranslatableError(f"{operand.kind} operand where a scalar is wanted")
        return operand.index

    def raw(self, operand: Operand, kind: str, *, high: bool = False) -> int:
        """The row with an operand's value, without its modifiers; 16-bit values lie in the low halves."""
        size = DTYPES[kind]().itemsize
        words = 2 if size == 8 else 1
        if operand.is_constant:
            bits = constant_bits(operand, kind)
            if high and size == 2 and operand.kind == "int":
                bits >>= 16
            return self.constant(bits & ((1 << 8 * size) - 1), words)
        if operand.kind == "v" and words == 2 and operand.count == 1:
            row = self.temporary(2)
            self.emit("widen64", row, operand.index)
            return row
        row = operand.index
        if operand.kind != "v":
            row = self.temporary(words)
            name = "broadcast64" if words == 2 else "broadcast"
            self.emit_scalar(name, d=64 * row, a=self.scalar(operand, kind if words == 2 else "u32"))
        return self.part(row, 16, 16) if high and size == 2 else row

    def part(self, row: int, shift: int, width: int, *, extend: bool = False) -> int:
        """A temporary row with some bits of a row, extended by zeros or by the sign."""
        result = self.temporary()
        self.emit("select_signed" if extend else "select", result, row, x=32 - shift - width, y=32 - width)
        return result

    def modified(self, row: int, operand: Operand, kind: str) -> int:
        """The row with the operand's ``|x|`` and ``-x`` applied."""
        if operand.absolute and kind[0] == "f":
            row = self.changed(
                row, kind, "keep_bits", {"f16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFF}[kind]
            )
        if operand.negate:
            row = self.negated(row, kind)
        return row

    def negated(self, row: int, kind: str) -> int:
        """The row with -x."""
        if kind[0] == "f":
            return self.changed(row, kind, "flip_bits", 0x8000 if kind == "f16" else 0x80000000)
        size = DTYPES[kind]().itemsize
        result = self.temporary(2 if size == 8 else 1)
        self.emit(f"negate_{8 * size}", result, row)
        return result

    def changed(self, row: int, kind: str, name: str, bits: int) -> int:
        """A temporary copy of a row, with an operation on the word that has the sign."""
        if kind != "f64":
            result = self.temporary()
            self.emit(name, result, row, x=bits)
            return result
        result = self.temporary(2)
        self.emit("copy", result, row)
        self.emit(name, result + 1, row + 1, x=bits)
        return result

    def source(self, inst: Instruction, position: int, kind: str) -> int:
        """The row with the operand at a position, modifiers applied."""
        operand = self.operand(inst, position)
        return self.modified(self.raw(operand, kind), operand, kind)

    def selected(self, operand: Operand, kind: str, select: str) -> int:
        """The row with the part of an operand that SDWA selects."""
        if operand.is_constant or select == "DWORD":
            return self.raw(operand, kind)
        return self.part(self.raw(operand, "u32"), *_SELECT[select], extend=operand.extend)

    # ------------------------------------------------------------------ results

    def insert(self, target: int, row: int, where: str, unused: str) -> None:
        """Write the low bits of a row to a part of a register; clear, keep or sign-fill the rest."""
        if where == "DWORD":
            self.emit("v_mov_b32", target, row)
            return
        shift, width = _SELECT[where]
        inside = ((1 << width) - 1) << shift
        if unused == "UNUSED_SEXT":
            self.emit("insert_signed", target, row, x=shift, y=32 - shift - width)
        else:
            self.emit(
                "insert", target, row, x=shift, y=inside, z=~inside if unused == "UNUSED_PRESERVE" else 0
            )

    def scalar_written(self, register: int, count: int = 1) -> None:
        """Follow a write of scalar registers."""
        if register <= EXEC + 1 and register + count > EXEC:
            self.emit_scalar("exec_written")

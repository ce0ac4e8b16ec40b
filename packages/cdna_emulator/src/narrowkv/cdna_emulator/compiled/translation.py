"""Translates a program to the engine's operations."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.program import Program
from narrowkv.cdna_emulator.state import Array

from .library import address_of
from .matrices import translate_matrix
from .memory import translate_memory
from .narrow import translate_narrow
from .operations import OPERATION, Code, UntranslatableError
from .scalars import translate_scalar
from .vector import translate_vector


class Translated:
    """A program as operations.

    Attributes:
        program: what was translated.
        instructions: the instructions by the number that the operations have.
        operations: array of `OPERATION`.
        entry: index of the operation where a wave starts.
        constants: rows of words ``[rows, 64]`` behind registers and temporaries.
        scalars: initial scalar registers, then scalar constants.
        register_rows: rows of registers and temporaries.
    """

    def __init__(self, program: Program) -> None:
        self.instructions: list[Instruction] = []
        code = Code(program)
        starts = self._translate(program, code)
        self.operations = operations = np.zeros(len(code.operations), OPERATION)
        self._tables: list[Array] = []  # keeps them alive
        base, at = operations.ctypes.data, np.cumsum([0, *([OPERATION.itemsize] * len(code.operations))])
        for k, (name, *fields, p) in enumerate(code.operations):
            if isinstance(p, np.ndarray):
                table = np.ascontiguousarray(p)
                self._tables.append(table)
                p = table.ctypes.data
            elif p is not None:
                p = base + int(at[starts[p]])
            operations[k] = (address_of(name), *fields, p or 0)
        self.entry = starts[program.entry]
        self.constants, self.scalars = code.all_constant_rows(), code.initial_scalars()
        self.register_rows = code.first_constant

    def _translate(self, program: Program, code: Code) -> list[int]:
        """Fill the code; the result is the first operation of each block."""
        starts: list[int] = []
        unknown: dict[str, str] = {}
        for number, block in enumerate(program.blocks):
            starts.append(len(code.operations))
            code.begin(len(self.instructions))
            code.emit_scalar("block", x=number)
            for inst in block.instructions:
                code.begin(len(self.instructions))
                self.instructions.append(inst)
                if inst is block.last and block.end != "fall":
                    code.emit_scalar(f"end_{block.end}", p=block.target if block.target >= 0 else None)
                    continue
                problem = translate_instruction(code, inst)
                if problem is not None:
                    unknown.setdefault(inst.name, f"{inst.name} (line {inst.line}: {problem})")
        if unknown:
            raise UntranslatableError("no operation for " + ", ".join(unknown.values()))
        return starts


def translate_instruction(code: Code, inst: Instruction) -> str | None:
    """Append the operations of an instruction that ends no block; the result says why there are none."""
    first = len(code.operations)
    try:
        if not _dispatch(code, inst):
            return "not known"
    except (UntranslatableError, IndexError, KeyError, ValueError) as error:
        return str(error)
    missing = {name for name, *_ in code.operations[first:] if address_of(name) is None}
    return f"operation {', '.join(sorted(missing))} is missing" if missing else None


def _dispatch(code: Code, inst: Instruction) -> bool:
    name = inst.name
    if name.startswith("v_mfma_"):
        return translate_matrix(code, inst)
    if name.startswith("v_") and name != "v_nop":
        return translate_narrow(code, inst) or translate_vector(code, inst)
    if name.startswith(("s_", "v_nop", "buffer_wb", "buffer_inv")):
        return translate_scalar(code, inst)
    return translate_memory(code, inst)


_known: WeakKeyDictionary[Program, Any] = WeakKeyDictionary()


def translated(program: Program) -> Translated:
    """The program's operations, translated once.

    Raises:
        UntranslatableError: naming the instructions that the engine lacks.
        BuildError: if the engine's library cannot be built.
    """
    known = _known.get(program)
    if known is None:
        try:
            known = Translated(program)
        except UntranslatableError as error:
            known = error
        _known[program] = known
    if isinstance(known, UntranslatableError):
        raise known
    found: Translated = known
    return found

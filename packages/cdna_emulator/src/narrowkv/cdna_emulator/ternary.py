"""v_bitop3 (gfx950): any bitwise function of three sources, given as a truth table.

Source: CDNA4 ISA document. Bit ``4 a + 2 b + c`` of the table is the result for source bits a, b, c.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .operands import source, write_vector
from .parser import Instruction
from .program import Program, Step
from .state import Array

# Functions of two bits by their truth table: bit 2 b + c is the result for b, c.
_TWO: tuple[Callable[[Array, Array], Array] | None, ...] = (
    None, lambda b, c: ~(b | c), lambda b, c: ~b & c, lambda b, c: ~b,
    lambda b, c: b & ~c, lambda b, c: ~c, lambda b, c: b ^ c, lambda b, c: ~(b & c),
    lambda b, c: b & c, lambda b, c: ~(b ^ c), lambda b, c: c, lambda b, c: ~b | c,
    lambda b, c: b, lambda b, c: b | ~c, lambda b, c: b | c, None,
)  # fmt: skip


def bitop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Apply a truth table of 8 bits to three words."""
    without, with_a = table & 15, table >> 4
    ones = np.array([[0xFFFFFFFF]], np.uint32).astype(a.dtype)
    zeros = ones ^ ones

    def two(index: int) -> Array:
        function = _TWO[index]
        if function is None:
            return ones if index else zeros
        return function(b, c)

    if without == with_a:
        return two(without)
    if with_a == 15 - without:
        return a ^ two(without)
    return (a & two(with_a)) | (~a & two(without))


def bind_bitop3(inst: Instruction, program: Program) -> Step | None:
    """The step of v_bitop3_b32 or v_bitop3_b16."""
    if program.target != "gfx950":
        return None
    kind = "u16" if inst.name.endswith("b16") else "u32"
    a, b, c = (source(inst, k, kind, program) for k in (1, 2, 3))
    table = inst.integer("bitop3")
    target = inst.operands[0]
    write = write_vector(int(target.strip("v")), kind)
    return lambda w: write(w, np.broadcast_to(bitop3(a(w), b(w), c(w), table), (w.n, 64)))

"""Wait states that software must put between dependent instructions.

Sources: "Manually Inserted Wait States (NOPs)" and "Dependency Resolution: Required Independent Instructions"
(matrix instructions) of the CDNA3 and CDNA4 ISA documents, and LLVM's `GCNHazardRecognizer` for gfx940 and
gfx950, which inserts the s_nops of compiled code. Everything that the tables do not name, such as a vector
ALU result that the next vector ALU instruction reads, is resolved by the hardware.

A wait state is one issued instruction; ``s_nop N`` is N + 1 of them.

Not in the table: fp64 matrix instructions and s_getreg, which no kernel of Triton's uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .matrix import MatrixShape, mfma_shape
from .parser import Instruction
from .program import Program
from .usage import (
    EXEC_BITS,
    M0_BITS,
    SCALAR_BITS,
    VCC_BITS,
    VECTOR_BITS,
    Usage,
    operand_bits,
    writes_high_half,
)

TRANS = "transcendental result read by another vector ALU instruction"
MOVED = "result moved by SDWA or op_sel read by a vector ALU instruction"
SCALAR_TO_VALU = "scalar register written by a vector ALU instruction read by a vector ALU instruction"
SCALAR_TO_LANE = (
    "scalar register written by a vector ALU instruction selecting a lane of v_readlane, v_writelane"
)
SCALAR_TO_MEMORY = "scalar register written by a vector ALU instruction read by a vector memory instruction"
VCC_TO_DIV_FMAS = "vcc written by a vector ALU instruction read by v_div_fmas"
EXEC_TO_LANE = "exec written by a vector ALU instruction before v_readlane, v_readfirstlane or v_writelane"
EXEC_TO_DPP = "exec written by a vector ALU instruction before a DPP instruction"
EXEC_TO_MATRIX = "exec written by a vector ALU instruction before a matrix instruction"
EXEC_TO_SWAP = "exec written by a vector ALU instruction before v_permlane16_swap or v_permlane32_swap"
VALU_TO_LANE = "vector ALU result read by v_readlane or v_readfirstlane"
VALU_TO_DPP = "vector ALU result read by a DPP instruction"
VALU_TO_SWAP = "vector ALU result read by v_permlane16_swap or v_permlane32_swap"
VALU_TO_MATRIX = "vector ALU result read by a matrix instruction"
DOT_READ = "dot product result read by another vector ALU instruction or as a factor"
DOT_OVERWRITTEN = "dot product result overwritten by another vector ALU instruction"
M0_TO_LDS = "m0 written by a scalar instruction before a load to LDS"
STORE_DATA = "data of a store of more than 64 bits overwritten by a vector ALU instruction"
SETREG = "s_setreg before s_setreg"

WAIT_STATES = {
    TRANS: 1, MOVED: 1, SCALAR_TO_VALU: 2, SCALAR_TO_LANE: 4, SCALAR_TO_MEMORY: 5, VCC_TO_DIV_FMAS: 4,
    EXEC_TO_LANE: 4, EXEC_TO_DPP: 5, EXEC_TO_MATRIX: 4, EXEC_TO_SWAP: 4, VALU_TO_LANE: 1, VALU_TO_DPP: 2,
    VALU_TO_SWAP: 2, VALU_TO_MATRIX: 2, DOT_READ: 3, DOT_OVERWRITTEN: 3, M0_TO_LDS: 1, STORE_DATA: 2,
    SETREG: 2,
}  # fmt: skip
"""Wait states between an instruction and a later one that depends on it in the way named.

Those after a matrix instruction depend on its passes and are computed in `_after_matrix`."""

MATRIX_TO_FACTOR = "matrix result used as a factor"
MATRIX_TO_ADDEND = "matrix result used as an addend"
MATRIX_TO_FP32_ADDEND = "matrix result used as an addend in fp32"
MATRIX_READ = "matrix result read by a vector ALU or memory instruction"
MATRIX_OVERWRITTEN = "matrix result overwritten by a vector ALU or memory instruction"
ADDEND_OVERWRITTEN = "addend of a matrix instruction overwritten"


class Produced(NamedTuple):
    """One way in which a later instruction can be issued too early.

    Attributes:
        what: the dependency, a key of `WAIT_STATES` or of a matrix rule.
        registers: bits of the registers that carry it.
        states: wait states between the two.
        exact_states: the same where the later instruction uses exactly these registers.
    """

    what: str
    registers: int
    states: int
    exact_states: int


@dataclass(frozen=True)
class Dependencies:
    """The dependencies of an instruction that matter to wait states.

    Attributes:
        states: wait states that the instruction itself counts as.
        produced: dependencies of later instructions on it.
        used: register bits by dependency.
        horizon: wait states after which nothing that it produced matters.
    """

    states: int
    produced: tuple[Produced, ...]
    used: dict[str, int]
    horizon: int


def matrix_clocks(shape: MatrixShape, target: str) -> int:
    """Clocks that a matrix instruction occupies the matrix unit.

    Source: dense throughput tables of the CDNA3 and CDNA4 ISA documents; AMD's matrix instruction calculator.
    """
    if shape.m == 4:
        return 16 if shape.a == "f64" else 8
    if shape.a == "f64":
        return 64 if target == "gfx950" else 32
    if shape.blocks > 1:
        return {16: 32, 32: 64}[shape.m]
    per_clock = {"f32": 64, "xf32": 256, "f16": 512, "bf16": 512, "i8": 1024, "fp8": 1024, "bf8": 1024}
    rate = per_clock.get(shape.a, 0)
    if shape.k in (64, 128) and shape.result == "f32":  # f8f6f4
        rate = 2048 if {"fp8", "bf8"} & {shape.a, shape.b} else 4096
    elif target == "gfx950" and shape.flops > 16 * rate and shape.m == 16:
        rate *= 2  # the shapes that CDNA4 adds
    elif target == "gfx950" and shape.flops > 32 * rate and shape.m == 32:
        rate *= 2
    return shape.flops // rate


def _after_matrix(inst: Instruction, usage: Usage, shape: MatrixShape, program: Program) -> list[Produced]:
    """Dependencies on a matrix instruction, by its passes of four clocks."""
    passes = matrix_clocks(shape, program.target) // 4
    is_xdl = shape.a not in ("f32", "f64")
    extra = 1 if is_xdl and program.target == "gfx950" and passes != 2 else 0
    result, exact = usage.writes & VECTOR_BITS, 2 if passes == 2 else 0
    use = passes + (3 if is_xdl else 2) + extra
    addend = passes + (1 if is_xdl else 0) + extra
    rules = [
        Produced(MATRIX_TO_FACTOR, result, use, use),
        Produced(MATRIX_READ, result, use, use),
        Produced(MATRIX_OVERWRITTEN, result, use, use),
        Produced(MATRIX_TO_FP32_ADDEND, result, addend, exact),
        Produced(MATRIX_TO_ADDEND, result, addend if is_xdl else 0, exact),
    ]
    if is_xdl:
        kept = {2: 1, 4: 3, 8: 7}.get(passes, 15)
        addend_bits = operand_bits(inst.operands[3], inst, program)
        rules.append(Produced(ADDEND_OVERWRITTEN, addend_bits, kept, kept))
    return rules


def _factors(inst: Instruction, program: Program) -> int:
    """Registers that a matrix instruction reads other than its addend."""
    bits = 0
    for position, text in enumerate(inst.operands[1:], 1):
        if position != 3:
            bits |= operand_bits(text, inst, program)
    return bits


def _wide_store_data(inst: Instruction, usage: Usage, program: Program) -> int:
    """Data registers of a store of more than 64 bits that its address unit still reads after issue."""
    if usage.kind not in ("store", "atomic"):
        return 0
    if inst.name.startswith("buffer"):
        data = operand_bits(inst.operands[0], inst, program)
        if inst.operands[-1].startswith(("s", "m0")):  # an offset register delays the next instruction
            return 0
    else:
        data = operand_bits(inst.operands[1], inst, program)
    return data & VECTOR_BITS if (data & VECTOR_BITS).bit_count() > 2 else 0


class _Rules:
    """Collects the dependencies of one instruction."""

    def __init__(self) -> None:
        self.produced: list[Produced] = []
        self.used: dict[str, int] = {}

    def produces(self, registers: int, *kinds: str) -> None:
        """Later instructions depend on these registers in each of these ways."""
        if registers:
            self.produced += [Produced(k, registers, WAIT_STATES[k], WAIT_STATES[k]) for k in kinds]

    def uses(self, registers: int, *kinds: str) -> None:
        """The instruction depends on these registers in each of these ways."""
        if registers:
            self.used |= dict.fromkeys(kinds, registers)


def _valu_results(inst: Instruction, usage: Usage, rules: _Rules) -> None:
    vector = usage.writes & VECTOR_BITS
    if usage.is_transcendental:
        rules.produces(vector, TRANS)
    if writes_high_half(inst):
        rules.produces(vector, MOVED)
    rules.produces(vector, VALU_TO_LANE, VALU_TO_DPP, VALU_TO_SWAP)
    if inst.name.startswith("v_dot"):
        rules.produces(vector, DOT_READ, DOT_OVERWRITTEN)
    else:
        rules.produces(vector, VALU_TO_MATRIX)
    scalar = usage.writes & SCALAR_BITS & ~EXEC_BITS
    rules.produces(scalar, SCALAR_TO_VALU, SCALAR_TO_LANE, SCALAR_TO_MEMORY)
    rules.produces(usage.writes & EXEC_BITS, EXEC_TO_LANE, EXEC_TO_DPP, EXEC_TO_MATRIX, EXEC_TO_SWAP)
    rules.produces(usage.writes & VCC_BITS, VCC_TO_DIV_FMAS)


def _valu_uses(inst: Instruction, usage: Usage, rules: _Rules, program: Program) -> None:
    name, vector = inst.name, usage.reads & VECTOR_BITS
    if name in ("v_readlane_b32", "v_readfirstlane_b32"):
        rules.uses(vector, VALU_TO_LANE)
    if name in ("v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32"):
        rules.uses(EXEC_BITS, EXEC_TO_LANE)
    if name in ("v_readlane_b32", "v_writelane_b32"):
        rules.uses(operand_bits(inst.operands[2], inst, program) & SCALAR_BITS, SCALAR_TO_LANE)
    if name.startswith("v_div_fmas"):
        rules.uses(VCC_BITS, VCC_TO_DIV_FMAS)
    if inst.encoding == "dpp":
        rules.uses(vector, VALU_TO_DPP)
        rules.uses(EXEC_BITS, EXEC_TO_DPP)
    if name.startswith("v_permlane"):
        rules.uses(vector, VALU_TO_SWAP)
        rules.uses(EXEC_BITS, EXEC_TO_SWAP)
    if name.startswith("v_dot"):  # another dot product may follow at once with the result as its addend
        factors = operand_bits(inst.operands[1], inst, program) | operand_bits(
            inst.operands[2], inst, program
        )
        rules.uses(factors & VECTOR_BITS, DOT_READ)
    else:
        rules.uses(vector, DOT_READ)
        rules.uses(usage.writes & VECTOR_BITS, DOT_OVERWRITTEN)


def _matrix_uses(
    inst: Instruction, usage: Usage, shape: MatrixShape, rules: _Rules, program: Program
) -> None:
    vector = usage.reads & VECTOR_BITS
    addend = operand_bits(inst.operands[3], inst, program) & VECTOR_BITS
    rules.uses(_factors(inst, program) & VECTOR_BITS, MATRIX_TO_FACTOR)
    rules.uses(addend, MATRIX_TO_FP32_ADDEND if shape.a == "f32" else MATRIX_TO_ADDEND)
    rules.uses(vector, VALU_TO_MATRIX, DOT_READ)
    rules.uses(EXEC_BITS, EXEC_TO_MATRIX)


def dependencies(inst: Instruction, usage: Usage, program: Program) -> Dependencies:
    """The dependencies of an instruction according to the tables."""
    kind, rules = usage.kind, _Rules()
    vector_read, vector_written = usage.reads & VECTOR_BITS, usage.writes & VECTOR_BITS
    shape = mfma_shape(inst) if kind == "mfma" else None
    is_memory = kind in ("load", "store", "atomic", "to_lds", "ds")
    if kind == "valu":
        _valu_results(inst, usage, rules)
        _valu_uses(inst, usage, rules, program)
    if shape is not None and shape.a != "f64":
        rules.produced += _after_matrix(inst, usage, shape, program)
        _matrix_uses(inst, usage, shape, rules, program)
    if kind in ("valu", "mfma"):
        if not usage.is_transcendental:
            rules.uses(vector_read, TRANS)
        rules.uses(vector_read, MOVED)
        rules.uses(usage.reads & SCALAR_BITS & ~EXEC_BITS, SCALAR_TO_VALU)
        rules.uses(vector_written, STORE_DATA)
    if kind == "valu" or is_memory:
        rules.uses(vector_read, MATRIX_READ)
        rules.uses(vector_written, MATRIX_OVERWRITTEN, ADDEND_OVERWRITTEN)
    if is_memory:
        rules.uses(vector_read, DOT_READ)
        rules.produces(_wide_store_data(inst, usage, program), STORE_DATA)
        if kind != "ds":
            rules.uses(usage.reads & SCALAR_BITS, SCALAR_TO_MEMORY)
    if kind == "to_lds":
        rules.uses(M0_BITS, M0_TO_LDS)
    if kind == "salu":
        rules.produces(usage.writes & M0_BITS, M0_TO_LDS)
        if inst.name.startswith("s_setreg"):
            rules.produces(M0_BITS, SETREG)  # `usage` has no MODE register: any bit represents it
            rules.uses(M0_BITS, SETREG)
    produced = tuple(rule for rule in rules.produced if rule.states or rule.exact_states)
    horizon = max((max(rule.states, rule.exact_states) for rule in produced), default=0)
    states = int(inst.operands[0], 0) + 1 if kind == "nop" else 1
    return Dependencies(states, produced, rules.used, horizon)

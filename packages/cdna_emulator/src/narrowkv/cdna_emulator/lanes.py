"""Sub-dword selection (SDWA), data-parallel primitives (DPP), and instructions that cross lanes.

Source: chapters "SDWA" and "DPP" of the CDNA3 ISA document; V_PERMLANE16_SWAP and V_PERMLANE32_SWAP from
CDNA4's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from .operands import (
    DTYPES,
    Operand,
    Reader,
    Writer,
    float_output,
    output_modifier,
    parse_operand,
    read_raw,
    unknown,
    with_modifiers,
    write_vector,
)
from .parser import Instruction
from .program import Program, Step
from .state import LANES, Array, Waves

if TYPE_CHECKING:
    from .valu_ops import ValuOp

_SELECT = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
}  # fmt: skip


def read_sdwa(operand: Operand, kind: str, select: str) -> Reader:
    """A reader of part of a register, zero- or sign-extended to the type."""
    if operand.is_constant or select == "DWORD":
        return read_raw(operand, kind)
    shift, width = _SELECT[select]
    words = read_raw(operand, "u32")
    dtype = DTYPES[kind]
    up = np.uint32(32 - shift - width)
    down = np.uint32(32 - width)
    if operand.extend:
        signed = np.int32(32 - width)
        field: Reader = lambda w: ((words(w) << up).view(np.int32) >> signed).view(np.uint32)  # noqa: E731
    else:
        field = lambda w: (words(w) << up) >> down  # noqa: E731
    if dtype().itemsize == 2:
        return lambda w: field(w).astype(np.uint16).view(dtype)
    return lambda w: field(w).view(dtype)


def write_sdwa(index: int, kind: str, where: str, unused: str) -> Writer:
    """A writer of part of a register; the rest is cleared, kept, or filled with the sign."""
    if where == "DWORD":
        return write_vector(index, kind)
    shift, width = _SELECT[where]
    ones = (1 << width) - 1
    inside = np.uint32(ones << shift)
    itemsize = DTYPES[kind]().itemsize

    def write(w: Waves, value: Array) -> None:
        bits = np.ascontiguousarray(value).view(np.uint16 if itemsize == 2 else np.uint32).astype(np.uint32)
        bits = (bits & np.uint32(ones)) << np.uint32(shift)
        if unused == "UNUSED_PRESERVE":
            bits = bits | (w.u[index] & ~inside)
        elif unused == "UNUSED_SEXT":
            up = np.uint32(32 - shift - width)
            bits = ((bits << up).view(np.int32) >> up.astype(np.int32)).view(np.uint32)
        np.copyto(w.u[index], bits, where=w.exec_mask)

    return write


def dpp_source_lanes(modifiers: dict[str, str]) -> tuple[Array, Array] | None:
    """For each lane the lane it reads, and whether there is one; None if no known DPP control is given."""
    lane = np.arange(LANES)
    row, within = lane & ~15, lane & 15
    for key, text in modifiers.items():
        amount = int(text, 0) if re.fullmatch(r"\d+|0x[0-9a-f]+", text) else 0
        if key == "quad_perm":
            picks = np.array([int(p) for p in text.strip("[]").split(",")])
            return (lane & ~3) + picks[lane & 3], np.ones(LANES, bool)
        if key == "row_shl":
            return row + ((within + amount) & 15), within + amount < 16
        if key == "row_shr":
            return row + ((within - amount) & 15), within >= amount
        if key == "row_ror":
            return row + ((within - amount) & 15), np.ones(LANES, bool)
        if key == "row_mirror":
            return row + 15 - within, np.ones(LANES, bool)
        if key == "row_half_mirror":
            return (lane & ~7) + 7 - (lane & 7), np.ones(LANES, bool)
        if key == "row_newbcast":
            return row + amount, np.ones(LANES, bool)
        if key == "row_bcast" and amount == 15:
            return np.maximum(row - 1, 0), lane >= 16
        if key == "row_bcast" and amount == 31:
            return np.where(lane >= 32, 31, 0), lane >= 32
        if key == "wave_shl":
            return (lane + 1) & 63, lane < 63
        if key == "wave_shr":
            return (lane - 1) & 63, lane > 0
        if key == "wave_rol":
            return (lane + 1) & 63, np.ones(LANES, bool)
        if key == "wave_ror":
            return (lane - 1) & 63, np.ones(LANES, bool)
    return None


def bind_dpp(inst: Instruction, op: ValuOp, texts: tuple[str, ...], program: Program) -> Step:
    """An ALU instruction whose first source comes from other lanes."""
    control = dpp_source_lanes(inst.modifiers)
    if control is None:
        raise unknown(inst, program, "DPP control")
    lanes, exists = control
    operands = [parse_operand(text, inst, program) for text in texts]
    read = [read_raw(o, k) for o, k in zip(operands, op.sources, strict=True)]
    zero_fill = "bound_ctrl" in inst.modifiers
    rows = np.array([(inst.integer("row_mask", 15) >> (lane >> 4)) & 1 for lane in range(LANES)], bool)
    banks = np.array(
        [(inst.integer("bank_mask", 15) >> ((lane >> 2) & 3)) & 1 for lane in range(LANES)], bool
    )
    enabled = rows & banks
    destination = parse_operand(inst.operands[0], inst, program).index
    function, omod, clamp = op.function, output_modifier(inst), "clamp" in inst.modifiers
    itemsize = DTYPES[op.result]().itemsize
    if itemsize > 4:
        raise unknown(inst, program, "64-bit DPP")
    if (clamp or omod != 1.0) and op.result[0] != "f":
        raise unknown(inst, program, f"an output modifier on {inst.name} with DPP")

    def step(w: Waves) -> None:
        valid = exists if w.full else exists & w.exec_mask[:, lanes]
        first = read[0](w)[:, lanes]
        first = np.where(valid, first, first.dtype.type(0))
        first = with_modifiers(lambda _: first, operands[0], op.sources[0])(w)
        rest = [
            with_modifiers(r, o, k)(w) for r, o, k in zip(read[1:], operands[1:], op.sources[1:], strict=True)
        ]
        value = function(first, *rest)
        if clamp or omod != 1.0:
            value = float_output(value, omod, clamp)
        bits = np.ascontiguousarray(value).view(np.uint16 if itemsize == 2 else np.uint32).astype(np.uint32)
        written = np.broadcast_to(enabled if zero_fill else enabled & valid, (w.n, LANES))
        np.copyto(w.u[destination], bits, where=written if w.full else written & w.exec_mask)

    return step


def _first_lane(w: Waves) -> Array:
    """Lowest active lane of each wave; lane 0 if none is active."""
    result: Array = w.exec_mask.argmax(axis=1)
    return result


def _bind_readfirstlane(inst: Instruction, program: Program) -> Step:
    target = parse_operand(inst.operands[0], inst, program).index
    operand = parse_operand(inst.operands[1], inst, program)
    read = read_raw(operand, "u32")

    def step(w: Waves) -> None:
        row = np.broadcast_to(read(w), (w.n, LANES))
        w.su[target][:, 0] = row[:, 0] if w.full else row[np.arange(w.n), _first_lane(w)]
        w.scalar_written(target)

    return step


def _bind_readlane(inst: Instruction, program: Program) -> Step:
    target = parse_operand(inst.operands[0], inst, program).index
    row = parse_operand(inst.operands[1], inst, program).index
    lane = read_raw(parse_operand(inst.operands[2], inst, program), "u32")

    def step(w: Waves) -> None:
        picked = np.broadcast_to(lane(w)[:, 0] & np.uint32(63), (w.n,))
        w.su[target][:, 0] = w.u[row][np.arange(w.n), picked]
        w.scalar_written(target)

    return step


def _bind_writelane(inst: Instruction, program: Program) -> Step:
    row = parse_operand(inst.operands[0], inst, program).index
    value = read_raw(parse_operand(inst.operands[1], inst, program), "u32")
    lane = read_raw(parse_operand(inst.operands[2], inst, program), "u32")

    def step(w: Waves) -> None:
        picked = np.broadcast_to(lane(w)[:, 0] & np.uint32(63), (w.n,))
        w.u[row][np.arange(w.n), picked] = value(w)[:, 0]

    return step


def _bind_swap(inst: Instruction, program: Program) -> Step:
    """v_permlaneN_swap: exchange the odd rows of N lanes of one register with the even rows of the other."""
    size = 32 if "lane32" in inst.name else 16
    first = parse_operand(inst.operands[0], inst, program).index
    second = parse_operand(inst.operands[1], inst, program).index
    odd = (np.arange(LANES) & size) != 0

    def step(w: Waves) -> None:
        a, b = w.u[first].copy(), w.u[second].copy()
        mask = w.exec_mask
        np.copyto(w.u[first], np.roll(b, size, axis=1), where=odd & mask)
        np.copyto(w.u[second], np.roll(a, -size, axis=1), where=~odd & mask)

    return step


def _bind_swap_registers(inst: Instruction, program: Program) -> Step:
    first = parse_operand(inst.operands[0], inst, program).index
    second = parse_operand(inst.operands[1], inst, program).index

    def step(w: Waves) -> None:
        kept = w.u[first].copy()
        np.copyto(w.u[first], w.u[second], where=w.exec_mask)
        np.copyto(w.u[second], kept, where=w.exec_mask)

    return step


CROSS_LANE = {
    "v_readfirstlane_b32": _bind_readfirstlane, "v_readlane_b32": _bind_readlane,
    "v_writelane_b32": _bind_writelane, "v_permlane32_swap_b32": _bind_swap,
    "v_permlane16_swap_b32": _bind_swap, "v_swap_b32": _bind_swap_registers,
}  # fmt: skip

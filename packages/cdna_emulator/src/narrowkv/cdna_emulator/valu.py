"""Binding of vector ALU instructions (VOP1, VOP2, VOP3, VOPC, with SDWA and DPP) to steps over a batch.

Source: chapters "Vector ALU Operations", "SDWA" and "DPP" of the CDNA3 ISA document. What an instruction
computes stands in `valu_ops`; here are operands, modifiers, destinations and the instructions with a carry.
"""

from __future__ import annotations

import numpy as np

from . import arithmetic
from .lanes import bind_dpp, read_sdwa, write_sdwa
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
from .state import VCC, Array, Waves
from .valu_ops import ACCUMULATING, COMPARES, LITERAL_FMA, SATURATING, VALU, ValuOp


def bind_valu(inst: Instruction, program: Program) -> Step | None:
    """The step of a vector ALU instruction, or None if `valu_ops` does not know it."""
    name = inst.name
    if name in CARRY:
        return _bind_carry(inst, program)
    if name.startswith("v_cmp"):
        return _bind_compare(inst, program)
    if name == "v_cndmask_b32":
        return _bind_select(inst, program)
    if name in SPECIAL:
        return SPECIAL[name](inst, program)
    base = ACCUMULATING.get(name) or LITERAL_FMA.get(name) or name
    op = VALU.get(base)
    return None if op is None else _bind_plain(inst, op, program)


def readers(inst: Instruction, op: ValuOp, program: Program, texts: tuple[str, ...]) -> tuple[Reader, ...]:
    """Readers of the sources, with SDWA selection, op_sel, and negate and absolute modifiers."""
    result = []
    select = inst.bits("op_sel", len(texts) + 1, 0)
    for position, (text, kind) in enumerate(zip(texts, op.sources, strict=True)):
        operand = parse_operand(text, inst, program)
        if inst.encoding == "sdwa":
            sdwa = inst.modifiers.get(f"src{position}_sel", "DWORD")
            read = read_sdwa(operand, kind, sdwa)
        else:
            read = read_raw(operand, kind, high=bool(select[position]) and not operand.is_constant)
        result.append(with_modifiers(read, operand, kind))
    return tuple(result)


def _sources(inst: Instruction, op: ValuOp, program: Program) -> tuple[str, ...]:
    texts = inst.operands[1:]
    if inst.name in ACCUMULATING:
        texts = (*texts, inst.operands[0])
    if len(texts) != len(op.sources):
        raise unknown(inst, program, f"{inst.name} with {len(texts)} sources")
    return texts


def destination(inst: Instruction, op: ValuOp, program: Program, position: int = 0) -> tuple[Operand, Writer]:
    """The result's register and its writer, with SDWA and op_sel destinations."""
    operand = parse_operand(inst.operands[position], inst, program)
    if operand.kind != "v":
        raise unknown(inst, program, f"destination {inst.operands[position]!r}")
    if inst.encoding == "sdwa":
        where = inst.modifiers.get("dst_sel", "DWORD")
        unused = inst.modifiers.get("dst_unused", "UNUSED_PAD")
        return operand, write_sdwa(operand.index, op.result, where, unused)
    if DTYPES[op.result]().itemsize == 2 and "op_sel" in inst.modifiers:
        high = bool(inst.bits("op_sel", len(op.sources) + 1, 0)[-1])
        where = "WORD_1" if high else "WORD_0"
        return operand, write_sdwa(operand.index, op.result, where, "UNUSED_PRESERVE")
    return operand, write_vector(operand.index, op.result)


def _bind_plain(inst: Instruction, op: ValuOp, program: Program) -> Step:
    texts = _sources(inst, op, program)
    if inst.encoding == "dpp":
        return bind_dpp(inst, op, texts, program)
    function = op.function
    clamp, omod = "clamp" in inst.modifiers, output_modifier(inst)
    read = readers(inst, op, program, texts)
    operand, write = destination(inst, op, program)
    if omod != 1.0 and op.result[0] != "f":
        raise unknown(inst, program, f"omod on {inst.name}")
    if clamp and op.result[0] in "iu":
        return _bind_saturating(inst, op, read, write, program)
    if clamp or omod != 1.0:
        plain = function
        function = lambda *args: float_output(plain(*args), omod, clamp)  # noqa: E731
    elif isinstance(function, np.ufunc) and op.result in ("u32", "i32", "f32") and inst.encoding != "sdwa":
        return _bind_ufunc(function, operand.index, op.result, read)
    if len(read) == 1:
        (r0,) = read
        return lambda w: write(w, function(r0(w)))
    if len(read) == 2:
        r0, r1 = read
        return lambda w: write(w, function(r0(w), r1(w)))
    r0, r1, r2 = read
    return lambda w: write(w, function(r0(w), r1(w), r2(w)))


def _bind_ufunc(function: np.ufunc, index: int, kind: str, read: tuple[Reader, ...]) -> Step:
    """The fast path: numpy computes straight into the register's row."""
    rows = {"u32": "u", "i32": "i", "f32": "f"}[kind]
    r0 = read[0]
    if len(read) == 1:

        def unary(w: Waves) -> None:
            if w.full:
                function(r0(w), out=getattr(w, rows)[index])
            else:
                function(r0(w), out=getattr(w, rows)[index], where=w.exec_mask)

        return unary
    r1 = read[1]

    def binary(w: Waves) -> None:
        if w.full:
            function(r0(w), r1(w), out=getattr(w, rows)[index])
        else:
            function(r0(w), r1(w), out=getattr(w, rows)[index], where=w.exec_mask)

    return binary


def _bind_saturating(
    inst: Instruction, op: ValuOp, read: tuple[Reader, ...], write: Writer, program: Program
) -> Step:
    function = SATURATING.get(inst.name)
    if function is None:
        raise unknown(inst, program, f"clamp on {inst.name}")
    dtype = np.dtype(DTYPES[op.result])
    info = np.iinfo(dtype)

    def step(w: Waves) -> None:
        wide = function(*(r(w).astype(np.int64) for r in read))
        write(w, np.clip(wide, info.min, info.max).astype(dtype))

    return step


def _mask_pair(text: str, inst: Instruction, program: Program) -> int:
    """The scalar register pair that holds a lane mask."""
    operand = parse_operand(text, inst, program)
    if operand.kind != "s" or operand.count != 2 or operand.index & 1:
        raise unknown(inst, program, f"lane mask {text!r}")
    return operand.index >> 1


def _bind_compare(inst: Instruction, program: Program) -> Step | None:
    writes_exec = inst.name.startswith("v_cmpx_")
    op = COMPARES.get(inst.name.replace("v_cmpx_", "v_cmp_"))
    if op is None:
        return None
    pair = _mask_pair(inst.operands[0], inst, program)
    first, second = readers(inst, op, program, inst.operands[1:])
    function = op.function

    def step(w: Waves) -> None:
        lanes = function(first(w), second(w))
        if lanes.shape[1] != 64:
            lanes = np.repeat(lanes, 64, axis=1)
        if lanes.shape[0] != w.n:
            lanes = np.repeat(lanes, w.n, axis=0)
        w.set_lanes(pair, lanes)
        if writes_exec:
            w.set_lanes(63, lanes)

    return step


def _bind_select(inst: Instruction, program: Program) -> Step:
    """v_cndmask_b32: the second source where the mask is set, else the first."""
    op = ValuOp("u32", ("u32", "u32"), np.where)
    has_mask = len(inst.operands) == 4
    pair = _mask_pair(inst.operands[3], inst, program) if has_mask else VCC >> 1
    kinds = ValuOp("u32", ("f32", "f32"), np.where) if _has_sign_modifier(inst) else op
    if inst.encoding == "dpp":
        raise unknown(inst, program, "v_cndmask_b32 with DPP")
    r0, r1 = readers(inst, kinds, program, inst.operands[1:3])
    _, write = destination(inst, op, program)
    return lambda w: write(w, np.where(w.lanes(pair), r1(w), r0(w)).view(np.uint32))


def _has_sign_modifier(inst: Instruction) -> bool:
    return any(text.startswith(("-v", "-s", "|", "-|", "neg(", "abs(")) for text in inst.operands[1:3])


def _carry_add(x: Array, y: Array, carry: Array) -> tuple[Array, Array]:
    wide = x.astype(np.uint64) + y + carry
    return wide.astype(np.uint32), wide > 0xFFFFFFFF


def _carry_subtract(x: Array, y: Array, borrow: Array) -> tuple[Array, Array]:
    wide = x.astype(np.int64) - y - borrow
    return wide.astype(np.uint32), wide < 0


# mnemonic: (function, sources swapped?, takes a carry in?)
CARRY = {
    "v_add_co_u32": (_carry_add, False, False), "v_addc_co_u32": (_carry_add, False, True),
    "v_sub_co_u32": (_carry_subtract, False, False), "v_subb_co_u32": (_carry_subtract, False, True),
    "v_subrev_co_u32": (_carry_subtract, True, False), "v_subbrev_co_u32": (_carry_subtract, True, True),
}  # fmt: skip


def _bind_carry(inst: Instruction, program: Program) -> Step:
    function, swapped, takes = CARRY[inst.name]
    op = ValuOp("u32", ("u32", "u32"), function)
    r0, r1 = readers(inst, op, program, inst.operands[2:4])
    if swapped:
        r0, r1 = r1, r0
    _, write = destination(inst, op, program)
    out = _mask_pair(inst.operands[1], inst, program)
    into = _mask_pair(inst.operands[4], inst, program) if takes else 0

    def step(w: Waves) -> None:
        carry = w.lanes(into).astype(np.uint32) if takes else np.zeros((1, 1), np.uint32)
        value, lanes = function(r0(w), r1(w), carry)
        w.set_lanes(out, np.broadcast_to(lanes, (w.n, 64)))
        write(w, value)

    return step


def _bind_mad_64(inst: Instruction, program: Program) -> Step:
    """v_mad_u64_u32 and v_mad_i64_i32: 32 x 32 + 64 bits, with a carry out."""
    signed = "i64" in inst.name
    wide, narrow = ("i64", "i32") if signed else ("u64", "u32")
    dtype = DTYPES[wide]
    op = ValuOp(wide, (narrow, narrow, wide), np.add)
    r0, r1, r2 = readers(inst, op, program, inst.operands[2:5])
    _, write = destination(inst, op, program)
    out = _mask_pair(inst.operands[1], inst, program)

    def step(w: Waves) -> None:
        product = r0(w).astype(dtype) * r1(w).astype(dtype)
        addend = r2(w)
        total = product + addend
        # The carry is bit 64 of the sum: its sign, if it has one.
        carry = total < product if not signed else (total < 0) != ((product ^ total) & (addend ^ total) < 0)
        w.set_lanes(out, np.broadcast_to(carry, (w.n, 64)))
        write(w, total)

    return step


def _bind_div_scale(inst: Instruction, program: Program) -> Step:
    kind = inst.name[-3:]
    op = ValuOp(kind, (kind, kind, kind), arithmetic.div_scale)
    r0, r1, r2 = readers(inst, op, program, inst.operands[2:5])
    _, write = destination(inst, op, program)
    out = _mask_pair(inst.operands[1], inst, program)

    def step(w: Waves) -> None:
        value, lanes = arithmetic.div_scale(r0(w), r1(w), r2(w))
        w.set_lanes(out, np.broadcast_to(lanes, (w.n, 64)))
        write(w, value)

    return step


def _bind_div_fmas(inst: Instruction, program: Program) -> Step:
    kind = inst.name[-3:]
    op = ValuOp(kind, (kind, kind, kind), arithmetic.div_fmas)
    r0, r1, r2 = readers(inst, op, program, inst.operands[1:4])
    _, write = destination(inst, op, program)
    return lambda w: write(w, arithmetic.div_fmas(r0(w), r1(w), r2(w), w.lanes(VCC >> 1)))


def _bind_mask_count(inst: Instruction, program: Program) -> Step:
    """v_mbcnt_lo and v_mbcnt_hi: bits of a mask that belong to lanes below this one, plus an addend."""
    low = inst.name.endswith("lo_u32_b32")
    lane = np.arange(64)
    below = np.where(lane < 32, (1 << np.minimum(lane, 31)) - 1, 0xFFFFFFFF) if low else None
    if below is None:
        below = np.where(lane < 32, 0, (1 << np.maximum(lane - 32, 0)) - 1)
    keep = below.astype(np.uint32)
    op = ValuOp("u32", ("u32", "u32"), np.add)
    r0, r1 = readers(inst, op, program, inst.operands[1:3])
    _, write = destination(inst, op, program)
    return lambda w: write(w, arithmetic.count_bits(r0(w) & keep) + r1(w))


SPECIAL = {
    "v_mad_u64_u32": _bind_mad_64, "v_mad_i64_i32": _bind_mad_64, "v_div_scale_f32": _bind_div_scale,
    "v_div_scale_f64": _bind_div_scale, "v_div_fmas_f32": _bind_div_fmas, "v_div_fmas_f64": _bind_div_fmas,
    "v_mbcnt_lo_u32_b32": _bind_mask_count,
    "v_mbcnt_hi_u32_b32": _bind_mask_count,
}  # fmt: skip

"""Packed instructions (VOP3P): two fp16, 16-bit integers or fp32 in one instruction, and dot products.

Source: "Packed math" and the VOP3P pseudo-code of the CDNA3 and CDNA4 ISA documents. op_sel picks, for each
source, the half that the low result uses; op_sel_hi the half that the high result uses; neg_lo and neg_hi
negate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arithmetic as a
from .operands import (
    DTYPES,
    Reader,
    float_output,
    parse_operand,
    read_raw,
    source,
    unknown,
    write_vector,
)
from .parser import Instruction
from .program import Program, Step
from .state import Array, Waves
from .valu_ops import SATURATING, VALU, ValuOp

# A 16-bit packed operation is the unpacked one, applied to both halves.
_HALF = {
    "v_pk_add_f16": "v_add_f16", "v_pk_mul_f16": "v_mul_f16", "v_pk_fma_f16": "v_fma_f16",
    "v_pk_min_f16": "v_min_f16", "v_pk_max_f16": "v_max_f16", "v_pk_add_u16": "v_add_u16",
    "v_pk_sub_u16": "v_sub_u16", "v_pk_add_i16": "v_add_i16", "v_pk_sub_i16": "v_sub_i16",
    "v_pk_mul_lo_u16": "v_mul_lo_u16", "v_pk_min_u16": "v_min_u16", "v_pk_max_u16": "v_max_u16",
    "v_pk_min_i16": "v_min_i16", "v_pk_max_i16": "v_max_i16", "v_pk_lshlrev_b16": "v_lshlrev_b16",
    "v_pk_lshrrev_b16": "v_lshrrev_b16", "v_pk_ashrrev_i16": "v_ashrrev_i16", "v_pk_mad_u16": "v_mad_u16",
    "v_pk_mad_i16": "v_mad_i16",
}  # fmt: skip
_HALF_OPS: dict[str, ValuOp] = {
    "v_pk_minimum3_f16": ValuOp("f16", ("f16",) * 3, lambda x, y, z: a.minimum(a.minimum(x, y), z)),
    "v_pk_maximum3_f16": ValuOp("f16", ("f16",) * 3, lambda x, y, z: a.maximum(a.maximum(x, y), z)),
    **{name: VALU[plain] for name, plain in _HALF.items()},
}
_WORD_OPS: dict[str, ValuOp] = {
    "v_pk_add_f32": VALU["v_add_f32"], "v_pk_mul_f32": VALU["v_mul_f32"], "v_pk_fma_f32": VALU["v_fma_f32"],
    "v_pk_mov_b32": ValuOp("u32", ("u32", "u32"), None),  # type: ignore[arg-type]
}  # fmt: skip


def _negated(read: Reader, negate: int) -> Reader:
    return (lambda w: np.negative(read(w))) if negate else read


def _pick_half(
    inst: Instruction, position: int, kind: str, high: int, negate: int, program: Program
) -> Reader:
    operand = parse_operand(inst.operands[1 + position], inst, program)
    # An inline float constant fills both halves only through op_sel_hi 0; its high half is zero.
    read = read_raw(operand, kind, high=bool(high))
    if operand.kind == "float" and high:
        zero = np.zeros((1, 1), DTYPES[kind])
        read = lambda w: zero  # noqa: E731
    return _negated(read, negate)


def _bind_half(inst: Instruction, op: ValuOp, program: Program) -> Step:
    count = len(op.sources)
    low_pick, high_pick = inst.bits("op_sel", count, 0), inst.bits("op_sel_hi", count, 1)
    low_neg, high_neg = inst.bits("neg_lo", count, 0), inst.bits("neg_hi", count, 0)
    low = [_pick_half(inst, k, op.sources[k], low_pick[k], low_neg[k], program) for k in range(count)]
    high = [_pick_half(inst, k, op.sources[k], high_pick[k], high_neg[k], program) for k in range(count)]
    target = parse_operand(inst.operands[0], inst, program).index
    function: Any = op.function
    if "clamp" in inst.modifiers and op.result[0] == "f":
        plain = function
        function = lambda *args: float_output(plain(*args), 1.0, True)  # noqa: E731
    elif "clamp" in inst.modifiers:
        function = _saturating(inst, op, program)

    def step(w: Waves) -> None:
        first = np.asarray(function(*(r(w) for r in low))).view(np.uint16)
        second = np.asarray(function(*(r(w) for r in high))).view(np.uint16)
        np.copyto(w.u[target], first | (second.astype(np.uint32) << np.uint32(16)), where=w.exec_mask)

    return step


def _saturating(inst: Instruction, op: ValuOp, program: Program) -> Any:
    wide = SATURATING.get(_HALF.get(inst.name, ""))
    if wide is None:
        raise unknown(inst, program, f"clamp on {inst.name}")
    dtype: Any = DTYPES[op.result]
    info = np.iinfo(dtype)
    return lambda *args: np.clip(wide(*(x.astype(np.int64) for x in args)), info.min, info.max).astype(dtype)


def _pick_word(
    inst: Instruction, position: int, kind: str, high: int, negate: int, program: Program
) -> Reader:
    operand = parse_operand(inst.operands[1 + position], inst, program)
    if operand.kind in "vs" and high:
        if operand.count != 2:
            raise unknown(inst, program, f"high word of {inst.operands[1 + position]!r}")
        operand = type(operand)(operand.kind, operand.index + 1)
    return _negated(read_raw(operand, kind), negate)


def _bind_word(inst: Instruction, op: ValuOp, program: Program) -> Step:
    count = len(op.sources)
    low_pick, high_pick = inst.bits("op_sel", count, 0), inst.bits("op_sel_hi", count, 1)
    low_neg, high_neg = inst.bits("neg_lo", count, 0), inst.bits("neg_hi", count, 0)
    target = parse_operand(inst.operands[0], inst, program).index
    write_low, write_high = write_vector(target, op.result), write_vector(target + 1, op.result)
    if inst.name == "v_pk_mov_b32":  # low result from the first source, high result from the second
        first = _pick_word(inst, 0, "u32", low_pick[0], 0, program)
        second = _pick_word(inst, 1, "u32", low_pick[1], 0, program)

        def move(w: Waves) -> None:
            x, y = first(w).copy(), second(w).copy()
            write_low(w, x)
            write_high(w, y)

        return move
    low = [_pick_word(inst, k, op.sources[k], low_pick[k], low_neg[k], program) for k in range(count)]
    high = [_pick_word(inst, k, op.sources[k], high_pick[k], high_neg[k], program) for k in range(count)]
    function, clamp = op.function, "clamp" in inst.modifiers

    def step(w: Waves) -> None:
        x = function(*(r(w) for r in low))
        y = function(*(r(w) for r in high))
        if clamp:
            x, y = float_output(x, 1.0, True), float_output(y, 1.0, True)
        write_low(w, x)
        write_high(w, y)

    return step


def _mix_reader(inst: Instruction, position: int, program: Program) -> Reader:
    """A source of v_fma_mix: fp32, or the fp16 half that op_sel names when op_sel_hi is set."""
    half = inst.bits("op_sel_hi", 3, 0)[position]
    high = inst.bits("op_sel", 3, 0)[position]
    operand = parse_operand(inst.operands[1 + position], inst, program)
    kind = "f16" if half else "f32"
    read = read_raw(operand, kind, high=bool(high and half))
    if operand.absolute or inst.bits("neg_hi", 3, 0)[position]:
        plain = read
        read = lambda w: np.abs(plain(w))  # noqa: E731
    negate = operand.negate or bool(inst.bits("neg_lo", 3, 0)[position])
    wide: Reader = lambda w: read(w).astype(np.float32)  # noqa: E731
    return _negated(wide, negate)


def _bind_mix(inst: Instruction, program: Program) -> Step:
    r0, r1, r2 = (_mix_reader(inst, k, program) for k in range(3))
    target = parse_operand(inst.operands[0], inst, program).index
    clamp = "clamp" in inst.modifiers
    write = write_vector(target, "f32")

    def compute(w: Waves) -> Array:
        return float_output(a.fma(r0(w), r1(w), r2(w)), 1.0, clamp)

    if inst.name == "v_fma_mix_f32":
        return lambda w: write(w, compute(w))
    shift = np.uint32(16 if "mixhi" in inst.name else 0)
    keep = np.uint32(0x0000FFFF if "mixhi" in inst.name else 0xFFFF0000)

    def half(w: Waves) -> None:
        bits = compute(w).astype(np.float16).view(np.uint16).astype(np.uint32) << shift
        np.copyto(w.u[target], bits | (w.u[target] & keep), where=w.exec_mask)

    return half


def _bytes(words: Array, dtype: type[np.generic]) -> Array:
    return np.ascontiguousarray(words).view(dtype).reshape(*words.shape, -1)


def _bind_dot(inst: Instruction, program: Program) -> Step:
    """v_dot*: sums of products of the parts of two words, plus an addend."""
    element, addend = _DOT[inst.name]
    accumulates = inst.name.startswith(("v_dot2c", "v_dot4c", "v_dot8c"))
    r0, r1 = (read_raw(parse_operand(inst.operands[k], inst, program), "u32") for k in (1, 2))
    r2 = source(inst, 0 if accumulates else 3, addend, program)
    target = parse_operand(inst.operands[0], inst, program).index
    write = write_vector(target, addend)
    wide = np.float64 if addend == "f32" else np.int64

    def parts(words: Array) -> Array:
        if element == "b16":
            return (_bytes(words, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(wide)
        return _bytes(words, DTYPES[element] if element != "i8" else np.int8).astype(wide)

    def step(w: Waves) -> None:
        total = (parts(r0(w)) * parts(r1(w))).sum(axis=-1) + r2(w).astype(wide)
        write(w, total.astype(DTYPES[addend]))

    return step


_DOT = {
    "v_dot2_f32_f16": ("f16", "f32"), "v_dot2c_f32_f16": ("f16", "f32"), "v_dot2_f32_bf16": ("b16", "f32"),
    "v_dot2c_f32_bf16": ("b16", "f32"), "v_dot2_i32_i16": ("i16", "i32"), "v_dot2_u32_u16": ("u16", "u32"),
    "v_dot2c_i32_i16": ("i16", "i32"), "v_dot4_i32_i8": ("i8", "i32"), "v_dot4_u32_u8": ("u8", "u32"),
    "v_dot4c_i32_i8": ("i8", "i32"),
}  # fmt: skip


def bind_packed(inst: Instruction, program: Program) -> Step | None:
    """The step of a packed instruction, or None if it is not one."""
    if inst.name in _HALF_OPS:
        return _bind_half(inst, _HALF_OPS[inst.name], program)
    if inst.name in _WORD_OPS:
        return _bind_word(inst, _WORD_OPS[inst.name], program)
    if inst.name in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        return _bind_mix(inst, program)
    if inst.name in _DOT:
        if any(inst.bits("op_sel", 3, 0)) or not all(inst.bits("op_sel_hi", 3, 1)):
            raise unknown(inst, program, "op_sel on a dot product")
        return _bind_dot(inst, program)
    return None

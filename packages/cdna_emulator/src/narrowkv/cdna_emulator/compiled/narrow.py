"""Conversions of narrow formats and packed instructions as operations."""

from __future__ import annotations

import re

import numpy as np

from narrowkv.cdna_emulator import formats
from narrowkv.cdna_emulator.operands import constant_bits
from narrowkv.cdna_emulator.packed import _DOT, _HALF, _HALF_OPS, _WORD_OPS
from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.state import Array
from narrowkv.cdna_emulator.valu_ops import ValuOp

from .operations import Code, UntranslatableError
from .vector import SAME, emit_rows

# Mirrors struct Format of c/number.h.
FORMAT = np.dtype(
    [
        (name, "i4")
        for name in ("mantissa_bits", "bias", "sign_bit", "max_code", "nan", "beyond", "specials", "pad")
    ]
    + [("decode_factor", "f4")]
)
_SPECIALS = ("fn", "ieee", "fnuz", "finite")
_DECODE_PAIR = re.compile(r"^v_cvt(_scalef32)?_pk_(f32|f16|bf16)_(fp8|bf8|fp4)$")
_DECODE_ONE = re.compile(r"^v_cvt(_scalef32)?_(f32|f16)_(fp8|bf8)$")
_ENCODE_PAIR = re.compile(r"^v_cvt(_scalef32)?_pk_(fp8|bf8|fp4)_(f32|f16|bf16)$")
_PACKS = {
    "v_cvt_pk_bf16_f32": "f32",
    "v_cvt_pk_f16_f32": "f32",
    "v_cvt_pkrtz_f16_f32": "f32",
    "v_cvt_pk_u16_u32": "u32",
    "v_cvt_pk_i16_i32": "i32",
    "v_cvt_pknorm_i16_f32": "f32",
    "v_cvt_pknorm_u16_f32": "f32",
    "v_pack_b32_f16": "u16",
}


def format_of(fmt: formats.SmallFloat) -> Array:
    """A format as the engine's C code takes it."""
    top = fmt.max_code
    nan = {"fn": fmt.sign_bit - 1, "ieee": fmt.sign_bit - 1, "fnuz": fmt.sign_bit, "finite": top}[
        fmt.specials
    ]
    beyond = {"ieee": top + 1, "finite": top}.get(fmt.specials, nan)
    numbers = (fmt.mantissa_bits, fmt.bias, fmt.sign_bit, top, nan, beyond, _SPECIALS.index(fmt.specials), 0)
    return np.array([(*numbers, 2.0 ** (127 - fmt.bias))], FORMAT)


def small_float(name: str, target: str) -> formats.SmallFloat:
    """The format that a target's instructions call by a name."""
    return {
        "fp8": formats.fp8(target),
        "bf8": formats.bf8(target),
        "fp4": formats.E2M1,
        "fp6": formats.E2M3,
        "bf6": formats.E3M2,
    }[name]


def translate_narrow(code: Code, inst: Instruction) -> bool:
    """Translate a conversion or a packed instruction; False if it is none."""
    name = inst.name
    if _DECODE_PAIR.match(name):
        _decode_pair(code, inst)
    elif _DECODE_ONE.match(name):
        _decode_one(code, inst)
    elif _ENCODE_PAIR.match(name):
        _encode_pair(code, inst)
    elif name == "v_cvt_f16_f32":
        _f16_f32(code, inst)
    elif name == "v_cvt_f32_bf16":
        select = inst.modifiers.get("src0_sel", "DWORD") if inst.encoding == "sdwa" else "DWORD"
        code.emit(name, code.operand(inst, 0).index, code.selected(code.operand(inst, 1), "b16", select))
    elif name in _PACKS:
        _pack(code, inst)
    elif name in ("v_ashr_pk_i8_i32", "v_ashr_pk_u8_i32"):
        _shift_pack(code, inst)
    elif name in _HALF_OPS:
        _packed_half(code, inst, _HALF_OPS[name])
    elif name in _WORD_OPS:
        _packed_word(code, inst, _WORD_OPS[name])
    elif name in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        _mix(code, inst)
    elif name in _DOT:
        _dot(code, inst)
    else:
        return False
    return True


# ------------------------------------------------------------------ conversions


def _word(code: Code, inst: Instruction) -> int:
    operand = code.operand(inst, 1)
    if inst.encoding == "sdwa":
        return code.selected(operand, "u32", inst.modifiers.get("src0_sel", "DWORD"))
    return code.raw(operand, "u32")


def _scale(code: Code, inst: Instruction, position: int) -> int | None:
    """The row with the scale of a conversion, of which the exponent counts; None if it is one."""
    if "scalef32" not in inst.name:
        return None
    operand = code.operand(inst, position)
    if operand.is_constant and constant_bits(operand, "u32") >> 23 & 255 == 127:
        return None
    return code.source(inst, position, "u32")


def _decode_pair(code: Code, inst: Instruction) -> None:
    wide, narrow = inst.name.rsplit("_", 2)[-2:]
    pick = inst.bits("op_sel", 4, 0)
    row = _word(code, inst)
    byte = 0 if inst.encoding == "sdwa" else pick[0] + 2 * pick[1] if narrow == "fp4" else 2 * pick[0]
    scale = _scale(code, inst, 2)
    code.emit(
        f"decode_pair_{wide}",
        code.operand(inst, 0).index,
        row,
        scale or 0,
        x=8 * byte,
        y=8 * byte + (4 if narrow == "fp4" else 8),
        z=int(scale is not None),
        p=format_of(small_float(narrow, code.program.target)),
    )


def _decode_one(code: Code, inst: Instruction) -> None:
    wide, narrow = inst.name.rsplit("_", 2)[-2:]
    pick = inst.bits("op_sel", 4, 0)
    row = _word(code, inst)
    byte = 0 if inst.encoding == "sdwa" else pick[0] + 2 * pick[1]
    scale = _scale(code, inst, 2)
    target = code.operand(inst, 0).index
    result = code.temporary() if wide == "f16" else target
    code.emit(
        f"decode_one_{wide}",
        result,
        row,
        scale or 0,
        x=8 * byte,
        y=8 * byte,
        z=int(scale is not None),
        p=format_of(small_float(narrow, code.program.target)),
    )
    if wide == "f16":
        code.insert(target, result, f"WORD_{pick[2]}", "UNUSED_PRESERVE")


def _encode_pair(code: Code, inst: Instruction) -> None:
    narrow, wide = inst.name.rsplit("_", 2)[-2:]
    if wide == "f32":
        pair = [code.source(inst, position, "f32") for position in (1, 2)]
    else:
        pair = []
        for high in (False, True):
            kind, row = "b16" if wide == "bf16" else "f16", code.temporary()
            half = code.raw(code.operand(inst, 1), kind, high=high)
            code.emit("bfloat_as_float" if wide == "bf16" else "half_as_float", row, half)
            pair.append(row)
    scale = _scale(code, inst, len(pair) + 1 if wide == "f32" else 2)
    pick = inst.bits("op_sel", 5, 0)
    row = code.temporary()
    code.emit(
        "encode_pair",
        row,
        pair[0],
        pair[1],
        scale or 0,
        y=4 if narrow == "fp4" else 8,
        z=int(scale is not None),
        p=format_of(small_float(narrow, code.program.target)),
    )
    where = f"BYTE_{pick[2] + 2 * pick[3]}" if narrow == "fp4" else f"WORD_{pick[len(inst.operands) - 1]}"
    code.insert(code.operand(inst, 0).index, row, where, "UNUSED_PRESERVE")


def _f16_f32(code: Code, inst: Instruction) -> None:
    operand = code.operand(inst, 1)
    select = inst.modifiers.get("src0_sel", "DWORD") if inst.encoding == "sdwa" else "DWORD"
    row = code.modified(code.selected(operand, "f32", select), operand, "f32")
    target = code.operand(inst, 0).index
    where, unused = "DWORD", "UNUSED_PAD"
    if inst.encoding == "sdwa":
        where, unused = inst.modifiers.get("dst_sel", "DWORD"), inst.modifiers.get("dst_unused", unused)
    elif "op_sel" in inst.modifiers:
        where, unused = f"WORD_{inst.bits('op_sel', 2, 0)[1]}", "UNUSED_PRESERVE"
    result = target if where == "DWORD" else code.temporary()
    code.emit(inst.name, result, row)
    if where != "DWORD":
        code.insert(target, result, where, unused)


def _pack(code: Code, inst: Instruction) -> None:
    kind = _PACKS[inst.name]
    pick = inst.bits("op_sel", 3, 0)
    rows = []
    for position in (0, 1):
        operand = code.operand(inst, 1 + position)
        row = code.raw(operand, kind, high=bool(pick[position]) and not operand.is_constant)
        rows.append(code.modified(row, operand, kind))
    emit_rows(code, inst.name, code.operand(inst, 0).index, rows)


def _shift_pack(code: Code, inst: Instruction) -> None:
    rows = [code.source(inst, 1, "i32"), code.source(inst, 2, "i32"), code.source(inst, 3, "u32")]
    row = code.temporary()
    emit_rows(code, inst.name, row, rows)
    where = f"WORD_{inst.bits('op_sel', 4, 0)[3]}"
    code.insert(code.operand(inst, 0).index, row, where, "UNUSED_PRESERVE")


# ------------------------------------------------------------------ packed


def _packed_source(
    code: Code, inst: Instruction, position: int, kind: str, picks: tuple[int, int], negates: tuple[int, int]
) -> int:
    """The row with the two halves of a source of a packed 16-bit instruction."""
    operand = code.operand(inst, 1 + position)
    if operand.is_constant:
        bits = constant_bits(operand, kind)
        low, high = (0 if pick and operand.kind == "float" else bits >> 16 * pick & 0xFFFF for pick in picks)
        row = code.constant(low | high << 16)
    else:
        row = code.raw(operand, "u32")
        if picks != (0, 1):
            joined = code.temporary()
            code.emit("join_halves", joined, row, row, x=16 * picks[0], y=16 * picks[1])
            row = joined
    if any(negates):
        if kind != "f16":
            raise UntranslatableError("negation of packed integers")
        row = code.changed(row, "f32", "flip_bits", 0x8000 * negates[0] | 0x80000000 * negates[1])
    return row


def _packed_half(code: Code, inst: Instruction, op: ValuOp) -> None:
    count = len(op.sources)
    fields = [
        inst.bits(name, count, default)
        for name, default in (("op_sel", 0), ("op_sel_hi", 1), ("neg_lo", 0), ("neg_hi", 0))
    ]
    rows = [
        _packed_source(
            code, inst, k, op.sources[k], (fields[0][k], fields[1][k]), (fields[2][k], fields[3][k])
        )
        for k in range(count)
    ]
    plain = _HALF.get(inst.name, "v_" + inst.name.removeprefix("v_pk_"))
    clamp, target = "clamp" in inst.modifiers, code.operand(inst, 0).index
    if clamp and op.result[0] != "f":
        emit_rows(code, f"pk_{plain}_clamp", target, rows)
        return
    result = code.temporary() if clamp else target
    emit_rows(code, f"pk_{SAME.get(plain, plain)}", result, rows)
    if clamp:
        code.emit("pk_clamp_f16", target, result)


def _packed_word(code: Code, inst: Instruction, op: ValuOp) -> None:
    count, target = len(op.sources), code.operand(inst, 0).index
    clamp, is_move = "clamp" in inst.modifiers, inst.name == "v_pk_mov_b32"
    low, high = inst.bits("op_sel", count, 0), inst.bits("op_sel_hi", count, 1)
    negates = inst.bits("neg_lo", count, 0), inst.bits("neg_hi", count, 0)

    def word(position: int, pick: int, negate: int) -> int:
        operand = code.operand(inst, 1 + position)
        if operand.kind in ("v", "s") and pick:
            operand = type(operand)(operand.kind, operand.index + 1)
        row = code.raw(operand, op.sources[position])
        return code.negated(row, op.sources[position]) if negate else row

    name = "v_mov_b32" if is_move else "v_" + inst.name.removeprefix("v_pk_")
    if is_move:
        halves = [[word(0, low[0], 0)], [word(1, low[1], 0)]]
    else:
        halves = [
            [word(k, pick[k], negate[k]) for k in range(count)]
            for pick, negate in zip((low, high), negates, strict=True)
        ]
    direct = target not in halves[1] and not clamp
    results = [target, target + 1] if direct else [code.temporary(), code.temporary()]
    for result, rows in zip(results, halves, strict=True):
        emit_rows(code, name, result, rows)
    if not direct:
        for k, result in enumerate(results):
            code.emit("clamp_f32" if clamp else "v_mov_b32", target + k, result)


def _mix(code: Code, inst: Instruction) -> None:
    rows = []
    for k in range(3):
        operand, half = code.operand(inst, 1 + k), inst.bits("op_sel_hi", 3, 0)[k]
        row = code.raw(operand, "f16" if half else "f32", high=bool(half and inst.bits("op_sel", 3, 0)[k]))
        if half:
            wide = code.temporary()
            code.emit("half_as_float", wide, row)
            row = wide
        if operand.absolute or inst.bits("neg_hi", 3, 0)[k]:
            row = code.changed(row, "f32", "keep_bits", 0x7FFFFFFF)
        if operand.negate or inst.bits("neg_lo", 3, 0)[k]:
            row = code.negated(row, "f32")
        rows.append(row)
    target, is_plain = code.operand(inst, 0).index, inst.name == "v_fma_mix_f32"
    steps = [
        "v_fma_f32",
        *(["clamp_f32"] if "clamp" in inst.modifiers else []),
        *([] if is_plain else [inst.name]),
    ]
    for number, name in enumerate(steps):
        result = target if number == len(steps) - 1 else code.temporary()
        emit_rows(code, name, result, rows)
        rows = [result]


def _dot(code: Code, inst: Instruction) -> None:
    addend = _DOT[inst.name][1]
    accumulates = inst.name.startswith(("v_dot2c", "v_dot4c", "v_dot8c"))
    rows = [code.raw(code.operand(inst, k), "u32") for k in (1, 2)]
    rows.append(code.source(inst, 0 if accumulates else 3, addend))
    emit_rows(code, re.sub(r"^(v_dot\d)c", r"\1", inst.name), code.operand(inst, 0).index, rows)

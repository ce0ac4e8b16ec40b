"""Vector ALU instructions as operations: VOP1, VOP2, VOP3, VOPC with SDWA and DPP, and moves across lanes."""

from __future__ import annotations

import numpy as np

from narrowkv.cdna_emulator.lanes import CROSS_LANE, dpp_source_lanes
from narrowkv.cdna_emulator.operands import DTYPES, Operand, constant_bits, output_modifier
from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.state import EXEC, LANES, VCC
from narrowkv.cdna_emulator.valu import CARRY
from narrowkv.cdna_emulator.valu_ops import ACCUMULATING, COMPARES, LITERAL_FMA, VALU, ValuOp

from .operations import Code, UntranslatableError

# Instructions that do what another one does.
SAME = {
    "v_accvgpr_read_b32": "v_mov_b32",
    "v_accvgpr_write_b32": "v_mov_b32",
    "v_accvgpr_mov_b32": "v_mov_b32",
    "v_add_i32": "v_add_u32",
    "v_sub_i32": "v_sub_u32",
    "v_rcp_iflag_f32": "v_rcp_f32",
    "v_add_i16": "v_add_u16",
    "v_sub_i16": "v_sub_u16",
    "v_mad_i16": "v_mad_u16",
}


def translate_vector(code: Code, inst: Instruction) -> bool:
    """Translate a vector ALU instruction; False if it is not one."""
    name = inst.name
    if name in CROSS_LANE:
        _cross_lane(code, inst)
    elif name == "v_bitop3_b32" or name == "v_bitop3_b16":
        _bitop3(code, inst)
    elif name in CARRY:
        _carry(code, inst)
    elif name.startswith("v_cmp"):
        _compare(code, inst)
    elif name == "v_cndmask_b32":
        _select(code, inst)
    elif name in _SPECIAL:
        _SPECIAL[name](code, inst)
    else:
        base = ACCUMULATING.get(name) or LITERAL_FMA.get(name) or name
        if base not in VALU:
            return False
        _plain(code, inst, base, VALU[base])
    return True


def sources(code: Code, inst: Instruction, op: ValuOp, texts: range | list[int]) -> list[int]:
    """Rows of the sources at some positions, with SDWA selection, op_sel and modifiers."""
    pick = inst.bits("op_sel", len(texts) + 1, 0)
    rows = []
    for k, (position, kind) in enumerate(zip(texts, op.sources, strict=True)):
        operand = code.operand(inst, position)
        if inst.encoding == "sdwa":
            row = code.selected(operand, kind, inst.modifiers.get(f"src{k}_sel", "DWORD"))
        else:
            row = code.raw(operand, kind, high=bool(pick[k]) and not operand.is_constant)
        rows.append(code.modified(row, operand, kind))
    return rows


def emit_rows(code: Code, name: str, target: int, rows: list[int], **fields: int) -> None:
    """Append an operation on up to three source rows."""
    code.emit(name, target, **dict(zip("abc", rows, strict=False)), **fields)


def _destination(code: Code, inst: Instruction, op: ValuOp) -> tuple[int, tuple[str, str] | None]:
    """The register of the result, and the part of it that is written if it is not all of it."""
    operand = code.operand(inst, 0)
    if inst.encoding == "sdwa":
        where = inst.modifiers.get("dst_sel", "DWORD")
        return operand.index, None if where == "DWORD" else (
            where,
            inst.modifiers.get("dst_unused", "UNUSED_PAD"),
        )
    if DTYPES[op.result]().itemsize == 2 and "op_sel" in inst.modifiers:
        high = inst.bits("op_sel", len(op.sources) + 1, 0)[-1]
        return operand.index, ("WORD_1" if high else "WORD_0", "UNUSED_PRESERVE")
    return operand.index, None


def _plain(code: Code, inst: Instruction, base: str, op: ValuOp) -> None:
    texts = [*range(1, len(inst.operands)), *([0] if inst.name in ACCUMULATING else [])]
    name = SAME.get(base, base)
    clamp, factor = "clamp" in inst.modifiers, output_modifier(inst)
    is_float = op.result[0] == "f"
    if clamp and not is_float:
        name = f"{inst.name}_clamp"
    words = 2 if DTYPES[op.result]().itemsize == 8 else 1
    outputs = [f"omod_{op.result}"] * (factor != 1) + [f"clamp_{op.result}"] * (clamp and is_float)
    plan = None
    if inst.encoding == "dpp":
        plan = _dpp_plan(inst)
        rows = _dpp_sources(code, inst, op, texts, plan)
        target, part = code.operand(inst, 0).index, None
    else:
        rows = sources(code, inst, op, texts)
        target, part = _destination(code, inst, op)
    if base == "v_perm_b32" and code.operand(inst, 3).kind != "v" and plan is None:
        selector = code.scalar(code.operand(inst, 3), "u32")
        code.emit_scalar("v_perm_b32_scalar", 64 * target, 64 * rows[0], 64 * rows[1], selector)
        return
    result = target if part is None and plan is None and not outputs else code.temporary(words)
    emit_rows(code, name, result, rows)
    for number, modifier in enumerate(outputs):
        to = target if part is None and plan is None and number == len(outputs) - 1 else result
        code.emit(modifier, to, result, _factor(code, op.result, factor))
        result = to
    if plan is not None:
        code.emit("dpp_write", target, result, x=int("bound_ctrl" in inst.modifiers), p=plan)
    elif part is not None:
        code.insert(target, result, *part)


def _factor(code: Code, kind: str, factor: float) -> int:
    """The row with the factor of an output modifier."""
    return code.constant(constant_bits(Operand("float", value=factor), kind), 2 if kind == "f64" else 1)


# ------------------------------------------------------------------ DPP


def _dpp_plan(inst: Instruction) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """For each lane: the lane it reads, whether there is one, whether its row and bank are enabled."""
    control = dpp_source_lanes(inst.modifiers)
    if control is None:
        raise UntranslatableError("DPP control")
    lane = np.arange(LANES)
    rows = (inst.integer("row_mask", 15) >> (lane >> 4)) & 1
    banks = (inst.integer("bank_mask", 15) >> ((lane >> 2) & 3)) & 1
    return np.concatenate([control[0], control[1], rows & banks]).astype(np.uint8)


def _dpp_sources(code: Code, inst: Instruction, op: ValuOp, texts: list[int], plan: object) -> list[int]:
    rows: list[int] = []
    for position, kind in zip(texts, op.sources, strict=True):
        operand = code.operand(inst, position)
        row = code.raw(operand, kind)
        if not rows:
            words = 2 if DTYPES[kind]().itemsize == 8 else 1
            moved = code.temporary(words)
            for word in range(words):
                code.emit("dpp_read", moved + word, row + word, p=plan)
            row = moved
        rows.append(code.modified(row, operand, kind))
    return rows


# ------------------------------------------------------------------ lane masks


def _mask(code: Code, inst: Instruction, position: int) -> int:
    operand = code.operand(inst, position)
    if operand.kind != "s":
        raise UntranslatableError(f"lane mask {inst.operands[position]!r}")
    return operand.index


def _compare(code: Code, inst: Instruction) -> None:
    name = inst.name.replace("v_cmpx_", "v_cmp_")
    if name not in COMPARES:
        raise UntranslatableError(inst.name)
    pair = _mask(code, inst, 0)
    a, b = sources(code, inst, COMPARES[name], [1, 2])
    code.emit_scalar(name, pair, 64 * a, 64 * b)
    code.scalar_written(pair, 2)
    if inst.name != name and pair != EXEC:
        code.emit_scalar("s_mov_b64", EXEC, pair, pair)
        code.scalar_written(EXEC, 2)


def _select(code: Code, inst: Instruction) -> None:
    if inst.encoding == "dpp":
        raise UntranslatableError("v_cndmask_b32 with DPP")
    signs = any(text.startswith(("-v", "-s", "|", "-|", "neg(", "abs(")) for text in inst.operands[1:3])
    kind = "f32" if signs else "u32"
    a, b = sources(code, inst, ValuOp("u32", (kind, kind), np.where), [1, 2])
    pair = _mask(code, inst, 3) if len(inst.operands) == 4 else VCC
    target, part = _destination(code, inst, ValuOp("u32", (kind, kind), np.where))
    result = target if part is None else code.temporary()
    code.emit_scalar("v_cndmask_b32", 64 * result, 64 * a, 64 * b, pair)
    if part is not None:
        code.insert(target, result, *part)


_TWO_WORDS = ValuOp("u32", ("u32", "u32"), np.add)


def _carry(code: Code, inst: Instruction) -> None:
    _, swapped, takes = CARRY[inst.name]
    a, b = sources(code, inst, _TWO_WORDS, [2, 3])
    if swapped:
        a, b = b, a
    into = _mask(code, inst, 4) if takes else -1
    target, part = _destination(code, inst, _TWO_WORDS)
    result = target if part is None else code.temporary()
    out = _mask(code, inst, 1)
    code.emit_scalar("v_addc", 64 * result, 64 * a, 64 * b, into, x=int("sub" in inst.name), y=out)
    if part is not None:
        code.insert(target, result, *part)


# ------------------------------------------------------------------ others


def _mad_64(code: Code, inst: Instruction) -> None:
    kinds = ("i32", "i32", "i64") if "i64" in inst.name else ("u32", "u32", "u64")
    rows = sources(code, inst, ValuOp(kinds[2], kinds, np.add), [2, 3, 4])
    emit_rows(code, inst.name, code.operand(inst, 0).index, rows, y=_mask(code, inst, 1))


def _div_scale(code: Code, inst: Instruction) -> None:
    rows = sources(code, inst, ValuOp("", (inst.name[-3:],) * 3, np.add), [2, 3, 4])
    emit_rows(code, inst.name, code.operand(inst, 0).index, rows, y=_mask(code, inst, 1))


def _div_fmas(code: Code, inst: Instruction) -> None:
    rows = sources(code, inst, ValuOp("", (inst.name[-3:],) * 3, np.add), [1, 2, 3])
    emit_rows(code, inst.name, code.operand(inst, 0).index, rows)


def _mask_count(code: Code, inst: Instruction) -> None:
    """v_mbcnt_lo and v_mbcnt_hi: bits of a mask that belong to lanes below this one, plus an addend."""
    lane = np.arange(LANES)
    first = 0 if inst.name.endswith("lo_u32_b32") else 32
    below = (np.uint64(1) << np.clip(lane - first, 0, 32).astype(np.uint64)) - np.uint64(1)
    keep = code.constant_rows(below.astype(np.uint32)[None])
    a, b = sources(code, inst, _TWO_WORDS, [1, 2])
    kept = code.temporary()
    code.emit("v_and_b32", kept, a, keep)
    code.emit("v_bcnt_u32_b32", code.operand(inst, 0).index, kept, b)


_SPECIAL = {
    "v_mad_u64_u32": _mad_64,
    "v_mad_i64_i32": _mad_64,
    "v_div_scale_f32": _div_scale,
    "v_div_scale_f64": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_div_fmas_f64": _div_fmas,
    "v_mbcnt_lo_u32_b32": _mask_count,
    "v_mbcnt_hi_u32_b32": _mask_count,
}


def _bitop3(code: Code, inst: Instruction) -> None:
    kind = "u16" if inst.name.endswith("b16") else "u32"
    rows = [code.source(inst, position, kind) for position in (1, 2, 3)]
    target = code.operand(inst, 0).index
    result = code.temporary() if kind == "u16" else target
    emit_rows(code, "v_bitop3_b32", result, rows, x=inst.integer("bitop3"))
    if kind == "u16":
        code.insert(target, result, "WORD_0", "UNUSED_PAD")


def _cross_lane(code: Code, inst: Instruction) -> None:
    name = inst.name
    first = code.operand(inst, 0).index
    second = code.operand(inst, 1)
    if name == "v_readfirstlane_b32":
        code.emit_scalar(name, first, 64 * code.raw(second, "u32"))
        code.scalar_written(first)
    elif name == "v_readlane_b32":
        code.emit_scalar(name, first, 64 * second.index, code.scalar(code.operand(inst, 2), "u32"))
        code.scalar_written(first)
    elif name == "v_writelane_b32":
        lane = code.scalar(code.operand(inst, 2), "u32")
        code.emit_scalar(name, 64 * first, code.scalar(second, "u32"), lane)
    else:  # swaps
        code.emit(name, first, 0, second.index)

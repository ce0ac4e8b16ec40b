"""Scalar instructions as operations."""

from __future__ import annotations

import re

from narrowkv.cdna_emulator.operands import Operand
from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.scalar import NO_EFFECT, SCALAR

from .operations import Code, UntranslatableError

_COMPARE = re.compile(r"^s_cmp(k)?_(eq|lg|gt|ge|lt|le)_([iu](?:32|64))$")
# Instructions with a kind of operand that the tables of `scalar` do not hold: (sources, result).
_OTHER = {
    "s_addc_u32": ("u32 u32", "u32"),
    "s_subb_u32": ("u32 u32", "u32"),
    "s_cselect_b32": ("u32 u32", "u32"),
    "s_cselect_b64": ("u64 u64", "u64"),
    "s_cmov_b32": ("u32", "u32"),
    "s_cmov_b64": ("u64", "u64"),
    "s_bitset0_b32": ("u32", "u32"),
    "s_bitset1_b32": ("u32", "u32"),
    "s_bitset0_b64": ("u32", "u64"),
    "s_bitset1_b64": ("u32", "u64"),
}
_LITERAL = {
    "s_movk_i32": "s_mov_b32",
    "s_addk_i32": "s_add_i32",
    "s_mulk_i32": "s_mul_i32",
    "s_cmovk_i32": "s_cmov_b32",
}


def translate_scalar(code: Code, inst: Instruction) -> bool:
    """Translate a scalar instruction that is no branch; False if it is not one."""
    name = inst.name
    if name in ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol"):
        code.emit_scalar("fence")
    elif name in NO_EFFECT:
        pass
    elif name.startswith("s_load_dword"):
        _load(code, inst)
    elif name in SCALAR or name in _OTHER:
        kinds, result = (
            _OTHER[name] if name in _OTHER else (" ".join(SCALAR[name].sources), SCALAR[name].result)
        )
        given = [code.scalar(code.operand(inst, 1 + k), kind) for k, kind in enumerate(kinds.split())]
        _result(code, inst, name, given, 2 if result.endswith("64") else 1)
    elif _COMPARE.match(name):
        _compare(code, inst)
    elif name.endswith("_saveexec_b64"):
        code.emit_scalar(name, code.operand(inst, 0).index, code.scalar(code.operand(inst, 1), "u64"))
    elif name in _LITERAL:
        _literal(code, inst)
    elif name.startswith("s_bitcmp"):
        kind = "u64" if name.endswith("b64") else "u32"
        given = [code.scalar(code.operand(inst, k), k_kind) for k, k_kind in enumerate((kind, "u32"))]
        code.emit_scalar(name, 0, *given)
    elif name == "s_setreg_imm32_b32":
        _setreg(code, inst)
    else:
        return False
    return True


def _result(code: Code, inst: Instruction, name: str, given: list[int], words: int) -> None:
    target = code.operand(inst, 0).index
    code.emit_scalar(name, target, *given)
    code.scalar_written(target, words)


def _compare(code: Code, inst: Instruction) -> None:
    found = _COMPARE.match(inst.name)
    assert found is not None
    immediate, order, kind = found.groups()
    first, second = code.operand(inst, 0), code.operand(inst, 1)
    if immediate:  # a signed or unsigned 16-bit literal
        value = int(second.value) & 0xFFFF
        second = Operand("int", value=value - 0x10000 if kind[0] == "i" and value & 0x8000 else value)
    code.emit_scalar(f"s_cmp_{order}_{kind}", 0, code.scalar(first, kind), code.scalar(second, kind))


def _literal(code: Code, inst: Instruction) -> None:
    value = int(inst.operands[1], 0) & 0xFFFF
    literal = code.scalar_constant(value - 0x10000 if value & 0x8000 else value)
    target = code.operand(inst, 0).index
    moves = inst.name in ("s_movk_i32", "s_cmovk_i32")
    _result(code, inst, _LITERAL[inst.name], [literal] if moves else [target, literal], 1)


def _setreg(code: Code, inst: Instruction) -> None:
    found = re.match(r"^hwreg\(HW_REG_MODE(?:,\s*(\d+),\s*(\d+))?\)$", inst.operands[0])
    if not found:
        raise UntranslatableError("this write to a hardware register")
    offset, size = int(found.group(1) or 0), int(found.group(2) or 32)
    if offset <= 23 < offset + size:
        code.emit_scalar("set_saturate", x=int(inst.operands[1], 0) >> (23 - offset) & 1)


def _load(code: Code, inst: Instruction) -> None:
    count = int(inst.name.removeprefix("s_load_dword").removeprefix("x") or 1)
    target = code.operand(inst, 0).index
    base, offset = code.scalar(code.operand(inst, 1), "u64"), code.scalar(code.operand(inst, 2), "i32")
    code.emit_scalar("s_load", target, base, offset, x=count, y=inst.integer("offset"))
    code.scalar_written(target, count)

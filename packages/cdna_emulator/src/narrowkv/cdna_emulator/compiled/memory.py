"""Vector memory and LDS instructions as operations."""

from __future__ import annotations

import re

import numpy as np

from narrowkv.cdna_emulator.atomics import ATOMICS, LDS_ATOMICS
from narrowkv.cdna_emulator.lds import _READS, _TRANSPOSES, _TWO, _WRITES, swizzle_lanes
from narrowkv.cdna_emulator.operands import Operand, parse_operand
from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.vmem import WIDTHS

from .operations import Code, UntranslatableError

_NAME = re.compile(r"^(buffer|global|flat|scratch)_(load|store|atomic)_(.+)$")
FILLS = ("zero", "sign", "low", "high", "low_sign", "high_sign")  # mirrors enum Fill of c/access.h
# Mirrors enum Atomic of c/atomic.h.
_KINDS = (
    "add",
    "sub",
    "swap",
    "cmpswap",
    "smin",
    "smax",
    "umin",
    "umax",
    "and",
    "or",
    "xor",
    "inc",
    "dec",
    "add_f",
    "min_f",
    "max_f",
    "pk_add_f16",
    "pk_add_bf16",
)
_LDS_KINDS = {
    "add_u32": "add",
    "sub_u32": "sub",
    "min_i32": "smin",
    "max_i32": "smax",
    "min_u32": "umin",
    "max_u32": "umax",
    "and_b32": "and",
    "or_b32": "or",
    "xor_b32": "xor",
    "inc_u32": "inc",
    "dec_u32": "dec",
    "add_f32": "add_f",
    "min_f32": "min_f",
    "max_f32": "max_f",
    "add_u64": "add",
    "add_f64": "add_f",
    "wrxchg_b32": "swap",
    "wrxchg_b64": "swap",
}


def atomic_kind(what: str) -> int:
    """The number of an atomic of device memory, by the end of its mnemonic."""
    return _KINDS.index(re.sub(r"_f(32|64)$", "_f", what))


def lds_atomic_kind(what: str) -> int:
    """The number of an atomic of LDS, by the end of its mnemonic."""
    return _KINDS.index(_LDS_KINDS[what])


def translate_memory(code: Code, inst: Instruction) -> bool:
    """Translate a vector memory or LDS instruction; False if it is none."""
    if inst.name.startswith("ds_"):
        return _lds(code, inst)
    found = _NAME.match(inst.name)
    if not found:
        return False
    space, action, what = found.groups()
    to_lds = "lds" in inst.modifiers or what.startswith("lds_")
    what = what.removeprefix("lds_")
    if action == "atomic":
        return _atomic(code, inst, space, what)
    if what not in WIDTHS:
        return False
    operands, width = inst.operands, WIDTHS[what]
    if space == "buffer":
        if to_lds and (len(operands) == 3 or "offen" in inst.modifiers):
            data, rest = "off", operands[-3:]
        else:
            data, rest = operands[0], operands[1:4]
        fields = _buffer_fields(code, inst, rest)
    else:
        address_first = action == "store" or to_lds
        data = "off" if to_lds else operands[1 if address_first else 0]
        saddr = operands[-1] if space != "flat" else "off"
        fields = _global_fields(code, inst, operands[0 if address_first else 1], saddr, space == "scratch")
    name = "global" if space == "flat" else space
    if to_lds:
        if space == "scratch":
            return False
        code.emit_scalar(f"{name}_to_lds_{width.size}", 0, **fields)
        return True
    row = parse_operand(data, inst, code.program).index
    extra = FILLS.index(width.fill) if action == "load" else 16 * (width.fill == "high")
    code.emit_scalar(f"{name}_{action}_{width.size}", 64 * row, z=extra, **fields)
    return True


def _buffer_fields(code: Code, inst: Instruction, texts: tuple[str, ...]) -> dict[str, int]:
    vaddr, rsrc, soffset = (parse_operand(text, inst, code.program) for text in texts)
    row = 64 * code.raw(vaddr, "u32") if "offen" in inst.modifiers else -1
    return {"a": row, "b": rsrc.index, "c": code.scalar(soffset, "u32"), "y": inst.integer("offset")}


def _global_fields(code: Code, inst: Instruction, vaddr: str, saddr: str, is_scratch: bool) -> dict[str, int]:
    lanes, base = (parse_operand(text, inst, code.program) for text in (vaddr, saddr))
    offset = inst.integer("offset")
    if is_scratch:
        row = 64 * code.raw(lanes, "u32") if lanes.kind != "none" else -1
        return {"a": row, "b": code.scalar(base, "u32") if base.kind != "none" else -1, "y": offset}
    if base.kind == "s":
        return {"a": 64 * lanes.index if lanes.kind == "v" else -1, "b": base.index, "y": offset}
    return {"a": 64 * lanes.index, "b": -1, "y": offset}


def _atomic(code: Code, inst: Instruction, space: str, what: str) -> bool:
    wide, base = what.endswith("_x2"), what.removesuffix("_x2")
    if base not in ATOMICS or space == "scratch":
        return False
    size = 2 * ATOMICS[base].size if wide else ATOMICS[base].size
    returns = "sc0" in inst.modifiers or "glc" in inst.modifiers
    operands = inst.operands
    if space == "buffer":
        data = result = operands[0]
        fields = _buffer_fields(code, inst, operands[1:4])
    else:
        result = operands[0]
        vaddr, data, *rest = operands[1:] if returns else operands
        fields = _global_fields(code, inst, vaddr, rest[0] if rest else "off", False)
    row, out = (64 * parse_operand(text, inst, code.program).index for text in (data, result))
    name = "buffer" if space == "buffer" else "global"
    code.emit_scalar(
        f"{name}_atomic_{8 * size}", row, x=out if returns else -1, z=atomic_kind(base), **fields
    )
    return True


# ------------------------------------------------------------------ LDS


def _row(code: Code, inst: Instruction, position: int) -> int:
    operand: Operand = code.operand(inst, position)
    if operand.kind != "v":
        raise UntranslatableError(f"operand {inst.operands[position]!r}")
    return operand.index


def _lds(code: Code, inst: Instruction) -> bool:
    name, rows = inst.name, [_row(code, inst, k) for k in range(len(inst.operands))]
    offset = 0 if name == "ds_swizzle_b32" else inst.integer("offset")
    two = _TWO.match(name)
    reads, writes = name.removeprefix("ds_read_"), name.removeprefix("ds_write_")
    if name in ("ds_bpermute_b32", "ds_permute_b32"):
        code.emit(name, rows[0], rows[1], rows[2], x=offset)
    elif name == "ds_swizzle_b32":
        lanes = swizzle_lanes(inst.modifiers.get("offset", "0"))
        if lanes is None:
            raise UntranslatableError("swizzle mode")
        code.emit(name, rows[0], rows[1], p=lanes.astype(np.uint8))
    elif two:
        size = int(two.group(3)) // 8
        unit = size * (64 if two.group(2) else 1)
        offsets = {"x": inst.integer("offset0") * unit, "y": inst.integer("offset1") * unit}
        if two.group(1) == "read":
            code.emit(f"lds_read2_{size}", rows[0], rows[1], **offsets)
        else:
            code.emit(f"lds_write2_{size}", rows[1], rows[0], rows[2], **offsets)
    elif reads in _READS:
        width = _READS[reads]
        code.emit(f"lds_read_{width.size}", rows[0], rows[1], y=offset, z=FILLS.index(width.fill))
    elif reads in _TRANSPOSES:
        code.emit("lds_read_transposed", rows[0], rows[1], x=_TRANSPOSES[reads], y=offset)
    elif writes in _WRITES:
        width = _WRITES[writes]
        code.emit(f"lds_write_{width.size}", rows[1], rows[0], y=offset, z=16 * (width.fill == "high"))
    else:
        return _lds_atomic(code, inst, rows, offset)
    return True


def _lds_atomic(code: Code, inst: Instruction, rows: list[int], offset: int) -> bool:
    name = inst.name.removeprefix("ds_")
    returns = "_rtn_" in name or name.startswith("wrxchg")
    what = name.replace("_rtn_", "_")
    if what not in LDS_ATOMICS:
        return False
    first = 1 if returns else 0
    code.emit(
        f"lds_atomic_{8 * LDS_ATOMICS[what].size}",
        rows[0] if returns else -1,
        rows[first],
        rows[first + 1],
        y=offset,
        z=lds_atomic_kind(what),
    )
    return True

"""Local data share: ds_read, ds_write, their two-address and transposing forms, lane permutes and atomics.

Source: "Data Share Operations" of the CDNA3 and CDNA4 ISA documents (DS_READ_B64_TR_* are CDNA4's).
"""

from __future__ import annotations

import re

import numpy as np

from .atomics import LDS_ATOMICS
from .operands import parse_operand, unknown
from .parser import Instruction
from .program import Program, Step
from .state import LANES, Array, Waves
from .vmem import Width, extend

_READS = {
    "u8": Width(1), "i8": Width(1, "sign"), "u16": Width(2), "i16": Width(2, "sign"), "b32": Width(4),
    "b64": Width(8), "b96": Width(12), "b128": Width(16), "u8_d16": Width(1, "low"), "u8_d16_hi": Width(1,
    "high"),
    "i8_d16": Width(1, "low_sign"), "i8_d16_hi": Width(1, "high_sign"), "u16_d16": Width(2, "low"),
    "u16_d16_hi": Width(2, "high"),
}  # fmt: skip
_WRITES = {
    "b8": Width(1), "b16": Width(2), "b32": Width(4), "b64": Width(8), "b96": Width(12), "b128": Width(16),
    "b8_d16_hi": Width(1, "high"), "b16_d16_hi": Width(2, "high"),
}  # fmt: skip
_TRANSPOSES = {"b64_tr_b16": 16, "b64_tr_b8": 8, "b64_tr_b4": 4}
_TWO = re.compile(r"^ds_(read|write)2(st64)?_b(32|64)$")


def bind_lds(inst: Instruction, program: Program) -> Step | None:
    """The step of a data-share instruction, or None if it is not one that the target has."""
    name = inst.name
    if name == "ds_bpermute_b32":
        return _bind_bpermute(inst, program)
    if name == "ds_permute_b32":
        return _bind_permute(inst, program)
    if name == "ds_swizzle_b32":
        return _bind_swizzle(inst, program)
    if _TWO.match(name):
        return _bind_two(inst, program)
    kind = name.removeprefix("ds_read_")
    if kind in _READS:
        return _bind_read(inst, _READS[kind], program)
    if kind in _TRANSPOSES and program.target == "gfx950":
        return _bind_transpose(inst, _TRANSPOSES[kind], program)
    kind = name.removeprefix("ds_write_")
    if kind in _WRITES:
        return _bind_write(inst, _WRITES[kind], program)
    return _bind_atomic(inst, program)


def _index(inst: Instruction, position: int, program: Program) -> int:
    operand = parse_operand(inst.operands[position], inst, program)
    if operand.kind != "v":
        raise unknown(inst, program, f"operand {inst.operands[position]!r}")
    return operand.index


def _bind_read(inst: Instruction, width: Width, program: Program) -> Step:
    target, address = _index(inst, 0, program), _index(inst, 1, program)
    offset, size, count = inst.integer("offset"), width.size, max(width.size // 4, 1)
    partial = width.fill != "zero"

    def step(w: Waves) -> None:
        words = w.execution.lds_load(w, inst, w.u[address].astype(np.int64) + offset, size)
        if partial:
            words = extend(words, width, w.u[target])
        if w.full:
            w.v[target : target + count] = words
        else:
            np.copyto(w.v[target : target + count], words, where=w.exec_mask)

    return step


def _bind_write(inst: Instruction, width: Width, program: Program) -> Step:
    address, data = _index(inst, 0, program), _index(inst, 1, program)
    offset, size, count = inst.integer("offset"), width.size, max(width.size // 4, 1)
    shift = np.uint32(16 if width.fill == "high" else 0)

    def step(w: Waves) -> None:
        words = w.v[data : data + count]
        w.execution.lds_store(
            w, inst, w.u[address].astype(np.int64) + offset, words >> shift if shift else words, size
        )

    return step


def _bind_two(inst: Instruction, program: Program) -> Step:
    found = _TWO.match(inst.name)
    assert found is not None
    action, far, bits = found.groups()
    size = int(bits) // 8
    unit = size * (64 if far else 1)
    offsets = [inst.integer("offset0") * unit, inst.integer("offset1") * unit]
    count = size // 4
    if action == "read":
        target, address = _index(inst, 0, program), _index(inst, 1, program)

        def read(w: Waves) -> None:
            base = w.u[address].astype(np.int64)
            words = [w.execution.lds_load(w, inst, base + offset, size) for offset in offsets]
            for k, part in enumerate(words):
                np.copyto(w.v[target + k * count : target + (k + 1) * count], part, where=w.exec_mask)

        return read
    address = _index(inst, 0, program)
    data = [_index(inst, 1, program), _index(inst, 2, program)]

    def write(w: Waves) -> None:
        base = w.u[address].astype(np.int64)
        for start, offset in zip(data, offsets, strict=True):
            w.execution.lds_store(w, inst, base + offset, w.v[start : start + count], size)

    return write


def _bind_transpose(inst: Instruction, bits: int, program: Program) -> Step:
    """ds_read_b64_tr: 16 lanes read a matrix with rows of 16 elements; lane i gets column i."""
    target, address = _index(inst, 0, program), _index(inst, 1, program)
    offset, elements = inst.integer("offset"), 64 // bits

    def step(w: Waves) -> None:
        words = w.execution.lds_load(w, inst, w.u[address].astype(np.int64) + offset, 8)
        octets = np.ascontiguousarray(words.transpose(1, 2, 0)).view(np.uint8)  # [n, 64, 8]
        if bits == 4:
            octets = np.stack([octets & np.uint8(15), octets >> np.uint8(4)], axis=-1)
        parts: Array = octets.view(np.uint16) if bits == 16 else octets
        rows = parts.reshape(w.n, 4, elements, 16)
        columns: Array = np.ascontiguousarray(rows.swapaxes(2, 3)).reshape(w.n, LANES, elements)
        if bits == 4:
            columns = columns[..., ::2] | (columns[..., 1::2] << np.uint8(4))
        result = np.ascontiguousarray(columns).view(np.uint32).reshape(w.n, LANES, 2)
        np.copyto(w.v[target : target + 2], result.transpose(2, 0, 1), where=w.exec_mask)

    return step


def _gather_lanes(w: Waves, row: Array, lanes: Array) -> Array:
    """row[lane] for each lane; lanes that are off give 0."""
    picked = np.take_along_axis(row, lanes, axis=1)
    if not w.full:
        picked = np.where(np.take_along_axis(w.exec_mask, lanes, axis=1), picked, np.uint32(0))
    return picked


def _bind_bpermute(inst: Instruction, program: Program) -> Step:
    target, address, data = (_index(inst, k, program) for k in range(3))
    offset = np.uint32(inst.integer("offset"))

    def step(w: Waves) -> None:
        lanes = (((w.u[address] + offset) >> np.uint32(2)) & np.uint32(63)).astype(np.int64)
        np.copyto(w.u[target], _gather_lanes(w, w.u[data], lanes), where=w.exec_mask)

    return step


def _bind_permute(inst: Instruction, program: Program) -> Step:
    target, address, data = (_index(inst, k, program) for k in range(3))
    offset = np.uint32(inst.integer("offset"))

    def step(w: Waves) -> None:
        lanes = (((w.u[address] + offset) >> np.uint32(2)) & np.uint32(63)).astype(np.int64)
        result = np.zeros((w.n, LANES), np.uint32)
        waves, from_lane = np.nonzero(w.exec_mask)
        result[waves, lanes[waves, from_lane]] = w.u[data][waves, from_lane]
        np.copyto(w.u[target], result, where=w.exec_mask)

    return step


def _quads(picks: Array) -> Array:
    """Source lanes when each lane of four reads the lane of its four that ``picks`` names."""
    lane = np.arange(LANES)
    result: Array = (lane & ~3) + picks[lane & 3]
    return result


def swizzle_lanes(text: str) -> Array | None:
    """Source lane of each lane for ds_swizzle_b32's offset, a number or swizzle(...)."""
    lane = np.arange(LANES)
    found = re.fullmatch(r"swizzle\((\w+),(.*)\)", text.replace(" ", ""))
    if not found:
        code = int(text, 0)
        if code & 0x8000:
            picks = np.array([(code >> (2 * k)) & 3 for k in range(4)])
            return _quads(picks)
        keep, fill, flip = code & 31, (code >> 5) & 31, (code >> 10) & 31
        return (lane & 32) + ((((lane & 31) & keep) | fill) ^ flip)
    mode, rest = found.groups()
    if mode == "QUAD_PERM":
        picks = np.array([int(p) for p in rest.split(",")])
        return _quads(picks)
    if mode == "SWAP":
        return lane ^ int(rest)
    if mode == "REVERSE":
        return lane ^ (int(rest) - 1)
    if mode == "BROADCAST":
        size, pick = (int(p) for p in rest.split(","))
        return (lane & ~(size - 1)) + pick
    if mode == "BITMASK_PERM":
        result = lane & 32
        for bit, char in zip((16, 8, 4, 2, 1), rest.strip('"'), strict=True):
            own = lane & bit
            result = result | {"0": 0 * own, "1": 0 * own + bit, "p": own, "i": own ^ bit}[char]
        return result
    return None


def _bind_swizzle(inst: Instruction, program: Program) -> Step:
    lanes = swizzle_lanes(inst.modifiers.get("offset", "0"))
    if lanes is None:
        raise unknown(inst, program, "swizzle mode")
    target, data = _index(inst, 0, program), _index(inst, 1, program)

    def step(w: Waves) -> None:
        picked = _gather_lanes(w, w.u[data], np.broadcast_to(lanes, (w.n, LANES)))
        np.copyto(w.u[target], picked, where=w.exec_mask)

    return step


def _bind_atomic(inst: Instruction, program: Program) -> Step | None:
    name = inst.name.removeprefix("ds_")
    returns = "_rtn_" in name or name.startswith("wrxchg")
    atomic = LDS_ATOMICS.get(name.replace("_rtn_", "_"))
    if atomic is None:
        return None
    address = _index(inst, 1 if returns else 0, program)
    data = _index(inst, 2 if returns else 1, program)
    result = _index(inst, 0, program) if returns else None
    offset, count = inst.integer("offset"), atomic.size // 4

    def step(w: Waves) -> None:
        addresses = w.u[address].astype(np.int64) + offset
        old = w.execution.lds_atomic(w, inst, addresses, w.v[data : data + count], atomic)
        if result is not None:
            np.copyto(w.v[result : result + count], old, where=w.exec_mask)

    return step

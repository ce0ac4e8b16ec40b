"""Vector memory: buffer, global, flat and scratch instructions, loads that go to LDS, and atomics.

Source: "Vector Memory Operations" and "Flat Memory Instructions" of the CDNA3 and CDNA4 ISA documents. A
buffer access whose offset is past the descriptor's num_records reads 0 or stores nothing, as in hardware;
one that passes the descriptor but leaves every mapped buffer is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .atomics import ATOMICS, apply_atomic
from .operands import Operand, Reader, parse_operand, read_raw, unknown
from .parser import Instruction
from .program import Program, Step
from .state import LANES, M0, Array, Waves

_NAME = re.compile(r"^(buffer|global|flat|scratch)_(load|store|atomic)_(.+)$")


class Width(NamedTuple):
    """How many bytes, and how a register is filled: zero, sign, low half kept, high half."""

    size: int
    fill: str = "zero"


WIDTHS = {
    "ubyte": Width(1), "sbyte": Width(1, "sign"), "ushort": Width(2), "sshort": Width(2, "sign"),
    "byte": Width(1), "short": Width(2), "dword": Width(4), "dwordx2": Width(8), "dwordx3": Width(12),
    "dwordx4": Width(16), "short_d16": Width(2, "low"), "short_d16_hi": Width(2, "high"),
    "ubyte_d16": Width(1, "low"), "ubyte_d16_hi": Width(1, "high"), "byte_d16_hi": Width(1, "high"),
    "sbyte_d16": Width(1, "low_sign"), "sbyte_d16_hi": Width(1, "high_sign"),
}  # fmt: skip

# Address of every lane: int64 ``[n, 64]``, and lanes that pass the range check (None: all).
Addressing = Callable[[Waves, int], tuple[Array, Array | None]]


def extend(words: Array, width: Width, old: Array) -> Array:
    """Raw loaded bytes as the register's new contents."""
    fill = width.fill
    if fill.endswith("sign"):
        shift = np.uint32(32 - 8 * width.size)
        words = ((words << shift).view(np.int32) >> shift.astype(np.int32)).view(np.uint32)
    if fill.startswith("low"):
        return (old & np.uint32(0xFFFF0000)) | (words & np.uint32(0xFFFF))
    if fill.startswith("high"):
        return (old & np.uint32(0xFFFF)) | (words << np.uint32(16))
    return words


def _buffer_addressing(inst: Instruction, operands: tuple[str, ...], program: Program) -> Addressing:
    """Base + soffset + voffset + offset, checked against num_records (raw buffers)."""
    if "idxen" in inst.modifiers or "addr64" in inst.modifiers:
        raise unknown(inst, program, "a structured buffer")
    vaddr, rsrc, soffset = (parse_operand(text, inst, program) for text in operands)
    offset = inst.integer("offset")
    lane_offset = read_raw(vaddr, "u32") if "offen" in inst.modifiers else None
    scalar_offset = read_raw(soffset, "u32")
    index = rsrc.index

    def address(w: Waves, size: int) -> tuple[Array, Array | None]:
        base = (w.sq[index >> 1].astype(np.int64) if not index & 1 else _pair(w, index)) & 0xFFFFFFFFFFFF
        within = scalar_offset(w).astype(np.int64) + offset
        if lane_offset is not None:
            within = within + lane_offset(w)
        valid = within <= w.su[index + 2].astype(np.int64) - size
        addresses = base + within
        if addresses.shape != (w.n, LANES):
            addresses = np.broadcast_to(addresses, (w.n, LANES))
            valid = np.broadcast_to(valid, (w.n, LANES))
        return addresses, None if valid.all() else valid

    return address


def _pair(w: Waves, index: int) -> Array:
    return w.su[index].astype(np.int64) | (w.su[index + 1].astype(np.int64) << 32)


def _flat_addressing(inst: Instruction, vaddr: Operand, saddr: Operand, program: Program) -> Addressing:
    """Vaddr (64 bits) + offset, or saddr + vaddr (32 bits) + offset."""
    offset = inst.integer("offset")
    if saddr.kind == "s":
        lane_offset = read_raw(vaddr, "u32") if vaddr.kind == "v" else None
        base = read_raw(saddr, "u64")

        def scalar_base(w: Waves, size: int) -> tuple[Array, Array | None]:
            total = base(w).astype(np.int64) + offset
            if lane_offset is not None:
                total = total + lane_offset(w)
            return np.broadcast_to(total, (w.n, LANES)), None

        return scalar_base
    if vaddr.count != 2:
        raise unknown(inst, program, "an address of 32 bits without a base")
    lanes = read_raw(vaddr, "u64")
    return lambda w, size: (lanes(w).view(np.int64) + offset, None)


def _scratch_addressing(inst: Instruction, vaddr: Operand, saddr: Operand, program: Program) -> Addressing:
    """Private memory: each lane has its own segment."""
    offset = inst.integer("offset")
    parts = [read_raw(o, "u32") for o in (vaddr, saddr) if o.kind != "none"]

    def address(w: Waves, size: int) -> tuple[Array, Array | None]:
        return w.execution.scratch_base(w) + sum(
            (p(w).astype(np.int64) for p in parts), np.int64(offset)
        ), None

    return address


def _active(w: Waves, valid: Array | None) -> Array | None:
    if w.full:
        return valid
    return w.exec_mask if valid is None else valid & w.exec_mask


def bind_vmem(inst: Instruction, program: Program) -> Step | None:
    """The step of a vector memory instruction, or None if it is not one."""
    found = _NAME.match(inst.name)
    if not found:
        return None
    space, action, what = found.groups()
    to_lds = "lds" in inst.modifiers or what.startswith("lds_")
    what = what.removeprefix("lds_")
    if action == "atomic":
        return _bind_atomic(inst, space, what, program)
    if what not in WIDTHS:
        return None
    operands = inst.operands
    if space == "buffer":
        if (to_lds and len(operands) == 3) or ("offen" in inst.modifiers and to_lds):
            data, rest = "off", operands[-3:]
        else:
            data, rest = operands[0], operands[1:4]
        address = _buffer_addressing(inst, rest, program)
    else:
        address_first = action == "store" or to_lds
        vaddr = parse_operand(operands[0 if address_first else 1], inst, program)
        data = "off" if to_lds else operands[1 if address_first else 0]
        saddr = parse_operand(operands[-1], inst, program) if space != "flat" else Operand("none")
        make = _scratch_addressing if space == "scratch" else _flat_addressing
        address = make(inst, vaddr, saddr, program)
    width = WIDTHS[what]
    if to_lds:
        return _bind_load_to_lds(inst, address, width)
    index = parse_operand(data, inst, program).index
    if action == "load":
        return _bind_load(inst, address, width, index)
    return _bind_store(inst, address, width, index)


def _bind_load(inst: Instruction, address: Addressing, width: Width, index: int) -> Step:
    size, count = width.size, max(width.size // 4, 1)
    partial = width.fill != "zero"

    def step(w: Waves) -> None:
        addresses, valid = address(w, size)
        words = w.execution.load(w, inst, addresses, _active(w, valid), size)
        if partial:
            words = extend(words, width, w.u[index])
        if w.full:
            w.v[index : index + count] = words
        else:
            np.copyto(w.v[index : index + count], words, where=w.exec_mask)

    return step


def _bind_store(inst: Instruction, address: Addressing, width: Width, index: int) -> Step:
    size, count = width.size, max(width.size // 4, 1)
    shift = np.uint32(16 if width.fill == "high" else 0)

    def step(w: Waves) -> None:
        addresses, valid = address(w, size)
        words = w.v[index : index + count]
        if shift:
            words = words >> shift
        w.execution.store(w, inst, addresses, _active(w, valid), words, size)

    return step


def _bind_load_to_lds(inst: Instruction, address: Addressing, width: Width) -> Step:
    """Lane i's data goes to LDS at M0 + offset + i * size; lanes that are off write nothing."""
    size, offset = width.size, inst.integer("offset")
    stride = max(size, 4)
    lanes = (np.arange(LANES) * stride)[None, :]

    def step(w: Waves) -> None:
        addresses, valid = address(w, size)
        words = w.execution.load(w, inst, addresses, _active(w, valid), size)
        target = w.su[M0].astype(np.int64) + offset + lanes
        for k in range(len(words)):
            w.execution.lds_store(w, inst, target + 4 * k, words[k], 4)

    return step


def _bind_atomic(inst: Instruction, space: str, what: str, program: Program) -> Step | None:
    wide = what.endswith("_x2")
    atomic = ATOMICS.get(what.removesuffix("_x2"))
    if atomic is None or space == "scratch":
        return None
    if wide:
        atomic = atomic.widened()
    returns = "sc0" in inst.modifiers or "glc" in inst.modifiers
    operands = inst.operands
    if space == "buffer":
        data_text, result_text = operands[0], operands[0]
        address = _buffer_addressing(inst, operands[1:4], program)
    else:
        result_text = operands[0]
        vaddr, data_text, *base = operands[1:] if returns else operands
        saddr = parse_operand(base[0], inst, program) if base else Operand("none")
        address = _flat_addressing(inst, parse_operand(vaddr, inst, program), saddr, program)
    data = parse_operand(data_text, inst, program).index
    result = parse_operand(result_text, inst, program).index if returns else None
    size, count = atomic.size, atomic.size // 4 * (2 if atomic.compares else 1)

    def step(w: Waves) -> None:
        addresses, valid = address(w, size)
        active = _active(w, valid)
        old = w.execution.atomic(w, inst, addresses, active, w.v[data : data + count], atomic)
        if result is not None:
            mask = np.ones((w.n, LANES), bool) if active is None else active
            np.copyto(w.v[result : result + size // 4], old, where=mask)

    return step


__all__ = ["WIDTHS", "Reader", "Width", "apply_atomic", "bind_vmem", "extend"]

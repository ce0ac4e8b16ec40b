"""Conversions to and from narrow formats: fp16, bf16, FP8, BF8, FP4, with and without a block scale.

Source: V_CVT_* in the CDNA3 and CDNA4 ISA documents. FP8 and BF8 are FNUZ on gfx942 and OCP on gfx950. The
scale of V_CVT_SCALEF32_* is an fp32 of which the exponent counts: decoding multiplies by it, encoding
divides by it.
"""

from __future__ import annotations

import re

import numpy as np

from . import formats
from .arithmetic import to_integer
from .lanes import read_sdwa, write_sdwa
from .operands import (
    Reader,
    Writer,
    parse_operand,
    read_raw,
    source,
    unknown,
    with_modifiers,
    write_vector,
)
from .parser import Instruction
from .program import Program, Step
from .state import Array, Waves

U32 = np.uint32


def _narrow(name: str, target: str) -> formats.SmallFloat:
    return {"fp8": formats.fp8(target), "bf8": formats.bf8(target), "fp4": formats.E2M1}[name]


def _wide_writer(index: int, kind: str) -> Writer:
    """Writes a pair: fp32 to two registers, fp16 or bf16 to the halves of one. Values are ``[2, n, 64]``."""
    if kind == "f32":
        low, high = write_vector(index, "f32"), write_vector(index + 1, "f32")

        def write_two(w: Waves, value: Array) -> None:
            low(w, value[0])
            high(w, value[1])

        return write_two
    word = write_vector(index, "u32")

    def write_halves(w: Waves, value: Array) -> None:
        bits = formats.f32_to_bf16(value) if kind == "bf16" else value.astype(np.float16).view(np.uint16)
        word(w, bits[0] | (bits[1].astype(U32) << U32(16)))

    return write_halves


def _scale(read: Reader) -> Reader:
    """The exponent field of an fp32 as an E8M0 scale."""
    return lambda w: formats.e8m0_to_f64((read(w) >> U32(23)) & U32(0xFF))


def _bytes_of(word: Array, byte: int) -> Array:
    return (word >> U32(8 * byte)).astype(np.uint8)


def _bind_decode_pair(inst: Instruction, program: Program) -> Step:
    """v_cvt_pk_f32_fp8 and v_cvt_scalef32_pk_{f32,f16,bf16}_{fp8,bf8,fp4}."""
    wide, narrow = inst.name.rsplit("_", 2)[-2:]
    fmt = _narrow(narrow, program.target)
    operand = parse_operand(inst.operands[1], inst, program)
    table = fmt.decode_table
    pick = inst.bits("op_sel", 4, 0)
    write = _wide_writer(parse_operand(inst.operands[0], inst, program).index, wide)
    scale = _scale(source(inst, 2, "u32", program)) if "scalef32" in inst.name else None
    if inst.encoding == "sdwa":
        word = read_sdwa(operand, "u32", inst.modifiers.get("src0_sel", "DWORD"))
        byte = 0
    else:
        word = read_raw(operand, "u32")
        byte = 2 * pick[0] if narrow != "fp4" else pick[0] + 2 * pick[1]

    def step(w: Waves) -> None:
        bits = word(w)
        if narrow == "fp4":
            octet = _bytes_of(bits, byte)
            codes = np.stack([octet & np.uint8(15), octet >> np.uint8(4)])
        else:
            codes = np.stack([_bytes_of(bits, byte), _bytes_of(bits, byte + 1)])
        value = table[codes]
        if scale is not None:
            value = (value * scale(w)).astype(np.float32)
        write(w, value)

    return step


def _bind_decode_one(inst: Instruction, program: Program) -> Step:
    """v_cvt_f32_fp8 and v_cvt_scalef32_{f32,f16}_{fp8,bf8}: one byte."""
    wide, narrow = inst.name.rsplit("_", 2)[-2:]
    table = _narrow(narrow, program.target).decode_table
    operand = parse_operand(inst.operands[1], inst, program)
    pick = inst.bits("op_sel", 4, 0)
    scale = _scale(source(inst, 2, "u32", program)) if "scalef32" in inst.name else None
    byte = pick[0] + 2 * pick[1]
    word = read_raw(operand, "u32")
    if inst.encoding == "sdwa":
        word, byte = read_sdwa(operand, "u32", inst.modifiers.get("src0_sel", "DWORD")), 0
    index = parse_operand(inst.operands[0], inst, program).index
    if wide == "f16":
        write = write_sdwa(index, "f16", f"WORD_{pick[2]}", "UNUSED_PRESERVE")
    else:
        write = write_vector(index, "f32")
    dtype = np.float16 if wide == "f16" else np.float32

    def step(w: Waves) -> None:
        value = table[_bytes_of(word(w), byte)]
        if scale is not None:
            value = value * scale(w)
        write(w, value.astype(dtype))

    return step


def _pair_reader(inst: Instruction, position: int, kind: str, program: Program) -> Reader:
    """The two values of a packed fp16 or bf16 register as ``[2, n, 64]`` fp32."""
    operand = parse_operand(inst.operands[position], inst, program)
    if kind == "f16":
        low, high = read_raw(operand, "f16"), read_raw(operand, "f16", high=True)
        return lambda w: np.stack([low(w), high(w)]).astype(np.float32)
    low, high = read_raw(operand, "b16"), read_raw(operand, "b16", high=True)
    return lambda w: formats.bf16_to_f32(np.stack([low(w), high(w)]))


def _bind_encode_pair(inst: Instruction, program: Program) -> Step:
    """v_cvt_pk_{fp8,bf8}_f32 and v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,f16,bf16}."""
    narrow, wide = inst.name.rsplit("_", 2)[-2:]
    fmt = _narrow(narrow, program.target)
    if wide == "f32":
        first, second = source(inst, 1, "f32", program), source(inst, 2, "f32", program)
        pair: Reader = lambda w: np.stack(np.broadcast_arrays(first(w), second(w)))  # noqa: E731
        next_operand = 3
    else:
        pair = _pair_reader(inst, 1, wide, program)
        next_operand = 2
    scale = _scale(source(inst, next_operand, "u32", program)) if "scalef32" in inst.name else None
    pick = inst.bits("op_sel", 5, 0)
    target = parse_operand(inst.operands[0], inst, program).index
    if narrow == "fp4":
        write = write_sdwa(target, "u32", f"BYTE_{pick[2] + 2 * pick[3]}", "UNUSED_PRESERVE")
    else:
        sources = len(inst.operands) - 1
        high = pick[sources]
        write = write_sdwa(target, "u32", f"WORD_{high}", "UNUSED_PRESERVE")

    def step(w: Waves) -> None:
        value = pair(w)
        if scale is not None:
            value = value / scale(w)
        codes = fmt.encode(value, saturate=w.fp16_overflow).astype(U32)
        word = codes[0] | (codes[1] << U32(4 if narrow == "fp4" else 8))
        write(w, np.broadcast_to(word, (w.n, 64)))

    return step


def _bind_f16_f32(inst: Instruction, program: Program) -> Step:
    operand = parse_operand(inst.operands[1], inst, program)
    if inst.encoding == "sdwa":
        plain = read_sdwa(operand, "f32", inst.modifiers.get("src0_sel", "DWORD"))
    else:
        plain = read_raw(operand, "f32")
    read = with_modifiers(plain, operand, "f32")
    index = parse_operand(inst.operands[0], inst, program).index
    write = write_vector(index, "f16")
    if inst.encoding == "sdwa":
        unused = inst.modifiers.get("dst_unused", "UNUSED_PAD")
        write = write_sdwa(index, "f16", inst.modifiers.get("dst_sel", "DWORD"), unused)
    elif "op_sel" in inst.modifiers:
        write = write_sdwa(index, "f16", f"WORD_{inst.bits('op_sel', 2, 0)[1]}", "UNUSED_PRESERVE")
    if set(inst.modifiers) - {"op_sel", "dst_sel", "dst_unused", "src0_sel"}:
        raise unknown(inst, program, "a modifier of v_cvt_f16_f32")
    return lambda w: write(w, formats.f32_to_f16(read(w), saturate=w.fp16_overflow))


def _halves(low: Array, high: Array) -> Array:
    return low.astype(U32) | (high.astype(U32) << U32(16))


def _bind_pack(inst: Instruction, program: Program) -> Step:
    """Two sources to the halves of a word."""
    kind, function = _PACKS[inst.name]
    pick = inst.bits("op_sel", 3, 0)
    read = []
    for position in (0, 1):
        operand = parse_operand(inst.operands[1 + position], inst, program)
        high = bool(pick[position]) and not operand.is_constant
        read.append(with_modifiers(read_raw(operand, kind, high=high), operand, kind))
    first, second = read
    write = write_vector(parse_operand(inst.operands[0], inst, program).index, "u32")

    def step(w: Waves) -> None:
        low, high = (np.asarray(function(r(w))).view(np.uint16) for r in (first, second))
        write(w, _halves(low, high))

    return step


_PACKS = {
    "v_cvt_pk_bf16_f32": ("f32", formats.f32_to_bf16),
    "v_cvt_pk_f16_f32": ("f32", formats.f32_to_f16),
    "v_cvt_pkrtz_f16_f32": ("f32", formats.f32_to_f16_toward_zero),
    "v_cvt_pk_u16_u32": ("u32", lambda x: np.minimum(x, U32(0xFFFF)).astype(np.uint16)),
    "v_cvt_pk_i16_i32": ("i32", lambda x: np.clip(x, -32768, 32767).astype(np.int16)),
    "v_cvt_pknorm_i16_f32": ("f32", lambda x: to_integer(np.rint(np.clip(x, -1, 1) * 32767.0), np.int16)),
    "v_cvt_pknorm_u16_f32": ("f32", lambda x: to_integer(np.rint(np.clip(x, 0, 1) * 65535.0), np.uint16)),
    "v_pack_b32_f16": ("u16", lambda x: x),
}


def _bind_f32_bf16(inst: Instruction, program: Program) -> Step:
    operand = parse_operand(inst.operands[1], inst, program)
    select = inst.modifiers.get("src0_sel", "DWORD") if inst.encoding == "sdwa" else "DWORD"
    read = read_sdwa(operand, "b16", select)
    write = write_vector(parse_operand(inst.operands[0], inst, program).index, "f32")
    return lambda w: write(w, formats.bf16_to_f32(read(w)))


def _bind_shift_pack(inst: Instruction, program: Program) -> Step:
    """v_ashr_pk_{i8,u8}_i32 (gfx950): shift two words right, saturate to bytes, pack into a halfword."""
    low, high = (0, 255) if "u8" in inst.name else (-128, 127)
    r0, r1 = source(inst, 1, "i32", program), source(inst, 2, "i32", program)
    amount = source(inst, 3, "u32", program)
    pick = inst.bits("op_sel", 4, 0)[3]
    where = write_sdwa(
        parse_operand(inst.operands[0], inst, program).index, "u32", f"WORD_{pick}", "UNUSED_PRESERVE"
    )

    def step(w: Waves) -> None:
        shift = (amount(w) & U32(31)).astype(np.int32)
        x, y = (np.clip(r(w) >> shift, low, high).astype(U32) & U32(255) for r in (r0, r1))
        where(w, np.broadcast_to(x | (y << U32(8)), (w.n, 64)))

    return step


_DECODE_PAIR = re.compile(r"^v_cvt(_scalef32)?_pk_(f32|f16|bf16)_(fp8|bf8|fp4)$")
_DECODE_ONE = re.compile(r"^v_cvt(_scalef32)?_(f32|f16)_(fp8|bf8)$")
_ENCODE_PAIR = re.compile(r"^v_cvt(_scalef32)?_pk_(fp8|bf8|fp4)_(f32|f16|bf16)$")
_ONLY_GFX950 = re.compile(r"scalef32|v_cvt_pk_bf16_f32|v_cvt_pk_f16_f32|v_cvt_f32_bf16|v_ashr_pk")


def bind_convert(inst: Instruction, program: Program) -> Step | None:
    """The step of a narrow conversion, or None if it is not one."""
    name = inst.name
    if _ONLY_GFX950.search(name) and program.target != "gfx950":
        return None
    if _DECODE_PAIR.match(name):
        return _bind_decode_pair(inst, program)
    if _DECODE_ONE.match(name):
        return _bind_decode_one(inst, program)
    if _ENCODE_PAIR.match(name):
        return _bind_encode_pair(inst, program)
    if name == "v_cvt_f16_f32":
        return _bind_f16_f32(inst, program)
    if name == "v_cvt_f32_bf16":
        return _bind_f32_bf16(inst, program)
    if name in _PACKS:
        return _bind_pack(inst, program)
    if name in ("v_ashr_pk_i8_i32", "v_ashr_pk_u8_i32"):
        return _bind_shift_pack(inst, program)
    return None

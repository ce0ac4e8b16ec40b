"""Scalar ALU and scalar memory: SOP1, SOP2, SOPC, SOPK, SMEM, and the parts of SOPP that do something.

Source: "Scalar ALU Operations", "Scalar Memory Operations" and "Program Flow Control" of the CDNA3 ISA
document. Values are columns ``[n, 1]``, one row for each wave.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import arithmetic as a
from .operands import DTYPES, Operand, Reader, parse_operand, read_raw, unknown
from .parser import Instruction
from .program import Program, Step
from .state import EXEC, Array, Waves

U32, U64 = np.uint32, np.uint64


class ScalarOp(NamedTuple):
    """Result type, source types, function; SCC is ``none``, ``nonzero`` or ``second`` (returned)."""

    result: str
    sources: tuple[str, ...]
    function: Callable[..., Any]
    scc: str = "none"


def _add_carry(x: Array, y: Array) -> tuple[Array, Array]:
    total = x + y
    return total, total < x


def _subtract_borrow(x: Array, y: Array) -> tuple[Array, Array]:
    return x - y, x < y


def _add_overflow(x: Array, y: Array) -> tuple[Array, Array]:
    total = x + y
    return total, ((x ^ total) & (y ^ total)) < 0


def _subtract_overflow(x: Array, y: Array) -> tuple[Array, Array]:
    total = x - y
    return total, ((x ^ y) & (x ^ total)) < 0


def _shift_add(amount: int) -> Callable[[Array, Array], tuple[Array, Array]]:
    def function(x: Array, y: Array) -> tuple[Array, Array]:
        wide = (x.astype(U64) << U64(amount)) + y
        return wide.astype(U32), wide > 0xFFFFFFFF

    return function


def _shl(x: Array, n: Array) -> Array:
    result: Array = x << (n & U32(8 * x.dtype.itemsize - 1)).astype(x.dtype)
    return result


def _shr(x: Array, n: Array) -> Array:
    result: Array = x >> (n & U32(8 * x.dtype.itemsize - 1)).astype(x.dtype)
    return result


def _field(x: Array, spec: Array) -> Array:
    """s_bfe: offset in bits 5:0, width in bits 22:16."""
    bits = 8 * x.dtype.itemsize
    unsigned: Any = U32 if bits == 32 else U64
    offset = (spec & U32(bits - 1)).astype(unsigned)
    width = np.minimum((spec >> U32(16)) & U32(127), U32(bits)).astype(unsigned)
    # Signed fields that reach past the top go on with the sign.
    raw = (x >> offset.astype(x.dtype)).view(unsigned)
    keep = np.where(width == bits, ~unsigned(0), (unsigned(1) << (width % unsigned(bits))) - unsigned(1))
    field = raw & keep
    if x.dtype.kind == "i":
        sign = np.where(
            width == 0, unsigned(0), unsigned(1) << ((width + unsigned(bits - 1)) % unsigned(bits))
        )
        field = (field ^ sign) - sign
    result: Array = field.view(x.dtype)
    return result


def _bits_set(x: Array) -> Array:
    return a.count_bits(x).astype(U32)


def _reverse64(x: Array) -> Array:
    octets = np.ascontiguousarray(x).view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, bitorder="little")[..., ::-1]
    return np.packbits(bits, axis=-1, bitorder="little").view(U64)


def _ff1_64(x: Array) -> Array:
    low = (x & (~x + U64(1))) - U64(1)
    return np.where(x == 0, U32(0xFFFFFFFF), _bits_set(low))


def _flbit_64(x: Array) -> Array:
    high, low = (x >> U64(32)).astype(U32), x.astype(U32)
    return np.where(
        high != 0, a.leading_zeros(high), np.where(low != 0, a.leading_zeros(low) + U32(32), U32(0xFFFFFFFF))
    )


def _sop(result: str, sources: str, scc: str, table: dict[str, Callable[..., Any]]) -> dict[str, ScalarOp]:
    return {name: ScalarOp(result, tuple(sources.split()), function, scc) for name, function in table.items()}


_LOGIC: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "andn2": lambda x, y: x & ~y,
    "orn2": lambda x, y: x | ~y, "nand": lambda x, y: ~(x & y), "nor": lambda x, y: ~(x | y),
    "xnor": lambda x, y: ~(x ^ y),
}  # fmt: skip

SCALAR: dict[str, ScalarOp] = {
    **_sop("u32", "u32", "none", {"s_mov_b32": np.positive, "s_brev_b32": a.reverse_bits,
                                  "s_ff1_i32_b32": a.trailing_zeros, "s_flbit_i32_b32": a.leading_zeros}),
    **_sop("u32", "u32", "nonzero", {"s_not_b32": np.invert, "s_bcnt1_i32_b32": _bits_set}),
    **_sop("i32", "i32", "none", {"s_sext_i32_i8": lambda x: x.astype(np.int8).astype(np.int32),
                                  "s_sext_i32_i16": lambda x: x.astype(np.int16).astype(np.int32)}),
    "s_flbit_i32": ScalarOp("u32", ("i32",), a.leading_sign_bits),
    "s_abs_i32": ScalarOp("i32", ("i32",), np.abs, "nonzero"),
    **_sop("u64", "u64", "none", {"s_mov_b64": np.positive, "s_brev_b64": _reverse64}),
    "s_not_b64": ScalarOp("u64", ("u64",), np.invert, "nonzero"),
    "s_bcnt1_i32_b64": ScalarOp("u32", ("u64",), _bits_set, "nonzero"),
    "s_ff1_i32_b64": ScalarOp("u32", ("u64",), _ff1_64),
    "s_flbit_i32_b64": ScalarOp("u32", ("u64",), _flbit_64),
    **_sop("u32", "u32 u32", "second", {"s_add_u32": _add_carry, "s_sub_u32": _subtract_borrow,
                                        **{f"s_lshl{n}_add_u32": _shift_add(n) for n in (1, 2, 3, 4)}}),
    **_sop("i32", "i32 i32", "second", {
        "s_add_i32": _add_overflow, "s_sub_i32": _subtract_overflow,
        "s_min_i32": lambda x, y: (np.minimum(x, y), x < y),
        "s_max_i32": lambda x, y: (np.maximum(x, y), x >= y),
        "s_absdiff_i32": lambda x, y: (np.abs(x - y), x != y),
    }),
    **_sop("u32", "u32 u32", "second", {
        "s_min_u32": lambda x, y: (np.minimum(x, y), x < y),
        "s_max_u32": lambda x, y: (np.maximum(x, y), x >= y),
    }),
    **_sop("u32", "u32 u32", "none", {
        "s_mul_i32": np.multiply, "s_mul_hi_u32": a.multiply_high,
        "s_pack_ll_b32_b16": lambda x, y: (x & U32(0xFFFF)) | (y << U32(16)),
        "s_pack_lh_b32_b16": lambda x, y: (x & U32(0xFFFF)) | (y & U32(0xFFFF0000)),
        "s_pack_hh_b32_b16": lambda x, y: (x >> U32(16)) | (y & U32(0xFFFF0000)),
        "s_bfm_b32": lambda n, at: ((U32(1) << (n & U32(31))) - U32(1)) << (at & U32(31)),
    }),
    "s_mul_hi_i32": ScalarOp("i32", ("i32", "i32"), a.multiply_high),
    **{f"s_{name}_b{bits}": ScalarOp(f"u{bits}", (f"u{bits}",) * 2, function, "nonzero")
       for bits in (32, 64) for name, function in _LOGIC.items()},
    **_sop("u32", "u32 u32", "nonzero", {"s_lshl_b32": _shl, "s_lshr_b32": _shr, "s_bfe_u32": _field}),
    **_sop("u64", "u64 u32", "nonzero", {"s_lshl_b64": _shl, "s_lshr_b64": _shr, "s_bfe_u64": _field}),
    "s_ashr_i32": ScalarOp("i32", ("i32", "u32"), _shr, "nonzero"),
    "s_ashr_i64": ScalarOp("i64", ("i64", "u32"), _shr, "nonzero"),
    "s_bfe_i32": ScalarOp("i32", ("i32", "u32"), _field, "nonzero"),
    "s_bfe_i64": ScalarOp("i64", ("i64", "u32"), _field, "nonzero"),
}  # fmt: skip

_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
    "le": np.less_equal,
}  # fmt: skip

# Instructions that only order, hint or wait: nothing here is asynchronous, so they do nothing.
NO_EFFECT = frozenset((
    "s_nop", "s_waitcnt", "s_setprio", "s_sleep", "s_sethalt", "s_icache_inv", "s_dcache_wb",
    "s_dcache_inv", "s_dcache_wb_vol", "s_dcache_inv_vol", "s_ttracedata", "s_setkill",
    "s_sched_barrier", "s_sched_group_barrier", "s_waitcnt_vscnt", "buffer_wbl2", "buffer_inv",
    "buffer_wbinvl1", "buffer_wbinvl1_vol", "s_set_gpr_idx_off", "v_nop",
))  # fmt: skip


def write_scalar(operand: Operand, kind: str) -> Callable[[Waves, Array], None]:
    """A writer of a scalar register or pair."""
    index = operand.index
    if kind in ("u32", "i32"):

        def write32(w: Waves, value: Array) -> None:
            w.su[index][...] = np.asarray(value).view(U32)
            w.scalar_written(index)

        return write32
    if index & 1:
        raise ValueError(f"scalar register pair s[{index}:{index + 1}] is not aligned")

    def write64(w: Waves, value: Array) -> None:
        w.sq[index >> 1][...] = np.asarray(value).view(U64)
        w.scalar_written(index, 2)

    return write64


def bind_scalar(inst: Instruction, program: Program) -> Step | None:
    """The step of a scalar instruction that is no branch, or None if it is not one."""
    name = inst.name
    if name == "buffer_inv" and "sc1" in inst.text:
        return lambda w: w.execution.invalidate(w)
    if name in NO_EFFECT:
        return lambda w: None
    if name.startswith("s_load_dword"):
        return _bind_load(inst, program)
    if name in SCALAR:
        return _bind_op(inst, SCALAR[name], program)
    found = re.match(r"^s_cmp(k)?_(eq|lg|gt|ge|lt|le)_([iu](?:32|64))$", name)
    if found:
        return _bind_compare(inst, bool(found.group(1)), found.group(2), found.group(3), program)
    if name.endswith("_saveexec_b64"):
        return _bind_saveexec(inst, program)
    bind = _OTHER.get(name)
    return None if bind is None else bind(inst, program)


def _readers(
    inst: Instruction, kinds: tuple[str, ...], program: Program, first: int = 1
) -> tuple[Reader, ...]:
    return tuple(
        read_raw(parse_operand(inst.operands[first + k], inst, program), kind) for k, kind in enumerate(kinds)
    )


def _bind_op(inst: Instruction, op: ScalarOp, program: Program) -> Step:
    target = parse_operand(inst.operands[0], inst, program)
    if target.kind != "s":
        raise unknown(inst, program, f"destination {inst.operands[0]!r}")
    read = _readers(inst, op.sources, program)
    write, function, scc = write_scalar(target, op.result), op.function, op.scc

    def step(w: Waves) -> None:
        value = function(*(r(w) for r in read))
        if scc == "second":
            value, flag = value
            np.copyto(w.scc, flag)
        elif scc == "nonzero":
            np.copyto(w.scc, value != 0)
        write(w, value)

    return step


def _bind_compare(inst: Instruction, immediate: bool, name: str, kind: str, program: Program) -> Step:
    function = _COMPARE[name]
    second = parse_operand(inst.operands[1], inst, program)
    if immediate:  # a signed or unsigned 16-bit literal
        value = int(second.value) & 0xFFFF
        second = Operand("int", value=value - 0x10000 if kind[0] == "i" and value & 0x8000 else value)
    x, y = read_raw(parse_operand(inst.operands[0], inst, program), kind), read_raw(second, kind)
    return lambda w: np.copyto(w.scc, function(x(w), y(w)))


def _bind_saveexec(inst: Instruction, program: Program) -> Step:
    """D = EXEC; EXEC = source op EXEC; SCC = EXEC != 0."""
    name = inst.name.removeprefix("s_").removesuffix("_saveexec_b64")
    functions: dict[str, Callable[[Array, Array], Array]] = {
        "and": lambda s, e: s & e, "or": lambda s, e: s | e, "xor": lambda s, e: s ^ e,
        "andn2": lambda s, e: s & ~e, "orn2": lambda s, e: s | ~e, "andn1": lambda s, e: ~s & e,
        "orn1": lambda s, e: ~s | e, "nand": lambda s, e: ~(s & e), "nor": lambda s, e: ~(s | e),
        "xnor": lambda s, e: ~(s ^ e),
    }  # fmt: skip
    if name not in functions:
        raise unknown(inst, program, inst.name)
    function, write = functions[name], write_scalar(parse_operand(inst.operands[0], inst, program), "u64")
    (read,) = _readers(inst, ("u64",), program)

    def step(w: Waves) -> None:
        before = w.sq[EXEC >> 1].copy()
        after = function(read(w), before)
        write(w, before)
        w.sq[EXEC >> 1][...] = after
        np.copyto(w.scc, after != 0)
        w.refresh_exec()

    return step


def _bind_carry(inst: Instruction, program: Program) -> Step:
    """s_addc_u32 and s_subb_u32: SCC in and out."""
    x, y = _readers(inst, ("u32", "u32"), program)
    write = write_scalar(parse_operand(inst.operands[0], inst, program), "u32")
    sign = 1 if inst.name == "s_addc_u32" else -1

    def step(w: Waves) -> None:
        wide = x(w).astype(np.int64) + sign * (y(w).astype(np.int64) + w.scc)
        np.copyto(w.scc, (wide < 0) | (wide > 0xFFFFFFFF))
        write(w, wide.astype(U32))

    return step


def _bind_select(inst: Instruction, program: Program) -> Step:
    kind = "u64" if inst.name.endswith("b64") else "u32"
    x, y = _readers(inst, (kind, kind), program)
    write = write_scalar(parse_operand(inst.operands[0], inst, program), kind)
    return lambda w: write(w, np.where(w.scc, x(w), y(w)))


def _bind_conditional_move(inst: Instruction, program: Program) -> Step:
    kind = "u64" if inst.name.endswith("b64") else "u32"
    target = parse_operand(inst.operands[0], inst, program)
    (x,) = _readers(inst, (kind,), program)
    old, write = read_raw(target, kind), write_scalar(target, kind)
    return lambda w: write(w, np.where(w.scc, x(w), old(w)))


def _bind_literal(inst: Instruction, program: Program) -> Step:
    """s_movk_i32, s_addk_i32, s_mulk_i32, s_cmovk_i32: a sign-extended 16-bit literal."""
    target = parse_operand(inst.operands[0], inst, program)
    value = int(inst.operands[1], 0) & 0xFFFF
    literal = np.array([[value - 0x10000 if value & 0x8000 else value]], np.int32)
    old, write = read_raw(target, "i32"), write_scalar(target, "i32")

    def step(w: Waves) -> None:
        if inst.name == "s_movk_i32":
            write(w, literal)
        elif inst.name == "s_addk_i32":
            total, flag = _add_overflow(old(w), literal)
            np.copyto(w.scc, flag)
            write(w, total)
        elif inst.name == "s_mulk_i32":
            write(w, old(w) * literal)
        else:
            write(w, np.where(w.scc, literal, old(w)))

    return step


def _bind_bitset(inst: Instruction, program: Program) -> Step:
    target = parse_operand(inst.operands[0], inst, program)
    kind = "u64" if inst.name.endswith("b64") else "u32"
    dtype: Any = DTYPES[kind]
    (at,) = _readers(inst, ("u32",), program)
    old, write = read_raw(target, kind), write_scalar(target, kind)
    sets = "bitset1" in inst.name

    def step(w: Waves) -> None:
        bit = _shl(np.ones((1, 1), dtype), at(w))
        write(w, old(w) | bit if sets else old(w) & ~bit)

    return step


def _bind_bitcmp(inst: Instruction, program: Program) -> Step:
    kind = "u64" if inst.name.endswith("b64") else "u32"
    x, n = _readers(inst, (kind, "u32"), program, first=0)
    wanted = inst.name.startswith("s_bitcmp1")
    return lambda w: np.copyto(w.scc, ((_shr(x(w), n(w)) & DTYPES[kind](1)) != 0) == wanted)


def _bind_setreg(inst: Instruction, program: Program) -> Step:
    """Writes to MODE: FP16_OVFL (bit 23) is modelled; rounding and denormals must stay at their defaults."""
    found = re.match(r"^hwreg\(HW_REG_MODE(?:,\s*(\d+),\s*(\d+))?\)$", inst.operands[0])
    if not found or not re.match(r"^(0x[0-9a-fA-F]+|\d+)$", inst.operands[1]):
        raise unknown(inst, program, "this write to a hardware register")
    offset, size = int(found.group(1) or 0), int(found.group(2) or 32)
    value = int(inst.operands[1], 0)
    defaults = 0xF0  # round to nearest even, denormals kept
    for bit in range(offset, offset + size):
        if bit < 8 and (value >> (bit - offset)) & 1 != (defaults >> bit) & 1:
            raise unknown(inst, program, "a rounding or denormal mode other than the default")

    def step(w: Waves) -> None:
        if offset <= 23 < offset + size:
            w.fp16_overflow = bool((value >> (23 - offset)) & 1)

    return step


def _bind_load(inst: Instruction, program: Program) -> Step:
    """s_load_dwordN: the address is the base plus an immediate or a scalar offset."""
    count = {"": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}[inst.name.removeprefix("s_load_dword")]
    target = parse_operand(inst.operands[0], inst, program).index
    (base,) = _readers(inst, ("u64",), program)
    offset = read_raw(parse_operand(inst.operands[2], inst, program), "i32")
    extra = inst.integer("offset")

    def step(w: Waves) -> None:
        addresses = (base(w).view(np.int64) + offset(w) + extra) & ~np.int64(3)
        words = w.execution.load(w, inst, addresses, None, 4 * count)
        for k in range(count):
            w.su[target + k][...] = words[k]
        w.scalar_written(target, count)

    return step


_OTHER: dict[str, Callable[[Instruction, Any], Step]] = {
    "s_addc_u32": _bind_carry, "s_subb_u32": _bind_carry, "s_cselect_b32": _bind_select,
    "s_cselect_b64": _bind_select, "s_cmov_b32": _bind_conditional_move, "s_cmov_b64": _bind_conditional_move,
    "s_movk_i32": _bind_literal, "s_addk_i32": _bind_literal, "s_mulk_i32": _bind_literal,
    "s_cmovk_i32": _bind_literal, "s_bitset0_b32": _bind_bitset, "s_bitset1_b32": _bind_bitset,
    "s_bitset0_b64": _bind_bitset, "s_bitset1_b64": _bind_bitset, "s_bitcmp0_b32": _bind_bitcmp,
    "s_bitcmp1_b32": _bind_bitcmp, "s_bitcmp0_b64": _bind_bitcmp, "s_bitcmp1_b64": _bind_bitcmp,
    "s_setreg_imm32_b32": _bind_setreg,
}  # fmt: skip

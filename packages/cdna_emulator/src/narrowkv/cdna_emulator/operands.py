"""Operands: parsing of their text, and functions that read or write them for a batch of waves.

Source: "Scalar Data Sources" and "Operands" of the CDNA3 and CDNA4 ISA documents. Reading returns an array
that broadcasts to ``[n, 64]``: rows for vector registers, columns for scalar ones, ``[1, 1]`` for constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import formats
from .errors import UnknownInstructionError
from .parser import Instruction
from .program import Program
from .state import Array, Waves

Reader = Callable[[Waves], Array]
Writer = Callable[[Waves, Array], None]

DTYPES: dict[str, type[np.generic]] = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u16": np.uint16, "i16": np.int16,
    "f16": np.float16,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64, "u8": np.uint8, "b16": np.uint16,
}  # fmt: skip

_NAMED_SCALARS = {
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "exec": (126, 2), "exec_lo": (126, 1),
    "exec_hi": (127, 1), "m0": (124, 1), "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1), "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
}  # fmt: skip
_REGISTER = re.compile(r"^(ttmp|[vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_INLINE_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        kind: ``v`` (vector or accumulation register), ``s``, ``int``, ``float``, ``scc`` or ``none``.
        index: first register.
        count: number of registers.
        value: the constant, for ``int`` and ``float``.
        negate, absolute, extend: the source modifiers ``-x``, ``|x|``, ``sext(x)``.
    """

    kind: str
    index: int = 0
    count: int = 1
    value: float = 0
    negate: bool = False
    absolute: bool = False
    extend: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it is a literal or an inline constant."""
        return self.kind in ("int", "float")


def unknown(inst: Instruction, program: Program, what: str) -> UnknownInstructionError:
    """The error for something in ``inst`` that is not implemented."""
    return UnknownInstructionError(
        f"{what} is not implemented for {program.target}",
        kernel=program.kernel_name, line=inst.line, source=inst.text,
    )  # fmt: skip


def parse_operand(text: str, inst: Instruction, program: Program) -> Operand:
    """Parse one operand's text."""
    try:
        return _parse(text, program.accum_offset, program.vgprs)
    except ValueError as error:
        raise unknown(inst, program, str(error)) from None


@lru_cache(maxsize=1 << 14)
def _parse(text: str, accum_offset: int, vgprs: int) -> Operand:
    """The operand in a program with these registers; a ValueError says what is not implemented."""
    negate = absolute = extend = False
    if text.startswith("neg(") and text.endswith(")"):
        negate, text = True, text[4:-1]
    elif text.startswith("-") and not re.match(r"^-[\d.]", text):
        negate, text = True, text[1:]
    if text.startswith("|") and text.endswith("|"):
        absolute, text = True, text[1:-1]
    elif text.startswith("abs(") and text.endswith(")"):
        absolute, text = True, text[4:-1]
    if text.startswith("sext(") and text.endswith(")"):
        extend, text = True, text[5:-1]
    flags = {"negate": negate, "absolute": absolute, "extend": extend}
    found = _REGISTER.match(text)
    if found:
        bank, single, first, last = found.groups()
        start = int(single if single is not None else first)
        count = 1 if single is not None or last is None else int(last) - start + 1
        if bank == "a":
            start += accum_offset
        if bank == "ttmp":
            start += 108
        limit = vgprs if bank in "va" else 128
        if start + count > limit:
            raise ValueError(f"register {text}, past the {limit} allocated,")
        return Operand("v" if bank in "va" else "s", start, count, **flags)
    if text in _NAMED_SCALARS:
        start, count = _NAMED_SCALARS[text]
        return Operand("s", start, count, **flags)
    if text in ("off", "null"):
        return Operand("none")
    if text in ("scc", "src_scc"):
        return Operand("scc")
    if text.startswith("lit(") and text.endswith(")"):
        text = text[4:-1]
    try:
        return Operand("int", value=int(text, 0), **flags)
    except ValueError:
        pass
    try:
        return Operand("float", value=float(text), **flags)
    except ValueError:
        raise ValueError(f"operand {text!r}") from None


def constant_bits(operand: Operand, kind: str) -> int:
    """The bits that a constant has as an operand of a type: inline floats take the operand's width."""
    if operand.kind == "int":
        value = int(operand.value)
        if kind == "f64" and not -16 <= value <= 64:
            value <<= 32  # a literal gives the high half of a double
        return value & 0xFFFFFFFFFFFFFFFF
    if kind in ("u64", "i64", "f64"):
        return int(np.float64(operand.value).view(np.uint64))
    if kind in ("f16", "u16", "i16", "b16"):
        return int(np.float16(operand.value).view(np.uint16))
    return int(np.float32(operand.value).view(np.uint32))


def _as_constant(bits: int, kind: str) -> Array:
    dtype = np.dtype(DTYPES[kind])
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64, 1: np.uint8}[dtype.itemsize]
    array = np.array([[bits & ((1 << (8 * dtype.itemsize)) - 1)]], dtype=unsigned).view(dtype)
    array.flags.writeable = False
    return array


def _halfword(words: Array, high: bool) -> Array:
    """Halfwords of 32-bit words, without a copy where the words are contiguous."""
    if words.flags.c_contiguous:
        return words.view(np.uint16)[..., 1 if high else 0 :: 2]
    return (words >> np.uint32(16 if high else 0)).astype(np.uint16)


def read_raw(operand: Operand, kind: str, *, high: bool = False) -> Reader:
    """A function that reads an operand as a type, without its negate and absolute modifiers."""
    index = operand.index
    if operand.is_constant:
        bits = constant_bits(operand, kind)
        if high and DTYPES[kind]().itemsize == 2:
            bits >>= 16 if operand.kind == "int" else 0
        constant = _as_constant(bits, kind)
        return lambda w: constant
    if operand.kind == "scc":
        return lambda w: w.scc.astype(DTYPES[kind])
    vector = operand.kind == "v"
    if kind == "u32":
        return (lambda w: w.u[index]) if vector else (lambda w: w.su[index])
    if kind == "f32":
        return (lambda w: w.f[index]) if vector else (lambda w: w.sf[index])
    if kind == "i32":
        return (lambda w: w.i[index]) if vector else (lambda w: w.si[index])
    if kind in ("u16", "i16", "f16", "b16"):
        dtype = DTYPES[kind]
        if vector:
            return lambda w: _halfword(w.u[index], high).view(dtype)
        return lambda w: _halfword(w.su[index], high).view(dtype)
    if kind in ("u64", "i64", "f64"):
        dtype = DTYPES[kind]
        if vector and operand.count == 1:
            return lambda w: w.u[index].astype(np.uint64).view(dtype)
        if vector:
            return lambda w: (w.u[index] | (w.u[index + 1].astype(np.uint64) << np.uint64(32))).view(dtype)
        if index & 1:
            return lambda w: (w.su[index] | (w.su[index + 1].astype(np.uint64) << np.uint64(32))).view(dtype)
        return lambda w: w.sq[index >> 1].view(dtype)
    raise KeyError(kind)


def with_modifiers(read: Reader, operand: Operand, kind: str) -> Reader:
    """Apply ``|x|`` and ``-x``: on the sign bit for floats, so that a NaN keeps its payload."""
    if operand.absolute:
        inner_abs = read
        read = (lambda w: np.abs(inner_abs(w))) if kind[0] in "fb" else inner_abs
    if operand.negate:
        inner = read
        read = lambda w: np.negative(inner(w))  # noqa: E731
    return read


def source(inst: Instruction, position: int, kind: str, program: Program) -> Reader:
    """A reader for the operand at ``position`` with its modifiers."""
    operand = parse_operand(inst.operands[position], inst, program)
    return with_modifiers(read_raw(operand, kind), operand, kind)


def write_vector(index: int, kind: str) -> Writer:
    """A function that writes a vector register under EXEC. 16-bit results clear the upper half (GFX9)."""
    if kind in ("u32", "i32", "f32"):
        rows = {"u32": "u", "i32": "i", "f32": "f"}[kind]

        def write32(w: Waves, value: Array) -> None:
            row = getattr(w, rows)[index]
            if w.full:
                row[...] = value
            else:
                np.copyto(row, value, where=w.exec_mask, casting="unsafe")

        return write32
    if kind in ("u16", "i16", "f16", "b16"):

        def write16(w: Waves, value: Array) -> None:
            words = np.asarray(value).view(np.uint16).astype(np.uint32)
            np.copyto(w.u[index], words, where=w.exec_mask)

        return write16
    if kind in ("u64", "i64", "f64"):

        def write64(w: Waves, value: Array) -> None:
            words = np.asarray(value).view(np.uint64)
            np.copyto(w.u[index], words.astype(np.uint32), where=w.exec_mask)
            np.copyto(w.u[index + 1], (words >> np.uint64(32)).astype(np.uint32), where=w.exec_mask)

        return write64
    raise KeyError(kind)


def float_output(value: Array, omod: float, clamp: bool) -> Array:
    """Output modifiers of a float result: multiply by ``omod``, then clamp to [0, 1] (NaN becomes 0)."""
    if omod != 1.0:
        value = value * value.dtype.type(omod)
    if clamp:
        zero, one = value.dtype.type(0), value.dtype.type(1)
        value = np.where(np.isnan(value), zero, np.minimum(np.maximum(value, zero), one))
    return value


def output_modifier(inst: Instruction) -> float:
    """The factor of ``mul:2``, ``mul:4`` or ``div:2``."""
    if "mul" in inst.modifiers:
        return float(inst.modifiers["mul"])
    return 1.0 / float(inst.modifiers["div"]) if "div" in inst.modifiers else 1.0


def to_bf16(value: Array) -> Array:
    """fp32 to bf16 bits, round to nearest even."""
    return formats.f32_to_bf16(value)

"""Matrix instructions (MFMA), the block-scaled f8f6f4 ones included.

Sources: "Matrix Arithmetic Instructions" of the CDNA3 and CDNA4 ISA documents and AMD's matrix instruction
calculator. For one block of M x N x K on 64 lanes, with g = 64 / M groups of lanes:

    A[i][k]: i = lane % M, and the lanes of group ``lane // M`` hold K / g consecutive k
    B[k][j]: j = lane % N, likewise
    D[i][j]: j = lane % N; 16 x 16: i = 4 * (lane // 16) + register;
             32 x 32: i = 8 * (register // 4) + 4 * (lane // 32) + register % 4
    8-bit types with 32 k to a lane hold two runs of 16: k = 16 * group + e and K / 2 + 16 * group + e
    with cbsz, groups of 2**cbsz blocks have one A: that of their block number abid

Products and sums are formed in fp64 and rounded once to fp32, or as the hardware does: see `matrix_sums`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import formats
from .matrix_sums import GROUPS, hardware_sum
from .operands import Operand, parse_operand, read_raw, unknown
from .parser import Instruction
from .program import Program, Step
from .state import LANES, Array, Waves

_NAME = re.compile(
    r"^v_mfma_(?:scale_)?(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(xf32|f32|f64|f16|bf16|i8|f8f6f4|fp8|bf8)"
    r"(?:_(1k|fp8|bf8))?$"
)
_F8F6F4 = ("fp8", "bf8", "fp6", "bf6", "fp4")  # the codes of cbsz and blgp
_GFX950_ONLY = {
    "v_mfma_f32_16x16x32_f16", "v_mfma_f32_32x32x16_f16", "v_mfma_f32_16x16x32_bf16",
    "v_mfma_f32_32x32x16_bf16",
    "v_mfma_i32_16x16x64_i8", "v_mfma_i32_32x32x32_i8",
}  # fmt: skip


@dataclass(frozen=True)
class MatrixShape:
    """Shape and element types of an MFMA instruction."""

    result: str
    m: int
    n: int
    k: int
    blocks: int
    a: str
    b: str

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k * self.blocks


def mfma_shape(inst: Instruction) -> MatrixShape | None:
    """The shape of an MFMA instruction, or None if the name is not one."""
    found = _NAME.match(inst.name)
    if not found:
        return None
    result, m, n, k, blocks, a, b = found.groups()
    b = a if b in (None, "1k") else b
    if a == "f8f6f4":
        a_code, b_code = inst.integer("cbsz"), inst.integer("blgp")
        a, b = _F8F6F4[a_code], _F8F6F4[b_code]
    return MatrixShape(result, int(m), int(n), int(k), int(blocks or 1), a, b)


def shared_blocks(inst: Instruction, shape: MatrixShape) -> Array | None:
    """The block whose A each block multiplies, by cbsz and abid; None if an instruction cannot share so."""
    size, number = (1, 0) if "f8f6f4" in inst.name else (1 << inst.integer("cbsz"), inst.integer("abid"))
    if size > shape.blocks or number >= size:
        return None
    return np.arange(shape.blocks) // size * size + number


def _bf16(raw: Array) -> Array:
    return formats.bf16_to_f32(raw.view(np.uint16)).astype(np.float64)


def _xf32(raw: Array) -> Array:
    """fp32 of which the multiplier takes a 10-bit mantissa; the bits below it are cut off."""
    return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def _nibbles(raw: Array) -> Array:
    octets = raw.view(np.uint8)
    return np.stack([octets & np.uint8(15), octets >> np.uint8(4)], axis=-1).reshape(*octets.shape[:-1], -1)


def _sixes(raw: Array) -> Array:
    """6-bit codes packed into words, lowest first."""
    bits = np.unpackbits(raw.view(np.uint8), axis=-1, bitorder="little")
    sixes = bits.reshape(*bits.shape[:-1], -1, 6)
    result: Array = (sixes << np.arange(6, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
    return result


def _decoder(kind: str, target: str) -> Callable[[Array], Array]:
    """Words ``[..., registers]`` to fp64 (int64 for i8) values ``[..., elements]``."""
    if kind in ("fp8", "bf8"):
        table = (formats.fp8 if kind == "fp8" else formats.bf8)(target).decode_table_f64
        return lambda raw: table[raw.view(np.uint8)]
    if kind in ("fp6", "bf6"):
        six = (formats.E2M3 if kind == "fp6" else formats.E3M2).decode_table_f64
        return lambda raw: six[_sixes(raw)]
    return {
        "f32": lambda raw: raw.view(np.float32).astype(np.float64),
        "xf32": _xf32,
        "f64": lambda raw: raw.view(np.float64),
        "f16": lambda raw: raw.view(np.float16).astype(np.float64),
        "bf16": _bf16,
        "i8": lambda raw: raw.view(np.int8).astype(np.float64),  # exact: |sum| < 2^53
        "fp4": lambda raw: formats.E2M1.decode_table_f64[_nibbles(raw)],
    }[kind]


_BITS = {
    "f32": 32,
    "xf32": 32,
    "f64": 64,
    "f16": 16,
    "bf16": 16,
    "i8": 8,
    "fp8": 8,
    "bf8": 8,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}


def _registers(shape: MatrixShape, rows: int, kind: str) -> int:
    """Registers that hold A or B."""
    return rows * shape.k * shape.blocks * _BITS[kind] // (32 * LANES)


def _matrix_reader(
    operand: Operand, kind: str, rows: int, shape: MatrixShape, program: Program
) -> Callable[[Waves], Array]:
    """A function that gathers A as ``[n, blocks, M, K]``, or B as ``[n, blocks, N, K]``, from registers."""
    groups = LANES // rows
    spread = groups // shape.blocks  # groups of lanes that share the k of one block
    per_lane = shape.k // spread
    registers = per_lane * _BITS[kind] // 32
    start, decode = operand.index, _decoder(kind, program.target)
    two_runs = kind in ("fp8", "bf8") and per_lane == 32
    blocks = shape.blocks

    def read(w: Waves) -> Array:
        raw = w.v[start : start + registers].reshape(registers, w.n, blocks, spread, rows)
        words = np.ascontiguousarray(raw.transpose(1, 2, 4, 3, 0))  # [n, blocks, rows, spread, registers]
        values = decode(words)
        if two_runs:
            values = values.reshape(w.n, blocks, rows, spread, 2, 16).swapaxes(3, 4)
        return values.reshape(w.n, blocks, rows, shape.k)

    return read


def _result_registers(product: Array, shape: MatrixShape) -> Array:
    """``[n, blocks, M, N]`` to ``[registers, n, 64]``."""
    n, blocks = product.shape[:2]
    if shape.result == "f64":  # i = 4 * register + lane // 16
        return product.reshape(n, 4, 64).transpose(1, 0, 2)
    if shape.m == 16:
        return product.reshape(n, blocks, 4, 4, 16).transpose(1, 3, 0, 2, 4).reshape(-1, n, LANES)
    if shape.m == 32:
        return product.reshape(n, blocks, 4, 2, 4, 32).transpose(1, 2, 4, 0, 3, 5).reshape(-1, n, LANES)
    return product.transpose(2, 0, 1, 3).reshape(4, n, LANES)  # 4 x 4, sixteen blocks


def _scale_reader(
    inst: Instruction, which: int, rows: int, shape: MatrixShape, program: Program
) -> Callable[[Waves], Array]:
    """Block scales as ``[n, 1, rows, K / 32]``: lane group g holds the scale of k in [32 g, 32 g + 32)."""
    operand = parse_operand(inst.operands[4 + which], inst, program)
    byte = inst.bits("op_sel", 3, 0)[which] + 2 * inst.bits("op_sel_hi", 3, 1)[which]
    read = read_raw(operand, "u32")
    shift = np.uint32(8 * byte)

    def scales(w: Waves) -> Array:
        codes = (np.broadcast_to(read(w), (w.n, LANES)) >> shift).astype(np.uint8)
        values = formats.e8m0_to_f64(codes)
        return values.reshape(w.n, 1, shape.k // 32, rows).swapaxes(2, 3)

    return scales


def bind_matrix(inst: Instruction, program: Program) -> Step | None:
    """The step of an MFMA instruction, or None if it is not one that the target has."""
    shape = mfma_shape(inst)
    if shape is None:
        return None
    name, gfx950 = inst.name, program.target == "gfx950"
    if ((name in _GFX950_ONLY or "f8f6f4" in name) and not gfx950) or (shape.a == "xf32" and gfx950):
        return None
    scaled = "_scale_" in name
    sharing = shared_blocks(inst, shape)
    if sharing is None or ("f8f6f4" not in name and inst.integer("blgp")):
        raise unknown(inst, program, "cbsz, abid or blgp")
    texts = inst.operands
    a_operand, b_operand, c_operand = (parse_operand(t, inst, program) for t in texts[1:4])
    target = parse_operand(texts[0], inst, program).index
    count = shape.m * shape.n * shape.blocks // LANES
    sizes = (count, _registers(shape, shape.m, shape.a), _registers(shape, shape.n, shape.b), count)
    for text, size in zip(texts[:4], sizes, strict=True):
        operand = parse_operand(text, inst, program)
        if not operand.is_constant and operand.count != size * (
            2 if shape.result == "f64" and size == count else 1
        ):
            raise unknown(inst, program, f"operand {text} where {size} registers are wanted")
    read_blocks = _matrix_reader(a_operand, shape.a, shape.m, shape, program)
    read_a = read_blocks if shape.blocks == 1 else (lambda w: read_blocks(w)[:, sharing])
    read_b = _matrix_reader(b_operand, shape.b, shape.n, shape, program)
    scale_a = _scale_reader(inst, 0, shape.m, shape, program) if scaled else None
    scale_b = _scale_reader(inst, 1, shape.n, shape, program) if scaled else None
    if shape.result == "f64":
        return _bind_f64(c_operand, target, read_a, read_b, shape)
    integer = shape.result == "i32"
    kind = "i32" if integer else "f32"
    constant = read_raw(c_operand, kind) if c_operand.is_constant else None
    start, dtype = c_operand.index, np.dtype(np.int32 if integer else np.float32)
    if program.hardware_sums and shape.a in GROUPS and "f8f6f4" not in name:
        return _bind_hardware_sums(c_operand, target, read_a, read_b, shape, program)

    def step(w: Waves) -> None:
        a, b = read_a(w), read_b(w)
        if scale_a is not None and scale_b is not None:
            a = a * np.repeat(scale_a(w), 32, axis=-1)
            b = b * np.repeat(scale_b(w), 32, axis=-1)
        total = _result_registers(_products(a, b), shape)
        if constant is None:
            total = total + w.v[start : start + count].view(dtype)
        elif constant(w).any():
            total = total + constant(w)
        out = w.v[target : target + count].view(dtype)
        out[...] = total.astype(np.int64) if integer else total

    return step


def _products(a: Array, b: Array) -> Array:
    """A [..., m, k] times B [..., n, k], each sum formed in the order of k.

    `numpy.matmul` sums in an order of its own, so that a last bit would depend on the machine. Products of
    fp32 are exact in fp64; those of fp64 are not, and take `numpy.matmul` for its fused multiply-add.
    """
    total = np.zeros((*a.shape[:-1], b.shape[-2]))
    for k in range(a.shape[-1]):
        total += a[..., :, None, k] * b[..., None, :, k]
    return total


def _bind_hardware_sums(
    c_operand: Operand, target: int, read_a: Callable[[Waves], Array], read_b: Callable[[Waves], Array],
    shape: MatrixShape, program: Program,
) -> Step:  # fmt: skip
    size = shape.blocks * shape.m * shape.n
    order = _result_registers(np.arange(size).reshape(1, shape.blocks, shape.m, shape.n), shape)[:, 0]
    read_constant = read_raw(c_operand, "f32") if c_operand.is_constant else None
    start, count = c_operand.index, size // LANES

    def step(w: Waves) -> None:
        addend = np.empty((w.n, size), np.float32)
        if read_constant is None:
            addend[:, order] = w.v[start : start + count].view(np.float32).swapaxes(0, 1)
        else:
            addend[:, order] = np.broadcast_to(read_constant(w), (w.n, LANES))[:, None]
        c = addend.reshape(w.n, shape.blocks, shape.m, shape.n)
        total = hardware_sum(read_a(w), read_b(w), c, (shape.a, shape.b), program.target)
        w.v[target : target + count].view(np.float32)[...] = _result_registers(total, shape)

    return step


def _bind_f64(
    c_operand: Operand,
    target: int,
    read_a: Callable[[Waves], Array],
    read_b: Callable[[Waves], Array],
    shape: MatrixShape,
) -> Step:
    reads = [read_raw(Operand("v", c_operand.index + 2 * r, 2), "f64") for r in range(4)]
    constant = read_raw(c_operand, "f64") if c_operand.is_constant else None

    def step(w: Waves) -> None:
        product = _result_registers(np.matmul(read_a(w), read_b(w).swapaxes(-1, -2)), shape)
        for r in range(4):
            bits = (product[r] + (constant or reads[r])(w)).view(np.uint64)
            w.u[target + 2 * r][...] = bits.astype(np.uint32)
            w.u[target + 2 * r + 1][...] = (bits >> np.uint64(32)).astype(np.uint32)

    return step

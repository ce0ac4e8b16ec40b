"""Matrix instructions as operations."""

from __future__ import annotations

import numpy as np

from narrowkv.cdna_emulator import formats
from narrowkv.cdna_emulator.matrix import _BITS, MatrixShape, mfma_shape, shared_blocks
from narrowkv.cdna_emulator.matrix_sums import _LEAST, GROUPS
from narrowkv.cdna_emulator.operands import constant_bits
from narrowkv.cdna_emulator.parser import Instruction
from narrowkv.cdna_emulator.state import LANES, Array

from .narrow import FORMAT, format_of, small_float
from .operations import Code, UntranslatableError

# Mirrors enum Element of c/matrix.c.
_ELEMENTS = {
    "f32": 0,
    "xf32": 1,
    "f64": 2,
    "f16": 3,
    "bf16": 4,
    "i8": 5,
    "fp8": 6,
    "bf8": 6,
    "fp6": 7,
    "bf6": 7,
    "fp4": 8,
}
_FACTOR = np.dtype(
    [(name, "i4") for name in ("element", "bits", "least", "count", "run")]
    + [("start", "i4", 16), ("format", FORMAT)]
)
_SHAPE = np.dtype(
    [(name, "i4") for name in ("m", "k", "blocks", "result", "group", "scale_a", "scale_b")]
    + [("sharing", "i4", 16), ("a", _FACTOR), ("b", _FACTOR)]
)


def _factor(kind: str, shape: MatrixShape, target: str) -> Array:
    factor = np.zeros((), _FACTOR)
    narrow = kind in ("fp8", "bf8", "fp6", "bf6", "fp4")
    factor["element"], factor["bits"] = _ELEMENTS[kind], _BITS[kind]
    factor["least"] = _LEAST.get(kind, _LEAST.get(f"{kind} {target}", 0))
    factor["format"] = format_of(small_float(kind, target) if narrow else formats.E4M3FN)[0]
    count = shape.k * shape.m * shape.blocks // LANES
    run = 16 if kind in ("fp8", "bf8") and count == 32 else count
    factor["count"], factor["run"] = count, run
    group, row = np.divmod(4 * np.arange(16), shape.m)
    block, part = np.divmod(group, shape.k // count)
    factor["start"] = (block * shape.k + part * run) * shape.m + row
    return factor


def translate_matrix(code: Code, inst: Instruction) -> bool:
    """Translate a matrix instruction; False if it is not one."""
    shape = mfma_shape(inst)
    if shape is None:
        return False
    if shape.m != shape.n or shape.m not in (4, 16, 32):
        raise UntranslatableError(f"a product of {shape.m} x {shape.n}")
    program, scaled = code.program, "_scale_" in inst.name
    fields = np.zeros(1, _SHAPE)
    fields["m"], fields["k"], fields["blocks"] = shape.m, shape.k, shape.blocks
    fields["result"] = ("f32", "i32", "f64").index(shape.result)
    fields["a"], fields["b"] = (_factor(kind, shape, program.target) for kind in (shape.a, shape.b))
    uses_model = program.hardware_sums and shape.a in GROUPS and "f8f6f4" not in inst.name
    fields["group"] = GROUPS[shape.a] if uses_model else 0
    fields["sharing"][0, : shape.blocks] = shared_blocks(inst, shape)
    scales = [0, 0]
    for which, name in enumerate(("scale_a", "scale_b")):
        fields[name] = -1
        if scaled:
            byte = inst.bits("op_sel", 3, 0)[which] + 2 * inst.bits("op_sel_hi", 3, 1)[which]
            fields[name] = 8 * byte
            scales[which] = code.raw(code.operand(inst, 4 + which), "u32")
    addend = code.operand(inst, 3)
    row, same = addend.index, addend.is_constant
    if addend.is_constant:
        bits = constant_bits(addend, shape.result)
        zero = (
            bits & (0x7FFFFFFFFFFFFFFF if shape.result == "f64" else 0x7FFFFFFF) == 0
            and shape.result != "f64"
        )
        row = -1 if zero else code.constant(bits, 2 if shape.result == "f64" else 1)
    d, a, b = (code.operand(inst, k).index for k in range(3))
    code.emit("matrix", d, a, b, row, x=64 * scales[0], y=int(same), z=64 * scales[1], p=fields)
    return True

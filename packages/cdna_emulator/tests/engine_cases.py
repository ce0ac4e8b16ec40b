"""Single instructions on both engines: every register and every byte that they leave is compared."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulator_machine import assembly

from narrowkv.cdna_emulator import Memory, Result, load_program, run
from narrowkv.cdna_emulator.operands import DTYPES

WORKGROUPS = 6  # with EXEC full, random, random, upper half, one lane, none
ROWS = 32  # v0..v31, of which v0..v15 are sources
SCALARS = 32  # s16..s47
_RECORD = 64 * ROWS + 64  # words of input of a workgroup: rows, scalars, EXEC
_OUT = 64 * (ROWS + SCALARS + 4)  # words of output: rows, scalars, VCC, SCC, EXEC

_EDGES = {
    "f32": [
        0x0,
        0x80000000,
        0x3F800000,
        0xBF800000,
        0x7F800000,
        0xFF800000,
        0x1,
        0x80000001,
        0x7FFFFF,
        0x800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x3F000000,
        0x40490FDB,
        0x4B000000,
        0x477FE000,
        0x477FF000,
        0x33000000,
        0x43800000,
    ],
    "f16": [
        0x0,
        0x8000,
        0x3C00,
        0xBC00,
        0x7C00,
        0xFC00,
        0x1,
        0x8001,
        0x3FF,
        0x400,
        0x7BFF,
        0xFBFF,
        0x3800,
        0x4248,
    ],
    "f64": [
        0x0,
        1 << 63,
        0x3FF << 52,
        0xBFF << 52,
        0x7FF << 52,
        0xFFF << 52,
        1,
        0x7FEFFFFFFFFFFFFF,
        0x3FE << 52,
        0x41E0000000000000,
        0xC1E0000000000000,
        0x36A0000000000000,
        0x47EFFFFFF0000000,
    ],
    "int": [
        0,
        1,
        2,
        31,
        32,
        63,
        0xFFFF,
        0x7FFF,
        0x8000,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFFFF,
        0xFFFFFF,
        0x00010001,
    ],
}
_NAN = {"f32": 0x7FC00000, "f16": 0x7E00, "f64": 0x7FF8 << 48}


def values(kind: str, rng: Any, count: int, with_nan: Any) -> Any:
    """Bits of `count` operands of a type (uint64): edge cases, ordinary numbers, any bits."""
    size = 8 * DTYPES[kind]().itemsize
    any_bits = rng.integers(0, 1 << 63, count, dtype=np.uint64) * 2 + rng.integers(
        0, 2, count, dtype=np.uint64
    )
    bits = any_bits & np.uint64((1 << size) - 1)
    edges = np.array(_EDGES[kind if kind in _EDGES else "int"], np.uint64)
    if kind in _NAN:
        small = {"f32": np.float32, "f16": np.float16, "f64": np.float64}[kind]
        unsigned: Any = {16: np.uint16, 32: np.uint32, 64: np.uint64}[size]
        ordinary = (rng.normal(size=count) * 10 ** rng.uniform(-3, 3, count)).astype(small).view(unsigned)
        bits = np.where(np.isnan(bits.astype(unsigned).view(small)), ordinary.astype(np.uint64), bits)
        bits = np.where(rng.random(count) < 0.5, ordinary.astype(np.uint64), bits)
    bits = np.where(rng.random(count) < 0.3, rng.choice(edges, count), bits) & np.uint64((1 << size) - 1)
    if kind in _NAN:
        bits = np.where(with_nan, np.uint64(_NAN[kind]), bits)
    if size == 16:  # both halves, for packed instructions and op_sel
        bits = bits | np.roll(bits, 1) << np.uint64(16)
    return bits


def records(kinds: tuple[str, ...], seed: int) -> Any:
    """Inputs of the workgroups, uint32: operand k in v[4k] and v[4k + 1], and in s[16 + 4k]."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 1 << 32, (WORKGROUPS, _RECORD), dtype=np.uint64).astype(np.uint32)
    nan_operand = rng.integers(0, 12, (WORKGROUPS, 64))  # of which operand the lane has a NaN
    for k, kind in enumerate(kinds):
        bits = values(kind, rng, WORKGROUPS * 64, (nan_operand == k).reshape(-1)).reshape(WORKGROUPS, 64)
        data[:, 256 * k : 256 * k + 64] = bits & np.uint64(0xFFFFFFFF)
        if DTYPES[kind]().itemsize == 8:
            data[:, 256 * k + 64 : 256 * k + 128] = bits >> np.uint64(32)
        at = 64 * ROWS + 4 * k
        data[:, at], data[:, at + 1] = bits[:, 0] & np.uint64(0xFFFFFFFF), bits[:, 0] >> np.uint64(32)
    exec_masks = [
        (1 << 64) - 1,
        int(rng.integers(1 << 63)),
        int(rng.integers(1 << 63)) << 1,
        0xFFFFFFFF << 32,
        1 << 17,
        0,
    ]
    for k, mask in enumerate(exec_masks):
        data[k, 64 * ROWS + SCALARS : 64 * ROWS + SCALARS + 2] = mask & 0xFFFFFFFF, mask >> 32
    return data


def kernel(lines: str) -> str:
    """Loads registers from the record of the workgroup, runs lines, stores the registers."""
    load = [
        f"global_load_dword v{r}, v127, s[4:5] offset:{256 * (r % 8)}"
        + ("\ns_add_u32 s4, s4, 2048\ns_addc_u32 s5, s5, 0" if r % 8 == 7 else "")
        for r in range(ROWS)
    ]
    body = [
        f"s_mul_i32 s6, s2, {4 * _RECORD}",
        f"s_mul_i32 s7, s2, {4 * _OUT}",
        "s_add_u32 s4, s8, s6",
        "s_addc_u32 s5, s9, 0",
        "s_add_u32 s10, s10, s7",
        "s_addc_u32 s11, s11, 0",
        "v_lshlrev_b32 v127, 2, v0",
        *load,
        "s_load_dwordx16 s[16:31], s[4:5], 0x0",
        "s_load_dwordx16 s[32:47], s[4:5], 0x40",
        f"s_load_dwordx2 s[14:15], s[4:5], {4 * SCALARS:#x}",
        "s_mov_b64 exec, s[14:15]",
        "s_mov_b64 vcc, s[40:41]",
        "s_mov_b32 m0, 0x100",
        "s_cmp_lg_u32 s42, 0x80000000",
        *lines.splitlines(),
        "s_cselect_b32 s12, 1, 0",
        "s_mov_b64 s[14:15], exec",
        "s_mov_b64 exec, -1",
    ]
    stored = (
        [f"v{r}" for r in range(ROWS)]
        + [f"s{16 + k}" for k in range(SCALARS)]
        + ["vcc_lo", "vcc_hi", "s12", "s14"]
    )
    for number, register in enumerate(stored):
        source = register
        if not register.startswith("v") or register.startswith("vcc"):
            body.append(f"v_mov_b32 v126, {register}")
            source = "v126"
        body.append(f"global_store_dword v127, {source}, s[10:11] offset:{256 * (number % 8)}")
        if number % 8 == 7:
            body += ["s_add_u32 s10, s10, 2048", "s_addc_u32 s11, s11, 0"]
    return "\n".join(body)


def outcomes(
    target: str,
    lines: str,
    kinds: tuple[str, ...] = ("u32",) * 4,
    *,
    seed: int = 0,
    extra: Any = None,
    **options: Any,
) -> list[tuple[Any, Any, Result]]:
    """What each engine leaves: registers ``[workgroups, rows, 64]``, the buffer at s[12:13], the result."""
    data, out = records(kinds, seed), np.zeros((WORKGROUPS, _OUT), np.uint32)
    before = np.array(np.zeros(64) if extra is None else extra, np.uint32)
    touched = before.copy()
    memory = Memory()
    pointers = {
        at: memory.map(array.reshape(-1).view(np.uint8), name=name)
        for at, name, array in ((8, "in", data), (10, "out", out), (12, "extra", touched))
    }
    setup = "\n".join(
        f"s_mov_b32 s{at + k}, {pointer >> 32 * k & 0xFFFFFFFF:#x}"
        for at, pointer in pointers.items()
        for k in (0, 1)
    )
    program = load_program(assembly(target, f"{setup}\n{kernel(lines)}"), lds_bytes=4096, **options)
    found = []
    for engine in ("numpy", "compiled"):  # in the same memory, because registers may hold addresses
        out[...], touched[...] = 0, before
        result = run(
            program, grid=(WORKGROUPS, 1, 1), args=[], memory=memory, check_uninitialised=False, engine=engine
        )
        found.append((out.reshape(WORKGROUPS, -1, 64).copy(), touched.copy(), result))
    return found


def _without_payloads(a: Any, b: Any, kind: str) -> tuple[Any, Any]:
    """Both with 0 where both are NaN."""
    dtype: Any = np.dtype(DTYPES[kind])
    if kind == "f64":
        wide = [(v[:, 16] | v[:, 17].astype(np.uint64) << np.uint64(32)).view(dtype) for v in (a, b)]
        for v in (a, b):
            v[:, 16:18][
                np.broadcast_to((np.isnan(wide[0]) & np.isnan(wide[1]))[:, None], v[:, 16:18].shape)
            ] = 0
        return a, b
    both = np.isnan(a.view(dtype)) & np.isnan(b.view(dtype))
    for v in (a, b):
        v.view(dtype)[both] = 0
    return a, b


def assert_same(
    target: str, lines: str, kinds: tuple[str, ...] = ("u32",) * 4, result: str = "u32", **options: Any
) -> None:
    """Compare the engines; a NaN may have any payload where the result is a float."""
    (a, x, first), (b, y, second) = outcomes(target, lines, kinds, **options)
    if result[0] == "f":
        a, b = _without_payloads(a, b, result)
    if not np.array_equal(a, b):
        where = np.argwhere(a != b)
        at = tuple(where[0])
        raise AssertionError(
            f"{lines!r}: {len(where)} words differ, first at {at}: numpy {a[at]:#x}, compiled {b[at]:#x}"
        )
    np.testing.assert_array_equal(x, y)
    assert first == second

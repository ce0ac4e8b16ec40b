"""The emulator's instructions against the pseudo-code of the ISA documents, bit for bit.

The pseudo-code is that of tinygrad's tables, which were generated from AMD's documents; it is no dependency.
Run with tinygrad installed in a folder of its own (`pip install --target DIR tinygrad`):
`NARROWKV_TINYGRAD=DIR pytest test_pseudocode.py`. As a script this prints the table of `docs/emulation.md`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from emulator_machine import execute
from pseudocode import FLOATS, NARROW, Number, decode, is_denormal, width_of
from pseudocode_run import Lane, show, translate

from narrowkv.cdna_emulator import EmulatorError

Array = Any

# What the documents define only up to an error: one unit in the last place is allowed.
APPROXIMATE = re.compile(r"^v_(exp|log|rcp|rcp_iflag|rsq|sqrt)_f")
# Not evaluated: moves between lanes, waits and modes, sums of matrix instructions, which the pseudo-code does
# not spell out, truth tables in modifiers, and functions of unknown precision.
LEFT_OUT = re.compile(
    r"^(v_(sin|cos)_|s_(setreg|nop|sleep|waitcnt|trap|set)"
    r"|v_(mfma|smfmac|bitop3|cmpx|div_|readlane|readfirst|writelane|perml))"
)
# Where the two differ, and why; docs/emulation.md has the same list.
KNOWN = {
    r"v_fract_": "the emulator keeps the result below 1",
    r"v_frexp_exp_": "of denormal numbers the emulator gives the true exponent",
    r"v_(log|rsq|sqrt)_f32$": "the emulator flushes denormal inputs",
    r"v_rndne_": "the emulator keeps the sign of zero, and large numbers",
    r"v_dot2c?_f32_": "the emulator rounds the sum once",
    r"v_cvt_scalef32_pk_fp4_": "the sign of a NaN, which FP4 lacks",
}


def tables() -> dict[str, str]:
    """Pseudo-code by mnemonic."""
    folder = os.environ.get("NARROWKV_TINYGRAD")
    if not folder:
        pytest.skip("NARROWKV_TINYGRAD names no folder with tinygrad")
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module("tinygrad.runtime.autogen.amd.cdna.str_pcode")
    finally:
        sys.path.remove(folder)
    return {re.sub(r"_e(32|64)$", "", op.name.lower()): text for op, text in module.PCODE.items()}


def _patterns(rng: np.random.Generator, count: int) -> Array:
    """64-bit patterns: edges of integers and of each floating type, random bits, and ordinary numbers."""
    edges = [0, 1, 2, 3, 31, 32, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
             0x3F800000, 0xBF800000, 0x3F000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00000, 0x00800000,
             0x00000001, 0x3C003C00, 0xBC00BC00, 0x7C007C00, 0xFC00FC00, 0x7E007E00, 0x00010001, 0x38003800,
             0x4B000001, 0x4F000000, 0x3FF0000000000000, 0x7FF0000000000000, 0xFFF8000000000000,
             0x8000000000000000, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x4340000000000001]  # fmt: skip
    kinds = rng.integers(0, 6, count)
    bits = rng.integers(0, 2**64, count, dtype=np.uint64)
    plain = (rng.normal(size=count) * 10.0 ** rng.uniform(-4, 4, count)).astype(np.float32)
    half = rng.normal(size=(count, 4)).astype(np.float16).view(np.uint64)[:, 0]
    double = (rng.normal(size=count) * 10.0 ** rng.uniform(-8, 8, count)).view(np.uint64)
    edge = np.array(edges, np.uint64)[rng.integers(0, len(edges), count)]
    single = plain.view(np.uint32).astype(np.uint64)
    small = bits & np.uint64(0x3F)
    return np.choose(kinds, [edge, bits, single, half, double, small])


def _is_wide(text: str, name: str) -> bool:
    return bool(re.search(rf"\b{name}\.[uifb]64|\b{name}\[63|\b{name}\.u32\[63", text))


def _operand(name: str, at: int, wide: bool, bank: str) -> str:
    return f"{bank}[{at}:{at + 1}]" if wide else f"{bank}{at}"


def instruction(name: str, text: str, literal: int) -> str:
    """The instruction's text with sources in registers 0, 2 and 4 (10, 12 and 14 if scalar)."""
    scalar = name.startswith("s_")
    bank, first = ("s", 10) if scalar else ("v", 0)
    sources = [k for k in range(3) if re.search(rf"\bS{k}\b|\bSRC{k}\b", text)]
    if re.match(r"s_(cmpk|movk|addk|mulk|cmovk)", name):
        where = "s20" if "cmpk" not in name else "s10"
        return f"{name} {where}, {literal & 0xFFFF:#x}"
    operands = [_operand(name, first + 2 * k, _is_wide(text, f"S{k}"), bank) for k in sources]
    if "SIMM32" in text:
        operands.insert(1 if "fmamk" in name else 2, f"{literal:#x}")
    target = [_operand(name, 8 if not scalar else 20, _is_wide(text, "D0") or "D0[63" in text, bank)]
    if name.startswith(("s_cmp_", "s_bitcmp")):
        target = []
    elif name.startswith("v_cmp"):
        target = ["vcc"]
    elif name.startswith("v_mad_") and "64_" in name:
        target.append("s[20:21]")
    elif re.search(r"VCC\.u64\[laneId\] =", text):
        target.append("vcc")
    carry = ["vcc"] if re.search(r"[+?-] VCC\.u64\[laneId\]|VCC\.u64\[laneId\] \?", text) else []
    return f"{name} {', '.join([*target, *operands, *carry])}"


def differences(
    name: str, text: str, table: dict[str, Any], target: str, rounds: int = 4
) -> tuple[int, list[str]]:
    """How many results were compared, and the first few that differ.

    Raises:
        EmulatorError: the emulator lacks the instruction.
    """
    code = None
    scalar = name.startswith("s_")
    compared, found = 0, []
    for number in range(rounds):
        rng = np.random.default_rng([number, *name.encode()])
        sources = [_patterns(rng, 64) for _ in range(3)]
        sources[1][::8] = sources[0][::8]
        old, carry, literal = _patterns(rng, 64), rng.integers(0, 2, 64), int(rng.integers(0, 2**31))
        line = instruction(name, text, literal)
        start = {8: old & np.uint64(0xFFFFFFFF), 9: old >> np.uint64(32)}
        for k, bits in enumerate(sources):
            start |= {2 * k: bits & np.uint64(0xFFFFFFFF), 2 * k + 1: bits >> np.uint64(32)}
        words = {register: bits.astype(np.uint32) for register, bits in start.items()}
        mask = int(sum(int(bit) << lane for lane, bit in enumerate(carry)))
        for lane in range(64 if not scalar else 8):
            if scalar:
                pairs = {10 + 2 * k + h: words[2 * k + h][lane] for k in range(3) for h in (0, 1)}
                pairs |= {20: words[8][lane], 21: words[9][lane], 30: 1 - carry[lane]}
                w = execute(target, f"s_cmp_eq_u32 s30, 0\n{line}", {}, {r: int(x) for r, x in pairs.items()})
            elif lane == 0:
                w = execute(target, line, words, {106: mask & 0xFFFFFFFF, 107: mask >> 32})
            code = code or compile(translate(text), name, "exec")
            inputs: dict[str, Any] = {f"S{k}": Number(int(sources[k][lane]), "b64") for k in range(3)}
            inputs |= {
                "D0": Number(int(old[lane]), "b64"), "VCC": Number(mask, "b64"), "TEXT": text,
                "laneId": Number(lane, "u32"), "SCC": Number(int(carry[lane]), "u1"),
                "EXEC": Number(2**64 - 1, "b64"), "OPSEL": Number(0, "b4"),
                "SIMM32": Number(literal, "b32"), "SDWA_SRC0_SEL": Number(0, "b3"),
            }  # fmt: skip
            if re.match(r"s_(cmp|mov|add|mul|cmov)k_", name):
                inputs["S1" if "cmpk" in name else "S0"] = Number(literal, "b64")
            run = Lane(code, table, inputs)
            pieces = _pieces(name, text, run, w, lane, scalar)
            compared += len(pieces)
            for what, got, want, kind in pieces:
                if not _agree(got, want, kind, bool(APPROXIMATE.match(name))):
                    shown = ", ".join(show(int(s[lane]) & 0xFFFFFFFF, "f32") for s in sources)
                    found.append(f"{line} [{shown}] {what}: {show(got, kind)}, not {show(want, kind)}")
    return compared, found


def _pieces(
    name: str, text: str, run: Lane, w: Any, lane: int, scalar: bool
) -> list[tuple[str, int, int, str]]:
    """(what, the emulator's bits, the pseudo-code's bits, type) of everything the instruction writes."""
    pieces = []
    if name.startswith("v_cmp"):
        return [("vcc", int(w.sq[53][0, 0]) >> lane & 1, run.values["D0"].bits >> lane & 1, "u1")]
    if scalar:
        got = int(w.su[20][0, 0]) | int(w.su[21][0, 0]) << 32
    else:
        got = int(w.u[8][0, lane]) | int(w.u[9][0, lane]) << 32
    for low, width, kind in _elements(text, run.written):
        keep = (1 << width) - 1
        pieces.append(("result", got >> low & keep, run.values["D0"].bits >> low & keep, kind))
    if "SCC =" in text:
        pieces.append(("scc", int(w.scc[0, 0]), int(bool(run.values["SCC"])), "u1"))
    if "EXEC.u64 =" in text:
        pieces.append(("exec", int(w.sq[63][0, 0]), run.values["EXEC"].bits, "u64"))
    if re.search(r"VCC\.u64\[laneId\] =", text):
        pieces.append(("vcc", int(w.sq[53][0, 0]) >> lane & 1, run.values["VCC"].bits >> lane & 1, "u1"))
    if "D1" in run.values:
        pieces.append(("carry", int(w.sq[10][0, 0]) >> lane & 1, run.values["D1"].bits, "u1"))
    return pieces


def _elements(text: str, written: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """What is written to the result, as the numbers that it holds: their NaNs have any payload."""
    narrow = re.search(r"_to_(fp8|bf8|fp4|f32(?=_scale))(?:_scale)?\(", text)
    packed = re.search(r"(?:tmp|D0)\[(?:15|31) : 0\]\.(f16|bf16|f32)", text)
    if "controls destination" in text:
        return [(0, 16, "f16")]
    kind = narrow[1] if narrow else packed[1] if packed else ""
    if not kind:
        return written
    width = width_of(kind)
    return [(low + k, width, kind) for low, size, _ in written for k in range(0, size, width)]


def _agree(got: int, want: int, kind: str, approximate: bool) -> bool:
    if got == want:
        return True
    if kind not in FLOATS and kind not in NARROW:
        return False
    x, y = decode(got, kind), decode(want, kind)
    if x != x or y != y:
        return x != x and y != y
    if approximate and is_denormal(Number(want, kind)) and x == 0:
        return True
    return approximate and abs(got - want) <= 1


def compare_all(table: dict[str, str], target: str, rounds: int) -> dict[str, tuple[int, list[str]]]:
    """`differences` of every instruction that a target and the table have."""
    # The minima and maxima, which other instructions' pseudo-code calls.
    helpers = {
        name: compile(translate(text), name, "exec")
        for name, text in table.items() if re.match(r"v_(min|max)\d?_", name)
    }  # fmt: skip
    results = {}
    for name, text in table.items():
        if not name.startswith(("s_", "v_")) or LEFT_OUT.match(name):
            continue
        if target == "gfx942" and re.search("fp8|bf8", name):
            continue  # the table has the formats of gfx950
        try:
            results[name] = differences(name, text, helpers, target, rounds)
        except EmulatorError:
            continue
    return results


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_instructions_agree_with_the_pseudo_code(target: str) -> None:
    results = compare_all(tables(), target, 2)
    assert len(results) > 250
    unknown = {n: bad[0] for n, (_, bad) in results.items() if bad and not any(re.match(k, n) for k in KNOWN)}
    assert not unknown


@pytest.mark.parametrize(
    ("name", "text", "agrees"),
    [
        ("v_and_b32", "D0.u32 = (S0.u32 & S1.u32)", True),
        ("v_and_b32", "D0.u32 = (S0.u32 | S1.u32)", False),
        ("v_cvt_f32_f16", "D0.f32 = f16_to_f32(S0.f16)", True),
        ("v_cvt_f32_f16", "D0.f32 = f16_to_f32(S0[31 : 16].f16)", False),
        ("s_add_u32", "tmp = 64'U(S0.u32) + 64'U(S1.u32);\nSCC = tmp[32];\nD0.u32 = tmp.u32", True),
        ("s_add_u32", "D0.u32 = S0.u32 + S1.u32;\nSCC = D0.u32 != 0U", False),
    ],
)  # fmt: skip
def test_the_comparison_finds_what_differs(name: str, text: str, agrees: bool) -> None:
    compared, found = differences(name, text, {}, "gfx950", 1)
    assert compared > 0
    assert (not found) == agrees


KINDS = (
    ("^s_", "scalar"), ("^v_cmp", "compares"), ("_cvt_", "conversions"), ("^v_(pk|dot)", "packed and dot"),
    ("", "other vector"),
)  # fmt: skip


def print_table(rounds: int) -> None:
    """Prints the table of agreement."""
    table = tables()
    for target in ("gfx942", "gfx950"):
        rows: dict[str, Counter[str]] = {}
        for name, (compared, bad) in compare_all(table, target, rounds).items():
            kind = next(kind for pattern, kind in KINDS if re.search(pattern, name))
            rows.setdefault(kind, Counter()).update(both=1, results=compared)
            rows[kind]["differ" if bad else "approximate" if APPROXIMATE.match(name) else "agree"] += 1
        for kind, row in rows.items():
            counts = [row[k] for k in ("both", "agree", "approximate", "differ", "results")]
            print(f"| {target} | {kind} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    np.seterr(all="ignore")
    print_table(2)

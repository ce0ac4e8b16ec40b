"""fp64 in both engines: division, fused multiply-add and the bits of 2 / pi against exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from emulator_machine import assembly

from narrowkv.cdna_emulator import Memory, engine_refusal, load_program, run

REFUSAL = engine_refusal(load_program(assembly("gfx942", "s_nop 0")))
ENGINES = [
    "numpy",
    pytest.param("compiled", marks=pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))),
]
QUOTIENT = """
    v_div_scale_f64 v[4:5], s[2:3], v[2:3], v[2:3], v[0:1]
    v_rcp_f64_e32 v[6:7], v[4:5]
    v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
    v_fmac_f64_e32 v[6:7], v[6:7], v[8:9]
    v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
    v_fmac_f64_e32 v[6:7], v[6:7], v[8:9]
    v_div_scale_f64 v[8:9], vcc, v[0:1], v[2:3], v[0:1]
    v_mul_f64 v[10:11], v[8:9], v[6:7]
    v_fma_f64 v[4:5], -v[4:5], v[10:11], v[8:9]
    v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[10:11]
    v_div_fixup_f64 v[12:13], v[4:5], v[2:3], v[0:1]"""


def double_edges(rng, count):
    """Doubles of every exponent, subnormal ones, neighbours of powers of two, zeros, infinities and NaN."""
    anything = rng.integers(0, 1 << 64, count, dtype=np.uint64).view(np.float64)
    subnormal = rng.integers(0, 1 << 52, count, dtype=np.uint64).view(np.float64)
    near = np.ldexp(1 + rng.integers(-3, 4, count) * 2.0**-52, rng.integers(-1074, 1024, count))
    some = rng.choice(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 2.0**-1022, np.finfo(np.float64).max], count
    )
    picked = rng.choice(4, count, p=(0.4, 0.3, 0.25, 0.05))
    return np.choose(picked, [anything, subnormal, near, some])


def run_on_doubles(lines, sources, result, engine):
    """The result in a pair of registers of lines that find sources in v[0:1], v[2:3] ..., for each lane."""
    count = len(sources[0])
    memory, out = Memory(), np.zeros(count)
    at = [memory.map(v.view(np.uint8)) for v in (*sources, out)]
    address = "".join(f"s_mov_b32 s{8 + 2 * k + j}, {p >> 32 * j & 0xFFFFFFFF:#x}\n" for k, p in enumerate(at)
                      for j in (0, 1))  # fmt: skip
    address += "s_lshl_b32 s6, s2, 9\nv_lshlrev_b32 v20, 3, v0\nv_add_u32 v20, s6, v20\n"
    loads = "".join(f"global_load_dwordx2 v[{2 * k}:{2 * k + 1}], v20, s[{8 + 2 * k}:{9 + 2 * k}]\n"
                    for k in range(len(sources)))  # fmt: skip
    end = 8 + 2 * len(sources)
    store = f"\nglobal_store_dwordx2 v20, v[{result}:{result + 1}], s[{end}:{end + 1}]"
    program = load_program(assembly("gfx942", address + loads + lines + store), lds_bytes=0)
    run(program, grid=(count // 64, 1, 1), args=[], memory=memory, check_uninitialised=False, engine=engine,
        batch_workgroups=count // 64)  # fmt: skip
    return out


@pytest.mark.parametrize("engine", ENGINES)
def test_fp64_division_is_exact(engine):
    rng = np.random.default_rng(8)
    count = 1 << 14
    y, q = double_edges(rng, count), double_edges(rng, count)
    with np.errstate(all="ignore"):
        # Half of the quotients are subnormal or next to numbers halfway between two of those.
        x = np.where(rng.random(count) < 0.5, double_edges(rng, count), y * q)
        want = x / y
    assert np.count_nonzero((want != 0) & (np.abs(want) < 2.0**-1022)) > count // 20
    got = run_on_doubles(QUOTIENT, [x, y], 12, engine)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("engine", ENGINES)
def test_fp64_fma_rounds_once(engine):
    rng = np.random.default_rng(9)
    count = 1 << 13
    x, y, z = (double_edges(rng, count) for _ in range(3))
    with np.errstate(all="ignore"):
        z = np.where(rng.random(count) < 0.5, z, -x * y * (1 + rng.integers(-2, 3, count) * 2.0**-52))
        got = run_on_doubles("v_fma_f64 v[6:7], v[0:1], v[2:3], v[4:5]", [x, y, z], 6, engine)
        for a, b, c, result in zip(x, y, z, got, strict=True):
            if np.isfinite([a, b, c]).all():
                exact = Fraction(a) * Fraction(b) + Fraction(c)
                overflow = abs(exact) >= Fraction(2) ** 1024 - Fraction(2) ** 970
                want = (math.inf if exact > 0 else -math.inf) if overflow else float(exact)
            else:
                want = c if np.isfinite([a, b]).all() else a * b + c
            np.testing.assert_equal(result, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_segments_of_two_over_pi(engine):
    mpmath = pytest.importorskip("mpmath")
    x = np.concatenate([np.ldexp(1.5, np.arange(-40, 1024, 19)), [0.0] * 8])[:64]
    with mpmath.workprec(1400):
        bits = int(mpmath.floor(2 / mpmath.pi * 2**1201))
    for segment in (0, 1, 2, 17):
        got = run_on_doubles(f"v_trig_preop_f64 v[6:7], v[0:1], {segment}", [x], 6, engine)
        for value, found in zip(x, got, strict=True):
            exponent = math.frexp(value)[1] + 1022 if value else 0
            shift = 53 * segment + max(exponent - 1077, 0)
            kept = (bits << 3000 >> (3000 + 1201 - 53 - shift)) & (2**53 - 1)
            assert found == math.ldexp(kept, (75 if exponent >= 1968 else -53) - shift)

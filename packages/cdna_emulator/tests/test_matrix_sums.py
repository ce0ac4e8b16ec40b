"""Sums of matrix instructions as CDNA3 forms them: each rule, and instructions that use them."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_machine import execute

from narrowkv.cdna_emulator.matrix_sums import hardware_sum


def one(kind: str, factors: list[tuple[float, float]], addend: float, k: int) -> float:
    """A sum of products, of which those not given are zero."""
    a, b = np.zeros((1, k)), np.zeros((1, k))
    for position, (x, y) in enumerate(factors):
        a[0, position], b[0, position] = x, y
    return float(hardware_sum(a, b, np.array([[addend]], np.float32), (kind, kind), "gfx942")[0, 0])


SMALL = (2.0**-12, 2.0**-13)


@pytest.mark.parametrize(
    ("kind", "factors", "addend", "expected"),
    [
        ("f16", [(1, 1)] + [SMALL] * 7, 0.0, 1.0),  # cut off at 24 bits, one by one
        ("f16", [(1, 1)] + [(SMALL[0], -SMALL[1])] * 7, 0.0, 1.0),  # toward zero
        ("f16", [(1, 1)], -(2.0**-30), 1 - 2.0**-24),  # the addend is rounded down
        ("f16", [(2.0**-12, -(2.0**-14))], 1.0, 1.0 - 2.0**-26),  # rounded in fp32 only: to nearest
        ("fp8", [(1, 1)], -(2.0**-30), 1.0),  # a small addend is dropped
        ("fp8", [(1, 1)], -(2.0**-25), 1 - 2.0**-24),  # one of 25 bits is not
        ("bf16", [(2.0**100, 2.0**100), (-(2.0**100), 2.0**100)], 0.0, np.nan),
        ("bf16", [(2.0**100, 2.0**100)], 0.0, np.inf),
        ("f16", [(np.inf, 1)], 0.0, np.inf), ("f16", [(np.nan, 1)], 0.0, np.nan),
        ("f16", [], 0.0, 0.0), ("f32", [(1, 1), (2.0**-25, 1)], 0.0, 1.0),
    ],
)  # fmt: skip
def test_rules(kind: str, factors: list[tuple[float, float]], addend: float, expected: float) -> None:
    with np.errstate(invalid="ignore"):
        got = one(kind, factors, addend, 16)
    np.testing.assert_equal(got, float(np.float32(expected)))


def test_groups_follow_one_another() -> None:
    """The ninth product finds the sum of eight, rounded to fp32, as its addend."""
    factors = [(1.0, 1.0)] + [(0.0, 0.0)] * 7 + [(2.0**-12, 2.0**-12)] * 8
    assert one("f16", factors, 0.0, 16) == 1 + 2.0**-21
    assert one("f16", factors[::-1], 0.0, 16) == 1 + 2.0**-21


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["16x16x16_f16", "32x32x8_f16", "16x16x16_bf16"])
def test_instructions_form_them(target: str, name: str) -> None:
    """Rows and columns are where they are without the option, and results differ in the last bits only."""
    random = np.random.default_rng(7)
    size = 16 if name.startswith("32") else 4
    half = np.float16 if name.endswith("_f16") else None
    x = random.normal(size=(4, 64, 2)).astype(np.float32)
    words = x.astype(half).view(np.uint32)[..., 0] if half else (x.view(np.uint32) >> 16)[..., 0] * 65537
    v: dict[int, np.ndarray] = {k: words[k].astype(np.uint32) for k in range(4)}
    v |= {8 + k: random.normal(size=64).astype(np.float32) for k in range(size)}
    line = f"v_mfma_f32_{name} v[32:{31 + size}], v[0:1], v[2:3], v[8:{7 + size}]"
    plain, exact = (execute(target, line, v, hardware_sums=option) for option in (False, True))
    for k in range(32, 32 + size):
        np.testing.assert_allclose(exact.f[k], plain.f[k], rtol=2e-6, atol=2e-6)
    assert any((exact.u[k] != plain.u[k]).any() for k in range(32, 32 + size))

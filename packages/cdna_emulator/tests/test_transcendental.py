"""Transcendental instructions: rounded correctly, so that no library's last bits show in a result."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from narrowkv.cdna_emulator import transcendental
from narrowkv.cdna_emulator.state import Array

mpmath.mp.prec = 200
TINY = np.finfo(np.float32).tiny
EXACT = {
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log2": lambda x: mpmath.log(x, 2),
    "reciprocal": lambda x: 1 / x,
    "reciprocal_root": lambda x: 1 / mpmath.sqrt(x),
    "root": mpmath.sqrt,
    "sine": lambda x: mpmath.sinpi(2 * x),
    "cosine": lambda x: mpmath.cospi(2 * x),
}
LIBRARY = {"exp2": "exp2", "log2": "log2", "sine": "sin", "cosine": "sin"}
EDGES = [1.0, 2.0, 0.25, 3.0, 5e-7, TINY, np.nextafter(TINY, np.float32(1)), 3.4e38, 127.999, 1 - 2**-24]
# Inputs whose results lie within a few fp64 units of the middle between two fp32 numbers.
HARD = {
    "exp2": ("0x1.05535ap-7", "0x1.9357c4p-4", "0x1.06c8aap-5"),
    "log2": ("0x1.dbbffap+0",),
    "reciprocal_root": ("0x1.7431c6p+1", "0x1.13e07p+1"),
    "sine": ("0x1.fafebp-5", "0x1.019148p-5"),
    "cosine": ("0x1.e228cep-3", "0x1.814054p-3", "0x1.bf9baep-3"),
}


def inputs(name: str, count: int, dtype: type = np.float32) -> Array:
    random = np.random.default_rng(5)
    if name == "exp2":
        x = random.uniform(-130, 129, count) * random.uniform(0, 1, count) ** 3
    elif name in ("sine", "cosine"):
        x = random.uniform(-2, 2, count) * random.uniform(0, 1, count) ** 4
    else:
        x = np.exp2(random.uniform(-126, 127, count))
    signs = (1, -1) if name in ("exp2", "reciprocal", "sine", "cosine") else (1,)
    edges = [sign * edge for sign in signs for edge in EDGES]
    edges += [float.fromhex(text) for text in HARD.get(name, ())]
    with np.errstate(over="ignore"):
        return np.concatenate([edges, x]).astype(dtype)


def rounded(value: mpmath.mpf, dtype: type) -> float:
    """The nearest number of a type, denormals included, ties to even."""
    info = np.finfo(dtype)
    if value == 0:
        return 0.0
    exponent = max(int(mpmath.floor(mpmath.log(abs(value), 2))), int(info.minexp))
    unit = mpmath.mpf(2) ** (exponent - int(info.nmant))
    result = mpmath.nint(value / unit) * unit  # ties to even
    if abs(result) > float(info.max):
        return float(mpmath.sign(value)) * np.inf
    return float(result)


def flushed(value: float) -> float:
    return float(np.copysign(0.0, value)) if abs(value) < TINY else value


@pytest.mark.parametrize("name", EXACT)
def test_a_result_is_the_nearest_number(name: str) -> None:
    x = inputs(name, 3000)
    with np.errstate(all="ignore"):
        got = getattr(transcendental, name)(x)
    flush = float if name in ("sine", "cosine") else flushed
    expected = [flush(rounded(EXACT[name](mpmath.mpf(float(v))), np.float32)) for v in x]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))


@pytest.mark.parametrize("name", EXACT)
def test_every_fp16_result_is_the_nearest_number(name: str) -> None:
    x = np.arange(0, 2**16, 7, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x) & (x != 0) & ((x > 0) | (name in ("exp2", "reciprocal", "sine", "cosine")))]
    with np.errstate(all="ignore"):
        got = getattr(transcendental, name)(x)
    expected = [rounded(EXACT[name](mpmath.mpf(float(v))), np.float16) for v in x]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, np.array(expected).astype(np.float16))


@pytest.mark.parametrize("name", LIBRARY)
def test_no_library_changes_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(name, 2**20)
    with np.errstate(all="ignore"):
        first = getattr(transcendental, name)(x)
        library = getattr(np, LIBRARY[name])
        for units in (-3, 3):  # an fp64 function that is that many units in the last place off
            monkeypatch.setattr(np, LIBRARY[name], lambda v, units=units: off(library(v), units))
            again = getattr(transcendental, name)(x)
            np.testing.assert_array_equal(again.view(np.int32), first.view(np.int32))


def off(values: Array, units: int) -> Array:
    changes = np.isfinite(values) & ((values.view(np.int64) & 0x1FFFFFFF) > 8)  # exact values stay
    return np.where(changes, (values.view(np.int64) + units).view(np.float64), values)


def test_special_values() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40], np.float32)
    with np.errstate(all="ignore"):
        found = {name: getattr(transcendental, name)(x).tolist() for name in EXACT}
    inf, nan = np.inf, np.nan
    expected = {
        "exp2": [inf, 0, nan, 1, 1, 1, 1],
        "log2": [inf, nan, nan, -inf, -inf, -inf, -inf],
        "reciprocal": [0, 0, nan, inf, -inf, inf, -inf],
        "reciprocal_root": [0, nan, nan, inf, -inf, inf, -inf],
        "root": [inf, nan, nan, 0, 0, 0, 0],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)
    assert np.isnan(found["sine"][:3]).all()
    assert found["cosine"][3:] == [1, 1, 1, 1]
    assert transcendental.exp2(np.array([-126, -126.5], np.float32)).tolist() == [float(TINY), 0]

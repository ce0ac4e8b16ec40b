"""Narrow formats against torch's dtypes, every code and every fp16 value."""

import numpy as np
import pytest

from narrowkv.cdna_emulator import formats

torch = pytest.importorskip("torch")

PAIRS = [
    (formats.E4M3FN, torch.float8_e4m3fn), (formats.E5M2, torch.float8_e5m2),
    (formats.E4M3FNUZ, torch.float8_e4m3fnuz), (formats.E5M2FNUZ, torch.float8_e5m2fnuz),
]  # fmt: skip
IDS = [fmt.name for fmt, _ in PAIRS]


@pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=IDS)
def test_decode_every_code(fmt, dtype):
    want = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(fmt.decode_table, want)


@pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=IDS)
def test_encode_every_finite_half_in_range(fmt, dtype):
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    limit = torch.finfo(dtype).max
    values = values[np.abs(values.astype(np.float32)) <= limit].astype(np.float32)
    want = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fmt.encode(values, saturate=False), want)


@pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=IDS)
def test_encode_beyond_range(fmt, dtype):
    big = np.array([1e6, -1e6], np.float32)
    saturated = fmt.decode_table[fmt.encode(big, saturate=True)]
    np.testing.assert_array_equal(saturated, [torch.finfo(dtype).max, -torch.finfo(dtype).max])
    assert not np.isfinite(fmt.decode_table[fmt.encode(big, saturate=False)]).any()
    assert np.isnan(fmt.decode_table[fmt.encode(np.array([np.nan]), saturate=True)]).all()


def test_e2m1_table_is_the_ocp_one():
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(formats.E2M1.decode_table, positive + [-x for x in positive])
    np.testing.assert_array_equal(
        formats.E2M1.encode(np.array([0.25, 0.75, 2.5, 5.0, 100.0, -0.3]), saturate=False), [0, 2, 4, 6, 7, 9]
    )


def test_e8m0_ends_of_the_range():
    np.testing.assert_array_equal(formats.e8m0_to_f64(np.array([0, 127, 254])), [2.0**-127, 1.0, 2.0**127])
    assert np.isnan(formats.e8m0_to_f64(np.array([255]))).all()


def test_bf16_rounds_to_nearest_even_everywhere():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    want = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(formats.f32_to_bf16(values), want)


def test_f16_toward_zero_never_grows():
    values = np.random.default_rng(1).normal(size=20_000).astype(np.float32) * 100
    half = formats.f32_to_f16_toward_zero(values).astype(np.float32)
    step = np.abs(
        np.nextafter(half.astype(np.float16), np.float16(np.inf) * np.sign(values).astype(np.float16))
    )
    assert (np.abs(half) <= np.abs(values)).all()
    assert (np.abs(values) < step.astype(np.float32)).all()

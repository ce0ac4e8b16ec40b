"""Bit-exact rounding, against oracles built from the formats' definitions in Python integers and fp64."""

import math

import numpy as np
import pytest
import torch

from narrowkv.quant import (
    FORMATS,
    FP8_FORMATS,
    cast_fp8,
    decode,
    encode,
    pack_fp4,
    pack_int4,
    round_fp4,
    round_int4,
    round_int8,
    unpack_fp4,
    unpack_int4,
)
from narrowkv.quant.fp4 import decode_fp4
from narrowkv.quant.rounding import round_to_format

# name: (exponent bits, mantissa bits, bias, codes that are NaN, codes that are Inf)
DEFINITIONS = {
    "fp8_e4m3fn": (4, 3, 7, {0x7F, 0xFF}, set()),
    "fp8_e4m3fnuz": (4, 3, 8, {0x80}, set()),
    "fp8_e5m2": (5, 2, 15, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
}
# The sixteen codes of E2M1, by hand from the MX specification.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def value_of_code(name: str, code: int) -> float:
    _, mantissa_bits, bias, nan, inf = DEFINITIONS[name]
    sign = -1.0 if code & 0x80 else 1.0
    if code in nan:
        return math.nan
    if code in inf:
        return sign * math.inf
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


def round_by_search(x: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Codes of the magnitudes nearest to |x| (fp64, exact), ties to the even code, saturating."""
    target = np.abs(x)
    upper = np.clip(np.searchsorted(magnitudes, target), 1, len(magnitudes) - 1)
    lower = upper - 1
    to_upper, to_lower = magnitudes[upper] - target, target - magnitudes[lower]
    tie_up = (to_upper == to_lower) & (upper % 2 == 0)
    return np.where((to_upper < to_lower) | tie_up, upper, lower)


def fp8_oracle(x: torch.Tensor, name: str) -> np.ndarray:
    codes = [c for c in range(128) if math.isfinite(value_of_code(name, c))]
    wide = x.double().numpy()
    code = round_by_search(np.nan_to_num(wide, nan=0.0), np.array([value_of_code(name, c) for c in codes]))
    code = np.where((wide < 0) & (code > 0), code | 0x80, code)
    return np.where(np.isnan(wide), -1, code)


def hard_inputs(name: str) -> torch.Tensor:
    """Every value, every midpoint, the fp32 numbers next to both, ranges beyond both ends, and Inf."""
    values = torch.tensor([value_of_code(name, c) for c in range(128)], dtype=torch.float64)
    values = values[values.isfinite()]
    middle = (values[1:] + values[:-1]) / 2
    points = torch.cat((values, middle, values[-1:] * torch.tensor([1.03125, 1.0625, 1.25, 2, 1e30]))).float()
    assert torch.equal(points[: len(values) + len(middle)].double(), torch.cat((values, middle)))
    up = torch.nextafter(points, torch.tensor(math.inf))
    down = torch.nextafter(points, torch.tensor(-math.inf))
    tiny = torch.tensor([2.0**-149, 2.0**-126, 2.0**-11, 2.0**-10, 2.0**-17, math.inf])
    positive = torch.cat((points, up, down, tiny))
    return torch.cat((positive, -positive))


def assert_codes(got: torch.Tensor, want: np.ndarray, name: str) -> None:
    nan = np.isin(got.numpy(), list(DEFINITIONS[name][3]))
    np.testing.assert_array_equal(nan, want == -1)
    np.testing.assert_array_equal(got.numpy()[~nan], want[~nan])


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_all_256_codes_decode_like_the_definition_and_like_torch(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    want = torch.tensor([value_of_code(name, c) for c in range(256)])
    got = decode(codes, name)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got)[~got.isnan()], torch.signbit(want)[~got.isnan()])
    own = codes.view(FORMATS[name].torch_dtype)
    torch.testing.assert_close(decode(own), own.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_all_256_codes_survive_decode_and_cast(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes, name)
    again = cast_fp8(values, name).view(torch.uint8)
    exact = values.isfinite() & (codes != 0x80)
    assert torch.equal(again[exact], codes[exact])
    assert decode(again[values.isnan()], name).isnan().all()
    if name != "fp8_e4m3fnuz":
        assert int(again[0x80]) == 0


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_ties_subnormals_and_overflow(name: str) -> None:
    x = hard_inputs(name)
    assert_codes(cast_fp8(x, name).view(torch.uint8), fp8_oracle(x, name), name)


@pytest.mark.parametrize("name", FP8_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_input(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_codes(cast_fp8(x, name).view(torch.uint8), fp8_oracle(x, name), name)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_random_fp32_bit_patterns(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32)
    near = torch.randn(1 << 18, generator=generator) * torch.exp2(
        torch.empty(1 << 18).uniform_(-20, 18, generator=generator)
    )
    x = torch.cat((bits.view(torch.float32), near))
    assert_codes(cast_fp8(x, name).view(torch.uint8), fp8_oracle(x, name), name)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_0x80_is_never_written_for_a_number(name: str) -> None:
    x = -torch.cat((torch.zeros(1), torch.logspace(-45, -2, 5000, dtype=torch.float64).float()))
    byte = cast_fp8(x, name).view(torch.uint8)
    assert int((byte == 0x80).sum()) == 0
    assert int((byte == 0).sum()) > 1


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_cast_handles_strided_and_empty_inputs(name: str) -> None:
    x = torch.randn(8, 6).t()[::2]
    assert torch.equal(cast_fp8(x, name).view(torch.uint8), cast_fp8(x.contiguous(), name).view(torch.uint8))
    assert cast_fp8(torch.zeros(0, 4), name).shape == (0, 4)
    before = x.clone()
    cast_fp8(x, name)
    assert torch.equal(x, before)


def test_cast_refuses() -> None:
    with pytest.raises(TypeError, match=r"x must have dtype one of .*, got torch.float64"):
        cast_fp8(torch.zeros(2, dtype=torch.float64), "fp8_e4m3fn")
    with pytest.raises(
        ValueError, match="format must be one of fp8_e4m3fn, fp8_e4m3fnuz, fp8_e5m2; got int8"
    ):
        cast_fp8(torch.zeros(2), "int8")
    with pytest.raises(ValueError, match="x must not require grad"):
        cast_fp8(torch.zeros(2, requires_grad=True), "fp8_e4m3fn")
    with pytest.raises(
        ValueError, match="format must be FP8, FP4, INT8 or INT4 to be quantised to, got bf16"
    ):
        encode(torch.zeros(2), "bf16")


def test_fp4_codes_are_the_hand_written_table() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    got = decode_fp4(codes)
    assert got.tolist() == E2M1
    assert torch.equal(torch.signbit(got), codes >= 8)
    keep = codes != 8
    assert torch.equal(round_fp4(got)[keep], codes[keep])
    assert int(round_fp4(got)[8]) == 0


def test_fp4_rounding_at_ties_and_their_neighbours_and_at_random() -> None:
    magnitudes = torch.tensor(E2M1[:8])
    points = torch.cat(
        (magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2, torch.tensor([7.0, 1e30, math.inf, 2.0**-149]))
    )
    points = torch.cat(
        (points, torch.nextafter(points, torch.tensor(math.inf)), torch.nextafter(points, torch.tensor(0.0)))
    )
    x = torch.cat((points, -points, torch.randn(1 << 16, generator=torch.Generator().manual_seed(2)) * 3))
    wide = x.double().numpy()
    code = round_by_search(np.nan_to_num(wide), np.array(E2M1[:8]))
    want = np.where((wide < 0) & (code > 0), code + 8, code)
    np.testing.assert_array_equal(round_fp4(x).numpy(), want)
    assert int(round_fp4(torch.tensor([math.nan]))[0]) == 0


@pytest.mark.parametrize(("round_to", "limit"), [(round_int8, 127), (round_int4, 7)])
def test_int_rounding(round_to, limit: int) -> None:  # type: ignore[no-untyped-def]
    halves = torch.arange(-2 * limit - 8, 2 * limit + 9) / 2.0
    x = torch.cat(
        (
            halves,
            torch.nextafter(halves, torch.tensor(math.inf)),
            torch.nextafter(halves, torch.tensor(-math.inf)),
        )
    )
    want = [max(-limit, min(limit, round(v))) for v in x.double().tolist()]  # Python rounds halves to even
    assert round_to(x).tolist() == want
    assert round_to(x).dtype == torch.int8
    assert round_to(torch.tensor([math.nan, math.inf, -math.inf])).tolist() == [0, limit, -limit]


def test_packing_puts_element_2i_in_the_low_nibble() -> None:
    assert pack_fp4(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    assert unpack_fp4(torch.tensor([0x21, 0xF0], dtype=torch.uint8)).tolist() == [1, 2, 0, 15]
    assert pack_int4(torch.tensor([-1, 7, -8, 0], dtype=torch.int8)).tolist() == [0x7F, 0x08]
    assert unpack_int4(torch.tensor([0x7F, 0x08], dtype=torch.uint8)).tolist() == [-1, 7, -8, 0]


def test_every_byte_survives_unpack_and_pack() -> None:
    byte = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert torch.equal(pack_fp4(unpack_fp4(byte)), byte)
    assert torch.equal(pack_int4(unpack_int4(byte)), byte)
    assert unpack_int4(byte).min() == -8
    assert unpack_int4(byte).max() == 7


def test_packing_refuses_odd_sizes_and_other_dtypes() -> None:
    with pytest.raises(
        ValueError, match=r"code must have an even last dimension to be packed, got shape \[2, 3\]"
    ):
        encode(torch.zeros(2, 3), "fp4_e2m1")
    with pytest.raises(TypeError, match=r"x must have dtype torch.int8"):
        pack_int4(torch.zeros(2))
    with pytest.raises(TypeError, match=r"packed must have dtype torch.uint8"):
        unpack_fp4(torch.zeros(2))
    with pytest.raises(ValueError, match="packed must have at least one dimension"):
        unpack_fp4(torch.tensor(1, dtype=torch.uint8))


@pytest.mark.parametrize("name", [f for f in FORMATS if FORMATS[f].kind != "float"])
def test_encode_then_decode_is_round_to_format(name: str) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)) * 4
    stored = encode(x, name)
    assert stored.dtype == FORMATS[name].storage_dtype
    assert stored.shape == (64, FORMATS[name].storage_bytes(32))
    assert torch.equal(decode(stored, name), round_to_format(x, name))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_decode_widens_16_bit_storage(name: str) -> None:
    x = torch.randn(8).to(FORMATS[name].torch_dtype)
    assert torch.equal(decode(x, name), x.float())


@pytest.mark.parametrize("name", [f for f in FORMATS if FORMATS[f].kind != "float"])
def test_rounding_has_no_bias(name: str) -> None:
    """Over whole steps the errors are symmetric: their mean is within five standard errors of 0."""
    count = 1 << 20
    x = 4.0 + 2.0 * torch.rand(count, generator=torch.Generator().manual_seed(4), dtype=torch.float64).float()
    for sign in (1.0, -1.0):
        error = (round_to_format(sign * x, name) - sign * x).double()
        assert float(error.std()) > 0.05
        assert abs(float(error.mean())) < 5 * float(error.std()) / math.sqrt(count)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_as_many_ties_go_up_as_down(name: str) -> None:
    fmt = FORMATS[name]
    step = fmt.smallest_subnormal
    ties = (
        torch.arange(2 ** (fmt.mantissa_bits + 1), dtype=torch.float32) + 0.5
    ) * step  # two binades of one step
    up = cast_fp8(ties, name).float() > ties
    assert int(up.sum()) * 2 == len(ties)

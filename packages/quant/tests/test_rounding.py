"""Bit-exact rounding, against oracles built from the formats' definitions in Python integers and fp64."""

import math
from collections.abc import Callable
from dataclasses import dataclass

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

# name: (mantissa bits, bias, codes that are NaN, codes that are Inf)
DEFINITIONS = {
    "fp8_e4m3fn": (3, 7, {0x7F, 0xFF}, set()),
    "fp8_e4m3fnuz": (3, 8, {0x80}, set()),
    "fp8_e5m2": (2, 15, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
}
# The sixteen codes of E2M1, by hand from the MX specification.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NAN = -1000  # where any of a format's NaN codes is right
CODES = torch.arange(256, dtype=torch.uint8)


def value_of_code(name: str, code: int) -> float:
    mantissa_bits, bias, nan, inf = DEFINITIONS[name]
    sign = -1.0 if code & 0x80 else 1.0
    if code in nan:
        return math.nan
    if code in inf:
        return sign * math.inf
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


@dataclass(frozen=True)
class Codes:
    """Codes of a format.

    Attributes:
        magnitudes: of the codes 0, 1, 2...
        round: narrowkv's rounding of fp32 to codes.
        negative: the code of a negative number, of its magnitude's.
        nan: codes that are NaN; without any, NaN becomes 0.
    """

    magnitudes: list[float]
    round: Callable[[torch.Tensor], torch.Tensor]
    negative: Callable[[np.ndarray], np.ndarray]
    nan: set[int]

    def nearest(self, x: torch.Tensor) -> np.ndarray:
        """Codes nearest to x (fp64, exact), ties to the even code, saturating, without negative zeros."""
        exact, magnitudes = x.double().numpy(), np.array(self.magnitudes)
        target = np.abs(np.nan_to_num(exact, nan=0.0))
        upper = np.clip(np.searchsorted(magnitudes, target), 1, len(magnitudes) - 1)
        to_upper, to_lower = magnitudes[upper] - target, target - magnitudes[upper - 1]
        is_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
        code = np.where(is_upper, upper, upper - 1)
        code = np.where((exact < 0) & (code > 0), self.negative(code), code)
        return np.where(np.isnan(exact), NAN if self.nan else 0, code)


def fp8_codes(name: str) -> Codes:
    values = [value_of_code(name, code) for code in range(128)]
    return Codes(
        [x for x in values if math.isfinite(x)],
        lambda x: cast_fp8(x, name).view(torch.uint8),
        lambda code: code | 0x80,
        DEFINITIONS[name][2],
    )


ROUNDINGS = {
    **{name: fp8_codes(name) for name in FP8_FORMATS},
    "fp4_e2m1": Codes(E2M1[:8], round_fp4, lambda code: code | 8, set()),
    "int8": Codes([float(i) for i in range(128)], round_int8, np.negative, set()),
    "int4": Codes([float(i) for i in range(8)], round_int4, np.negative, set()),
}


def hard_inputs(codes: Codes) -> torch.Tensor:
    """Every value, every midpoint, the fp32 numbers next to both, ranges beyond both ends, and Inf."""
    values = torch.tensor(codes.magnitudes, dtype=torch.float64)
    middle = (values[1:] + values[:-1]) / 2
    beyond = values[-1:] * torch.tensor([1.03125, 1.0625, 1.25, 2, 1e30])
    points = torch.cat((values, middle, beyond)).float()
    assert torch.equal(points[: len(values) + len(middle)].double(), torch.cat((values, middle)))
    around = (torch.nextafter(points, torch.tensor(limit)) for limit in (math.inf, -math.inf))
    tiny = torch.tensor([2.0**-149, 2.0**-126, 2.0**-11, 2.0**-10, 2.0**-17, math.inf, math.nan])
    positive = torch.cat((points, *around, tiny))
    return torch.cat((positive, -positive))


def random_inputs(codes: Codes) -> torch.Tensor:
    """Random fp32 bit patterns, and numbers whose exponents are those of the formats."""
    random = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=random).to(torch.int32)
    exponents = torch.empty(1 << 16).uniform_(-20, 18, generator=random)
    return torch.cat((bits.view(torch.float32), torch.randn(1 << 16, generator=random) * exponents.exp2()))


EVERY_16_BITS = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
INPUTS = {
    "ties and their neighbours": hard_inputs,
    "random": random_inputs,
    "every bf16": lambda codes: EVERY_16_BITS.view(torch.bfloat16),
    "every fp16": lambda codes: EVERY_16_BITS.view(torch.float16),
}
each_format = pytest.mark.parametrize("name", ROUNDINGS)
each_fp8 = pytest.mark.parametrize("name", FP8_FORMATS)


@pytest.mark.parametrize("inputs", INPUTS)
@each_format
def test_rounds_to_the_nearest_ties_to_even_and_saturates(name: str, inputs: str) -> None:
    codes = ROUNDINGS[name]
    x = INPUTS[inputs](codes)
    got = codes.round(x if name in FP8_FORMATS else x.float()).long().numpy()
    np.testing.assert_array_equal(np.where(np.isin(got, list(codes.nan)), NAN, got), codes.nearest(x))


@each_fp8
def test_all_256_codes_decode_like_the_definition_and_like_torch(name: str) -> None:
    want = torch.tensor([value_of_code(name, c) for c in range(256)])
    got = decode(CODES, name)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got)[~got.isnan()], torch.signbit(want)[~got.isnan()])
    own = CODES.view(FORMATS[name].torch_dtype)
    torch.testing.assert_close(decode(own), own.float(), rtol=0, atol=0, equal_nan=True)


@each_fp8
def test_all_256_codes_survive_decode_and_cast(name: str) -> None:
    values = decode(CODES, name)
    again = cast_fp8(values, name).view(torch.uint8)
    exact = values.isfinite() & (CODES != 0x80)
    assert torch.equal(again[exact], CODES[exact])
    assert decode(again[values.isnan()], name).isnan().all()
    if name != "fp8_e4m3fnuz":
        assert int(again[0x80]) == 0


def test_fp4_codes_are_the_hand_written_table() -> None:
    codes = CODES[:16]
    got = decode_fp4(codes)
    assert got.tolist() == E2M1
    assert torch.equal(torch.signbit(got), codes >= 8)
    assert torch.equal(round_fp4(got), codes.masked_fill(codes == 8, 0))


@each_fp8
def test_cast_handles_strided_and_empty_inputs(name: str) -> None:
    x = torch.randn(8, 6).t()[::2]
    before = x.clone()
    assert torch.equal(cast_fp8(x, name).view(torch.uint8), cast_fp8(x.contiguous(), name).view(torch.uint8))
    assert torch.equal(x, before)
    assert cast_fp8(torch.zeros(0, 4), name).shape == (0, 4)


def test_packing_puts_element_2i_in_the_low_nibble() -> None:
    assert pack_fp4(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    assert unpack_fp4(torch.tensor([0x21, 0xF0], dtype=torch.uint8)).tolist() == [1, 2, 0, 15]
    assert pack_int4(torch.tensor([-1, 7, -8, 0], dtype=torch.int8)).tolist() == [0x7F, 0x08]
    assert unpack_int4(torch.tensor([0x7F, 0x08], dtype=torch.uint8)).tolist() == [-1, 7, -8, 0]
    byte = CODES.view(16, 16)
    assert torch.equal(pack_fp4(unpack_fp4(byte)), byte)
    assert torch.equal(pack_int4(unpack_int4(byte)), byte)


@each_format
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


@each_format
def test_rounding_has_no_bias(name: str) -> None:
    """Over whole steps the errors are symmetric: their mean is within five standard errors of 0."""
    count = 1 << 17
    x = 4.0 + 2.0 * torch.rand(count, generator=torch.Generator().manual_seed(4), dtype=torch.float64).float()
    for sign in (1.0, -1.0):
        error = (round_to_format(sign * x, name) - sign * x).double()
        assert float(error.std()) > 0.05
        assert abs(float(error.mean())) < 5 * float(error.std()) / math.sqrt(count)

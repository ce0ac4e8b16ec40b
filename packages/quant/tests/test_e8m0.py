"""E8M0 bytes and the exponent rules; the mse rule against a search over every exponent in fp64."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowkv.quant import FORMATS, dsv4_tile_scale, e8m0_decode, e8m0_encode
from narrowkv.quant.e8m0 import (
    ceil_exponent,
    e8m0_from_exponent,
    floor_exponent,
    largest_exponent,
    mse_exponent,
)
from narrowkv.quant.rounding import round_to_format

NARROW = [name for name, f in FORMATS.items() if f.kind != "float"]
BYTES = torch.arange(256, dtype=torch.uint8)


def test_all_bytes_decode_to_their_power_and_back() -> None:
    value = e8m0_decode(BYTES)
    assert value[:255].double().tolist() == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert value[255].isnan()
    assert torch.equal(e8m0_encode(value), BYTES)


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no float8_e8m0fnu")
def test_all_bytes_decode_like_torch() -> None:
    own = BYTES.view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(e8m0_decode(BYTES), own, rtol=0, atol=0, equal_nan=True)


def test_encode_of_what_is_not_a_power_of_two() -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-149, 1.5, 3.999, -1.0, math.nan, math.inf, -math.inf])
    assert e8m0_encode(x).tolist() == [0, 0, 0, 127, 128, 255, 255, 255, 255]
    strided = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).t()
    assert e8m0_encode(strided).tolist() == [[127, 129], [128, 130]]
    assert e8m0_from_exponent(torch.tensor([-300, -127, 0, 127, 300])).tolist() == [0, 0, 127, 254, 254]


def amax_samples() -> torch.Tensor:
    """Random fp32 magnitudes of every size, and both sides of the powers of two and some multiples."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(1, 0x7F800000, (5000,), generator=generator, dtype=torch.int32)
    powers = torch.cat(
        [torch.ldexp(torch.full((253,), m), torch.arange(-126, 127)) for m in (1.0, 1.5, 1.75, 127 / 64)]
    )
    around = [torch.nextafter(powers, torch.tensor(limit)) for limit in (0.0, math.inf)]
    return torch.cat((bits.view(torch.float32), powers, *around))


@pytest.mark.parametrize("name", NARROW)
def test_floor_and_ceil_rules_against_fractions(name: str) -> None:
    amax = amax_samples()
    top = Fraction(FORMATS[name].max_value)
    emax = math.frexp(FORMATS[name].max_value)[1] - 1
    floors, ceils = floor_exponent(amax, name).tolist(), ceil_exponent(amax, name).tolist()
    for value, low, high in zip(amax.double().tolist(), floors, ceils, strict=True):
        exact = Fraction(value)
        assert Fraction(2) ** (low + emax) <= exact < Fraction(2) ** (low + emax + 1)
        assert top * Fraction(2) ** (high - 1) < exact
        assert exact <= top * Fraction(2) ** high or high == largest_exponent(name)
        assert top * Fraction(2) ** high < 2**128
    zeros = torch.zeros(3)
    assert floor_exponent(zeros, name).tolist() == ceil_exponent(zeros, name).tolist() == [0, 0, 0]


def assert_least(groups: torch.Tensor, name: str) -> None:
    """The chosen exponents have the least squared error of all 255, in fp64."""
    exponents = torch.arange(-127, 128)[:, None, None]
    every = groups.double().expand(255, -1, -1)
    scaled = torch.ldexp(every, -exponents).clamp(-1e30, 1e30).float()
    back = torch.ldexp(round_to_format(scaled, name).double(), exponents)
    errors = (back - every).square().sum(-1)  # [255, groups]
    chosen = mse_exponent(groups, name).to(torch.int64) + 127
    got, best = errors.gather(0, chosen[None])[0], errors.amin(0)
    excess = float(((got - best) / best.clamp(min=1e-300)).max())
    assert bool((got <= best * (1 + 1e-5)).all()), f"excess {excess}"


def mse_groups(group: int, seed: int) -> torch.Tensor:
    """Groups that make the rule work: plain, one outlier among values at a half step, nearly constant."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-30, 30, (400, 1), generator=g).float())
    outlier = torch.full((200, group), 0.5) * torch.randint(0, 4, (200, group), generator=g)
    outlier[100:, 1:] = 0.5
    outlier[:, 0] = torch.linspace(4.0, 40.0, 100).repeat(2)
    constant = torch.linspace(0.9, 9.0, 200).unsqueeze(1) * (1 + 0.01 * torch.randn(200, group, generator=g))
    plain = torch.randn(400, group, generator=g) * spread
    # Each group is tried at 255 exponents: of long groups a sample, which still has every kind.
    return torch.cat((plain, outlier, constant))[:: {16: 2, 32: 4, 128: 8, 256: 16}.get(group, 1)]


@pytest.mark.parametrize("group", [1, 16, 32, 128, 256])
@pytest.mark.parametrize("name", NARROW)
def test_mse_rule_has_the_least_error_of_all_255_exponents(name: str, group: int) -> None:
    assert_least(mse_groups(group, group), name)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["fp4_e2m1", "int4", "fp8_e4m3fn"]),
    st.lists(st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False), min_size=1, max_size=256),
)
def test_mse_rule_has_the_least_error_for_any_group(name: str, values: list[float]) -> None:
    assert_least(torch.tensor([values], dtype=torch.float32), name)


@pytest.mark.parametrize(
    ("name", "values", "floor", "ceil", "best"),
    [
        # 7.5 saturates at 6 but is 8 one step up, where the halves vanish: 4 * 0.25 against 2 * 2.25
        ("fp4_e2m1", [7.5, 7.5, 0.5, 0.5], 0, 1, 1),
        # clipping 8 to 6 costs 4; the step that holds 8 would lose 31 halves, 7.75
        ("fp4_e2m1", [8.0] + [0.5] * 31, 1, 1, 0),
        # 6.5 clipped costs 0.25; one step up costs 0.25 there too (to 6) and loses the halves
        ("fp4_e2m1", [6.5, 0.5, 0.5, 0.5], 0, 1, 0),
        # clipping 8 to 7 costs 1; the step that holds 8 would lose 15 ones to ties, 15
        ("int4", [8.0] + [1.0] * 15, 1, 1, 0),
    ],
)
def test_rules_on_groups_worked_by_hand(
    name: str, values: list[float], floor: int, ceil: int, best: int
) -> None:
    group = torch.tensor([values])
    rules = (floor_exponent(group.amax(-1), name), ceil_exponent(group.amax(-1), name))
    assert [int(exponent) for exponent in (*rules, mse_exponent(group, name))] == [floor, ceil, best]


def test_mse_rule_survives_the_ends_of_fp32() -> None:
    big = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert int(mse_exponent(big, "fp4_e2m1")) == 125  # 4 * 2^126 = 2^128 is nearer than 6 * 2^125, but Inf
    assert int(mse_exponent(torch.full((1, 32), 2.0**-149), "fp4_e2m1")) == -127
    assert int(mse_exponent(torch.zeros(1, 32), "fp4_e2m1")) == 0
    assert mse_exponent(torch.zeros(0, 32), "fp4_e2m1").shape == (0,)
    mixed = torch.tensor([[math.nan, 6.0], [math.inf, 1.0]])
    assert mse_exponent(mixed, "fp4_e2m1").tolist() == [0, 125]


def test_dsv4_scale_is_the_formula() -> None:
    amax = torch.cat(
        (torch.linspace(0, 2000, 4001), 448 * torch.exp2(torch.arange(-20.0, 20.0)), torch.tensor([2.9e38]))
    )
    for value, scale in zip(amax.double().tolist(), dsv4_tile_scale(amax).double().tolist(), strict=True):
        wanted = max(value / 448, 1e-4)
        assert math.frexp(scale)[0] == 0.5, "not a power of two"
        # the quotient is rounded to fp32, which may lift it onto a power of two but never past one
        assert wanted * (1 - 2.0**-23) <= scale < 2 * wanted * (1 + 2.0**-23)
    edges = dsv4_tile_scale(torch.tensor([0.0, 0.0448, 448.0, 448.00003, 896.0, math.inf, math.nan]))
    assert edges[:6].tolist() == [2.0**-13, 2.0**-13, 1.0, 2.0, 2.0, 2.0**119]
    assert edges[6].isnan()

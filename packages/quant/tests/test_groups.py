"""Groups of channels with E8M0 and E4M3 scales: definitions, rules, hard groups, and the search."""

from __future__ import annotations

import math

import pytest
import torch

from narrowkv.quant import (
    FORMATS,
    dequantize_per_group,
    e8m0_decode,
    nvfp4_global_descale,
    quantize_per_group,
)
from narrowkv.quant.e4m3 import search_e4m3
from narrowkv.quant.rounding import round_to_format

NARROW = [name for name, f in FORMATS.items() if f.kind != "float"]
each_format = pytest.mark.parametrize("name", NARROW)
each_rule = pytest.mark.parametrize("exponent", ["floor", "ceil", "mse"])


def errors(x: torch.Tensor, group: int, **options: str) -> torch.Tensor:
    """Squared error of each group, in fp64."""
    back = dequantize_per_group(*quantize_per_group(x, group, **options), group)  # type: ignore[arg-type]
    return (back - x).double().view(x.shape[0], -1, group).square().sum(-1)


def hard_groups(size: int, tiny: float) -> torch.Tensor:
    """Zeros, a NaN, an infinity, the smallest numbers, and ones."""
    x = torch.ones(5, size)
    x[0], x[1, 3], x[2, 3], x[3] = 0.0, math.nan, math.inf, tiny
    return x


@pytest.mark.parametrize("group", [32, 64, 128])
@each_rule
@each_format
def test_e8m0_groups_are_exactly_the_definition(name: str, exponent: str, group: int) -> None:
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(10)) * 3
    stored, descale = quantize_per_group(x, group, exponent=exponent, format=name)
    assert descale.dtype == torch.uint8
    assert descale.shape == (6, 256 // group)
    groups, scale = x.view(6, -1, group), e8m0_decode(descale).unsqueeze(-1)
    want = (round_to_format(groups / scale, name) * scale).view(6, 256)
    assert torch.equal(dequantize_per_group(stored, descale, group, format=name), want)
    scaled_max = (groups / scale).abs().amax(-1)
    top = FORMATS[name].max_value
    power = 2.0 ** math.floor(math.log2(top))
    if exponent == "ceil":
        assert bool(((scaled_max <= top) & (scaled_max > top / 2)).all())
    if exponent == "floor":
        assert bool(((scaled_max >= power) & (scaled_max < 2 * power)).all())


def test_e8m0_rules_on_a_worked_group() -> None:
    x = torch.tensor([[7.0, 1.0] + [0.0] * 30])
    # 7 saturates at 6 (error 1), or ties between 6 and 8 one step up and goes to 8 (error 1): mse, which is
    # the default, takes the floor's.
    for rule, byte in (("floor", 127), ("ceil", 128), ("mse", 127), (None, 127)):
        assert quantize_per_group(x, 32, exponent=rule)[1].tolist() == [[byte]]


@each_rule
@each_format
def test_e8m0_hard_groups(name: str, exponent: str) -> None:
    x = hard_groups(32, 2.0**-149)
    stored, descale = quantize_per_group(x, 32, exponent=exponent, format=name)
    back = dequantize_per_group(stored, descale, 32, format=name)
    byte = descale.flatten().tolist()
    assert (byte[0], byte[3]) == (127, 0)
    assert torch.equal(back[[0, 4]], x[[0, 4]])
    assert back[1, 3].isnan()
    if FORMATS[name].has_nan:
        assert int(back[1].isnan().sum()) == 1
    else:
        assert byte[1] == 0xFF
    assert byte[2] < 0xFF
    assert float(back[2, 3]) >= torch.finfo(torch.float32).max / 2
    assert not back[[0, 2, 3, 4]].isnan().any()


def test_nvfp4_is_exactly_the_definition() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(11)) * 2
    tensor_descale = nvfp4_global_descale(x)
    assert float(tensor_descale) == float(x.abs().amax() / (448 * 6))
    stored, descale = quantize_per_group(x, 16, scale="e4m3", exponent="amax", global_descale=tensor_descale)
    assert descale.dtype == torch.float8_e4m3fn
    groups = (x / tensor_descale).view(64, 8, 16)
    scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    assert torch.equal(descale.view(torch.uint8), scale.view(torch.uint8))
    want = round_to_format(groups / scale.float().unsqueeze(-1), "fp4_e2m1")
    want = (want * (scale.float() * tensor_descale).unsqueeze(-1)).view(64, 128)
    assert torch.equal(dequantize_per_group(stored, descale, 16, global_descale=tensor_descale), want)


def test_nvfp4_choice_of_4_or_6_never_loses_and_often_wins() -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(12))
    plain, best = errors(x, 16, scale="e4m3", exponent="amax"), errors(x, 16, scale="e4m3")
    assert bool((best <= plain * (1 + 1e-5)).all())
    assert float((best < plain * 0.999).double().mean()) > 0.2
    worked = torch.tensor([[8.0] + [6.0] * 15])  # at scale 2 both are codes (4, 3); at 8/6 a six is not
    stored, descale = quantize_per_group(worked, 16, scale="e4m3")
    assert descale.float().tolist() == [[2.0]]
    assert torch.equal(dequantize_per_group(stored, descale, 16), worked)


@pytest.mark.parametrize(("rule", "size"), [("mse", 16), ("search", 64)])
def test_e4m3_hard_groups(rule: str, size: int) -> None:
    x = hard_groups(size, 1e-30)
    stored, descale = quantize_per_group(x, size, scale="e4m3", exponent=rule)
    back, scale = dequantize_per_group(stored, descale, size), descale.float().flatten()
    assert scale[[0, 2]].tolist() == [1.0, 448.0]
    assert bool(back[1].isnan().all())
    assert float(back[2, 3]) == 6 * 448.0
    assert not bool(back[3].any())
    assert torch.equal(back[[0, 4]], x[[0, 4]])
    assert not back[2].isnan().any()


def test_nvfp4_global_descale_edges() -> None:
    for x in (torch.zeros(4), torch.zeros(0, 4), torch.tensor([math.nan, 2688.0])):
        assert nvfp4_global_descale(x).tolist() == [1.0]
    assert bool(torch.isfinite(nvfp4_global_descale(torch.tensor([math.inf]))).all())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spread", [0.3, 40.0])
def test_the_search_is_within_a_hundredth_of_the_best_of_all_codes(head_dim: int, spread: float) -> None:
    rows = torch.randn(200, head_dim, generator=torch.manual_seed(0)) * spread
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None, None]
    every = (round_to_format(rows / scales, "fp4_e2m1") * scales - rows).double().square().sum(-1)
    got = float(errors(rows, head_dim, scale="e4m3", exponent="search").sum())
    assert got <= 1.01 * float(every.amin(0).sum())
    assert got < 0.93 * float(errors(rows, head_dim, scale="e4m3").sum())
    assert got < 0.9 * float(errors(rows, head_dim).sum())


def test_the_search_of_a_scale_outside_the_range_and_of_nothing() -> None:
    rows = torch.zeros(2, 64)
    rows[0], rows[1, 0] = 1e-6, 1e6
    assert search_e4m3(rows, "fp4_e2m1").float().tolist() == [2.0**-9, 448.0]
    assert search_e4m3(torch.zeros(3, 0), "fp4_e2m1").shape == (3,)

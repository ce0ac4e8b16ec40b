"""The search for an E4M3 scale, against every code there is."""

from __future__ import annotations

import math

import pytest
import torch

from narrowkv.quant import dequantize_per_group, quantize_per_group
from narrowkv.quant.e4m3 import search_e4m3
from narrowkv.quant.rounding import round_to_format


def _errors(rows: torch.Tensor) -> torch.Tensor:
    """Squared error of each row at each positive E4M3 scale, `[126, rows]`, without the search."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rounded = round_to_format(rows[None] / scales[:, None, None], "fp4_e2m1") * scales[:, None, None]
    return (rounded - rows).double().square().sum(-1)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spread", [0.3, 40.0])
def test_the_search_is_within_a_hundredth_of_the_best_of_all_codes(head_dim: int, spread: float) -> None:
    rows = torch.randn(200, head_dim, generator=torch.manual_seed(0)) * spread
    best = _errors(rows).amin(0)
    stored, scale = quantize_per_group(rows, head_dim, scale="e4m3", exponent="search")
    got = (dequantize_per_group(stored, scale, head_dim) - rows).double().square().sum(-1)
    assert float(got.sum() / best.sum()) <= 1.01
    powers = quantize_per_group(rows, head_dim)
    two = (dequantize_per_group(*powers, head_dim) - rows).double().square().sum(-1)
    four_or_six = quantize_per_group(rows, head_dim, scale="e4m3")
    nvfp4 = (dequantize_per_group(*four_or_six, head_dim) - rows).double().square().sum(-1)
    assert float(got.sum()) < 0.93 * float(nvfp4.sum())
    assert float(got.sum()) < 0.9 * float(two.sum())


def test_rows_outside_the_range_zeros_and_not_numbers() -> None:
    rows = torch.zeros(5, 64)
    rows[1] = 1e-6
    rows[2, 0] = 1e6
    rows[3, 0] = math.nan
    rows[4, 0] = math.inf
    scale = search_e4m3(rows, "fp4_e2m1").float()
    assert scale[[0, 1]].tolist() == [1.0, 2.0**-9]
    assert scale[[2, 4]].tolist() == [448.0, 448.0]
    assert math.isnan(scale[3])
    stored, scales = quantize_per_group(rows, 64, scale="e4m3", exponent="search")
    back = dequantize_per_group(stored, scales, 64)
    assert not bool(back[:2].any())
    assert back[[2, 4], 0].tolist() == [2688.0, 2688.0]
    assert bool(back[3].isnan().all())
    assert search_e4m3(torch.zeros(3, 0), "fp4_e2m1").shape == (3,)


def test_the_search_is_for_e4m3_scales_only() -> None:
    with pytest.raises(ValueError, match="exponent"):
        quantize_per_group(torch.ones(1, 64), 64, exponent="search")

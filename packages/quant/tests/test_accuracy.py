"""Error figures by hand, and that NaN or Inf never passes."""

import math

import pytest
import torch

from narrowkv.quant import ErrorReport, compare, cosine, max_abs, relative_l1, rmse

O = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
REF = torch.tensor([[1.0, 2.5], [3.0, 4.0]])


def test_figures_by_hand() -> None:
    assert relative_l1(O, REF) == pytest.approx(1.5 / 10.5)
    assert rmse(O, REF) == pytest.approx(math.sqrt(1.25 / 4))
    assert cosine(O, REF) == pytest.approx((1 + 5 + 9 + 20) / math.sqrt(39 * 32.25))
    assert max_abs(O, REF) == 1.0
    report = compare(O, REF)
    assert report.worst_index == (1, 1)
    assert (report.count, report.not_finite) == (4, 0)
    assert "at [1, 1]" in str(report)


def test_equal_tensors_of_any_dtype() -> None:
    x = torch.randn(7).bfloat16()
    assert compare(x, x.double()) == ErrorReport(0.0, 0.0, pytest.approx(1.0), 0.0, (0,), 0, 7)


def test_bounds() -> None:
    report = compare(O, REF)
    assert report.passes()
    assert report.passes(relative_l1=0.15, rmse=0.6, cosine=0.98, max_abs=1.0)
    assert not report.passes(relative_l1=0.14)
    assert not report.passes(rmse=0.5)
    assert not report.passes(cosine=0.999)
    assert not report.passes(max_abs=0.99)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["o", "ref", "both"])
def test_not_finite_fails_and_is_located(bad: float, side: str) -> None:
    o, ref = O.clone(), REF.clone()
    if side in ("o", "both"):
        o[1, 0] = bad
    if side in ("ref", "both"):
        ref[1, 0] = bad
    report = compare(o, ref)
    assert not report.passes()
    assert math.isnan(report.relative_l1)
    assert report.worst_index == (1, 0)
    assert report.not_finite == (0 if side == "ref" else 1)


def test_max_abs_of_lse_with_empty_rows() -> None:
    lse = torch.tensor([1.0, -math.inf])
    assert max_abs(lse, lse + torch.tensor([0.25, 0.0])) == 0.25
    assert max_abs(torch.tensor([1.0, 0.0]), lse) == math.inf
    assert math.isnan(max_abs(torch.tensor([1.0, math.nan]), lse))


def test_zeros_and_nothing() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert relative_l1(zero, zero) == 0.0
    assert relative_l1(one, zero) == math.inf
    assert cosine(zero, zero) == 1.0
    assert cosine(one, zero) == 0.0
    assert math.isnan(cosine(torch.tensor([math.nan, 0.0]), zero))
    assert compare(torch.zeros(0), torch.zeros(0)).passes(relative_l1=0.0, cosine=1.0)


def test_small_differences_survive_large_sums() -> None:
    ref = torch.full((1 << 20,), 1.0)
    o = ref.clone()
    o[0] += 2.0**-20
    assert relative_l1(o, ref) == 2.0**-40

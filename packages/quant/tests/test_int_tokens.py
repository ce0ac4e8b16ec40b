"""INT8 and INT4 with a scale per token and head: byte maps by hand, and what the rounding costs."""

from __future__ import annotations

import math

import pytest
import torch

from narrowkv.quant import (
    dequantize_tokens_int4,
    quantize_tokens_int4,
    quantize_tokens_int8,
    split_zero_point,
)


def test_bytes_by_hand() -> None:
    stored, scale = quantize_tokens_int8(torch.tensor([[254.0, -1.0, 1.0, 0.98, -254.0]]))
    assert stored.tolist() == [[127, -1, 1, 0, -127]]  # halfway numbers away from zero
    assert scale.tolist() == [2.0]
    # (max - min) / 15 is 2: the zero point is 2, and codes are x / 2 + 2.
    stored, scale = quantize_tokens_int4(torch.tensor([[-4.0, 26.0, 0.0, 2.0, 1.0, -1.0]]))
    assert stored.tolist() == [[0xF0, 0x32, 0x23]]
    assert scale.view(torch.int32).tolist() == [0x40000002]
    assert dequantize_tokens_int4(stored, scale).tolist() == [[-4.0, 26.0, 0.0, 2.0, 2.0, 0.0]]


def test_zeros_one_sign_nan_and_infinity() -> None:
    x = torch.zeros(5, 4)
    x[1] = torch.tensor([5.0, 7.0, 9.0, 15.0])
    x[2, 1], x[3, 1], x[4, :2] = math.nan, math.inf, torch.tensor([3e38, -3e38])
    for quantise in (quantize_tokens_int8, quantize_tokens_int4):
        stored, scale = quantise(x)
        assert scale[2].isnan()
        assert not stored[2].any()
        assert scale[[0, 1, 3, 4]].isfinite().all()
    factor, zero = split_zero_point(scale)
    assert factor[0] == pytest.approx(1e-6, rel=1e-5)
    # The range includes zero, so that numbers of one sign do not saturate.
    assert (factor[1], zero[1]) == (1.0, 0.0)
    back = dequantize_tokens_int4(stored, scale)
    assert back[1].tolist() == [5.0, 7.0, 9.0, 15.0]
    assert not back[0].any()


def test_errors_are_half_a_step_and_without_bias() -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    stored, scale = quantize_tokens_int8(x)
    packed, word = quantize_tokens_int4(x)
    # INT4's zero point is rounded, too: the ends of the range may be off by a whole step.
    for back, step, most, bias in (
        (stored * scale[:, None], scale, 0.5001, 1e-4),
        (dequantize_tokens_int4(packed, word), word, 1.0001, 2e-3),
    ):
        assert ((back - x).abs() <= step[:, None] * most).all()
        assert abs(float((back - x).mean())) < bias

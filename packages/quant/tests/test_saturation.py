"""The largest finite numbers saturate: no quantiser stores them as what decodes to Inf or NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from narrowkv.quant import (
    dequantize_per_group,
    dequantize_per_head,
    dequantize_per_tensor,
    dequantize_per_token_head,
    dequantize_tokens_int4,
    dsv4_tile_scale,
    quantize_per_group,
    quantize_per_head,
    quantize_per_tensor,
    quantize_per_token_head,
    quantize_tokens_int4,
    quantize_tokens_int8,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("fp4_e2m1", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "int4", "int8")
RULES = [
    *(("e8m0", rule) for rule in ("mse", "floor", "ceil", "ultraquant", "sglang")),
    *(("e4m3", rule) for rule in ("mse", "amax", "search")),
    ("fp32", "amax"),
]  # fmt: skip


def _rows(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Rows of 32 numbers that have the dtype's largest in several company."""
    top = torch.finfo(dtype).max
    for row in (
        [top] * 32, [top, -top] * 16, [top] + [0.0] * 31, [top, -0.6 * top, 0.3 * top, 1.0] * 8,
        [0.9 * top] * 32, [-top] + [1e-30] * 31,
    ):  # fmt: skip
        yield torch.tensor(row).to(dtype).reshape(1, 1, 1, 32)


def _check(x: torch.Tensor, found: torch.Tensor, share: float) -> None:
    """Finite, of the right sign, and at least that share of the largest magnitude."""
    assert bool(found.isfinite().all()), (x.flatten()[:4], found.flatten()[:4])
    at = x.float().abs().argmax()
    assert float(found.flatten()[at] / x.float().flatten()[at]) >= share


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "rule"), RULES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_of_groups(fmt: str, scale: str, rule: str, dtype: torch.dtype) -> None:
    if rule in ("ultraquant", "sglang") and fmt != "fp4_e2m1":
        pytest.skip("the rule is for FP4 only")
    for x in _rows(dtype):
        for group in (16, 32):
            stored, descale = quantize_per_group(x, group, scale=scale, exponent=rule, format=fmt)
            # A scale in E4M3 ends at 448, far below float32's largest numbers.
            share = 0.0 if scale == "e4m3" else 0.5
            _check(x, dequantize_per_group(stored, descale, group, format=fmt), share)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_scale_for_many(fmt: str, dtype: torch.dtype) -> None:
    for x in _rows(dtype):
        for quantize, dequantize in (
            (quantize_per_tensor, dequantize_per_tensor),
            (quantize_per_head, dequantize_per_head),
            (quantize_per_token_head, dequantize_per_token_head),
        ):
            if fmt == "fp4_e2m1":
                continue
            stored, descale = quantize(x[0], fmt)
            _check(x, dequantize(stored, descale, fmt), 0.85)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_of_tokens(dtype: torch.dtype) -> None:
    for x in _rows(dtype):
        stored, scale = quantize_tokens_int8(x[0])
        # They end at half of float32's largest number, whose differences are finite.
        _check(x, stored.float() * scale.unsqueeze(-1), 0.49)
        _check(x, dequantize_tokens_int4(*quantize_tokens_int4(x[0])), 0.46)


def test_a_tile_of_deepseek_v4() -> None:
    for x in _rows(torch.float32):
        scale = dsv4_tile_scale(x.abs().amax())
        _check(x, (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale, 0.85)

"""INT8 and INT4 with a scale per token and head: byte maps by hand, rules, and device code bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.quant import (
    dequantize_tokens_int4,
    quantize_tokens_int4,
    quantize_tokens_int8,
    split_zero_point,
    unpack_int4,
)
from narrowkv.quant.device import join_parts, widen_parts, widening_exponent
from narrowkv.quant.device_int import narrow_int4, narrow_int8, widen_int4, zero_point_and_scale
from narrowkv.runtime.launch import LaunchOptions, launch

ONE = LaunchOptions(num_warps=1, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _widen_int8_kernel(x_ptr, o_ptr, ROUTE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """All words of one byte or of two, put back in order."""
    N: tl.constexpr = 256 if PARTS == 1 else 16384
    i = tl.arange(0, N)[:, None] + tl.program_id(0) * N
    parts = widen_parts(tl.load(x_ptr + i), "int8", ROUTE, DTYPE, PARTS)
    j = tl.arange(0, PARTS)[None, :]
    tl.store(o_ptr + i * PARTS + j, join_parts(parts, PARTS).to(tl.float32))


@triton.jit
def _widen_int4_kernel(
    x_ptr, scale_ptr, o_ptr, factor_ptr, ROUTE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Rows of sixteen words, each with its scale."""
    n = tl.arange(0, N) + tl.program_id(0) * N
    at = n[:, None] * 16 + tl.arange(0, 16)[None, :]
    zero, factor = zero_point_and_scale(tl.load(scale_ptr + n))
    parts = widen_int4(tl.load(x_ptr + at), zero, ROUTE, DTYPE, PARTS)
    columns = n[:, None] * 16 * PARTS + tl.arange(0, 16 * PARTS)[None, :]
    tl.store(o_ptr + columns, join_parts(parts, PARTS).to(tl.float32))
    tl.store(factor_ptr + n, factor)


@triton.jit
def _narrow_kernel(x_ptr, code_ptr, scale_ptr, N: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    if BITS == 4:
        codes, scales = narrow_int4(tl.load(x_ptr + at))
    else:
        codes, scales = narrow_int8(tl.load(x_ptr + at))
    tl.store(code_ptr + at, codes.to(tl.uint8))
    tl.store(scale_ptr + n, scales)


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
    stored, scale = quantize_tokens_int4(x)
    factor, zero = split_zero_point(scale)
    assert factor[0] == pytest.approx(1e-6, rel=1e-5)
    # The range includes zero, so that numbers of one sign do not saturate.
    assert (factor[1], zero[1]) == (1.0, 0.0)
    assert dequantize_tokens_int4(stored, scale)[1].tolist() == [5.0, 7.0, 9.0, 15.0]
    assert dequantize_tokens_int4(stored, scale)[[0]].abs().max() == 0


def test_errors_are_half_a_step_and_without_bias() -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    stored, scale = quantize_tokens_int8(x)
    error = stored * scale[:, None] - x
    assert (error.abs() <= scale[:, None] * 0.5001).all()
    assert abs(float(error.mean())) < 1e-4
    packed, word = quantize_tokens_int4(x)
    error = dequantize_tokens_int4(packed, word) - x
    # The zero point is rounded, too: the ends of the range may be off by a whole step.
    assert (error.abs() <= word[:, None] * 1.0001).all()
    assert abs(float(error.mean())) < 2e-3


def test_odd_widths_and_wrong_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        quantize_tokens_int4(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="float64"):
        quantize_tokens_int8(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="scale"):
        split_zero_point(torch.zeros(2, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_int8_code_is_widened_exactly(parts: int, dtype: tl.dtype, device: str) -> None:
    bits = torch.arange(256 if parts == 1 else 65536, device=device)
    words = bits.to(torch.uint8 if parts == 1 else torch.int32)
    words = words if parts == 1 else words.to(torch.uint16).view(torch.int16)
    routes = ["bits"]
    if device != "cpu" and torch.version.hip is None and parts == 2 and dtype == tl.float16:
        routes.append("ptx")
    for route in routes:
        got = torch.full((words.numel() * parts,), torch.nan, device=device)
        grid = (1 if parts == 1 else 4, 1, 1)
        constants = {"ROUTE": route, "PARTS": parts, "DTYPE": dtype}
        launch(_widen_int8_kernel, grid, (words, got), constants, ONE)
        expected = words.view(torch.int8).float()
        assert torch.equal(got * 2.0 ** widening_exponent("int8", route), expected)


@pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [2, 4])
def test_every_int4_word_is_widened_exactly_by_every_zero_point(
    parts: int, dtype: tl.dtype, device: str
) -> None:
    words = torch.arange(65536, dtype=torch.int32, device=device).to(torch.uint16).view(torch.int16)
    words = words if parts == 4 else torch.arange(256, dtype=torch.uint8, device=device)
    rows = words.view(-1, 16)
    factors = torch.full((rows.shape[0],), 0.75, device=device).view(torch.int32)
    scale = factors | (torch.arange(rows.shape[0], device=device) % 16).int()
    routes = ["bits"]
    if device != "cpu" and torch.version.hip is None and parts == 4 and dtype == tl.float16:
        routes.append("ptx")
    expected = dequantize_tokens_int4(rows.view(torch.uint8), scale.view(torch.float32)) / 0.75
    for route in routes:
        got = torch.full((rows.shape[0], 16 * parts), torch.nan, device=device)
        factor = torch.full((rows.shape[0],), torch.nan, device=device)
        block = min(rows.shape[0], 256)
        constants = {"ROUTE": route, "PARTS": parts, "DTYPE": dtype, "N": block}
        grid = (rows.shape[0] // block, 1, 1)
        launch(_widen_int4_kernel, grid, (words, scale, got, factor), constants, ONE)
        assert torch.equal(got * 2.0 ** widening_exponent("int4", route), expected)
        assert (factor == 0.75).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_device_code_narrows_bit_for_bit(bits: int, device: str) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=random) * torch.logspace(-20, 20, 64)[:, None]
    x[3], x[4, 5], x[5, 6], x[6], x[7] = 0, math.nan, -math.inf, x[6].abs(), 3e38
    x[8] = torch.arange(64) / 2 - 7
    x = x.to(device)
    codes, scale = torch.zeros(64, 64, dtype=torch.uint8, device=device), torch.zeros(64, device=device)
    launch(_narrow_kernel, (1, 1, 1), (x, codes, scale), {"N": 64, "SIZE": 64, "BITS": bits}, ONE)
    if bits == 8:
        expected, scales = quantize_tokens_int8(x)
        assert torch.equal(codes.view(torch.int8), expected)
    else:
        expected, scales = quantize_tokens_int4(x)
        assert torch.equal(codes, unpack_int4(expected).view(torch.uint8) & 15)
    assert torch.equal(scale.view(torch.int32), scales.view(torch.int32))

"""Device code equals torch: every code of every format widened by every route, and narrowing bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.quant import (
    FORMATS,
    FP8_FORMATS,
    cast_fp8,
    decode,
    dequantize_tokens_int4,
    e8m0_decode,
    pack_fp4,
    quantize_per_group,
    quantize_tokens_int4,
    quantize_tokens_int8,
    unpack_int4,
)
from narrowkv.quant.device import e8m0_to_fp32, join_parts, narrow_fp8, widen, widen_parts
from narrowkv.quant.device_fp4 import narrow_fp4, share_exponent
from narrowkv.quant.device_int import narrow_int4, narrow_int8, widen_int4, zero_point_and_scale
from narrowkv.quant.formats import widening_exponent
from narrowkv.runtime.launch import LaunchOptions, launch

ONE = LaunchOptions(num_warps=1, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _widen_kernel(
    x_ptr, o_ptr, FORMAT: tl.constexpr, ROUTE: tl.constexpr, PARTS: tl.constexpr, COMPARE: tl.constexpr,
    DTYPE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Words of PARTS elements, widened and put back in order."""
    i = tl.arange(0, N)[:, None] + tl.program_id(0) * N
    if COMPARE:
        parts = widen_parts(tl.load(x_ptr + i), FORMAT, ROUTE, DTYPE, PARTS)
    else:
        parts = (widen(tl.load(x_ptr + i), FORMAT, ROUTE, DTYPE, False),)
    tl.store(o_ptr + i * PARTS + tl.arange(0, PARTS)[None, :], join_parts(parts, PARTS).to(tl.float32))


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
def _narrow_kernel(x_ptr, code_ptr, FORMAT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(code_ptr + i, narrow_fp8(tl.load(x_ptr + i), FORMAT))


@triton.jit
def _narrow_rows_kernel(x_ptr, code_ptr, scale_ptr, N: tl.constexpr, SIZE: tl.constexpr, RULE: tl.constexpr):
    """Codes, and a scale of each row: by tokens of integers, or by a rule of FP4's groups."""
    n = tl.arange(0, N)
    at = n[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + at)
    if RULE == "int8":
        codes, scales = narrow_int8(x)
    elif RULE == "int4":
        codes, scales = narrow_int4(x)
    else:
        codes, scales = narrow_fp4(x, RULE)
    tl.store(code_ptr + at, codes.to(tl.uint8))
    tl.store(scale_ptr + n, scales)


@triton.jit
def _share_kernel(s_ptr, top_ptr, rest_ptr):
    n, g = tl.arange(0, 256), tl.arange(0, 4)
    at = n[:, None] * 4 + g[None, :]
    top, rest = share_exponent(tl.load(s_ptr + at))
    tl.store(top_ptr + n, top)
    tl.store(rest_ptr + at, rest)


@triton.jit
def _e8m0_kernel(x_ptr, o_ptr):
    i = tl.arange(0, 256)
    tl.store(o_ptr + i, e8m0_to_fp32(tl.load(x_ptr + i)))


@dataclass(frozen=True)
class Widening:
    """How words of `parts` elements of a format are widened; `compare` is how FNUZ's NaN is found."""

    format: str
    route: str
    parts: int
    compare: bool = True

    def __str__(self) -> str:
        return f"{self.format}-{self.route}-{self.parts}{'' if self.compare else '-by-bits'}"

    def words(self, device: str) -> torch.Tensor:
        """Every word there is: uint8 or int16."""
        bits = self.parts * FORMATS[self.format].bits
        return torch.arange(2**bits, device=device).to(torch.uint8 if bits == 8 else torch.int16)


ROUTES = ("native", "bits")
WIDENINGS = [
    *(Widening(name, route, parts) for name in FP8_FORMATS for route in ROUTES for parts in (1, 2)),
    *(Widening(name, "bits", 1, compare=False) for name in FP8_FORMATS),
    Widening("fp8_e4m3fn", "fnuz_alias", 1),
    Widening("fp4_e2m1", "bits", 2),
    Widening("fp4_e2m1", "bits", 4),
    Widening("int8", "bits", 1),
    Widening("int8", "bits", 2),
]
PTX = [
    Widening("fp8_e4m3fn", "ptx", 2),
    Widening("fp4_e2m1", "ptx", 4),
    Widening("fp4_e2m1", "ptx8", 4),
    Widening("int8", "ptx", 2),
]


def _check_widening(w: Widening, compute: tl.dtype, device: str) -> None:
    words = w.words(device)
    codes = words.view(torch.uint8)
    storage = FORMATS[w.format].storage_dtype
    stored = words.view(storage) if w.route == "native" and w.parts == 1 else words
    got = torch.full((words.numel() * w.parts,), torch.nan, device=device)
    programs = max(1, words.numel() // 16384)
    constants = {
        "FORMAT": w.format, "ROUTE": w.route, "PARTS": w.parts, "COMPARE": w.compare, "DTYPE": compute,
        "N": words.numel() // programs,
    }  # fmt: skip
    launch(_widen_kernel, (programs,), (stored, got), constants, ONE)
    got *= 2.0 ** widening_exponent(w.format, w.route)
    want = decode(codes.view(storage), w.format)
    if w.route == "fnuz_alias":  # which is not for negative zeros and NaN
        is_meant = ~torch.isin(codes, torch.tensor([0x80, 0x7F, 0xFF], device=device))
        got, want = got[is_meant], want[is_meant]
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if w.format == "fp4_e2m1":
        assert torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("compute", [tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("w", WIDENINGS, ids=str)
def test_every_code_in_every_place_is_widened_exactly(w: Widening, compute: tl.dtype, device: str) -> None:
    if device != "cpu" and (w.route == "fnuz_alias" or (w.format, w.route) == ("fp8_e4m3fnuz", "native")):
        pytest.skip("CUDA has no FNUZ type; it takes the bits route")
    _check_widening(w, compute, device)


@pytest.mark.gpu
@pytest.mark.parametrize("w", PTX, ids=str)
def test_every_code_is_widened_exactly_by_ptx(w: Widening) -> None:
    if torch.version.hip:
        pytest.skip("PTX is NVIDIA's")
    _check_widening(w, tl.float16, "cuda")


@pytest.mark.parametrize("compute", [tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [2, 4])
def test_every_int4_word_is_widened_exactly_by_every_zero_point(
    parts: int, compute: tl.dtype, device: str
) -> None:
    rows = Widening("int4", "bits", parts).words(device).view(-1, 16)
    count = rows.shape[0]
    zeros = torch.arange(count, device=device).int() % 16
    scale = torch.full((count,), 0.75, device=device).view(torch.int32) | zeros
    routes = ["bits"]
    if device != "cpu" and torch.version.hip is None and parts == 4 and compute == tl.float16:
        routes.append("ptx")
    expected = dequantize_tokens_int4(rows.view(torch.uint8), scale.view(torch.float32)) / 0.75
    for route in routes:
        got = torch.full((count, 16 * parts), torch.nan, device=device)
        factor = torch.full((count,), torch.nan, device=device)
        block = min(count, 256)
        constants = {"ROUTE": route, "PARTS": parts, "DTYPE": compute, "N": block}
        launch(_widen_int4_kernel, (count // block,), (rows, scale, got, factor), constants, ONE)
        assert torch.equal(got * 2.0 ** widening_exponent("int4", route), expected)
        assert (factor == 0.75).all()


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_narrowing_equals_the_host_cast_bit_for_bit(name: str, device: str) -> None:
    values = decode(torch.arange(256, dtype=torch.uint8), name)
    finite = values[values.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, torch.tensor(9e9)), torch.nextafter(ties, torch.tensor(-9e9))])
    odd = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e9, -1e9, torch.inf, -torch.inf, torch.nan])
    random = torch.randn(2048, generator=torch.Generator().manual_seed(0)) * 30
    x = torch.cat([finite, ties, near, odd, random])[:2048].to(device)
    out = torch.zeros(2048, dtype=torch.uint8, device=device)
    launch(_narrow_kernel, (1,), (x, out), {"FORMAT": name, "N": 2048}, ONE)
    nan = x.isnan()
    assert torch.equal(out[~nan], cast_fp8(x, name).view(torch.uint8)[~nan])
    assert bool(decode(out[nan], name).isnan().all())
    assert name == "fp8_e4m3fnuz" or not bool((out == 0x80).any())


Host = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
HOST: dict[str, Host] = {"int8": quantize_tokens_int8, "int4": quantize_tokens_int4}
for _rule in ("floor", "ceil", "mse", "ultraquant", "sglang"):
    HOST[_rule] = lambda x, rule=_rule: quantize_per_group(x, x.shape[1], exponent=rule)  # type: ignore[misc]


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("rule", HOST)
def test_narrowing_rows_equals_the_host_bit_for_bit(rule: str, size: int, device: str) -> None:
    random = torch.Generator().manual_seed(0)
    spread = 66 if rule.startswith("int") else 120  # in steps of their own, integers have no subnormal scales
    exponents = torch.randint(-spread, spread, (64, 1), generator=random)
    x = torch.randn(64, size, generator=random) * torch.exp2(exponents)
    x[0], x[1], x[2, 3], x[3, 4], x[4] = 0, 1e-42, torch.nan, -torch.inf, torch.finfo(torch.float32).max
    # Ties between codes of FP4, exactly and one unit to either side; then halves, and one sign.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[5:8] = 0.5
    x[5, :8], x[6, :8], x[7, :8] = ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)
    x[8], x[9], x[10] = torch.arange(size) / 2 - 7, x[9].abs(), 3e38
    x = x.to(device)
    codes = torch.zeros(64, size, dtype=torch.uint8, device=device)
    expected, expected_scales = HOST[rule](x)
    scales = torch.zeros(64, dtype=expected_scales.dtype, device=device)
    launch(_narrow_rows_kernel, (1,), (x, codes, scales), {"N": 64, "SIZE": size, "RULE": rule}, ONE)
    if rule == "int8":
        assert torch.equal(codes.view(torch.int8), expected)
    elif rule == "int4":
        assert torch.equal(codes, unpack_int4(expected).view(torch.uint8) & 15)
    else:
        assert torch.equal(pack_fp4(codes), expected)
    assert torch.equal(scales.view(torch.uint8), expected_scales.flatten().view(torch.uint8))


def test_e8m0_bytes(device: str) -> None:
    codes, out = torch.arange(256, dtype=torch.uint8, device=device), torch.zeros(256, device=device)
    launch(_e8m0_kernel, (1,), (codes, out), {}, ONE)
    torch.testing.assert_close(out, e8m0_decode(codes), rtol=0, atol=0, equal_nan=True)


def test_an_exponent_is_shared_and_what_is_left_is_a_power_of_two(device: str) -> None:
    top = torch.arange(256)[:, None]
    scales = (top - torch.tensor([0, 3, 27, 200])).clamp_min(0)
    scales[:254, 1] = torch.where(top[:254, 0] % 7 == 0, 255, scales[:254, 1])
    shared = torch.zeros(256, dtype=torch.uint8, device=device)
    rest = torch.zeros(256, 4, dtype=torch.float16, device=device)
    launch(_share_kernel, (1,), (scales.to(torch.uint8).to(device), shared, rest), {}, ONE)
    largest = torch.where(scales == 255, 0, scales).amax(1)
    assert torch.equal(shared.cpu().long(), largest)
    exponent = 14 + scales - largest[:, None]
    want = torch.where(exponent > -15, torch.exp2(exponent.float()), 0.0)  # beyond fp16's normals: nothing
    want[scales == 255] = torch.nan
    torch.testing.assert_close(rest.cpu().float(), want, rtol=0, atol=0, equal_nan=True)

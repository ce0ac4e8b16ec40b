"""Device helpers: every code of every format, by every route."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from narrowkv.quant.device import (
    e8m0_to_fp32,
    join_parts,
    narrow_fp8,
    widen,
    widen_parts,
    widening_exponent,
)
from narrowkv.quant.device_fp4 import narrow_fp4, share_exponent
from narrowkv.quant.fp4 import pack_fp4
from narrowkv.quant.quantize import cast_fp8, quantize_per_group
from narrowkv.runtime.launch import LaunchOptions, launch

ONE = LaunchOptions(num_warps=1, num_stages=1)
DTYPES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}


@triton.jit
def _widen_kernel(
    x_ptr, o_ptr,
    FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr, COMPARE: tl.constexpr = True,
):  # fmt: skip
    i = tl.arange(0, 256)
    tl.store(o_ptr + i, widen(tl.load(x_ptr + i), FORMAT, ROUTE, DTYPE, COMPARE).to(tl.float32))


@triton.jit
def _widen_pairs_kernel(x_ptr, o_ptr, FORMAT: tl.constexpr, ROUTE: tl.constexpr):
    i = tl.arange(0, 128)
    even, odd = widen_parts(tl.load(x_ptr + i), FORMAT, ROUTE, tl.float16, 2)
    tl.store(o_ptr + 2 * i, even.to(tl.float32))
    tl.store(o_ptr + 2 * i + 1, odd.to(tl.float32))


@triton.jit
def _fp4_kernel(x_ptr, o_ptr, ROUTE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """65536 words of four elements or 256 bytes of two, put back in order."""
    N: tl.constexpr = 16384 if PARTS == 4 else 256
    i = tl.arange(0, N)[:, None] + tl.program_id(0) * N
    parts = widen_parts(tl.load(x_ptr + i), "fp4_e2m1", ROUTE, DTYPE, PARTS)
    j = tl.arange(0, PARTS)[None, :]
    tl.store(o_ptr + i * PARTS + j, join_parts(parts, PARTS).to(tl.float32))


@triton.jit
def _share_kernel(s_ptr, top_ptr, rest_ptr):
    n, g = tl.arange(0, 256), tl.arange(0, 4)
    at = n[:, None] * 4 + g[None, :]
    top, rest = share_exponent(tl.load(s_ptr + at))
    tl.store(top_ptr + n, top)
    tl.store(rest_ptr + at, rest)


@triton.jit
def _narrow_fp4_kernel(x_ptr, code_ptr, scale_ptr, N: tl.constexpr, SIZE: tl.constexpr, RULE: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    codes, scales = narrow_fp4(tl.load(x_ptr + at), RULE)
    tl.store(code_ptr + at, codes.to(tl.uint8))
    tl.store(scale_ptr + n, scales)


@triton.jit
def _narrow_kernel(x_ptr, o_ptr, FORMAT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, narrow_fp8(tl.load(x_ptr + i), FORMAT))


@triton.jit
def _e8m0_kernel(x_ptr, o_ptr):
    i = tl.arange(0, 256)
    tl.store(o_ptr + i, e8m0_to_fp32(tl.load(x_ptr + i)))


def _codes(device: str) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device)


def _native_here(fmt: str, device: str) -> bool:
    return device == "cpu" or fmt != "fp8_e4m3fnuz"


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("route", ["native", "bits"])
@pytest.mark.parametrize("compute", [tl.float16, tl.bfloat16])
@pytest.mark.parametrize("compare", [True, False])
def test_every_code_is_widened_exactly(
    fmt: str, route: str, compute: tl.dtype, compare: bool, device: str
) -> None:
    if route == "native" and not _native_here(fmt, device):
        pytest.skip("CUDA has no FNUZ type; it takes the bits route")
    codes = _codes(device)
    stored = codes.view(DTYPES[fmt]) if route == "native" else codes
    out = torch.zeros(256, device=device)
    constants = {"FORMAT": fmt, "ROUTE": route, "DTYPE": compute, "COMPARE": compare}
    launch(_widen_kernel, (1,), (stored, out), constants, ONE)
    want = codes.view(DTYPES[fmt]).float()
    np.testing.assert_array_equal(
        (out * 2.0 ** widening_exponent(fmt, route)).cpu().numpy(), want.cpu().numpy()
    )


def test_the_alias_reads_ocp_bytes_but_for_the_codes_it_is_not_for() -> None:
    codes, out = _codes("cpu"), torch.zeros(256)
    constants = {"FORMAT": "fp8_e4m3fn", "ROUTE": "fnuz_alias", "DTYPE": tl.float16}
    launch(_widen_kernel, (1,), (codes, out), constants, ONE)
    want = codes.view(torch.float8_e4m3fn).float()
    good = torch.ones(256, dtype=torch.bool)
    good[[0x80, 0x7F, 0xFF]] = False
    assert torch.equal(out[good] * 2.0 ** widening_exponent("fp8_e4m3fn", "fnuz_alias"), want[good])


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("route", ["native", "bits"])
def test_pairs_come_apart_in_order(fmt: str, route: str, device: str) -> None:
    if route == "native" and not _native_here(fmt, device):
        pytest.skip("CUDA has no FNUZ type; it takes the bits route")
    codes, out = _codes(device), torch.zeros(256, device=device)
    launch(_widen_pairs_kernel, (1,), (codes.view(torch.int16), out), {"FORMAT": fmt, "ROUTE": route}, ONE)
    want = codes.view(DTYPES[fmt]).float()
    np.testing.assert_array_equal(
        (out * 2.0 ** widening_exponent(fmt, route)).cpu().numpy(), want.cpu().numpy()
    )


@pytest.mark.gpu
def test_pairs_by_ptx() -> None:
    if torch.version.hip:
        pytest.skip("PTX is NVIDIA's")
    codes, out = _codes("cuda"), torch.zeros(256, device="cuda")
    launch(
        _widen_pairs_kernel,
        (1,),
        (codes.view(torch.int16), out),
        {"FORMAT": "fp8_e4m3fn", "ROUTE": "ptx"},
        ONE,
    )
    np.testing.assert_array_equal(out.cpu().numpy(), codes.view(torch.float8_e4m3fn).float().cpu().numpy())


@pytest.mark.parametrize("fmt", DTYPES)
def test_narrowing_equals_the_host_cast_bit_for_bit(fmt: str, device: str) -> None:
    torch.manual_seed(0)
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[fmt]).float()
    finite = values[values.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, torch.tensor(9e9)), torch.nextafter(ties, torch.tensor(-9e9))])
    odd = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e9, -1e9, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([finite, ties, near, odd, torch.randn(900) * 30])[:2048]
    x = torch.cat([x, torch.zeros(2048 - x.numel())]).to(device)
    out = torch.zeros(2048, dtype=torch.uint8, device=device)
    launch(_narrow_kernel, (1,), (x, out), {"FORMAT": fmt, "N": 2048}, ONE)
    want = cast_fp8(x, fmt)
    nan = x.isnan()
    assert torch.equal(out[~nan], want.view(torch.uint8)[~nan])
    assert bool(out.view(DTYPES[fmt])[nan].float().isnan().all())
    assert fmt == "fp8_e4m3fnuz" or not bool((out == 0x80).any())


def test_e8m0_bytes(device: str) -> None:
    out = torch.zeros(256, device=device)
    launch(_e8m0_kernel, (1,), (_codes(device), out), {}, ONE)
    got = out.cpu()
    assert (float(got[0]), float(got[127])) == (2.0**-127, 1.0)
    assert bool(got[255].isnan())
    assert torch.equal(got[1:255], torch.exp2(torch.arange(1, 255).double() - 127).float())


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _check_fp4(route: str, parts: int, compute: tl.dtype, device: str) -> None:
    words = torch.arange(65536 if parts == 4 else 256, device=device)
    stored = words.to(torch.int16) if parts == 4 else words.to(torch.uint8)
    out = torch.zeros(words.numel(), parts, device=device)
    constants = {"ROUTE": route, "PARTS": parts, "DTYPE": compute}
    launch(_fp4_kernel, (4 if parts == 4 else 1,), (stored, out), constants, ONE)
    nibbles = words[:, None] >> 4 * torch.arange(parts, device=device) & 15
    want = torch.tensor(E2M1, device=device)[nibbles]
    assert torch.equal(
        (out * 2.0 ** widening_exponent("fp4_e2m1", route)).view(torch.int32), want.view(torch.int32)
    )


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("compute", [tl.float16, tl.bfloat16])
def test_every_fp4_code_in_every_place_is_widened_exactly(parts: int, compute: tl.dtype, device: str) -> None:
    _check_fp4("bits", parts, compute, device)


@pytest.mark.gpu
def test_fp4_by_ptx() -> None:
    if torch.version.hip:
        pytest.skip("PTX is NVIDIA's")
    _check_fp4("ptx", 4, tl.float16, "cuda")


@pytest.mark.parametrize("rule", ["floor", "ceil", "mse", "ultraquant", "sglang"])
@pytest.mark.parametrize("size", [32, 128])
def test_narrowing_to_fp4_equals_the_host_bit_for_bit(rule: str, size: int, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, size) * torch.exp2(torch.randint(-120, 120, (64, 1)))
    x[0], x[1], x[2, 3], x[3, 4], x[4] = 0, 1e-42, torch.nan, -torch.inf, torch.finfo(torch.float32).max
    # Ties between codes, exactly and one unit to either side.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[5, :8], x[6, :8], x[7, :8] = ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)
    x[5:8, 8:] = 0.5
    x = x.to(device)
    codes = torch.zeros(64, size, dtype=torch.uint8, device=device)
    scales = torch.zeros(64, dtype=torch.uint8, device=device)
    exact = LaunchOptions(num_warps=1, num_stages=1, enable_fp_fusion=False)
    launch(_narrow_fp4_kernel, (1,), (x, codes, scales), {"N": 64, "SIZE": size, "RULE": rule}, exact)
    stored, descale = quantize_per_group(x, size, exponent=rule)
    assert torch.equal(scales, descale[:, 0])
    assert torch.equal(pack_fp4(codes), stored)


def test_an_exponent_is_shared_and_what_is_left_is_a_power_of_two(device: str) -> None:
    top = torch.arange(256)[:, None]
    scales = (top - torch.tensor([0, 3, 27, 200])).clamp_min(0)
    scales[:254, 1] = torch.where(top[:254, 0] % 7 == 0, 255, scales[:254, 1])
    stored = scales.to(torch.uint8).to(device)
    shared = torch.zeros(256, dtype=torch.uint8, device=device)
    rest = torch.zeros(256, 4, dtype=torch.float16, device=device)
    launch(_share_kernel, (1,), (stored, shared, rest), {}, ONE)
    largest = torch.where(scales == 255, 0, scales).amax(1)
    assert torch.equal(shared.cpu().long(), largest)
    want = torch.exp2(14.0 + scales - largest[:, None]).half().float()
    want = torch.where(14 + scales - largest[:, None] > -15, want, 0.0)  # beyond fp16's normals: nothing
    got = rest.cpu().float()
    assert torch.equal(got.isnan(), scales == 255)
    assert torch.equal(got[scales != 255], want[scales != 255])

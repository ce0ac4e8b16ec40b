"""Device helpers: every code of every format, by every route."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from narrowkv.quant.device import e8m0_to_fp32, narrow_fp8, widen, widen_parts, widening_exponent
from narrowkv.quant.launch import LaunchOptions, launch
from narrowkv.quant.quantize import cast_fp8

ONE = LaunchOptions(num_warps=1, num_stages=1)
DTYPES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}


@triton.jit
def _widen_kernel(x_ptr, o_ptr, FORMAT: tl.constexpr, ROUTE: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(o_ptr + i, widen(tl.load(x_ptr + i), FORMAT, ROUTE, DTYPE).to(tl.float32))


@triton.jit
def _widen_pairs_kernel(x_ptr, o_ptr, FORMAT: tl.constexpr, ROUTE: tl.constexpr):
    i = tl.arange(0, 128)
    even, odd = widen_parts(tl.load(x_ptr + i), FORMAT, ROUTE, tl.float16, 2)
    tl.store(o_ptr + 2 * i, even.to(tl.float32))
    tl.store(o_ptr + 2 * i + 1, odd.to(tl.float32))


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
def test_every_code_is_widened_exactly(fmt: str, route: str, compute: tl.dtype, device: str) -> None:
    if route == "native" and not _native_here(fmt, device):
        pytest.skip("CUDA has no FNUZ type; it takes the bits route")
    codes = _codes(device)
    stored = codes.view(DTYPES[fmt]) if route == "native" else codes
    out = torch.zeros(256, device=device)
    launch(_widen_kernel, (1,), (stored, out), {"FORMAT": fmt, "ROUTE": route, "DTYPE": compute}, ONE)
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

"""Formats: figures against torch's own, look-up, and the storage check."""

import pytest
import torch

from narrowkv.quant import FORMATS, FP8_FORMATS, Format, check_storage, get_format


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_figures_and_lookup(fmt: Format) -> None:
    assert get_format(fmt.name) is fmt
    assert get_format(fmt) is fmt
    assert str(fmt) == fmt.name
    assert fmt.storage_dtype == (torch.uint8 if fmt.is_packed else fmt.torch_dtype)
    if fmt.torch_dtype is None:
        return
    assert get_format(fmt.torch_dtype) is fmt
    if fmt.kind != "int":
        info = torch.finfo(fmt.torch_dtype)
        assert (fmt.max_value, fmt.smallest_normal) == (info.max, info.smallest_normal)
        assert (fmt.bits, 2.0**-fmt.mantissa_bits) == (info.bits, info.eps)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_fp8_subnormal_and_nan_codes_are_those_of_torch(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(fmt.torch_dtype).float()
    assert float(values[1]) == fmt.smallest_subnormal
    assert tuple(codes[values.isnan()].tolist()) == fmt.nan_codes
    finite = values[values.isfinite()]
    assert float(finite.max()) == fmt.max_value == -float(finite.min())


def test_storage_bytes() -> None:
    sizes = {f: get_format(f).storage_bytes(128) for f in ("bf16", "fp8_e5m2", "fp4_e2m1", "int4")}
    assert sizes == {"bf16": 256, "fp8_e5m2": 128, "fp4_e2m1": 64, "int4": 64}


def test_check_storage_views_tagged_bytes_without_a_copy() -> None:
    raw = torch.arange(16, dtype=torch.uint8).view(4, 4)[:, ::1]
    view = check_storage("k", raw, "fp8_e4m3fnuz")
    assert view.dtype == torch.float8_e4m3fnuz
    assert view.data_ptr() == raw.data_ptr()
    strided = torch.zeros(4, 8, dtype=torch.uint8)[:, ::2]
    assert check_storage("k", strided, "fp8_e4m3fn").stride() == (8, 2)
    k = torch.zeros(2, dtype=torch.float8_e5m2)
    assert check_storage("k", k, None) is k

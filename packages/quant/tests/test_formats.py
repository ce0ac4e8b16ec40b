"""Formats: figures against torch's own, look-up, and the storage check."""

import pytest
import torch

from narrowkv.quant import FORMATS, FP8_FORMATS, Format, check_storage, get_format

EXACT_DTYPES = [f for f in FORMATS.values() if f.torch_dtype is not None and f.kind != "int"]


@pytest.mark.parametrize("fmt", EXACT_DTYPES, ids=str)
def test_figures_equal_torch_finfo(fmt: Format) -> None:
    info = torch.finfo(fmt.torch_dtype)
    assert fmt.max_value == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.bits == info.bits
    assert info.eps == 2.0**-fmt.mantissa_bits


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_fp8_subnormal_and_nan_codes_are_those_of_torch(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(fmt.torch_dtype).float()
    assert float(values[1]) == fmt.smallest_subnormal
    assert tuple(codes[values.isnan()].tolist()) == fmt.nan_codes
    finite = values[values.isfinite()]
    assert float(finite.max()) == fmt.max_value == -float(finite.min())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_lookup_by_name_format_and_dtype(fmt: Format) -> None:
    assert get_format(fmt.name) is fmt
    assert get_format(fmt) is fmt
    if fmt.torch_dtype is not None:
        assert get_format(fmt.torch_dtype) is fmt
    assert str(fmt) == fmt.name
    assert fmt.storage_dtype == (torch.uint8 if fmt.is_packed else fmt.torch_dtype)


def test_storage_bytes() -> None:
    assert [get_format(f).storage_bytes(128) for f in ("bf16", "fp8_e5m2", "fp4_e2m1", "int4")] == [
        256,
        128,
        64,
        64,
    ]
    with pytest.raises(ValueError, match="elements must be even for fp4_e2m1, got 5"):
        get_format("fp4_e2m1").storage_bytes(5)


def test_unknown_formats_are_refused_with_the_known() -> None:
    with pytest.raises(ValueError, match=r"format must be one of bf16, .*int4; got 'fp8'"):
        get_format("fp8")
    with pytest.raises(ValueError, match="uint8 bytes do not tell their format"):
        get_format(torch.uint8)
    with pytest.raises(TypeError, match=r"format must be a name, a torch.dtype or a Format, got int"):
        get_format(8)  # type: ignore[arg-type]


def test_formats_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        FORMATS["fp8"] = FORMATS["bf16"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        FORMATS["bf16"].bits = 8  # type: ignore[misc]


def test_check_storage_views_tagged_bytes_without_a_copy() -> None:
    raw = torch.arange(16, dtype=torch.uint8).view(4, 4)[:, ::1]
    view = check_storage("k", raw, "fp8_e4m3fnuz")
    assert view.dtype == torch.float8_e4m3fnuz
    assert view.data_ptr() == raw.data_ptr()
    strided = torch.zeros(4, 8, dtype=torch.uint8)[:, ::2]
    assert check_storage("k", strided, "fp8_e4m3fn").stride() == (8, 2)


def test_check_storage_takes_the_format_from_the_dtype() -> None:
    k = torch.zeros(2, dtype=torch.float8_e5m2)
    assert check_storage("k", k, None) is k
    with pytest.raises(
        ValueError, match=r"k has dtype torch.uint8, which does not tell its format: pass one of"
    ):
        check_storage("k", torch.zeros(2, dtype=torch.uint8), None)


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [
        (torch.float8_e4m3fn, "fp8_e4m3fnuz"),
        (torch.float8_e4m3fnuz, "fp8_e4m3fn"),
        (torch.bfloat16, "fp16"),
        (torch.int8, "fp4_e2m1"),
        (torch.uint8, "int8"),
    ],
)
def test_check_storage_refuses_a_tag_that_the_dtype_contradicts(dtype: torch.dtype, tag: str) -> None:
    with pytest.raises(TypeError, match=rf"k in format {tag} must have dtype .*, got {dtype}"):
        check_storage("k", torch.zeros(2, dtype=dtype), tag)

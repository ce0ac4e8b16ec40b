"""The shared validators: what passes, and messages that name the argument, the expected, what came."""

import math

import pytest
import torch

from narrowkv.quant import errors


def test_check_tensor_and_dtype() -> None:
    x = torch.zeros(2)
    assert errors.check_tensor("x", x) is x
    errors.check_dtype("x", x, torch.float32)
    errors.check_dtype("x", x, (torch.float16, torch.float32))
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor, got list"):
        errors.check_tensor("x", [1])
    with pytest.raises(TypeError, match=r"x must have dtype torch.float16, got torch.float32"):
        errors.check_dtype("x", x, torch.float16)
    with pytest.raises(
        TypeError, match=r"q must have dtype one of torch.bfloat16, torch.float16, got torch.float32"
    ):
        errors.check_dtype("q", x, (torch.bfloat16, torch.float16))
    with pytest.raises(TypeError, match=r"kv_indptr must have dtype torch.int32, got torch.int64"):
        errors.check_int32("kv_indptr", torch.zeros(2, dtype=torch.int64))


def test_check_shape() -> None:
    x = torch.zeros(2, 3, 3)
    errors.check_shape("x", x, (2, 3, 3))
    errors.check_shape("x", x, ("batch", "n", "n"))
    errors.check_shape("x", x, (None, 3, None))
    with pytest.raises(
        ValueError, match=r"block_table must have shape \[batch, max_pages\], got \[2, 3, 3\]"
    ):
        errors.check_shape("block_table", x, ("batch", "max_pages"))
    with pytest.raises(ValueError, match=r"x must have shape \[n, n, 3\], got \[2, 3, 3\]"):
        errors.check_shape("x", x, ("n", "n", 3))
    with pytest.raises(ValueError, match=r"x must have shape \[\*, 4, 3\], got"):
        errors.check_shape("x", x, (None, 4, 3))


def test_check_same_device() -> None:
    x, y = torch.zeros(1), torch.zeros(1, device="meta")
    assert errors.check_same_device(q=x, k=None, v=x) == torch.device("cpu")
    with pytest.raises(ValueError, match="v must be on cpu like q, got meta"):
        errors.check_same_device(q=x, k=None, v=y)
    with pytest.raises(ValueError, match="one of q, k must be a tensor, got None for each"):
        errors.check_same_device(q=None, k=None)


def test_check_last_dim_contiguous() -> None:
    x = torch.zeros(4, 4)
    errors.check_last_dim_contiguous("x", x[:, :2])
    errors.check_last_dim_contiguous("x", x[::2])
    errors.check_last_dim_contiguous("x", x.t()[:, :1])
    with pytest.raises(
        ValueError, match=r"x must have a contiguous last dimension \(stride 1\), got stride 4"
    ):
        errors.check_last_dim_contiguous("x", x.t())
    with pytest.raises(ValueError, match="x must have at least one dimension"):
        errors.check_last_dim_contiguous("x", torch.tensor(1.0))


@pytest.mark.parametrize("bad", [0, -3])
def test_check_positive_int_refuses(bad: int) -> None:
    with pytest.raises(ValueError, match=f"page_size must be at least 1, got {bad}"):
        errors.check_positive_int("page_size", bad)


def test_check_positive_int() -> None:
    assert errors.check_positive_int("n", 6, multiple_of=3) == 6
    with pytest.raises(ValueError, match="n must be a positive multiple of 4, got 6"):
        errors.check_positive_int("n", 6, multiple_of=4)
    for not_int in (True, 2.0):
        with pytest.raises(TypeError, match="n must be an int, got"):
            errors.check_positive_int("n", not_int)  # type: ignore[arg-type]


def test_check_choice() -> None:
    assert errors.check_choice("layout", "NHD", ("NHD", "HND")) == "NHD"
    with pytest.raises(ValueError, match="layout must be one of NHD, HND; got 'nhd'"):
        errors.check_choice("layout", "nhd", ("NHD", "HND"))
    with pytest.raises(TypeError, match="layout must be a str, one of NHD, HND; got int"):
        errors.check_choice("layout", 1, ("NHD", "HND"))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-46])
def test_descale_float_refuses(bad: float) -> None:
    with pytest.raises(ValueError, match="k_descale must be"):
        errors.check_descale_float("k_descale", bad)


def test_descale_float_accepts() -> None:
    assert errors.check_descale_float("k_descale", 2) == 2.0
    assert errors.check_descale_float("k_descale", 2.0**-149) == 2.0**-149
    for not_number in ("1", True, None):
        with pytest.raises(TypeError, match="k_descale must be a float, got"):
            errors.check_descale_float("k_descale", not_number)  # type: ignore[arg-type]


def test_finite_float() -> None:
    assert errors.check_finite_float("sm_scale", 0) == 0.0
    with pytest.raises(ValueError, match="sm_scale must be finite, got nan"):
        errors.check_finite_float("sm_scale", math.nan)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_descale_tensor_values_are_looked_at_only_when_asked(bad: float) -> None:
    descale = torch.tensor([1.0, bad, 2.0])
    errors.check_descale_tensor("v_descale", descale)
    with pytest.raises(
        ValueError, match=r"v_descale must be finite and greater than 0, got .* \(1 such values\)"
    ):
        errors.check_descale_tensor("v_descale", descale, validate=True)
    errors.check_descale_tensor("v_descale", torch.ones(2), validate=True)
    errors.check_descale_tensor("v_descale", torch.ones(0), validate=True)
    with pytest.raises(TypeError, match=r"v_descale must have dtype torch.float32"):
        errors.check_descale_tensor("v_descale", torch.ones(2, dtype=torch.float64))


def test_no_grad() -> None:
    x = torch.zeros(1, requires_grad=True)
    errors.check_no_grad(q=torch.zeros(1), k=None)
    with torch.no_grad():
        errors.check_no_grad(q=x)
    with pytest.raises(ValueError, match="q must not require grad"):
        errors.check_no_grad(q=x)


def test_overlap() -> None:
    base = torch.zeros(4, 8)
    errors.check_no_overlap("out", base[:2], q=base[2:], k=None)
    errors.check_no_overlap("out", base[:0], q=base)
    errors.check_no_overlap("out", torch.zeros(4, 8), q=base)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        errors.check_no_overlap("out", base[:3], q=base[2:])
    with pytest.raises(ValueError, match="out must not share memory with q"):
        errors.check_no_overlap("out", base.view(torch.int32)[1], q=base)


def test_unsupported_is_a_value_error() -> None:
    assert issubclass(errors.UnsupportedError, ValueError)

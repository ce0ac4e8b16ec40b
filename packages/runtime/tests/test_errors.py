"""The shared validators: what passes, and messages that name the argument, the expected, what came."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.runtime import errors


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
    largest = torch.finfo(torch.float32).max
    assert errors.check_finite_float("sm_scale", -largest) == -largest
    # The last is the smallest double that float32 rounds to infinity.
    for bad in (math.nan, math.inf, -math.inf, 1e39, 10**400, (2.0 - 2.0**-24) * 2.0**127):
        with pytest.raises(ValueError, match="sm_scale must be finite"):
            errors.check_finite_float("sm_scale", bad)
    with pytest.raises(ValueError, match="sm_scale must be finite in float32"):
        errors.check_finite_float("sm_scale", 1e39)
    below = math.nextafter((2.0 - 2.0**-24) * 2.0**127, 0.0)
    assert math.isfinite(float(torch.tensor(errors.check_finite_float("sm_scale", below))))


def test_window() -> None:
    for window in (-1, 0, 2**30 - 1):
        assert errors.check_window("window_left", window) == window
    # Windows that reach every key there can be.
    for window in (2**30, 2**31 - 1):
        assert errors.check_window("window_left", window) == -1
    for bad in (-2, 2**31):
        with pytest.raises(ValueError, match=r"window_left must be -1 .* or a number of keys up to"):
            errors.check_window("window_left", bad)
    for not_int in (True, 1.0, None):
        with pytest.raises(TypeError, match="window_left must be an int, got"):
            errors.check_window("window_left", not_int)  # type: ignore[arg-type]


def test_instance() -> None:
    x = torch.zeros(1)
    assert errors.check_instance("cache", x, torch.Tensor) is x
    with pytest.raises(TypeError, match="cache must be a Tensor, got NoneType"):
        errors.check_instance("cache", None, torch.Tensor)


def test_index_vectors() -> None:
    column = torch.zeros(3, 2, dtype=torch.int64)[:, 0]
    errors.check_index_vector("slot_mapping", column, 3)
    errors.check_index_vector("slot_mapping", column.int(), "tokens")
    for bad in (torch.zeros(3), torch.zeros(3, dtype=torch.int16), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(TypeError, match=r"slot_mapping must have dtype one of torch.int32, torch.int64"):
            errors.check_index_vector("slot_mapping", bad, 3)
    with pytest.raises(ValueError, match=r"slot_mapping must have shape \[4\], got \[3\]"):
        errors.check_index_vector("slot_mapping", column, 4)
    with pytest.raises(ValueError, match=r"slot_mapping must have shape \[tokens\], got \[3, 1\]"):
        errors.check_index_vector("slot_mapping", column[:, None], "tokens")


def test_a_strided_vector_is_copied_and_another_is_not() -> None:
    numbers = torch.arange(6)
    assert errors.contiguous_vector(numbers) is numbers
    copy = errors.contiguous_vector(numbers[::2])
    assert (copy.tolist(), copy.stride()) == ([0, 2, 4], (1,))


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
    learnt = torch.ones(2, requires_grad=True)
    with torch.no_grad(), pytest.raises(ValueError, match=r"v_descale must not require grad.*detach"):
        errors.check_descale_tensor("v_descale", learnt)
    errors.check_descale_tensor("v_descale", learnt.detach())
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


def test_an_output_may_not_overlap_itself_and_inputs_may_be_anything() -> None:
    base = torch.zeros(4, 8)
    for good in (base.t(), base[::2, ::3], torch.zeros(4, 1, 8).expand(4, 1, 8), base[:1].expand(1, 8)):
        errors.check_no_overlap("out", good, k_descale=0.5, sinks=None, q=torch.zeros(4, 8))
    for bad in (
        torch.zeros(8).expand(4, 8),
        torch.zeros(1).expand(2),
        base.as_strided((4, 8), (4, 1)),
        base.as_strided((2, 2), (1, 1)),
    ):
        with pytest.raises(ValueError, match=r"out must not overlap itself, got shape .* with strides"):
            errors.check_no_overlap("out", bad)
    with pytest.raises(ValueError, match="out must not share memory with sinks"):
        errors.check_no_overlap("out", base, k_descale=0.5, sinks=base[0, :2])


def _without_memory() -> dict[str, torch.Tensor]:
    with FakeTensorMode():
        fake = torch.ones(4, 8)
    return {
        "fake": fake,
        "meta": torch.ones(4, 8, device="meta"),
        "functional": torch._to_functional_tensor(torch.ones(4, 8)),
    }


@pytest.mark.parametrize("kind", ["fake", "meta", "functional", "vmapped"])
def test_no_check_asks_a_tensor_without_memory_for_its_address(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_address(self: torch.Tensor) -> int:
        raise AssertionError("data_ptr was called")

    def check(out: torch.Tensor) -> torch.Tensor:
        assert not errors.has_memory(out)
        errors.check_no_overlap("out", out, q=out)
        errors.check_no_overlap("out", torch.zeros(0), q=out)
        errors.check_descale_tensor("k_descale", out, validate=True)
        errors.check_last_dim_contiguous("q", out)
        return out

    real = torch.zeros(2, 4, 8)
    assert errors.has_memory(real)
    monkeypatch.setattr(torch.Tensor, "data_ptr", no_address)
    with pytest.raises(AssertionError, match="data_ptr was called"):
        errors.check_no_overlap("out", real, q=real)
    if kind == "vmapped":
        torch.func.vmap(check)(real)
    else:
        check(_without_memory()[kind])


def test_unsupported_is_a_value_error() -> None:
    assert issubclass(errors.UnsupportedError, ValueError)

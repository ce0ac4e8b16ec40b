"""The shared validators: what passes, and messages that name the argument, the expected, what came."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.runtime import errors

I64, F16, F32, BF16 = torch.int64, torch.float16, torch.float32, torch.bfloat16
PAIR, BOX, SQUARE, BASE = torch.zeros(2), torch.zeros(2, 3, 3), torch.zeros(4, 4), torch.zeros(4, 8)
COLUMN = torch.zeros(3, 2, dtype=I64)[:, 0]
LEARNT = torch.ones(2, requires_grad=True)
META = torch.zeros(1, device="meta")
# The smallest double that float32 rounds to infinity.
OVERFLOW = (2.0 - 2.0**-24) * 2.0**127
BELOW = math.nextafter(OVERFLOW, 0.0)
LARGEST = torch.finfo(F32).max
LAYOUTS = ("NHD", "HND")

# Check, positional arguments, keywords, what it returns.
ACCEPTED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = [
    (errors.check_tensor, ("x", PAIR), {}, PAIR),
    (errors.check_dtype, ("x", PAIR, F32), {}, None),
    (errors.check_dtype, ("x", PAIR, (F16, F32)), {}, None),
    (errors.check_shape, ("x", BOX, (2, 3, 3)), {}, None),
    (errors.check_shape, ("x", BOX, ("batch", "n", "n")), {}, None),
    (errors.check_shape, ("x", BOX, (None, 3, None)), {}, None),
    (errors.check_same_device, (), {"q": PAIR, "k": None, "v": PAIR}, torch.device("cpu")),
    (errors.check_last_dim_contiguous, ("x", SQUARE[:, :2]), {}, None),
    (errors.check_last_dim_contiguous, ("x", SQUARE[::2]), {}, None),
    (errors.check_last_dim_contiguous, ("x", SQUARE.t()[:, :1]), {}, None),
    (errors.check_positive_int, ("n", 6), {"multiple_of": 3}, 6),
    (errors.check_choice, ("layout", "NHD", LAYOUTS), {}, "NHD"),
    (errors.check_instance, ("cache", PAIR, torch.Tensor), {}, PAIR),
    (errors.check_descale_float, ("k_descale", 2), {}, 2.0),
    (errors.check_descale_float, ("k_descale", 2.0**-149), {}, 2.0**-149),
    (errors.check_finite_float, ("sm_scale", 0), {}, 0.0),
    (errors.check_finite_float, ("sm_scale", -LARGEST), {}, -LARGEST),
    (errors.check_finite_float, ("sm_scale", BELOW), {}, BELOW),
    *((errors.check_window, ("window_left", n), {}, n) for n in (-1, 0, 2**30 - 1)),
    # Windows that reach every key there can be.
    *((errors.check_window, ("window_left", n), {}, -1) for n in (2**30, 2**31 - 1)),
    (errors.check_index_vector, ("slot_mapping", COLUMN, 3), {}, None),
    (errors.check_index_vector, ("slot_mapping", COLUMN.int(), "tokens"), {}, None),
    # Values of a tensor are looked at only when asked.
    *((errors.check_descale_tensor, ("v_descale", torch.tensor([1.0, bad])), {}, None)
      for bad in (0.0, -1.0, math.nan, math.inf)),
    (errors.check_descale_tensor, ("v_descale", torch.ones(2)), {"validate": True}, None),
    (errors.check_descale_tensor, ("v_descale", torch.ones(0)), {"validate": True}, None),
    (errors.check_descale_tensor, ("v_descale", LEARNT.detach()), {}, None),
    (errors.check_no_grad, (), {"q": PAIR, "k": None}, None),
    (errors.check_no_overlap, ("out", BASE[:2]), {"q": BASE[2:], "k": None}, None),
    (errors.check_no_overlap, ("out", BASE[:0]), {"q": BASE}, None),
    *((errors.check_no_overlap, ("out", good), {"k_descale": 0.5, "sinks": None, "q": SQUARE}, None)
      for good in (BASE.t(), BASE[::2, ::3], torch.zeros(4, 1, 8).expand(4, 1, 8), BASE[:1].expand(1, 8))),
]  # fmt: skip

# Check, positional arguments, keywords, error, message.
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (errors.check_tensor, ("x", [1]), {}, TypeError, "x must be a torch.Tensor, got list"),
    (errors.check_dtype, ("x", PAIR, F16), {}, TypeError,
     "x must have dtype torch.float16, got torch.float32"),
    (errors.check_dtype, ("q", PAIR, (BF16, F16)), {}, TypeError,
     "q must have dtype one of torch.bfloat16, torch.float16, got torch.float32"),
    (errors.check_int32, ("kv_indptr", COLUMN), {}, TypeError,
     "kv_indptr must have dtype torch.int32, got torch.int64"),
    (errors.check_shape, ("block_table", BOX, ("batch", "max_pages")), {}, ValueError,
     r"block_table must have shape \[batch, max_pages\], got \[2, 3, 3\]"),
    (errors.check_shape, ("x", BOX, ("n", "n", 3)), {}, ValueError,
     r"x must have shape \[n, n, 3\], got \[2, 3, 3\]"),
    (errors.check_shape, ("x", BOX, (None, 4, 3)), {}, ValueError, r"x must have shape \[\*, 4, 3\], got"),
    (errors.check_same_device, (), {"q": PAIR, "k": None, "v": META}, ValueError,
     "v must be on cpu like q, got meta"),
    (errors.check_same_device, (), {"q": None, "k": None}, ValueError,
     "one of q, k must be a tensor, got None for each"),
    (errors.check_last_dim_contiguous, ("x", SQUARE.t()), {}, ValueError,
     r"x must have a contiguous last dimension \(stride 1\), got stride 4"),
    (errors.check_last_dim_contiguous, ("x", torch.tensor(1.0)), {}, ValueError,
     "x must have at least one dimension"),
    *((errors.check_positive_int, ("page_size", bad), {}, ValueError,
       f"page_size must be at least 1, got {bad}")
      for bad in (0, -3)),
    (errors.check_positive_int, ("n", 6), {"multiple_of": 4}, ValueError,
     "n must be a positive multiple of 4, got 6"),
    *((errors.check_positive_int, ("n", bad), {}, TypeError, "n must be an int, got") for bad in (True, 2.0)),
    (errors.check_choice, ("layout", "nhd", LAYOUTS), {}, ValueError,
     "layout must be one of NHD, HND; got 'nhd'"),
    (errors.check_choice, ("layout", 1, LAYOUTS), {}, TypeError,
     "layout must be a str, one of NHD, HND; got int"),
    *((errors.check_descale_float, ("k_descale", bad), {}, ValueError, "k_descale must be")
      for bad in (0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-46)),
    *((errors.check_descale_float, ("k_descale", bad), {}, TypeError, "k_descale must be a float, got")
      for bad in ("1", True, None)),
    *((errors.check_finite_float, ("sm_scale", bad), {}, ValueError, "sm_scale must be finite")
      for bad in (math.nan, math.inf, -math.inf, 10**400, OVERFLOW)),
    (errors.check_finite_float, ("sm_scale", 1e39), {}, ValueError, "sm_scale must be finite in float32"),
    *((errors.check_window, ("window_left", bad), {}, ValueError,
       "window_left must be -1 .* or a number of keys up to") for bad in (-2, 2**31)),
    *((errors.check_window, ("window_left", bad), {}, TypeError, "window_left must be an int, got")
      for bad in (True, 1.0, None)),
    (errors.check_instance, ("cache", None, torch.Tensor), {}, TypeError,
     "cache must be a Tensor, got NoneType"),
    *((errors.check_index_vector, ("slot_mapping", torch.zeros(3, dtype=bad), 3), {}, TypeError,
       "slot_mapping must have dtype one of torch.int32, torch.int64")
      for bad in (F32, torch.int16, torch.bool)),
    (errors.check_index_vector, ("slot_mapping", COLUMN, 4), {}, ValueError,
     r"slot_mapping must have shape \[4\], got \[3\]"),
    (errors.check_index_vector, ("slot_mapping", COLUMN[:, None], "tokens"), {}, ValueError,
     r"slot_mapping must have shape \[tokens\], got \[3, 1\]"),
    *((errors.check_descale_tensor, ("v_descale", torch.tensor([1.0, bad, 2.0])), {"validate": True},
       ValueError, r"v_descale must be finite and greater than 0, got .* \(1 such values\)")
      for bad in (0.0, -1.0, math.nan, math.inf)),
    (errors.check_descale_tensor, ("v_descale", LEARNT), {}, ValueError,
     "v_descale must not require grad.*detach"),
    (errors.check_descale_tensor, ("v_descale", torch.ones(2, dtype=torch.float64)), {}, TypeError,
     "v_descale must have dtype torch.float32"),
    (errors.check_no_overlap, ("out", BASE[:3]), {"q": BASE[2:]}, ValueError,
     "out must not share memory with q"),
    (errors.check_no_overlap, ("out", BASE.view(torch.int32)[1]), {"q": BASE}, ValueError,
     "out must not share memory with q"),
    (errors.check_no_overlap, ("out", BASE), {"k_descale": 0.5, "sinks": BASE[0, :2]}, ValueError,
     "out must not share memory with sinks"),
    *((errors.check_no_overlap, ("out", bad), {}, ValueError,
       r"out must not overlap itself, got shape .* with strides")
      for bad in (torch.zeros(8).expand(4, 8), torch.zeros(1).expand(2), BASE.as_strided((4, 8), (4, 1)),
                  BASE.as_strided((2, 2), (1, 1)))),
]  # fmt: skip


@pytest.mark.parametrize(("check", "arguments", "options", "expected"), ACCEPTED)
def test_what_is_right_passes(
    check: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], expected: Any
) -> None:
    found = check(*arguments, **options)
    assert found is expected or found == expected


@pytest.mark.parametrize(("check", "arguments", "options", "error", "message"), REFUSED)
def test_what_is_wrong_is_refused(
    check: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception],
    message: str,
) -> None:  # fmt: skip
    with torch.no_grad(), pytest.raises(error, match=message):
        check(*arguments, **options)


def test_gradients_are_refused_where_torch_would_record_them() -> None:
    with torch.no_grad():
        errors.check_no_grad(q=LEARNT)
    with pytest.raises(ValueError, match="q must not require grad"):
        errors.check_no_grad(q=LEARNT)


def test_a_strided_vector_is_copied_and_another_is_not() -> None:
    numbers = torch.arange(6)
    assert errors.contiguous_vector(numbers) is numbers
    copy = errors.contiguous_vector(numbers[::2])
    assert (copy.tolist(), copy.stride()) == ([0, 2, 4], (1,))


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

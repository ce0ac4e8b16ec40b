"""Argument checks shared by every narrowkv package: typed errors, without a device sync.

Each message names the argument, says what was expected and what came. A wrong kind of object (dtype, not a
tensor) is a `TypeError`; a wrong value (shape, size, device, range) is a `ValueError`.

Example:
    >>> import torch
    >>> check_shape("block_table", torch.zeros(3, dtype=torch.int32), ("batch", "max_pages"))
    Traceback (most recent call last):
    ValueError: block_table must have shape [batch, max_pages], got [3]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch

__all__ = [
    "UnsupportedError",
    "check_choice",
    "check_descale_float",
    "check_descale_tensor",
    "check_dtype",
    "check_finite_float",
    "check_int32",
    "check_last_dim_contiguous",
    "check_no_grad",
    "check_no_overlap",
    "check_positive_int",
    "check_same_device",
    "check_shape",
    "check_tensor",
]


class UnsupportedError(ValueError):
    """The request is well formed, but this target, format or toolchain cannot serve it.

    The message says why, and what is known or needed instead.
    """


def _spell(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)


def _shape(sizes: Iterable[object]) -> str:
    return "[" + ", ".join("*" if size is None else str(size) for size in sizes) + "]"


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Returns `value` if it is a tensor.

    Raises:
        TypeError: `value` is anything else.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def check_dtype(name: str, tensor: torch.Tensor, allowed: torch.dtype | Collection[torch.dtype]) -> None:
    """Checks that `tensor` has one of the `allowed` dtypes.

    Raises:
        TypeError: `tensor` is not a tensor, or has another dtype.
    """
    check_tensor(name, tensor)
    dtypes = (allowed,) if isinstance(allowed, torch.dtype) else tuple(allowed)
    if tensor.dtype not in dtypes:
        wanted = _spell(dtypes) if len(dtypes) == 1 else f"one of {_spell(dtypes)}"
        raise TypeError(f"{name} must have dtype {wanted}, got {tensor.dtype}")


def check_int32(name: str, tensor: torch.Tensor) -> None:
    """Checks that `tensor` is an int32 tensor (all paging metadata is).

    Raises:
        TypeError: `tensor` is not a tensor, or not int32.
    """
    check_dtype(name, tensor, torch.int32)


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | str | None]) -> None:
    """Checks the shape of `tensor`.

    Args:
        name: the argument's name.
        tensor: any tensor.
        expected: one entry per dimension: an int is required exactly; a str names a free size in the message,
            and the same str twice must be the same size; None is free.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: the number of dimensions or a size differs.
    """
    check_tensor(name, tensor)
    sizes = tuple(tensor.shape)
    bound: dict[str, int] = {}
    ok = len(sizes) == len(expected)
    for size, want in zip(sizes, expected, strict=False):
        if isinstance(want, str):
            ok = ok and bound.setdefault(want, size) == size
        elif want is not None:
            ok = ok and size == want
    if not ok:
        raise ValueError(f"{name} must have shape {_shape(expected)}, got {_shape(sizes)}")


def check_same_device(**tensors: torch.Tensor | None) -> torch.device:
    """Checks that all tensors are on one device, and returns it; None values are skipped.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: two tensors are on different devices, or there is no tensor.
    """
    first: tuple[str, torch.device] | None = None
    for name, value in tensors.items():
        if value is None:
            continue
        device = check_tensor(name, value).device
        if first is None:
            first = (name, device)
        elif device != first[1]:
            raise ValueError(f"{name} must be on {first[1]} like {first[0]}, got {device}")
    if first is None:
        raise ValueError(f"one of {_spell(tensors)} must be a tensor, got None for each")
    return first[1]


def check_last_dim_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Checks that neighbours along the last dimension are neighbours in memory; other strides are free.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: the last dimension is strided, or there is none.
    """
    check_tensor(name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar tensor")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension (stride 1), got stride {tensor.stride(-1)}"
        )


def check_positive_int(name: str, value: int, *, multiple_of: int = 1) -> int:
    """Checks that `value` is an int >= 1 and a multiple of `multiple_of`, and returns it.

    Raises:
        TypeError: `value` is not an int (bool is not one).
        ValueError: `value` is below 1 or not such a multiple.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1 or value % multiple_of:
        wanted = "at least 1" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value


def check_choice(name: str, value: str, known: Collection[str]) -> str:
    """Checks that `value` is one of the `known` words, and returns it.

    Raises:
        TypeError: `value` is not a str.
        ValueError: `value` is not known; the message lists what is.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, one of {_spell(known)}; got {type(value).__name__}")
    if value not in known:
        raise ValueError(f"{name} must be one of {_spell(known)}; got {value!r}")
    return value


def check_finite_float(name: str, value: float) -> float:
    """Checks that `value` is a finite real number, and returns it as a float (for `sm_scale`, soft caps).

    Raises:
        TypeError: `value` is not an int or a float.
        ValueError: `value` is NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def check_descale_float(name: str, value: float) -> float:
    """Checks a descale that was given as a number, and returns it as a float.

    Raises:
        TypeError: `value` is not an int or a float.
        ValueError: `value` is zero, negative, NaN or infinite, or is so once it is rounded to fp32.
    """
    number = check_finite_float(name, value)
    if number <= 0.0:
        raise ValueError(f"{name} must be greater than 0, got {number}")
    if not 2.0**-149 <= number < 2.0**128:
        raise ValueError(f"{name} must be representable in float32, got {number}")
    return number


def check_descale_tensor(name: str, tensor: torch.Tensor, *, validate: bool = False) -> None:
    """Checks that a descale tensor is fp32 and, with `validate`, that every value is finite and above zero.

    Args:
        name: the argument's name.
        tensor: the descales, any shape.
        validate: also look at the values, which waits for the device.

    Raises:
        TypeError: `tensor` is not an fp32 tensor.
        ValueError: `validate`, and a value is zero, negative, NaN or infinite.
    """
    check_dtype(name, tensor, torch.float32)
    if validate and tensor.numel():
        bad = ~(torch.isfinite(tensor) & (tensor > 0))
        count = int(bad.sum())
        if count:
            first = float(tensor[bad].flatten()[0])
            raise ValueError(f"{name} must be finite and greater than 0, got {first} ({count} such values)")


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """Checks that no tensor requires grad: these operations have no backward; None values are skipped.

    Raises:
        ValueError: a tensor requires grad while grad mode is on.
    """
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if value is not None and value.requires_grad:
            raise ValueError(f"{name} must not require grad (there is no backward), got requires_grad=True")


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_no_overlap(out_name: str, out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Checks that the bytes spanned by `out` are not those of an input; None inputs are skipped.

    Two interleaved views of one storage count as overlapping: the check compares the spans, not the elements.

    Raises:
        ValueError: `out` and an input share bytes.
    """
    if out.numel() == 0:
        return
    low, high = _byte_range(out)
    for name, value in inputs.items():
        if value is None or value.numel() == 0 or value.device != out.device:
            continue
        other_low, other_high = _byte_range(value)
        if low < other_high and other_low < high:
            raise ValueError(f"{out_name} must not share memory with {name}, got overlapping tensors")

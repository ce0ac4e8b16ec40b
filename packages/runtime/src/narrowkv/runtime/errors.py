"""Argument checks shared by every narrowkv package: typed errors, without a device sync.

Each message names the argument, what was expected and what was given. A wrong kind of object (dtype, not a
tensor) is a `TypeError`; a wrong value (shape, size, device, range) is a `ValueError`.

From `check_device` on: checks of what attention operations have in common, sinks, caps, windows and results.

Example:
    >>> import torch
    >>> check_shape("block_table", torch.zeros(3, dtype=torch.int32), ("batch", "max_pages"))
    Traceback (most recent call last):
    ValueError: block_table must have shape [batch, max_pages], got [3]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = [
    "UnsupportedError",
    "byte_span",
    "check_choice",
    "check_descale_float",
    "check_descale_tensor",
    "check_dtype",
    "check_finite_float",
    "check_index_vector",
    "check_instance",
    "check_int32",
    "check_last_dim_contiguous",
    "check_no_grad",
    "check_no_overlap",
    "check_positive_int",
    "check_same_device",
    "check_shape",
    "check_tensor",
    "check_window",
    "contiguous_vector",
    "has_memory",
    "with_defaults",
]

_T = TypeVar("_T")
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_OUT_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)  # with `out_scale`
_INT32_MAX = 2**31 - 1
# The smallest number that float32 rounds to infinity: half a unit above its largest.
_FLOAT32_OVERFLOW = (2.0 - 2.0**-24) * 2.0**127


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
    """Checks that `tensor` is an int32 tensor.

    Raises:
        TypeError: `tensor` is not a tensor, or not int32.
    """
    check_dtype(name, tensor, torch.int32)


def check_index_vector(name: str, tensor: torch.Tensor, length: int | str) -> None:
    """Checks a vector of integers (slots, positions, lengths) that a kernel reads by its stride.

    Any stride is accepted, so a column of an engine's table needs no copy. A kernel that assumes stride 1
    must be given `contiguous_vector(tensor)` instead.

    Args:
        name: the argument's name.
        tensor: `[length]` int32 or int64.
        length: the size, or a name for it if it is free.

    Raises:
        TypeError: `tensor` is not a tensor, or neither int32 nor int64.
        ValueError: `tensor` does not have one dimension of that size.
    """
    check_dtype(name, tensor, (torch.int32, torch.int64))
    check_shape(name, tensor, (length,))


def contiguous_vector(tensor: torch.Tensor) -> torch.Tensor:
    """The vector itself if its stride is 1, else a copy made on its device, without waiting for the device.

    A copy does not see later writes to the original, so it must be made in each call.
    """
    return tensor if tensor.shape[0] < 2 or tensor.stride(0) == 1 else tensor.contiguous()


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
    """Checks that the last dimension has stride 1; other strides are free.

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


def check_window(name: str, value: int) -> int:
    """Checks the number of keys before or after a query that a window includes.

    Args:
        name: the argument's name, e.g. `window_left`.
        value: -1 for no limit, or 0 to 2**31 - 1.

    Returns:
        `value`; or -1 if it is 2**30 or more, because such a window includes all keys and its positions
        would overflow 32 bits.

    Raises:
        TypeError: `value` is not an int (bool is not one).
        ValueError: `value` is below -1 or beyond int32.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not -1 <= value <= _INT32_MAX:
        raise ValueError(f"{name} must be -1 (no limit) or a number of keys up to {_INT32_MAX}, got {value}")
    return -1 if value >= 2**30 else value


def check_instance(name: str, value: object, kind: type[_T]) -> _T:
    """Returns `value` if it is an object of class `kind` (a cache, a page table, a plan).

    Raises:
        TypeError: `value` is anything else.

    Example:
        >>> check_instance("cache", {}, torch.Tensor)
        Traceback (most recent call last):
        TypeError: cache must be a Tensor, got dict
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def check_choice(name: str, value: str, known: Collection[str]) -> str:
    """Checks that `value` is one of the `known` strings, and returns it.

    Raises:
        TypeError: `value` is not a str.
        ValueError: `value` is not one of them; the message lists them.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, one of {_spell(known)}; got {type(value).__name__}")
    if value not in known:
        raise ValueError(f"{name} must be one of {_spell(known)}; got {value!r}")
    return value


def check_finite_float(name: str, value: float) -> float:
    """Checks a real number that is finite in float32, as kernels take it (softmax scales, soft caps).

    Returns:
        The number as a float; it is not rounded.

    Raises:
        TypeError: `value` is not an int or a float.
        ValueError: `value` is NaN, infinite or too large for float32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if value != value or value in (math.inf, -math.inf):
        raise ValueError(f"{name} must be finite, got {value}")
    if not -_FLOAT32_OVERFLOW < value < _FLOAT32_OVERFLOW:  # exact for an int of any size
        raise ValueError(f"{name} must be finite in float32 (at most 3.4e38 in magnitude), got {value}")
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
    if number < 2.0**-149:
        raise ValueError(f"{name} must be representable in float32 (at least 1.4e-45), got {number}")
    return number


def check_descale_tensor(name: str, tensor: torch.Tensor, *, validate: bool = False) -> None:
    """Checks that a descale tensor is fp32 and, with `validate`, that every value is finite and above zero.

    Args:
        name: the argument's name.
        tensor: the descales, any shape.
        validate: also look at the values, which waits for the device; tensors without memory have none.

    Raises:
        TypeError: `tensor` is not an fp32 tensor.
        ValueError: `tensor` requires grad, whether grad mode is on or not (a cache that holds it outlives the
            mode); or `validate`, and a value is zero, negative, NaN or infinite.
    """
    check_dtype(name, tensor, torch.float32)
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require grad (there is no backward): pass {name}.detach()")
    if validate and tensor.numel() and has_memory(tensor):
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


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory. Fake, meta, functional and vmapped tensors have none.

    `data_ptr()` of such a tensor is 0, warns or raises, so nothing may ask for it.
    """
    return not (
        tensor.is_meta
        or (type(tensor) is not torch.Tensor and isinstance(tensor, (FakeTensor, FunctionalTensor)))
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor with memory and elements, and of the first byte after it."""
    begin = tensor.data_ptr()
    return begin, begin + span_bytes(tensor)


def spans_of(*values: object) -> list[tuple[int, int]]:
    """The address ranges of the tensors among the values; other values and empty tensors have none."""
    return [byte_span(value) for value in values if isinstance(value, torch.Tensor) and value.numel()]


def span_bytes(x: torch.Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 for an empty one and for None."""
    if x is None or not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def check_no_overlap(out_name: str, out: torch.Tensor, /, **inputs: object) -> None:
    """Checks that no two elements of `out` share memory, and that `out` does not overlap an input.

    Two interleaved views of one storage count as overlapping: the check compares the spans, not the elements.
    Tensors without memory (fake, meta, functional) are checked against themselves only.

    Args:
        out_name: the output's name.
        out: the output.
        **inputs: the call's other arguments by name; whatever is not a tensor (None, a number) is skipped.

    Raises:
        ValueError: `out` overlaps itself (an expanded tensor, say) or an input.
    """
    if out.numel() == 0:
        return
    span = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= span:
            raise ValueError(
                f"{out_name} must not overlap itself, got shape {list(out.shape)} with strides "
                f"{list(out.stride())}: pass a tensor whose elements each have their own memory"
            )
        span += (size - 1) * stride
    if not has_memory(out):
        return
    low, high = byte_span(out)
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.device != out.device:
            continue
        if not has_memory(value):
            continue
        other_low, other_high = byte_span(value)
        if low < other_high and other_low < high:
            raise ValueError(f"{out_name} must not share memory with {name}, got overlapping tensors")


def with_defaults(function: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call to `function`, with `defaults` for those not given; refuses unknown ones."""
    found = {**defaults, **given}
    if len(found) > len(defaults):
        name = next(name for name in given if name not in defaults)
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return found


def check_device(name: str, tensor: torch.Tensor, device: torch.device, like: str = "q") -> None:
    """Checks that a tensor is on a device.

    Args:
        name: of the tensor.
        tensor: the tensor.
        device: where it must be.
        like: what else is there, for the message.

    Raises:
        ValueError: it is on another device.
    """
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like {like}, got {tensor.device}")


def check_soft_cap(value: float) -> float:
    """Checks the cap of logits, 0 for none, and returns it.

    Raises:
        TypeError, ValueError: it is no number, not finite or negative.
    """
    soft_cap = check_finite_float("logits_soft_cap", value)
    if soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be 0 (off) or positive, got {value}")
    return soft_cap


def check_windows(left: int, right: int = -1, *, causal: bool = True) -> tuple[int, int]:
    """Checks how many keys before and after itself a row attends to, -1 for all.

    Returns:
        Both numbers; the second is 0 if the mask is causal.

    Raises:
        TypeError, ValueError: naming the side.
    """
    left = check_window("window_left", left)
    if causal and right > 0:
        raise ValueError(f"window_right must be -1 or 0 with causal=True, got {right}")
    return left, 0 if causal else check_window("window_right", right)


def check_sinks(
    sinks: torch.Tensor | None, num_heads: int, device: torch.device, *, name: str = "sinks",
    dtypes: Collection[torch.dtype] = OUT_DTYPES, like: str = "q",
) -> None:  # fmt: skip
    """Checks the logit that each head adds to its denominator; None is no sink.

    Raises:
        TypeError, ValueError: naming the tensor, what was expected and what came.
    """
    if sinks is None:
        return
    check_dtype(name, sinks, dtypes)
    check_shape(name, sinks, (num_heads,))
    check_last_dim_contiguous(name, sinks)
    check_device(name, sinks, device, like)
    check_no_grad(**{name: sinks})


def check_out_dtype(
    out_dtype: torch.dtype | None, dtypes: Collection[torch.dtype] = OUT_DTYPES
) -> None:  # fmt: skip
    """Checks the dtype that a new output is to have; None leaves it to the operation.

    Raises:
        TypeError, ValueError: it is no dtype, or none of `dtypes`.
    """
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {type(out_dtype).__name__}")
    if out_dtype is not None and out_dtype not in dtypes:
        raise ValueError(f"out_dtype must be one of {tuple(dtypes)}, got {out_dtype}")


def check_out(
    out: torch.Tensor, shape: tuple[int, ...], dtypes: Collection[torch.dtype], device: torch.device,
    like: str = "q",
) -> None:  # fmt: skip
    """Checks where a caller wants the output.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    check_dtype("out", out, dtypes)
    check_shape("out", out, shape)
    check_last_dim_contiguous("out", out)
    check_device("out", out, device, like)
    check_no_grad(out=out)


def check_lse(
    lse: torch.Tensor, shape: tuple[int, ...], device: torch.device, *, name: str = "lse", like: str = "q",
    any_strides: bool = False,
) -> None:  # fmt: skip
    """Checks where a caller wants the log-sum-exp.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    check_dtype(name, lse, torch.float32)
    check_shape(name, lse, shape)
    if not any_strides:
        check_last_dim_contiguous(name, lse)
    check_device(name, lse, device, like)
    check_no_grad(**{name: lse})


def refuse_overlap(
    out: torch.Tensor | None, lse: torch.Tensor | None, inputs: Mapping[str, Any], lse_name: str = "lse"
) -> None:
    """Refuses results that share memory with themselves, each other or an input.

    Args:
        out, lse: the results that the caller gave.
        inputs: what the call reads, by the names of messages; what is no tensor is skipped.
        lse_name: of `lse`, for messages.

    Raises:
        ValueError: naming both.
    """
    if out is not None:
        check_no_overlap("out", out, **inputs, **{lse_name: lse})
    if lse is not None:
        check_no_overlap(lse_name, lse, **inputs)


def wide_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of a new output: a query's own, or bf16 for FP8 queries, also where they are bytes."""
    return q.dtype if q.dtype.itemsize == 2 else torch.bfloat16


def check_results(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, sinks: torch.Tensor | None,
    out_dtype: torch.dtype | None, out_scale: torch.Tensor | None, inputs: Mapping[str, Any], *,
    head_dim: int, vendor: str,
) -> torch.dtype:  # fmt: skip
    """Checks the results that a caller gave, and sinks, of an operation whose output is like q.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`.
        out, lse, sinks, out_dtype, out_scale: as the caller gave them.
        inputs: what the call reads, by the names of messages.
        head_dim: channels of the output, which are V's.
        vendor: of the target that writes the output.

    Returns:
        The dtype of the output.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        UnsupportedError: the output is E4M3 FNUZ, and the target one of NVIDIA's, which have no such type.
    """
    check_sinks(sinks, q.shape[1], q.device)
    dtypes = OUT_DTYPES if out_scale is None else FP8_OUT_DTYPES
    check_out_dtype(out_dtype, dtypes)
    if out is not None:
        check_out(out, (*q.shape[:2], head_dim), dtypes if out_dtype is None else (out_dtype,), q.device)
    if out_scale is not None:
        check_descale_tensor("out_scale", out_scale)
        check_shape("out_scale", out_scale, (1,))
        check_device("out_scale", out_scale, q.device)
        written = out_dtype if out is None else out.dtype
        if written is None:
            raise ValueError(f"out_dtype must be one of {dtypes} with out_scale, or out must be given")
        if written == torch.float8_e4m3fnuz and vendor == "nvidia":
            raise UnsupportedError("out in float8_e4m3fnuz is for AMD: NVIDIA's GPUs have float8_e4m3fn")
    if lse is not None:
        check_lse(lse, tuple(q.shape[:2]), q.device)
    refuse_overlap(out, lse, inputs)
    return out_dtype or wide_dtype(q) if out is None else out.dtype

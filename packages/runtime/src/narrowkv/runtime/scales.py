"""The values of scale tensors: read once when an operation binds them, and again after they change in place.

Reading a value waits for the device. So a tensor is read in the first call that takes it, and in a later call
only if its version counter has moved, which every torch operation that writes in place does. Nothing is read
while a graph is captured, while torch traces, or of tensors without memory; the next other call reads it.

Scales that are stored beside the numbers of a cache are data, and are not read: those per page, per token and
per group of channels. Slots that no token has taken may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowkv.runtime.errors import check_descale_tensor, has_memory
from narrowkv.runtime.operation import Bounded, ByIdentity

__all__ = ["check_scales", "not_written"]

# By tensor, or by the tensor that it is a view of: the version at which each part was found right.
_right: ByIdentity[Bounded[int]] = ByIdentity()
_WHOLE = None
_MOST_PARTS = 256  # of one tensor


def check_scales(scales: Mapping[str, object], validate: bool | None = None) -> None:
    """Refuses scale tensors with a value that is zero, negative, NaN or infinite.

    Args:
        scales: fp32 tensors by name; whatever is not a tensor (None, a number) is skipped.
        validate: None reads tensors that have not been read in their present version; True reads every one;
            False reads none.

    Raises:
        ValueError: naming the scale, what was expected and what came.

    Example:
        >>> check_scales({"k_descale": torch.tensor([0.0])})
        Traceback (most recent call last):
        ValueError: k_descale must be finite and greater than 0, got 0.0 (1 such values)
    """
    if validate is False or torch.compiler.is_dynamo_compiling():
        return
    for name, value in scales.items():
        if not isinstance(value, torch.Tensor):
            continue
        # A view is a new object each time that it is made.
        owner: torch.Tensor = value if value._base is None else value._base
        part = _WHOLE if owner is value else (value.storage_offset(), value.shape, value.stride())
        version = 0 if value.is_inference() else value._version
        known = _right.get(id(owner))
        if validate is None and known is not None and known.get(part) == version:
            continue
        if not _readable(value):
            continue
        check_descale_tensor(name, value, validate=True)
        if known is None:
            known = _right.keep(owner, Bounded(_MOST_PARTS))
        known.keep(part, version)


def not_written(scales: Mapping[str, object]) -> None:
    """Takes back the write to each scale that torch counted when it called an operator.

    An operator that writes the scales of tokens says so of its argument, and torch then moves the version of
    whatever it is given, static scales too.
    """
    if torch.is_inference_mode_enabled():
        return  # torch counts nothing
    for value in scales.values():
        if isinstance(value, torch.Tensor) and value._base is None and not value.is_inference():
            known: dict[Any, int] = _right.get(id(value), {})
            if known.get(_WHOLE) == value._version - 1:
                known[_WHOLE] = value._version


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the values can be read now: not while torch traces, nor while a graph is captured."""
    if torch._C._len_torch_dispatch_stack() or not has_memory(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())

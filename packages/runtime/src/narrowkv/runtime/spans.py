"""Byte addresses that tensors take, compared cheaply."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from narrowkv.runtime.errors import byte_span


def spans_of(*values: object) -> list[tuple[int, int]]:
    """The address ranges of the tensors among the values; other values and empty tensors have none."""
    return [byte_span(value) for value in values if isinstance(value, torch.Tensor) and value.numel()]


def meets(begin: int, num_bytes: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether bytes at an address lie in one of the spans."""
    end = begin + num_bytes
    for low, high in spans:
        if begin < high and low < end:
            return num_bytes > 0
    return False


def span_bytes(x: torch.Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 for an empty one and for None."""
    if x is None or not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def share_memory(
    outputs: Iterable[tuple[torch.Tensor | None, int]],
    inputs: Iterable[tuple[torch.Tensor | None, int]],
    spans: Iterable[tuple[int, int]] = (),
) -> bool:
    """Whether an output may share memory with an input or another output; the caller's checks say which.

    Args:
        outputs, inputs: tensors with the bytes that they span; None is skipped.
        spans: addresses of further inputs.
    """
    taken = [*spans]
    for tensor, size in inputs:
        if tensor is not None and size:
            begin = tensor.data_ptr()
            taken.append((begin, begin + size))
    for tensor, size in outputs:
        if tensor is not None and size:
            begin = tensor.data_ptr()
            end = begin + size
            for low, high in taken:
                if begin < high and low < end:
                    return True
            taken.append((begin, end))
    return False

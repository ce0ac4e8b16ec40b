"""Byte addresses that tensors take, compared cheaply."""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import byte_span


def spans_of(*values: object) -> list[tuple[int, int]]:
    """The address ranges of the tensors among the values; other values and empty tensors have none."""
    return [byte_span(value) for value in values if isinstance(value, torch.Tensor) and value.numel()]


def span_bytes(x: torch.Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 for an empty one and for None."""
    if x is None or not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()

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

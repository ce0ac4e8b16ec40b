"""A paged cache and its page table as the arguments of kernels that read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.kernels.pages import Descale, KVPointers
from narrowkv.paged_cache.layouts import KVStrides
from narrowkv.quant.device import NATIVE
from narrowkv.quant.formats import get_format
from narrowkv.runtime.targets import Target

# A route of widening: packed conversions in inline PTX.
PTX = "ptx"
ABSENT = Descale(None, 0, 0, 0)


class Side(NamedTuple):
    """K or V as a kernel reads it: words, how they are widened, elements per word."""

    pointers: KVPointers
    route: str
    parts: int


def descale_pointers(value: Any, granularity: str) -> tuple[str, float, Descale]:
    """How kernels take a descale of K or V.

    Returns:
        The kind (`Stored.descale`), the factor to fold into a scale on the host, and pointers with strides.
    """
    if not isinstance(value, torch.Tensor):
        return "scalar", float(value), ABSENT
    if granularity == "tensor":
        return "head", 1.0, Descale(value, 0, 0, 0)
    if granularity == "head":
        return "head", 1.0, Descale(value, 0, 0, value.stride(0))
    if granularity == "sequence_head":
        return "head", 1.0, Descale(value, value.stride(0), 0, value.stride(1))
    if granularity == "page_head":
        return "token", 1.0, Descale(value, value.stride(0), 0, value.stride(1))
    kinds = {torch.float32: "token", torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}
    kind = kinds[value.dtype]
    if granularity == "token_head_group":
        kind = "e8m0_group"
    if kind == "e4m3":
        value = value.view(torch.uint8)  # not every target has the type
    return kind, 1.0, Descale(value, value.stride(0), value.stride(1), value.stride(2))


def side_of(stored: torch.Tensor, strides: KVStrides, format_name: str, route: str, parts: int) -> Side:
    """K or V as the words that the kernel loads, with fewer elements per word if a stride is odd."""
    fmt = get_format(format_name)
    if parts > 1:
        even = not any(s % 2 for s in (strides.page, strides.token, strides.head, stored.data_ptr()))
        if strides.vec == 0 and even:
            words = stored.view(torch.int16)
            return Side(
                KVPointers(words, strides.page // 2, strides.token // 2, strides.head // 2, 0), route, parts
            )
        parts = 2 if fmt.kind == "fp4" else 1
    if fmt.kind == "fp8":
        dtype = fmt.storage_dtype if route == NATIVE else torch.uint8
        stored = stored if stored.dtype == dtype else stored.view(dtype)
    return Side(KVPointers(stored, strides.page, strides.token, strides.head, strides.outer), route, parts)


def packed_route(target: Target, format_name: str, side: Side, half: bool) -> str:
    """The route of a side: inline PTX for 16-bit words on NVIDIA, else the route that it has."""
    packed = (format_name == "fp8_e4m3fn" and side.parts == 2 and side.route == NATIVE) or (
        format_name == "fp4_e2m1" and side.parts == 4
    )
    return PTX if packed and half and target.vendor == "nvidia" else side.route


def step_of(tensor: torch.Tensor) -> int | None:
    """The stride of the last dimension, or None for 1, as `Table` has it."""
    return None if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.stride(-1)

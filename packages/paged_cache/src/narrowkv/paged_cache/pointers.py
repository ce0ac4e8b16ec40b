"""A paged cache and its page table as the arguments of kernels that read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowkv.paged_cache.descales import CacheSide
from narrowkv.paged_cache.kernels.pages import Descale, KVPointers, Stored
from narrowkv.paged_cache.layouts import KVStrides
from narrowkv.quant.device import NATIVE, widening_exponent
from narrowkv.quant.formats import get_format
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target, least_columns

# Routes of widening: packed conversions in inline PTX; FP4 by way of bytes of FP8; FP4 by gfx950's own
# instruction.
PTX = "ptx"
PTX8 = "ptx8"
CDNA4 = "cdna4"
ABSENT = Descale(None, 0, 0, 0)


class Side(NamedTuple):
    """K or V as a kernel reads it: words, how they are widened, elements per word, x if vectorised."""

    pointers: KVPointers
    route: str
    parts: int
    vec: int


def descale_pointers(side: CacheSide) -> tuple[str, float, Descale]:
    """How kernels take the descale of K or V.

    Returns:
        The kind (`Stored.descale`), the factor to fold into a scale on the host, and pointers with strides.
    """
    value, granularity = side.descale, side.granularity
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
    if side.format == "int4":
        kind, value = "token_zero", value.view(torch.int32)
    if kind == "e4m3":
        value = value.view(torch.uint8)  # not every target has the type
    if side.group:
        kind = f"{kind}_{side.group}"
    return kind, side.tensor_scale, Descale(value, value.stride(0), value.stride(1), value.stride(2))


def widening_power(format_name: str, route: str, descale_kind: str) -> int:
    """The power of two that a widened tile is still to be multiplied by; see `widen_tile`."""
    if descale_kind.startswith("e8m0_"):
        # Taken along by the groups' factors, of which those for bytes are at most 2**15 and those of
        # gfx950's own instruction at most 2**13.
        return {PTX8: widening_exponent(format_name, route) - 15, CDNA4: -13}.get(route, 0)
    return widening_exponent(format_name, route)


def scales_are_words(descale: Descale) -> bool:
    """Whether the scales of a key's groups can be read as one word."""
    strides = (descale.ptr.data_ptr(), descale.major, descale.token, descale.head)
    return not any(stride % descale.ptr.shape[-1] for stride in strides)


def stored_as(side: Side, format_name: str, route: str, kind: str, descale: Descale) -> Stored:
    """Constants of K or V: of the words of `side`, widened by `route`, with this kind of descale."""
    _, _, group = kind.partition("_")
    aligned = group.isdigit() and scales_are_words(descale)
    factors = kind not in ("scalar", "head") and not kind.startswith("e4m3_")
    return Stored(format_name, route, side.parts, side.vec, kind, factors, aligned)


def side_of(stored: torch.Tensor, strides: KVStrides, format_name: str, route: str, parts: int) -> Side:
    """K or V as the words that the kernel loads, with fewer elements per word if a stride is odd."""
    fmt = get_format(format_name)
    if parts > 1:
        even = not any(s % 2 for s in (strides.page, strides.token, strides.head, stored.data_ptr()))
        if strides.vec == 0 and even:
            words = stored.view(torch.int16)
            pointers = KVPointers(words, strides.page // 2, strides.token // 2, strides.head // 2, 0)
            return Side(pointers, route, parts, 0)
        parts = 2 if fmt.is_packed else 1
    if fmt.bits == 8:
        dtype = fmt.storage_dtype if route == NATIVE else torch.uint8
        stored = stored if stored.dtype == dtype else stored.view(dtype)
    pointers = KVPointers(stored, strides.page, strides.token, strides.head, strides.outer)
    return Side(pointers, route, parts, strides.vec)


def packed_route(
    target: Target, format_name: str, side: Side, half: bool, *, as_bytes: bool = False, cdna4: bool = False
) -> str:
    """The route of a side: inline assembly for 16-bit words on NVIDIA and gfx950, else the route that it has.

    as_bytes: FP4 is converted as bytes of E4M3, which takes fewer instructions; the kernel then takes the
        scales of groups in relation to the tile's largest. H100, decode, 96/8 heads, one scale a head: B128
        ctx1024 91 us instead of 96, B64 ctx8192 248 and 254.
    cdna4: gfx950 converts FP4 by its own instruction, which needs more registers at a time, and a kernel
        whose matrix instructions take at most four passes.
    """
    if cdna4 and target.name == "gfx950" and format_name == "fp4_e2m1" and side.parts == 4:
        return CDNA4
    by_cast = format_name == "fp8_e4m3fn" and side.route == NATIVE
    packed = (side.parts == 2 and (by_cast or format_name == "int8")) or side.parts == 4
    if not packed or not half or target.vendor != "nvidia":
        return side.route
    return PTX8 if as_bytes and format_name == "fp4_e2m1" else PTX


def multiplied_parts(target: Target, columns: int, parts: int) -> int:
    """Parts in which matrix instructions multiply V, which is widened in `parts`: that many, or one.

    No part has fewer columns than `least_columns` allows a warpgroup.

    Args:
        target: what the kernel runs on.
        columns: of V, `head_dim` rounded up to a power of two.
        parts: `Stored.parts` of V.
    """
    return 1 if columns < least_columns(target, WARPGROUP_ROWS) * parts else parts


def step_of(tensor: torch.Tensor) -> int | None:
    """The stride of the last dimension, or None for 1, as `Table` has it."""
    return None if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.stride(-1)

"""A paged cache as kernel arguments, and arrival counters of calls whose plan has none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.attn_decode.config import DecodeConfig
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.descales import static_scales
from narrowkv.paged_cache.kernels.pages import Descale, KVPointers, Stored
from narrowkv.paged_cache.pointers import (
    Side,
    descale_pointers,
    packed_route,
    scales_are_words,
    side_of,
    stored_as,
    widening_power,
)
from narrowkv.quant import KeyTransform
from narrowkv.quant.device import widen_route
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch.gpu import current_stream
from narrowkv.runtime.launch.workspace import MOST_COUNTERS
from narrowkv.runtime.spans import spans_of
from narrowkv.runtime.targets import Target

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class BoundCache(NamedTuple):
    """A cache as the arguments of decode kernels.

    Attributes:
        k, v: pointers and strides; k_descale, v_descale: of the descales that are tensors.
        tensors: those of k, v, k_descale and v_descale, and balance and offset of keys; None for an absent
            one.
        stages: how keys are rotated; see `rotate_parts`.
        k_stored, v_stored: constants.
        k_factor, v_factor: the descales that are numbers, times what the conversion leaves out.
        int64_offsets: offsets need 64 bits.
        spans: addresses that the cache and its descales take.
        scales: scale tensors whose values are read once, by name; see `narrowkv.runtime.scales`.
        number: the same for all caches that ask for the same kernels, have the same strides and pass the same
            checks.
    """

    k: KVPointers
    v: KVPointers
    k_descale: Descale
    v_descale: Descale
    tensors: tuple[torch.Tensor | None, ...]
    stages: int
    k_stored: Stored
    v_stored: Stored
    k_factor: float
    v_factor: float
    int64_offsets: bool
    spans: list[tuple[int, int]]
    scales: dict[str, torch.Tensor]
    number: int


# What the pointers depend on, by cache. An entry goes with its cache.
_bound_caches: ByIdentity[dict[Any, BoundCache]] = ByIdentity()
_numbers: dict[Any, int] = {}


def bind_cache(cache: PagedKVCache, target: Target, config: DecodeConfig) -> BoundCache:
    """The cache as kernel arguments, found once."""
    k_parts, v_parts = config.k_parts, config.v_parts
    native, ahead = config.kernel == "native", config.prefetch != ""
    key = (target.name, native, ahead, k_parts, v_parts)
    known = _bound_caches.get(id(cache))
    if known is None:
        known = _bound_caches.keep(cache, {})
    if key in known:
        return known[key]
    k_format, v_format = cache.format.k, cache.format.v
    k_strides, v_strides = cache.k_strides, cache.v_strides
    k_side = side_of(cache.k, k_strides, k_format, widen_route(target, k_format), k_parts)
    v_side = side_of(cache.v, v_strides, v_format, widen_route(target, v_format), v_parts)
    half = "bf16" not in (k_format, v_format)
    (k_mode, k_factor, k_descale), (v_mode, v_factor, v_descale) = map(descale_pointers, cache.sides())
    # gfx950's own FP4 conversion takes registers that tiles without prefetch do not leave. Its inline
    # assembly waits too short a time for the matrix instructions of the native kernel.
    grouped = cache.head_dim if k_format == v_format else 0
    k_own, v_own = (
        ahead and not native and _has_own_conversion(side, mode, descale, grouped)
        for side, mode, descale in ((k_side, k_mode, k_descale), (v_side, v_mode, v_descale))
    )
    k_route = packed_route(target, k_format, k_side, half, as_bytes=True, cdna4=k_own)
    v_route = packed_route(target, v_format, v_side, half, as_bytes=True, cdna4=v_own)
    k_exponent = 0 if native else widening_power(k_format, k_route, k_mode)
    v_exponent = widening_power(v_format, v_route, v_mode)
    k_stored = stored_as(k_side, k_format, k_route, k_mode, k_descale)
    if native:
        k_stored = k_stored._replace(parts=1)
        if k_mode in ("e8m0_16", "e4m3_16", "e4m3_32"):
            raise UnsupportedError(
                "kernel='native' needs keys with one scale a head or an E8M0 scale per 32 channels, got "
                f"{k_mode}; kernel='decode' works here"
            )
    v_stored = stored_as(v_side, v_format, v_route, v_mode, v_descale)
    pointers = (k_side.pointers, v_side.pointers, k_descale, v_descale)
    transform = cache.key_transform or KeyTransform(rotated=False)
    static, stages = (transform.balance, transform.offset), transform.stages(cache.head_dim)
    signature = (
        stages, *(x is None for x in static), k_stored, v_stored, cache.needs_64_bit_addresses,
        _sequences(cache), cache.num_pages,
        cache.k.requires_grad or cache.v.requires_grad, cache.k.device, key,
        tuple((each[0] is not None and (each[0].dtype, each[0].dim()), each[1:]) for each in pointers),
    )  # fmt: skip
    known[key] = BoundCache(
        *pointers, (*(each[0] for each in pointers), *static), stages, k_stored, v_stored,
        k_factor * 2.0**k_exponent, v_factor * 2.0**v_exponent, cache.needs_64_bit_addresses,
        spans_of(cache.k, cache.v, cache.k_descale, cache.v_descale, *static), static_scales(cache),
        _numbers.setdefault(signature, len(_numbers)),
    )  # fmt: skip
    return known[key]


def _has_own_conversion(side: Side, mode: str, descale: Descale, head_dim: int) -> bool:
    """Whether gfx950's conversion applies to FP4 words: see `fp4_quads_cdna4` and `widen_groups_cdna4`.

    It takes few instructions where a lane loads four adjacent words: the compiler does so if it knows rows to
    begin at multiples of 16 bytes. There is one scale a head, or those of a key's groups are one integer.

    Args:
        side, mode, descale: of K or V.
        head_dim: of the model; 0 leaves scales of groups out, for a cache of two formats, where the
            conversion spills 6 to 15 registers with heads of 128.
    """
    words = side.pointers
    if any(step % 16 for step in (words.ptr.data_ptr(), words.page, words.token, words.head)):
        return False
    kind, _, group = mode.partition("_")
    if kind not in ("e8m0", "e4m3"):
        return False
    return not group or (head_dim // int(group) in (2, 4, 8) and scales_are_words(descale))


def _sequences(cache: PagedKVCache) -> tuple[int | None, int | None]:
    """Rows of the descales of K and V that have one for each sequence."""
    return tuple(
        value.shape[0] if kind == "sequence_head" and isinstance(value, torch.Tensor) else None
        for value, kind in ((cache.k_descale, cache.k_granularity), (cache.v_descale, cache.v_granularity))
    )  # type: ignore[return-value]


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def zeroed_counters(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` arrival counters of a call whose plan has none.

    Calls on one stream share them, because every launch leaves them zero. A graph has its own: it may be
    replayed on another stream.
    """
    if count > MOST_COUNTERS or device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, current_stream(device.index))
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    return found

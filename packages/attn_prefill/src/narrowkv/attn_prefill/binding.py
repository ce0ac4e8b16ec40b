"""A cache as kernels of attn_prefill take it, prepared once for each cache and kind of plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from narrowkv.attn_decode.config import parts_of
from narrowkv.attn_prefill.config import fp8_route
from narrowkv.attn_prefill.kernels.arguments import Cache, Destination, Storing
from narrowkv.attn_prefill.kernels.widen import BF16_VALUE_EXPONENT
from narrowkv.paged_cache import PagedKVCache, Rope
from narrowkv.paged_cache.descales import static_scales
from narrowkv.paged_cache.kernels.pages import Descale, Stored
from narrowkv.paged_cache.pointers import descale_pointers, packed_route, side_of, stored_as, widening_power
from narrowkv.paged_cache.rope import rope_constants
from narrowkv.paged_cache.storing import cache_pointers, storage_constants, store_of
from narrowkv.quant import KeyTransform
from narrowkv.quant.device import widen_route, widening_exponent
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import named_values
from narrowkv.runtime.spans import spans_of
from narrowkv.runtime.targets import Target

# Names of the 16-bit formats of caches and queries.
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, eq=False, slots=True)  # every call reads it: fields of slots are the fastest
class Reading:
    """How one kind of kernel reads a cache.

    Attributes:
        cache: pointers and strides; arguments: its tensors as values of a call, by name.
        k, v: constants.
        k_scale, v_scale: what logits and output are multiplied by: descales that are numbers, and the powers
            of two that the conversion leaves out.
    """

    cache: Cache
    arguments: dict[str, torch.Tensor]
    k: Stored
    v: Stored
    k_scale: float
    v_scale: float


@dataclass(frozen=True, eq=False, slots=True)
class BoundCache:
    """A cache as the arguments of kernels.

    Attributes:
        readings: how kernels read the cache. "in_loop": they attend to its pages; "in_large_tiles": the same
            for tiles of 64 rows by the loop of decode, whose matrix instruction takes V from shared memory as
            it lies there; "to_scratch": they widen its keys into the scratch, ahead of attention.
        k_descale, v_descale: of descales per head, for kernels that attend to the scratch.
        destination: where new tokens are stored, None for a plan that does not append; new_arguments: its
            tensors and numbers, and those of the key transform, as values of a call, by name.
        per_key: whether K and V have descales that differ from key to key.
        int64_offsets: offsets need 64 bits.
        spans: addresses that the cache and its descales take; written: those that an append writes.
        scales: scale tensors whose values are read once, by name; see `narrowkv.runtime.scales`.
        batch: sequences that its descales are for, or None.
        number: the same for all caches that ask for the same kernels and pass the same checks.
        matrices: how keys are copied out of their pages, by the keys of a tile; see `matrix_of`.
        transform: what queries go through ahead of attention, or None.
    """

    readings: dict[str, Reading]
    k_descale: Descale
    v_descale: Descale
    destination: Destination | None
    new_arguments: dict[str, Any]
    per_key: tuple[bool, bool]
    int64_offsets: bool
    spans: list[tuple[int, int]]
    scales: dict[str, torch.Tensor]
    written: tuple[tuple[int, int], ...]
    hull: tuple[int, int]
    num_pages: int
    batch: int | None
    number: int
    matrices: dict[int, Any]
    transform: KeyTransform | None

    @property
    def has_offset(self) -> bool:
        """Whether keys lost an offset."""
        return self.transform is not None and self.transform.offset is not None


# By cache, and by what a plan's kernels read it as. An entry goes with its cache.
_bound_caches: ByIdentity[dict[Any, BoundCache]] = ByIdentity()
_numbers: dict[Any, int] = {}


def per_key(k_granularity: str, v_granularity: str) -> tuple[bool, bool]:
    """Whether K and V have descales that differ from key to key."""
    shared = ("tensor", "head", "sequence_head")
    return k_granularity not in shared, v_granularity not in shared


def bind_cache(cache: PagedKVCache, target: Target, fp8: str | None, exponent: str | None) -> BoundCache:
    """The cache as kernel arguments, found once.

    Args:
        cache: any cache; one that can be appended to if `exponent` is given.
        target: what the kernels run on.
        fp8: the FP8 format in which the matrix unit multiplies the cache without widening, or None.
        exponent: of a plan that appends: how FP4 scales are chosen.
    """
    key = (target.name, fp8, exponent)
    known = _bound_caches.get(id(cache))
    if known is None:
        known = _bound_caches.keep(cache, {})
    if key in known:
        return known[key]
    half = "bf16" not in (cache.format.k, cache.format.v)
    in_loop = _reading(cache, target, fp8, half, to_scratch=False)
    in_large_tiles = _reading(cache, target, fp8, half, to_scratch=False, large_tiles=True)
    to_scratch = _reading(cache, target, fp8, True, to_scratch=True)
    if fp8 is not None and exponent is None:
        # Q's bytes are read as K's are, and lose the same power of two.
        power = 2.0 ** widening_exponent(cache.format.k, in_loop.k.route)
        in_loop = replace(in_loop, k_scale=in_loop.k_scale * power)
        to_scratch = replace(to_scratch, k_scale=to_scratch.k_scale * power)
    written: tuple[tuple[int, int], ...] = ()
    destination = None
    new_arguments: dict[str, Any] = {}
    transform = cache.key_transform
    if exponent is not None:
        destination = Destination(*(value for struct in cache_pointers(cache) for value in struct))
        new_arguments = named_values("new", destination)
        if transform is not None:
            new_arguments |= {"k_offset": transform.offset, "k_balance": transform.balance}
        written = store_of(cache).spans
    batch = None
    for value, kind in ((cache.k_descale, cache.k_granularity), (cache.v_descale, cache.v_granularity)):
        if kind == "sequence_head" and isinstance(value, torch.Tensor):
            batch = value.shape[0]
    hull = (min(low for low, _ in written), max(high for _, high in written)) if written else (0, 0)
    signature = (
        in_loop.k, in_loop.v, in_large_tiles.v, to_scratch.k, to_scratch.v, cache.k_granularity,
        cache.v_granularity,
        cache.negative_zero_free, cache.needs_64_bit_addresses, batch, cache.k_strides,
        cache.k.data_ptr() % 16, to_scratch.k_scale == 1.0, cache.k.requires_grad or cache.v.requires_grad,
        cache.num_pages, cache.k.device, key, storing_constants(cache, exponent, None) if exponent else None,
        (cache.num_pages + 1) * max(cache.k_strides.page, 1) < 2**31,
        *(_fixed(each.cache) for each in (in_loop, in_large_tiles, to_scratch)),
        () if destination is None else _fixed(destination),
    )  # fmt: skip
    static = () if transform is None else (transform.offset, transform.balance)
    signature += (None if transform is None else (transform.rotated, *(x is None for x in static)),)
    k_descale, v_descale = (descale_pointers(side)[2] for side in cache.sides())
    readings = {"in_loop": in_loop, "in_large_tiles": in_large_tiles, "to_scratch": to_scratch}
    bound = BoundCache(
        readings, k_descale, v_descale, destination, new_arguments,
        per_key(cache.k_granularity, cache.v_granularity),
        cache.needs_64_bit_addresses, spans_of(cache.k, cache.v, cache.k_descale, cache.v_descale, *static),
        static_scales(cache), written, hull, cache.num_pages, batch,
        _numbers.setdefault(signature, len(_numbers)), {}, transform,
    )  # fmt: skip
    known[key] = bound
    return bound


def _fixed(struct: Any) -> tuple[Any, ...]:
    """Strides and sizes that launches over caches of one kind share."""
    return tuple(None if isinstance(value, torch.Tensor | float) else value for value in struct)


def matrix_of(bound: BoundCache, cache: PagedKVCache, block_n: int) -> Any:
    """How tiles of `block_n` keys are copied out of the cache's pages, a `PageMatrix`, or None."""
    if block_n not in bound.matrices:
        from narrowkv.attn_prefill.kernels.pipelined_copies import page_matrix

        bound.matrices[block_n] = page_matrix(cache, block_n)
    return bound.matrices[block_n]


def _reading(
    cache: PagedKVCache, target: Target, fp8: str | None, half: bool, *, to_scratch: bool,
    large_tiles: bool = False,
) -> Reading:  # fmt: skip
    """How kernels read a cache that compute in float16 (`half`) or bfloat16, or in FP8.

    The scratch keeps the bytes of K for FP8 matrix units; V is widened to float16 there.
    """
    pointers: list[Any] = []
    descales: list[Any] = []
    stored: list[Stored] = []
    scales = []
    for cached, strides in zip(cache.sides(), (cache.k_strides, cache.v_strides), strict=True):
        x, name, is_key = cached.stored, cached.format, cached.is_key
        mode, factor, descale = descale_pointers(cached)
        kept = fp8 if is_key or not to_scratch else None
        route = widen_route(target, name) if kept is None else fp8_route(kept, name)
        parts = parts_of(target, name, is_key=is_key or large_tiles) if kept is None else 1
        side = side_of(x, strides, name, route, parts)
        power = widening_power(name, side.route, mode)
        if to_scratch and name == "bf16" and not is_key:
            power = -BF16_VALUE_EXPONENT.value
        pointers += side.pointers
        descales += descale
        stored.append(stored_as(side, name, packed_route(target, name, side, half), mode, descale))
        scales.append(factor * 2.0**power)
    found = Cache(*pointers, *descales)
    return Reading(found, named_values("cache", found), stored[0], stored[1], scales[0], scales[1])


def storing_constants(cache: PagedKVCache, exponent: str, rope: Rope | None) -> Storing:
    """Constants of how new tokens are rotated and stored in this cache."""
    transform = cache.key_transform or KeyTransform(rotated=False)
    found = {**storage_constants(cache, exponent), **rope_constants(rope)}
    found["STAGES"] = transform.stages(cache.head_dim)
    return Storing(**{name: found[name.upper()] for name in Storing._fields})

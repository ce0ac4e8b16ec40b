"""How tokens are stored in a cache: what an append kernel is compiled for, and its pointers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.descales import PER_TOKEN_GRANULARITIES, CacheSide, static_scales
from narrowkv.paged_cache.kernels.append import DescalePointers, NewTokens
from narrowkv.paged_cache.kernels.pages import KVPointers
from narrowkv.quant import KeyTransform
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import (
    byte_span,
    check_instance,
    check_no_grad,
    has_memory,
)
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import named, named_values


class Store(NamedTuple):
    """A cache as kernels write to it; made once for each cache, which is checked then.

    Attributes:
        k, v, k_descale, v_descale: kernel arguments.
        row, v_row: shape of a token of K and of V.
        device: where the cache is.
        num_slots: tokens that the cache holds.
        constants: names and values of `tl.constexpr` arguments.
        kind: a number that caches with the same constants, strides and device share.
        arguments: tensors and descales as values of a call, by name.
        k_offset, k_balance: of the cache's `key_transform`, or None.
        spans: byte addresses of what is written, each as `byte_span` gives it; hull: the least and the
            greatest of them.
        scales: scale tensors that are read and not written, by name.
    """

    k: KVPointers
    v: KVPointers
    k_descale: DescalePointers
    v_descale: DescalePointers
    row: tuple[int, int]
    v_row: tuple[int, int]
    device: torch.device
    num_slots: int
    constants: tuple[tuple[str, Any], ...]
    kind: int
    arguments: dict[str, Any]
    k_offset: torch.Tensor | None
    k_balance: torch.Tensor | None
    spans: tuple[tuple[int, int], ...]
    hull: tuple[int, int]
    scales: dict[str, torch.Tensor]

    def named(self) -> dict[str, Any]:
        """Kernel arguments by the kernel's names, with an `Arg` for what `arguments` holds."""
        return {name: named(f"new_{name}", struct) for name, struct in zip(_STRUCTS, self[:4], strict=True)}


STORES: ByIdentity[Store] = ByIdentity()
_STRUCTS = ("k", "v", "k_descale", "v_descale")
_kinds: dict[Any, int] = {}


def store_of(cache: PagedKVCache) -> Store:
    """The cache as kernels write to it.

    Raises:
        TypeError: not a `PagedKVCache`.
        ValueError: a cache that cannot be appended to.
    """
    store = STORES.get(id(check_instance("cache", cache, PagedKVCache)))
    return STORES.keep(cache, _make_store(cache)) if store is None else store


def _make_store(cache: PagedKVCache) -> Store:
    for name, kind in (("k_descale", cache.k_granularity), ("v_descale", cache.v_granularity)):
        if kind in ("page_head", "sequence_head"):
            raise ValueError(
                f"{name} must be per tensor, per head or per token-head to append, got {kind!r}: "
                "a new token cannot change the descale of tokens that are stored already"
            )
    check_no_grad(k=cache.k, v=cache.v)
    pointers: list[Any] = []
    for stored, strides in ((cache.k, cache.k_strides), (cache.v, cache.v_strides)):
        # The kernel writes FP8 as bytes: casts differ between targets, and FNUZ is no type of CUDA's.
        words = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        pointers.append(KVPointers(words, strides.page, strides.token, strides.head, strides.outer))
    constants = tuple(_side_constants(cache).items())
    transform = cache.key_transform or KeyTransform(rotated=False)
    constants += (("PAGE_SIZE", cache.page_size), ("HEAD_DIM", cache.head_dim))
    constants += (("V_HEAD_DIM", cache.v_head_dim), ("BUTTERFLIES", transform.butterflies(cache.head_dim)))
    pointers += map(_descale_pointers, cache.sides())
    # Heads, strides and dtypes are fixed by kind; addresses and descales that are numbers vary.
    metadata = tuple(
        value if not isinstance(value, torch.Tensor) else (value.dtype, value.dim())
        for each in pointers
        for value in each
        if not isinstance(value, float)
    )
    metadata += (transform.offset is not None, transform.balance is not None, cache.num_kv_heads)
    number = _kinds.setdefault((constants, metadata, cache.k.device), len(_kinds))
    arguments: dict[str, Any] = {}
    for name, struct in zip(_STRUCTS, pointers, strict=True):
        arguments |= named_values(f"new_{name}", struct)
    k, v, k_descale, v_descale = pointers
    spans = tuple(byte_span(x) for x in written_tensors(cache).values() if x.numel() and has_memory(x))
    hull = (min(low for low, _ in spans), max(high for _, high in spans)) if spans else (0, 0)
    return Store(
        k,
        v,
        k_descale,
        v_descale,
        (cache.num_kv_heads, cache.head_dim),
        (cache.num_kv_heads, cache.v_head_dim),
        cache.k.device,
        cache.num_pages * cache.page_size,
        constants,
        number,
        arguments,
        transform.offset,
        transform.balance,
        spans,
        hull,
        static_scales(cache),
    )


def written_tensors(cache: PagedKVCache) -> dict[str, torch.Tensor]:
    """The tensors that an append writes: K, V and descales per token."""
    written = {"cache.k": cache.k, "cache.v": cache.v}
    for name, value, kind in (
        ("cache.k_descale", cache.k_descale, cache.k_granularity),
        ("cache.v_descale", cache.v_descale, cache.v_granularity),
    ):
        if isinstance(value, torch.Tensor) and kind in PER_TOKEN_GRANULARITIES:
            written[name] = value
    return written


def new_tokens(x: torch.Tensor) -> NewTokens:
    """K or V of new tokens as a kernel argument."""
    return NewTokens(x, x.stride(0), x.stride(1))


def storage_constants(cache: PagedKVCache, exponent: str) -> dict[str, Any]:
    """How a kernel quantises into this cache."""
    return {**_side_constants(cache), "RULE": exponent}


def _side_constants(cache: PagedKVCache) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    for side, strides in zip(cache.sides(), (cache.k_strides, cache.v_strides), strict=True):
        fmt = get_format(side.format)
        if isinstance(side.descale, torch.Tensor):
            scaling = "token" if side.granularity in PER_TOKEN_GRANULARITIES else "tensor"
            if side.descale.dtype == torch.float8_e4m3fn:
                scaling = "token_e4m3" if side.tensor_scale == 1.0 else "tensor_e4m3"
        else:
            scaling = "one" if fmt.kind == "float" and side.descale == 1.0 else "number"
        prefix = side.name.upper()
        constants |= {
            f"{prefix}_FORMAT": fmt.name,
            f"{prefix}_MAX": fmt.max_value,
            f"{prefix}_SCALING": scaling,
            f"{prefix}_GROUP": side.group,
            f"{prefix}_VEC": strides.vec,
        }
    return constants


def _descale_pointers(side: CacheSide) -> DescalePointers:
    value = side.descale
    if not isinstance(value, torch.Tensor):
        return DescalePointers(float(value), None, 0, 0, 0)
    if side.granularity in PER_TOKEN_GRANULARITIES:
        value = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        return DescalePointers(side.tensor_scale, value, value.stride(0), value.stride(1), value.stride(2))
    return DescalePointers(1.0, value, 0, 0, value.stride(0) if side.granularity == "head" else 0)

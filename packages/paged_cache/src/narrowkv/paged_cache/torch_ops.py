"""`torch.ops.narrowkv.append`: the append that torch.compile, export and fake tensors see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowkv.paged_cache.append import append
from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.layouts import CacheFormat
from narrowkv.paged_cache.rope import Rope
from narrowkv.quant import KeyTransform
from narrowkv.runtime.launch.tracing import register, traces
from narrowkv.runtime.operation import Bounded
from narrowkv.runtime.scales import not_written

CACHE_SCHEMA = (
    "Tensor{a} k, Tensor{b} v, Tensor{c}? k_descale, Tensor{d}? v_descale, Tensor? key_offset, "
    "Tensor? key_balance"
)
CacheTensors = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None,
    torch.Tensor | None,
]  # fmt: skip


def cache_tensors(cache: PagedKVCache) -> CacheTensors:
    """The tensors of a cache as operators take them: K, V, and of descales and key transform what it has."""
    k_descale = cache.k_descale if isinstance(cache.k_descale, torch.Tensor) else None
    v_descale = cache.v_descale if isinstance(cache.v_descale, torch.Tensor) else None
    transform = cache.key_transform
    offset, balance = (None, None) if transform is None else (transform.offset, transform.balance)
    return cache.k, cache.v, k_descale, v_descale, offset, balance


def cache_options(cache: PagedKVCache) -> dict[str, object]:
    """The attributes of a cache that are no tensors, for `spell`."""
    return {
        "k_dtype": cache.k.dtype,
        "v_dtype": cache.v.dtype,
        "k_format": cache.format.k,
        "v_format": cache.format.v,
        "layout": cache.layout,
        "v_head_dim": cache.v_head_dim,
        "k_descale": None if isinstance(cache.k_descale, torch.Tensor) else cache.k_descale,
        "v_descale": None if isinstance(cache.v_descale, torch.Tensor) else cache.v_descale,
        "k_granularity": cache.k_granularity,
        "v_granularity": cache.v_granularity,
        "k_tensor_scale": cache.k_tensor_scale,
        "v_tensor_scale": cache.v_tensor_scale,
        "negative_zero_free": cache.negative_zero_free,
        "rotated": None if cache.key_transform is None else cache.key_transform.rotated,
    }


_CACHE_OPTIONS = (
    "k_dtype", "v_dtype", "k_format", "v_format", "layout", "v_head_dim", "k_descale", "v_descale",
    "k_granularity", "v_granularity", "k_tensor_scale", "v_tensor_scale", "negative_zero_free",
    "rotated",
)  # fmt: skip
# Results of checking a cache, by everything that the checks look at: metadata of tensors, and options.
_checked: Bounded[dict[str, Any]] = Bounded(1024)


def cache_from(tensors: CacheTensors, options: dict[str, Any]) -> PagedKVCache:
    """The cache of `cache_tensors` and `cache_options`; takes its own options out of `options`.

    Tensors and options like those of an earlier call are not checked again.
    """
    own = tuple(options.pop(name) for name in _CACHE_OPTIONS)
    k_dtype, v_dtype, k_format, v_format, layout, _, k_static, v_static, k_kind, v_kind, *numbers = own
    k_number, v_number, clean, rotated = numbers
    k, v, k_descale, v_descale, offset, balance = tensors
    parts: dict[str, Any] = {
        "k": k.view(k_dtype),
        "v": v.view(v_dtype),
        "k_descale": k_static if k_descale is None else k_descale,
        "v_descale": v_static if v_descale is None else v_descale,
        "key_transform": None if rotated is None else KeyTransform(offset, balance, rotated),
    }
    key = (
        own,
        tuple(None if x is None else (type(x), x.dtype, x.shape, x.stride(), x.device) for x in tensors),
    )
    known = _checked.get(key)
    if known is None:
        cache = PagedKVCache.from_tensors(
            parts["k"], parts["v"], format=CacheFormat(k_format, v_format), layout=layout,
            k_descale=parts["k_descale"], v_descale=parts["v_descale"], k_granularity=k_kind,
            v_granularity=v_kind, k_tensor_scale=k_number, v_tensor_scale=v_number,
            negative_zero_free=clean, validate=False,
        )  # fmt: skip
        cache = replace(cache, key_transform=parts["key_transform"])
        _checked.keep(key, {name: value for name, value in vars(cache).items() if name not in parts})
        return cache
    cache = object.__new__(PagedKVCache)
    vars(cache).update(known, **parts)
    return cache


def rope_tensors(rope: Rope | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The tensors of a rotary embedding as operators take them."""
    return (None, None, None) if rope is None else (rope.cos, rope.sin, rope.positions)


def rope_from(tensors: Sequence[torch.Tensor | None], options: dict[str, Any]) -> Rope | None:
    """The rotary embedding of `rope_tensors`; takes its style, `rope`, out of `options`."""
    style, (cos, sin, positions) = options.pop("rope"), tensors
    if cos is None or sin is None or positions is None:
        return None
    return Rope(cos, sin, positions, style=style)


def _append(*tensors: Any) -> None:
    *cached, k_new, v_new, slot_mapping, cos, sin, positions, k_offset, q, given = tensors
    cache, rope = cache_from(tuple(cached), given), rope_from((cos, sin, positions), given)
    not_written(cache.static_scales())
    append(cache, k_new, v_new, slot_mapping, rope=rope, k_offset=k_offset, q=q, **given)


_call_append = register(
    "append",
    CACHE_SCHEMA.format(a="(a!)", b="(b!)", c="(c!)", d="(d!)")
    + ", Tensor k_new, Tensor v_new, Tensor slot_mapping, Tensor? cos, Tensor? sin, Tensor? positions, "
    "Tensor? k_offset, Tensor(e!)? q",
    _append,
    written=("k", "v", "k_descale", "v_descale", "q"),
)


@traces("append")
def traced_append(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rope: Rope | None = None,
    k_offset: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    **options: object,
) -> None:
    """`append` through its operator, which checks the arguments when it runs."""
    tensors = (*cache_tensors(cache), k_new, v_new, slot_mapping, *rope_tensors(rope), k_offset, q)
    style = None if rope is None else rope.style
    _call_append(tensors, {**cache_options(cache), "rope": style, **options})

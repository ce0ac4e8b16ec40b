"""Every n-th KV head of a cache, as a cache over the same memory."""

from __future__ import annotations

import torch

from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.operation import ByIdentity

_HEADS_AXIS = {"NHD": 2, "HND": 1, "tokens": 1, "concat": 2, "vectorised": 1}
_DESCALE_AXIS = {"head": 0, "sequence_head": 1, "page_head": 1, "token_head": 2, "token_head_group": 2}

_groups: ByIdentity[dict[tuple[int, int], PagedKVCache]] = ByIdentity()


def every_nth_head(cache: PagedKVCache, first: int, step: int) -> PagedKVCache:
    """KV heads first, first + step, ... of a cache; views, made once for each cache."""
    if step == 1:
        return cache
    known = _groups.get(id(cache))
    if known is None:
        known = _groups.keep(cache, {})
    if (first, step) not in known:
        axis = _HEADS_AXIS[cache.layout]
        known[first, step] = PagedKVCache.from_tensors(
            _every_nth(cache.k, axis, first, step), _every_nth(cache.v, axis, first, step),
            format=cache.format, layout=cache.layout,
            k_descale=_descale(cache.k_descale, cache.k_granularity, first, step),
            v_descale=_descale(cache.v_descale, cache.v_granularity, first, step),
            k_granularity=_granularity(cache.k_descale, cache.k_granularity),
            v_granularity=_granularity(cache.v_descale, cache.v_granularity),
            k_tensor_scale=cache.k_tensor_scale, v_tensor_scale=cache.v_tensor_scale,
            negative_zero_free=cache.negative_zero_free, validate=False,
        )  # fmt: skip
    return known[first, step]


def _every_nth(tensor: torch.Tensor, axis: int, first: int, step: int) -> torch.Tensor:
    return tensor[(*(slice(None),) * axis, slice(first, None, step))]


def _descale(value: float | torch.Tensor, kind: str, first: int, step: int) -> float | torch.Tensor:
    axis = _DESCALE_AXIS.get(kind)
    if axis is None or not isinstance(value, torch.Tensor):
        return value
    return _every_nth(value, axis, first, step)


def _granularity(value: float | torch.Tensor, kind: str) -> str | None:
    return kind if isinstance(value, torch.Tensor) else None

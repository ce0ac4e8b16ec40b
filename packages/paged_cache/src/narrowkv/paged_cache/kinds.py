"""The properties of a cache that a plan depends on, as one number that is cheap to compare."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.runtime.identity import ByIdentity

CACHE_KINDS: ByIdentity[int] = ByIdentity()
_numbers: dict[Any, int] = {}


def kind_of_cache(cache: PagedKVCache) -> int:
    """The same number for caches of one device, format, shape of pages and granularities of descales.

    `CACHE_KINDS` has it from then on.
    """
    kind = (
        cache.format, cache.head_dim, cache.v_head_dim, cache.num_kv_heads, cache.page_size,
        cache.k_granularity, cache.v_granularity, *(side.group for side in cache.sides()), cache.k.device,
    )  # fmt: skip
    return CACHE_KINDS.keep(cache, _numbers.setdefault(kind, len(_numbers)))


def fp4_scales(cache: PagedKVCache) -> dict[str, Any]:
    """`scale_group` and `scale_format` of a cache, as `plan_decode` takes them with a shape."""
    fp4 = [side for side in cache.sides() if side.format == "fp4_e2m1"]
    if not fp4:
        return {}
    e4m3 = any(isinstance(side.descale, torch.Tensor) and side.descale.dtype != torch.uint8 for side in fp4)
    return {
        "scale_group": max(side.group for side in fp4) or None,
        "scale_format": "e4m3" if e4m3 else "e8m0",
    }

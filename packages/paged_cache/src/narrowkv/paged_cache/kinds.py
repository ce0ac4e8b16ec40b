"""What a plan depends on of a cache, as one number that is compared cheaply."""

from __future__ import annotations

from typing import Any

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.runtime.identity import ByIdentity

CACHE_KINDS: ByIdentity[int] = ByIdentity()
_numbers: dict[Any, int] = {}


def kind_of_cache(cache: PagedKVCache) -> int:
    """The same number for caches of one device, format, shape of pages and granularities of descales.

    `CACHE_KINDS` has it from then on.
    """
    kind = (
        cache.format, cache.head_dim, cache.num_kv_heads, cache.page_size, cache.k_granularity,
        cache.v_granularity, cache.k.device,
    )  # fmt: skip
    return CACHE_KINDS.keep(cache, _numbers.setdefault(kind, len(_numbers)))

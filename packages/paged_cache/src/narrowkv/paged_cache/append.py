"""Appending new tokens to a paged cache in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.options import APPEND, StoreArguments
from narrowkv.paged_cache.storing import STORES, store_of
from narrowkv.runtime.launch.tracing import traceable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.paged_cache.options import StoreOptions


@traceable
def append(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    **options: Unpack[StoreOptions],
) -> None:
    """Writes new tokens into the cache: RoPE on K and Q, its `key_transform`, quantise, scatter. One launch.

    The first call with some sizes, dtypes and options checks everything; later calls check what can change
    and launch. Nothing is allocated and the device is not waited for, so a call can be
    captured in a graph and replayed with other tokens, slots and positions.

    Args:
        cache: written in place; bytes of other slots do not change. Static descales (float, `[1]`,
            `[num_kv_heads]`) are applied as they are (stored = saturate(x / descale)); a per token-head
            descale tensor gets the new tokens' own, and so do the E8M0 or E4M3 scales of FP4.
        k_new: `[tokens, num_kv_heads, head_dim]`, bf16, fp16 or fp32, last dimension contiguous, not within
            the cache's own memory. v_new: the same with `v_head_dim` channels.
        slot_mapping: `[tokens]` int32 or int64, any stride, `page * page_size + position in the page`; -1
            skips a token. Slots outside the cache are never written. Of two tokens with one slot either may
            be stored, and K may be of one and V of the other.
        **options: `rope`, `k_offset`, `q`, `exponent` and `validate`: see `StoreOptions`.

    Raises:
        TypeError, ValueError: before anything is written.

    Example:
        >>> cache = PagedKVCache.empty(4, 16, 2, 64, format="fp8_e4m3fn")
        >>> new = torch.ones(1, 2, 64)
        >>> append(cache, new, 2 * new, torch.tensor([17]))
        >>> float(cache.dequantize()[1][1, 1, 0, 0])
        2.0
    """
    plan = (STORES.get(id(cache)) or store_of(cache)).plan
    if not options.keys() <= APPEND.keywords:
        APPEND.check_keywords(options)
    plan.call(StoreArguments(cache, k_new, v_new, slot_mapping, **options))

"""SGLang's KV pools as narrowkv caches: views of their memory, and why a pool cannot be read."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant.formats import get_format

__all__ = [
    "has_window",
    "layer_cache",
    "pool_reasons",
]

_LAYOUTS = {"nhd": "NHD", "hnd": "HND", "vectorized_5d": "vectorised"}


def _parts(pool: Any) -> list[Any]:
    """The pools of which a pool is composed."""
    if isinstance(pool, SWAKVPool):
        return [part for part in (pool.full_kv_pool, pool.swa_kv_pool) if part.layer_num]
    if isinstance(pool, HybridLinearKVPool):
        return _parts(pool.full_kv_pool)
    return [pool]


def pool_reasons(pool: Any) -> list[str]:
    """Why narrowkv cannot read a pool; an empty list is a yes.

    Args:
        pool: SGLang's `token_to_kv_pool`.
    """
    reasons = []
    for part in _parts(pool):
        kind = type(part).__name__
        if type(part) is not MHATokenToKVPool:
            note = ""
            if kind == "MHATokenToKVPoolFP4":
                note = (
                    ": it has an E8M0 scale for 16 channels, where the kernels have one for 32 or for a head"
                )
            reasons.append(f"its pool is a {kind}, and narrowkv reads a MHATokenToKVPool{note}")
            continue
        if part.is_quantized_kv_cache:
            method = type(part.quant_method).__name__
            reasons.append(f"its pool is quantised by {method}, and narrowkv reads 16-bit and FP8 pools")
        if part.head_dim != part.v_head_dim:
            reasons.append(f"keys have {part.head_dim} channels and values {part.v_head_dim}")
        if part.kv_cache_layout not in _LAYOUTS:
            reasons.append(f"its pool has the layout {part.kv_cache_layout}")
    return reasons


def has_window(pool: Any, layer_id: int) -> bool:
    """Whether a layer's tokens lie in the pool of sliding windows, whose slots are numbers of their own."""
    return isinstance(pool, SWAKVPool) and pool.layers_mapping[layer_id][1]


def layer_cache(pool: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> PagedKVCache:
    """A layer's cache as views of the pool's memory; nothing is copied.

    Args:
        pool: SGLang's `token_to_kv_pool`.
        layer: the `RadixAttention`; its scales are those of an FP8 pool.
        k, v: what the pool's `get_key_buffer` and `get_value_buffer` returned for the layer.

    Raises:
        TypeError, ValueError: for a pool that does not hold such slots.
    """
    layout, page_size = _LAYOUTS[_parts(pool)[0].kv_cache_layout], pool.page_size
    if layout == "NHD":
        k, v = (x.view(-1, page_size, *x.shape[1:]) for x in (k, v))
    name = get_format(k.dtype).name
    if get_format(name).kind == "float":
        return PagedKVCache.from_tensors(k, v, format=name, layout=layout)
    descales = [1.0 if scale is None else scale for scale in (layer.k_scale, layer.v_scale)]
    return PagedKVCache.from_tensors(
        k, v, format=name, layout=layout, k_descale=descales[0], v_descale=descales[1]
    )

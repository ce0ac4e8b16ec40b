"""SGLang's KV pools as narrowkv caches: views of their memory, and why a pool cannot be read."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MHATokenToKVPoolFP4
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from narrowkv.engines.geometry import geometry_reasons
from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant.formats import get_format

__all__ = [
    "FP4",
    "has_window",
    "layer_buffers",
    "layer_cache",
    "pool_reasons",
    "stored_format",
]

FP4 = "fp4_mx_block16"  # SGLang's name of its FP4 recipe
SCALE_GROUP = 16
_LAYOUTS = {"nhd": "NHD", "hnd": "HND", "vectorized_5d": "vectorised"}


def _parts(pool: Any) -> list[Any]:
    """The pools of which a pool is composed."""
    if isinstance(pool, SWAKVPool):
        return [part for part in (pool.full_kv_pool, pool.swa_kv_pool) if part.layer_num]
    if isinstance(pool, HybridLinearKVPool):
        return _parts(pool.full_kv_pool)
    return [pool]


def _is_fp4(part: Any) -> bool:
    """Whether a pool stores E2M1 with an E8M0 scale per 16 channels."""
    if type(part) is MHATokenToKVPool:
        return bool(getattr(part.quant_method, "name", None) == FP4)
    return type(part) is MHATokenToKVPoolFP4


def stored_format(pool: Any) -> tuple[str, int | None]:
    """Narrowkv's name of a pool's format, and the channels that share a scale, or None."""
    if _is_fp4(pool):
        return "fp4_e2m1", SCALE_GROUP
    return get_format(pool.dtype).name, None


def layer_buffers(pool: Any, layer_id: int) -> list[torch.Tensor]:
    """A layer's memory: keys and values, then their scales in an FP4 pool, whose getters dequantise."""
    if not _is_fp4(pool):
        return [pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)]
    index = layer_id - pool.start_layer
    return [b[index] for b in (pool.k_buffer, pool.v_buffer, pool.k_scale_buffer, pool.v_scale_buffer)]


def pool_reasons(pool: Any) -> list[str]:
    """Why narrowkv cannot read a pool; an empty list is a yes.

    Args:
        pool: SGLang's `token_to_kv_pool`.
    """
    reasons = []
    for part in _parts(pool):
        if _is_fp4(part):
            if part is not pool:
                reasons.append("its FP4 pool is part of another pool")
        elif type(part) is not MHATokenToKVPool:
            kind = type(part).__name__
            reasons.append(f"its pool is a {kind}, and narrowkv reads a MHATokenToKVPool")
            continue
        elif part.is_quantized_kv_cache:
            method = type(part.quant_method).__name__
            reasons.append(f"its pool is quantised by {method}, and narrowkv reads 16-bit, FP8 and FP4 pools")
        reasons += geometry_reasons(1, 1, part.head_dim, part.v_head_dim)
        if part.head_dim != part.v_head_dim and _is_fp4(part):
            reasons.append("its FP4 pool has values narrower than keys")
        if part.kv_cache_layout not in _LAYOUTS:
            reasons.append(f"its pool has the layout {part.kv_cache_layout}")
    return reasons


def has_window(pool: Any, layer_id: int) -> bool:
    """Whether a layer's tokens lie in the pool of sliding windows, whose slots are numbers of their own."""
    return isinstance(pool, SWAKVPool) and pool.layers_mapping[layer_id][1]


def layer_cache(pool: Any, layer: Any, buffers: list[torch.Tensor]) -> PagedKVCache:
    """A layer's cache as views of the pool's memory; nothing is copied.

    Args:
        pool: SGLang's `token_to_kv_pool`.
        layer: the `RadixAttention`; its scales are those of an FP8 pool.
        buffers: what `layer_buffers` returned for the layer.

    Raises:
        TypeError, ValueError: for a pool that does not hold such slots.
    """
    page_size = pool.page_size
    if _is_fp4(pool):
        k, v = (x.view(torch.uint8).view(-1, page_size, *x.shape[1:]) for x in buffers[:2])
        scales = [x.view(torch.uint8).view(*k.shape[:3], -1) for x in buffers[2:]]
        return PagedKVCache.from_tensors(k, v, format="fp4_e2m1", k_descale=scales[0], v_descale=scales[1])
    (k, v), layout = buffers, _LAYOUTS[_parts(pool)[0].kv_cache_layout]
    if layout == "NHD":
        k, v = (x.view(-1, page_size, *x.shape[1:]) for x in (k, v))
    name = get_format(k.dtype).name
    if get_format(name).kind == "float":
        return PagedKVCache.from_tensors(k, v, format=name, layout=layout)
    descales = [1.0 if scale is None else scale for scale in (layer.k_scale, layer.v_scale)]
    return PagedKVCache.from_tensors(
        k, v, format=name, layout=layout, k_descale=descales[0], v_descale=descales[1]
    )

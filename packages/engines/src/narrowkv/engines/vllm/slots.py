"""vLLM's cache of one layer as narrowkv's: where keys, values and their scales lie in a slot.

A slot holds everything of one token and head, in this order:

    16-bit, fp8             K | V
    fp8_per_token_head      K | fp32 scale | V | fp32 scale
    ultraquant_4bit         K codes | E8M0 per 32 | V codes | E8M0 per 32
"""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant.formats import get_format
from narrowkv.runtime.launch import active_target

__all__ = [
    "CACHE_DTYPES",
    "format_of",
    "layer_cache",
    "slot_bytes",
]

PER_TOKEN_HEAD, ULTRAQUANT = "fp8_per_token_head", "ultraquant_4bit"
_GROUP = 32
_SCALE_BYTES = 4
# vLLM's names of cache dtypes that are served. "auto" and 16-bit names are the model's dtype.
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", PER_TOKEN_HEAD, ULTRAQUANT)


def slot_bytes(cache_dtype: str, head_dim: int) -> int | None:
    """Bytes of a slot that vLLM must be told; None where it knows them.

    Example:
        >>> slot_bytes("fp8_per_token_head", 128), slot_bytes("ultraquant_4bit", 128), slot_bytes("fp8", 128)
        (264, 136, None)
    """
    if cache_dtype == PER_TOKEN_HEAD:
        return 2 * (head_dim + _SCALE_BYTES)
    if cache_dtype == ULTRAQUANT:
        return 2 * (head_dim // 2 + head_dim // _GROUP)
    return None


def format_of(cache_dtype: str, model_dtype: torch.dtype, device: torch.device) -> str:
    """Narrowkv's name of what vLLM stores; plain "fp8" is the E4M3 format of the device.

    Raises:
        ValueError: for a cache dtype that is not served.
    """
    if cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r}")
    if cache_dtype == ULTRAQUANT:
        return "fp4_e2m1"
    if cache_dtype == "fp8_e5m2":
        return "fp8_e5m2"
    if cache_dtype.startswith("fp8"):
        return active_target(device).native_fp8 or "fp8_e4m3fn"
    names = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return get_format(names.get(cache_dtype, model_dtype)).name


def layer_cache(
    kv_cache: torch.Tensor, cache_dtype: str, head_dim: int, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> PagedKVCache:
    """A layer's cache as views of vLLM's memory; nothing is copied.

    Args:
        kv_cache: `[blocks, num_kv_heads, block_size, slot]`, any strides but the last.
        cache_dtype: one of `CACHE_DTYPES`.
        head_dim: channels.
        k_scale, v_scale: fp32 `[]`, `[1]` or `[num_kv_heads]`: the layer's, used for "fp8".

    Raises:
        TypeError, ValueError: for a cache that does not hold such slots.
    """
    slots = kv_cache.transpose(1, 2)
    given: dict[str, Any] = {}
    if cache_dtype == PER_TOKEN_HEAD:
        halves = torch.split(slots.view(torch.uint8), head_dim + _SCALE_BYTES, -1)
        k, v = (half[..., :head_dim] for half in halves)
        scales = [half[..., head_dim:].view(torch.float32)[..., 0] for half in halves]
        given = {"k_granularity": "token_head", "v_granularity": "token_head"}
    elif cache_dtype == ULTRAQUANT:
        codes, groups = head_dim // 2, head_dim // _GROUP
        k, k_groups, v, v_groups = torch.split(slots.view(torch.uint8), [codes, groups, codes, groups], -1)
        scales = [k_groups, v_groups]
    else:
        k, v = torch.split(slots, head_dim, -1)
        scales = [k_scale, v_scale]
    name = format_of(cache_dtype, kv_cache.dtype, kv_cache.device)
    if get_format(name).kind == "float":
        return PagedKVCache.from_tensors(k, v, format=name)
    return PagedKVCache.from_tensors(k, v, format=name, k_descale=scales[0], v_descale=scales[1], **given)

"""Which attention shapes narrowkv serves, answered in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from narrowkv.paged_cache.layouts import HEAD_DIMS


def geometry_reasons(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None
) -> list[str]:
    """Why attention of this shape cannot be served.

    Args:
        num_qo_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: channels of a query and of a key.
        v_head_dim: channels of a value; None if they are head_dim.

    Returns:
        Sentences; empty if the shape is served.

    Example:
        >>> geometry_reasons(96, 8, 128)
        []
        >>> geometry_reasons(8, 8, 72)
        ['head_dim is 72, and the kernels have 64, 80, 96, 112, 128, 192, 256']
    """
    reasons = []
    if v_head_dim is not None and v_head_dim != head_dim:
        reasons.append(f"keys have {head_dim} channels and values {v_head_dim}; a cache has one head_dim")
    if head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim is {head_dim}, and the kernels have {', '.join(map(str, HEAD_DIMS))}")
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        reasons.append(f"{num_qo_heads} query heads are no multiple of {num_kv_heads} KV heads")
    return reasons


def config_reasons(text: Any) -> Iterator[str]:
    """Why the attention that a decoder's configuration describes cannot be served.

    Args:
        text: the configuration, or that of one layer, with the attributes that transformers gives it.
    """
    heads = _first(text, "num_attention_heads", "n_head", "num_heads")
    if heads is None:
        yield "its configuration names no number of attention heads"
        return
    kv_heads = _first(text, "num_key_value_heads", "num_kv_heads") or heads
    if getattr(text, "multi_query", False):
        kv_heads = 1
    if _first(text, "kv_lora_rank") is not None:
        yield "its keys and values are compressed together (MLA); the cache holds keys and values of heads"
        return
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    head_dim = _first(text, "head_dim") or (hidden // heads if hidden else 0)
    yield from geometry_reasons(heads, kv_heads, head_dim, _first(text, "v_head_dim"))
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi":
        yield "it adds ALiBi biases to its logits"
    if getattr(text, "dtype", None) == torch.float32:
        yield "it is loaded in float32: load it with dtype=torch.bfloat16"
    if getattr(text, "is_causal", True) is False:
        yield "its attention is not causal"


def _first(config: Any, *names: str) -> Any:
    """The first of some attributes that a configuration has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None

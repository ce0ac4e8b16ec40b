"""Which attention shapes narrowkv serves, answered in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowkv.paged_cache.layouts import HEAD_DIMS
from narrowkv.sparse_fp8.config import MOST_HEADS
from narrowkv.sparse_fp8.layouts import HEAD_DIM, ROPE_DIM

_HEADS = ("num_attention_heads", "n_head", "num_heads")


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
        ['head_dim is 72, and the kernels have 64, 80, 96, 112, 128, 192, 256, 320, 512']
        >>> geometry_reasons(64, 4, 192, 128), geometry_reasons(8, 8, 64, 128)
        ([], ['values have 128 channels, more than the 64 of keys'])
    """
    reasons = []
    # By width, so that one for both is named once.
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    for channels, name in {v_head_dim: "v_head_dim", head_dim: "head_dim"}.items():
        if channels not in HEAD_DIMS:
            served = ", ".join(map(str, HEAD_DIMS))
            reasons.append(f"{name} is {channels}, and the kernels have {served}")
    if v_head_dim > head_dim:
        reasons.append(f"values have {v_head_dim} channels, more than the {head_dim} of keys")
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        reasons.append(f"{num_qo_heads} query heads are no multiple of {num_kv_heads} KV heads")
    return reasons


def latent_reasons(kv_lora_rank: int, qk_rope_head_dim: int) -> list[str]:
    """Why latent attention (MLA) over rows of these columns cannot be served.

    Args:
        kv_lora_rank: latent columns of a row.
        qk_rope_head_dim: RoPE columns of a row.

    Returns:
        Sentences; empty if the rows are served.

    Example:
        >>> latent_reasons(512, 64)
        []
        >>> latent_reasons(256, 32)
        ['its latent rows have 256 columns and 32 of RoPE, and the kernels have 512 with 64 or none']
    """
    if kv_lora_rank == HEAD_DIM and qk_rope_head_dim in (0, ROPE_DIM):
        return []
    return [
        f"its latent rows have {kv_lora_rank} columns and {qk_rope_head_dim} of RoPE, and the kernels have "
        f"{HEAD_DIM} with {ROPE_DIM} or none"
    ]


def is_latent(config: Any) -> bool:
    """Whether the decoder of a model caches latent rows (MLA).

    Example:
        >>> from transformers import DeepseekV3Config
        >>> is_latent(DeepseekV3Config())
        True
    """
    return any(_first(layer, "kv_lora_rank") is not None for layer in _layers(config))


def has_narrow_values(config: Any) -> bool:
    """Whether values of a decoder's heads have fewer channels than their keys.

    Example:
        >>> from transformers import LlamaConfig
        >>> has_narrow_values(LlamaConfig(head_dim=128))
        False
    """
    return not is_latent(config) and any(
        (_first(layer, "v_head_dim") or _head_dim(layer)) < _head_dim(layer) for layer in _layers(config)
    )


def decoder_reasons(config: Any, *, latent: bool = False) -> list[str]:
    """Why the attention of a model's decoder cannot be served.

    Args:
        config: the model's configuration, with the attributes that transformers gives it.
        latent: whether the engine's adapter has latent attention (MLA).

    Returns:
        Sentences; empty if every layer is served. A model whose layers differ is asked layer by layer.

    Example:
        >>> from transformers import LlamaConfig
        >>> decoder_reasons(LlamaConfig(head_dim=128))
        []
    """
    if getattr(config, "is_encoder_decoder", False):
        return ["it has an encoder: attention to the encoder's tokens is not served"]
    found = (reason for layer in _layers(config) for reason in _layer_reasons(layer, latent))
    return list(dict.fromkeys(found))


def head_dims(config: Any) -> list[int]:
    """The head_dims of a decoder's layers, without repetition; 0 where its configuration names none.

    Example:
        >>> from transformers import LlamaConfig
        >>> head_dims(LlamaConfig(head_dim=128))
        [128]
    """
    return list(dict.fromkeys(map(_head_dim, _layers(config))))


def _layers(config: Any) -> list[Any]:
    """Configurations of a decoder's layers, or that of all of them."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    counted = isinstance(getattr(text, "num_hidden_layers", None), int)
    return (counted and list(getattr(text, "per_layer_config", ()))) or [text]


def _head_dim(layer: Any) -> int:
    heads, hidden = (_first(layer, *names) for names in (_HEADS, ("hidden_size", "n_embd", "d_model")))
    found = _first(layer, "head_dim")
    return int(found or (hidden // heads if hidden and isinstance(heads, int) else 0))


def _layer_reasons(layer: Any, latent: bool) -> Iterator[str]:
    heads = _first(layer, *_HEADS)
    if not isinstance(heads, int):
        yield f"its configuration names no number of attention heads, got {heads}"
        return
    kv_heads = _first(layer, "num_key_value_heads", "num_kv_heads") or heads
    if getattr(layer, "multi_query", False):
        kv_heads = 1
    if _first(layer, "kv_lora_rank") is not None and latent:
        yield from latent_reasons(layer.kv_lora_rank, _first(layer, "qk_rope_head_dim") or 0)
        if heads > MOST_HEADS:
            yield f"it has {heads} query heads, and the kernels take {MOST_HEADS}"
        return
    if _first(layer, "kv_lora_rank") is not None:
        yield "its keys and values are compressed together (MLA); the cache holds keys and values of heads"
        return
    yield from geometry_reasons(heads, kv_heads, _head_dim(layer), _first(layer, "v_head_dim"))
    if getattr(layer, "alibi", False) or getattr(layer, "position_embedding_type", None) == "alibi":
        yield "it adds ALiBi biases to its logits"
    if getattr(layer, "is_causal", True) is False:
        yield "its attention is not causal"


def _first(config: Any, *names: str) -> Any:
    """The first of some attributes that a configuration has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None

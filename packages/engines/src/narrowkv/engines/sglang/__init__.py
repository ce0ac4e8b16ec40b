"""narrowkv inside SGLang: an attention backend over its KV pools, for `--attention-backend narrowkv`.

SGLang finds `register` by the entry point `sglang.srt.plugins` of this distribution.

Example:
    >>> from sglang import Engine  # doctest: +SKIP
    >>> engine = Engine(model_path=model, attention_backend="narrowkv", page_size=64)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from narrowkv.engines.geometry import decoder_reasons, has_narrow_values, is_latent
from narrowkv.engines.versions import adapting
from narrowkv.runtime.errors import check_choice

NAME = "narrowkv"
# SGLang's names of cache dtypes that are served; "auto" is the model's dtype, or what its weights say.
LATENT_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")  # of models with latent attention
CACHE_DTYPES = (*LATENT_CACHE_DTYPES, "fp8_e5m2", "fp4_mx_block16")


# Model types that SGLang starts only with backends of a fixed list.
LISTED = ("exaone4", "exaone_moe", "gpt_oss")


def register(*, instead_of: str | None = None) -> None:
    """Registers narrowkv with SGLang as the attention backend "narrowkv". A second call has no effect.

    Args:
        instead_of: name of a backend of SGLang that narrowkv also replaces, such as "triton". SGLang starts
            some models (gpt-oss) only with backends of a fixed list, and "narrowkv" is not on it.

    Raises:
        ValueError: SGLang has no backend `instead_of`.
        EngineVersionError: the installed SGLang lacks a name that the adapter imports.
    """
    with adapting("sglang"):
        from sglang.srt.arg_groups.choices import (
            ATTENTION_BACKEND_CHOICES,
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        )
        from sglang.srt.layers.attention.attention_registry import (
            ATTENTION_BACKENDS,
            register_attention_backend,
        )

    if instead_of is not None:
        register_attention_backend(check_choice("instead_of", instead_of, tuple(ATTENTION_BACKENDS)))(_make)
    register_attention_backend(NAME)(_make)
    for names in (
        ATTENTION_BACKEND_CHOICES,
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if NAME not in names:
            names.append(NAME)


def _make(runner: Any) -> Any:
    with adapting("sglang"):
        from narrowkv.engines.sglang.backend import NarrowAttentionBackend
        from narrowkv.engines.sglang.latent import LatentPoolBackend

    return (LatentPoolBackend if runner.use_mla_backend else NarrowAttentionBackend)(runner)


def supports(config: Any, *, kv_cache_dtype: str = "auto") -> list[str]:
    """Why narrowkv's backend cannot serve a model in SGLang; an empty list is a yes.

    Args:
        config: the model's configuration, as transformers reads it.
        kv_cache_dtype: SGLang's option of that name.

    Returns:
        Sentences, in no order.

    Example:
        >>> from transformers import LlamaConfig
        >>> supports(LlamaConfig(head_dim=128), kv_cache_dtype="fp8_e4m3")
        []
    """
    latent = is_latent(config)
    reasons, known = [], LATENT_CACHE_DTYPES if latent else CACHE_DTYPES
    if kv_cache_dtype not in known:
        reasons.append(f"kv_cache_dtype is {kv_cache_dtype}, and narrowkv reads {', '.join(known)}")
    if str(getattr(config, "model_type", None)).startswith("deepseek_v4"):  # V4.1, too
        return [
            *reasons,
            "its attention over compressed keys is the backend dsv4's: "
            "narrowkv.engines.sglang.deepseek_v4.patch() puts narrowkv's kernel into that one",
        ]
    text = config.get_text_config(decoder=True)
    if text.model_type in LISTED:
        reasons.append(
            "SGLang starts it with backends of its own list alone: "
            'narrowkv.engines.sglang.register(instead_of="triton") takes the place of one'
        )
    if getattr(text, "attention_chunk_size", None):
        reasons.append("some layers attend within chunks")
    if latent and getattr(text, "index_topk", None):
        reasons.append("an indexer chooses the tokens that it attends to: SGLang's backend for it is dsa")
    if kv_cache_dtype == "fp4_mx_block16" and has_narrow_values(config):
        reasons.append("its values are narrower than its keys, and narrowkv reads them in 16 bits and FP8")
    return [*reasons, *decoder_reasons(config, latent=True)]


__all__ = ["CACHE_DTYPES", "LATENT_CACHE_DTYPES", "LISTED", "NAME", "register", "supports"]

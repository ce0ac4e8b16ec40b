"""narrowkv inside SGLang: an attention backend over its KV pools, for `--attention-backend narrowkv`.

SGLang finds `register` by the entry point `sglang.srt.plugins` of this distribution.

Example:
    >>> from sglang import Engine  # doctest: +SKIP
    >>> engine = Engine(model_path=model, attention_backend="narrowkv", page_size=64)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from narrowkv.engines.geometry import decoder_reasons

NAME = "narrowkv"
# SGLang's names of cache dtypes that are served; "auto" is the model's dtype, or what its weights say.
CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_mx_block16")


def register() -> None:
    """Makes narrowkv the attention backend "narrowkv" of SGLang; calling it again changes nothing."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_make)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)


def _make(runner: Any) -> Any:
    from narrowkv.engines.sglang.backend import NarrowAttentionBackend

    return NarrowAttentionBackend(runner)


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
    reasons = []
    if kv_cache_dtype not in CACHE_DTYPES:
        reasons.append(f"kv_cache_dtype is {kv_cache_dtype}, and narrowkv reads {', '.join(CACHE_DTYPES)}")
    if str(getattr(config, "model_type", None)).startswith("deepseek_v4"):  # V4.1, too
        return [
            *reasons,
            "its attention over compressed keys is the backend dsv4's: "
            "narrowkv.engines.sglang.deepseek_v4.patch() puts narrowkv's kernel into that one",
        ]
    return [*reasons, *decoder_reasons(config)]


__all__ = ["CACHE_DTYPES", "NAME", "register", "supports"]

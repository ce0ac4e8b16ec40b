"""narrowkv inside vLLM: an attention backend over FP8 and FP4 caches, for `--attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` of this distribution.

Example:
    >>> from vllm import LLM  # doctest: +SKIP
    >>> llm = LLM(model, attention_backend="CUSTOM", kv_cache_dtype="fp8")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from narrowkv.engines.geometry import config_reasons

BACKEND = "narrowkv.engines.vllm.backend.NarrowAttentionBackend"


def register(*, cpu: bool = False) -> None:
    """Makes narrowkv vLLM's backend CUSTOM.

    Args:
        cpu: also take the place of the CPU's own backend, because vLLM on a CPU takes no other. It holds for
            this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if cpu:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)


def supports(config: Any) -> list[str]:
    """Why narrowkv's backend cannot serve a model in vLLM; an empty list is a yes.

    Args:
        config: the model's configuration, as transformers reads it.

    Returns:
        Sentences, in no order.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(config, "is_encoder_decoder", False):
        return ["it has an encoder: attention to the encoder's tokens is not served"]
    return list(config_reasons(text))


__all__ = ["BACKEND", "register", "supports"]

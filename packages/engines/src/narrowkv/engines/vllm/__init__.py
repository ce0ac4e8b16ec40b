"""narrowkv inside vLLM: an attention backend over FP8 and FP4 caches, for `--attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` of this distribution.

Example:
    >>> from vllm import LLM  # doctest: +SKIP
    >>> llm = LLM(model, attention_backend="CUSTOM", kv_cache_dtype="fp8")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from narrowkv.engines.geometry import decoder_reasons, head_dims
from narrowkv.engines.versions import adapting
from narrowkv.engines.vllm.slots import CACHE_DTYPES, OWN_SLOTS, slot_reasons

BACKEND = "narrowkv.engines.vllm.NarrowAttentionBackend"


def register(*, cpu: bool = False) -> None:
    """Makes narrowkv vLLM's backend CUSTOM.

    Args:
        cpu: also take the place of the CPU's own backend, because vLLM on a CPU takes no other. It holds for
            this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0.

    Raises:
        EngineVersionError: the installed vLLM lacks a name that the adapter imports.
    """
    with adapting("vllm"):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if cpu:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)


def supports(config: Any, *, kv_cache_dtype: str = "auto") -> list[str]:
    """Why narrowkv's backend cannot serve a model in vLLM; an empty list is a yes.

    Args:
        config: the model's configuration, as transformers reads it.
        kv_cache_dtype: vLLM's option of that name; or "narrowkv_k8v4" or "narrowkv_fp4", which are asked
            for beside "fp8".

    Returns:
        Sentences, in no order.

    Example:
        >>> from transformers import LlamaConfig
        >>> supports(LlamaConfig(head_dim=128), kv_cache_dtype="fp8")
        []
    """
    reasons = decoder_reasons(config)
    known = (*CACHE_DTYPES, *OWN_SLOTS)
    if kv_cache_dtype not in known:
        reasons.append(f"kv_cache_dtype is {kv_cache_dtype}, and narrowkv reads {', '.join(known)}")
    elif not reasons:
        reasons += [reason for dim in head_dims(config) for reason in slot_reasons(kv_cache_dtype, dim)]
    return reasons


def __getattr__(name: str) -> Any:
    """`NarrowAttentionBackend`, which vLLM asks for when it starts a model: its module imports vLLM."""
    if name != "NarrowAttentionBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with adapting("vllm"):
        from narrowkv.engines.vllm.backend import NarrowAttentionBackend

    return NarrowAttentionBackend


__all__ = ["BACKEND", "register", "supports"]

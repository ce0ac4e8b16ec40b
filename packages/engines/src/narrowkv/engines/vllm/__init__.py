"""narrowkv inside vLLM: an attention backend over FP8 and FP4 caches, for `--attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` of this distribution.

Example:
    >>> from vllm import LLM  # doctest: +SKIP
    >>> llm = LLM(model, attention_backend="CUSTOM", kv_cache_dtype="fp8")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import Any

from narrowkv.engines.geometry import decoder_reasons, head_dims
from narrowkv.engines.versions import adapting
from narrowkv.engines.vllm.slots import CACHE_DTYPES, OWN_SLOTS, register_own_slots, slot_reasons
from narrowkv.runtime.errors import check_choice

BACKEND = "narrowkv.engines.vllm.NarrowAttentionBackend"


def register(*, instead_of: str | None = None) -> None:
    """Makes narrowkv vLLM's backend CUSTOM, and its cache dtypes known to a vLLM that takes new ones (0.33).

    Args:
        instead_of: backends of vLLM that narrowkv also replaces, by their names and separated by commas; None
            takes them from the environment variable NARROWKV_VLLM_INSTEAD_OF, which reaches all processes of
            vLLM. Replacing "ROCM_ATTN", the first that vLLM considers on ROCm, makes narrowkv the automatic
            choice. vLLM on a CPU takes no other backend than "CPU_ATTN".

    Raises:
        ValueError: vLLM has no such backend.
        EngineVersionError: the installed vLLM lacks a name that the adapter imports.
    """
    with adapting("vllm"):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_own_slots()
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    asked = os.environ.get("NARROWKV_VLLM_INSTEAD_OF", "") if instead_of is None else instead_of
    known = AttentionBackendEnum.__members__
    for name in filter(None, (each.strip() for each in asked.split(","))):
        register_backend(known[check_choice("instead_of", name, tuple(known))], BACKEND)


def supports(config: Any, *, kv_cache_dtype: str = "auto") -> list[str]:
    """Why narrowkv's backend cannot serve a model in vLLM; an empty list is a yes.

    Args:
        config: the model's configuration, as transformers reads it.
        kv_cache_dtype: vLLM's option of that name; vLLM 0.32 is asked for "narrowkv_k8v4" and "narrowkv_fp4"
            by `additional_config` and "fp8".

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

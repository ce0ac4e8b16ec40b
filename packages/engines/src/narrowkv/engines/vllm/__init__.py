"""narrowkv inside vLLM: an attention backend over FP8 and FP4 caches, for `--attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` of this distribution.

Example:
    >>> from vllm import LLM  # doctest: +SKIP
    >>> llm = LLM(model, attention_backend="CUSTOM", kv_cache_dtype="fp8")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import Any

from narrowkv.engines.geometry import decoder_reasons, has_narrow_values, head_dims, is_latent
from narrowkv.engines.versions import adapting
from narrowkv.engines.vllm.slots import (
    CACHE_DTYPES,
    LATENT_CACHE_DTYPES,
    OWN_SLOTS,
    register_own_slots,
    slot_reasons,
)
from narrowkv.runtime.errors import check_choice

BACKEND = "narrowkv.engines.vllm.NarrowBackend"
LATENT_BACKEND = "narrowkv.engines.vllm.NarrowLatentBackend"
LATENT_PREFILL = "narrowkv.engines.vllm.NarrowLatentPrefill"


def register(*, instead_of: str | None = None) -> None:
    """Makes narrowkv vLLM's backend CUSTOM, and its cache dtypes known to a vLLM that takes new ones (0.33).

    Args:
        instead_of: backends of vLLM that narrowkv also replaces, by their names and separated by commas; None
            takes them from the environment variable NARROWKV_VLLM_INSTEAD_OF, which reaches all processes of
            vLLM. Replacing "ROCM_ATTN", the first that vLLM considers on ROCm, makes narrowkv the automatic
            choice, "TRITON_MLA" that of models with latent attention (MLA). vLLM on a CPU takes no other
            backends than "CPU_ATTN", and "CPU_MLA" or "AMX_MLA".

    Raises:
        ValueError: vLLM has no such backend.
        EngineVersionError: the installed vLLM lacks a name that the adapter imports.
    """
    with adapting("vllm"):
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_own_slots()
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, LATENT_PREFILL)
    asked = os.environ.get("NARROWKV_VLLM_INSTEAD_OF", "") if instead_of is None else instead_of
    known = AttentionBackendEnum.__members__
    for name in filter(None, (each.strip() for each in asked.split(","))):
        path = LATENT_BACKEND if name.endswith("_MLA") else BACKEND
        register_backend(known[check_choice("instead_of", name, tuple(known))], path)


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
    latent = is_latent(config)
    reasons = decoder_reasons(config, latent=True)
    if latent and "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        reasons.append(
            "an indexer chooses the tokens that it attends to; narrowkv's latent attention is dense"
        )
    if has_narrow_values(config):
        reasons.append("its values are narrower than its keys, and vLLM starts it with a backend of its own")
    known = LATENT_CACHE_DTYPES if latent else (*CACHE_DTYPES, *OWN_SLOTS)
    if kv_cache_dtype not in known:
        reasons.append(f"kv_cache_dtype is {kv_cache_dtype}, and narrowkv reads {', '.join(known)}")
    elif not reasons and not latent:
        reasons += [reason for dim in head_dims(config) for reason in slot_reasons(kv_cache_dtype, dim)]
    return reasons


def __getattr__(name: str) -> Any:
    """The backends, whose modules import vLLM, which asks for them when it starts a model.

    `NarrowBackend` is the one for the model that vLLM starts: its name CUSTOM has one path.
    """
    if name not in ("NarrowBackend", "NarrowAttentionBackend", "NarrowLatentBackend", "NarrowLatentPrefill"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with adapting("vllm"):
        from vllm.config import get_current_vllm_config_or_none

        if name == "NarrowBackend":
            config = get_current_vllm_config_or_none()
            model = None if config is None else config.model_config
            is_mla = model is not None and model.use_mla
            name = "NarrowLatentBackend" if is_mla else "NarrowAttentionBackend"
        from narrowkv.engines.vllm import backend

        if name == "NarrowAttentionBackend":
            return backend.NarrowAttentionBackend
        from narrowkv.engines.vllm import latent

    return getattr(latent, name)


__all__ = ["BACKEND", "LATENT_BACKEND", "LATENT_PREFILL", "register", "supports"]

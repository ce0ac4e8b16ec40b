"""Small models of real shapes: the attention of a named architecture, with few layers and random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from narrowkv.runtime.errors import check_choice

__all__ = [
    "DEEPSEEK_V4",
    "LATENT",
    "LATENT_SPARSE",
    "TINY_MODELS",
    "TinyModel",
    "tiny_config",
    "tiny_model",
]


@dataclass(frozen=True)
class TinyModel:
    """Sizes of a small model.

    Attributes:
        model_type: transformers' name of the architecture.
        num_qo_heads, num_kv_heads, head_dim: of its attention, with the ratio and head_dim of a model
            of the family.
        options: what else its configuration says.
    """

    model_type: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)


DEEPSEEK_V4 = "deepseek-v4-tiny"
LATENT_SPARSE = ("deepseek-v3.2-tiny", "glm-5-tiny")
LATENT = ("deepseek-v3-tiny", "kimi-linear-tiny", *LATENT_SPARSE)
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_LATENT = {
    **_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_INDEXER = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 6}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
TINY_MODELS = {
    "glm-4.5-air-tiny": TinyModel(
        "glm4_moe", 12, 1, 128, {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}
    ),
    "llama-3-tiny": TinyModel("llama", 8, 2, 64),
    "qwen3-tiny": TinyModel("qwen3", 4, 2, 128),
    "gpt-oss-tiny": TinyModel(
        "gpt_oss", 16, 2, 64, {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "gemma-2-tiny": TinyModel(
        "gemma2", 4, 2, 128, {**_WINDOWS, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 128}
    ),
    "gemma-3-tiny": TinyModel("gemma3_text", 4, 2, 256, {**_WINDOWS, "query_pre_attn_scalar": 256}),
    # Values narrower than keys; layers with a window have sinks and twice the KV heads.
    "mimo-v2-tiny": TinyModel(
        "mimo_v2_flash", 8, 1, 192,
        {**_WINDOWS, **_EXPERTS, "v_head_dim": 128, "n_routed_experts": 4, "mlp_layer_types": ["dense"] * 2},
    ),
    # Layers with windows have heads of 256 channels, the others of 512.
    "gemma-4-tiny": TinyModel(
        "gemma4_text", 8, 2, 256,
        {
            **_WINDOWS, "global_head_dim": 512, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 96,
        },
    ),
    # Latent attention.
    "deepseek-v3-tiny": TinyModel("deepseek_v3", 12, 12, 64, _LATENT),
    "kimi-linear-tiny": TinyModel(
        "kimi_linear", 8, 8, 64,
        {
            **_LATENT, "q_lora_rank": None, "num_local_experts": 4, "linear_head_dim": 64,
            "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "deepseek-v3.2-tiny": TinyModel("deepseek_v32", 8, 8, 64, {**_LATENT, **_INDEXER}),
    # Every second layer takes the tokens that the layer before it chose.
    "glm-5-tiny": TinyModel(
        "glm_moe_dsa", 8, 8, 64,
        {
            **_LATENT, **_INDEXER, "qk_nope_head_dim": 192, "v_head_dim": 256,
            "indexer_types": ["full", "shared"],
        },
    ),
    # A layer of each kind, which compress so much that a short prompt has compressed rows.
    DEEPSEEK_V4: TinyModel(
        "deepseek_v4", 8, 1, 512,
        {
            **_EXPERTS, "n_routed_experts": 4, "num_hidden_layers": 3, "sliding_window": 6,
            "mlp_layer_types": ["moe"] * 3,
            "layer_types": [
                "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 128,
            "index_topk": 2,
        },
    ),
}  # fmt: skip


def tiny_config(name: str, *, vocab_size: int = 96, num_layers: int = 2) -> Any:
    """The configuration, of transformers, of a small model.

    Args:
        name: one of `TINY_MODELS`.
        vocab_size: tokens that it knows.
        num_layers: layers, every second with a sliding window where a model has windows; DeepSeek-V4 has
            three.

    Raises:
        ValueError: for another name.

    Example:
        >>> tiny_config("glm-4.5-air-tiny").num_attention_heads
        12
    """
    from transformers import AutoConfig

    tiny = TINY_MODELS[check_choice("name", name, tuple(TINY_MODELS))]
    options: dict[str, Any] = {
        "num_hidden_layers": num_layers, "num_attention_heads": tiny.num_qo_heads,
        "num_key_value_heads": tiny.num_kv_heads, "head_dim": tiny.head_dim, "hidden_size": 128,
        "intermediate_size": 128, "vocab_size": vocab_size, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    options |= tiny.options
    if "layer_types" in options:
        options["layer_types"] = (options["layer_types"] * num_layers)[: options["num_hidden_layers"]]
    return AutoConfig.for_model(tiny.model_type, **options)


def tiny_model(name: str, *, seed: int = 0, attn_implementation: str = "eager", **sizes: int) -> Any:
    """A small model with random weights in bf16, on the CPU.

    Args:
        name: one of `TINY_MODELS`.
        seed: of the weights.
        attn_implementation: as for `from_pretrained`.
        **sizes: `vocab_size` and `num_layers`, as for `tiny_config`.

    Example:
        >>> model = tiny_model("llama-3-tiny")  # doctest: +SKIP
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(name, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # weights as large as trained ones, so that attention is not uniform
            torch.nn.init.normal_(parameter, std=0.15)
    return model.to(torch.bfloat16).eval()

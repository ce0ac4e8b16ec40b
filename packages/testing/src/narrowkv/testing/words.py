"""Words that options and case lines take, known without torch, so that a misspelled one is refused at once.

A test compares them with what the packages define.
"""

from __future__ import annotations

from dataclasses import dataclass

AMD_TARGETS = ("gfx942", "gfx950")
PLACES = ("cpu", "gpu", *AMD_TARGETS)
QUERY_DTYPES = ("bf16", "fp16")
FP4 = "fp4_e2m1"
CACHE_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", FP4, "int8", "int4")
SCALE_GROUPS = (16, 32)
"""Channels of FP4 that can share a scale."""
DECODE_KERNELS = ("native", "decode", "fp8")
SPARSE_WAYS = ("bf16", "prepass", "fused", "fused-fp8q")
"""What `bench sparse` compares: 16-bit rows, and FP8 rows in each mode."""
SAGE_PRECISIONS = ("int8", "int4", "fp8")
SAGE_GRANULARITIES = ("per_tensor", "per_block", "per_warp", "per_thread")
INDEX_KEYS = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1")
COMMS = ("a2a", "ag_rs", "symm_mem")
"""Exchanges of partial results between ranks."""
ENGINE_CACHES = {
    "transformers": ("bf16", "fp8_e4m3fn", "k8v4", "fp4_e2m1", "int8", "int4"),
    "vllm": (
        "auto", "fp8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "ultraquant_4bit",
        "narrowkv_k8v4", "narrowkv_fp4",
    ),
    "sglang": ("auto", "fp8_e4m3"),
}  # fmt: skip
ACCURACY_RECIPES = (
    "bf16", "fp8-tensor", "fp8", "fp8-offset", "k8v4", "k8v4-e4m3", "fp4", "fp4-offset", "fp4-e4m3-plain",
    "fp4-e4m3-offset", "fp4-e4m3", "fp4-e4m3-recent", "fp4-mx", "fp4-32", "nvfp4", "nvfp4-offset",
)  # fmt: skip
TINY_MODELS = (
    "glm-4.5-air-tiny", "llama-3-tiny", "qwen3-tiny", "gpt-oss-tiny", "gemma-2-tiny", "gemma-3-tiny",
    "gemma-4-tiny", "mimo-v2-tiny",
    "deepseek-v3-tiny", "kimi-linear-tiny", "deepseek-v3.2-tiny", "glm-5-tiny", "deepseek-v4-tiny",
)  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """Heads of one GPU's share of a model."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128


SERVED_MODELS = {
    "llama-70b-tp8": Heads(8, 1), "llama-8b": Heads(32, 8), "glm-4.5": Heads(96, 8),
    "qwen3-moe": Heads(64, 4), "gpt-oss-120b": Heads(64, 8, 64), "gemma-3-12b": Heads(16, 8, 256),
    "qwen3-next": Heads(16, 2, 256),
}  # fmt: skip
"""Models that `bench traffic` has steps of."""
TRAFFIC = ("decode", "speculative", "mixed", "speculative-mixed")

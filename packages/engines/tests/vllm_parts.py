"""Parts of vLLM that tests make without a model: what a builder of metadata reads of a configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from narrowkv.engines.vllm.backend import NarrowMetadataBuilder


def make_builder(block_size: int = 16, *, adaptive: bool = False, ranks: int = 1) -> Any:
    """narrowkv's builder for a model with two speculative tokens.

    Args:
        adaptive: whether vLLM shortens requests on the device.
        ranks: of decode context parallelism.
    """
    guesses = SimpleNamespace(
        enable_adaptive_verification=adaptive, num_speculative_tokens=2, parallel_drafting=False
    )
    config: Any = SimpleNamespace(
        speculative_config=guesses, use_v2_model_runner=True,
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
    )  # fmt: skip
    return NarrowMetadataBuilder(SimpleNamespace(block_size=block_size), [], config, torch.device("cpu"))

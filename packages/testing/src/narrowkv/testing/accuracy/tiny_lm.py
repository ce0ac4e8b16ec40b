"""Trains a small language model with grouped queries, RoPE and a long context on text that Python ships."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from narrowkv.testing.accuracy.models import BYTES, LanguageModel, encode_bytes
from narrowkv.testing.accuracy.texts import needle_text, training_text

__all__ = ["TinySizes", "train_tiny"]


@dataclass(frozen=True)
class TinySizes:
    """Sizes of the model and of its training. The defaults take minutes on a GPU.

    Attributes:
        layers, hidden, num_qo_heads, num_kv_heads, head_dim: of the model.
        context: tokens (bytes) of a training sequence, and of the model's positions.
        batch, steps: of the training.
        learning_rate: the largest; it rises over a twentieth of the steps and falls as a cosine.
    """

    layers: int = 8
    hidden: int = 576  # a multiple of the heads, which transformers asks for
    num_qo_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 64
    context: int = 4096
    batch: int = 8
    steps: int = 1500
    learning_rate: float = 1e-3


def tiny_lm_config(sizes: TinySizes) -> Any:
    """The configuration, of transformers: a Llama whose tokens are bytes."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=256, hidden_size=sizes.hidden, intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.num_qo_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        max_position_embeddings=2 * sizes.context, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    setattr(config, BYTES, True)
    return config


def _sequence(text: str, context: int, chosen: random.Random) -> list[int]:
    """A piece of the text; every second one has a fact in it that its end asks for."""
    at = chosen.randrange(len(text) - context)
    if chosen.random() < 0.5:
        return list(text[at : at + context + 1].encode())[: context + 1]
    length = chosen.randrange(context // 8, context - 160) if context > 400 else context // 2
    prompt, answer = needle_text(
        text[at : at + length], chosen.randrange(1 << 30) + (1 << 20), chosen.random()
    )
    tail = f"{prompt}{answer}.\n{text[at + length : at + context + 1]}"
    return list(tail.encode())[: context + 1]


def train_tiny(
    sizes: TinySizes = TinySizes(),  # frozen
    *,
    seed: int = 0,
    device: str | None = None,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> LanguageModel:
    """Trains the model; the same seed on the same machine gives the same one, up to the order of GPU sums.

    Args:
        sizes: of the model and the training.
        seed: of weights and data.
        device: default the GPU if there is one. The model is in bf16 there at the end, in fp32 on a CPU.
        progress: called with each step's number and loss.

    Returns:
        The model; `model.save_pretrained(folder)` keeps it, and `load_model(folder)` loads it.
    """
    from transformers import AutoModelForCausalLM

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    chosen = random.Random(seed)
    model = AutoModelForCausalLM.from_config(tiny_lm_config(sizes), attn_implementation="sdpa")
    model = model.float().to(where).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=sizes.learning_rate, weight_decay=0.1, betas=(0.9, 0.95)
    )
    text = training_text()
    warmup = max(sizes.steps // 20, 1)
    for step in range(sizes.steps):
        rate = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / sizes.steps))
        for group in optimizer.param_groups:
            group["lr"] = sizes.learning_rate * rate
        rows = [_sequence(text, sizes.context, chosen) for _ in range(sizes.batch)]
        shortest = min(map(len, rows))
        ids = torch.tensor([row[:shortest] for row in rows], device=where)
        with torch.autocast(where, torch.bfloat16, enabled=where == "cuda"):
            logits = model(ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step, float(loss.detach()) if step % 50 == 0 or step + 1 == sizes.steps else math.nan)
    model = model.eval().requires_grad_(False)
    return LanguageModel("tiny", model.bfloat16() if where == "cuda" else model, encode_bytes)

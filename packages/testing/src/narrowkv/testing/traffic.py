"""Seeded steps of a serving engine: how many new tokens each sequence has, and over how many keys.

Lengths are lognormal, as those of served requests are: half of the sequences have fewer than 2000 tokens, and
a few have tens of thousands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowkv.testing.bench.large_cache import CacheSizes

__all__ = ["MODELS", "TRAFFIC", "Heads", "LayerStep", "grid", "serving_steps"]

SHORTEST, MEDIAN, LONGEST, SPREAD = 100, 2000, 60_000, 1.2  # tokens; of the logarithm
_CAPACITY = 65_536  # tokens that a row of an engine's block table has pages for
_NEW_TOKENS = 2048  # of all chunks of a step, at most
_CHUNKS = 4
_CHUNK_PREFIX = 4096  # keys before a chunk of the grid
_DRAFTED = (2, 4, 8, 16)  # query tokens of a speculative step
_NGRAM = (1, 5)  # of a request for which an n-gram speculator found nothing, and found four tokens
_REHEARSED_SEQUENCES, _REHEARSED_SHARE = 4, 64


@dataclass(frozen=True)
class Heads:
    """Heads of one GPU's share of a model."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128


MODELS = {
    "llama-70b-tp8": Heads(8, 1), "llama-8b": Heads(32, 8), "glm-4.5": Heads(96, 8),
    "qwen3-moe": Heads(64, 4), "gpt-oss-120b": Heads(64, 8, 64), "gemma-3-12b": Heads(16, 8, 256),
    "qwen3-next": Heads(16, 2, 256),
}  # fmt: skip
TRAFFIC = ("decode", "speculative", "mixed", "speculative-mixed")


@dataclass(frozen=True)
class LayerStep:
    """One attention layer of one step of an engine.

    Attributes:
        model: of `MODELS`.
        traffic: what kind of step it is, for tables.
        q_lens: new tokens of each sequence; lens: its keys, the new tokens included.
        format: of the cache, as for `CacheSizes`.
        page_size: tokens a page.
        appends: whether the call stores the new tokens itself, as `prefill_append` does.
        capacity: tokens that a row of the block table has pages for; 0 for the longest sequence's.
        layout: of the cache, as for `CacheSizes`.
    """

    model: str
    traffic: str
    q_lens: tuple[int, ...]
    lens: tuple[int, ...]
    format: str = "fp8_e4m3fn"
    page_size: int = 16
    appends: bool = False
    capacity: int = 0
    layout: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.sizes().items())

    @property
    def heads(self) -> Heads:
        """The heads of the model."""
        return MODELS[self.model]

    @property
    def pages(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-n // self.page_size) for n in self.lens]

    @property
    def max_pages(self) -> int:
        """Columns of the block table."""
        return max(-(-self.capacity // self.page_size), *self.pages, 1)

    @property
    def cache(self) -> CacheSizes:
        """A cache of one long sequence, whose pages all sequences share out."""
        from narrowkv.testing.bench.large_cache import CacheSizes  # not before the names of steps are known

        heads, tokens = self.heads, sum(self.pages) * self.page_size
        return CacheSizes(
            1, tokens, self.page_size, heads.num_kv_heads, heads.head_dim, self.format, self.layout
        )

    @property
    def bytes_touched(self) -> float:
        """K, V, scales, page ids, q and o, and what an append reads and stores, each byte once."""
        heads, new = self.heads, sum(self.q_lens)
        sixteen_bit = 2 * new * heads.num_qo_heads + (2 * new * heads.num_kv_heads if self.appends else 0)
        tokens = replace(self.cache, context=sum(self.lens))
        return tokens.num_bytes + 2 * sixteen_bit * heads.head_dim

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV that the causal mask leaves."""
        pairs = sum(n * (full - n) + n * (n + 1) / 2 for n, full in zip(self.q_lens, self.lens, strict=True))
        return 4.0 * pairs * self.heads.num_qo_heads * self.heads.head_dim

    def sizes(self) -> dict[str, str | int]:
        """What a table and a JSON row say about the step."""
        heads = self.heads
        return {
            "model": self.model, "heads": f"{heads.num_qo_heads}/{heads.num_kv_heads}",
            "head_dim": heads.head_dim, "traffic": self.traffic, "format": self.format,
            "operation": "append" if self.appends else "attend", "batch": len(self.lens),
            "new_tokens": sum(self.q_lens), "keys": sum(self.lens), "longest": max(self.lens),
        }  # fmt: skip

    def rehearsal(self) -> LayerStep:
        """A few of the sequences, among them the one with the most new tokens, and a 64th of their tokens."""
        order = sorted(range(len(self.lens)), key=lambda i: -self.q_lens[i])
        chosen = sorted(order[:1] + order[-_REHEARSED_SEQUENCES + 1 :]) if len(order) > 1 else order
        few = max(_DRAFTED)
        q_lens = [n if (n := self.q_lens[i]) <= few else few + n // _REHEARSED_SHARE for i in chosen]
        lens = [new + self.lens[i] // _REHEARSED_SHARE for new, i in zip(q_lens, chosen, strict=True)]
        capacity = self.capacity // _REHEARSED_SHARE
        return replace(self, q_lens=tuple(q_lens), lens=tuple(lens), capacity=capacity)


def _length(draw: random.Random) -> int:
    return min(max(round(draw.lognormvariate(math.log(MEDIAN), SPREAD)), SHORTEST), LONGEST)


def _chunks(draw: random.Random) -> Iterator[tuple[int, int]]:
    """New tokens and keys of the prompts that a step prefills: chunks of a budget, the last one cut off."""
    left = _NEW_TOKENS
    for _ in range(draw.randint(1, _CHUNKS)):
        prompt = _length(draw)
        new = min(prompt, left)
        yield new, draw.randint(new, prompt)
        left -= new
        if not left:
            return


def _sequences(traffic: str, batch: int, draw: random.Random) -> list[tuple[int, int]]:
    """New tokens and keys of each sequence of a step."""
    found = list(_chunks(draw))[:batch] if traffic.endswith("mixed") else []
    drafted = draw.choice(_DRAFTED) if traffic == "speculative" else 1
    for _ in range(batch - len(found)):
        new = draw.choice(_NGRAM) if traffic == "speculative-mixed" else drafted
        found.append((new, new + _length(draw)))
    draw.shuffle(found)
    return found


def serving_steps(
    models: Sequence[str], traffic: Sequence[str], batches: Sequence[int], formats: Sequence[str],
    seed: int = 0,
) -> list[LayerStep]:  # fmt: skip
    """A step of every combination; a mixed one also as an append.

    A step's lengths depend on its model, traffic, batch and the seed, and on nothing else.

    Args:
        models: of `MODELS`.
        traffic: of `TRAFFIC`: "decode" has one new token in every sequence, "speculative" has 2 to 16,
            "mixed" has chunks of prompts among decodes, "speculative-mixed" has them among decodes of one or
            five tokens.
        batches: sequences of a step.
        formats: of the cache, as for `CacheSizes`.
        seed: of the lengths.

    Example:
        >>> (step,) = serving_steps(["llama-8b"], ["speculative"], [3], ["bf16"])
        >>> len(step.lens), len(set(step.q_lens)), step.q_lens[0] in (2, 4, 8, 16)
        (3, 1, True)
    """
    steps = []
    for fmt, model, kind, batch in product(formats, models, traffic, batches):
        q_lens, lens = zip(
            *_sequences(kind, batch, random.Random(f"{seed} {model} {kind} {batch}")), strict=True
        )
        step = LayerStep(model, kind, q_lens, lens, fmt, capacity=_CAPACITY)
        steps += [step, replace(step, appends=True)] if kind.endswith("mixed") else [step]
    return steps


def _alike(model: str, batch: int, new: int, keys: int, fmt: str = "fp8_e4m3fn") -> LayerStep:
    name = "decode" if new == 1 else "speculative" if new <= max(_DRAFTED) else "prefill"
    return LayerStep(model, f"{name} {new} of {keys}", (new,) * batch, (keys,) * batch, fmt)


def _mixed(model: str, decodes: int, chunks: int, new: int) -> Iterator[LayerStep]:
    draw = random.Random(f"{model} {decodes} {chunks}")
    q_lens = (1,) * decodes + (new,) * chunks
    lens = tuple(n + (_length(draw) if n == 1 else _CHUNK_PREFIX) for n in q_lens)
    step = LayerStep(model, f"{decodes} decodes + {chunks} x {new}", q_lens, lens)
    return iter((step, replace(step, appends=True)))


def grid() -> list[LayerStep]:
    """Steps for which the automatic choice is compared with every forced one."""
    return [
        *(_alike("glm-4.5", *sizes) for sizes in ((4, 1, 1024), (1, 1, 32768), (64, 1, 8192))),
        *(_alike("glm-4.5", 64, 1, keys, fmt) for keys in (1024, 8192)
          for fmt in ("fp4_e2m1", "fp8_e4m3fn/fp4_e2m1")),
        _alike("glm-4.5", 1, 1, 32768, "fp8_e4m3fn/fp4_e2m1"),
        *(_alike("glm-4.5", *sizes) for sizes in (
            (64, 8, 8192), (4, 8, 8192), (64, 4, 8192), (64, 2, 8192), (16, 16, 8192))),
        *_mixed("glm-4.5", 60, 4, 512), *_mixed("llama-8b", 60, 4, 512), *_mixed("llama-70b-tp8", 60, 4, 512),
        *_mixed("glm-4.5", 127, 1, 2048),
        *(_alike("llama-8b", 1, 128, 128 + old, "bf16") for old in (4096, 32768)),
        _alike("qwen3-next", 1, 4096, 4096), _alike("qwen3-next", 1, 1024, 5120),
    ]  # fmt: skip


def rehearsals(steps: Iterable[LayerStep]) -> list[LayerStep]:
    """Small steps for a CPU: one of each model, kind of traffic, format and operation."""
    kinds = {(step.model, step.traffic, step.format, step.appends): step for step in steps}
    return [step.rehearsal() for step in kinds.values()]

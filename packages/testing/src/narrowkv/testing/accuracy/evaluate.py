"""Measures recipes on a model: each token's prediction with each cache, against the 16-bit one.

On a CPU the model attends over what a recipe gives back, by a function of transformers' interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from narrowkv.engines.transformers.attention import refuse_unknown
from narrowkv.engines.transformers.masks import padding_of
from narrowkv.quant import Calibration, lse_correction
from narrowkv.runtime.attention.reference import attention_reference
from narrowkv.testing.accuracy.models import LanguageModel, calibration_text, evaluation_text, needle_text
from narrowkv.testing.recipes import REFERENCE, Recipe

__all__ = [
    "NAME", "Score", "Statistics", "StoredAttention", "collect", "measure", "statistics_of",
    "stored_attention",
]  # fmt: skip


NAME = "narrowkv_stored"
_ROWS = 1024  # queries whose scores exist at a time

Samples = dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class StoredAttention:
    """Causal attention in float32 over K and V as a recipe stores them, for one sequence.

    Args:
        recipe: how K and V are stored.
        calibration: what the recipe needs, a layer for each layer of `layers`.
        layers: indices of the model's attention layers, in order; all that a calibration is for.
        samples: where Q, K and V of each layer are kept, or None.
    """

    def __init__(
        self,
        recipe: Recipe = REFERENCE,
        calibration: Calibration | None = None,
        layers: list[int] | None = None,
        samples: Samples | None = None,
    ) -> None:
        self.recipe, self.calibration, self.layers, self.samples = recipe, calibration, layers, samples

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
        sliding_window: int | None = None, softcap: float | None = None,
        s_aux: torch.Tensor | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """As transformers' `AttentionInterface` calls it: `[1, heads, tokens, head_dim]`, no padding."""
        refuse_unknown(kwargs, dropout)
        if query.shape[0] != 1 or attention_mask is not None or query.shape[2] != key.shape[2]:
            raise ValueError("accuracy is measured on one whole sequence without padding at a time")
        q, k, v = (x[0].transpose(0, 1).float() for x in (query, key, value))  # [tokens, heads, head_dim]
        index = int(getattr(module, "layer_idx", 0))
        if self.samples is not None:
            self.samples[index] = q, k, v
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        layer = shift = None
        if self.calibration is not None and self.layers is not None:
            layer = self.calibration.layers[self.layers.index(index)]
            shift = lse_correction(q, layer.offset, scale)
            q, k, v = layer.queries(q), layer.keys(k), layer.values(v)
        (k, v), *near = self.recipe.store(k, v)
        if near:
            if softcap or s_aux is not None or sliding_window is not None:
                raise ValueError(f"{self.recipe.name} is for models without windows, soft caps and sinks")
            o = _causal_with_near(
                q, (k, v), near[0], scale, first=self.recipe.first, recent=self.recipe.recent
            )
        else:
            o = _causal(q, k, v, scale, softcap=softcap, window=sliding_window, sinks=s_aux, shift=shift)
        if layer is not None:
            o = layer.output(o)
        return o.to(query.dtype)[None], None


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, softcap: float | None,
    window: int | None, sinks: torch.Tensor | None, shift: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention in float32: `[tokens, heads, head_dim]` of one sequence; shift: added to logits."""
    if not softcap and window is None and sinks is None:
        by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
        o = torch.nn.functional.scaled_dot_product_attention(
            by_head[0], by_head[1], by_head[2], is_causal=True, scale=scale, enable_gqa=True
        )
        return o[0].transpose(0, 1)
    parts = [
        attention_reference(
            q[first : first + _ROWS], k[: first + _ROWS], v[: first + _ROWS],
            torch.arange(first, min(first + _ROWS, q.shape[0]), device=q.device), sm_scale=scale,
            logits_soft_cap=softcap or 0.0, window_left=-1 if window is None else window - 1, window_right=0,
            sinks=sinks, shift=None if shift is None else shift[first : first + _ROWS],
        )[0]
        for first in range(0, q.shape[0], _ROWS)
    ]  # fmt: skip
    return torch.cat(parts)


def _causal_with_near(
    q: torch.Tensor, far: tuple[torch.Tensor, torch.Tensor], near: tuple[torch.Tensor, torch.Tensor],
    scale: float, *, first: int, recent: int,
) -> torch.Tensor:  # fmt: skip
    """Causal attention that sees the first and the newest tokens of each query as they are in `near`."""
    heads = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (*far, *near)]
    key = torch.arange(q.shape[0], device=q.device)
    parts = []
    for begin in range(0, q.shape[0], _ROWS):
        rows = q[begin : begin + _ROWS]
        end = begin + rows.shape[0]
        far_k, far_v, near_k, near_v = (x[:end] for x in heads)
        place = key[begin:end, None]
        is_near = (key[:end] < first) | (key[:end] > place - recent)
        logits, far_logits = (torch.einsum("thd,shd->hts", rows, k) * scale for k in (near_k, far_k))
        logits = torch.where(is_near, logits, far_logits)
        p = logits.masked_fill(key[:end] > place, -torch.inf).softmax(-1)
        parts.append(
            torch.einsum("hts,shd->thd", p * is_near, near_v)
            + torch.einsum("hts,shd->thd", p * ~is_near, far_v)
        )
    return torch.cat(parts)


@contextmanager
def _attending_by(model: Any, implementation: str) -> Iterator[None]:
    """Makes a model of transformers attend by a registered implementation meanwhile."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def stored_attention(model: Any, attention: StoredAttention) -> AbstractContextManager[None]:
    """Makes a model of transformers attend by `attention` meanwhile."""
    AttentionInterface.register(NAME, attention.attend)
    AttentionMaskInterface.register(NAME, padding_of)
    return _attending_by(model, NAME)


_CHUNK = 256  # tokens whose probabilities are compared at a time


@dataclass(frozen=True)
class Score:
    """The cost of a recipe in accuracy.

    Attributes:
        recipe, note, bits: of the recipe; bits of an element at the model's head_dim, scales included.
        ran: "kernels" or "torch", which is the same bytes dequantised and attended in float32.
        kl: mean KL divergence of the next token's distribution from the 16-bit cache's, in nats.
        perplexity: of the text; perplexity_change: relative to the 16-bit cache's.
        agreement: how often the likeliest next token is that of the 16-bit cache.
        retrieved: facts found, of `needles`.
        tokens: predictions that were compared.
    """

    recipe: str
    note: str
    bits: float
    ran: str
    kl: float
    perplexity: float
    perplexity_change: float
    agreement: float
    retrieved: int
    needles: int
    tokens: int


@dataclass(frozen=True)
class Statistics:
    """How K and V of all layers look on the calibration text: the median and the largest over heads.

    Attributes:
        k_outlier, v_outlier: the largest channel's root mean square over the median channel's.
        k_bias: the largest abs(mean) over standard deviation of a channel of K.
        k_first: the norm of the first token's key over the median key's.
    """

    k_outlier: tuple[float, float]
    v_outlier: tuple[float, float]
    k_bias: tuple[float, float]
    k_first: tuple[float, float]


@torch.no_grad()
def collect(model: LanguageModel, tokens: int) -> Samples:
    """Q, K and V of every attention layer on the calibration text, by the layer's index."""
    samples: Samples = {}
    with stored_attention(model.model, StoredAttention(samples=samples)):
        model.model(model.tokens(calibration_text(), tokens)[None], use_cache=False)
    return dict(sorted(samples.items()))


def statistics_of(samples: Samples) -> Statistics:
    """How K and V of a model are made."""

    def spread(values: list[torch.Tensor]) -> tuple[float, float]:
        every = torch.cat([x.flatten() for x in values]).float()
        return float(every.median()), float(every.max())

    def outlier(x: torch.Tensor) -> torch.Tensor:
        rms = x.square().mean(0).sqrt()
        return rms.amax(-1) / rms.median(-1).values

    keys, values = [k for _, k, _ in samples.values()], [v for _, _, v in samples.values()]
    return Statistics(
        spread([outlier(k) for k in keys]),
        spread([outlier(v) for v in values]),
        spread([(k.mean(0).abs() / k.std(0)).amax(-1) for k in keys]),
        spread([k[0].norm(dim=-1) / k.norm(dim=-1).median(0).values for k in keys]),
    )


class Runner:
    """Runs a model with a recipe's cache, by the kernels where that is fast and possible, and sums errors."""

    def __init__(self, model: LanguageModel, recipe: Recipe, samples: Samples, kernels: bool) -> None:
        self.model, self.recipe = model, recipe
        self.layers = list(samples)
        self.calibration: Calibration | None = recipe.calibration(samples.values())
        self.kernels = kernels and recipe.in_cache
        self.nll = self.kl = 0.0
        self.agreed = self.tokens = 0
        self.retrieved: list[bool] = []

    def _attending(self) -> AbstractContextManager[None]:
        model = self.model.model
        if not self.kernels:
            return stored_attention(model, StoredAttention(self.recipe, self.calibration, self.layers))
        import narrowkv.engines.transformers as narrow

        narrow.register()
        return _attending_by(model, narrow.NAME)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of every position, `[tokens, vocabulary]` on the model's device, in the model's dtype."""
        with self._attending():
            cache: Any = None
            if self.kernels:
                from narrowkv.engines.transformers import NarrowCache

                cache = NarrowCache(
                    self.model.model.config, max_length=ids.shape[0], calibration=self.calibration,
                    first=self.recipe.first, recent=self.recipe.recent, **self.recipe.cache_options(),
                )  # fmt: skip
            # Tokens that come together would see one another as they are, not as they are stored.
            one_by_one = cache is not None and self.recipe.keeps_some
            steps = list(ids[:, None]) if one_by_one else [ids]
            logits = [
                self.model.model(step[None], past_key_values=cache, use_cache=cache is not None).logits[0]
                for step in steps
            ]
        return torch.cat(logits)

    def count(self, got: torch.Tensor, wanted: torch.Tensor, ids: torch.Tensor) -> None:
        """Adds the predictions of one sequence; logits `[tokens, vocabulary]`, none follows the last."""
        for first in range(0, ids.shape[0] - 1, _CHUNK):
            rows = slice(first, min(first + _CHUNK, ids.shape[0] - 1))
            p, q = (x[rows].float().log_softmax(-1) for x in (wanted, got))
            follows = ids[rows.start + 1 : rows.stop + 1]
            self.nll -= float(q.gather(1, follows[:, None]).double().sum())
            self.kl += float((p.exp() * (p - q)).sum(-1).double().sum())
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            self.tokens += rows.stop - rows.start

    def score(self, best: float) -> Score:
        """What the recipe costs; `best` is the perplexity with the 16-bit cache."""
        recipe, perplexity = self.recipe, math.exp(self.nll / self.tokens)
        return Score(
            recipe.name, recipe.note, recipe.bits(self.model.head_dim),
            "kernels" if self.kernels else "torch", self.kl / self.tokens, perplexity, perplexity / best - 1,
            self.agreed / self.tokens, sum(self.retrieved), len(self.retrieved), self.tokens,
        )  # fmt: skip


def _needles(model: LanguageModel, context: int, count: int) -> list[tuple[torch.Tensor, int]]:
    """Sequences with a fact and its question, and how many tokens at the end are the answer."""
    made = []
    # Filler of as many characters as leave room for the fact and the question.
    text = evaluation_text()
    ids = model.encode(text[: 4 * context])
    filler = text[: max(int(4 * context * min(1.0, context / len(ids))) - 160, 64)]
    for index in range(count):
        prompt, answer = needle_text(filler, index, (index + 0.5) / count)
        whole, before = model.encode(prompt + answer), model.encode(prompt)
        made.append((torch.tensor(whole, device=model.device), len(whole) - len(before)))
    return made


def _found(logits: torch.Tensor, ids: torch.Tensor, answer: int) -> bool:
    """Whether each token of the answer is the likeliest after those before it."""
    return bool((logits[-answer - 1 : -1].argmax(-1) == ids[-answer:]).all())


def measure(
    model: LanguageModel,
    recipes: Sequence[Recipe],
    *,
    tokens: int = 1024,
    context: int = 1024,
    needles: int = 0,
    calibration_tokens: int = 1024,
    kernels: bool | None = None,
    samples: Samples | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Score]:
    """What each recipe costs a model.

    The model reads a text once with each recipe's cache; every query attends to K and V as they are stored.

    Args:
        model: from `load_model`.
        recipes: of `RECIPES`, or others.
        tokens: of the text, in sequences of `context`.
        context: tokens of a sequence, at least 2.
        needles: sequences with a fact whose retrieval is counted.
        calibration_tokens: of the text that recipes are calibrated on.
        kernels: whether recipes that the kernels have run through them; default: on a GPU. The others, and
            all on a CPU, are quantised to the same bytes, dequantised, and attended in float32.
        samples: of `collect`; default they are collected.
        progress: called with a recipe's name after each sequence.

    Returns:
        A score for each recipe; after Ctrl-C, for those that had read what the reference had read.

    Raises:
        ValueError: the model or the text cannot serve the sizes.
    """
    by_kernels = model.device.type == "cuda" if kernels is None else kernels
    samples = collect(model, calibration_tokens) if samples is None else samples
    exact = Runner(model, REFERENCE, samples, False)
    runners = [Runner(model, recipe, samples, by_kernels) for recipe in recipes]
    needed = _needles(model, context, needles) if needles else []
    text = model.tokens(evaluation_text(), tokens)
    pieces = [text[first : first + context] for first in range(0, tokens - 1, context)]
    try:
        for ids in pieces:
            wanted = exact.logits(ids)
            exact.count(wanted, wanted, ids)
            for runner in runners:
                same = runner.recipe is REFERENCE and not runner.kernels
                runner.count(wanted if same else runner.logits(ids), wanted, ids)
                progress(runner.recipe.name)
        for ids, answer in needed:
            for runner in runners:
                runner.retrieved.append(_found(runner.logits(ids), ids, answer))
                progress(runner.recipe.name)
    except KeyboardInterrupt:
        if not exact.tokens:
            raise
    best = math.exp(exact.nll / exact.tokens)
    return [runner.score(best) for runner in runners if runner.tokens == exact.tokens]


def frontier(scores: Sequence[Score]) -> set[str]:
    """Recipes that no other one beats in bits or KL without losing in the other."""
    return {
        s.recipe
        for s in scores
        if not any((o.bits, o.kl) != (s.bits, s.kl) and o.bits <= s.bits and o.kl <= s.kl for o in scores)
    }

"""Decode's part of `narrowkv tune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from narrowkv.attn_decode import DecodePlan, DecodeShape, paged_decode, plan_decode
from narrowkv.attn_decode.config import is_tuned, shape_class, with_choice
from narrowkv.attn_decode.config_tuned import DecodeChoice, choices, merges
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch import Workspace, active_target
from narrowkv.runtime.tuned import shipped_only
from narrowkv.testing.bench.decode import DecodeSizes, checker
from narrowkv.testing.bench.large_cache import LargeCache
from narrowkv.testing.cases.decode import BOUND
from narrowkv.testing.tune import TuneSettings
from narrowkv.testing.tune.search import Shapes, TunedCall, inner

Measured = tuple[DecodeSizes, ...]


class DecodeFamily:
    """Shape classes of one query token for each sequence.

    Args:
        settings: what to search.
        device: of the tensors.
    """

    name = "decode"

    def __init__(self, settings: TuneSettings, device: str = "cuda") -> None:
        self._settings = settings
        self._device = device

    def classes(self) -> list[Measured]:
        """By format, batch and context the shapes to measure; classes of short calls first."""
        given = self._settings
        contexts = [given.contexts] if given.capacity else [(context,) for context in given.contexts]
        return [
            self._measured(fmt, batch, lengths)
            for fmt, lengths, batch in product(given.formats, contexts, given.batches)
        ]

    def _measured(self, fmt: str, batch: int, contexts: Sequence[int]) -> Measured:
        heads, page = self._settings.heads, self._settings.page_size

        def sizes(sequences: int, tokens: int) -> DecodeSizes:
            context = -(-tokens // page) * page
            ratio = heads.num_qo_heads // heads.num_kv_heads
            return DecodeSizes(
                sequences, context, page, heads.num_kv_heads, ratio, heads.head_dim, self._settings.q, fmt
            )

        if len(contexts) > 1:
            return tuple(sizes(batch, context) for context in contexts)
        pairs = zip(_both(batch, 6), _both(contexts[0], 5), strict=True)
        return tuple(dict.fromkeys(sizes(*pair) for pair in pairs))

    def name_of(self, chosen: Measured) -> str:
        """The class of the first of the measured shapes."""
        sizes = chosen[0]
        batch, num_qo_heads, head_dim = sizes.q_shape
        shape = DecodeShape(
            batch, 1, num_qo_heads, sizes.num_kv_heads, head_dim, sizes.page_size,
            self._settings.capacity or sizes.context, sizes.q_dtype,
        )  # fmt: skip
        formats = sizes.cache.cache_format
        return shape_class(shape, formats.k, formats.v, sizes.cache.scale_group)

    def open(self, chosen: Measured) -> Shapes[DecodeChoice]:
        """Draws the caches; a plan for each configuration is made when it is tried."""
        trials, plans = [], []
        for sizes in chosen:
            cache, table = LargeCache(sizes.cache, device=self._device).view(sizes.cache)
            random = torch.Generator(self._device).manual_seed(1)
            q = torch.randn(sizes.q_shape, generator=random, device=self._device).to(sizes.q_dtype)
            out, error = torch.empty_like(q), checker(q, cache, table)
            plan = partial(self._plan, q, cache, table)
            plans.append(plan(None))
            trials.append(partial(_trial, q, cache, table, out, error, plan))
        first = plans[0]
        name = self.name_of(chosen)
        if any(shape_class(p.shape, p.k_format, p.v_format, p.scale_group) != name for p in plans):
            raise ValueError(f"measured shapes must be of one class, got {chosen}")
        target = active_target(q.device)
        tried = choices(target, first.shape.head_dim, first.shape.capacity) if is_tuned(first.config) else []
        measured = tuple(f"{sizes.batch} x {sizes.context}" for sizes in chosen)
        shipped = first.config.explain(first.shape)
        return Shapes("decode", name, measured, shipped, tried, partial(merges, target), tuple(trials))

    def _plan(
        self, q: torch.Tensor, cache: PagedKVCache, table: PageTable, choice: DecodeChoice | None
    ) -> DecodePlan:
        with shipped_only():
            plan = plan_decode(q, cache, table, max_seq_len=self._settings.capacity or None)
            if choice is None:
                return plan
            config = with_choice(plan.target, plan.shape, plan.config, choice)
            plan = replace(plan, config=config, workspace=None)
            needed = plan.workspace_bytes()
        return replace(plan, workspace=Workspace(needed, plan.device)) if needed else plan


def _both(size: int, eighths: int) -> tuple[int, int]:
    found = tuple(inner(size, eighths))
    return found[0], found[-1]


def _trial(
    q: torch.Tensor, cache: PagedKVCache, table: PageTable, out: torch.Tensor,
    error: Callable[[torch.Tensor], float], plan: Callable[[DecodeChoice | None], DecodePlan],
    choice: DecodeChoice | None,
) -> TunedCall:  # fmt: skip
    run: Callable[[], torch.Tensor] = partial(paged_decode, q, cache, table, out=out, plan=plan(choice))  # type: ignore[assignment]
    return TunedCall(run, error, BOUND)


def make(settings: TuneSettings, device: str = "cuda") -> DecodeFamily:
    """The family."""
    return DecodeFamily(settings, device)

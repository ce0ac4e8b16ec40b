"""The part of `narrowkv tune` for prefill: a chunk of new tokens of one sequence over its older ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from narrowkv.attn_prefill import PrefillPlan, PrefillShape, batch_prefill, plan_prefill
from narrowkv.attn_prefill.config_tuned import (
    PrefillChoice,
    choices,
    is_tuned,
    shape_class,
    splits,
    with_choice,
)
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.tuned import shipped_only
from narrowkv.testing.bench.large_cache import LargeCache
from narrowkv.testing.bench.prefill import PrefillSizes, checker
from narrowkv.testing.cases.decode import BOUND
from narrowkv.testing.tune import TuneSettings
from narrowkv.testing.tune.search import Shapes, TunedCall

Measured = tuple[PrefillSizes, ...]


class PrefillFamily:
    """Shape classes of `batch_prefill` of one sequence.

    Args:
        settings: what to search.
        device: of the tensors.
    """

    name = "prefill"

    def __init__(self, settings: TuneSettings, device: str = "cuda") -> None:
        self._settings = settings
        self._device = device

    def classes(self) -> list[Measured]:
        """By format, chunk and all tokens the shapes to measure; a chunk is at most all tokens."""
        given, heads = self._settings, self._settings.heads

        def sizes(fmt: str, new: int, keys: int) -> PrefillSizes:
            ratio = heads.num_qo_heads // heads.num_kv_heads
            return PrefillSizes(
                new, keys - new, heads.num_kv_heads, ratio, heads.head_dim, given.page_size, fmt
            )

        return [
            (sizes(fmt, new, keys), sizes(fmt, new * 5 // 8, keys * 5 // 8))
            for fmt, new, keys in product(given.formats, given.chunks, given.contexts)
            if new <= keys
        ]

    def name_of(self, chosen: Measured) -> str:
        """The class of the first of the measured shapes."""
        sizes = chosen[0]
        shape = PrefillShape(
            batch=1, num_tokens=sizes.new, max_q_len=sizes.new, num_qo_heads=sizes.num_kv_heads * sizes.ratio,
            num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, page_size=sizes.page_size,
            max_seq_len=sizes.length, kv_tokens=sizes.length,
        )  # fmt: skip
        formats = sizes.cache.cache_format
        return shape_class(shape, (formats.k, formats.v), self._is_plain(sizes))

    @staticmethod
    def _is_plain(sizes: PrefillSizes) -> bool:
        formats = sizes.cache.cache_format
        return all(fmt in ("bf16", "fp16") or fmt.startswith("fp8_") for fmt in (formats.k, formats.v))

    def open(self, chosen: Measured) -> Shapes[PrefillChoice]:
        """Draws the caches; a plan for each configuration is made when it is tried."""
        trials, plans = [], []
        for sizes in chosen:
            cache, table = LargeCache(sizes.cache, device=self._device).view(sizes.cache)
            random = torch.Generator(self._device).manual_seed(1)
            size = (sizes.new, sizes.num_kv_heads * sizes.ratio, sizes.head_dim)
            q = torch.randn(size, generator=random, device=self._device).bfloat16()
            starts = torch.tensor([0, sizes.new], dtype=torch.int32, device=self._device)
            plan = partial(_plan, q, cache, table, starts, self._is_plain(sizes))
            plans.append(plan(None))
            trials.append(partial(_trial, (q, cache, table, starts), checker(q, cache, table), plan))
        first, target = plans[0], active_target(plans[0].device)
        tried = choices(target, first.shape.head_dim) if is_tuned(first.shape, first.config) else []
        measured = tuple(f"{sizes.new} over {sizes.prefix}" for sizes in chosen)
        return Shapes(
            "prefill", self.name_of(chosen), measured, first.explain(), tried, splits, tuple(trials)
        )


def _plan(
    q: torch.Tensor, cache: PagedKVCache, table: PageTable, starts: torch.Tensor, plain_keys: bool,
    choice: PrefillChoice | None,
) -> PrefillPlan:  # fmt: skip
    kernel = None if choice is None else choice.kernel
    with shipped_only():
        plan = plan_prefill(q, cache, table, starts, max_q_len=q.shape[0], kernel=kernel)
    if choice is None:
        return plan
    base = plan.config if plan.config.fallback is None else plan.config.fallback
    config = with_choice(plan.target, plan.shape, base, choice)
    return replace(plan, config=config, workspace=None).with_workspace()


def _trial(
    paged: tuple[torch.Tensor, PagedKVCache, PageTable, torch.Tensor], error: Callable[[torch.Tensor], float],
    plan: Callable[[PrefillChoice | None], PrefillPlan], choice: PrefillChoice | None,
) -> TunedCall:  # fmt: skip
    out = torch.empty_like(paged[0])
    run: Callable[[], torch.Tensor] = partial(batch_prefill, *paged, out=out, plan=plan(choice))  # type: ignore[assignment]
    return TunedCall(run, error, BOUND)


def make(settings: TuneSettings, device: str = "cuda") -> PrefillFamily:
    """The family."""
    return PrefillFamily(settings, device)

"""The families of `narrowkv tune`: the shapes of each, a call of a shape, and the configurations to try."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Generic, TypeVar

import torch

from narrowkv.attn_decode import DecodePlan, DecodeShape, paged_decode, plan_decode
from narrowkv.attn_decode import config as decode_config
from narrowkv.attn_decode import config_tuned as decode
from narrowkv.attn_prefill import PrefillPlan, PrefillShape, batch_prefill, plan_prefill
from narrowkv.attn_prefill import config_tuned as prefill
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.accuracy import compare
from narrowkv.runtime.launch import Workspace
from narrowkv.runtime.tuned import shipped_only
from narrowkv.sage import SagePlan, SageShape, plan_sage, sage_attention_reference
from narrowkv.sage import config_tuned as sage
from narrowkv.sage.options import SageArguments
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    RowsFormat,
    SparsePlan,
    plan_sparse,
    sparse_prefill_reference,
)
from narrowkv.sparse_fp8 import config_tuned as sparse
from narrowkv.sparse_fp8.layouts import LAYOUTS
from narrowkv.testing.bench.decode import DecodeSizes
from narrowkv.testing.bench.decode import checker as decode_checker
from narrowkv.testing.bench.large_cache import LargeCache
from narrowkv.testing.bench.prefill import PrefillSizes
from narrowkv.testing.bench.prefill import checker as prefill_checker
from narrowkv.testing.cases.decode import BOUND as DECODE_BOUND
from narrowkv.testing.cases.sage import BOUND as SAGE_BOUND
from narrowkv.testing.cases.sparse import BOUND_16_BIT_QUERY
from narrowkv.testing.tune import SparseHeads, TuneSettings
from narrowkv.testing.tune.search import Shapes, TunedCall, inner
from narrowkv.testing.words import Heads

__all__ = [
    "SPARSE_LAYOUTS",
    "DecodeFamily",
    "PrefillFamily",
    "SageFamily",
    "SparseFamily",
    "TunedFamily",
    "family_of",
]

SPARSE_LAYOUTS = tuple(LAYOUTS)

Sizes = TypeVar("Sizes")
Choice = TypeVar("Choice")
_POOL_ROWS = 65536  # of sparse attention
_CHECKED_TOKENS = 4  # of sparse attention
_CHECKED_ROWS = 512  # of Sage attention
_SAGE_BLOCK = 128  # queries and keys that are quantised independently of others


Drawn = tuple[Callable[[Any], Any], TunedCall]
"""The tensors of a shape: a plan by a configuration, or by the shipped one for None, and a call by a plan."""


class TunedFamily(ABC, Generic[Sizes, Choice]):
    """A family of kernels that `narrowkv tune` has configurations for.

    Args:
        settings: what to search.
        device: of the tensors.
    """

    name: str

    def __init__(self, settings: TuneSettings, device: str = "cuda") -> None:
        self.settings = settings
        self.device = device

    @abstractmethod
    def classes(self) -> list[tuple[Sizes, ...]]:
        """The shapes to measure of each shape class, largest first; none if the model has no such calls."""

    @abstractmethod
    def class_of(self, sizes: Sizes) -> str:
        """The class of a shape, as its rows have it."""

    @abstractmethod
    def describe(self, sizes: Sizes) -> str:
        """A shape in a few words, for tables."""

    @abstractmethod
    def inputs(self, sizes: Sizes) -> Drawn:
        """Draws the tensors of a shape."""

    @abstractmethod
    def space(self, plan: Any) -> tuple[Sequence[Choice], Callable[[Choice], Sequence[Choice]]]:
        """What to try in the place of a shipped plan, and then in the place of the fastest of those."""

    def name_of(self, chosen: tuple[Sizes, ...]) -> str:
        """The name of a class.

        Raises:
            ValueError: the shapes are not of one class.
        """
        names = {self.class_of(sizes) for sizes in chosen}
        if len(names) != 1:
            raise ValueError(f"measured shapes must be of one class, got {chosen}")
        return names.pop()

    def open(self, chosen: tuple[Sizes, ...]) -> Shapes[Any]:
        """Draws the tensors of a class; a plan for each configuration is made when it is tried."""
        drawn = [self.inputs(sizes) for sizes in chosen]
        first = drawn[0][0](None)
        tried, refined = self.space(first)
        measured = tuple(map(self.describe, chosen))
        trials = tuple(partial(_trial, *one) for one in drawn)
        return Shapes(self.name, self.name_of(chosen), measured, first.explain(), tried, refined, trials)

    @property
    def heads(self) -> Heads | None:
        """The model's heads; None for one of sparse attention."""
        return self.settings.heads if isinstance(self.settings.heads, Heads) else None

    def randn(self, *size: int, seed: int = 1) -> torch.Tensor:
        """The same Gaussian numbers each time, in fp32."""
        random = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(size, generator=random, device=self.device)


class DecodeFamily(TunedFamily[DecodeSizes, decode.DecodeChoice]):
    """One query token for each sequence."""

    name = "decode"

    def classes(self) -> list[tuple[DecodeSizes, ...]]:
        """By format, context and batch."""
        given = self.settings
        contexts = [given.contexts] if given.capacity else [(context,) for context in given.contexts]
        return [
            tuple(self._sizes(fmt, batch, lengths))
            for fmt, lengths, batch in product(given.formats, contexts, given.batches)
            if self.heads
        ]

    def _sizes(self, fmt: str, batch: int, contexts: Sequence[int]) -> Iterator[DecodeSizes]:
        heads, page = self.heads, self.settings.page_size
        assert heads is not None
        pairs = [(batch, context) for context in contexts]
        if len(pairs) == 1:
            pairs = list(zip(_both(batch, 6), _both(contexts[0], 5), strict=True))
        for sequences, tokens in dict.fromkeys((batch, -(-tokens // page) * page) for batch, tokens in pairs):
            ratio = heads.num_qo_heads // heads.num_kv_heads
            yield DecodeSizes(
                sequences, tokens, page, heads.num_kv_heads, ratio, heads.head_dim, self.settings.q, fmt
            )

    def class_of(self, sizes: DecodeSizes) -> str:
        """By the plan's shape."""
        batch, num_qo_heads, head_dim = sizes.q_shape
        shape = DecodeShape(
            batch, 1, num_qo_heads, sizes.num_kv_heads, head_dim, sizes.page_size,
            self.settings.capacity or sizes.context, sizes.q_dtype,
        )  # fmt: skip
        formats = sizes.cache.cache_format
        return decode_config.shape_class(shape, formats.k, formats.v, sizes.cache.scale_group)

    def describe(self, sizes: DecodeSizes) -> str:
        """Sequences and tokens of each."""
        return f"{sizes.batch} x {sizes.context}"

    def inputs(self, sizes: DecodeSizes) -> Drawn:
        """A cache in shuffled pages."""
        cache, table = LargeCache(sizes.cache, device=self.device).view(sizes.cache)
        q = self.randn(*sizes.q_shape).to(sizes.q_dtype)
        run: Any = partial(paged_decode, q, cache, table, out=torch.empty_like(q))
        plan = partial(self._plan, q, cache, table)
        return plan, TunedCall(run, decode_checker(q, cache, table), DECODE_BOUND)

    def _plan(
        self, q: torch.Tensor, cache: PagedKVCache, table: PageTable, choice: decode.DecodeChoice | None
    ) -> DecodePlan:
        with shipped_only():
            plan = plan_decode(q, cache, table, max_seq_len=self.settings.capacity or None)
            if choice is not None:
                config = decode_config.with_choice(plan.target, plan.shape, plan.config, choice)
                plan = replace(plan, config=config, workspace=None)
                needed = plan.workspace_bytes()
                plan = replace(plan, workspace=Workspace(needed, plan.device)) if needed else plan
        return plan

    def space(self, plan: DecodePlan) -> Any:
        """Tiles and splits, then ways to merge."""
        if not decode_config.is_tuned(plan.config):
            return [], lambda _: []
        tried = decode.choices(plan.target, plan.shape.head_dim, plan.shape.capacity)
        return tried, partial(decode.merges, plan.target)


class PrefillFamily(TunedFamily[PrefillSizes, prefill.PrefillChoice]):
    """`batch_prefill` of a chunk of one sequence over its older tokens: kernels "dense" and "fused"."""

    name = "prefill"

    def classes(self) -> list[tuple[PrefillSizes, ...]]:
        """By format, chunk and all tokens; a chunk is at most all tokens."""
        given, heads = self.settings, self.heads
        if heads is None:
            return []
        sizes = partial(
            PrefillSizes, num_kv_heads=heads.num_kv_heads, ratio=heads.num_qo_heads // heads.num_kv_heads,
            head_dim=heads.head_dim, page_size=given.page_size,
        )  # fmt: skip
        return [
            tuple(sizes(n * s // 8, (keys - n) * s // 8, format=fmt) for s in (8, 5))
            for fmt, n, keys in product(given.formats, given.chunks, given.contexts)
            if n <= keys
        ]

    def class_of(self, sizes: PrefillSizes) -> str:
        """By the plan's shape."""
        shape = PrefillShape(
            batch=1, num_tokens=sizes.new, max_q_len=sizes.new, num_qo_heads=sizes.num_kv_heads * sizes.ratio,
            num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, page_size=sizes.page_size,
            max_seq_len=sizes.length, kv_tokens=sizes.length,
        )  # fmt: skip
        formats = sizes.cache.cache_format.k, sizes.cache.cache_format.v
        plain_keys = all(fmt in ("bf16", "fp16") or fmt.startswith("fp8_") for fmt in formats)
        return prefill.shape_class(shape, formats, plain_keys)

    def describe(self, sizes: PrefillSizes) -> str:
        """New and older tokens."""
        return f"{sizes.new} over {sizes.prefix}"

    def inputs(self, sizes: PrefillSizes) -> Drawn:
        """A cache in shuffled pages."""
        cache, table = LargeCache(sizes.cache, device=self.device).view(sizes.cache)
        q = self.randn(sizes.new, sizes.num_kv_heads * sizes.ratio, sizes.head_dim).bfloat16()
        starts = torch.tensor([0, sizes.new], dtype=torch.int32, device=self.device)
        paged = q, cache, table, starts
        run: Any = partial(batch_prefill, *paged, out=torch.empty_like(q))
        return partial(self._plan, paged), TunedCall(run, prefill_checker(q, cache, table), DECODE_BOUND)

    @staticmethod
    def _plan(paged: tuple[Any, ...], choice: prefill.PrefillChoice | None) -> PrefillPlan:
        kernel = None if choice is None else choice.kernel
        with shipped_only():
            plan = plan_prefill(*paged, max_q_len=paged[0].shape[0], kernel=kernel)
        if choice is None:
            return plan
        base = plan.config if plan.config.fallback is None else plan.config.fallback
        config = prefill.with_choice(plan.target, plan.shape, base, choice)
        return replace(plan, config=config, workspace=None).with_workspace()

    def space(self, plan: PrefillPlan) -> Any:
        """Kernels and tiles, then splits."""
        is_tuned = prefill.is_tuned(plan.shape, plan.config)
        return prefill.choices(plan.target, plan.shape.head_dim) if is_tuned else [], prefill.splits


class SparseFamily(TunedFamily[int, sparse.SparseChoice]):
    """Sparse attention over FP8 rows, of decodes and of chunks of a prefill; a shape is its tokens."""

    name = "sparse"

    def classes(self) -> list[tuple[int, ...]]:
        """By tokens."""
        if not isinstance(self.settings.heads, SparseHeads):
            return []
        tokens = dict.fromkeys((*self.settings.batches, *self.settings.chunks))
        return [tuple(inner(most, 6)) for most in tokens]

    def class_of(self, sizes: int) -> str:
        """By the plan's rows and the call's sizes."""
        return sparse.shape_class(self._shipped(), sizes, self._indices(sizes))

    def describe(self, sizes: int) -> str:
        """Tokens and rows of each."""
        return f"{sizes} x {self._rows.topk + self._rows.window}"

    @property
    def _rows(self) -> SparseHeads:
        assert isinstance(self.settings.heads, SparseHeads)
        return self.settings.heads

    def _indices(self, tokens: int) -> int:
        """Indices of the longer source."""
        return tokens * max(self._rows.topk, self._rows.window)

    def _shipped(self) -> SparsePlan:
        heads = self._rows
        layout = LAYOUTS[heads.layout]
        rows = RowsFormat(
            heads.layout, 64, layout.group, "fp4_e2m1" if layout.values == "fp4" else "fp8_e4m3fn", True
        )
        with shipped_only():
            return plan_sparse(
                num_qo_heads=heads.num_qo_heads, prefix=rows, extend=rows if heads.window else None,
                device=self.device,
            )  # fmt: skip

    def inputs(self, sizes: int) -> Drawn:
        """Rows at random places of a pool."""
        heads = self._rows
        x = self.randn(_POOL_ROWS, LAYOUTS[heads.layout].head_dim)
        pool = DSV4Rows.quantize(x, layout=heads.layout, page_size=64)
        q = self.randn(sizes, heads.num_qo_heads, x.shape[1], seed=2).bfloat16()
        count = min(_CHECKED_TOKENS, sizes)
        checked = torch.linspace(0, sizes - 1, count, device=self.device).round().long()
        counts = (heads.topk, heads.window) if heads.window else (heads.topk,)
        sources = [self._source(pool, sizes, each, checked) for each in counts]
        given = [whole for whole, _ in sources]
        expected = sparse_prefill_reference(q[checked], *(part for _, part in sources))
        assert isinstance(expected, torch.Tensor)
        out = torch.empty(*q.shape[:2], expected.shape[-1], dtype=q.dtype, device=self.device)
        return partial(self._plan, sizes), TunedCall(
            lambda plan: plan.run(q, *given, out=out),
            lambda o: compare(o[checked], expected).relative_l1,
            BOUND_16_BIT_QUERY,
        )

    def _source(
        self, pool: DSV4Rows, tokens: int, each: int, checked: torch.Tensor
    ) -> tuple[KVSource, KVSource]:
        """A source with `each` rows for a token, and the part of it for the checked tokens."""
        random = torch.Generator(self.device).manual_seed(each)
        indices = torch.randint(0, _POOL_ROWS, (tokens, each), generator=random, device=self.device).int()
        starts = torch.arange(0, tokens * each + 1, each, device=self.device).int()
        part = indices[checked].reshape(-1).contiguous()
        return (
            KVSource(pool, starts, indices.reshape(-1)),
            KVSource(pool, starts[: len(checked) + 1].contiguous(), part),
        )

    def _plan(self, tokens: int, choice: sparse.SparseChoice | None) -> SparsePlan:
        plan = self._shipped()
        plan = plan if choice is None else sparse.with_choice(plan, choice)
        return replace(plan, max_num_tokens=tokens, max_indices=self._indices(tokens)).with_workspace()

    def space(self, plan: SparsePlan) -> Any:
        """Kernels and tiles, then splits."""
        return sparse.choices(plan), sparse.fills


class SageFamily(TunedFamily[tuple[int, bool], sage.SageChoice]):
    """Sage attention of one sequence. The measured time includes quantising Q and K to int8 and V to FP8.

    A shape is its tokens, and whether it is causal.
    """

    name = "sage"

    def classes(self) -> list[tuple[tuple[int, bool], ...]]:
        """By tokens, without a mask and causal."""
        heads = self.heads
        if heads is None or heads.head_dim not in (64, 128):
            return []
        return [
            tuple((n, causal) for n in dict.fromkeys((most, _smaller_sage(most))))
            for most, causal in product(self.settings.contexts, (False, True))
        ]

    def class_of(self, sizes: tuple[int, bool]) -> str:
        """By the plan's shape."""
        return sage.shape_class(self._shape(sizes[0]), SageArguments(causal=_mask(sizes)))

    def describe(self, sizes: tuple[int, bool]) -> str:
        """Tokens."""
        return f"{sizes[0]} tokens"

    def _shape(self, tokens: int) -> SageShape:
        heads = self.heads
        assert heads is not None
        return SageShape(1, tokens, tokens, heads.num_qo_heads, heads.num_kv_heads, heads.head_dim, False)

    def inputs(self, sizes: tuple[int, bool]) -> Drawn:
        """Gaussian Q, K and V; the last rows of one head are checked, which are quantised by themselves."""
        shape = self._shape(sizes[0])
        q, k, v = (
            self.randn(1, sizes[0], count, shape.head_dim, seed=seed).bfloat16()
            for seed, count in enumerate((shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads))
        )
        rows = min(_CHECKED_ROWS, sizes[0])
        expected = sage_attention_reference(q[:, -rows:, :1], k[:, :, :1], v[:, :, :1], causal=_mask(sizes))
        assert isinstance(expected, torch.Tensor)
        out = torch.empty_like(q)
        return partial(self._plan, sizes), TunedCall(
            lambda plan: plan.run(q, k, v, out=out),
            lambda o: compare(o[:, -rows:, :1], expected).relative_l1,
            SAGE_BOUND,
        )

    def _plan(self, sizes: tuple[int, bool], choice: sage.SageChoice | None) -> SagePlan:
        with shipped_only():
            plan = plan_sage(self._shape(sizes[0]), device=self.device, causal=_mask(sizes))
        if choice is not None:
            plan = replace(plan, config=sage.with_choice(plan.config, choice))
        return plan.with_workspace()

    def space(self, plan: SagePlan) -> Any:
        """Tiles, then orders of programs."""
        return sage.choices(plan.target, plan.config), sage.orders


def family_of(name: str, settings: TuneSettings, device: str = "cuda") -> TunedFamily[Any, Any]:
    """The family of that name."""
    families: tuple[type[TunedFamily[Any, Any]], ...] = DecodeFamily, PrefillFamily, SparseFamily, SageFamily
    return {family.name: family for family in families}[name](settings, device)


def _both(size: int, eighths: int) -> tuple[int, int]:
    found = tuple(inner(size, eighths))
    return found[0], found[-1]


def _smaller_sage(tokens: int) -> int:
    """Whole blocks of tokens of the same class."""
    smaller = tokens * 5 // 8 // _SAGE_BLOCK * _SAGE_BLOCK
    return smaller if tokens // 2 < smaller else tokens


def _mask(sizes: tuple[int, bool]) -> str | None:
    """The keyword `causal` of Sage attention."""
    return "bottom_right" if sizes[1] else None


def _trial(plan: Callable[[Any], Any], call: TunedCall, choice: Any) -> TunedCall:
    """A call by a configuration."""
    return replace(call, run=partial(call.run, plan=plan(choice)))

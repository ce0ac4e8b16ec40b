"""Cases of decode: shapes, axes, seeded inputs and bounds, for tests, `validate`, `probe` and `bench`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from narrowkv.attn_decode.api import paged_decode
from narrowkv.attn_decode.options import DecodeOptions
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.attn_decode.planning import plan_decode, plan_for_call
from narrowkv.attn_decode.reference import paged_decode_reference
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, pack_tree_mask
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import wide_dtype
from narrowkv.runtime.launch import compile_for
from narrowkv.testing.cases import Inputs, each_alone, named, word_of
from narrowkv.testing.cases.cache import DESCALES, LAYOUTS, CacheCase, fields_of_contract
from narrowkv.testing.operation import BOUND_16_BIT_QUERY, Cases, Contract, Shape
from narrowkv.testing.words import CACHE_FORMATS, DECODE_KERNELS

__all__ = [
    "AXES", "CASES", "GLM_GQA12", "K8V4", "TREES", "DecodeCase", "DecodeInputs", "at_random", "draw_tree",
    "shipped", "sweep",
]  # fmt: skip

BOUND = BOUND_16_BIT_QUERY
LSE_BOUND = 1e-3
_16_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUERIES = {**_16_BIT, "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz}
Q_DESCALE = 0.5  # of FP8 queries: not 1, so that forgetting it shows
OUT_SCALE = 0.02  # of FP8 outputs
TREES = ("chain", "star", "random")
OUTPUTS = {"": None, **QUERIES, "fp32": torch.float32}
QUICK_RANDOM_CASES = 40
FULL_RANDOM_CASES = 800


@dataclass(frozen=True, kw_only=True)
class DecodeCase(CacheCase):
    """One decode call: a cache, and sizes and options of the call.

    Attributes:
        q_len: query tokens of each sequence.
        tree: one of `TREES` that the query tokens form; empty for a sequence without a tree mask.
        gqa_ratio: query heads for each KV head.
        q_dtype, out_dtype: of query and output; None for q's. FP8 queries are over an FP8 cache.
        window_left, logits_soft_cap, sinks: options of the call; -1 and 0 are off.
        split: forces how the keys are split; empty leaves it to the plan.
        kernel: forces "native", "decode" or "fp8"; empty leaves it to the target.
        batch_invariant: whether a sequence has the same bits in every batch.
    """

    lens: tuple[int, ...] = (64, 37)
    stale_columns: int = 1
    spread: float = 1.0
    q_len: int = 1
    tree: str = named("", words=("", *TREES))
    gqa_ratio: int = named(12, "ratio")
    q_dtype: torch.dtype = named(torch.bfloat16, "q", QUERIES)
    out_dtype: torch.dtype | None = named(None, "out", OUTPUTS)
    window_left: int = named(-1, "window")
    logits_soft_cap: float = named(0.0, "soft_cap")
    sinks: bool = False
    split: str = named("", words=("", "none", "even", "per_sequence"))
    kernel: str = named("", words=("", *DECODE_KERNELS))
    batch_invariant: bool = False

    bound = BOUND
    lse_bound = LSE_BOUND

    @classmethod
    def small(cls, **changes: Any) -> DecodeCase:
        """A case that the interpreter runs in a moment, with some fields changed; most tests vary it."""
        return cls(**{"lens": (70, 5, 130), "head_dim": 64, "stale_columns": 0, "spread": 0.5, **changes})

    @property
    def kind(self) -> tuple[str, str]:
        """The query's dtype and the cache's format, for tables."""
        same = self.formats.k == self.formats.v
        return word_of(self, "q_dtype"), self.formats.k if same else "K and V differ"

    def build(
        self, device: torch.device | str = "cpu", seed: int | None = None
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        """Q `[batch * q_len, num_qo_heads, head_dim]`, the cache and its page table.

        Raises:
            CaseError: the layout does not go with the page size, the sizes or the formats.
            ValueError, TypeError: the cache refuses a format, layout or size.
        """
        return self._draw(torch.manual_seed(self.seed if seed is None else seed), device)

    def inputs(self, device: str = "cpu") -> DecodeInputs:
        """The same with the options of the call. Raises what `build` raises."""
        generator = torch.Generator().manual_seed(self.seed)
        q, cache, table = self._draw(generator, device)
        sinks = torch.randn(q.shape[1], generator=generator).to(device) if self.sinks else None
        options = {**options_of(self, DecodeOptions, device), "sinks": sinks}
        return DecodeInputs(
            q, cache, table, options, self.split or None, self.kernel or None, self.batch_invariant
        )

    def _draw(
        self, generator: torch.Generator, device: torch.device | str
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        cache, table = self.cache(generator, device)
        if self.tree:
            seen = draw_tree(self.tree, len(self.lens), self.q_len, generator)
            table = table.with_tree_mask(pack_tree_mask(seen.to(device)))
        size = (len(self.lens) * self.q_len, self.num_kv_heads * self.gqa_ratio, self.head_dim)
        return torch.randn(size, generator=generator).to(self.q_dtype).to(device), cache, table


def options_of(case: Any, keywords: Any, device: torch.device | str) -> dict[str, Any]:
    """The keywords of a call that a case has fields for, without sinks, and the scales of FP8 tensors."""
    options = {name: getattr(case, name) for name in keywords.__annotations__ if hasattr(case, name)}
    options["sinks"] = None
    if case.out_dtype is not None and case.out_dtype.itemsize == 1:
        options["out_scale"] = torch.tensor([OUT_SCALE], device=device)
    if case.q_dtype.itemsize == 1:
        options["q_descale"] = Q_DESCALE
    return options


def reference_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call as its reference gets them: its output is fp32 unless the call's is FP8."""
    if "out_scale" in options:
        return options
    return {name: value for name, value in options.items() if name != "out_dtype"}


def draw_tree(kind: str, batch: int, q_len: int, random: torch.Generator) -> torch.Tensor:
    """Trees of new tokens, `[batch, q_len, q_len]` bool for `pack_tree_mask`.

    Args:
        kind: "chain", each token follows the one before; "star", all follow the first; "random", each follows
            one of those before.
    """
    seen = torch.eye(q_len, dtype=torch.bool).repeat(batch, 1, 1)
    for token in range(1, q_len):
        parents = {
            "chain": torch.full((batch,), token - 1),
            "star": torch.zeros(batch, dtype=torch.long),
            "random": torch.randint(token, (batch,), generator=random),
        }[kind]
        seen[:, token] |= seen[torch.arange(batch), parents]
    return seen


@dataclass(frozen=True)
class DecodeInputs(Inputs):
    """The tensors of a call.

    Attributes:
        q: `[batch * q_len, num_qo_heads, head_dim]`.
        cache, table: the paged cache and its page table.
        options: keyword arguments of `paged_decode` other than `plan`.
        split, kernel, batch_invariant: arguments of `plan_decode`.
    """

    q: torch.Tensor
    cache: PagedKVCache
    table: PageTable
    options: dict[str, Any] = field(default_factory=dict)
    split: str | None = None
    kernel: str | None = None
    batch_invariant: bool = False

    def plan(self, **changes: Any) -> DecodePlan:
        """The plan that the case asks for, with some arguments of `plan_decode` changed."""
        forced = {"split": self.split, "kernel": self.kernel, "batch_invariant": self.batch_invariant}
        return plan_decode(self.q, self.cache, self.table, **forced | changes)

    def call(self, plan: DecodePlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`paged_decode` on these inputs: `(o, lse)`. The output holds NaN before."""
        if plan is None and (self.split or self.kernel or self.batch_invariant):
            plan = self.plan()
        dtype = self.options.get("out_dtype") or wide_dtype(self.q)
        size = (*self.q.shape[:2], self.cache.v_head_dim)
        out = torch.full(size, torch.nan, dtype=dtype, device=self.q.device)
        options = {**self.options, "out": out, "return_lse": True, "plan": plan}
        o, lse = paged_decode(self.q, self.cache, self.table, **options)
        return o, lse

    def prepare(self) -> Callable[[], torch.Tensor]:
        """Plans; the call that it returns runs the plan and gives `o`."""
        run: Any = partial(paged_decode, self.q, self.cache, self.table, **self.options, plan=self.plan())
        prepared: Callable[[], torch.Tensor] = run
        return prepared

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 on the dequantised cache."""
        options = reference_options(self.options)
        o, lse = paged_decode_reference(self.q, self.cache, self.table, **options, return_lse=True)
        return o, lse

    def bytes_per_token(self) -> float:
        """Bytes of K and V that a token takes, over all heads."""
        return self.cache.bytes_per_token()


GLM_GQA12 = DecodeCase(lens=(1024,) * 4, num_kv_heads=8)
"""GLM-4.5-Air's attention, batch 4, context 1024."""
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")
"""Keys in FP8, values in FP4: most of FP4's capacity at a third of its error."""

# Each value alone is one case of the quick sweep; the full one mixes them at random. "k" and "v" are the two
# sides of the field `format`.
AXES: dict[str, tuple[Any, ...]] = {
    "gqa_ratio": (1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 71),
    "head_dim": (64, 80, 96, 128, 192, 256, 320, 512),
    "page_size": (1, 3, 7, 16, 48, 64),
    "layout": LAYOUTS,
    "ragged": (False, True),
    "granularity": DESCALES,
    "k": CACHE_FORMATS,
    "v": CACHE_FORMATS,
    "scale_group": (None, 16, 32),
    "scale_format": ("e8m0", "e4m3"),
    "q_dtype": tuple(QUERIES.values()),
    "out_dtype": tuple(x for x in OUTPUTS.values() if x != torch.float8_e4m3fnuz),  # which AMD alone has
    "q_len": (1, 2, 4, 8, 16),
    "tree": ("", *TREES),
    "window_left": (-1, 0, 5, 40),
    "logits_soft_cap": (0.0, 2.0, 30.0),
    "sinks": (False, True),
    "lens": (
        (64, 37), (1,), (0,), (0, 1, 2), (16, 17, 15), (31, 32, 33), (63, 64, 65), (129, 0, 7), (300, 5),
    ),
    "split": ("", "none", "even", "per_sequence"),
    "outliers": (False, True),
    "clean": (False, True),
    "num_kv_heads": (1, 2, 3),
    "batch_invariant": (False, True),
}  # fmt: skip
_VECTOR_PAGES = (16, 48, 64)


def _mixed(k: str, v: str) -> str | CacheFormat:
    return k if k == v else CacheFormat(k, v)


def mended(case: DecodeCase) -> DecodeCase:
    """The nearest case that a cache can have: some layouts need certain page sizes and formats."""
    k, v = case.formats.k, case.formats.v
    if case.layout == "tokens" and case.page_size != 1:
        case = replace(case, page_size=1)
    if case.layout == "vectorised":
        if case.page_size not in _VECTOR_PAGES:
            case = replace(case, page_size=16)
        if case.head_dim % 16:
            case = replace(case, head_dim=64)
    if case.layout == "concat" or {k, v} == {"bf16", "fp16"}:
        case = replace(case, format=k)
    if case.q_dtype.itemsize == 1 and {get_format(name).kind for name in (k, v)} != {"fp8"}:
        case = replace(case, q_dtype=torch.bfloat16)
    if "fp4_e2m1" not in (case.formats.k, case.formats.v):
        case = replace(case, scale_group=None, scale_format="e8m0")
    if case.layout == "vectorised" and any(get_format(name).is_packed for name in (k, v)):
        case = replace(case, layout="HND")
    if case.batch_invariant:  # its splits may not be forced
        case = replace(case, split="")
    if case.q_len * case.gqa_ratio > 256:
        case = replace(case, q_len=2)
    if case.scale_group and case.head_dim % case.scale_group:
        case = replace(case, head_dim=64)
    return case


def one_at_a_time() -> Iterator[DecodeCase]:
    """The default case, and each value of each axis alone; a cache format also for K and V alike."""
    base = DecodeCase()
    yield base
    sides: dict[str, list[Any]] = {
        "k": [_mixed(k, base.formats.v) for k in AXES["k"]],
        "v": [_mixed(base.formats.k, v) for v in AXES["v"]],
    }
    for name, values in AXES.items():
        axis = {"format": sides[name]} if name in sides else {name: values}
        yield from map(mended, each_alone(base, axis))
    yield from (DecodeCase(head_dim=192, v_head_dim=128, format=name) for name in ("bf16", "fp8_e4m3fn"))
    for fmt in AXES["k"]:
        yield DecodeCase(format=fmt)
    for fmt in ("fp4_e2m1", K8V4):
        yield from (
            DecodeCase(format=fmt, scale_group=group, scale_format=scale)
            for group, scale in ((32, "e8m0"), (16, "e8m0"), (16, "e4m3"), (32, "e4m3"), (None, "e4m3"))
        )
    yield DecodeCase(format=CacheFormat(k="int8", v="int4"), granularity="token_head")
    yield DecodeCase(format="int8", granularity="token_head")
    yield DecodeCase(format="fp4_e2m1", page_size=1, gqa_ratio=17, q_len=2)


def at_random(count: int, seed: int) -> Iterator[DecodeCase]:
    """Cases with every axis drawn at random; half of them with one format for K and V."""
    draw = random.Random(seed)
    for number in range(count):
        values = {name: draw.choice(choices) for name, choices in AXES.items()}
        k, v = values.pop("k"), values.pop("v")
        if values["gqa_ratio"] > 16:
            values["num_kv_heads"] = 1
        values["format"] = _mixed(k, k if number % 2 else v)
        yield mended(DecodeCase(**values, seed=draw.randrange(2**31)))


def sweep(*, full: bool = False, seed: int = 0) -> list[DecodeCase]:
    """The cases of a sweep, each once: each value of each axis alone, and random mixtures."""
    cases = [*one_at_a_time(), *at_random(FULL_RANDOM_CASES if full else QUICK_RANDOM_CASES, seed)]
    return list(dict.fromkeys(cases))


def of_contract(contract: Contract, shape: Shape, clean: bool) -> DecodeCase:
    """The decode that a contract asks for."""
    return DecodeCase(
        lens=(shape.context,) * shape.batch, q_len=shape.q_len, q_dtype=QUERIES[contract.q],
        **fields_of_contract(contract, shape, clean),
    )  # fmt: skip


def families(target: str) -> dict[str, DecodeCase]:
    """A case of each family of kernels."""
    traced: dict[str, Any] = {"lens": (1024,), "num_kv_heads": 1, "split": "none"}
    return {
        "decode, E4M3FN": DecodeCase(clean=True, **traced),
        "decode, E4M3FNUZ": DecodeCase(format="fp8_e4m3fnuz", **traced),
        "decode, bf16": DecodeCase(format="bf16", **traced),
    }


def shipped(target: str = "") -> list[DecodeCase]:
    """A call for every kind of shipped configuration: formats, head_dims, ratios, tokens, short and long."""
    ways = [
        *(DecodeCase(format=name) for name in (*CACHE_FORMATS, K8V4)),
        DecodeCase(format="fp4_e2m1", scale_group=32),
        DecodeCase(q_dtype=torch.float8_e4m3fn),
        *(DecodeCase(head_dim=head_dim) for head_dim in (64, 256, 512)),
        DecodeCase(gqa_ratio=1),
    ]
    sizes = [((37, 64), 1), ((37, 64), 4), ((2048,), 1), ((2048,), 4)]
    return [
        replace(way, lens=lens, q_len=q_len, num_kv_heads=2, clean=True)
        for way in ways
        for lens, q_len in sizes
    ]


def tile_bytes(inputs: DecodeInputs, target: str) -> tuple[float, str]:
    """HBM bytes of one pass of the hot loop by one workgroup, and the plan in words."""
    q, cache, table = inputs.q, inputs.cache, inputs.table
    forced = inputs.split or inputs.kernel
    with compile_for(target):
        plan = inputs.plan() if forced else plan_for_call(q, cache, table, batch_invariant=False)
    config, shape = plan.config, plan.shape
    row_bytes = cache.bytes_per_token() / cache.num_kv_heads
    row_blocks = -(-shape.q_len * shape.gqa_ratio // config.block_m)
    # Row blocks of one KV head read the same keys: HBM gives them once, a cache the other times.
    return config.block_n * row_bytes / row_blocks, plan.explain()


CASES = Cases(
    case=DecodeCase,
    bounds={"relative_l1": BOUND},
    sweep=lambda target, full, seed: sweep(full=full, seed=seed),
    of_contract=of_contract,
    families=families,
    shipped=shipped,
    tile_bytes=tile_bytes,
)

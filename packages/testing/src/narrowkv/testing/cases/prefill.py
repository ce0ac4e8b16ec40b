"""Cases of prefill: axes, seeded inputs and bounds, for tests, `validate`, `probe` and `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.attn_prefill.api import batch_prefill, prefill_append
from narrowkv.attn_prefill.arguments import AppendOptions, PrefillOptions
from narrowkv.attn_prefill.config import APPEND_KERNELS, KERNELS
from narrowkv.attn_prefill.plan import PrefillPlan
from narrowkv.attn_prefill.planning import plan_append, plan_prefill
from narrowkv.attn_prefill.reference import batch_prefill_reference, prefill_append_reference
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, Rope, append
from narrowkv.runtime.errors import wide_dtype
from narrowkv.runtime.targets import Target, get_target
from narrowkv.testing.cases import CaseError, Inputs, decode, each_alone, named, unknown, word_of
from narrowkv.testing.cases import cache as cases
from narrowkv.testing.operation import BOUND_FP8_COMPUTE, Cases, Contract, Shape

__all__ = ["CASES", "PrefillCase", "PrefillInputs", "shipped", "sweep"]

BOUND_FP8_QUERY = BOUND_FP8_COMPUTE
"""Bound on the relative L1 error if P is rounded to FP8 for PV; kernel "dense" rounds it to float16."""
BOUND_TWO_FP8_TERMS = 0.004
"""Bound if queries and P are sums of two FP8 terms, eight bits; rounding the queries changes lse."""
LSE_BOUND_TWO_FP8_TERMS = 4e-3

QUERIES = decode.QUERIES
Lens = tuple[int, ...]
_OPERATION_KERNELS = {"prefill": KERNELS, "append": APPEND_KERNELS}
_NOT_OF_PREFILL = ("rope", "fp8_compute")
_NOT_OF_APPEND = ("ragged", "causal", "window_right", "batch_invariant")
_I32 = torch.int32


@dataclass(frozen=True, kw_only=True)
class PrefillCase(cases.CacheCase):
    """One `batch_prefill` or `prefill_append`: a cache, and sizes and options of the call.

    Attributes:
        operation: "prefill" or "append".
        kernel: forces one of the operation's kernels; empty leaves it to the target.
        q_lens: query tokens of each sequence; `lens` counts the keys, the new ones included.
        gqa_ratio: query heads for each KV head.
        q_dtype: bf16 or fp16, or FP8 for a prefill; out_dtype: of the output, None for q's.
        fp8_compute: option of an append.
        causal, window_left, window_right, logits_soft_cap, sinks, batch_invariant: options; -1 and 0 are off.
        num_splits: forces how many programs share a tile's keys; 0 leaves it to the plan.
        rope: of an append: "neox", "gptj" or None; rotary_dim: the columns that it rotates.

    Raises:
        CaseError: fields that do not go together.
    """

    operation: str = named("prefill", words=tuple(_OPERATION_KERNELS))
    kernel: str = named("", words=("", *KERNELS, *APPEND_KERNELS))
    q_lens: Lens = (5, 1, 25)
    lens: Lens = (20, 5, 70)
    num_kv_heads: int = named(1, "kv_heads")
    head_dim: int = 64
    gqa_ratio: int = named(3, "ratio")
    q_dtype: torch.dtype = named(torch.bfloat16, "q", QUERIES)
    out_dtype: torch.dtype | None = named(None, "out", decode.OUTPUTS)
    fp8_compute: bool = False
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = named(0.0, "soft_cap")
    sinks: bool = False
    batch_invariant: bool = False
    num_splits: int = named(0, "splits")
    rope: str | None = named(None, words={"": None, "neox": "neox", "gptj": "gptj"})
    rotary_dim: int = 32

    def __post_init__(self) -> None:
        if self.kernel not in ("", *_OPERATION_KERNELS[self.operation]):
            raise unknown("kernel", self.kernel, _OPERATION_KERNELS[self.operation])
        if len(self.q_lens) != len(self.lens):
            raise CaseError(f"q_lens and lens must have a number for each sequence, got {self.q_lens}")
        if self.appends and any(new > full for new, full in zip(self.q_lens, self.lens, strict=True)):
            raise CaseError(f"lens must count an append's new tokens too, got {self.lens}")
        for name in _NOT_OF_APPEND if self.appends else _NOT_OF_PREFILL:
            if getattr(self, name) != getattr(type(self), name):
                raise CaseError(f"{name} is not an option of operation {self.operation}")
        if self.appends and self.q_dtype.itemsize == 1:
            raise CaseError("q must be bf16 or fp16 for operation append")

    @property
    def appends(self) -> bool:
        """Whether the call stores new tokens."""
        return self.operation == "append"

    @property
    def native_fp8(self) -> str:
        """The FP8 format that is multiplied without widening, or None."""
        return self.formats.k if self.fp8_compute or self.q_dtype.itemsize == 1 else ""

    @property
    def bound(self) -> float:
        """The largest relative L1 error that passes."""
        if self.fp8_compute:
            return BOUND_TWO_FP8_TERMS
        return BOUND_FP8_QUERY if self.q_dtype.itemsize == 1 and self.kernel != "dense" else decode.BOUND

    @property
    def lse_bound(self) -> float:
        """The largest difference of lse that passes."""
        return LSE_BOUND_TWO_FP8_TERMS if self.fp8_compute else decode.LSE_BOUND

    @classmethod
    def small(cls, q_lens: Lens = (5, 1, 25), lens: Lens = (20, 5, 70), **changes: Any) -> PrefillCase:
        """A case that the interpreter runs in a moment, with some fields changed; most tests vary it."""
        return cls(q_lens=q_lens, lens=lens, **{"num_kv_heads": 2, **changes})

    @classmethod
    def append(cls, q_lens: Lens = (5, 1, 25), lens: Lens = (20, 5, 70), **changes: Any) -> PrefillCase:
        """A small append of `q_lens` new tokens to sequences that hold `lens` tokens before it."""
        full = tuple(new + old for new, old in zip(q_lens, lens, strict=True))
        return cls.small(q_lens, full, operation="append", **changes)

    @property
    def kind(self) -> tuple[str, str]:
        """The query's format, and operation and cache, for tables."""
        q = word_of(self, "q_dtype")
        return f"{q}, fp8_compute" if self.fp8_compute else q, f"{self.operation}, {self.format_name}"

    def build(
        self, device: torch.device | str = "cpu", seed: int | None = None
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable, torch.Tensor]:
        """q, cache, page table, cu_seqlens_q. Seeds torch's generator. Raises what `cache` raises."""
        generator = torch.manual_seed(self.seed if seed is None else seed)
        cache, table = self.cache(generator, device)
        size = sum(self.q_lens), self.num_kv_heads * self.gqa_ratio, self.head_dim
        q = torch.randn(size, generator=generator)
        starts = torch.tensor([0, *self.q_lens], dtype=_I32).cumsum(0).to(device, _I32)
        return q.to(self.q_dtype).to(device), cache, table, starts

    def build_append(
        self, device: torch.device | str = "cpu", seed: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedKVCache, PageTable, torch.Tensor, Rope | None]:
        """q, k_new, v_new, cache, page table, cu_seqlens_q and the rotary embedding.

        Every byte of the cache that is not an old token's is NaN unless it is clean.
        """
        q, cache, table, starts = self.build(device, seed)
        old = tuple(full - new for full, new in zip(self.lens, self.q_lens, strict=True))
        before = torch.tensor(old, dtype=_I32, device=device)
        table = PageTable.from_block_table(table.page_ids, cached_lens=before, page_size=self.page_size)
        if not self.clean:
            cases.poison_from(cache, table, self.lens)
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        k_new, v_new = (
            torch.randn(q.shape[0], self.num_kv_heads, width, generator=generator).to(self.q_dtype).to(device)
            for width in (cache.head_dim, cache.v_head_dim)
        )
        ranges = [begin + torch.arange(n) for begin, n in zip(old, self.q_lens, strict=True)]
        rope = None
        if self.rope is not None:
            rope = cases.random_rope(self.rope, self.rotary_dim, torch.cat(ranges), generator, device)
        return q, k_new, v_new, cache, table, starts, rope

    def inputs(self, device: str = "cpu") -> PrefillInputs:
        """The tensors with the options of the call. Raises what `build` raises."""
        options = decode.options_of(self, AppendOptions if self.appends else PrefillOptions, device)
        if self.appends:
            q, k_new, v_new, cache, table, starts, options["rope"] = self.build_append(device)
            before = cases.copy_cache(cache)
            inputs = PrefillInputs(self, q, cache, table, starts, options, (k_new, v_new), before)
        else:
            inputs = PrefillInputs(self, *self.build(device), options)
        if self.sinks:
            options["sinks"] = torch.randn(inputs.q.shape[1]).to(device)
        return inputs


@dataclass(frozen=True)
class PrefillInputs(Inputs):
    """The tensors of a case and how the operation is called with them.

    Attributes:
        case: it.
        q, cache, table, starts: as the operations take them.
        options: keyword arguments that the reference has too.
        new: of an append: k_new and v_new.
        wanted: of an append: the cache before it; `reference` appends here what the operation must store.
    """

    case: PrefillCase
    q: torch.Tensor
    cache: PagedKVCache
    table: PageTable
    starts: torch.Tensor
    options: dict[str, Any]
    new: tuple[torch.Tensor, ...] = ()
    wanted: PagedKVCache | None = field(repr=False, default=None)

    def plan(self, **changes: Any) -> PrefillPlan:
        """The plan that the case asks for, with some arguments of the planning function changed."""
        case = self.case
        arguments = self.q, self.cache, self.table, self.starts
        forced = {"kernel": case.kernel or None, "num_splits": case.num_splits or None}
        if case.appends:
            return plan_append(*arguments, fp8_compute=case.fp8_compute, **forced | changes)
        # Only a caller who knows that every sequence has one query can have decode.
        forced |= {
            "max_q_len": 1 if case.kernel == "decode" else None,
            "batch_invariant": case.batch_invariant,
        }
        return plan_prefill(*arguments, **forced | changes)

    def call(self, plan: PrefillPlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The case's operation: `(o, lse)`. Scratch holds NaN before, and the output where it is given."""
        plan = plan or self.plan()
        poison_plan(plan)
        dtype = self.case.out_dtype or wide_dtype(self.q)
        size = (*self.q.shape[:2], self.cache.v_head_dim)
        out = torch.full(size, torch.nan, dtype=dtype, device=self.q.device)
        o, lse = self.run(plan, return_lse=True, **({} if self.case.appends else {"out": out}))
        return o, lse

    def run(self, plan: PrefillPlan, **options: Any) -> Any:
        """The case's operation by a plan."""
        options = {**self.options, **options, "plan": plan}
        if self.case.appends:
            k_new, v_new = self.new
            return prefill_append(
                self.q, k_new, v_new, self.cache, self.table, self.starts, fp8_compute=self.case.fp8_compute,
                **options,
            )  # fmt: skip
        return batch_prefill(self.q, self.cache, self.table, self.starts, **options)

    def prepare(self) -> Callable[[], torch.Tensor]:
        """Plans; the call that it returns gives `o`. Every call of an append stores the same tokens."""
        return partial(self.run, self.plan())

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 on the dequantised cache."""
        options = {**decode.reference_options(self.options), "return_lse": True}
        if self.wanted is not None:
            k_new, v_new = self.new
            o, lse = prefill_append_reference(
                self.q, k_new, v_new, self.wanted, self.table, self.starts, **options
            )
            return o, lse
        o, lse = batch_prefill_reference(self.q, self.cache, self.table, self.starts, **options)
        return o, lse

    def wrong_bytes(self) -> str:
        """After `call` and `reference`: where the cache is not what an append must leave; empty if it is."""
        if self.wanted is None:
            return ""
        differ = cases.differing_bytes(self.cache, self.wanted)
        return ", ".join(f"{count} bytes of {name} stored wrongly" for name, count in differ.items())

    def bytes_per_token(self) -> float:
        """Bytes of K and V that a token takes, over all heads."""
        return self.cache.bytes_per_token()


def poison_plan(plan: PrefillPlan) -> None:
    """Makes a plan's scratch and partial results NaN, so that reading what was not written shows."""
    if plan.workspace is not None:
        (memory,) = plan.workspace.carve([((plan.workspace.num_bytes,), torch.uint8)])
        memory.fill_(0xFF)


FORMATS = ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1", decode.K8V4)
_PREFILLS = tuple(PrefillCase(kernel=kernel) for kernel in ("dense", "fused"))
_APPENDS = tuple(PrefillCase(operation="append", kernel=kernel) for kernel in ("append_then_attend", "fused"))
_ON_FP8_MATRIX_UNITS = (
    PrefillCase(q_dtype=torch.float8_e4m3fn),
    PrefillCase(q_dtype=torch.float8_e4m3fnuz, format="fp8_e4m3fnuz"),
    PrefillCase(operation="append", fp8_compute=True),
    PrefillCase(operation="append", fp8_compute=True, format="fp8_e4m3fnuz"),
)

# Each value alone, with every kernel, is a case of the quick sweep, and so are these combinations.
AXES: dict[str, tuple[Any, ...]] = {
    "format": ("bf16", "fp16", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1", decode.K8V4, "int8", "int4"),
    "q_dtype": (torch.float16,),
    "out_dtype": (torch.float8_e4m3fn,),
    "layout": ("HND", "concat", "vectorised", "padded"),
    "page_size": (1, 3, 32, 64, 128),
    "head_dim": (80, 96, 112, 128, 192, 256, 320, 512),
    "gqa_ratio": (1, 2, 5, 7, 8, 12, 71),
    "num_kv_heads": (2,),
    "granularity": ("tensor", "head", "token_head"),
    "window_left": (0, 12, 1000),
    "logits_soft_cap": (3.0,),
    "sinks": (True,),
    "clean": (True,),
}
Changes = tuple[dict[str, Any], ...]
OF_BOTH: Changes = (
    {"format": "fp4_e2m1", "scale_group": 32},
    {"format": "fp4_e2m1", "scale_group": 16, "scale_format": "e4m3"},
    {"format": "int8", "granularity": "token_head"},
    {"format": CacheFormat(k="int8", v="int4")},
    {"q_dtype": torch.float16, "format": "fp16"},
    {"layout": "tokens", "page_size": 1},
    {"num_splits": 3, "lens": (20, 5, 200)},
    {"q_lens": (1, 1, 1), "lens": (1, 16, 17)},
    {"q_lens": (0, 5, 0), "lens": (20, 5, 0)},
    {"q_lens": (1, 40, 2), "lens": (65, 64, 63)},
    *({"head_dim": 192, "v_head_dim": 128, "format": name} for name in ("bf16", "fp8_e4m3fn")),
)
OF_PREFILL: Changes = (
    *({"granularity": name} for name in ("sequence_head", "page_head")),
    {"ragged": True},
    {"causal": False},
    {"causal": False, "window_right": 5},
    {"causal": False, "window_left": 30, "window_right": 9},
    {"q_lens": (7, 3), "lens": (2, 0)},  # more queries than keys
)
OF_APPEND: Changes = (
    {"rope": "neox"},
    {"rope": "gptj"},
    {"q_lens": (20, 3, 9), "lens": (27, 3, 75)},  # chunks that begin inside a page
    {"q_lens": (9, 0, 70), "lens": (139, 40, 70)},
)
# The quick sweep has these for cases with FP8 products; the full sweep mixes all axes.
_MASKS: Changes = (
    {},
    {"window_left": 12, "sinks": True},
    {"logits_soft_cap": 3.0, "num_splits": 3},
    {"clean": True, "granularity": "head"},
)
_PAGE_3 = {"page_size": 3}
_SIZES: Changes = (
    {},
    {"q_lens": (40, 9), "lens": (140, 70), "gqa_ratio": 12, "head_dim": 128, "page_size": 1},
    {"q_lens": (3, 17, 1), "lens": (3, 80, 33), "num_kv_heads": 2, "gqa_ratio": 5, "head_dim": 96, **_PAGE_3},
    {"q_lens": (33,), "lens": (300,), "gqa_ratio": 8, "head_dim": 256, "page_size": 64},
)
_FORMATS: Changes = (
    *({"format": name} for name in (*FORMATS, "fp8_e5m2", "int8", "int4")),
    {"format": decode.K8V4, "scale_group": 32},
)


def quick() -> Iterator[PrefillCase]:
    """The default case of each operation and kernel, and each value of each axis alone."""
    yield from (PrefillCase(), PrefillCase(operation="append"))
    yield PrefillCase(kernel="decode", q_lens=(1, 1, 1))
    yield from (PrefillCase(batch_invariant=True, format=name) for name in FORMATS)
    for way in (*_PREFILLS, *_APPENDS):
        yield from each_alone(way, AXES)
        for change in ({}, *OF_BOTH, *(OF_APPEND if way.appends else OF_PREFILL)):
            yield replace(way, **change)
    for way, change in product(_ON_FP8_MATRIX_UNITS, _MASKS):
        yield replace(way, **change)


def full() -> Iterator[PrefillCase]:
    """Kernels by formats, sizes and options."""
    for way, fmt in product((*_PREFILLS, *_APPENDS), _FORMATS):
        for sizes, mask in product(_SIZES, _MASKS):
            yield replace(way, **fmt, **sizes, **mask)
    for way, sizes, mask in product(_ON_FP8_MATRIX_UNITS, _SIZES, _MASKS):
        yield replace(way, **sizes, **mask)


def can_be(case: PrefillCase) -> bool:
    """Whether the operation has such calls: one scratch holds old and new keys unless an append is fused."""
    k = case.formats.k
    return case.kernel != "append_then_attend" or k not in ("bf16", "fp16") or k == word_of(case, "q_dtype")


def serves(case: PrefillCase, target: Target) -> bool:
    """Whether a target has the case's kernel and FP8 matrix units of its format."""
    if case.native_fp8 in ("", target.native_fp8) or target.native_fp8 is None:
        return True
    return target.name == "gfx942" and case.native_fp8 == "fp8_e4m3fn"  # read as FNUZ, half of it


def sweep(target: Target, *, everything: bool = False) -> list[PrefillCase]:
    """The cases of a sweep that a target serves, each once."""
    found = dict.fromkeys([*quick(), *(full() if everything else ())])
    return [case for case in found if can_be(case) and serves(case, target)]


HEAD_DIMS = (128, 64)
# A chunk over a prefix, with so many programs that no tile's keys are split.
_CALL = PrefillCase(q_lens=(1024,), lens=(4096,), num_kv_heads=8, gqa_ratio=12, clean=True)
_APPEND = replace(_CALL, operation="append", kernel="fused")


def shipped(target: str) -> list[PrefillCase]:
    """A call for every shipped configuration of a target: kernels, formats, head_dims."""
    ways = [replace(_CALL, kernel="dense"), replace(_CALL, kernel="fused"), _APPEND]
    ways.append(replace(_APPEND, kernel="append_then_attend"))
    calls = [replace(way, format=name) for way in ways for name in FORMATS]
    for name in ("fp8_e4m3fn", "fp8_e4m3fnuz"):
        calls += [
            replace(_CALL, kernel="fused", q_dtype=QUERIES[name], format=name),
            replace(_APPEND, fp8_compute=True, format=name),
        ]
    return [
        replace(case, head_dim=head_dim)
        for head_dim in HEAD_DIMS
        for case in calls
        if serves(case, get_target(target))
    ]


def of_contract(contract: Contract, shape: Shape, clean: bool) -> PrefillCase:
    """The call that a contract asks for; `q_len` new tokens of an append follow `context` older ones."""
    appends = contract.operation == "prefill_append"
    length = shape.context + shape.q_len if appends else shape.context
    return PrefillCase(
        operation="append" if appends else "prefill", ragged=not appends, q_dtype=QUERIES[contract.q],
        q_lens=(shape.q_len,) * shape.batch, lens=(length,) * shape.batch,
        **cases.fields_of_contract(contract, shape, clean),
    )  # fmt: skip


_TRACED = PrefillCase(q_lens=(256,), lens=(1024,), num_kv_heads=1, gqa_ratio=4, clean=True)
_APPEND_ALONE = "append to the cache"


def _append_alone() -> None:
    inputs = replace(_TRACED, operation="append").inputs()
    k_new, v_new = inputs.new
    append(inputs.cache, k_new, v_new, torch.arange(k_new.shape[0], dtype=_I32))


def families(target: str) -> dict[str, Any]:
    """A case of each family of kernels, and a call that only appends."""
    fp8 = "fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3fn"
    fused = replace(_TRACED, kernel="fused")
    return {
        "dense prefill": replace(_TRACED, kernel="dense"),
        "fused prefill": fused,
        # In splits of these keys the loop makes too few passes to be timed.
        "prefill, FP8 queries": replace(fused, q_dtype=QUERIES[fp8], format=fp8, num_splits=1),
        "append, then attend": replace(_TRACED, operation="append", kernel="append_then_attend"),
        "append, fused": replace(_TRACED, operation="append", kernel="fused"),
        _APPEND_ALONE: _append_alone,
    }


CASES = Cases(
    case=PrefillCase,
    bounds={
        "relative_l1": decode.BOUND,
        "with Q in FP8": BOUND_FP8_QUERY,
        "with fp8_compute": BOUND_TWO_FP8_TERMS,
    },
    sweep=lambda target, full, seed: sweep(target, everything=full),
    of_contract=of_contract,
    families=families,
    hbm_shares={_APPEND_ALONE: 1.0},
    shipped=shipped,
    columns={
        "operation": lambda case: case.operation,
        "Q": lambda case: case.kind[0],
        "cache": lambda case: case.format_name,
        "head_dim": lambda case: case.head_dim,
    },
)

"""One prefill call as text and as tensors; see `narrowkv.cli.cases` for the form of the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from narrowkv.attn_decode.workloads import WorkloadError
from narrowkv.attn_prefill import (
    PrefillPlan,
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
    prefill_append_reference,
)
from narrowkv.attn_prefill.config import APPEND_KERNELS, KERNELS
from narrowkv.attn_prefill.workloads import (
    AppendWorkload,
    PrefillWorkload,
    copy_cache,
    differing_bytes,
    poison_plan,
)
from narrowkv.cli.cases import (
    LSE_BOUND,
    CaseResult,
    check,
    parse_case,
    parse_format,
    parse_lens,
    spell_case,
)
from narrowkv.cli.contracts import BOUND_16_BIT_QUERY, BOUND_FP8_COMPUTE
from narrowkv.cli.names import unknown
from narrowkv.cli.places import Place
from narrowkv.cli.report import UsageError
from narrowkv.cli.validate import AXES as DECODE_AXES
from narrowkv.cli.validate import Kind
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.targets import Target

# Queries and P are held in two FP8 terms, eight bits; lse is off by what the queries lose.
BOUND_TWO_FP8_TERMS = 0.004
LSE_BOUND_TWO_FP8_TERMS = 4e-3

QUERIES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
_Q_DESCALE = 0.5  # of FP8 queries: not 1, so that forgetting it shows
_OPERATION_KERNELS = {"prefill": KERNELS, "append": APPEND_KERNELS}


@dataclass(frozen=True)
class PrefillCase:
    """Sizes, formats and options of one `batch_prefill` or `prefill_append`.

    Attributes:
        operation: "prefill" or "append".
        kernel: forces one of the operation's kernels; empty leaves it to the target.
        q_lens: query tokens of each sequence, joined by "+".
        lens: keys of each sequence, the new ones included.
        kv_heads, ratio, head_dim: sizes.
        page_size, layout: of the cache; a layout may be "padded": NHD with strided heads and an offset.
        format: of the cache: "K", "K/V" or "K/V:GROUP".
        q: "bf16", "fp16", or the FP8 format of a prefill's queries.
        fp8_compute: option of an append.
        descale: "float" or a granularity. FP4 has its scales.
        table: "block_table" or, of a prefill, "ragged".
        causal, window_left, window_right, soft_cap, sinks: options; windows of -1 and a cap of 0 are off.
        splits: forces how many programs share a tile's keys; 0 leaves it to the plan.
        rope: of an append: "neox", "gptj" or empty.
        clean: whether the cache is declared free of negative zeros and NaN; otherwise unused slots hold NaN.
        seed: of the inputs.
    """

    operation: str = "prefill"
    kernel: str = ""
    q_lens: str = "5+1+25"
    lens: str = "20+5+70"
    kv_heads: int = 1
    ratio: int = 3
    head_dim: int = 64
    page_size: int = 16
    layout: str = "NHD"
    format: str = "fp8_e4m3fn"
    q: str = "bf16"
    fp8_compute: bool = False
    descale: str = "float"
    table: str = "block_table"
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    splits: int = 0
    rope: str = ""
    clean: bool = False
    seed: int = 0

    @property
    def appends(self) -> bool:
        """Whether the call stores new tokens."""
        return self.operation == "append"

    @property
    def fp8_unit(self) -> str:
        """The FP8 format that is multiplied as it is stored, or nothing."""
        return self.format if self.fp8_compute or self.q.startswith("fp8_") else ""

    @property
    def bound(self) -> float:
        """The largest relative L1 error that passes."""
        if self.fp8_compute:
            return BOUND_TWO_FP8_TERMS
        return BOUND_FP8_COMPUTE if self.q.startswith("fp8_") else BOUND_16_BIT_QUERY

    @property
    def lse_bound(self) -> float:
        """The largest difference of lse that passes."""
        return LSE_BOUND_TWO_FP8_TERMS if self.fp8_compute else LSE_BOUND

    def __str__(self) -> str:
        return spell_case(self)

    @classmethod
    def parse(cls, text: str) -> PrefillCase:
        """The case that `str` spells.

        Raises:
            UsageError: naming the part that is wrong and what is known.
        """
        case = parse_case(cls, text)
        for name, known in (
            ("operation", tuple(_OPERATION_KERNELS)),
            ("kernel", ("", *_OPERATION_KERNELS.get(case.operation, ()))),
            ("layout", DECODE_AXES["layout"]),
            ("descale", DECODE_AXES["descale"]),
            ("q", tuple(QUERIES)),
            ("table", DECODE_AXES["table"]),
            ("rope", ("", "neox", "gptj")),
        ):
            value = getattr(case, name)
            if value not in known:
                raise unknown(f"--case {name}", value, [word or "empty" for word in known])
        q_lens, lens = parse_lens("q_lens", case.q_lens), parse_lens("lens", case.lens)
        if len(q_lens) != len(lens):
            raise UsageError(f"--case q_lens and lens must have a number for each sequence, got {text!r}")
        if case.appends and any(new > full for new, full in zip(q_lens, lens, strict=True)):
            raise UsageError(f"--case lens must count an append's new tokens too, got {text!r}")
        others = ("q", "table", "causal", "window_right") if case.appends else ("rope", "fp8_compute")
        for name in others:
            value, default = getattr(case, name), getattr(cls, name)
            if value != default and (name, value) != ("q", "fp16"):
                raise UsageError(f"--case {name}={value} is not of operation {case.operation}")
        try:
            parse_format(case.format)
        except UsageError as error:
            raise UsageError(f"--case format: {error}") from None
        return case


@dataclass(frozen=True)
class PrefillCall:
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

    def plan(self) -> PrefillPlan:
        """The plan that the case asks for."""
        case = self.case
        arguments = self.q, self.cache, self.table, self.starts
        forced: dict[str, Any] = {"kernel": case.kernel or None, "num_splits": case.splits or None}
        if case.appends:
            return plan_append(*arguments, fp8_compute=case.fp8_compute, **forced)
        # Only a caller who knows that every sequence has one query can have decode.
        return plan_prefill(*arguments, max_q_len=1 if case.kernel == "decode" else None, **forced)

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The case's operation: `(o, lse)`. Scratch holds NaN before, and the output where it is given."""
        plan = self.plan()
        poison_plan(plan)
        options = {**self.options, "return_lse": True, "plan": plan}
        if self.case.appends:
            k_new, v_new = self.new
            o, lse = prefill_append(
                self.q, k_new, v_new, self.cache, self.table, self.starts,
                fp8_compute=self.case.fp8_compute, **options,
            )  # fmt: skip
            return o, lse
        dtype = self.q.dtype if self.q.dtype.itemsize == 2 else torch.bfloat16
        out = torch.full(self.q.shape, torch.nan, dtype=dtype, device=self.q.device)
        o, lse = batch_prefill(self.q, self.cache, self.table, self.starts, out=out, **options)
        return o, lse

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 on the dequantised cache."""
        options = {**self.options, "return_lse": True}
        if self.wanted is not None:
            k_new, v_new = self.new
            o, lse = prefill_append_reference(
                self.q, k_new, v_new, self.wanted, self.table, self.starts, **options
            )
            return o, lse
        o, lse = batch_prefill_reference(self.q, self.cache, self.table, self.starts, **options)
        return o, lse

    def wrongly_stored(self) -> str:
        """After `call` and `reference`: where the cache is not what an append must leave; empty if it is."""
        if self.wanted is None:
            return ""
        differ = differing_bytes(self.cache, self.wanted)
        return ", ".join(f"{count} bytes of {name} stored wrongly" for name, count in differ.items())

    def bytes_per_token(self) -> float:
        """Bytes of K and V that a token takes, over all heads."""
        return self.cache.bytes_per_token()


def build(case: PrefillCase, device: str = "cpu") -> PrefillCall:
    """The tensors of a case.

    Raises:
        UsageError: a layout that does not go with the sizes or formats.
        ValueError, TypeError: what the cache says to formats, layouts or sizes that it does not take.
    """
    fmt, group = parse_format(case.format)
    q_lens, lens = parse_lens("q_lens", case.q_lens), parse_lens("lens", case.lens)
    fields: dict[str, Any] = {
        "q_lens": q_lens,
        "num_kv_heads": case.kv_heads,
        "gqa_ratio": case.ratio,
        "head_dim": case.head_dim,
        "page_size": case.page_size,
        "layout": case.layout,
        "format": fmt,
        "scale_group": group or None,
        "q_dtype": QUERIES[case.q],
        "granularity": case.descale,
        "ragged": case.table == "ragged",
        "clean": case.clean,
    }
    random = torch.Generator().manual_seed(case.seed)
    sinks = torch.randn(case.kv_heads * case.ratio, generator=random).to(device) if case.sinks else None
    options: dict[str, Any] = {
        "logits_soft_cap": case.soft_cap,
        "window_left": case.window_left,
        "sinks": sinks,
    }
    try:
        if not case.appends:
            q, cache, table, starts = PrefillWorkload(lens=lens, **fields).build(device, case.seed)
            options |= {"causal": case.causal, "window_right": case.window_right}
            if q.dtype.itemsize == 1:
                options["q_descale"] = _Q_DESCALE
            return PrefillCall(case, q, cache, table, starts, options)
        old = tuple(full - new for full, new in zip(lens, q_lens, strict=True))
        workload = AppendWorkload(lens=old, rope=case.rope or None, **fields)
        q, k_new, v_new, cache, table, starts, rope = workload.build_append(device, case.seed)
    except WorkloadError as error:
        raise UsageError(f"--case {error}") from None
    rotation: dict[str, Rope | None] = {"rope": rope}
    return PrefillCall(case, q, cache, table, starts, options | rotation, (k_new, v_new), copy_cache(cache))


def run(case: PrefillCase, place: Place) -> CaseResult:
    """Runs a case at a place and compares what it gives, and what it stores, with the reference."""
    call = build(case, place.device)
    with place.context():
        results = call.call()
    result = check(case, call, case.bound, lambda: results, case.lse_bound)
    if stored := call.wrongly_stored():
        detail = "; ".join(filter(None, (result.detail, stored)))
        result = replace(result, passed=False, detail=detail)
    return result


_PREFILLS = (PrefillCase(kernel="dense"), PrefillCase(kernel="fused"))
_APPENDS = (
    PrefillCase(operation="append", kernel="append_then_attend"),
    PrefillCase(operation="append", kernel="fused"),
)
# Queries in FP8, or old tokens on FP8 matrix units.
_FP8_UNITS = (
    PrefillCase(q="fp8_e4m3fn"),
    PrefillCase(q="fp8_e4m3fnuz", format="fp8_e4m3fnuz"),
    PrefillCase(operation="append", fp8_compute=True),
    PrefillCase(operation="append", fp8_compute=True, format="fp8_e4m3fnuz"),
)

Changes = tuple[dict[str, Any], ...]
# Each of these alone, and with every kernel, is a case of the quick sweep.
OF_BOTH: Changes = (
    *({"format": name} for name in ("bf16", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1")),
    *({"format": name} for name in ("fp8_e4m3fn/fp4_e2m1", "fp4_e2m1:32", "fp16")),
    {"q": "fp16"},
    {"q": "fp16", "format": "fp16"},
    *({"layout": name} for name in ("HND", "concat", "vectorised", "padded")),
    {"layout": "tokens", "page_size": 1},
    *({"page_size": n} for n in (1, 3, 32, 64, 128)),
    *({"head_dim": n} for n in (80, 96, 128, 192, 256)),
    *({"ratio": n} for n in (1, 2, 5, 7, 8, 12, 71)),
    {"kv_heads": 2},
    *({"descale": name} for name in ("tensor", "head", "token_head")),
    *({"window_left": n} for n in (0, 12, 1000)),
    {"soft_cap": 3.0},
    {"sinks": True},
    {"splits": 3, "lens": "20+5+200"},
    {"clean": True},
    {"q_lens": "1+1+1", "lens": "1+16+17"},
    {"q_lens": "0+5+0", "lens": "20+5+0"},
    {"q_lens": "1+40+2", "lens": "65+64+63"},
)
OF_PREFILL: Changes = (
    *({"descale": name} for name in ("sequence_head", "page_head")),
    {"table": "ragged"},
    {"causal": False},
    {"causal": False, "window_right": 5},
    {"causal": False, "window_left": 30, "window_right": 9},
    {"q_lens": "7+3", "lens": "2+0"},  # more queries than keys
)
OF_APPEND: Changes = (
    {"rope": "neox"},
    {"rope": "gptj"},
    {"q_lens": "20+3+9", "lens": "27+3+75"},  # chunks that begin inside a page
    {"q_lens": "9+0+70", "lens": "139+40+70"},
)
# What runs on FP8 units meets these in the quick sweep too; the full one mixes all with all.
_MASKS: Changes = (
    {},
    {"window_left": 12, "sinks": True},
    {"soft_cap": 3.0, "splits": 3},
    {"clean": True, "descale": "head"},
)
_SIZES: Changes = (
    {},
    {"q_lens": "40+9", "lens": "140+70", "ratio": 12, "head_dim": 128, "page_size": 1},
    {"q_lens": "3+17+1", "lens": "3+80+33", "ratio": 5, "head_dim": 96, "page_size": 3, "kv_heads": 2},
    {"q_lens": "33", "lens": "300", "ratio": 8, "head_dim": 256, "page_size": 64},
)
_FORMATS = (
    *("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1"),
    *("fp8_e4m3fn/fp4_e2m1", "fp8_e4m3fn/fp4_e2m1:32"),
)


def quick() -> Iterator[PrefillCase]:
    """The default case of each operation and kernel, and each value of each axis alone."""
    yield PrefillCase()
    yield PrefillCase(operation="append")
    yield PrefillCase(kernel="decode", q_lens="1+1+1")
    for way in (*_PREFILLS, *_APPENDS):
        changes = (*OF_BOTH, *(OF_APPEND if way.appends else OF_PREFILL))
        yield from (replace(way, **change) for change in ({}, *changes))
    for way, change in product(_FP8_UNITS, _MASKS):
        yield replace(way, **change)


def full() -> Iterator[PrefillCase]:
    """Kernels by formats, sizes and options."""
    for way, name in product((*_PREFILLS, *_APPENDS), _FORMATS):
        for sizes, mask in product(_SIZES, _MASKS):
            yield replace(way, format=name, **sizes, **mask)
    for way, sizes, mask in product(_FP8_UNITS, _SIZES, _MASKS):
        yield replace(way, **sizes, **mask)


def can_be(case: PrefillCase) -> bool:
    """Whether the operation has such calls: one scratch holds old and new keys unless an append is fused."""
    k = parse_format(case.format)[0].k
    return case.kernel != "append_then_attend" or k not in ("bf16", "fp16") or k == case.q


def serves(case: PrefillCase, target: Target) -> bool:
    """Whether a target has the case's kernel and FP8 matrix units of its format."""
    if case.fp8_unit in ("", target.native_fp8) or target.native_fp8 is None:
        return True
    return target.name == "gfx942" and case.fp8_unit == "fp8_e4m3fn"  # read as FNUZ, half of it


def sweep(place: Place, *, everything: bool) -> list[PrefillCase]:
    """The cases of a sweep that a place serves, each once."""
    with place.context():
        target = active_target(torch.device(place.device))
    cases = dict.fromkeys([*quick(), *(full() if everything else ())])
    return [case for case in cases if can_be(case) and serves(case, target)]


def _group(line: str) -> tuple[str, str]:
    case = PrefillCase.parse(line)
    return f"{case.q}, fp8_compute" if case.fp8_compute else case.q, f"{case.operation}, {case.format}"


PREFILL_CASES = Kind(
    "batch_prefill and prefill_append",
    "prefill",
    run,
    _group,
    {
        "relative_l1": BOUND_16_BIT_QUERY,
        "with Q in FP8": BOUND_FP8_COMPUTE,
        "with fp8_compute": BOUND_TWO_FP8_TERMS,
    },
)
"""For `narrowkv validate prefill`."""

"""One decode call as text and as tensors: what `probe` and `validate` run, and what `--case` repeats.

A case is a line such as `ratio=17,page_size=7,lens=33+0+130,k=fp8_e4m3fn`; what it leaves out has the
default. The same line always builds the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch

from narrowkv.attn_decode import DecodePlan, paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.workloads import DecodeWorkload, WorkloadError
from narrowkv.cli.names import one_of, split_format, unknown
from narrowkv.cli.report import UsageError
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.descales import GRANULARITIES
from narrowkv.quant.accuracy import ErrorReport, compare, max_abs, relative_l1

LSE_BOUND = 1e-3
_QUERY_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OUT_DTYPES = {**_QUERY_DTYPES, "fp32": torch.float32}
_DESCALES = ("float", *GRANULARITIES[:-1])  # the last is FP4's own
Case = TypeVar("Case")


def spell_case(case: Any) -> str:
    """A frozen dataclass as `name=value` pairs of what is not the default."""
    changed = ((f.name, getattr(case, f.name)) for f in fields(case) if getattr(case, f.name) != f.default)
    return ",".join(f"{name}={_spell(value)}" for name, value in changed) or "seed=0"


def parse_case(kind: type[Case], text: str) -> Case:
    """The frozen dataclass that `spell_case` spelled.

    Raises:
        UsageError: naming the part that is wrong and what is known.
    """
    known = {f.name: f.default for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--case must be name=value pairs of {', '.join(known)}; got {part!r}")
        if name not in known:
            raise unknown(f"a name of --case ({part})", name, known)
        try:
            values[name] = _read(value, type(known[name]))
        except ValueError:
            raise UsageError(f"--case {name} must be a {type(known[name]).__name__}, got {value!r}") from None
    return kind(**values)


def parse_lens(name: str, text: str) -> tuple[int, ...]:
    """Numbers joined by "+"; none in an empty text.

    Raises:
        UsageError: for anything else, naming the part of the case.
    """
    parts = text.split("+") if text else []
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--case {name} must be numbers joined by '+', got {text!r}")
    return tuple(int(part) for part in parts)


def parse_format(text: str) -> tuple[CacheFormat, int]:
    """A cache format and FP4's channels per scale from "K", "K/V" or "K/V:GROUP"; 0 is one scale a head.

    Raises:
        UsageError: a format that a cache does not have, or a group that is not its.
    """
    k, v, group = split_format(text)
    return CacheFormat(k, v), group


@dataclass(frozen=True)
class DecodeCase:
    """Sizes, formats and options of one decode call.

    Attributes:
        lens: tokens of each sequence, joined by "+"; their number is the batch.
        q_len: query tokens of each sequence.
        kv_heads: KV heads.
        ratio: query heads for each.
        head_dim: elements of a head.
        page_size: tokens a page.
        q, out: dtypes of query and output; an empty `out` is q's.
        k, v: cache formats.
        group: channels that share a scale of FP4; 0 for one scale a token and head.
        kernel: forces "native" or "decode"; empty leaves it to the target.
        layout: a cache layout, or "padded": NHD with strided heads and a storage offset.
        table: "block_table" or "ragged".
        descale: "float", "tensor", "head", "sequence_head", "page_head" or "token_head". FP4 has its scales.
        clean: whether the cache is declared free of negative zeros and NaN; otherwise unused slots hold NaN.
        window, soft_cap, sinks: options of the call; window -1 and soft_cap 0 are off.
        split: forces how the keys are split; empty leaves it to the plan.
        data: "gaussian", or "outlier": K with a channel offset, which makes softmax peaky.
        seed: of the inputs.
    """

    lens: str = "64+37"
    q_len: int = 1
    kv_heads: int = 2
    ratio: int = 12
    head_dim: int = 128
    page_size: int = 16
    q: str = "bf16"
    out: str = ""
    k: str = "fp8_e4m3fn"
    v: str = "fp8_e4m3fn"
    group: int = 0
    kernel: str = ""
    layout: str = "NHD"
    table: str = "block_table"
    descale: str = "float"
    clean: bool = False
    window: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    split: str = ""
    data: str = "gaussian"
    seed: int = 0

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return parse_lens("lens", self.lens)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seq_lens)

    def __str__(self) -> str:
        return spell_case(self)

    @classmethod
    def parse(cls, text: str) -> DecodeCase:
        """The case that `str` spells.

        Raises:
            UsageError: naming the part that is wrong and what is known.
        """
        case = parse_case(cls, text)
        parse_lens("lens", case.lens)
        for name, value, choices in (("q", case.q, _QUERY_DTYPES), ("out", case.out or "fp32", _OUT_DTYPES)):
            one_of(f"--case {name}", value, tuple(choices))
        return case


def _spell(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _read(text: str, kind: type) -> Any:
    return bool(int(text)) if kind is bool else kind(text)


@dataclass(frozen=True)
class DecodeInputs:
    """The tensors of a case.

    Attributes:
        q: `[batch * q_len, num_qo_heads, head_dim]`.
        cache, table: the paged cache and its page table.
        options: keyword arguments of `paged_decode`, `plan` apart.
        split, kernel: what the case forces, or None.
    """

    q: torch.Tensor
    cache: PagedKVCache
    table: PageTable
    options: dict[str, Any]
    split: str | None
    kernel: str | None = None

    def plan(self) -> DecodePlan:
        """The plan that the case asks for."""
        return plan_decode(self.q, self.cache, self.table, split=self.split, kernel=self.kernel)

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`paged_decode` on these inputs: `(o, lse)`."""
        plan = self.plan() if self.split or self.kernel else None
        o, lse = paged_decode(self.q, self.cache, self.table, **self.options, return_lse=True, plan=plan)
        return o, lse

    def bytes_per_token(self) -> float:
        """Bytes of K and V that a token takes, over all heads."""
        return self.cache.bytes_per_token()

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 on the dequantised cache."""
        options = {name: value for name, value in self.options.items() if name != "out_dtype"}
        o, lse = paged_decode_reference(self.q, self.cache, self.table, **options, return_lse=True)
        return o, lse


def build(case: DecodeCase, device: str = "cpu") -> DecodeInputs:
    """The tensors of a case, made on the CPU so that every device gets the same numbers.

    Raises:
        ValueError, TypeError: what the cache says to formats, layouts or sizes that it does not take.
    """
    for name, value, known in (
        ("table", case.table, ("block_table", "ragged")),
        ("data", case.data, ("gaussian", "outlier")),
        ("descale", case.descale, _DESCALES),
    ):
        one_of(f"--case {name}", value, known)
    random = torch.Generator().manual_seed(case.seed)
    try:
        q, cache, table = DecodeWorkload(
            lens=case.seq_lens,
            q_len=case.q_len,
            num_kv_heads=case.kv_heads,
            gqa_ratio=case.ratio,
            head_dim=case.head_dim,
            page_size=case.page_size,
            layout=case.layout,
            format=CacheFormat(case.k, case.v),
            scale_group=case.group or None,
            q_dtype=_QUERY_DTYPES[case.q],
            granularity=case.descale,
            ragged=case.table == "ragged",
            stale_columns=1,
            clean=case.clean,
            spread=1.0,
            outliers=case.data == "outlier",
        ).draw(random, device)
    except WorkloadError as error:
        raise UsageError(f"--case {error}") from None
    heads = case.kv_heads * case.ratio
    sinks = torch.randn(heads, generator=random).to(device) if case.sinks else None
    options = {
        "logits_soft_cap": case.soft_cap,
        "window_left": case.window,
        "sinks": sinks,
        "out_dtype": _OUT_DTYPES[case.out] if case.out else None,
    }
    return DecodeInputs(q, cache, table, options, case.split or None, case.kernel or None)


@dataclass(frozen=True)
class CaseResult:
    """How a case went.

    Attributes:
        case: the line that repeats it.
        error: of `o` against the fp32 reference; None if the call was refused or broke.
        lse_error: largest difference of `lse`.
        passed: within both bounds.
        detail: why not.
        bound: of the relative L1 error.
        place: where it ran: "cpu", "gpu" or an emulated target.
    """

    case: str
    error: ErrorReport | None
    lse_error: float
    passed: bool
    detail: str = ""
    bound: float = math.nan
    place: str = ""


class CallInputs(Protocol):
    """Tensors that an operation can be called with, and the reference on them."""

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` of the operation."""

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32."""


def check(
    case: object,
    inputs: CallInputs,
    bound: float,
    call: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None,
    lse_bound: float = LSE_BOUND,
) -> CaseResult:
    """Runs a case and compares it with the reference. `call` stands in for the operation itself.

    A few outputs can be unlucky enough that rounding the exact result to the output's dtype alone exceeds
    `bound`; then the bound is that rounding and a tenth of `bound`.
    """
    o, lse = (call or inputs.call)()
    expected, expected_lse = inputs.reference()
    rounding = relative_l1(expected.to(o.dtype), expected)
    bound = max(bound, rounding + bound / 10)
    error = compare(o, expected)
    lse_error = max_abs(lse, expected_lse)
    problems = []
    if not error.passes(relative_l1=bound):
        problems.append(f"{error} (bound {bound:.3g})")
    if not lse_error <= lse_bound:
        problems.append(f"lse differs by {lse_error:.3g} (bound {lse_bound:g})")
    return CaseResult(str(case), error, lse_error, not problems, "; ".join(problems), bound)

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
from narrowkv.cli.report import UsageError
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.descales import SCALE_GROUP
from narrowkv.quant.accuracy import ErrorReport, compare, max_abs, relative_l1
from narrowkv.quant.e8m0 import E8M0_NAN
from narrowkv.quant.formats import Format, get_format
from narrowkv.quant.quantize import cast_fp8, quantize_per_group

LSE_BOUND = 1e-3
_QUERY_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OUT_DTYPES = {**_QUERY_DTYPES, "fp32": torch.float32}
_SPARE_PAGES = 3
Case = TypeVar("Case")
FP4 = "fp4_e2m1"
# Unused slots hold NaN, so that reading one shows.
_NAN_BYTE = {"fp8_e4m3fn": 0x7F, "fp8_e4m3fnuz": 0x80, "fp8_e5m2": 0x7F}


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
        if not equals or name not in known:
            raise UsageError(f"--case must be name=value pairs of {', '.join(known)}; got {part!r}")
        try:
            values[name] = _read(value, type(known[name]))
        except ValueError:
            raise UsageError(f"--case {name} must be a {type(known[name]).__name__}, got {value!r}") from None
    return kind(**values)


def parse_format(text: str) -> tuple[CacheFormat, int]:
    """A cache format and FP4's channels per scale from "K", "K/V" or "K/V:GROUP"; 0 is one scale a head.

    Raises:
        ValueError: a format that a cache does not have, or a group that is not its.
    """
    formats, _, group = text.partition(":")
    k, _, v = formats.partition("/")
    if group not in ("", str(SCALE_GROUP)):
        raise ValueError(
            f"FP4 has one scale a head or, after a colon, per {SCALE_GROUP} channels, got {group!r}"
        )
    parsed = CacheFormat.parse(CacheFormat(k, v or k))
    if group and FP4 not in (parsed.k, parsed.v):
        raise ValueError(f"only FP4 has scales per {group} channels, got {formats}")
    return parsed, int(group or 0)


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
        return tuple(int(n) for n in self.lens.split("+")) if self.lens else ()

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
        try:
            lens = case.seq_lens
        except ValueError:
            raise UsageError(f"--case lens must be numbers joined by '+', got {case.lens!r}") from None
        if any(n < 0 for n in lens):
            raise UsageError(f"--case lens must not be negative, got {case.lens!r}")
        for name, value, choices in (("q", case.q, _QUERY_DTYPES), ("out", case.out or "fp32", _OUT_DTYPES)):
            if value not in choices:
                raise UsageError(f"--case {name} must be one of {', '.join(choices)}; got {value!r}")
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
        plan = self.plan() if self.split else None
        o, lse = paged_decode(
            self.q, self.cache, self.table, **self.options, return_lse=True, plan=plan, kernel=self.kernel
        )
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
    random = torch.Generator().manual_seed(case.seed)
    cache_format = CacheFormat.parse(CacheFormat(case.k, case.v))
    pages, table = _page_table(case, random, device)
    num_pages = sum(len(ids) for ids in pages) + _SPARE_PAGES
    shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    used = torch.zeros(shape[:2], dtype=torch.bool)
    for ids, seq_len in zip(pages, case.seq_lens, strict=True):
        mask = torch.arange(len(ids) * case.page_size).view(-1, case.page_size) < seq_len
        used[ids] = mask
    stored, descales, kinds = [], [], []
    for name in ("k", "v"):
        fmt = get_format(getattr(case, name))
        x = torch.randn(shape, generator=random)
        if case.data == "outlier" and name == "k":
            x[..., ::21] += 8.0
        elif case.data not in ("gaussian", "outlier"):
            raise UsageError(f"--case data must be gaussian or outlier, got {case.data!r}")
        keep = None if case.clean else used
        descale: float | torch.Tensor
        if fmt.kind == "fp4":
            data, descale = _store_fp4(x, case.group, keep)
            kind = "token_head_group" if case.group else "token_head"
        else:
            amax = float(x.abs().amax()) if x.numel() else 1.0
            descale, factor = _descale(case, fmt, amax, shape, pages, random)
            data, kind = _store(x / factor, fmt, keep), case.descale
        stored.append(data)
        descales.append(descale.to(device) if isinstance(descale, torch.Tensor) else descale)
        kinds.append(None if isinstance(descale, float) else kind)
    k, v, layout = _lay_out(stored[0], stored[1], case.layout)
    k, v = _to(k, device), _to(v, device)
    cache = PagedKVCache.from_tensors(
        k,
        v,
        format=cache_format,
        layout=layout,
        k_descale=descales[0],
        v_descale=descales[1],
        k_granularity=kinds[0],
        v_granularity=kinds[1],
        negative_zero_free=case.clean,
    )
    heads = case.kv_heads * case.ratio
    q = torch.randn((case.batch * case.q_len, heads, case.head_dim), generator=random).to(
        _QUERY_DTYPES[case.q]
    )
    sinks = torch.randn(heads, generator=random).to(device) if case.sinks else None
    options = {
        "logits_soft_cap": case.soft_cap,
        "window_left": case.window,
        "sinks": sinks,
        "out_dtype": _OUT_DTYPES[case.out] if case.out else None,
    }
    return DecodeInputs(q.to(device), cache, table, options, case.split or None, case.kernel or None)


def _page_table(
    case: DecodeCase, random: torch.Generator, device: str
) -> tuple[list[torch.Tensor], PageTable]:
    """Page ids of each sequence, shuffled, and the table over them."""
    counts = [-(-n // case.page_size) for n in case.seq_lens]
    order = torch.randperm(sum(counts) + _SPARE_PAGES, generator=random)
    ends = torch.tensor([0, *counts]).cumsum(0)
    pages = [order[begin:end] for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    spare = int(order[-1])
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    if case.table == "ragged":
        last = torch.where(lens > 0, (lens - 1) % case.page_size + 1, torch.zeros_like(lens))
        ids = torch.cat([*pages, torch.tensor([spare])]).int()  # one stale id past the end
        tensors = (ends.int().to(device), ids.to(device), last.int().to(device))
        return pages, PageTable.from_ragged(*tensors, page_size=case.page_size)
    if case.table != "block_table":
        raise UsageError(f"--case table must be block_table or ragged, got {case.table!r}")
    block_table = torch.full((case.batch, max([*counts, 0]) + 1), spare, dtype=torch.int32)
    for row, ids in enumerate(pages):
        block_table[row, : len(ids)] = ids.int()
    return pages, PageTable.from_block_table(
        block_table.to(device), lens.to(device), page_size=case.page_size
    )


def _descale(
    case: DecodeCase,
    fmt: Format,
    amax: float,
    shape: tuple[int, ...],
    pages: list[torch.Tensor],
    random: torch.Generator,
) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """The descale as the cache takes it, and shaped to multiply `[num_pages, page_size, heads, head_dim]`."""
    num_pages, page_size, heads, _ = shape
    base = 1.0 if fmt.kind == "float" else amax / fmt.max_value
    sizes: dict[str, tuple[int, ...]] = {
        "tensor": (1,),
        "head": (heads,),
        "sequence_head": (len(pages), heads),
        "page_head": (num_pages, heads),
        "token_head": (num_pages, page_size, heads),
    }
    if case.descale == "float":
        return base, base
    if case.descale not in sizes:
        raise UsageError(f"--case descale must be one of float, {', '.join(sizes)}; got {case.descale!r}")
    # Above base nothing saturates; below it some does, which the reference sees too.
    descale = base * (0.9 + torch.rand(sizes[case.descale], generator=random))
    if case.descale == "sequence_head":
        factor = torch.full((num_pages, 1, heads, 1), base)
        for seq, ids in enumerate(pages):
            factor[ids] = descale[seq].view(1, 1, heads, 1)
        return descale, factor
    if case.descale == "page_head":
        return descale, descale.view(num_pages, 1, heads, 1)
    if case.descale == "token_head":
        return descale, descale[..., None]
    return descale, descale.view(1, 1, -1, 1)


def _store(x: torch.Tensor, fmt: Format, used: torch.Tensor | None) -> torch.Tensor:
    """`x` in the storage format; slots that are not `used` become NaN."""
    if fmt.kind == "float":
        assert fmt.torch_dtype is not None
        stored = x.to(fmt.torch_dtype)
        if used is not None:
            stored[~used] = float("nan")
        return stored
    stored = cast_fp8(x, fmt.name)
    if used is not None:
        stored.view(torch.uint8)[~used] = _NAN_BYTE[fmt.name]
    return stored


def _store_fp4(x: torch.Tensor, group: int, used: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed FP4 and its E8M0 scales; those of slots that are not `used` are NaN."""
    stored, scales = quantize_per_group(x, group or x.shape[-1])
    if used is not None:
        scales[~used] = E8M0_NAN
    return stored, scales if group else scales[..., 0].contiguous()


def _lay_out(k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Storage tensors in `layout` from `[num_pages, page_size, num_kv_heads, head_dim]`."""
    if layout == "HND":
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), layout
    if layout == "tokens":
        if k.shape[1] != 1:
            raise UsageError(f"--case layout=tokens needs page_size=1, got {k.shape[1]}")
        return k[:, 0].contiguous(), v[:, 0].contiguous(), layout
    if layout == "concat":
        if k.dtype != v.dtype:
            raise UsageError("--case layout=concat needs k and v of one format")
        both = torch.cat([k, v], -1)
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :], layout
    if layout == "vectorised":
        x, y = 16 // k.element_size(), 16 // v.element_size()
        pages, tokens, heads, dim = k.shape
        if dim % x or tokens % y:
            raise UsageError(f"--case layout=vectorised needs head_dim % {x} == 0 and page_size % {y} == 0")
        vector_k = k.view(pages, tokens, heads, dim // x, x).permute(0, 2, 3, 1, 4).contiguous()
        vector_v = v.view(pages, tokens // y, y, heads, dim).permute(0, 3, 1, 4, 2).contiguous()
        return vector_k, vector_v, layout
    if layout == "padded":
        return _padded(k), _padded(v), "NHD"
    return k, v, layout


def _padded(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with a gap after each head and token, and not starting on a 16-byte boundary."""
    pages, tokens, heads, dim = x.shape
    sizes = (pages, tokens, heads + 1, dim + 2)
    wide = torch.zeros(
        pages * tokens * (heads + 1) * (dim + 2) + 2,
        dtype=torch.int16 if x.element_size() == 2 else torch.uint8,
    )
    view = wide[2:].view(x.dtype).view(sizes)[:, :, :heads, :dim]
    view.copy_(x)
    return view


def _to(x: torch.Tensor, device: str) -> torch.Tensor:
    if device == "cpu":
        return x
    # .to() would make a strided view contiguous; the strides are part of the case.
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype).set_(storage).to(device)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


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
    if not lse_error <= LSE_BOUND:
        problems.append(f"lse differs by {lse_error:.3g} (bound {LSE_BOUND:g})")
    return CaseResult(str(case), error, lse_error, not problems, "; ".join(problems), bound)

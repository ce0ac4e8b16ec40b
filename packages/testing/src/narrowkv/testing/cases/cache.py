"""Seeded paged caches: the part that the cases of decode and of prefill share.

Pages are shuffled, page ids past the end of a sequence are far out of range, and unless the cache is clean
every unused slot holds NaN, so that a kernel that reads one shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.descales import GRANULARITIES
from narrowkv.paged_cache.layouts import CacheFormat
from narrowkv.paged_cache.page_table import PageTable
from narrowkv.paged_cache.rope import Rope
from narrowkv.quant.e4m3 import E4M3_NAN
from narrowkv.quant.e8m0 import E8M0_NAN
from narrowkv.quant.formats import Format, get_format
from narrowkv.quant.groups import nvfp4_global_descale
from narrowkv.quant.int_tokens import quantize_tokens_int4, quantize_tokens_int8
from narrowkv.quant.quantize import quantize_per_group
from narrowkv.quant.rounding import encode
from narrowkv.testing.cases import Case, CaseError, named, unknown
from narrowkv.testing.operation import Contract, Shape
from narrowkv.testing.words import CACHE_FORMATS

__all__ = [
    "DESCALES", "LAYOUTS", "CacheCase", "copy_cache", "differing_bytes", "fields_of_contract",
    "poison_from", "random_rope", "shuffled_pages", "table_of",
]  # fmt: skip

DESCALES = ("float", *GRANULARITIES[:-1])
"""Descale granularities of FP8 and 16-bit caches; FP4 has its scales."""
LAYOUTS = ("NHD", "HND", "tokens", "concat", "vectorised", "padded")
"""Layouts of a case: those of a cache, and "padded", which is NHD with strided heads and a storage offset."""

_I32 = torch.int32
_STORED = ("k", "v", "k_descale", "v_descale")
SPARE_PAGES = 3
# Page ids past the end of a sequence in a page table. Times the stride of a page they do not wrap, in 32
# bits, to an offset inside a cache.
_STALE = 2**30 + 54321
# Codes of NaN, or of a large number in a format that has no NaN.
_NAN_BYTE = {"fp8_e4m3fn": 0x7F, "fp8_e4m3fnuz": 0x80, "fp8_e5m2": 0x7F, "int8": 0x80}


def _read_format(text: str) -> str | CacheFormat:
    k, slash, v = text.partition("/")
    for name in (k, v) if slash else (k,):
        if name not in CACHE_FORMATS:
            raise unknown("format", name, CACHE_FORMATS)
    return CacheFormat(k, v) if slash and k != v else k


def _spell_format(value: str | CacheFormat) -> str:
    return f"{value.k}/{value.v}" if isinstance(value, CacheFormat) else value


def shuffled_pages(lens: Sequence[int], page_size: int, random: torch.Generator) -> list[torch.Tensor]:
    """Page ids of each sequence, of a cache that has three pages more."""
    counts = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(counts) + SPARE_PAGES, generator=random)
    return list(torch.split(order[: sum(counts)], counts))


def table_of(
    pages: Sequence[torch.Tensor], lens: Sequence[int], page_size: int, device: torch.device | str,
    ragged: bool, stale_columns: int,
) -> PageTable:  # fmt: skip
    """The table over pages of sequences; ids past the end of a sequence are far out of range."""
    seq_lens = torch.tensor(lens, dtype=_I32)
    if ragged:
        starts = torch.tensor([0, *(len(ids) for ids in pages)]).cumsum(0)
        last = torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0)
        ids = torch.cat([*pages, torch.tensor([_STALE])])
        return PageTable.from_ragged(*(x.to(device, _I32) for x in (starts, ids, last)), page_size=page_size)
    width = max([*map(len, pages), 1 - stale_columns]) + stale_columns
    block_table = torch.full((len(pages), width), _STALE, dtype=_I32)
    for row, ids in enumerate(pages):
        block_table[row, : len(ids)] = ids.int()
    return PageTable.from_block_table(block_table.to(device), seq_lens.to(device), page_size=page_size)


@dataclass(frozen=True, kw_only=True)
class CacheCase(Case):
    """A paged cache with sequences in it.

    Attributes:
        lens: tokens of each sequence; their number is the batch.
        num_kv_heads, head_dim: sizes; v_head_dim: channels of V, 0 for as many as K has.
        page_size: tokens a page.
        layout: one of `LAYOUTS`.
        format: of K and V; scale_group: channels that share a scale of FP4, None for one scale a head.
        scale_format: how a scale of FP4 is stored, "e8m0" or "e4m3".
        granularity: one of `DESCALES`.
        ragged: FlashInfer-style metadata instead of a block table.
        stale_columns: how many columns more than the longest sequence needs a block table has.
        clean: whether the cache is declared free of negative zeros and NaN; otherwise unused slots hold NaN.
        spread: standard deviation of K and V.
        outliers: whether channels of K have an offset, which makes softmax peaky.
        seed: of all numbers.
    """

    lens: tuple[int, ...] = (70, 5, 130)
    num_kv_heads: int = named(2, "kv_heads")
    head_dim: int = 128
    v_head_dim: int = 0
    page_size: int = 16
    layout: str = named("NHD", words=LAYOUTS)
    format: str | CacheFormat = named("fp8_e4m3fn", read=_read_format, spell=_spell_format)
    scale_group: int | None = named(None, "group", kind=int)
    scale_format: str = named("e8m0", words=("e8m0", "e4m3"))
    granularity: str = named("float", "descale", DESCALES)
    ragged: bool = named(False, "table", {"block_table": False, "ragged": True})
    stale_columns: int = 0
    clean: bool = False
    spread: float = 0.5
    outliers: bool = named(False, "data", {"gaussian": False, "outlier": True})
    seed: int = 0

    @property
    def formats(self) -> CacheFormat:
        """Storage formats of K and V."""
        return CacheFormat.parse(self.format)

    @property
    def format_name(self) -> str:
        """The formats of K and V, and after a colon FP4's channels per scale and E4M3 for its scales."""
        said = [str(self.scale_group)] if self.scale_group else []
        said += ["e4m3"] if self.scale_format != "e8m0" else []
        return ":".join((_spell_format(self.format), *said))

    def cache(
        self, random: torch.Generator, device: torch.device | str = "cpu"
    ) -> tuple[PagedKVCache, PageTable]:
        """The cache and its page table; made on the CPU, so that every device gets the same numbers.

        Raises:
            CaseError: the layout does not go with the page size, the sizes or the formats.
            ValueError, TypeError: the cache refuses a format, layout or size.
        """
        pages = shuffled_pages(self.lens, self.page_size, random)
        table = table_of(pages, self.lens, self.page_size, device, self.ragged, self.stale_columns)
        num_pages = sum(len(ids) for ids in pages) + SPARE_PAGES
        shape = (num_pages, self.page_size, self.num_kv_heads)
        used = torch.zeros(shape[:2], dtype=torch.bool)
        for ids, seq_len in zip(pages, self.lens, strict=True):
            used[ids] = torch.arange(len(ids) * self.page_size).view(-1, self.page_size) < seq_len
        stored, descales, kinds, numbers = [], [], [], []
        sides = (
            (self.formats.k, self.head_dim, self.outliers),
            (self.formats.v, self.v_head_dim or self.head_dim, False),
        )
        for name, head_dim, outliers in sides:
            fmt = get_format(name)
            x = torch.randn((*shape, head_dim), generator=random) * self.spread
            if outliers:
                x[..., ::21] += 8.0
            keep = None if self.clean else used
            descale: float | torch.Tensor
            numbers.append(1.0)
            if fmt.kind == "fp4":
                if self.scale_group and self.scale_format == "e4m3":
                    numbers[-1] = float(nvfp4_global_descale(x))
                data, descale = _store_fp4(x, self.scale_group, self.scale_format, numbers[-1], keep)
                kind = "token_head_group" if self.scale_group else "token_head"
            elif fmt.name == "int4" or (fmt.name == "int8" and self.granularity == "token_head"):
                data, descale = (quantize_tokens_int4 if fmt.is_packed else quantize_tokens_int8)(x)
                kind = "token_head"
                if keep is not None:
                    descale[~keep] = torch.nan
            else:
                descale, factor = self._descale(x, fmt, pages, random)
                data, kind = _store(x / factor, fmt, keep), self.granularity
            stored.append(data)
            descales.append(descale.to(device) if isinstance(descale, torch.Tensor) else descale)
            kinds.append(None if isinstance(descale, float) else kind)
        k, v, layout = _lay_out(stored[0], stored[1], self.layout)
        cache = PagedKVCache.from_tensors(
            _to(k, device),
            _to(v, device),
            format=self.formats,
            layout=layout,
            k_descale=descales[0],
            v_descale=descales[1],
            k_granularity=kinds[0],
            v_granularity=kinds[1],
            negative_zero_free=self.clean,
            k_tensor_scale=numbers[0],
            v_tensor_scale=numbers[1],
        )
        return cache, table

    def _descale(
        self, x: torch.Tensor, fmt: Format, pages: list[torch.Tensor], random: torch.Generator
    ) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        """The descale as the cache takes it, and shaped to multiply x."""
        num_pages, page_size, heads, _ = x.shape
        base = 1.0
        if fmt.kind != "float":
            base = (float(x.abs().amax()) if x.numel() else 1.0) / fmt.max_value
        if self.granularity == "float":
            return base, base
        sizes: dict[str, tuple[int, ...]] = {
            "tensor": (1,),
            "head": (heads,),
            "sequence_head": (len(pages), heads),
            "page_head": (num_pages, heads),
            "token_head": (num_pages, page_size, heads),
        }
        # Above base nothing saturates; below it some does, which the reference sees too.
        descale = base * (0.9 + torch.rand(sizes[self.granularity], generator=random))
        if self.granularity == "sequence_head":
            factor = torch.full((num_pages, 1, heads, 1), base)
            for seq, ids in enumerate(pages):
                factor[ids] = descale[seq].view(1, 1, heads, 1)
            return descale, factor
        if self.granularity == "page_head":
            return descale, descale.view(num_pages, 1, heads, 1)
        if self.granularity == "token_head":
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
    stored = encode(x, fmt)
    if used is not None:
        stored.view(torch.uint8)[~used] = _NAN_BYTE[fmt.name]
    return stored


def _store_fp4(
    x: torch.Tensor, group: int | None, scale: str, number: float, used: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed FP4 of `x / number` and its scales; those of slots that are not `used` are NaN."""
    rule = {"e8m0": "mse", "e4m3": "search"}[scale]
    stored, scales = quantize_per_group(
        x, group or x.shape[-1], scale=scale, exponent=rule, global_descale=number
    )
    if used is not None:
        scales.view(torch.uint8)[~used] = {"e8m0": E8M0_NAN, "e4m3": E4M3_NAN}[scale]
    return stored, scales if group else scales[..., 0].contiguous()


def _lay_out(k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Storage tensors in `layout` from `[num_pages, page_size, num_kv_heads, head_dim]`."""
    if layout == "HND":
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), layout
    if layout == "tokens":
        if k.shape[1] != 1:
            raise CaseError(f"layout=tokens needs page_size=1, got {k.shape[1]}")
        return k[:, 0].contiguous(), v[:, 0].contiguous(), layout
    if layout == "concat":
        if k.dtype != v.dtype:
            raise CaseError("layout=concat needs k and v of one format")
        both = torch.cat([k, v], -1)
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :], layout
    if layout == "vectorised":
        x, y = 16 // k.element_size(), 16 // v.element_size()
        pages, tokens, heads, dim = k.shape
        if dim % x or tokens % y:
            raise CaseError(f"layout=vectorised needs head_dim % {x} == 0 and page_size % {y} == 0")
        v_dim = v.shape[3]
        vector_k = k.view(pages, tokens, heads, dim // x, x).permute(0, 2, 3, 1, 4).contiguous()
        vector_v = v.view(pages, tokens // y, y, heads, v_dim).permute(0, 3, 1, 4, 2).contiguous()
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


def _to(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type == "cpu":
        return x
    # .to() would make a strided view contiguous; the strides are part of the case.
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype).set_(storage).to(device)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def poison_from(cache: PagedKVCache, table: PageTable, full: tuple[int, ...]) -> None:
    """Makes the tokens between the table's lengths and `full` NaN again."""
    k, v = cache.logical()
    assert table.seq_lens is not None
    for seq, old in enumerate(table.seq_lens.tolist()):
        positions = torch.arange(old, full[seq])
        pages = table.page_ids[seq].cpu()[positions // table.page_size].long()
        slots = positions % table.page_size
        for stored, name in ((k, cache.format.k), (v, cache.format.v)):
            if stored.element_size() == 1:
                code = {**_NAN_BYTE, "fp4_e2m1": 0x77, "int4": 0xFF}[name]
                stored.view(torch.uint8)[pages.to(stored.device), slots.to(stored.device)] = code
            else:
                stored[pages.to(stored.device), slots.to(stored.device)] = float("nan")


def copy_cache(cache: PagedKVCache) -> PagedKVCache:
    """A copy of a cache with its own memory."""

    def own(x: Any) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) else x

    return replace(cache, **{name: own(getattr(cache, name)) for name in _STORED})


def differing_bytes(a: PagedKVCache, b: PagedKVCache) -> dict[str, int]:
    """How many bytes two caches of the same shape differ in, by "k", "v", "k_descale" and "v_descale".

    NaNs of a 16-bit cache are alike: a conversion may give a NaN any payload.
    """
    found = {}
    for name in _STORED:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor):
            if x.dtype in (torch.bfloat16, torch.float16):
                x, y = (torch.where(each.isnan(), torch.nan, each) for each in (x, y))
            differ = x.flatten().view(torch.uint8) != y.flatten().view(torch.uint8)
            found[name] = int(differ.sum())
    return {name: count for name, count in found.items() if count}


def random_rope(
    style: str, rotary_dim: int, positions: torch.Tensor, random: torch.Generator, device: torch.device | str
) -> Rope:
    """A rotary embedding of random angles, "neox" or "gptj", that rotates `rotary_dim` columns."""
    angle = torch.rand(int(positions.max()) + 2, rotary_dim // 2, generator=random) * 6
    return Rope(angle.cos().to(device), angle.sin().to(device), positions.to(device, _I32), style=style)


def fields_of_contract(contract: Contract, shape: Shape, clean: bool) -> dict[str, Any]:
    """Fields of a case over a paged cache for a contract: of the cache, the heads and the spread."""
    return {
        "num_kv_heads": shape.num_kv_heads,
        "gqa_ratio": shape.gqa_ratio,
        "head_dim": shape.head_dim,
        "page_size": contract.page_size,
        "format": contract.k if contract.k == contract.v else CacheFormat(contract.k, contract.v),
        "scale_group": contract.scale_group or None,
        "clean": clean,
        "spread": 1.0,
    }

"""Named decode shapes and seeded inputs; tests, examples, `validate` and `probe` draw from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.quant.e4m3 import E4M3_NAN
from narrowkv.quant.e8m0 import E8M0_NAN
from narrowkv.quant.formats import Format, get_format
from narrowkv.quant.quantize import cast_fp8, quantize_per_group

_I32 = torch.int32
_SPARE_PAGES = 3
# What stands in a page table past the end of a sequence. Times the stride of a page it does not wrap, in 32
# bits, to an offset inside a cache.
_STALE = 2**30 + 54321
# Unused slots hold NaN, so that reading one shows.
_NAN_BYTE = {"fp8_e4m3fn": 0x7F, "fp8_e4m3fnuz": 0x80, "fp8_e5m2": 0x7F}


class WorkloadError(ValueError):
    """These fields do not go together."""


@dataclass(frozen=True)
class DecodeWorkload:
    """A decode step to build.

    Attributes:
        lens: tokens of each sequence.
        q_len: query tokens a sequence.
        num_kv_heads, gqa_ratio, head_dim: heads.
        page_size, format: the cache; scale_group: channels per scale of FP4, None for one a head;
            scale_format: how that is stored, "e8m0" or "e4m3".
        layout: of the cache, or "padded": NHD with strided heads and a storage offset.
        q_dtype: bf16 or fp16.
        granularity: of the descales that are not FP4's: "float" or one of the cache's.
        ragged: FlashInfer-style metadata instead of a block table.
        stale_columns: how much wider the block table is than the longest sequence.
        clean: whether the cache is declared free of negative zeros and NaN; otherwise unused slots hold NaN.
        spread: standard deviation of K and V.
        outliers: K has a channel offset, which makes softmax peaky.
    """

    lens: tuple[int, ...] = (70, 5, 130)
    q_len: int = 1
    num_kv_heads: int = 2
    gqa_ratio: int = 12
    head_dim: int = 64
    page_size: int = 16
    layout: str = "NHD"
    format: str | CacheFormat = "fp8_e4m3fn"
    scale_group: int | None = None
    scale_format: str = "e8m0"
    q_dtype: torch.dtype = torch.bfloat16
    granularity: str = "float"
    ragged: bool = False
    stale_columns: int = 0
    clean: bool = False
    spread: float = 0.5
    outliers: bool = False

    def build(
        self, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        """q, cache, page table: pages shuffled, stale ids far out of range, every unused byte NaN."""
        return self.draw(torch.manual_seed(seed), device)

    def draw(
        self, random: torch.Generator, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
        """The same from a generator; made on the CPU, so that every device gets the same numbers.

        Raises:
            WorkloadError: the layout does not go with the page size, the sizes or the formats.
            ValueError, TypeError: what the cache says to what it does not take.
        """
        pages, table = self._page_table(random, device)
        num_pages = sum(len(ids) for ids in pages) + _SPARE_PAGES
        shape = (num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        used = torch.zeros(shape[:2], dtype=torch.bool)
        for ids, seq_len in zip(pages, self.lens, strict=True):
            used[ids] = torch.arange(len(ids) * self.page_size).view(-1, self.page_size) < seq_len
        formats = CacheFormat.parse(self.format)
        stored, descales, kinds = [], [], []
        for name, outliers in ((formats.k, self.outliers), (formats.v, False)):
            fmt = get_format(name)
            x = torch.randn(shape, generator=random) * self.spread
            if outliers:
                x[..., ::21] += 8.0
            keep = None if self.clean else used
            descale: float | torch.Tensor
            if fmt.kind == "fp4":
                data, descale = _store_fp4(x, self.scale_group, self.scale_format, keep)
                kind = "token_head_group" if self.scale_group else "token_head"
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
            format=formats,
            layout=layout,
            k_descale=descales[0],
            v_descale=descales[1],
            k_granularity=kinds[0],
            v_granularity=kinds[1],
            negative_zero_free=self.clean,
        )
        size = (len(self.lens) * self.q_len, self.num_kv_heads * self.gqa_ratio, self.head_dim)
        return torch.randn(size, generator=random).to(self.q_dtype).to(device), cache, table

    def _page_table(
        self, random: torch.Generator, device: torch.device | str
    ) -> tuple[list[torch.Tensor], PageTable]:
        """Page ids of each sequence, shuffled, and the table over them."""
        counts = [-(-n // self.page_size) for n in self.lens]
        order = torch.randperm(sum(counts) + _SPARE_PAGES, generator=random)
        ends = torch.tensor([0, *counts]).cumsum(0)
        pages = [order[begin:end] for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        lens = torch.tensor(self.lens, dtype=_I32)
        if self.ragged:
            last = torch.where(lens > 0, (lens - 1) % self.page_size + 1, torch.zeros_like(lens))
            ids = torch.cat([*pages, torch.tensor([_STALE])])
            tensors = (x.to(device, _I32) for x in (ends, ids, last))
            return pages, PageTable.from_ragged(*tensors, page_size=self.page_size)
        width = max([*counts, 1 - self.stale_columns]) + self.stale_columns
        block_table = torch.full((len(self.lens), width), _STALE, dtype=_I32)
        for row, ids in enumerate(pages):
            block_table[row, : len(ids)] = ids.int()
        return pages, PageTable.from_block_table(
            block_table.to(device), lens.to(device), page_size=self.page_size
        )

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
    stored = cast_fp8(x, fmt.name)
    if used is not None:
        stored.view(torch.uint8)[~used] = _NAN_BYTE[fmt.name]
    return stored


def _store_fp4(
    x: torch.Tensor, group: int | None, scale: str, used: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed FP4 and its scales; those of slots that are not `used` are NaN."""
    rule = {"e8m0": "mse", "e4m3": "search"}[scale]
    stored, scales = quantize_per_group(x, group or x.shape[-1], scale=scale, exponent=rule)
    if used is not None:
        scales.view(torch.uint8)[~used] = {"e8m0": E8M0_NAN, "e4m3": E4M3_NAN}[scale]
    return stored, scales if group else scales[..., 0].contiguous()


def _lay_out(k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Storage tensors in `layout` from `[num_pages, page_size, num_kv_heads, head_dim]`."""
    if layout == "HND":
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), layout
    if layout == "tokens":
        if k.shape[1] != 1:
            raise WorkloadError(f"layout=tokens needs page_size=1, got {k.shape[1]}")
        return k[:, 0].contiguous(), v[:, 0].contiguous(), layout
    if layout == "concat":
        if k.dtype != v.dtype:
            raise WorkloadError("layout=concat needs k and v of one format")
        both = torch.cat([k, v], -1)
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :], layout
    if layout == "vectorised":
        x, y = 16 // k.element_size(), 16 // v.element_size()
        pages, tokens, heads, dim = k.shape
        if dim % x or tokens % y:
            raise WorkloadError(f"layout=vectorised needs head_dim % {x} == 0 and page_size % {y} == 0")
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


def _to(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type == "cpu":
        return x
    # .to() would make a strided view contiguous; the strides are part of the case.
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype).set_(storage).to(device)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


GLM_GQA12 = DecodeWorkload(lens=(1024,) * 4, num_kv_heads=8, head_dim=128)
"""The probe: GLM-4.5-Air's attention, batch 4, context 1024."""
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")
"""Keys in FP8, values in FP4: most of FP4's capacity at a third of its error."""

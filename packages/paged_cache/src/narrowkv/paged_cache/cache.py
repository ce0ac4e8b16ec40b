"""A paged KV cache: tensors of an engine, with their layout, formats and descales."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from narrowkv.paged_cache.convert import descale_for, largest_per_head, page_chunks, store_pages
from narrowkv.paged_cache.descales import (
    PER_PAGE_GRANULARITIES,
    CacheSide,
    check_descale,
    check_exponent,
    check_fp4_scales,
    check_tensor_scale,
    descale_or_one,
    new_descale,
)
from narrowkv.paged_cache.key_transform import check_key_transform
from narrowkv.paged_cache.layouts import (
    LAYOUTS,
    CacheFormat,
    KVStrides,
    allocate,
    check_head_dims,
    logical_sizes,
    logical_view,
    strides_of,
)
from narrowkv.quant import KeyTransform
from narrowkv.quant.formats import check_storage, get_format
from narrowkv.quant.rounding import decode
from narrowkv.runtime.errors import (
    check_choice,
    check_positive_int,
    check_same_device,
    check_tensor,
    span_bytes,
)
from narrowkv.runtime.operation import ByIdentity

if TYPE_CHECKING:
    from narrowkv.paged_cache.page_table import PageTable

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Keys and values of all sequences, in pages. Holds references; nothing is copied.

    Two caches are equal only if they are the same object; `copy.deepcopy` makes one with its own memory.

    The storage format is part of the type and never guessed from the device: uint8 storage needs the tag, and
    a torch FP8 dtype must agree with it.

    Attributes:
        k, v: storage tensors as given, in `layout`.
        format: storage formats.
        layout: "NHD" `[num_pages, page_size, num_kv_heads, head_dim]`; "HND" `[num_pages, num_kv_heads,
            page_size, head_dim]`; "tokens" `[slots, num_kv_heads, head_dim]` (page size 1); "concat": NHD
            with K and V side by side on the last axis, passed as its two halves; "vectorised" (AITER): K
            `[num_pages, H, D/x, page_size, x]` and V `[num_pages, H, page_size/x, D, x]`, x = 16 / itemsize.
            FP4 and INT4 halve the last axis: uint8, element 2i in the low nibble.
        num_pages, page_size, num_kv_heads, head_dim: sizes of the logical cache.
        v_head_dim: channels of V, where they are fewer than the `head_dim` of K: of latent attention that is
            not absorbed 128 beside 192. 0 takes `head_dim`. 16-bit and FP8 caches alone have two widths.
        k_descale, v_descale: what stored numbers are multiplied by: a float, or an fp32 tensor; for FP4 a
            tensor of E8M0 scales (uint8) or E4M3 scales (float8_e4m3fn); for INT4 an fp32 tensor "token_head"
            with a zero point in the four lowest bits of each scale, see `narrowkv.quant.int_tokens`.
        k_granularity, v_granularity: what a descale tensor's axes are: "tensor" `[1]`, "head" `[H]`,
            "sequence_head" `[batch, H]`, "page_head" `[num_pages, H]`, "token_head" `[num_pages, page_size,
            H]`, "token_head_group" `[num_pages, page_size, H, head_dim / 16]` or `head_dim / 32`. FP4 has one
            of the last two.
        negative_zero_free: whether no FP8 byte is 0x80 or a NaN code, which holds for finite numbers that
            narrowkv wrote. It allows OCP bytes to be read faster on gfx942.
        k_tensor_scale, v_tensor_scale: what E4M3 scales are multiplied by, 1.0 for other formats.
        key_transform: offset, balance and rotation that kernels apply to new keys and to queries, or None.
            `dataclasses.replace` sets it. Methods of the cache give keys as they are stored.
    """

    k: torch.Tensor
    v: torch.Tensor
    format: CacheFormat
    layout: str
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    k_descale: float | torch.Tensor = 1.0
    v_descale: float | torch.Tensor = 1.0
    k_granularity: str = "tensor"
    v_granularity: str = "tensor"
    negative_zero_free: bool = False
    k_tensor_scale: float = 1.0
    v_tensor_scale: float = 1.0
    key_transform: KeyTransform | None = None
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        """Checks the descales, which `dataclasses.replace` may have changed."""
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        sizes = self.num_pages, self.page_size, self.num_kv_heads, self.head_dim
        for side in self.sides():
            name = f"{side.name}_descale"
            sizes = (*sizes[:3], side.head_dim)
            check_descale(name, side.descale, side.granularity, side.format, sizes, self.k.device, False)
            check_tensor_scale(side)
        check_key_transform(self.key_transform, self.num_kv_heads, self.head_dim, self.k)

    def sides(self) -> tuple[CacheSide, CacheSide]:
        """K and V, each with its format and descale."""
        return (
            CacheSide(
                "k", self.k, self.format.k, self.k_descale, self.k_granularity, self.head_dim,
                self.k_tensor_scale,
            ),
            CacheSide(
                "v", self.v, self.format.v, self.v_descale, self.v_granularity, self.v_head_dim,
                self.v_tensor_scale,
            ),
        )  # fmt: skip

    def static_scales(self) -> dict[str, torch.Tensor]:
        """The scale tensors that are no data of pages, by name; see `narrowkv.runtime.scales`."""
        found = {}
        for side in self.sides():
            if isinstance(side.descale, torch.Tensor) and side.granularity not in PER_PAGE_GRANULARITIES:
                found[f"{side.name}_descale"] = side.descale
        if self.key_transform is not None and self.key_transform.balance is not None:
            found["key_transform.balance"] = self.key_transform.balance
        return found

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        format: str | CacheFormat,
        v_head_dim: int | None = None,
        layout: str = "NHD",
        k_descale: float | torch.Tensor | None = None,
        v_descale: float | torch.Tensor | None = None,
        scale_group: int | None = None,
        scale_format: str = "e8m0",
        device: torch.device | str = "cpu",
        validate: bool | None = None,
    ) -> PagedKVCache:
        """Allocates a cache of zeros.

        Args:
            num_pages, page_size, num_kv_heads, head_dim: sizes; any page size >= 1.
            format: a format name or a `CacheFormat` pair.
            v_head_dim: channels of V; default those of K.
            layout: one of the layouts above; "concat" allocates one tensor with K|V on the last axis.
            k_descale, v_descale: static descales for `append`, 1.0 by default. By default INT8 and INT4 have
                a scale per token and head instead, which INT4 always has. FP4 sides have scales of their own,
                and with E4M3 scales a number given here multiplies the whole tensor besides.
            scale_group: FP4: channels per scale, 16 or 32, or None for one scale per position and head.
            scale_format: FP4: "e8m0" (powers of two; with `scale_group=32` OCP MX), or "e4m3", the same byte
                with a mantissa and half the error; see `narrowkv.quant.e4m3`. With `scale_group=16` that is
                NVFP4.
            device: where.
            validate: False leaves the values of descale tensors unread; see `from_tensors`.

        Raises:
            TypeError, ValueError: for sizes, names or descales that a cache cannot have.

        Example:
            >>> PagedKVCache.empty(4, 16, 2, 128, format="fp8_e4m3fn").bytes_per_token()
            512.0
            >>> PagedKVCache.empty(4, 16, 2, 128, format="fp4_e2m1").bytes_per_token()
            260.0
            >>> PagedKVCache.empty(4, 16, 2, 128, format="int4").bytes_per_token()
            272.0
            >>> PagedKVCache.empty(4, 16, 2, 192, v_head_dim=128, format="bf16").bytes_per_token()
            1280.0
        """
        parsed = CacheFormat.parse(format)
        check_choice("layout", layout, LAYOUTS)
        for name, value in [
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("num_kv_heads", num_kv_heads),
        ]:
            check_positive_int(name, value)
        check_positive_int("head_dim", head_dim)
        v_head_dim = check_positive_int("v_head_dim", head_dim if v_head_dim is None else v_head_dim)
        check_head_dims(head_dim, v_head_dim, parsed)
        if layout == "tokens" and page_size != 1:
            raise ValueError(f"page_size must be 1 for layout 'tokens', got {page_size}")
        formats = get_format(parsed.k), get_format(parsed.v)
        sizes = (num_pages, page_size, num_kv_heads, head_dim)
        check_fp4_scales(scale_group, scale_format, parsed, head_dim)
        (k_scales, k_number), (v_scales, v_number) = (
            new_descale(fmt, given, sizes, scale_group, scale_format, device)
            for fmt, given in zip(formats, (k_descale, v_descale), strict=True)
        )
        k, v = allocate(layout, sizes, v_head_dim, formats, device)
        made = cls.from_tensors(
            k, v, format=parsed, layout=layout, k_descale=k_scales, v_descale=v_scales,
            k_tensor_scale=k_number, v_tensor_scale=v_number, validate=validate,
        )  # fmt: skip
        return replace(made, negative_zero_free=True)

    @classmethod
    def from_tensors(
        cls,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        format: str | CacheFormat,
        layout: str = "NHD",
        k_descale: float | torch.Tensor | None = None,
        v_descale: float | torch.Tensor | None = None,
        k_granularity: str | None = None,
        v_granularity: str | None = None,
        k_tensor_scale: float = 1.0,
        v_tensor_scale: float = 1.0,
        negative_zero_free: bool = False,
        validate: bool | None = None,
    ) -> PagedKVCache:
        """Wraps an engine's own tensors.

        Args:
            k, v: storage in `layout`; heads and tokens may be strided, the last axis is contiguous. uint8 is
                taken for FP8.
            format: what the bytes are. Required: it is never guessed.
            layout: see the class.
            k_descale, v_descale: float, or fp32 tensor of a shape that tells its granularity; for FP4 uint8
                E8M0 scales or float8_e4m3fn scales, above zero, `[num_pages, page_size, H]` or `[num_pages,
                page_size, H, head_dim / group]` with groups of 16 or 32 channels; any strides but the last.
                Required except for 16-bit formats.
            k_granularity, v_granularity: the granularity, needed if the shape fits two.
            k_tensor_scale, v_tensor_scale: what E4M3 scales are multiplied by, NVFP4's second scale.
            negative_zero_free: a promise that no FP8 byte is 0x80 or a NaN code.
            validate: whether to read the values of descale tensors, which waits for the device. None reads
                those per tensor, head or sequence, unless they were read before and have not changed since;
                True reads fp32 scales of pages and tokens, and E4M3 scales, too; False reads none.

        Raises:
            TypeError, ValueError: before anything is read.

        Example:
            >>> k = torch.zeros(4, 2, 16, 128, dtype=torch.uint8)
            >>> cache = PagedKVCache.from_tensors(
            ...     k, k, k_descale=0.02, v_descale=0.03, format="fp8_e4m3fn", layout="HND"
            ... )
            >>> cache.page_size
            16
        """
        parsed = CacheFormat.parse(format)
        check_choice("layout", layout, LAYOUTS)
        check_tensor("k", k)
        check_tensor("v", v)
        k = check_storage("k", k, parsed.k)
        v = check_storage("v", v, parsed.v)
        check_same_device(k=k, v=v)
        sizes = logical_sizes("k", k, layout, parsed.k, is_key=True)
        v_sizes = logical_sizes("v", v, layout, parsed.v, is_key=False)
        if sizes[:3] != v_sizes[:3]:
            raise ValueError(
                f"v must hold the same [num_pages, page_size, num_kv_heads, head_dim] as k {sizes}, "
                f"but for head_dim, got {v_sizes}"
            )
        num_pages, page_size, heads, head_dim = sizes
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if heads < 1:
            raise ValueError(f"num_kv_heads must be at least 1, got {heads}")
        check_head_dims(head_dim, v_sizes[3], parsed)
        k_descale = descale_or_one("k_descale", k_descale, parsed.k)
        v_descale = descale_or_one("v_descale", v_descale, parsed.v)
        k_kind = check_descale("k_descale", k_descale, k_granularity, parsed.k, sizes, k.device, validate)
        v_kind = check_descale("v_descale", v_descale, v_granularity, parsed.v, v_sizes, v.device, validate)
        return cls(
            k, v, parsed, layout, num_pages, page_size, heads, head_dim, k_descale, v_descale, k_kind, v_kind,
            negative_zero_free, k_tensor_scale, v_tensor_scale, v_head_dim=v_sizes[3],
        )  # fmt: skip

    @property
    def k_strides(self) -> KVStrides:
        """Strides of K over the logical axes."""
        return strides_of(self.k, self.layout, is_key=True)

    @property
    def v_strides(self) -> KVStrides:
        """Strides of V over the logical axes."""
        return strides_of(self.v, self.layout, is_key=False)

    @property
    def needs_64_bit_addresses(self) -> bool:
        """Whether the offset of an element can be larger than 2**31 - 1 bytes."""
        return any(span_bytes(t) > _INT32_MAX for t in (self.k, self.v))

    def logical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V stored, as `[num_pages, page_size, num_kv_heads, head_dim]` (views unless vectorised).

        V has `v_head_dim` channels, here and in what other methods return.

        FP4 and INT4 stay packed: uint8 `[num_pages, page_size, num_kv_heads, head_dim / 2]`.
        """
        return logical_view(self.k, self.layout, is_key=True), logical_view(self.v, self.layout, is_key=False)

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as fp32 `[num_pages, page_size, num_kv_heads, head_dim]`.

        Raises:
            ValueError: for "sequence_head" descales, which belong to sequences and not to pages.
        """
        return self.dequantized_pages(slice(None))

    def dequantized_pages(self, pages: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some pages as fp32 `[pages, page_size, num_kv_heads, head_dim]`.

        Raises:
            ValueError: for "sequence_head" descales, which belong to sequences and not to pages.
        """
        found = []
        for side in self.sides():
            if side.granularity == "sequence_head":
                raise ValueError(
                    f"{side.name}_descale is per sequence: pages have no descale of their own; use gather"
                )
            tokens = logical_view(side.stored[pages], self.layout, is_key=side.is_key)
            found.append(side.numbers_of(tokens, pages))
        return found[0], found[1]

    def convert(
        self,
        format: str | CacheFormat,
        *,
        layout: str | None = None,
        k_descale: float | torch.Tensor | None = None,
        v_descale: float | torch.Tensor | None = None,
        scale_group: int | None = None,
        scale_format: str = "e8m0",
        exponent: str = "mse",
    ) -> PagedKVCache:
        """A new cache of another format, with the same tokens in the same pages.

        Its bytes are those that `append` writes for the dequantised tokens of this cache. Pages are converted
        in chunks; some hundred MiB of temporary memory are needed besides the new cache.

        Args:
            format: of the new cache, a format name or a `CacheFormat` pair.
            layout: of the new cache; default this one's. FP4 has no "vectorised".
            k_descale, v_descale: as for `empty`. Default 1.0 for 16 bits, one per token for INT8, and for
                FP8 one number a head: the largest finite magnitude that the head has in any page becomes the
                format's largest number. Tokens that are appended later share it, so pass calibrated ones if
                they may be larger, or a tensor `[num_pages, page_size, num_kv_heads]` for one per token.
            scale_group, scale_format: FP4: as for `empty`.
            exponent: FP4: how a scale is chosen, as for `append`.

        Raises:
            ValueError: for "sequence_head" descales, whose pages have no number of their own; or for sizes
                and names that a cache cannot have.

        Example:
            >>> cache = PagedKVCache.empty(4, 16, 2, 64, format="bf16")
            >>> _ = cache.k.fill_(6.0)
            >>> fp4 = cache.convert("fp4_e2m1")
            >>> fp4.bytes_per_token() / cache.bytes_per_token(), float(fp4.dequantize()[0].max())
            (0.2578125, 6.0)
        """
        parsed = CacheFormat.parse(format)
        pages_of_chunks = page_chunks(self.num_pages, self.page_size * self.num_kv_heads * self.head_dim)
        if None in (k_descale, v_descale) and "fp8" in (get_format(parsed.k).kind, get_format(parsed.v).kind):
            largest_k, largest_v = largest_per_head(map(self.dequantized_pages, pages_of_chunks))
            k_descale = descale_for(largest_k, parsed.k) if k_descale is None else k_descale
            v_descale = descale_for(largest_v, parsed.v) if v_descale is None else v_descale
        new = PagedKVCache.empty(
            self.num_pages,
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
            format=parsed,
            v_head_dim=self.v_head_dim,
            layout=self.layout if layout is None else layout,
            k_descale=k_descale,
            v_descale=v_descale,
            scale_group=scale_group,
            scale_format=scale_format,
            device=self.k.device,
        )
        check_exponent(exponent, new.k_descale, new.v_descale)
        for pages in pages_of_chunks:
            for x, side in zip(self.dequantized_pages(pages), new.sides(), strict=True):
                store_pages(x, side, pages, new.layout, exponent)
        return replace(new, negative_zero_free=self.negative_zero_free, key_transform=self.key_transform)

    def gather(self, page_table: PageTable, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence's dequantised K and V, `[seq_len, num_kv_heads, head_dim]` fp32; waits for the device.

        V has `v_head_dim` channels.

        Raises:
            ValueError: a page id outside the cache.
        """
        pages, seq_len = page_table.pages_of(seq)
        if bool(((pages < 0) | (pages >= self.num_pages)).any()):
            raise ValueError(
                f"page ids of sequence {seq} must lie in [0, {self.num_pages}), got {pages.tolist()[:16]}"
            )
        out = []
        for stored, side in zip(self.logical(), self.sides(), strict=True):
            if side.granularity == "sequence_head":
                assert isinstance(side.descale, torch.Tensor)
                rows = decode(stored[pages], side.format) * side.descale[seq][:, None]
            else:
                rows = side.numbers_of(stored[pages], pages)
            out.append(rows.reshape(-1, self.num_kv_heads, side.head_dim)[:seq_len])
        return out[0], out[1]

    def bytes_per_token(self) -> float:
        """Bytes of K, V and per-token descales for one token over all heads."""
        bits = sum(side.head_dim * get_format(side.format).bits for side in self.sides())
        total = self.num_kv_heads * bits / 8
        for side in self.sides():
            if isinstance(side.descale, torch.Tensor) and side.granularity in PER_PAGE_GRANULARITIES:
                per_page = math.prod(side.descale.shape[1:]) * side.descale.element_size()
                total += per_page / self.page_size
        return total

    def tokens_per_gib(self) -> int:
        """Tokens that one GiB holds."""
        return int(2**30 / self.bytes_per_token())


CACHE_KINDS: ByIdentity[int] = ByIdentity()
_kind_numbers: dict[Any, int] = {}


def kind_of_cache(cache: PagedKVCache) -> int:
    """The same number for caches of one device, format, shape of pages and granularities of descales.

    `CACHE_KINDS` has it from then on.
    """
    kind = (
        cache.format, cache.head_dim, cache.v_head_dim, cache.num_kv_heads, cache.page_size,
        cache.k_granularity, cache.v_granularity, *(side.group for side in cache.sides()), cache.k.device,
    )  # fmt: skip
    return CACHE_KINDS.keep(cache, _kind_numbers.setdefault(kind, len(_kind_numbers)))


def fp4_scales(cache: PagedKVCache) -> dict[str, Any]:
    """`scale_group` and `scale_format` of a cache, as `plan_decode` takes them with a shape."""
    fp4 = [side for side in cache.sides() if side.format == "fp4_e2m1"]
    if not fp4:
        return {}
    e4m3 = any(isinstance(side.descale, torch.Tensor) and side.descale.dtype != torch.uint8 for side in fp4)
    return {
        "scale_group": max(side.group for side in fp4) or None,
        "scale_format": "e4m3" if e4m3 else "e8m0",
    }

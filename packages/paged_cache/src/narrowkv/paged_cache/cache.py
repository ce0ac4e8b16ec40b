"""A paged KV cache as a set of strides over tensors that an engine already has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from narrowkv.quant.errors import (
    check_choice,
    check_descale_float,
    check_descale_tensor,
    check_positive_int,
    check_same_device,
    check_tensor,
)
from narrowkv.quant.formats import Format, check_storage, get_format

if TYPE_CHECKING:
    from narrowkv.paged_cache.page_table import PageTable

LAYOUTS = ("NHD", "HND", "tokens", "concat", "vectorised")
GRANULARITIES = ("tensor", "head", "sequence_head", "page_head", "token_head")
_CACHE_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class CacheFormat:
    """Storage formats of K and V, which may differ.

    Example:
        >>> str(CacheFormat.parse("fp8_e4m3fn"))
        'fp8_e4m3fn'
    """

    k: str
    v: str

    @classmethod
    def parse(cls, value: str | CacheFormat) -> CacheFormat:
        """One name for both, or a pair.

        Raises:
            ValueError: for a format that a cache cannot have.
        """
        parsed = value if isinstance(value, CacheFormat) else cls(value, value)
        check_choice("format.k", parsed.k, _CACHE_FORMATS)
        check_choice("format.v", parsed.v, _CACHE_FORMATS)
        return parsed

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"


@dataclass(frozen=True)
class KVStrides:
    """Where element [page, token, head, dim] of K or V lies; strides in elements.

    Attributes:
        page, token, head: strides of the logical axes. The last axis has stride 1 unless `vec` is set.
        outer: vectorised layout only: stride between groups of `vec` along dim (K) or along tokens (V).
        vec: 0, or x of the vectorised layout: K's dim d lies at `(d // x) * outer + d % x` and its token at
            `t * x`; V's token t lies at `(t // x) * outer + t % x` and its dim at `d * x`.
    """

    page: int
    token: int
    head: int
    outer: int = 0
    vec: int = 0


@dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of all sequences, in pages. Holds references; nothing is copied.

    The storage format is part of the type and never guessed from the device: uint8 storage needs the tag, and
    a torch FP8 dtype must agree with it.

    Attributes:
        k, v: storage tensors as given, in `layout`.
        format: storage formats.
        layout: "NHD" `[num_pages, page_size, num_kv_heads, head_dim]`; "HND" `[num_pages, num_kv_heads,
            page_size, head_dim]`; "tokens" `[slots, num_kv_heads, head_dim]` (page size 1); "concat" NHD with
            K|V on the last axis,
            passed as the two halves; "vectorised" K `[num_pages, H, D/x, page_size, x]`, V `[num_pages, H,
            page_size/x, D,
            x]`, x = 16 / itemsize (AITER).
        num_pages, page_size, num_kv_heads, head_dim: sizes of the logical cache.
        k_descale, v_descale: what stored numbers are multiplied by: a float, or an fp32 tensor.
        k_granularity, v_granularity: what a descale tensor's axes are: "tensor" `[1]`, "head" `[H]`,
            "sequence_head" `[batch, H]`, "page_head" `[num_pages, H]`, "token_head" `[num_pages, page_size,
            H]`.
        negative_zero_free: no FP8 byte is 0x80, nor a NaN code: narrowkv's own finite writes. It allows a
            faster read of OCP bytes on gfx942.
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

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        format: str | CacheFormat,
        layout: str = "NHD",
        k_descale: float | torch.Tensor = 1.0,
        v_descale: float | torch.Tensor = 1.0,
        device: torch.device | str = "cpu",
    ) -> PagedKVCache:
        """A zeroed cache of one's own.

        Args:
            num_pages, page_size, num_kv_heads, head_dim: sizes; any page size >= 1.
            format: a format name or a `CacheFormat` pair.
            layout: one of the layouts above; "concat" allocates one tensor with K|V on the last axis.
            k_descale, v_descale: static descales for `append`.
            device: where.

        Raises:
            TypeError, ValueError: for sizes or names that a cache cannot have.

        Example:
            >>> PagedKVCache.empty(4, 16, 2, 128, format="fp8_e4m3fn").bytes_per_token()
            512.0
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
        if layout == "tokens" and page_size != 1:
            raise ValueError(f"page_size must be 1 for layout 'tokens', got {page_size}")
        formats = get_format(parsed.k), get_format(parsed.v)
        if layout == "concat":
            if parsed.k != parsed.v:
                raise ValueError(f"layout 'concat' needs one format for K and V, got {parsed}")
            both = _zeros((num_pages, page_size, num_kv_heads, 2 * head_dim), formats[0], device)
            k, v = both[..., :head_dim], both[..., head_dim:]
        else:
            shapes = _storage_shapes(layout, num_pages, page_size, num_kv_heads, head_dim, formats)
            k, v = (_zeros(shape, fmt, device) for shape, fmt in zip(shapes, formats, strict=True))
        made = cls.from_tensors(k, v, format=parsed, layout=layout, k_descale=k_descale, v_descale=v_descale)
        return replace(made, negative_zero_free=True)

    @classmethod
    def from_tensors(
        cls,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        format: str | CacheFormat,
        layout: str = "NHD",
        k_descale: float | torch.Tensor = 1.0,
        v_descale: float | torch.Tensor = 1.0,
        k_granularity: str | None = None,
        v_granularity: str | None = None,
        negative_zero_free: bool = False,
        validate: bool = False,
    ) -> PagedKVCache:
        """Wraps an engine's own tensors.

        Args:
            k, v: storage in `layout`; heads and tokens may be strided, the last axis is contiguous. uint8 is
                taken for FP8.
            format: what the bytes are. Required: it is never guessed.
            layout: see the class.
            k_descale, v_descale: float, or fp32 tensor of a shape that tells its granularity.
            k_granularity, v_granularity: name it where the shape could mean two things.
            negative_zero_free: the caller vouches that no FP8 byte is 0x80 or a NaN code.
            validate: also look at descale values, which waits for the device.

        Raises:
            TypeError, ValueError: before anything is read.

        Example:
            >>> k = torch.zeros(4, 2, 16, 128, dtype=torch.uint8)
            >>> PagedKVCache.from_tensors(k, k, k_descale=0.02, format="fp8_e4m3fn", layout="HND").page_size
            16
        """
        parsed = CacheFormat.parse(format)
        check_choice("layout", layout, LAYOUTS)
        check_tensor("k", k)
        check_tensor("v", v)
        k = check_storage("k", k, parsed.k)
        v = check_storage("v", v, parsed.v)
        check_same_device(k=k, v=v)
        sizes = _logical_sizes("k", k, layout, is_key=True)
        if sizes != (other := _logical_sizes("v", v, layout, is_key=False)):
            raise ValueError(
                f"v must hold the same [num_pages, page_size, num_kv_heads, head_dim] as k {sizes}, "
                f"got {other}"
            )
        num_pages, page_size, heads, head_dim = sizes
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        k_kind = _check_descale("k_descale", k_descale, k_granularity, sizes, k.device, validate)
        v_kind = _check_descale("v_descale", v_descale, v_granularity, sizes, v.device, validate)
        return cls(
            k,
            v,
            parsed,
            layout,
            num_pages,
            page_size,
            heads,
            head_dim,
            k_descale,
            v_descale,
            k_kind,
            v_kind,
            negative_zero_free,
        )

    @property
    def k_strides(self) -> KVStrides:
        """Strides of K over the logical axes."""
        return _strides(self.k, self.layout, is_key=True)

    @property
    def v_strides(self) -> KVStrides:
        """Strides of V over the logical axes."""
        return _strides(self.v, self.layout, is_key=False)

    @property
    def needs_64_bit_addresses(self) -> bool:
        """Whether an element offset can pass 2**31 - 1 bytes."""
        return any(_span_bytes(t) > _INT32_MAX for t in (self.k, self.v))

    def logical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V stored, as `[num_pages, page_size, num_kv_heads, head_dim]` (views unless vectorised)."""
        return _logical_view(self.k, self.layout, is_key=True), _logical_view(
            self.v, self.layout, is_key=False
        )

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as fp32 `[num_pages, page_size, num_kv_heads, head_dim]`.

        Raises:
            ValueError: for "sequence_head" descales, which belong to sequences and not to pages.
        """
        for name, kind in (("k_descale", self.k_granularity), ("v_descale", self.v_granularity)):
            if kind == "sequence_head":
                raise ValueError(f"{name} is per sequence: pages have no descale of their own; use gather")
        k, v = self.logical()
        return (
            k.float() * _page_factor(self.k_descale, self.k_granularity),
            v.float() * _page_factor(self.v_descale, self.v_granularity),
        )

    def gather(self, page_table: PageTable, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence's dequantised K and V, `[seq_len, num_kv_heads, head_dim]` fp32; reads its length."""
        pages, seq_len = page_table.pages_of(seq)
        k, v = self.logical()
        out = []
        for stored, descale, kind in (
            (k, self.k_descale, self.k_granularity),
            (v, self.v_descale, self.v_granularity),
        ):
            rows = stored[pages].float()
            if kind == "sequence_head":
                assert isinstance(descale, torch.Tensor)
                rows = rows * descale[seq][:, None]
            else:
                factor = _page_factor(descale, kind)
                rows = rows * (
                    factor[pages]
                    if isinstance(factor, torch.Tensor) and kind in ("page_head", "token_head")
                    else factor
                )
            out.append(rows.reshape(-1, self.num_kv_heads, self.head_dim)[:seq_len])
        return out[0], out[1]

    def bytes_per_token(self) -> float:
        """Bytes of K, V and per-token descales for one token over all heads."""
        bits = get_format(self.format.k).bits + get_format(self.format.v).bits
        total = self.num_kv_heads * self.head_dim * bits / 8
        for descale, kind in ((self.k_descale, self.k_granularity), (self.v_descale, self.v_granularity)):
            if isinstance(descale, torch.Tensor) and kind in ("page_head", "token_head"):
                total += (
                    self.num_kv_heads
                    * descale.element_size()
                    / (self.page_size if kind == "page_head" else 1)
                )
        return total

    def tokens_per_gib(self) -> int:
        """Tokens that one GiB holds."""
        return int(2**30 / self.bytes_per_token())


def _zeros(shape: tuple[int, ...], fmt: Format, device: torch.device | str) -> torch.Tensor:
    dtype = fmt.storage_dtype
    if fmt.kind == "fp8":
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _storage_shapes(
    layout: str, pages: int, page_size: int, heads: int, dim: int, formats: tuple[Format, Format]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if layout == "NHD":
        return ((pages, page_size, heads, dim),) * 2
    if layout == "HND":
        return ((pages, heads, page_size, dim),) * 2
    if layout == "tokens":
        return ((pages, heads, dim),) * 2
    x, y = (16 // fmt.storage_dtype.itemsize for fmt in formats)
    if dim % x or page_size % y:
        raise ValueError(
            f"layout 'vectorised' needs head_dim % {x} == 0 and page_size % {y} == 0, "
            f"got {dim} and {page_size}"
        )
    return (pages, heads, dim // x, page_size, x), (pages, heads, page_size // y, dim, y)


def _logical_sizes(name: str, t: torch.Tensor, layout: str, *, is_key: bool) -> tuple[int, int, int, int]:
    want = {"tokens": 3, "vectorised": 5}.get(layout, 4)
    if t.dim() != want:
        raise ValueError(
            f"{name} must have {want} dimensions for layout {layout!r}, got shape {tuple(t.shape)}"
        )
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension (stride 1), got stride {t.stride(-1)}"
        )
    s = t.shape
    if layout == "tokens":
        return s[0], 1, s[1], s[2]
    if layout == "HND":
        return s[0], s[2], s[1], s[3]
    if layout == "vectorised":
        x = 16 // t.element_size()
        if s[4] != x or t.stride(3) != x:
            raise ValueError(
                f"{name} must end in packed groups of x = {x}, got shape {tuple(s)} with strides {t.stride()}"
            )
        return (s[0], s[3], s[1], s[2] * x) if is_key else (s[0], s[2] * x, s[1], s[3])
    return s[0], s[1], s[2], s[3]


def _strides(t: torch.Tensor, layout: str, *, is_key: bool) -> KVStrides:
    st = t.stride()
    if layout == "tokens":
        return KVStrides(st[0], 0, st[1])
    if layout == "HND":
        return KVStrides(st[0], st[2], st[1])
    if layout == "vectorised":
        return KVStrides(st[0], st[3] if is_key else 0, st[1], outer=st[2], vec=t.shape[4])
    return KVStrides(st[0], st[1], st[2])


def _logical_view(t: torch.Tensor, layout: str, *, is_key: bool) -> torch.Tensor:
    if layout == "tokens":
        return t.unsqueeze(1)
    if layout == "HND":
        return t.transpose(1, 2)
    if layout == "vectorised":
        pages, heads = t.shape[:2]
        bits = t.view(torch.uint8) if t.element_size() == 1 else t
        # K [p, h, d/x, t, x] -> [p, t, h, d/x, x]; V [p, h, t/x, d, x] -> [p, t/x, x, h, d].
        moved = bits.permute(0, 3, 1, 2, 4) if is_key else bits.permute(0, 2, 4, 1, 3)
        tokens, dim = (
            (t.shape[3], t.shape[2] * t.shape[4]) if is_key else (t.shape[2] * t.shape[4], t.shape[3])
        )
        return moved.reshape(pages, tokens, heads, dim).view(t.dtype)
    return t


def _span_bytes(t: torch.Tensor) -> int:
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _page_factor(descale: float | torch.Tensor, kind: str) -> float | torch.Tensor:
    """The descale shaped to multiply `[num_pages, page_size, num_kv_heads, head_dim]`."""
    if not isinstance(descale, torch.Tensor):
        return descale
    if kind == "tensor":
        return descale.view(1, 1, 1, 1)
    if kind == "head":
        return descale.view(1, 1, -1, 1)
    return descale[:, None, :, None] if kind == "page_head" else descale[..., None]


def _check_descale(
    name: str,
    descale: float | torch.Tensor,
    granularity: str | None,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    validate: bool,
) -> str:
    """Checks a descale and returns its granularity."""
    if granularity is not None:
        check_choice(name.replace("descale", "granularity"), granularity, GRANULARITIES)
    if not isinstance(descale, torch.Tensor):
        check_descale_float(name, descale)
        if math.isinf(descale):
            raise ValueError(f"{name} must be finite, got {descale}")
        return "tensor"
    check_descale_tensor(name, descale, validate=validate)
    if descale.device != device:
        raise ValueError(f"{name} must be on {device} like the cache, got {descale.device}")
    num_pages, page_size, heads, _ = sizes
    shape = tuple(descale.shape)
    fits = {
        "tensor": shape == (1,),
        "head": shape == (heads,),
        "sequence_head": len(shape) == 2 and shape[1] == heads,
        "page_head": shape == (num_pages, heads),
        "token_head": shape == (num_pages, page_size, heads),
    }
    if granularity is not None:
        if not fits[granularity]:
            raise ValueError(
                f"{name} does not have the shape of granularity {granularity!r}, "
                f"got {shape} for a cache {sizes}"
            )
        return granularity
    # [1] for one head is the same either way; [num_pages, H] could also be [batch, H].
    kinds = [kind for kind, fit in fits.items() if fit]
    if kinds == ["sequence_head", "page_head"]:
        raise ValueError(
            f"{name} of shape {shape} may be per sequence or per page: "
            f"pass {name.replace('descale', 'granularity')}"
        )
    if not kinds:
        raise ValueError(
            f"{name} must be a float or have shape [1], [{heads}], [batch, {heads}], "
            f"[{num_pages}, {heads}] or "
            f"[{num_pages}, {page_size}, {heads}], got {shape}"
        )
    return kinds[0]

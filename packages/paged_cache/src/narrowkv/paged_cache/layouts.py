"""Formats and layouts of caches: where an element lies, shapes of storage, the logical view of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.quant.formats import Format, get_format
from narrowkv.runtime.errors import UnsupportedError, check_choice

_CACHE_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1", "int8", "int4")
LAYOUTS = ("NHD", "HND", "tokens", "concat", "vectorised")
# Head dimensions that attention kernels support.
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 320, 512)
# Those of decode: K of 576 channels, as latent attention has them, beside a V of fewer.
DECODE_HEAD_DIMS = (*HEAD_DIMS, 576)


@dataclass(frozen=True)
class CacheFormat:
    """Storage formats of K and V, which may differ.

    Example:
        >>> str(CacheFormat.parse("fp8_e4m3fn"))
        'fp8_e4m3fn'
        >>> str(CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1"))
        'k=fp8_e4m3fn,v=fp4_e2m1'
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


def check_head_dim(head_dim: int) -> None:
    """Refuses a head_dim that no attention kernel supports.

    Raises:
        UnsupportedError: the message lists those that are supported.
    """
    if head_dim not in DECODE_HEAD_DIMS:
        served = ", ".join(map(str, DECODE_HEAD_DIMS))
        raise UnsupportedError(
            f"head_dim must be one of {served}, which attention kernels serve, got {head_dim}"
        )


def check_head_dims(head_dim: int, v_head_dim: int, format: CacheFormat) -> None:
    """Refuses widths of K and V that no attention kernel supports.

    Raises:
        UnsupportedError: what is supported.
    """
    check_head_dim(head_dim)
    if v_head_dim == head_dim != 576:
        return
    if v_head_dim not in HEAD_DIMS or v_head_dim > head_dim:
        raise UnsupportedError(
            f"v_head_dim must be head_dim, or less and one of {', '.join(map(str, HEAD_DIMS))}, got "
            f"v_head_dim {v_head_dim} with head_dim {head_dim}"
        )
    if any(get_format(name).kind not in ("float", "fp8") for name in (format.k, format.v)):
        raise UnsupportedError(
            "v_head_dim must be head_dim unless K and V are both in 16 bits or FP8, got "
            f"v_head_dim {v_head_dim} with head_dim {head_dim} for {format}"
        )


class HeadShape:
    """The heads of a call over a paged cache: what shapes of decode and of prefill have in common."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        if self.v_head_dim == self.head_dim:
            object.__setattr__(self, "v_head_dim", 0)  # shapes that are alike are equal

    @property
    def v_dim(self) -> int:
        """Channels of V and of the output."""
        return self.v_head_dim or self.head_dim

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class KVStrides:
    """Where element [page, token, head, dim] of K or V lies; strides in stored elements (FP4: bytes).

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


def zeros(shape: tuple[int, ...], fmt: Format, device: torch.device | str) -> torch.Tensor:
    """A tensor of zeros in the storage dtype of a format."""
    dtype = fmt.storage_dtype
    if fmt.kind == "fp8":
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def allocate(
    layout: str,
    sizes: tuple[int, int, int, int],
    v_head_dim: int,
    formats: tuple[Format, Format],
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of zeros; sizes: num_pages, page_size, num_kv_heads, head_dim.

    Raises:
        ValueError: two formats in one tensor.
    """
    if layout == "concat":
        fmt = formats[0]
        if fmt != formats[1]:
            raise ValueError(
                f"layout 'concat' needs one format for K and V, got k={fmt.name},v={formats[1].name}"
            )
        size = 8 * fmt.storage_dtype.itemsize
        width, v_width = sizes[3] * fmt.bits // size, v_head_dim * fmt.bits // size
        both = zeros((*sizes[:3], width + v_width), fmt, device)
        return both[..., :width], both[..., width:]
    shapes = storage_shapes(layout, *sizes, v_head_dim, formats)
    k, v = (zeros(shape, fmt, device) for shape, fmt in zip(shapes, formats, strict=True))
    return k, v


def storage_shapes(
    layout: str, pages: int, page_size: int, heads: int, dim: int, v_dim: int, formats: tuple[Format, Format]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Storage shapes of K and V in a layout."""
    widths = [
        width * fmt.bits // (8 * fmt.storage_dtype.itemsize)
        for width, fmt in zip((dim, v_dim), formats, strict=True)
    ]
    if layout == "NHD":
        return (pages, page_size, heads, widths[0]), (pages, page_size, heads, widths[1])
    if layout == "HND":
        return (pages, heads, page_size, widths[0]), (pages, heads, page_size, widths[1])
    if layout == "tokens":
        return (pages, heads, widths[0]), (pages, heads, widths[1])
    _refuse_packed_vectorised(*formats)
    x, y = (16 // fmt.storage_dtype.itemsize for fmt in formats)
    if dim % x or page_size % y:
        raise ValueError(
            f"layout 'vectorised' needs head_dim % {x} == 0 and page_size % {y} == 0, "
            f"got {dim} and {page_size}"
        )
    return (pages, heads, dim // x, page_size, x), (pages, heads, page_size // y, v_dim, y)


def _refuse_packed_vectorised(*formats: Format) -> None:
    packed = [fmt.name for fmt in formats if fmt.is_packed]
    if packed:
        raise UnsupportedError(
            f"layout 'vectorised' is not defined for {packed[0]}; layouts that are: NHD, HND, tokens, concat"
        )


def logical_sizes(
    name: str, t: torch.Tensor, layout: str, format_name: str, *, is_key: bool
) -> tuple[int, int, int, int]:
    """Checks storage against its layout: `(num_pages, page_size, num_kv_heads, head_dim)`."""
    fmt = get_format(format_name)
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
    head_dim = s[-1] * t.element_size() * 8 // fmt.bits
    if layout == "tokens":
        return s[0], 1, s[1], head_dim
    if layout == "HND":
        return s[0], s[2], s[1], head_dim
    if layout == "vectorised":
        _refuse_packed_vectorised(fmt)
        x = 16 // t.element_size()
        if s[4] != x or t.stride(3) != x:
            raise ValueError(
                f"{name} must end in packed groups of x = {x}, got shape {tuple(s)} with strides {t.stride()}"
            )
        return (s[0], s[3], s[1], s[2] * x) if is_key else (s[0], s[2] * x, s[1], s[3])
    return s[0], s[1], s[2], head_dim


def strides_of(t: torch.Tensor, layout: str, *, is_key: bool) -> KVStrides:
    """Strides of storage over the logical axes."""
    st = t.stride()
    if layout == "tokens":
        return KVStrides(st[0], 0, st[1])
    if layout == "HND":
        return KVStrides(st[0], st[2], st[1])
    if layout == "vectorised":
        return KVStrides(st[0], st[3] if is_key else 0, st[1], outer=st[2], vec=t.shape[4])
    return KVStrides(st[0], st[1], st[2])


def logical_view(t: torch.Tensor, layout: str, *, is_key: bool) -> torch.Tensor:
    """Storage as `[num_pages, page_size, num_kv_heads, stored elements]`; a copy only if vectorised."""
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


def from_logical(x: torch.Tensor, layout: str, *, is_key: bool) -> torch.Tensor:
    """The inverse of `logical_view`: `[num_pages, page_size, num_kv_heads, stored elements]` in a layout."""
    if layout == "tokens":
        return x.squeeze(1)
    if layout == "HND":
        return x.transpose(1, 2)
    if layout == "vectorised":
        pages, tokens, heads, dim = x.shape
        size = 16 // x.element_size()
        bits = x.view(torch.uint8) if x.element_size() == 1 else x
        if is_key:
            moved = bits.view(pages, tokens, heads, dim // size, size).permute(0, 2, 3, 1, 4)
        else:
            moved = bits.view(pages, tokens // size, size, heads, dim).permute(0, 3, 1, 4, 2)
        return moved.contiguous().view(x.dtype)
    return x

"""Descales of a cache: their granularities, what fits which format, and how they multiply pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowkv.paged_cache.layouts import CacheFormat
from narrowkv.quant.e8m0 import E8M0_BIAS, e8m0_decode
from narrowkv.quant.formats import Format, get_format
from narrowkv.quant.groups import EXPONENT_RULES
from narrowkv.quant.int_tokens import dequantize_tokens_int4
from narrowkv.quant.rounding import decode
from narrowkv.runtime.errors import check_choice, check_descale_float, check_descale_tensor, check_dtype
from narrowkv.runtime.scales import check_scales

GRANULARITIES = ("tensor", "head", "sequence_head", "page_head", "token_head", "token_head_group")
PER_TOKEN_GRANULARITIES = ("token_head", "token_head_group")
PER_PAGE_GRANULARITIES = ("page_head", *PER_TOKEN_GRANULARITIES)
SCALE_FORMATS = ("e8m0", "e4m3")  # of FP4's scales
SCALE_GROUPS = (16, 32)  # channels that can share a scale of FP4; OCP MX has 32, NVFP4 16
_E4M3_ONE = 0x38


class CacheSide(NamedTuple):
    """K or V of a cache.

    Attributes:
        name: "k" or "v".
        stored: the storage tensor, in the cache's layout.
        format: its storage format.
        descale: what stored numbers are multiplied by.
        granularity: what the axes of a descale tensor are.
        head_dim: channels of a head.
        tensor_scale: what stored numbers are multiplied by besides their scales.
    """

    name: str
    stored: torch.Tensor
    format: str
    descale: float | torch.Tensor
    granularity: str
    head_dim: int
    tensor_scale: float = 1.0

    @property
    def group(self) -> int:
        """Channels that share a scale; 0 if a head has one scale, or none."""
        if self.granularity != "token_head_group":
            return 0
        assert isinstance(self.descale, torch.Tensor)
        return self.head_dim // self.descale.shape[-1]

    def numbers_of(self, stored: torch.Tensor, pages: slice | torch.Tensor) -> torch.Tensor:
        """Stored elements of some pages `[pages, page_size, num_kv_heads, ...]` as fp32 numbers."""
        if self.format == "int4":
            assert isinstance(self.descale, torch.Tensor)
            return dequantize_tokens_int4(stored, self.descale[pages])
        return decode(stored, self.format) * self.factor_of(pages)

    @property
    def is_key(self) -> bool:
        """Whether this is K."""
        return self.name == "k"

    def descale_of(self, pages: slice | torch.Tensor) -> float | torch.Tensor:
        """The descale of some pages; all pages share it unless its granularity has an axis of pages."""
        if isinstance(self.descale, torch.Tensor) and self.granularity in PER_PAGE_GRANULARITIES:
            return self.descale[pages]
        return self.descale

    def factor_of(self, pages: slice | torch.Tensor) -> float | torch.Tensor:
        """What multiplies some pages `[pages, page_size, num_kv_heads, head_dim]`."""
        descale, kind = self.descale_of(pages), self.granularity
        if not isinstance(descale, torch.Tensor):
            return descale
        if kind == "tensor":
            return descale.view(1, 1, 1, 1)
        if kind == "head":
            return descale.view(1, 1, -1, 1)
        descale = e8m0_decode(descale) if descale.dtype == torch.uint8 else descale.float()
        descale = descale * self.tensor_scale
        if self.group:
            return descale.repeat_interleave(self.group, -1)
        return descale[:, None, :, None] if kind == "page_head" else descale[..., None]


def check_fp4_scales(scale_group: int | None, scale_format: str, format: CacheFormat, head_dim: int) -> None:
    """Refuses options of FP4 scales that a cache of this format cannot have.

    Raises:
        TypeError, ValueError: naming the option and what it must be.
    """
    has_fp4 = any(get_format(name).kind == "fp4" for name in (format.k, format.v))
    if scale_group is not None and (scale_group not in SCALE_GROUPS or not has_fp4 or head_dim % scale_group):
        raise ValueError(
            f"scale_group must be None, or {' or '.join(map(str, SCALE_GROUPS))} for an fp4_e2m1 cache with "
            f"head_dim a multiple of it, got {scale_group!r} for {format} with head_dim {head_dim}"
        )
    check_choice("scale_format", scale_format, SCALE_FORMATS)
    if scale_format != "e8m0" and not has_fp4:
        raise ValueError(f"scale_format {scale_format!r} is for an fp4_e2m1 cache, got {format}")


def check_tensor_scale(side: CacheSide) -> None:
    """Refuses a number for the whole tensor where there are no E4M3 scales that it could multiply.

    Raises:
        TypeError, ValueError: naming it and what it must be.
    """
    name = f"{side.name}_tensor_scale"
    check_descale_float(name, side.tensor_scale)
    has_e4m3 = isinstance(side.descale, torch.Tensor) and side.descale.dtype == torch.float8_e4m3fn
    if side.tensor_scale != 1.0 and not has_e4m3:
        raise ValueError(f"{name} must be 1.0 without E4M3 scales, got {side.tensor_scale}")


def fp4_scales_of_one(
    sizes: tuple[int, int, int, int], scale_group: int | None, scale_format: str, device: torch.device | str
) -> torch.Tensor:
    """Scales of 1.0 for each position and head, or for each group of channels, of an FP4 side."""
    shape = sizes[:3] if scale_group is None else (*sizes[:3], sizes[3] // scale_group)
    if scale_format == "e8m0":
        return torch.full(shape, E8M0_BIAS, dtype=torch.uint8, device=device)
    return torch.full(shape, _E4M3_ONE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)


def new_descale(
    fmt: Format,
    given: float | torch.Tensor | None,
    sizes: tuple[int, int, int, int],
    scale_group: int | None,
    scale_format: str,
    device: torch.device | str,
) -> tuple[float | torch.Tensor, float]:
    """The descale of a new side, `given` or as its format has it, and what E4M3 scales are multiplied by."""
    if fmt.kind == "fp4":
        number = float(given) if given is not None and scale_format == "e4m3" else 1.0
        return fp4_scales_of_one(sizes, scale_group, scale_format, device), number
    if given is None and fmt.kind == "int":
        return torch.ones(sizes[:3], device=device), 1.0
    return 1.0 if given is None else given, 1.0


def descale_or_one(name: str, descale: float | torch.Tensor | None, format_name: str) -> float | torch.Tensor:
    """The descale, or 1.0 for a 16-bit side that has none.

    Raises:
        ValueError: a narrow format without a descale.
    """
    if descale is not None:
        return descale
    if get_format(format_name).kind != "float":
        raise ValueError(
            f"{name} must be given for {format_name}: what the stored numbers are to be multiplied by, as "
            "their writer chose it (1.0 for numbers that were cast as they are)"
        )
    return 1.0


def check_descale(
    name: str,
    descale: float | torch.Tensor,
    granularity: str | None,
    format_name: str,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    validate: bool | None,
) -> str:
    """Checks a descale and returns its granularity; `validate` as for `PagedKVCache.from_tensors`."""
    kind = _granularity_of(name, descale, granularity, format_name, sizes, device, validate)
    if isinstance(descale, torch.Tensor) and descale.dtype == torch.float32:
        if validate or kind not in PER_PAGE_GRANULARITIES:
            check_scales({name: descale}, validate)
    return kind


def _granularity_of(
    name: str,
    descale: float | torch.Tensor,
    granularity: str | None,
    format_name: str,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    validate: bool | None,
) -> str:
    if granularity is not None:
        check_choice(name.replace("descale", "granularity"), granularity, GRANULARITIES)
    if get_format(format_name).kind == "fp4":
        return _check_fp4_scales(name, descale, granularity, sizes, device, validate)
    if format_name == "int4" and (not isinstance(descale, torch.Tensor) or tuple(descale.shape) != sizes[:3]):
        got = tuple(descale.shape) if isinstance(descale, torch.Tensor) else repr(descale)
        raise ValueError(
            f"{name} must be fp32 {list(sizes[:3])} for int4, scales with a zero point in their four lowest "
            f"bits, got {got}"
        )
    if not isinstance(descale, torch.Tensor):
        check_descale_float(name, descale)
        if granularity not in (None, "tensor"):
            raise TypeError(f"{name} must be a tensor for granularity {granularity!r}, got {descale!r}")
        return "tensor"
    check_descale_tensor(name, descale)
    if descale.device != device:
        raise ValueError(f"{name} must be on {device} like the cache, got {descale.device}")
    num_pages, page_size, heads, _ = sizes
    shape = tuple(descale.shape)
    fits = {
        "tensor": shape in ((), (1,)),
        "head": shape == (heads,),
        "sequence_head": len(shape) == 2 and shape[1] == heads,
        "page_head": shape == (num_pages, heads),
        "token_head": shape == (num_pages, page_size, heads),
    }
    if granularity is not None:
        if not fits.get(granularity):
            raise ValueError(
                f"{name} does not have the shape of granularity {granularity!r}, "
                f"got {shape} for a cache {sizes}{_swapped(shape, sizes)}"
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
            f"{name} must be a float or have shape [], [1], [{heads}], [batch, {heads}], "
            f"[{num_pages}, {heads}] or [{num_pages}, {page_size}, {heads}], got {list(shape)}"
            + _swapped(shape, sizes)
        )
    return kinds[0]


def _swapped(shape: tuple[int, ...], sizes: tuple[int, int, int, int]) -> str:
    """A hint for a descale that fits the cache if its page size and its heads change places."""
    num_pages, page_size, heads, _ = sizes
    if page_size == heads or shape not in (
        (page_size,),
        (num_pages, page_size),
        (num_pages, heads, page_size),
    ):
        return ""
    return (
        f"; it fits {page_size} heads: are k and v in layout 'HND', passed as 'NHD', or the other way round?"
    )


def _check_fp4_scales(
    name: str,
    descale: float | torch.Tensor,
    granularity: str | None,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    validate: bool | None,
) -> str:
    """Checks the scales of an FP4 side and returns their granularity; every byte is a legal E8M0 scale."""
    if not isinstance(descale, torch.Tensor):
        raise TypeError(
            f"{name} must be a tensor of scales for fp4_e2m1, uint8 (E8M0) or float8_e4m3fn, got {descale!r}"
        )
    check_dtype(name, descale, (torch.uint8, torch.float8_e4m3fn))
    if descale.device != device:
        raise ValueError(f"{name} must be on {device} like the cache, got {descale.device}")
    if validate and descale.dtype == torch.float8_e4m3fn:
        wrong = int((descale.float() <= 0).sum())
        if wrong:
            raise ValueError(f"{name} must hold E4M3 scales above zero, got {wrong} that are not")
    num_pages, page_size, heads, head_dim = sizes
    groups = [
        (num_pages, page_size, heads, head_dim // group) for group in SCALE_GROUPS if head_dim % group == 0
    ]
    if descale.dim() == 4 and descale.shape[-1] > 1 and descale.stride(-1) != 1:
        raise ValueError(
            f"{name} must have contiguous groups (last stride 1), got strides {descale.stride()}"
        )
    if tuple(descale.shape) == sizes[:3] and granularity in (None, "token_head"):
        return "token_head"
    if tuple(descale.shape) in groups and granularity in (None, "token_head_group"):
        return "token_head_group"
    raise ValueError(
        f"{name} must have shape {' or '.join(str(list(s)) for s in (sizes[:3], *groups))} for fp4_e2m1 "
        f"with head_dim {head_dim}, got {tuple(descale.shape)}"
        + (f" for granularity {granularity!r}" if granularity else "")
    )


def check_exponent(exponent: str, *descales: object) -> None:
    """Checks the rule by which the scales of FP4 are chosen.

    Raises:
        ValueError: an unknown rule, or one that is for powers of two with E4M3 scales.
    """
    check_choice("exponent", exponent, EXPONENT_RULES)
    e4m3 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in descales)
    if e4m3 and exponent != "mse":
        raise ValueError(f"exponent must be 'mse' for a cache with E4M3 scales, got {exponent!r}")

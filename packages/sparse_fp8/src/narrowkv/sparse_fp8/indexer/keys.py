"""Index keys: the one narrow key a token that DeepSeek's sparse attention selects tokens by."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from narrowkv.quant import check_storage, decode, encode, get_format
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
)

__all__ = ["HEAD_DIMS", "INDEX_FORMATS", "SHUFFLED_TILE", "IndexKeys", "IndexKeysFormat"]

INDEX_FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz")
HEAD_DIMS = (32, 64, 128, 256)
SHUFFLED_TILE = 16
"""Keys, and bytes of a key, of a tile of shuffled pages."""
_SCALE_BYTES = 4
_INT32_MAX = 2**31 - 1
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class IndexKeysFormat:
    """How index keys are stored: what a compiled kernel and a plan depend on.

    Attributes:
        format: of the values: "fp8_e4m3fn" or "fp8_e4m3fnuz".
        head_dim: channels of a key.
        page_size: tokens of a page; 0 for keys without pages.
        shuffled: as in `IndexKeys`.
        offsets_64_bit: whether an offset into the keys can need more than 31 bits.
    """

    format: str = "fp8_e4m3fn"
    head_dim: int = 128
    page_size: int = 0
    shuffled: bool = False
    offsets_64_bit: bool = False

    def __post_init__(self) -> None:
        """Checks the values."""
        check_choice("format", self.format, INDEX_FORMATS)
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {self.head_dim!r}")
        if self.shuffled and (self.page_size == 0 or self.page_size % SHUFFLED_TILE):
            raise ValueError(
                f"page_size must be a multiple of {SHUFFLED_TILE} for shuffled keys, got {self.page_size}"
            )


@dataclass(frozen=True, eq=False)
class IndexKeys:
    """FP8 index keys with one fp32 scale a key, in pages or one after another.

    Two objects are equal only if they are the same object.

    Args:
        values: E4M3 `[num_keys, head_dim]`, or `[num_pages, page_size, head_dim]` for pages; the format's own
            dtype or uint8. The last dimension is contiguous. head_dim is 32, 64, 128 or 256.
        scale: fp32 `[num_keys]` or `[num_pages, page_size]`, not negative: what a key's values are multiplied
            by.
        format: "fp8_e4m3fn" or "fp8_e4m3fnuz".
        shuffled: whether a page stores tiles of 16 keys by 16 channels one after another, a row of tiles
            after the other, as AITER's matrix instructions read them.

    Attributes:
        buffer: the packed pages that hold values and scales; None for other keys.
        stored: how the keys are stored.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    Example:
        >>> keys = IndexKeys.quantize(torch.eye(32)[:2])
        >>> keys.dequantize()[0, :2], keys.is_paged
        (tensor([1., 0.]), False)
    """

    values: torch.Tensor
    scale: torch.Tensor
    format: str = "fp8_e4m3fn"
    shuffled: bool = False
    buffer: torch.Tensor | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Checks the tensors, so that every object can be read safely."""
        if torch.compiler.is_compiling():
            return  # traced calls read the tensors alone, and their operators make keys that check them
        check_choice("format", self.format, INDEX_FORMATS)
        check_storage("values", self.values, self.format)
        check_dtype("scale", self.scale, torch.float32)
        shape = ("num_pages", "page_size", "head_dim") if self.values.dim() == 3 else ("num_keys", "head_dim")
        check_shape("values", self.values, shape)
        check_shape("scale", self.scale, tuple(self.values.shape[:-1]))
        check_last_dim_contiguous("values", self.values)
        check_same_device(values=self.values, scale=self.scale)
        for name, tensor in (("values", self.values), ("scale", self.scale)):
            if tensor.requires_grad:
                raise ValueError(f"{name} must not require grad (there is no backward): pass {name}.detach()")
        if self.is_paged:
            check_positive_int("page_size", self.values.shape[1])
        if self.shuffled and not (
            self.is_paged and self.values.shape[1] % SHUFFLED_TILE == 0 and self.values[0].is_contiguous()
        ):
            raise ValueError(
                f"values must be contiguous pages of a multiple of {SHUFFLED_TILE} tokens to be shuffled, "
                f"got shape {list(self.values.shape)} and strides {list(self.values.stride())}"
            )
        self.stored  # noqa: B018  # checks head_dim

    @classmethod
    def packed(cls, buffer: torch.Tensor, *, format: str = "fp8_e4m3fn", shuffled: bool = False) -> IndexKeys:
        """The index cache of vLLM, SGLang and DeepGEMM, without a copy.

        A page holds the values of all its tokens, then their scales.

        Args:
            buffer: uint8 or E4M3 `[num_pages, page_size, head_dim + 4]` or `[num_pages, page_size, 1,
                head_dim + 4]`. Each page is contiguous; the stride between pages is a multiple of 4.
            format, shuffled: as for `IndexKeys`.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.

        Example:
            >>> keys = IndexKeys.packed(torch.zeros(3, 64, 132, dtype=torch.uint8))
            >>> keys.values.shape, keys.scale.shape
            (torch.Size([3, 64, 128]), torch.Size([3, 64]))
        """
        buffer = check_storage("buffer", buffer, format).view(torch.uint8)
        if buffer.dim() == 4 and buffer.shape[2] == 1:
            buffer = buffer[:, :, 0]
        check_shape("buffer", buffer, ("num_pages", "page_size", "bytes_per_key"))
        pages, page_size, row = buffer.shape
        head_dim = row - _SCALE_BYTES
        if head_dim not in HEAD_DIMS:
            wanted = tuple(each + _SCALE_BYTES for each in HEAD_DIMS)
            raise ValueError(f"buffer must have one of {wanted} bytes a key, got {row}")
        if (page_size > 1 and buffer.stride(1) != row) or buffer.stride(2) != 1:
            raise ValueError(f"buffer must have contiguous pages, got strides {list(buffer.stride())}")
        if buffer.stride(0) % _SCALE_BYTES or buffer.storage_offset() % _SCALE_BYTES:
            raise ValueError(
                f"buffer must begin, and have a stride between pages, at a multiple of {_SCALE_BYTES} bytes, "
                f"got offset {buffer.storage_offset()} and stride {buffer.stride(0)}"
            )
        flat = buffer.as_strided((pages, page_size * row), (buffer.stride(0), 1))
        values = flat[:, : page_size * head_dim].view(pages, page_size, head_dim)
        scale = flat[:, page_size * head_dim :].view(torch.float32)
        keys = cls(values, scale, format, shuffled)
        object.__setattr__(keys, "buffer", buffer)
        return keys

    @classmethod
    def quantize(
        cls,
        x: torch.Tensor,
        *,
        format: str = "fp8_e4m3fn",
        page_size: int | None = None,
        pow2_scales: bool = False,
    ) -> IndexKeys:
        """Keys from numbers: each key's scale is `max(amax, 1e-4)` over the format's largest number.

        Args:
            x: fp32, bf16 or fp16 `[num_keys, head_dim]`.
            format: as for `IndexKeys`.
            page_size: stores the keys in packed pages of so many tokens; None stores them without pages.
            pow2_scales: rounds scales up to powers of two.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        check_shape("x", x, ("num_keys", "head_dim"))
        check_choice("format", format, INDEX_FORMATS)
        magnitude = x.float().abs().nan_to_num(0.0, posinf=torch.inf).clamp(max=_LARGEST)
        scale = magnitude.amax(-1).clamp(min=1e-4) / get_format(format).max_value
        if pow2_scales:
            scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        values = encode(x.float() / scale[:, None], format)
        if page_size is None:
            return cls(values, scale, format)
        check_positive_int("page_size", page_size)
        num_keys, head_dim = x.shape
        pages = -(-num_keys // page_size)
        buffer = torch.zeros(pages, page_size, head_dim + _SCALE_BYTES, dtype=torch.uint8, device=x.device)
        keys = cls.packed(buffer, format=format)
        at = torch.arange(num_keys, device=x.device)
        keys.values[at // page_size, at % page_size] = values.view(torch.uint8)
        keys.scale[at // page_size, at % page_size] = scale
        return keys

    @property
    def is_paged(self) -> bool:
        """Whether the keys lie in pages."""
        return self.values.dim() == 3

    @property
    def num_pages(self) -> int:
        """Pages; of keys without pages, keys."""
        return self.values.shape[0]

    @cached_property
    def stored(self) -> IndexKeysFormat:
        """How the keys are stored."""
        last = sum(
            (size - 1) * step for size, step in zip(self.values.shape, self.values.stride(), strict=True)
        )
        return IndexKeysFormat(
            format=self.format,
            head_dim=self.values.shape[-1],
            page_size=self.values.shape[1] if self.is_paged else 0,
            shuffled=self.shuffled,
            offsets_64_bit=last > _INT32_MAX,
        )

    @cached_property
    def native(self) -> torch.Tensor:
        """The values in the format's own dtype."""
        return check_storage("values", self.values, self.format)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers in the shape of `values`, fp32 or fp64."""
        values = self.native
        if self.shuffled:
            pages, size, dim = values.shape
            tiles = values.reshape(
                pages, size // SHUFFLED_TILE, dim // SHUFFLED_TILE, SHUFFLED_TILE, SHUFFLED_TILE
            )
            values = tiles.transpose(2, 3).reshape(pages, size, dim)
        return decode(values, self.format).to(dtype) * self.scale[..., None].to(dtype)

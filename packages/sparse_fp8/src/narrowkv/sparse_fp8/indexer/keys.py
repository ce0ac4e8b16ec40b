"""Index keys: the one narrow key a token that DeepSeek's sparse attention selects tokens by."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from narrowkv.quant import check_storage, decode, e8m0_decode, encode, get_format, quantize_per_group
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
)

__all__ = ["FP4", "FP4_GROUP", "HEAD_DIMS", "INDEX_FORMATS", "SHUFFLED_TILE", "IndexKeys", "IndexKeysFormat"]

INDEX_FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1")
FP4 = "fp4_e2m1"
FP4_GROUP = 32
"""Channels of an FP4 key that share a scale."""
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
        format: of the values: "fp8_e4m3fn", "fp8_e4m3fnuz" or "fp4_e2m1".
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
        if self.shuffled and self.format == FP4:
            raise ValueError("shuffled keys must be in FP8, got fp4_e2m1")
        if self.shuffled and (self.page_size == 0 or self.page_size % SHUFFLED_TILE):
            raise ValueError(
                f"page_size must be a multiple of {SHUFFLED_TILE} for shuffled keys, got {self.page_size}"
            )


@dataclass(frozen=True, eq=False)
class IndexKeys:
    """FP8 or FP4 index keys, in pages or one after another.

    Two objects are equal only if they are the same object.

    Args:
        values: E4M3 `[num_keys, head_dim]`, or `[num_pages, page_size, head_dim]` for pages; the format's own
            dtype or uint8. The last dimension is contiguous. head_dim is 32, 64, 128 or 256. FP4: uint8, two
            channels a byte, the even one in the low half: `head_dim / 2` bytes a key.
        scale: fp32 `[num_keys]` or `[num_pages, page_size]`, not negative: what a key's values are multiplied
            by. FP4: uint8 E8M0 with one more dimension, contiguous, of `head_dim / 32` groups of channels.
        format: "fp8_e4m3fn", "fp8_e4m3fnuz" or "fp4_e2m1".
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
        check_dtype("scale", self.scale, torch.uint8 if self.format == FP4 else torch.float32)
        shape = ("num_pages", "page_size", "head_dim") if self.values.dim() == 3 else ("num_keys", "head_dim")
        check_shape("values", self.values, shape)
        check_last_dim_contiguous("values", self.values)
        groups: tuple[int, ...] = ()
        if self.format == FP4:
            groups = (2 * self.values.shape[-1] // FP4_GROUP,)
            check_last_dim_contiguous("scale", self.scale)
        check_shape("scale", self.scale, (*self.values.shape[:-1], *groups))
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
                head_dim + 4]`. Each page is contiguous; the stride between pages is a multiple of 4. FP4:
                uint8, with `head_dim / 2 + head_dim / 32` bytes a key.
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
        known = {sum(_bytes_of(format, each)): each for each in HEAD_DIMS}
        if row not in known:
            raise ValueError(f"buffer must have one of {tuple(known)} bytes a key, got {row}")
        value_bytes, scale_bytes = _bytes_of(format, known[row])
        if (page_size > 1 and buffer.stride(1) != row) or buffer.stride(2) != 1:
            raise ValueError(f"buffer must have contiguous pages, got strides {list(buffer.stride())}")
        if format != FP4 and (buffer.stride(0) % _SCALE_BYTES or buffer.storage_offset() % _SCALE_BYTES):
            raise ValueError(
                f"buffer must begin, and have a stride between pages, at a multiple of {_SCALE_BYTES} bytes, "
                f"got offset {buffer.storage_offset()} and stride {buffer.stride(0)}"
            )
        flat = buffer.as_strided((pages, page_size * row), (buffer.stride(0), 1))
        values = flat[:, : page_size * value_bytes].view(pages, page_size, value_bytes)
        scale = flat[:, page_size * value_bytes :]
        scale = scale.view(pages, page_size, scale_bytes) if format == FP4 else scale.view(torch.float32)
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

        Scales of FP4 are the smallest powers of two at which nothing saturates.

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
        if format == FP4:
            values, scale = quantize_per_group(x, FP4_GROUP, exponent="ceil")
            return (
                cls(values, scale, format)
                if page_size is None
                else cls._in_pages(values, scale, format, page_size)
            )
        magnitude = x.float().abs().nan_to_num(0.0, posinf=torch.inf).clamp(max=_LARGEST)
        scale = magnitude.amax(-1).clamp(min=1e-4) / get_format(format).max_value
        if pow2_scales:
            scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        values = encode(x.float() / scale[:, None], format)
        return (
            cls(values, scale, format)
            if page_size is None
            else cls._in_pages(values, scale, format, page_size)
        )

    @classmethod
    def _in_pages(cls, values: torch.Tensor, scale: torch.Tensor, format: str, page_size: int) -> IndexKeys:
        """Packed pages of keys; slots after the last are zeros."""
        check_positive_int("page_size", page_size)
        num_keys, pages = values.shape[0], -(-values.shape[0] // page_size)
        row = values.shape[1] + (scale.shape[1] if format == FP4 else _SCALE_BYTES)
        buffer = torch.zeros(pages, page_size, row, dtype=torch.uint8, device=values.device)
        keys = cls.packed(buffer, format=format)
        at = torch.arange(num_keys, device=values.device)
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
            head_dim=self.values.shape[-1] * (2 if self.format == FP4 else 1),
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
        numbers = decode(values, self.format).to(dtype)
        if self.format == FP4:
            return numbers * e8m0_decode(self.scale).to(dtype).repeat_interleave(FP4_GROUP, -1)
        return numbers * self.scale[..., None].to(dtype)


def _bytes_of(format: str, head_dim: int) -> tuple[int, int]:
    """Bytes of a key's values and of its scales."""
    return (head_dim // 2, head_dim // FP4_GROUP) if format == FP4 else (head_dim, _SCALE_BYTES)

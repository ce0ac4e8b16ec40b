"""Rows of DeepSeek-V4's KV: 448 NoPE columns in FP8 with tile scales, 64 RoPE columns in bf16.

Three layouts hold the same numbers; `DSV4Rows` says which one a buffer has, packs, unpacks and quantises.
A tile is 64 NoPE columns, its scale a power of two: `2^ceil(log2(max(amax / 448, 1e-4)))`.

Example:
    >>> import torch
    >>> x = torch.randn(3, 512)
    >>> rows = DSV4Rows.quantize(x, layout="row512")
    >>> rows.num_rows, rows.data.shape, rows.dequantize().shape
    (3, torch.Size([3, 512]), torch.Size([3, 512]))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from narrowkv.quant import cast_fp8, check_storage, dsv4_tile_scale, e8m0_decode, e8m0_encode, get_format
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
    check_tensor,
    has_memory,
)
from narrowkv.sparse_fp8.binding import BoundRows, bind_fp8_rows
from narrowkv.sparse_fp8.layouts import (
    FORMATS,
    HEAD_DIM,
    LAYOUTS,
    NOPE_DIM,
    NUM_TILES,
    PACKED_BYTES,
    ROPE_DIM,
    ROW512_BYTES,
    TILE,
    pack_pages,
    pack_row512,
    unpack_pages,
)

__all__ = ["DSV4Rows", "query_heads"]


@dataclass(frozen=True, eq=False)
class DSV4Rows:
    """Rows of 448 FP8 and 64 bf16 columns with power-of-two scales, in one of three layouts.

    Make one with `split`, `packed584`, `row512`, `quantize` or `pack`. The tensors are checked whenever an
    object is made, `dataclasses.replace` included, so that every object can be read safely. Two objects are
    equal only if they are the same object.

    Attributes:
        layout: "split", "packed584" or "row512".
        data: split: FP8 `[rows, 448]`; packed584: uint8 `[pages, bytes]`; row512: uint8 `[rows, 512]`.
        rope: bf16 `[rows, 64]`; packed584: None, it lies in `data`.
        scale: split: fp32 `[rows, 7]` or `[rows, 14]`; None otherwise, it lies in `data`.
        page_size: rows of a packed584 page; 1 otherwise.
        scale_group: columns that a scale is for: 64, or 32 (row512 read as 14 scales; split with 14).
        format: the FP8 format of the NoPE bytes.
        negative_zero_free: whether byte 0x80 never occurs, so that OCP bytes may be read as FNUZ at half
            their value. True for rows that this class quantised; a buffer from elsewhere must not claim it.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """

    layout: str
    data: torch.Tensor
    rope: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    page_size: int = 1
    scale_group: int = TILE
    format: str = "fp8_e4m3fn"
    negative_zero_free: bool = False

    def __post_init__(self) -> None:
        """Checks the tensors against the layout, so that no row lies outside them."""
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("format", self.format, FORMATS)
        check_positive_int("page_size", self.page_size)
        if self.layout == "packed584":
            self._check_packed()
        else:
            self._check_rows()
        parts = {"data": self.data, "rope": self.rope, "scale": self.scale}
        for name, tensor in parts.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(f"{name} must not require grad (there is no backward): pass {name}.detach()")
        check_same_device(**parts)

    def _check_packed(self) -> None:
        check_dtype("buffer", self.data, torch.uint8)
        need = self.page_size * PACKED_BYTES
        if self.data.dim() != 2 or self.data.shape[1] < need:
            raise ValueError(
                f"buffer must have shape [pages, >= {need}] for page_size {self.page_size}, "
                f"got {list(self.data.shape)}"
            )
        check_last_dim_contiguous("buffer", self.data)
        if (self.data.shape[0] > 1 and self.data.stride(0) % 2) or (
            has_memory(self.data) and self.data.data_ptr() % 2
        ):
            raise ValueError(
                "buffer must start at an even address and have an even stride between pages (it holds "
                f"bf16), got stride {self.data.stride(0)}"
            )
        _check_absent("packed584", rope=self.rope, scale=self.scale)
        if self.scale_group != TILE:
            raise ValueError(f"scale_group must be {TILE} for layout packed584, got {self.scale_group!r}")

    def _check_rows(self) -> None:
        if self.page_size != 1:
            raise ValueError(f"page_size must be 1 for layout {self.layout}, got {self.page_size}")
        if self.layout == "split":
            check_storage("nope", self.data, self.format)
            check_shape("nope", self.data, ("rows", NOPE_DIM))
        else:
            check_dtype("rows", self.data, torch.uint8)
            check_shape("rows", self.data, ("rows", ROW512_BYTES))
        rows = self.data.shape[0]
        rope = check_tensor("rope", self.rope)
        check_dtype("rope", rope, torch.bfloat16)
        check_shape("rope", rope, (rows, ROPE_DIM))
        check_last_dim_contiguous("nope" if self.layout == "split" else "rows", self.data)
        check_last_dim_contiguous("rope", rope)
        if self.scale_group not in (32, TILE):
            raise ValueError(f"scale_group must be {TILE} or 32, got {self.scale_group!r}")
        if self.layout == "row512":
            _check_absent("row512", scale=self.scale)
            return
        scale = check_tensor("scale", self.scale)
        check_dtype("scale", scale, torch.float32)
        check_shape("scale", scale, (rows, NOPE_DIM // self.scale_group))
        check_last_dim_contiguous("scale", scale)

    @classmethod
    def split(
        cls,
        nope: torch.Tensor,
        rope: torch.Tensor,
        scale: torch.Tensor,
        *,
        format: str | None = None,
        negative_zero_free: bool = False,
    ) -> DSV4Rows:
        """Three tensors, each with a row stride of its own.

        Args:
            nope: `[rows, 448]`, an E4M3 dtype, or uint8 with `format`.
            rope: `[rows, 64]` bf16.
            scale: `[rows, 7]` fp32 powers of two, one per 64 columns; or `[rows, 14]`, one per 32.
            format: "fp8_e4m3fn" or "fp8_e4m3fnuz"; None takes it from the dtype of `nope`.
            negative_zero_free: see the attribute.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        name = _format_of("nope", nope, format)
        check_dtype("scale", scale, torch.float32)
        if scale.dim() != 2 or scale.shape[1] not in (7, 14):
            raise ValueError(f"scale must have shape [rows, 7] or [rows, 14], got {list(scale.shape)}")
        group = NOPE_DIM // scale.shape[1]
        return cls("split", nope, rope, scale, 1, group, name, negative_zero_free)

    @classmethod
    def packed584(
        cls,
        buffer: torch.Tensor,
        *,
        page_size: int = 64,
        format: str = "fp8_e4m3fn",
        negative_zero_free: bool = False,
    ) -> DSV4Rows:
        """One byte buffer of pages.

        In a page of P tokens, token p has its 448 E4M3 bytes and then 64 bf16 at byte `p * 576`, and its
        seven E8M0 bytes (a zero byte follows) at byte `P * 576 + p * 8`.

        Args:
            buffer: uint8 `[pages, bytes]` with at least `page_size * 584` bytes a page, or
                `[pages, page_size, 584]`. The stride between pages is the tensor's own, so padded pages
                are a view; it must be even.
            page_size: P, any positive number.
            format: the FP8 format of the NoPE bytes.
            negative_zero_free: see the attribute.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        check_dtype("buffer", buffer, torch.uint8)
        check_positive_int("page_size", page_size)
        if buffer.dim() == 3:
            check_shape("buffer", buffer, ("pages", page_size, PACKED_BYTES))
            if buffer.stride(1) != PACKED_BYTES and page_size > 1:
                raise ValueError(
                    f"buffer must have contiguous pages (stride {PACKED_BYTES} between its rows), "
                    f"got stride {buffer.stride(1)}"
                )
            check_last_dim_contiguous("buffer", buffer)
            buffer = buffer.as_strided(
                (buffer.shape[0], page_size * PACKED_BYTES), (buffer.stride(0), 1), buffer.storage_offset()
            )
        return cls(
            "packed584", buffer, page_size=page_size, format=format, negative_zero_free=negative_zero_free
        )

    @classmethod
    def row512(
        cls,
        rows: torch.Tensor,
        rope: torch.Tensor,
        *,
        scale_group: int = TILE,
        format: str = "fp8_e4m3fn",
        negative_zero_free: bool = False,
    ) -> DSV4Rows:
        """Rows of 512 bytes: 448 E4M3, then 14 scale bytes s0,s0,s1,s1,...,s6,s6 (E8M0), then zeros.

        Args:
            rows: uint8 `[rows, 512]`.
            rope: bf16 `[rows, 64]`, apart.
            scale_group: 64 reads every other scale byte; 32 reads all 14, which may then differ.
            format: the FP8 format of the NoPE bytes.
            negative_zero_free: see the attribute.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        return cls("row512", rows, rope, None, 1, scale_group, format, negative_zero_free)

    @classmethod
    def quantize(
        cls,
        x: torch.Tensor,
        *,
        layout: str = "split",
        page_size: int = 64,
        padded: bool = True,
        format: str = "fp8_e4m3fn",
    ) -> DSV4Rows:
        """Quantises rows: a scale per 64 NoPE columns, RoPE rounded to bf16.

        The scale is `2^ceil(log2(max(amax / 448, 1e-4)))`; for FNUZ, whose largest number is 240, the same
        rule with 240 in 448's place.

        Args:
            x: `[..., 512]` fp32, bf16 or fp16, RoPE last; leading dimensions are flattened to rows.
            layout: "split", "packed584" or "row512".
            page_size: rows of a packed584 page; the last page is filled up with zeros.
            padded: whether packed584 pages are padded to a multiple of 576 bytes.
            format: "fp8_e4m3fn" or "fp8_e4m3fnuz".

        Returns:
            Rows on the device of `x`; never byte 0x80 but for an FNUZ NaN.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        check_dtype("x", x, (torch.float32, torch.bfloat16, torch.float16))
        check_choice("format", format, FORMATS)
        if x.dim() < 1 or x.shape[-1] != HEAD_DIM:
            raise ValueError(f"x must have shape [..., {HEAD_DIM}], got {list(x.shape)}")
        values = x.detach().float().reshape(-1, HEAD_DIM)
        tiles = values[:, :NOPE_DIM].reshape(-1, NUM_TILES, TILE)
        amax = tiles.abs().amax(-1)
        # dsv4_tile_scale divides by 448; scaling by a power of two first would not turn that into 240.
        ratio = 448.0 / get_format(format).max_value
        scale = dsv4_tile_scale(amax * ratio)
        nope = cast_fp8((tiles / scale[..., None]).reshape(-1, NOPE_DIM), format)
        return cls.pack(
            nope, values[:, NOPE_DIM:].to(torch.bfloat16), scale, layout, page_size=page_size, padded=padded
        )

    @classmethod
    def pack(
        cls,
        nope: torch.Tensor,
        rope: torch.Tensor,
        scale: torch.Tensor,
        layout: str,
        *,
        page_size: int = 64,
        padded: bool = True,
    ) -> DSV4Rows:
        """Packs rows that are already quantised.

        Args:
            nope: `[rows, 448]` E4M3 dtype without byte 0x80 (as `quantize` makes it).
            rope: `[rows, 64]` bf16.
            scale: `[rows, 7]` fp32 powers of two.
            layout: "split", "packed584" or "row512".
            page_size: rows of a packed584 page.
            padded: whether packed584 pages are padded to a multiple of 576 bytes.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        check_choice("layout", layout, LAYOUTS)
        plain = cls.split(nope, rope, scale)
        check_shape("scale", scale, (nope.shape[0], NUM_TILES))
        name = plain.format
        clean = name == "fp8_e4m3fn" or not bool(nope.float().isnan().any())
        if layout == "split":
            return cls.split(nope, rope, scale, negative_zero_free=clean)
        bytes_, scales = nope.view(torch.uint8), e8m0_encode(scale)
        if layout == "row512":
            return cls.row512(
                pack_row512(bytes_, scales), rope.contiguous(), format=name, negative_zero_free=clean
            )
        check_positive_int("page_size", page_size)
        buffer = pack_pages(bytes_, rope, scales, page_size, padded=padded)
        return cls.packed584(buffer, page_size=page_size, format=name, negative_zero_free=clean)

    @property
    def num_rows(self) -> int:
        """Rows that can be addressed; packed584 counts whole pages."""
        return self.data.shape[0] * self.page_size

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.data.device

    @cached_property
    def bound(self) -> BoundRows:
        """The rows as kernels take them; made at the first use."""
        return bind_fp8_rows(
            self.data,
            self.rope,
            self.scale,
            num_rows=self.num_rows,
            layout=self.layout,
            page_size=self.page_size,
            scale_group=self.scale_group,
            format=self.format,
            negative_zero_free=self.negative_zero_free,
        )

    def bytes_per_row(self) -> int:
        """Bytes that attention reads of a row, scales included."""
        scales = NOPE_DIM // self.scale_group * (4 if self.layout == "split" else 1)
        return NOPE_DIM + 2 * ROPE_DIM + scales

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(nope, rope, scale)`: E4M3 `[rows, 448]`, bf16 `[rows, 64]`, fp32 `[rows, 7]` or `[rows, 14]`."""
        storage = get_format(self.format).storage_dtype
        if self.layout == "split":
            assert self.rope is not None
            assert self.scale is not None
            return self.data.view(storage), self.rope, self.scale
        if self.layout == "row512":
            assert self.rope is not None
            nope = self.data[:, :NOPE_DIM].contiguous().view(storage)
            scales = self.data[:, NOPE_DIM : NOPE_DIM + 2 * NUM_TILES]
            return nope, self.rope, e8m0_decode(scales[:, :: self.scale_group // 32].contiguous())
        nope, rope, scales = unpack_pages(self.data, self.page_size)
        return nope.view(storage), rope, e8m0_decode(scales)

    def dequantize(self) -> torch.Tensor:
        """The rows as fp32 `[rows, 512]`, exactly."""
        nope, rope, scale = self.unpack()
        values = nope.float() * scale.repeat_interleave(self.scale_group, -1)
        return torch.cat([values, rope.float()], -1)

    def to(self, device: torch.device | str) -> DSV4Rows:
        """The same rows on another device."""
        rope = None if self.rope is None else self.rope.to(device)
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, data=self.data.to(device), rope=rope, scale=scale)


def _check_absent(layout: str, **parts: torch.Tensor | None) -> None:
    for name, tensor in parts.items():
        if tensor is not None:
            raise ValueError(f"{name} must be None for layout {layout}: it lies in data")


def query_heads(q: DSV4Rows, num_tokens: int, num_qo_heads: int | None) -> int:
    """Heads of a query in FP8: as given, or as many as its rows make."""
    if num_qo_heads is not None:
        return num_qo_heads
    return q.num_rows // num_tokens if num_tokens else 8


def _format_of(name: str, tensor: torch.Tensor, format: str | None) -> str:
    stored = check_storage(name, tensor, format)
    return check_choice("format", get_format(stored.dtype).name, FORMATS)

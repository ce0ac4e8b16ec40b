"""Rows of DeepSeek's KV caches: columns in FP8 or FP4 with a scale for each group, and RoPE columns.

`DSV4Rows` says which layout a buffer has, packs, unpacks and quantises. The layouts are in
`narrowkv.sparse_fp8.layouts`.

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

from narrowkv.quant import check_storage, e8m0_decode, get_format
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_finite_float,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
    check_tensor,
    has_memory,
)
from narrowkv.sparse_fp8.binding import BoundRows, bind_quantized_rows, byte_range
from narrowkv.sparse_fp8.layouts import FORMATS, LAYOUTS, PAGED_LAYOUTS, ROPE_DIM, RowLayout
from narrowkv.sparse_fp8.packing import (
    dequantize_values,
    pack_pages,
    pack_row512,
    quantize_pages,
    quantize_values,
    unpack_pages,
)

__all__ = ["DSV4Rows", "query_heads"]


@dataclass(frozen=True, eq=False)
class DSV4Rows:
    """Quantised rows of DeepSeek V4, V4.1 or V3.2, in one of the layouts of `layouts.LAYOUTS`.

    Make one with `split`, `paged`, `packed584`, `row512`, `quantize` or `pack`. The tensors are checked
    whenever an object is made, `dataclasses.replace` included, so that every object can be read safely. Two
    objects are equal only if they are the same object.

    Attributes:
        layout: the name of a layout.
        data: split: FP8 `[rows, 448]`; split512: FP8 `[rows, 512]`; row512: uint8 `[rows, 512]`; others:
            uint8 `[pages, bytes]`.
        rope: bf16 `[rows, 64]` for split and row512; None otherwise, it lies in `data`.
        scale: split: fp32 `[rows, 7]` or `[rows, 14]`; split512: fp32 `[rows, 8]`; None otherwise, it lies in
            `data`.
        page_size: rows of a page; 1 for layouts without pages.
        scale_group: columns that a scale is for: the layout's, or 32 (row512 read as 14 scales; split with
            14).
        format: the format of the values: "fp8_e4m3fn", "fp8_e4m3fnuz" or "fp4_e2m1".
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
    scale_group: int = 64
    format: str = "fp8_e4m3fn"
    negative_zero_free: bool = False

    def __post_init__(self) -> None:
        """Checks the tensors against the layout, so that no row lies outside them."""
        check_choice("layout", self.layout, tuple(LAYOUTS))
        check_choice("format", self.format, FORMATS)
        if not self.format.startswith(self.places.values):
            raise ValueError(
                f"format must be one of {self.places.values} for layout {self.layout}, got {self.format!r}"
            )
        check_positive_int("page_size", self.page_size)
        if self.places.is_paged:
            check_pages(self)
        else:
            check_parts(self)
        parts = {"data": self.data, "rope": self.rope, "scale": self.scale}
        for name, tensor in parts.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(f"{name} must not require grad (there is no backward): pass {name}.detach()")
        check_same_device(**parts)

    @property
    def places(self) -> RowLayout:
        """Where the parts of a row lie."""
        return LAYOUTS[self.layout]

    @classmethod
    def split(
        cls,
        nope: torch.Tensor,
        rope: torch.Tensor | None,
        scale: torch.Tensor,
        *,
        format: str | None = None,
        negative_zero_free: bool = False,
    ) -> DSV4Rows:
        """Three tensors, or two with RoPE columns among the quantised ones, each with its own row stride.

        Args:
            nope: `[rows, 448]`, or without `rope` `[rows, 512]`; an E4M3 dtype, or uint8 with `format`.
            rope: `[rows, 64]` bf16; None for layout "split512".
            scale: `[rows, 7]` fp32 powers of two, one per 64 columns; or `[rows, 14]`, one per 32. Without
                `rope` `[rows, 8]`, any fp32 numbers.
            format: "fp8_e4m3fn" or "fp8_e4m3fnuz"; None takes it from the dtype of `nope`.
            negative_zero_free: see the attribute.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        stored = get_format(check_storage("nope", nope, format).dtype).name
        check_choice("format", stored, FORMATS)
        check_dtype("scale", scale, torch.float32)
        if rope is None:
            return cls("split512", nope, None, scale, 1, 64, stored, negative_zero_free)
        if scale.dim() != 2 or scale.shape[1] not in (7, 14):
            raise ValueError(f"scale must have shape [rows, 7] or [rows, 14], got {list(scale.shape)}")
        return cls("split", nope, rope, scale, 1, 448 // scale.shape[1], stored, negative_zero_free)

    @classmethod
    def paged(
        cls,
        buffer: torch.Tensor,
        layout: str,
        *,
        page_size: int = 64,
        format: str | None = None,
        negative_zero_free: bool = False,
        scale: torch.Tensor | float | None = None,
    ) -> DSV4Rows:
        """One byte buffer of pages.

        Args:
            buffer: uint8 `[pages, bytes]` with at least the layout's bytes for `page_size` tokens, or
                `[pages, page_size, bytes of a token]`. The stride between pages is the tensor's own, so
                padded pages are a view; it must be a multiple of the widest number in a page.
            layout: a layout of pages: "packed584" (DeepSeek-V4); "packed528", "packed288", "packed272",
                "record528", "record288", "record272" (V4.1); "record656", "record352" (V3.2); "tensor576",
                "tensor512" (one scale for all values), whose buffer may have an E4M3 dtype.
            page_size: tokens of a page, any positive number.
            format: the format of the values: "fp8_e4m3fn" (None means it) or "fp8_e4m3fnuz" for FP8 layouts,
                "fp4_e2m1" for FP4 layouts.
            negative_zero_free: see the attribute.
            scale: of "tensor576" and "tensor512": an fp32 tensor `[1]`, or a number; None for other layouts.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.

        Example:
            >>> DSV4Rows.paged(torch.zeros(2, 64 * 528, dtype=torch.uint8), "packed528").num_rows
            128
        """
        places = LAYOUTS[check_choice("layout", layout, PAGED_LAYOUTS)]
        if places.has_one_scale:
            if format is None and buffer.dtype == torch.uint8:
                format = places.default_format
            stored = check_storage("buffer", buffer, format)
            format, buffer = get_format(stored.dtype).name, stored.view(torch.uint8)
            if not isinstance(scale, torch.Tensor):
                number = check_finite_float("scale", 1.0 if scale is None else scale)
                scale = torch.tensor([number], dtype=torch.float32, device=buffer.device)
        elif scale is not None:
            raise ValueError(f"scale must be None for layout {layout}: it lies in data")
        check_dtype("buffer", buffer, torch.uint8)
        check_positive_int("page_size", page_size)
        if buffer.dim() == 3:
            check_shape("buffer", buffer, ("pages", page_size, places.row_bytes))
            if buffer.stride(1) != places.row_bytes and page_size > 1:
                raise ValueError(
                    f"buffer must have contiguous pages (stride {places.row_bytes} between its rows), "
                    f"got stride {buffer.stride(1)}"
                )
            check_last_dim_contiguous("buffer", buffer)
            buffer = buffer.as_strided(
                (buffer.shape[0], page_size * places.row_bytes),
                (buffer.stride(0), 1),
                buffer.storage_offset(),
            )
        return cls(
            layout,
            buffer,
            scale=scale,
            page_size=page_size,
            scale_group=places.group,
            format=places.default_format if format is None else format,
            negative_zero_free=negative_zero_free,
        )

    @classmethod
    def packed584(
        cls,
        buffer: torch.Tensor,
        *,
        page_size: int = 64,
        format: str = "fp8_e4m3fn",
        negative_zero_free: bool = False,
    ) -> DSV4Rows:
        """Pages of DeepSeek-V4: `paged` with layout "packed584".

        In a page of P tokens, token p has its 448 E4M3 bytes and then 64 bf16 at byte `p * 576`, and its
        seven E8M0 bytes (a zero byte follows) at byte `P * 576 + p * 8`.

        Args:
            buffer, page_size, format, negative_zero_free: as for `paged`.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        return cls.paged(
            buffer, "packed584", page_size=page_size, format=format, negative_zero_free=negative_zero_free
        )

    @classmethod
    def row512(
        cls,
        rows: torch.Tensor,
        rope: torch.Tensor,
        *,
        scale_group: int = 64,
        format: str = "fp8_e4m3fn",
        negative_zero_free: bool = False,
    ) -> DSV4Rows:
        """Rows of 512 bytes: 448 E4M3, then 14 scale bytes s0,s0,s1,s1,...,s6,s6 (E8M0), then zeros.

        Args:
            rows: uint8 `[rows, 512]`.
            rope: bf16 `[rows, 64]`, a separate tensor.
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
        format: str | None = None,
    ) -> DSV4Rows:
        """Quantises rows, with the scales that the engines' writers choose for the layout.

        E8M0 scales of FP8 are `2^ceil(log2(max(amax / 448, 1e-4)))`; for FNUZ, whose largest number is 240,
        the same rule with 240 in 448's place. E4M3 scales of FP4 are `amax / 6`, at least 2^-9, rounded
        (up for "record352"); E8M0 scales of FP4 the smallest power of two at which nothing saturates; fp32
        scales `amax / 448`, of the finite values where one scale is for all rows.

        Args:
            x: `[..., 512]` (`[..., 576]` for "record656", "record352" and "tensor576") fp32, bf16 or fp16,
                RoPE last; leading dimensions are flattened to rows.
            layout: the name of a layout.
            page_size: rows of a page; the last page is filled up with zeros.
            padded: whether pages are padded as engines pad them.
            format: as for `paged`.

        Returns:
            Rows on the device of `x`; FP8 values never have byte 0x80 but for an FNUZ NaN.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        check_dtype("x", x, (torch.float32, torch.bfloat16, torch.float16))
        places = LAYOUTS[check_choice("layout", layout, tuple(LAYOUTS))]
        if x.dim() < 1 or x.shape[-1] != places.head_dim:
            raise ValueError(
                f"x must have shape [..., {places.head_dim}] for layout {layout}, got {list(x.shape)}"
            )
        wide = x.detach().float().reshape(-1, places.head_dim)
        format = places.default_format if format is None else format
        if places.has_one_scale:
            check_positive_int("page_size", page_size)
            pages, scale = quantize_pages(wide, format, page_size)
            clean = format != "fp8_e4m3fnuz" or not bool(wide.isnan().any())
            return cls.paged(
                pages, layout, page_size=page_size, format=format, negative_zero_free=clean, scale=scale
            )
        values, scale = quantize_values(wide[:, : places.quantized], places, format)
        rope = wide[:, places.quantized :].to(torch.bfloat16) if places.rope else None
        return cls.pack(values, rope, scale, layout, page_size=page_size, padded=padded)

    @classmethod
    def pack(
        cls,
        values: torch.Tensor,
        rope: torch.Tensor | None,
        scale: torch.Tensor,
        layout: str,
        *,
        page_size: int = 64,
        padded: bool = True,
    ) -> DSV4Rows:
        """Packs rows that are already quantised.

        Args:
            values: the quantised columns: an E4M3 dtype without byte 0x80 (as `quantize` makes it), or packed
                FP4 in uint8, `[rows, bytes]`.
            rope: `[rows, 64]` RoPE columns, bf16, or what `unpack` gave; None if they are among the values.
            scale: fp32 `[rows, scales]`; powers of two for E8M0 and split.
            layout: the name of a layout.
            page_size: rows of a page.
            padded: whether pages are padded as engines pad them.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        places = LAYOUTS[check_choice("layout", layout, tuple(LAYOUTS))]
        format = "fp4_e2m1"
        if places.values == "fp8":
            format = get_format(check_storage("values", values, None).dtype).name
        if places.has_one_scale:
            raise ValueError(f"layout must have scales in its rows, got {layout!r}: use paged or quantize")
        check_shape("values", values, ("rows", places.value_bytes))
        rows = values.shape[0]
        check_dtype("scale", scale, torch.float32)
        check_shape("scale", scale, (rows, places.num_groups))
        if places.rope:
            check_shape("rope", check_tensor("rope", rope), (rows, ROPE_DIM))
        else:
            check_absent(layout, rope=rope)
        clean = format != "fp8_e4m3fnuz" or not bool(values.float().isnan().any())
        if places.has_scale_tensor:
            return cls.split(values, rope, scale, negative_zero_free=clean)
        if layout == "row512":
            data = pack_row512(values.view(torch.uint8), scale, places)
            rope = check_tensor("rope", rope).contiguous()
            return cls.row512(data, rope, format=format, negative_zero_free=clean)
        check_positive_int("page_size", page_size)
        buffer = pack_pages(values, rope, scale, places, page_size, padded=padded)
        return cls.paged(buffer, layout, page_size=page_size, format=format, negative_zero_free=clean)

    @property
    def num_rows(self) -> int:
        """Rows that can be addressed; whole pages are counted."""
        return self.data.shape[0] * self.page_size

    @property
    def head_dim(self) -> int:
        """Columns of a row: 512, or 576 for DeepSeek-V3.2."""
        return self.places.head_dim

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.data.device

    @cached_property
    def bound(self) -> BoundRows:
        """The rows as kernels take them; made at the first use."""
        return bind_quantized_rows(
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

    @cached_property
    def byte_ranges(self) -> tuple[tuple[int, int], ...]:
        """For each tensor, the addresses of its first byte and of the byte after its last."""
        return tuple(byte_range(tensor) for tensor in self.bound.tensors.values())

    def bytes_per_row(self) -> int:
        """Bytes that attention reads of a row, scales included."""
        places = self.places
        scales = 0 if places.has_one_scale else places.quantized // self.scale_group * places.scale_item_bytes
        return places.value_bytes + ROPE_DIM * places.rope_item_bytes + scales

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """`(values, rope, scale)`: `rope` is None if RoPE columns are among the values.

        Values are E4M3 `[rows, columns]` or FP4 in uint8 `[rows, columns / 2]`, RoPE columns bf16 or E4M3
        `[rows, 64]`, scales fp32 `[rows, columns / scale_group]`.
        """
        storage = get_format(self.format).storage_dtype
        if self.places.has_scale_tensor:
            return self.data.view(storage), self.rope, check_tensor("scale", self.scale)
        if not self.places.is_paged:
            values = self.data[:, : self.places.value_bytes].contiguous().view(storage)
            copies = self.places.num_groups * self.places.scale_copies
            scales = self.data[:, self.places.value_bytes :][:, :copies]
            return values, self.rope, e8m0_decode(scales[:, :: self.scale_group // 32].contiguous())
        if self.places.has_one_scale:
            parts = unpack_pages(self.data, self.page_size, self.places)
            values, rope = parts[0].view(storage), parts[1]
            rope = None if rope is None else rope.view(storage)
            return values, rope, check_tensor("scale", self.scale).expand(self.num_rows, 1)
        values, rope, scale = unpack_pages(self.data, self.page_size, self.places)
        return values.view(storage), rope, scale

    def dequantize(self) -> torch.Tensor:
        """The rows as fp32 `[rows, head_dim]`, exactly."""
        values, rope, scale = self.unpack()
        wide = dequantize_values(values, scale, self.format)
        if rope is not None and self.places.has_one_scale:
            rope = dequantize_values(rope, scale, self.format)
        return wide if rope is None else torch.cat([wide, rope.float()], -1)

    def to(self, device: torch.device | str) -> DSV4Rows:
        """The same rows on another device."""
        rope = None if self.rope is None else self.rope.to(device)
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, data=self.data.to(device), rope=rope, scale=scale)


def query_heads(q: DSV4Rows, num_tokens: int, num_qo_heads: int | None) -> int:
    """Heads of a quantised query: as given, or as many as its rows make."""
    if num_qo_heads is not None:
        return num_qo_heads
    return q.num_rows // num_tokens if num_tokens else 8


def check_pages(rows: DSV4Rows) -> None:
    """Refuses a buffer that does not hold whole pages."""
    check_dtype("buffer", rows.data, torch.uint8)
    layout = rows.places
    need = layout.page_bytes(rows.page_size, padded=False)
    if rows.data.dim() != 2 or rows.data.shape[1] < need:
        raise ValueError(
            f"buffer must have shape [pages, >= {need}] for layout {rows.layout} and page_size "
            f"{rows.page_size}, got {list(rows.data.shape)}"
        )
    check_last_dim_contiguous("buffer", rows.data)
    step = layout.alignment
    if (rows.data.shape[0] > 1 and rows.data.stride(0) % step) or (
        has_memory(rows.data) and rows.data.data_ptr() % step
    ):
        raise ValueError(
            f"buffer must start at a multiple of {step} bytes and have a stride between pages that is one "
            f"(numbers of {step} bytes lie in it), got stride {rows.data.stride(0)}"
        )
    check_absent(rows.layout, rope=rows.rope)
    if layout.has_one_scale:
        scale = check_tensor("scale", rows.scale)
        check_dtype("scale", scale, torch.float32)
        check_shape("scale", scale, (1,))
    else:
        check_absent(rows.layout, scale=rows.scale)
    if rows.scale_group != layout.group:
        raise ValueError(
            f"scale_group must be {layout.group} for layout {rows.layout}, got {rows.scale_group!r}"
        )


def check_parts(rows: DSV4Rows) -> None:
    """Refuses tensors of layouts without pages that do not fit each other."""
    if rows.page_size != 1:
        raise ValueError(f"page_size must be 1 for layout {rows.layout}, got {rows.page_size}")
    places = rows.places
    name = "nope" if places.has_scale_tensor else "rows"
    if places.has_scale_tensor:
        check_storage(name, rows.data, rows.format)
        check_shape(name, rows.data, ("rows", places.quantized))
    else:
        check_dtype("rows", rows.data, torch.uint8)
        check_shape("rows", rows.data, ("rows", 512))
    count = rows.data.shape[0]
    check_last_dim_contiguous(name, rows.data)
    if places.rope:
        rope = check_tensor("rope", rows.rope)
        check_dtype("rope", rope, torch.bfloat16)
        check_shape("rope", rope, (count, ROPE_DIM))
        check_last_dim_contiguous("rope", rope)
    else:
        check_absent(rows.layout, rope=rows.rope)
    groups = (64, 32) if places.rope else (places.group,)
    if rows.scale_group not in groups:
        raise ValueError(
            f"scale_group must be {' or '.join(map(str, groups))} for layout {rows.layout}, "
            f"got {rows.scale_group!r}"
        )
    if not places.has_scale_tensor:
        check_absent(rows.layout, scale=rows.scale)
        return
    scale = check_tensor("scale", rows.scale)
    check_dtype("scale", scale, torch.float32)
    check_shape("scale", scale, (count, places.quantized // rows.scale_group))
    check_last_dim_contiguous("scale", scale)


def check_absent(layout: str, **parts: torch.Tensor | None) -> None:
    """Refuses tensors that a layout has no place for.

    Raises:
        ValueError: naming the tensor.
    """
    for name, tensor in parts.items():
        if tensor is not None:
            raise ValueError(f"{name} must be None for layout {layout}: it lies in data")

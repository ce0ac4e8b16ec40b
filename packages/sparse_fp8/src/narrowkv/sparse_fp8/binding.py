"""Rows and index lists as kernel arguments: pointers, strides, and constants to compile for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.runtime.errors import byte_span, has_memory
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers
from narrowkv.sparse_fp8.layouts import HEAD_DIM, LAYOUTS, ROPE_DIM

__all__ = [
    "NO_CSR",
    "NO_ROWS",
    "QUERY_FORMATS",
    "BoundRows",
    "RowsFormat",
    "bind_16_bit_rows",
    "bind_quantized_rows",
    "byte_range",
    "format_id_of",
    "widened_format",
]

INT32_MAX = 2**31 - 1
NO_ROWS = RowPointers(None, None, None, 0, 0, 0, 0, 0)
NO_CSR = Csr(None, None, 0)
_LAYOUT_OF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class RowsFormat(NamedTuple):
    """How rows are stored: what a compiled kernel and a plan depend on.

    Attributes:
        layout: "bf16" or "fp16" for 16-bit rows; the name of a layout for `DSV4Rows`.
        page_size: rows of a page; 1 for rows without pages.
        scale_group: columns that a scale is for.
        format: the format of the quantised values; "" for 16-bit rows.
        negative_zero_free: as in `DSV4Rows`.
        offsets_64_bit: whether an offset into the rows can need more than 31 bits.
        aligned: whether every row begins at a multiple of 16 elements and of 16 bytes, which the kernels for
            Hopper copy at once.
        columns: columns of 16-bit rows, 512 or 576; of no meaning for others.

    Example:
        >>> RowsFormat("packed584", page_size=64, format="fp8_e4m3fn").is_quantized
        True
    """

    layout: str
    page_size: int = 1
    scale_group: int = 64
    format: str = ""
    negative_zero_free: bool = False
    offsets_64_bit: bool = False
    aligned: bool = True
    columns: int = HEAD_DIM

    @property
    def is_quantized(self) -> bool:
        """Whether the rows are `DSV4Rows`."""
        return self.format != ""

    @property
    def head_dim(self) -> int:
        """Columns of a row: 512, or 576 for DeepSeek-V3.2."""
        return LAYOUTS[self.layout].head_dim if self.is_quantized else self.columns

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of 16-bit rows; bf16 for quantised ones, which are widened to it."""
        return torch.float16 if self.layout == "fp16" else torch.bfloat16


QUERY_FORMATS = {
    (name, columns): RowsFormat(name, columns=columns)
    for name in ("bf16", "fp16")
    for columns in (HEAD_DIM, HEAD_DIM + ROPE_DIM)
}


def widened_format(rows: RowsFormat) -> RowsFormat:
    """How a query or rows are stored once they are widened to 16 bits."""
    return QUERY_FORMATS["fp16" if rows.dtype == torch.float16 else "bf16", rows.head_dim]


class BoundRows(NamedTuple):
    """Rows as kernels take them.

    Attributes:
        format: what kernels are compiled for.
        pointers: pointers and strides.
        num_rows: rows that an index may name.
        tensors: the tensors that hold the rows, by name.
        format_id: an id that rows with equal formats, dtypes and strides have in common.
    """

    format: RowsFormat
    pointers: RowPointers
    num_rows: int
    tensors: dict[str, torch.Tensor]
    format_id: int


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and of the byte after its last; (0, 0) if it is empty."""
    return byte_span(tensor) if tensor.numel() and has_memory(tensor) else (0, 0)


def begins_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes; also if it has no memory."""
    return not has_memory(tensor) or tensor.data_ptr() % 16 == 0


def _passes_31_bits(*parts: torch.Tensor | None) -> bool:
    """Whether an element's offset within its tensor can need more than 31 bits."""
    return any(
        sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) > INT32_MAX
        for part in parts
        if part is not None and part.numel()
    )


def bind_16_bit_rows(rows: torch.Tensor) -> BoundRows:
    """Rows of bf16 or fp16 `[num_rows, 512]` or `[num_rows, 576]`."""
    stride = rows.stride(0)
    aligned = begins_aligned(rows) and stride % 16 == 0
    row_format = RowsFormat(
        _LAYOUT_OF[rows.dtype], offsets_64_bit=_passes_31_bits(rows), aligned=aligned,
        columns=rows.shape[1],
    )  # fmt: skip
    pointers = RowPointers(rows, None, None, stride, 0, 0, 0, 0)
    format_id = format_id_of(pointers, row_format)
    return BoundRows(row_format, pointers, rows.shape[0], {"rows": rows}, format_id)


def bind_quantized_rows(
    data: torch.Tensor,
    rope: torch.Tensor | None,
    scale: torch.Tensor | None,
    *,
    num_rows: int,
    layout: str,
    page_size: int,
    scale_group: int,
    format: str,
    negative_zero_free: bool,
) -> BoundRows:
    """The rows of a `DSV4Rows`, whose attributes the arguments are. Scales in fp32 become int32."""
    parts = {"data": data, "rope": rope, "scale": scale}
    tensors = {f"rows.{name}": part for name, part in parts.items() if part is not None}
    places = LAYOUTS[layout]
    if places.is_paged:
        pages, width = data.shape
        step = places.alignment
        # The stride of a single page says nothing and may be odd.
        stride = data.stride(0) if pages > 1 else -(-width // step) * step
        tokens = data.as_strided((pages, places.page_bytes(page_size, padded=False)), (stride, 1))
        columns = tokens.view(torch.bfloat16) if places.rope == "bf16" else data
        if scale is not None:
            scales, scale_stride = scale.view(torch.int32), 0
        else:
            scales = tokens.view(torch.int32) if places.scale_item_bytes == 4 else data
            scale_stride = stride // places.scale_item_bytes
        pointers = RowPointers(
            data, columns, scales, stride, stride // (places.rope_item_bytes or 1), scale_stride, 0, 0
        )
    else:
        nope = data.view(torch.uint8)
        scales = nope if scale is None else scale.view(torch.int32)
        columns = nope if rope is None else rope
        pointers = RowPointers(
            nope, columns, scales, nope.stride(0), columns.stride(0), scales.stride(0), 0, 0
        )
    aligned = all(begins_aligned(tensor) for tensor in (pointers.nope, pointers.rope))
    row_format = RowsFormat(
        layout,
        page_size,
        scale_group,
        format,
        negative_zero_free,
        _passes_31_bits(data, rope, scale),
        aligned and not (pointers.stride_n % 16 or pointers.stride_r % 16),
    )
    return BoundRows(row_format, pointers, num_rows, tensors, format_id_of(pointers, row_format))


_format_ids: dict[tuple[Any, ...], int] = {}


def format_id_of(*structs: tuple[Any, ...]) -> int:
    """An id that structs with equal dtypes and numbers have in common."""
    signature = tuple(
        value.dtype if isinstance(value, torch.Tensor) else value for each in structs for value in each
    )
    return _format_ids.setdefault(signature, len(_format_ids))

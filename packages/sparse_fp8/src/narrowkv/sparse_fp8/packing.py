"""Rows into bytes and back: values and scales of a row, and where a page has them."""

from __future__ import annotations

import torch

from narrowkv.quant import (
    cast_fp8,
    decode,
    dsv4_tile_scale,
    e8m0_decode,
    e8m0_encode,
    encode,
    get_format,
)
from narrowkv.quant.e8m0 import ceil_exponent, e8m0_from_exponent
from narrowkv.sparse_fp8.layouts import ROPE_DIM, RowLayout

__all__ = [
    "decode_scales",
    "dequantize_values",
    "pack_pages",
    "pack_row512",
    "quantize_pages",
    "quantize_values",
    "unpack_pages",
]

_SCALE_DTYPE = {"e4m3": torch.float8_e4m3fn, "fp32": torch.float32}
_ROPE_DTYPE = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_SMALLEST_E4M3 = 2.0**-9
_LARGEST_E4M3 = 0x7E


def _scales(amax: torch.Tensor, layout: RowLayout, format: str) -> torch.Tensor:
    """The scales of groups with these largest magnitudes, fp32, as the engines' writers choose them."""
    largest = get_format(format).max_value
    if layout.scale == "fp32":
        tiny = torch.finfo(torch.float32).tiny
        return (amax / torch.full_like(amax, largest)).clamp(min=tiny)
    if layout.values == "fp8":
        # dsv4_tile_scale divides by 448; scaling by a power of two first would not turn that into 240.
        return dsv4_tile_scale(amax * (448.0 / largest))
    if layout.scale == "e4m3":
        wanted = (amax / torch.full_like(amax, largest)).clamp(min=_SMALLEST_E4M3)
        code = cast_fp8(wanted, "fp8_e4m3fn").view(torch.uint8)
        if layout.rounds_scales_up:
            # The codes of positive numbers rise with them; the last one is 448.
            low = code.view(torch.float8_e4m3fn).float() < wanted
            code = code + (low & (code < _LARGEST_E4M3)).to(torch.uint8)
        return code.view(torch.float8_e4m3fn).float()
    finite = amax.nan_to_num(0.0).clamp(max=torch.finfo(torch.float32).max)
    scale = e8m0_decode(e8m0_from_exponent(ceil_exponent(finite, format)))
    return scale.masked_fill(amax.isnan(), torch.nan)


def quantize_values(x: torch.Tensor, layout: RowLayout, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises columns with a scale for each group.

    Args:
        x: fp32 `[rows, quantized]`.
        layout: what is stored.
        format: the format of the values.

    Returns:
        Values in their storage dtype `[rows, value_bytes]`, and fp32 scales `[rows, num_groups]`.
    """
    groups = x.reshape(-1, layout.num_groups, layout.group)
    scale = _scales(groups.abs().amax(-1), layout, format)
    return encode((groups / scale[..., None]).reshape(-1, layout.quantized), get_format(format)), scale


def quantize_pages(x: torch.Tensor, format: str, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rows with one scale for all of them.

    Args:
        x: fp32 `[rows, columns]`.
        format: an FP8 format.
        page_size: rows of a page; the last page is filled up with zeros.

    Returns:
        uint8 `[pages, page_size, columns]`, and the fp32 scale `[1]`.
    """
    finite = x[x.isfinite()]
    largest = finite.abs().max() if finite.numel() else x.new_ones(())
    wanted = largest / torch.full_like(largest, get_format(format).max_value)
    scale = wanted.clamp(min=torch.finfo(torch.float32).tiny).view(1)
    stored = encode(x / scale, get_format(format)).view(torch.uint8)
    pages = stored.new_zeros(-(-x.shape[0] // page_size) * page_size, x.shape[1])
    pages[: x.shape[0]] = stored
    return pages.view(-1, page_size, x.shape[1]), scale


def dequantize_values(values: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    """The quantised columns as fp32 `[rows, quantized]`."""
    wide = decode(values, format)
    return wide * scale.repeat_interleave(wide.shape[-1] // scale.shape[-1], -1)


def _encode_scales(scale: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """The bytes of scales, uint8 `[rows, num_groups * scale_item_bytes]`."""
    if layout.scale == "e8m0":
        return e8m0_encode(scale)
    if layout.scale_stride > 1:
        scale = scale[:, layout.scale_order]
    return scale.to(_SCALE_DTYPE[layout.scale]).contiguous().view(torch.uint8)


def decode_scales(stored: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Undoes `_encode_scales`: fp32 `[rows, num_groups]`."""
    if layout.scale == "e8m0":
        return e8m0_decode(stored)
    scale = stored.contiguous().view(_SCALE_DTYPE[layout.scale]).float()
    if layout.scale_stride > 1:
        scale = scale[:, torch.tensor(layout.scale_order).argsort()]
    return scale


def pack_row512(values: torch.Tensor, scale: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Rows of 512 bytes: 448 FP8 bytes, 14 scale bytes (each of the seven twice), zeros.

    Args:
        values: uint8 `[rows, 448]`.
        scale: fp32 `[rows, 7]`, powers of two.
        layout: row512.

    Returns:
        uint8 `[rows, 512]`.
    """
    scales = _encode_scales(scale, layout).repeat_interleave(layout.scale_copies, -1)
    row = values.new_zeros(values.shape[0], 512)
    row[:, : layout.value_bytes] = values
    row[:, layout.value_bytes : layout.value_bytes + scales.shape[1]] = scales
    return row


def _part(pages: torch.Tensor, page_size: int, place: tuple[int, int], size: int) -> torch.Tensor:
    """A view of bytes `[pages, page_size, size]`; `place`: the first one's byte, and the step to the next."""
    first, step = place
    return pages.as_strided(
        (pages.shape[0], page_size, size), (pages.stride(0), step, 1), pages.storage_offset() + first
    )


def _parts(pages: torch.Tensor, page_size: int, layout: RowLayout) -> tuple[torch.Tensor, ...]:
    """Views of the bytes of values, RoPE columns and scales, each `[pages, page_size, bytes]`."""
    step = layout.data_bytes
    return (
        _part(pages, page_size, (0, step), layout.value_bytes),
        _part(pages, page_size, (layout.rope_at, step), ROPE_DIM * layout.rope_item_bytes),
        _part(
            pages, page_size, layout.scale_place(page_size), layout.num_groups * layout.scale_item_bytes
        ),
    )  # fmt: skip


def pack_pages(
    values: torch.Tensor, rope: torch.Tensor | None, scale: torch.Tensor, layout: RowLayout,
    page_size: int, *, padded: bool,
) -> torch.Tensor:  # fmt: skip
    """Pages of rows; the last page is filled up with zeros.

    Args:
        values: `[rows, value_bytes]`, one byte an element.
        rope: `[rows, 64]`, RoPE columns in the dtype that is stored; None if they are among the values.
        scale: fp32 `[rows, num_groups]`.
        layout: a paged one.
        page_size: rows of a page.
        padded: whether pages are padded as engines pad them.

    Returns:
        uint8 `[pages, bytes]`.
    """
    rows = values.shape[0]
    count = -(-rows // page_size)
    pages = torch.zeros(
        count, layout.page_bytes(page_size, padded=padded), dtype=torch.uint8, device=values.device
    )
    stored = [values.view(torch.uint8), None, _encode_scales(scale, layout)]
    if rope is not None:
        stored[1] = rope.to(_ROPE_DTYPE[layout.rope]).contiguous().view(torch.uint8)
    for place, part in zip(_parts(pages, page_size, layout), stored, strict=True):
        if part is not None:
            full = part.new_zeros(count * page_size, part.shape[1])
            full[:rows] = part
            place.copy_(full.view(place.shape))
    return pages


def unpack_pages(
    pages: torch.Tensor, page_size: int, layout: RowLayout
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Undoes `pack_pages` for whole pages: bytes of values, RoPE columns, fp32 scales (1 for one apart)."""
    values, rope, scales = (part.flatten(0, 1) for part in _parts(pages, page_size, layout))
    columns = rope.contiguous().view(_ROPE_DTYPE[layout.rope]) if layout.rope else None
    if layout.has_one_scale:
        return values.contiguous(), columns, torch.ones(len(values), 1, device=pages.device)
    return values.contiguous(), columns, decode_scales(scales, layout)

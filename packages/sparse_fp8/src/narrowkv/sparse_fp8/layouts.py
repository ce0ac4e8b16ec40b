"""The bytes of DeepSeek-V4's KV rows: sizes, and packing into pages and back."""

from __future__ import annotations

import torch

__all__ = [
    "FORMATS",
    "HEAD_DIM",
    "LAYOUTS",
    "NOPE_DIM",
    "NUM_TILES",
    "PACKED_BYTES",
    "ROPE_DIM",
    "ROW512_BYTES",
    "SCALE_BYTES",
    "TILE",
    "TOKEN_BYTES",
    "pack_pages",
    "pack_row512",
    "packed_page_stride",
    "unpack_pages",
]

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
TILE = 64
NUM_TILES = NOPE_DIM // TILE
LAYOUTS = ("split", "packed584", "row512")
FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz")

TOKEN_BYTES = NOPE_DIM + 2 * ROPE_DIM  # packed584: 448 FP8 bytes, then 64 bf16
SCALE_BYTES = 8  # packed584: seven E8M0 bytes and a zero byte
PACKED_BYTES = TOKEN_BYTES + SCALE_BYTES
ROW512_BYTES = 512


def packed_page_stride(page_size: int) -> int:
    """Bytes of a padded `packed584` page: the next multiple of 576 from `page_size * 584` on.

    Example:
        >>> packed_page_stride(64), packed_page_stride(1)
        (37440, 1152)
    """
    return -(-page_size * PACKED_BYTES // TOKEN_BYTES) * TOKEN_BYTES


def pack_row512(nope: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of 512 bytes: 448 FP8 bytes, 14 scale bytes (each of the seven twice), zeros.

    Args:
        nope: uint8 `[rows, 448]`.
        scales: uint8 `[rows, 7]`, E8M0.

    Returns:
        uint8 `[rows, 512]`.
    """
    row = nope.new_zeros(nope.shape[0], ROW512_BYTES)
    row[:, :NOPE_DIM] = nope
    row[:, NOPE_DIM : NOPE_DIM + 2 * NUM_TILES] = scales.repeat_interleave(2, -1)
    return row


def pack_pages(
    nope: torch.Tensor, rope: torch.Tensor, scales: torch.Tensor, page_size: int, *, padded: bool
) -> torch.Tensor:
    """packed584 pages; the last page is filled up with zeros.

    Args:
        nope: uint8 `[rows, 448]`.
        rope: bf16 `[rows, 64]`.
        scales: uint8 `[rows, 7]`, E8M0.
        page_size: rows of a page.
        padded: whether pages are padded to a multiple of 576 bytes.

    Returns:
        uint8 `[pages, bytes]`.
    """
    rows = nope.shape[0]
    pages = -(-rows // page_size)
    stride = packed_page_stride(page_size) if padded else page_size * PACKED_BYTES
    buffer = nope.new_zeros(pages, stride)
    tokens = nope.new_zeros(pages * page_size, TOKEN_BYTES)
    tokens[:rows, :NOPE_DIM] = nope
    tokens[:rows, NOPE_DIM:] = rope.contiguous().view(torch.uint8)
    padded_scales = nope.new_zeros(pages * page_size, SCALE_BYTES)
    padded_scales[:rows, :NUM_TILES] = scales
    buffer[:, : page_size * TOKEN_BYTES] = tokens.view(pages, -1)
    buffer[:, page_size * TOKEN_BYTES : page_size * PACKED_BYTES] = padded_scales.view(pages, -1)
    return buffer


def unpack_pages(buffer: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Undoes `pack_pages`: uint8 `[rows, 448]`, bf16 `[rows, 64]` and uint8 `[rows, 7]` of whole pages."""
    tokens = buffer[:, : page_size * TOKEN_BYTES].reshape(-1, TOKEN_BYTES)
    scales = buffer[:, page_size * TOKEN_BYTES : page_size * PACKED_BYTES].reshape(-1, SCALE_BYTES)
    return (
        tokens[:, :NOPE_DIM].contiguous(),
        tokens[:, NOPE_DIM:].contiguous().view(torch.bfloat16),
        scales[:, :NUM_TILES].contiguous(),
    )

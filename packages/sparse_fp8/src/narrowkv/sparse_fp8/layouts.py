"""The byte maps of DeepSeek's KV rows: where a row's values, scales and RoPE columns lie.

A layout is data: kernels, packers and checks all read `LAYOUTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FORMATS",
    "HEAD_DIM",
    "LAYOUTS",
    "PAGED_LAYOUTS",
    "ROPE_DIM",
    "RowLayout",
    "packed_page_stride",
]

HEAD_DIM = 512
"""Columns of V, which are the first columns of K."""
ROPE_DIM = 64
FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1")
_VALUES_PER_BYTE = {"fp8": 1, "fp4": 2}
_ROPE_ITEM_BYTES = {"bf16": 2, "fp8": 1, "": 0}
_SCALE_ITEM_BYTES = {"e8m0": 1, "e4m3": 1, "fp32": 4, "pow2": 4, "tensor": 4}


@dataclass(frozen=True)
class RowLayout:
    """Where the parts of a row lie, and how they are stored.

    The first `quantized` columns are stored as `values`, each group of them with a scale. RoPE columns follow
    unless they are among the quantised ones. K is all columns, V the first 512.

    Attributes:
        name: the name of the layout.
        quantized: columns that are stored in FP8 or FP4.
        values: "fp8" or "fp4" (E2M1, two to a byte, the even column in the low half).
        group: columns that a scale is for.
        scale: "e8m0", "e4m3", "fp32", or "pow2": powers of two in fp32; "tensor": one fp32 number for all
            columns of all rows, RoPE columns in FP8 included, apart from them.
        rope: how the last 64 columns are stored if they are not quantised: "bf16", or "fp8" (E4M3 without a
            scale, or with the one of the tensor); "" if they are.
        scale_copies: how often each scale is stored in a row.
        data_bytes: bytes from a token's values to the next token's in a page; 0 where rows are tensors of
            their own.
        rope_at: byte of a token's RoPE columns, from its values on.
        scale_at: byte of a token's scales, from its values on; None where the scales of a page lie together,
            after the data of all its tokens, and where they are a tensor of their own.
        scale_bytes: bytes of a token's scales and their padding.
        page_multiple: writers pad pages to a multiple of so many bytes.
        scale_stride: scales of groups that are so many groups apart are adjacent, see `scale_order`.
        rounds_scales_up: an E4M3 scale is the least one at which nothing saturates, not the nearest.
    """

    name: str
    quantized: int
    values: str
    group: int
    scale: str
    rope: str
    scale_copies: int = 1
    data_bytes: int = 0
    rope_at: int = 0
    scale_at: int | None = None
    scale_bytes: int = 0
    page_multiple: int = 1
    scale_stride: int = 1
    rounds_scales_up: bool = False

    @property
    def is_paged(self) -> bool:
        """Whether all parts lie in one buffer of pages."""
        return self.data_bytes > 0

    @property
    def has_scale_tensor(self) -> bool:
        """Whether scales are a tensor of their own."""
        return not self.is_paged and self.scale_at is None

    @property
    def has_one_scale(self) -> bool:
        """Whether all rows have one scale, a tensor of its own."""
        return self.scale == "tensor"

    @property
    def scales_stay_apart(self) -> bool:
        """Whether products with the scales need more bits than bf16 has."""
        return self.scale in ("fp32", "tensor")

    @property
    def default_format(self) -> str:
        """The OCP format of the values."""
        return "fp8_e4m3fn" if self.values == "fp8" else "fp4_e2m1"

    @property
    def head_dim(self) -> int:
        """Columns of K."""
        return self.quantized + (ROPE_DIM if self.rope else 0)

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        return self.quantized // self.group

    @property
    def scale_order(self) -> list[int]:
        """The groups in the order in which their scales lie in a row."""
        step = self.scale_stride
        return [group for first in range(step) for group in range(first, self.num_groups, step)]

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's quantised columns."""
        return self.quantized // _VALUES_PER_BYTE[self.values]

    @property
    def rope_item_bytes(self) -> int:
        """Bytes of a RoPE column that is not quantised."""
        return _ROPE_ITEM_BYTES[self.rope]

    @property
    def scale_item_bytes(self) -> int:
        """Bytes of a scale."""
        return _SCALE_ITEM_BYTES[self.scale]

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in a page, its scales and their padding included."""
        return self.data_bytes + (self.scale_bytes if self.scale_at is None else 0)

    @property
    def alignment(self) -> int:
        """What addresses of pages must be a multiple of, because of the widest number in them."""
        return max(self.rope_item_bytes, 1 if self.has_one_scale else self.scale_item_bytes)

    def scale_place(self, page_size: int) -> tuple[int, int]:
        """The byte of a page's first scale, and bytes from a token's scales to the next token's."""
        if self.has_one_scale:
            return 0, 0
        if self.scale_at is None:
            return page_size * self.data_bytes, self.scale_bytes
        return self.scale_at, self.data_bytes

    def page_bytes(self, page_size: int, *, padded: bool = True) -> int:
        """Bytes of a page."""
        multiple = self.page_multiple if padded else 1
        return -(-page_size * self.row_bytes // multiple) * multiple


# packedN: in a page, the data of all tokens, then the scales of all tokens. recordN: one token after another,
# each with its data and its scales. N: bytes of a token.
LAYOUTS = {
    layout.name: layout
    for layout in (
        # DeepSeek-V4: 448 columns in FP8, 64 in bf16.
        RowLayout("split", 448, "fp8", 64, "pow2", "bf16"),
        RowLayout("row512", 448, "fp8", 64, "e8m0", "bf16", scale_copies=2, scale_at=448),
        RowLayout(
            "packed584", 448, "fp8", 64, "e8m0", "bf16",
            data_bytes=576, rope_at=448, scale_bytes=8, page_multiple=576,
        ),
        # AITER's FP8 pool of DeepSeek-V4: RoPE is quantised, too, and scales are any numbers.
        RowLayout("split512", 512, "fp8", 64, "fp32", ""),
        # Latent rows of MLA in FP8 with one scale a layer, with and without RoPE columns.
        RowLayout("tensor576", 512, "fp8", 512, "tensor", "fp8", data_bytes=576, rope_at=512),
        RowLayout("tensor512", 512, "fp8", 512, "tensor", "", data_bytes=512),
        # DeepSeek-V4.1: RoPE is quantised, too.
        RowLayout("packed528", 512, "fp8", 32, "e8m0", "", data_bytes=512, scale_bytes=16, page_multiple=512),
        RowLayout("packed288", 512, "fp4", 16, "e4m3", "", data_bytes=256, scale_bytes=32, page_multiple=256),
        RowLayout("packed272", 512, "fp4", 32, "e8m0", "", data_bytes=256, scale_bytes=16, page_multiple=256),
        RowLayout("record528", 512, "fp8", 32, "e8m0", "", data_bytes=528, scale_at=512),
        RowLayout("record288", 512, "fp4", 16, "e4m3", "", data_bytes=288, scale_at=256),
        RowLayout("record272", 512, "fp4", 32, "e8m0", "", data_bytes=272, scale_at=256),
        # DeepSeek-V3.2: K has 64 RoPE columns after the 512 that are V, too.
        RowLayout("record656", 512, "fp8", 128, "fp32", "bf16", data_bytes=656, rope_at=528, scale_at=512),
        RowLayout(
            "record352", 512, "fp4", 16, "e4m3", "fp8",
            data_bytes=352, rope_at=256, scale_at=320, scale_stride=4, rounds_scales_up=True,
        ),
    )
}  # fmt: skip
PAGED_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if layout.is_paged)


def packed_page_stride(page_size: int, layout: str = "packed584") -> int:
    """Bytes of a page as engines allocate it: `packed584` pages are padded to a multiple of 576 bytes.

    Example:
        >>> packed_page_stride(64), packed_page_stride(1), packed_page_stride(64, "record528")
        (37440, 1152, 33792)
    """
    return LAYOUTS[layout].page_bytes(page_size)

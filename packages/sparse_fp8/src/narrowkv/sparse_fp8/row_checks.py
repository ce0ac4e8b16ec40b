"""What the tensors of quantised rows must be, for each kind of layout."""

from __future__ import annotations

from typing import Protocol

import torch

from narrowkv.quant import check_storage
from narrowkv.runtime.errors import (
    check_dtype,
    check_last_dim_contiguous,
    check_shape,
    check_tensor,
    has_memory,
)
from narrowkv.sparse_fp8.layouts import ROPE_DIM, RowLayout

__all__ = ["check_absent", "check_pages", "check_parts"]


class RowTensors(Protocol):
    """What the checks read of `DSV4Rows`."""

    @property
    def data(self) -> torch.Tensor: ...
    @property
    def rope(self) -> torch.Tensor | None: ...
    @property
    def scale(self) -> torch.Tensor | None: ...
    @property
    def layout(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    @property
    def scale_group(self) -> int: ...
    @property
    def places(self) -> RowLayout: ...


def check_pages(rows: RowTensors) -> None:
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


def check_parts(rows: RowTensors) -> None:
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

"""Checks of a Sage attention's metadata, before any launch."""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_index_vector,
    check_positive_int,
    check_same_device,
    check_shape,
    check_window,
)
from narrowkv.sage.shapes import SageShape

LAYOUTS = ("BSHD", "BHSD")
FLOATS = (torch.bfloat16, torch.float16)
_FLAGS = (torch.bool, torch.uint8, torch.int8, torch.int32)
# Queries and keys of a block are multiples of these: a tile of every target lies in one block.
_BLOCK_UNITS = (128, 64)
_HEAD_DIMS = (64, 128)
_DIMENSIONS = {"BSHD": "[batch, seq, heads, head_dim]", "BHSD": "[batch, heads, seq, head_dim]"}
# No model has as many heads: tokens were taken for heads.
_MOST_HEADS = 256


def dimensions(layout: str, ragged: bool) -> str:
    """The shape of q, k, v and o, for messages."""
    return "[total_tokens, heads, head_dim]" if ragged else _DIMENSIONS[layout]


def check_starts(name: str, starts: torch.Tensor | None, tokens: int) -> None:
    """Reads where sequences begin and refuses what is wrong; this waits for the device.

    Raises:
        ValueError: they do not begin at 0, decrease, or pass the tokens that there are.
    """
    if starts is None:
        return
    values = starts.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    for i in range(len(values) - 1):
        if values[i + 1] < values[i]:
            raise ValueError(
                f"{name} must not decrease, got {values[i]} and then {values[i + 1]} at elements {i}, {i + 1}"
            )
    if values[-1] > tokens:
        raise ValueError(f"{name} must end within the {tokens} tokens, got {values[-1]}")


def windows_of(causal: str | bool | None, window: tuple[int, int] | None) -> tuple[bool, int, int]:
    """Alignment, and how far a row sees to the left and right."""
    if causal is True:
        raise ValueError('causal must say how it is aligned: "top_left" or "bottom_right", got True')
    if causal:
        check_choice("causal", causal, ("top_left", "bottom_right"))
    if window is None:
        return causal != "top_left", -1, 0 if causal else -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be (left, right), each -1 or a number of tokens, got {window!r}")
    left, right = (check_window(f"window[{i}]", side) for i, side in enumerate(window))
    if causal and window[1] == -1:
        right = 0
    return causal != "top_left", left, right


def check_block_sizes(sizes: object) -> tuple[int, int]:
    """Queries and keys of a block of a block mask.

    Raises:
        TypeError, ValueError: they are not two multiples of 128 and 64.
    """
    if not isinstance(sizes, tuple | list) or len(sizes) != 2:
        raise TypeError(f"block_sizes must be (queries, keys) of a block, got {sizes!r}")
    queries, keys = (
        check_positive_int(f"block_sizes[{i}]", size, multiple_of=unit)
        for i, (size, unit) in enumerate(zip(sizes, _BLOCK_UNITS, strict=True))
    )
    return queries, keys


def check_block_mask(
    block_mask: torch.Tensor | None, sizes: tuple[int, int] | None, shape: SageShape
) -> torch.Tensor | None:
    """The block mask of a call of this shape, or None for a plan without one.

    Raises:
        TypeError, ValueError: there is one and the plan is for none, or the other way round; or its dtype or
            shape are wrong.
    """
    if sizes is None:
        if block_mask is not None:
            raise ValueError("block_mask must be None: the plan was made without block_sizes")
        return None
    if block_mask is None:
        raise ValueError(f"block_mask must be given: the plan is for blocks of {sizes[0]} x {sizes[1]}")
    check_dtype("block_mask", block_mask, _FLAGS)
    blocks = (-(-shape.q_tokens // sizes[0]), -(-shape.k_tokens // sizes[1]))
    if not shape.ragged:
        check_shape("block_mask", block_mask, (shape.batch, shape.num_qo_heads, *blocks))
        return block_mask
    check_shape("block_mask", block_mask, (shape.batch, shape.num_qo_heads, "query blocks", "key blocks"))
    for axis, most in zip((2, 3), blocks, strict=True):
        if not 1 <= block_mask.shape[axis] <= max(most, 1):
            raise ValueError(
                f"block_mask must have 1 to {max(most, 1)} blocks on axis {axis}, which all tokens fill, "
                f"got {block_mask.shape[axis]}"
            )
    return block_mask


def sage_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    layout: str = "BSHD",
) -> SageShape:
    """Sizes of a call, checked without reading the device."""
    check_choice("layout", layout, LAYOUTS)
    ragged = cu_seqlens_q is not None
    if ragged != (cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must both be given or both be None, got one")
    for name, tensor in (("q", q), ("k", k)):
        check_dtype(name, tensor, FLOATS)
        if tensor.dim() != (3 if ragged else 4):
            raise ValueError(f"{name} must have shape {dimensions(layout, ragged)}, got {list(tensor.shape)}")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        if layout != "BSHD":
            raise ValueError(
                f"layout must be left out with cu_seqlens, where tensors are {dimensions(layout, True)}, "
                f"got {layout!r}"
            )
        check_index_vector("cu_seqlens_q", cu_seqlens_q, "batch + 1")
        if cu_seqlens_q.numel() == 0:
            raise ValueError(f"cu_seqlens_q must have shape [batch + 1], got {list(cu_seqlens_q.shape)}")
        batch = cu_seqlens_q.numel() - 1
        check_index_vector("cu_seqlens_k", cu_seqlens_k, batch + 1)
        check_same_device(q=q, k=k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    else:
        batch = q.shape[0]
        if k.shape[0] != batch:
            raise ValueError(f"k must have q's batch {batch}, got {k.shape[0]}")
        check_same_device(q=q, k=k)
    if layout == "BHSD":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    shape = SageShape(batch, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], ragged)
    if k.shape[-1] != shape.head_dim:
        raise ValueError(f"k must have q's head_dim {shape.head_dim}, got {k.shape[-1]}")
    check_sage_shape(shape, layout)
    return shape


def check_sage_shape(shape: SageShape, layout: str) -> None:
    """Refuses sizes that no kernel takes, and axes that were evidently swapped.

    Raises:
        ValueError: naming the size.
    """
    if shape.head_dim not in _HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {_HEAD_DIMS}, got {shape.head_dim}")
    heads, kv_heads = shape.num_qo_heads, shape.num_kv_heads
    hint = ""
    if not shape.ragged:
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        hint = f"; if tensors are {_DIMENSIONS[other]}, pass layout={other!r}"
    if max(heads, kv_heads) > _MOST_HEADS:
        raise ValueError(
            f"q and k must have at most {_MOST_HEADS} heads, got {heads} and {kv_heads} in layout {layout}"
            + hint
        )
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads, at least 1, got {heads}{hint}")

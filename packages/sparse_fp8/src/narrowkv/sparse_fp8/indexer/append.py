"""`append_index_keys`: rotates, quantises and stores the index keys of new tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from narrowkv.quant import get_format
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_choice,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
)
from narrowkv.runtime.launch import BoundLaunch, LaunchOptions
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.sparse_fp8.indexer.kernels.append import AppendSpec, Rotation, _append_index_keys_kernel
from narrowkv.sparse_fp8.indexer.kernels.logits import KeyPages
from narrowkv.sparse_fp8.indexer.keys import FP4, SHUFFLED_TILE, IndexKeys, IndexKeysFormat

__all__ = ["append_index_keys"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 16
_KERNELS = 64


@traceable
def append_index_keys(
    k: torch.Tensor,
    keys: IndexKeys,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    style: str = "neox",
    hadamard: bool = False,
    pow2_scales: bool = False,
) -> None:
    """Writes the index keys of new tokens into their slots: RoPE, Hadamard rotation, FP8 with a scale a key.

    All of it is computed in fp32 and rounded once. The stored bytes are those of `IndexKeys.quantize`.

    Args:
        k: bf16, fp16 or fp32 `[num_tokens, head_dim]`, last dimension contiguous: normalised keys.
        keys: where to write, in FP8.
        slot_mapping: int32 or int64 `[num_tokens]`: token t goes to slot `slot_mapping[t]`, token `slot %
            page_size` of page `slot // page_size`. -1, and any slot that there is not, is skipped.
        cos, sin: bf16, fp16 or fp32 `[max_position, rotary_dim / 2]`, last dimension contiguous, of one
            stride: rotates the first rotary_dim channels; None for no RoPE.
        positions: int32 or int64 `[num_tokens]`, with `cos`; one out of range stands for the nearest inside.
        style: "neox" (the halves of the rotary channels are partners) or "gptj" (neighbours are).
        hadamard: also rotates all channels by the orthonormal Hadamard matrix, as DeepSeek-V3.2 does; its
            queries must be rotated, too (`narrowkv.quant.hadamard`).
        pow2_scales: rounds scales up to powers of two.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.
        UnsupportedError: keys in FP4.

    Source: DeepSeek-V3.2's indexer; the scale is that of vLLM's `indexer_k_quant_and_cache`,
    `max(amax, 1e-4)` over the format's largest number.

    Example:
        >>> keys = IndexKeys.packed(torch.zeros(2, 4, 36, dtype=torch.uint8))
        >>> append_index_keys(torch.ones(1, 32), keys, torch.tensor([5]))
        >>> keys.dequantize()[1, 1, :2]
        tensor([1., 1.])
    """
    if check_instance("keys", keys, IndexKeys).format == FP4:
        raise UnsupportedError("keys must be in FP8 to be appended to: quantise FP4 by IndexKeys.quantize")
    check_dtype("k", k, _FLOATS)
    check_shape("k", k, ("num_tokens", keys.stored.head_dim))
    check_last_dim_contiguous("k", k)
    check_no_grad(k=k)
    check_index_vector("slot_mapping", slot_mapping, k.shape[0])
    check_choice("style", style, ("neox", "gptj"))
    check_same_device(
        k=k, values=keys.values, slot_mapping=slot_mapping, cos=cos, sin=sin, positions=positions
    )
    rotation, rotary, max_position = _rotation(k, keys.stored.head_dim, cos, sin, positions)
    values, scale = keys.values.view(torch.uint8), keys.scale
    steps = (values.stride(1), scale.stride(1)) if keys.is_paged else (0, 0)
    num_slots = keys.num_pages * max(1, keys.stored.page_size)
    kernel = _kernel(keys.stored, rotary, style, bool(hadamard), bool(pow2_scales))
    kernel(
        (-(-k.shape[0] // _BLOCK),),
        (
            k, k.stride(0), slot_mapping, slot_mapping.stride(0),
            KeyPages(values, scale, values.stride(0), steps[0], scale.stride(0), steps[1]),
            rotation, k.shape[0], num_slots, max_position,
        ),
    )  # fmt: skip


def _rotation(
    k: torch.Tensor, head_dim: int, cos: torch.Tensor | None, sin: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> tuple[Any, int, int]:  # fmt: skip
    """RoPE as a kernel's argument, the channels that it rotates, and how many positions there are."""
    if cos is None or sin is None or positions is None:
        if not (cos is None and sin is None and positions is None):
            raise ValueError("cos, sin and positions must all be given or all be None, got some")
        return Rotation(None, None, None, 0, 0), 0, 0
    check_dtype("cos", cos, _FLOATS)
    check_dtype("sin", sin, cos.dtype)
    check_shape("cos", cos, ("max_position", "rotary_dim / 2"))
    check_shape("sin", sin, tuple(cos.shape))
    check_last_dim_contiguous("cos", cos)
    check_last_dim_contiguous("sin", sin)
    check_index_vector("positions", positions, k.shape[0])
    rotary = 2 * cos.shape[1]
    if not 0 < rotary <= head_dim or cos.shape[0] == 0:
        raise ValueError(
            f"cos must have at least one position and 1 to {head_dim // 2} columns, got {list(cos.shape)}"
        )
    if cos.stride(0) != sin.stride(0):
        raise ValueError(f"sin must have the stride of cos, {cos.stride(0)}, got {sin.stride(0)}")
    return Rotation(cos, sin, positions, cos.stride(0), positions.stride(0)), rotary, cos.shape[0]


@lru_cache(maxsize=_KERNELS)
def _kernel(stored: IndexKeysFormat, rotary: int, style: str, hadamard: bool, pow2: bool) -> BoundLaunch:
    spec = AppendSpec(
        HEAD_DIM=stored.head_dim,
        ROTARY=rotary,
        NEOX=style == "neox",
        STAGES=stored.head_dim.bit_length() - 1 if hadamard else 0,
        POW2=pow2,
        FORMAT=stored.format,
        MAX=get_format(stored.format).max_value,
        BLOCK=_BLOCK,
        PAGE_SIZE=stored.page_size,
        SHUFFLED=SHUFFLED_TILE if stored.shuffled else 0,
    )
    # Products and sums are rounded apart, as the host's are.
    options = LaunchOptions(num_warps=4, num_stages=1, enable_fp_fusion=False)
    return BoundLaunch(_append_index_keys_kernel, {"SPEC": spec}, options)

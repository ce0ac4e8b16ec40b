"""Offset, balance and rotation of keys: checks, and their application to queries in a launch of its own."""

from __future__ import annotations

from functools import lru_cache

import torch

from narrowkv.paged_cache.kernels.queries import _transform_queries_kernel
from narrowkv.paged_cache.rope import Rope, rope_constants, rope_pointers
from narrowkv.quant import KeyTransform
from narrowkv.runtime.errors import check_instance, check_no_grad, check_same_device, check_shape
from narrowkv.runtime.launch import BoundLaunch, LaunchOptions

_ROWS = 32


def check_key_transform(
    transform: KeyTransform | None, num_kv_heads: int, head_dim: int, k: torch.Tensor
) -> None:
    """Refuses a transformation of keys of other heads, or on another device than the stored keys `k`."""
    if transform is None:
        return
    check_instance("key_transform", transform, KeyTransform)
    for name, value in transform_tensors(transform).items():
        check_shape(name, value, (num_kv_heads, head_dim))
    check_same_device(k=k, **transform_tensors(transform))
    check_no_grad(**transform_tensors(transform))


def transform_tensors(transform: KeyTransform | None) -> dict[str, torch.Tensor]:
    """The tensors of a transformation, by name."""
    if transform is None:
        return {}
    named = {"key_transform.offset": transform.offset, "key_transform.balance": transform.balance}
    return {name: value for name, value in named.items() if value is not None}


def transform_queries(
    q: torch.Tensor,
    transform: KeyTransform,
    num_kv_heads: int,
    sm_scale: float | None = None,
    rope: Rope | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`KeyTransform.queries` in one launch, for kernels that take queries as they are in memory.

    Args:
        q: bf16 or fp16 `[num_tokens, num_qo_heads, head_dim]`, last dimension contiguous.
        transform: with tensors of `num_kv_heads` heads.
        num_kv_heads: divides num_qo_heads.
        sm_scale: scale of the logits, if their shift by the offset is wanted.
        rope: a rotary embedding that comes first.

    Returns:
        A new tensor like `q`, contiguous; and fp32 `[num_tokens, num_qo_heads]`, what an lse over the stored
        keys lacks, or None if `sm_scale` is None or there is no offset.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    offset = None if sm_scale is None else transform.offset
    shift = None if offset is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    launch = _bound(
        num_kv_heads, num_heads // num_kv_heads, head_dim, transform.butterflies(head_dim),
        *rope_constants(rope).values(),
    )  # fmt: skip
    blocks = -(-num_tokens * (num_heads // num_kv_heads) // _ROWS)
    arguments = (
        q, out, shift, transform.balance, offset, rope_pointers(rope), q.stride(0), q.stride(1), num_tokens,
        0.0 if sm_scale is None else float(sm_scale),
    )  # fmt: skip
    launch((blocks * num_kv_heads, 1, 1), arguments)
    return out, shift


@lru_cache
def _bound(
    num_kv_heads: int, gqa_ratio: int, head_dim: int, butterflies: int, rotary_dim: int, interleaved: bool
) -> BoundLaunch:
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "GQA_RATIO": gqa_ratio,
        "HEAD_DIM": head_dim,
        "BUTTERFLIES": butterflies,
        "ROTARY_DIM": rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_M": _ROWS,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
    }
    return BoundLaunch(_transform_queries_kernel, constants, LaunchOptions(num_warps=4, num_stages=1))

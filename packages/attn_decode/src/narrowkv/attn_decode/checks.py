"""Checks of a decode call's metadata, before any launch."""

from __future__ import annotations

import torch

from narrowkv.attn_decode.config import DecodeShape
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.checks import check_table
from narrowkv.paged_cache.layouts import DECODE_HEAD_DIMS
from narrowkv.quant import KeyTransform
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_descale_float,
    check_descale_tensor,
    check_dtype,
    check_instance,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)


def check_classes(q: object, cache: object, page_table: object, **optional: object) -> None:
    """Refuses arguments of wrong classes; `optional` ones may be None."""
    check_tensor("q", q)
    for name, value in optional.items():
        if value is not None:
            check_tensor(name, value)
    check_instance("cache", cache, PagedKVCache)
    check_instance("page_table", page_table, PageTable)


QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def check_query_format(dtype: torch.dtype, formats: CacheFormat) -> None:
    """Refuses FP8 queries over what they are not served with.

    Raises:
        UnsupportedError: K and V are neither both in FP8 nor both in FP4.
    """
    kinds = {get_format(name).kind for name in (formats.k, formats.v)}
    if dtype.itemsize == 1 and kinds not in ({"fp8"}, {"fp4"}):
        raise UnsupportedError(
            f"an FP8 query needs K and V in FP8, or both in FP4, got k={formats.k}, v={formats.v}; a 16-bit "
            "query reads any cache"
        )


def fold_q_descale(q: torch.Tensor, q_descale: float | torch.Tensor, scale: float) -> float:
    """The softmax scale with a descale of the query in it that is a number."""
    if isinstance(q_descale, torch.Tensor):
        check_dtype("q_descale", q_descale, (torch.float32,))
        check_shape("q_descale", q_descale, (1,))
        check_same_device(q=q, q_descale=q_descale)
        check_descale_tensor("q_descale", q_descale)
    else:
        check_descale_float("q_descale", q_descale)
    if q.dtype.itemsize > 1:
        if isinstance(q_descale, torch.Tensor) or q_descale != 1.0:
            raise ValueError(f"q_descale must be 1.0 for a query in {q.dtype}, got {q_descale}")
        return scale
    return scale if isinstance(q_descale, torch.Tensor) else scale * q_descale


def check_transform(transform: KeyTransform | None, q: torch.Tensor) -> None:
    """Refuses what is not served over keys that a cache's `key_transform` changed."""
    if transform is not None and q.dtype.itemsize == 1:
        raise ValueError(
            f"q must be bf16 or fp16 for a cache with a key_transform, got {q.dtype}: pass q as it was "
            "before it was quantised"
        )


def decode_shape(q: torch.Tensor, cache: PagedKVCache, page_table: PageTable) -> DecodeShape:
    """Checks what a decode call's metadata can tell without reading the device, and returns its shape.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_classes(q, cache, page_table)
    check_table(page_table, cache, row_masks=True)
    check_dtype("q", q, QUERY_DTYPES)
    check_query_format(q.dtype, cache.format)
    check_transform(cache.key_transform, q)
    if q.dim() != 3:
        raise ValueError(f"q must have shape [batch * q_len, num_qo_heads, head_dim], got {tuple(q.shape)}")
    check_last_dim_contiguous("q", q)
    num_tokens, num_qo_heads, head_dim = q.shape
    batch = page_table.batch_size
    if head_dim != cache.head_dim:
        raise ValueError(f"q must have the cache's head_dim {cache.head_dim}, got {head_dim}")
    if (batch == 0 and num_tokens) or (batch and (num_tokens % batch or num_tokens == 0)):
        raise ValueError(f"q must have batch * q_len rows for batch {batch}, got {num_tokens}")
    for name, mask in (("key_ranges", page_table.key_ranges), ("tree_mask", page_table.tree_mask)):
        if mask is not None and batch and mask.shape[1] != num_tokens // batch:
            raise ValueError(
                f"{name} must have q_len = {num_tokens // batch} query tokens a sequence, got {mask.shape[1]}"
            )
    check_same_device(q=q, k=cache.k, v=cache.v, page_table=page_table.page_ids)
    shape = DecodeShape(
        batch=batch,
        q_len=num_tokens // batch if batch else 1,
        num_qo_heads=num_qo_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        capacity=page_table.capacity,
        q_dtype=q.dtype,
        v_head_dim=cache.v_head_dim,
    )
    check_decode_shape(shape)
    return shape


def check_decode_shape(shape: DecodeShape) -> None:
    """Refuses heads and head dimensions that no kernel takes."""
    if shape.head_dim not in DECODE_HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {DECODE_HEAD_DIMS}, got {shape.head_dim}")
    if shape.num_qo_heads < 1 or shape.num_qo_heads % shape.num_kv_heads:
        raise ValueError(
            f"q must have a positive multiple of the cache's {shape.num_kv_heads} KV heads, "
            f"got num_qo_heads={shape.num_qo_heads}"
        )


def check_values(capacity: int, cache: PagedKVCache, page_table: PageTable) -> None:
    """Looks at lengths, page ids and descales, which waits for the device.

    Raises:
        ValueError: naming the first fault found; a sequence is longer than the plan's `capacity`.
    """
    page_table.check_values(cache.num_pages)
    lens = page_table.seq_lens_tensor()
    longest = int(lens.max()) if lens.numel() else 0
    if longest > capacity:
        raise ValueError(
            f"plan must cover the longest sequence of {longest} tokens, got one for {capacity}: call "
            "plan_decode with a larger max_seq_len"
        )
    for name, value in (("k_descale", cache.k_descale), ("v_descale", cache.v_descale)):
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            check_descale_tensor(name, value, validate=True)

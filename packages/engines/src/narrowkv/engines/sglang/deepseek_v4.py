"""The sparse attention of DeepSeek V4 and V4.1 over SGLang's pages, by narrowkv's kernels.

SGLang's backend "dsv4" selects the rows of each token; on ROCm it then calls one function for attention.
`patch` puts `flash_mla_with_kvcache` into its place.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from narrowkv.engines.deepseek import LAYOUTS, attend_to_rows, listed_rows, page_rows
from narrowkv.engines.versions import adapting
from narrowkv.quant.formats import get_format
from narrowkv.sparse_fp8 import DSV4Rows

__all__ = [
    "flash_mla_with_kvcache",
    "patch",
    "pool_reasons",
    "pool_rows",
]

_HEAD_DIM = 512


def pool_reasons(pool: Any) -> list[str]:
    """Why narrowkv cannot read a pool; an empty list is a yes.

    Args:
        pool: SGLang's `DeepSeekV4SingleKVPool`, of a window or of compressed rows, or one like it.
    """
    with adapting("sglang"):
        from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    if pool.kv_cache_total_dim == _HEAD_DIM:
        return [
            "its pool is in uniform FP8 (512 bytes a token, without scales), which narrowkv has no rows for"
        ]
    if pool.kv_layout is KVLayout.V4 or pool.kv_layout.encoding in (KVLayout.V41, KVLayout.V41_FP4):
        return []
    return [f"its pool has the layout {pool.kv_layout.value}"]


def pool_rows(pool: Any, layer_id: int) -> DSV4Rows:
    """A layer's rows where they are in SGLang's pool.

    Args:
        pool: SGLang's `DeepSeekV4SingleKVPool`.
        layer_id: the layer's number, as the pool's `get_key_buffer` takes it.

    Raises:
        ValueError: for a pool that narrowkv does not read.
    """
    reasons = pool_reasons(pool)
    if reasons:
        raise ValueError(f"pool must hold rows that narrowkv reads: {reasons[0]}")
    buffer, width = pool.get_key_buffer(layer_id).view(torch.uint8), pool.kv_cache_total_dim
    pages = buffer[:, : pool.page_size * width].view(buffer.shape[0], pool.page_size, width)
    return page_rows(pages, _fp8(), interleaved=pool.kv_layout.is_interleaved)


def _fp8() -> str:
    """The FP8 format that SGLang stores on this device."""
    with adapting("sglang"):
        from sglang.srt.layers.attention.hip_flash_mla import FP8_DTYPE

    return get_format(FP8_DTYPE).name


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    indices: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    inv_rope: Any = None,
    interleaved: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of tokens to rows of one or two paged caches, by SGLang's names of arguments.

    Args:
        q: `[batch, tokens, num_qo_heads, 512]`, bf16; 1 to 128 heads.
        k_cache: `[pages, page_size, 1, bytes]`, FP8 or bytes, pages padded or not; 584 bytes a token
            (DeepSeek-V4), 528 (V4.1) or 288 (V4.1 in NVFP4).
        indices: `[batch, tokens, width]` int32 rows of `k_cache`; -1 is skipped.
        attn_sink: `[num_qo_heads]` fp32, a logit whose value is 0.
        topk_length: `[batch]` or `[batch, tokens]`: only so many of a token's indices count.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: the same of a second cache, whose layout
            may be another.
        softmax_scale: of the logits; default `512 ** -0.5`.
        inv_rope: SGLang's frequencies and positions: the output is rotated back by its own function.
        interleaved: whether pages are `V41_NEW` or `V41_FP4_NEW`, which have the sizes of V4.1's others.

    Returns:
        `[batch, tokens, num_qo_heads, 512]`, and None for the log-sum-exp.

    Raises:
        TypeError, ValueError: for shapes and formats that narrowkv does not read.
    """
    if q.shape[-1] != _HEAD_DIM:
        raise ValueError(f"q must have {_HEAD_DIM} channels, got {q.shape[-1]}")
    fp8 = _fp8()
    source = listed_rows(page_rows(k_cache.squeeze(2), fp8, interleaved=interleaved), indices, topk_length)
    extra = None
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None
        rows = page_rows(extra_k_cache.squeeze(2), fp8, interleaved=interleaved)
        extra = listed_rows(rows, extra_indices_in_kvcache, extra_topk_length)
    o = attend_to_rows(q.flatten(0, 1), source, extra, attn_sink=attn_sink, sm_scale=softmax_scale)
    if inv_rope is not None:
        with adapting("sglang"):
            from sglang.srt.layers.attention.hip_flash_mla import _apply_inverse_rope

        _apply_inverse_rope(o, inv_rope)
    return o.view(q.shape), None


def patch() -> Callable[[], None]:
    """Lets narrowkv's kernel stand in for those of SGLang's backend "dsv4" on ROCm.

    Caches in layouts that narrowkv does not read stay with SGLang's kernels, and a warning says so once. For
    DeepSeek-V4 set SGLANG_HACK_FLASHMLA_BACKEND=triton, so that heads are not padded to 64 and no call takes
    another way; leave it at its default for V4.1, whose pages SGLang makes only with that.

    Returns:
        A function that puts SGLang's back.

    Raises:
        ImportError: SGLang is not installed, or is a version that this does not fit.
    """
    with adapting("sglang"):
        from sglang.srt.layers.attention import deepseek_v4_backend_hip_radix as place

    theirs = place.flash_mla_with_kvcache_entrypoint

    @functools.wraps(theirs)
    def call(backend: str, **kwargs: Any) -> Any:
        caches = [kwargs[name] for name in ("k_cache", "extra_k_cache") if kwargs.get(name) is not None]
        unread = [cache.shape[-1] for cache in caches if cache.shape[-1] not in LAYOUTS]
        if not unread:
            return flash_mla_with_kvcache(**kwargs)
        warnings.warn(
            f"narrowkv reads no pages of {unread[0]} bytes a token: SGLang's kernel runs", stacklevel=2
        )
        return theirs(backend=backend, **kwargs)

    place.flash_mla_with_kvcache_entrypoint = call

    def undo() -> None:
        place.flash_mla_with_kvcache_entrypoint = theirs

    return undo

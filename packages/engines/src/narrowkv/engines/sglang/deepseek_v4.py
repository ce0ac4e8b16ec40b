"""DeepSeek-V4's sparse attention over SGLang's pages, by narrowkv's kernels.

SGLang's backend "dsv4" selects the rows of each token; on ROCm it then calls one function for attention.
`patch` puts `flash_mla_with_kvcache` into its place.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from narrowkv.quant.formats import get_format
from narrowkv.sparse_fp8 import DSV4Rows, KVSource, sparse_decode, sparse_prefill_fp8

__all__ = [
    "flash_mla_with_kvcache",
    "patch",
]

_PAGE_BYTES_A_TOKEN = 584
_HEAD_DIM = 512
# Query tokens from which a call fills the device without sharing a token's rows out.
_PREFILL_TOKENS = 256


@functools.lru_cache(maxsize=64)
def _starts(tokens: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (tokens + 1) * width, width, dtype=torch.int32, device=device)


def _source(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None) -> KVSource:
    from sglang.srt.layers.attention.hip_flash_mla import FP8_DTYPE

    pages, page_size = cache.shape[:2]
    buffer = cache.view(torch.uint8).view(pages, page_size, _PAGE_BYTES_A_TOKEN)
    rows = DSV4Rows.packed584(buffer, page_size=page_size, format=get_format(FP8_DTYPE).name)
    width = indices.shape[-1]
    named = indices.reshape(-1, width)
    if lengths is not None:
        place = torch.arange(width, device=named.device)
        named = named.masked_fill(place >= lengths.reshape(-1, 1), -1)
    return KVSource(rows, _starts(named.shape[0], width, named.device), named.reshape(-1))


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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of tokens to rows of one or two paged caches, by SGLang's names of arguments.

    Args:
        q: `[batch, tokens, num_qo_heads, 512]`, bf16; 8, 16, 32, 64 or 128 heads.
        k_cache: `[pages, page_size, 1, 584]`, FP8 or bytes, pages padded or not.
        indices: `[batch, tokens, width]` int32 rows of `k_cache`; -1 is skipped.
        attn_sink: `[num_qo_heads]` fp32, a logit whose value is 0.
        topk_length: `[batch]` or `[batch, tokens]`: only so many of a token's indices count.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: the same of a second cache.
        softmax_scale: of the logits; default `512 ** -0.5`.
        inv_rope: SGLang's frequencies and positions: the output is rotated back by its own function.

    Returns:
        `[batch, tokens, num_qo_heads, 512]`, and None for the log-sum-exp.

    Raises:
        TypeError, ValueError: for shapes and formats that narrowkv does not read.
    """
    if k_cache.shape[-1] != _PAGE_BYTES_A_TOKEN or q.shape[-1] != _HEAD_DIM:
        raise ValueError(
            f"k_cache must have {_PAGE_BYTES_A_TOKEN} bytes a token and q {_HEAD_DIM} channels, got "
            f"{k_cache.shape[-1]} and {q.shape[-1]}: use SGLang's own kernel for other layouts"
        )
    batch, tokens, heads, width = q.shape
    source = _source(k_cache, indices, topk_length)
    extra = None
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None
        extra = _source(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    rows = q.reshape(batch * tokens, heads, width)
    options: dict[str, Any] = {"attn_sink": attn_sink, "sm_scale": softmax_scale}
    if rows.shape[0] < _PREFILL_TOKENS:
        o: Any = sparse_decode(rows, source, extra, **options)
    else:
        o = sparse_prefill_fp8(rows, source, extra, mode="fused", **options)
    if inv_rope is not None:
        from sglang.srt.layers.attention.hip_flash_mla import _apply_inverse_rope

        _apply_inverse_rope(o, inv_rope)
    return o.view(batch, tokens, heads, width), None


def patch() -> Callable[[], None]:
    """Lets narrowkv's kernel stand in for those of SGLang's backend "dsv4" on ROCm.

    Caches in other layouts than DeepSeek-V4's (584 bytes a token) stay with SGLang's kernels, and a warning
    says so once. Set SGLANG_HACK_FLASHMLA_BACKEND=triton, so that heads are not padded to 64 and no call
    takes another way.

    Returns:
        A function that puts SGLang's back.

    Raises:
        ImportError: SGLang is not installed.
    """
    from sglang.srt.layers.attention import deepseek_v4_backend_hip_radix as place

    theirs = place.flash_mla_with_kvcache_entrypoint

    @functools.wraps(theirs)
    def call(backend: str, **kwargs: Any) -> Any:
        found = kwargs["k_cache"].shape[-1]
        if found == _PAGE_BYTES_A_TOKEN:
            return flash_mla_with_kvcache(**kwargs)
        warnings.warn(f"narrowkv reads no pages of {found} bytes a token: SGLang's kernel runs", stacklevel=2)
        return theirs(backend=backend, **kwargs)

    place.flash_mla_with_kvcache_entrypoint = call

    def undo() -> None:
        place.flash_mla_with_kvcache_entrypoint = theirs

    return undo

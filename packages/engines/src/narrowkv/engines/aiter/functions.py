"""The functions: AITER's names, parameters and results."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_prefill import batch_prefill
from narrowkv.engines.aiter.signatures import as_aiter
from narrowkv.engines.aiter.tensors import (
    cache_of,
    decode_tokens,
    paged_attention_cache,
    per_tensor_or_sequence,
    prefill_plan,
    ragged_table,
    refuse,
)
from narrowkv.paged_cache import PageTable
from narrowkv.runtime.errors import UnsupportedError

__all__ = [
    "mha_batch_prefill_func",
    "paged_attention_ragged",
    "paged_attention_v1",
    "unified_attention",
]


@as_aiter(
    "q k v cu_seqlens_q kv_indptr kv_page_indices max_seqlen_q max_seqlen_k",
    dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False, out=None,
    kv_last_page_lens=None, block_table=None, seqlen_k=None, q_descale=None, k_descale=None, v_descale=None,
    kv_block_descale=None, sink_ptr=None, sink_size=0,
)  # fmt: skip
def mha_batch_prefill_func(call: Any) -> Any:
    """Attention of ragged queries over a paged cache.

    Args:
        call: AITER's arguments. `k` and `v` have five dimensions (vectorised), four (`[pages, page_size,
            num_kv_heads, head_dim]`) or three (a token a page); q is 16-bit over a cache of any dtype, or FP8
            over a cache of its own dtype. `kv_block_descale` is `[pages, num_kv_heads, 2]` fp32.

    Returns:
        `[tokens, num_qo_heads, head_dim]`; with `return_lse` also the log-sum-exp `[num_qo_heads, tokens]`
        fp32, a transposed view.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for ALiBi, dropout, attention weights and sink tokens.
    """
    refuse("mha_batch_prefill_func", call, "alibi_slopes", "return_attn_probs", "sink_size", "dropout_p")
    layout = {5: "vectorised", 4: "NHD", 3: "tokens"}.get(call.k.dim())
    if layout is None:
        raise ValueError(f"k must have 3, 4 or 5 dimensions, got shape {tuple(call.k.shape)}")
    if call.kv_block_descale is None:
        descales, kind = (call.k_descale, call.v_descale), None
    else:
        descales, kind = call.kv_block_descale.unbind(-1), "page_head"
    cache = cache_of(call.k, call.v, layout, descales, kind)
    if call.block_table is not None:
        table = PageTable.from_block_table(call.block_table, call.seqlen_k, page_size=cache.page_size)
    else:
        table = ragged_table(call.kv_indptr, call.kv_page_indices, call.kv_last_page_lens, cache)
    left, right = call.window_size[:2]
    result: Any = batch_prefill(
        call.q, cache, table, call.cu_seqlens_q, causal=call.causal, sm_scale=call.softmax_scale,
        q_descale=1.0 if call.q_descale is None else call.q_descale.view(-1)[:1],
        logits_soft_cap=call.logits_soft_cap, window_left=left, window_right=-1 if call.causal else right,
        sinks=call.sink_ptr, out=call.out, return_lse=call.return_lse,
        plan=prefill_plan(call.q, cache, table, call.cu_seqlens_q, call.max_seqlen_q, call.max_seqlen_k),
    )  # fmt: skip
    return (result[0], result[1].t()) if call.return_lse else result


@as_aiter(
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table "
    "softcap q_descale k_descale v_descale",
    q_scales=None, alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None, shuffled_kv_cache=False,
    skip_reduce=False, backend=None,
)  # fmt: skip
def unified_attention(call: Any) -> torch.Tensor:
    """Causal attention of ragged queries over a cache with a block table, as vLLM calls it.

    Args:
        call: AITER's arguments. `k` and `v` are `[pages, page_size, num_kv_heads, head_dim]`, or vectorised
            with `shuffled_kv_cache`. Descales are per tensor or `[batch, num_kv_heads]`, expanded or not.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for ALiBi, biases, FP4 queries, a quantised output and unmerged splits.
    """
    refuse("unified_attention", call, "q_scales", "alibi_slopes", "output_scale", "qq_bias", "skip_reduce")
    if not call.causal:
        raise ValueError("unified_attention must be causal, got causal=False: call mha_batch_prefill_func")
    descales = tuple(map(per_tensor_or_sequence, (call.k_descale, call.v_descale)))
    kinds = {d.dim() for d in descales if isinstance(d, torch.Tensor) and d.dtype == torch.float32}
    kind = "sequence_head" if kinds == {2} else None
    if call.shuffled_kv_cache and call.k.dim() != 5:
        raise UnsupportedError(
            "unified_attention takes shuffled caches of 5 dimensions: AITER's shuffled NVFP4 pages have "
            f"codes and scales in the order of gfx1250's matrix instructions; got {tuple(call.k.shape)}"
        )
    cache = cache_of(call.k, call.v, "vectorised" if call.shuffled_kv_cache else "NHD", descales, kind)
    table = PageTable.from_block_table(call.block_table, call.seqused_k, page_size=cache.page_size)
    batch_prefill(
        call.q, cache, table, call.cu_seqlens_q, sm_scale=call.softmax_scale,
        q_descale=1.0 if call.q_descale is None else call.q_descale.view(-1)[:1],
        logits_soft_cap=call.softcap or 0.0, window_left=call.window_size[0], sinks=call.sinks, out=call.out,
        plan=prefill_plan(call.q, cache, table, call.cu_seqlens_q, call.max_seqlen_q, call.max_seqlen_k),
    )  # fmt: skip
    return call.out  # type: ignore[no-any-return]


@as_aiter(
    "out workspace_buffer query key_cache value_cache scale kv_indptr kv_page_indices kv_last_page_lens "
    "block_size max_num_partitions alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale "
    "v_scale",
    fp8_out_scale=None, partition_size=256, mtp=1, q_scale=None,
)  # fmt: skip
def paged_attention_ragged(call: Any) -> torch.Tensor:
    """Decode over a cache with a ragged page table.

    Args:
        call: AITER's arguments. `key_cache` and `value_cache` are in `kv_cache_layout` "HND" or "NHD", in the
            query's dtype or FP8; a uint8 cache holds the FP8 E4M3 format of the device. `workspace_buffer`
            and the partition sizes are not used.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for ALiBi, an FP8 output, FP8 queries, and more than one query token (`mtp`).
    """
    refuse("paged_attention_ragged", call, "alibi_slopes", "fp8_out_scale", "q_scale")
    cache = paged_attention_cache(call)
    table = ragged_table(call.kv_indptr, call.kv_page_indices, call.kv_last_page_lens, cache)
    return decode_tokens(call, cache, table)


@as_aiter(
    "out workspace_buffer query key_cache value_cache scale block_tables cu_query_lens context_lens "
    "max_context_len alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale v_scale",
    fp8_out_scale=None, partition_size=256, mtp=1, q_scale=None, sliding_window=0,
)  # fmt: skip
def paged_attention_v1(call: Any) -> torch.Tensor:
    """Decode over a cache with a block table.

    Args:
        call: AITER's arguments, as for `paged_attention_ragged`. With `cu_query_lens` every query row is
            attended, where AITER leaves out sequences with more than one. A `sliding_window` above 0 is the
            number of keys that are seen, the newest included.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, UnsupportedError: as for `paged_attention_ragged`.
    """
    refuse("paged_attention_v1", call, "alibi_slopes", "fp8_out_scale", "q_scale")
    cache = paged_attention_cache(call)
    table = PageTable.from_block_table(call.block_tables, call.context_lens, page_size=cache.page_size)
    window = call.sliding_window - 1 if call.sliding_window > 0 else -1
    if call.cu_query_lens is None:
        return decode_tokens(call, cache, table, window_left=window)
    batch_prefill(
        call.query, cache, table, call.cu_query_lens, sm_scale=call.scale, out=call.out, window_left=window,
        logits_soft_cap=call.logits_soft_cap,
    )  # fmt: skip
    return call.out  # type: ignore[no-any-return]

"""A chunk of a prompt whose query heads are sharded and whose older tokens are spread over the same ranks."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_decode import merge_states
from narrowkv.attn_prefill import batch_prefill
from narrowkv.context_parallel.exchange import merge_over_ranks
from narrowkv.context_parallel.groups import Group, all_gather, check_layout, group_of
from narrowkv.context_parallel.layout import ShardLayout
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.checks import check_one_width, tensors_of
from narrowkv.runtime.errors import check_dtype, check_results, check_shape
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.scales import check_scales


def cp_chunk_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    layout: ShardLayout,
    group: Group = None,
    comm: str = "a2a",
    partial_dtype: torch.dtype = torch.float32,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens, which every rank has for its heads, over themselves and older tokens.

    Engines with tensor parallelism and decode context parallelism need this call: the ranks of the group
    share KV heads, and each has all new tokens of its query heads. Each rank reads the new keys from its
    arguments and the older keys that it owns. Every rank of the group must make the call; nothing is stored.

    Args:
        q: `[tokens, own heads, head_dim]`, bf16 or fp16, all sequences' new tokens one after the other.
        k_new, v_new: `[tokens, num_kv_heads, head_dim]` in q's dtype, equal on all ranks of the group.
        cache: this rank's tokens; new ones may be stored already.
        page_table: a block table of the whole sequences; lengths include the new tokens.
        cu_seqlens_q: `[batch + 1]` int32 or int64, any stride, where each sequence's new tokens begin.
        layout: which rank holds which token.
        group, comm, partial_dtype: as for `plan_cp_decode`, but "symm_mem", which needs a plan.
        sm_scale, logits_soft_cap: as for `narrowkv.attn_prefill.batch_prefill`.
        sinks: `[own heads]`.
        out: where to write, like q.

    Returns:
        `o` like q.

    Raises:
        TypeError, ValueError: for wrong shapes or dtypes, or a layout that is not this group's.

    Example:
        >>> o = cp_chunk_attention(q, k, v, cache, table, cu_seqlens_q, layout=layout)   # doctest: +SKIP
    """
    ranks = group_of(group)
    check_layout(layout.world, layout.rank, ranks)
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    check_shape("q", q, ("tokens", "own heads", cache.head_dim))
    check_one_width(cache, "cp_chunk_attention")
    # Before any rank waits for another:
    check_scales(cache.static_scales())
    read = {"q": q, "k_new": k_new, "v_new": v_new, "cu_seqlens_q": cu_seqlens_q, "sinks": sinks}
    out_dtype = check_results(
        q, out, None, sinks, None, None, {**read, **tensors_of(cache, page_table)}, head_dim=cache.head_dim,
        vendor=active_target(q.device).vendor,
    )  # fmt: skip
    options: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
    tokens, heads, head_dim = q.shape
    states = torch.zeros(2, tokens, heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.full((2, tokens, heads), -torch.inf, device=q.device)
    new_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    keys = PagedKVCache.from_tensors(
        k_new, v_new, format="bf16" if q.dtype == torch.bfloat16 else "fp16", layout="tokens"
    )
    every_token = torch.arange(tokens, dtype=cu_seqlens_q.dtype, device=q.device)
    new = PageTable.from_ragged(cu_seqlens_q, every_token, new_lens.clamp(0, 1), page_size=1)
    batch_prefill(q, keys, new, cu_seqlens_q, out=states[0], lse=lse[0], **options)

    everyone = q.new_empty(layout.world, tokens, heads, head_dim)
    all_gather(everyone.flatten(0, 1), q.contiguous(), group=ranks)
    whole = everyone.transpose(0, 1).flatten(1, 2)
    older = PageTable.from_block_table(
        page_table.page_ids, page_table.seq_lens_tensor() - new_lens, page_size=page_table.page_size
    )
    local = layout.shard_table(older, cache.page_size).table
    part = torch.zeros(whole.shape, dtype=torch.float32, device=q.device)
    part_lse = torch.full(whole.shape[:2], -torch.inf, device=q.device)
    batch_prefill(whole, cache, local, cu_seqlens_q, causal=False, out=part, lse=part_lse, **options)
    states[1], lse[1] = merge_over_ranks(part, part_lse, group=ranks, comm=comm, partial_dtype=partial_dtype)
    o, _ = merge_states(states, lse, sinks=sinks, out=out, out_dtype=out_dtype)
    return o

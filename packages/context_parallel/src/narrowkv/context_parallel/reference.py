"""The oracle: every rank's shard in one process, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from narrowkv.attn_decode import merge_states_reference, paged_decode_reference
from narrowkv.context_parallel.layout import ShardedTable
from narrowkv.paged_cache import PagedKVCache


def cp_paged_decode_reference(
    q: torch.Tensor,
    shards: Sequence[tuple[PagedKVCache, ShardedTable]],
    *,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cp_paged_decode` of all ranks together.

    Args:
        q: `[batch * q_len, num_qo_heads, head_dim]`, all heads.
        shards: each rank's cache and table, in rank order.
        sinks: `[num_qo_heads]`. Further options: `sm_scale` and `logits_soft_cap`.

    Returns:
        `(o, lse)` in fp32, of all heads.
    """
    parts = [
        paged_decode_reference(q, cache, table.table, return_lse=True, **options) for cache, table in shards
    ]
    o, lse = (torch.stack([part[i] for part in parts]) for i in range(2))
    return merge_states_reference(o, lse, sinks=sinks)

"""Decode over a sequence whose cache is spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowkv.context_parallel.layout import ShardedTable
from narrowkv.context_parallel.plan import CPDecodePlan
from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.errors import check_instance

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.attn_decode.options import AttentionOptions


def cp_paged_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    table: ShardedTable,
    *,
    plan: CPDecodePlan,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's newest tokens over a cache of which every rank holds a part.

    Every rank of the plan's group must make the call. Queries are gathered over heads, each rank attends all
    of them to its own tokens without sinks, and partial results go to the ranks that own the heads, where
    they are merged with the sinks. Nothing is allocated but outputs that were not given, once a batch of this
    size has been seen, and the host does not wait, so a step with NCCL can be captured in a graph.

    Args:
        q: `[batch * q_len, own heads, head_dim]`, bf16 or fp16; all heads where the plan says "replicated".
        cache: this rank's tokens; any layout, page size and format.
        table: this rank's page table, from `ShardLayout.shard_table`, which a window is part of.
        plan: from `plan_cp_decode`.
        **options: `sm_scale`, `out`, `out_dtype`, `logits_soft_cap`, `sinks`, `return_lse`, `lse` and
            `validate`: see `narrowkv.attn_decode.AttentionOptions`, of this rank's heads.

    Returns:
        `o`, or `(o, lse)`, of q's heads over all ranks' tokens: natural logarithms, without the sink.

    Raises:
        TypeError, ValueError: before any communication, for arguments that do not go with the plan.
        RuntimeError: from the backend, within the group's timeout, where a rank is gone.

    Source: Helix Parallelism (Bhatia et al., arXiv 2507.07120); merging after Flash-Decoding (Dao et al.,
        2023).

    Example:
        >>> from narrowkv.context_parallel import ShardLayout, plan_cp_decode
        >>> from narrowkv.paged_cache import PagedKVCache, PageTable
        >>> layout = ShardLayout(world=1, rank=0, interleave=16)    # of dist.get_world_size() and get_rank()
        >>> cache = PagedKVCache.empty(2, 16, 1, 64, format="bf16")
        >>> whole = PageTable.from_block_table(torch.tensor([[1, 0]]), torch.tensor([20]), page_size=16)
        >>> table, q = layout.shard_table(whole, cache.page_size), torch.randn(1, 4, 64).bfloat16()
        >>> cp_paged_decode(q, cache, table, plan=plan_cp_decode(q, cache, table)).shape
        torch.Size([1, 4, 64])
    """
    check_instance("plan", plan, CPDecodePlan)
    return plan.run(q, cache, table, **options)

"""Blocks of keys and values that go round the ranks, and Sage attention over them.

Ring attention after Liu, Zaharia and Abbeel (arXiv 2310.01889): each rank keeps its queries, and while it
attends to one rank's keys, the next rank's are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from narrowkv.attn_decode import merge_states
from narrowkv.context_parallel.groups import Group, agreement, all_gather, group_of
from narrowkv.runtime.errors import check_choice
from narrowkv.sage import sage_attention


def passed_round(own: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's block, this rank's first, then that of the rank before it, and so on.

    Yields:
        `(rank of the group, block)`. The next block is received while the caller uses this one, which is
        valid until the next is asked for.
    """
    world, rank = group.size(), group.rank()
    to, source = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    block = own.contiguous()
    for step in range(world):
        last = step == world - 1
        if not last:
            arriving = torch.empty_like(block)
            pending = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, block, to, group), dist.P2POp(dist.irecv, arriving, source, group)]
            )
        yield (rank - step) % world, block
        if not last:
            for work in pending:
                work.wait()
            block = arriving


def gathered(own: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's block in rank order, by one all-gather."""
    everyone = own.new_empty(group.size(), *own.shape)
    all_gather(everyone.view(-1, *own.shape[1:]), own.contiguous(), group=group)
    yield from enumerate(everyone)


def ring_sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sage attention of a sequence of which each rank has a block, one after the other in rank order.

    Args:
        q: `[batch, seq / ranks, num_qo_heads, head_dim]`, this rank's block; see
            `narrowkv.sage.sage_attention`.
        k, v: `[batch, seq / ranks, num_kv_heads, head_dim]`. Blocks of all ranks have equal shapes.
        group: the ranks; every one must make the call.
        causal: tokens attend to those up to themselves. Later ranks then have more to do; `cp_prefill`
            balances that, for attention that is not quantised.
        **options: `qk_dtype`, granularities, smoothing and `sm_scale` of `sage_attention`. K is smoothed
            within each block.

    Returns:
        `(o, lse)`, like q, and fp32 without head_dim: over the whole sequence. Merged in rank order, so that
        the bits are the same every time.

    Raises:
        TypeError, ValueError: as `sage_attention`; or ranks have different shapes, on every rank.

    Example:
        >>> o, lse = ring_sage_attention(q, k, v, qk_dtype="int8")                        # doctest: +SKIP
    """
    ranks = group_of(group)
    with agreement(ranks) as equal:
        check_choice("layout", options.get("layout", "BSHD"), ("BSHD",))
        equal |= {"shape of k": tuple(k.shape), "dtype of k": k.dtype, "causal": causal}
        if k.shape != v.shape:
            raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    tokens = q.shape[0] * q.shape[1]
    states = q.new_empty(ranks.size(), *q.shape)
    lse = torch.full((ranks.size(), *q.shape[:3]), -torch.inf, device=q.device)
    for source, block in passed_round(torch.stack((k, v)), ranks):
        if causal and source > ranks.rank():
            continue
        mask = "top_left" if causal and source == ranks.rank() else None
        sage_attention(q, block[0], block[1], causal=mask, out=states[source], lse=lse[source], **options)
    merged, total = merge_states(
        states.view(-1, tokens, *q.shape[2:]), lse.view(-1, tokens, q.shape[2]), out_dtype=q.dtype
    )
    return merged.view(q.shape), total.view(q.shape[:3])

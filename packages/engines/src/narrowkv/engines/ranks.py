"""A step of a paged engine whose sequences are spread over ranks: decode context parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from narrowkv.attn_decode import DecodeShape
from narrowkv.context_parallel import (
    CPDecodePlan,
    ShardedTable,
    ShardLayout,
    cp_chunk_attention,
    cp_paged_decode,
    plan_cp_decode,
)
from narrowkv.context_parallel.buffers import Moves, exchange_bytes
from narrowkv.engines.steps import Step, reserve
from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import Workspace

# Queries and partial results on their way between ranks.
_exchanges: dict[torch.device, Workspace] = {}


@dataclass
class Ranks:
    """The ranks that share an engine's sequences.

    Attributes:
        layout: which rank holds which token.
        group: the process group, in the order of the layout.
        comm: "a2a" or "ag_rs".
        plans: of decode steps, by shape; every rank makes the same ones at the same time.
    """

    layout: ShardLayout
    group: Any
    comm: str = "ag_rs"
    plans: dict[Any, CPDecodePlan] = field(default_factory=dict)

    def reserve(self, shape: DecodeShape, device: torch.device) -> None:
        """Allocates what ranks exchange in decode steps, while an engine is being set up.

        Args:
            shape: of a rank's attention over all ranks' heads, for the largest batch and number of tokens.
            device: where the tensors will be.
        """
        moves = Moves(self.layout, self.comm, torch.float32, "sharded", 1, shape, device)
        reserve(exchange_bytes(moves), device, _exchanges)


@dataclass
class RanksStep(Step):
    """A step whose `table` has pages that all ranks share.

    Attributes:
        tables: this rank's tables of the step, by window.
    """

    tables: dict[int, ShardedTable] = field(default_factory=dict)


def attend_over_ranks(
    step: RanksStep, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, cache: PagedKVCache,
    out: torch.Tensor, *, ranks: Ranks, max_batch: int, window_left: int = -1,
    sinks: torch.Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    """Attention of a step's tokens to pages of all ranks, into `out`; every rank must call it.

    Args:
        step: the step; its tokens are stored already, each by its owner.
        q: `[num_tokens, own heads, head_dim]`, of this rank's heads.
        k_new, v_new: `[num_tokens, num_kv_heads, head_dim]`, the step's own keys and values.
        cache: this rank's pages.
        out: like q.
        ranks: who shares the sequences.
        max_batch: requests of a decode step, at most.
        window_left: keys before itself that a token attends to; -1 for all.
        sinks: `[own heads]`.
        **options: sm_scale and logits_soft_cap.

    Raises:
        UnsupportedError: a prompt in a layer with a window.
    """
    if not step.decodes:
        if window_left >= 0:
            raise UnsupportedError(
                "a prompt's sliding window is not served with decode context parallelism: run this model "
                "with decode_context_parallel_size=1"
            )
        assert step.query_start_loc is not None
        cp_chunk_attention(
            q, k_new, v_new, cache, step.table, step.query_start_loc, layout=ranks.layout, group=ranks.group,
            comm=ranks.comm, sinks=sinks, out=out, **options,
        )  # fmt: skip
        return
    if window_left not in step.tables:
        step.tables[window_left] = ranks.layout.shard_table(
            step.table, cache.page_size, q_len=step.max_query_len, window_left=window_left
        )
    table = step.tables[window_left]
    most = max(max_batch, step.table.batch_size)
    key = (
        step.max_query_len, q.shape[1:], q.dtype, cache.num_kv_heads, cache.page_size, cache.format,
        cache.k_granularity, step.table.page_ids.shape[1], window_left, most,
    )  # fmt: skip
    if key not in ranks.plans:
        plan = plan_cp_decode(q, cache, table, group=ranks.group, comm=ranks.comm, max_batch=most)
        ranks.plans[key] = plan.with_workspaces(
            reserve(plan.workspace_bytes(), q.device), reserve(plan.exchange_bytes(), q.device, _exchanges)
        )
    cp_paged_decode(q, cache, table, plan=ranks.plans[key], sinks=sinks, out=out, **options)

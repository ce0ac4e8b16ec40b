"""Steps of a paged engine over latent rows (MLA): plans of decodes, pieces of prompts, expanded prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.engines.steps import Step, attend, reserve
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.formats import get_format
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.operation import Bounded
from narrowkv.sparse_fp8 import DSV4Rows, SparsePlan, plan_latent
from narrowkv.sparse_fp8.binding import QUERY_FORMATS
from narrowkv.sparse_fp8.latent import MOST_QUERIES

__all__ = ["MOST_QUERIES", "Pieces", "attend_expanded", "fp8_rows", "latent_plan"]

_plans: Bounded[SparsePlan] = Bounded(256)


def fp8_rows(pages: torch.Tensor, format: str, scale: torch.Tensor | None = None) -> DSV4Rows:
    """An engine's pages of FP8 rows with one scale, where they are.

    Args:
        pages: `[pages, page_size, columns]` of one byte each; 576 or 512 columns.
        format: "fp8_e4m3fn" or "fp8_e4m3fnuz".
        scale: fp32 `[1]`; None for 1.
    """
    layout, data = f"tensor{pages.shape[-1]}", pages.view(torch.uint8)
    return DSV4Rows.paged(data, layout, page_size=pages.shape[1], format=format, scale=scale)


def latent_plan(
    rows: DSV4Rows | torch.Tensor,
    *,
    num_qo_heads: int,
    page_size: int,
    q_len: int,
    dtype: torch.dtype,
    device: torch.device,
    sm_scale: float,
    max_batch: int,
    max_seq_len: int,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> SparsePlan:
    """The plan of decode steps over such rows, in the workspace of the device's attention.

    Args:
        rows: the rows in pages, quantised or in the dtype of queries.
        num_qo_heads, page_size, q_len, device, sm_scale, return_lse, batch_invariant, max_seq_len: as for
            `plan_latent`.
        dtype: of queries, bf16 or fp16.
        max_batch: requests of a step, at most.

    Example:
        >>> plan = latent_plan(
        ...     torch.zeros(3, 16, 576, dtype=torch.bfloat16), num_qo_heads=12, page_size=16, q_len=1,
        ...     dtype=torch.bfloat16, device=torch.device("cpu"), sm_scale=0.07, max_batch=4,
        ...     max_seq_len=1024,
        ... )
        >>> plan.pages.HEADS
        12
    """
    if isinstance(rows, DSV4Rows):
        stored = rows.bound.format
    else:
        stored = QUERY_FORMATS[get_format(rows.dtype).name, rows.shape[-1]]
    key = (
        stored, num_qo_heads, page_size, q_len, dtype, device, active_target(device).name, sm_scale,
        max_batch, max_seq_len, return_lse, batch_invariant,
    )  # fmt: skip
    plan = _plans.find(key)
    if plan is None:
        made = plan_latent(
            num_qo_heads=num_qo_heads, rows=stored, page_size=page_size, q_len=q_len, device=device,
            query=get_format(dtype).name, sm_scale=sm_scale, return_lse=return_lse,
            batch_invariant=batch_invariant, max_batch=max_batch, max_seq_len=max_seq_len,
        )  # fmt: skip
        plan = made.with_workspace(reserve(made.workspace_bytes(), made.device))
        _plans.keep(key, plan)
    return plan


def attend_expanded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_starts: torch.Tensor, k_starts: torch.Tensor,
    max_q_len: int, max_seq_len: int, *, causal: bool, sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of the tokens of prompts to keys and values that were expanded from latent rows.

    Args:
        q: `[tokens, num_heads, channels]`, bf16 or fp16.
        k, v: `[keys, num_heads, channels]`; values may have fewer channels.
        q_starts, k_starts: `[requests + 1]`, where each request's queries and keys begin.
        max_q_len, max_seq_len: of a request, on the host.
        causal: whether a token sees no later key; the last of both belong together.
        sm_scale: of the logits.

    Returns:
        `[tokens, num_heads, value's channels]`, and the natural log-sum-exp `[tokens, num_heads]` fp32.
    """
    format = "fp16" if k.dtype == torch.float16 else "bf16"
    cache = PagedKVCache.from_tensors(k.contiguous(), v.contiguous(), format=format, layout="tokens")
    starts = k_starts.to(torch.int32)
    ids = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
    filled = (starts[1:] > starts[:-1]).to(torch.int32)
    table = PageTable.from_ragged(starts, ids, filled, page_size=1)
    step = Step(q.shape[0], max_q_len, max_seq_len, q_starts.to(torch.int32), table, max_kv_tokens=k.shape[0])
    step.decodes = False
    o, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)
    attend(step, q, cache, o, max_batch=1, sm_scale=sm_scale, causal=causal, lse=lse)
    return o, lse


@dataclass(frozen=True)
class Pieces:
    """Prompts cut into pieces of `MOST_QUERIES` tokens, which `latent_decode` takes as requests of their own.

    The last piece of a request has its padding in front.

    Attributes:
        rows: `[pieces * MOST_QUERIES]` int64, the token of each query; `num_tokens` for padding.
        table: pages and lengths of the pieces.
        num_tokens: of all requests.
    """

    rows: torch.Tensor
    table: PageTable
    num_tokens: int

    @classmethod
    def cut(cls, table: PageTable, q_lens: torch.Tensor, host_q_lens: list[int]) -> Pieces:
        """The pieces of a step; nothing is read from the device.

        Args:
            table: a block table of the requests, whose lengths include the step's tokens.
            q_lens: `[requests]`, query tokens of each.
            host_q_lens: the same on the host.

        Example:
            >>> table = PageTable.from_block_table(
            ...     torch.zeros(2, 4, dtype=torch.int32), torch.tensor([30, 9]), page_size=16
            ... )
            >>> pieces = Pieces.cut(table, torch.tensor([9, 2]), [9, 2])
            >>> pieces.table.seq_lens.tolist()
            [29, 30, 9]
            >>> pieces.rows.view(3, -1)[1:].tolist()
            [[11, 11, 11, 11, 11, 11, 11, 8], [11, 11, 11, 11, 11, 11, 9, 10]]
        """
        assert table.seq_lens is not None
        device, size, count = q_lens.device, MOST_QUERIES, sum(-(-n // MOST_QUERIES) for n in host_q_lens)
        q_lens = q_lens.long()
        counts = (q_lens + size - 1) // size
        request = torch.arange(len(host_q_lens), device=device).repeat_interleave(counts, output_size=count)
        first = (torch.arange(count, device=device) - (counts.cumsum(0) - counts)[request]) * size
        tokens = (q_lens[request] - first).clamp(max=size)
        place = torch.arange(size, device=device) - (size - tokens)[:, None]
        rows = ((q_lens.cumsum(0) - q_lens)[request] + first)[:, None] + place
        num_tokens = sum(host_q_lens)
        lens = table.seq_lens[request] - q_lens[request] + first + tokens
        return cls(
            rows.masked_fill(place < 0, num_tokens).flatten(),
            PageTable.from_block_table(
                table.page_ids[request], lens.to(torch.int32), page_size=table.page_size
            ),
            num_tokens,
        )

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        """Queries `[num_tokens, ...]` as those of the pieces; padding repeats the last one."""
        return q[self.rows.clamp(max=self.num_tokens - 1)]

    def scatter(self, o: torch.Tensor) -> torch.Tensor:
        """Outputs of the pieces as those of the tokens, `[num_tokens, ...]`."""
        out = o.new_empty(self.num_tokens + 1, *o.shape[1:])
        return out.index_copy_(0, self.rows, o)[: self.num_tokens]

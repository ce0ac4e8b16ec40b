"""Steps of a paged engine over latent rows (MLA): one plan and one workspace for all layers of a shape."""

from __future__ import annotations

import torch

from narrowkv.engines.steps import reserve
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.operation import Bounded
from narrowkv.sparse_fp8 import RowsFormat, SparsePlan, plan_latent
from narrowkv.sparse_fp8.latent import MOST_QUERIES

__all__ = ["MOST_QUERIES", "latent_plan"]

_plans: Bounded[SparsePlan] = Bounded(256)


def latent_plan(
    rows: RowsFormat,
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
        rows: how the rows are stored.
        num_qo_heads, page_size, q_len, device, sm_scale, return_lse, batch_invariant, max_seq_len: as for
            `plan_latent`.
        dtype: of queries, bf16 or fp16.
        max_batch: requests of a step, at most.

    Example:
        >>> rows = RowsFormat("bf16", columns=576)
        >>> plan = latent_plan(
        ...     rows, num_qo_heads=12, page_size=16, q_len=1, dtype=torch.bfloat16,
        ...     device=torch.device("cpu"), sm_scale=0.07, max_batch=4, max_seq_len=1024,
        ... )
        >>> plan.pages.HEADS
        12
    """
    key = (
        rows, num_qo_heads, page_size, q_len, dtype, device, active_target(device).name, sm_scale, max_batch,
        max_seq_len, return_lse, batch_invariant,
    )  # fmt: skip
    plan = _plans.find(key)
    if plan is None:
        made = plan_latent(
            num_qo_heads=num_qo_heads, rows=rows, page_size=page_size, q_len=q_len, device=device,
            query="fp16" if dtype == torch.float16 else "bf16", sm_scale=sm_scale, return_lse=return_lse,
            batch_invariant=batch_invariant, max_batch=max_batch, max_seq_len=max_seq_len,
        )  # fmt: skip
        plan = made.with_workspace(reserve(made.workspace_bytes(), made.device))
        _plans.keep(key, plan)
    return plan

"""A step of a paged engine: what its layers share, and the call that attends to the engine's pages.

The adapters of vLLM and SGLang bring their batch and their cache into this form.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowkv.attn_decode import DecodePlan, DecodeShape, paged_decode, plan_decode
from narrowkv.attn_prefill import PrefillPlan, batch_prefill, plan_prefill
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.kinds import CACHE_KINDS, kind_of_cache
from narrowkv.runtime.launch import Workspace, active_target

__all__ = [
    "MAX_DECODE_TOKENS",
    "SCRATCH_BYTES",
    "Step",
    "attend",
    "attend_batch_invariant",
    "reserve",
    "reserve_decode",
]

# Query tokens of a sequence up to which a batch of equal ones is a decode step (speculative tokens).
MAX_DECODE_TOKENS = 16
# Scratch of widened keys that a prefill may take.
SCRATCH_BYTES = 512 * 2**20

_workspaces: dict[torch.device, Workspace] = {}
_decode_plans: dict[Any, DecodePlan] = {}


@dataclass
class Step:
    """What a step's layers share.

    Attributes:
        num_tokens: query tokens without padding.
        max_query_len, max_seq_len: bounds, on the host.
        query_start_loc: `[requests + 1]` int32; may be None if every request has `max_query_len` tokens.
        table: pages and lengths of the requests, by reference.
        ragged: whether requests may have other numbers of tokens than `num_tokens` and `max_query_len` say,
            which then only `query_start_loc` knows.
        prefill_plans: plans of this step, by shape.
    """

    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor | None
    table: PageTable
    ragged: bool = False
    prefill_plans: dict[Any, PrefillPlan] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        """Whether all requests have the same few tokens: if the longest has as many as the average has."""
        few = self.max_query_len <= MAX_DECODE_TOKENS or self.table.tree_mask is not None
        return not self.ragged and few and self.num_tokens == self.table.batch_size * self.max_query_len


def reserve(
    num_bytes: int, device: torch.device, held: dict[torch.device, Workspace] | None = None
) -> Workspace:
    """The one workspace of a device, at least this large: layers run one after the other.

    Args:
        num_bytes: of a call.
        device: where its tensors are.
        held: workspaces by device; those of attention if None.
    """
    held = _workspaces if held is None else held
    found = held.get(device)
    if found is None or found.num_bytes < num_bytes:
        found = held[device] = Workspace(num_bytes, device)
    return found


def reserve_decode(
    shape: DecodeShape, format: str | CacheFormat, device: torch.device, *, scale_group: int | None = None,
    scale_format: str | None = None, batch_invariant: bool = False,
) -> None:  # fmt: skip
    """Allocates the workspace of decode steps while an engine is being set up.

    Args:
        shape: the largest batch, context and number of query tokens of a request; steps of fewer, which may
            need more memory, are served, too.
        format: of the cache.
        device: where the tensors will be.
        scale_group, scale_format: of FP4, as for `plan_decode`.
        batch_invariant: whether the steps are those of `attend_batch_invariant`.
    """
    target = active_target(device).name
    counts = {*range(1, min(shape.q_len, MAX_DECODE_TOKENS) + 1), shape.q_len}
    most = max(
        _decode_bytes(
            replace(shape, q_len=tokens), format, device, scale_group, scale_format, target, batch_invariant
        )
        for tokens in counts
    )
    reserve(most, device)


@functools.lru_cache(maxsize=256)
def _decode_bytes(
    shape: DecodeShape, format: str | CacheFormat, device: torch.device, scale_group: int | None,
    scale_format: str | None, target: str, batch_invariant: bool,
) -> int:  # fmt: skip
    """The workspace of steps of a shape; layers of one shape ask for the same."""
    plan = plan_decode(
        shape, format, device=device, scale_group=scale_group, scale_format=scale_format,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return plan.workspace_bytes()


def attend(
    step: Step, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor, *, max_batch: int,
    batch_invariant: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Attention of a step's tokens to the pages of its requests, into `out`.

    Args:
        step: the step.
        q: `[num_tokens, num_qo_heads, head_dim]`.
        cache: the layer's pages.
        out: like q.
        max_batch: requests of a decode step, at most.
        batch_invariant: give a token the same bits whatever else is in its step. Decodes then go the way of
            prefills, with which they share steps.
        **options: of `paged_decode` and `batch_prefill`: sm_scale, logits_soft_cap, window_left, sinks.
    """
    if step.decodes and not batch_invariant:
        plan = _decode_plan(q, cache, step, max_batch)
        paged_decode(q, cache, step.table, out=out, plan=plan, **options)
        return
    assert step.query_start_loc is not None
    prefill = _prefill_plan(q, cache, step, batch_invariant)
    batch_prefill(q, cache, step.table, step.query_start_loc, out=out, plan=prefill, **options)


def attend_batch_invariant(
    step: Step, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor, *, max_batch: int, **options: Any
) -> None:
    """As `attend`, with the same bits for a token whatever other requests its step has.

    For engines whose steps have decodes or prefills, never both: decodes, the steps without
    `query_start_loc`, keep the decode kernel, whose bits are not those of a prefill.
    """
    if step.query_start_loc is None:
        plan = _decode_plan(q, cache, step, max_batch, batch_invariant=True)
        paged_decode(q, cache, step.table, out=out, plan=plan, **options)
        return
    attend(step, q, cache, out, max_batch=max_batch, batch_invariant=True, **options)


def _kind(cache: PagedKVCache) -> int:
    """What a plan depends on of a cache, as one number; found again without a look at the cache."""
    kind = CACHE_KINDS.get(id(cache))
    return kind_of_cache(cache) if kind is None else kind


def _decode_plan(
    q: torch.Tensor, cache: PagedKVCache, step: Step, max_batch: int, *, batch_invariant: bool = False
) -> DecodePlan:
    """The plan of decode steps with this many query tokens, made once for all layers of a shape."""
    most = max(max_batch, step.table.batch_size)
    key = (
        _kind(cache), q.shape[1:], q.dtype, step.max_query_len, step.table.page_ids.shape[1], most,
        batch_invariant,
    )  # fmt: skip
    plan = _decode_plans.get(key)
    if plan is None:
        make = functools.partial(
            plan_decode, q, cache, step.table, max_batch=most, batch_invariant=batch_invariant
        )
        plan = _decode_plans[key] = make(workspace=reserve(make().workspace_bytes(), q.device))
    return plan


def _prefill_plan(q: torch.Tensor, cache: PagedKVCache, step: Step, batch_invariant: bool) -> PrefillPlan:
    """The plan of this step, made once for all layers of a shape; its scratch goes with the step."""
    key = (_kind(cache), q.shape, q.dtype)
    if key not in step.prefill_plans:
        assert step.query_start_loc is not None
        step.prefill_plans[key] = plan_prefill(
            q, cache, step.table, step.query_start_loc, max_q_len=max(step.max_query_len, 1),
            max_seq_len=max(step.max_seq_len, 1), scratch_limit_bytes=SCRATCH_BYTES,
            batch_invariant=batch_invariant,
        )  # fmt: skip
    return step.prefill_plans[key]

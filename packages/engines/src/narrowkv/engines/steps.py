"""A step of a paged engine: what its layers share, and the call that attends to the engine's pages.

The adapters of vLLM and SGLang bring their batch and their cache into this form.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from narrowkv.attn_decode import DecodePlan, DecodeShape, paged_decode, plan_decode
from narrowkv.attn_prefill import PrefillPlan, PrefillShape, batch_prefill
from narrowkv.attn_prefill.planning import plan_without_memory
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.cache import CACHE_KINDS, kind_of_cache
from narrowkv.runtime.launch import Workspace, active_target, executor
from narrowkv.runtime.operation import Bounded

__all__ = [
    "MAX_DECODE_TOKENS",
    "SCRATCH_BYTES",
    "Step",
    "attend",
    "attend_batch_invariant",
    "divide",
    "reserve",
    "reserve_decode",
]

# Query tokens of a sequence up to which a batch of equal ones is a decode step (speculative tokens).
MAX_DECODE_TOKENS = 16
# Scratch of widened keys that a prefill may take.
SCRATCH_BYTES = 512 * 2**20

_workspaces: dict[torch.device, Workspace] = {}
_decode_plans: dict[Any, DecodePlan] = {}
# Scratch of prefills, and the plans that use it.
_scratch: dict[torch.device, Workspace] = {}
_prefill_plans: Bounded[PrefillPlan] = Bounded(1024)
# Plans of prefills in captured graphs, which hold the addresses of their scratch.
_captured: list[PrefillPlan] = []


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
        max_kv_tokens: a bound of all requests' keys together, on the host; 0 if there is none.
        min_query_len: the fewest query tokens of a request, on the host; 0 if it is not known.
        parts: steps of consecutive requests that attention serves one after the other; empty for one call.
    """

    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor | None
    table: PageTable
    ragged: bool = False
    max_kv_tokens: int = 0
    min_query_len: int = 0
    parts: tuple[Step, ...] = ()

    @functools.cached_property
    def decodes(self) -> bool:
        """Whether all requests have the same few tokens: if the longest has as many as the average has."""
        few = self.max_query_len <= MAX_DECODE_TOKENS or self.table.tree_mask is not None
        return not self.ragged and few and self.num_tokens == self.table.batch_size * self.max_query_len

    @functools.cached_property
    def prefill_sizes(self) -> tuple[int, int, int, int, int, int]:
        """Bounds of a plan for steps of about this size: of a `PrefillShape`.

        They are batch, num_tokens, max_q_len, max_seq_len, kv_tokens and min_q_len. What memory goes with is
        rounded up by a quarter at most, the others to powers of two.
        """
        batch, max_q_len = _at_least(self.table.batch_size), _at_least(self.max_query_len)
        num_tokens = min(_at_least(self.num_tokens, 4), batch * max_q_len)
        max_seq_len = max(min(_at_least(self.max_seq_len), self.table.capacity), 1)
        kv_tokens = batch * max_seq_len
        if self.max_kv_tokens:
            kv_tokens = min(kv_tokens, _at_least(self.max_kv_tokens, 4))
        # Classes of few query tokens have at most this many.
        min_q_len = 1 << min(self.min_query_len, 64).bit_length() >> 1
        return batch, num_tokens, max_q_len, max_seq_len, kv_tokens, min_q_len


def divide(
    step: Step, starts: Sequence[int], lens: Sequence[int] | None = None, *, decode_tokens: int = 1
) -> Step:  # fmt: skip
    """The step with decodes and prefills as parts, if it begins with decodes or else ends with them.

    Decodes are then served by `paged_decode`, and only the keys of prefills are widened. Without the division
    keys of all requests count as those of prefills, whose scratch they may not fit.

    Args:
        step: the step; its table is a block table.
        starts: the values of `query_start_loc`.
        lens: keys of each request with those of the step, or bounds of them; None if the host does not know.
        decode_tokens: query tokens up to which a request decodes.
    """
    q_lens = [end - begin for begin, end in pairwise(starts)]
    decodes = [count <= decode_tokens for count in q_lens]
    if all(decodes):  # a graph that is captured of it is replayed with other lengths
        return step
    step = replace(step, max_kv_tokens=0 if lens is None else sum(lens), min_query_len=min(q_lens))
    cut = decodes.index(False) or len(decodes) - decodes[::-1].index(False)
    if cut == len(decodes):
        return step
    parts = tuple(
        _part(step, starts, lens, begin, end, all(decodes[begin:end]))
        for begin, end in ((0, cut), (cut, len(decodes)))
    )
    return replace(step, parts=parts)


def _part(
    step: Step, starts: Sequence[int], lens: Sequence[int] | None, begin: int, end: int, decodes: bool
) -> Step:
    """The step of some consecutive requests, and whether all of them decode."""
    table, first = step.table, starts[begin]
    q_lens = [after - before for before, after in pairwise(starts[begin : end + 1])]
    assert table.seq_lens is not None
    assert step.query_start_loc is not None
    own = None if lens is None else lens[begin:end]
    part = Step(
        starts[end] - first,
        max(q_lens),
        step.max_seq_len if own is None else max(own),
        None,
        PageTable.from_block_table(
            table.page_ids[begin:end], table.seq_lens[begin:end], page_size=table.page_size
        ),
        max_kv_tokens=0 if own is None else sum(own),
        min_query_len=min(q_lens),
    )  # fmt: skip
    # A short end of a prompt as a decode would be a kernel that warming up does not reach.
    part.decodes = part.decodes and decodes
    if not part.decodes:
        part.query_start_loc = step.query_start_loc[begin : end + 1] - first
    return part


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
        out: like q, with the channels of the cache's V.
        max_batch: requests of a decode step, at most.
        batch_invariant: give a token the same bits whatever else is in its step. Decodes then go the way of
            prefills, with which they share steps.
        **options: of `paged_decode` and `batch_prefill`: sm_scale, logits_soft_cap, window_left, sinks, lse;
            causal for steps that do not decode.
    """
    if step.parts and not batch_invariant:
        tokens = [part.num_tokens for part in step.parts]
        rows = zip(q.split_with_sizes(tokens), out.split_with_sizes(tokens), strict=True)
        for part, (queries, results) in zip(step.parts, rows, strict=True):
            attend(part, queries, cache, results, max_batch=max_batch, **options)
        return
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


def _where(q: torch.Tensor) -> tuple[torch.device, str | None]:
    """The device of a call, and the target of the executor that runs it in the device's place."""
    running = executor()
    return q.device, None if running is None else running.target.name


def _decode_plan(
    q: torch.Tensor, cache: PagedKVCache, step: Step, max_batch: int, *, batch_invariant: bool = False
) -> DecodePlan:
    """The plan of decode steps with this many query tokens, made once for all layers of a shape."""
    most = max(max_batch, step.table.batch_size)
    key = (
        _kind(cache), q.shape[1:], q.dtype, step.max_query_len, step.table.page_ids.shape[1], most,
        batch_invariant, *_where(q),
    )  # fmt: skip
    plan = _decode_plans.get(key)
    if plan is None:
        make = functools.partial(
            plan_decode, q, cache, step.table, max_batch=most, batch_invariant=batch_invariant
        )
        plan = _decode_plans[key] = make(workspace=reserve(make().workspace_bytes(), q.device))
    return plan


def _prefill_plan(q: torch.Tensor, cache: PagedKVCache, step: Step, batch_invariant: bool) -> PrefillPlan:
    """The plan of prefills of about this size, kept for all layers of a shape and for later steps."""
    key = (_kind(cache), q.shape[1:], q.dtype, step.prefill_sizes, batch_invariant, *_where(q))
    plan = _prefill_plans.get(key)
    captures = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if plan is None:
        batch, num_tokens, max_q_len, max_seq_len, kv_tokens, min_q_len = step.prefill_sizes
        shape = PrefillShape(
            batch=batch, num_tokens=num_tokens, max_q_len=max_q_len, num_qo_heads=q.shape[1],
            num_kv_heads=cache.num_kv_heads, head_dim=q.shape[2], page_size=cache.page_size,
            max_seq_len=max_seq_len, kv_tokens=kv_tokens, q_dtype=q.dtype, min_q_len=min_q_len,
            v_head_dim=cache.v_head_dim,
        )  # fmt: skip
        plan = plan_without_memory(
            PrefillPlan, shape, cache, limit=SCRATCH_BYTES, batch_invariant=batch_invariant
        )
        if captures:  # what is allocated now belongs to the graph
            plan = plan.with_workspace()
        else:
            shared = _reserve_scratch(plan.workspace_bytes(), q.device)
            plan = _prefill_plans.keep(key, plan.with_workspace(shared))
    if captures:
        _captured.append(plan)
    return plan


def _at_least(size: int, parts: int = 1) -> int:
    """The smallest allowed size that is at least `size`.

    Allowed are powers of two and, between each and the next, `parts - 1` sizes at equal distances.

    Example:
        >>> [_at_least(size) for size in (0, 1, 9)], [_at_least(size, 4) for size in (9, 10, 11, 513)]
        ([1, 1, 16], [10, 10, 12, 640])
    """
    unit = max((1 << max(size - 1, 0).bit_length()) // (2 * parts), 1)
    return max(-(-size // unit) * unit, 1)


def _reserve_scratch(num_bytes: int, device: torch.device) -> Workspace:
    """The one workspace of prefills of a device; plans that have a smaller one are made again."""
    found = _scratch.get(device)
    if found is None or found.num_bytes < num_bytes:
        _prefill_plans.clear()
        found = _scratch.pop(device, None)
        del found  # before its successor is allocated
        found = _scratch[device] = Workspace(num_bytes, device)
    return found

"""Public operations of attn_prefill: check, choose, allocate, launch. No mathematics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowkv.attn_prefill.arguments import APPEND, PREFILL, Arguments
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan, check_plan
from narrowkv.attn_prefill.planning import plan_for_call
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch.tracing import traceable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.attn_prefill.arguments import AppendOptions, PrefillOptions


@traceable
def batch_prefill(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    plan: PrefillPlan | None = None,
    **options: Unpack[PrefillOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged queries over a paged KV cache, which already holds their own keys and values.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`, all sequences' query tokens one after the other, last
            dimension contiguous. bf16 or fp16 over any cache, with no quantisation of Q; or FP8 over a cache
            of the same FP8 format, which runs on FP8 matrix units.
        cache: keys and values; any layout, page size and format. With a `key_transform` a launch ahead of
            attention balances and rotates q into memory that the call allocates.
        page_table: which pages each sequence occupies, and its length with the new tokens in it.
        cu_seqlens_q: `[batch + 1]` int32 or int64, any stride, where each sequence's query tokens begin.
            Row i of a sequence stands at position `seq_len - q_len + i`: the mask is aligned bottom-right,
            and rows before the first key attend to nothing. A token belongs to the first sequence that claims
            it, and a sequence with an entry outside [0, tokens] has none.
        plan: from `plan_prefill`, which can also be told bounds that shapes do not show; without one, a plan
            is made for the call. A call with a plan allocates only outputs that were not given. No call
            waits for the device, so it can be captured in a graph.
        **options: `causal`, `sm_scale`, `q_descale`, `logits_soft_cap`, `window_left`, `window_right`,
            `sinks`, `out`, `out_dtype`, `return_lse`, `lse`, `validate` and `batch_invariant`: see
            `PrefillOptions`.

    An infinite or NaN value of V makes its channel infinite or NaN in rows that attend to it, and may make
    their other channels NaN; other rows are not affected.

    Returns:
        `o`, or `(o, lse)`; `lse` is `[tokens, num_qo_heads]` fp32, natural log of the scaled logits' sum
        **without the sink**. A row that attends to nothing has o = 0 and lse = -inf. Rows that no sequence
        owns (past the end of `cu_seqlens_q`), or beyond the plan's `max_q_len` in a sequence, are not
        written. Lengths that are negative or longer than the page table are brought into its range, and keys
        beyond the plan's `max_seq_len` are not attended to by kernel "dense".

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.
        UnsupportedError: for formats that no kernel serves on this target, and why.

    Source: FlashAttention-2's loop (Dao, 2023) over rows packed from the heads of a group.

    Example:
        >>> o = batch_prefill(q, cache, table, cu_seqlens_q, causal=True)                 # doctest: +SKIP
        >>> o, lse = batch_prefill(q, cache, table, cu_seqlens_q, return_lse=True)        # doctest: +SKIP
    """
    if plan is None:
        invariant = bool(options.get("batch_invariant", False))
        plan = plan_for_call(PrefillPlan, q, cache, page_table, cu_seqlens_q, invariant)
    elif type(plan) is not PrefillPlan:
        check_plan(plan, PrefillPlan, "plan_prefill")
    if not options.keys() <= PREFILL.keywords:
        PREFILL.check_keywords(options)
    return plan.call(Arguments(q, cache, page_table, cu_seqlens_q, **options))


@traceable
def prefill_append(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    fp8_compute: bool = False,
    plan: AppendPlan | None = None,
    **options: Unpack[AppendOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a chunk over its cache and itself; the chunk is appended to the cache.

    One launch; on Hopper two, where they are faster: `plan_append` chooses, or is told.

    Older tokens are read from the cache, the chunk's own keys and values unquantised from `k_new` and
    `v_new`. The cache gets the bytes that `narrowkv.paged_cache.append` would write, and no others change.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`, bf16 or fp16, all sequences' new tokens one after the other,
            last dimension contiguous.
        k_new: `[tokens, num_kv_heads, head_dim]` in q's dtype, last dimension contiguous; v_new: the same
            with the cache's `v_head_dim` channels.
        cache: any layout, page size and format; read and written in place. Its descales are per tensor, per
            head or per token-head, as for `append`. With a `key_transform` a launch ahead rotates and
            transforms q for stored keys, and new keys are transformed as they are stored.
        page_table: a block table with pages for the new tokens too; `seq_lens` are the lengths **before** the
            append, and are not changed. What has no page is not stored.
        cu_seqlens_q: `[batch + 1]` int32 or int64, any stride, where each sequence's new tokens begin.
        fp8_compute: multiply queries and old tokens on FP8 matrix units, queries as two FP8 terms (FP8
            caches only).
        plan: from `plan_append`; without one, a plan is made for the call. A call with a plan allocates only
            outputs that were not given. No call waits for the device.
        **options: `rope`, `sm_scale`, `logits_soft_cap`, `window_left`, `sinks`, `out`, `out_dtype`,
            `return_lse`, `lse` and `validate`: see `AppendOptions`.

    An infinite or NaN value of V makes its channel infinite or NaN in rows that attend to it, and may make
    their other channels NaN; other rows are not affected.

    Returns:
        `o`, or `(o, lse)`; `lse` as `batch_prefill` gives it, **without the sink**.

    Raises:
        TypeError, ValueError: before anything is written, naming the argument, what was expected and what
            came.
        UnsupportedError: for formats that no kernel serves on this target, and why.

    Source: FlashAttention-2's loop (Dao, 2023) over rows packed from the heads of a group; rotary embedding
        after RoFormer (Su et al., 2021).

    Example:
        >>> o = prefill_append(q, k_new, v_new, cache, table, cu_seqlens_q)      # doctest: +SKIP
    """
    if plan is None:
        plan = plan_for_call(AppendPlan, q, cache, page_table, cu_seqlens_q, fp8_compute)
    elif type(plan) is not AppendPlan:
        check_plan(plan, AppendPlan, "plan_append")
    if fp8_compute != plan.fp8_compute:
        raise ValueError(f"plan must be made with fp8_compute={fp8_compute}: call plan_append again")
    if not options.keys() <= APPEND.keywords:
        APPEND.check_keywords(options)
    return plan.call(Arguments(q, cache, page_table, cu_seqlens_q, k_new, v_new, **options))

"""The oracles: attention over the dequantised cache in float32 with plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowkv.attn_prefill.arguments import APPEND, PREFILL, Arguments
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan
from narrowkv.paged_cache import PagedKVCache, PageTable, append_reference, apply_rope_reference
from narrowkv.quant import lse_correction
from narrowkv.runtime.attention.reference import attention_reference, finish
from narrowkv.runtime.untried import reference_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.attn_prefill.arguments import AppendOptions, PrefillOptions


@reference_of(PrefillPlan)
def batch_prefill_reference(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    plan: object = None,
    **options: Unpack[PrefillOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`batch_prefill` in float32, sequence by sequence; same arguments; reads lengths on the host."""
    PREFILL.check_keywords(options)
    given = Arguments(q, cache, page_table, cu_seqlens_q, **options)
    scale = q.shape[2] ** -0.5 if given.sm_scale is None else given.sm_scale
    shift = None
    if (transform := cache.key_transform) is not None:
        if transform.offset is not None:
            shift = lse_correction(q, transform.offset, scale)
        q = transform.queries(q).to(q.dtype)
    o = torch.zeros((*q.shape[:2], cache.v_head_dim), dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    starts = cu_seqlens_q.tolist()
    for seq in range(page_table.batch_size):
        rows = slice(starts[seq], starts[seq + 1])
        k, v = cache.gather(page_table, seq)
        q_len, kv_len = rows.stop - rows.start, k.shape[0]
        if q_len == 0 or kv_len == 0:
            continue
        o[rows], lse[rows] = attention_reference(
            q[rows].float() * given.q_descale,
            k,
            v,
            kv_len - q_len + torch.arange(q_len, device=q.device),
            sm_scale=scale,
            logits_soft_cap=given.logits_soft_cap,
            window_left=given.window_left,
            window_right=0 if given.causal else given.window_right,
            sinks=given.sinks,
            shift=None if shift is None else shift[rows],
        )
    return finish(o, lse, given.out, options)


@reference_of(AppendPlan)
def prefill_append_reference(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    fp8_compute: bool = False,
    plan: PrefillPlan | None = None,
    **options: Unpack[AppendOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`prefill_append` in float32, sequence by sequence; same arguments and effect on the cache.

    It computes as without `fp8_compute`.
    """
    APPEND.check_keywords(options)
    given = Arguments(q, cache, page_table, cu_seqlens_q, k_new, v_new, **options)
    rope = given.rope
    scale = q.shape[2] ** -0.5 if given.sm_scale is None else given.sm_scale
    turned_q, turned_k = q, k_new
    if rope is not None:
        turned_q = apply_rope_reference(q, rope).to(q.dtype)
        turned_k = apply_rope_reference(k_new, rope).to(k_new.dtype)
    shift = None
    if (transform := cache.key_transform) is not None:
        if transform.offset is not None:
            shift = lse_correction(turned_q, transform.offset, scale)
        turned_q = transform.queries(turned_q).to(q.dtype)
        exact = k_new if rope is None else apply_rope_reference(k_new, rope)
        turned_k = transform.keys(exact).to(k_new.dtype)
    o = torch.zeros((*q.shape[:2], cache.v_head_dim), dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    starts = cu_seqlens_q.tolist()
    slots = torch.full((q.shape[0],), -1, dtype=torch.int32)
    for seq in range(page_table.batch_size):
        rows = slice(starts[seq], starts[seq + 1])
        k, v = cache.gather(page_table, seq)
        old, new = k.shape[0], rows.stop - rows.start
        if new == 0:
            continue
        positions = old + torch.arange(new)
        o[rows], lse[rows] = attention_reference(
            turned_q[rows],
            torch.cat([k, turned_k[rows].float()]),
            torch.cat([v, v_new[rows].float()]),
            positions.to(q.device),
            sm_scale=scale,
            logits_soft_cap=given.logits_soft_cap,
            window_left=given.window_left,
            window_right=0,
            sinks=given.sinks,
            shift=None if shift is None else shift[rows],
        )
        size = page_table.page_size
        held = positions < page_table.capacity
        pages = page_table.page_ids[seq].cpu()[(positions // size)[held].long()]
        kept = torch.where(
            (pages >= 0) & (pages < cache.num_pages), pages.long() * size + positions[held] % size, -1
        )
        slots[rows][held] = kept.int()
    exponent = "mse" if plan is None or plan.exponent is None else plan.exponent
    append_reference(cache, k_new, v_new, slots.to(q.device), rope=rope, exponent=exponent)
    return finish(o, lse, given.out, options)

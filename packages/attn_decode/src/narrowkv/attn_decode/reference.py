"""The oracle: attention over the dequantised cache in float32 with plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowkv.attn_decode.options import DecodeArguments
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant import lse_correction
from narrowkv.runtime.attention.reference import finish
from narrowkv.runtime.untried import reference_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.attn_decode.options import DecodeOptions


@reference_of(DecodePlan)
def paged_decode_reference(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    *,
    plan: object = None,
    **options: Unpack[DecodeOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_decode` in float32, sequence by sequence; same arguments; reads lengths on the host.

    The result is float32, divided by `out_scale` if there is one, unless `out_dtype` or `out` says otherwise.
    """
    given = DecodeArguments(q, cache, page_table, **options)
    batch = page_table.batch_size
    q_len = q.shape[0] // batch if batch else 1
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    gqa_ratio = q.shape[1] // num_kv_heads
    scale = head_dim**-0.5 if given.sm_scale is None else given.sm_scale
    if q.dtype.itemsize == 1:
        q = q.float() * given.q_descale
    shift = None
    if (transform := cache.key_transform) is not None:
        if transform.offset is not None:
            shift = lse_correction(q, transform.offset, scale)
        q = transform.queries(q)
    o = torch.zeros((*q.shape[:2], cache.v_head_dim), dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    for seq in range(batch):
        k, v = cache.gather(page_table, seq)
        kv_len = k.shape[0]
        if kv_len == 0:
            continue
        rows = slice(seq * q_len, (seq + 1) * q_len)
        query = q[rows].float().view(q_len, num_kv_heads, gqa_ratio, head_dim)
        s = torch.einsum("qhgd,lhd->qhgl", query, k) * scale
        if shift is not None:
            s += shift[rows].view(*s.shape[:3], 1)
        if (cap := given.logits_soft_cap) > 0:
            s = cap * torch.tanh(s / cap)
        key = torch.arange(kv_len, device=q.device)[None]
        position = (kv_len - q_len + torch.arange(q_len, device=q.device))[:, None]
        keep = key <= position
        if page_table.key_ranges is not None:
            begin, end = page_table.key_ranges[seq, :, :1], page_table.key_ranges[seq, :, 1:]
            keep = (key >= begin) & (key < end)
        if page_table.tree_mask is not None:
            mask = page_table.tree_mask
            if page_table.key_ranges is None:
                keep = torch.ones_like(keep)
            new = key - (kv_len - q_len)
            seen = (mask[seq][:, None] >> new.clamp(0, 8 * mask.element_size() - 1)) & 1
            keep = keep & ((new < 0) | seen.bool())
        if given.window_left >= 0:
            keep &= key >= position - given.window_left
        s = s.masked_fill(~keep[:, None, None], -math.inf)
        log_sum = torch.logsumexp(s, -1)
        denominator = log_sum
        if given.sinks is not None:
            denominator = torch.logaddexp(
                log_sum, given.sinks.float().view(num_kv_heads, gqa_ratio).expand_as(log_sum)
            )
        # Keys that a row does not attend to have no part in it, not even 0 * NaN.
        p = torch.exp(s - denominator[..., None]).masked_fill(
            ~keep[:, None, None] | (log_sum == -math.inf)[..., None], 0.0
        )
        clean = torch.where(v.isnan(), 0.0, v)
        result = torch.einsum("qhgl,lhd->qhgd", p, clean)
        poisoned = torch.einsum("ql,lhd->qhd", keep.float(), torch.isnan(v).float())[:, :, None] > 0
        o[rows] = result.masked_fill(poisoned.expand_as(result), math.nan).reshape(q_len, -1, v.shape[2])
        lse[rows] = log_sum.reshape(q_len, -1)
    return finish(o, lse, given.out, given._asdict())


def merge_states_reference(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    lse_base: str = "e",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` in float64; the same arguments and results."""
    base = math.log(2.0) if lse_base == "2" else 1.0
    natural = lse.double() * base
    total = torch.logsumexp(natural, 0)
    denominator = total if sinks is None else torch.logaddexp(total, sinks.double().expand_as(total))
    weight = torch.exp(natural - denominator.clamp_min(torch.finfo(torch.float64).min))
    weight = weight.masked_fill((lse == -math.inf), 0.0)
    merged = (weight[..., None] * o.double().masked_fill((lse == -math.inf)[..., None], 0.0)).sum(0)
    merged = merged.to(out_dtype or o.dtype) if out is None else out.copy_(merged)
    total = (total / base).float()
    return merged, total if lse_out is None else lse_out.copy_(total)

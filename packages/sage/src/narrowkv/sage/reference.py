"""The oracle: host quantisers and float32 attention over what they stored, with plain torch."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from narrowkv.quant.formats import get_format
from narrowkv.quant.quantize import dequantize_per_channel, quantize_per_channel
from narrowkv.quant.rounding import round_to_format
from narrowkv.quant.sage import (
    TokenGroups,
    block_mean,
    dequantize_per_token_group,
    quantize_per_token_group,
    token_mean,
)
from narrowkv.runtime.attention.reference import attention_reference, finish
from narrowkv.sage.api import block_sizes_of, plan_sage
from narrowkv.sage.operation import SAGE, SagePlan
from narrowkv.sage.options import SageArguments

Ranges = list[slice]


def ranges_of(x: torch.Tensor, starts: torch.Tensor | None) -> Ranges:
    """The rows of each sequence in `x` with batch and tokens flattened; reads `starts` on the host."""
    if starts is None:
        return [slice(i * x.shape[1], (i + 1) * x.shape[1]) for i in range(x.shape[0])]
    bounds = starts.tolist()
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def scratch_rows(ranges: Ranges, *, ragged: bool) -> Ranges:
    """The rows of each sequence in scratch memory, where sequences begin at multiples of 128 rows.

    A dense one has its length in whole blocks; a ragged one that begins at token t begins at row
    `(t // 128 + i) * 128`, which needs no sum over the sequences before.
    """
    rows, at = [], 0
    for i, tokens in enumerate(ranges):
        length = tokens.stop - tokens.start
        first = (tokens.start // 128 + i) * 128 if ragged else at
        rows.append(slice(first, first + length))
        at += -(-length // 128) * 128
    return rows


def through_format(
    sequences: list[torch.Tensor], groups: TokenGroups | None, format_name: str
) -> list[torch.Tensor]:
    """Smoothed sequences `[tokens, heads, dim]` after quantising and dequantising, fp32."""
    if groups is None:  # one descale for all sequences
        whole = torch.cat(sequences)
        stored, descale = quantize_per_token_group(whole, None, format_name)
        values = dequantize_per_token_group(stored, descale, None, format_name)
        return list(torch.split(values, [len(x) for x in sequences]))
    return [
        dequantize_per_token_group(*quantize_per_token_group(x, groups, format_name), groups, format_name)
        for x in sequences
    ]


def _spread_means(q: torch.Tensor) -> torch.Tensor:
    return block_mean(q).repeat_interleave(128, 0)[: q.shape[0]]


def _round_rows(p: torch.Tensor, format_name: str) -> torch.Tensor:
    """P through an FP8 format, each row's largest scaled to the format's."""
    top = p.amax(-1, keepdim=True).clamp_min(1e-30) / get_format(format_name).max_value
    return round_to_format(p / top, format_name) * top


def _attend(
    plan: SagePlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor | None,
    p_format: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`(o, lse)` of one sequence; `blocks` is its block mask `[heads, query blocks, key blocks]`."""
    rows, keys = q.shape[0], k.shape[0]
    visible = None
    if blocks is not None and plan.block_sizes is not None:
        q_block, k_block = plan.block_sizes
        visible = (blocks != 0).repeat_interleave(q_block, 1).repeat_interleave(k_block, 2)[:, :rows, :keys]
        # Blocks past a ragged mask are masked.
        missing = (0, keys - visible.shape[2], 0, rows - visible.shape[1])
        visible = torch.nn.functional.pad(visible, missing)
    return attention_reference(
        q, k, v, torch.arange(rows, device=q.device) + (keys - rows if plan.mask.BOTTOM_RIGHT else 0),
        sm_scale=plan.sm_scale, logits_soft_cap=0.0, window_left=plan.mask.LEFT,
        window_right=plan.mask.RIGHT, sinks=None, visible=visible,
        round_p=None if p_format is None else partial(_round_rows, format_name=p_format),
    )  # fmt: skip


def sage_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, qk_dtype: str | None = "int8", **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sage_attention` with the host's quantisers and fp32 attention; reads lengths on the host.

    Args:
        q, k, v, **options: as for `sage_attention`; the result is float32 unless `out` says otherwise.
        qk_dtype: as for `sage_attention`; None computes attention in fp32 without quantisation.
    """
    SAGE.check_keywords(options)
    given = SageArguments(q, k, v, qk_dtype=qk_dtype or "int8", **options)
    plan = _plan_of(given)
    o, lse = _results(plan, q, k, v, given.block_mask, exact=qk_dtype is None, p_format=None)
    return finish(o, lse, given.out, options)


def narrow_p_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """`sage_attention_reference` that also rounds P, scaled to the FP8 format's range, as the operation must.

    How far it is from the reference is what the operation cannot avoid.
    """
    given = SageArguments(q, k, v, **options)
    plan = _plan_of(given)
    return _results(plan, q, k, v, given.block_mask, exact=False, p_format=plan.config.fp8)[0]


def _plan_of(given: SageArguments) -> SagePlan:
    """The plan of a call, with its lists of lengths."""
    sizes = block_sizes_of(given.block_mask, given.block_sizes)
    return plan_sage(
        given.q, given.k, cu_seqlens_q=given.cu_seqlens_q, cu_seqlens_k=given.cu_seqlens_k,
        **given.planned | {"block_sizes": sizes},
    )  # fmt: skip


def _results(
    plan: SagePlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: torch.Tensor | None, *,
    exact: bool, p_format: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`(o, lse)` of every sequence, in the plan's layout; `exact` quantises nothing."""
    q, k, v = (plan.viewed(x) for x in (q, k, v))
    blocks = [None] * plan.shape.batch if block_mask is None else list(block_mask)
    flat_q, flat_k, flat_v = (x.float().reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    q_ranges, k_ranges = ranges_of(q, plan.cu_seqlens_q), ranges_of(k, plan.cu_seqlens_k)
    queries, keys, values = (
        [flat_q[r] for r in q_ranges],
        [flat_k[r] for r in k_ranges],
        [flat_v[r] for r in k_ranges],
    )
    o = torch.zeros_like(flat_q)
    lse = torch.full(flat_q.shape[:2], -math.inf, device=q.device)
    if exact:
        sequences = zip(queries, keys, values, blocks, strict=True)
        results = [_attend(plan, *sequence, None) for sequence in sequences]
    else:
        means = [token_mean(x) if plan.smooth_k else torch.zeros_like(x[:1].sum(0)) for x in keys]
        shared = [_spread_means(x) if plan.smooth_q else torch.zeros_like(x) for x in queries]
        own = [x - mean for x, mean in zip(queries, shared, strict=True)]
        narrow_q = through_format(own, plan.q_groups, plan.qk_format)
        narrow_k = through_format(
            [x - mean for x, mean in zip(keys, means, strict=True)], plan.k_groups, plan.qk_format
        )
        narrow_v = [dequantize_per_channel(*quantize_per_channel(x, plan.config.fp8)) for x in values]
        results = []
        for i, key in enumerate(keys):
            # Side by side: the rows' own part against narrow keys, and the block's mean against keys as they
            # came.
            both_q, both_k = torch.cat([narrow_q[i], shared[i]], -1), torch.cat([narrow_k[i], key], -1)
            result, log_sum = _attend(plan, both_q, both_k, narrow_v[i], blocks[i], p_format)
            ratio = q.shape[-2] // k.shape[-2]
            log_sum += plan.sm_scale * (own[i] * means[i].repeat_interleave(ratio, 0)).sum(-1)
            results.append((result, log_sum))
    for rows, (result, log_sum) in zip(q_ranges, results, strict=True):
        o[rows], lse[rows] = result, log_sum
    return plan.viewed(o.view(q.shape)), plan.viewed(lse.view(q.shape[:-1]))


def short_sum_error(plan: SagePlan, q: torch.Tensor, k: torch.Tensor) -> float:
    """How far a logit may be off by the target's own sum of FP8 products; 0 where that is as good as fp32.

    Hopper adds 32 channels at a time to what it has, and of that keeps 13 bits after the leading one.
    """
    if plan.target.name != "sm90" or get_format(plan.qk_format).kind != "fp8":
        return 0.0
    q, k = plan.viewed(q), plan.viewed(k)
    flat_q, flat_k = (x.float().reshape(-1, *x.shape[-2:]) for x in (q, k))
    steps, largest = plan.shape.head_dim // 32, 0.0
    for rows, keys in zip(ranges_of(q, plan.cu_seqlens_q), ranges_of(k, plan.cu_seqlens_k), strict=True):
        x, y = flat_q[rows], flat_k[keys]
        if len(x) == 0 or len(y) == 0:
            continue
        x = x - _spread_means(x) if plan.smooth_q else x
        y = y - token_mean(y) if plan.smooth_k else y
        x = x.view(len(x), y.shape[1], plan.shape.gqa_ratio, steps, 32)
        sums = torch.einsum("qhgcd,khcd->qhgkc", x, y.view(len(y), y.shape[1], steps, 32)).cumsum(-1)
        largest = max(largest, float(sums.abs().max()))
    return steps * 2.0**-13 * largest * plan.sm_scale

"""The oracle of every attention operation: plain attention in float32 with torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    sm_scale: float,
    logits_soft_cap: float,
    window_left: int,
    window_right: int,
    sinks: torch.Tensor | None,
    shift: torch.Tensor | None = None,
    round_p: Callable[[torch.Tensor], torch.Tensor] | None = None,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in float32: `q [rows, num_qo_heads, head_dim]`, `k, v [keys, num_kv_heads, head_dim]`.

    `positions [rows]` are the rows' places among the keys; windows of -1 are open. q and k may be wider than
    v. `shift [rows, num_qo_heads]` is added to the logits of each row, before a soft cap. `round_p` rounds P
    `[..., keys]` before it is multiplied by V. `visible` bool `[num_qo_heads, rows, keys]` masks more keys.
    """
    num_keys, num_kv_heads, head_dim = k.shape
    rows, num_qo_heads, _ = q.shape
    ratio = num_qo_heads // num_kv_heads
    s = torch.einsum("qhgd,lhd->qhgl", q.float().view(rows, num_kv_heads, ratio, head_dim), k) * sm_scale
    if shift is not None:
        s = s + shift.view(rows, num_kv_heads, ratio, 1)
    if logits_soft_cap > 0:
        s = logits_soft_cap * torch.tanh(s / logits_soft_cap)
    key = torch.arange(num_keys, device=q.device)[None]
    keep = torch.ones(rows, num_keys, dtype=torch.bool, device=q.device)
    if window_right >= 0:
        keep &= key <= positions[:, None] + window_right
    if window_left >= 0:
        keep &= key >= positions[:, None] - window_left
    seen = keep[:, None, None]  # [rows, 1, 1, keys], or of every head
    if visible is not None:
        seen = seen & visible.reshape(num_kv_heads, ratio, rows, num_keys).permute(2, 0, 1, 3)
    s = s.masked_fill(~seen, -math.inf)
    log_sum = torch.logsumexp(s, -1)
    denominator = log_sum
    if sinks is not None:
        denominator = torch.logaddexp(log_sum, sinks.float().view(num_kv_heads, ratio).expand_as(log_sum))
    # Keys that a row does not attend to have no part in it, not even 0 * NaN.
    empty = log_sum == -math.inf
    p = torch.exp(s - denominator[..., None]).masked_fill(~seen | empty[..., None], 0.0)
    if round_p is not None and num_keys:
        p = round_p(p)
    finite = v.isfinite()
    o = torch.einsum("qhgl,lhd->qhgd", p, v.masked_fill(~finite, 0.0))
    bad = torch.einsum("qhgl,lhd->qhgd", seen.expand(-1, num_kv_heads, -1, -1).float(), (~finite).float()) > 0
    o = o.masked_fill(bad.any(-1, keepdim=True), math.nan).masked_fill(empty[..., None], 0.0)
    return o.reshape(rows, num_qo_heads, v.shape[2]), log_sum.reshape(rows, num_qo_heads)


def finish(
    o: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor | None, options: Mapping[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The result where and as the caller wants it; float32 unless `out` or `out_dtype` says otherwise.

    With `out_scale` it is divided by that, and saturates in FP8.
    """
    if options.get("out_scale") is not None:
        o = o / options["out_scale"]
        dtype = options.get("out_dtype") if out is None else out.dtype
        if dtype is not None:
            most = torch.finfo(dtype).max
            o = o.clamp(-most, most)
    if out is not None:
        o = out.copy_(o)
    elif options.get("out_dtype") is not None:
        o = o.to(options["out_dtype"])
    if options.get("lse") is not None:
        log_sum = options["lse"].copy_(log_sum)
    return (o, log_sum) if options.get("return_lse") else o

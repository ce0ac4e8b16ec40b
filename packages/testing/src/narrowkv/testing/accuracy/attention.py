"""Attention in plain torch over what a recipe gives back, as a function for transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from narrowkv.engines.transformers.attention import refuse_unknown
from narrowkv.engines.transformers.masks import padding_of
from narrowkv.quant import Calibration, lse_correction
from narrowkv.runtime.attention.reference import attention_reference
from narrowkv.testing.accuracy.recipes import REFERENCE, Recipe

__all__ = ["NAME", "StoredAttention", "stored_attention"]

NAME = "narrowkv_stored"
_ROWS = 1024  # queries whose scores exist at a time

Samples = dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class StoredAttention:
    """Causal attention in float32 over K and V as a recipe stores them, for one sequence.

    Args:
        recipe: how K and V are stored.
        calibration: what the recipe needs, a layer for each layer of `layers`.
        layers: indices of the model's attention layers, in order; all that a calibration is for.
        samples: where Q, K and V of each layer are kept, or None.
    """

    def __init__(
        self,
        recipe: Recipe = REFERENCE,
        calibration: Calibration | None = None,
        layers: list[int] | None = None,
        samples: Samples | None = None,
    ) -> None:
        self.recipe, self.calibration, self.layers, self.samples = recipe, calibration, layers, samples

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
        sliding_window: int | None = None, softcap: float | None = None,
        s_aux: torch.Tensor | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """As transformers' `AttentionInterface` calls it: `[1, heads, tokens, head_dim]`, no padding."""
        refuse_unknown(kwargs, dropout)
        if query.shape[0] != 1 or attention_mask is not None or query.shape[2] != key.shape[2]:
            raise ValueError("accuracy is measured on one whole sequence without padding at a time")
        q, k, v = (x[0].transpose(0, 1).float() for x in (query, key, value))  # [tokens, heads, head_dim]
        index = int(getattr(module, "layer_idx", 0))
        if self.samples is not None:
            self.samples[index] = q, k, v
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        layer = shift = None
        if self.calibration is not None and self.layers is not None:
            layer = self.calibration.layers[self.layers.index(index)]
            shift = lse_correction(q, layer.offset, scale)
            q, k, v = layer.queries(q), layer.keys(k), layer.values(v)
        (k, v), *near = self.recipe.store(k, v)
        if near:
            if softcap or s_aux is not None or sliding_window is not None:
                raise ValueError(f"{self.recipe.name} is for models without windows, soft caps and sinks")
            o = _causal_with_near(
                q, (k, v), near[0], scale, first=self.recipe.first, recent=self.recipe.recent
            )
        else:
            o = _causal(q, k, v, scale, softcap=softcap, window=sliding_window, sinks=s_aux, shift=shift)
        if layer is not None:
            o = layer.output(o)
        return o.to(query.dtype)[None], None


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, softcap: float | None,
    window: int | None, sinks: torch.Tensor | None, shift: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention in float32: `[tokens, heads, head_dim]` of one sequence; shift: added to logits."""
    if not softcap and window is None and sinks is None:
        by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
        o = torch.nn.functional.scaled_dot_product_attention(
            by_head[0], by_head[1], by_head[2], is_causal=True, scale=scale, enable_gqa=True
        )
        return o[0].transpose(0, 1)
    parts = [
        attention_reference(
            q[first : first + _ROWS], k[: first + _ROWS], v[: first + _ROWS],
            torch.arange(first, min(first + _ROWS, q.shape[0]), device=q.device), sm_scale=scale,
            logits_soft_cap=softcap or 0.0, window_left=-1 if window is None else window - 1, window_right=0,
            sinks=sinks, shift=None if shift is None else shift[first : first + _ROWS],
        )[0]
        for first in range(0, q.shape[0], _ROWS)
    ]  # fmt: skip
    return torch.cat(parts)


def _causal_with_near(
    q: torch.Tensor, far: tuple[torch.Tensor, torch.Tensor], near: tuple[torch.Tensor, torch.Tensor],
    scale: float, *, first: int, recent: int,
) -> torch.Tensor:  # fmt: skip
    """Causal attention that sees the first and the newest tokens of each query as they are in `near`."""
    heads = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (*far, *near)]
    key = torch.arange(q.shape[0], device=q.device)
    parts = []
    for begin in range(0, q.shape[0], _ROWS):
        rows = q[begin : begin + _ROWS]
        end = begin + rows.shape[0]
        far_k, far_v, near_k, near_v = (x[:end] for x in heads)
        place = key[begin:end, None]
        is_near = (key[:end] < first) | (key[:end] > place - recent)
        logits, far_logits = (torch.einsum("thd,shd->hts", rows, k) * scale for k in (near_k, far_k))
        logits = torch.where(is_near, logits, far_logits)
        p = logits.masked_fill(key[:end] > place, -torch.inf).softmax(-1)
        parts.append(
            torch.einsum("hts,shd->thd", p * is_near, near_v)
            + torch.einsum("hts,shd->thd", p * ~is_near, far_v)
        )
    return torch.cat(parts)


@contextmanager
def stored_attention(model: Any, attention: StoredAttention) -> Iterator[None]:
    """Makes a model of transformers attend by `attention` meanwhile."""
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention.attend)
    AttentionMaskInterface.register(NAME, padding_of)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

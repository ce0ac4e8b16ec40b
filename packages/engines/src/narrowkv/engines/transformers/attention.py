"""The attention function that transformers calls in every layer."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_decode import merge_states, paged_decode
from narrowkv.attn_prefill import batch_prefill
from narrowkv.engines.transformers.dense import attend_dense, rows_of
from narrowkv.engines.transformers.latent import LatentLayer, attend_latent, latent_layer
from narrowkv.engines.transformers.layers import LAYER_TAG, NarrowLayer
from narrowkv.engines.transformers.masks import tokens_of

# Arguments of other attention functions that change the result and have no counterpart here.
_REFUSED = frozenset({"position_bias", "indices", "block_indices", "sinks", "head_mask", "packed_seq_ids"})


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of a layer, for transformers' `AttentionInterface`.

    With a `NarrowCache` the keys and values that `update` handed on are stored, then attention reads them
    back from the pages. Without one (a forward pass without a cache, or another cache in 16 bits), attention
    reads `key` and `value` where they are.

    Args:
        module: the attention module.
        query: `[batch, num_qo_heads, tokens, head_dim]`, bf16 or fp16.
        key, value: `[batch, num_kv_heads, keys, head_dim]`; values may have fewer channels than keys.
        attention_mask: what `padding_of` returned, `[batch, keys]` (0 for padding), or None.
        scaling: of the logits; default `head_dim ** -0.5`.
        dropout: must be 0.
        sliding_window: keys that a token attends to, itself included.
        softcap: logits are `softcap * tanh(logits / softcap)`.
        s_aux: `[num_qo_heads]`, a logit per head whose value is 0 (attention sinks).
        is_causal: must not be False for more than one token.
        **kwargs: what else models pass; arguments that change the result are refused.

    Returns:
        `[batch, tokens, num_qo_heads, value's channels]`, and None for the attention weights. Padding gets 0.

    Raises:
        TypeError, ValueError: for what narrowkv does not serve.
    """
    batch, _, tokens, _ = query.shape
    refuse_unknown(kwargs, dropout)
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "narrowkv's attention has no backward, got a model that records gradients: call it inside `with "
            'torch.no_grad():` (generate does), and for training use attn_implementation="sdpa"'
        )
    if tokens > 1 and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(
            "narrowkv's attention is causal, got a module with is_causal=False (an image tower?): set it for "
            'the decoder alone, attn_implementation={"text_config": "narrowkv"}'
        )
    layer = getattr(key, LAYER_TAG, None) or latent_layer(module)
    keys = layer.length if isinstance(layer, NarrowLayer) else key.shape[2]
    real = tokens_of(attention_mask, batch, keys, tokens)
    options: dict[str, Any] = {
        "sm_scale": scaling,
        "logits_soft_cap": softcap or 0.0,
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "sinks": s_aux,
    }
    if isinstance(layer, LatentLayer):
        o = attend_latent(module, layer, query, key, value, real.queries, scaling)
    elif not isinstance(layer, NarrowLayer):
        o = attend_dense(query, key, value, real.keys, real.queries, **options)
    elif layer.near is None:
        o = _attend_pages(layer, query, real.queries, options)
    elif sliding_window is None:
        o = _attend_apart(layer, query, key, value, real.queries, options)
    else:
        raise ValueError(
            "NarrowCache with recent tokens in FP8 must know which layers have a sliding window, got "
            "one that its configuration does not name: use recent=0 for this model"
        )
    o = o.view(batch, tokens, -1, value.shape[-1])
    if real.served is not None:
        o = o.where(real.served[:, :, None, None], torch.nan)
    return o, None


def _attend_pages(
    layer: NarrowLayer, query: torch.Tensor, padding: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attention of a layer to all its pages, once the new tokens are stored in them."""
    layer.store(padding)
    rows, cache = layer.owner.rows, layer.cache
    step = rows.step
    assert cache is not None
    assert step is not None
    o: Any
    if step.starts is None:
        q = query.squeeze(2)
        o = paged_decode(q, cache, step.table, plan=layer.decode_plans(q)[0], **options)
    else:
        q = rows_of(query)
        plan = rows.prefill_plan(q, cache, step)
        o = batch_prefill(q, cache, step.table, step.starts, plan=plan, **options)
    return _output(layer, o)


def _attend_apart(
    layer: NarrowLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    padding: torch.Tensor | None, options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Attention of a layer that keeps first and newest tokens apart: partial results, merged.

    A new token attends to both caches, which hold it already. Several attend to one another as they are, and
    to what both caches held before them.
    """
    tokens = query.shape[2]
    sinks, options = options["sinks"], {**options, "sinks": None}
    if tokens == 1:
        layer.store(padding)
        q = query.squeeze(2)
        o, lse = _states(2, q, value.shape[-1])
        plans = layer.decode_plans(q)
        for i, (cache, table) in enumerate(layer.decode_inputs()):
            paged_decode(q, cache, table, plan=plans[i], out=o[i], lse=lse[i], **options)
        return _output(layer, merge_states(o, lse, sinks=sinks, out_dtype=q.dtype)[0])
    layer.make_room(padding)
    step = layer.owner.rows.step
    assert step is not None
    assert step.window is not None
    assert step.starts is not None
    if step.window.near_before is None or step.window.far_before is None:
        o = attend_dense(query, key, value, padding, padding, **{**options, "sinks": sinks})
    else:
        q = rows_of(query)
        o, lse = _states(3, q, value.shape[-1])
        before = (layer.near, step.window.near_before), (layer.cache, step.window.far_before)
        for i, (held, table) in enumerate(before):
            assert held is not None
            batch_prefill(q, held, table, step.starts, causal=False, out=o[i], lse=lse[i], **options)
            o[i] = _output(layer, o[i])
        attend_dense(query, key, value, padding, padding, out=o[2], lse=lse[2], **options)
        o = merge_states(o, lse, sinks=sinks, out_dtype=q.dtype)[0]
    layer.store(padding)
    return o


def _states(count: int, q: torch.Tensor, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for partial results: o `[count, *q.shape[:2], channels]` and lse without its last axis, fp32."""
    o = torch.empty(count, *q.shape[:2], channels, dtype=torch.float32, device=q.device)
    return o, torch.empty(o.shape[:3], dtype=torch.float32, device=q.device)


def _output(layer: NarrowLayer, o: torch.Tensor) -> torch.Tensor:
    """The output `[tokens, num_qo_heads, head_dim]` of attention over the layer's stored values."""
    return o if layer.calibration is None else layer.calibration.output(o)


def refuse_unknown(options: dict[str, Any], dropout: float) -> None:
    """Refuses arguments of other attention functions that change the result.

    Raises:
        ValueError: naming them.
    """
    if not dropout and _REFUSED.isdisjoint(options):
        return
    refused = sorted(name for name in _REFUSED if options.get(name) is not None)
    if refused or dropout:
        raise ValueError(
            f"narrowkv's attention has no {', '.join(refused) or 'dropout'}: use "
            'attn_implementation="sdpa" for this model'
        )

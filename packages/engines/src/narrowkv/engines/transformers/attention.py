"""The attention function that transformers calls in every layer."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_decode import merge_states, paged_decode
from narrowkv.attn_prefill import batch_prefill
from narrowkv.engines.transformers.cache import LAYER_TAG, NarrowLayer
from narrowkv.engines.transformers.masks import check_padding
from narrowkv.engines.transformers.rows import Step, interleaved_starts
from narrowkv.paged_cache import PagedKVCache, PageTable

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
        key, value: `[batch, num_kv_heads, keys, head_dim]`.
        attention_mask: `[batch, keys]`, 0 for padding at the ends of a row, or None.
        scaling: of the logits; default `head_dim ** -0.5`.
        dropout: must be 0.
        sliding_window: keys that a token attends to, itself included.
        softcap: logits are `softcap * tanh(logits / softcap)`.
        s_aux: `[num_qo_heads]`, a logit per head whose value is 0 (attention sinks).
        is_causal: must not be False for more than one token.
        **kwargs: what else models pass; arguments that change the result are refused.

    Returns:
        `[batch, tokens, num_qo_heads, head_dim]`, and None for the attention weights. Padding gets 0.

    Raises:
        TypeError, ValueError: for what narrowkv does not serve.
    """
    batch, _, tokens, head_dim = query.shape
    refuse_unknown(kwargs, dropout)
    if tokens > 1 and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(
            "narrowkv's attention is causal, got a module with is_causal=False (an image tower?): set it for "
            'the decoder alone, attn_implementation={"text_config": "narrowkv"}'
        )
    padding = check_padding(attention_mask, batch)
    options: dict[str, Any] = {
        "sm_scale": scaling,
        "logits_soft_cap": softcap or 0.0,
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "sinks": s_aux,
    }
    o: Any
    layer = getattr(key, LAYER_TAG, None)
    if isinstance(layer, NarrowLayer):
        if layer.near is not None:
            if sliding_window is not None:
                raise ValueError(
                    "NarrowCache with recent tokens in FP8 must know which layers have a sliding window, got "
                    "one that its configuration does not name: use recent=0 for this model"
                )
            o = _attend_apart(layer, query, key, value, padding, options)
            return o.view(batch, tokens, -1, head_dim), None
        layer.store(padding)
        rows, cache = layer.owner.rows, layer.cache
        step = rows.step
        assert cache is not None
        assert step is not None
        if step.starts is None:
            q = query.squeeze(2)
            o = paged_decode(q, cache, step.table, plan=layer.decode_plans(q)[0], **options)
            return _output(layer, o).unsqueeze(1), None
        q = _rows_of(query)
        plan = rows.prefill_plan(q, cache, step)
        o = batch_prefill(q, cache, step.table, step.starts, plan=plan, **options)
        return _output(layer, o).view(batch, tokens, -1, head_dim), None
    return _attend_dense(query, key, value, padding, **options).view(batch, tokens, -1, head_dim), None


def _attend_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None, **options: Any
) -> Any:
    """Attention to `key` and `value` where they are: `[batch * tokens, num_qo_heads, head_dim]`."""
    batch, _, tokens, _ = query.shape
    step = _dense_step(key, padding, batch, tokens)
    cache = PagedKVCache.from_tensors(
        *(_as_slots(x) for x in (key, value)), format=_format_of(key), layout="tokens"
    )
    if step.starts is None:
        return paged_decode(query.squeeze(2), cache, step.table, **options)
    return batch_prefill(_rows_of(query), cache, step.table, step.starts, **options)


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
        o, lse = _states(2, q)
        plans = layer.decode_plans(q)
        for i, (cache, table) in enumerate(layer.decode_inputs()):
            paged_decode(q, cache, table, plan=plans[i], out=o[i], lse=lse[i], **options)
        return _output(layer, merge_states(o, lse, sinks=sinks, out_dtype=q.dtype)[0])
    layer.make_room(padding)
    step = layer.owner.rows.step
    assert step is not None
    assert step.window is not None
    assert step.starts is not None
    # K and V of a model may differ in how they lie; token by token they are alike.
    key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    if step.window.near_before is None or step.window.far_before is None:
        o = _attend_dense(query, key, value, padding, **{**options, "sinks": sinks})
    else:
        q = _rows_of(query)
        o, lse = _states(3, q)
        before = (layer.near, step.window.near_before), (layer.cache, step.window.far_before)
        for i, (held, table) in enumerate(before):
            assert held is not None
            batch_prefill(q, held, table, step.starts, causal=False, out=o[i], lse=lse[i], **options)
            o[i] = _output(layer, o[i])
        own = None if padding is None else padding[:, -tokens:]
        _attend_dense(query, key, value, own, out=o[2], lse=lse[2], **options)
        o = merge_states(o, lse, sinks=sinks, out_dtype=q.dtype)[0]
    layer.store(padding)
    return o


def _states(count: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for partial results: o `[count, *q.shape]` and lse without its last axis, fp32."""
    o = torch.empty(count, *q.shape, dtype=torch.float32, device=q.device)
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


def _rows_of(query: torch.Tensor) -> torch.Tensor:
    """Queries as `[batch * tokens, num_qo_heads, head_dim]`; a view in the layouts that models have."""
    batch, heads, tokens, head_dim = query.shape
    return query.transpose(1, 2).reshape(batch * tokens, heads, head_dim)


def _format_of(key: torch.Tensor) -> str:
    formats = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if key.dtype not in formats:
        raise TypeError(f"narrowkv's attention needs a model in bf16 or fp16, got {key.dtype}: pass dtype=")
    return formats[key.dtype]


def _as_slots(x: torch.Tensor) -> torch.Tensor:
    """Keys or values `[batch, heads, keys, head_dim]` as slots `[slots, heads, head_dim]`, without a copy.

    Key t of row b is slot `b * (stride of rows / stride of keys) + t`; slots between rows are never read.
    """
    batch, heads, keys, head_dim = x.shape
    row, head, key, last = x.stride()
    if last != 1 or (batch > 1 and row % key):
        raise ValueError(
            "narrowkv's attention needs key and value with a contiguous last dimension and rows that are "
            f"whole keys apart, got strides {x.stride()}"
        )
    slots = (batch - 1) * (row // key) + keys
    return x.as_strided((slots, heads, head_dim), (key, head, 1))


def _dense_step(key: torch.Tensor, padding: torch.Tensor | None, batch: int, tokens: int) -> Step:
    """The step of a call whose keys are all in `key`, a page for each."""
    keys, device = key.shape[2], key.device
    first = torch.arange(batch, device=device) * (key.stride(0) // key.stride(2) if batch > 1 else 0)
    counts = torch.full((batch,), keys, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    if padding is not None:
        seen = padding[:, -keys:].bool().cumsum(1)
        first, counts = first + (seen == 0).sum(1), seen[:, -1].to(torch.int32)
    ids = (first[:, None] + torch.arange(keys, device=device)).to(torch.int32)
    if padding is not None and tokens > 1:
        starts, _ = interleaved_starts(padding[:, -tokens:])
        ids, rows = ids.new_zeros(2 * batch + 1, keys), ids
        counts, lens = counts.new_zeros(2 * batch + 1), counts
        ids[1::2], counts[1::2] = rows, lens
    table = PageTable.from_block_table(ids, counts, page_size=1)
    return Step(tokens, ids, table, None if tokens == 1 else starts)

"""The attention function that transformers calls in every layer."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_decode import paged_decode
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
        if (
            layer.calibration is not None
            and (softcap or s_aux is not None)
            and layer.calibration.shifts_logits
        ):
            raise ValueError(
                "a calibration with a K offset shifts logits, which a soft cap or attention sinks would see: "
                "calibrate this model with offset=False"
            )
        layer.store(padding)
        rows, cache = layer.owner.rows, layer.cache
        step = rows.step
        assert cache is not None
        assert step is not None
        if step.starts is None:
            q = _calibrated(layer, query.squeeze(2))
            o = paged_decode(q, cache, step.table, plan=layer.decode_plan(q), **options)
            return _output(layer, o).unsqueeze(1), None
        q = _calibrated(layer, _rows_of(query))
        plan = rows.prefill_plan(q, cache, step)
        o = batch_prefill(q, cache, step.table, step.starts, plan=plan, **options)
        return _output(layer, o).view(batch, tokens, -1, head_dim), None
    step = _dense_step(key, padding, batch, tokens)
    cache = PagedKVCache.from_tensors(
        *(_as_slots(x) for x in (key, value)), format=_format_of(key), layout="tokens"
    )
    if step.starts is None:
        o = paged_decode(query.squeeze(2), cache, step.table, **options)
        return o.unsqueeze(1), None
    o = batch_prefill(_rows_of(query), cache, step.table, step.starts, **options)
    return o.view(batch, tokens, -1, head_dim), None


def _calibrated(layer: NarrowLayer, q: torch.Tensor) -> torch.Tensor:
    """Queries `[tokens, num_qo_heads, head_dim]` for the layer's stored keys."""
    return q if layer.calibration is None else layer.calibration.queries(q)


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

"""Attention to keys and values where they are: of a call without a cache, or in transformers' caches."""

from __future__ import annotations

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import batch_prefill
from narrowkv.engines.transformers.rows import interleaved_starts
from narrowkv.engines.transformers.window import between_padding
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch.tracing import traceable, traces


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_tokens: torch.Tensor | None,
    query_tokens: torch.Tensor | None,
    *,
    sm_scale: float | None,
    logits_soft_cap: float,
    window_left: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the newest tokens of each row to all of them.

    Args:
        query: `[batch, num_qo_heads, tokens, head_dim]`, bf16 or fp16.
        key, value: `[batch, num_kv_heads, keys, head_dim]`; values may have fewer channels than keys.
        key_tokens, query_tokens: `[batch, keys]` and `[batch, tokens]`, 0 for padding; None for none. A row's
            last key that is a token belongs to its last query that is one.
        sm_scale, logits_soft_cap, window_left, sinks: as for `batch_prefill`.
        out, lse: where to write the output and the log-sum-exp.

    Returns:
        `[batch * tokens, num_qo_heads, value's channels]`.
    """
    (batch, _, tokens, head_dim), keys, device = query.shape, key.shape[2], key.device
    starts: torch.Tensor | None = None
    if key_tokens is None or query_tokens is None:
        places = torch.arange(keys, dtype=torch.int32, device=device).expand(batch, keys)
        lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
        if tokens > 1:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    else:
        places, lens = _places(key_tokens.bool())
        if tokens > 1:
            starts, _ = interleaved_starts(query_tokens)
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    options = scale, logits_soft_cap, window_left
    if out is None:
        return attend_places(query, key, value, places, lens, starts, sinks, *options)
    return _attend_places(query, key, value, places, lens, starts, sinks, *options, out=out, lse=lse)


def _places(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens of each row are, in order, and how many there are.

    Args:
        tokens: `[batch, keys]` bool.

    Returns:
        `[batch, keys]` int32, of which the first ones count, and `[batch]` int32.
    """
    batch, keys = tokens.shape
    seen = tokens.cumsum(1)
    places = torch.arange(keys, dtype=torch.int32, device=tokens.device).expand(batch, keys)
    # Padding goes to a column of its own.
    into = torch.where(tokens, seen - 1, keys)
    found = places.new_zeros(batch, keys + 1).scatter(1, into, places)
    return found[:, :keys], seen[:, -1].to(torch.int32)


def _attend_places(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor, lens: torch.Tensor,
    starts: torch.Tensor | None, sinks: torch.Tensor | None, sm_scale: float, logits_soft_cap: float,
    window_left: int, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of each row to the keys at its first `lens` places, a page for each key."""
    batch, device = query.shape[0], key.device
    k, v, row = _as_slots(key, value)
    cache = PagedKVCache.from_tensors(k, v, format=_format_of(key), layout="tokens")
    ids = places + (torch.arange(batch, dtype=torch.int32, device=device) * row)[:, None]
    if starts is not None and starts.shape[0] == 2 * batch + 2:
        ids, lens = between_padding(ids), between_padding(lens)
    table = PageTable.from_block_table(ids, lens, page_size=1)
    o: torch.Tensor
    if starts is None:
        o = paged_decode(
            query.squeeze(2), cache, table, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
            window_left=window_left, sinks=sinks, out=out, lse=lse,
        )  # type: ignore[assignment]  # fmt: skip
    else:
        o = batch_prefill(
            rows_of(query), cache, table, starts, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
            window_left=window_left, sinks=sinks, out=out, lse=lse,
        )  # type: ignore[assignment]  # fmt: skip
    return o


@traceable
def attend_places(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor, lens: torch.Tensor,
    starts: torch.Tensor | None, sinks: torch.Tensor | None, sm_scale: float, logits_soft_cap: float,
    window_left: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of each row to the keys at its first `lens` places; an operator where torch traces.

    Strides of key and value are looked at when it runs: a compiler may lay them out otherwise than the trace.

    Args:
        query: `[batch, num_qo_heads, tokens, head_dim]`.
        key, value: `[batch, num_kv_heads, keys, head_dim]`; values may have fewer channels than keys.
        places: `[batch, keys]` int32.
        lens: `[batch]` int32.
        starts: where sequences of queries begin, of `interleaved_starts` or one for each row; None for a
            query of each row.
        sinks: `[num_qo_heads]`, or None.
        sm_scale, logits_soft_cap, window_left: as for `batch_prefill`.

    Returns:
        `[batch * tokens, num_qo_heads, value's channels]`.
    """
    return _attend_places(
        query, key, value, places, lens, starts, sinks, sm_scale, logits_soft_cap, window_left
    )


@torch.library.custom_op(
    "narrowkv::attend_places",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor places, Tensor lens, Tensor? starts, "
    "Tensor? sinks, float sm_scale, float logits_soft_cap, int window_left) -> Tensor",
)
def _places_op(*args: object) -> torch.Tensor:
    return _attend_places(*args)  # type: ignore[arg-type]


@_places_op.register_fake
def _places_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object
) -> torch.Tensor:  # fmt: skip
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch * tokens, heads, value.shape[-1])


@traces("attend_places")
def _traced_places(*args: object) -> torch.Tensor:
    return torch.ops.narrowkv.attend_places(*args)  # type: ignore[no-any-return]


def rows_of(query: torch.Tensor) -> torch.Tensor:
    """Queries as `[batch * tokens, num_qo_heads, head_dim]`; a view in the layouts that models have."""
    batch, heads, tokens, head_dim = query.shape
    return query.transpose(1, 2).reshape(batch * tokens, heads, head_dim)


def _format_of(key: torch.Tensor) -> str:
    formats = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if key.dtype not in formats:
        raise TypeError(f"narrowkv's attention needs a model in bf16 or fp16, got {key.dtype}: pass dtype=")
    return formats[key.dtype]


def _as_slots(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values `[batch, heads, keys, head_dim]` as slots `[slots, heads, head_dim]`.

    Key t of row b is slot `b * slots of a row + t`; slots between rows are never read. Nothing is copied,
    unless keys and values lie in different ways, or rows are not whole keys apart; of contiguous keys, only
    the values are.

    Returns:
        Both, and the slots of a row.
    """
    apart = {_slots_of_a_row(x) for x in (key, value)}
    if len(apart) > 1 and key.is_contiguous():
        value = value.contiguous()
    elif len(apart) > 1 or None in apart:
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    row = _slots_of_a_row(key)
    assert row is not None
    k, v = (
        x.as_strided(((x.shape[0] - 1) * row + x.shape[2], x.shape[1], x.shape[3]), (step, head, 1))
        for x in (key, value)
        for _, head, step, _ in (x.stride(),)
    )
    return k, v, row


def _slots_of_a_row(x: torch.Tensor) -> int | None:
    """How many keys a row of `[batch, heads, keys, head_dim]` is after the row before, or None."""
    row, _, step, last = x.stride()
    if x.shape[0] == 1:
        return 0 if last == 1 else None
    return row // step if last == 1 and step and row % step == 0 else None

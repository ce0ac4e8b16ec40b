"""`torch.ops.narrowkv.paged_decode` and `.merge_states`: what torch.compile, export and fake tensors see."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_decode.api import paged_decode
from narrowkv.attn_decode.merging import merge_states
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.torch_ops import CACHE_SCHEMA, cache_from, cache_options, cache_tensors
from narrowkv.runtime.launch.tracing import (
    OPTIONS_SCHEMA,
    as_bytes,
    call_attention,
    plan_of,
    register_attention,
    spell,
    spelled,
    traces,
)

_INPUTS = (
    "Tensor q, "
    + CACHE_SCHEMA.format(a="", b="", c="", d="")
    + ", Tensor page_ids, Tensor? kv_indptr, Tensor? kv_last_page_len, Tensor? seq_lens, Tensor? key_ranges, "
    + "Tensor? tree_mask, Tensor? q_descale, Tensor? sinks, "
    + OPTIONS_SCHEMA
)

_STATES = f"Tensor o, Tensor lse, Tensor? sinks, {OPTIONS_SCHEMA}"


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None, key_offset: torch.Tensor | None, key_balance: torch.Tensor | None,
    page_ids: torch.Tensor, kv_indptr: torch.Tensor | None,
    kv_last_page_len: torch.Tensor | None, seq_lens: torch.Tensor | None, key_ranges: torch.Tensor | None,
    tree_mask: torch.Tensor | None, q_descale: torch.Tensor | None, sinks: torch.Tensor | None,
    *options: Any, **outputs: Any,
) -> Any:  # fmt: skip
    given = spelled(*options)
    cache = cache_from((k, v, k_descale, v_descale, key_offset, key_balance), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), kv_indptr, kv_last_page_len, seq_lens,
        given.pop("before_append"), key_ranges, tree_mask,
    )  # fmt: skip
    number, given["plan"] = given.pop("q_number"), plan_of(given.pop("plan"))
    return paged_decode(
        q.view(given.pop("q_dtype")), cache, table, sinks=sinks,
        q_descale=number if q_descale is None else q_descale, **given, **outputs,
    )  # fmt: skip


register_attention("paged_decode", _INPUTS, _decode)


@traces("paged_decode")
def traced_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    *,
    q_descale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    plan: DecodePlan | None = None,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_decode` through its operators, which check the arguments when they run.

    A plan goes as its handle: it must live where the traced call runs.
    """
    on_device = q_descale if isinstance(q_descale, torch.Tensor) else None
    spec = spell(
        q_dtype=q.dtype,
        q_number=1.0 if on_device is not None else q_descale,
        plan=None if plan is None else plan.handle,
        kind=page_table.kind,
        page_size=page_table.page_size,
        before_append=page_table.before_append,
        out_dtype=out_dtype,
        **cache_options(cache),
        **options,
    )
    inputs = (
        as_bytes(q), *cache_tensors(cache), page_table.page_ids, page_table.kv_indptr,
        page_table.kv_last_page_len, page_table.seq_lens, page_table.key_ranges, page_table.tree_mask,
        on_device, sinks, *spec,
    )  # fmt: skip
    ops = torch.ops.narrowkv
    return call_attention(
        ops.paged_decode, ops.paged_decode_out, q, inputs, out=out, lse=lse, return_lse=return_lse,
        out_dtype=out_dtype,
    )  # fmt: skip


def _merge(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, *options: Any, **outputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return merge_states(o, lse, sinks=sinks, **spelled(*options), **outputs)


@torch.library.custom_op("narrowkv::merge_states", mutates_args=(), schema=f"({_STATES}) -> (Tensor, Tensor)")
def _merge_op(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _merge(*args)


@_merge_op.register_fake
def _merge_fake(o: torch.Tensor, lse: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = spelled(*rest[-3:])["out_dtype"] or o.dtype
    return o.new_empty(o.shape[1:], dtype=dtype), lse.new_empty(lse.shape[1:])


@torch.library.custom_op(
    "narrowkv::merge_states_out",
    mutates_args=("out", "lse_out"),
    schema=f"({_STATES}, Tensor(a!) out, Tensor(b!) lse_out) -> ()",
)
def _merge_out_op(*args: Any) -> None:
    *inputs, out, lse_out = args
    _merge(*inputs, out=out, lse_out=lse_out)


@_merge_out_op.register_fake
def _merge_out_fake(*args: object) -> None:
    """Writes into its outputs, and returns nothing."""


@traces("merge_states")
def traced_merge(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    lse_base: str = "e",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` through its operators, which check the arguments when they run."""
    inputs = (o, lse, sinks, *spell(lse_base=lse_base, out_dtype=out_dtype))
    if out is None and lse_out is None:
        merged: tuple[torch.Tensor, torch.Tensor] = torch.ops.narrowkv.merge_states(*inputs)
        return merged
    if out is None:
        out = o.new_empty(o.shape[1:], dtype=out_dtype or o.dtype)
    if lse_out is None:
        lse_out = lse.new_empty(lse.shape[1:])
    torch.ops.narrowkv.merge_states_out(*inputs, out, lse_out)
    return out, lse_out

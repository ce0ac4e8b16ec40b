"""`torch.ops.narrowkv.sparse_*`: sparse attention as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowkv.paged_cache import PageTable
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
from narrowkv.sparse_fp8.api import sparse_decode, sparse_prefill, sparse_prefill_fp8
from narrowkv.sparse_fp8.latent import latent_decode
from narrowkv.sparse_fp8.layouts import HEAD_DIM
from narrowkv.sparse_fp8.operation import SparsePlan
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

_ROWS = "Tensor{0} {1}, Tensor? {1}_rope, Tensor? {1}_scale"
_SOURCE = _ROWS + ", Tensor? {1}_indptr, Tensor? {1}_indices"
_INPUTS = (
    f"{_ROWS.format('', 'q')}, {_SOURCE.format('?', 'prefix')}, {_SOURCE.format('?', 'extend')}, "
    f"Tensor? attn_sink, {OPTIONS_SCHEMA}"
)
_Parts = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_NUM_TENSORS = 14


def _rows_parts(rows: torch.Tensor | DSV4Rows | None) -> _Parts:
    """The tensors of rows as operators take them."""
    if not isinstance(rows, DSV4Rows):
        return rows, None, None
    scale = rows.scale
    return as_bytes(rows.data), rows.rope, None if scale is None else as_bytes(scale)


def _rows_options(name: str, rows: torch.Tensor | DSV4Rows | None) -> dict[str, object]:
    """The attributes of rows that are no tensors, for `spell`."""
    if not isinstance(rows, DSV4Rows):
        return {f"{name}_layout": None}
    return {
        f"{name}_layout": rows.layout,
        f"{name}_dtype": rows.data.dtype,
        f"{name}_scale_dtype": None if rows.scale is None else rows.scale.dtype,
        f"{name}_page_size": rows.page_size,
        f"{name}_scale_group": rows.scale_group,
        f"{name}_format": rows.format,
        f"{name}_negative_zero_free": rows.negative_zero_free,
    }


def _rows_from(name: str, parts: _Parts, options: dict[str, Any]) -> Any:
    """The rows of `_rows_parts` and `_rows_options`; takes its own options out of `options`."""
    layout = options.pop(f"{name}_layout")
    data, rope, scale = parts
    if layout is None or data is None:
        return data
    data = data.view(options.pop(f"{name}_dtype"))
    scale_dtype = options.pop(f"{name}_scale_dtype")
    names = ("page_size", "scale_group", "format", "negative_zero_free")
    return DSV4Rows(
        layout, data, rope, scale if scale is None else scale.view(scale_dtype),
        **{each: options.pop(f"{name}_{each}") for each in names},
    )  # fmt: skip


def _tensors(
    q: torch.Tensor | DSV4Rows, prefix: KVSource | None, extend: KVSource | None, sink: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    found: list[torch.Tensor | None] = [*_rows_parts(q)]
    for source in (prefix, extend):
        if source is None:
            found += [None] * 5
        else:
            found += [*_rows_parts(source.rows), source.indptr, source.indices]
    return (*found, sink)


def _call(operation: Callable[..., Any], tensors: Any, options: Any, **outputs: Any) -> Any:
    given = spelled(*options)
    q = _rows_from("q", tensors[:3], given)
    sources = []
    for name, at in (("prefix", 3), ("extend", 8)):
        rows = _rows_from(name, tensors[at : at + 3], given)
        sources.append(None if rows is None else KVSource(rows, *tensors[at + 3 : at + 5]))
    given["plan"] = plan_of(given.pop("plan"))
    return operation(q, *sources, attn_sink=tensors[13], **given, **outputs)


def _shape(tensors: Any, page_size: int | None, num_qo_heads: int | None) -> tuple[Any, Any, torch.dtype]:
    """Tokens, heads and dtype of a result; `page_size` is None for a 16-bit query."""
    q = tensors[0]
    if page_size is None:
        return q.shape[0], q.shape[1], q.dtype
    tokens = (tensors[6] if tensors[6] is not None else tensors[11]).shape[0] - 1
    heads = q.shape[0] * page_size // tokens if num_qo_heads is None else num_qo_heads
    return tokens, heads, torch.bfloat16


def _register(name: str, operation: Callable[..., Any]) -> None:
    """Registers the operators of an operation, and sends its traced calls to them."""

    @torch.library.custom_op(f"narrowkv::{name}", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = _call(operation, args[:_NUM_TENSORS], args[_NUM_TENSORS:], return_lse=True)
        return o, lse

    @run.register_fake
    def fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = spelled(*args[_NUM_TENSORS:])
        tokens, heads, dtype = _shape(args, given.get("q_page_size"), given.get("num_qo_heads"))
        o = args[0].new_empty((tokens, heads, HEAD_DIM), dtype=dtype)
        return o, args[0].new_empty((tokens, heads), dtype=torch.float32)

    @torch.library.custom_op(
        f"narrowkv::{name}_out",
        mutates_args=("out", "lse"),
        schema=f"({_INPUTS}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    )
    def run_out(*args: Any) -> None:
        *inputs, out, lse = args
        _call(
            operation, inputs[:_NUM_TENSORS], inputs[_NUM_TENSORS:], out=out, lse=lse,
            return_lse=lse is not None,
        )  # fmt: skip

    @run_out.register_fake
    def fake_out(*args: object) -> None:
        """Writes into its outputs, and returns nothing."""

    functional, into = getattr(torch.ops.narrowkv, name), getattr(torch.ops.narrowkv, f"{name}_out")

    @traces(name)
    def traced(
        q: torch.Tensor | DSV4Rows,
        prefix: KVSource | None,
        extend: KVSource | None = None,
        *,
        attn_sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        num_qo_heads: int | None = None,
        plan: SparsePlan | None = None,
        **options: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The operation through its operators, which check the arguments when they run."""
        spec = spell(
            plan=None if plan is None else plan.handle,
            **_rows_options("q", q),
            **_rows_options("prefix", None if prefix is None else prefix.rows),
            **_rows_options("extend", None if extend is None else extend.rows),
            **({} if num_qo_heads is None else {"num_qo_heads": num_qo_heads}),
            **options,
        )
        tensors = _tensors(q, prefix, extend, attn_sink)
        inputs = (*tensors, *spec)
        # A plan says itself whether there is a log-sum-exp.
        writes = return_lse if plan is None else plan.writes_lse
        if out is None and lse is None and (plan is None or writes):
            o, sums = functional(*inputs)
            return (o, sums) if writes else o
        page_size = q.page_size if isinstance(q, DSV4Rows) else None
        tokens, heads, dtype = _shape(tensors, page_size, num_qo_heads)
        first = tensors[0]
        assert first is not None
        if out is None:
            out = first.new_empty((tokens, heads, HEAD_DIM), dtype=dtype)
        if lse is None and writes:
            lse = first.new_empty((tokens, heads), dtype=torch.float32)
        into(*inputs, out, lse)
        return (out, lse) if return_lse and lse is not None else out


for _operation in (sparse_prefill, sparse_prefill_fp8, sparse_decode):
    _register(_operation.__name__, _operation)


_LATENT_INPUTS = (
    f"Tensor q, {_ROWS.format('', 'rows')}, Tensor page_ids, Tensor? kv_indptr, Tensor? kv_last_page_len, "
    f"Tensor? seq_lens, Tensor? sinks, {OPTIONS_SCHEMA}"
)


def _latent(
    q: torch.Tensor, data: torch.Tensor, rope: torch.Tensor | None, scale: torch.Tensor | None,
    page_ids: torch.Tensor, kv_indptr: torch.Tensor | None, kv_last_page_len: torch.Tensor | None,
    seq_lens: torch.Tensor | None, sinks: torch.Tensor | None, *options: Any, **outputs: Any,
) -> Any:  # fmt: skip
    given = spelled(*options)
    rows = _rows_from("rows", (data, rope, scale), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), kv_indptr, kv_last_page_len, seq_lens,
        given.pop("before_append"),
    )  # fmt: skip
    given["plan"] = plan_of(given.pop("plan"))
    del given["out_dtype"]
    return latent_decode(q, rows, table, sinks=sinks, **given, **outputs)


register_attention("latent_decode", _LATENT_INPUTS, _latent, columns=HEAD_DIM)


@traces("latent_decode")
def traced_latent(
    q: torch.Tensor,
    rows: torch.Tensor | DSV4Rows,
    page_table: PageTable,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    plan: SparsePlan | None = None,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`latent_decode` through its operators, which check the arguments when they run."""
    spec = spell(
        plan=None if plan is None else plan.handle,
        kind=page_table.kind,
        page_size=page_table.page_size,
        before_append=page_table.before_append,
        out_dtype=None,
        **_rows_options("rows", rows),
        **options,
    )
    inputs = (
        q, *_rows_parts(rows), page_table.page_ids, page_table.kv_indptr, page_table.kv_last_page_len,
        page_table.seq_lens, sinks, *spec,
    )  # fmt: skip
    if plan is not None:
        return_lse = plan.writes_lse  # it says itself
        if out is None and not return_lse:
            out = q.new_empty((*q.shape[:2], HEAD_DIM))
    ops = torch.ops.narrowkv
    return call_attention(
        ops.latent_decode, ops.latent_decode_out, q, inputs, out=out, lse=lse, return_lse=return_lse,
        out_dtype=None, columns=HEAD_DIM,
    )  # fmt: skip

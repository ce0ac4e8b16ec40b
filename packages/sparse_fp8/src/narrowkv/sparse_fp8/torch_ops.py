"""`torch.ops.narrowkv.sparse_*`: sparse attention as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from narrowkv.paged_cache import PageTable
from narrowkv.runtime.launch.tracing import Results, Tensors, as_bytes, register, traces
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
    "Tensor? attn_sink"
)
_Parts = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


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


def _call(operation: Callable[..., Any], *args: Any, **outputs: Any) -> Any:
    tensors, given = args[:-1], args[-1]
    q = _rows_from("q", tensors[:3], given)
    sources = []
    for name, at in (("prefix", 3), ("extend", 8)):
        rows = _rows_from(name, tensors[at : at + 3], given)
        sources.append(None if rows is None else KVSource(rows, *tensors[at + 3 : at + 5]))
    return operation(q, *sources, attn_sink=tensors[13], **given, **outputs)


def _results(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    """Shapes and dtypes of a result; there is no `q_page_size` for a 16-bit query."""
    q, prefix_indptr, extend_indptr = tensors[0], tensors[6], tensors[11]
    assert q is not None
    tokens, heads, dtype = q.shape[0], q.shape[1], q.dtype
    if options.get("q_page_size") is not None:
        indptr = extend_indptr if prefix_indptr is None else prefix_indptr
        assert indptr is not None
        tokens, dtype = indptr.shape[0] - 1, torch.bfloat16
        heads = options.get("num_qo_heads") or q.shape[0] * options["q_page_size"] // tokens
    return ((tokens, heads, HEAD_DIM), dtype), ((tokens, heads), torch.float32)


def _register(name: str, operation: Callable[..., Any]) -> None:
    """Registers the operators of an operation, and sends its traced calls to them."""
    dispatch = register(name, _INPUTS, partial(_call, operation), _results)

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
    ) -> Any:
        """The operation through its operators, which check the arguments when they run."""
        spelled = {
            "plan": plan,
            **_rows_options("q", q),
            **_rows_options("prefix", None if prefix is None else prefix.rows),
            **_rows_options("extend", None if extend is None else extend.rows),
            **({} if num_qo_heads is None else {"num_qo_heads": num_qo_heads}),
            **options,
        }
        # A plan says itself whether there is a log-sum-exp.
        writes = return_lse if plan is None else plan.writes_lse
        return dispatch(
            _tensors(q, prefix, extend, attn_sink), spelled, out, lse, return_lse=writes,
            allocates=plan is None or writes,
        )  # fmt: skip


for _operation in (sparse_prefill, sparse_prefill_fp8, sparse_decode):
    _register(_operation.__name__, _operation)


_LATENT_INPUTS = (
    f"Tensor q, {_ROWS.format('', 'rows')}, Tensor page_ids, Tensor? kv_indptr, Tensor? kv_last_page_len, "
    "Tensor? seq_lens, Tensor? sinks"
)


def _latent(*args: Any, **outputs: Any) -> Any:
    q, data, rope, scale, page_ids, kv_indptr, kv_last_page_len, seq_lens, sinks, given = args
    rows = _rows_from("rows", (data, rope, scale), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), kv_indptr, kv_last_page_len, seq_lens,
        given.pop("before_append"),
    )  # fmt: skip
    return latent_decode(q, rows, table, sinks=sinks, **given, **outputs)


def _latent_results(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    q = tensors[0]
    assert q is not None
    return ((*q.shape[:2], HEAD_DIM), q.dtype), (q.shape[:2], torch.float32)


_latent_operators = register("latent_decode", _LATENT_INPUTS, _latent, _latent_results)


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
) -> Any:
    """`latent_decode` through its operators, which check the arguments when they run."""
    spelled = {
        "plan": plan,
        "kind": page_table.kind,
        "page_size": page_table.page_size,
        "before_append": page_table.before_append,
        **_rows_options("rows", rows),
        **options,
    }
    tensors = (
        q, *_rows_parts(rows), page_table.page_ids, page_table.kv_indptr, page_table.kv_last_page_len,
        page_table.seq_lens, sinks,
    )  # fmt: skip
    # A plan says itself whether there is a log-sum-exp.
    writes = return_lse if plan is None else plan.writes_lse
    return _latent_operators(
        tensors, spelled, out, lse, return_lse=writes, allocates=plan is None or writes
    )  # fmt: skip

"""`torch.ops.narrowkv.batch_prefill` and `.prefill_append`: what torch's compilers and fake tensors see."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_prefill.api import batch_prefill, prefill_append
from narrowkv.attn_prefill.arguments import APPEND, PREFILL
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.paged_cache.torch_ops import (
    CACHE_SCHEMA,
    cache_from,
    cache_options,
    cache_tensors,
    rope_from,
    rope_tensors,
)
from narrowkv.runtime.launch.tracing import as_bytes, like_query, register, traces

_TABLE = "Tensor page_ids, Tensor? kv_indptr, Tensor? kv_last_page_len, Tensor? seq_lens"
_READ = CACHE_SCHEMA.format(a="", b="", c="", d="")
_WRITTEN = CACHE_SCHEMA.format(a="(a!)", b="(b!)", c="(c!)", d="(d!)")
_PREFILL = (
    f"Tensor q, {_READ}, {_TABLE}, Tensor cu_seqlens_q, Tensor? q_descale, Tensor? sinks, Tensor? out_scale"
)
_APPEND = (
    f"Tensor q, Tensor k_new, Tensor v_new, {_WRITTEN}, Tensor page_ids, Tensor seq_lens, "
    "Tensor cu_seqlens_q, Tensor? cos, Tensor? sin, Tensor? positions, Tensor? sinks, Tensor? out_scale"
)


def _prefill(q: torch.Tensor, *tensors: Any, **outputs: Any) -> Any:
    *cached, page_ids, indptr, last_page_len, seq_lens, starts, q_descale, sinks, out_scale, given = tensors
    cache = cache_from(tuple(cached), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), indptr, last_page_len, seq_lens,
        given.pop("before_append"),
    )  # fmt: skip
    number = given.pop("q_number")
    return batch_prefill(
        q.view(given.pop("q_dtype")), cache, table, starts, sinks=sinks,
        q_descale=number if q_descale is None else q_descale, out_scale=out_scale, **given, **outputs,
    )  # fmt: skip


def _append(q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, *tensors: Any, **outputs: Any) -> Any:
    *cached, page_ids, seq_lens, starts, cos, sin, positions, sinks, out_scale, given = tensors
    cache = cache_from(tuple(cached), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), None, None, seq_lens, given.pop("before_append")
    )
    rope = rope_from((cos, sin, positions), given)
    return prefill_append(
        q, k_new, v_new, cache, table, starts, rope=rope, sinks=sinks, out_scale=out_scale, **given, **outputs
    )


_call_prefill = register("batch_prefill", _PREFILL, _prefill, like_query)
_call_append = register(
    "prefill_append", _APPEND, _append, like_query, written=("k", "v", "k_descale", "v_descale"), aliases="ef"
)


def _table_options(table: PageTable) -> dict[str, object]:
    return {"kind": table.kind, "page_size": table.page_size, "before_append": table.before_append}


@traces("batch_prefill")
def traced_prefill(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    q_descale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    out_scale: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
    **options: object,
) -> Any:
    """`batch_prefill` through its operators, which check the arguments when they run.

    A plan is passed by its handle: it must be alive where the traced call runs.
    """
    PREFILL.check_keywords(options)
    on_device = q_descale if isinstance(q_descale, torch.Tensor) else None
    tensors = (
        as_bytes(q), *cache_tensors(cache), page_table.page_ids, page_table.kv_indptr,
        page_table.kv_last_page_len, page_table.seq_lens, cu_seqlens_q, on_device, sinks,
        out_scale,
    )  # fmt: skip
    spelled = {
        **_table_options(page_table), "out_dtype": out_dtype, "plan": plan, "q_dtype": q.dtype,
        "q_number": 1.0 if on_device is not None else q_descale, **cache_options(cache), **options,
    }  # fmt: skip
    return _call_prefill(tensors, spelled, out, lse, return_lse=return_lse)


@traces("prefill_append")
def traced_append(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    rope: Rope | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    out_scale: torch.Tensor | None = None,
    plan: AppendPlan | None = None,
    **options: object,
) -> Any:
    """`prefill_append` through its operators; see `traced_prefill`."""
    APPEND.check_keywords(name for name in options if name != "fp8_compute")
    tensors = (
        q, k_new, v_new, *cache_tensors(cache), page_table.page_ids, page_table.seq_lens, cu_seqlens_q,
        *rope_tensors(rope), sinks, out_scale,
    )  # fmt: skip
    spelled = {
        **_table_options(page_table), "out_dtype": out_dtype, "plan": plan,
        "rope": None if rope is None else rope.style, **cache_options(cache), **options,
    }  # fmt: skip
    return _call_append(tensors, spelled, out, lse, return_lse=return_lse)

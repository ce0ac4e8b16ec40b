"""`torch.ops.narrowkv.batch_prefill` and `.prefill_append`: what torch's compilers and fake tensors see."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_prefill.api import batch_prefill, prefill_append
from narrowkv.attn_prefill.arguments import check_keywords
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
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

_TABLE = "Tensor page_ids, Tensor? kv_indptr, Tensor? kv_last_page_len, Tensor? seq_lens"
_READ = CACHE_SCHEMA.format(a="", b="", c="", d="")
_WRITTEN = CACHE_SCHEMA.format(a="(a!)", b="(b!)", c="(c!)", d="(d!)")
_PREFILL = (
    f"Tensor q, {_READ}, {_TABLE}, Tensor cu_seqlens_q, Tensor? q_descale, Tensor? sinks, {OPTIONS_SCHEMA}"
)
_APPEND = (
    f"Tensor q, Tensor k_new, Tensor v_new, {_WRITTEN}, Tensor page_ids, Tensor seq_lens, "
    "Tensor cu_seqlens_q, Tensor? cos, Tensor? sin, Tensor? positions, Tensor? sinks, " + OPTIONS_SCHEMA
)


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None, key_offset: torch.Tensor | None, key_balance: torch.Tensor | None,
    page_ids: torch.Tensor, kv_indptr: torch.Tensor | None,
    kv_last_page_len: torch.Tensor | None, seq_lens: torch.Tensor | None, cu_seqlens_q: torch.Tensor,
    q_descale: torch.Tensor | None, sinks: torch.Tensor | None, *options: Any, **outputs: Any,
) -> Any:  # fmt: skip
    given = spelled(*options)
    cache = cache_from((k, v, k_descale, v_descale, key_offset, key_balance), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), kv_indptr, kv_last_page_len, seq_lens,
        given.pop("before_append"),
    )  # fmt: skip
    number, given["plan"] = given.pop("q_number"), plan_of(given.pop("plan"))
    return batch_prefill(
        q.view(given.pop("q_dtype")), cache, table, cu_seqlens_q, sinks=sinks,
        q_descale=number if q_descale is None else q_descale, **given, **outputs,
    )  # fmt: skip


def _append(
    q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    k_descale: torch.Tensor | None, v_descale: torch.Tensor | None, key_offset: torch.Tensor | None,
    key_balance: torch.Tensor | None, page_ids: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    positions: torch.Tensor | None, sinks: torch.Tensor | None, *options: Any, **outputs: Any,
) -> Any:  # fmt: skip
    given = spelled(*options)
    cache = cache_from((k, v, k_descale, v_descale, key_offset, key_balance), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), None, None, seq_lens, given.pop("before_append")
    )
    style, rope = given.pop("rope"), None
    given["plan"] = plan_of(given.pop("plan"))
    if cos is not None and sin is not None and positions is not None:
        rope = Rope(cos, sin, positions, style=style)
    return prefill_append(
        q, k_new, v_new, cache, table, cu_seqlens_q, rope=rope, sinks=sinks, **given, **outputs
    )


register_attention("batch_prefill", _PREFILL, _prefill)
register_attention(
    "prefill_append", _APPEND, _append, written=("k", "v", "k_descale", "v_descale"), aliases="ef"
)


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
    plan: PrefillPlan | None = None,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`batch_prefill` through its operators, which check the arguments when they run.

    A plan is passed by its handle: it must be alive where the traced call runs.
    """
    check_keywords("batch_prefill", options)
    on_device = q_descale if isinstance(q_descale, torch.Tensor) else None
    spec = spell(
        kind=page_table.kind, page_size=page_table.page_size, before_append=page_table.before_append,
        out_dtype=out_dtype, plan=None if plan is None else plan.handle, q_dtype=q.dtype,
        q_number=1.0 if on_device is not None else q_descale,
        **cache_options(cache), **options,
    )  # fmt: skip
    inputs = (
        as_bytes(q), *cache_tensors(cache), page_table.page_ids, page_table.kv_indptr,
        page_table.kv_last_page_len, page_table.seq_lens, cu_seqlens_q, on_device, sinks, *spec,
    )  # fmt: skip
    ops = torch.ops.narrowkv
    return call_attention(
        ops.batch_prefill, ops.batch_prefill_out, q, inputs, out=out, lse=lse, return_lse=return_lse,
        out_dtype=out_dtype,
    )  # fmt: skip


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
    plan: AppendPlan | None = None,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`prefill_append` through its operators; see `traced_prefill`."""
    check_keywords("prefill_append", (name for name in options if name != "fp8_compute"))
    cos, sin, positions = (None, None, None) if rope is None else (rope.cos, rope.sin, rope.positions)
    spec = spell(
        kind=page_table.kind, page_size=page_table.page_size, before_append=page_table.before_append,
        out_dtype=out_dtype, plan=None if plan is None else plan.handle,
        rope=None if rope is None else rope.style, **cache_options(cache), **options,
    )  # fmt: skip
    inputs = (
        q, k_new, v_new, *cache_tensors(cache), page_table.page_ids, page_table.seq_lens, cu_seqlens_q, cos,
        sin, positions, sinks, *spec,
    )  # fmt: skip
    ops = torch.ops.narrowkv
    return call_attention(
        ops.prefill_append, ops.prefill_append_out, q, inputs, out=out, lse=lse, return_lse=return_lse,
        out_dtype=out_dtype,
    )  # fmt: skip

"""`torch.ops.narrowkv.paged_decode` and `.merge_states`: what torch.compile, export and fake tensors see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowkv.attn_decode.api import paged_decode
from narrowkv.attn_decode.merging import merge_states
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.torch_ops import CACHE_SCHEMA, cache_from, cache_options, cache_tensors
from narrowkv.runtime.launch.tracing import Results, Tensors, as_bytes, like_query, register, traces

_INPUTS = (
    "Tensor q, "
    + CACHE_SCHEMA.format(a="", b="", c="", d="")
    + ", Tensor page_ids, Tensor? kv_indptr, Tensor? kv_last_page_len, Tensor? seq_lens, Tensor? key_ranges, "
    + "Tensor? tree_mask, Tensor? q_descale, Tensor? sinks, Tensor? out_scale"
)


def _decode(q: torch.Tensor, *args: Any, **outputs: Any) -> Any:
    *tensors, q_descale, sinks, out_scale, given = args
    *cached, page_ids, indptr, last_page_len, seq_lens, key_ranges, tree = tensors
    cache = cache_from(tuple(cached), given)
    table = PageTable(
        given.pop("kind"), page_ids, given.pop("page_size"), indptr, last_page_len, seq_lens,
        given.pop("before_append"), key_ranges, tree,
    )  # fmt: skip
    number = given.pop("q_number")
    return paged_decode(
        q.view(given.pop("q_dtype")), cache, table, sinks=sinks,
        q_descale=number if q_descale is None else q_descale, out_scale=out_scale, **given, **outputs,
    )  # fmt: skip


_call_decode = register("paged_decode", _INPUTS, _decode, like_query)


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
    out_scale: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    **options: object,
) -> Any:
    """`paged_decode` through its operators, which check the arguments when they run.

    A plan goes as its handle: it must live where the traced call runs.
    """
    on_device = q_descale if isinstance(q_descale, torch.Tensor) else None
    tensors = (
        as_bytes(q), *cache_tensors(cache), page_table.page_ids, page_table.kv_indptr,
        page_table.kv_last_page_len, page_table.seq_lens, page_table.key_ranges, page_table.tree_mask,
        on_device, sinks, out_scale,
    )  # fmt: skip
    spelled = {
        "q_dtype": q.dtype, "q_number": 1.0 if on_device is not None else q_descale, "plan": plan,
        "kind": page_table.kind, "page_size": page_table.page_size,
        "before_append": page_table.before_append, "out_dtype": out_dtype, **cache_options(cache), **options,
    }  # fmt: skip
    return _call_decode(tensors, spelled, out, lse, return_lse=return_lse)


def _merge(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, given: dict[str, Any], **outputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return merge_states(o, lse, sinks=sinks, **given, **outputs)


def _merged(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    o, lse = tensors[:2]
    assert o is not None
    assert lse is not None
    return (o.shape[1:], options["out_dtype"] or o.dtype), (lse.shape[1:], lse.dtype)


_call_merge = register(
    "merge_states", "Tensor o, Tensor lse, Tensor? sinks", _merge, _merged, outputs=("out", "lse_out")
)


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
) -> Any:
    """`merge_states` through its operators, which check the arguments when they run."""
    options = {"lse_base": lse_base, "out_dtype": out_dtype}
    return _call_merge((o, lse, sinks), options, out, lse_out)

"""AITER's tensors as narrowkv's caches and page tables, and the calls that several functions share."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import PrefillPlan, plan_prefill
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import active_target

__all__ = [
    "cache_of",
    "decode_tokens",
    "paged_attention_cache",
    "per_tensor_or_sequence",
    "prefill_plan",
    "ragged_table",
    "refuse",
]

_MAX_PLANS = 4  # prefill plans that are kept, each with its scratch
_plans: OrderedDict[Any, PrefillPlan] = OrderedDict()


def refuse(function: str, call: Any, *names: str) -> None:
    """Refuses arguments that change the result and that narrowkv has not."""
    given = [name for name in names if (value := getattr(call, name)) is not None and value is not False]
    given = [name for name in given if isinstance(getattr(call, name), torch.Tensor) or getattr(call, name)]
    if given:
        raise UnsupportedError(
            f"{function} does not serve {', '.join(given)}: leave it out, or call AITER's own function"
        )


def cache_of(
    k: torch.Tensor, v: torch.Tensor, layout: str, descales: tuple[Any, Any], kind: str | None
) -> PagedKVCache:
    """AITER's tensors as a cache; descales are for FP8 alone."""
    name = _format_of(k)
    given: dict[str, Any] = {}
    if get_format(name).kind == "fp8":
        for side, value in zip(("k", "v"), descales, strict=True):
            tensor = isinstance(value, torch.Tensor)
            given[f"{side}_descale"] = 1.0 if value is None else value
            given[f"{side}_granularity"] = kind if tensor else None
    return PagedKVCache.from_tensors(k, v, format=name, layout=layout, **given)


def _format_of(stored: torch.Tensor) -> str:
    if stored.dtype == torch.uint8:
        return active_target(stored.device).native_fp8 or "fp8_e4m3fn"
    return get_format(stored.dtype).name


def per_tensor_or_sequence(descale: Any) -> Any:
    """A descale `[batch, num_kv_heads]`, or one number of a tensor that only repeats it."""
    if isinstance(descale, torch.Tensor) and descale.dim() == 2 and not any(descale.stride()):
        return descale[0, :1]
    return descale


def ragged_table(
    indptr: torch.Tensor, pages: torch.Tensor, last_page_lens: torch.Tensor | None, cache: PagedKVCache
) -> PageTable:
    """A ragged table; without lengths of last pages every page is full."""
    if last_page_lens is None:
        full = torch.full((1,), cache.page_size, dtype=torch.int32, device=indptr.device)
        last_page_lens = full.expand(indptr.shape[0] - 1)
    return PageTable.from_ragged(indptr, pages, last_page_lens, page_size=cache.page_size)


def paged_attention_cache(call: Any) -> PagedKVCache:
    """The cache of a paged attention call, whose arguments name its dtype and layout.

    Raises:
        ValueError: they are not those of its tensors.
    """
    kinds = {"auto": ("float",), "fp8": ("fp8",), "fp8_e4m3": ("fp8",)}
    found = get_format(_format_of(call.key_cache)).kind
    if found not in kinds.get(call.kv_cache_dtype, ()):
        raise ValueError(
            f"kv_cache_dtype must be 'auto' for a 16-bit cache and 'fp8' for FP8, got "
            f"{call.kv_cache_dtype!r} for {call.key_cache.dtype}"
        )
    if call.kv_cache_layout not in ("HND", "NHD"):
        raise ValueError(f"kv_cache_layout must be 'HND' or 'NHD', got {call.kv_cache_layout!r}")
    layout = "tokens" if call.key_cache.dim() == 3 else call.kv_cache_layout
    return cache_of(call.key_cache, call.value_cache, layout, (call.k_scale, call.v_scale), None)


def decode_tokens(call: Any, cache: PagedKVCache, table: PageTable, **options: Any) -> torch.Tensor:
    """Decode of one token a sequence into the call's `out`, which is returned.

    Raises:
        UnsupportedError: for more query tokens.
    """
    if call.mtp != 1:
        raise UnsupportedError(f"mtp must be 1, got {call.mtp}: call unified_attention for several tokens")
    paged_decode(
        call.query, cache, table, sm_scale=call.scale, out=call.out, logits_soft_cap=call.logits_soft_cap,
        **options,
    )  # fmt: skip
    return call.out  # type: ignore[no-any-return]


def prefill_plan(
    q: torch.Tensor, cache: PagedKVCache, table: PageTable, starts: torch.Tensor, max_q: int, max_k: int
) -> PrefillPlan:
    """A plan of these shapes and bounds; the few that were used last are kept."""
    key = (
        q.shape, q.dtype, q.device, cache.format, cache.num_kv_heads, cache.page_size, cache.k_granularity,
        table.kind, table.page_ids.shape, table.batch_size, max_q, max_k, active_target(q.device).name,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = plan_prefill(q, cache, table, starts, max_q_len=max(max_q, 1), max_seq_len=max(max_k, 1))
        _plans[key] = plan
        if len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    _plans.move_to_end(key)
    return plan

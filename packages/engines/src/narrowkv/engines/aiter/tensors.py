"""AITER's tensors as narrowkv's caches and page tables, and the calls that several functions share."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import PrefillPlan, plan_prefill
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.cache import fp4_scales, kind_of_cache
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.operation import Bounded

__all__ = [
    "cache_of",
    "decode_tokens",
    "fp8_format_of",
    "paged_attention_cache",
    "per_tensor_or_sequence",
    "prefill_plan",
    "ragged_table",
    "refuse",
]

_FP4, _E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
_FP4_SCALES = (torch.uint8, _E8M0, torch.float8_e4m3fn)
_plans: Bounded[PrefillPlan] = Bounded(4)  # each with its scratch


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
    """AITER's tensors as a cache.

    FP8 has descales in fp32. FP4 is `float4_e2m1fn_x2`, or uint8 beside scales in E8M0 (uint8 or
    `float8_e8m0fnu`) or E4M3: `[pages, page_size, num_kv_heads]`, and one more dimension with scales of
    groups of 16 or 32 channels; without pages `[slots, num_kv_heads]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: FP4 in AITER's vectorised layout or with descales of pages.
    """
    stored: list[torch.Tensor] = []
    names: list[str] = []
    given: dict[str, Any] = {}
    for side, tensor, value in zip(("k", "v"), (k, v), descales, strict=True):
        name = _format_of(tensor, value)
        if name == "fp4_e2m1":
            if layout == "vectorised" or kind == "page_head":
                raise UnsupportedError(
                    f"{side} in FP4 must be linear with scales for each token and head: AITER's shuffled "
                    "pages hold codes and scales in the order of gfx1250's matrix instructions"
                )
            tensor, value = tensor.view(torch.uint8), _fp4_scales(side, value, layout)
            given[f"{side}_descale"] = value
        elif get_format(name).kind == "fp8":
            given[f"{side}_descale"] = 1.0 if value is None else value
            given[f"{side}_granularity"] = kind if isinstance(value, torch.Tensor) else None
        stored.append(tensor)
        names.append(name)
    return PagedKVCache.from_tensors(*stored, format=CacheFormat(*names), layout=layout, **given)


def _fp4_scales(side: str, value: Any, layout: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{side}'s descale must be a tensor of scales for FP4, got {type(value).__name__}")
    scales = value.view(torch.uint8) if value.dtype == _E8M0 else value
    return scales.unsqueeze(1) if layout == "tokens" else scales


def fp8_format_of(stored: torch.Tensor) -> str:
    """The format of FP8 storage; uint8 stands for the E4M3 format of the device."""
    if stored.dtype == torch.uint8:
        return active_target(stored.device).native_fp8 or "fp8_e4m3fn"
    return get_format(stored.dtype).name


def _format_of(stored: torch.Tensor, descale: Any) -> str:
    """The format of a cache's tensor: uint8 is FP4 beside scales of 8 bits, else FP8."""
    scales_of_fp4 = isinstance(descale, torch.Tensor) and descale.dtype in _FP4_SCALES
    if stored.dtype == _FP4 or (stored.dtype == torch.uint8 and scales_of_fp4):
        return "fp4_e2m1"
    return fp8_format_of(stored)


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
    kinds = {"auto": "float", "fp8": "fp8", "fp8_e4m3": "fp8", "fp4": "fp4"}
    sides = (call.key_cache, call.k_scale), (call.value_cache, call.v_scale)
    for stored, descale in sides:
        if get_format(_format_of(stored, descale)).kind != kinds.get(call.kv_cache_dtype):
            raise ValueError(
                f"kv_cache_dtype must be 'auto' for a 16-bit cache, 'fp8' for FP8 and 'fp4' for FP4, got "
                f"{call.kv_cache_dtype!r} for {stored.dtype}"
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
        q.shape, q.dtype, q.device, kind_of_cache(cache), *fp4_scales(cache).items(),
        table.kind, table.page_ids.shape, table.batch_size, max_q, max_k, active_target(q.device).name,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        made = plan_prefill(q, cache, table, starts, max_q_len=max(max_q, 1), max_seq_len=max(max_k, 1))
        plan = _plans.keep(key, made)
    return plan

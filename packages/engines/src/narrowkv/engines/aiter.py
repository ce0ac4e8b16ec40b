"""AITER's attention functions, by their names and signatures, over narrowkv's kernels.

They take AITER's tensors as they are: linear caches of one or many tokens a page, vectorised ones with
transposed V, ragged tables and block tables, descales per tensor, per sequence and per page. AITER itself is
imported by `patch` alone. Signatures are those of AITER at e4048607 (August 2026).

Example:
    >>> import narrowkv.engines.aiter as aiter
    >>> o = aiter.mha_batch_prefill_func(
    ...     q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_q, max_k, causal=True
    ... )  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import PrefillPlan, batch_prefill, plan_prefill
from narrowkv.engines.geometry import config_reasons
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import active_target
from narrowkv.sparse_fp8 import KVSource, sparse_prefill

__all__ = [
    "AITER_GQA_RATIOS",
    "mha_batch_prefill_func",
    "pa_sparse_prefill_opus",
    "paged_attention_ragged",
    "paged_attention_v1",
    "patch",
    "supports",
    "unified_attention",
]

# GQA ratios that AITER's paged attention is tuned and tested for; others fail there, some of them silently.
AITER_GQA_RATIOS = (1, 2, 4, 8, 16)
_MAX_PLANS = 4  # prefill plans that are kept, each with its scratch
_plans: OrderedDict[Any, PrefillPlan] = OrderedDict()

_REQUIRED = inspect.Parameter.empty


def _as_aiter(required: str, **defaults: Any) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Gives a function AITER's parameters: the required ones by name, the others with their defaults."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in [*((name, _REQUIRED) for name in required.split()), *defaults.items()]
    ]
    signature = inspect.Signature(parameters)

    def wrap(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(SimpleNamespace(**bound.arguments))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return wrap


@_as_aiter(
    "q k v cu_seqlens_q kv_indptr kv_page_indices max_seqlen_q max_seqlen_k",
    dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False, out=None,
    kv_last_page_lens=None, block_table=None, seqlen_k=None, q_descale=None, k_descale=None, v_descale=None,
    kv_block_descale=None, sink_ptr=None, sink_size=0,
)  # fmt: skip
def mha_batch_prefill_func(call: Any) -> Any:
    """Attention of ragged queries over a paged cache.

    Args:
        call: AITER's arguments. `k` and `v` have five dimensions (vectorised), four (`[pages, page_size,
            num_kv_heads, head_dim]`) or three (a token a page); q is 16-bit over a cache of any dtype, or FP8
            over a cache of its own dtype. `kv_block_descale` is `[pages, num_kv_heads, 2]` fp32.

    Returns:
        `[tokens, num_qo_heads, head_dim]`; with `return_lse` also the log-sum-exp `[num_qo_heads, tokens]`
        fp32, a transposed view.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for ALiBi, dropout, attention weights and sink tokens.
    """
    _refuse("mha_batch_prefill_func", call, "alibi_slopes", "return_attn_probs", "sink_size", "dropout_p")
    layout = {5: "vectorised", 4: "NHD", 3: "tokens"}.get(call.k.dim())
    if layout is None:
        raise ValueError(f"k must have 3, 4 or 5 dimensions, got shape {tuple(call.k.shape)}")
    if call.kv_block_descale is None:
        descales, kind = (call.k_descale, call.v_descale), None
    else:
        descales, kind = call.kv_block_descale.unbind(-1), "page_head"
    cache = _cache(call.k, call.v, layout, descales, kind)
    if call.block_table is not None:
        table = PageTable.from_block_table(call.block_table, call.seqlen_k, page_size=cache.page_size)
    else:
        table = _ragged(call.kv_indptr, call.kv_page_indices, call.kv_last_page_lens, cache)
    left, right = call.window_size[:2]
    result: Any = batch_prefill(
        call.q, cache, table, call.cu_seqlens_q, causal=call.causal, sm_scale=call.softmax_scale,
        q_descale=1.0 if call.q_descale is None else call.q_descale.view(-1)[:1],
        logits_soft_cap=call.logits_soft_cap, window_left=left, window_right=-1 if call.causal else right,
        sinks=call.sink_ptr, out=call.out, return_lse=call.return_lse,
        plan=_plan(call.q, cache, table, call.cu_seqlens_q, call.max_seqlen_q, call.max_seqlen_k),
    )  # fmt: skip
    return (result[0], result[1].t()) if call.return_lse else result


@_as_aiter(
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table "
    "softcap q_descale k_descale v_descale",
    q_scales=None, alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None, shuffled_kv_cache=False,
    skip_reduce=False, backend=None,
)  # fmt: skip
def unified_attention(call: Any) -> torch.Tensor:
    """Causal attention of ragged queries over a cache with a block table, as vLLM calls it.

    Args:
        call: AITER's arguments. `k` and `v` are `[pages, page_size, num_kv_heads, head_dim]`, or vectorised
            with `shuffled_kv_cache`. Descales are per tensor or `[batch, num_kv_heads]`, expanded or not.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for ALiBi, biases, FP4 queries, a quantised output and unmerged splits.
    """
    _refuse("unified_attention", call, "q_scales", "alibi_slopes", "output_scale", "qq_bias", "skip_reduce")
    if not call.causal:
        raise ValueError("unified_attention must be causal, got causal=False: call mha_batch_prefill_func")
    descales = tuple(map(_per_tensor_or_sequence, (call.k_descale, call.v_descale)))
    kinds = {d.dim() for d in descales if isinstance(d, torch.Tensor)}
    kind = "sequence_head" if kinds == {2} else None
    cache = _cache(call.k, call.v, "vectorised" if call.shuffled_kv_cache else "NHD", descales, kind)
    table = PageTable.from_block_table(call.block_table, call.seqused_k, page_size=cache.page_size)
    batch_prefill(
        call.q, cache, table, call.cu_seqlens_q, sm_scale=call.softmax_scale,
        q_descale=1.0 if call.q_descale is None else call.q_descale.view(-1)[:1],
        logits_soft_cap=call.softcap or 0.0, window_left=call.window_size[0], sinks=call.sinks, out=call.out,
        plan=_plan(call.q, cache, table, call.cu_seqlens_q, call.max_seqlen_q, call.max_seqlen_k),
    )  # fmt: skip
    return call.out  # type: ignore[no-any-return]


@_as_aiter(
    "out workspace_buffer query key_cache value_cache scale kv_indptr kv_page_indices kv_last_page_lens "
    "block_size max_num_partitions alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale "
    "v_scale",
    fp8_out_scale=None, partition_size=256, mtp=1, q_scale=None,
)  # fmt: skip
def paged_attention_ragged(call: Any) -> torch.Tensor:
    """Decode over a cache with a ragged page table.

    Args:
        call: AITER's arguments. `key_cache` and `value_cache` are in `kv_cache_layout` "HND" or "NHD", in the
            query's dtype or FP8; a uint8 cache holds the FP8 E4M3 format of the device. `workspace_buffer`
            and the partition sizes are not used.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for ALiBi, an FP8 output, FP8 queries, and more than one query token (`mtp`).
    """
    _refuse("paged_attention_ragged", call, "alibi_slopes", "fp8_out_scale", "q_scale")
    cache = _paged_attention_cache(call)
    table = _ragged(call.kv_indptr, call.kv_page_indices, call.kv_last_page_lens, cache)
    return _decode(call, cache, table)


@_as_aiter(
    "out workspace_buffer query key_cache value_cache scale block_tables cu_query_lens context_lens "
    "max_context_len alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale v_scale",
    fp8_out_scale=None, partition_size=256, mtp=1, q_scale=None, sliding_window=0,
)  # fmt: skip
def paged_attention_v1(call: Any) -> torch.Tensor:
    """Decode over a cache with a block table.

    Args:
        call: AITER's arguments, as for `paged_attention_ragged`. With `cu_query_lens` every query row is
            attended, where AITER leaves out sequences with more than one. A `sliding_window` above 0 is the
            number of keys that are seen, the newest included.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, UnsupportedError: as for `paged_attention_ragged`.
    """
    _refuse("paged_attention_v1", call, "alibi_slopes", "fp8_out_scale", "q_scale")
    cache = _paged_attention_cache(call)
    table = PageTable.from_block_table(call.block_tables, call.context_lens, page_size=cache.page_size)
    window = call.sliding_window - 1 if call.sliding_window > 0 else -1
    if call.cu_query_lens is None:
        return _decode(call, cache, table, window_left=window)
    batch_prefill(
        call.query, cache, table, call.cu_query_lens, sm_scale=call.scale, out=call.out, window_left=window,
        logits_soft_cap=call.logits_soft_cap,
    )  # fmt: skip
    return call.out  # type: ignore[no-any-return]


@_as_aiter(
    "q unified_kv kv_indices_prefix kv_indptr_prefix kv kv_indices_extend kv_indptr_extend attn_sink "
    "softmax_scale",
    out=None, inv_rope_positions=None, inv_rope_freqs=None, out_scale=None,
)  # fmt: skip
def pa_sparse_prefill_opus(call: Any) -> Any:
    """DeepSeek-V4's sparse attention over 16-bit rows of a pool and of this forward.

    Args:
        call: AITER's arguments: `q` `[tokens, num_qo_heads, 512]`, rows `[rows, 512]` in its dtype, a CSR for
            each source, and `attn_sink` `[num_qo_heads]` fp32.

    Returns:
        `[tokens, num_qo_heads, 512]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for a fused inverse rotation and a quantised output.
    """
    _refuse("pa_sparse_prefill_opus", call, "inv_rope_positions", "inv_rope_freqs", "out_scale")
    return sparse_prefill(
        call.q,
        KVSource(call.unified_kv, call.kv_indptr_prefix, call.kv_indices_prefix),
        KVSource(call.kv, call.kv_indptr_extend, call.kv_indices_extend),
        attn_sink=call.attn_sink, sm_scale=call.softmax_scale, out=call.out,
    )  # fmt: skip


def _refuse(function: str, call: Any, *names: str) -> None:
    """Refuses arguments that change the result and that narrowkv has not."""
    given = [name for name in names if (value := getattr(call, name)) is not None and value is not False]
    given = [name for name in given if isinstance(getattr(call, name), torch.Tensor) or getattr(call, name)]
    if given:
        raise UnsupportedError(
            f"{function} does not serve {', '.join(given)}: leave it out, or call AITER's own function"
        )


def _cache(
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


def _per_tensor_or_sequence(descale: Any) -> Any:
    """A descale `[batch, num_kv_heads]`, or one number of a tensor that only repeats it."""
    if isinstance(descale, torch.Tensor) and descale.dim() == 2 and not any(descale.stride()):
        return descale[0, :1]
    return descale


def _ragged(
    indptr: torch.Tensor, pages: torch.Tensor, last_page_lens: torch.Tensor | None, cache: PagedKVCache
) -> PageTable:
    """A ragged table; without lengths of last pages every page is full."""
    if last_page_lens is None:
        full = torch.full((1,), cache.page_size, dtype=torch.int32, device=indptr.device)
        last_page_lens = full.expand(indptr.shape[0] - 1)
    return PageTable.from_ragged(indptr, pages, last_page_lens, page_size=cache.page_size)


def _paged_attention_cache(call: Any) -> PagedKVCache:
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
    return _cache(call.key_cache, call.value_cache, layout, (call.k_scale, call.v_scale), None)


def _decode(call: Any, cache: PagedKVCache, table: PageTable, **options: Any) -> torch.Tensor:
    if call.mtp != 1:
        raise UnsupportedError(f"mtp must be 1, got {call.mtp}: call unified_attention for several tokens")
    paged_decode(
        call.query, cache, table, sm_scale=call.scale, out=call.out, logits_soft_cap=call.logits_soft_cap,
        **options,
    )  # fmt: skip
    return call.out  # type: ignore[no-any-return]


def _plan(
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


def supports(config: Any) -> list[str]:
    """Why these functions cannot serve a model's attention; an empty list is a yes.

    Args:
        config: a model's configuration, with the attributes that transformers gives it.

    Returns:
        Sentences, in no order.
    """
    return list(config_reasons(config))


# Where AITER keeps each function, where it looks it up again, and the arguments that hold queries and keys.
_PLACES = {
    "mha_batch_prefill_func": (("aiter.ops.mha", "aiter"), "q", "k"),
    "unified_attention": (("aiter.ops.triton.attention.unified_attention",), "q", "k"),
    "paged_attention_ragged": (("aiter.ops.attention", "aiter"), "query", "key_cache"),
    "paged_attention_v1": (("aiter.ops.attention", "aiter"), "query", "key_cache"),
}
_announced: set[tuple[str, str]] = set()


def patch(*, everything: bool = False) -> Callable[[], None]:
    """Lets narrowkv stand in for AITER's functions where AITER is known to refuse or to be wrong.

    That is a GQA ratio other than 1, 2, 4, 8 and 16, and 16-bit queries over an FP8 cache in
    `mha_batch_prefill_func`. A warning says so, once for each function and reason. Modules that imported
    AITER's functions before keep them: patch first.

    Args:
        everything: every call goes to narrowkv.

    Returns:
        A function that puts AITER's functions back.

    Raises:
        ImportError: AITER is not installed.
    """
    put_back: list[tuple[Any, str, Any]] = []
    for name, (modules, query, key) in _PLACES.items():
        own = globals()[name]
        for path in modules:
            module = importlib.import_module(path)
            theirs = getattr(module, name, None)
            if theirs is None:
                continue
            put_back.append((module, name, theirs))
            setattr(module, name, _standing_in(name, own, theirs, query, key, everything))

    def undo() -> None:
        for module, name, theirs in put_back:
            setattr(module, name, theirs)

    return undo


def _standing_in(
    name: str, own: Callable[..., Any], theirs: Callable[..., Any], query: str, key: str, everything: bool
) -> Callable[..., Any]:
    signature = inspect.signature(own)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        reason = _known_refusal(name, given[query], given[key], given)
        if reason is None and not everything:
            return theirs(*args, **kwargs)
        reason = reason or "patch(everything=True)"
        if (name, reason) not in _announced:
            _announced.add((name, reason))
            warnings.warn(f"narrowkv stands in for aiter's {name}: {reason}", stacklevel=2)
        return own(*args, **kwargs)

    return call


def _known_refusal(name: str, q: torch.Tensor, k: torch.Tensor, given: dict[str, Any]) -> str | None:
    heads_first = k.dim() == 5 or given.get("kv_cache_layout") == "HND"
    ratio = q.shape[1] // k.shape[1 if heads_first or k.dim() == 3 else 2]
    if ratio not in AITER_GQA_RATIOS:
        return f"a GQA ratio of {ratio}"
    if name == "mha_batch_prefill_func" and q.element_size() == 2 and k.element_size() == 1:
        return "16-bit queries over an FP8 cache"
    return None

"""Makes plans of prefill: from tensors, from shapes, and for calls that were not planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from narrowkv.attn_decode import DecodePlan, DecodeShape, plan_decode
from narrowkv.attn_prefill.arguments import Arguments
from narrowkv.attn_prefill.checks import (
    bounded,
    check_classes,
    check_shape_of_plan,
    check_values,
    prefill_shape,
)
from narrowkv.attn_prefill.memory import key_type
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan
from narrowkv.attn_prefill.settings import SCRATCH_LIMIT_BYTES, widened_per_key
from narrowkv.attn_prefill.tiles import PrefillConfig, PrefillShape
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.cache import CACHE_KINDS, fp4_scales, kind_of_cache
from narrowkv.paged_cache.descales import check_exponent
from narrowkv.paged_cache.storing import store_of
from narrowkv.runtime.errors import check_instance, check_positive_int
from narrowkv.runtime.launch import Workspace, active_target, is_compiled
from narrowkv.runtime.launch.path import executor
from narrowkv.runtime.operation import Bounded
from narrowkv.runtime.targets import Target

_P = TypeVar("_P", bound="PrefillPlan")


def can_pipeline(target: Target, q_dtype: torch.dtype, cache: PagedKVCache) -> bool:
    """Whether `kernels/pipelined.py` serves the call: in Gluon for Hopper, it cannot be interpreted."""
    formats, granularities = (cache.format.k, cache.format.v), (cache.k_granularity, cache.v_granularity)
    return (
        target.name == "sm90"
        and is_compiled(cache.k)
        and cache.v_head_dim == cache.head_dim in (64, 128, 256)
        and not any(widened_per_key(q_dtype, formats, granularities))
        and key_type(q_dtype, cache.format.k) == q_dtype
    )


def plan_prefill(
    q: torch.Tensor | PrefillShape,
    cache: PagedKVCache,
    page_table: PageTable | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    max_kv_tokens: int | None = None,
    kernel: str | None = None,
    num_splits: int | None = None,
    scratch_limit_bytes: int = SCRATCH_LIMIT_BYTES,
    batch_invariant: bool = False,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> PrefillPlan:
    """Plans prefills: checks metadata, chooses the kernel, allocates the workspace.

    Nothing is read from the device unless `validate`. The plan holds for any lengths within its bounds, so a
    captured graph can be replayed with other lengths, and for all calls up to its maxima.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`, of which only the metadata is used; or, before there are
            tensors, a `PrefillShape` of the largest call.
        cache: the cache, or with a `PrefillShape` one like it; one page is enough.
        page_table, cu_seqlens_q: as for `batch_prefill`; None with a `PrefillShape`.
        max_q_len: the most query tokens of one sequence, where known. 1 lets `paged_decode` serve the call.
        max_seq_len: the most keys of one sequence; default the table's capacity.
        max_kv_tokens: the most keys of all sequences together. It bounds the scratch of widened keys, which
            an engine's wide block table would otherwise make large.
        kernel: forces "dense", "fused", "split" or "decode".
        num_splits: forces how many programs share a tile's keys.
        scratch_limit_bytes: the most scratch that the automatic choice may take.
        batch_invariant: choose kernel, tiles and splits by the model alone, so that a sequence's result has
            the same bits alone, in any batch and with any table width. The kernel is "fused" unless it is
            forced to be "dense", and there is one split unless `num_splits` says otherwise: long prompts take
            longer than by the kernel that the shapes would choose.
        workspace: memory that plans share whose calls do not run at the same time, with at least
            `workspace_bytes()`; None allocates what this plan needs.
        validate: also look at the values of cu_seqlens_q, of the table, of descales and at whether the bounds
            above hold, which waits for the device.

    Lengths beyond `max_q_len`, `max_seq_len` or `max_kv_tokens` are refused where they are on the CPU, and
    with `validate`. Elsewhere a call cannot know them: query tokens past `max_q_len` are not written, rows
    that see keys which the scratch lacks are NaN, and all other rows are right.

    Returns:
        A `PrefillPlan` for `batch_prefill(..., plan=plan)` or `plan.run(...)`.

    Raises:
        TypeError, ValueError: for metadata that `batch_prefill` would refuse; a workspace that is too small.
        UnsupportedError: for a forced kernel that cannot serve the call.

    Example:
        >>> plan = plan_prefill(q, cache, table, cu_seqlens_q, max_q_len=512)      # doctest: +SKIP
        >>> o = batch_prefill(q, cache, table, cu_seqlens_q, plan=plan)            # doctest: +SKIP
        >>> shape = PrefillShape(batch=8, num_tokens=512, max_q_len=512, num_qo_heads=8, num_kv_heads=2,
        ...                      head_dim=64, page_size=16, max_seq_len=1024, kv_tokens=8192)
        >>> cache = PagedKVCache.empty(1, 16, 2, 64, format="fp8_e4m3fn")
        >>> plan_prefill(shape, cache).config.kernel
        'dense'
    """
    shape = _shape_of(q, cache, page_table, cu_seqlens_q, appends=False)
    shape = bounded(shape, max_q_len, max_seq_len, max_kv_tokens)
    if validate and page_table is not None and cu_seqlens_q is not None:
        check_values(shape, cache, page_table, cu_seqlens_q)
    plan = plan_without_memory(
        PrefillPlan, shape, cache, kernel=kernel, num_splits=num_splits, limit=scratch_limit_bytes,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if plan.config.kernel == "decode":
        plan = replace(plan, decode=_decode_plan(shape, cache))
    return plan.with_workspace(workspace)


def plan_append(
    q: torch.Tensor | PrefillShape,
    cache: PagedKVCache,
    page_table: PageTable | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    fp8_compute: bool = False,
    exponent: str = "mse",
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    max_kv_tokens: int | None = None,
    kernel: str | None = None,
    num_splits: int | None = None,
    scratch_limit_bytes: int = SCRATCH_LIMIT_BYTES,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> AppendPlan:
    """Plans calls of `prefill_append`: checks metadata, chooses the kernel, allocates the workspace.

    Args:
        q, cache, page_table, cu_seqlens_q: as for `plan_prefill`, the table as for `prefill_append`.
        fp8_compute: multiply queries and old tokens on FP8 matrix units.
        exponent: FP4: how a group's scale is chosen; see `narrowkv.paged_cache.append`.
        max_q_len, max_seq_len, max_kv_tokens: bounds as for `plan_prefill`, new tokens included.
        kernel: forces "append_then_attend" (one launch stores and widens, one attends), "pipelined" (the same
            with Hopper's kernel) or "fused" (one launch that widens old tokens in its loop).
        num_splits: forces how many programs share a tile's keys.
        scratch_limit_bytes: the most scratch that the automatic choice may take.
        workspace: as for `plan_prefill`.
        validate: also look at the values of cu_seqlens_q, of the table and its room for the new tokens, of
            descales and at whether the bounds above hold, which waits for the device.

    Returns:
        An `AppendPlan` for `prefill_append(..., plan=plan)` or `plan.run(...)`.

    Raises:
        TypeError, ValueError: for metadata that `prefill_append` would refuse; a workspace that is too small.
        UnsupportedError: for a forced kernel that cannot serve the call.

    Example:
        >>> plan = plan_append(q, cache, table, cu_seqlens_q)                       # doctest: +SKIP
        >>> o = prefill_append(q, k, v, cache, table, cu_seqlens_q, plan=plan)      # doctest: +SKIP
    """
    shape = _shape_of(q, cache, page_table, cu_seqlens_q, appends=True)
    shape = bounded(shape, max_q_len, max_seq_len, max_kv_tokens)
    check_exponent(exponent, cache.k_descale, cache.v_descale)
    if validate and page_table is not None and cu_seqlens_q is not None:
        check_values(shape, cache, page_table, cu_seqlens_q)
    plan = plan_without_memory(
        AppendPlan, shape, cache, kernel=kernel, num_splits=num_splits, limit=scratch_limit_bytes,
        exponent=exponent, fp8_compute=fp8_compute,
    )  # fmt: skip
    return plan.with_workspace(workspace)


def _shape_of(
    q: torch.Tensor | PrefillShape, cache: PagedKVCache, page_table: PageTable | None,
    cu_seqlens_q: torch.Tensor | None, *, appends: bool,
) -> PrefillShape:  # fmt: skip
    """The largest call's shape, once it is checked."""
    if not isinstance(q, PrefillShape):
        if page_table is None or cu_seqlens_q is None:
            check_classes(Arguments(q, cache, cast(Any, page_table), cast(Any, cu_seqlens_q)))
            raise AssertionError("one of them is None")
        return prefill_shape(q, cache, page_table, cu_seqlens_q, appends=appends)
    if page_table is not None or cu_seqlens_q is not None:
        raise TypeError("page_table and cu_seqlens_q must be None with a PrefillShape: it says the maxima")
    check_shape_of_plan(q, check_instance("cache", cache, PagedKVCache), appends=appends)
    return q


def plan_without_memory(
    kind: type[_P], shape: PrefillShape, cache: PagedKVCache, *, kernel: str | None = None,
    num_splits: int | None = None, limit: int | None = None, batch_invariant: bool = False,
    exponent: str | None = None, fp8_compute: bool = False,
) -> _P:  # fmt: skip
    """A plan without a workspace and without a plan of `paged_decode`; without maxima if `limit` is None."""
    if num_splits is not None:
        check_positive_int("num_splits", num_splits)
    if exponent is not None:
        store_of(cache)
    target = active_target(cache.k.device)
    plan = kind(
        target=target, device=cache.k.device, shape=shape, k_format=cache.format.k, v_format=cache.format.v,
        k_granularity=cache.k_granularity, v_granularity=cache.v_granularity, config=PrefillConfig("", ""),
        pipelines=can_pipeline(target, shape.q_dtype, cache), exponent=exponent, kernel=kernel,
        num_splits=num_splits, batch_invariant=batch_invariant, fp8_compute=fp8_compute,
    )  # fmt: skip
    if limit is not None:
        plan = replace(plan, scratch_fits=plan.scratch_bytes(shape) <= limit)
    return replace(plan, config=plan.choose(shape))


def _decode_plan(shape: PrefillShape, cache: PagedKVCache) -> DecodePlan:
    decode = DecodeShape(
        batch=shape.batch, q_len=1, num_qo_heads=shape.num_qo_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, page_size=shape.page_size, capacity=shape.max_seq_len, q_dtype=shape.q_dtype,
        v_head_dim=shape.v_head_dim,
    )  # fmt: skip
    return plan_decode(decode, cache.format, device=cache.k.device, **fp4_scales(cache))


_plans: Bounded[PrefillPlan] = Bounded(64)


def plan_for_call(
    kind: type[_P], q: torch.Tensor, cache: PagedKVCache, page_table: PageTable, cu_seqlens_q: torch.Tensor,
    flag: bool,
) -> _P:  # fmt: skip
    """The plan of unplanned calls of a model, of any size; each call allocates its own memory.

    kind: `PrefillPlan` or `AppendPlan`; flag: `batch_invariant` of the first, `fp8_compute` of the second.
    """
    cache_kind = CACHE_KINDS.get(id(cache))
    if cache_kind is None or type(q) is not torch.Tensor:
        check_classes(Arguments(q, cache, page_table, cu_seqlens_q))
        cache_kind = kind_of_cache(cache)
    running = executor()
    key = (
        cache_kind, kind, flag, q.shape[1:], q.dtype, q.get_device(),
        None if running is None else (running.target.name, type(running)),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        shape = prefill_shape(q, cache, page_table, cu_seqlens_q, appends=kind.appends)
        if kind is PrefillPlan:
            plan = plan_without_memory(PrefillPlan, shape, cache, batch_invariant=flag)
        else:
            plan = plan_without_memory(AppendPlan, shape, cache, exponent="mse", fp8_compute=flag)
        _plans.keep(key, plan)
    return cast(_P, plan)

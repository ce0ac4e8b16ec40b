"""Makes plans of decode: from tensors, from shapes, and for calls that were not planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from narrowkv.attn_decode.checks import (
    check_classes,
    check_decode_shape,
    check_query_format,
    check_values,
    decode_shape,
)
from narrowkv.attn_decode.config import DecodeShape, choose_config
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.binding import BOUND_TABLES, bind_table
from narrowkv.paged_cache.cache import CACHE_KINDS, kind_of_cache
from narrowkv.paged_cache.descales import check_fp4_scales
from narrowkv.paged_cache.layouts import check_head_dims
from narrowkv.runtime import launch
from narrowkv.runtime.errors import check_choice, check_positive_int
from narrowkv.runtime.launch import active_target, executor
from narrowkv.runtime.operation import Bounded


def plan_decode(
    q: torch.Tensor | DecodeShape,
    cache: PagedKVCache | CacheFormat | str,
    page_table: PageTable | None = None,
    *,
    device: torch.device | str | None = None,
    scale_group: int | None = None,
    scale_format: str | None = None,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
    tokens_per_split: int | None = None,
    split: str | None = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
    workspace: launch.Workspace | None = None,
    validate: bool = False,
) -> DecodePlan:
    """Plans decode steps: checks the metadata, chooses the configuration, allocates the workspace.

    Nothing is read from the device. One plan serves every layer of a model, every batch up to its maximum
    and any lengths, so that a captured graph can be replayed with other lengths and page tables.

    Args:
        q: `[batch * q_len, num_qo_heads, head_dim]`, bf16, fp16 or FP8, of which only the metadata is used;
            or, before there are tensors, a `DecodeShape` whose `batch` and `capacity` are the maxima.
        cache: the paged cache; with a `DecodeShape` its format.
        page_table: the page table; None with a `DecodeShape`.
        device: with a `DecodeShape`: where the tensors will be.
        scale_group: with a `DecodeShape`: FP4's channels per scale, 16 or 32, None for one scale per position
            and head.
        scale_format: with a `DecodeShape`: how FP4's scales are stored, "e8m0" (also None) or "e4m3".
        max_batch: sequences of a call, at most; default q's.
        max_seq_len: tokens of a sequence, at most; default what a row of the page table holds. Only speed
            depends on it: longer sequences are served, too.
        tokens_per_split: a fixed split size in tokens, rounded up to key tiles.
        split: forces "none", "even" or "per_sequence".
        kernel: forces "native" (scaled matrix instructions on FP4 keys, Q as a sum of E4M3 terms: gfx950),
            "fp8" (FP8 queries over FP4, which becomes FP8 by a table: gfx942 and gfx950) or "decode" (the
            cache widened to 16 bits: everywhere). None is "decode".
        batch_invariant: the result of a sequence has the same bits alone and in any batch, with any width of
            the page table. Tiles and splits then depend on the sequence alone, which costs speed where the
            batch would have asked for others: short contexts, and few long sequences.
        workspace: memory that plans share whose calls do not run at the same time, with at least
            `workspace_bytes()`; None allocates what this plan needs.
        validate: look at lengths, page ids and descales, which waits for the device.

    Returns:
        A `DecodePlan` for `paged_decode(..., plan=plan)` or `plan.run(...)`.

    Raises:
        TypeError, ValueError: for metadata that `paged_decode` would refuse; a workspace that is too small.
        UnsupportedError: for formats that the kernel does not read, or a forced kernel that the target lacks.

    Example:
        >>> plan = plan_decode(q, cache, table)                 # doctest: +SKIP
        >>> o = paged_decode(q, cache, table, plan=plan)        # doctest: +SKIP
        >>> shape = DecodeShape(batch=4, q_len=1, num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16,
        ...                     capacity=1024)
        >>> plan_decode(shape, "fp8_e4m3fn", device="cpu").config.kernel
        'decode'
    """
    plan = _plan(
        q, cache, page_table, device=device, scale_group=scale_group, scale_format=scale_format,
        max_batch=max_batch, max_seq_len=max_seq_len, tokens_per_split=tokens_per_split, split=split,
        kernel=kernel, batch_invariant=batch_invariant,
    )  # fmt: skip
    if validate and isinstance(cache, PagedKVCache) and page_table is not None:
        check_values(plan.shape.capacity, cache, page_table)
    return plan if workspace is None and not plan.workspace_bytes() else plan.with_workspace(workspace)


def _plan(
    q: torch.Tensor | DecodeShape, cache: PagedKVCache | CacheFormat | str, page_table: PageTable | None,
    *, device: torch.device | str | None = None, scale_group: int | None = None,
    scale_format: str | None = None, max_batch: int | None = None,
    max_seq_len: int | None = None, tokens_per_split: int | None = None, split: str | None = None,
    kernel: str | None = None, batch_invariant: bool = False,
) -> DecodePlan:  # fmt: skip
    """A plan without its workspace."""
    if isinstance(q, DecodeShape):
        if page_table is not None or isinstance(cache, PagedKVCache) or device is None:
            raise TypeError(
                "plan_decode with a DecodeShape needs a cache format and device=..., and neither cache nor "
                "page_table"
            )
        # Tensors made on "cuda" are on the current GPU, whose index they name.
        shape, formats, device = q, CacheFormat.parse(cache), torch.empty(0, device=device).device
        check_decode_shape(shape)
        check_head_dims(shape.head_dim, shape.v_dim, formats)
        check_query_format(shape.q_dtype, formats)
        check_fp4_scales(scale_group, scale_format or "e8m0", formats, shape.head_dim)
    else:
        if page_table is None or not isinstance(cache, PagedKVCache):
            check_classes(q, cache, page_table)
            raise TypeError("page_table must be a PageTable, got None")
        if (device, scale_group, scale_format) != (None, None, None):
            raise ValueError(
                "device, scale_group and scale_format are those of the tensors: pass them with a DecodeShape "
                "only"
            )
        shape, formats, device = decode_shape(q, cache, page_table), cache.format, q.device
        scale_group = max(side.group for side in cache.sides())
    for name, value in (
        ("max_batch", max_batch), ("max_seq_len", max_seq_len), ("tokens_per_split", tokens_per_split)
    ):  # fmt: skip
        if value is not None:
            check_positive_int(name, value)
    if split is not None:
        check_choice("split", split, ("none", "even", "per_sequence"))
        if batch_invariant or tokens_per_split:
            raise ValueError(f"split must be None with batch_invariant or tokens_per_split, got {split!r}")
    if max_batch is not None and max_batch < shape.batch:
        raise ValueError(f"max_batch must be at least q's batch {shape.batch}, got {max_batch}")
    shape = replace(shape, batch=max_batch or shape.batch, capacity=max_seq_len or shape.capacity)
    target = active_target(device)
    options: dict[str, Any] = {
        "scale_group": scale_group or 0,
        "kernel": kernel,
        "split": split,
        "tokens_per_split": tokens_per_split or 0,
        "batch_invariant": batch_invariant,
    }
    config = choose_config(target, shape, formats.k, formats.v, **options)
    return DecodePlan(
        target=target, device=device, shape=shape, k_format=formats.k, v_format=formats.v, config=config,
        **options,
    )  # fmt: skip


_plans: Bounded[DecodePlan] = Bounded(256)


def plan_for_call(
    q: torch.Tensor, cache: PagedKVCache, page_table: PageTable, batch_invariant: bool
) -> DecodePlan:
    """A plan of this call's shapes, made once; its calls allocate their partial results.

    Contexts are rounded up to a power of two, so that a growing page table does not ask for a plan each step.
    """
    table, kind = BOUND_TABLES.get(id(page_table)), CACHE_KINDS.get(id(cache))
    if table is None or kind is None or type(q) is not torch.Tensor:
        check_classes(q, cache, page_table)
        table = table or bind_table(page_table)
        kind = kind_of_cache(cache)
    capacity = 1 << max(table.max_pages * page_table.page_size - 1, 0).bit_length()
    running = executor()
    key = (
        kind, table.number, table.batch, capacity, q.shape, q.dtype, q.get_device(), batch_invariant,
        None if running is None else running.target.name,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(q, cache, page_table, max_seq_len=capacity, batch_invariant=batch_invariant)
        _plans.keep(key, plan)
    return plan

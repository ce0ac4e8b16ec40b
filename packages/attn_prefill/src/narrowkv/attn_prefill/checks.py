"""Checks of a call's options and, where asked for, of the values of its metadata, before any launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from narrowkv.attn_decode.checks import QUERY_DTYPES
from narrowkv.attn_prefill.arguments import Arguments
from narrowkv.attn_prefill.tiles import PrefillShape
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.checks import check_new_tokens, check_table, tensors_of
from narrowkv.paged_cache.descales import PER_TOKEN_GRANULARITIES
from narrowkv.paged_cache.layouts import HEAD_DIMS
from narrowkv.runtime.errors import (
    check_descale_tensor,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
    check_tensor,
)

APPEND_DTYPES = (torch.bfloat16, torch.float16)  # of queries and new tokens


def inputs_of(given: Arguments) -> dict[str, Any]:
    """What a call reads, by the names of messages."""
    return {
        "q": given.q, **tensors_of(given.cache, given.page_table), "cu_seqlens_q": given.cu_seqlens_q,
        "sinks": given.sinks, "q_descale": given.q_descale, "k_new": given.k_new, "v_new": given.v_new,
        "out_scale": given.out_scale, **({} if given.rope is None else given.rope.tensors()),
    }  # fmt: skip


def check_chunk(given: Arguments, inputs: dict[str, Any], *, validate: bool | None) -> None:
    """Refuses new tokens that do not belong to the queries or cannot be stored, and inputs in the cache.

    inputs: what the call reads, as `inputs_of` names it.
    """
    q, k_new, v_new, cache, rope = given.q, given.k_new, given.v_new, given.cache, given.rope
    if k_new is None or v_new is None:
        return
    # Of the cache's own tensors those of the transform alone are not written.
    read = {name: x for name, x in inputs.items() if not name.startswith("cache.")}
    check_new_tokens(cache, k_new, v_new, rope, read, dtypes=(q.dtype,), tokens=q.shape[0], validate=validate)


def _descales(cache: PagedKVCache) -> Iterator[tuple[str, Any, str]]:
    """Name, value and granularity of both descales."""
    yield "k_descale", cache.k_descale, cache.k_granularity
    yield "v_descale", cache.v_descale, cache.v_granularity


def check_values(
    shape: PrefillShape, cache: PagedKVCache, page_table: PageTable, cu_seqlens_q: torch.Tensor
) -> None:
    """Looks at the values of a call's metadata, which waits for the device.

    Args:
        shape: the call's number of query tokens, and the bounds that its plan was made with.
        cache: its descales of used tokens.
        page_table: lengths and page ids; of a table before an append also its room for the new tokens.
        cu_seqlens_q: where each sequence's query tokens begin.

    Raises:
        ValueError: naming the first fault found, what was expected and what came.
    """
    starts = cu_seqlens_q.cpu().long()
    q_lens = starts.diff()
    if int(starts[0]) != 0 or int(starts[-1]) != shape.num_tokens or bool((q_lens < 0).any()):
        raise ValueError(
            f"cu_seqlens_q must rise from 0 to the number of query tokens {shape.num_tokens}, "
            f"got {starts.tolist()[:16]}"
        )
    page_table.check_values(cache.num_pages)
    lens = page_table.seq_lens_tensor().cpu().long()
    if page_table.before_append:
        lens = lens + q_lens
        _check_room(page_table, lens, q_lens)
        full = torch.where(q_lens > 0, lens, 0).to(page_table.page_ids.device, torch.int32)
        replace(page_table, seq_lens=full, before_append=False).check_values(cache.num_pages)
    if q_lens.numel():
        _check_bound("max_q_len", shape.max_q_len, int(q_lens.max()))
        _check_bound("max_seq_len", shape.max_seq_len, int(lens.max()))
        _check_bound("max_kv_tokens", shape.kv_tokens, int(lens.sum()))
    for name, descale, kind in _descales(cache):
        if isinstance(descale, torch.Tensor) and descale.dtype == torch.float32:
            for values in _used_descales(descale, kind, page_table):
                check_descale_tensor(name, values, validate=True)


def check_bounds(shape: PrefillShape, page_table: PageTable, cu_seqlens_q: torch.Tensor) -> None:
    """Refuses lengths beyond a plan's maxima, for tensors on the CPU, which are read without a wait.

    Wrong lengths are what kernels take them for: none is below 0, or beyond the tokens of q or of the table.

    Args:
        shape: the number of query tokens, and the plan's maxima.

    Raises:
        ValueError: naming the maximum, what it must be and what it is.
    """
    q_lens = cu_seqlens_q.long().diff().clamp(0, shape.num_tokens)
    lens, capacity = page_table.seq_lens_tensor().long(), page_table.capacity
    lens = (lens + q_lens if page_table.before_append else lens).clamp(0, capacity)
    if not len(lens):
        return
    total = min(int(lens.sum()), capacity * (1 if page_table.kind == "ragged" else len(lens)))
    _check_bound("max_q_len", shape.max_q_len, int(q_lens.max()))
    _check_bound("max_seq_len", shape.max_seq_len, int(lens.max()))
    _check_bound("max_kv_tokens", shape.kv_tokens, total)


def _check_room(page_table: PageTable, lens: torch.Tensor, q_lens: torch.Tensor) -> None:
    beyond = (lens > page_table.capacity) & (q_lens > 0)
    if bool(beyond.any()):
        seq = int(beyond.nonzero()[0])
        raise ValueError(
            f"page_table must have pages for the new tokens: sequence {seq} comes to {int(lens[seq])} "
            f"tokens, got pages for {page_table.capacity}; extend the table before the append"
        )


def _check_bound(name: str, bound: int, value: int) -> None:
    if value > bound:
        raise ValueError(f"{name} must be at least {value} for these lengths, got {bound}: make a new plan")


def _used_descales(descale: torch.Tensor, kind: str, page_table: PageTable) -> Iterator[torch.Tensor]:
    """The values of a descale that a call reads: those of tokens that the table names, or all."""
    if kind not in ("page_head", *PER_TOKEN_GRANULARITIES):
        yield descale
        return
    for seq in range(page_table.batch_size):
        pages, seq_len = page_table.pages_of(seq)
        used = descale[pages]
        yield used if kind == "page_head" else used.flatten(0, 1)[:seq_len]


def prefill_shape(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    appends: bool,
) -> PrefillShape:
    """Checks what a call's metadata can tell without reading the device, and returns its shape.

    An append needs 16-bit queries and a block table with the lengths before it.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_dtype("q", q, APPEND_DTYPES if appends else QUERY_DTYPES)
    check_table(page_table, cache, before_append=appends)
    check_shape("q", q, ("tokens", "num_qo_heads", "head_dim"))
    check_last_dim_contiguous("q", q)
    num_tokens, num_qo_heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {HEAD_DIMS}, got {head_dim}")
    if head_dim != cache.head_dim:
        raise ValueError(f"q must have the cache's head_dim {cache.head_dim}, got {head_dim}")
    if num_qo_heads % cache.num_kv_heads or num_qo_heads == 0:
        raise ValueError(
            f"q must have a multiple of the cache's {cache.num_kv_heads} KV heads, "
            f"got num_qo_heads={num_qo_heads}"
        )
    batch = page_table.batch_size
    check_index_vector("cu_seqlens_q", cu_seqlens_q, batch + 1)
    check_same_device(q=q, k=cache.k, v=cache.v, page_table=page_table.page_ids, cu_seqlens_q=cu_seqlens_q)
    if batch == 0 and num_tokens:
        raise ValueError(f"q must have no tokens for an empty batch, got {num_tokens}")
    capacity = page_table.capacity
    return PrefillShape(
        batch=batch,
        num_tokens=num_tokens,
        max_q_len=num_tokens,
        num_qo_heads=num_qo_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        max_seq_len=capacity,
        kv_tokens=capacity if page_table.kind == "ragged" else batch * capacity,
        q_dtype=q.dtype,
        v_head_dim=cache.v_head_dim,
    )


def bounded(
    shape: PrefillShape, max_q_len: int | None, max_seq_len: int | None, max_kv_tokens: int | None
) -> PrefillShape:
    """The shape with the caller's tighter bounds."""
    bounds = {"max_q_len": max_q_len, "max_seq_len": max_seq_len, "kv_tokens": max_kv_tokens}
    for name, value in bounds.items():
        if value is not None:
            check_positive_int("max_kv_tokens" if name == "kv_tokens" else name, value)
            shape = replace(shape, **{name: min(getattr(shape, name), value)})
    return replace(shape, kv_tokens=min(shape.kv_tokens, shape.batch * shape.max_seq_len))


def check_classes(given: Arguments, *, appends: bool = False) -> None:
    """Refuses arguments of wrong classes."""
    check_instance("cache", given.cache, PagedKVCache)
    check_instance("page_table", given.page_table, PageTable)
    needed = ("q", "cu_seqlens_q", *(("k_new", "v_new") if appends else ()))
    for name in (*needed, "out", "lse", "sinks"):
        value = getattr(given, name)
        if value is not None or name in needed:
            check_tensor(name, value)


def check_shape_of_plan(shape: PrefillShape, cache: PagedKVCache, *, appends: bool) -> None:
    """Checks the maxima of a plan that is made without tensors, and that the cache goes with them.

    Raises:
        TypeError, ValueError: naming the field, what was expected and what came.
    """
    for name in ("batch", "num_tokens", "max_q_len", "num_qo_heads", "max_seq_len", "kv_tokens"):
        check_positive_int(name, getattr(shape, name))
    known = APPEND_DTYPES if appends else QUERY_DTYPES
    if shape.q_dtype not in known:
        raise ValueError(f"q_dtype must be one of {known}, got {shape.q_dtype}")
    wanted = (cache.num_kv_heads, cache.head_dim, cache.v_head_dim, cache.page_size)
    if (sizes := (shape.num_kv_heads, shape.head_dim, shape.v_dim, shape.page_size)) != wanted:
        raise ValueError(
            f"shape must have the cache's (num_kv_heads, head_dim, v_head_dim, page_size) {wanted}, "
            f"got {sizes}"
        )
    if shape.head_dim not in HEAD_DIMS:
        raise ValueError(f"shape must have head_dim in {HEAD_DIMS}, got {shape.head_dim}")
    if shape.num_qo_heads % shape.num_kv_heads:
        raise ValueError(
            f"shape must have a multiple of {shape.num_kv_heads} KV heads, "
            f"got num_qo_heads={shape.num_qo_heads}"
        )

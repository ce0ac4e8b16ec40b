"""Whether a cache and a page table belong together, and whether new tokens can be stored in a cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.descales import PER_TOKEN_GRANULARITIES, check_exponent
from narrowkv.paged_cache.key_transform import transform_tensors
from narrowkv.paged_cache.options import StoreArguments
from narrowkv.paged_cache.page_table import PageTable
from narrowkv.paged_cache.rope import FLOATS, Rope, check_rope
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
    has_memory,
)
from narrowkv.runtime.scales import check_scales


def check_one_width(cache: PagedKVCache, operation: str) -> None:
    """Refuses a cache whose V is narrower than K, for an operation that takes one width.

    Raises:
        UnsupportedError: naming the operation and both widths.
    """
    if cache.v_head_dim != cache.head_dim:
        raise UnsupportedError(
            f"{operation} needs K and V of one width, got head_dim {cache.head_dim} and v_head_dim "
            f"{cache.v_head_dim}"
        )


def check_table(
    page_table: PageTable, cache: PagedKVCache, *, before_append: bool = False, row_masks: bool = False
) -> None:
    """Checks that a page table and a cache belong together, and to the operation.

    Args:
        page_table: the table.
        cache: the cache; descales per sequence must be for the table's sequences.
        before_append: whether the operation appends the call's tokens itself.
        row_masks: whether the operation takes a table with `key_ranges` or `tree_mask`.

    Raises:
        TypeError: not a `PageTable`, not a `PagedKVCache`.
        ValueError: another page size, another device, another number of sequences in a descale; or the
            table's lengths include the call's tokens and should not, or the other way round; or it has
            `key_ranges` or `tree_mask`, which the operation does not take.
    """
    check_instance("cache", cache, PagedKVCache)
    check_instance("page_table", page_table, PageTable)
    if page_table.page_size != cache.page_size:
        hint = layout_hint(cache, page_size=page_table.page_size)
        raise ValueError(
            f"page_table must have the cache's page_size {cache.page_size}, got {page_table.page_size}{hint}"
        )
    check_same_device(k=cache.k, page_table=page_table.page_ids)
    for name, descale, kind in (
        ("k_descale", cache.k_descale, cache.k_granularity),
        ("v_descale", cache.v_descale, cache.v_granularity),
    ):
        if kind == "sequence_head" and isinstance(descale, torch.Tensor):
            check_shape(name, descale, (page_table.batch_size, cache.num_kv_heads))
    for name, mask in (("key_ranges", page_table.key_ranges), ("tree_mask", page_table.tree_mask)):
        if mask is not None and not row_masks:
            raise ValueError(
                f"page_table must have no {name}, which only paged_decode takes: pass the table without it"
            )
    if page_table.before_append == before_append:
        return
    if before_append:
        raise ValueError(
            "page_table must hold the lengths before the append, and pages for the new tokens too: make it "
            "with PagePool.table_before(seqs, new_tokens) after extend, or with "
            "PageTable.from_block_table(block_table, cached_lens=...); got lengths that include all tokens"
        )
    raise ValueError(
        "page_table must hold lengths that include the tokens of this call: make it with "
        "PagePool.page_table(seqs) or PageTable.from_block_table(block_table, seq_lens); got lengths before "
        "an append (cached_lens), which only prefill_append takes"
    )


def tensors_of(cache: PagedKVCache, page_table: PageTable) -> dict[str, Any]:
    """What attention reads of a cache and a page table, by the names of messages; some are no tensors."""
    table, transform = page_table, cache.key_transform
    return {
        "cache.k": cache.k, "cache.v": cache.v, "cache.k_descale": cache.k_descale,
        "cache.v_descale": cache.v_descale, **({} if transform is None else transform_tensors(transform)),
        "page ids": table.page_ids, "seq_lens": table.seq_lens, "kv_indptr": table.kv_indptr,
        "kv_last_page_len": table.kv_last_page_len, "key_ranges": table.key_ranges,
        "tree_mask": table.tree_mask,
    }  # fmt: skip


def layout_hint(cache: PagedKVCache, *, page_size: int | None = None, num_kv_heads: int | None = None) -> str:
    """The end of a message about sizes that a cache does not have: whether its layout may be mistaken.

    Args:
        cache: the cache.
        page_size, num_kv_heads: the sizes that another argument has.

    Returns:
        "" unless the sizes would fit if the cache's page size and heads changed places.
    """
    swapped = cache.layout in ("NHD", "HND", "concat") and cache.page_size != cache.num_kv_heads
    if (
        not swapped
        or page_size not in (None, cache.num_kv_heads)
        or num_kv_heads not in (None, cache.page_size)
    ):
        return ""
    other = "NHD" if cache.layout == "HND" else "HND"
    return (
        f"; the cache was made with layout {cache.layout!r}, page_size {cache.page_size} and "
        f"{cache.num_kv_heads} KV heads: are its tensors in layout {other!r}?"
    )


def check_stores(cache: PagedKVCache) -> None:
    """Refuses a cache that cannot be appended to.

    Raises:
        TypeError: not a `PagedKVCache`.
        ValueError: its descales are shared by tokens that are stored at different times.
    """
    check_instance("cache", cache, PagedKVCache)
    for name, kind in (("k_descale", cache.k_granularity), ("v_descale", cache.v_granularity)):
        if kind in ("page_head", "sequence_head"):
            raise ValueError(
                f"{name} must be per tensor, per head or per token-head to append, got {kind!r}: "
                "a new token cannot change the descale of tokens that are stored already"
            )
    check_no_grad(k=cache.k, v=cache.v)


def written_tensors(cache: PagedKVCache) -> dict[str, torch.Tensor]:
    """The tensors that an append writes: K, V and descales per token."""
    written = {"cache.k": cache.k, "cache.v": cache.v}
    for name, value, kind in (
        ("cache.k_descale", cache.k_descale, cache.k_granularity),
        ("cache.v_descale", cache.v_descale, cache.v_granularity),
    ):
        if isinstance(value, torch.Tensor) and kind in PER_TOKEN_GRANULARITIES:
            written[name] = value
    return written


def check_new_tokens(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    rope: Rope | None,
    read: Mapping[str, object],
    *,
    dtypes: Collection[torch.dtype] = FLOATS,
    tokens: int | None = None,
    validate: bool | None,
) -> None:
    """Refuses new tokens that cannot be stored in the cache, before anything is written.

    Args:
        cache: one that `check_stores` has found to be appended to.
        k_new, v_new, rope: as for `append`.
        read: what else the call reads, by the names of messages; what is no tensor is skipped.
        dtypes, tokens: what the new tokens must have; None takes the number of tokens of `k_new`.
        validate: whether to look at the values of positions too, which waits for the device.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    for name, new, head_dim in (("k_new", k_new, cache.head_dim), ("v_new", v_new, cache.v_head_dim)):
        check_dtype(name, new, dtypes)
        if new.dim() != 3 or new.shape[1:] != (cache.num_kv_heads, head_dim):
            hint = layout_hint(cache, num_kv_heads=new.shape[1]) if new.dim() == 3 else ""
            raise ValueError(
                f"{name} must have shape [tokens, {cache.num_kv_heads}, {head_dim}] for this cache, "
                f"got {list(new.shape)}{hint}"
            )
        tokens = k_new.shape[0] if tokens is None else tokens
        check_shape(name, new, (tokens, cache.num_kv_heads, head_dim))
        check_last_dim_contiguous(name, new)
    check_same_device(k=cache.k, k_new=k_new, v_new=v_new)
    check_no_grad(k=cache.k, v=cache.v, k_new=k_new, v_new=v_new)
    inputs: dict[str, object] = {"k_new": k_new, "v_new": v_new}
    if rope is not None:
        check_rope(rope, cache.head_dim, k_new)
        inputs |= rope.tensors()
    inputs |= read
    for name, tensor in written_tensors(cache).items():
        check_no_overlap(name, tensor, **inputs)
    if validate and rope is not None and k_new.shape[0] and has_memory(rope.positions):
        low, high = int(rope.positions.min()), int(rope.positions.max())
        if low < 0 or high >= rope.cos.shape[0]:
            raise ValueError(f"rope.positions must lie in [0, {rope.cos.shape[0]}), got {low}..{high}")


def check_append(given: StoreArguments) -> None:
    """Refuses what `append` cannot do, before anything is written."""
    cache, k_new, slots, k_offset = given.cache, given.k_new, given.slot_mapping, given.k_offset
    read = {"slot_mapping": slots, "k_offset": k_offset, **transform_tensors(cache.key_transform)}
    check_new_tokens(cache, k_new, given.v_new, given.rope, read, validate=given.validate)
    check_exponent(given.exponent, cache.k_descale, cache.v_descale)
    if given.q is not None:
        _check_queries(given, given.q)
    check_index_vector("slot_mapping", slots, k_new.shape[0])
    check_same_device(k=cache.k, slot_mapping=slots, k_offset=k_offset)
    if k_offset is not None:
        if cache.key_transform is not None:
            raise ValueError(
                "k_offset must be None for a cache with a key_transform: put it in as "
                "dataclasses.replace(cache, key_transform=KeyTransform(offset=k_offset, ...))"
            )
        check_dtype("k_offset", k_offset, (torch.float32,))
        check_shape("k_offset", k_offset, (cache.num_kv_heads, cache.head_dim))
        check_no_grad(k_offset=k_offset)
        if not k_offset.is_contiguous():
            raise ValueError(f"k_offset must be contiguous, got strides {k_offset.stride()}")
    if given.validate and has_memory(slots):
        _check_slots(slots, cache.num_pages * cache.page_size)
    check_scales(cache.static_scales(), given.validate)


def _check_queries(given: StoreArguments, q: torch.Tensor) -> None:
    """Refuses queries that cannot be rotated in place."""
    cache, rope = given.cache, given.rope
    if rope is None:
        raise ValueError("q must come with rope, which rotates it: leave q out, or pass rope=Rope(...)")
    check_dtype("q", q, FLOATS)
    check_shape("q", q, (given.k_new.shape[0], "num_qo_heads", cache.head_dim))
    check_last_dim_contiguous("q", q)
    check_same_device(k=cache.k, q=q)
    check_no_grad(q=q)
    read = {**rope.tensors(), "slot_mapping": given.slot_mapping, "k_offset": given.k_offset}
    check_no_overlap("q", q, **written_tensors(cache), **read)
    for name, new in (("k_new", given.k_new), ("v_new", given.v_new)):
        if q.numel() and has_memory(q) and has_memory(new) and rows_meet(q, new):
            raise ValueError(f"q must not share memory with {name}, got overlapping tensors")


def rows_meet(q: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether queries and new tokens share memory; those of one packed tensor of Q, K and V do not."""
    (a, a_step, a_row), (b, b_step, b_row) = _rows_of(q), _rows_of(new)
    last = q.shape[0] - 1
    if a + last * a_step + a_row <= b or b + last * b_step + b_row <= a:
        return False
    behind = (b - a) % max(a_step, 1)
    return a_step != b_step or behind < a_row or behind + b_row > a_step


def _rows_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Where tokens begin, the bytes from a token to the next, and those of one."""
    size, (token, head, _) = x.element_size(), x.stride()
    return x.data_ptr(), token * size, ((x.shape[1] - 1) * head + x.shape[2]) * size


def _check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    used = slot_mapping[slot_mapping != -1].cpu()
    if bool(((used < 0) | (used >= num_slots)).any()):
        raise ValueError(f"slot_mapping must hold -1 or slots in [0, {num_slots}), got {used.tolist()[:16]}")
    if len(set(used.tolist())) != used.numel():
        raise ValueError(f"slot_mapping must not hold a slot twice, got {used.sort().values.tolist()[:16]}")

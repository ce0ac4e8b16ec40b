"""Whether a cache and a page table belong together."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.key_transform import transform_tensors
from narrowkv.paged_cache.page_table import PageTable
from narrowkv.runtime.errors import UnsupportedError, check_instance, check_same_device, check_shape


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
    table = page_table
    return {
        "cache.k": cache.k, "cache.v": cache.v, "cache.k_descale": cache.k_descale,
        "cache.v_descale": cache.v_descale, **transform_tensors(cache.key_transform),
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

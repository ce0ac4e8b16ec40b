"""Compiles all kernels that a model's decode, append and prefill can reach, before a server starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from narrowkv.attn_decode import DecodeShape, paged_decode, plan_decode
from narrowkv.attn_prefill.api import batch_prefill, prefill_append
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.paged_cache.kinds import fp4_scales
from narrowkv.runtime.errors import check_instance, check_positive_int
from narrowkv.runtime.launch import KernelSpec, RecordExecutor, Warmup, recording, warmup

__all__ = ["model_cache", "model_kernels", "record_model", "warmup_model"]

_MOST_TOKENS = 16384
_SPAN_32_BITS = 2**31


def model_cache(
    formats: str, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, device: str
) -> PagedKVCache:
    """A cache whose kernels are those of one with `num_pages` pages, in little more than 2 GiB.

    Kernels know of the pages whether offsets fit 32 bits and whether their number is a multiple of 16.
    """
    for_one = PagedKVCache.empty(1, page_size, num_kv_heads, head_dim, format=formats, device=device)
    per_page = max(for_one.k.nbytes, for_one.v.nbytes, 1)
    least = min(for_one.k.nbytes, for_one.v.nbytes)
    enough = -(-_SPAN_32_BITS // max(least, 1)) + 1
    if num_pages * per_page > _SPAN_32_BITS:
        num_pages = min(num_pages, enough + (num_pages - enough) % 16)
    made = PagedKVCache.empty(num_pages, page_size, num_kv_heads, head_dim, format=formats, device=device)
    # An engine's cache holds what others wrote, too.
    return replace(made, negative_zero_free=False)


def record_model(
    cache: PagedKVCache,
    *,
    num_qo_heads: int,
    max_batch: int,
    max_seq_len: int,
    max_num_tokens: int = 0,
    q_dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
    slot_dtype: torch.dtype = torch.int64,
    target: str | None = None,
    **options: Any,
) -> RecordExecutor:
    """Makes the calls of `model_kernels`, with its arguments; returns what recorded their launches."""
    check_instance("cache", cache, PagedKVCache)
    for name, value in (("max_batch", max_batch), ("max_seq_len", max_seq_len)):
        check_positive_int(name, value)
    device, heads, dim = cache.k.device, cache.num_kv_heads, cache.head_dim
    pages = -(-max_seq_len // cache.page_size)
    row = torch.zeros(1, pages, dtype=index_dtype, device=device)

    def table(batch: int, name: str = "seq_lens", width: int = pages) -> PageTable:
        lengths: dict[str, Any] = {name: torch.zeros(batch, dtype=index_dtype, device=device)}
        return PageTable.from_block_table(
            row[:, :width].expand(batch, -1), page_size=cache.page_size, **lengths
        )

    def tensor(tokens: int, num_heads: int) -> torch.Tensor:
        return torch.empty(tokens, num_heads, dim, dtype=q_dtype, device=device)

    with recording(target) as recorder:
        shape = DecodeShape(max_batch, 1, num_qo_heads, heads, dim, cache.page_size, max_seq_len, q_dtype)
        plan = plan_decode(shape, cache.format, device=device, **fp4_scales(cache))
        for batch in range(1, max_batch + 1):
            paged_decode(tensor(batch, num_qo_heads), cache, table(batch), plan=plan, **options)
        slots = torch.zeros(2, dtype=slot_dtype, device=device)
        append(cache, tensor(2, heads), tensor(2, heads), slots)
        for batch, tokens, width in _prefill_sizes(min(max_num_tokens, _MOST_TOKENS), max_batch, pages):
            starts = torch.zeros(batch + 1, dtype=index_dtype, device=device)
            q, k, v = tensor(tokens, num_qo_heads), tensor(tokens, heads), tensor(tokens, heads)
            batch_prefill(q, cache, table(batch, width=width), starts)
            prefill_append(q, k, v, cache, table(batch, "cached_lens", width), starts)
    return recorder


def model_kernels(cache: PagedKVCache, **model: Any) -> list[KernelSpec]:
    """Every kernel that one layer's calls can reach, as `warmup` compiles them; nothing is run.

    The calls themselves are made, with tensors whose contents do not matter, and their launches noted: decode
    by one plan at every batch, `append`, and with `max_num_tokens` also `batch_prefill` and `prefill_append`.

    Args:
        cache: a cache like the server's, with as many pages: the compiler knows whether offsets fit 32 bits.
        **model: keyword arguments, as follows.
        num_qo_heads: query heads of the model.
        max_batch: sequences of a decode call, at most.
        max_seq_len: tokens of a sequence, at most.
        max_num_tokens: tokens of a prefill call, at most; 0 leaves prefill out.
        q_dtype: of queries and new tokens: bf16 or fp16.
        index_dtype: of block tables, lengths and cu_seqlens: int32 or int64.
        slot_dtype: of slot mappings: int32 or int64.
        target: an AMD target to compile for without a GPU; None is the current GPU.
        **options: `window_left`, `logits_soft_cap`, `sinks` (a tensor) of decode, if the model has them.

    Raises:
        TypeError, ValueError: sizes and formats that the operations refuse.

    Example:
        >>> cache = PagedKVCache.empty(64, 16, 1, 64, format="fp8_e4m3fn")
        >>> kernels = model_kernels(cache, num_qo_heads=4, max_batch=8, max_seq_len=512, target="gfx942")
        >>> sorted({kernel.name for kernel in kernels})
        ['_append_kernel', '_merge_splits_kernel', '_paged_decode_kernel']
    """
    return record_model(cache, **model).specs()


def _prefill_sizes(max_num_tokens: int, max_batch: int, max_pages: int) -> Iterator[tuple[int, int, int]]:
    """Batches, tokens and widths of the page table, by powers of two: configurations follow thresholds."""

    def powers(most: int) -> list[int]:
        return sorted({min(2**i, most) for i in range(most.bit_length() + 1)}) if most else []

    return (
        (batch, tokens, width)
        for tokens in powers(max_num_tokens)
        for batch in powers(min(tokens, max_batch))
        for width in powers(max_pages)
    )


def warmup_model(
    cache: PagedKVCache,
    *,
    target: str | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **model: Any,
) -> Warmup:
    """Compiles `model_kernels(cache, **model)` into Triton's cache folder, in parallel processes.

    Args:
        cache: a cache like the server's.
        target, processes, progress: as for `narrowkv.runtime.launch.warmup`.
        **model: the other arguments of `model_kernels`.

    Raises:
        RuntimeError: a kernel did not compile; the others are compiled all the same.

    Example:
        >>> warmup_model(cache, num_qo_heads=96, max_batch=512, max_seq_len=131072)   # doctest: +SKIP
    """
    kernels = model_kernels(cache, target=target, **model)
    return warmup(kernels, target, processes=processes, progress=progress)

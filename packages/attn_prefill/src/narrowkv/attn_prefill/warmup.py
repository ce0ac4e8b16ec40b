"""Compiles all kernels that a model's decode, append and prefill can reach, before a server starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from narrowkv.attn_decode import DecodeShape, paged_decode, plan_decode
from narrowkv.attn_prefill.api import batch_prefill, prefill_append
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan
from narrowkv.attn_prefill.planning import plan_without_memory
from narrowkv.attn_prefill.tiles import PrefillShape
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.paged_cache.cache import fp4_scales
from narrowkv.runtime.errors import check_instance, check_positive_int
from narrowkv.runtime.launch import KernelSpec, RecordExecutor, Warmup, load_kernels, recording, warmup

__all__ = ["model_cache", "model_kernels", "record_model", "warmup_model"]

_MOST_TOKENS = 16384
_SCRATCH_BYTES = 512 * 2**20  # of planned calls, whose memory is allocated though nothing runs
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
    max_q_len: int = 8,
    q_dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
    slot_dtype: torch.dtype = torch.int64,
    target: str | None = None,
    **options: Any,
) -> RecordExecutor:
    """Makes the calls of `model_kernels`, with its arguments; returns what recorded their launches."""
    check_instance("cache", cache, PagedKVCache)
    for name, value in (("max_batch", max_batch), ("max_seq_len", max_seq_len), ("max_q_len", max_q_len)):
        check_positive_int(name, value)
    calls = _ModelCalls(cache, num_qo_heads, max_seq_len, q_dtype, index_dtype)
    with recording(target) as recorder:
        for q_len in range(1, max_q_len + 1):
            calls.decode(q_len, max_batch, options)
        slots = torch.zeros(2, dtype=slot_dtype, device=cache.k.device)
        append(cache, *calls.new_tokens(2), slots)
        max_num_tokens = min(max_num_tokens, _MOST_TOKENS)
        for batch, tokens, width in _prefill_sizes(max_num_tokens, max_batch, calls.pages):
            calls.prefill(batch, tokens, width)
        calls.planned_prefills(max_num_tokens, max_batch)
    return recorder


class _ModelCalls:
    """Calls of one layer, with tensors whose contents do not matter."""

    def __init__(
        self, cache: PagedKVCache, num_qo_heads: int, max_seq_len: int, q_dtype: torch.dtype,
        index_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._cache, self._num_qo_heads = cache, num_qo_heads
        self._q_dtype, self._index_dtype = q_dtype, index_dtype
        self._max_seq_len = max_seq_len
        self.pages = -(-max_seq_len // cache.page_size)
        self._row = self._zeros(1, self.pages)

    def _zeros(self, *size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=self._index_dtype, device=self._cache.k.device)

    def queries(self, tokens: int) -> torch.Tensor:
        """Queries of the model."""
        return self._empty(tokens, self._num_qo_heads, self._cache.head_dim)

    def new_tokens(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values to store."""
        cache = self._cache
        return (
            self._empty(tokens, cache.num_kv_heads, cache.head_dim),
            self._empty(tokens, cache.num_kv_heads, cache.v_head_dim),
        )

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._q_dtype, device=self._cache.k.device)

    def _table(self, batch: int, width: int, name: str = "seq_lens") -> PageTable:
        lengths: dict[str, Any] = {name: self._zeros(batch)}
        ids = self._row[:, :width].expand(batch, -1)
        return PageTable.from_block_table(ids, page_size=self._cache.page_size, **lengths)

    def decode(self, q_len: int, max_batch: int, options: dict[str, Any]) -> None:
        """Calls with `q_len` query tokens: each configuration that a batch has at a capacity is called once.

        Capacities are powers of two, for which calls that are not planned are configured, and `max_seq_len`.
        """
        cache, seen = self._cache, set()
        capacities = {1 << i for i in range((self._max_seq_len - 1).bit_length() + 1)}
        for capacity in sorted({*capacities, self._max_seq_len}, reverse=True):
            shape = DecodeShape(
                max_batch, q_len, self._num_qo_heads, cache.num_kv_heads, cache.head_dim, cache.page_size,
                capacity, self._q_dtype, cache.v_head_dim,
            )  # fmt: skip
            plan = plan_decode(shape, cache.format, device=cache.k.device, **fp4_scales(cache))
            for batch in range(1, max_batch + 1):
                config = plan.config_for(batch)
                # A kernel depends on the number of splits only in whether each sequence has exactly one.
                kind = replace(config, num_items=0, tiles_per_split=0, slots=0), config.num_items == batch
                if kind not in seen:
                    seen.add(kind)
                    q = self.queries(batch * q_len)
                    paged_decode(q, cache, self._table(batch, self.pages), plan=plan, **options)

    def prefill(
        self, batch: int, tokens: int, width: int, plans: tuple[PrefillPlan, AppendPlan] | None = None
    ) -> None:
        """A call of `batch_prefill` and one of `prefill_append`, by plans or without."""
        cache, starts = self._cache, self._zeros(batch + 1)
        q, (k, v) = self.queries(tokens), self.new_tokens(tokens)
        attends, appends = plans or (None, None)
        batch_prefill(q, cache, self._table(batch, width), starts, plan=attends)
        prefill_append(q, k, v, cache, self._table(batch, width, "cached_lens"), starts, plan=appends)

    def planned_prefills(self, max_num_tokens: int, max_batch: int) -> None:
        """Calls by plans that know bounds: each configuration is called once."""
        seen: set[Any] = set()
        for shape in self._prefill_shapes(max_num_tokens, max_batch):
            plans = (
                plan_without_memory(PrefillPlan, shape, self._cache, limit=_SCRATCH_BYTES),
                plan_without_memory(AppendPlan, shape, self._cache, limit=_SCRATCH_BYTES, exponent="mse"),
            )
            kind = tuple(plan.config.kind() for plan in plans)
            if kind not in seen:
                seen.add(kind)
                width = -(-shape.max_seq_len // shape.page_size)
                self.prefill(shape.batch, shape.num_tokens, width, plans)

    def _prefill_shapes(self, max_num_tokens: int, max_batch: int) -> Iterator[PrefillShape]:
        """Bounds by powers of two: of batch, query tokens of a sequence, the fewest of them, and keys."""
        cache = self._cache
        for max_q_len, batch in product(_powers(max_num_tokens), _powers(max_batch)):
            for max_seq_len, least in product(_powers(self._max_seq_len)[::2], (0, *_powers(16))):
                if max_q_len <= max_seq_len and least <= max_q_len and batch <= max_num_tokens:
                    yield PrefillShape(
                        batch=batch, num_tokens=min(batch * max_q_len, max_num_tokens), max_q_len=max_q_len,
                        num_qo_heads=self._num_qo_heads, num_kv_heads=cache.num_kv_heads,
                        head_dim=cache.head_dim, page_size=cache.page_size, max_seq_len=max_seq_len,
                        kv_tokens=batch * max_seq_len, q_dtype=self._q_dtype, min_q_len=least,
                        v_head_dim=cache.v_head_dim,
                    )  # fmt: skip


def model_kernels(cache: PagedKVCache, **model: Any) -> list[KernelSpec]:
    """Every kernel that one layer's calls can reach, as `warmup` compiles them; nothing is run.

    The calls themselves are made, with tensors whose contents do not matter, and their launches noted: decode
    of 1 to `max_q_len` tokens at every batch, planned and not, `append`, and with `max_num_tokens` also
    `batch_prefill` and `prefill_append`, without a plan and by plans that know bounds.

    Args:
        cache: a cache like the server's, with as many pages: the compiler knows whether offsets fit 32 bits.
        **model: keyword arguments, as follows.
        num_qo_heads: query heads of the model.
        max_batch: sequences of a decode call, at most.
        max_seq_len: tokens of a sequence, at most.
        max_num_tokens: tokens of a prefill call, at most; 0 leaves prefill out.
        max_q_len: query tokens of a sequence of a decode call, at most: 1 and the speculative ones.
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


def _powers(most: int) -> list[int]:
    """The powers of two up to `most`, and `most` itself."""
    return sorted({min(2**i, most) for i in range(most.bit_length() + 1)}) if most else []


def _prefill_sizes(max_num_tokens: int, max_batch: int, max_pages: int) -> Iterator[tuple[int, int, int]]:
    """Batches, tokens and widths of the page table, by powers of two: configurations follow thresholds."""
    return (
        (batch, tokens, width)
        for tokens in _powers(max_num_tokens)
        for batch in _powers(min(tokens, max_batch))
        for width in _powers(max_pages)
    )


def warmup_model(
    cache: PagedKVCache,
    *,
    target: str | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    load: bool = False,
    **model: Any,
) -> Warmup:
    """Compiles `model_kernels(cache, **model)` into Triton's cache folder, in parallel processes.

    Args:
        cache: a cache like the server's.
        target, processes, progress: as for `narrowkv.runtime.launch.warmup`.
        load: also load the kernels onto the current GPU, in this process, so that no call waits for that.
        **model: the other arguments of `model_kernels`.

    Raises:
        RuntimeError: a kernel did not compile; the others are compiled all the same.

    Example:
        >>> warmup_model(cache, num_qo_heads=96, max_batch=512, max_seq_len=131072)   # doctest: +SKIP
    """
    kernels = model_kernels(cache, target=target, **model)
    found = warmup(kernels, target, processes=processes, progress=progress)
    if load:
        load_kernels(kernels)
    return found

"""A paged cache and its page table as kernel arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.kernels.pages import Descale, KVPointers, Stored
from narrowkv.paged_cache.pointers import descale_pointers, packed_route, side_of, step_of
from narrowkv.quant.device import widen_route, widening_exponent
from narrowkv.runtime.errors import byte_span
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import Workspace
from narrowkv.runtime.launch.gpu import current_stream
from narrowkv.runtime.targets import Target

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INT32_MAX = 2**31 - 1


class BoundCache(NamedTuple):
    """A cache as the arguments of decode kernels.

    Attributes:
        k, v: pointers and strides; k_descale, v_descale: of the descales that are tensors.
        tensors: those of k, v, k_descale and v_descale that there are, in this order.
        k_stored, v_stored: constants.
        k_factor, v_factor: the descales that are numbers, times what the conversion leaves out.
        wide_address: offsets need 64 bits.
        spans: addresses that the cache and its descales take.
        number: the same for all caches that ask for the same kernels, have the same strides and pass the same
            checks.
    """

    k: KVPointers
    v: KVPointers
    k_descale: Descale
    v_descale: Descale
    tensors: tuple[torch.Tensor, ...]
    k_stored: Stored
    v_stored: Stored
    k_factor: float
    v_factor: float
    wide_address: bool
    spans: list[tuple[int, int]]
    number: int


# What the pointers depend on, by cache. An entry goes with its cache.
_bound_caches: ByIdentity[dict[Any, BoundCache]] = ByIdentity()
_numbers: dict[Any, int] = {}


def bind_cache(cache: PagedKVCache, target: Target, kernel: str, k_parts: int, v_parts: int) -> BoundCache:
    """The cache as kernel arguments, found once."""
    key = (target.name, kernel, k_parts, v_parts)
    known = _bound_caches.get(id(cache))
    if known is None:
        known = _bound_caches.keep(cache, {})
    if key in known:
        return known[key]
    k_format, v_format = cache.format.k, cache.format.v
    k_strides, v_strides = cache.k_strides, cache.v_strides
    k_side = side_of(cache.k, k_strides, k_format, widen_route(target, k_format), k_parts)
    v_side = side_of(cache.v, v_strides, v_format, widen_route(target, v_format), v_parts)
    native, half = kernel == "native", "bf16" not in (k_format, v_format)
    k_mode, k_factor, k_descale = descale_pointers(cache.k_descale, cache.k_granularity)
    v_mode, v_factor, v_descale = descale_pointers(cache.v_descale, cache.v_granularity)
    # The scales of groups are applied while widening, and take the power of two along.
    k_exponent = 0 if native or k_mode == "e8m0_group" else widening_exponent(k_format, k_side.route)
    v_exponent = 0 if v_mode == "e8m0_group" else widening_exponent(v_format, v_side.route)
    k_route = packed_route(target, k_format, k_side, half)
    v_route = packed_route(target, v_format, v_side, half)
    k_stored = Stored(k_format, k_route, 1 if native else k_side.parts, k_strides.vec, k_mode)
    v_stored = Stored(v_format, v_route, v_side.parts, v_strides.vec, v_mode)
    pointers = (k_side.pointers, v_side.pointers, k_descale, v_descale)
    signature = (
        k_stored, v_stored, cache.needs_64_bit_addresses, _sequences(cache), cache.num_pages,
        cache.k.requires_grad or cache.v.requires_grad, cache.k.device, key,
        tuple((each[0] is not None and (each[0].dtype, each[0].dim()), each[1:]) for each in pointers),
    )  # fmt: skip
    known[key] = BoundCache(
        *pointers, tuple(each[0] for each in pointers if each[0] is not None), k_stored, v_stored,
        k_factor * 2.0**k_exponent, v_factor * 2.0**v_exponent, cache.needs_64_bit_addresses,
        spans_of(cache.k, cache.v, cache.k_descale, cache.v_descale),
        _numbers.setdefault(signature, len(_numbers)),
    )  # fmt: skip
    return known[key]


def _sequences(cache: PagedKVCache) -> tuple[int | None, int | None]:
    """Rows of the descales of K and V that have one for each sequence."""
    return tuple(
        value.shape[0] if kind == "sequence_head" and isinstance(value, torch.Tensor) else None
        for value, kind in ((cache.k_descale, cache.k_granularity), (cache.v_descale, cache.v_granularity))
    )  # type: ignore[return-value]


class BoundTable(NamedTuple):
    """A page table as the arguments of decode kernels.

    Attributes:
        ids, row, lens, num_ids, max_pages: see `Table`.
        steps: strides of ids, row and lens, as `TableSteps` has them.
        batch: sequences.
        spans: addresses that the tensors take.
        ranges: keys that each query token attends to, or None.
        number: the same for all tables that ask for the same kernels and pass the same checks.
    """

    ids: torch.Tensor
    row: torch.Tensor | int
    lens: torch.Tensor
    num_ids: int
    max_pages: int
    steps: tuple[int | None, int | None, int | None]
    batch: int
    spans: list[tuple[int, int]]
    ranges: torch.Tensor | None
    number: int


BOUND_TABLES: ByIdentity[BoundTable] = ByIdentity()


def bind_table(table: PageTable) -> BoundTable:
    """The page table as kernel arguments; `BOUND_TABLES` has it from then on.

    Raises:
        ValueError: it spans more page ids than kernels count.
    """
    ids, indptr = table.page_ids, table.kv_indptr
    lens = table.kv_last_page_len if table.seq_lens is None else table.seq_lens
    assert lens is not None
    num_ids = 1 + sum((size - 1) * stride for size, stride in zip(ids.shape, ids.stride(), strict=True))
    if num_ids > _INT32_MAX:
        raise ValueError(
            f"page_table must span fewer than 2**31 page ids, got shape {tuple(ids.shape)} with strides "
            f"{ids.stride()}"
        )
    steps = step_of(ids), None if indptr is None else step_of(indptr), step_of(lens)
    signature = (
        table.kind, table.page_size, table.before_append, steps, ids.device, ids.dtype, lens.dtype,
        lens.shape, lens.device, ids.shape[-1] == 0,
        None if indptr is None else (indptr.dtype, indptr.device),
        None if table.key_ranges is None else table.key_ranges.shape,
    )  # fmt: skip
    bound = BoundTable(
        ids, ids.stride(0) if indptr is None else indptr, lens, num_ids, ids.shape[-1], steps, lens.shape[0],
        spans_of(ids, lens, indptr, table.key_ranges), table.key_ranges,
        _numbers.setdefault(signature, len(_numbers)),
    )  # fmt: skip
    return BOUND_TABLES.keep(table, bound)


def spans_of(*values: object) -> list[tuple[int, int]]:
    """The addresses that those of the values take that are tensors with elements."""
    return [byte_span(value) for value in values if isinstance(value, torch.Tensor) and value.numel()]


def meets(begin: int, num_bytes: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether bytes at an address lie in one of the spans."""
    end = begin + num_bytes
    for low, high in spans:
        if begin < high and low < end:
            return num_bytes > 0
    return False


_counters: dict[tuple[torch.device, int], Workspace] = {}


def zeroed_counters(count: int, device: torch.device) -> torch.Tensor:
    """Arrival counters of a call whose plan has none.

    Calls on one stream share them, because every launch leaves them zero. A graph has its own: it may be
    replayed on another stream.
    """
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, current_stream(device.index))
    if key not in _counters:
        _counters[key] = Workspace(0, device)
    return _counters[key].counters(count)

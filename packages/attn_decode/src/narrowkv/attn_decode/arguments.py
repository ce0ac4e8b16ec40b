"""A paged cache and its page table as kernel arguments."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.kernels.pages import Descale, KVPointers, Stored
from narrowkv.paged_cache.layouts import span_bytes
from narrowkv.paged_cache.pointers import descale_pointers, packed_route, side_of
from narrowkv.quant.device import widen_route, widening_exponent
from narrowkv.runtime.errors import (
    check_dtype,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
)
from narrowkv.runtime.targets import Target

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def output_tensor(
    q: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None, cache: PagedKVCache
) -> torch.Tensor:
    """A new output, or the caller's once it is checked."""
    if out is None:
        dtype = q.dtype if out_dtype is None else out_dtype
        if dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype must be one of {OUT_DTYPES}, got {dtype}")
        return torch.empty(q.shape, dtype=dtype, device=q.device)
    check_dtype("out", out, OUT_DTYPES if out_dtype is None else (out_dtype,))
    check_shape("out", out, tuple(q.shape))
    check_same_device(q=q, out=out)
    check_last_dim_contiguous("out", out)
    check_no_grad(out=out)
    check_no_overlap("out", out, q=q, k=cache.k, v=cache.v)
    return out


class BoundCache(NamedTuple):
    """A cache as the arguments of decode kernels.

    Attributes:
        k, v: pointers and strides; k_descale, v_descale: of the descales that are tensors.
        k_stored, v_stored: constants.
        k_factor, v_factor: the descales that are numbers, times what the conversion leaves out.
        wide_address: offsets need 64 bits.
        spans: addresses that the cache and its descales take.
        number: the same for all caches that ask for the same kernels and pass the same checks.
    """

    k: KVPointers
    v: KVPointers
    k_descale: Descale
    v_descale: Descale
    k_stored: Stored
    v_stored: Stored
    k_factor: float
    v_factor: float
    wide_address: bool
    spans: list[tuple[int, int]]
    number: int


# By cache, and by what the pointers depend on. An entry goes with its cache.
BOUND_CACHES: WeakKeyDictionary[PagedKVCache, dict[Any, BoundCache]] = WeakKeyDictionary()
_numbers: dict[Any, int] = {}


def bind_cache(cache: PagedKVCache, target: Target, kernel: str, k_parts: int, v_parts: int) -> BoundCache:
    """The cache as kernel arguments; `BOUND_CACHES` has it from then on."""
    key = (target.name, kernel, k_parts, v_parts)
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
    tensors = [t for t in (cache.k, cache.v, cache.k_descale, cache.v_descale) if isinstance(t, torch.Tensor)]
    spans = [(t.data_ptr(), t.data_ptr() + span_bytes(t)) for t in tensors if t.numel()]
    signature = (
        k_stored, v_stored, cache.needs_64_bit_addresses, _sequences(cache), cache.num_pages,
        cache.k.requires_grad or cache.v.requires_grad, cache.k.device, key,
    )  # fmt: skip
    bound = BoundCache(
        k_side.pointers, v_side.pointers, k_descale, v_descale, k_stored, v_stored,
        k_factor * 2.0**k_exponent, v_factor * 2.0**v_exponent, cache.needs_64_bit_addresses, spans,
        _numbers.setdefault(signature, len(_numbers)),
    )  # fmt: skip
    BOUND_CACHES.setdefault(cache, {})[key] = bound
    return bound


def _sequences(cache: PagedKVCache) -> tuple[int | None, int | None]:
    """Rows of the descales of K and V that have one for each sequence."""
    return tuple(
        value.shape[0] if kind == "sequence_head" and isinstance(value, torch.Tensor) else None
        for value, kind in ((cache.k_descale, cache.k_granularity), (cache.v_descale, cache.v_granularity))
    )  # type: ignore[return-value]


def shares_memory(
    written: list[tuple[torch.Tensor | None, int]],
    read: list[tuple[torch.Tensor, int]],
    spans: list[tuple[int, int]],
) -> bool:
    """Whether a result, given with the bytes that it spans, overlaps an input, another result or a span."""
    taken = list(spans)
    for tensor, size in read:
        begin = tensor.data_ptr()
        taken.append((begin, begin + size))
    for result, size in written:
        if result is not None and size:
            begin = result.data_ptr()
            for other, end in taken:
                if begin < end and other < begin + size:
                    return True
            taken.append((begin, begin + size))
    return False

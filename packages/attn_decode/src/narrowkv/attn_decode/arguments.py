"""A paged cache and its page table as kernel arguments."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from narrowkv.attn_decode.config import PTX
from narrowkv.attn_decode.kernels import Descale, KVPointers, Stored, Table
from narrowkv.paged_cache import KVStrides, PagedKVCache, PageTable
from narrowkv.paged_cache.layouts import span_bytes
from narrowkv.quant.device import NATIVE, widen_route, widening_exponent
from narrowkv.quant.formats import get_format
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
ABSENT = Descale(None, 0, 0, 0)


class Side(NamedTuple):
    """K or V as a kernel reads it: words, how they are widened, elements per word."""

    pointers: KVPointers
    route: str
    parts: int


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


def descale_pointers(value: Any, granularity: str) -> tuple[str, float, Descale]:
    """(mode, factor to fold, pointers) of a K or V descale; see `_paged_decode_kernel`."""
    if not isinstance(value, torch.Tensor):
        return "scalar", float(value), ABSENT
    if granularity == "tensor":
        return "head", 1.0, Descale(value, 0, 0, 0)
    if granularity == "head":
        return "head", 1.0, Descale(value, 0, 0, value.stride(0))
    if granularity == "sequence_head":
        return "head", 1.0, Descale(value, value.stride(0), 0, value.stride(1))
    if granularity == "page_head":
        return "token", 1.0, Descale(value, value.stride(0), 0, value.stride(1))
    kind = "token" if value.dtype == torch.float32 else "e8m0"
    if granularity == "token_head_group":
        kind = "e8m0_group"
    return kind, 1.0, Descale(value, value.stride(0), value.stride(1), value.stride(2))


def side_of(stored: torch.Tensor, strides: KVStrides, format_name: str, route: str, parts: int) -> Side:
    """K or V seen in the words that the kernel loads; fewer elements a word where strides are odd."""
    fmt = get_format(format_name)
    if parts > 1:
        even = not any(s % 2 for s in (strides.page, strides.token, strides.head, stored.data_ptr()))
        if strides.vec == 0 and even:
            words = stored.view(torch.int16)
            return Side(
                KVPointers(words, strides.page // 2, strides.token // 2, strides.head // 2, 0), route, parts
            )
        parts = 2 if fmt.kind == "fp4" else 1
    if fmt.kind == "fp8":
        dtype = fmt.storage_dtype if route == NATIVE else torch.uint8
        stored = stored if stored.dtype == dtype else stored.view(dtype)
    return Side(KVPointers(stored, strides.page, strides.token, strides.head, strides.outer), route, parts)


def packed_route(target: Target, format_name: str, side: Side, half: bool) -> str:
    """Packed conversions in inline assembly, for 16-bit words on NVIDIA."""
    packed = (format_name == "fp8_e4m3fn" and side.parts == 2 and side.route == NATIVE) or (
        format_name == "fp4_e2m1" and side.parts == 4
    )
    return PTX if packed and half and target.vendor == "nvidia" else side.route


def table_pointers(page_table: PageTable, cache: PagedKVCache) -> Table:
    """The page table of either kind, with the bounds that keep an unvalidated one memory-safe."""
    ids, num_pages = page_table.page_ids, cache.num_pages
    if ids.numel() == 0:
        ids = ids.new_zeros(1, 1)  # every sequence is empty: something to point at, whose content is not used
        num_pages = 0
    max_pages = ids.shape[-1] if num_pages else 0
    num_ids = 1 + sum((size - 1) * stride for size, stride in zip(ids.shape, ids.stride(), strict=True))
    if page_table.kind == "ragged":
        row: torch.Tensor | int | None = page_table.kv_indptr
        row_step, lens = _optional_step(page_table.kv_indptr), page_table.kv_last_page_len
    else:
        row, row_step, lens = ids.stride(0), None, page_table.seq_lens
    return Table(ids, row, lens, num_ids, num_pages, max_pages, step_of(ids), row_step, _optional_step(lens))


def step_of(tensor: torch.Tensor) -> int | None:
    """The stride of the last dimension, or None for 1, as `Table` has it."""
    return None if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.stride(-1)


def _optional_step(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else step_of(tensor)


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

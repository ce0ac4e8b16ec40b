"""A paged cache and its page table as the arguments of kernels that read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.kernels.pages import Descale, KVPointers, Table
from narrowkv.paged_cache.layouts import KVStrides
from narrowkv.paged_cache.page_table import PageTable
from narrowkv.quant.device import NATIVE
from narrowkv.quant.formats import get_format
from narrowkv.runtime.targets import Target

# How words are widened: packed conversions in inline assembly.
PTX = "ptx"
ABSENT = Descale(None, 0, 0, 0)


class Side(NamedTuple):
    """K or V as a kernel reads it: words, how they are widened, elements per word."""

    pointers: KVPointers
    route: str
    parts: int


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

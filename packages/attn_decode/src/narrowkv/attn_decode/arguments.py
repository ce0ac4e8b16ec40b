"""A paged cache and its page table as kernel arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.attn_decode.config import PTX
from narrowkv.attn_decode.kernels import Descale, KVPointers, Table
from narrowkv.paged_cache import KVStrides, PagedKVCache, PageTable
from narrowkv.quant.device import NATIVE
from narrowkv.quant.errors import (
    check_dtype,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
)
from narrowkv.quant.formats import get_format
from narrowkv.quant.targets import Target

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
        row_step, lens = _step(page_table.kv_indptr), page_table.kv_last_page_len
    else:
        row, row_step, lens = ids.stride(0), None, page_table.seq_lens
    return Table(ids, row, lens, num_ids, num_pages, max_pages, _step(ids), row_step, _step(lens))


def _step(tensor: torch.Tensor | None) -> int | None:
    """The stride of the last dimension, or None for 1, as `Table` has it."""
    if tensor is None or tensor.shape[-1] < 2:
        return None
    stride = tensor.stride(-1)
    return None if stride == 1 else stride

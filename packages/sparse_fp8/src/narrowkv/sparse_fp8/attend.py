"""From a checked call to launches: over 16-bit rows, over FP8 rows, or over FP8 rows expanded first."""

from __future__ import annotations

import math
from typing import Any

import torch

from narrowkv.quant.device import BITS, widen_route, widening_exponent
from narrowkv.quant.launch import LaunchOptions, is_compiled, launch
from narrowkv.quant.targets import Target
from narrowkv.sparse_fp8.arguments import (
    NO_CSR,
    NO_ROWS,
    SparseCall,
    allocate_partials,
    csr_pointers,
    fused_suits_hopper,
    heads_need_64_bit,
    needs_64_bit,
    output_pointers,
    row_pointers,
    suits_hopper,
)
from narrowkv.sparse_fp8.config import SparseConfig, choose_config
from narrowkv.sparse_fp8.kernels.expand import _expand_kernel
from narrowkv.sparse_fp8.kernels.fused import _sparse_fused_kernel
from narrowkv.sparse_fp8.kernels.results import Output, Partials, _merge_sparse_kernel
from narrowkv.sparse_fp8.kernels.rows import RowPointers
from narrowkv.sparse_fp8.kernels.wide import _sparse_wide_kernel
from narrowkv.sparse_fp8.rows import HEAD_DIM, DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

_LOG2E = math.log2(math.e)
_SPLITS_AT_ONCE = 8
# How far numerators pass one, in powers of two, before a maximum follows: well inside float16; bf16 has the
# range of float32, and there it hardly ever does. Sums over 2**11 rows stay finite up to rows of 2**84.
_SLACK = {torch.float16: 8.0, torch.bfloat16: 32.0}


def attend_wide(
    call: SparseCall,
    q: torch.Tensor,
    prefix: KVSource | None,
    extend: KVSource | None,
    *,
    num_splits: int | None,
) -> None:
    """The call with this q over these sources, all 16-bit."""
    wide_heads = heads_need_64_bit(q, call.o)
    config = choose_config(
        call.target,
        kernel="wide",
        num_tokens=call.num_tokens,
        num_heads=call.num_heads,
        mean_rows=call.mean_rows,
        hopper=is_compiled(q) and suits_hopper(q, prefix, extend) and not wide_heads,
        num_splits=num_splits,
    )
    if config.stages:
        _run_hopper(call, config, q, prefix, extend)
        return
    constexprs = {"WIDE_HEADS": wide_heads}
    _run(call, config, _sparse_wide_kernel, (q,), (q.stride(0), q.stride(1)), (prefix, extend), constexprs)


def attend_fused(call: SparseCall, *, num_splits: int | None) -> None:
    """The call straight from FP8 rows."""
    q = call.q
    fp8 = [*call.fp8_rows, *([q] if isinstance(q, DSV4Rows) else [])]
    format_name = fp8[0].format
    # One route for all rows of a call: they meet in one matrix product.
    route = widen_route(
        call.target, format_name, negative_zero_free=all(rows.negative_zero_free for rows in fp8)
    )
    fp8_qk = isinstance(q, DSV4Rows) and route != BITS and all(rows.scale_group == 64 for rows in fp8)
    wide_heads = heads_need_64_bit(q, call.o)
    config = choose_config(
        call.target,
        kernel="fused",
        num_tokens=call.num_tokens,
        num_heads=call.num_heads,
        mean_rows=call.mean_rows,
        fp8_qk=fp8_qk,
        hopper=fused_suits_hopper(q, call.prefix, call.extend, call.target) and not wide_heads,
        num_splits=num_splits,
    )
    if config.stages:
        _run_hopper(call, config, _wide_query(call), call.prefix, call.extend)
        return
    if isinstance(q, DSV4Rows):
        query, stride_qh = row_pointers(q), 0
    else:
        query, stride_qh = RowPointers(q, None, None, q.stride(0), 0, 0, q.shape[0]), q.stride(1)
    constexprs = {
        **_layout("Q", q),
        **_layout("PREFIX", call.prefix.rows if call.prefix is not None else None),
        **_layout("EXTEND", call.extend.rows if call.extend is not None else None),
        "FP8_Q": isinstance(q, DSV4Rows),
        "WIDE_HEADS": wide_heads,
        "FORMAT": format_name,
        "ROUTE": route,
        "EXPONENT": widening_exponent(format_name, route),
        "FP8_QK": fp8_qk,
        "WIDTH": config.width,
    }
    _run(call, config, _sparse_fused_kernel, (query,), (stride_qh,), (call.prefix, call.extend), constexprs)


def attend_prepass(call: SparseCall, *, num_splits: int | None) -> None:
    """The call over 16-bit copies of its FP8 rows."""
    prefix, extend = (
        _expand_source(source, call.compute_dtype, call.target) if source is not None else None
        for source in (call.prefix, call.extend)
    )
    attend_wide(call, _wide_query(call), prefix, extend, num_splits=num_splits)


def _wide_query(call: SparseCall) -> torch.Tensor:
    """The query in 16 bits: widening FP8 is exact."""
    if isinstance(call.q, torch.Tensor):
        return call.q
    rows = call.num_tokens * call.num_heads
    q = _expand(call.q, None, rows, call.compute_dtype, call.target)
    return q.view(call.num_tokens, call.num_heads, HEAD_DIM)


def _layout(name: str, rows: torch.Tensor | DSV4Rows | None) -> dict[str, Any]:
    fp8 = rows if isinstance(rows, DSV4Rows) else None
    return {
        f"{name}_LAYOUT": "" if fp8 is None else fp8.layout,
        f"{name}_PAGE_SIZE": 1 if fp8 is None else fp8.page_size,
        f"{name}_GROUP": 64 if fp8 is None else fp8.scale_group,
    }


def _run(
    call: SparseCall,
    config: SparseConfig,
    kernel: Any,
    query: tuple[Any, ...],
    query_strides: tuple[int, ...],
    sources: tuple[KVSource | None, KVSource | None],
    constexprs: dict[str, Any],
) -> None:
    """Launches an attention kernel in plain Triton, and the merge when the rows were split."""
    prefix, extend = sources
    results = output_pointers(call), allocate_partials(call, config.num_splits)
    arguments = _arguments(call, config, query, results, sources, query_strides)
    launch(
        kernel,
        (call.num_tokens * -(-call.num_heads // config.block_h), config.num_splits),
        arguments,
        {
            "NUM_HEADS": call.num_heads,
            "HAS_PREFIX": prefix is not None,
            "HAS_EXTEND": extend is not None,
            "WIDE_PREFIX": prefix is not None and needs_64_bit(prefix.rows),
            "WIDE_EXTEND": extend is not None and needs_64_bit(extend.rows),
            **constexprs,
            **_wanted(call),
            "SPLIT": config.num_splits > 1,
            "GUARD": config.guard,
            "BLOCK_H": config.block_h,
            "BLOCK_K": config.block_k,
        },
        config.options,
    )
    _merge(call, config, results)


def _wanted(call: SparseCall) -> dict[str, bool]:
    return {"HAS_SINK": call.sink is not None, "WRITE_LSE": call.lse is not None}


def _arguments(
    call: SparseCall,
    config: SparseConfig,
    query: tuple[Any, ...],
    results: tuple[Output, Partials],
    sources: tuple[KVSource | None, KVSource | None],
    query_strides: tuple[int, ...],
) -> tuple[Any, ...]:
    """What all attention kernels take: q, results, the sources, numbers."""
    pointers: list[Any] = []
    for source in sources:
        pointers += [NO_ROWS, NO_CSR] if source is None else [row_pointers(source.rows), csr_pointers(source)]
    return (
        *query,
        *results,
        *pointers,
        *query_strides,
        call.scale * _LOG2E,
        call.num_tokens,
        config.num_splits,
    )


def _merge(call: SparseCall, config: SparseConfig, results: tuple[Output, Partials]) -> None:
    """Merges the splits that an attention kernel left, if there were any."""
    if config.num_splits == 1:
        return
    launch(
        _merge_sparse_kernel,
        (call.num_tokens * call.num_heads,),
        (*results, call.num_tokens, config.num_splits),
        {"NUM_HEADS": call.num_heads, "BLOCK_S": _SPLITS_AT_ONCE, **_wanted(call)},
        LaunchOptions(num_warps=1, num_stages=1),
    )


def _run_hopper(
    call: SparseCall,
    config: SparseConfig,
    q: torch.Tensor,
    prefix: KVSource | None,
    extend: KVSource | None,
) -> None:
    """Launches a kernel for Hopper over 16-bit rows or over FP8 rows, and the merge."""
    # Not at the top: a Triton without Gluon runs everything else.
    from narrowkv.sparse_fp8.kernels.few import _sparse_few_kernel
    from narrowkv.sparse_fp8.kernels.hopper import _sparse_hopper_kernel
    from narrowkv.sparse_fp8.kernels.hopper_fp8 import _sparse_hopper_fp8_kernel

    items = call.num_tokens * -(-call.num_heads // config.block_h) * config.num_splits
    if items == 0:
        return
    results = output_pointers(call), allocate_partials(call, config.num_splits)
    strides = q.stride(0), q.stride(1)
    arguments = _arguments(call, config, (q,), results, (prefix, extend), strides)
    rows = [source.rows for source in (prefix, extend) if source is not None]
    ring = {"STAGES": config.stages}
    layout = {
        "LAYOUT": rows[0].layout if isinstance(rows[0], DSV4Rows) else "",
        "PREFIX_PAGE_SIZE": _page_size(prefix),
        "EXTEND_PAGE_SIZE": _page_size(extend),
    }
    kernel: Any
    stored: dict[str, Any]
    if config.block_h < 64:
        kernel, stored = _sparse_few_kernel, {**ring, **layout}
    elif isinstance(rows[0], DSV4Rows):
        kernel, stored = _sparse_hopper_fp8_kernel, layout
    else:
        kernel, stored = _sparse_hopper_kernel, ring
    units = call.target.figures.units if call.target.figures is not None else items
    launch(
        kernel,
        (min(items, units),),
        (*arguments, items),
        {
            "NUM_HEADS": call.num_heads,
            "HAS_PREFIX": prefix is not None,
            "HAS_EXTEND": extend is not None,
            **stored,
            "WIDE_ADDRESS": any(needs_64_bit(x) for x in rows),
            **_wanted(call),
            "SPLIT": config.num_splits > 1,
            "BLOCK_H": config.block_h,
            "BLOCK_K": config.block_k,
            "SLACK": _SLACK[q.dtype],
        },
        config.options,
    )
    _merge(call, config, results)


def _page_size(source: KVSource | None) -> int:
    return source.rows.page_size if source is not None and isinstance(source.rows, DSV4Rows) else 1


def _expand_source(source: KVSource, dtype: torch.dtype, target: Target) -> KVSource:
    """The source over 16-bit scratch: all its rows, or one row per index when there are fewer indices."""
    rows = source.rows
    if isinstance(rows, torch.Tensor):
        return source
    nnz = source.indices.shape[0]
    if nnz >= rows.num_rows:
        return KVSource(_expand(rows, None, rows.num_rows, dtype, target), source.indptr, source.indices)
    scratch = _expand(rows, source.indices, nnz, dtype, target)
    live = (source.indices >= 0) & (source.indices < rows.num_rows)
    place = torch.arange(nnz, dtype=torch.int32, device=source.indices.device)
    return KVSource(scratch, source.indptr, torch.where(live, place, -1))


def _expand(
    rows: DSV4Rows, indices: torch.Tensor | None, num_out: int, dtype: torch.dtype, target: Target
) -> torch.Tensor:
    """FP8 rows as 16-bit `[num_out, 512]`: the first `num_out`, or those that `indices` name."""
    scratch = torch.empty(num_out, HEAD_DIM, dtype=dtype, device=rows.device)
    route = widen_route(target, rows.format, negative_zero_free=rows.negative_zero_free)
    block = 64 if target.name == "cpu" else 16
    launch(
        _expand_kernel,
        (-(-num_out // block),),
        (scratch, row_pointers(rows), indices, num_out),
        {
            "GATHER": indices is not None,
            "LAYOUT": rows.layout,
            "PAGE_SIZE": rows.page_size,
            "GROUP": rows.scale_group,
            "WIDE_ADDRESS": needs_64_bit(rows),
            "FORMAT": rows.format,
            "ROUTE": route,
            "EXPONENT": widening_exponent(rows.format, route),
            "BLOCK_R": block,
        },
        LaunchOptions(num_warps=4, num_stages=1),
    )
    return scratch

"""Kernels of sparse attention bound to what a plan fixes, and the structs that they are launched with."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.quant.device import widen_route, widening_exponent
from narrowkv.runtime.launch import BoundLaunch, LaunchOptions
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.binding import RowsFormat
from narrowkv.sparse_fp8.config import SparseConfig
from narrowkv.sparse_fp8.kernels.expand import _expand_kernel
from narrowkv.sparse_fp8.kernels.fused import _sparse_fused_kernel
from narrowkv.sparse_fp8.kernels.results import Call, Partials, Tiles, _merge_sparse_kernel
from narrowkv.sparse_fp8.kernels.rows import Stored, Widening
from narrowkv.sparse_fp8.kernels.wide import _sparse_wide_kernel

NO_PARTIALS = Partials(None, None, None)
_SPLITS_AT_ONCE = 8
# How far numerators pass one, in powers of two, before a maximum follows: well inside float16; bf16 has the
# range of float32, and there it hardly ever does. Sums over 2**11 rows stay finite up to rows of 2**84.
_SLACK = {torch.float16: 8.0, torch.bfloat16: 32.0}


def expand_block(target: Target) -> int:
    """Rows that a program of the expansion widens."""
    return 64 if target.name == "cpu" else 16


def _stored(rows: RowsFormat | None) -> Stored | None:
    if rows is None:
        return None
    return Stored(rows.layout if rows.is_fp8 else "", rows.page_size, rows.scale_group, rows.offsets_64_bit)


def route_of(target: Target, rows: list[RowsFormat]) -> str:
    """How FP8 rows are widened on a target: one route for all of a call, since they meet in one product."""
    clean = all(each.negative_zero_free for each in rows)
    return widen_route(target, rows[0].format, negative_zero_free=clean)


def bind_attention(
    config: SparseConfig, call: Call, target: Target, query: RowsFormat,
    prefix: RowsFormat | None, extend: RowsFormat | None,
) -> BoundLaunch:  # fmt: skip
    """The attention kernel of a configuration, for sources stored in these ways."""
    if config.stages:
        return _bind_hopper(config, call, query, prefix, extend)
    constexprs: dict[str, Any] = {
        "CALL": call,
        "PREFIX": _stored(prefix),
        "EXTEND": _stored(extend),
        "TILES": Tiles(config.block_h, config.block_k, config.width, config.guard),
    }
    if config.kernel == "wide":
        return BoundLaunch(_sparse_wide_kernel, constexprs, config.options)
    fp8 = [rows for rows in (query, prefix, extend) if rows is not None and rows.is_fp8]
    route = route_of(target, fp8)
    constexprs |= {
        "QUERY": _stored(query),
        "WIDENING": Widening(fp8[0].format, route, widening_exponent(fp8[0].format, route)),
        "FP8_QK": config.fp8_qk,
    }
    return BoundLaunch(_sparse_fused_kernel, constexprs, config.options)


def _bind_hopper(
    config: SparseConfig, call: Call, query: RowsFormat, prefix: RowsFormat | None, extend: RowsFormat | None
) -> BoundLaunch:
    # Not at the top: a Triton without Gluon runs everything else.
    from narrowkv.sparse_fp8.kernels.few import _sparse_few_kernel
    from narrowkv.sparse_fp8.kernels.hopper import HopperCall, _sparse_hopper_kernel
    from narrowkv.sparse_fp8.kernels.hopper_fp8 import _sparse_hopper_fp8_kernel

    rows = [each for each in (prefix, extend) if each is not None]
    kernel: Any
    if config.block_h < 64:
        kernel = _sparse_few_kernel
    else:
        kernel = _sparse_hopper_fp8_kernel if rows[0].is_fp8 else _sparse_hopper_kernel
    constexprs = HopperCall(
        call.NUM_HEADS,
        config.head_blocks(call.NUM_HEADS),
        prefix is not None,
        extend is not None,
        rows[0].layout if rows[0].is_fp8 else "",
        1 if prefix is None else prefix.page_size,
        1 if extend is None else extend.page_size,
        any(each.offsets_64_bit for each in rows),
        call.SPLIT,
        call.HAS_SINK,
        call.WRITE_LSE,
        config.block_h,
        config.block_k,
        config.stages,
        _SLACK[query.dtype],
    )
    return BoundLaunch(kernel, {"CALL": constexprs}, config.options)


def bind_merge(call: Call) -> BoundLaunch:
    """The merge of what splits leave."""
    constexprs = {"CALL": call, "BLOCK_S": _SPLITS_AT_ONCE}
    return BoundLaunch(_merge_sparse_kernel, constexprs, LaunchOptions(num_warps=1, num_stages=1))


def bind_expand(rows: RowsFormat, target: Target, *, gather: bool) -> BoundLaunch:
    """FP8 rows to 16-bit rows: all of them, or those that an index list names."""
    route = route_of(target, [rows])
    constexprs = {
        "GATHER": gather,
        "STORED": _stored(rows),
        "WIDENING": Widening(rows.format, route, widening_exponent(rows.format, route)),
        "BLOCK_R": expand_block(target),
    }
    return BoundLaunch(_expand_kernel, constexprs, LaunchOptions(num_warps=4, num_stages=1))

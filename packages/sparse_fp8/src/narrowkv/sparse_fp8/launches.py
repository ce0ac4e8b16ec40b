"""What a call of sparse attention launches: kernels with their constants, arguments by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from narrowkv.quant.formats import widen_route, widening_exponent
from narrowkv.runtime.attention.xcds import xcd_order
from narrowkv.runtime.launch import (
    Arg,
    BoundLaunch,
    KernelLaunch,
    LaunchOptions,
    PreparedCall,
    launch_by_name,
    named,
)
from narrowkv.runtime.operation import SCRATCH
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.binding import NO_CSR, NO_ROWS, RowsFormat, widened_format
from narrowkv.sparse_fp8.checks import SparseSettings
from narrowkv.sparse_fp8.config import SparseConfig, few_heads_registers
from narrowkv.sparse_fp8.kernels.expand import _expand_kernel
from narrowkv.sparse_fp8.kernels.fused import _sparse_fused_kernel
from narrowkv.sparse_fp8.kernels.results import Output, Partials, SparseSpec, Tiles, _merge_sparse_kernel
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers, StoredRows
from narrowkv.sparse_fp8.kernels.sixteen_bit import _sparse_16bit_kernel
from narrowkv.sparse_fp8.layouts import HEAD_DIM, LAYOUTS
from narrowkv.sparse_fp8.options import SparseArguments

_SPLITS_AT_ONCE = 8
_MERGE = LaunchOptions(num_warps=1, num_stages=1)
_EXPAND = LaunchOptions(num_warps=4, num_stages=1)
_LOG2E = math.log2(math.e)
# How far, in powers of two, a numerator may pass 1 before the reference of the logits is updated, and how far
# below 1 an update brings the largest. Float16 keeps its range; for bf16 see `softmax.headroom`.
_SLACK = {torch.float16: 8.0, torch.bfloat16: -24.0}
_HEADROOM = {torch.float16: 0.0, torch.bfloat16: 32.0}


def expand_block(target: Target) -> int:
    """Rows that one program of the expansion kernel widens."""
    return 64 if target.name == "cpu" else 16


def stored(
    rows: RowsFormat | None, target: Target, *, int64_offsets: bool | None = None
) -> StoredRows | None:
    """How rows are stored, as kernels are compiled for it, and how the target widens them."""
    if rows is None:
        return None
    if int64_offsets is None:
        int64_offsets = rows.offsets_64_bit
    if not rows.is_quantized:
        return StoredRows("", 0, "", "", 0, 0, 1, 0, 0, 0, 0, 0, False, int64_offsets, False, "", "", 0)
    layout = LAYOUTS[rows.layout]
    route = route_of(target, rows)
    rope_at = scale_at = value_step = rope_step = scale_step = 0
    if layout.is_paged:
        scale_at, scale_step = layout.scale_place(rows.page_size)
        value_step, rope_at = layout.data_bytes, layout.rope_at
        rope_step = layout.data_bytes
    elif layout.scale_at is not None:
        scale_at = layout.scale_at
    item, rope_item = layout.scale_item_bytes, layout.rope_item_bytes or 1
    return StoredRows(
        VALUES=layout.values,
        COLUMNS=layout.quantized,
        ROPE=layout.rope,
        SCALE=layout.scale,
        GROUP=rows.scale_group,
        STEP=max(1, layout.scale_copies * rows.scale_group // layout.group),
        PAGE_SIZE=rows.page_size,
        VALUE_STRIDE=value_step,
        ROPE_STRIDE=rope_step // rope_item,
        SCALE_STRIDE=scale_step // item,
        ROPE_AT=rope_at // rope_item,
        SCALE_AT=scale_at // item,
        ONE_BUFFER=item == 1,
        INT64_OFFSETS=int64_offsets,
        IN_HALVES=target.is_amd and layout.values == "fp8" and layout.quantized == HEAD_DIM,
        FORMAT=rows.format,
        ROUTE=route,
        EXPONENT=widening_exponent(rows.format, route),
        SCALE_STRIDE_IN_ROW=layout.scale_stride,
    )


def route_of(target: Target, rows: RowsFormat) -> str:
    """How the values of rows are widened on a target."""
    return widen_route(target, rows.format, negative_zero_free=rows.negative_zero_free)


def attention_kernel(
    plan: SparseSettings, config: SparseConfig, split: bool, offsets_64_bit: tuple[bool, bool, bool]
) -> BoundLaunch:
    """The attention kernel; `offsets_64_bit` is for prefix, extend and the heads of query and output."""
    tokens = config.xcd_tokens * config.head_blocks(plan.num_qo_heads)
    order = xcd_order(plan.target.xcds, plan.target.xcds * tokens, 1)
    call = _call(plan, split, offsets_64_bit[2])._replace(ORDER=order)
    query, prefix, extend = plan.query, plan.prefix, plan.extend
    if plan.mode == "prepass" or config.family != "portable":
        query = widened_format(query)
    if plan.mode == "prepass":
        prefix, extend = (None if rows is None else query for rows in (prefix, extend))
    prefix, extend = (
        None if rows is None else rows._replace(offsets_64_bit=far)
        for rows, far in zip((prefix, extend), offsets_64_bit, strict=False)
    )
    kernel, constexprs = _kernel_of(config, call, plan.target, query, prefix, extend)
    return plan.bind(kernel, config.options, **constexprs)


def _call(plan: SparseSettings, split: bool, int64_heads: bool) -> SparseSpec:
    return SparseSpec(
        plan.num_qo_heads, plan.has_sink, plan.writes_lse, split, int64_heads, plan.head_dim, plan.pages
    )


def _kernel_of(
    config: SparseConfig, call: SparseSpec, target: Target, query: RowsFormat,
    prefix: RowsFormat | None, extend: RowsFormat | None,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The attention kernel of a configuration and its constants, for sources stored in these ways."""
    if config.family == "hopper":
        return _hopper_kernel(config, call, target, query, prefix, extend)
    constexprs: dict[str, Any] = {"PREFIX": stored(prefix, target), "EXTEND": stored(extend, target)}
    if config.family == "cdna":
        from narrowkv.sparse_fp8.kernels.cdna.attention import _sparse_cdna_kernel, cdna_call

        return _sparse_cdna_kernel, {**constexprs, "CALL": cdna_call(call, config, target)}
    constexprs |= {"CALL": call, "TILES": Tiles(config.block_h, config.block_k, config.width, config.guard)}
    if config.kernel == "16bit":
        return _sparse_16bit_kernel, constexprs
    constexprs |= {"QUERY": stored(query, target, int64_offsets=True), "FP8_QK": config.fp8_qk}
    return _sparse_fused_kernel, constexprs


def _hopper_kernel(
    config: SparseConfig, call: SparseSpec, target: Target, query: RowsFormat,
    prefix: RowsFormat | None, extend: RowsFormat | None,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    # Not at the top: a Triton without Gluon runs everything else.
    from narrowkv.sparse_fp8.kernels.hopper.few_heads import _sparse_few_heads_kernel
    from narrowkv.sparse_fp8.kernels.hopper.fp8 import _sparse_hopper_fp8_kernel
    from narrowkv.sparse_fp8.kernels.hopper.frame import HopperCall
    from narrowkv.sparse_fp8.kernels.hopper.sixteen_bit import _sparse_hopper_kernel

    rows = [each for each in (prefix, extend) if each is not None]
    scale = LAYOUTS[rows[0].layout].scale if rows[0].is_quantized else ""
    far = any(each.offsets_64_bit for each in rows)
    kernel: Any
    if config.block_h < 64:
        kernel = _sparse_few_heads_kernel
    else:
        kernel = _sparse_hopper_fp8_kernel if rows[0].is_quantized else _sparse_hopper_kernel
    constexprs = HopperCall(
        call.NUM_HEADS,
        config.head_blocks(call.NUM_HEADS),
        prefix is not None,
        extend is not None,
        stored(rows[0], target, int64_offsets=far),
        stored(rows[-1], target, int64_offsets=far),
        call.SPLIT,
        call.HAS_SINK,
        call.WRITE_LSE,
        config.block_h,
        config.block_k,
        config.stages,
        _SLACK[query.dtype],
        _HEADROOM[query.dtype],
        *few_heads_registers(config.block_h, scale),
        call.PAGES,
        call.HEAD_DIM,
        HEAD_DIM // rows[0].scale_group if scale == "fp32" else 1,
    )
    return kernel, {"CALL": constexprs}


def merge_kernel(plan: SparseSettings) -> BoundLaunch:
    """The kernel that merges the partial results of splits."""
    return plan.bind(_merge_sparse_kernel, _MERGE, CALL=_call(plan, False, False), BLOCK_S=_SPLITS_AT_ONCE)


def expansion_kernel(plan: SparseSettings, rows: RowsFormat, *, gather: bool) -> BoundLaunch:
    """The kernel that expands FP8 rows to 16 bits: all of them, or those that an index list names."""
    return plan.bind(
        _expand_kernel, _EXPAND, GATHER=gather, STORED=stored(rows, plan.target), HEAD_DIM=rows.head_dim,
        BLOCK_R=expand_block(plan.target),
    )  # fmt: skip


# What launches depend on of a call's query or of one of its sources: the id of its format, for a 16-bit query
# the strides of tokens and heads; whether offsets into what the attention kernel reads can pass 31 bits; and
# which rows are expanded to 16 bits in scratch first, "all" or only the "named" ones, else "".
SideLayout = tuple[Any, bool, str]


class SparseLayout(NamedTuple):
    """What a plan's launches are made for; calls with equal layouts use the same launches.

    Attributes:
        family: `SparseConfig.family` of the attention kernel.
        split: whether several programs share the rows of a token.
        query, prefix, extend: how they lie; None for a source that is absent.
        out_dtype, stride_ot, stride_oh, stride_lt, stride_lh: dtype and strides of the outputs.
    """

    family: str
    split: bool
    query: SideLayout
    prefix: SideLayout | None
    extend: SideLayout | None
    out_dtype: torch.dtype
    stride_ot: int
    stride_oh: int
    stride_lt: int
    stride_lh: int


def prepare(
    plan: SparseSettings, config: SparseConfig, layout: SparseLayout,
    memory: Mapping[str, Any], given: SparseArguments,
) -> PreparedCall:  # fmt: skip
    """The launches of calls with this layout.

    Args:
        plan: of the calls.
        config: of the attention kernel.
        layout: what the launches depend on.
        memory: scratch by name: tensors, or parts of a block that each call allocates.
        given: such a call.
    """
    q = given.q
    steps: list[KernelLaunch] = []
    sources: dict[str, Any] = {}
    for side, source, lies in (
        ("prefix", given.prefix, layout.prefix),
        ("extend", given.extend, layout.extend),
    ):
        rows: Any = NO_ROWS
        csr: Any = NO_CSR
        if source is not None and lies is not None:
            rows, csr = named(side, source.pointers), named(side, source.csr)
            _, _, expands = lies
            if expands:
                gathered = csr if expands == "named" else None
                steps.append(_expand(plan, side, source.format, rows, gathered, memory))
                rows = _expanded_rows(plan, side, memory)
                csr = csr if gathered is None else csr._replace(indices=memory[f"{side}_places"])
        sources |= {side: rows, f"{side}_csr": csr}
        sources[f"{side}_rows"] = 0 if source is None else Arg(f"{side}_rows")
        sources[f"{side}_nnz"] = 0 if source is None else Arg(f"{side}_nnz")
    if isinstance(q, torch.Tensor):
        query = RowPointers(Arg("q_nope"), None, None, q.stride(0), 0, 0, q.stride(1), 0)
    else:
        query = named("q", q.bound.pointers)
        if layout.query[2]:
            steps.append(_expand(plan, "q", q.bound.format, query, None, memory))
            query = _expanded_rows(plan, "q", memory)._replace(
                stride_n=plan.num_qo_heads * plan.head_dim, stride_h=plan.head_dim
            )
    results = Output(
        Arg("out"), Arg("lse") if plan.writes_lse else None, Arg("sink") if plan.has_sink else None,
        layout.stride_ot, layout.stride_oh, layout.stride_lt, layout.stride_lh,
    )  # fmt: skip
    partials = Partials(*(memory[name] if layout.split else None for name in ("acc", "m", "l")))
    prefix_far, extend_far = (side is not None and side[1] for side in (layout.prefix, layout.extend))
    far = (prefix_far, extend_far, layout.query[1])
    kernel = attention_kernel(plan, config, layout.split, far)
    arguments = {
        "q": query, "out": results, "partials": partials, **sources, "qk_scale": plan.sm_scale * _LOG2E,
        "num_tokens": Arg("tokens"), "num_splits": Arg("splits"),
    }  # fmt: skip
    if layout.family == "hopper":
        arguments["num_items"] = Arg("items")
        steps.append(launch_by_name(kernel, (Arg("programs"),), **arguments))
    else:
        steps.append(launch_by_name(kernel, (Arg("programs"), Arg("splits")), **arguments))
    if layout.split:
        merged = {name: arguments[name] for name in ("out", "partials", "num_tokens", "num_splits")}
        steps.append(launch_by_name(merge_kernel(plan), (Arg("merged_rows"),), **merged))
    return PreparedCall(("q_nope", "out", "lse", "sink", SCRATCH), steps)


def _expand(
    plan: SparseSettings, side: str, stored_as: RowsFormat, rows: RowPointers, gathered: Csr | None,
    memory: Mapping[str, Any],
) -> KernelLaunch:  # fmt: skip
    """Expands FP8 rows to 16 bits: the first ones, or those that the index lists `gathered` name."""
    gather = gathered is not None
    return launch_by_name(
        expansion_kernel(plan, stored_as, gather=gather), (Arg(f"{side}_blocks"),),
        out_ptr=memory[f"{side}_expanded"], places_ptr=memory[f"{side}_places"] if gather else None,
        rows=rows, csr=gathered if gather else NO_CSR, num_rows=Arg(f"{side}_stored_rows"),
        num_out=Arg(f"{side}_rows"),
    )  # fmt: skip


def _expanded_rows(plan: SparseSettings, side: str, memory: Mapping[str, Any]) -> RowPointers:
    return RowPointers(memory[f"{side}_expanded"], None, None, plan.head_dim, 0, 0, 0, 0)

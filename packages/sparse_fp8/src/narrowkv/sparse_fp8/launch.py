"""From a plan to kernels: the launches of a plan, bound at the first call that needs them, and kept."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from narrowkv.quant.device import widen_route, widening_exponent
from narrowkv.runtime.launch import VARIES, BoundLaunch, FixedLaunch, LaunchOptions
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.binding import NO_CSR, RowsFormat, varying
from narrowkv.sparse_fp8.checks import PlannedCall
from narrowkv.sparse_fp8.config import SparseConfig, few_heads_registers
from narrowkv.sparse_fp8.formats import widened_format
from narrowkv.sparse_fp8.kernels.expand import _expand_kernel
from narrowkv.sparse_fp8.kernels.fused import _sparse_fused_kernel
from narrowkv.sparse_fp8.kernels.results import Call, Output, Partials, Tiles, _merge_sparse_kernel
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers, Stored
from narrowkv.sparse_fp8.kernels.sixteen_bit import _sparse_16bit_kernel
from narrowkv.sparse_fp8.layouts import HEAD_DIM, LAYOUTS
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

NO_PARTIALS = Partials(None, None, None)
_SPLITS_AT_ONCE = 8
_MAX_FIXED = 1024
_LOG2E = math.log2(math.e)
# How far, in powers of two, a numerator may pass 1 before the reference of the logits is updated, and how far
# below 1 an update brings the largest. Float16 keeps its range; for bf16 see `softmax.headroom`.
_SLACK = {torch.float16: 8.0, torch.bfloat16: -24.0}
_HEADROOM = {torch.float16: 0.0, torch.bfloat16: 32.0}


def expand_block(target: Target) -> int:
    """Rows that one program of the expansion kernel widens."""
    return 64 if target.name == "cpu" else 16


def stored(rows: RowsFormat | None, target: Target, *, int64_offsets: bool | None = None) -> Stored | None:
    """How rows are stored, as kernels are compiled for it, and how the target widens them."""
    if rows is None:
        return None
    if int64_offsets is None:
        int64_offsets = rows.offsets_64_bit
    if not rows.is_quantized:
        return Stored("", 0, "", "", 0, 0, 1, 0, 0, 0, 0, 0, False, int64_offsets, False, "", "", 0)
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
    return Stored(
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


def bind_attention(
    config: SparseConfig, call: Call, target: Target, query: RowsFormat,
    prefix: RowsFormat | None, extend: RowsFormat | None,
) -> BoundLaunch:  # fmt: skip
    """The attention kernel of a configuration, for sources stored in these ways."""
    if config.family == "hopper":
        return _bind_hopper(config, call, target, query, prefix, extend)
    constexprs: dict[str, Any] = {"PREFIX": stored(prefix, target), "EXTEND": stored(extend, target)}
    if config.family == "cdna":
        from narrowkv.sparse_fp8.kernels.cdna import _sparse_cdna_kernel, cdna_call

        constexprs["CALL"] = cdna_call(call, config, target)
        return BoundLaunch(_sparse_cdna_kernel, constexprs, config.options)
    tiles = Tiles(config.block_h, config.block_k, config.width, config.guard)
    constexprs |= {"CALL": call, "TILES": tiles}
    if config.kernel == "16bit":
        return BoundLaunch(_sparse_16bit_kernel, constexprs, config.options)
    constexprs |= {"QUERY": stored(query, target, int64_offsets=True), "FP8_QK": config.fp8_qk}
    return BoundLaunch(_sparse_fused_kernel, constexprs, config.options)


def _bind_hopper(
    config: SparseConfig, call: Call, target: Target, query: RowsFormat,
    prefix: RowsFormat | None, extend: RowsFormat | None,
) -> BoundLaunch:  # fmt: skip
    # Not at the top: a Triton without Gluon runs everything else.
    from narrowkv.sparse_fp8.kernels.few_heads import _sparse_few_heads_kernel
    from narrowkv.sparse_fp8.kernels.hopper import _sparse_hopper_kernel
    from narrowkv.sparse_fp8.kernels.hopper_copies import HopperCall
    from narrowkv.sparse_fp8.kernels.hopper_fp8 import _sparse_hopper_fp8_kernel

    rows = [each for each in (prefix, extend) if each is not None]
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
        *few_heads_registers(config.block_h, rows[0].is_quantized),
    )
    return BoundLaunch(kernel, {"CALL": constexprs}, config.options)


def bind_merge(call: Call) -> BoundLaunch:
    """The kernel that merges the partial results of splits."""
    constexprs = {"CALL": call, "BLOCK_S": _SPLITS_AT_ONCE}
    return BoundLaunch(_merge_sparse_kernel, constexprs, LaunchOptions(num_warps=1, num_stages=1))


def bind_expand(rows: RowsFormat, target: Target, *, gather: bool) -> BoundLaunch:
    """The kernel that expands FP8 rows to 16 bits: all of them, or those that an index list names."""
    constexprs = {
        "GATHER": gather,
        "STORED": stored(rows, target),
        "HEAD_DIM": rows.head_dim,
        "BLOCK_R": expand_block(target),
    }
    return BoundLaunch(_expand_kernel, constexprs, LaunchOptions(num_warps=4, num_stages=1))


class CallLayout(NamedTuple):
    """Everything that a kernel's fixed arguments depend on besides the plan; two equal ones share a launch.

    Attributes:
        family: `SparseConfig.family` of the configuration.
        split: whether several programs share the rows of a token.
        prefix_offsets_64_bit, extend_offsets_64_bit, head_offsets_64_bit: which offsets can pass 31 bits.
        query: the strides of a 16-bit query, or the struct of an FP8 one.
        out_dtype, stride_ot, stride_oh, stride_lt, stride_lh: dtype and strides of the outputs.
        prefix_format, extend_format: `format_id` of each source.
    """

    family: str
    split: bool
    prefix_offsets_64_bit: bool
    extend_offsets_64_bit: bool
    head_offsets_64_bit: bool
    query: tuple[Any, ...]
    out_dtype: torch.dtype
    stride_ot: int
    stride_oh: int
    stride_lt: int
    stride_lh: int
    prefix_format: Any
    extend_format: Any


class SparseLaunches:
    """The launches of one plan.

    Args:
        planned: what all calls of the plan have in common.
        sm_scale: the softmax scale.
    """

    def __init__(self, planned: PlannedCall, sm_scale: float) -> None:
        self.planned, self.sm_scale = planned, sm_scale
        self._bound: dict[Any, BoundLaunch] = {}
        self._fixed: dict[Any, Any] = {}

    def attention(
        self, config: SparseConfig, layout: CallLayout, prefix: tuple[RowPointers, Csr],
        extend: tuple[RowPointers, Csr],
    ) -> tuple[FixedLaunch, FixedLaunch | None]:  # fmt: skip
        """The attention kernel of such calls, and the merge kernel if their rows are split."""
        known: tuple[FixedLaunch, FixedLaunch | None] | None = self._fixed.get(layout)
        if known is not None:
            return known
        planned, query = self.planned, layout.query
        if not isinstance(query, RowPointers):
            query = RowPointers(VARIES, None, None, query[0], 0, 0, query[1], 0)
        lse, sink = VARIES if planned.writes_lse else None, VARIES if planned.has_sink else None
        results = Output(
            VARIES, lse, sink, layout.stride_ot, layout.stride_oh, layout.stride_lt, layout.stride_lh
        )
        partials = Partials(VARIES, VARIES, VARIES) if layout.split else NO_PARTIALS
        sizes = (VARIES,) * (7 if config.family == "hopper" else 6)
        sources = (*map(varying, prefix), *map(varying, extend))
        offsets = (
            layout.prefix_offsets_64_bit, layout.extend_offsets_64_bit, layout.head_offsets_64_bit,
        )  # fmt: skip
        attend = FixedLaunch(
            self.bound_attention(config, layout.split, offsets),
            (query, results, partials, *sources, self.sm_scale * _LOG2E, *sizes),
        )
        merge = None
        if layout.split:
            merge = FixedLaunch(self.bound_merge(), (results, partials, VARIES, VARIES))
        self._keep(layout, (attend, merge))
        return attend, merge

    def expand(
        self, rows: DSV4Rows, named_by: KVSource | None, count: int, expanded: torch.Tensor,
        places: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Expands FP8 rows to 16 bits: the first `count` rows, or those that index lists name.

        Args:
            rows: the rows.
            named_by: the source whose index lists name the rows; None for the first ones.
            count: rows of the result.
            expanded: where to write, bf16 or fp16 `[count, 512]`.
            places: with `named_by`, where to write the row of `expanded` that each index refers to.
        """
        gather = named_by is not None
        key = ("expand", rows.bound.template, rows.bound.format, named_by and named_by.format_id)
        launch = self._fixed.get(key)
        if launch is None:
            csr = NO_CSR if named_by is None else varying(named_by.csr)
            arguments = (VARIES, VARIES if gather else None, rows.bound.template, csr, VARIES, VARIES)
            launch = FixedLaunch(self.bound_expansion(rows.bound.format, gather=gather), arguments)
            self._keep(key, launch)
        grid = (-(-count // expand_block(self.planned.target)), 1, 1)
        if named_by is None:
            launch(grid, (expanded, *rows.bound.stored, rows.num_rows, count))
        else:
            lists = named_by.csr
            launch(
                grid,
                (expanded, places, *rows.bound.stored, lists.indptr, lists.indices, rows.num_rows, count),
            )

    def bound_attention(
        self, config: SparseConfig, split: bool, offsets_64_bit: tuple[bool, bool, bool]
    ) -> BoundLaunch:
        """The attention kernel; `offsets_64_bit` is for prefix, extend and the heads of query and output."""
        key = (config.family, split, offsets_64_bit)
        known = self._bound.get(key)
        if known is not None:
            return known
        planned = self.planned
        call = Call(
            planned.num_qo_heads, planned.has_sink, planned.writes_lse, split, offsets_64_bit[2],
            planned.head_dim,
        )  # fmt: skip
        query, prefix, extend = planned.query, planned.prefix, planned.extend
        if planned.mode == "prepass" or config.family != "portable":
            query = widened_format(query)
        if planned.mode == "prepass":
            prefix, extend = (None if rows is None else query for rows in (prefix, extend))
        prefix, extend = (
            None if rows is None else rows._replace(offsets_64_bit=large)
            for rows, large in zip((prefix, extend), offsets_64_bit, strict=False)
        )
        self._bound[key] = bind_attention(config, call, planned.target, query, prefix, extend)
        return self._bound[key]

    def bound_merge(self) -> BoundLaunch:
        """The merge kernel."""
        if "merge" not in self._bound:
            planned = self.planned
            call = Call(
                planned.num_qo_heads, planned.has_sink, planned.writes_lse, False, False, planned.head_dim
            )
            self._bound["merge"] = bind_merge(call)
        return self._bound["merge"]

    def bound_expansion(self, rows: RowsFormat, *, gather: bool) -> BoundLaunch:
        """The expansion kernel for rows that are stored in this way."""
        key = (rows, gather)
        if key not in self._bound:
            self._bound[key] = bind_expand(rows, self.planned.target, gather=gather)
        return self._bound[key]

    def _keep(self, key: Any, launch: Any) -> None:
        if len(self._fixed) >= _MAX_FIXED:
            self._fixed.clear()
        self._fixed[key] = launch

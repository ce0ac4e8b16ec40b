"""What a call of Sage attention launches: scratch memory, kernels with their constants, arguments by name.

A call quantises K and V, quantises Q, and attends. `memory` says where the tensors between the kernels are:
it maps the names of `blocks_of_keys`, `blocks_of_statistics` and `blocks_of_queries` to tensors, or to marks
of what each call gives. A name that is not there is a step that the plan does not take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from narrowkv.quant.formats import get_format
from narrowkv.quant.sage import TokenGroups, token_groups
from narrowkv.runtime.attention.xcds import xcd_order
from narrowkv.runtime.launch import (
    Arg,
    BoundLaunch,
    Clear,
    Described,
    KernelLaunch,
    LaunchOptions,
    Part,
    launch_by_name,
)
from narrowkv.runtime.launch.workspace import Block
from narrowkv.runtime.operation import Plan
from narrowkv.sage.checks import windows_of
from narrowkv.sage.config import SageConfig
from narrowkv.sage.kernels import (
    ChannelStatistics,
    Groups,
    Mask,
    Narrow,
    NarrowKeys,
    NarrowQuery,
    SageOutputs,
    SageSpec,
    Smoothing,
    Strided,
    TileLists,
    ValueOrder,
    _channel_statistics_kernel,
    _finish_statistics_kernel,
    _mean_scores_kernel,
    _quantise_keys_values_kernel,
    _quantise_tokens_kernel,
    _sage_attention_kernel,
    _sequence_bounds_kernel,
    _tile_lists_kernel,
)
from narrowkv.sage.options import SageArguments
from narrowkv.sage.shapes import ROW_ALIGNMENT, SageShape, descriptor_of

Memory = Mapping[str, Any]

_LOG2E = math.log2(math.e)
# The kernels round exactly as the host does: a multiplication and an addition must not be fused.
# H200, b2 h32 d128, 16k tokens: statistics of K and V at 2 and 4 warps 138 us, 8 warps 147. At 4k K and V
# took 136 in all, 142 if the last part to arrive finished the statistics; with statistics and blocks both at
# 16 warps 378, in one launch where blocks waited 351 to 410.
_STATISTICS = LaunchOptions(num_warps=4, num_stages=1, enable_fp_fusion=False)
# Tokens that a program quantises, at least. H200, the same at 2k: K and V, then Q, at 64 tokens and 4 warps
# 40 and 19 us, 8 warps 48 and 20, 16 warps 53 and 23; 128 tokens and 8 or 16 warps 59 and 22; Q at 32 tokens
# and 4 warps 19. Model: gfx950 at 64 tokens and 4 warps 23 and 13, 8 warps 19 and 9, 16 warps 25 and 12; 128
# tokens and 8 warps 19 and 9. gfx942 at 64 tokens and 4 warps 22 and 8, 8 warps 22 and 10.
_LEAST_BLOCK = 64
_BOUNDS = LaunchOptions(num_warps=1, num_stages=1)
_MEANS = LaunchOptions(num_warps=4, num_stages=1)
_LISTS = LaunchOptions(num_warps=1, num_stages=1)
_MEAN_BLOCKS = 16  # blocks of Q whose means meet a tile of keys at once: the least rows of a dot


@dataclass(frozen=True, eq=False, kw_only=True)
class SageSettings(Plan):
    """The part of a `SagePlan` that its launches are made from.

    Attributes:
        shape: the sizes of the largest call.
        options: the keywords of `plan_sage`.
        config: the launch configuration.
        cu_seqlens_q, cu_seqlens_k: where sequences begin, unless a call says so; None for a dense batch.
    """

    shape: SageShape
    options: SageArguments
    config: SageConfig
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    @cached_property
    def qk_format(self) -> str:
        """Format of Q and K in scratch: "int8", "int4" or the target's FP8."""
        return self.config.fp8 if self.options.qk_dtype == "fp8" else self.options.qk_dtype

    @cached_property
    def q_groups(self) -> TokenGroups | None:
        """Tokens of Q that share a descale; None for the whole tensor."""
        return token_groups("q", self.options.q_granularity)

    @cached_property
    def k_groups(self) -> TokenGroups | None:
        """Tokens of K that share a descale; None for the whole tensor."""
        return token_groups("k", self.options.k_granularity)

    @cached_property
    def mask(self) -> Mask:
        """Which keys a query attends to."""
        return Mask(*windows_of(self.options.causal, self.options.window))

    @property
    def smooth_k(self) -> bool:
        """Whether the means of K are taken out."""
        return self.options.smooth_k

    @property
    def smooth_q(self) -> bool:
        """Whether the means of Q are taken out."""
        return self.options.smooth_q

    @property
    def block_sizes(self) -> tuple[int, int] | None:
        """Queries and keys of a block of the block mask; None for a plan without one."""
        return self.options.block_sizes

    @cached_property
    def sm_scale(self) -> float:
        """The softmax scale."""
        scale = self.options.sm_scale
        return float(self.shape.head_dim**-0.5 if scale is None else scale)


# --------------------------------------------------------------------------------------------------- memory


def blocks_of_keys(plan: SageSettings, size: SageShape) -> dict[str, Block]:
    """The quantised K and V of a call, by name."""
    heads, dim, rows = size.num_kv_heads, size.head_dim, size.rows(size.k_tokens)
    channels = (size.batch, heads, dim)
    found: dict[str, Block] = {
        "k_codes": _codes_block(plan.qk_format, (heads, rows), dim),
        "k_descale": (_descales(plan.k_groups, heads, rows), torch.float32),
        "v_codes": ((heads, dim, rows), torch.uint8),
        "v_descale": (channels, torch.float32),
    }
    if plan.smooth_k:
        found["k_mean"] = (channels, torch.float32)
    if size.ragged:
        found["k_bounds"] = ((size.batch, 2), torch.int32)
    return found


def blocks_of_statistics(plan: SageSettings, size: SageShape) -> dict[str, Block]:
    """Scratch of the step that quantises K and V, by name."""
    partial = (size.batch, size.num_kv_heads, _parts(plan), size.head_dim)
    found: dict[str, Block] = {"v_parts": (partial, torch.float32)}
    if plan.smooth_k:
        found["k_parts"] = (partial, torch.float64)
    if plan.k_groups is None:
        found["amax"] = ((1,), torch.int32)
    return found


def attention_quantises(plan: SageSettings, lse: bool) -> bool:
    """Whether attention quantises Q: groups lie within a tile of rows, no other kernel reads the codes."""
    groups = plan.q_groups
    within = groups is not None and plan.config.block_m % groups.span == 0
    return plan.config.quantises_q and within and not plan.smooth_q and not (plan.smooth_k and lse)


def blocks_of_queries(
    plan: SageSettings, size: SageShape, *, lse: bool = True, block_mask: torch.Tensor | None = None
) -> dict[str, Block]:
    """Scratch of a call's quantised Q, by name; without its block mask that of the largest one."""
    heads, rows = size.num_qo_heads, size.rows(size.q_tokens)
    blocks = rows // ROW_ALIGNMENT
    found: dict[str, Block] = {}
    if not attention_quantises(plan, lse):
        found["q_codes"] = _codes_block(plan.qk_format, (heads, rows), size.head_dim)
        found["q_descale"] = (_descales(plan.q_groups, heads, rows), torch.float32)
    if plan.q_groups is None:
        found["amax"] = ((1,), torch.int32)
    if size.ragged:
        found["q_bounds"] = ((size.batch, 2), torch.int32)
    if plan.smooth_q:
        found["q_mean"] = ((heads, blocks, size.head_dim), torch.float32)
        found["mean_scores"] = ((heads, blocks, size.rows(size.k_tokens)), torch.float32)
    if plan.smooth_k and lse:
        found["shift"] = ((heads, rows), torch.float32)
    return found | blocks_of_lists(plan, size, block_mask)


def blocks_of_lists(plan: SageSettings, size: SageShape, block_mask: torch.Tensor | None) -> dict[str, Block]:
    """Scratch of the lists of key tiles, by name; without a call's block mask that of the largest one."""
    if plan.block_sizes is None:
        return {}
    q_blocks, k_tiles = _sizes_of_lists(plan, size, block_mask)
    lists = (size.batch * size.num_qo_heads, q_blocks)
    return {
        "listed_tiles": ((*lists, k_tiles), torch.int32),
        "tiles_before": ((*lists, k_tiles + 1), torch.int32),
    }


def _sizes_of_lists(plan: SageSettings, size: SageShape, block_mask: torch.Tensor | None) -> tuple[int, int]:
    """Blocks of queries of a sequence, and key tiles that may be listed for one; 0 without a block mask."""
    if plan.block_sizes is None:
        return 0, 0
    block_q, block_k = plan.block_sizes
    tiles = -(-size.k_tokens // plan.config.block_n)
    if block_mask is None:
        return -(-size.q_tokens // block_q), tiles
    return block_mask.shape[2], min(tiles, block_mask.shape[3] * (block_k // plan.config.block_n))


def _codes_block(format_name: str, rows: tuple[int, int], channels: int) -> Block:
    """Codes with the dtype that the pre-pass writes."""
    fmt = get_format(format_name)
    return (*rows, fmt.storage_bytes(channels)), torch.uint8 if fmt.kind == "fp8" else torch.int8


def _descales(groups: TokenGroups | None, heads: int, rows: int) -> tuple[int, ...]:
    return (1,) if groups is None else (heads, rows // groups.span * groups.groups)


def as_stored(codes: Any, format_name: str) -> Any:
    """Codes, or a mark of them, with the dtype that attention reads."""
    fmt = get_format(format_name)
    if fmt.kind != "fp8" or isinstance(codes, Arg):
        return codes
    if isinstance(codes, Part):
        return Part(codes.block, codes.offset, fmt.storage_dtype)
    return codes.view(fmt.storage_dtype)


# -------------------------------------------------------------------------------------------------- kernels


def _parts(plan: SageSettings) -> int:
    """Programs that share a head's statistics: enough to fill a GPU, none that does little."""
    return min(16, 1 << max(-(-plan.shape.k_tokens // 256) - 1, 0).bit_length())


def _block(plan: SageSettings, side: str) -> int:
    """Tokens of Q or K that a program quantises: whole groups, and whole blocks of smoothed queries."""
    groups = plan.q_groups if side == "q" else plan.k_groups
    if side == "q" and plan.smooth_q:
        return ROW_ALIGNMENT
    return max(_LEAST_BLOCK, 0 if groups is None else groups.span)


def _quantising(plan: SageSettings, side: str) -> LaunchOptions:
    warps = _block(plan, side) // (16 if plan.target.is_nvidia else 8)
    return LaunchOptions(num_warps=warps, num_stages=1, enable_fp_fusion=False)


def _groups(groups: TokenGroups | None) -> Groups:
    return Groups(0, 1, 1) if groups is None else Groups(groups.span, groups.groups, groups.run)


def _order(plan: SageSettings) -> ValueOrder:
    order = plan.config.key_order
    return ValueOrder(order.gather, order.lanes, order.width)


def _bounds(plan: SageSettings) -> BoundLaunch:
    return plan.bind(_sequence_bounds_kernel, _BOUNDS)


def _statistics(plan: SageSettings) -> tuple[BoundLaunch, BoundLaunch]:
    """The kernels that measure the channels of K and V."""
    shape = plan.shape
    same = {
        "RAGGED": shape.ragged, "SMOOTH": plan.smooth_k, "PARTS": _parts(plan), "HEAD_DIM": shape.head_dim
    }  # fmt: skip
    v_max = get_format(plan.config.fp8).max_value
    return (
        plan.bind(_channel_statistics_kernel, _STATISTICS, **same, BLOCK=32),
        plan.bind(_finish_statistics_kernel, _STATISTICS, **same, V_FORMAT_MAX=v_max),
    )


def _tokens(plan: SageSettings, side: str, *, shift: bool = False, measure: bool = False) -> BoundLaunch:
    """The kernel that quantises Q, or that only finds the largest magnitude of Q or K.

    `shift`: it also stores what smoothing K takes from the log-sum-exp.
    """
    is_q = side == "q"
    smooth = ("block" if plan.smooth_q else "none") if is_q else "sequence" if plan.smooth_k else "none"
    return plan.bind(
        _quantise_tokens_kernel, _quantising(plan, side), RAGGED=plan.shape.ragged, SMOOTH=smooth,
        WRITE_SHIFT=shift, GQA_RATIO=plan.shape.gqa_ratio if is_q else 1, FORMAT=plan.qk_format,
        FORMAT_MAX=get_format(plan.qk_format).max_value, MEASURE=measure,
        GROUPS=_groups(plan.q_groups if is_q else plan.k_groups), HEAD_DIM=plan.shape.head_dim,
        BLOCK=_block(plan, side),
    )  # fmt: skip


def _keys_values(plan: SageSettings) -> BoundLaunch:
    return plan.bind(
        _quantise_keys_values_kernel, _quantising(plan, "k"), RAGGED=plan.shape.ragged, SMOOTH=plan.smooth_k,
        FORMAT=plan.qk_format, FORMAT_MAX=get_format(plan.qk_format).max_value, GROUPS=_groups(plan.k_groups),
        V_FORMAT=plan.config.fp8, ORDER=_order(plan), HEAD_DIM=plan.shape.head_dim, BLOCK=_block(plan, "k"),
        V_BLOCK=_LEAST_BLOCK,
    )  # fmt: skip


def _mean_scores(plan: SageSettings) -> BoundLaunch:
    """The kernel that multiplies the means of Q with K."""
    return plan.bind(
        _mean_scores_kernel, _MEANS, RAGGED=plan.shape.ragged, GQA_RATIO=plan.shape.gqa_ratio,
        HEAD_DIM=plan.shape.head_dim, BLOCK_Q=_MEAN_BLOCKS,
    )  # fmt: skip


def _tile_lists(plan: SageSettings, sizes: tuple[int, int]) -> BoundLaunch:
    """The kernel that lists the key tiles that a block mask shows."""
    return plan.bind(_tile_lists_kernel, _LISTS, K_TILES=sizes[1] // plan.config.block_n)


def _attention(plan: SageSettings, lse: bool, tma: bool, quantises: bool) -> BoundLaunch:
    config, format_max = plan.config, get_format(plan.qk_format).max_value
    q_tiles = 0 if plan.block_sizes is None else plan.block_sizes[0] // config.block_m
    call = SageSpec(
        plan.shape.ragged, plan.shape.gqa_ratio, plan.shape.head_dim, plan.qk_format,
        format_max if quantises else 0, plan.smooth_q,
        plan.smooth_k and lse, lse, math.log2(get_format(config.fp8).max_value), config.two_level, tma,
        config.reread_q, config.ahead, config.block_m, config.block_n, q_tiles,
        xcd_order(plan.target.xcds, plan.shape.num_qo_heads, config.xcd_rows),
    )  # fmt: skip
    return plan.bind(
        _sage_attention_kernel, config.options, CALL=call, Q_GROUPS=_groups(plan.q_groups),
        K_GROUPS=_groups(plan.k_groups), MASK=plan.mask, ORDER=_order(plan),
    )  # fmt: skip


def kernels_of(plan: SageSettings) -> list[BoundLaunch]:
    """Every kernel that calls can launch, the log-sum-exp written or not."""
    found = [_bounds(plan)] if plan.shape.ragged else []
    found += [*_statistics(plan), _keys_values(plan)]
    sides = {"k": plan.k_groups, "q": plan.q_groups}
    found += [_tokens(plan, side, measure=True) for side, groups in sides.items() if groups is None]
    found += [_mean_scores(plan)] if plan.smooth_q else []
    found += [] if plan.block_sizes is None else [_tile_lists(plan, plan.block_sizes)]
    for lse in (False, True):
        quantises = attention_quantises(plan, lse)
        found += [] if quantises else [_tokens(plan, "q", shift=plan.smooth_k and lse)]
        found.append(_attention(plan, lse, plan.config.tma, quantises))
    return list({id(launch): launch for launch in found}.values())


# ------------------------------------------------------------------------------------------------- launches


def _strided(name: str, x: torch.Tensor) -> Strided:
    """A tensor of a call, which is as BSHD or `[tokens, heads, head_dim]`."""
    return Strided(Arg(name), x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


def _find_bounds(
    plan: SageSettings, side: str, size: SageShape, tokens: int, memory: Memory
) -> list[KernelLaunch]:
    """Finds where sequences lie, clamped whatever the starts hold."""
    if not size.ragged or not size.batch:
        return []
    return [
        launch_by_name(
            _bounds(plan), (1,), starts_ptr=Arg(f"{side}_starts"), bounds_ptr=memory[f"{side}_bounds"],
            num_tokens=tokens, batch=size.batch,
        )
    ]  # fmt: skip


def quantise_keys(
    plan: SageSettings, size: SageShape, k: torch.Tensor, v: torch.Tensor, memory: Memory
) -> list[KernelLaunch | Clear]:
    """The steps that quantise `k` and `v`: the channels' statistics, then the blocks, of both at once."""
    heads, rows, bounds = size.num_kv_heads, size.rows(size.k_tokens), memory.get("k_bounds")
    k_mean = memory.get("k_mean")
    same = {"bounds_ptr": bounds, "batch": size.batch, "length": size.k_tokens}
    tensors = {"k": _strided("k", k), "v": _strided("v", v)}
    stats = {
        "k_stats": ChannelStatistics(memory.get("k_parts"), k_mean),
        "v_stats": ChannelStatistics(memory["v_parts"], memory["v_descale"]),
    }
    smoothing = Smoothing(None, k_mean, None)
    amax = memory["amax"] if plan.k_groups is None else None
    narrow = Narrow(memory["k_codes"], memory["k_descale"], amax, rows)
    items, k_blocks = size.batch * (2 if plan.smooth_k else 1), rows // _block(plan, "k")
    blocks = k_blocks + rows // _LEAST_BLOCK
    measure, finish = _statistics(plan)
    steps: list[KernelLaunch | Clear] = [
        *_find_bounds(plan, "k", size, size.k_tokens, memory),
        launch_by_name(measure, (heads * _parts(plan) * items,), **tensors, **stats, **same, num_heads=heads),
        launch_by_name(finish, (items, heads), **stats, **same),
    ]
    if amax is not None:
        largest = _tokens(plan, "k", measure=True)
        given = {"x": tensors["k"], "smoothing": smoothing, "out": narrow, "sm_scale": 0.0, **same}
        steps += [Clear(amax, 1), launch_by_name(largest, (heads * k_blocks,), **given, num_heads=heads)]
    quantise = launch_by_name(
        _keys_values(plan), (heads * blocks,), **tensors, smoothing=smoothing,
        v_descale_ptr=memory["v_descale"], k_out=narrow, v_out_ptr=memory["v_codes"], **same, num_heads=heads,
    )  # fmt: skip
    return [*steps, quantise]


def quantise_queries(
    plan: SageSettings, size: SageShape, q: torch.Tensor, k_source: torch.Tensor | None, memory: Memory, *,
    lse: bool,
) -> list[KernelLaunch | Clear]:  # fmt: skip
    """The steps that quantise `q`; `k_source` is K before its quantisation, where Q is smoothed."""
    if attention_quantises(plan, lse):
        return [*_find_bounds(plan, "q", size, size.q_tokens, memory)]
    heads, rows, bounds = size.num_qo_heads, size.rows(size.q_tokens), memory.get("q_bounds")
    blocks, shifts = rows // ROW_ALIGNMENT, plan.smooth_k and lse
    programs = (heads * (rows // _block(plan, "q")),)
    amax = memory["amax"] if plan.q_groups is None else None
    mean = memory.get("q_mean")
    given = {
        "x": _strided("q", q),
        "bounds_ptr": bounds,
        "smoothing": Smoothing(mean, memory["k_mean"] if shifts else None, memory.get("shift")),
        "out": Narrow(memory["q_codes"], memory["q_descale"], amax, rows),
        "sm_scale": plan.sm_scale,
        "batch": size.batch,
        "length": size.q_tokens,
        "num_heads": heads,
    }
    steps: list[KernelLaunch | Clear] = [*_find_bounds(plan, "q", size, size.q_tokens, memory)]
    if amax is not None:
        measure = launch_by_name(_tokens(plan, "q", measure=True), programs, **given)
        steps += [Clear(amax, 1), measure]
    steps.append(launch_by_name(_tokens(plan, "q", shift=shifts), programs, **given))
    if k_source is not None and plan.smooth_q:
        k_rows = size.rows(size.k_tokens)
        blocks_of_one = -(-size.q_tokens // ROW_ALIGNMENT)
        grid = (k_rows // ROW_ALIGNMENT, -(-blocks_of_one // _MEAN_BLOCKS), heads)
        means = launch_by_name(
            _mean_scores(plan), grid, k=_strided("k", k_source), q_bounds_ptr=bounds,
            k_bounds_ptr=memory.get("k_bounds"), q_mean_ptr=mean, out_ptr=memory["mean_scores"],
            q_blocks=blocks, k_rows=k_rows, qk_scale=plan.sm_scale * _LOG2E, batch=size.batch,
            q_length=size.q_tokens, k_length=size.k_tokens,
        )  # fmt: skip
        steps.append(means)
    return steps


def list_tiles(
    plan: SageSettings, size: SageShape, block_mask: torch.Tensor | None, memory: Memory
) -> list[KernelLaunch]:
    """The step that lists the key tiles of each block of queries, where the plan has a block mask."""
    if plan.block_sizes is None or block_mask is None:
        return []
    strides, (q_blocks, k_tiles) = block_mask.stride(), _sizes_of_lists(plan, size, block_mask)
    return [
        launch_by_name(
            _tile_lists(plan, plan.block_sizes), (size.batch * size.num_qo_heads * q_blocks,),
            mask_ptr=Arg("block_mask"), mask_batch=strides[0], mask_head=strides[1], mask_q_block=strides[2],
            mask_k_block=strides[3], lists=_lists(plan, memory), num_heads=size.num_qo_heads,
            q_blocks=q_blocks, k_tiles=k_tiles,
        )
    ]  # fmt: skip


def _lists(plan: SageSettings, memory: Memory) -> TileLists | None:
    """Where the lists of key tiles are; None for a plan without a block mask."""
    if plan.block_sizes is None:
        return None
    return TileLists(memory["listed_tiles"], memory["tiles_before"])


def attend(
    plan: SageSettings,
    size: SageShape,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    memory: Memory,
    block_mask: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
) -> KernelLaunch:
    """Attention over the results of the pre-pass, into tensors with these strides, `lse` `[..., heads]`.

    `q` is quantised here where `attention_quantises`; without it, its codes are in `memory`.
    """
    config = plan.config
    q_blocks, k_tiles = _sizes_of_lists(plan, size, block_mask)
    rows, k_rows = size.rows(size.q_tokens), size.rows(size.k_tokens)
    tiles = -(-(rows if size.ragged else size.q_tokens) // config.block_m)
    items = size.num_qo_heads * (1 if size.ragged else size.batch)
    together = 1
    if config.xcd_rows:
        together = max(size.num_qo_heads, 1)
    # Without a limit to the right all tiles have the same length. If a head has many, few are last.
    elif plan.mask.RIGHT >= 0 and 4 * tiles <= config.programs_together:
        together = min(-(-config.programs_together // max(tiles, 1)), max(items, 1))
    # Codes of int4 are read times 16 on both sides.
    codes = 1 / 256 if plan.qk_format == "int4" else 1.0
    steps = (0, 0, 0)
    if lse is not None:
        steps = (0 if size.ragged else lse.stride(0), lse.stride(-2), lse.stride(-1))
    tma = config.tma and k_rows > 0
    query: Any
    if quantises := q is not None and attention_quantises(plan, lse is not None):
        query = _strided("q", q)
    else:
        query = NarrowQuery(
            as_stored(memory["q_codes"], plan.qk_format), memory["q_descale"], memory.get("mean_scores"),
            memory.get("shift"), rows,
        )  # fmt: skip
    return launch_by_name(
        _attention(plan, lse is not None, tma, quantises), (items * tiles,), query=query,
        keys=NarrowKeys(
            as_stored(memory["k_codes"], plan.qk_format), as_stored(memory["v_codes"], config.fp8),
            memory["k_descale"], memory["v_descale"], k_rows,
        ),
        k_desc=memory["k_desc"] if tma else None, v_desc=memory["v_desc"] if tma else None,
        out=SageOutputs(*_strided("out", out), None if lse is None else Arg("lse")),
        lists=_lists(plan, memory),
        q_bounds_ptr=memory.get("q_bounds"), k_bounds_ptr=memory.get("k_bounds"),
        qk_scale=plan.sm_scale * _LOG2E * codes, num_heads=size.num_qo_heads, batch=size.batch,
        q_length=size.q_tokens, k_length=size.k_tokens, items=items, tiles=tiles, together=together,
        lse_batch=steps[0], lse_token=steps[1], lse_head=steps[2], q_blocks=q_blocks, k_tiles=k_tiles,
    )  # fmt: skip


def describe(memory: dict[str, Any], plan: SageSettings, size: SageShape) -> None:
    """Adds the tensor descriptors of quantised K and V, which are parts of scratch."""
    heads, dim, rows, block_n = (
        size.num_kv_heads,
        size.head_dim,
        size.rows(size.k_tokens),
        plan.config.block_n,
    )
    (_, _, width), _ = _codes_block(plan.qk_format, (heads, rows), dim)
    for name, format_name, sizes, block in (
        ("k", plan.qk_format, (heads * rows, width), [block_n, width]),
        ("v", plan.config.fp8, (heads * dim, rows), [dim, block_n]),
    ):
        codes = as_stored(memory[f"{name}_codes"], format_name)
        memory[f"{name}_desc"] = Described(codes, None, partial(_described, sizes, block))


def _described(sizes: tuple[int, int], block: list[int], part: torch.Tensor, _: object) -> Any:
    return descriptor_of(part[: sizes[0] * sizes[1]].view(sizes), block)

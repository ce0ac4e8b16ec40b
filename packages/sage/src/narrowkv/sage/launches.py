"""From tensors to launches: scratch, pointers and constants of the pre-pass and of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from narrowkv.quant.formats import get_format
from narrowkv.quant.sage import TokenGroups
from narrowkv.runtime.errors import contiguous_vector
from narrowkv.runtime.launch import VARIES, BoundLaunch, FixedLaunch, LaunchOptions, Workspace
from narrowkv.sage.config import KeyOrder, SageConfig
from narrowkv.sage.kernels import (
    ALIGN,
    Call,
    Groups,
    Mask,
    Narrow,
    NarrowKeys,
    NarrowQuery,
    Order,
    Outputs,
    Smoothing,
    Statistics,
    Strided,
    _channel_statistics_kernel,
    _finish_statistics_kernel,
    _mean_scores_kernel,
    _quantise_keys_values_kernel,
    _quantise_tokens_kernel,
    _sage_attention_kernel,
    _sequence_bounds_kernel,
)

_ALIGN: int = ALIGN.value
_LOG2E = math.log2(math.e)
# The host's roundings are repeated one by one: no multiplication may melt into an addition.
# H200, b2 h32 d128, 16k tokens: Q at 16 warps 173 us, 8 warps 188, 4 warps 264; statistics of K and V at 2
# and 4 warps 138, 8 warps 147. At 4k K and V take 136 in all, 142 if the last part to arrive finishes the
# statistics; with statistics and blocks both at 16 warps 378, in one launch where blocks wait 351 to 410.
_STATISTICS = LaunchOptions(num_warps=4, num_stages=1, enable_fp_fusion=False)
_QUANTISE = LaunchOptions(num_warps=16, num_stages=1, enable_fp_fusion=False)
_MAX_FIXED = 256
_SIZES_KEPT = 64  # calls of other sizes whose scratch is remembered
_MEAN_BLOCKS = 16  # blocks of Q whose means meet a tile of keys at once: the least rows of a dot


@dataclass(frozen=True)
class SageShape:
    """Sizes of a call.

    Attributes:
        batch: sequences.
        q_tokens, k_tokens: tokens of each sequence, or of all together when `ragged`.
        num_qo_heads, num_kv_heads, head_dim: heads.
        ragged: sequences differ in length.
    """

    batch: int
    q_tokens: int
    k_tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    ragged: bool

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def q_sizes(self) -> tuple[int, ...]:
        """Shape of Q."""
        return self._sizes(self.q_tokens, self.num_qo_heads)

    @property
    def kv_sizes(self) -> tuple[int, ...]:
        """Shape of K and of V."""
        return self._sizes(self.k_tokens, self.num_kv_heads)

    def _sizes(self, tokens: int, heads: int) -> tuple[int, ...]:
        dense = () if self.ragged else (self.batch,)
        return (*dense, tokens, heads, self.head_dim)

    def rows(self, tokens: int) -> int:
        """Scratch rows of one head: every sequence in whole blocks."""
        if self.ragged:
            return (tokens // _ALIGN + self.batch) * _ALIGN
        return self.batch * -(-tokens // _ALIGN) * _ALIGN


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """K and V as attention reads them, quantised once; made by `SagePlan.quantize_kv`.

    Sequences lie one after the other, each from a multiple of 128 rows on.

    Attributes:
        k: `[num_kv_heads, rows, head_dim]`, int4 `[..., head_dim / 2]`.
        k_descale: fp32 `[num_kv_heads, groups]`, or `[1]`.
        k_mean: fp32 `[batch, num_kv_heads, head_dim]` that was subtracted, or None.
        v: `[num_kv_heads, head_dim, rows]`, keys in `key_order`.
        v_descale: fp32 `[batch, num_kv_heads, head_dim]`.
        shape: sizes it was made for.
        qk_format, fp8: stored formats of K and of V.
        k_groups: which tokens share a descale.
        key_order: of V.
        bounds: int32 `[batch, 2]`, first token and number of tokens of each sequence, or None.
        k_source: K as it came, where Q's smoothing needs it.
        block_n: keys of a tile, for tensor descriptors.
    """

    k: torch.Tensor
    k_descale: torch.Tensor
    k_mean: torch.Tensor | None
    v: torch.Tensor
    v_descale: torch.Tensor
    shape: SageShape
    qk_format: str
    fp8: str
    k_groups: TokenGroups | None
    key_order: KeyOrder
    bounds: torch.Tensor | None
    k_source: torch.Tensor | None
    block_n: int

    @cached_property
    def keys(self) -> NarrowKeys:
        """K and V as the kernel takes them."""
        return NarrowKeys(self.k, self.v, self.k_descale, self.v_descale, self.k.shape[1])

    @cached_property
    def descriptors(self) -> tuple[Any, Any]:
        """Tensor descriptors of K and V with heads and rows as one dimension."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = [self.block_n, self.k.shape[2]], [self.v.shape[1], self.block_n]
        flat = (stored.view(-1, stored.shape[2]) for stored in (self.k, self.v))
        k, v = (
            TensorDescriptor(x, list(x.shape), list(x.stride()), block)
            for x, block in zip(flat, blocks, strict=True)
        )
        return k, v


def _strided(x: torch.Tensor) -> Strided:
    return Strided(x, x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


def _groups(groups: TokenGroups | None) -> Groups:
    return Groups(0, 1, 1) if groups is None else Groups(groups.span, groups.groups, groups.run)


class Launched(NamedTuple):
    """A launch that was made, to be made again with other tensors.

    Attributes:
        launch, grid: what was launched.
        before, after: what varies, before and after the query or the results.
    """

    launch: FixedLaunch
    grid: tuple[int, int, int]
    before: tuple[Any, ...]
    after: tuple[Any, ...]


class _QueryScratch(NamedTuple):
    """A call's query in scratch: as the pre-pass writes it and attention reads it, its means, its bounds."""

    narrow: Narrow
    query: NarrowQuery
    mean: torch.Tensor | None
    bounds: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class SageLaunches:
    """The kernels of a plan, bound to what it fixes, and the memory that they work in.

    Attributes:
        shape: the largest call.
        qk_format: of Q and K in scratch.
        q_groups, k_groups: which tokens share a descale.
        mask: which keys a row attends to.
        smooth_k, smooth_q: which means are taken out.
        sm_scale: the softmax scale.
        config: the launch configuration.
        device: where it runs.
        workspace: scratch of the queries; None allocates it in each call.
    """

    shape: SageShape
    qk_format: str
    q_groups: TokenGroups | None
    k_groups: TokenGroups | None
    mask: Mask
    smooth_k: bool
    smooth_q: bool
    sm_scale: float
    config: SageConfig
    device: torch.device
    workspace: Workspace | None
    _bound: dict[Any, BoundLaunch] = field(default_factory=dict, init=False, repr=False)
    _fixed: dict[Any, FixedLaunch] = field(default_factory=dict, init=False, repr=False)
    _scratch: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _sized: dict[Any, _QueryScratch] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Divides the workspace up."""
        if self.workspace is not None:
            blocks = self.blocks()
            self._scratch.update(zip(blocks, self.workspace.carve(list(blocks.values())), strict=True))

    # ------------------------------------------------------------------------------------------ memory

    def blocks(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Scratch of the largest call, by name."""
        shape = self.shape
        heads, dim, kv_heads = shape.num_qo_heads, shape.head_dim, shape.num_kv_heads
        rows, k_rows = shape.rows(shape.q_tokens), shape.rows(shape.k_tokens)
        partial = (shape.batch, kv_heads, self.parts, dim)
        q_mean = (heads, rows // _ALIGN, dim)
        return {
            "q": ((heads, rows, get_format(self.qk_format).storage_bytes(dim)), torch.uint8),
            "q_descale": (self._descales(self.q_groups, heads, rows), torch.float32),
            "amax": ((1,), torch.int32),
            "q_bounds": ((shape.batch if shape.ragged else 0, 2), torch.int32),
            "q_mean": (q_mean if self.smooth_q else (0,), torch.float32),
            "mean_scores": ((heads, rows // _ALIGN, k_rows) if self.smooth_q else (0,), torch.float32),
            "shift": ((heads, rows) if self.smooth_k else (0,), torch.float32),
            "v_parts": (partial, torch.float32),
            "k_parts": (partial if self.smooth_k else (0,), torch.float64),
        }

    @property
    def parts(self) -> int:
        """Programs that share a head's statistics: enough to fill a GPU, none that does little."""
        return min(16, 1 << max(-(-self.shape.k_tokens // 256) - 1, 0).bit_length())

    @staticmethod
    def _descales(groups: TokenGroups | None, heads: int, rows: int) -> tuple[int, ...]:
        return (1,) if groups is None else (heads, rows // groups.span * groups.groups)

    def _memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Undefined memory of a shape: the beginning of the workspace's block, or a new tensor."""
        if self.workspace is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._scratch[name].view(-1)[: math.prod(shape)].view(shape)

    # ---------------------------------------------------------------------------------------- launches

    def kernels(self) -> list[BoundLaunch]:
        """Every kernel that calls can launch, the log-sum-exp written or not."""
        found = [self._bounds()] if self.shape.ragged else []
        found += [*self._statistics(), self._quantise_kv()]
        found += [self._measure(key) for key in ("k", "q") if self._group_of(key) is None]
        found += [self._mean_scores()] if self.smooth_q else []
        for lse in (False, True):
            found += [self._quantise_q(self.smooth_k and lse), self._attention(lse)]
        return list({id(launch): launch for launch in found}.values())

    def _bind(self, key: Any, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> BoundLaunch:
        self._bound[key] = BoundLaunch(kernel, constexprs, options)
        return self._bound[key]

    def _bounds(self) -> BoundLaunch:
        known = self._bound.get("bounds")
        return known or self._bind(
            "bounds", _sequence_bounds_kernel, {}, LaunchOptions(num_warps=1, num_stages=1)
        )

    def _statistics(self) -> tuple[BoundLaunch, BoundLaunch]:
        if "statistics" not in self._bound:
            constants = {
                "RAGGED": self.shape.ragged,
                "SMOOTH": self.smooth_k,
                "PARTS": self.parts,
                "HEAD_DIM": self.shape.head_dim,
            }
            v_max = get_format(self.config.fp8).max_value
            self._bind("statistics", _channel_statistics_kernel, {**constants, "BLOCK": 32}, _STATISTICS)
            self._bind("finish", _finish_statistics_kernel, {**constants, "V_FORMAT_MAX": v_max}, _STATISTICS)
        return self._bound["statistics"], self._bound["finish"]

    def _group_of(self, which: str) -> TokenGroups | None:
        return self.q_groups if which == "q" else self.k_groups

    def _tokens(self, which: str, smooth: str, *, shift: bool, measure: bool) -> BoundLaunch:
        key = ("tokens", which, shift, measure)
        return self._bound.get(key) or self._bind(
            key,
            _quantise_tokens_kernel,
            {
                "RAGGED": self.shape.ragged,
                "SMOOTH": smooth,
                "WRITE_SHIFT": shift,
                "GQA_RATIO": self.shape.gqa_ratio if which == "q" else 1,
                "FORMAT": self.qk_format,
                "FORMAT_MAX": get_format(self.qk_format).max_value,
                "MEASURE": measure,
                "GROUPS": _groups(self._group_of(which)),
                "HEAD_DIM": self.shape.head_dim,
            },
            _QUANTISE,
        )

    def _measure(self, which: str) -> BoundLaunch:
        smooth = self._smooth_q if which == "q" else self._smooth_k
        return self._tokens(which, smooth, shift=False, measure=True)

    def _quantise_q(self, shift: bool) -> BoundLaunch:
        return self._tokens("q", self._smooth_q, shift=shift, measure=False)

    @property
    def _smooth_q(self) -> str:
        return "block" if self.smooth_q else "none"

    @property
    def _smooth_k(self) -> str:
        return "sequence" if self.smooth_k else "none"

    def _quantise_kv(self) -> BoundLaunch:
        return self._bound.get("kv") or self._bind(
            "kv",
            _quantise_keys_values_kernel,
            {
                "RAGGED": self.shape.ragged,
                "SMOOTH": self.smooth_k,
                "FORMAT": self.qk_format,
                "FORMAT_MAX": get_format(self.qk_format).max_value,
                "GROUPS": _groups(self.k_groups),
                "V_FORMAT": self.config.fp8,
                "ORDER": self._order,
                "HEAD_DIM": self.shape.head_dim,
            },
            _QUANTISE,
        )

    @property
    def _order(self) -> Order:
        order = self.config.key_order
        return Order(order.gather, order.lanes, order.width)

    def _mean_scores(self) -> BoundLaunch:
        return self._bound.get("mean_scores") or self._bind(
            "mean_scores",
            _mean_scores_kernel,
            {
                "RAGGED": self.shape.ragged,
                "GQA_RATIO": self.shape.gqa_ratio,
                "HEAD_DIM": self.shape.head_dim,
                "BLOCK_Q": _MEAN_BLOCKS,
            },
            LaunchOptions(num_warps=4, num_stages=1),
        )

    def _attention(self, lse: bool, *, tma: bool | None = None) -> BoundLaunch:
        config = self.config
        tma = config.tma if tma is None else tma
        key = ("attention", lse, tma)
        known = self._bound.get(key)
        if known is not None:
            return known
        call = Call(
            self.shape.ragged, self.shape.gqa_ratio, self.shape.head_dim, self.qk_format, self.smooth_q,
            self.smooth_k and lse, lse, math.log2(get_format(config.fp8).max_value), config.two_level, tma,
            config.reread_q, config.block_m, config.block_n,
        )  # fmt: skip
        return self._bind(
            key,
            _sage_attention_kernel,
            {
                "CALL": call,
                "Q_GROUPS": _groups(self.q_groups),
                "K_GROUPS": _groups(self.k_groups),
                "MASK": self.mask,
                "ORDER": self._order,
            },
            config.options,
        )

    # ------------------------------------------------------------------------------------------- calls

    def _find_bounds(
        self, starts: torch.Tensor | None, tokens: int, bounds: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Where sequences lie, whatever `starts` holds; None for a dense batch."""
        if starts is None or bounds is None:
            return None
        batch = starts.shape[0] - 1
        if batch:
            self._bounds()((1,), (contiguous_vector(starts), bounds, tokens, batch))
        return bounds

    def quantise_keys_values(
        self, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, size: SageShape
    ) -> QuantizedKV:
        """K and V in memory of their own: the channels' statistics, then the blocks, of both at once."""
        heads, dim, rows = size.num_kv_heads, size.head_dim, size.rows(size.k_tokens)
        empty = torch.empty
        bounds = None
        if starts is not None:
            bounds = empty((size.batch, 2), dtype=torch.int32, device=self.device)
        self._find_bounds(starts, size.k_tokens, bounds)
        sizes = (size.batch, size.k_tokens)
        strided_k, strided_v = _strided(k), _strided(v)
        v_descale = empty((size.batch, heads, dim), dtype=torch.float32, device=self.device)
        k_mean = torch.empty_like(v_descale) if self.smooth_k else None
        partial = (size.batch, heads, self.parts, dim)
        v_stats = Statistics(self._memory("v_parts", partial, torch.float32), v_descale)
        k_stats = Statistics(None, None)
        if self.smooth_k:
            k_stats = Statistics(self._memory("k_parts", partial, torch.float64), k_mean)
        items = size.batch * (2 if self.smooth_k else 1)
        statistics, finish = self._statistics()
        statistics((self.parts * items, heads), (strided_k, strided_v, bounds, k_stats, v_stats, *sizes))
        finish((items, heads), (bounds, k_stats, v_stats, *sizes))
        fmt = get_format(self.qk_format)
        stored = empty((heads, rows, fmt.storage_bytes(dim)), dtype=torch.uint8, device=self.device)
        descale = empty(self._descales(self.k_groups, heads, rows), dtype=torch.float32, device=self.device)
        smoothing = Smoothing(None, k_mean, None)
        narrow = Narrow(_codes(stored, self.qk_format), descale, self._clear_amax(self.k_groups), rows)
        if self.k_groups is None:
            self._measure("k")((rows // _ALIGN, heads), (strided_k, bounds, smoothing, narrow, 0.0, *sizes))
        v_stored = empty((heads, dim, rows), dtype=torch.uint8, device=self.device)
        self._quantise_kv()(
            (rows // _ALIGN, heads, 2),
            (strided_k, strided_v, bounds, smoothing, v_descale, narrow, v_stored, *sizes),
        )
        return QuantizedKV(
            _as_stored(stored, self.qk_format), descale, k_mean, _as_stored(v_stored, self.config.fp8),
            v_descale, size, self.qk_format, self.config.fp8, self.k_groups, self.config.key_order, bounds,
            k if self.smooth_q else None, self.config.block_n,
        )  # fmt: skip

    def _clear_amax(self, groups: TokenGroups | None) -> torch.Tensor | None:
        return None if groups is not None else self._memory("amax", (1,), torch.int32).zero_()

    def quantise_queries(
        self, q: torch.Tensor, starts: torch.Tensor | None, kv: QuantizedKV, size: SageShape, *, lse: bool
    ) -> tuple[NarrowQuery, torch.Tensor | None, Launched]:
        """Q in scratch with what its smoothing took out, where its sequences lie, and the last launch."""
        scratch = self._query_scratch(size, lse)
        self._find_bounds(starts, size.q_tokens, scratch.bounds)
        shifts = self.smooth_k and lse
        smoothing = Smoothing(scratch.mean, kv.k_mean if shifts else None, scratch.query.shift)
        if scratch.narrow.amax is not None:
            scratch.narrow.amax.zero_()
        strided, rows = _strided(q), scratch.query.rows
        grid = (rows // _ALIGN, size.num_qo_heads)
        if self.q_groups is None:
            self._measure("q")(
                grid,
                (
                    strided,
                    scratch.bounds,
                    smoothing,
                    scratch.narrow,
                    self.sm_scale,
                    size.batch,
                    size.q_tokens,
                ),
            )
        structs = (smoothing, scratch.narrow[:3])
        key = ("q", q.dtype, strided[1:], tuple(x is None for each in structs for x in each))
        launch = self._fixed.get(key)
        if launch is None:
            launch = self._keep(
                key,
                self._quantise_q(shifts),
                (
                    _varying(strided), None if scratch.bounds is None else VARIES, _varying(smoothing),
                    _varying(scratch.narrow)._replace(rows=VARIES), self.sm_scale, VARIES, VARIES,
                ),
            )  # fmt: skip
        values = (scratch.bounds, *smoothing, *scratch.narrow[:3])
        tensors = tuple(x for x in values if x is not None)
        launched = Launched(launch, (*grid, 1), (), (*tensors, rows, size.batch, size.q_tokens))
        launch(launched.grid, (q, *launched.after))
        if scratch.mean is not None and kv.k_source is not None:
            k_rows = kv.k.shape[1]
            blocks_of_one = -(-size.q_tokens // _ALIGN)
            self._mean_scores()(
                (k_rows // _ALIGN, -(-blocks_of_one // _MEAN_BLOCKS), size.num_qo_heads),
                (
                    _strided(kv.k_source), scratch.bounds, kv.bounds, scratch.mean, scratch.query.mean_scores,
                    grid[0], k_rows, self.sm_scale * _LOG2E, size.batch, size.q_tokens, kv.shape.k_tokens,
                ),
            )  # fmt: skip
        return scratch.query, scratch.bounds, launched

    def _query_scratch(self, size: SageShape, lse: bool) -> _QueryScratch:
        """Memory for a call's query; with a workspace that of the last call of this size."""
        key = (size.batch, size.q_tokens, size.k_tokens, lse)
        known = self._sized.get(key)
        if known is not None:
            return known
        heads, rows, dim = size.num_qo_heads, size.rows(size.q_tokens), size.head_dim
        blocks = rows // _ALIGN
        bounds = mean = mean_scores = shift = amax = None
        if size.ragged:
            bounds = self._memory("q_bounds", (size.batch, 2), torch.int32)
        if self.smooth_q:
            mean = self._memory("q_mean", (heads, blocks, dim), torch.float32)
            k_rows = size.rows(size.k_tokens)
            mean_scores = self._memory("mean_scores", (heads, blocks, k_rows), torch.float32)
        if self.smooth_k and lse:
            shift = self._memory("shift", (heads, rows), torch.float32)
        if self.q_groups is None:
            amax = self._memory("amax", (1,), torch.int32)
        width = get_format(self.qk_format).storage_bytes(dim)
        stored = self._memory("q", (heads, rows, width), torch.uint8)
        descale = self._memory("q_descale", self._descales(self.q_groups, heads, rows), torch.float32)
        found = _QueryScratch(
            Narrow(_codes(stored, self.qk_format), descale, amax, rows),
            NarrowQuery(_as_stored(stored, self.qk_format), descale, mean_scores, shift, rows),
            mean,
            bounds,
        )
        if self.workspace is not None:
            if len(self._sized) == _SIZES_KEPT:
                self._sized.clear()
            self._sized[key] = found
        return found

    def attend(
        self, query: NarrowQuery, bounds: torch.Tensor | None, kv: QuantizedKV, out: torch.Tensor,
        lse: torch.Tensor | None, size: SageShape,
    ) -> Launched:  # fmt: skip
        """Attention over what the pre-pass stored; what was launched."""
        config = self.config
        tiles = -(-(query.rows if size.ragged else size.q_tokens) // config.block_m)
        items = size.num_qo_heads * (1 if size.ragged else size.batch)
        together = 1
        # Without a limit to the right all tiles are as long; where a head has many, its last are few of all.
        if self.mask.RIGHT >= 0 and 4 * tiles <= config.programs_together:
            together = min(-(-config.programs_together // max(tiles, 1)), max(items, 1))
        # Codes of int4 are read times 16 on both sides.
        codes = 1 / 256 if self.qk_format == "int4" else 1.0
        strided = _strided(out)
        steps = (0, 0, 0)
        if lse is not None:
            steps = (0 if size.ragged else lse.stride(0), lse.stride(-2), lse.stride(-1))
        tma = config.tma and kv.k.numel() > 0
        keys = kv.keys
        launch_key = (
            "attend", tma, out.dtype, strided[1:], lse is None, tuple(x is None for x in query[:4]),
            tuple(x is None for x in keys[:4]), bounds is None, size.num_qo_heads,
        )  # fmt: skip
        launch = self._fixed.get(launch_key)
        if launch is None:
            launch = self._keep(
                launch_key,
                self._attention(lse is not None, tma=tma),
                (
                    _varying(query)._replace(rows=VARIES), _varying(keys)._replace(rows=VARIES),
                    *((VARIES, VARIES) if tma else (None, None)),
                    Outputs(VARIES, *strided[1:], None if lse is None else VARIES),
                    *((None, None) if bounds is None else (VARIES, VARIES)),
                    self.sm_scale * _LOG2E * codes, size.num_qo_heads, *(VARIES,) * 9,
                ),
            )  # fmt: skip
        before = (*query, *keys, *(kv.descriptors if tma else ()))
        after = () if bounds is None else (bounds, kv.bounds)
        after = (*after, size.batch, size.q_tokens, size.k_tokens, items, tiles, together, *steps)
        launched = Launched(launch, (items * tiles, 1, 1), tuple(x for x in before if x is not None), after)
        launch(launched.grid, (*launched.before, *((out,) if lse is None else (out, lse)), *after))
        return launched

    def _keep(self, key: Any, bound: BoundLaunch, arguments: tuple[Any, ...]) -> FixedLaunch:
        """Remembers a launch with fixed arguments."""
        if len(self._fixed) >= _MAX_FIXED:
            self._fixed.clear()
        self._fixed[key] = FixedLaunch(bound, arguments)
        return self._fixed[key]


def _varying(struct: Any) -> Any:
    """The struct with `VARIES` for its tensors."""
    return type(struct)(*(VARIES if isinstance(value, torch.Tensor) else value for value in struct))


def _codes(stored: torch.Tensor, format_name: str) -> torch.Tensor:
    """Bytes as the pre-pass writes them."""
    return stored if get_format(format_name).kind == "fp8" else stored.view(torch.int8)


def _as_stored(stored: torch.Tensor, format_name: str) -> torch.Tensor:
    """Bytes as attention reads them."""
    fmt = get_format(format_name)
    return stored.view(fmt.storage_dtype) if fmt.kind == "fp8" else stored.view(torch.int8)

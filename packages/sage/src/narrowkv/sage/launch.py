"""The launches of a call: the pre-pass of Q, K and V, and attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from narrowkv.quant.formats import get_format
from narrowkv.quant.sage import TokenGroups
from narrowkv.runtime.errors import contiguous_vector
from narrowkv.runtime.launch import VARIES, FixedLaunch, Varies
from narrowkv.sage.binding import MEAN_BLOCKS, SageKernels
from narrowkv.sage.kernels import Narrow, NarrowQuery, Outputs, Smoothing, Statistics, Strided
from narrowkv.sage.shapes import ROW_ALIGNMENT, QuantizedKV, SageShape

_LOG2E = math.log2(math.e)
_MAX_FIXED = 256
_SIZES_KEPT = 64  # calls of other sizes whose scratch is remembered


def _strided(x: torch.Tensor) -> Strided:
    return Strided(x, x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


class Launched(NamedTuple):
    """A launch that can be repeated with other tensors.

    Attributes:
        launch, grid: what was launched.
        before, after: what varies, before and after the query or the results.
    """

    launch: FixedLaunch
    grid: tuple[int, int, int]
    before: tuple[Any, ...]
    after: tuple[Any, ...]


# Indices of the values that the launches over K and V take.
_VALUES = (
    "k", "v", "bounds", "k_parts", "k_mean", "v_parts", "v_descale", "stored", "descale", "amax", "v_stored",
    "rows", "batch", "k_tokens",
)  # fmt: skip
_VALUE = {name: Varies(index) for index, name in enumerate(_VALUES)}


class _KeysValues(NamedTuple):
    """The launches that quantise K and V, in their order; `measure` only for a descale of the whole K."""

    statistics: FixedLaunch
    finish: FixedLaunch
    measure: FixedLaunch | None
    quantise: FixedLaunch


class _QueryScratch(NamedTuple):
    """A call's query in scratch: as the pre-pass writes it and attention reads it, its means, its bounds."""

    narrow: Narrow
    query: NarrowQuery
    mean: torch.Tensor | None
    bounds: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class SageLaunches(SageKernels):
    """The launches of a plan's calls; see `SageKernels`."""

    _fixed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _sized: dict[Any, _QueryScratch] = field(default_factory=dict, init=False, repr=False)
    _parts_of: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def _find_bounds(
        self, starts: torch.Tensor | None, tokens: int, bounds: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Bounds of the sequences, clamped whatever `starts` holds; None for a dense batch."""
        if starts is None or bounds is None:
            return None
        batch = starts.shape[0] - 1
        if batch:
            self.bounds_kernel()((1,), (contiguous_vector(starts), bounds, tokens, batch))
        return bounds

    def quantise_keys_values(
        self, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, size: SageShape
    ) -> QuantizedKV:
        """Quantises K and V into new memory: the channels' statistics, then the blocks, of both at once."""
        heads, dim, rows = size.num_kv_heads, size.head_dim, size.rows(size.k_tokens)
        empty, device = torch.empty, self.device
        bounds = None
        if starts is not None:
            bounds = empty((size.batch, 2), dtype=torch.int32, device=device)
        self._find_bounds(starts, size.k_tokens, bounds)
        v_descale = empty((size.batch, heads, dim), dtype=torch.float32, device=device)
        k_mean = torch.empty_like(v_descale) if self.smooth_k else None
        k_parts, v_parts = self._statistics_scratch(size)
        amax = self._clear_amax(self.k_groups)
        width = get_format(self.qk_format).storage_bytes(dim)
        stored = empty((heads, rows, width), dtype=torch.uint8, device=device)
        descale = empty(self.descales(self.k_groups, heads, rows), dtype=torch.float32, device=device)
        v_stored = empty((heads, dim, rows), dtype=torch.uint8, device=device)
        launches = self._keys_values_launches(k, v, ragged=bounds is not None)
        values = (
            k, v, bounds, k_parts, k_mean, v_parts, v_descale, _codes(stored, self.qk_format), descale, amax,
            v_stored, rows, size.batch, size.k_tokens,
        )  # fmt: skip
        items, blocks = size.batch * (2 if self.smooth_k else 1), rows // ROW_ALIGNMENT
        launches.statistics((self.parts * items, heads, 1), values)
        launches.finish((items, heads, 1), values)
        if launches.measure is not None:
            launches.measure((blocks, heads, 1), values)
        launches.quantise((blocks, heads, 2), values)
        return QuantizedKV(
            _as_stored(stored, self.qk_format), descale, k_mean, _as_stored(v_stored, self.config.fp8),
            v_descale, size, self.qk_format, self.config.fp8, self.k_groups, self.config.key_order, bounds,
            k if self.smooth_q else None, self.config.block_n,
        )  # fmt: skip

    def _statistics_scratch(self, size: SageShape) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Partial statistics of K, if it is smoothed, and of V; a workspace has them for all calls."""
        found = self._parts_of.get(size.batch)
        if found is None:
            partial = (size.batch, size.num_kv_heads, self.parts, size.head_dim)
            k_parts = self.memory("k_parts", partial, torch.float64) if self.smooth_k else None
            found = k_parts, self.memory("v_parts", partial, torch.float32)
            if self.workspace is not None:
                self._parts_of[size.batch] = found
        return found

    def _keys_values_launches(self, k: torch.Tensor, v: torch.Tensor, *, ragged: bool) -> _KeysValues:
        """The launches that quantise keys and values with these dtypes and strides."""
        strided_k, strided_v = _strided(k), _strided(v)
        key = ("kv", k.dtype, v.dtype, strided_k[1:], strided_v[1:])
        known = self._fixed.get(key)
        if known is not None:
            return known  # type: ignore[no-any-return]
        value = _VALUE
        strided_k, strided_v = strided_k._replace(ptr=value["k"]), strided_v._replace(ptr=value["v"])
        bounds = value["bounds"] if ragged else None
        k_mean = value["k_mean"] if self.smooth_k else None
        k_stats = Statistics(value["k_parts"] if self.smooth_k else None, k_mean)
        v_stats = Statistics(value["v_parts"], value["v_descale"])
        sizes = (value["batch"], value["k_tokens"])
        whole = self.k_groups is None
        smoothing = Smoothing(None, k_mean, None)
        narrow = Narrow(value["stored"], value["descale"], value["amax"] if whole else None, value["rows"])
        statistics, finish = self.statistics()
        launches = _KeysValues(
            FixedLaunch(statistics, (strided_k, strided_v, bounds, k_stats, v_stats, *sizes)),
            FixedLaunch(finish, (bounds, k_stats, v_stats, *sizes)),
            FixedLaunch(self.measure("k"), (strided_k, bounds, smoothing, narrow, 0.0, *sizes))
            if whole
            else None,
            FixedLaunch(
                self.quantise_kv(),
                (
                    strided_k, strided_v, bounds, smoothing, value["v_descale"], narrow, value["v_stored"],
                    *sizes,
                ),
            ),
        )  # fmt: skip
        kept: _KeysValues = self._keep(key, launches)
        return kept

    def _clear_amax(self, groups: TokenGroups | None) -> torch.Tensor | None:
        return None if groups is not None else self.memory("amax", (1,), torch.int32).zero_()

    def quantise_queries(
        self, q: torch.Tensor, starts: torch.Tensor | None, kv: QuantizedKV, size: SageShape, *, lse: bool
    ) -> tuple[NarrowQuery, torch.Tensor | None, Launched]:
        """Q in scratch memory, the means that smoothing subtracted, bounds, and the last launch."""
        scratch = self._query_scratch(size, lse)
        self._find_bounds(starts, size.q_tokens, scratch.bounds)
        shifts = self.smooth_k and lse
        smoothing = Smoothing(scratch.mean, kv.k_mean if shifts else None, scratch.query.shift)
        if scratch.narrow.amax is not None:
            scratch.narrow.amax.zero_()
        strided, rows = _strided(q), scratch.query.rows
        grid = (rows // ROW_ALIGNMENT, size.num_qo_heads)
        if self.q_groups is None:
            self.measure("q")(
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
            arguments: tuple[Any, ...] = (
                _varying(strided), None if scratch.bounds is None else VARIES, _varying(smoothing),
                _varying(scratch.narrow)._replace(rows=VARIES), self.sm_scale, VARIES, VARIES,
            )  # fmt: skip
            launch = self._keep(key, FixedLaunch(self.quantise_q(shifts), arguments))
        values = (scratch.bounds, *smoothing, *scratch.narrow[:3])
        tensors = tuple(x for x in values if x is not None)
        launched = Launched(launch, (*grid, 1), (), (*tensors, rows, size.batch, size.q_tokens))
        launch(launched.grid, (q, *launched.after))
        if scratch.mean is not None and kv.k_source is not None:
            k_rows = kv.k.shape[1]
            blocks_of_one = -(-size.q_tokens // ROW_ALIGNMENT)
            self.mean_scores()(
                (k_rows // ROW_ALIGNMENT, -(-blocks_of_one // MEAN_BLOCKS), size.num_qo_heads),
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
        blocks = rows // ROW_ALIGNMENT
        bounds = mean = mean_scores = shift = amax = None
        if size.ragged:
            bounds = self.memory("q_bounds", (size.batch, 2), torch.int32)
        if self.smooth_q:
            mean = self.memory("q_mean", (heads, blocks, dim), torch.float32)
            k_rows = size.rows(size.k_tokens)
            mean_scores = self.memory("mean_scores", (heads, blocks, k_rows), torch.float32)
        if self.smooth_k and lse:
            shift = self.memory("shift", (heads, rows), torch.float32)
        if self.q_groups is None:
            amax = self.memory("amax", (1,), torch.int32)
        width = get_format(self.qk_format).storage_bytes(dim)
        stored = self.memory("q", (heads, rows, width), torch.uint8)
        descale = self.memory("q_descale", self.descales(self.q_groups, heads, rows), torch.float32)
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
        """Launches attention over the results of the pre-pass; returns the launch."""
        config = self.config
        tiles = -(-(query.rows if size.ragged else size.q_tokens) // config.block_m)
        items = size.num_qo_heads * (1 if size.ragged else size.batch)
        together = 1
        # Without a limit to the right all tiles have the same length. If a head has many, few are last.
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
            arguments = (
                _varying(query)._replace(rows=VARIES), _varying(keys)._replace(rows=VARIES),
                *((VARIES, VARIES) if tma else (None, None)),
                Outputs(VARIES, *strided[1:], None if lse is None else VARIES),
                *((None, None) if bounds is None else (VARIES, VARIES)),
                self.sm_scale * _LOG2E * codes, size.num_qo_heads, *(VARIES,) * 9,
            )  # fmt: skip
            launch = self._keep(launch_key, FixedLaunch(self.attention(lse is not None, tma=tma), arguments))
        before = (*query, *keys, *(kv.descriptors if tma else ()))
        after = () if bounds is None else (bounds, kv.bounds)
        after = (*after, size.batch, size.q_tokens, size.k_tokens, items, tiles, together, *steps)
        launched = Launched(launch, (items * tiles, 1, 1), tuple(x for x in before if x is not None), after)
        launch(launched.grid, (*launched.before, *((out,) if lse is None else (out, lse)), *after))
        return launched

    def _keep(self, key: Any, launches: Any) -> Any:
        """Remembers launches with fixed arguments."""
        if len(self._fixed) >= _MAX_FIXED:
            self._fixed.clear()
        self._fixed[key] = launches
        return launches


def _varying(struct: Any) -> Any:
    """The struct with `VARIES` for its tensors."""
    return type(struct)(*(VARIES if isinstance(value, torch.Tensor) else value for value in struct))


def _codes(stored: torch.Tensor, format_name: str) -> torch.Tensor:
    """The codes with the dtype that the pre-pass writes."""
    return stored if get_format(format_name).kind == "fp8" else stored.view(torch.int8)


def _as_stored(stored: torch.Tensor, format_name: str) -> torch.Tensor:
    """The codes with the dtype that attention reads."""
    fmt = get_format(format_name)
    return stored.view(fmt.storage_dtype) if fmt.kind == "fp8" else stored.view(torch.int8)

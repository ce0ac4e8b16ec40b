"""The host work of a decode step, done once: configuration, workspace, prepared launches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from narrowkv.attn_decode.checks import (
    check_classes,
    check_values,
    decode_shape,
    fold_q_descale,
)
from narrowkv.attn_decode.config import DecodeConfig, DecodeShape, choose_config
from narrowkv.attn_decode.kernels import PartialResults, _merge_splits_kernel, _paged_decode_kernel
from narrowkv.attn_decode.launch import (
    READING,
    PreparedDecode,
    allocated,
    constants_of,
    fits_lanes,
    fitting,
    launches_of,
    power_of_two,
    read_options,
    serves_tall,
    tall_rows,
)
from narrowkv.attn_decode.options import DECODE, PLAIN_VALUES, DecodeArguments
from narrowkv.attn_decode.tiles import TALL_TILES
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.binding import BOUND_TABLES, BoundCache, BoundTable, bind_cache, bind_table
from narrowkv.paged_cache.checks import tensors_of
from narrowkv.quant import get_format
from narrowkv.quant.formats import BITS, widening_exponent
from narrowkv.runtime import launch
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_finite_float,
    check_no_grad,
    check_results,
    check_soft_cap,
    check_windows,
    refuse_overlap,
)
from narrowkv.runtime.launch import (
    BoundLaunch,
    LaunchOptions,
    PreparedCall,
    active_target,
    block_bytes,
    executor,
)
from narrowkv.runtime.launch.workspace import zeroed_counters
from narrowkv.runtime.operation import (
    ByIdentity,
    Operation,
    Plan,
    metadata_of,
    refuse_containers,
    spans_of_arguments,
)
from narrowkv.runtime.scales import check_scales
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.attn_decode.options import DecodeOptions

_LOG2E = math.log2(math.e)
_MAX_GRID = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38
# Of a call, in the order in which its launches take them.
_VALUES = (
    "q", "out", "lse", "sinks", "q_descale", "o_scale", "ranges", "tree", "ids", "row", "lens", "num_ids",
    "max_pages", "qk_scale", "out_scale", "cache_k", "cache_v", "cache_k_descale", "cache_v_descale",
    "k_balance", "k_offset", "block", "counters",
)  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodePlan(Plan):
    """Everything about decode steps that does not depend on the values of lengths and page ids.

    A plan serves every layer and every step of a model, for all batches up to `shape.batch`. Its calls write
    to one workspace, so they must not run at the same time as each other or as those of another plan with
    that workspace.

    Attributes:
        shape: the shapes that it serves; `batch` and `capacity` are maxima.
        k_format: storage format of K; v_format: of V.
        config: tile sizes and the split of the keys at the largest batch.
        scale_group: channels per scale of FP4, 0 for one scale per position and head.
        tokens_per_split, split, kernel, batch_invariant: see `plan_decode`.

    The other attributes are those of `narrowkv.runtime.operation.Plan`; the workspace holds partial results
    and arrival counters, and is None if there are none.
    """

    operation: ClassVar[Operation] = DECODE
    most_calls: ClassVar[int] = 4096
    shape: DecodeShape
    k_format: str
    v_format: str
    config: DecodeConfig
    scale_group: int = 0
    tokens_per_split: int = 0
    split: str | None = None
    kernel: str | None = None
    batch_invariant: bool = False
    _configs: dict[int, DecodeConfig] = field(init=False, repr=False, default_factory=dict)
    _caches: ByIdentity[BoundCache] = field(init=False, repr=False, default_factory=ByIdentity)

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodePlan:
        """A plan for the same calls, with its own workspace."""
        own = None if self.workspace is None else launch.Workspace(self.workspace.num_bytes, self.device)
        return replace(self, workspace=own)

    def explain(self) -> str:
        """One line for a person: the configuration, how often keys are read, and the bytes."""
        shape = self.shape
        bits = shape.head_dim * get_format(self.k_format).bits
        bits += shape.v_dim * get_format(self.v_format).bits
        stored = shape.batch * shape.capacity * shape.num_kv_heads * bits / 8
        tall = self._tall_rows(self.config)
        plain = f"; in plain calls tiles of {tall} rows x {TALL_TILES[tall].block_n} keys" if tall else ""
        return (
            f"{self.target.name}, {self.config.explain(shape)}{plain}; at most {stored / 1e6:.1f} MB of keys "
            f"and values and {self.workspace_bytes() / 1e6:.1f} MB of partial results"
        )

    def config_for(self, batch: int) -> DecodeConfig:
        """The configuration of a call with this many sequences."""
        if batch == self.shape.batch:
            return self.config
        if batch not in self._configs:
            self._configs[batch] = choose_config(
                self.target, replace(self.shape, batch=batch), self.k_format, self.v_format,
                scale_group=self.scale_group, kernel=self.kernel, split=self.split,
                tokens_per_split=self.tokens_per_split, batch_invariant=self.batch_invariant,
            )  # fmt: skip
        return self._configs[batch]

    def workspace_bytes(self) -> int:
        """Bytes that a `narrowkv.runtime.launch.Workspace` needs for every call of this plan."""
        return max((block_bytes(self._blocks(batch)) for batch in range(1, self.shape.batch + 1)), default=0)

    def kernels(
        self,
        cache: PagedKVCache,
        *,
        ragged: bool = False,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        sinks: bool = False,
        return_lse: bool = False,
    ) -> tuple[BoundLaunch, ...]:
        """Every kernel, with its constants and compiler options, that calls of this plan can launch.

        Args:
            cache: a cache like those of the calls; one page is enough.
            ragged: whether their page tables are ragged.
            logits_soft_cap, window_left, return_lse: as in the calls; sinks: whether they have sinks.

        Example:
            >>> for bound in plan.kernels(cache):          # doctest: +SKIP
            ...     print(bound.kernel, bound.constexprs, bound.options)
        """
        bound = self._bind(cache)
        options = (ragged, window_left, logits_soft_cap > 0, sinks, return_lse)
        found: dict[int, BoundLaunch] = {}
        for batch, masks in product(range(1, self.shape.batch + 1), (False, True)):
            for prepared in self._bound_launches(bound, batch, *options, masks):
                if prepared is not None:
                    found[id(prepared)] = prepared
        return tuple(found.values())

    def run(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`paged_decode` by this plan: the same arguments and results.

        The first call with some shapes, dtypes, strides and options checks them and prepares its launches;
        later calls with the same ones only launch.
        """
        return self.call(DecodeArguments(q, cache, page_table, **options))

    def call(self, given: DecodeArguments) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A call by this plan; see `run`."""
        q, cache, page_table, q_descale = given.q, given.cache, given.page_table, given.q_descale
        out, sinks, lse, return_lse = given.out, given.sinks, given.lse, given.return_lse
        out_scale = given.out_scale
        bound = self._caches.get(id(cache))
        table = BOUND_TABLES.get(id(page_table))
        if bound is None or table is None:
            check_classes(q, cache, page_table)
            if bound is None:
                bound = self._caches.keep(cache, self._bind(cache))
            if table is None:
                table = bind_table(page_table)
        running = executor()
        try:
            signature = (
                bound.number, table.number, table.batch,
                None if running is None else (type(running), running.target.name),
                type(q), q.shape, q.stride(), q.dtype, q.device, q.requires_grad and torch.is_grad_enabled(),
                given[PLAIN_VALUES], q_descale if type(q_descale) is float else metadata_of(q_descale),
                None if out is None else (out.shape, out.stride(), out.dtype, out.device, out.requires_grad),
                None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.device, lse.requires_grad),
                None
                if sinks is None
                else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device, sinks.requires_grad),
                None if out_scale is None else metadata_of(out_scale),
            )  # fmt: skip
            call: PreparedDecode | None = self.calls.get(signature)
        except (AttributeError, TypeError):
            check_classes(q, cache, page_table, out=out, lse=lse, sinks=sinks)
            refuse_containers(given, PLAIN_VALUES)
            raise
        if call is None:
            call = self.prepared(signature, self._prepare(bound, table, given), given)
        if given.validate:
            check_values(self.shape.capacity, cache, page_table)
        if bound.scales or type(q_descale) is not float or out_scale is not None:
            scales = {**bound.scales, "q_descale": q_descale, "out_scale": out_scale}
            check_scales(scales, given.validate)
        o, lse = self.results(call, given, bound.spans, table.spans)
        if call.empty:
            o.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
        elif call.launches is not None:
            reading, transform = bound.readings[READING], bound.transform
            qk_scale = call.logit_scale * reading.k_factor
            if not -FLOAT32_MAX <= qk_scale <= FLOAT32_MAX:
                raise ValueError(
                    f"sm_scale times the descale of K must be finite in float32, got {qk_scale}: "
                    "pass a smaller sm_scale"
                )
            block = counters = None
            if call.scratch_bytes:
                block = torch.empty(call.scratch_bytes, dtype=torch.uint8, device=q.device)
                counters = zeroed_counters(call.counters, q.device) if call.counters else None
            call.launches.run(
                q.view(torch.uint8) if call.q_as_bytes else q, o, lse, sinks, q_descale, out_scale,
                table.ranges, table.tree, table.ids, table.row, table.lens, table.num_ids, table.max_pages,
                qk_scale, reading.v_factor, reading.k.ptr, reading.v.ptr, reading.k_descale.ptr,
                reading.v_descale.ptr, transform.balance, transform.offset, block, counters,
            )  # fmt: skip
        return (o, lse) if return_lse and lse is not None else o

    def _bind(self, cache: PagedKVCache) -> BoundCache:
        """The cache as kernel arguments, once it is known to be of this plan's kind."""
        sizes = (cache.num_kv_heads, cache.head_dim, cache.v_head_dim, cache.page_size)
        made = (*sizes, cache.format.k, cache.format.v)
        shape = self.shape
        sizes = (shape.num_kv_heads, shape.head_dim, shape.v_dim, shape.page_size)
        wanted = (*sizes, self.k_format, self.v_format)
        if made != wanted or cache.k.device != self.device:
            raise ValueError(
                "plan must be made for a cache of (num_kv_heads, head_dim, v_head_dim, page_size, K, V) "
                f"{made} on {cache.k.device}, got a plan for {wanted} on {self.device}: call plan_decode "
                "again"
            )
        half = "bf16" not in (self.k_format, self.v_format)
        bound = bind_cache(cache, self.target, ((READING, read_options(self.target, self.config, half)),))
        descale = bound.readings[READING].k_stored.descale
        if self.config.kernel == "native" and descale in ("e8m0_16", "e4m3_16", "e4m3_32"):
            raise UnsupportedError(
                "kernel='native' needs keys with one scale a head or an E8M0 scale per 32 channels, got "
                f"{descale}; kernel='decode' works here"
            )
        if self.config.kernel == "fp8" and (
            bound.transforms or not fits_lanes(shape, self.config, bound.readings[READING])
        ):
            raise UnsupportedError(
                "kernel='fp8' needs pages of a multiple of 4 tokens, rows at multiples of 16 bytes and no "
                "key transform; kernel='decode' works here"
            )
        return bound

    def _blocks(self, batch: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Memory of partial results at this batch: `acc` and `ml` of `PartialResults`."""
        config, shape = self.config_for(batch), self.shape
        if config.split == "none" or batch == 0:
            return []
        row_blocks = -(-shape.q_len * shape.gqa_ratio // config.block_m)
        slots = config.num_items * shape.num_kv_heads * row_blocks
        return [
            ((slots, config.block_m, power_of_two(shape.v_dim)), torch.float32),
            ((slots, 2, config.block_m), torch.float32),
        ]

    def _tall_rows(self, config: DecodeConfig) -> int:
        return tall_rows(self.target, self.shape, config, (self.k_format, self.v_format))

    def _bound_launches(
        self, bound: BoundCache, batch: int, ragged: bool, window_left: int, soft_cap: bool, sinks: bool,
        lse: bool, masks: bool,
    ) -> tuple[BoundLaunch, BoundLaunch | None]:  # fmt: skip
        """The attention kernel of a call, and the one that merges if there is one.

        masks: the page table has ranges of keys or a tree.
        """
        config = fitting(self.target, self.config_for(batch), bound, soft_cap)
        constexprs = constants_of(
            self.target, self.shape, config, bound, ragged=ragged, window_left=window_left,
            soft_cap=soft_cap, sinks=sinks, lse=lse,
        )  # fmt: skip
        tall = self._tall_rows(config)
        if tall and serves_tall(bound, constexprs["RULES"], masks):
            from narrowkv.attn_decode.kernels.tall import _tall_decode_kernel

            tile = TALL_TILES[tall]
            constexprs["BLOCKS"] = constexprs["BLOCKS"]._replace(m=tall, n=tile.block_n)
            return self.bind(_tall_decode_kernel, tile.options, **constexprs), None
        attend = self.bind(_paged_decode_kernel, config.options, **constexprs)
        if config.split == "none" or config.merge_in_launch or config.num_items == batch:
            return attend, None
        merging = {name: value for name, value in constexprs.items() if name != "K"}
        merging["BLOCK_S"] = config.merge.splits
        early = constexprs["RULES"].early
        options = LaunchOptions(num_warps=config.merge.warps, num_stages=1, launch_pdl=early)
        return attend, self.bind(_merge_splits_kernel, options, **merging)

    def _prepare(self, bound: BoundCache, table: BoundTable, given: DecodeArguments) -> PreparedDecode:
        """Checks all that does not change from call to call, and prepares the launches."""
        q, cache, page_table, q_descale = given.q, given.cache, given.page_table, given.q_descale
        out, lse, sinks = given.out, given.lse, given.sinks
        writes_lse = given.return_lse or lse is not None
        shape = decode_shape(q, cache, page_table)
        self._check(shape, q.device, active_target(self.device))
        scale = q.shape[2] ** -0.5
        if given.sm_scale is not None:
            scale = check_finite_float("sm_scale", given.sm_scale)
        scale = fold_q_descale(q, q_descale, scale)
        soft_cap, (window_left, _) = check_soft_cap(given.logits_soft_cap), check_windows(given.window_left)
        if table.ranges is not None and window_left >= 0:
            raise ValueError(
                f"window_left must be -1 for a page table with key_ranges, got {window_left}: the ranges say "
                "which keys a window leaves out"
            )
        check_no_grad(q=q, k=cache.k, v=cache.v)
        out_dtype = check_results(
            q, out, lse, sinks, given.out_dtype, given.out_scale, _inputs(given), head_dim=shape.v_dim,
            vendor=self.target.vendor,
        )  # fmt: skip
        batch, config = shape.batch, self.config_for(shape.batch)
        attend, merge = self._bound_launches(
            bound, batch, page_table.kind == "ragged", window_left, soft_cap > 0, sinks is not None,
            writes_lse, table.ranges is not None or table.tree is not None,
        )  # fmt: skip
        logit_scale = scale * (1.0 if soft_cap > 0 else _LOG2E)
        if q.dtype.itemsize == 1:
            logit_scale *= 2.0 ** widening_exponent(get_format(q.dtype).name, BITS)
        block_m = attend.constexprs["BLOCKS"].m
        programs = config.num_items * shape.num_kv_heads * -(-shape.q_len * shape.gqa_ratio // block_m)
        if programs > _MAX_GRID:
            raise ValueError(
                f"batch, max_seq_len and tokens_per_split make {programs} programs, and a launch has at most "
                f"{_MAX_GRID}: plan for a smaller batch or larger splits"
            )
        parts = 1 if attend.kernel is _paged_decode_kernel else block_m // WARPGROUP_ROWS  # merged apart
        counters = programs * parts if config.split != "none" else 0
        if not attend.constexprs["RULES"].can_merge:
            counters = 0
        elif not config.merge_in_launch:
            counters = 1  # something to point at
        blocks = self._blocks(batch)
        partial = PartialResults(None, None, None)
        if self.workspace is not None and blocks:
            arrived = self.workspace.counters(counters) if counters else None
            acc, ml = self.workspace.carve(blocks)
            partial = PartialResults(acc, ml, arrived)
            blocks = []
        elif blocks:
            partial = allocated(block_bytes(blocks[:1]), counters > 0)
        token, head = q.shape[1] * shape.v_dim, shape.v_dim
        if out is not None:
            token, head = out.stride()[:2]
        steps = launches_of(
            attend, merge, bound, table, partial, config,
            (q.stride(0), q.stride(1), token, head, q.shape[1] if lse is None else lse.stride(0)),
            (programs, batch * shape.num_kv_heads * shape.q_len * shape.gqa_ratio),
            num_pages=cache.num_pages, soft_cap=soft_cap, logit_scale=logit_scale,
            optional=[
                name
                for name, there in (
                    ("lse", writes_lse), ("sinks", sinks is not None),
                    ("q_descale", isinstance(q_descale, torch.Tensor)),
                    ("o_scale", given.out_scale is not None),
                )
                if there
            ],
        )  # fmt: skip
        return PreparedDecode(
            launches=PreparedCall(_VALUES, steps) if batch and programs else None,
            out=((*q.shape[:2], shape.v_dim), out_dtype),
            lse=(q.shape[:2], torch.float32),
            scratch_bytes=block_bytes(blocks),
            empty=cache.num_pages == 0 or table.max_pages == 0,
            counters=counters,
            logit_scale=logit_scale,
            q_as_bytes=q.dtype.itemsize == 1,
            **spans_of_arguments(given),
        )

    def refuse_overlap(self, given: DecodeArguments) -> None:
        """Refuses results that lie over each other or an input, naming both."""
        refuse_overlap(given.out, given.lse, _inputs(given))

    def _check(self, shape: DecodeShape, device: torch.device, target: Target) -> None:
        """Refuses a call that the plan was not made for, and says what is needed."""
        planned = self.shape
        fits = replace(shape, batch=0, capacity=0) == replace(planned, batch=0, capacity=0)
        if (
            not fits
            or shape.batch > planned.batch
            or device != self.device
            or target.name != self.target.name
        ):
            raise ValueError(
                f"plan must be made for {shape} or a larger batch on {device} ({target.name}), got a plan "
                f"for {planned} on {self.device} ({self.target.name}): call plan_decode again"
            )


def _inputs(given: DecodeArguments) -> dict[str, Any]:
    """What a call reads, by the names of messages."""
    tensors = tensors_of(given.cache, given.page_table)
    return {
        "q": given.q, **tensors, "sinks": given.sinks, "q_descale": given.q_descale,
        "out_scale": given.out_scale,
    }  # fmt: skip

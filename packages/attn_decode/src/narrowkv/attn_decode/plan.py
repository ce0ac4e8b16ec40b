"""The host work of a decode step, done once: checks, configuration, workspace, prepared launches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from narrowkv.attn_decode.arguments import (
    OUT_DTYPES,
    BoundCache,
    bind_cache,
    zeroed_counters,
)
from narrowkv.attn_decode.config import SCALED_DOT_DEPTH, DecodeConfig, DecodeShape, choose_config
from narrowkv.attn_decode.kernels import (
    Blocks,
    Rows,
    Rules,
    Sizes,
    Workspace,
    _merge_splits_kernel,
    _paged_decode_kernel,
)
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.bound_table import BOUND_TABLES, BoundTable, bind_table
from narrowkv.paged_cache.checks import check_table
from narrowkv.paged_cache.kernels.pages import TableSteps
from narrowkv.paged_cache.layouts import span_bytes
from narrowkv.runtime import launch
from narrowkv.runtime.errors import (
    check_choice,
    check_descale_tensor,
    check_dtype,
    check_finite_float,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_positive_int,
    check_same_device,
    check_shape,
    check_tensor,
    check_window,
)
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import (
    VARIES,
    BoundLaunch,
    FixedLaunch,
    LaunchOptions,
    active_target,
    block_bytes,
    executor,
)
from narrowkv.runtime.launch.tracing import handle_of
from narrowkv.runtime.spans import meets
from narrowkv.runtime.targets import Target

_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOG2E = math.log2(math.e)
_MAX_GRID = 2**31 - 1
_MAX_PREPARED = 4096
FLOAT32_MAX = 3.4028234663852886e38


class _Call(NamedTuple):
    """What `DecodePlan.run` prepared for calls whose tensors have the same metadata.

    Attributes:
        attend, merge: the launches; `merge` is None where no second kernel is needed.
        grid, merge_grid: their grids.
        empty: no sequence has keys, because the cache or the page table has no pages.
        blocks, counters: partial results that a call allocates, and how many arrival counters it needs; no
            blocks where there are none or the plan has memory for them.
        logit_scale: scale of the logits without the cache's descale.
        out_dtype: of a new output.
        q_bytes, o_bytes, lse_bytes, sinks_bytes: bytes that the tensors span.
    """

    attend: FixedLaunch
    merge: FixedLaunch | None
    grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int]
    empty: bool
    blocks: list[Any]
    counters: int
    logit_scale: float
    out_dtype: torch.dtype
    q_bytes: int
    o_bytes: int
    lse_bytes: int
    sinks_bytes: int


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Everything about decode steps that does not depend on the values of lengths and page ids.

    A plan serves every layer and every step of a model, for all batches up to `shape.batch`. Its calls write
    to one workspace, so they must not run at the same time as each other or as those of another plan with
    that workspace. Two plans are equal only if they are the same object.

    Attributes:
        target: what the configuration was chosen for.
        shape: the shapes that it serves; `batch` and `capacity` are maxima.
        k_format: storage format of K; v_format: of V.
        config: tile sizes and the split of the keys at the largest batch.
        device: where the tensors are.
        workspace: memory of partial results and arrival counters; None if none is needed.
        scale_groups: the cache has FP4 scales per 32 channels.
        tokens_per_split, split, kernel, batch_invariant: see `plan_decode`.
        handle: what the operators of `torch.ops.narrowkv` find the plan by, in this process.
    """

    target: Target
    shape: DecodeShape
    k_format: str
    v_format: str
    config: DecodeConfig
    device: torch.device
    workspace: launch.Workspace | None = field(repr=False, default=None)
    scale_groups: bool = False
    tokens_per_split: int = 0
    split: str | None = None
    kernel: str | None = None
    batch_invariant: bool = False
    handle: str = field(init=False, repr=False)
    _configs: dict[int, DecodeConfig] = field(init=False, repr=False, default_factory=dict)
    _launches: dict[Any, BoundLaunch] = field(init=False, repr=False, default_factory=dict)
    _caches: ByIdentity[BoundCache] = field(init=False, repr=False, default_factory=ByIdentity)
    _calls: dict[Any, _Call] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Makes the plan known to operators."""
        object.__setattr__(self, "handle", handle_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodePlan:
        """A plan for the same calls, with a workspace of its own."""
        own = None if self.workspace is None else launch.Workspace(self.workspace.num_bytes, self.device)
        return replace(self, workspace=own)

    def explain(self) -> str:
        """Why this configuration: one line for a person."""
        c = self.config
        each = c.num_units // max(self.shape.batch, 1)
        how = {
            "none": "one program per sequence and head block",
            "uniform": f"up to {each} equal splits of every sequence",
            "even": f"an even share of all keys over {c.num_units} work units",
            "fixed": f"splits of {c.tiles_per_split * c.block_n} keys, at most {each} a sequence",
        }[c.split]
        merge = (
            ""
            if c.split == "none"
            else ", merged in the launch"
            if c.merge_in_launch
            else ", merged by a second kernel"
        )
        return (
            f"{self.target.name}, {c.kernel}: tiles of {c.block_m} rows x {c.block_n} keys, "
            f"{c.options.num_warps} warps, {c.options.num_stages} stages; {how}{merge}"
        )

    def config_for(self, batch: int) -> DecodeConfig:
        """The configuration of a call with this many sequences."""
        if batch == self.shape.batch:
            return self.config
        if batch not in self._configs:
            self._configs[batch] = choose_config(
                self.target, replace(self.shape, batch=batch), self.k_format, self.v_format,
                scale_groups=self.scale_groups, kernel=self.kernel, split=self.split,
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
        for batch in range(1, self.shape.batch + 1):
            for prepared in self._bound_launches(bound, batch, *options):
                if prepared is not None:
                    found[id(prepared)] = prepared
        return tuple(found.values())

    def run(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        *,
        sm_scale: float | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        lse: torch.Tensor | None = None,
        validate: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`paged_decode` by this plan: the same arguments and results.

        The first call with some shapes, dtypes, strides and options checks them and prepares its launches;
        later calls with the same ones only launch.
        """
        bound = self._caches.get(id(cache))
        table = BOUND_TABLES.get(id(page_table))
        if bound is None or table is None:
            _check_classes(q, cache, page_table)
            if bound is None:
                bound = self._caches.keep(cache, self._bind(cache))
            if table is None:
                table = bind_table(page_table)
        running = executor()
        try:
            signature = (
                bound.number, table.number, table.batch, None if running is None else running.target.name,
                type(q), q.shape, q.stride(), q.dtype, q.device, q.requires_grad and torch.is_grad_enabled(),
                sm_scale, logits_soft_cap, window_left, return_lse, out_dtype,
                None if out is None else (out.shape, out.stride(), out.dtype, out.device, out.requires_grad),
                None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.device, lse.requires_grad),
                None
                if sinks is None
                else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device, sinks.requires_grad),
            )  # fmt: skip
        except AttributeError:
            _check_classes(q, cache, page_table, out=out, lse=lse, sinks=sinks)
            raise
        call = self._calls.get(signature)
        if call is None:
            call = self._prepare(
                bound, table, q, cache, page_table, sm_scale, out, out_dtype, logits_soft_cap, window_left,
                sinks, return_lse, lse,
            )  # fmt: skip
            if len(self._calls) >= _MAX_PREPARED:
                self._calls.clear()
            self._calls[signature] = call
        if validate:
            self._check_values(cache, page_table)
        if out is not None or lse is not None:
            begin = q.data_ptr()
            spans = [*bound.spans, *table.spans, (begin, begin + call.q_bytes)]
            if sinks is not None:
                begin = sinks.data_ptr()
                spans.append((begin, begin + call.sinks_bytes))
            begin = 0 if out is None else out.data_ptr()
            met = meets(begin, call.o_bytes, spans)
            if lse is not None:
                spans.append((begin, begin + call.o_bytes))
                met = met or meets(lse.data_ptr(), call.lse_bytes, spans)
            if met:
                _refuse_overlap(out, lse, q, cache, page_table, sinks)
        o = torch.empty(q.shape, dtype=call.out_dtype, device=q.device) if out is None else out
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if call.empty:
            o.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
        elif call.grid[0]:
            lead: tuple[torch.Tensor, ...] = (q, o) if lse is None else (q, o, lse)
            if sinks is not None:
                lead = (*lead, sinks)
            if table.ranges is not None:
                lead = (*lead, table.ranges)
            partial: tuple[torch.Tensor, ...] = ()
            if call.blocks:
                partial = _allocate(call.blocks, call.counters, q.device)
            qk_scale = call.logit_scale * bound.k_factor
            if not -FLOAT32_MAX <= qk_scale <= FLOAT32_MAX:
                raise ValueError(
                    f"sm_scale times the descale of K must be finite in float32, got {qk_scale}: "
                    "pass a smaller sm_scale"
                )
            pages = (*partial, *table[:5])
            call.attend(call.grid, (*lead, *bound.tensors, *pages, qk_scale, bound.v_factor))
            if call.merge is not None:
                descale = () if bound.v_descale.ptr is None else (bound.v_descale.ptr,)
                call.merge(call.merge_grid, (*lead, *descale, *pages, bound.v_factor))
        return (o, lse) if return_lse and lse is not None else o

    def _bind(self, cache: PagedKVCache) -> BoundCache:
        """The cache as kernel arguments, once it is known to be of this plan's kind."""
        c = self.config
        made = (cache.num_kv_heads, cache.head_dim, cache.page_size, cache.format.k, cache.format.v)
        shape = self.shape
        wanted = (shape.num_kv_heads, shape.head_dim, shape.page_size, self.k_format, self.v_format)
        if made != wanted or cache.k.device != self.device:
            raise ValueError(
                f"plan must be made for a cache of (num_kv_heads, head_dim, page_size, K, V) {made} on "
                f"{cache.k.device}, got a plan for {wanted} on {self.device}: call plan_decode again"
            )
        return bind_cache(cache, self.target, c.kernel, c.k_parts, c.v_parts)

    def _blocks(self, batch: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Memory of partial results at this batch: `acc` and `ml` of `Workspace`."""
        config, shape = self.config_for(batch), self.shape
        if config.split == "none" or batch == 0:
            return []
        slots = config.num_units * shape.num_kv_heads * self._row_blocks(config)
        return [
            ((slots, config.block_m, _power_of_two(shape.head_dim)), torch.float32),
            ((slots, 2, config.block_m), torch.float32),
        ]

    def _row_blocks(self, config: DecodeConfig) -> int:
        return -(-self.shape.q_len * self.shape.gqa_ratio // config.block_m)

    def _bound_launches(
        self, bound: BoundCache, batch: int, ragged: bool, window_left: int, soft_cap: bool, sinks: bool,
        lse: bool,
    ) -> tuple[BoundLaunch, BoundLaunch | None]:  # fmt: skip
        """The attention kernel of a call, and the one that merges if there is one."""
        shape, config = self.shape, self.config_for(batch)
        native = config.kernel == "native"
        half = "bf16" not in (self.k_format, self.v_format)
        block_d = _power_of_two(shape.head_dim)
        constexprs = {
            "SIZES": Sizes(
                shape.num_kv_heads, shape.gqa_ratio, shape.q_len, shape.head_dim, shape.page_size, ragged
            ),
            "K": bound.k_stored,
            "V": bound.v_stored,
            "RULES": Rules(
                compute=tl.float16 if half else tl.bfloat16,
                scale_q=half and shape.q_dtype == torch.bfloat16 and not native,
                split_q=not half and shape.q_dtype == torch.float16,
                native=native,
                soft_cap=soft_cap,
                sinks=sinks,
                lse=lse,
                window_left=window_left,
                wide_address=bound.wide_address,
                even=config.split == "even",
                partial=config.split != "none",
                can_merge=config.merge_in_launch or not (config.split == "none" or self.target.is_amd),
            ),
            "BLOCKS": Blocks(
                config.block_m, config.block_n, block_d, max(block_d, SCALED_DOT_DEPTH) if native else block_d
            ),
        }
        attend = self._bound_launch(_paged_decode_kernel, constexprs, config.options)
        if config.split == "none" or config.merge_in_launch or config.num_units == batch:
            return attend, None
        merging = {name: value for name, value in constexprs.items() if name != "K"}
        options = LaunchOptions(num_warps=1, num_stages=1)
        return attend, self._bound_launch(_merge_splits_kernel, merging, options)

    def _bound_launch(self, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> BoundLaunch:
        """One object for each kernel with its constants, whatever the batch."""
        key = (kernel, tuple(constexprs.values()), options)
        return self._launches.setdefault(key, BoundLaunch(kernel, constexprs, options))

    def _prepare(
        self, bound: BoundCache, table: BoundTable, q: torch.Tensor, cache: PagedKVCache,
        page_table: PageTable, sm_scale: float | None, out: torch.Tensor | None,
        out_dtype: torch.dtype | None, logits_soft_cap: float, window_left: int,
        sinks: torch.Tensor | None, return_lse: bool, lse: torch.Tensor | None,
    ) -> _Call:  # fmt: skip
        """Checks all that does not change from call to call, and prepares the launches."""
        shape = decode_shape(q, cache, page_table)
        self._check(shape, q.device, active_target(self.device))
        scale = q.shape[2] ** -0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
        soft_cap = check_finite_float("logits_soft_cap", logits_soft_cap)
        if soft_cap < 0:
            raise ValueError(f"logits_soft_cap must be 0 (off) or positive, got {logits_soft_cap}")
        window_left = check_window("window_left", window_left)
        if table.ranges is not None and window_left >= 0:
            raise ValueError(
                f"window_left must be -1 for a page table with key_ranges, got {window_left}: the ranges say "
                "which keys a window leaves out"
            )
        if sinks is not None:
            check_dtype("sinks", sinks, _SINK_DTYPES)
            check_shape("sinks", sinks, (shape.num_qo_heads,))
            check_last_dim_contiguous("sinks", sinks)
            check_same_device(q=q, sinks=sinks)
        check_no_grad(q=q, k=cache.k, v=cache.v, sinks=sinks)
        out_dtype = _check_out(q, out, out_dtype)
        if lse is not None:
            check_dtype("lse", lse, (torch.float32,))
            check_shape("lse", lse, tuple(q.shape[:2]))
            check_last_dim_contiguous("lse", lse)
            check_same_device(q=q, lse=lse)
            check_no_grad(lse=lse)
        _refuse_overlap(out, lse, q, cache, page_table, sinks)
        batch, config = shape.batch, self.config_for(shape.batch)
        attend, merge = self._bound_launches(
            bound, batch, page_table.kind == "ragged", window_left, soft_cap > 0, sinks is not None,
            return_lse or lse is not None,
        )  # fmt: skip
        row_blocks = self._row_blocks(config)
        programs = config.num_units * shape.num_kv_heads * row_blocks
        if programs > _MAX_GRID:
            raise ValueError(
                f"batch, max_seq_len and tokens_per_split make {programs} programs, and a launch has at most "
                f"{_MAX_GRID}: plan for a smaller batch or larger splits"
            )
        counters = batch * shape.num_kv_heads * row_blocks if config.split != "none" else 0
        if not attend.constexprs["RULES"].can_merge:
            counters = 0
        elif not config.merge_in_launch:
            counters = 1  # something to point at
        blocks = self._blocks(batch)
        partial = Workspace(None, None, None)
        if self.workspace is not None and blocks:
            arrived = self.workspace.counters(counters) if counters else None
            acc, ml = self.workspace.carve(blocks)
            partial = Workspace(acc, ml, arrived)
            blocks = []
        elif blocks:
            partial = Workspace(VARIES, VARIES, VARIES if counters else None)
        token, head, _ = _contiguous(q) if out is None else out.stride()
        rows = Rows(
            VARIES, VARIES, VARIES if return_lse or lse is not None else None,
            None if sinks is None else VARIES, q.stride(0), q.stride(1), token, head,
            q.shape[1] if lse is None else lse.stride(0), None if table.ranges is None else VARIES,
        )  # fmt: skip
        k, v, k_descale, v_descale = (
            each if each.ptr is None else each._replace(ptr=VARIES) for each in bound[:4]
        )
        pages = (VARIES, VARIES, VARIES, VARIES, VARIES, TableSteps(cache.num_pages, *table.steps))
        sizes = (batch, config.num_units, max(config.tiles_per_split, 1))
        scale_by = scale * (1.0 if soft_cap > 0 else _LOG2E)
        attending = (
            rows, k, v, k_descale, v_descale, partial, *pages, VARIES, VARIES, soft_cap, *sizes,
            int(config.merge_in_launch),
        )  # fmt: skip
        merging = (rows, v_descale, partial, *pages, VARIES, *sizes)
        return _Call(
            attend=FixedLaunch(attend, attending),
            merge=None if merge is None else FixedLaunch(merge, merging),
            grid=(programs if batch else 0, 1, 1),
            merge_grid=(batch * shape.num_kv_heads * shape.q_len * shape.gqa_ratio, 1, 1),
            empty=cache.num_pages == 0 or table.max_pages == 0,
            blocks=blocks,
            counters=counters,
            logit_scale=scale_by,
            out_dtype=out_dtype,
            q_bytes=span_bytes(q),
            o_bytes=0 if out is None else span_bytes(out),
            lse_bytes=0 if lse is None else span_bytes(lse),
            sinks_bytes=0 if sinks is None else span_bytes(sinks),
        )

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

    def _check_values(self, cache: PagedKVCache, page_table: PageTable) -> None:
        """Looks at lengths, page ids and descales, which waits for the device."""
        page_table.check_values(cache.num_pages)
        lens = page_table.seq_lens_tensor()
        longest = int(lens.max()) if lens.numel() else 0
        if longest > self.shape.capacity:
            raise ValueError(
                f"plan must cover the longest sequence of {longest} tokens, got one for "
                f"{self.shape.capacity}: call plan_decode with a larger max_seq_len"
            )
        for name, value in (("k_descale", cache.k_descale), ("v_descale", cache.v_descale)):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                check_descale_tensor(name, value, validate=True)


def _contiguous(q: torch.Tensor) -> tuple[int, int, int]:
    """Strides of a new tensor with q's shape."""
    return q.shape[1] * q.shape[2], q.shape[2], 1


def _power_of_two(head_dim: int) -> int:
    return 1 << (head_dim - 1).bit_length()


def _allocate(blocks: list[Any], counters: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Memory of a call whose plan has none: acc and ml of `Workspace`, and counters if it needs any."""
    acc, ml = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in blocks)
    return (acc, ml, zeroed_counters(counters, device)) if counters else (acc, ml)


def _check_classes(q: object, cache: object, page_table: object, **optional: object) -> None:
    check_tensor("q", q)
    for name, value in optional.items():
        if value is not None:
            check_tensor(name, value)
    check_instance("cache", cache, PagedKVCache)
    check_instance("page_table", page_table, PageTable)


def _check_out(q: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """The output's dtype, once the caller's output is checked."""
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be one of {OUT_DTYPES}, got {out_dtype}")
    if out is None:
        return q.dtype if out_dtype is None else out_dtype
    check_dtype("out", out, OUT_DTYPES if out_dtype is None else (out_dtype,))
    check_shape("out", out, tuple(q.shape))
    check_same_device(q=q, out=out)
    check_last_dim_contiguous("out", out)
    check_no_grad(out=out)
    return out.dtype


def _refuse_overlap(
    out: torch.Tensor | None, lse: torch.Tensor | None, q: torch.Tensor, cache: PagedKVCache,
    page_table: PageTable, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """Refuses results that overlap themselves, each other or an input."""
    inputs = {
        "q": q, "k": cache.k, "v": cache.v, "sinks": sinks, "k_descale": cache.k_descale,
        "v_descale": cache.v_descale, "page_ids": page_table.page_ids, "seq_lens": page_table.seq_lens,
        "kv_indptr": page_table.kv_indptr, "kv_last_page_len": page_table.kv_last_page_len,
        "key_ranges": page_table.key_ranges,
    }  # fmt: skip
    if out is not None:
        check_no_overlap("out", out, **inputs, lse=lse)
    if lse is not None:
        check_no_overlap("lse", lse, **inputs)


def decode_shape(q: torch.Tensor, cache: PagedKVCache, page_table: PageTable) -> DecodeShape:
    """Checks what a decode call's metadata can tell without reading the device, and returns its shape.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check_classes(q, cache, page_table)
    check_table(page_table, cache, key_ranges=True)
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    if q.dim() != 3:
        raise ValueError(f"q must have shape [batch * q_len, num_qo_heads, head_dim], got {tuple(q.shape)}")
    check_last_dim_contiguous("q", q)
    num_tokens, num_qo_heads, head_dim = q.shape
    batch = page_table.batch_size
    if head_dim != cache.head_dim:
        raise ValueError(f"q must have the cache's head_dim {cache.head_dim}, got {head_dim}")
    if (batch == 0 and num_tokens) or (batch and (num_tokens % batch or num_tokens == 0)):
        raise ValueError(f"q must have batch * q_len rows for batch {batch}, got {num_tokens}")
    ranges = page_table.key_ranges
    if ranges is not None and batch and ranges.shape[1] != num_tokens // batch:
        raise ValueError(
            f"key_ranges must have q_len = {num_tokens // batch} query tokens a sequence, "
            f"got {ranges.shape[1]}"
        )
    check_same_device(q=q, k=cache.k, v=cache.v, page_table=page_table.page_ids)
    shape = DecodeShape(
        batch=batch,
        q_len=num_tokens // batch if batch else 1,
        num_qo_heads=num_qo_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        capacity=page_table.capacity,
        q_dtype=q.dtype,
    )
    _check_shape(shape)
    return shape


def _check_shape(shape: DecodeShape) -> None:
    if shape.head_dim not in _HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {_HEAD_DIMS}, got {shape.head_dim}")
    if shape.num_qo_heads < 1 or shape.num_qo_heads % shape.num_kv_heads:
        raise ValueError(
            f"q must have a positive multiple of the cache's {shape.num_kv_heads} KV heads, "
            f"got num_qo_heads={shape.num_qo_heads}"
        )


def plan_decode(
    q: torch.Tensor | DecodeShape,
    cache: PagedKVCache | CacheFormat | str,
    page_table: PageTable | None = None,
    *,
    device: torch.device | str | None = None,
    scale_group: int | None = None,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
    tokens_per_split: int | None = None,
    split: str | None = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
    workspace: launch.Workspace | None = None,
    validate: bool = False,
) -> DecodePlan:
    """Plans decode steps: checks the metadata, chooses the configuration, allocates the workspace.

    Nothing is read from the device. One plan serves every layer of a model, every batch up to its maximum
    and any lengths, so that a captured graph can be replayed with other lengths and page tables.

    Args:
        q: `[batch * q_len, num_qo_heads, head_dim]`, bf16 or fp16, of which only the metadata is used; or,
            before there are tensors, a `DecodeShape` whose `batch` and `capacity` are the maxima.
        cache: the paged cache; with a `DecodeShape` its format.
        page_table: the page table; None with a `DecodeShape`.
        device: with a `DecodeShape`: where the tensors will be.
        scale_group: with a `DecodeShape`: 32 for FP4 with a scale per 32 channels.
        max_batch: sequences of a call, at most; default q's.
        max_seq_len: tokens of a sequence, at most; default what a row of the page table holds. Only speed
            depends on it: longer sequences are served, too.
        tokens_per_split: a fixed split size in tokens, rounded up to key tiles.
        split: forces "none", "even" or "uniform".
        kernel: forces "native" (scaled matrix instructions on FP4 keys, Q as a sum of E4M3 terms: gfx950) or
            "decode" (the cache widened to 16 bits: everywhere). None takes native where it can.
        batch_invariant: the result of a sequence has the same bits alone and in any batch, with any width of
            the page table. Tiles and splits then depend on the sequence alone, which costs speed where the
            batch would have asked for others: short contexts, and few long sequences.
        workspace: memory that plans share whose calls do not run at the same time, with at least
            `workspace_bytes()`; None allocates what this plan needs.
        validate: look at lengths, page ids and descales, which waits for the device.

    Returns:
        A `DecodePlan` for `paged_decode(..., plan=plan)` or `plan.run(...)`.

    Raises:
        TypeError, ValueError: for metadata that `paged_decode` would refuse; a workspace that is too small.
        UnsupportedError: for formats that the kernel does not read, or a forced kernel that the target lacks.

    Example:
        >>> plan = plan_decode(q, cache, table)                 # doctest: +SKIP
        >>> o = paged_decode(q, cache, table, plan=plan)        # doctest: +SKIP
        >>> shape = DecodeShape(batch=4, q_len=1, num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16,
        ...                     capacity=1024)
        >>> plan_decode(shape, "fp8_e4m3fn", device="cpu").config.kernel
        'decode'
    """
    plan = _plan(
        q, cache, page_table, device=device, scale_group=scale_group, max_batch=max_batch,
        max_seq_len=max_seq_len, tokens_per_split=tokens_per_split, split=split, kernel=kernel,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if validate and isinstance(cache, PagedKVCache) and page_table is not None:
        plan._check_values(cache, page_table)
    needed = plan.workspace_bytes()
    if workspace is None:
        return replace(plan, workspace=launch.Workspace(needed, plan.device)) if needed else plan
    check_instance("workspace", workspace, launch.Workspace)
    if workspace.num_bytes < needed or workspace.device != plan.device:
        raise ValueError(
            f"workspace must have at least {needed} bytes on {plan.device}, "
            f"got {workspace.num_bytes} on {workspace.device}"
        )
    return replace(plan, workspace=workspace)


def _plan(
    q: torch.Tensor | DecodeShape, cache: PagedKVCache | CacheFormat | str, page_table: PageTable | None,
    *, device: torch.device | str | None = None, scale_group: int | None = None, max_batch: int | None = None,
    max_seq_len: int | None = None, tokens_per_split: int | None = None, split: str | None = None,
    kernel: str | None = None, batch_invariant: bool = False,
) -> DecodePlan:  # fmt: skip
    """A plan without its workspace."""
    if isinstance(q, DecodeShape):
        if page_table is not None or isinstance(cache, PagedKVCache) or device is None:
            raise TypeError(
                "plan_decode with a DecodeShape needs a cache format and device=..., and neither cache nor "
                "page_table"
            )
        shape, formats, device = q, CacheFormat.parse(cache), torch.device(device)
        _check_shape(shape)
        scale_groups = scale_group is not None
    else:
        if page_table is None or not isinstance(cache, PagedKVCache):
            _check_classes(q, cache, page_table)
            raise TypeError("page_table must be a PageTable, got None")
        if device is not None or scale_group is not None:
            raise ValueError(
                "device and scale_group are those of the tensors: pass them with a DecodeShape only"
            )
        shape, formats, device = decode_shape(q, cache, page_table), cache.format, q.device
        scale_groups = "token_head_group" in (cache.k_granularity, cache.v_granularity)
    for name, value in (
        ("max_batch", max_batch), ("max_seq_len", max_seq_len), ("tokens_per_split", tokens_per_split)
    ):  # fmt: skip
        if value is not None:
            check_positive_int(name, value)
    if split is not None:
        check_choice("split", split, ("none", "even", "uniform"))
        if batch_invariant or tokens_per_split:
            raise ValueError(f"split must be None with batch_invariant or tokens_per_split, got {split!r}")
    if max_batch is not None and max_batch < shape.batch:
        raise ValueError(f"max_batch must be at least q's batch {shape.batch}, got {max_batch}")
    shape = replace(shape, batch=max_batch or shape.batch, capacity=max_seq_len or shape.capacity)
    target = active_target(device)
    options: dict[str, Any] = {
        "scale_groups": scale_groups,
        "kernel": kernel,
        "split": split,
        "tokens_per_split": tokens_per_split or 0,
        "batch_invariant": batch_invariant,
    }
    config = choose_config(target, shape, formats.k, formats.v, **options)
    return DecodePlan(target, shape, formats.k, formats.v, config, device, **options)


_plans: dict[Any, DecodePlan] = {}
# What a plan depends on of a cache.
_kinds: ByIdentity[tuple[Any, ...]] = ByIdentity()
_MAX_PLANS = 256


def plan_for_call(
    q: torch.Tensor, cache: PagedKVCache, page_table: PageTable, batch_invariant: bool
) -> DecodePlan:
    """A plan of this call's shapes, made once; its calls allocate their partial results.

    Contexts are rounded up to a power of two, so that a growing page table does not ask for a plan each step.
    """
    table, kind = BOUND_TABLES.get(id(page_table)), _kinds.get(id(cache))
    if table is None or kind is None or type(q) is not torch.Tensor:
        _check_classes(q, cache, page_table)
        table = table or bind_table(page_table)
        kind = (
            cache.format, cache.head_dim, cache.num_kv_heads, cache.page_size, cache.k_granularity,
            cache.v_granularity,
        )  # fmt: skip
        kind = _kinds.keep(cache, kind)
    capacity = 1 << max(table.max_pages * page_table.page_size - 1, 0).bit_length()
    running = executor()
    key = (
        q.shape, q.dtype, q.device, table.number, table.batch, capacity, kind, batch_invariant,
        None if running is None else running.target.name,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(q, cache, page_table, max_seq_len=capacity, batch_invariant=batch_invariant)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan

"""What a plan of prefill is made for: shapes, configurations, memory, and its cache as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from narrowkv.attn_decode import DecodePlan
from narrowkv.attn_prefill.config import choose_append_config, choose_config, fp8_route
from narrowkv.attn_prefill.cost import explain_class, few_bounds, most_widened
from narrowkv.attn_prefill.kernels.widen import VALUE_EXPONENT
from narrowkv.attn_prefill.memory import (
    FACTORS_OF_BLOCKS,
    Blocks,
    LaunchMemory,
    MemorySizes,
    has_v_factors,
    key_type,
    make_memory,
    power_of_two,
    scratch_bytes,
    scratch_rows,
)
from narrowkv.attn_prefill.tiles import (
    IN_PAGES,
    PrefillConfig,
    PrefillShape,
    most_work_items,
    partial_programs,
    scratch_block,
    split_config,
    tall_configs,
    tuned_as,
)
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.binding import BoundCache, ReadOptions, bind_cache, parts_of
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import Workspace
from narrowkv.runtime.operation import Bounded, ByIdentity, Plan
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target

if TYPE_CHECKING:
    from typing_extensions import Self

SCRATCH_LIMIT_BYTES = 4 * 2**30
_LARGEST_BLOCK = 128  # keys of a block of scratch
_LEAST_ROWS = 16  # of a tile
_MOST_SPLITS = 32
# Two are read; the next counters begin in a cache line of their own, with an address that is aligned.
_FLAGS = 64


def per_key(k_granularity: str, v_granularity: str) -> tuple[bool, bool]:
    """Whether K and V have descales that differ from key to key."""
    shared = ("tensor", "head", "sequence_head")
    return k_granularity not in shared, v_granularity not in shared


@lru_cache
def widened_per_key(
    q_dtype: torch.dtype, formats: tuple[str, str], granularities: tuple[str, str]
) -> tuple[bool, bool]:
    """Whether widened K and V have factors of each key beside them.

    FP4 takes its scales along when it is widened: K in bfloat16, exactly, since a scale has at most four bits
    and an element two; V as that of a bf16 cache, see `to_fp16_with_exponent`. K in float16 would leave its
    range.
    """
    k_own, v_own = per_key(*granularities)
    k_takes_along = formats[0] == "fp4_e2m1" and q_dtype == torch.bfloat16
    return k_own and not k_takes_along, v_own and formats[1] != "fp4_e2m1"


@lru_cache
def read_options(
    target: Target, k_format: str, v_format: str, fp8: str | None
) -> tuple[tuple[str, ReadOptions], ...]:
    """How each kind of kernel reads a cache, by the names of `PrefillConfig.reading`.

    "in_loop": kernels attend to its pages; "in_large_tiles": the same for tiles of 64 rows by the loop of
    decode, whose matrix instruction takes V from shared memory as it lies there; "in_tall_tiles": the same by
    `kernels/tall.py`; "to_scratch": they widen its keys into the scratch, ahead of attention, which keeps the
    bytes of K for FP8 matrix units and has V in float16.

    Args:
        target: what the kernels run on.
        k_format, v_format: of the cache.
        fp8: the FP8 format in which the matrix unit multiplies the cache without widening, or None.
    """
    half = "bf16" not in (k_format, v_format)
    k_parts, v_parts, large = (
        parts_of(target, name, is_key=is_key) if fp8 is None else 1
        for name, is_key in ((k_format, True), (v_format, False), (v_format, True))
    )
    k_route, v_route = (None if fp8 is None else fp8_route(fp8, name) for name in (k_format, v_format))
    return (
        ("in_loop", ReadOptions(k_parts, v_parts, k_route, v_route, half)),
        ("in_large_tiles", ReadOptions(k_parts, large, k_route, v_route, half)),
        ("in_tall_tiles", ReadOptions(k_parts, large, k_route, v_route, half, fp4_as_bytes=True)),
        (
            "to_scratch",
            ReadOptions(
                k_parts, parts_of(target, v_format, is_key=False), k_route,
                v_exponent=-VALUE_EXPONENT.value if v_format in FACTORS_OF_BLOCKS else None,
            ),
        ),
    )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillSettings(Plan):
    """The part of a prefill plan that its launches are made from: configurations and memory.

    A plan serves every layer of a model, and all calls up to its maxima. Its calls write to one workspace, so
    they must not run at the same time as each other or as those of another plan with that workspace.

    Attributes:
        shape: the shapes that it serves; `batch`, `num_tokens`, `max_q_len`, `max_seq_len` and `kv_tokens`
            are maxima.
        k_format, v_format: of the cache.
        k_granularity, v_granularity: of the descales.
        config: the kernel, its tiles and splits in the largest call.
        appends: whether it is a plan of `prefill_append`.
        pipelines: whether `kernels/pipelined.py` takes the formats and runs here.
        decode: the plan of `paged_decode` where every sequence has one query token, else None.
        exponent: of `plan_append`: how FP4 scales of appended tokens are chosen; None for a plan that does
            not append.
        kernel, num_splits, batch_invariant, fp8_compute: see `plan_prefill` and `plan_append`.
        scratch_fits: whether widened keys of the largest call fit the allowed memory; None for a plan that
            unplanned calls share, which has no maxima and decides in each call.

    The other attributes are those of `narrowkv.runtime.operation.Plan`; the workspace holds scratch, partial
    results and counters.
    """

    appends: ClassVar[bool] = False
    most_calls: ClassVar[int] = 4096
    shape: PrefillShape
    k_format: str
    v_format: str
    k_granularity: str
    v_granularity: str
    config: PrefillConfig
    pipelines: bool
    decode: DecodePlan | None = field(repr=False, default=None)
    exponent: str | None = None
    kernel: str | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    fp8_compute: bool = False
    scratch_fits: bool | None = None
    _configs: Bounded[PrefillConfig] = field(init=False, repr=False, default_factory=partial(Bounded, 4096))
    _memories: dict[PrefillConfig, LaunchMemory] = field(init=False, repr=False, default_factory=dict)
    # Launches of calls with the same metadata, whatever their sizes.
    _caches: ByIdentity[BoundCache] = field(init=False, repr=False, default_factory=ByIdentity)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A plan for the same calls, with its own memory."""
        if self.workspace is None:
            return replace(self)
        return self.with_workspace(Workspace(self.workspace.num_bytes, self.device))

    def explain(self) -> str:
        """Why this configuration: for people, a line for each class of sequences and its alternatives."""
        if self.decode is not None:
            return f"paged_decode, because {self.config.why}: {self.decode.explain()}"
        formats = (self.k_format, self.v_format)
        fits = self.scratch_fits is not False
        widened = None if not fits or self.config.fp8 else "pipelined" if self.pipelines else "dense"
        return "\n".join(
            f"{self.target.name}: {part.explain()}; "
            f"{explain_class(self.target, self.shape, formats, part, widened)}"
            for part in (*self.config.short_queries, self.config)
        )

    def shape_of_call(self, batch: int, num_tokens: int) -> PrefillShape:
        """The shape of a call with these numbers of sequences and query tokens, with the plan's bounds.

        Raises:
            ValueError: the plan is for fewer.
        """
        shape = self.shape
        if (batch, num_tokens) == (shape.batch, shape.num_tokens):
            return shape
        if batch > shape.batch or num_tokens > shape.num_tokens:
            raise ValueError(
                f"plan must be made for {num_tokens} query tokens of {batch} sequences or more, "
                f"got a plan for {shape.num_tokens} of {shape.batch}: call {self.operation.maker} again"
            )
        return replace(
            shape,
            batch=batch,
            num_tokens=num_tokens,
            max_q_len=min(shape.max_q_len, num_tokens),
            kv_tokens=min(shape.kv_tokens, batch * shape.max_seq_len),
        )

    def config_for(self, shape: PrefillShape) -> PrefillConfig:
        """The configuration of a call of this shape."""
        if shape is self.shape:
            return self.config
        config = self._configs.get(shape)
        return self._configs.keep(shape, self.choose(shape)) if config is None else config

    def workspace_bytes(self) -> int:
        """Bytes that a `narrowkv.runtime.launch.Workspace` needs for every call of this plan.

        Widened keys take 4 bytes for each channel of each KV head and token of `shape.kv_tokens` and
        `shape.num_tokens`, with sequences rounded up to blocks of 64 or 128 keys, besides factors of keys and
        blocks; partial results take at most 8 tiles of rows for each tile that the device runs at once.
        """
        needed = [memory_sizes.num_bytes for memory_sizes in self._sizes_of_kernels]
        return max([*needed, self.decode.workspace_bytes() if self.decode is not None else 0])

    def with_workspace(self, workspace: Workspace | None = None) -> Self:
        """The same plan, and the plan of `paged_decode` with it, in this workspace; see `Plan`."""
        plan = super().with_workspace(workspace)
        assert plan.workspace is not None
        plan.workspace.counters(max(sizes.num_counters for sizes in self._sizes_of_kernels))
        if plan.decode is None:
            return plan
        return replace(plan, decode=replace(plan.decode, workspace=plan.workspace))

    def memory(self, config: PrefillConfig) -> LaunchMemory | None:
        """The memory of calls with this configuration; None where each call allocates its own."""
        if self.workspace is None:
            return None
        kind = replace(config, short_queries=()).kind()
        found = self._memories.get(kind)
        if found is None:
            memory_sizes = self.memory_sizes(self.shape, config, exact=False)
            found = self._memories[kind] = make_memory(memory_sizes, self.workspace)
        return found

    def bound_cache(self, cache: PagedKVCache) -> BoundCache:
        """The cache as kernel arguments, once it is known to be of this plan's kind.

        Raises:
            ValueError: the plan is for another kind of cache.
        """
        known = self._caches.get(id(cache))
        if known is not None:
            return known
        formats = (cache.format.k, cache.format.v, cache.k_granularity, cache.v_granularity)
        sizes = (cache.num_kv_heads, cache.head_dim, cache.v_head_dim, cache.page_size)
        made = (*sizes, *formats, cache.k.device)
        shape = self.shape
        own = (self.k_format, self.v_format, self.k_granularity, self.v_granularity)
        sizes = (shape.num_kv_heads, shape.head_dim, shape.v_dim, shape.page_size)
        wanted = (*sizes, *own, self.device)
        if made != wanted:
            raise ValueError(
                "plan must be made for a cache of (num_kv_heads, head_dim, v_head_dim, page_size, K, V, "
                f"their descales, device) {made}, got a plan for {wanted}: call {self.operation.maker} again"
            )
        options = read_options(self.target, self.k_format, self.v_format, self.config.fp8)
        return self._caches.keep(cache, bind_cache(cache, self.target, options, stores=self.appends))

    def choose(self, shape: PrefillShape) -> PrefillConfig:
        """The configuration that this plan's options give a shape."""
        fits = self.scratch_fits
        if fits is None:
            fits = self.scratch_bytes(shape) <= SCRATCH_LIMIT_BYTES
        formats, q_format = (self.k_format, self.v_format), get_format(self.shape.q_dtype)
        if self.appends:
            config = choose_append_config(
                self.target, shape, formats, q_format.name, fp8_compute=self.fp8_compute, scratch_fits=fits,
                can_pipeline=self.pipelines, plain_keys=self._plain_keys(), kernel=self.kernel,
                classes=self.num_splits is None,
            )  # fmt: skip
        else:
            config = choose_config(
                self.target,
                shape.of_any_sequence() if self.batch_invariant else shape,
                formats,
                q_fp8=q_format.name if q_format.kind == "fp8" else None,
                scratch_fits=fits,
                can_decode=not self.batch_invariant
                and all(
                    each.max_q_len == 1 and each.num_tokens == each.batch
                    for each in (shape, shape if self.scratch_fits is None else self.shape)
                ),
                can_pipeline=self.pipelines and not self.batch_invariant,
                plain_keys=self._plain_keys(),
                kernel="fused" if self.batch_invariant and self.kernel is None else self.kernel,
                classes=self.num_splits is None,
            )
        if self.num_splits is None:
            return config
        if config.kernel == "split":
            raise UnsupportedError(
                "kernel='split' shares keys by the sequences' lengths: leave num_splits out, "
                f"got {self.num_splits}"
            )
        config = replace(config, num_splits=self.num_splits)
        if config.fallback is not None:
            config = replace(config, fallback=replace(config.fallback, num_splits=self.num_splits))
        return config

    def _plain_keys(self) -> bool:
        """Whether widened keys have no factors of their own, and Q is one term beside them."""
        one_term = self.k_format != "bf16" or self.shape.q_dtype != torch.float16
        return one_term and not any(self.widened_per_key())

    def widened_per_key(self) -> tuple[bool, bool]:
        """Whether widened K and V have factors of each key beside them."""
        granularities = (self.k_granularity, self.v_granularity)
        return widened_per_key(self.shape.q_dtype, (self.k_format, self.v_format), granularities)

    def widened_sequences(self, shape: PrefillShape) -> int:
        """The most sequences whose keys are widened in calls of up to this shape."""
        if not self._has_classes():
            return shape.batch
        widened = "pipelined" if self.pipelines else "dense"
        return most_widened(self.target, shape, (self.k_format, self.v_format), widened)

    def scratch_bytes(self, shape: PrefillShape) -> int:
        """Bytes of the scratch for calls of up to this shape."""
        sequences = self.widened_sequences(shape)
        return scratch_bytes(shape, scratch_block(shape.head_dim), sequences, appends=self.appends)

    def _has_classes(self) -> bool:
        """Whether sequences with few query tokens can have launches of their own."""
        automatic = self.kernel is None and self.num_splits is None and not self.batch_invariant
        return automatic and self.shape.q_dtype.itemsize > 1 and not self.fp8_compute

    def memory_sizes(self, shape: PrefillShape, config: PrefillConfig, *, exact: bool) -> MemorySizes:
        """Memory of a configuration for calls of this shape, or (not exact) of any shape up to it."""
        block, heads, appends = config.scratch_block, shape.num_kv_heads, self.appends
        v_factors = has_v_factors(self.v_format, appends=appends, k_in_pages=config.k_in_pages)
        blocks, counters = Blocks(), dict[str, int]()
        if config.kernel not in IN_PAGES:
            sequences = shape.sequences_with(config.q_lens[0]) if exact else self.widened_sequences(shape)
            rows = scratch_rows(shape, block, sequences, appends=appends)
            factors_of_blocks = (heads, rows // block), torch.float32
            k_per_key, v_per_key = self.widened_per_key()
            blocks["k"] = (heads, rows, shape.head_dim), key_type(self.shape.q_dtype, self.k_format)
            blocks["v"] = (heads, rows, shape.v_dim), torch.float16
            if k_per_key or config.k_in_pages:
                blocks["k_factor"] = (heads, rows), torch.float32
            if v_per_key:
                blocks["v_factor"] = (heads, rows), torch.float32
            if appends:
                blocks["k_block_factor"] = factors_of_blocks
            if v_factors:
                blocks["v_block_factor"] = factors_of_blocks
            tiles = max(shape.row_tiles(config.block_m if exact else _LEAST_ROWS), 1)
            blocks["schedule"] = (tiles, 8), torch.int32
        # Only the pipelined kernel looks at them, and puts them back to zero.
        if config.fallback is not None and v_factors:
            counters["factor_flag"] = _FLAGS
        rows, arrivals = self._partials(shape, config, exact)
        if rows:
            blocks["acc"] = (rows * power_of_two(shape.v_dim),), torch.float32
            blocks["ml"] = (rows * 2,), torch.float32
            counters["arrived"] = arrivals
        return MemorySizes(shape, config, blocks, counters)

    def _partials(self, shape: PrefillShape, config: PrefillConfig, exact: bool) -> tuple[int, int]:
        """Rows of partial results, and counters of programs that have arrived; see `memory_sizes`."""
        heads, block_m, splits = shape.num_kv_heads, config.block_m, config.num_splits
        if config.kernel == "split":
            formats, found = (self.k_format, self.v_format), []
            for each in (config, *tall_configs(self.target, shape, config, formats).values()):
                rows = WARPGROUP_ROWS if each.is_tall else block_m  # a warpgroup has its own partial results
                found.append((most_work_items(shape, each) * each.block_m, rows))
            return heads * max(rows for rows, _ in found), heads * max(rows // each for rows, each in found)
        # The pipelined kernel counts halves of a tile.
        if exact:
            tiles = shape.row_tiles(block_m) * heads
            return (tiles * splits * block_m, 2 * tiles) if splits > 1 else (0, 0)
        rows = max(shape.row_tiles(m) * m for m in (16, 32, 64, 128)) * heads
        tiles = shape.row_tiles(_LEAST_ROWS) * heads
        if self.num_splits is not None:
            return (rows * self.num_splits, 2 * tiles) if self.num_splits > 1 else (0, 0)
        splits = min(-(-shape.max_seq_len // 16) // 4, _MOST_SPLITS)
        programs = partial_programs(self.target, 2)
        # Tiles of 128 rows fill a multiprocessor of NVIDIA alone; two share a compute unit of AMD.
        largest = 128 if tuned_as(self.target).is_amd else 64
        return (min(rows * splits, programs * largest), 2 * min(tiles, programs)) if splits > 1 else (0, 0)

    @cached_property
    def _sizes_of_kernels(self) -> list[MemorySizes]:
        """Memory that is large enough for every configuration that a call can have."""
        config = self.config
        if config.kernel == "decode":
            config = replace(config, kernel="fused")  # for calls of other sizes
        configs = [config, *config.short_queries, *self._split_configs()]
        may_widen = self.kernel not in ("fused", "split", "decode") and not self.batch_invariant
        may_widen = may_widen and (config.fp8 is None or not (self.appends or self.target.is_nvidia))
        if config.kernel not in IN_PAGES or (may_widen and self.scratch_fits):
            least = scratch_block(self.shape.head_dim)
            blocks = (least, _LARGEST_BLOCK) if self.pipelines else (least,)
            kernel = "append_then_attend" if self.appends else "dense"
            configs += [
                replace(config, kernel=kernel, scratch_block=block, k_in_pages=self.pipelines)
                for block in blocks
            ]
        return [self.memory_sizes(self.shape, config, exact=False) for config in configs]

    def _split_configs(self) -> list[PrefillConfig]:
        """Configurations of kernel "split" that the automatic choice makes for calls of any size."""
        if not self._has_classes():
            return []
        formats = (self.k_format, self.v_format)
        found = [few_bounds(self.target, self.shape, formats, name) for name in (None, "dense", "pipelined")]
        return [
            split_config(self.target, self.shape, formats, (0, most), block_m, "")
            for bounds in found
            for most, block_m in bounds
            if most >= self.shape.min_q_len
        ]

    def configs_of_calls(self) -> list[tuple[PrefillConfig, PrefillShape]]:
        """Configurations that calls have, over powers of two and between them.

        Each is with the shapes of the first call and of the one with the most tokens: programs that widen
        many keys do so in a loop, which is another kernel.
        """
        batches, tokens = (_steps(most) for most in (self.shape.batch, self.shape.num_tokens))
        first: dict[PrefillConfig, tuple[PrefillConfig, PrefillShape]] = {}
        most: dict[PrefillConfig, tuple[PrefillConfig, PrefillShape]] = {}
        for batch in batches:
            for num_tokens in tokens:
                shape = self.shape_of_call(batch, num_tokens)
                config = self.config_for(shape)
                kind, call = config.kind(), (config, shape)
                first.setdefault(kind, call)
                most[kind] = max(most.get(kind, call), call, key=_tokens_of)
        return [*first.values(), *(call for kind, call in most.items() if call is not first[kind])]


def _tokens_of(call: tuple[PrefillConfig, PrefillShape]) -> int:
    return call[1].kv_tokens + call[1].num_tokens


def _steps(most: int) -> list[int]:
    """Numbers up to `most`, four between each power of two and the next."""
    steps = {(4 + part) << shift >> 2 for shift in range(most.bit_length()) for part in range(4)}
    return sorted({min(step, most) for step in steps} | {most})

"""Plans of prefill: the configuration, the memory and the launches of calls, made once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from narrowkv.attn_decode import DecodePlan, DecodeShape, plan_decode
from narrowkv.attn_prefill.binding import BOUND_CACHES, BoundCache, bind_cache, per_key, storing_constants
from narrowkv.attn_prefill.calls import APPEND_OPTIONS, PREFILL_OPTIONS, Arguments, refuse_keywords, run
from narrowkv.attn_prefill.checks import (
    append_shape,
    bounded,
    check_classes,
    check_shape_of_plan,
    check_values,
    prefill_shape,
)
from narrowkv.attn_prefill.config import choose_append_config, choose_config
from narrowkv.attn_prefill.launches import Kind, make_route
from narrowkv.attn_prefill.memory import Memory, Needs, key_type, make_memory, scratch_bytes
from narrowkv.attn_prefill.shapes import SCRATCH_BLOCK, PrefillConfig, PrefillShape
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.paged_cache.append import EXPONENT_RULES, store_of
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import check_choice, check_instance, check_positive_int
from narrowkv.runtime.launch import (
    BoundLaunch,
    LaunchOptions,
    Workspace,
    active_target,
    block_bytes,
    is_compiled,
)
from narrowkv.runtime.launch.gluon import has_gluon
from narrowkv.runtime.launch.path import executor
from narrowkv.runtime.targets import Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.attn_prefill.calls import AppendOptions, PrefillOptions

_P = TypeVar("_P", bound="PrefillPlan")
SCRATCH_LIMIT_BYTES = 4 * 2**30
_LARGEST_BLOCK = 128  # keys of a block of scratch
_MAX_KEPT = 4096  # configurations and routes


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """A prepared prefill: what does not depend on the values of lengths and page ids.

    A plan serves every layer of a model, and all calls up to its maxima. Its calls write to one workspace, so
    they must not run at the same time as each other or as those of another plan with that workspace. Two
    plans are equal only if they are the same object.

    Attributes:
        target: what the configuration was chosen for.
        shape: the shapes that it serves; `batch`, `num_tokens`, `max_q_len`, `max_seq_len` and `kv_tokens`
            are maxima.
        q_dtype: of the query; k_format, v_format: of the cache.
        k_granularity, v_granularity: of the descales.
        config: the kernel, its tiles and splits in the largest call.
        device: where the memory is.
        pipelines: whether `kernels/pipelined.py` takes the formats and runs here.
        workspace: scratch, partial results and counters; None if each call allocates its own.
        decode: the plan of `paged_decode` where every sequence has one query token, else None.
        exponent: of `plan_append`: how FP4 scales of appended tokens are chosen; None for a plan that does
            not append.
        kernel, num_splits, batch_invariant, fp8_compute: see `plan_prefill` and `plan_append`.
        scratch_fits: whether widened keys of the largest call fit the allowed memory; None for a plan that
            unplanned calls share, which has no maxima and decides in each call.
    """

    target: Target
    shape: PrefillShape
    q_dtype: torch.dtype
    k_format: str
    v_format: str
    k_granularity: str
    v_granularity: str
    config: PrefillConfig
    device: torch.device
    pipelines: bool
    workspace: Workspace | None = field(repr=False, default=None)
    decode: DecodePlan | None = field(repr=False, default=None)
    exponent: str | None = None
    kernel: str | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    fp8_compute: bool = False
    scratch_fits: bool | None = None
    _configs: dict[Any, PrefillConfig] = field(init=False, repr=False, default_factory=dict)
    _launches: dict[Any, BoundLaunch] = field(init=False, repr=False, default_factory=dict)
    _memories: dict[PrefillConfig, Memory] = field(init=False, repr=False, default_factory=dict)
    _calls: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)

    def __deepcopy__(self: _P, memo: dict[int, Any]) -> _P:
        """A plan for the same calls, with memory of its own."""
        if self.workspace is None:
            return replace(self)
        return replace(self).with_workspace(Workspace(self.workspace.num_bytes, self.device))

    def explain(self) -> str:
        """Why this configuration: one line for a person."""
        c = self.config
        if self.decode is not None:
            return f"paged_decode, because {c.why}: {self.decode.explain()}"
        warps = f"{c.options.num_warps} warps"
        if c.otherwise is not None:
            warps = "two warpgroups that attend and a warp that copies"
        splits = "" if c.num_splits == 1 else f", the keys of each shared by {c.num_splits} programs"
        pages = ", K from its pages where they allow it" if c.k_in_pages else ""
        return (
            f"{self.target.name}: {c.kernel}, because {c.why}; tiles of {c.block_m} rows x {c.block_n} keys, "
            f"{warps}, {c.options.num_stages} stages{splits}{pages}"
        )

    @property
    def appends(self) -> bool:
        """Whether it is a plan of `prefill_append`."""
        return self.exponent is not None

    def shape_of_call(self, batch: int, num_tokens: int) -> PrefillShape:
        """The shape of a call with so many sequences and query tokens, with the plan's bounds."""
        shape = self.shape
        if (batch, num_tokens) == (shape.batch, shape.num_tokens):
            return shape
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
        if config is None:
            if len(self._configs) >= _MAX_KEPT:
                self._configs.clear()
            config = self._configs[shape] = self._choose(shape)
        return config

    def workspace_bytes(self) -> int:
        """Bytes that a `narrowkv.runtime.launch.Workspace` needs for every call of this plan.

        Widened keys take 4 bytes for each channel of each KV head and token of `shape.kv_tokens` and
        `shape.num_tokens`, with sequences rounded up to blocks of 64 or 128 keys, besides factors of keys and
        blocks; partial results take at most 8 tiles of rows for each tile that the device runs at once.
        """
        needed = [block_bytes(list(needs.blocks.values())) for needs in self._needs_of_kernels()]
        return max([*needed, self.decode.workspace_bytes() if self.decode is not None else 0])

    def with_workspace(self: _P, workspace: Workspace | None) -> _P:
        """The plan with its memory in this workspace; a new one of the right size for None.

        Raises:
            TypeError, ValueError: the workspace is no `Workspace`, too small or on another device.
        """
        needed = self.workspace_bytes()
        if workspace is None:
            workspace = Workspace(needed, self.device)
        check_instance("workspace", workspace, Workspace)
        if workspace.num_bytes < needed or workspace.device != self.device:
            raise ValueError(
                f"workspace must have at least {needed} bytes on {self.device}, "
                f"got {workspace.num_bytes} on {workspace.device}"
            )
        decode = None if self.decode is None else replace(self.decode, workspace=workspace)
        return replace(self, workspace=workspace, decode=decode)

    def memory(self, config: PrefillConfig) -> Memory | None:
        """The memory of calls with this configuration; None where each call allocates its own."""
        if self.workspace is None:
            return None
        kind = _kind_of(config)
        found = self._memories.get(kind)
        if found is None:
            needs = self.needs(self.shape, config, exact=False)
            found = self._memories[kind] = make_memory(needs, self.workspace, self.device)
        return found

    def bound_launch(self, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> BoundLaunch:
        """One object for each kernel with its constants, whatever the sizes of calls."""
        key = (kernel, tuple(constexprs.values()), options)
        return self._launches.setdefault(key, BoundLaunch(kernel, constexprs, options))

    def kernels(
        self,
        cache: PagedKVCache,
        *,
        ragged: bool = False,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        window_right: int = 0,
        sinks: bool = False,
        return_lse: bool = False,
        rope: Rope | None = None,
    ) -> tuple[BoundLaunch, ...]:
        """Every kernel of prefill, with its constants and options, that calls of this plan can launch.

        Kernels of `paged_decode`, where that serves calls, are those of `plan.decode.kernels(cache)`.

        Args:
            cache: a cache like those of the calls; one page is enough.
            ragged: whether their page tables are ragged.
            logits_soft_cap, window_left, window_right, return_lse: as in the calls, causal ones by default;
                sinks: whether they have sinks.
            rope: of an append: the rotary embedding.

        Example:
            >>> for launch in plan.kernels(cache):          # doctest: +SKIP
            ...     print(launch.kernel, launch.constexprs, launch.options)
        """
        bound = self.bind(cache)
        kind = Kind(
            ragged, logits_soft_cap > 0, sinks, return_lse, False, window_left, window_right, True,
            storing_constants(cache, self.exponent, rope) if self.exponent is not None else None,
            self.target.is_amd and is_compiled(cache.k), cache.negative_zero_free,
        )  # fmt: skip
        found: dict[int, BoundLaunch] = {}
        for config, shape in self._configs_of_calls():
            if config.kernel != "decode":
                route = make_route(self, shape, config, cache, bound, kind)
                for launch in (route.fill, route.attend):
                    if launch is not None:
                        found[id(launch)] = launch
        return tuple(found.values())

    def bind(self, cache: PagedKVCache) -> BoundCache:
        """The cache as kernel arguments, once it is known to be of this plan's kind.

        Raises:
            ValueError: the plan is for another kind of cache.
        """
        formats = (cache.format.k, cache.format.v, cache.k_granularity, cache.v_granularity)
        made = (cache.num_kv_heads, cache.head_dim, cache.page_size, *formats, cache.k.device)
        shape = self.shape
        own = (self.k_format, self.v_format, self.k_granularity, self.v_granularity)
        wanted = (shape.num_kv_heads, shape.head_dim, shape.page_size, *own, self.device)
        if made != wanted:
            raise ValueError(
                f"plan must be made for a cache of (num_kv_heads, head_dim, page_size, K, V, their descales, "
                f"device) {made}, got a plan for {wanted}: call {self.maker} again"
            )
        found = BOUND_CACHES.get(cache, {}).get((self.target.name, self.config.fp8, self.exponent))
        return found or bind_cache(cache, self.target, self.config.fp8, self.exponent)

    @property
    def maker(self) -> str:
        """The function that makes such plans."""
        return "plan_append" if self.appends else "plan_prefill"

    @property
    def _decodes(self) -> bool:
        """Whether the plan has one for `paged_decode`, or will have one."""
        return self.shape.max_q_len == 1 and self.shape.num_tokens == self.shape.batch

    def _choose(self, shape: PrefillShape) -> PrefillConfig:
        fits = self.scratch_fits
        if fits is None:
            fits = scratch_bytes(shape, SCRATCH_BLOCK, appends=self.appends) <= SCRATCH_LIMIT_BYTES
        formats, q_format = (self.k_format, self.v_format), get_format(self.q_dtype)
        if self.appends:
            config = choose_append_config(
                self.target, shape, formats, q_format.name, fp8_compute=self.fp8_compute, scratch_fits=fits,
                can_pipeline=self.pipelines, plain_keys=self._plain_keys(), kernel=self.kernel,
            )  # fmt: skip
        else:
            config = choose_config(
                self.target,
                shape.of_any_sequence() if self.batch_invariant else shape,
                formats,
                q_fp8=q_format.name if q_format.kind == "fp8" else None,
                scratch_fits=fits,
                can_decode=(
                    q_format.kind == "float"
                    and shape.num_tokens == shape.batch
                    and shape.max_q_len == 1
                    and not self.batch_invariant
                    and (self.scratch_fits is None or self._decodes)
                ),
                can_pipeline=self.pipelines and not self.batch_invariant,
                plain_keys=self._plain_keys(),
                kernel="fused" if self.batch_invariant and self.kernel is None else self.kernel,
            )
        if self.num_splits is None:
            return config
        config = replace(config, num_splits=self.num_splits)
        if config.otherwise is not None:
            config = replace(config, otherwise=replace(config.otherwise, num_splits=self.num_splits))
        return config

    def _plain_keys(self) -> bool:
        """Whether widened keys have no factors of their own, and Q is one term beside them."""
        shared = not any(per_key(self.k_granularity, self.v_granularity))
        return shared and (self.k_format != "bf16" or self.q_dtype != torch.float16)

    def needs(self, shape: PrefillShape, config: PrefillConfig, *, exact: bool) -> Needs:
        """What a configuration needs for calls of this shape, or (not exact) of any shape up to it."""
        own = per_key(self.k_granularity, self.v_granularity)
        return Needs(
            shape, config, self.target, self.q_dtype, self.k_format, self.v_format, own,
            self.appends, self.num_splits, exact,
        )  # fmt: skip

    def _needs_of_kernels(self) -> list[Needs]:
        """What the memory of every configuration that a call can have fits in."""
        config = self.config
        if config.kernel == "decode":
            config = replace(config, kernel="fused")  # for calls of other sizes
        configs = [config]
        may_widen = self.kernel not in ("fused", "decode") and not self.batch_invariant
        may_widen = may_widen and (config.fp8 is None or not (self.appends or self.target.is_nvidia))
        if config.kernel != "fused" or (may_widen and self.scratch_fits):
            blocks = (SCRATCH_BLOCK, _LARGEST_BLOCK) if self.pipelines else (SCRATCH_BLOCK,)
            kernel = "append_then_attend" if self.appends else "dense"
            configs += [
                replace(config, kernel=kernel, scratch_block=block, k_in_pages=self.pipelines)
                for block in blocks
            ]
        return [self.needs(self.shape, config, exact=False) for config in configs]

    def _configs_of_calls(self) -> list[tuple[PrefillConfig, PrefillShape]]:
        """Configurations that calls have, each with the shape of one: over powers of two and between them."""
        batches, tokens = (_steps(most) for most in (self.shape.batch, self.shape.num_tokens))
        found: dict[PrefillConfig, tuple[PrefillConfig, PrefillShape]] = {}
        for batch in batches:
            for num_tokens in tokens:
                shape = self.shape_of_call(batch, num_tokens)
                config = self.config_for(shape)
                found.setdefault(_kind_of(config), (config, shape))
        return list(found.values())

    def run(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        cu_seqlens_q: torch.Tensor,
        *,
        causal: bool = True,
        sm_scale: float | None = None,
        q_descale: float | torch.Tensor = 1.0,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        window_right: int = -1,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        **options: Unpack[PrefillOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`batch_prefill` by this plan: the same arguments and results.

        The first call with some dtypes, strides and options checks them, and the first one of some size
        prepares its launches; later calls with the same ones only launch.
        """
        if options and not options.keys() <= PREFILL_OPTIONS:
            refuse_keywords("batch_prefill", options, PREFILL_OPTIONS)
        given = Arguments(
            q, None, None, cache, page_table, cu_seqlens_q, None, causal, sm_scale, q_descale,
            logits_soft_cap, window_left, window_right, sinks, out, **options,
        )  # fmt: skip
        return run(self, given)


class AppendPlan(PrefillPlan):
    """A `PrefillPlan` for `prefill_append`."""

    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        cu_seqlens_q: torch.Tensor,
        *,
        rope: Rope | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        **options: Unpack[AppendOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`prefill_append` by this plan: the same arguments and results; see `PrefillPlan.run`."""
        if options and not options.keys() <= APPEND_OPTIONS:
            refuse_keywords("prefill_append", options, APPEND_OPTIONS)
        given = Arguments(
            q, k_new, v_new, cache, page_table, cu_seqlens_q, rope, True, sm_scale, 1.0,
            logits_soft_cap, window_left, -1, sinks, out, **options,
        )  # fmt: skip
        return run(self, given)


def _kind_of(config: PrefillConfig) -> PrefillConfig:
    """What kernels and memory depend on: whether there are splits, not how many, and for no reason."""
    otherwise = None if config.otherwise is None else _kind_of(config.otherwise)
    return replace(config, why="", num_splits=min(config.num_splits, 2), otherwise=otherwise)


def _steps(most: int) -> list[int]:
    """Numbers up to `most`, four between each power of two and the next."""
    steps = {(4 + part) << shift >> 2 for shift in range(most.bit_length()) for part in range(4)}
    return sorted({min(step, most) for step in steps} | {most})


def check_plan(plan: object, kind: type[PrefillPlan], maker: str) -> None:
    """Refuses what is no plan, or one for the other operation."""
    check_instance("plan", plan, PrefillPlan)
    if type(plan) is not kind:
        raise ValueError(f"plan must be made by {maker}, got one for another operation: call {maker} again")


def can_pipeline(target: Target, q_dtype: torch.dtype, cache: PagedKVCache) -> bool:
    """Whether `kernels/pipelined.py` serves the call: in Gluon for Hopper, it cannot be interpreted."""
    return (
        target.name == "sm90"
        and is_compiled(cache.k)
        and has_gluon()
        and cache.head_dim in (64, 128)
        and not any(per_key(cache.k_granularity, cache.v_granularity))
        and key_type(q_dtype, cache.format.k) == q_dtype
    )


def plan_prefill(
    q: torch.Tensor | PrefillShape,
    cache: PagedKVCache,
    page_table: PageTable | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    max_kv_tokens: int | None = None,
    kernel: str | None = None,
    num_splits: int | None = None,
    scratch_limit_bytes: int = SCRATCH_LIMIT_BYTES,
    batch_invariant: bool = False,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> PrefillPlan:
    """Plans prefills: checks metadata, chooses the kernel, allocates the workspace.

    Nothing is read from the device unless `validate`. The plan holds for any lengths within its bounds, so a
    captured graph can be replayed with other lengths, and for all calls up to its maxima.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`, of which only the metadata is used; or, before there are
            tensors, a `PrefillShape` of the largest call.
        cache: the cache, or with a `PrefillShape` one like it; one page is enough.
        page_table, cu_seqlens_q: as for `batch_prefill`; None with a `PrefillShape`.
        max_q_len: the most query tokens of one sequence, where known. 1 lets `paged_decode` serve the call.
        max_seq_len: the most keys of one sequence; default the table's capacity.
        max_kv_tokens: the most keys of all sequences together. It bounds the scratch of widened keys, which
            an engine's wide block table would otherwise make large.
        kernel: forces "dense", "fused" or "decode".
        num_splits: forces how many programs share a tile's keys.
        scratch_limit_bytes: the most scratch that the automatic choice may take.
        batch_invariant: choose kernel, tiles and splits by the model alone, so that a sequence's result has
            the same bits alone, in any batch and with any table width. The kernel is "fused" unless it is
            forced to be "dense", and there is one split unless `num_splits` says otherwise: long prompts take
            longer than by the kernel that the shapes would choose.
        workspace: memory that plans share whose calls do not run at the same time, with at least
            `workspace_bytes()`; None allocates what this plan needs.
        validate: also look at the values of cu_seqlens_q, of the table, of descales and at whether the bounds
            above hold, which waits for the device.

    Returns:
        A `PrefillPlan` for `batch_prefill(..., plan=plan)` or `plan.run(...)`.

    Raises:
        TypeError, ValueError: for metadata that `batch_prefill` would refuse; a workspace that is too small.
        UnsupportedError: for a forced kernel that cannot serve the call.

    Example:
        >>> plan = plan_prefill(q, cache, table, cu_seqlens_q, max_q_len=512)      # doctest: +SKIP
        >>> o = batch_prefill(q, cache, table, cu_seqlens_q, plan=plan)            # doctest: +SKIP
        >>> shape = PrefillShape(batch=8, num_tokens=512, max_q_len=512, num_qo_heads=8, num_kv_heads=2,
        ...                      head_dim=64, page_size=16, max_seq_len=1024, kv_tokens=8192)
        >>> cache = PagedKVCache.empty(1, 16, 2, 64, format="fp8_e4m3fn")
        >>> plan_prefill(shape, cache).config.kernel
        'dense'
    """
    shape = _shape_of(q, cache, page_table, cu_seqlens_q, appends=False)
    shape = bounded(shape, max_q_len, max_seq_len, max_kv_tokens)
    if validate and page_table is not None and cu_seqlens_q is not None:
        check_values(shape, cache, page_table, cu_seqlens_q)
    plan = _plan(
        PrefillPlan, shape, cache, kernel=kernel, num_splits=num_splits, limit=scratch_limit_bytes,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if plan.config.kernel == "decode":
        plan = replace(plan, decode=_decode_plan(shape, cache))
    return plan.with_workspace(workspace)


def plan_append(
    q: torch.Tensor | PrefillShape,
    cache: PagedKVCache,
    page_table: PageTable | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    fp8_compute: bool = False,
    exponent: str = "mse",
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    max_kv_tokens: int | None = None,
    kernel: str | None = None,
    num_splits: int | None = None,
    scratch_limit_bytes: int = SCRATCH_LIMIT_BYTES,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> AppendPlan:
    """Plans calls of `prefill_append`: checks metadata, chooses the kernel, allocates the workspace.

    Args:
        q, cache, page_table, cu_seqlens_q: as for `plan_prefill`, the table as for `prefill_append`.
        fp8_compute: multiply queries and old tokens on FP8 matrix units.
        exponent: FP4: how a group's scale is chosen; see `narrowkv.paged_cache.append`.
        max_q_len, max_seq_len, max_kv_tokens: bounds as for `plan_prefill`, new tokens included.
        kernel: forces "append_then_attend" (one launch stores and widens, one attends), "pipelined" (the same
            with Hopper's kernel) or "fused" (one launch that widens old tokens in its loop).
        num_splits: forces how many programs share a tile's keys.
        scratch_limit_bytes: the most scratch that the automatic choice may take.
        workspace: as for `plan_prefill`.
        validate: also look at the values of cu_seqlens_q, of the table and its room for the new tokens, of
            descales and at whether the bounds above hold, which waits for the device.

    Returns:
        An `AppendPlan` for `prefill_append(..., plan=plan)` or `plan.run(...)`.

    Raises:
        TypeError, ValueError: for metadata that `prefill_append` would refuse; a workspace that is too small.
        UnsupportedError: for a forced kernel that cannot serve the call.

    Example:
        >>> plan = plan_append(q, cache, table, cu_seqlens_q)                       # doctest: +SKIP
        >>> o = prefill_append(q, k, v, cache, table, cu_seqlens_q, plan=plan)      # doctest: +SKIP
    """
    shape = _shape_of(q, cache, page_table, cu_seqlens_q, appends=True)
    shape = bounded(shape, max_q_len, max_seq_len, max_kv_tokens)
    check_choice("exponent", exponent, EXPONENT_RULES)
    if validate and page_table is not None and cu_seqlens_q is not None:
        check_values(shape, cache, page_table, cu_seqlens_q)
    plan = _plan(
        AppendPlan, shape, cache, kernel=kernel, num_splits=num_splits, limit=scratch_limit_bytes,
        exponent=exponent, fp8_compute=fp8_compute,
    )  # fmt: skip
    return plan.with_workspace(workspace)


def _shape_of(
    q: torch.Tensor | PrefillShape, cache: PagedKVCache, page_table: PageTable | None,
    cu_seqlens_q: torch.Tensor | None, *, appends: bool,
) -> PrefillShape:  # fmt: skip
    """The largest call's shape, once it is checked."""
    if not isinstance(q, PrefillShape):
        if page_table is None or cu_seqlens_q is None:
            check_classes(q, cache, page_table, cu_seqlens_q)
            raise AssertionError("one of them is None")
        return (append_shape if appends else prefill_shape)(q, cache, page_table, cu_seqlens_q)
    if page_table is not None or cu_seqlens_q is not None:
        raise TypeError("page_table and cu_seqlens_q must be None with a PrefillShape: it says the maxima")
    check_shape_of_plan(q, check_instance("cache", cache, PagedKVCache), appends=appends)
    return q


def _plan(
    kind: type[_P], shape: PrefillShape, cache: PagedKVCache, *, kernel: str | None = None,
    num_splits: int | None = None, limit: int | None = None, batch_invariant: bool = False,
    exponent: str | None = None, fp8_compute: bool = False,
) -> _P:  # fmt: skip
    """A plan without its workspace; without maxima if there is no limit."""
    if num_splits is not None:
        check_positive_int("num_splits", num_splits)
    if exponent is not None:
        store_of(cache)
    target = active_target(cache.k.device)
    needed = scratch_bytes(shape, SCRATCH_BLOCK, appends=exponent is not None)
    plan = kind(
        target, shape, shape.q_dtype, cache.format.k, cache.format.v, cache.k_granularity,
        cache.v_granularity, PrefillConfig("", ""), cache.k.device,
        can_pipeline(target, shape.q_dtype, cache), exponent=exponent, kernel=kernel, num_splits=num_splits,
        batch_invariant=batch_invariant, fp8_compute=fp8_compute,
        scratch_fits=None if limit is None else needed <= limit,
    )  # fmt: skip
    return replace(plan, config=plan._choose(shape))


def _decode_plan(shape: PrefillShape, cache: PagedKVCache) -> DecodePlan:
    decode = DecodeShape(
        batch=shape.batch, q_len=1, num_qo_heads=shape.num_qo_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, page_size=shape.page_size, capacity=shape.max_seq_len, q_dtype=shape.q_dtype,
    )  # fmt: skip
    groups = "token_head_group" in (cache.k_granularity, cache.v_granularity)
    return plan_decode(decode, cache.format, device=cache.k.device, scale_group=32 if groups else None)


_plans: dict[Any, PrefillPlan] = {}
_MAX_PLANS = 64


def plan_for_call(
    kind: type[_P], q: torch.Tensor, cache: PagedKVCache, page_table: PageTable, cu_seqlens_q: torch.Tensor,
    flag: bool,
) -> _P:  # fmt: skip
    """The plan of unplanned calls of a model, of any size; each call allocates its own memory.

    kind: `PrefillPlan` or `AppendPlan`; flag: `batch_invariant` of the first, `fp8_compute` of the second.
    """
    if not (isinstance(q, torch.Tensor) and type(cache) is PagedKVCache):
        check_classes(q, cache, page_table, cu_seqlens_q)
    key = (
        q.shape[1:], q.dtype, q.device, cache.format, cache.head_dim, cache.num_kv_heads, cache.page_size,
        cache.k_granularity, cache.v_granularity, kind, flag, active_target(q.device).name, type(executor()),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if kind is PrefillPlan:
            shape = prefill_shape(q, cache, page_table, cu_seqlens_q)
            plan = _plan(PrefillPlan, shape, cache, batch_invariant=flag)
        else:
            shape = append_shape(q, cache, page_table, cu_seqlens_q)
            plan = _plan(AppendPlan, shape, cache, exponent=EXPONENT_RULES[0], fp8_compute=flag)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return cast(_P, plan)

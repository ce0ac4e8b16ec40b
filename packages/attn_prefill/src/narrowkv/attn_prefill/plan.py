"""Plans of `batch_prefill` and `prefill_append`: calls are checked and prepared once, then only launched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from narrowkv.attn_decode.checks import check_transform, fold_q_descale
from narrowkv.attn_decode.planning import plan_for_call as decode_plan_for_call
from narrowkv.attn_prefill.arguments import APPEND, PLAIN_VALUES, PREFILL, Arguments
from narrowkv.attn_prefill.checks import (
    check_bounds,
    check_chunk,
    check_classes,
    check_values,
    inputs_of,
    prefill_shape,
)
from narrowkv.attn_prefill.config import fp8_route
from narrowkv.attn_prefill.launch import (
    CallTraits,
    Route,
    launches_of,
    make_routes,
    matrix_of,
    storing_constants,
)
from narrowkv.attn_prefill.memory import MemorySizes, allocate
from narrowkv.attn_prefill.settings import PrefillSettings
from narrowkv.attn_prefill.tiles import PrefillShape
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.paged_cache.binding import BOUND_TABLES, BoundCache, BoundTable, bind_table
from narrowkv.paged_cache.key_transform import transform_queries
from narrowkv.paged_cache.rope import BOUND_ROPES, BoundRope, bind_rope
from narrowkv.quant.formats import widening_exponent
from narrowkv.runtime.errors import (
    check_finite_float,
    check_instance,
    check_no_grad,
    check_results,
    check_soft_cap,
    check_windows,
    refuse_overlap,
)
from narrowkv.runtime.launch import (
    BoundLaunch,
    PreparedCall,
    active_target,
    executor,
    is_compiled,
)
from narrowkv.runtime.operation import (
    Operation,
    Prepared,
    metadata_of,
    refuse_containers,
    spans_of_arguments,
)
from narrowkv.runtime.scales import check_scales

_LOG2E = math.log2(math.e)
_NOTHING: dict[str, Any] = {}
# Of a call, in the order in which its launches take them.
_VALUES = (
    "q", "out", "starts", "ids", "row", "lens", "num_ids", "max_pages", "qk_scale", "out_scale", "k_new",
    "v_new", "given_q", "k_scale",
)  # fmt: skip


class CheckedPrefill(NamedTuple):
    """A call after the checks.

    Attributes:
        shape: its sizes.
        scale: of the logits, with a descale of the query that is a number; logit_scale: the same in base 2,
            or natural for a soft cap.
        soft_cap: the cap of logits, or 0.
        out_dtype: of a new output.
        traits: the values that kernels depend on.
    """

    shape: PrefillShape
    scale: float
    logit_scale: float
    soft_cap: float
    out_dtype: torch.dtype
    traits: CallTraits


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PreparedPrefill(Prepared):
    """The launches and values of calls whose tensors have the same shapes, strides, dtypes and devices.

    Attributes:
        checked: the call.
        classes: how each class of sequences is served; empty where there is nothing to launch, or
            `paged_decode` serves the call.
        decodes: whether that is so.
        q_as_bytes: an FP8 query goes to a matrix unit of another format.
        has_options: whether kernels take a log-sum-exp, sinks, a descale of the query or shifts of logits.
        starts_as_is: whether `cu_seqlens_q` goes to kernels as it is, else as a contiguous copy.

    The other attributes are those of `Prepared`; launches are those of the classes.
    """

    checked: CheckedPrefill
    classes: tuple[Route, ...]
    decodes: bool
    q_as_bytes: bool
    has_options: bool
    starts_as_is: bool


class PrefillPlan(PrefillSettings):
    """All of a prefill that does not depend on the values of lengths and page ids; see `PrefillSettings`."""

    operation: ClassVar[Operation] = PREFILL

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
        bound = self.bound_cache(cache)
        turn = BOUND_ROPES.get(id(rope)) or bind_rope(check_instance("rope", rope, Rope))
        traits = self._traits(
            bound, cache, turn, ragged=ragged, soft_cap=logits_soft_cap > 0, sinks=sinks, lse=return_lse,
            q_descale=False, window_left=window_left, window_right=window_right, positive=True,
        )  # fmt: skip
        found: dict[int, BoundLaunch] = {}
        for config, shape in self.configs_of_calls():
            if config.kernel != "decode":
                for route in make_routes(self, shape, config, cache, bound, traits):
                    found |= {id(launch): launch for launch in route.kernels}
        return tuple(found.values())

    def run(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        cu_seqlens_q: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`batch_prefill` by this plan: the same arguments and results.

        The first call with some dtypes, strides and options checks them, and the first one of some size
        prepares its launches; later calls with the same ones only launch.
        """
        self.operation.check_keywords(options)
        return self.call(Arguments(q, cache, page_table, cu_seqlens_q, **options))

    def call(self, given: Arguments) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A call by this plan; see `run`."""
        q, cache, starts, k_new, v_new = given.q, given.cache, given.cu_seqlens_q, given.k_new, given.v_new
        rope, q_descale, sinks, out, lse = given.rope, given.q_descale, given.sinks, given.out, given.lse
        out_scale = given.out_scale
        bound, table = self._caches.get(id(cache)), BOUND_TABLES.get(id(given.page_table))
        turn = BOUND_ROPES.get(id(rope))
        if bound is None or table is None or turn is None:
            bound, table, turn = self._bind_arguments(given)
        running = executor()
        try:
            signature = (
                bound.number, table.number, table.batch, table.max_pages if self.scratch_fits is None else 0,
                None if running is None else (running.target.name, type(running)), torch.is_grad_enabled(),
                type(q), q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
                starts.shape, starts.stride(), starts.dtype, starts.device,
                given[PLAIN_VALUES],
                q_descale if type(q_descale) is float else metadata_of(q_descale),
                None if out is None else (out.shape, out.stride(), out.dtype, out.device, out.requires_grad),
                None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.device, lse.requires_grad),
                None
                if sinks is None
                else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device, sinks.requires_grad),
                None if out_scale is None else metadata_of(out_scale),
                turn.kind, turn.tokens,
                None
                if k_new is None or v_new is None
                else (
                    k_new.shape, k_new.stride(), k_new.dtype, k_new.device, k_new.requires_grad,
                    v_new.shape, v_new.stride(), v_new.dtype, v_new.device, v_new.requires_grad,
                ),
            )  # fmt: skip
            call: PreparedPrefill | None = self.calls.get(signature)
        except (AttributeError, TypeError):
            check_classes(given, appends=self.appends)
            refuse_containers(given, PLAIN_VALUES)
            raise
        if call is None or given.validate:
            call = self._checked_call(bound, table, turn, signature, given)
        if bound.scales or type(q_descale) is not float or out_scale is not None:
            scales = {**bound.scales, "q_descale": q_descale, "out_scale": out_scale}
            check_scales(scales, given.validate)
        read = [*table.spans, *turn.spans]
        o, lse = self.results(call, given, bound.spans, read, bound.store)
        if call.classes:
            rows, shift = q.view(torch.uint8) if call.q_as_bytes else q, None
            if bound.transforms:
                # Logits lack q . k_offset, because the offset was subtracted from K.
                lost = call.checked.scale if call.checked.traits.shifts else None
                rows, shift = transform_queries(q, bound.transform, cache.num_kv_heads, lost, rope)
            begins = starts if call.starts_as_is else starts.contiguous()
            optional = _NOTHING
            if call.has_options:
                optional = {
                    "lse": lse, "sinks": sinks, "q_descale": q_descale, "shift": shift, "o_scale": out_scale,
                }  # fmt: skip
            for served in call.classes:
                reading, own = bound.readings[served.reading], _NOTHING
                if served.in_pages:
                    own = {**own, "page_desc": matrix_of(cache, served.config.block_n).descriptor}
                if isinstance(served.memory, MemorySizes):
                    own = {**own, **allocate(served.memory, self.device)}
                served.launches.run(
                    rows, o, begins, table.ids, table.row, table.lens, table.num_ids,
                    table.max_pages if bound.num_pages else 0, call.checked.logit_scale * reading.k_factor,
                    reading.v_factor / served.p_scale, k_new, v_new, q, reading.k_factor,
                    served.sizes, reading.arguments, bound.new_arguments, turn.arguments, optional, own,
                )  # fmt: skip
        elif call.decodes:
            decode = self.decode or decode_plan_for_call(q, cache, given.page_table, False)
            decode.run(
                q, cache, given.page_table, sm_scale=call.checked.scale,
                q_descale=q_descale if isinstance(q_descale, torch.Tensor) else 1.0, out=o,
                logits_soft_cap=call.checked.soft_cap, window_left=call.checked.traits.window_left,
                sinks=sinks, lse=lse, out_scale=out_scale, validate=False,
            )  # fmt: skip
        return (o, lse) if given.return_lse and lse is not None else o

    def _bind_arguments(self, given: Arguments) -> tuple[BoundCache, BoundTable, BoundRope]:
        """Cache, page table and rotary embedding as kernel arguments."""
        check_classes(given, appends=self.appends)
        turn = BOUND_ROPES.get(id(given.rope)) or bind_rope(check_instance("rope", given.rope, Rope))
        bound = self.bound_cache(given.cache)
        table = BOUND_TABLES.get(id(given.page_table)) or bind_table(given.page_table)
        return bound, table, turn

    def _checked_call(
        self, bound: BoundCache, table: BoundTable, turn: BoundRope, signature: Any, given: Arguments
    ) -> PreparedPrefill:
        """Checks the arguments of a call, with `validate` their values too, and prepares its launches once.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came.
        """
        checked = self._check(bound, turn, given)
        call: PreparedPrefill | None = self.calls.get(signature)
        prepared = call or self._prepare(bound, table, turn, given, checked)
        if given.validate is None and self.scratch_fits is not None and self.device.type == "cpu":
            most = replace(self.shape, num_tokens=len(given.q))
            check_bounds(most, given.page_table, given.cu_seqlens_q)
        return self.prepared(signature, prepared, given) if call is None else prepared

    def _check(self, bound: BoundCache, turn: BoundRope, given: Arguments) -> CheckedPrefill:
        """Checks everything but the plan's maxima."""
        if given.batch_invariant and not self.batch_invariant:
            raise ValueError("plan must be made with batch_invariant=True: call plan_prefill again")
        q, cache, table, starts = given.q, given.cache, given.page_table, given.cu_seqlens_q
        shape = prefill_shape(q, cache, table, starts, appends=self.appends)
        inputs = inputs_of(given)
        check_chunk(given, inputs, validate=given.validate)
        made = (self.shape.num_qo_heads, self.shape.head_dim, self.shape.q_dtype, self.target.name)
        called = (shape.num_qo_heads, shape.head_dim, shape.q_dtype, active_target(q.device).name)
        if made != called:
            raise ValueError(
                f"plan must be made for (num_qo_heads, head_dim, q's dtype, target) {called}, got a plan for "
                f"{made}: call {self.operation.maker} again"
            )
        scale = (
            q.shape[2] ** -0.5 if given.sm_scale is None else check_finite_float("sm_scale", given.sm_scale)
        )
        soft_cap = check_soft_cap(given.logits_soft_cap)
        left, right = check_windows(given.window_left, given.window_right, causal=given.causal)
        if not self.appends:
            check_transform(cache.key_transform, q)
            scale = fold_q_descale(q, given.q_descale, scale)
        check_no_grad(q=q, k=cache.k, v=cache.v)
        if given.validate:
            most = shape
            if self.scratch_fits is not None:
                bounds = {
                    name: getattr(self.shape, name) for name in ("max_q_len", "max_seq_len", "kv_tokens")
                }
                most = replace(shape, **bounds)
            check_values(most, cache, table, starts)
        traits = self._traits(
            bound, cache, turn, ragged=table.kind == "ragged", soft_cap=soft_cap > 0,
            sinks=given.sinks is not None, lse=given.return_lse or given.lse is not None,
            q_descale=isinstance(given.q_descale, torch.Tensor), window_left=left, window_right=right,
            positive=scale > 0, o_scale=given.out_scale is not None,
        )  # fmt: skip
        logit_scale = scale * (1.0 if soft_cap > 0 else _LOG2E)
        if self.config.fp8 is not None and not self.appends:
            # Q's bytes are read as K's are, and lose the same power of two.
            logit_scale *= 2.0 ** widening_exponent(self.k_format, fp8_route(self.config.fp8, self.k_format))
        out_dtype = check_results(
            q, given.out, given.lse, given.sinks, given.out_dtype, given.out_scale, inputs,
            head_dim=shape.v_dim, vendor=self.target.vendor,
        )  # fmt: skip
        return CheckedPrefill(shape, scale, logit_scale, soft_cap, out_dtype, traits)

    def _traits(
        self, bound: BoundCache, cache: PagedKVCache, turn: BoundRope, *, soft_cap: bool, sinks: bool,
        lse: bool, **options: Any,
    ) -> CallTraits:  # fmt: skip
        """The values that the kernels of a call depend on."""
        return CallTraits(
            soft_cap=soft_cap,
            sinks=sinks,
            lse=lse,
            shifts=bound.transform.offset is not None and (soft_cap or sinks or lse),
            storing=None
            if self.exponent is None or bound.store is None
            else storing_constants(bound.store, self.exponent, turn),
            settle=self.target.store_wait if is_compiled(cache.k) else "",
            clean=cache.negative_zero_free,
            **options,
        )

    def _prepare(
        self, bound: BoundCache, table: BoundTable, turn: BoundRope, given: Arguments,
        checked: CheckedPrefill,
    ) -> PreparedPrefill:  # fmt: skip
        """The launches of a checked call."""
        traits, shape = checked.traits, checked.shape
        if self.scratch_fits is not None:
            shape = self.shape_of_call(shape.batch, shape.num_tokens)
        config = self.config_for(shape)
        decodes = config.kernel == "decode"
        classes = []
        if shape.num_tokens and not decodes:
            for route in make_routes(self, shape, config, given.cache, bound, traits):
                sizes = route.memory.arguments if isinstance(route.memory, MemorySizes) else {}
                launches = self._launches(route, bound, table, turn, given, checked)
                classes.append(route._replace(launches=launches, sizes=route.sizes | sizes))
        return PreparedPrefill(
            checked=checked,
            classes=tuple(classes),
            decodes=decodes and shape.num_tokens > 0,
            q_as_bytes=not self.appends and self.config.fp8 not in (None, self.k_format),
            has_options=traits.lse or traits.sinks or traits.q_descale or traits.shifts or traits.o_scale,
            starts_as_is=given.cu_seqlens_q.is_contiguous(),
            out=((*given.q.shape[:2], self.shape.v_dim), checked.out_dtype),
            lse=(given.q.shape[:2], torch.float32),
            **(spans_of_arguments(given) if shape.num_tokens else {}),
        )

    def refuse_overlap(self, given: Arguments) -> None:
        """Refuses results that lie over each other or an input, and new tokens that lie in the cache."""
        inputs = inputs_of(given)
        check_chunk(given, inputs, validate=False)
        refuse_overlap(given.out, given.lse, inputs)

    def _launches(
        self, route: Route, bound: BoundCache, table: BoundTable, turn: BoundRope, given: Arguments,
        checked: CheckedPrefill,
    ) -> PreparedCall:  # fmt: skip
        """The launches of calls like this one by this route, whatever their sizes."""
        memory, config, traits = route.memory, route.config, checked.traits
        tensors = (given.q, given.out, given.lse, given.cu_seqlens_q, given.sinks, given.k_new, given.v_new)
        key = (
            bound.number, table.number, turn.kind, traits, checked.scale,
            checked.soft_cap, checked.out_dtype, metadata_of(given.q_descale), not table.max_pages,
            *(None if x is None else (type(x), x.dtype, x.stride(), x.device) for x in tensors),
            id(route.fill), id(route.attend), route.in_pages, config.block_m, config.block_n,
            (*memory.blocks, *memory.counters) if isinstance(memory, MemorySizes) else id(memory),
        )  # fmt: skip
        found = self._layouts.get(key)
        if found is not None:
            return found
        steps = launches_of(route, given, traits, bound, table, turn, checked.logit_scale, checked.soft_cap)
        return self._layouts.keep(key, PreparedCall(_VALUES, steps))


class AppendPlan(PrefillPlan):
    """A `PrefillPlan` for `prefill_append`."""

    operation: ClassVar[Operation] = APPEND
    appends: ClassVar[bool] = True

    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        cu_seqlens_q: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`prefill_append` by this plan: the same arguments and results; see `PrefillPlan.run`."""
        self.operation.check_keywords(options)
        return self.call(Arguments(q, cache, page_table, cu_seqlens_q, k_new, v_new, **options))


def check_plan(plan: object, kind: type[PrefillPlan], maker: str) -> None:
    """Refuses what is no plan, or one for the other operation."""
    check_instance("plan", plan, PrefillPlan)
    if type(plan) is not kind:
        raise ValueError(f"plan must be made by {maker}, got one for another operation: call {maker} again")

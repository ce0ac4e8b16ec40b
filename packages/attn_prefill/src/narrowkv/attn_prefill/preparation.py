"""A call of prefill that differs from all before it: its checks, and the launches of calls like it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from narrowkv.attn_decode.checks import check_transform, fold_q_descale
from narrowkv.attn_prefill.binding import BoundCache, storing_constants
from narrowkv.attn_prefill.checks import (
    append_shape,
    call_inputs,
    check_chunk,
    check_outputs,
    check_sinks,
    check_soft_cap,
    check_values,
    prefill_shape,
)
from narrowkv.attn_prefill.launch import Kind, Numbers, Route, make_routes
from narrowkv.attn_prefill.memory import Needs
from narrowkv.attn_prefill.plan_base import PlanBase
from narrowkv.attn_prefill.shapes import PrefillShape
from narrowkv.attn_prefill.templates import Launches, Layout, fix_launches
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.paged_cache.bound_table import BoundTable
from narrowkv.paged_cache.rope import rope_pointers
from narrowkv.runtime.errors import check_finite_float, check_no_grad, check_window
from narrowkv.runtime.launch import active_target, is_compiled
from narrowkv.runtime.spans import span_bytes

_LOG2E = math.log2(math.e)
_MAX_KEPT = 4096


class Arguments(NamedTuple):
    """The arguments of a call of `batch_prefill` or `prefill_append`; some have one value in each of them."""

    q: torch.Tensor
    k_new: torch.Tensor | None
    v_new: torch.Tensor | None
    cache: PagedKVCache
    page_table: PageTable
    starts: torch.Tensor
    rope: Rope | None
    causal: bool
    sm_scale: float | None
    q_descale: float | torch.Tensor
    soft_cap: float
    window_left: int
    window_right: int
    sinks: torch.Tensor | None
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    return_lse: bool
    lse: torch.Tensor | None
    validate: bool | None


class Served(NamedTuple):
    """How sequences of one class are served.

    Attributes:
        launches: the launches; fill_grid, grid: of these; numbers: sizes.
        needs: the memory that each call allocates; None if the plan has it.
    """

    launches: Launches
    fill_grid: tuple[int, int, int]
    grid: tuple[int, int, int]
    numbers: Numbers
    needs: Needs | None


class Prepared(NamedTuple):
    """Launches that calls share if their tensors have the same metadata.

    Attributes:
        classes: how each class of sequences is served; empty where there is nothing to launch, or
            `paged_decode` serves the call.
        decodes: whether that is so.
        scale: of the logits, with a descale of the query that is a number; logit_scale: the same in base 2,
            or natural for a soft cap.
        shift_scale: of the queries' products with the offset that keys lost, or None if nothing sees them.
        soft_cap: the cap of logits, or 0; window_left: how many earlier keys a row sees, or -1.
        q_as_bytes: an FP8 query goes to a matrix unit of another format.
        out_dtype: of a new output.
        q, o, lse, starts, sinks, k_new, v_new: bytes that these tensors span, or 0; q_descale: the same, or
            None if it is a number.
    """

    classes: tuple[Served, ...]
    decodes: bool
    scale: float
    logit_scale: float
    shift_scale: float | None
    soft_cap: float
    window_left: int
    q_as_bytes: bool
    out_dtype: torch.dtype
    q: int
    o: int
    lse: int
    starts: int
    sinks: int
    k_new: int
    v_new: int
    q_descale: int | None


class _Checked(NamedTuple):
    """The options of a call after the checks, in one form."""

    shape: PrefillShape
    scale: float
    soft_cap: float
    window_left: int
    window_right: int
    out_dtype: torch.dtype


def prepare(plan: PlanBase, bound: BoundCache, table: BoundTable, key: Any, g: Arguments) -> Prepared:
    """Checks a call and prepares its launches; the plan finds them by `key` from then on.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    checked = _check(plan, g)
    found = plan._calls.get(key)
    if found is not None:
        return found  # type: ignore[no-any-return]
    kind = _kind(plan, bound, g, checked)
    shape = _bounded(plan, checked.shape)
    scale, soft_cap = checked.scale, checked.soft_cap
    config = plan.config_for(shape)
    decodes = config.kernel == "decode"
    logit_scale = scale * (1.0 if soft_cap > 0 else _LOG2E)
    classes = []
    if shape.num_tokens and not decodes:
        layout = _layout(g, kind, bound, table, logit_scale, soft_cap)
        for route in make_routes(plan, shape, config, g.cache, bound, kind):
            launches = _launches(plan, route, g.cache, bound, layout, key[0])
            needs = route.memory if isinstance(route.memory, Needs) else None
            classes.append(Served(launches, route.fill_grid, route.grid, route.numbers, needs))
    tensors = (g.q, g.out, g.lse, g.starts, g.sinks, g.k_new, g.v_new)
    q, out, lse, starts, sinks, k_new, v_new = (
        0 if x is None or not shape.num_tokens else span_bytes(x) for x in tensors
    )
    if len(plan._calls) >= _MAX_KEPT:
        plan._calls.clear()
    prepared = plan._calls[key] = Prepared(
        tuple(classes),
        decodes and shape.num_tokens > 0,
        scale,
        logit_scale,
        scale if kind.shifts else None,
        soft_cap,
        checked.window_left,
        not plan.appends and plan.config.fp8 not in (None, plan.k_format),
        checked.out_dtype,
        q,
        out,
        lse,
        starts,
        sinks,
        k_new,
        v_new,
        4 if isinstance(g.q_descale, torch.Tensor) else None,
    )
    return prepared


def _launches(
    plan: PlanBase, route: Route, cache: PagedKVCache, bound: BoundCache, layout: Layout, metadata: Any
) -> Launches:
    """The launches of calls with these metadata by this route, whatever their sizes."""
    memory = route.memory
    key = (
        metadata, layout.empty, id(route.fill), id(route.attend), route.in_pages, route.p_scale,
        memory.names if isinstance(memory, Needs) else id(memory),
        route.config.block_m, route.config.block_n,
    )  # fmt: skip
    found = plan._fixed.get(key)
    if found is None:
        if len(plan._fixed) >= _MAX_KEPT:
            plan._fixed.clear()
        found = plan._fixed[key] = fix_launches(route, cache, bound, layout)
    return found


def _layout(
    g: Arguments, kind: Kind, bound: BoundCache, table: BoundTable, logit_scale: float, soft_cap: float
) -> Layout:
    _, heads, head_dim = g.q.shape
    return Layout(
        q=_steps(g.q) if bound.transform is None else (heads * head_dim, head_dim),
        o=(heads * head_dim, head_dim) if g.out is None else _steps(g.out),
        given_q=_steps(g.q),
        lse=0 if not kind.lse else heads if g.lse is None else g.lse.stride(0),
        new=None if g.k_new is None or g.v_new is None else (_steps(g.k_new), _steps(g.v_new)),
        rope=rope_pointers(g.rope),
        ragged=kind.ragged,
        steps=table.steps,
        empty=not table.max_pages or not bound.num_pages,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        has_lse=kind.lse,
        has_sinks=kind.sinks,
        has_q_descale=kind.q_descale,
        has_shift=kind.shifts,
    )


def _steps(x: torch.Tensor) -> tuple[int, int]:
    """Strides of a token and of a head."""
    return x.stride(0), x.stride(1)


def refuse_overlap(g: Arguments) -> None:
    """Names what overlaps, if anything does."""
    if g.k_new is not None and g.v_new is not None:
        check_chunk(g.q, g.k_new, g.v_new, g.cache, g.page_table, g.starts, g.rope, g.sinks, validate=False)
    check_outputs(g.q, g.out, None, g.lse, _inputs(g))


def _inputs(g: Arguments) -> dict[str, Any]:
    """The tensors of a call by name, but for q and results."""
    others: dict[str, Any] = {
        "sinks": g.sinks, "q_descale": g.q_descale, "k_new": g.k_new, "v_new": g.v_new
    }  # fmt: skip
    if g.rope is not None:
        others |= {"rope.cos": g.rope.cos, "rope.sin": g.rope.sin, "rope.positions": g.rope.positions}
    return call_inputs(g.cache, g.page_table, g.starts, **others)


def _check(plan: PlanBase, g: Arguments) -> _Checked:
    """Checks everything but the plan's maxima."""
    q, cache, table = g.q, g.cache, g.page_table
    shape = (append_shape if plan.appends else prefill_shape)(q, cache, table, g.starts)
    if g.k_new is not None and g.v_new is not None:
        check_chunk(q, g.k_new, g.v_new, cache, table, g.starts, g.rope, g.sinks, validate=g.validate)
    _check_plan(plan, shape, active_target(q.device).name)
    scale = q.shape[2] ** -0.5 if g.sm_scale is None else check_finite_float("sm_scale", g.sm_scale)
    soft_cap = check_soft_cap(g.soft_cap)
    window_left = check_window("window_left", g.window_left)
    if g.causal and g.window_right > 0:
        raise ValueError(f"window_right must be -1 or 0 with causal=True, got {g.window_right}")
    window_right = 0 if g.causal else check_window("window_right", g.window_right)
    check_sinks(q, g.sinks)
    check_transform(cache.key_transform, q)
    if not plan.appends:
        scale = fold_q_descale(q, g.q_descale, scale)
    check_no_grad(q=q, k=cache.k, v=cache.v, sinks=g.sinks)
    if g.validate:
        bounds = {name: getattr(plan.shape, name) for name in ("max_q_len", "max_seq_len", "kv_tokens")}
        check_values(shape if plan.scratch_fits is None else replace(shape, **bounds), cache, table, g.starts)
    out_dtype = check_outputs(q, g.out, g.out_dtype, g.lse, _inputs(g))
    return _Checked(shape, scale, soft_cap, window_left, window_right, out_dtype)


def _check_plan(plan: PlanBase, shape: PrefillShape, target: str) -> None:
    """Refuses a plan that was made for another model or target, and says what is needed."""
    made = (plan.shape.num_qo_heads, plan.shape.head_dim, plan.q_dtype, plan.target.name)
    called = (shape.num_qo_heads, shape.head_dim, shape.q_dtype, target)
    if made != called:
        raise ValueError(
            f"plan must be made for (num_qo_heads, head_dim, q's dtype, target) {called}, got a plan for "
            f"{made}: call {plan.maker} again"
        )


def _bounded(plan: PlanBase, shape: PrefillShape) -> PrefillShape:
    """The call's shape with the plan's bounds, if it has any."""
    if plan.scratch_fits is None:
        return shape
    most = plan.shape
    if shape.batch > most.batch or shape.num_tokens > most.num_tokens:
        raise ValueError(
            f"plan must be made for {shape.num_tokens} query tokens of {shape.batch} sequences or more, "
            f"got a plan for {most.num_tokens} of {most.batch}: call {plan.maker} again"
        )
    return plan.shape_of_call(shape.batch, shape.num_tokens)


def _kind(plan: PlanBase, bound: BoundCache, g: Arguments, checked: _Checked) -> Kind:
    """The values that the kernels of a checked call depend on."""
    return Kind(
        ragged=g.page_table.kind == "ragged",
        soft_cap=checked.soft_cap > 0,
        sinks=g.sinks is not None,
        lse=g.return_lse or g.lse is not None,
        q_descale=isinstance(g.q_descale, torch.Tensor),
        window_left=checked.window_left,
        window_right=checked.window_right,
        shifts=bound.has_offset
        and (checked.soft_cap > 0 or g.sinks is not None or g.return_lse or g.lse is not None),
        positive=checked.scale > 0,
        storing=None if plan.exponent is None else storing_constants(g.cache, plan.exponent, g.rope),
        settle=plan.target.is_amd and is_compiled(g.cache.k),
        clean=g.cache.negative_zero_free,
    )

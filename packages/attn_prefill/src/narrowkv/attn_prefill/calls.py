"""A call of prefill by its plan: checks of what may have changed since a call like it, and the launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch

from narrowkv.attn_decode.plan import plan_for_call as decode_plan_for_call
from narrowkv.attn_prefill.binding import BOUND_CACHES, BoundCache, matrix_of, storing_constants
from narrowkv.attn_prefill.checks import (
    append_shape,
    call_inputs,
    check_chunk,
    check_classes,
    check_outputs,
    check_sinks,
    check_soft_cap,
    check_values,
    fold_q_descale,
    prefill_shape,
)
from narrowkv.attn_prefill.kernels.arguments import AppendScales, Chunk, Outputs, Queries
from narrowkv.attn_prefill.launches import Kind, Route, make_route
from narrowkv.attn_prefill.memory import Needs, make_memory
from narrowkv.attn_prefill.shapes import PrefillShape
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.paged_cache.append import rope_pointers
from narrowkv.paged_cache.kernels.pages import Table
from narrowkv.paged_cache.layouts import span_bytes
from narrowkv.paged_cache.pointers import step_of
from narrowkv.runtime.errors import check_finite_float, check_no_grad, check_window
from narrowkv.runtime.launch import active_target, is_compiled
from narrowkv.runtime.launch.path import executor

if TYPE_CHECKING:
    from narrowkv.attn_prefill.plan import PrefillPlan

_LOG2E = math.log2(math.e)
_OPTIONAL = (torch.Tensor, type(None))
_MAX_KEPT = 4096


class AppendOptions(TypedDict, total=False):
    """Keywords that say where results go and what is checked.

    Attributes:
        out_dtype: bf16, fp16 or fp32, of a new output; default q's dtype, and bf16 for FP8 queries.
        return_lse: also return the log-sum-exp.
        lse: where to write the log-sum-exp, `[tokens, num_qo_heads]` fp32, last dimension contiguous. It is
            returned only with `return_lse`.
        validate: look at the values of all metadata first (cu_seqlens_q, lengths, page ids, descales,
            positions, bounds of the plan), which waits for the device.
    """

    out_dtype: torch.dtype | None
    return_lse: bool
    lse: torch.Tensor | None
    validate: bool


class PrefillOptions(AppendOptions, total=False):
    """`AppendOptions`, and whether the bits of a result may depend on the batch.

    Attributes:
        batch_invariant: a sequence's result has the same bits alone and in any batch; see `plan_prefill`.
    """

    batch_invariant: bool


APPEND_OPTIONS = frozenset(AppendOptions.__annotations__)
PREFILL_OPTIONS = APPEND_OPTIONS | {"batch_invariant"}


def refuse_keywords(function: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises for a keyword that an operation does not have.

    Raises:
        TypeError: as Python does.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class _Sized(NamedTuple):
    """What calls of one kind with the same numbers of sequences and tokens share.

    Attributes:
        route: the launches; None where there is nothing to launch, or `paged_decode` serves the call.
        decodes: whether that is so.
        q, o, lse, lens, starts, k_new, v_new, positions: bytes that these tensors span, or 0.
    """

    route: Route | None
    decodes: bool
    q: int
    o: int
    lse: int
    lens: int
    starts: int
    k_new: int
    v_new: int
    positions: int


@dataclass(frozen=True, eq=False)
class _Call:
    """What calls share whose tensors have the same metadata but for the numbers of sequences and tokens.

    Attributes:
        kind: what decides on their kernels.
        scale: of the logits, with a descale of the query that is a number; logit_scale: the same in base 2,
            or natural for a soft cap.
        soft_cap: the cap of logits, or 0.
        q_as_bytes: an FP8 query goes to a matrix unit of another format.
        out_dtype: of a new output.
        steps: strides of page ids, of indptr and of lengths, as `Table` has them.
        sinks, angles: bytes that `sinks`, and `Rope.cos` and `Rope.sin` each, span.
        sized: by numbers of sequences and tokens, and by the table's width where the plan has no maxima.
    """

    kind: Kind
    scale: float
    logit_scale: float
    soft_cap: float
    q_as_bytes: bool
    out_dtype: torch.dtype
    steps: tuple[int | None, int | None, int | None]
    sinks: int
    angles: int
    sized: dict[tuple[int, int, int], _Sized] = field(default_factory=dict)


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
    out_dtype: torch.dtype | None = None
    return_lse: bool = False
    lse: torch.Tensor | None = None
    validate: bool = False
    batch_invariant: bool = False


def run(plan: PrefillPlan, given: Arguments) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call of `batch_prefill` or, by a plan that appends, of `prefill_append`."""
    (
        q, k_new, v_new, cache, page_table, starts, rope, causal, sm_scale, q_descale, soft_cap, window_left,
        window_right, sinks, out, out_dtype, return_lse, lse, validate, batch_invariant,
    ) = given  # fmt: skip
    if batch_invariant and not plan.batch_invariant:
        raise ValueError("plan must be made with batch_invariant=True: call plan_prefill again")
    if not (
        isinstance(q, torch.Tensor) and type(cache) is PagedKVCache and type(page_table) is PageTable
        and isinstance(starts, torch.Tensor) and isinstance(out, _OPTIONAL) and isinstance(lse, _OPTIONAL)
        and isinstance(sinks, _OPTIONAL) and (rope is None or type(rope) is Rope)
        and (plan.exponent is None or (isinstance(k_new, torch.Tensor) and isinstance(v_new, torch.Tensor)))
    ):  # fmt: skip
        new: dict[str, object] = {} if plan.exponent is None else {"k_new": k_new, "v_new": v_new}
        check_classes(q, cache, page_table, starts, rope, new, out=out, lse=lse, sinks=sinks)
    caches = BOUND_CACHES.get(cache)
    bound = None if caches is None else caches.get((plan.target.name, plan.config.fp8, plan.exponent))
    if bound is None:
        bound = plan.bind(cache)
    ids, indptr, lens = page_table.page_ids, page_table.kv_indptr, page_table.seq_lens
    if lens is None:
        lens = page_table.kv_last_page_len
    assert lens is not None
    shape, batch, size, stride = q.shape, lens.shape[0], ids.shape, ids.stride()
    tokens = shape[0] if len(shape) == 3 else 0
    signature: Any = (
        bound.number, bound.batch is None or bound.batch == batch, type(q), shape[1:], q.stride(), q.dtype,
        q.device, q.requires_grad, torch.is_grad_enabled(), starts.shape == (batch + 1,), starts.dtype,
        starts.stride(), starts.device, lens.stride(), ids.dtype, stride[-1] if size[-1] > 1 else 1,
        ids.device, page_table.page_size, page_table.before_append,
        None if indptr is None else indptr.stride(),
        causal, sm_scale, soft_cap, window_left, window_right, return_lse, out_dtype,
        q_descale if type(q_descale) is float else _key(q_descale),
        None if out is None else (
            out.shape == shape, out.stride(), out.dtype, out.device, out.requires_grad
        ),
        None if lse is None else (
            lse.shape == shape[:2], lse.stride(), lse.dtype, lse.device, lse.requires_grad
        ),
        None if sinks is None else _key(sinks),
        active_target(plan.device).name, type(executor()),
    )  # fmt: skip
    if k_new is not None and v_new is not None:
        signature += (
            k_new.shape[:1] == v_new.shape[:1] == shape[:1], k_new.shape[1:], v_new.shape[1:],
            k_new.stride(), v_new.stride(), k_new.dtype, v_new.dtype, k_new.device, v_new.device,
            k_new.requires_grad, v_new.requires_grad,
        )  # fmt: skip
    if rope is not None:
        cos, sin, positions = rope.cos, rope.sin, rope.positions
        signature += (
            rope.style, type(cos), cos.dtype, cos.shape, cos.stride(), cos.device, cos.requires_grad,
            type(sin), sin.dtype, sin.shape, sin.stride(), sin.device, sin.requires_grad, type(positions),
            positions.dtype, positions.device, positions.shape == (tokens,), positions.stride(),
        )  # fmt: skip
    call: _Call | None = plan._calls.get(signature)
    key = (batch, tokens, 0 if plan.scratch_fits is not None else size[-1])
    sized = None if call is None else call.sized.get(key)
    if call is None or sized is None or validate:
        call, sized = _prepare(plan, bound, signature, key, given)
    num_ids = 1 + (size[-1] - 1) * stride[-1]
    if indptr is None:
        num_ids += (size[0] - 1) * stride[0]
    if (out is not None or lse is not None or k_new is not None) and tokens:
        read = [
            (q, sized.q), (ids, num_ids * ids.element_size()), (lens, sized.lens), (starts, sized.starts),
        ]  # fmt: skip
        if indptr is not None:
            read.append((indptr, (1 + batch * indptr.stride(0)) * indptr.element_size()))
        if sinks is not None:
            read.append((sinks, call.sinks))
        if k_new is not None and v_new is not None:
            read += [(k_new, sized.k_new), (v_new, sized.v_new)]
            if rope is not None:
                read += [(rope.cos, call.angles), (rope.sin, call.angles), (rope.positions, sized.positions)]
        if isinstance(q_descale, torch.Tensor):
            read.append((q_descale, 4))
        if _overlap([(out, sized.o), (lse, sized.lse)], read, bound.spans, bound.written):
            _refuse_overlap(given)
    o = torch.empty(shape, dtype=call.out_dtype, device=q.device) if out is None else out
    if lse is None and return_lse:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
    route = sized.route
    if route is not None:
        if not ids.numel():
            ids = ids.new_zeros(1, 1)  # every sequence is empty: something to point at, which is not read
            max_pages = 0
        else:
            max_pages = size[-1] if cache.num_pages else 0
        table = Table(ids, indptr, lens, None, cache.num_pages if max_pages else 0, None, *call.steps)
        strides, o_strides = q.stride(), o.stride()
        if call.q_as_bytes:
            q = q.view(torch.uint8)
        q_scale = q_descale if isinstance(q_descale, torch.Tensor) else None
        _launch(
            plan, route, bound, call, cache, table,
            Queries(q, strides[0], strides[1], starts, None, None, q_scale),
            Outputs(o, o_strides[0], o_strides[1], lse, 0 if lse is None else lse.stride(0), sinks),
            (0 if indptr is not None else stride[0], max(num_ids, 1), max_pages), k_new, v_new, rope,
        )  # fmt: skip
    elif sized.decodes:
        decode = plan.decode or decode_plan_for_call(q, cache, page_table, False)
        decode.run(
            q, cache, page_table, sm_scale=call.scale, out=o, logits_soft_cap=call.soft_cap,
            window_left=call.kind.window_left, sinks=sinks, lse=lse,
        )  # fmt: skip
    return (o, lse) if return_lse and lse is not None else o


def _launch(
    plan: PrefillPlan, route: Route, bound: BoundCache, call: _Call, cache: PagedKVCache, table: Table,
    queries: Queries, outputs: Outputs, table_sizes: tuple[int, int, int], k_new: torch.Tensor | None,
    v_new: torch.Tensor | None, rope: Rope | None,
) -> None:  # fmt: skip
    """Launches what a route says."""
    memory = route.memory
    if isinstance(memory, Needs):
        memory = make_memory(memory, None, plan.device)
    config, sizes = route.config, route.sizes
    reading = bound.in_loop if config.kernel == "fused" else bound.to_scratch
    logit_scale, soft_cap = call.logit_scale, call.soft_cap
    qk_scale, out_scale = logit_scale * reading.k_scale, reading.v_scale / route.p_scale
    appended: tuple[Any, ...] = ()
    rotation = None
    if k_new is not None and v_new is not None:
        k_stride, v_stride = k_new.stride(), v_new.stride()
        chunk = Chunk(k_new, k_stride[0], k_stride[1], v_new, v_stride[0], v_stride[1])
        rotation = rope_pointers(rope)
        appended = chunk, rotation, bound.destination
        scales = AppendScales(logit_scale, reading.k_scale, out_scale, soft_cap)
    if route.fill is None:
        if not appended:
            route.attend(
                route.grid,
                (
                    queries, outputs, reading.cache, table, memory.partials, qk_scale, out_scale,
                    soft_cap, *sizes, *table_sizes, *route.counts,
                ),
            )  # fmt: skip
            return
        route.attend(
            route.grid,
            (
                queries, outputs, *appended, reading.cache, table, memory.partials, scales, *sizes,
                *table_sizes, *route.counts,
            ),
        )  # fmt: skip
        return
    scratch = memory.scratch
    if appended:
        route.fill(
            route.fill_grid,
            (
                queries, *appended, reading.cache, table, scratch, scales, *sizes, config.block_m,
                *table_sizes, *route.bounds, *route.counts,
            ),
        )  # fmt: skip
    else:
        route.fill(
            route.fill_grid,
            (
                queries, reading.cache, table, scratch, *sizes, config.block_m, *table_sizes, *route.bounds,
                *route.counts,
            ),
        )  # fmt: skip
    if route.pipelined:
        desc = pages = None
        if route.in_pages:
            matrix = matrix_of(bound, cache, config.block_n)
            desc, pages = matrix.descriptor, matrix.pages(table)
        route.attend(
            route.grid,
            (
                queries, outputs, scratch, *memory.descriptors, desc, pages, bound.k_descale,
                bound.v_descale, memory.partials, qk_scale, logit_scale, out_scale, *table_sizes,
                route.num_tiles, config.num_splits,
            ),
        )  # fmt: skip
        return
    # Appended keys are in the scratch unquantised, and the factors of old ones beside them.
    scale = logit_scale if appended else qk_scale
    route.attend(
        route.grid,
        (
            queries, outputs, rotation, scratch, *memory.descriptors, bound.k_descale, bound.v_descale,
            memory.partials, scale, out_scale, soft_cap, config.num_splits,
        ),
    )  # fmt: skip


def _key(x: Any) -> tuple[Any, ...]:
    """A tensor's metadata, or a number and its class."""
    if isinstance(x, torch.Tensor):
        return type(x), x.dtype, x.shape, x.stride(), x.device, x.requires_grad
    return type(x), x


def _overlap(
    results: list[tuple[torch.Tensor | None, int]],
    read: list[tuple[torch.Tensor, int]],
    spans: list[tuple[int, int]],
    written: tuple[tuple[int, int], ...],
) -> bool:
    """Whether a result, given with its bytes, shares memory with anything, or an input with what is written.

    Args:
        results: outputs; read: inputs.
        spans: addresses of the cache; written: those that an append writes.
    """
    taken = []
    for tensor, num_bytes in read:
        begin = tensor.data_ptr()
        end = begin + num_bytes
        for low, high in written:
            if begin < high and low < end:
                return True
        taken.append((begin, end))
    for result, num_bytes in results:
        if result is not None:
            begin = result.data_ptr()
            end = begin + num_bytes
            for low, high in (*taken, *spans):
                if begin < high and low < end:
                    return True
            taken.append((begin, end))
    return False


def _refuse_overlap(given: Arguments) -> None:
    """Names what overlaps, if anything does."""
    g = given
    if g.k_new is not None and g.v_new is not None:
        check_chunk(g.q, g.k_new, g.v_new, g.cache, g.page_table, g.starts, g.rope, g.sinks, validate=False)
    check_outputs(g.q, g.out, None, g.lse, _inputs(g))


def _inputs(given: Arguments) -> dict[str, Any]:
    """The tensors of a call by name, but for q and results."""
    g = given
    others: dict[str, Any] = {
        "sinks": g.sinks, "q_descale": g.q_descale, "k_new": g.k_new, "v_new": g.v_new
    }  # fmt: skip
    if g.rope is not None:
        others |= {"rope.cos": g.rope.cos, "rope.sin": g.rope.sin, "rope.positions": g.rope.positions}
    return call_inputs(g.cache, g.page_table, g.starts, **others)


def _prepare(
    plan: PrefillPlan, bound: BoundCache, signature: Any, key: tuple[int, int, int], given: Arguments
) -> tuple[_Call, _Sized]:
    """Checks a call that differs from all before it, or whose values are to be looked at."""
    g = given
    call = _check(plan, bound, g)
    known = plan._calls.get(signature)
    if known is None:
        if len(plan._calls) >= _MAX_KEPT:
            plan._calls.clear()
        plan._calls[signature] = call
    else:
        call = known
    sized = call.sized.get(key)
    if sized is None:
        sized = _size(plan, bound, call, g)
        if len(call.sized) >= _MAX_KEPT:
            call.sized.clear()
        call.sized[key] = sized
    return call, sized


def _check(plan: PrefillPlan, bound: BoundCache, g: Arguments) -> _Call:
    """Checks everything but sizes against the plan's maxima."""
    q, cache, table = g.q, g.cache, g.page_table
    shape = (append_shape if plan.appends else prefill_shape)(q, cache, table, g.starts)
    new = g.k_new is not None and g.v_new is not None
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
    if not plan.appends:
        scale = fold_q_descale(q, g.q_descale, scale, validate=g.validate)
    check_no_grad(q=q, k=cache.k, v=cache.v, sinks=g.sinks)
    if g.validate:
        bounds = {name: getattr(plan.shape, name) for name in ("max_q_len", "max_seq_len", "kv_tokens")}
        check_values(shape if plan.scratch_fits is None else replace(shape, **bounds), cache, table, g.starts)
    out_dtype = check_outputs(q, g.out, g.out_dtype, g.lse, _inputs(g))
    storing = None
    if plan.exponent is not None:
        storing = storing_constants(cache, plan.exponent, g.rope)
    indptr, lens = table.kv_indptr, table.seq_lens
    if lens is None:
        lens = table.kv_last_page_len
    assert lens is not None
    assert new == plan.appends
    return _Call(
        kind=Kind(
            ragged=table.kind == "ragged",
            soft_cap=soft_cap > 0,
            sinks=g.sinks is not None,
            lse=g.return_lse or g.lse is not None,
            q_descale=isinstance(g.q_descale, torch.Tensor),
            window_left=window_left,
            window_right=window_right,
            positive=scale > 0,
            storing=storing,
            settle=plan.target.is_amd and is_compiled(cache.k),
            clean=cache.negative_zero_free,
        ),
        scale=scale,
        logit_scale=scale * (1.0 if soft_cap > 0 else _LOG2E),
        soft_cap=soft_cap,
        q_as_bytes=not plan.appends and plan.config.fp8 not in (None, plan.k_format),
        out_dtype=out_dtype,
        steps=(step_of(table.page_ids), None if indptr is None else step_of(indptr), step_of(lens)),
        sinks=0 if g.sinks is None else span_bytes(g.sinks),
        angles=0 if g.rope is None else span_bytes(g.rope.cos),
    )


def _check_plan(plan: PrefillPlan, shape: PrefillShape, target: str) -> None:
    """Refuses a plan that was made for another model or target, and says what is needed."""
    made = (plan.shape.num_qo_heads, plan.shape.head_dim, plan.q_dtype, plan.target.name)
    called = (shape.num_qo_heads, shape.head_dim, shape.q_dtype, target)
    if made != called:
        raise ValueError(
            f"plan must be made for (num_qo_heads, head_dim, q's dtype, target) {called}, got a plan for "
            f"{made}: call {plan.maker} again"
        )


def _size(plan: PrefillPlan, bound: BoundCache, call: _Call, g: Arguments) -> _Sized:
    """The launches of a call of this size, and the bytes of its tensors."""
    q, table = g.q, g.page_table
    shape = (append_shape if plan.appends else prefill_shape)(q, g.cache, table, g.starts)
    if plan.scratch_fits is not None:
        most = plan.shape
        if shape.batch > most.batch or shape.num_tokens > most.num_tokens:
            raise ValueError(
                f"plan must be made for {shape.num_tokens} query tokens of {shape.batch} sequences or more, "
                f"got a plan for {most.num_tokens} of {most.batch}: call {plan.maker} again"
            )
        shape = plan.shape_of_call(shape.batch, shape.num_tokens)
    config = plan.config_for(shape)
    decodes = config.kernel == "decode"
    route = None
    if shape.num_tokens and not decodes:
        route = make_route(plan, shape, config, g.cache, bound, call.kind)
    lens = table.seq_lens if table.seq_lens is not None else table.kv_last_page_len
    positions = None if g.rope is None else g.rope.positions
    sizes = (
        0 if x is None or not shape.num_tokens else span_bytes(x)
        for x in (q, g.out, g.lse, lens, g.starts, g.k_new, g.v_new, positions)
    )
    return _Sized(route, decodes and shape.num_tokens > 0, *sizes)

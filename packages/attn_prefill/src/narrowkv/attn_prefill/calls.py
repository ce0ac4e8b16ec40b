"""A call of prefill by its plan: compares what may differ from a call like it, and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from narrowkv.attn_decode.planning import plan_for_call as decode_plan_for_call
from narrowkv.attn_prefill.binding import matrix_of
from narrowkv.attn_prefill.checks import check_bounds, check_classes
from narrowkv.attn_prefill.memory import allocate
from narrowkv.attn_prefill.plan_base import PlanBase
from narrowkv.attn_prefill.preparation import Arguments, Prepared, prepare, refuse_overlap
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.bound_table import BOUND_TABLES, bind_table
from narrowkv.paged_cache.key_transform import transform_queries
from narrowkv.paged_cache.rope import BOUND_ROPES, bind_rope, metadata_of
from narrowkv.runtime.errors import contiguous_vector
from narrowkv.runtime.launch import executor
from narrowkv.runtime.scales import check_scales
from narrowkv.runtime.spans import meets


def run(plan: PlanBase, given: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call of `batch_prefill` or, by a plan that appends, of `prefill_append`.

    given: the values of `Arguments`, which a call that is served before does not make.
    """
    q: torch.Tensor
    k_new: torch.Tensor | None
    v_new: torch.Tensor | None
    cache: PagedKVCache
    page_table: PageTable
    (
        q, k_new, v_new, cache, page_table, starts, rope, causal, sm_scale, q_descale, soft_cap, window_left,
        window_right, sinks, out, out_dtype, return_lse, lse, validate,
    ) = given  # fmt: skip
    bound, table = plan._caches.get(id(cache)), BOUND_TABLES.get(id(page_table))
    turn = None if rope is None else BOUND_ROPES.get(id(rope))
    if bound is None or table is None or (rope is not None and turn is None):
        _check(plan, given)
        bound = bound or plan._caches.keep(cache, plan.bind(cache))
        table = table or bind_table(page_table)
        turn = None if rope is None else turn or bind_rope(rope)
    running = executor()
    try:
        grad = q.requires_grad
        layout: Any = (
            bound.number, table.number, None if running is None else (running.target.name, type(running)),
            type(q), q.stride(), q.dtype, q.get_device(), starts.stride(), starts.dtype, starts.get_device(),
            causal, sm_scale, soft_cap, window_left, window_right, return_lse, out_dtype,
            q_descale if type(q_descale) is float else metadata_of(q_descale),
        )  # fmt: skip
        sizes: Any = (table.batch, q.shape, starts.shape, table.max_pages if plan.scratch_fits is None else 0)
        if out is not None:
            grad = grad or out.requires_grad
            layout += (out.stride(), out.dtype, out.get_device())
            sizes += (out.shape,)
        if lse is not None:
            grad = grad or lse.requires_grad
            layout += ("lse", lse.stride(), lse.dtype, lse.get_device())
            sizes += (lse.shape,)
        if sinks is not None:
            grad = grad or sinks.requires_grad
            layout += ("sinks", sinks.stride(), sinks.dtype, sinks.shape, sinks.get_device())
        if k_new is not None and v_new is not None:
            grad = grad or k_new.requires_grad or v_new.requires_grad
            layout += (
                k_new.stride(), v_new.stride(), k_new.dtype, v_new.dtype, k_new.get_device(),
                v_new.get_device(),
            )  # fmt: skip
            sizes += (k_new.shape, v_new.shape)
        if turn is not None:
            layout += (turn.kind,)
            sizes += (turn.tokens,)
        key = (layout, sizes, grad, torch.is_grad_enabled())
        call: Prepared | None = plan._calls.get(key)
    except (AttributeError, TypeError):
        _check(plan, given)
        raise
    if call is None or validate:
        call = prepare(plan, bound, table, key, Arguments(*given))
        if validate is None and plan.scratch_fits is not None and plan.device.type == "cpu":
            check_bounds(replace(plan.shape, num_tokens=len(q)), page_table, starts)
    if bound.scales or call.q_descale is not None:
        check_scales({**bound.scales, "q_descale": q_descale}, validate)
    if out is not None or lse is not None or k_new is not None:
        begin, first = q.data_ptr(), starts.data_ptr()
        spans = [*table.spans, (begin, begin + call.q), (first, first + call.starts)]
        if sinks is not None:
            begin = sinks.data_ptr()
            spans.append((begin, begin + call.sinks))
        if k_new is not None and v_new is not None:
            begin, first = k_new.data_ptr(), v_new.data_ptr()
            spans += ((begin, begin + call.k_new), (first, first + call.v_new))
            if turn is not None:
                spans += turn.spans
            low, high = bound.hull
            for begin, end in spans:
                if begin < high and low < end:
                    for first, last in bound.written:
                        if begin < last and first < end:
                            refuse_overlap(Arguments(*given))
        if call.q_descale is not None:
            begin = q_descale.data_ptr()
            spans.append((begin, begin + call.q_descale))
        if out is not None or lse is not None:
            spans += bound.spans
            begin = 0 if out is None else out.data_ptr()
            met = meets(begin, call.o, spans)
            if lse is not None:
                spans.append((begin, begin + call.o))
                met = met or meets(lse.data_ptr(), call.lse, spans)
            if met:
                refuse_overlap(Arguments(*given))
    o = torch.empty(q.shape, dtype=call.out_dtype, device=q.device) if out is None else out
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows, shift = q, None
    if bound.transform is not None and call.classes:
        rows, shift = transform_queries(q, bound.transform, cache.num_kv_heads, call.shift_scale, rope)
    begins = contiguous_vector(starts)
    for launches, fill_grid, grid, numbers, needs in call.classes:
        reading = getattr(bound, launches.reading)
        values = (
            rows.view(torch.uint8) if call.q_as_bytes else rows, o, lse, begins, q_descale, sinks, shift,
            table.ids, table.row, table.lens, table.num_ids, table.max_pages if bound.num_pages else 0,
            call.logit_scale * reading.k_scale, reading.v_scale / launches.p_scale, reading.k_scale,
            *numbers, *reading.values,
        )  # fmt: skip
        if k_new is not None:
            values += (*bound.new_values, k_new, v_new)
            if bound.transform is not None:
                values += (bound.transform.offset, bound.transform.balance, q)
            if turn is not None:
                values += turn.tensors
        if launches.block_n:
            values += (matrix_of(bound, cache, launches.block_n).descriptor,)
        if needs is not None:
            values += allocate(needs, plan.device)
        if launches.fill is not None:
            launches.fill(fill_grid, values)
        launches.attend(grid, values)
    if call.decodes:
        decode = plan.decode or decode_plan_for_call(q, cache, page_table, False)
        decode.run(
            q, cache, page_table, sm_scale=call.scale,
            q_descale=1.0 if call.q_descale is None else q_descale, out=o, logits_soft_cap=call.soft_cap,
            window_left=call.window_left, sinks=sinks, lse=lse, validate=False,
        )  # fmt: skip
    return (o, lse) if return_lse and lse is not None else o


def _check(plan: PlanBase, given: tuple[Any, ...]) -> None:
    """Refuses arguments of wrong classes."""
    g = Arguments(*given)
    new: dict[str, object] = {} if plan.exponent is None else {"k_new": g.k_new, "v_new": g.v_new}
    check_classes(
        g.q, g.cache, g.page_table, g.starts, g.rope, new, out=g.out, lse=g.lse, sinks=g.sinks
    )  # fmt: skip

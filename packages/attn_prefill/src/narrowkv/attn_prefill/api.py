"""Public operations of attn_prefill: check, choose, allocate, launch. No mathematics."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill.checks import (
    call_inputs,
    check_chunk,
    check_sinks,
    check_soft_cap,
    check_values,
    fold_q_descale,
    outputs_for,
)
from narrowkv.attn_prefill.kernels.rows import Outputs, Queries
from narrowkv.attn_prefill.launches import PrefillCall
from narrowkv.attn_prefill.plan import (
    PrefillPlan,
    append_shape,
    check_plan,
    plan_append,
    plan_prefill,
    planned_shape,
    prefill_shape,
)
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.runtime.errors import check_finite_float, check_no_grad, check_window, with_defaults
from narrowkv.runtime.launch import active_target

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


_APPEND_DEFAULTS = {"out_dtype": None, "return_lse": False, "lse": None, "validate": False}
_PREFILL_DEFAULTS = {**_APPEND_DEFAULTS, "batch_invariant": False}


def batch_prefill(
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
    plan: PrefillPlan | None = None,
    **options: Unpack[PrefillOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged queries over a paged KV cache, which already holds their own keys and values.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`, all sequences' query tokens one after the other, last
            dimension contiguous. bf16 or fp16 over any cache, with no quantisation of Q; or FP8 over a cache
            of the same FP8 format, which runs on FP8 matrix units.
        cache: keys and values; any layout, page size and format.
        page_table: which pages each sequence occupies, and its length with the new tokens in it.
        cu_seqlens_q: `[batch + 1]` int32, where each sequence's query tokens begin. Row i of a sequence
            stands at position `seq_len - q_len + i`: the mask is aligned bottom-right, and rows before the
            first key attend to nothing. A token belongs to the first sequence that claims it, and a sequence
            with an entry outside [0, tokens] has none.
        causal: a row attends to keys up to its own position.
        sm_scale: softmax scale; default `head_dim ** -0.5`.
        q_descale: FP8 queries: a float or an fp32 tensor `[1]`.
        logits_soft_cap: `c * tanh(logits / c)` when positive.
        window_left, window_right: how many keys before and after itself a row attends to; -1 for all.
            `causal` is the same as `window_right=0`.
        sinks: `[num_qo_heads]`, a logit per head with value 0: it enters the denominator of `o`.
        out: where to write, `[tokens, num_qo_heads, head_dim]`, bf16, fp16 or fp32; it must not overlap any
            other tensor of the call.
        plan: from `plan_prefill`, which can also be told bounds that shapes do not show; without one, a plan
            is made for the call. With one there is no allocation but outputs that were not given, and no host
            synchronisation either way, so the call can be captured in a graph.
        **options: `out_dtype`, `return_lse`, `lse`, `validate` and `batch_invariant`: see `PrefillOptions`.

    Returns:
        `o`, or `(o, lse)`; `lse` is `[tokens, num_qo_heads]` fp32, natural log of the scaled logits' sum
        **without the sink**. A row that attends to nothing has o = 0 and lse = -inf. Rows that no sequence
        owns (past the end of `cu_seqlens_q`), or beyond the plan's `max_q_len` in a sequence, are not
        written. Lengths that are negative or longer than the page table are brought into its range, and keys
        beyond the plan's `max_seq_len` are not attended to by kernel "dense".

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.
        UnsupportedError: for formats that no kernel serves on this target, and why.

    Source: FlashAttention-2's loop (Dao, 2023) over rows packed from the heads of a group.

    Example:
        >>> o = batch_prefill(q, cache, table, cu_seqlens_q, causal=True)                 # doctest: +SKIP
        >>> o, lse = batch_prefill(q, cache, table, cu_seqlens_q, return_lse=True)        # doctest: +SKIP
    """
    how = with_defaults("batch_prefill", options, _PREFILL_DEFAULTS)
    shape = prefill_shape(q, cache, page_table, cu_seqlens_q)
    target = active_target(q.device)
    if plan is None:
        plan = plan_prefill(q, cache, page_table, cu_seqlens_q, batch_invariant=how["batch_invariant"])
    else:
        check_plan(plan, shape, q, cache, target, maker="plan_prefill")
        if how["batch_invariant"] and not plan.batch_invariant:
            raise ValueError("plan must be made with batch_invariant=True: call plan_prefill again")
    scale = q.shape[2] ** -0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    soft_cap = check_soft_cap(logits_soft_cap)
    window_left = check_window("window_left", window_left)
    if causal and window_right > 0:
        raise ValueError(f"window_right must be -1 or 0 with causal=True, got {window_right}")
    window_right = 0 if causal else check_window("window_right", window_right)
    check_sinks(q, sinks)
    scale, descale = fold_q_descale(q, q_descale, scale, validate=how["validate"])
    check_no_grad(q=q, k=cache.k, v=cache.v, sinks=sinks)
    if how["validate"]:
        check_values(planned_shape(plan, shape), cache, page_table, cu_seqlens_q)
    inputs = call_inputs(cache, page_table, cu_seqlens_q, sinks=sinks, q_descale=q_descale)
    o, lse = outputs_for(q, out, how["out_dtype"], how["lse"], how["return_lse"], inputs)
    if plan.decode is not None:
        paged_decode(
            q,
            cache,
            page_table,
            sm_scale=scale,
            out=o,
            logits_soft_cap=soft_cap,
            window_left=window_left,
            sinks=sinks,
            lse=lse,
            plan=plan.decode,
        )
    elif shape.num_tokens:
        call = PrefillCall(plan, cache, page_table, scale, soft_cap, window_left, window_right)
        queries = Queries(
            q, q.stride(0), q.stride(1), cu_seqlens_q, q.shape[0], plan.shape.max_q_len, descale
        )
        outputs = Outputs(o, o.stride(0), o.stride(1), lse, 0 if lse is None else lse.stride(0), sinks)
        (call.dense if plan.config.kernel == "dense" else call.fused)(queries, outputs)
    return (o, lse) if how["return_lse"] and lse is not None else o


def prefill_append(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    rope: Rope | None = None,
    fp8_compute: bool = False,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
    **options: Unpack[AppendOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a chunk over its cache and itself; the chunk is appended to the cache.

    One launch; on Hopper two, where they are faster: `plan_append` chooses, or is told.

    Older tokens are read from the cache, the chunk's own keys and values unquantised from `k_new` and
    `v_new`. The cache gets the bytes that `narrowkv.paged_cache.append` would write, and no others change.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`, bf16 or fp16, all sequences' new tokens one after the other,
            last dimension contiguous.
        k_new, v_new: `[tokens, num_kv_heads, head_dim]` in q's dtype, last dimension contiguous.
        cache: any layout, page size and format; read and written in place. Its descales are per tensor, per
            head or per token-head, as for `append`.
        page_table: a block table with pages for the new tokens too; `seq_lens` are the lengths **before** the
            append, and are not changed. What has no page is not stored.
        cu_seqlens_q: `[batch + 1]` int32, where each sequence's new tokens begin.
        rope: rotary embedding of q and k_new, by each new token's position. Rotated queries and keys are
            rounded to q's dtype for attention; the cache gets the keys before that rounding.
        fp8_compute: multiply queries and old tokens on FP8 matrix units, queries as two FP8 terms (FP8
            caches only).
        sm_scale, logits_soft_cap, window_left, sinks, out: as for `batch_prefill`.
        plan: from `plan_append`; without one, a plan is made for the call. With one there is no allocation
            but outputs that were not given, and no host synchronisation either way.
        **options: `out_dtype`, `return_lse`, `lse` and `validate`: see `AppendOptions`.

    Returns:
        `o`, or `(o, lse)`; `lse` as `batch_prefill` gives it, **without the sink**.

    Raises:
        TypeError, ValueError: before anything is written, naming the argument, what was expected and what
            came.
        UnsupportedError: for formats that no kernel serves on this target, and why.

    Source: FlashAttention-2's loop (Dao, 2023) over rows packed from the heads of a group; rotary embedding
        after RoFormer (Su et al., 2021).

    Example:
        >>> o = prefill_append(q, k_new, v_new, cache, table, cu_seqlens_q)      # doctest: +SKIP
    """
    how = with_defaults("prefill_append", options, _APPEND_DEFAULTS)
    shape = append_shape(q, cache, page_table, cu_seqlens_q)
    inputs = call_inputs(cache, page_table, cu_seqlens_q, sinks=sinks, k_new=k_new, v_new=v_new)
    check_chunk(q, k_new, v_new, cache, page_table, cu_seqlens_q, rope, sinks, validate=how["validate"])
    target = active_target(q.device)
    if plan is None:
        plan = plan_append(q, cache, page_table, cu_seqlens_q, fp8_compute=fp8_compute)
    else:
        check_plan(plan, shape, q, cache, target, maker="plan_append")
        if fp8_compute != (plan.config.fp8 is not None):
            raise ValueError(f"plan must be made with fp8_compute={fp8_compute}: call plan_append again")
    scale = q.shape[2] ** -0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    soft_cap = check_soft_cap(logits_soft_cap)
    window_left = check_window("window_left", window_left)
    check_sinks(q, sinks)
    check_no_grad(q=q, k=cache.k, v=cache.v, sinks=sinks)
    if how["validate"]:
        check_values(planned_shape(plan, shape), cache, page_table, cu_seqlens_q)
    if rope is not None:
        inputs |= {"rope.cos": rope.cos, "rope.sin": rope.sin, "rope.positions": rope.positions}
    o, lse = outputs_for(q, out, how["out_dtype"], how["lse"], how["return_lse"], inputs)
    if shape.num_tokens:
        call = PrefillCall(plan, cache, page_table, scale, soft_cap, window_left, 0)
        queries = Queries(q, q.stride(0), q.stride(1), cu_seqlens_q, q.shape[0], plan.shape.max_q_len, None)
        outputs = Outputs(o, o.stride(0), o.stride(1), lse, 0 if lse is None else lse.stride(0), sinks)
        call.append(queries, outputs, k_new, v_new, rope)
    return (o, lse) if how["return_lse"] and lse is not None else o

"""Public operations of attn_decode: check, choose, allocate, launch. No mathematics."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from narrowkv.attn_decode.arguments import (
    OUT_DTYPES,
    descale_pointers,
    output_tensor,
    packed_route,
    side_of,
    table_pointers,
)
from narrowkv.attn_decode.config import SCALED_DOT_DEPTH
from narrowkv.attn_decode.kernels import (
    Workspace,
    _merge_splits_kernel,
    _merge_states_kernel,
    _paged_decode_kernel,
)
from narrowkv.attn_decode.plan import DecodePlan, check_plan, decode_shape, plan_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.device import widen_route, widening_exponent
from narrowkv.quant.errors import (
    check_dtype,
    check_finite_float,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
)
from narrowkv.quant.launch import LaunchOptions, active_target, launch
from narrowkv.quant.launch.tracing import traceable

_LOG2E = math.log2(math.e)


@traceable
def paged_decode(
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
    plan: DecodePlan | None = None,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's newest tokens over its paged KV cache, which already holds them.

    Args:
        q: `[batch * q_len, num_qo_heads, head_dim]`, bf16 or fp16, last dimension contiguous. With q_len > 1
            (speculative tokens) row i of a sequence stands at position `seq_len - q_len + i` and attends to
            keys up
            to itself.
        cache: keys and values; any layout and page size, in bf16, fp16, FP8 or FP4. q is not quantised, but
            inside the native FP4 kernel.
        page_table: which pages each sequence occupies, and its length.
        sm_scale: softmax scale; default `head_dim ** -0.5`.
        out: where to write, `[batch * q_len, num_qo_heads, head_dim]`.
        out_dtype: dtype of a new output; default q's. fp32 is allowed.
        logits_soft_cap: `c * tanh(logits / c)` when positive.
        window_left: a row attends to at most this many keys before itself; -1 for all.
        sinks: `[num_qo_heads]`, a logit per head with value 0: it enters the denominator of `o`.
        return_lse: also return the log-sum-exp.
        lse: where to write the log-sum-exp, `[batch * q_len, num_qo_heads]` fp32, last dimension contiguous.
            It is returned only with `return_lse`.
        plan: from `plan_decode`; without one, a plan is made for the call. With one there is no allocation
            but the outputs, and no host synchronisation either way, so the call can be captured in a graph.
        kernel: forces "native" or "decode" when there is no plan; see `plan_decode`.

    Returns:
        `o`, or `(o, lse)`; `lse` is `[batch * q_len, num_qo_heads]` fp32, natural log of the scaled logits'
        sum **without the sink**, so that partial results merge. A row that attends to nothing has o = 0 and
        lse = -inf.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.
        UnsupportedError: for formats that the kernel does not read, or a forced kernel that the target lacks.

    Source: split-KV decode after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> o = paged_decode(q, cache, table, sm_scale=128**-0.5)                       # doctest: +SKIP
        >>> o, lse = paged_decode(q, cache, table, return_lse=True, plan=plan)          # doctest: +SKIP
    """
    shape = decode_shape(q, cache, page_table)
    target = active_target(q.device)
    if plan is None:
        plan = plan_decode(q, cache, page_table, kernel=kernel)
    elif kernel not in (None, plan.config.kernel):
        raise ValueError(f"kernel must be the plan's {plan.config.kernel!r} or None, got {kernel!r}")
    else:
        check_plan(plan, shape, cache, q.device, target)
    scale = q.shape[2] ** -0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    soft_cap = check_finite_float("logits_soft_cap", logits_soft_cap)
    if soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be 0 (off) or positive, got {logits_soft_cap}")
    if not isinstance(window_left, int) or window_left < -1:
        raise ValueError(f"window_left must be -1 (no window) or a number of tokens, got {window_left!r}")
    if sinks is not None:
        check_shape("sinks", sinks, (shape.num_qo_heads,))
        check_last_dim_contiguous("sinks", sinks)
        check_dtype("sinks", sinks, (torch.float32, torch.bfloat16, torch.float16))
        check_same_device(q=q, sinks=sinks)
    check_no_grad(q=q, k=cache.k, v=cache.v, sinks=sinks)
    o = output_tensor(q, out, out_dtype, cache)
    if lse is not None:
        check_dtype("lse", lse, (torch.float32,))
        check_shape("lse", lse, tuple(q.shape[:2]))
        check_last_dim_contiguous("lse", lse)
        check_same_device(q=q, lse=lse)
    elif return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if cache.num_pages == 0 or page_table.page_ids.numel() == 0:  # every sequence is empty
        o.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    elif shape.batch:
        _launch_decode(q, o, lse, sinks, cache, page_table, plan, scale, soft_cap, window_left)
    return (o, lse) if return_lse and lse is not None else o


def _launch_decode(
    q: torch.Tensor, o: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None,
    cache: PagedKVCache, page_table: PageTable, plan: DecodePlan,
    scale: float, soft_cap: float, window_left: int,
) -> None:  # fmt: skip
    shape, config, target = plan.shape, plan.config, plan.target
    k_format, v_format = plan.k_format, plan.v_format
    k_strides, v_strides = cache.k_strides, cache.v_strides
    k_route = widen_route(target, k_format)
    v_route = widen_route(target, v_format)
    k_side = side_of(cache.k, k_strides, k_format, k_route, config.k_parts)
    v_side = side_of(cache.v, v_strides, v_format, v_route, config.v_parts)
    native = config.kernel == "native"
    k_exponent = 0 if native else widening_exponent(k_format, k_route)
    v_exponent = widening_exponent(v_format, v_route)
    k_mode, k_factor, k_descale = descale_pointers(cache.k_descale, cache.k_granularity)
    v_mode, v_factor, v_descale = descale_pointers(cache.v_descale, cache.v_granularity)
    # The scales of groups are applied while widening, and take the power of two along.
    out_scale = v_factor * 2.0 ** (0 if v_mode == "e8m0_group" else v_exponent)
    k_power = 2.0 ** (0 if k_mode == "e8m0_group" else k_exponent)
    qk_scale = scale * k_factor * k_power * (1.0 if soft_cap > 0 else _LOG2E)

    half = "bf16" not in (k_format, v_format)
    compute = tl.float16 if half else tl.bfloat16
    ragged = page_table.kind == "ragged"
    table = table_pointers(page_table, cache)
    workspace = plan.workspace if plan.workspace is not None else Workspace(None, None, None)
    rows = shape.q_len * shape.gqa_ratio
    head_programs = shape.num_kv_heads * -(-rows // config.block_m)
    stride_lse = 0 if lse is None else lse.stride(0)
    block_d = 1 << (shape.head_dim - 1).bit_length()
    shared = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GQA_RATIO": shape.gqa_ratio,
        "Q_LEN": shape.q_len,
        "HEAD_DIM": shape.head_dim,
        "PAGE_SIZE": shape.page_size,
        "RAGGED": ragged,
        "V_DESCALE": v_mode,
        "WINDOW_LEFT": window_left,
        "HAS_SINKS": sinks is not None,
        "WRITE_LSE": lse is not None,
        "SPLIT": config.split,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
        "BLOCK_B": max(2, 1 << (shape.batch - 1).bit_length()),
    }
    launch(
        _paged_decode_kernel,
        (head_programs, config.num_units),
        (
            q, o, lse, sinks,
            k_side.pointers, v_side.pointers,
            k_descale, v_descale, table, workspace,
            q.stride(0), q.stride(1), o.stride(0), o.stride(1), stride_lse,
            qk_scale, out_scale, soft_cap, shape.batch, config.num_units, config.tiles_per_split,
        ),
        {
            "K_VEC": k_strides.vec,
            "V_VEC": v_strides.vec,
            "WIDE_ADDRESS": cache.needs_64_bit_addresses,
            "K_FORMAT": k_format,
            "V_FORMAT": v_format,
            "K_ROUTE": packed_route(target, k_format, k_side, half),
            "V_ROUTE": packed_route(target, v_format, v_side, half),
            "COMPUTE": compute,
            "SCALE_Q": half and q.dtype == torch.bfloat16 and not native,
            "SPLIT_Q": not half and q.dtype == torch.float16,
            "K_DESCALE": k_mode,
            "HAS_SOFT_CAP": soft_cap > 0,
            "MERGE_IN_LAUNCH": config.merge_in_launch,
            "NATIVE_QK": native,
            "BLOCK_DK": max(block_d, SCALED_DOT_DEPTH) if native else block_d,
            "K_PARTS": 1 if native else k_side.parts,
            "V_PARTS": v_side.parts,
            **shared,
        },
        config.options,
    )  # fmt: skip
    if config.split != "none" and not config.merge_in_launch:
        launch(
            _merge_splits_kernel,
            (shape.num_kv_heads * rows, shape.batch),
            (o, lse, sinks, v_descale, table, workspace,
             o.stride(0), o.stride(1), stride_lse, out_scale, shape.batch,
             config.num_units, config.tiles_per_split),
            {"BLOCK_S": 16, **shared},
            LaunchOptions(num_warps=1, num_stages=1),
        )  # fmt: skip


def merge_states(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines partial attention results over splits, prefixes or ranks.

    Args:
        o: `[num_states, num_tokens, num_qo_heads, head_dim]`, bf16, fp16 or fp32, contiguous: results that
            are each normalised.
        lse: `[num_states, num_tokens, num_qo_heads]` fp32, natural log. -inf marks a state that attended to
            nothing; its `o` is not read.

    Returns:
        `(o, lse)` of the union: `[num_tokens, num_qo_heads, head_dim]` in o's dtype, and `[num_tokens,
        num_qo_heads]` fp32.

    Raises:
        TypeError, ValueError: for wrong shapes, dtypes or devices.

    Example:
        >>> states = torch.stack([o_prefix, o_suffix])  # doctest: +SKIP
        >>> o, lse = merge_states(states, torch.stack([lse_prefix, lse_suffix]))  # doctest: +SKIP
    """
    check_dtype("o", o, OUT_DTYPES)
    check_dtype("lse", lse, (torch.float32,))
    if o.dim() != 4:
        raise ValueError(
            f"o must have shape [num_states, num_tokens, num_qo_heads, head_dim], got {tuple(o.shape)}"
        )
    check_shape("lse", lse, tuple(o.shape[:3]))
    check_same_device(o=o, lse=lse)
    check_no_grad(o=o, lse=lse)
    num_states, num_tokens, num_heads, head_dim = o.shape
    if num_states == 0:
        raise ValueError("o must have at least one state, got 0")
    if not (o[0].is_contiguous() and lse[0].is_contiguous()):
        raise ValueError("o and lse must be contiguous within a state")
    merged = torch.empty(o.shape[1:], dtype=o.dtype, device=o.device)
    merged_lse = torch.empty(lse.shape[1:], dtype=torch.float32, device=o.device)
    launch(
        _merge_states_kernel,
        (num_tokens * num_heads,),
        (o, lse, merged, merged_lse, num_states, o.stride(0), lse.stride(0)),
        {"HEAD_DIM": head_dim, "BLOCK_D": 1 << (head_dim - 1).bit_length()},
        LaunchOptions(num_warps=1, num_stages=1),
    )
    return merged, merged_lse

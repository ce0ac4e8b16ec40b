"""`sage_attention`: dense attention that quantises Q, K and V on the way in."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

import torch

from narrowkv.runtime.errors import check_choice, check_finite_float, check_tensor, with_defaults
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.operation import Bounded, signature_of
from narrowkv.sage.checks import LAYOUTS, check_block_sizes, check_sage_shape, sage_shape, windows_of
from narrowkv.sage.operation import SagePlan, make_plan, with_tuned_config
from narrowkv.sage.settings import SageOptions
from narrowkv.sage.shapes import SageShape
from narrowkv.sage.sixteen_bit import BACKENDS

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SageCallOptions(TypedDict, total=False):
    """Keywords that say how tensors lie, where results go and what is checked.

    Attributes:
        layout: of dense q, k, v and the output: "BSHD" `[batch, seq, heads, head_dim]`, as FlashAttention and
            AITER have it (the default), or "BHSD" `[batch, heads, seq, head_dim]`, as PyTorch's SDPA has it.
        out: where to write, like q; bf16 or fp16.
        lse: where to write the log-sum-exp, fp32, shaped like q without head_dim. It is returned only with
            `return_lse`.
        return_lse: also return the log-sum-exp.
        backend: "sage" quantises (the default); "auto" takes torch's attention in 16 bits for calls that it
            serves in less time, which is more accurate, too. `plan_sage(...).explain()` says which and why.
        block_mask: which blocks of keys each block of queries attends to, `[batch, num_qo_heads,
            ceil(q_len / block_sizes[0]), ceil(k_len / block_sizes[1])]`, bool, uint8, int8 or int32, any
            strides: 0 masks a block, anything else shows it to the extent that `causal` and `window` do.
            Masked blocks are not read. Not with cu_seqlens.
        block_sizes: queries and keys of a block of `block_mask`, multiples of 128 and 64; (128, 128) if left
            out.
        validate: also read cu_seqlens and refuse wrong values, which waits for the device. Otherwise a token
            belongs to the first sequence that claims it, and a sequence with an entry outside the tensor has
            no tokens: nothing is read or written outside the tensors. Tokens of no sequence have no result.
    """

    layout: str
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    backend: str
    block_mask: torch.Tensor | None
    block_sizes: tuple[int, int] | None
    validate: bool


class SagePlanOptions(TypedDict, total=False):
    """Further keywords of `plan_sage`.

    Attributes:
        layout: as for `sage_attention`.
        block_sizes: queries and keys of a block of the block mask that calls give, multiples of 128 and 64;
            None (the default) for calls without one.
    """

    layout: str
    block_sizes: tuple[int, int] | None


QK_DTYPES = ("int8", "int4", "fp8")
# Plans of calls that were not planned.
_plans: Bounded[SagePlan] = Bounded(1024)
_DEFAULT_BLOCK_SIZES = (128, 128)
_DEFAULTS = {
    "layout": "BSHD",
    "out": None,
    "lse": None,
    "return_lse": False,
    "backend": "sage",
    "block_mask": None,
    "block_sizes": None,
    "validate": False,
}


_PLAN_DEFAULTS = {name: _DEFAULTS[name] for name in ("layout", "block_sizes")}


@traceable
def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qk_dtype: str = "int8",
    q_granularity: str = "per_thread",
    k_granularity: str = "per_thread",
    causal: str | bool | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    sm_scale: float | None = None,
    **options: Unpack[SageCallOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Dense attention with Q and K in int8, int4 or FP8 and V in FP8, for long prefill and diffusion.

    Args:
        q: `[batch, q_len, num_qo_heads, head_dim]`, or `[q_tokens, num_qo_heads, head_dim]` with cu_seqlens;
            bf16 or fp16, head_dim 64 or 128, at most 256 heads, last dimension contiguous.
        k, v: `[batch, k_len, num_kv_heads, head_dim]`, or `[k_tokens, num_kv_heads, head_dim]`; num_qo_heads
            is a multiple of num_kv_heads. Lengths of q and k may differ, and be zero.
        qk_dtype: what Q and K are multiplied in: "int8", "int4" or "fp8" (E4M3 of the target's kind).
        q_granularity, k_granularity: tokens that share a descale: "per_tensor", "per_block" (128), "per_warp"
            (Q 32, K 64) or "per_thread" (Q 4, K 16; interleaved, see `narrowkv.quant.sage`).
        causal: None, "top_left" (query i stands at key i) or "bottom_right" (the last query stands at the
            last key): a query attends to keys up to where it stands, or as far as `window` says.
        window: `(left, right)`: keys before and after where a query stands that it attends to, -1 for all;
            with `causal` a right of -1 is 0. Without `causal`, queries stand bottom-right. The masks
            `t:128,30` and `b:128,30` of composable-kernel's example are
            `causal="top_left", window=(128, 30)` and `causal="bottom_right", window=(128, 30)`; its `xt:n`
            and `xb:n` are those with `window=(n // 2, n - 1 - n // 2)`.
        cu_seqlens_q, cu_seqlens_k: where sequences begin, int32 or int64 `[batch + 1]`, for sequences of
            different lengths.
        smooth_k: subtract K's mean over each sequence before quantising. Only the error changes; lse is
            corrected.
        smooth_q: also subtract Q's mean over each 128 tokens and add its scores back; for int4, at the price
            of fp32 scratch `[num_qo_heads, q_len / 128, k_len]` a sequence.
        sm_scale: softmax scale, not negative; default `head_dim ** -0.5`.
        **options: `layout`, `out`, `lse`, `return_lse`, `backend`, `block_mask`, `block_sizes`, `validate`;
            see `SageCallOptions`.

    Returns:
        `o` like q, or `(o, lse)`; lse is fp32, natural log, shaped like q without head_dim. A row that
        attends to nothing has o = 0 and lse = -inf. A NaN in K makes its group of tokens NaN, with smoothing
        the whole head of the sequence; one in V reaches rows whose tiles of keys hold it.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.

    Source: SageAttention and SageAttention2 (Zhang et al., arXiv 2410.02367, 2411.10958).

    Example:
        >>> q, k, v = (torch.randn(1, 130, 2, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> o, lse = sage_attention(q, k, v, causal="bottom_right", return_lse=True)
        >>> o.shape, lse.shape
        (torch.Size([1, 130, 2, 64]), torch.Size([1, 130, 2]))
    """
    how = with_defaults("sage_attention", options, _DEFAULTS)
    out, lse, return_lse, block_mask = how["out"], how["lse"], how["return_lse"], how["block_mask"]
    target = active_target(q.device).name if isinstance(q, torch.Tensor) else None
    signature = signature_of(
        q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, return_lse, target, qk_dtype, q_granularity,
        k_granularity, causal, window, how["layout"], smooth_k, smooth_q, sm_scale, block_mask,
        how["block_sizes"],
    )  # fmt: skip
    plan = _plans.find(signature)
    if plan is None:
        planned = SageOptions(
            qk_dtype,
            q_granularity,
            k_granularity,
            causal,
            window,
            how["layout"],
            smooth_k,
            smooth_q,
            sm_scale,
            block_sizes_of(block_mask, how["block_sizes"]),
        )
        plan = _plans.keep(signature, _plan(q, k, cu_seqlens_q, cu_seqlens_k, planned, None))
    backend = how["backend"]
    if backend != "sage" and check_choice("backend", backend, BACKENDS) == "auto":
        one_dtype = q.dtype == k.dtype == check_tensor("v", v).dtype
        if not plan.why_quantised(lse=return_lse or lse is not None, one_dtype=one_dtype):
            return plan.attend_in_16_bits(q, k, v, out)
    return plan.run_as_signed(
        signature, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, return_lse, block_mask, how["validate"]
    )


def block_sizes_of(block_mask: object, sizes: tuple[int, int] | None) -> tuple[int, int] | None:
    """Sizes of the blocks of a call's mask; None without one."""
    if block_mask is not None:
        check_tensor("block_mask", block_mask)
        return _DEFAULT_BLOCK_SIZES if sizes is None else sizes
    if sizes is not None:
        raise ValueError(f"block_sizes must be left out without a block_mask, got {sizes}")
    return None


def plan_sage(
    q: torch.Tensor | SageShape,
    k: torch.Tensor | None = None,
    *,
    qk_dtype: str = "int8",
    q_granularity: str = "per_thread",
    k_granularity: str = "per_thread",
    causal: str | bool | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    sm_scale: float | None = None,
    device: torch.device | str | None = None,
    **more: Unpack[SagePlanOptions],
) -> SagePlan:
    """Plans Sage attention for calls of these sizes or smaller; arguments as for `sage_attention`.

    Nothing is read from the device, and of `q` and `k` only the metadata. With a `SageShape` nothing needs to
    be there yet: `plan_sage(SageShape(batch, q_tokens, k_tokens, heads, kv_heads, head_dim, ragged),
    device=...)`; ragged calls then give `quantize_kv` and `attend` their cu_seqlens.

    Args:
        q: a query of the largest size, or the largest sizes.
        k: keys of the largest size; None with a `SageShape`.
        device: where tensors will be; None takes that of q.
        qk_dtype, q_granularity, k_granularity, causal, window, cu_seqlens_q, cu_seqlens_k, smooth_k,
            smooth_q, sm_scale: as for `sage_attention`.
        **more: `layout`, `block_sizes`; see `SagePlanOptions`.

    Returns:
        A plan: call its `quantize_kv(k, v)` once for K and V, and `attend(q, kv)` for each query.
        `plan.with_workspace()` allocates its scratch once.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> plan = plan_sage(q, k, causal="bottom_right")       # doctest: +SKIP
        >>> kv = plan.quantize_kv(k, v)                         # doctest: +SKIP
        >>> o = plan.attend(q, kv)                              # doctest: +SKIP
    """
    how = with_defaults("plan_sage", more, _PLAN_DEFAULTS)
    options = SageOptions(
        qk_dtype, q_granularity, k_granularity, causal, window, how["layout"], smooth_k, smooth_q, sm_scale,
        how["block_sizes"],
    )  # fmt: skip
    plan = _plan(q, k, cu_seqlens_q, cu_seqlens_k, options, device)
    if cu_seqlens_q is None:
        return plan
    # The copy shares the calls that were prepared: their signatures have the metadata of lengths.
    planned = copy.copy(plan)
    object.__setattr__(planned, "cu_seqlens_q", cu_seqlens_q)
    object.__setattr__(planned, "cu_seqlens_k", cu_seqlens_k)
    return planned


def _plan(
    q: torch.Tensor | SageShape, k: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, options: SageOptions, device: torch.device | str | None,
) -> SagePlan:  # fmt: skip
    """The plan of calls of this size, without their lists of lengths."""
    check_choice("qk_dtype", options.qk_dtype, QK_DTYPES)
    windows_of(options.causal, options.window)
    if isinstance(q, SageShape):
        if k is not None or device is None:
            raise ValueError("k must be None and device given with a SageShape")
        check_choice("layout", options.layout, LAYOUTS)
        check_sage_shape(q, options.layout)
        shape, place = q, torch.empty(0, device=device).device
    else:
        shape = sage_shape(q, check_tensor("k", k), cu_seqlens_q, cu_seqlens_k, options.layout)
        place = q.device
    scale = options.sm_scale
    if scale is not None and check_finite_float("sm_scale", scale) < 0:
        raise ValueError(f"sm_scale must not be negative, got {scale}")
    if options.window is not None:
        options = replace(options, window=(options.window[0], options.window[1]))
    if options.block_sizes is not None:
        if shape.ragged:
            raise ValueError("a block mask must come without cu_seqlens: it is for sequences of one length")
        options = replace(options, block_sizes=check_block_sizes(options.block_sizes))
    return with_tuned_config(make_plan(active_target(place), shape, options, place))

"""`sage_attention`: dense attention that quantises Q, K and V on the way in."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from narrowkv.runtime.errors import check_choice, check_finite_float, check_tensor
from narrowkv.runtime.launch import active_target, executor
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.operation import Bounded, Prepared, refuse_containers, signature_of
from narrowkv.sage.checks import LAYOUTS, check_block_sizes, check_sage_shape, sage_shape, windows_of
from narrowkv.sage.operation import PLAN, SAGE, SagePlan, make_plan, with_tuned_config
from narrowkv.sage.options import OF_TENSORS, PLAIN_VALUES, SageArguments
from narrowkv.sage.shapes import SageShape
from narrowkv.sage.sixteen_bit import BACKENDS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sage.options import SageOptions, SagePlanOptions


QK_DTYPES = ("int8", "int4", "fp8")
# Of calls that were not planned.
_calls: Bounded[tuple[SagePlan, Prepared | None]] = Bounded(1024)
_DEFAULT_BLOCK_SIZES = (128, 128)


@traceable
def sage_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Unpack[SageOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Dense attention with Q and K in int8, int4 or FP8 and V in FP8, for long prefill and diffusion.

    Args:
        q: `[batch, q_len, num_qo_heads, head_dim]`, or `[q_tokens, num_qo_heads, head_dim]` with cu_seqlens;
            bf16 or fp16, head_dim 64 or 128, at most 256 heads, last dimension contiguous.
        k, v: `[batch, k_len, num_kv_heads, head_dim]`, or `[k_tokens, num_kv_heads, head_dim]`; num_qo_heads
            is a multiple of num_kv_heads. Lengths of q and k may differ, and be zero.
        **options: `qk_dtype`, `q_granularity`, `k_granularity`, `causal`, `window`, `layout`, `smooth_k`,
            `smooth_q`, `sm_scale` and `block_sizes`: see `SagePlanOptions`; `cu_seqlens_q`, `cu_seqlens_k`,
            `out`, `lse`, `return_lse`, `block_mask`, `validate` and `backend`: see `SageOptions`.

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
    if not options.keys() <= SAGE.keywords:
        SAGE.check_keywords(options)
    given, running = SageArguments(q, k, v, **options), executor()
    if list in map(type, (given.window, given.block_sizes)):
        given = given._replace(window=_as_tuple(given.window), block_sizes=_as_tuple(given.block_sizes))
    target = None if running is None else running.target.name
    signature = target, signature_of(*given[:OF_TENSORS]), given[PLAIN_VALUES]
    found = _calls.find(signature)
    if found is None:
        refuse_containers(given, PLAIN_VALUES)
        found = _calls.keep(signature, _plan_and_call(given))
    plan, call = found
    return plan.attend_in_16_bits(q, k, v, given.out) if call is None else plan.launch(call, given)


def _as_tuple(pair: Any) -> Any:
    """A list as a tuple, by which calls are looked up; anything else as it is."""
    return tuple(pair) if isinstance(pair, list) else pair


def _plan_and_call(given: SageArguments) -> tuple[SagePlan, Prepared | None]:
    """The plan of calls like this one, and its prepared call; None where torch's attention serves them."""
    q, k = given.q, given.k
    sizes = block_sizes_of(given.block_mask, given.block_sizes)
    plan = _plan(q, k, given._replace(block_sizes=sizes), None)
    if check_choice("backend", given.backend, BACKENDS) == "auto":
        one_dtype = q.dtype == k.dtype == check_tensor("v", given.v).dtype
        lse = given.return_lse or given.lse is not None
        if not plan.why_quantised(lse=lse, one_dtype=one_dtype):
            return plan, None
    return plan, plan.prepare(given)


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
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    **options: Unpack[SagePlanOptions],
) -> SagePlan:
    """Plans Sage attention for calls of these sizes or smaller; arguments as for `sage_attention`.

    Nothing is read from the device, and of `q` and `k` only the metadata. With a `SageShape` nothing needs to
    be there yet: `plan_sage(SageShape(batch, q_tokens, k_tokens, heads, kv_heads, head_dim, ragged),
    device=...)`; ragged calls then give `quantize_kv` and `attend` their cu_seqlens.

    Args:
        q: a query of the largest size, or the largest sizes.
        k: keys of the largest size; None with a `SageShape`.
        device: where tensors will be; None takes that of q.
        cu_seqlens_q, cu_seqlens_k: as for `sage_attention`.
        **options: the keywords of `sage_attention` that a plan is made for; see `SagePlanOptions`.

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
    if not options.keys() <= PLAN.keywords:
        PLAN.check_keywords(options)
    given = SageArguments(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    plan = _plan(q, k, given, device)
    if cu_seqlens_q is None:
        return plan
    # The copy shares the calls that were prepared: their signatures have the metadata of lengths.
    planned = copy.copy(plan)
    object.__setattr__(planned, "cu_seqlens_q", cu_seqlens_q)
    object.__setattr__(planned, "cu_seqlens_k", cu_seqlens_k)
    return planned


def _plan(
    q: torch.Tensor | SageShape, k: torch.Tensor | None, given: SageArguments,
    device: torch.device | str | None,
) -> SagePlan:  # fmt: skip
    """The plan of calls of this size, without their lists of lengths."""
    check_choice("qk_dtype", given.qk_dtype, QK_DTYPES)
    windows_of(given.causal, given.window)
    if isinstance(q, SageShape):
        if k is not None or device is None:
            raise ValueError("k must be None and device given with a SageShape")
        check_choice("layout", given.layout, LAYOUTS)
        check_sage_shape(q, given.layout)
        shape, place = q, torch.empty(0, device=device).device
    else:
        starts = given.cu_seqlens_q, given.cu_seqlens_k
        shape = sage_shape(q, check_tensor("k", k), *starts, given.layout)
        place = q.device
    if given.sm_scale is not None and check_finite_float("sm_scale", given.sm_scale) < 0:
        raise ValueError(f"sm_scale must not be negative, got {given.sm_scale}")
    sizes = given.block_sizes
    if sizes is not None:
        sizes = check_block_sizes(sizes)
    window = None if given.window is None else (given.window[0], given.window[1])
    options = SageArguments(**given.planned | {"window": window, "block_sizes": sizes})
    return with_tuned_config(make_plan(active_target(place), shape, options, place))

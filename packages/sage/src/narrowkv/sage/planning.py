"""Makes plans of Sage attention."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from narrowkv.quant.sage import token_groups
from narrowkv.runtime.errors import check_choice, check_finite_float, check_tensor
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.targets import Target
from narrowkv.sage.checks import LAYOUTS, check_sage_shape, sage_shape, windows_of
from narrowkv.sage.config import choose_config
from narrowkv.sage.plan import SagePlan
from narrowkv.sage.shapes import SageShape

QK_DTYPES = ("int8", "int4", "fp8")
_CACHED_PLANS = 256


def plan_sage(
    q: torch.Tensor | SageShape,
    k: torch.Tensor | None = None,
    *,
    qk_dtype: str = "int8",
    q_granularity: str = "per_thread",
    k_granularity: str = "per_thread",
    causal: str | bool | None = None,
    window: tuple[int, int] | None = None,
    layout: str = "BSHD",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    sm_scale: float | None = None,
    device: torch.device | str | None = None,
) -> SagePlan:
    """Plans Sage attention for calls of these sizes or smaller; arguments as for `sage_attention`.

    Nothing is read from the device, and of `q` and `k` only the metadata. With a `SageShape` nothing needs to
    be there yet: `plan_sage(SageShape(batch, q_tokens, k_tokens, heads, kv_heads, head_dim, ragged),
    device=...)`; ragged calls then give `quantize_kv` and `attend` their cu_seqlens.

    Args:
        q: a query of the largest size, or the largest sizes.
        k: keys of the largest size; None with a `SageShape`.
        device: where tensors will be; None takes that of q.
        qk_dtype, q_granularity, k_granularity, causal, window, layout, cu_seqlens_q, cu_seqlens_k, smooth_k,
            smooth_q, sm_scale: as for `sage_attention`.

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
    check_choice("qk_dtype", qk_dtype, QK_DTYPES)
    bottom_right, left, right = windows_of(causal, window)
    if isinstance(q, SageShape):
        if k is not None or device is None:
            raise ValueError("k must be None and device given with a SageShape")
        check_choice("layout", layout, LAYOUTS)
        check_sage_shape(q, layout)
        shape, place = q, torch.empty(0, device=device).device
    else:
        shape = sage_shape(q, check_tensor("k", k), cu_seqlens_q, cu_seqlens_k, layout)
        place = q.device
    scale = shape.head_dim**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    if scale < 0:
        raise ValueError(f"sm_scale must not be negative, got {scale}")
    plan = _make_plan(
        active_target(place), shape, qk_dtype, q_granularity, k_granularity, bottom_right, left, right,
        smooth_k, smooth_q, scale, place, layout,
    )  # fmt: skip
    if cu_seqlens_q is None:
        return plan
    planned = replace(plan, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    # The kernels are bound once for all lists of lengths.
    planned.__dict__["launches"] = plan.launches
    return planned


@lru_cache(maxsize=_CACHED_PLANS)
def _make_plan(
    target: Target, shape: SageShape, qk_dtype: str, q_granularity: str, k_granularity: str,
    bottom_right: bool, left: int, right: int, smooth_k: bool, smooth_q: bool, sm_scale: float,
    device: torch.device, layout: str,
) -> SagePlan:  # fmt: skip
    """A plan without a workspace, cached for calls without a plan."""
    config = choose_config(target, qk_dtype, smooth_q=smooth_q, window=left >= 0)
    return SagePlan(
        target, shape, config.fp8 if qk_dtype == "fp8" else qk_dtype, token_groups("q", q_granularity),
        token_groups("k", k_granularity), bottom_right, left, right, smooth_k, smooth_q, sm_scale, config,
        device, layout,
    )  # fmt: skip

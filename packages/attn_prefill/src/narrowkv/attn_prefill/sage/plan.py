"""Sage attention planned once: what is quantised how, which configuration runs, a call's two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowkv.attn_prefill.sage.config import SageConfig, choose_config
from narrowkv.attn_prefill.sage.launches import (
    QuantizedKV,
    SageShape,
    launch_attention,
    quantise_keys_values,
    quantise_queries,
)
from narrowkv.quant.errors import (
    check_choice,
    check_dtype,
    check_finite_float,
    check_int32,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
)
from narrowkv.quant.launch import active_target
from narrowkv.quant.sage import TokenGroups, token_groups
from narrowkv.quant.targets import Target

QK_DTYPES = ("int8", "int4", "fp8")
_HEAD_DIMS = (64, 128)
_FLOATS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SagePlan:
    """A Sage attention of one shape, ready to quantise and to attend.

    Made by `plan_sage`. `quantize_kv` and `attend` make no host synchronisation, so both can be captured in a
    graph.

    Attributes:
        target: what it was planned for.
        shape: the sizes.
        qk_format: format of Q and K in scratch: "int8", "int4" or the target's FP8.
        q_groups, k_groups: which tokens share a descale; None for the whole tensor.
        bottom_right: the last query stands at the last key; else the first at the first.
        window_left, window_right: keys before and after a query's position that it attends to; -1 for all.
        smooth_k, smooth_q: which means are taken out.
        sm_scale: the softmax scale.
        config: the launch configuration.
        device: where it runs.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`, or None for a dense batch.
    """

    target: Target
    shape: SageShape
    qk_format: str
    q_groups: TokenGroups | None
    k_groups: TokenGroups | None
    bottom_right: bool
    window_left: int
    window_right: int
    smooth_k: bool
    smooth_q: bool
    sm_scale: float
    config: SageConfig
    device: torch.device
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None

    def quantize_kv(self, k: torch.Tensor, v: torch.Tensor) -> QuantizedKV:
        """Quantises K and V, which then serve any number of `attend` calls.

        Args:
            k, v: bf16 or fp16 `[batch, k_len, num_kv_heads, head_dim]`, or `[k_tokens, num_kv_heads,
                head_dim]` with cu_seqlens; last dimension contiguous.

        Returns:
            What `attend` reads. With `smooth_q` it keeps `k` itself, which must not change meanwhile.

        Raises:
            TypeError, ValueError: tensors that the plan is not for.
        """
        for name, tensor in (("k", k), ("v", v)):
            _check_operand(name, tensor, self.shape.kv_sizes, self.device)
        return quantise_keys_values(
            k, v, self.cu_seqlens_k, self.shape, self.qk_format, self.k_groups, self.config,
            smooth=self.smooth_k, keep_k=self.smooth_q,
        )  # fmt: skip

    def attend(
        self, q: torch.Tensor, kv: QuantizedKV, *, out: torch.Tensor | None = None, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of `q` over quantised keys and values.

        Args:
            q: bf16 or fp16 `[batch, q_len, num_qo_heads, head_dim]`, or `[q_tokens, num_qo_heads, head_dim]`
                with cu_seqlens.
            kv: from `quantize_kv` of this plan, or of one with the same keys.
            out: where to write, like q; bf16 or fp16.
            return_lse: also return the log-sum-exp.

        Returns:
            `o`, or `(o, lse)`; see `sage_attention`.

        Raises:
            TypeError, ValueError: tensors that the plan is not for.
        """
        _check_operand("q", q, self.shape.q_sizes, self.device)
        self._check_kv(kv)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        else:
            _check_operand("out", out, self.shape.q_sizes, self.device)
            check_no_overlap("out", out, q=q, k=kv.k, v=kv.v)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
        if q.numel():
            query = quantise_queries(
                q, self.cu_seqlens_q, self.shape, self.qk_format, self.q_groups, kv,
                smooth=self.smooth_q, write_shift=self.smooth_k and return_lse, sm_scale=self.sm_scale,
            )  # fmt: skip
            launch_attention(
                query, kv, out, lse, self.cu_seqlens_q, self.shape, self.config,
                q_groups=self.q_groups, bottom_right=self.bottom_right,
                window=(self.window_left, self.window_right), sm_scale=self.sm_scale,
            )  # fmt: skip
        return out if lse is None else (out, lse)

    def _check_kv(self, kv: QuantizedKV) -> None:
        mine = (self.shape.kv_sizes, self.qk_format, self.config.fp8, self.k_groups, self.config.key_order)
        theirs = (kv.shape.kv_sizes, kv.qk_format, kv.fp8, kv.k_groups, kv.key_order)
        if mine != theirs:
            raise ValueError(f"kv must be quantised for this plan ({mine}), got one for {theirs}")
        if (self.smooth_k and kv.k_mean is None) or (self.smooth_q and kv.k_source is None):
            raise ValueError("kv must be quantised by a plan with the same smooth_k and smooth_q")
        if kv.cu_seqlens is not self.cu_seqlens_k and (kv.cu_seqlens is None or self.cu_seqlens_k is None):
            raise ValueError(
                "kv must be of a dense batch where the plan is, and of ragged sequences where it is"
            )
        check_same_device(q=torch.empty(0, device=self.device), kv=kv.k)


def _check_operand(name: str, x: torch.Tensor, sizes: tuple[int, ...], device: torch.device) -> None:
    check_dtype(name, x, _FLOATS)
    check_shape(name, x, sizes)
    check_last_dim_contiguous(name, x)
    check_no_grad(**{name: x})
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the plan, got {x.device}")


def _windows(causal: str | bool | None, window: tuple[int, int] | None) -> tuple[bool, int, int]:
    if causal is True:
        raise ValueError('causal must say how it is aligned: "top_left" or "bottom_right", got True')
    if causal:
        check_choice("causal", causal, ("top_left", "bottom_right"))
    left, right = (-1, -1) if window is None else window
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, int) or side < -1:
            raise ValueError(f"window must be (left, right), each -1 or a number of tokens, got {window!r}")
    return causal != "top_left", left, 0 if causal else right


def _check_starts(name: str, starts: torch.Tensor, batch: int) -> None:
    check_int32(name, starts)
    check_shape(name, starts, (batch + 1,))
    if not starts.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {starts.stride(0)}")


def sage_shape(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None
) -> SageShape:
    """Sizes of a call, checked without reading the device."""
    ragged = cu_seqlens_q is not None
    if ragged != (cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must both be given or both be None, got one")
    dims, layout = (3, "[total_tokens, heads, head_dim]") if ragged else (4, "[batch, seq, heads, head_dim]")
    for name, tensor in (("q", q), ("k", k)):
        check_dtype(name, tensor, _FLOATS)
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have shape {layout}, got {list(tensor.shape)}")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        check_int32("cu_seqlens_q", cu_seqlens_q)
        if cu_seqlens_q.dim() != 1 or cu_seqlens_q.numel() == 0:
            raise ValueError(f"cu_seqlens_q must have shape [batch + 1], got {list(cu_seqlens_q.shape)}")
        batch = cu_seqlens_q.numel() - 1
        _check_starts("cu_seqlens_q", cu_seqlens_q, batch)
        _check_starts("cu_seqlens_k", cu_seqlens_k, batch)
        check_same_device(q=q, k=k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    else:
        batch = q.shape[0]
        if k.shape[0] != batch:
            raise ValueError(f"k must have q's batch {batch}, got {k.shape[0]}")
        check_same_device(q=q, k=k)
    heads, kv_heads, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    if head_dim not in _HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {_HEAD_DIMS}, got {head_dim}")
    if k.shape[-1] != head_dim:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {k.shape[-1]}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads, got {heads}")
    return SageShape(batch, q.shape[-3], k.shape[-3], heads, kv_heads, head_dim, ragged)


def plan_sage(
    q: torch.Tensor,
    k: torch.Tensor,
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
) -> SagePlan:
    """Plans Sage attention for tensors of these shapes; arguments as for `sage_attention`.

    Nothing is read from the device, and of `q` and `k` only the metadata.

    Returns:
        A plan whose `quantize_kv(k, v)` is done once and whose `attend(q, kv)` many times.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> plan = plan_sage(q, k, causal="bottom_right")       # doctest: +SKIP
        >>> kv = plan.quantize_kv(k, v)                         # doctest: +SKIP
        >>> o = plan.attend(q, kv)                              # doctest: +SKIP
    """
    check_choice("qk_dtype", qk_dtype, QK_DTYPES)
    q_groups, k_groups = token_groups("q", q_granularity), token_groups("k", k_granularity)
    bottom_right, left, right = _windows(causal, window)
    shape = sage_shape(q, k, cu_seqlens_q, cu_seqlens_k)
    scale = shape.head_dim**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    if scale < 0 or not math.isfinite(scale):
        raise ValueError(f"sm_scale must not be negative, got {scale}")
    target = active_target(q.device)
    config = choose_config(target)
    return SagePlan(
        target, shape, config.fp8 if qk_dtype == "fp8" else qk_dtype, q_groups, k_groups,
        bottom_right, left, right, smooth_k, smooth_q, scale, config, q.device, cu_seqlens_q, cu_seqlens_k,
    )  # fmt: skip

"""Torch's attention in 16 bits, which `backend="auto"` takes for calls that it serves in less time."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from narrowkv.runtime.targets import Target
from narrowkv.sage.kernels import Mask
from narrowkv.sage.shapes import SageShape

BACKENDS = ("sage", "auto")
# Fewest keys from which on Sage attention takes less time than torch's, without a mask and with a causal one.
_SAGE_PAYS_FROM = {False: 8192, True: 8192}


def why_quantised(target: Target, shape: SageShape, mask: Mask, *, lse: bool, one_dtype: bool) -> str:
    """Why `backend="auto"` quantises a call of this shape; empty where torch's attention is faster.

    Args:
        target: what the call runs on.
        shape: its sizes.
        mask: which keys a query attends to.
        lse: whether the log-sum-exp is wanted.
        one_dtype: whether Q, K and V have one dtype.
    """
    causal = mask.RIGHT == 0
    if target.name != "sm90":
        return f"16-bit attention was not measured on {target.name}"
    if shape.ragged:
        return "torch's 16-bit attention takes no cu_seqlens"
    if mask.LEFT >= 0 or mask.RIGHT > 0 or (causal and shape.q_tokens != shape.k_tokens):
        return "torch's 16-bit attention has no mask but the causal one of as many queries as keys"
    if lse:
        return "torch's 16-bit attention returns no log-sum-exp"
    if not one_dtype:
        return "torch's 16-bit attention takes q, k and v in one dtype only"
    least = _SAGE_PAYS_FROM[causal]
    if shape.k_tokens >= least:
        return f"it takes less time than 16-bit attention from {least} keys on"
    if shape.q_tokens == 0 or shape.k_tokens == 0:
        return "there is nothing to attend to"
    return ""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, sm_scale: float
) -> torch.Tensor:
    """Attention of `[batch, tokens, heads, head_dim]` by torch, cuDNN's where torch has it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    backends = [
        SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]  # fmt: skip
    with sdpa_kernel(backends, set_priority=True):
        o = scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=sm_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return o.transpose(1, 2)

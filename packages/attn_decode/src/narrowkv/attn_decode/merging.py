"""Merging of partial results: checks and the launch."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from narrowkv.attn_decode.kernels import States, _merge_states_kernel
from narrowkv.runtime.checks import (
    OUT_DTYPES,
    check_device,
    check_lse,
    check_out,
    check_out_dtype,
    check_sinks,
    refuse_overlap,
)
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_no_grad,
    check_shape,
)
from narrowkv.runtime.launch import BoundLaunch, LaunchOptions
from narrowkv.runtime.launch.tracing import traceable


@traceable
def merge_states(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    lse_base: str = "e",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines partial attention results over splits, prefixes or ranks, in the order of the states.

    Args:
        o: `[num_states, num_tokens, num_qo_heads, head_dim]`, bf16, fp16 or fp32, any strides but a
            contiguous last dimension: results that are each normalised, without sinks.
        lse: `[num_states, num_tokens, num_qo_heads]` fp32, any strides. -inf marks a state that attended to
            nothing; its `o` is not read.
        sinks: `[num_qo_heads]` fp32, bf16 or fp16, contiguous: a natural logit per head with value 0. It
            enters the denominator of the merged `o`, and so must not be in the partial ones.
        lse_base: "e" where lse are natural logarithms, "2" where their base is 2; of the result, too.
        out: where to write, `[num_tokens, num_qo_heads, head_dim]`, last dimension contiguous.
        out_dtype: dtype of a new output; default o's.
        lse_out: where to write the lse, `[num_tokens, num_qo_heads]` fp32.

    Returns:
        `(o, lse)` of the union: `[num_tokens, num_qo_heads, head_dim]`, and `[num_tokens, num_qo_heads]`
        fp32 without the sink. A row without keys has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: for wrong shapes, dtypes, devices or strides.

    Example:
        >>> states = torch.stack([o_prefix, o_suffix])  # doctest: +SKIP
        >>> o, lse = merge_states(states, torch.stack([lse_prefix, lse_suffix]))  # doctest: +SKIP
    """
    check_dtype("o", o, OUT_DTYPES)
    check_dtype("lse", lse, (torch.float32,))
    check_choice("lse_base", lse_base, ("e", "2"))
    if o.dim() != 4:
        raise ValueError(
            f"o must have shape [num_states, num_tokens, num_qo_heads, head_dim], got {tuple(o.shape)}"
        )
    check_shape("lse", lse, tuple(o.shape[:3]))
    check_last_dim_contiguous("o", o)
    num_states, num_tokens, num_heads, head_dim = o.shape
    if num_states == 0:
        raise ValueError("o must have at least one state, got 0")
    check_device("lse", lse, o.device, "o")
    check_sinks(sinks, num_heads, o.device, like="o")
    check_no_grad(o=o, lse=lse)
    check_out_dtype(out_dtype)
    shape = (num_tokens, num_heads, head_dim)
    if out is not None:
        check_out(out, shape, OUT_DTYPES if out_dtype is None else (out_dtype,), o.device, "o")
    if lse_out is not None:
        check_lse(lse_out, shape[:2], o.device, name="lse_out", like="o", any_strides=True)
    refuse_overlap(out, lse_out, {"o": o, "lse": lse, "sinks": sinks}, "lse_out")
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or o.dtype, device=o.device)
    if lse_out is None:
        lse_out = torch.empty(shape[:2], dtype=torch.float32, device=o.device)
    launch_merge(o, lse, sinks, out, lse_out, lse_base=lse_base)
    return out, lse_out


def launch_merge(
    o: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse_out: torch.Tensor | None,
    *,
    lse_base: str = "e",
    only: int | None = None,
) -> None:
    """Launches the merge of arguments that are known to be right; see `merge_states`.

    Args:
        o, lse, sinks, out, lse_base: as there; lse_out: None is not written.
        only: the one state whose share of the merged `o` is wanted; `o` then holds that state alone.
    """
    num_states, num_tokens, num_heads = lse.shape
    head_dim = o.shape[3]
    begin, end, state = (0, num_states, o.stride(0)) if only is None else (only, only + 1, 0)
    merged_lse = (None, None, None, None) if lse_out is None else (lse_out, 0, *lse_out.stride())
    _bound(head_dim, lse_base)(
        (num_tokens * num_heads,),
        (
            States(o, state, o.stride(1), o.stride(2)),
            States(lse, *lse.stride()),
            States(out, 0, out.stride(0), out.stride(1)),
            States(*merged_lse),
            sinks, num_states, begin, end, num_heads,
        ),
    )  # fmt: skip


@lru_cache
def _bound(head_dim: int, lse_base: str) -> BoundLaunch:
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
        "LSE_UNIT": math.log(2.0) if lse_base == "2" else 1.0,
    }
    return BoundLaunch(_merge_states_kernel, constants, LaunchOptions(num_warps=1, num_stages=1))

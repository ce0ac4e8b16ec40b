"""Checks of a call's options, before anything is launched."""

from __future__ import annotations

import torch

from narrowkv.attn_decode.arguments import OUT_DTYPES, output_tensor
from narrowkv.paged_cache import PagedKVCache, Rope
from narrowkv.paged_cache.append import EXPONENT_RULES, check_new_tokens
from narrowkv.quant.errors import (
    check_descale_float,
    check_dtype,
    check_finite_float,
    check_last_dim_contiguous,
    check_no_overlap,
    check_same_device,
    check_shape,
)
from narrowkv.quant.formats import get_format


def check_soft_cap(value: float) -> float:
    """Refuses a negative or non-finite cap."""
    soft_cap = check_finite_float("logits_soft_cap", value)
    if soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be 0 (off) or positive, got {value}")
    return soft_cap


def check_window(name: str, value: int) -> None:
    """Refuses what is no number of tokens."""
    if not isinstance(value, int) or value < -1:
        raise ValueError(f"{name} must be -1 (no window) or a number of tokens, got {value!r}")


def check_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Refuses sinks of another shape, dtype or device."""
    if sinks is not None:
        check_shape("sinks", sinks, (q.shape[1],))
        check_last_dim_contiguous("sinks", sinks)
        check_dtype("sinks", sinks, OUT_DTYPES)
        check_same_device(q=q, sinks=sinks)


def fold_q_descale(
    q: torch.Tensor, q_descale: float | torch.Tensor, scale: float
) -> tuple[float, torch.Tensor | None]:
    """The softmax scale with a float descale in it, and a descale that is on the device."""
    if isinstance(q_descale, torch.Tensor):
        check_dtype("q_descale", q_descale, (torch.float32,))
        check_shape("q_descale", q_descale, (1,))
        check_same_device(q=q, q_descale=q_descale)
    else:
        check_descale_float("q_descale", q_descale)
    if get_format(q.dtype).kind != "fp8":
        if isinstance(q_descale, torch.Tensor) or q_descale != 1.0:
            raise ValueError(f"q_descale must be 1.0 for a query in {q.dtype}, got {q_descale}")
        return scale, None
    return (scale, q_descale) if isinstance(q_descale, torch.Tensor) else (scale * q_descale, None)


def output_for(q: torch.Tensor, out: torch.Tensor | torch.dtype | None, cache: PagedKVCache) -> torch.Tensor:
    """The output tensor: the caller's, or a new one."""
    if isinstance(out, torch.Tensor):
        return output_tensor(q, out, None, cache)
    default = q.dtype if get_format(q.dtype).kind == "float" else torch.bfloat16
    return output_tensor(q, None, default if out is None else out, cache)


def check_chunk(
    q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, cache: PagedKVCache, rope: Rope | None
) -> None:
    """Refuses new tokens that do not belong to the queries or cannot be stored."""
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        check_dtype(name, new, (q.dtype,))
        check_shape(name, new, (q.shape[0], cache.num_kv_heads, cache.head_dim))
    check_same_device(q=q, k_new=k_new)
    check_new_tokens(cache, k_new, v_new, rope, EXPONENT_RULES[0], validate=False)
    check_no_overlap("cache.k", cache.k, k_new=k_new, v_new=v_new, q=q)
    check_no_overlap("cache.v", cache.v, k_new=k_new, v_new=v_new, q=q)

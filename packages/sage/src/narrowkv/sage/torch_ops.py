"""`torch.ops.narrowkv.sage_attention`: Sage attention as torch.compile, export and fake tensors see it.

One operator quantises and attends. The tensors between the two steps are in its own memory.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.runtime.launch.tracing import OPTIONS_SCHEMA, spell, spelled, traces
from narrowkv.sage.api import sage_attention

_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, {OPTIONS_SCHEMA}"


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, *options: Any, **outputs: Any,
) -> Any:  # fmt: skip
    given = spelled(*options)
    left, right = given.pop("window_left"), given.pop("window_right")
    return sage_attention(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        window=None if left is None else (left, right), **given, **outputs,
    )  # fmt: skip


@torch.library.custom_op(
    "narrowkv::sage_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def _sage_op(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _attend(*args, return_lse=True)
    return o, lse


@_sage_op.register_fake
def _sage_fake(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(
    "narrowkv::sage_attention_out",
    mutates_args=("out", "lse"),
    schema=f"({_INPUTS}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
)
def _sage_out_op(*args: Any) -> None:
    *inputs, out, lse = args
    _attend(*inputs, out=out, lse=lse, return_lse=lse is not None)


@_sage_out_op.register_fake
def _sage_out_fake(*args: object) -> None:
    """Writes into its outputs, and returns nothing."""


@traces("sage_attention")
def traced_sage(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sage_attention` through its operators, which check the arguments when they run."""
    left, right = (None, None) if window is None else window
    spec = spell(window_left=left, window_right=right, **options)
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k, *spec)
    # Without an lse `backend="auto"` may take an attention that has none.
    if out is None and lse is None and (return_lse or options.get("backend") != "auto"):
        o, sums = torch.ops.narrowkv.sage_attention(*inputs)
        return (o, sums) if return_lse else o
    if out is None:
        out = q.new_empty(q.shape)
    if lse is None and return_lse:
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    torch.ops.narrowkv.sage_attention_out(*inputs, out, lse)
    return (out, lse) if return_lse and lse is not None else out

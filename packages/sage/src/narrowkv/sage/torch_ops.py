"""`torch.ops.narrowkv.sage_attention`: Sage attention as torch.compile, export and fake tensors see it.

One operator quantises and attends. The tensors between the two steps are in its own memory.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.runtime.launch.tracing import OPTIONS_SCHEMA, as_bytes, spell, spelled, traces
from narrowkv.sage.api import sage_attention
from narrowkv.sage.prequantized import SageOperands, sage_attention_quantized

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


_OPERANDS = ("q", "k", "v", "q_descale", "k_descale", "v_descale")
_QUANTIZED = "".join(f"Tensor {name}, " for name in _OPERANDS) + OPTIONS_SCHEMA


@torch.library.custom_op(
    "narrowkv::sage_attention_quantized", mutates_args=(), schema=f"({_QUANTIZED}) -> (Tensor, Tensor)"
)
def _quantized_op(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = spelled(*args[6:])
    left, right = given.pop("window_left"), given.pop("window_right")
    dtypes = [given.pop(f"{name}_dtype") for name in _OPERANDS[:3]]
    tensors = [x.view(dtype) for x, dtype in zip(args, dtypes, strict=False)]
    names = ("q_len", "k_len", "layout", "column_major_v")
    operands = SageOperands(*tensors, *args[3:6], **{name: given.pop(name) for name in names})
    o, lse = sage_attention_quantized(
        operands, window=None if left is None else (left, right), **given, return_lse=True
    )
    return o.contiguous(), lse.contiguous()


@_quantized_op.register_fake
def _quantized_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = spelled(*args[6:])
    q, v = args[0], args[2]
    channels = v.shape[2 if given["column_major_v"] else 3]
    tokens = 1 if given["layout"] == "BSHD" else 2
    sizes = list(q.shape[:3])
    sizes[tokens] = given["q_len"] or sizes[tokens]
    return q.new_empty((*sizes, channels), dtype=given["out_dtype"]), q.new_empty(sizes, dtype=torch.float32)


@traces("sage_attention_quantized")
def traced_quantized(
    operands: SageOperands,
    *,
    window: tuple[int, int] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sage_attention_quantized` through its operator, which checks the arguments when it runs."""
    left, right = (None, None) if window is None else window
    tensors = [getattr(operands, name) for name in _OPERANDS]
    spec = spell(
        window_left=left, window_right=right, out_dtype=out_dtype, q_len=operands.q_len,
        k_len=operands.k_len, layout=operands.layout, column_major_v=operands.column_major_v,
        q_dtype=operands.q.dtype, k_dtype=operands.k.dtype, v_dtype=operands.v.dtype, **options,
    )  # fmt: skip
    o, lse = torch.ops.narrowkv.sage_attention_quantized(*map(as_bytes, tensors), *spec)
    return (o, lse) if return_lse else o

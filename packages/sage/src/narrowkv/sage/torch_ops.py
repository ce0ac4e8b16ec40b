"""`torch.ops.narrowkv.sage_attention`: Sage attention as torch.compile, export and fake tensors see it.

One operator quantises and attends. The tensors between the two steps are in its own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowkv.runtime.launch.tracing import Results, Tensors, as_bytes, register, traces
from narrowkv.sage.api import sage_attention
from narrowkv.sage.prequantized import SageOperands, sage_attention_quantized


def _window(given: dict[str, Any]) -> tuple[int, int] | None:
    """The window of options that `_window_options` made, which are taken out of `given`."""
    left, right = given.pop("window_left"), given.pop("window_right")
    return None if left is None else (left, right)


def _window_options(window: tuple[int, int] | None) -> dict[str, int | None]:
    left, right = (None, None) if window is None else window
    return {"window_left": left, "window_right": right}


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, given: dict[str, Any], **outputs: Any,
) -> Any:  # fmt: skip
    window = _window(given)
    return sage_attention(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, window=window, **given, **outputs
    )


def _attended(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    q = tensors[0]
    assert q is not None
    return (q.shape, q.dtype), (q.shape[:-1], torch.float32)


_call_sage = register(
    "sage_attention", "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k", _attend,
    _attended,
)  # fmt: skip


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
) -> Any:
    """`sage_attention` through its operators, which check the arguments when they run."""
    return _call_sage(
        (q, k, v, cu_seqlens_q, cu_seqlens_k), {**_window_options(window), **options}, out, lse,
        return_lse=return_lse,
        # Without an lse `backend="auto"` may take an attention that has none.
        allocates=return_lse or options.get("backend") != "auto",
    )  # fmt: skip


_OPERANDS = ("q", "k", "v", "q_descale", "k_descale", "v_descale")


def _attend_quantized(*args: Any, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    *tensors, given = args
    window = _window(given)
    dtypes = [given.pop(f"{name}_dtype") for name in _OPERANDS[:3]]
    codes = [x.view(dtype) for x, dtype in zip(tensors, dtypes, strict=False)]
    names = ("q_len", "k_len", "layout", "column_major_v")
    operands = SageOperands(*codes, *tensors[3:], **{name: given.pop(name) for name in names})
    o, lse = sage_attention_quantized(operands, window=window, **given, return_lse=return_lse)
    return o.contiguous(), lse.contiguous()


def _attended_quantized(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    q, _, v = tensors[:3]
    assert q is not None
    assert v is not None
    channels = v.shape[2 if options["column_major_v"] else 3]
    tokens = 1 if options["layout"] == "BSHD" else 2
    sizes = list(q.shape[:3])
    sizes[tokens] = options["q_len"] or sizes[tokens]
    return ((*sizes, channels), options["out_dtype"]), (sizes, torch.float32)


_call_quantized = register(
    "sage_attention_quantized", ", ".join(f"Tensor {name}" for name in _OPERANDS), _attend_quantized,
    _attended_quantized, into=False,
)  # fmt: skip


@traces("sage_attention_quantized")
def traced_quantized(
    operands: SageOperands,
    *,
    window: tuple[int, int] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    **options: object,
) -> Any:
    """`sage_attention_quantized` through its operator, which checks the arguments when it runs."""
    spelled = {
        **_window_options(window), "out_dtype": out_dtype, "q_len": operands.q_len, "k_len": operands.k_len,
        "layout": operands.layout, "column_major_v": operands.column_major_v, "q_dtype": operands.q.dtype,
        "k_dtype": operands.k.dtype, "v_dtype": operands.v.dtype, **options,
    }  # fmt: skip
    tensors = [as_bytes(getattr(operands, name)) for name in _OPERANDS]
    return _call_quantized(tensors, spelled, return_lse=return_lse)

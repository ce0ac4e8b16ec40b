"""`torch.ops.narrowkv.sage_attention`: Sage attention as torch.compile, export and fake tensors see it.

One operator quantises and attends. The tensors between the two steps are in its own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowkv.runtime.launch.tracing import Results, Tensors, as_bytes, register, traces
from narrowkv.sage.api import sage_attention
from narrowkv.sage.operation import SAGE
from narrowkv.sage.prequantized import SageOperands, sage_attention_quantized

_WINDOW = ("window_left", "window_right")
_BLOCKS = ("q_block", "k_block")


def _pair(given: dict[str, Any], first: str, second: str) -> tuple[int, int] | None:
    """The pair that `_spelled_pair` wrote under these names, which are taken out of `given`."""
    left, right = given.pop(first), given.pop(second)
    return None if left is None else (left, right)


def _spelled_pair(pair: tuple[int, int] | None, first: str, second: str) -> dict[str, int | None]:
    left, right = (None, None) if pair is None else pair
    return {first: left, second: right}


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, block_mask: torch.Tensor | None, given: dict[str, Any],
    **outputs: Any,
) -> Any:  # fmt: skip
    window, block_sizes = _pair(given, *_WINDOW), _pair(given, *_BLOCKS)
    return sage_attention(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, window=window, block_mask=block_mask,
        block_sizes=block_sizes, **given, **outputs,
    )  # fmt: skip


def _attended(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    q = tensors[0]
    assert q is not None
    return (q.shape, q.dtype), (q.shape[:-1], torch.float32)


_call_sage = register(
    "sage_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_mask", _attend,
    _attended,
)  # fmt: skip


@traces("sage_attention")
def traced_sage(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: tuple[int, int] | None = None,
    block_sizes: tuple[int, int] | None = None, return_lse: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """`sage_attention` through its operators, which check the arguments when they run."""
    SAGE.check_keywords(options)
    tensors = [options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_mask")]
    out, lse = options.pop("out", None), options.pop("lse", None)
    spelled = {**_spelled_pair(window, *_WINDOW), **_spelled_pair(block_sizes, *_BLOCKS), **options}
    return _call_sage(
        (q, k, v, *tensors), spelled, out, lse, return_lse=return_lse,
        # Without an lse `backend="auto"` may take an attention that has none.
        allocates=return_lse or options.get("backend") != "auto",
    )  # fmt: skip


_OPERANDS = ("q", "k", "v", "q_descale", "k_descale", "v_descale")


def _attend_quantized(*args: Any, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    *tensors, block_mask, given = args
    window, block_sizes = _pair(given, *_WINDOW), _pair(given, *_BLOCKS)
    dtypes = [given.pop(f"{name}_dtype") for name in _OPERANDS[:3]]
    codes = [x.view(dtype) for x, dtype in zip(tensors, dtypes, strict=False)]
    names = ("q_len", "k_len", "layout", "column_major_v")
    operands = SageOperands(*codes, *tensors[3:], **{name: given.pop(name) for name in names})
    o, lse = sage_attention_quantized(
        operands, window=window, block_mask=block_mask, block_sizes=block_sizes, **given,
        return_lse=return_lse,
    )  # fmt: skip
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
    "sage_attention_quantized",
    ", ".join((*(f"Tensor {name}" for name in _OPERANDS), "Tensor? block_mask")), _attend_quantized,
    _attended_quantized, into=False,
)  # fmt: skip


@traces("sage_attention_quantized")
def traced_quantized(
    operands: SageOperands,
    *,
    window: tuple[int, int] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    block_mask: torch.Tensor | None = None,
    block_sizes: tuple[int, int] | None = None,
    **options: object,
) -> Any:
    """`sage_attention_quantized` through its operator, which checks the arguments when it runs."""
    spelled = {
        **_spelled_pair(window, *_WINDOW), **_spelled_pair(block_sizes, *_BLOCKS), "out_dtype": out_dtype,
        "q_len": operands.q_len,
        "k_len": operands.k_len, "layout": operands.layout, "column_major_v": operands.column_major_v,
        "q_dtype": operands.q.dtype, "k_dtype": operands.k.dtype, "v_dtype": operands.v.dtype, **options,
    }  # fmt: skip
    tensors = [*(as_bytes(getattr(operands, name)) for name in _OPERANDS), block_mask]
    return _call_quantized(tensors, spelled, return_lse=return_lse)

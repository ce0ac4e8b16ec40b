"""Checks of the arguments that attention operations have in common: results, sinks, caps, windows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from narrowkv.runtime.errors import (
    UnsupportedError,
    check_descale_tensor,
    check_dtype,
    check_finite_float,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_shape,
    check_window,
)
from narrowkv.runtime.launch.tracing import wide_dtype
from narrowkv.runtime.targets import Target

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_OUT_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)  # with `out_scale`


def check_device(name: str, tensor: torch.Tensor, device: torch.device, like: str = "q") -> None:
    """Checks that a tensor is on a device.

    Args:
        name: of the tensor.
        tensor: the tensor.
        device: where it must be.
        like: what else is there, for the message.

    Raises:
        ValueError: it is on another device.
    """
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like {like}, got {tensor.device}")


def check_soft_cap(value: float) -> float:
    """Checks the cap of logits, 0 for none, and returns it.

    Raises:
        TypeError, ValueError: it is no number, not finite or negative.
    """
    soft_cap = check_finite_float("logits_soft_cap", value)
    if soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be 0 (off) or positive, got {value}")
    return soft_cap


def check_windows(left: int, right: int = -1, *, causal: bool = True) -> tuple[int, int]:
    """Checks how many keys before and after itself a row attends to, -1 for all.

    Returns:
        Both numbers; the second is 0 if the mask is causal.

    Raises:
        TypeError, ValueError: naming the side.
    """
    left = check_window("window_left", left)
    if causal and right > 0:
        raise ValueError(f"window_right must be -1 or 0 with causal=True, got {right}")
    return left, 0 if causal else check_window("window_right", right)


def check_sinks(
    sinks: torch.Tensor | None, num_heads: int, device: torch.device, *, name: str = "sinks",
    dtypes: Collection[torch.dtype] = OUT_DTYPES, like: str = "q",
) -> None:  # fmt: skip
    """Checks the logit that each head adds to its denominator; None is no sink.

    Raises:
        TypeError, ValueError: naming the tensor, what was expected and what came.
    """
    if sinks is None:
        return
    check_dtype(name, sinks, dtypes)
    check_shape(name, sinks, (num_heads,))
    check_last_dim_contiguous(name, sinks)
    check_device(name, sinks, device, like)
    check_no_grad(**{name: sinks})


def check_out_dtype(
    out_dtype: torch.dtype | None, dtypes: Collection[torch.dtype] = OUT_DTYPES
) -> None:  # fmt: skip
    """Checks the dtype that a new output is to have; None leaves it to the operation.

    Raises:
        TypeError, ValueError: it is no dtype, or none of `dtypes`.
    """
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {type(out_dtype).__name__}")
    if out_dtype is not None and out_dtype not in dtypes:
        raise ValueError(f"out_dtype must be one of {tuple(dtypes)}, got {out_dtype}")


def check_out(
    out: torch.Tensor, shape: tuple[int, ...], dtypes: Collection[torch.dtype], device: torch.device,
    like: str = "q",
) -> None:  # fmt: skip
    """Checks where a caller wants the output.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    check_dtype("out", out, dtypes)
    check_shape("out", out, shape)
    check_last_dim_contiguous("out", out)
    check_device("out", out, device, like)
    check_no_grad(out=out)


def check_lse(
    lse: torch.Tensor, shape: tuple[int, ...], device: torch.device, *, name: str = "lse", like: str = "q",
    any_strides: bool = False,
) -> None:  # fmt: skip
    """Checks where a caller wants the log-sum-exp.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    check_dtype(name, lse, torch.float32)
    check_shape(name, lse, shape)
    if not any_strides:
        check_last_dim_contiguous(name, lse)
    check_device(name, lse, device, like)
    check_no_grad(**{name: lse})


def refuse_overlap(
    out: torch.Tensor | None, lse: torch.Tensor | None, inputs: Mapping[str, Any], lse_name: str = "lse"
) -> None:
    """Refuses results that share memory with themselves, each other or an input.

    Args:
        out, lse: the results that the caller gave.
        inputs: what the call reads, by the names of messages; what is no tensor is skipped.
        lse_name: of `lse`, for messages.

    Raises:
        ValueError: naming both.
    """
    if out is not None:
        check_no_overlap("out", out, **inputs, **{lse_name: lse})
    if lse is not None:
        check_no_overlap(lse_name, lse, **inputs)


def check_results(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, sinks: torch.Tensor | None,
    out_dtype: torch.dtype | None, out_scale: torch.Tensor | None, inputs: Mapping[str, Any], *,
    head_dim: int, target: Target,
) -> torch.dtype:  # fmt: skip
    """Checks the results that a caller gave, and sinks, of an operation whose output is like q.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`.
        out, lse, sinks, out_dtype, out_scale: as the caller gave them.
        inputs: what the call reads, by the names of messages.
        head_dim: channels of the output, which are V's.
        target: what writes the output.

    Returns:
        The dtype of the output.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        UnsupportedError: the output is E4M3 FNUZ, and the target one of NVIDIA's, which have no such type.
    """
    check_sinks(sinks, q.shape[1], q.device)
    dtypes = OUT_DTYPES if out_scale is None else FP8_OUT_DTYPES
    check_out_dtype(out_dtype, dtypes)
    if out is not None:
        check_out(out, (*q.shape[:2], head_dim), dtypes if out_dtype is None else (out_dtype,), q.device)
    if out_scale is not None:
        check_descale_tensor("out_scale", out_scale)
        check_shape("out_scale", out_scale, (1,))
        check_device("out_scale", out_scale, q.device)
        written = out_dtype if out is None else out.dtype
        if written is None:
            raise ValueError(f"out_dtype must be one of {dtypes} with out_scale, or out must be given")
        if written == torch.float8_e4m3fnuz and target.vendor == "nvidia":
            raise UnsupportedError("out in float8_e4m3fnuz is for AMD: NVIDIA's GPUs have float8_e4m3fn")
    if lse is not None:
        check_lse(lse, tuple(q.shape[:2]), q.device)
    refuse_overlap(out, lse, inputs)
    return out_dtype or wide_dtype(q) if out is None else out.dtype

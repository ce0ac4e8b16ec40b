"""Rounding to a stored format and reading back: the only place where torch tensors become FP8.

Example:
    >>> import torch
    >>> cast_fp8(torch.tensor([1.06, -1e9, -0.0]), "fp8_e4m3fn").view(torch.uint8)
    tensor([ 56, 254,   0], dtype=torch.uint8)
    >>> decode(torch.tensor([0x38], dtype=torch.uint8), "fp8_e4m3fn")
    tensor([1.])
"""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import UnsupportedError, check_dtype, check_no_grad

from .formats import FP8_FORMATS, Format, check_storage, get_format
from .fp4 import decode_fp4, pack_fp4, round_fp4, unpack_fp4
from .int_formats import pack_int4, round_int4, round_int8, unpack_int4

__all__ = ["cast_fp8", "decode", "encode", "get_narrow_format", "round_to_format", "to_fp32"]

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def to_fp32(name: str, x: torch.Tensor) -> torch.Tensor:
    """Checks that `x` can be quantised, and widens it to fp32 (exact).

    Raises:
        TypeError: `x` is not an fp32, bf16 or fp16 tensor. fp64 is refused: narrowing it twice would round
            twice.
        ValueError: `x` requires grad.
    """
    check_dtype(name, x, _INPUT_DTYPES)
    check_no_grad(**{name: x})
    return x.float()


def get_narrow_format(format: str | torch.dtype | Format) -> Format:
    """The format, if it is one that needs a descale (FP8, FP4, INT8, INT4).

    Raises:
        TypeError: `format` is not a name, a dtype or a `Format`.
        ValueError: the format is unknown.
        UnsupportedError: the format is a 16-bit one, which is stored as it is.
    """
    fmt = get_format(format)
    if fmt.kind == "float":
        raise UnsupportedError(f"format must be FP8, FP4, INT8 or INT4 to be quantised to, got {fmt.name}")
    return fmt


def cast_fp8(x: torch.Tensor, format: str | torch.dtype | Format) -> torch.Tensor:
    """Casts to FP8: nearest, ties to even, saturating (Inf too), NaN to NaN, and no negative zero.

    Byte 0x80 is -0.0 in E4M3FN and E5M2, and NaN in E4M3FNUZ. It is never written for a number: what rounds
    to zero is stored as 0x00 whatever its sign. In E4M3FNUZ it is written for NaN, which has no other code
    there.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.
        format: an FP8 format.

    Returns:
        The format's float8 dtype, the shape of `x`.

    Raises:
        TypeError: the dtype of `x` is another one.
        ValueError: `format` is not an FP8 format, or `x` requires grad.
    """
    fmt = get_format(format)
    if fmt.kind != "fp8":
        raise ValueError(f"format must be one of {', '.join(FP8_FORMATS)}; got {fmt.name}")
    # clamp keeps NaN, and some casts do not saturate
    widened = to_fp32("x", x).clamp(-fmt.max_value, fmt.max_value)
    stored = widened.to(fmt.storage_dtype)
    if 0x80 not in fmt.nan_codes:
        byte = stored.view(torch.uint8)
        byte.masked_fill_(byte == 0x80, 0)
    return stored


def round_to_format(x: torch.Tensor, format: str | torch.dtype | Format) -> torch.Tensor:
    """The fp32 values that `x` has once it is stored: rounded, saturated, not packed.

    Args:
        x: fp32, any shape.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        fp32 of that shape. NaN stays NaN in FP8 and becomes 0 in the formats that lack it.

    Raises:
        TypeError: `x` is not an fp32 tensor.
        UnsupportedError: `format` is a 16-bit one.
    """
    fmt = get_narrow_format(format)
    check_dtype("x", x, torch.float32)
    if fmt.kind == "fp8":
        return cast_fp8(x, fmt).float()
    if fmt.kind == "fp4":
        return decode_fp4(round_fp4(x))
    return (round_int8(x) if fmt.bits == 8 else round_int4(x)).float()


def encode(x: torch.Tensor, format: str | torch.dtype | Format) -> torch.Tensor:
    """Stores `x` as it is (descale 1): rounded to nearest even, saturated, packed where the format is.

    Args:
        x: fp32 `[..., n]`; n even for FP4 and INT4.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        The format's storage dtype, `[..., n]`, or uint8 `[..., n / 2]` for the packed formats.

    Raises:
        TypeError: `x` is not an fp32 tensor.
        ValueError: n is odd for a packed format.
        UnsupportedError: `format` is a 16-bit one.
    """
    fmt = get_narrow_format(format)
    check_dtype("x", x, torch.float32)
    if fmt.kind == "fp8":
        return cast_fp8(x, fmt)
    if fmt.kind == "fp4":
        return pack_fp4(round_fp4(x))
    return round_int8(x) if fmt.bits == 8 else pack_int4(round_int4(x))


def decode(stored: torch.Tensor, format: str | torch.dtype | Format | None = None) -> torch.Tensor:
    """Reads storage back as fp32, without a descale. Exact for every format.

    Args:
        stored: the format's storage dtype, or uint8 for a named FP8 format; `[..., n]`, packed formats `[...,
            n / 2]`.
        format: any format; None takes it from the dtype, which uint8 does not tell.

    Returns:
        fp32 `[..., n]`.

    Raises:
        TypeError: the dtype is not the format's.
        ValueError: `format` is None and the dtype does not tell it.
    """
    tensor = check_storage("stored", stored, format)
    fmt = get_format(tensor.dtype if format is None else format)
    if fmt.kind == "fp4":
        return decode_fp4(unpack_fp4(tensor))
    if fmt.name == "int4":
        return unpack_int4(tensor).float()
    return tensor.float()

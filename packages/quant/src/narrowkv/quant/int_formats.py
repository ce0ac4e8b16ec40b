"""INT8 and INT4: symmetric rounding, and packing INT4 two to a byte.

Symmetric means that -128 and -8 are never written: the range is the same on both sides, and a sign flip is
exact.

Example:
    >>> import torch
    >>> round_int8(torch.tensor([0.5, 1.5, -200.0]))
    tensor([   0,    2, -127], dtype=torch.int8)
    >>> unpack_int4(pack_int4(torch.tensor([-7, 3], dtype=torch.int8)))
    tensor([-7,  3], dtype=torch.int8)
"""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import check_dtype

from .fp4 import pack_nibbles, unpack_nibbles

__all__ = ["pack_int4", "round_int4", "round_int8", "unpack_int4"]


def _round_symmetric(x: torch.Tensor, limit: int) -> torch.Tensor:
    check_dtype("x", x, torch.float32)
    return torch.nan_to_num(x.round().clamp(-limit, limit), nan=0.0).to(torch.int8)


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 numbers to int8: nearest, ties to even, saturating at +-127; NaN gives 0.

    Raises:
        TypeError: `x` is not an fp32 tensor.
    """
    return _round_symmetric(x, 127)


def round_int4(x: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 numbers to INT4 in int8 storage: nearest, ties to even, saturating at +-7; NaN gives 0.

    Raises:
        TypeError: `x` is not an fp32 tensor.
    """
    return _round_symmetric(x, 7)


def pack_int4(x: torch.Tensor) -> torch.Tensor:
    """Packs int8 numbers in -8..7 as two's-complement nibbles: element 2i in the low nibble of byte i.

    Args:
        x: int8 `[..., n]`, n even.

    Returns:
        uint8 `[..., n / 2]`.

    Raises:
        TypeError: `x` is not an int8 tensor.
        ValueError: n is odd.
    """
    check_dtype("x", x, torch.int8)
    return pack_nibbles(x.contiguous().view(torch.uint8))


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Undoes `pack_int4`.

    Args:
        packed: uint8 `[..., n]`.

    Returns:
        int8 `[..., 2 * n]`, each -8..7.

    Raises:
        TypeError: `packed` is not a uint8 tensor.
    """
    nibble = unpack_nibbles(packed).view(torch.int8)
    return (nibble ^ 8) - 8

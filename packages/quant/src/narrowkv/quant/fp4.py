"""FP4 E2M1: rounding from fp32, the sixteen values, and packing two to a byte.

Bits are sign, two of exponent (bias 1), one of mantissa: the magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6. There
is no Inf and no NaN. Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.

Example:
    >>> import torch
    >>> packed = pack_fp4(round_fp4(torch.tensor([0.7, -6.5])))
    >>> packed
    tensor([241], dtype=torch.uint8)
    >>> decode_fp4(unpack_fp4(packed))
    tensor([ 0.5000, -6.0000])
"""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import check_choice, check_dtype

__all__ = [
    "FP4_TIES",
    "FP4_VALUES",
    "decode_fp4",
    "pack_fp4",
    "pack_nibbles",
    "round_fp4",
    "unpack_fp4",
    "unpack_nibbles",
]

FP4_VALUES: tuple[float, ...] = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)
"""The value of each of the sixteen codes."""

# A magnitude has code i when it is above i of these. Each is a midpoint of two neighbours where the tie goes
# down to the even code, and the fp32 number just below the midpoint where the tie goes up to it.
_ULP = 2.0**-23
_BOUNDARIES = (0.25, 0.75 - _ULP / 2, 1.25, 1.75 - _ULP, 2.5, 3.5 - 2 * _ULP, 5.0)
FP4_TIES = ("even", "down", "away")
"""How halfway numbers are rounded: to the even code, towards minus infinity, or away from zero."""
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def round_fp4(x: torch.Tensor, ties: str = "even") -> torch.Tensor:
    """Rounds fp32 numbers to E2M1 codes: nearest, saturating at 6.

    Args:
        x: fp32, any shape.
        ties: one of `FP4_TIES`.

    Returns:
        uint8 codes 0..15 of that shape. What rounds to zero has code 0 whatever its sign, except that "away"
        keeps the sign (code 8); NaN, which the format lacks, gives code 0: the group's scale must carry it.

    Raises:
        TypeError: `x` is not an fp32 tensor.
        ValueError: `ties` is unknown.
    """
    check_dtype("x", x, torch.float32)
    check_choice("ties", ties, FP4_TIES)
    magnitude, negative = x.abs(), x < 0
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for even, midpoint in zip(_BOUNDARIES, _MIDPOINTS, strict=True):
        # A third of the time of torch.bucketize; NaN is above none.
        if ties == "even":
            code += magnitude > even
        else:
            upwards = negative if ties == "down" else torch.ones_like(negative)
            code += (magnitude > midpoint) | ((magnitude == midpoint) & upwards)
    signed = negative if ties == "away" else negative & (code > 0)
    return code + 8 * signed.to(torch.uint8)


def decode_fp4(code: torch.Tensor) -> torch.Tensor:
    """The fp32 values of E2M1 codes.

    Args:
        code: uint8 codes, any shape; only the low four bits count.

    Returns:
        fp32 of that shape; code 8 is -0.0.

    Raises:
        TypeError: `code` is not a uint8 tensor.
    """
    check_dtype("code", code, torch.uint8)
    table = torch.tensor(FP4_VALUES, dtype=torch.float32, device=code.device)
    # With 32-bit indices, which `table[...]` would widen: a fifth of its time.
    return table.index_select(0, (code & 0xF).flatten().int()).view(code.shape)


def pack_nibbles(code: torch.Tensor) -> torch.Tensor:
    """Packs the low four bits of neighbours along the last dimension: element 2i in the low nibble of byte i.

    Args:
        code: uint8 `[..., n]`, n even.

    Returns:
        uint8 `[..., n / 2]`.

    Raises:
        TypeError: `code` is not a uint8 tensor.
        ValueError: n is odd, or `code` is a scalar.
    """
    check_dtype("code", code, torch.uint8)
    if code.dim() == 0 or code.shape[-1] % 2:
        raise ValueError(f"code must have an even last dimension to be packed, got shape {list(code.shape)}")
    return (code[..., 0::2] & 0xF) | (code[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undoes `pack_nibbles`.

    Args:
        packed: uint8 `[..., n]`.

    Returns:
        uint8 `[..., 2 * n]`, each 0..15.

    Raises:
        TypeError: `packed` is not a uint8 tensor.
        ValueError: `packed` is a scalar.
    """
    check_dtype("packed", packed, torch.uint8)
    if packed.dim() == 0:
        raise ValueError("packed must have at least one dimension, got a scalar tensor")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_fp4(code: torch.Tensor) -> torch.Tensor:
    """Packs E2M1 codes `[..., n]` (uint8, n even) into bytes `[..., n / 2]`; see `pack_nibbles`."""
    return pack_nibbles(code)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks bytes `[..., n]` (uint8) into E2M1 codes `[..., 2 * n]`; see `unpack_nibbles`."""
    return unpack_nibbles(packed)

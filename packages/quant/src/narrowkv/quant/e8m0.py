"""E8M0 scales: one byte that encodes a power of two, and the rules that choose it.

The value of byte b is 2^(b - 127): 0x00 is 2^-127 (not zero), 0x7F is 1.0, 0xFF is NaN (OCP Microscaling
Formats (MX) Specification 1.0, section 5.4). All arithmetic here is on exponents and bits, so it is exact.

Example:
    >>> import torch
    >>> e8m0_decode(torch.tensor([126, 127, 130], dtype=torch.uint8))
    tensor([0.5000, 1.0000, 8.0000])
    >>> e8m0_encode(torch.tensor([0.5, 1.0, 8.0]))
    tensor([126, 127, 130], dtype=torch.uint8)
"""

from __future__ import annotations

import math

import torch

from narrowkv.runtime.errors import check_dtype

from .formats import Format, get_format
from .rounding import round_to_format

__all__ = [
    "E8M0_BIAS",
    "E8M0_NAN",
    "ceil_exponent",
    "dsv4_tile_scale",
    "e8m0_decode",
    "e8m0_encode",
    "e8m0_from_exponent",
    "floor_exponent",
    "mse_exponent",
    "sglang_exponent",
    "ultraquant_exponent",
]

E8M0_BIAS = 127
E8M0_NAN = 0xFF
_SMALLEST = 0x00400000  # fp32 bits of 2^-127, which is subnormal there
ULTRAQUANT_FACTOR = 0.156  # of the largest magnitude of a group, before it is rounded to a power of two
ABOVE_SQRT2 = 0x3504F4  # the mantissa of the smallest fp32 number above sqrt(2)


def e8m0_decode(byte: torch.Tensor) -> torch.Tensor:
    """Decodes E8M0 bytes.

    Args:
        byte: uint8, any shape.

    Returns:
        fp32 of that shape: 2^(byte - 127), or NaN for 0xFF.

    Raises:
        TypeError: `byte` is not a uint8 tensor.
    """
    check_dtype("byte", byte, torch.uint8)
    exponent = byte.to(torch.int32)
    bits = torch.where(exponent == 0, _SMALLEST, exponent << 23)
    value = bits.view(torch.float32)
    return value.masked_fill(exponent == E8M0_NAN, math.nan)


def e8m0_encode(x_pow2: torch.Tensor) -> torch.Tensor:
    """Encodes powers of two as E8M0 bytes.

    Args:
        x_pow2: fp32, any shape, powers of two. Any other positive value is encoded as the power of two below
            it.

    Returns:
        uint8 of that shape. Below 2^-127 (zero included) gives 0x00; negative, NaN and Inf give 0xFF (NaN).

    Raises:
        TypeError: `x_pow2` is not an fp32 tensor.
    """
    check_dtype("x_pow2", x_pow2, torch.float32)
    bits = x_pow2.contiguous().view(torch.int32)
    byte = (bits >> 23) & 0xFF  # the exponent field; subnormals of fp32 and zero have 0, which is 2^-127 here
    invalid = ~(x_pow2 >= 0) | torch.isinf(x_pow2)
    return byte.masked_fill(invalid, E8M0_NAN).to(torch.uint8)


def e8m0_from_exponent(exponent: torch.Tensor) -> torch.Tensor:
    """The E8M0 byte of 2^exponent, for integer exponents, clamped to the range [-127, 127].

    Args:
        exponent: integer tensor, any shape.

    Returns:
        uint8 of that shape.
    """
    return (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)


def _pow2(exponent: torch.Tensor) -> torch.Tensor:
    return e8m0_decode(e8m0_from_exponent(exponent))  # exact, which exp2 need not be


def _frexp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mantissa, exponent = torch.frexp(x)
    return mantissa, exponent


def largest_exponent(format: str | torch.dtype | Format) -> int:
    """The largest exponent of a scale with which every code of a format stays finite in fp32."""
    _, top = math.frexp(get_format(format).max_value)
    return 128 - top


def floor_exponent(amax: torch.Tensor, format: str | torch.dtype | Format) -> torch.Tensor:
    """The OCP MX rule: floor(log2(amax)) minus the exponent of the format's largest value.

    The largest element may saturate.

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3.

    Args:
        amax: fp32 largest magnitudes, finite and >= 0, any shape.
        format: the element format.

    Returns:
        int32 exponents of the same shape, not clamped; 0 where amax is 0.
    """
    check_dtype("amax", amax, torch.float32)
    _, top = math.frexp(get_format(format).max_value)
    _, exponent = _frexp(amax)
    return torch.where(amax == 0, 0, exponent.to(torch.int32) - top)


def ceil_exponent(amax: torch.Tensor, format: str | torch.dtype | Format) -> torch.Tensor:
    """The smallest exponent at which nothing saturates: ceil(log2(amax / max_value)), exactly.

    At most `largest_exponent`: numbers near the largest of fp32 saturate and do not come back as Inf.

    Args:
        amax: fp32 largest magnitudes, finite and >= 0, any shape.
        format: the element format.

    Returns:
        int32 exponents of the same shape, not clamped; 0 where amax is 0.
    """
    check_dtype("amax", amax, torch.float32)
    top_mantissa, top = math.frexp(get_format(format).max_value)
    mantissa, exponent = _frexp(amax)
    above = (mantissa > top_mantissa).to(torch.int32)
    wanted = (exponent.to(torch.int32) - top + above).clamp(max=largest_exponent(format))
    return torch.where(amax == 0, 0, wanted)


# Exponents tried by the mse rule, relative to the floor rule's. Above +1 the grid only gets coarser. Below -2
# clipping the largest element costs more than 256 others can gain: 1/4 of a squared step each in FP4, 1 in
# INT4.
_CANDIDATES = (0, 1, -1, -2)


def mse_exponent(groups: torch.Tensor, format: str | torch.dtype | Format) -> torch.Tensor:
    """The exponent at which a group has the least squared error.

    Among exponents with the same error it takes the first of: the floor rule's, one above, one below, two
        below.

    The optimum over every E8M0 exponent for groups of up to 256 elements; over the four exponents from two
    below the floor rule's to one above it for longer ones.

    Args:
        groups: fp32 `[..., group]`. NaN counts as 0, Inf as the largest finite fp32.
        format: the element format.

    Returns:
        int32 `[...]`, from -127 to `largest_exponent`; 0 for a group of zeros.

    Raises:
        TypeError: `groups` is not an fp32 tensor.

    Example:
        >>> group = torch.tensor([[7.5, 7.5, 0.5, 0.5]])  # at exponent 0 these saturate at 6, at 1 they are 8
        >>> mse_exponent(group, "fp4_e2m1"), floor_exponent(group.amax(-1), "fp4_e2m1")
        (tensor([1], dtype=torch.int32), tensor([0], dtype=torch.int32))
    """
    check_dtype("groups", groups, torch.float32)
    limit = torch.finfo(torch.float32).max
    finite = groups.nan_to_num(nan=0.0, posinf=limit, neginf=-limit)
    if finite.numel() == 0:
        return torch.zeros(finite.shape[:-1], dtype=torch.int32, device=finite.device)
    floor = floor_exponent(finite.abs().amax(-1), format)
    # Errors are compared on the group brought to the format's range, where squares cannot overflow or vanish.
    # The shift is made in two halves because 2^-floor alone can be out of fp32's range.
    half = floor >> 1
    unit = finite * _pow2(-half).unsqueeze(-1) * _pow2(half - floor).unsqueeze(-1)
    best = floor.clamp(-E8M0_BIAS, E8M0_BIAS)
    # In float64 the order of the sum does not matter, so every device chooses the same exponent.
    least = torch.full_like(floor, math.inf, dtype=torch.float64)
    for step in _CANDIDATES:
        exponent = (floor + step).clamp(-E8M0_BIAS, largest_exponent(format))
        scale = _pow2(exponent - floor).unsqueeze(-1)
        error = (round_to_format(unit / scale, format) * scale - unit).double().square().sum(-1)
        better = error < least
        best = torch.where(better, exponent, best)
        least = torch.where(better, error, least)
    return best


def ultraquant_exponent(amax: torch.Tensor) -> torch.Tensor:
    """The exponent of vLLM's UltraQuant caches: log2(0.156 * amax), rounded with halves up.

    Args:
        amax: fp32 largest magnitudes, finite, any shape.

    Returns:
        int32 of that shape, in [-126, 127]; -127 (byte 0) for zero.

    Raises:
        TypeError: `amax` is not an fp32 tensor.

    Example:
        >>> ultraquant_exponent(torch.tensor([0.0, 6.0, 9.0]))
        tensor([-127,    0,    0], dtype=torch.int32)
    """
    check_dtype("amax", amax, torch.float32)
    bits = (amax * ULTRAQUANT_FACTOR).view(torch.int32)
    rounded = (bits >> 23) - 127 + ((bits & 0x7FFFFF) >= ABOVE_SQRT2).int()
    return rounded.clamp(-126, 127).masked_fill(amax == 0, -127)


def sglang_exponent(amax: torch.Tensor) -> torch.Tensor:
    """The exponent of SGLang's FP4 pool: ceil(log2(amax / 6)), at least -33.

    Args:
        amax: fp32 largest magnitudes, finite, any shape.

    Returns:
        int32 of that shape.

    Raises:
        TypeError: `amax` is not an fp32 tensor.
    """
    return torch.where(amax == 0, -33, ceil_exponent(amax, "fp4_e2m1").clamp(min=-33))


def dsv4_tile_scale(amax: torch.Tensor) -> torch.Tensor:
    """The power-of-two scale of a DeepSeek tile: 2^ceil(log2(max(amax / 448, 1e-4))), at most 2^119.

    With 2^120 code 256 would be Inf.

    Args:
        amax: fp32 largest magnitudes of the tiles, any shape.

    Returns:
        fp32 powers of two of the same shape (`e8m0_encode` makes bytes of them); NaN where amax is NaN. Inf
        counts as the largest finite fp32.

    Raises:
        TypeError: `amax` is not an fp32 tensor.

    Example:
        >>> dsv4_tile_scale(torch.tensor([0.0, 448.0, 449.0]))
        tensor([1.2207e-04, 1.0000e+00, 2.0000e+00])
    """
    check_dtype("amax", amax, torch.float32)
    wanted = (amax.clamp(max=torch.finfo(torch.float32).max) / 448.0).clamp(min=1e-4)
    mantissa, exponent = _frexp(wanted)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # frexp's mantissa is in [0.5, 1)
    scale = e8m0_decode(e8m0_from_exponent(exponent.clamp(max=largest_exponent("fp8_e4m3fn"))))
    return scale.masked_fill(torch.isnan(amax), math.nan)

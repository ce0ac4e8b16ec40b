"""Sums of matrix instructions as CDNA3 forms them, instead of in fp64 with one rounding.

Source: the published model of CDNA3's matrix units (microsoft/MMA-Sim), which its authors found bit-exact on
MI300X. Products are added in groups of consecutive k, one group after another:

- A group has 8 products of 16-bit numbers, 16 of 8-bit numbers, 4 of xf32.
- Its products are cut off (toward zero) at 24 fraction bits below the largest exponent among them, and added.
- 8-bit numbers: products of even k and of odd k are added separately; the two sums are then rounded down at
  24 fraction bits below the larger exponent, and added.
- The sum is rounded down at 31, and the addend at 24 fraction bits below the larger of their exponents; an
  8-bit group drops an addend that is more than 25 bits smaller. Their sum is rounded to nearest even in fp32.
- fp32 products are added one by one, each with one rounding (a chain of fused multiply-adds).

The exponent of a product is the sum of its factors' exponents; that of a subnormal is the least of its
format, and that of zero is -126.
"""

from __future__ import annotations

import numpy as np

from .state import Array

GROUPS = {"f16": 8, "bf16": 8, "fp8": 16, "bf8": 16, "xf32": 4, "f32": 1}
"""Products of a group, by the type of the factors; other types are added as without the option."""

_LEAST = {
    "f16": -14, "bf16": -126, "xf32": -126, "f32": -126, "fp8 gfx942": -7, "bf8 gfx942": -15,
    "fp8 gfx950": -6, "bf8 gfx950": -14,
}  # fmt: skip
_ZERO = -126
_OVERFLOW = 2.0**128  # a product of two bf16 numbers may be as large, which makes the sum infinite


def _exponents(values: Array, kind: str, target: str) -> Array:
    least = _LEAST[kind if kind in _LEAST else f"{kind} {target}"]
    exponents: Array = np.maximum(np.frexp(values)[1] - 1, least)
    return np.where(values == 0, _ZERO, exponents)


def _group_sum(products: Array, exponents: Array) -> tuple[Array, Array]:
    """Sum of products cut off 24 bits below the largest exponent, in multiples of the last kept bit."""
    largest = exponents.max(axis=-1)
    return np.trunc(np.ldexp(products, 24 - largest[..., None])).sum(axis=-1), largest


def _added(sums: Array, exponent: Array, addend: Array, is_8_bit: bool) -> Array:
    """The fp32 sum of a group's sum (in multiples of 2**-24 of its exponent) and the fp32 addend."""
    own = _exponents(addend, "f32", "")
    largest = np.maximum(exponent, own)
    total = np.ldexp(np.floor(np.ldexp(sums, exponent + 7 - largest)), largest - 31)
    kept = np.ldexp(np.floor(np.ldexp(addend, 24 - largest)), largest - 24)
    if is_8_bit:
        kept = np.where(own >= largest - 25, kept, 0.0)
    result: Array = (total + kept).astype(np.float32).astype(np.float64)
    return result


def hardware_sum(a: Array, b: Array, c: Array, kinds: tuple[str, str], target: str) -> Array:
    """D = A B + C as the hardware adds it.

    Args:
        a: ``[..., M, K]`` fp64 values of the factors' types; b: ``[..., N, K]``; c: ``[..., M, N]`` fp32.
        kinds: types of A and B, of `GROUPS`.
        target: whose FP8 formats they are.

    Returns:
        ``[..., M, N]`` fp64 that hold fp32 numbers. An infinite sum or a NaN is that of fp64.
    """
    left, right = a[..., :, None, :], b[..., None, :, :]
    size = GROUPS[kinds[0]]
    total = c.astype(np.float64)
    for first in range(0, a.shape[-1], size):
        part = slice(first, first + size)
        products = left[..., part] * right[..., part]
        plain = products.sum(axis=-1) + total
        if size == 1:
            total = plain.astype(np.float32).astype(np.float64)
            continue
        exponents = _exponents(left[..., part], kinds[0], target) + _exponents(
            right[..., part], kinds[1], target
        )
        overflow = np.where(np.abs(products) >= _OVERFLOW, np.copysign(np.inf, products), 0.0).sum(axis=-1)
        products = np.where(np.abs(products) < _OVERFLOW, products, 0.0)
        if size == 16:
            sums, each = zip(
                *(_group_sum(products[..., k::2], exponents[..., k::2]) for k in (0, 1)), strict=True
            )
            largest = np.maximum(*each)
            group = sum(np.floor(np.ldexp(s, e - largest)) for s, e in zip(sums, each, strict=True))
        else:
            group, largest = _group_sum(products, exponents)
        with np.errstate(invalid="ignore"):
            added = _added(np.asarray(group), largest, np.where(np.isfinite(total), total, 0.0), size == 16)
        total = np.where(np.isfinite(plain), added + overflow, plain)
    return total

"""Narrow number formats: tables that decode every code, and encoders that round to nearest even.

Sources: OCP 8-bit Floating Point Specification (E4M3FN, E5M2), OCP Microscaling Formats (E2M1, E2M3, E3M2,
E8M0), and for the FNUZ forms of gfx942 the CDNA3 ISA document: one NaN at 0x80, no infinity, no negative
zero, exponent bias one higher than in the OCP form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .state import Array


@dataclass(frozen=True)
class SmallFloat:
    """A binary format of at most 8 bits.

    Attributes:
        name: the usual name.
        exponent_bits, mantissa_bits, bias: the fields.
        specials: which codes are not finite: ``fn`` (all ones is NaN), ``ieee`` (infinity and NaNs as in
            IEEE 754), ``fnuz`` (0x80 is NaN), ``finite`` (none).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str

    @property
    def sign_bit(self) -> int:
        """The code's sign bit."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def max_code(self) -> int:
        """Code of the greatest finite value."""
        top = self.sign_bit - 1
        return {"fn": top - 1, "ieee": top - (1 << self.mantissa_bits), "fnuz": top, "finite": top}[
            self.specials
        ]

    @cached_property
    def decode_table(self) -> Array:
        """fp32 value of every code."""
        codes = np.arange(2 * self.sign_bit)
        exponent = (codes >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        mantissa = codes & ((1 << self.mantissa_bits) - 1)
        significand = np.where(exponent == 0, mantissa, mantissa + (1 << self.mantissa_bits)).astype(
            np.float64
        )
        value = np.ldexp(significand, np.maximum(exponent, 1) - self.bias - self.mantissa_bits)
        magnitude = codes & (self.sign_bit - 1)
        if self.specials == "fn":
            value[magnitude == self.sign_bit - 1] = np.nan
        elif self.specials == "ieee":
            value[magnitude == self.max_code + 1] = np.inf
            value[magnitude > self.max_code + 1] = np.nan
        value = np.where(codes & self.sign_bit, -value, value)
        if self.specials == "fnuz":
            value[self.sign_bit] = np.nan
        table: Array = value.astype(np.float32)
        return table

    @cached_property
    def decode_table_f64(self) -> Array:
        """fp64 value of every code."""
        return self.decode_table.astype(np.float64)

    def encode(self, value: Array, *, saturate: bool) -> Array:
        """Round fp32 or fp64 values to codes (uint8).

        Args:
            value: any shape.
            saturate: what MODE.FP16_OVFL says: finite values too large become the greatest finite value
                instead of infinity or NaN. Formats without infinity and NaN always saturate.

        Returns:
            Codes of the same shape. An infinity stays one where the format has it, else it becomes NaN.
        """
        magnitude = np.abs(value).astype(np.float64)
        finite = np.isfinite(magnitude)
        safe = np.where(finite, magnitude, 0.0)
        lowest = 1 - self.bias
        exponent = np.where(safe == 0, lowest, np.maximum(np.frexp(safe)[1] - 1, lowest))
        units = np.rint(np.ldexp(safe, self.mantissa_bits - exponent)).astype(np.int64)
        code = units + ((exponent - lowest).astype(np.int64) << self.mantissa_bits)
        top = self.max_code
        too_large = code > top
        sign = np.where(np.signbit(value), self.sign_bit, 0)
        if self.specials == "finite":
            code = np.where(too_large | np.isinf(magnitude), top, code)
            return (np.where(np.isnan(magnitude), top, code) | sign).astype(np.uint8)
        nan = {"fn": self.sign_bit - 1, "ieee": self.sign_bit - 1, "fnuz": self.sign_bit}[self.specials]
        beyond = top + 1 if self.specials == "ieee" else nan
        code = np.where(too_large, top if saturate else beyond, code)
        code = np.where(np.isinf(magnitude), beyond, code)
        code = np.where(np.isnan(magnitude), nan, code)
        if self.specials == "fnuz":
            return np.where((code == 0) | (code == nan), code, code | sign).astype(np.uint8)
        return (code | sign).astype(np.uint8)


E4M3FN = SmallFloat("e4m3fn", 4, 3, 7, "fn")
E5M2 = SmallFloat("e5m2", 5, 2, 15, "ieee")
E4M3FNUZ = SmallFloat("e4m3fnuz", 4, 3, 8, "fnuz")
E5M2FNUZ = SmallFloat("e5m2fnuz", 5, 2, 16, "fnuz")
E2M1 = SmallFloat("e2m1", 2, 1, 1, "finite")
E2M3 = SmallFloat("e2m3", 2, 3, 1, "finite")
E3M2 = SmallFloat("e3m2", 3, 2, 3, "finite")


def fp8(target: str) -> SmallFloat:
    """The format that the hardware of a target calls FP8."""
    return E4M3FNUZ if target == "gfx942" else E4M3FN


def bf8(target: str) -> SmallFloat:
    """The format that the hardware of a target calls BF8."""
    return E5M2FNUZ if target == "gfx942" else E5M2


def e8m0_to_f64(codes: Array) -> Array:
    """Block scales: 2^(code - 127), and NaN for 0xFF."""
    codes = np.asarray(codes)
    value: Array = np.ldexp(1.0, codes.astype(np.int32) - 127)
    return np.where(codes == 0xFF, np.nan, value)


def bf16_to_f32(bits: Array) -> Array:
    """bf16 bits (uint16) to fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(value: Array) -> Array:
    """fp32 to bf16 bits (uint16), round to nearest even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(value).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet = bits | np.uint32(0x400000)
    return (np.where(np.isnan(value), quiet, rounded) >> np.uint32(16)).astype(np.uint16)


def f32_to_f16(value: Array, *, saturate: bool = False) -> Array:
    """fp32 to fp16, round to nearest even; ``saturate`` clamps finite values that overflow (FP16_OVFL)."""
    half: Array = value.astype(np.float16)
    if saturate:
        limit = np.copysign(np.float16(65504), value).astype(np.float16)
        half = np.where(np.isinf(half) & np.isfinite(value), limit, half)
    return half


def f32_to_f16_toward_zero(value: Array) -> Array:
    """fp32 to fp16, rounding toward zero (v_cvt_pkrtz_f16_f32)."""
    half = value.astype(np.float16)
    away = np.abs(half.astype(np.float32)) > np.abs(value)
    return np.where(away, (half.view(np.uint16) - np.uint16(1)).view(np.float16), half)

"""Numbers of the ISA documents' pseudo-code, for an independent check of the emulator.

The pseudo-code is text of another project's tables (`tinygrad.runtime.autogen.amd.cdna.str_pcode`).
`pseudocode_run` translates it to Python line by line. Nothing here uses the emulator's own arithmetic.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

# Bits of the exponent and of the mantissa.
FLOATS = {"f16": (5, 10), "f32": (8, 23), "f64": (11, 52), "bf16": (8, 7)}
NARROW = {"fp8": (4, 3), "bf8": (5, 2), "fp4": (2, 1)}
_LAYOUTS = FLOATS | NARROW
_LARGEST = {"fp8": 126, "fp4": 7}  # codes of formats without infinity
_NUMPY = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_SUFFIX = re.compile(r"^(u|i|b|f|bf|fp|bfp)(\d+)$")


def width_of(kind: str) -> int:
    """Bits of a type."""
    return {"fp8": 8, "bf8": 8, "fp4": 4}.get(kind) or int(re.sub(r"\D", "", kind))


def decode(bits: int, kind: str) -> float:
    """The number that bits of a floating type are."""
    exponent_bits, mantissa_bits = _LAYOUTS[kind]
    top, bias = (1 << exponent_bits) - 1, (1 << (exponent_bits - 1)) - 1
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent, mantissa = bits >> mantissa_bits & top, bits & ((1 << mantissa_bits) - 1)
    if kind == "fp8" and bits & 127 == 127:
        return math.nan
    if kind not in _LARGEST and exponent == top:
        return math.copysign(math.nan if mantissa else math.inf, sign)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (mantissa + (1 << mantissa_bits)) * 2.0 ** (exponent - bias - mantissa_bits)


def encode(value: float | Fraction, kind: str, *, down: bool = False) -> int:
    """Bits of a number in a floating type: nearest even, or toward zero with `down`."""
    exponent_bits, mantissa_bits = _LAYOUTS[kind]
    bias, infinity = (1 << (exponent_bits - 1)) - 1, ((1 << exponent_bits) - 1) << mantissa_bits
    beyond = {"fp8": 127, "fp4": 7}.get(kind, infinity)
    negative = value < 0 if isinstance(value, Fraction) else math.copysign(1.0, value) < 0
    sign = negative << (exponent_bits + mantissa_bits)
    if isinstance(value, float) and math.isnan(value):
        if kind == "fp4":
            return sign | 7
        return 127 if kind in NARROW else infinity | 1 << (mantissa_bits - 1)
    if isinstance(value, float) and math.isinf(value):
        return sign | beyond
    value = abs(Fraction(value))
    if value == 0:
        return sign
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent = max(exponent - (value < Fraction(2) ** exponent), 1 - bias)
    count = value / Fraction(2) ** (exponent - mantissa_bits)
    code = (math.floor(count) if down else round(count)) + (exponent + bias - 1 << mantissa_bits)
    if kind in _LARGEST:
        return sign | (code if code <= _LARGEST[kind] else beyond)
    return sign | (code if code < infinity else infinity - 1 if down else beyond)


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Number, Any], bool]:
    def method(self: Number, other: Any) -> bool:
        x, y, _ = self._common(other)
        return compare(x, y)

    return method


def _bitwise(combine: Callable[[int, int], int]) -> Callable[[Number, Any], Number]:
    def method(self: Number, other: Any) -> Number:
        x, y, kind = self._common(other)
        return Number(combine(x, y), kind)

    return method


def _arithmetic(combine: Callable[[Any, Any], Any]) -> Callable[[Number, Any], Number]:
    def method(self: Number, other: Any) -> Number:
        x, y, kind = self._common(other)
        if kind not in FLOATS:
            return Number(combine(x, y), kind)
        with np.errstate(all="ignore"):
            return of_float(float(combine(_NUMPY[kind](x), _NUMPY[kind](y))), kind)

    return method


class Number:
    """Bits with a type: `u`, `i` and `b` of any width, or a floating type."""

    def __init__(self, bits: int, kind: str) -> None:
        self.kind, self.width = kind, width_of(kind)
        self.bits = bits & ((1 << self.width) - 1)

    @property
    def floating(self) -> bool:
        return self.kind in FLOATS or self.kind in NARROW

    @property
    def value(self) -> Any:
        if self.floating:
            return decode(self.bits, self.kind)
        if self.kind[0] == "i" and self.bits >> (self.width - 1) & 1:
            return self.bits - (1 << self.width)
        return self.bits

    def __getattr__(self, name: str) -> Number:
        if not _SUFFIX.match(name) and name not in NARROW:
            raise AttributeError(name)
        return Number(self.bits, name)

    def __getitem__(self, key: Any) -> Number:
        if isinstance(key, slice):
            high, low = int(key.start), int(key.stop)
            if high < low:  # [0 : 31] reverses
                text = f"{self.bits:0{low - high + 1}b}"[::-1]
                return Number(int(text, 2), f"b{low - high + 1}")
            return Number(self.bits >> low, f"b{high - low + 1}")
        return Number(self.bits >> int(key), "u1")

    def __index__(self) -> int:
        return int(self.value)

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def _common(self, other: Any) -> tuple[Any, Any, str]:
        other = number(other, self)
        if self.floating or other.floating:
            kinds = [x.kind for x in (self, other) if x.floating]
            kind = max(kinds, key=width_of)
            return float(self), float(other), kind
        width = max(self.width, other.width)
        signed = self.kind[0] == "i" and other.kind[0] == "i"
        return self.value, other.value, f"{'i' if signed else 'u'}{width}"

    __add__, __sub__, _times = map(_arithmetic, (operator.add, operator.sub, operator.mul))
    __truediv__ = _arithmetic(operator.truediv)
    __and__, __or__, __xor__ = map(_bitwise, (operator.and_, operator.or_, operator.xor))
    __lt__, __le__ = map(_comparison, (operator.lt, operator.le))
    __gt__, __ge__ = map(_comparison, (operator.gt, operator.ge))

    def __mul__(self, other: Any) -> Number:
        if hasattr(other, "exponent"):
            return other * self  # type: ignore[no-any-return]
        return self._times(other)

    def __rmul__(self, other: Any) -> Number:
        return number(other, self) * self

    def __rsub__(self, other: Any) -> Number:
        return number(other, self) - self

    def __neg__(self) -> Number:
        if self.floating:
            return Number(self.bits ^ (1 << (self.width - 1)), self.kind)
        return Number(-self.value, self.kind)

    def __pos__(self) -> Number:
        return self

    def __invert__(self) -> Number:
        return Number(~self.bits, self.kind)

    def __lshift__(self, count: Any) -> Number:
        return Number(self.value << int(count), self.kind)

    def __rlshift__(self, value: int) -> Number:
        return number(value) << self

    def __rshift__(self, count: Any) -> Number:
        return Number(self.value >> int(count), self.kind)

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, SignedZero):
            return float(self) == 0 and (math.copysign(1, float(self)) < 0) == other.negative
        if isinstance(other, Denormal):
            return self.kind in FLOATS and self.value != 0 and is_denormal(self)
        x, y, _ = self._common(other)
        return x == y

    def __ne__(self, other: Any) -> bool:
        # The pseudo-code's <> is "less or greater", which is false for NaN; `!=` of numbers is the same here.
        x, y, _ = self._common(other)
        return x < y or x > y

    __hash__ = None  # type: ignore[assignment]


class SignedZero:
    """+0.0 or -0.0 on the right of ==, which the pseudo-code of minima and maxima tells apart."""

    def __init__(self, negative: bool) -> None:
        self.negative = negative


class Denormal:
    """DENORM.f32 and DENORM.f64: equal to any denormal number."""


def number(value: Any, like: Number | None = None) -> Number:
    """A Python number as a literal of the type that it stands beside."""
    if isinstance(value, Number):
        return value
    if isinstance(value, float):
        return of_float(value, like.kind if like is not None and like.kind in FLOATS else "f64")
    if isinstance(value, bool):
        return Number(int(value), "u1")
    if like is not None and like.kind in FLOATS:
        return of_float(float(value), like.kind)
    return Number(int(value), "i32" if like is None or like.width <= 32 else f"{like.kind[0]}{like.width}")


def of_float(value: float | Fraction, kind: str, *, down: bool = False) -> Number:
    """A number rounded to a floating type."""
    return Number(encode(value, kind, down=down), kind)


def is_denormal(x: Number) -> bool:
    exponent_bits, mantissa_bits = FLOATS[x.kind]
    return x.bits >> mantissa_bits & ((1 << exponent_bits) - 1) == 0

"""Transcendental functions, rounded correctly: the same bits with every numpy, math library and CPU.

numpy's fp64 functions differ between machines in their last bits. A value whose rounding to fp32 these bits
could change is compared with the middle between its fp32 neighbours in decimal arithmetic; that is one value
in some millions. The hardware is accurate to about one unit in the last place. Denormals are flushed where
LLVM's lowering assumes it: by v_exp_f32, v_log_f32, v_rcp_f32, v_rsq_f32 and v_sqrt_f32.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal, localcontext

import numpy as np

from .state import Array

_TINY = np.finfo(np.float32).tiny
# Of an fp64 number, the bits that rounding to fp32 removes, and their value in the middle.
_REMOVED, _MIDDLE = np.int64(0x1FFFFFFF), np.int64(0x10000000)
_TRUSTED = np.int64(64)  # units in the last place that an fp64 function may be wrong
_PRECISION = Context(prec=60)

Exact = Callable[[Decimal], Decimal]


def _rounded(values: Array, x: Array, exact: Exact) -> Array:
    """fp64 `values` of a function of `x` in the type of `x`, rounded once; `exact` is the function."""
    if x.dtype == np.float32:
        close = ((values.view(np.int64) + (_TRUSTED - _MIDDLE)) & _REMOVED) <= 2 * _TRUSTED
        if close.any():
            values = values.copy()
            for at in np.argwhere(close):
                values[tuple(at)] = _beside_middle(float(values[tuple(at)]), float(x[tuple(at)]), exact)
    return values.astype(x.dtype)


def _beside_middle(value: float, x: float, exact: Exact) -> float:
    """The fp64 number next to the middle of two fp32 numbers, on the side of the function's value."""
    bits = np.float64(value).view(np.int64)
    middle = float(((bits & ~_REMOVED) | _MIDDLE).view(np.float64))
    with localcontext(_PRECISION):
        side = exact(Decimal(x)).compare(Decimal(middle))
    return middle if side == 0 else float(np.nextafter(middle, np.inf if side > 0 else -np.inf))


def _flush(x: Array) -> Array:
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def _evaluated(function: Callable[[Array], Array], x: Array, exact: Exact) -> Array:
    x = _flush(x)
    return _flush(_rounded(function(x.astype(np.float64)), x, exact))


def exp2(x: Array) -> Array:
    """2**x."""
    return _evaluated(np.exp2, x, lambda v: Decimal(2) ** v)


def log2(x: Array) -> Array:
    """Base-2 logarithm."""
    return _evaluated(np.log2, x, lambda v: v.ln() / Decimal(2).ln())


def reciprocal(x: Array) -> Array:
    """1 / x; IEEE division rounds it."""
    return _flush(x.dtype.type(1) / _flush(x))


def reciprocal_root(x: Array) -> Array:
    """1 / sqrt(x)."""
    return _evaluated(lambda v: 1.0 / np.sqrt(v), x, lambda v: 1 / v.sqrt())


def root(x: Array) -> Array:
    """Square root; IEEE rounds it."""
    return _flush(np.sqrt(_flush(x)))


def sine(x: Array) -> Array:
    """sin(2 pi x): the hardware's argument is in revolutions."""
    return _rounded(_sine(x.astype(np.float64)), x, _exact_sine)


def cosine(x: Array) -> Array:
    """cos(2 pi x): the hardware's argument is in revolutions."""
    turns = x.astype(np.float64)
    turns = turns - np.rint(turns) + 0.25  # exact where the cosine is small
    return _rounded(_sine(turns), x, lambda v: _exact_sine(v + Decimal("0.25")))


def _sine(turns: Array) -> Array:
    """fp64 sine; the argument is first brought to a quarter of a turn, exactly."""
    turns = turns - np.rint(turns)
    turns = np.where(np.abs(turns) > 0.25, np.copysign(0.5, turns) - turns, turns)
    return np.sin(2 * np.pi * turns)


def _exact_sine(turns: Decimal) -> Decimal:
    """sin(2 pi turns) by its series."""
    angle = 2 * _PI * (turns - turns.to_integral_value())
    term = total = angle
    for k in range(2, 80, 2):
        term *= -angle * angle / (k * (k + 1))
        total += term
    return total


_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")

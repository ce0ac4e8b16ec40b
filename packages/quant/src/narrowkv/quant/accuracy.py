"""Error figures of a result against a reference, all computed in fp64.

Example:
    >>> import torch
    >>> report = compare(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    >>> round(report.relative_l1, 4), report.max_abs, report.worst_index
    (0.1667, 0.5, (1,))
    >>> report.passes(relative_l1=0.2)
    True
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowkv.runtime.errors import check_shape, check_tensor

__all__ = ["ErrorReport", "compare", "cosine", "max_abs", "relative_l1", "rmse"]


def _pair(o: torch.Tensor, ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensor("ref", ref)
    check_shape("o", o, tuple(ref.shape))
    return o.detach().double().cpu(), ref.detach().double().cpu()


def _difference(o: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return torch.where(o == ref, 0.0, o - ref)  # equal infinities differ by 0, not by NaN


def relative_l1(o: torch.Tensor, ref: torch.Tensor) -> float:
    """`sum|o - ref| / sum|ref|`.

    0 when both are all zero, Inf when only `ref` is, NaN when a value is NaN or Inf.

    Raises:
        TypeError: not tensors.
        ValueError: the shapes differ.
    """
    a, b = _pair(o, ref)
    total, scale = float((a - b).abs().sum()), float(b.abs().sum())
    if math.isnan(total) or math.isinf(scale) or math.isinf(total):
        return math.nan
    if scale == 0.0:
        return 0.0 if total == 0.0 else math.inf
    return total / scale


def rmse(o: torch.Tensor, ref: torch.Tensor) -> float:
    """Root of the mean squared difference.

    0 for no elements, NaN when a value is NaN or equal infinities meet.

    Raises:
        TypeError: not tensors.
        ValueError: the shapes differ.
    """
    a, b = _pair(o, ref)
    return math.sqrt(float((a - b).square().mean())) if a.numel() else 0.0


def cosine(o: torch.Tensor, ref: torch.Tensor) -> float:
    """Cosine of the angle between the flattened tensors; 1 when both are all zero, 0 when one is.

    Raises:
        TypeError: not tensors.
        ValueError: the shapes differ.
    """
    a, b = _pair(o, ref)
    norm_a, norm_b = float(a.norm()), float(b.norm())
    if norm_a == 0.0 or norm_b == 0.0:
        return 1.0 if norm_a == norm_b else (math.nan if math.isnan(norm_a + norm_b) else 0.0)
    return float((a / norm_a * (b / norm_b)).sum())


def max_abs(o: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest difference.

    0 for no elements and where equal infinities meet (an `lse` of -inf), NaN for any NaN.

    Raises:
        TypeError: not tensors.
        ValueError: the shapes differ.
    """
    a, b = _pair(o, ref)
    return float(_difference(a, b).abs().amax()) if a.numel() else 0.0


@dataclass(frozen=True)
class ErrorReport:
    """The error figures of one result. All are NaN if a value of the result or the reference is NaN or Inf.

    Attributes:
        relative_l1: see `relative_l1`.
        rmse: see `rmse`.
        cosine: see `cosine`.
        max_abs: see `max_abs`.
        worst_index: coordinates of the largest difference, or of the first value that is not finite.
        not_finite: how many elements of the result are NaN or Inf.
        count: how many elements were compared.
    """

    relative_l1: float
    rmse: float
    cosine: float
    max_abs: float
    worst_index: tuple[int, ...]
    not_finite: int
    count: int

    def passes(
        self,
        *,
        relative_l1: float | None = None,
        rmse: float | None = None,
        cosine: float | None = None,
        max_abs: float | None = None,
    ) -> bool:
        """Whether every figure is a number and within the given bounds (cosine at least, others at most)."""
        if any(math.isnan(figure) for figure in (self.relative_l1, self.rmse, self.cosine, self.max_abs)):
            return False
        upper = ((self.relative_l1, relative_l1), (self.rmse, rmse), (self.max_abs, max_abs))
        within = all(bound is None or figure <= bound for figure, bound in upper)
        return within and (cosine is None or self.cosine >= cosine)

    def __str__(self) -> str:
        return (
            f"relL1 {self.relative_l1:.3g}, RMSE {self.rmse:.3g}, cosine {self.cosine:.6f}, "
            f"max {self.max_abs:.3g} at {list(self.worst_index)}, "
            f"not finite {self.not_finite} of {self.count}"
        )


def _coordinates(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """The coordinates of an element of a contiguous tensor; torch.unravel_index would import sympy."""
    found: list[int] = []
    for size in reversed(shape):
        flat, here = divmod(flat, size)
        found.insert(0, here)
    return tuple(found)


def compare(o: torch.Tensor, ref: torch.Tensor) -> ErrorReport:
    """All error figures of `o` against `ref`.

    NaN or Inf in either makes every figure NaN, which passes no bound.

    Args:
        o: the result, any shape and floating dtype, on any device.
        ref: the reference, the same shape.

    Raises:
        TypeError: not tensors.
        ValueError: the shapes differ.
    """
    a, b = _pair(o, ref)
    bad = ~(torch.isfinite(a) & torch.isfinite(b))
    not_finite = int((~torch.isfinite(a)).sum())
    measure = bad.double() if bool(bad.any()) else (a - b).abs()
    worst = _coordinates(int(measure.argmax()), a.shape) if a.numel() else ()
    if bool(bad.any()):
        nan = math.nan
        return ErrorReport(nan, nan, nan, nan, worst, not_finite, a.numel())
    return ErrorReport(relative_l1(a, b), rmse(a, b), cosine(a, b), max_abs(a, b), worst, 0, a.numel())

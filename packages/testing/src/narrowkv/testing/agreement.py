"""Assertions that the results of attention are those of its reference."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.quant.accuracy import compare, max_abs
from narrowkv.testing.cases import Case

__all__ = ["assert_agrees", "assert_right"]


def assert_agrees(
    results: Any, expected: Any, *, bound: float = 0.002, lse_bound: float = 1e-3, detail: object = ""
) -> None:
    """Fails unless every number is finite and within the bounds.

    Args:
        results: `o`, or `(o, lse)`.
        expected: the same of the reference.
        bound: of the relative L1 error of `o`.
        lse_bound: of the largest difference of `lse`; equal infinities agree.
        detail: what a failure says besides the errors.

    Raises:
        AssertionError: they differ by more, or a value of `o` is not finite.
    """
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    error = compare(results[0], expected[0])
    assert error.passes(relative_l1=bound), f"{error} (bound {bound:.3g}) {detail}"
    for lse, expected_lse in zip(results[1:], expected[1:], strict=True):
        difference = max_abs(lse, expected_lse)
        assert difference <= lse_bound, f"lse differs by {difference:.3g} (bound {lse_bound:.3g}) {detail}"


def assert_right(
    case: Case, device: str = "cpu", *, inputs: Any = None, plan: Any = None, bound: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Calls a case's operation and compares its results, and the bytes that it stored, with the reference.

    Args:
        case: says the bounds.
        device: of the tensors.
        inputs: the case's tensors, changed; without them, as the case makes them.
        plan: of the call; without one, what the case asks for.
        bound: of the relative L1 error, instead of the case's.
        **options: of the call, besides those of the case.

    Returns:
        `(o, lse)`.

    Raises:
        AssertionError: a number or a stored byte is wrong.
    """
    inputs = case.inputs(device) if inputs is None else inputs
    inputs.options.update(options)
    results: tuple[torch.Tensor, torch.Tensor] = inputs.call(*([] if plan is None else [plan]))
    bound = case.bound if bound is None else bound
    assert_agrees(results, inputs.reference(), bound=bound, lse_bound=case.lse_bound, detail=case)
    assert not (wrong := inputs.wrong_bytes()), f"{wrong} {case}"
    return results

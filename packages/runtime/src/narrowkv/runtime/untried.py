"""Targets that no GPU and no emulator has run: first calls are compared with the reference.

`narrowkv.runtime.targets.UNTRIED` lists them. On such a GPU plans are made only if the environment variable
NARROWKV_UNTRIED_GPU is 1, and only of operations whose reference is registered here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import Target

__all__ = ["compare_first_call", "reference_of", "refuse_untried"]

_F = TypeVar("_F", bound=Callable[..., Any])
# Rounding, of products in FP8 too, stays below 0.03; an operand in the wrong order gives 0.3 and more.
_BOUND = 0.05
# Stored elements that may round the other way: 16-bit numbers before them are rounded from sums.
_STORED_OTHERWISE = 0.01
_RESULTS = ("out", "lse", "return_lse", "validate")
_references: dict[type, Callable[..., Any]] = {}


def reference_of(plan: type) -> Callable[[_F], _F]:
    """Decorates the reference that first calls by plans of this class are compared with."""

    def register(reference: _F) -> _F:
        _references[plan] = reference
        return reference

    return register


def refuse_untried(plan: type, target: Target, device: torch.device) -> None:
    """Refuses plans on a GPU that nothing has run, where their first calls cannot be compared.

    Raises:
        UnsupportedError: naming what works there.
    """
    if target.is_untried and device.type == "cuda" and plan not in _references:
        served = ", ".join(sorted(known.__name__ for known in _references))
        raise UnsupportedError(
            f"{plan.__name__} is not for {target.name}, which nothing has run: it serves {served} only, "
            "whose first calls are compared with the reference"
        )


def compare_first_call(plan: Any, given: Any) -> None:
    """Makes a call that a plan has prepared, and compares its output and what it stored with the reference.

    A copy of the cache takes memory meanwhile, where the call stores new tokens. The comparison waits for the
    device, so the first call cannot be captured in a graph.

    Args:
        plan: the plan, whose `call` was prepared for such calls.
        given: the arguments of the call, a named tuple.

    Raises:
        RuntimeError: the results differ; later calls are compared, too.
    """
    defaults = type(given)._field_defaults
    arguments = {
        name: value
        for name, value in given._asdict().items()
        if name not in _RESULTS
        and (name not in defaults or isinstance(value, torch.Tensor) or value != defaults[name])
    }
    stores = "k_new" in arguments
    if stores:
        arguments |= {"cache": copy.deepcopy(given.cache), "plan": plan}
    expected = _references[type(plan)](**arguments).float()
    result = plan.call(given)
    out = (result[0] if isinstance(result, tuple) else result).float()
    error = float((out - expected).abs().sum() / expected.abs().sum().clamp_min(1e-30))
    stored = _stored_otherwise(given, arguments["cache"]) if stores else 0.0
    if not error <= _BOUND or not stored <= _STORED_OTHERWISE:
        plan.calls.clear()
        raise RuntimeError(
            f"the first call by a {type(plan).__name__} on {plan.target.name}, which nothing had run before, "
            f"is wrong: relative L1 error {error:.2g} (at most {_BOUND}), {stored:.1%} of the stored bytes "
            "differ; please report it with the output of `narrowkv env`"
        )


def _stored_otherwise(given: Any, expected: Any) -> float:
    """Elements of the cache that differ from the expected ones, as a share of those that a call stores."""
    differ = sum(
        int((stored.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        for stored, wanted in ((given.cache.k, expected.k), (given.cache.v, expected.v))
    )
    elements: int = given.k_new.numel() + given.v_new.numel()
    return differ / max(elements, 1)

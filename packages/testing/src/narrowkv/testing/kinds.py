"""The operations whose cases are compared with a reference, and the errors that pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowkv.runtime.targets import Target
from narrowkv.testing.cases import Case, decode, prefill, sparse

__all__ = ["DECODE", "KINDS", "PREFILL", "SPARSE", "Kind"]


@dataclass(frozen=True)
class Kind:
    """An operation, or several, whose cases can be validated.

    Attributes:
        operation: its function, for people.
        argument: its name after `narrowkv validate`; empty for decode.
        case: the class of its cases.
        bounds: relative L1 errors that pass, by what they hold for.
        sweep: the cases that a target serves, all or fewer, with a seed for random ones.
    """

    operation: str
    argument: str
    case: Any
    bounds: Mapping[str, float] = field(hash=False)
    sweep: Callable[[Target, bool, int], Sequence[Case]]

    @property
    def bound(self) -> str:
        """The bounds for people."""
        return ", ".join(
            f"{bound:g}" if name == "relative_l1" else f"{bound:g} {name}"
            for name, bound in self.bounds.items()
        )


DECODE = Kind(
    "paged_decode", "", decode.DecodeCase, {"relative_l1": decode.BOUND},
    lambda target, full, seed: decode.sweep(full=full, seed=seed),
)  # fmt: skip
PREFILL = Kind(
    "batch_prefill and prefill_append",
    "prefill",
    prefill.PrefillCase,
    {
        "relative_l1": decode.BOUND,
        "with Q in FP8": prefill.BOUND_FP8_QUERY,
        "with fp8_compute": prefill.BOUND_TWO_FP8_TERMS,
    },
    lambda target, full, seed: prefill.sweep(target, everything=full),
)
SPARSE = Kind(
    "sparse_prefill, sparse_prefill_fp8 and sparse_decode",
    "sparse",
    sparse.SparseCase,
    {"relative_l1": sparse.BOUND_16_BIT_QUERY, "with Q in FP8": sparse.BOUND_FP8_QK},
    lambda target, full, seed: sparse.sweep(everything=full),
)
KINDS = {"decode": DECODE, "prefill": PREFILL, "sparse": SPARSE}

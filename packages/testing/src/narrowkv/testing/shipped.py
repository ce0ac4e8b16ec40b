"""The calls that compile every configuration that an operation ships, and how a table names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowkv.testing.cases import Case, prefill, sage, sparse

__all__ = ["SHIPPED", "Shipped"]


@dataclass(frozen=True)
class Shipped:
    """The shipped configurations of an operation.

    Attributes:
        cases: a call for every configuration that it ships for a target.
        columns: functions of a case whose values name it in a table, by header.
        every_kernel: whether to show all kernels of a call; otherwise the attention kernel, and others with a
            fault.
    """

    cases: Callable[[str], Sequence[Case]]
    columns: Mapping[str, Callable[[Any], object]]
    every_kernel: bool = False


SHIPPED = {
    "prefill": Shipped(
        prefill.shipped,
        {
            "operation": lambda case: case.operation,
            "Q": lambda case: case.kind[0],
            "cache": lambda case: case.format_name,
            "head_dim": lambda case: case.head_dim,
        },
    ),
    "sparse": Shipped(
        lambda target: sparse.shipped(),
        {
            "mode": lambda case: case.mode,
            "Q": lambda case: case.q,
            "rows": lambda case: case.rows + ("" if case.clean else ", foreign"),
            "heads": lambda case: case.num_qo_heads,
        },
        every_kernel=True,
    ),
    "sage": Shipped(
        lambda target: sage.shipped(),
        {
            "Q and K": lambda case: case.qk_dtype,
            "granularity": lambda case: case.granularity,
            "head_dim": lambda case: case.head_dim,
        },
    ),
}
"""By operation."""

"""Small sets of cases in which every value of every axis appears: the samples that `make test` runs."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def values_of(name: str, value: Any) -> frozenset[Hashable]:
    """The axes of a parameter, each with its value: the fields of a dataclass, else the parameter itself."""
    if is_dataclass(value) and not isinstance(value, type):
        return frozenset().union(
            *(values_of(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value))
        )
    return frozenset({(name, repr(value))})


def covering(
    cases: Sequence[frozenset[Hashable]], seed: int = 0, always: Sequence[int] = (), most: int | None = None
) -> list[int]:  # fmt: skip
    """Chooses cases, few but not always the fewest, that together have all values that any case has.

    Each step takes the case with the most values that are still missing; the seed decides between equals.

    Args:
        cases: the values of each case.
        seed: of the order in which equally good cases are taken.
        always: indices of cases that are chosen first, whatever values they have.
        most: how many cases may be chosen; those of `always` all are. Values may be missing then.

    Returns:
        Indices of the chosen cases, ascending.

    Example:
        >>> covering([frozenset("ax"), frozenset("ay"), frozenset("bx"), frozenset("a")])
        [1, 2]
    """
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    chosen = list(always)
    missing = frozenset().union(*cases).difference(*(cases[index] for index in chosen))
    while missing and (most is None or len(chosen) < most):
        best = max(order, key=lambda index: len(cases[index] & missing))
        chosen.append(best)
        missing -= cases[best]
    return sorted(chosen)

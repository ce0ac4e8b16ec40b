"""The columns of a bench's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowkv.testing.records import number

__all__ = ["Columns", "Record", "microseconds", "ratio_of"]

Record = Mapping[str, Any]
"""A measured row as an object."""


@dataclass(frozen=True)
class Columns:
    """A bench's own columns: by header, the name of a record's value or a function of the record.

    Attributes:
        labels: words, on the left; sizes: numbers, before the times; figures: after the times.
        series: the values that tell the series of a plot apart.
        shown: which of the records a table shows.
    """

    labels: Mapping[str, str | Callable[[Record], str]] = field(default_factory=dict)
    sizes: Mapping[str, str | Callable[[Record], str]] = field(default_factory=dict)
    series: tuple[str, ...] = ()
    figures: Mapping[str, Callable[[Record], str]] = field(default_factory=dict)
    shown: Callable[[Sequence[Record]], Sequence[Record]] = list


def microseconds(name: str) -> Callable[[Record], str]:
    """A record's time in microseconds."""
    return lambda row: number(row[name], 4)


def ratio_of(name: str) -> Callable[[Record], str]:
    """A record's ratio, or a dash."""
    return lambda row: "-" if row[name] is None else f"{row[name]:.2f}"

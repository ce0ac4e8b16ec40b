"""Launch configurations as rows of data, each with the measurement or the constraint that it is there for.

A table lists rows from the special to the general; the first row whose conditions a call meets is its choice.

Example:
    >>> warps = (
    ...     ConfigRow({"rows": range(17), "heads": (64, 128)}, 1, "one warp holds 16 rows"),
    ...     ConfigRow({}, 4, "more rows or wider heads spill with less"),
    ... )
    >>> choice_for(warps, {"rows": 16, "heads": 128}), choice_for(warps, {"rows": 32, "heads": 128})
    (1, 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["ConfigRow", "choice_for"]

Chosen = TypeVar("Chosen")


@dataclass(frozen=True)
class ConfigRow(Generic[Chosen]):
    """What the calls get that meet a row's conditions.

    Attributes:
        when: for each named fact of a call the value that it must have, or a tuple or range of such values.
        choice: what such a call gets.
        evidence: the measurement, or the model's figure, that the choice rests on, with its device and unit;
            or the limit of the hardware or the compiler that leaves no other choice; empty where nothing was
            compared.
    """

    when: Mapping[str, Any]
    choice: Chosen
    evidence: str = ""

    def fits(self, facts: Mapping[str, Any]) -> bool:
        """Whether a call with these facts meets the conditions."""
        for name, wanted in self.when.items():
            fact = facts[name]
            if fact not in wanted if isinstance(wanted, (tuple, range)) else fact != wanted:
                return False
        return True


def choice_for(rows: Iterable[ConfigRow[Chosen]], facts: Mapping[str, Any]) -> Chosen:
    """The choice of the first row whose conditions a call with these facts meets.

    Raises:
        LookupError: no row is for such calls.
    """
    for row in rows:
        if row.fits(facts):
            return row.choice
    raise LookupError(f"no row is for {dict(facts)}")

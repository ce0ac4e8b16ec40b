"""Reads the cases of `--case`."""

from __future__ import annotations

from typing import Any

from narrowkv.cli.report import UsageError
from narrowkv.testing.cases import CaseError
from narrowkv.testing.cases import parse_case as parse
from narrowkv.testing.kinds import Kind


def parse_case(kind: Kind, line: str) -> Any:
    """The case of a line of --case.

    Raises:
        UsageError: naming the part that is wrong and what is known.
    """
    try:
        return parse(kind.case, line)
    except CaseError as error:
        raise UsageError(f"--case {error}") from None

"""Reads the cases of `--case`."""

from __future__ import annotations

from typing import Any

from narrowkv.cli.report import UsageError
from narrowkv.testing.cases import CaseError
from narrowkv.testing.cases import parse_case as parse
from narrowkv.testing.operation import OperationEntry


def parse_case(operation: OperationEntry, line: str) -> Any:
    """The case of an operation that a line of --case is.

    Raises:
        UsageError: naming the part that is wrong and what is known.
    """
    try:
        return parse(operation.cases.case, line)
    except CaseError as error:
        raise UsageError(f"--case {error}") from None

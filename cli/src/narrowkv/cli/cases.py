"""The cases and formats that options name."""

from __future__ import annotations

from typing import Any

from narrowkv.cli.names import split_format
from narrowkv.cli.report import UsageError
from narrowkv.paged_cache import CacheFormat
from narrowkv.runtime.cases import CaseError
from narrowkv.runtime.cases import parse_case as parse
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


def parse_format(text: str) -> tuple[CacheFormat, int]:
    """A cache format and FP4's channels per scale from "K", "K/V" or "K/V:GROUP"; 0 is one scale a head.

    Raises:
        UsageError: a format that a cache does not have, or a group that FP4 does not have.
    """
    k, v, group = split_format(text)
    return CacheFormat(k, v), group

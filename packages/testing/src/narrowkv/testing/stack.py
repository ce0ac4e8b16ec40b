"""Known faults of the software below narrowkv on AMD, by version."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["KNOWN_FAULTS", "KnownFault", "known_faults", "rocm_version"]


@dataclass(frozen=True)
class KnownFault:
    """A fault that others reported.

    Attributes:
        said: what goes wrong, and what to do.
        source: where it was reported.
        holds: whether a version of ROCm has it: major, minor and, if it is known, patch.
    """

    said: str
    source: str
    holds: Callable[[tuple[int, ...]], bool]


KNOWN_FAULTS = (
    KnownFault(
        "replays of HIP graphs may give wrong results, in about one process of five (ROCm 7.2.0 to 7.2.3): "
        "compare replays with eager calls, or use another ROCm",
        "https://github.com/ROCm/clr/issues/279",
        lambda rocm: rocm[:2] == (7, 2) and (len(rocm) < 3 or rocm[2] <= 3),
    ),
    KnownFault(
        "HIP reports no error for work that a graph cannot capture (before ROCm 7.14), and torch looks for "
        "it in calls of its own only: compare the first replay of a graph with an eager call",
        "https://github.com/ROCm/pytorch/pull/3323",
        lambda rocm: rocm < (7, 14),
    ),
)
"""By the version of ROCm. That of masked loads has no range of versions: `narrowkv.testing.masked_loads`."""


def rocm_version(torch_version: str | None = None, hip: str | None = None) -> tuple[int, ...] | None:
    """The version of ROCm that torch was built with: major, minor and, where the build's name has it, patch.

    Args:
        torch_version: `torch.__version__`; default that of this process.
        hip: `torch.version.hip`, whose third number is not ROCm's; default that of this process.

    Returns:
        None if torch is not for ROCm, or its GPU is virtual.

    Example:
        >>> rocm_version("2.11.0+rocm7.2.1", "7.2.53211")
        (7, 2, 1)
        >>> rocm_version("2.13.0a0+gitabc", "7.14.26222-1a2b")
        (7, 14)
    """
    version = torch.__version__ if torch_version is None else torch_version
    hip = torch.version.hip if torch_version is None else hip
    if not hip or hip.endswith("-virtual"):
        return None
    named = re.search(r"rocm(?:sdk)?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if named is None:
        return tuple(int(part) for part in re.findall(r"\d+", hip)[:2])
    return tuple(int(part) for part in named.groups() if part is not None)


def known_faults(rocm: tuple[int, ...] | None) -> list[dict[str, str]]:
    """What is known of a version of ROCm, as `narrowkv env` shows it; nothing for None."""
    if rocm is None:
        return []
    return [{"said": fault.said, "source": fault.source} for fault in KNOWN_FAULTS if fault.holds(rocm)]

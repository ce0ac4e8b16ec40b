"""Samples of a launch's workgroups: enough to finish some output rows, few enough for a laptop.

A kernel that no operation lists in its `samples` is run whole. Which rows its workgroups own is found by
watching what they store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.workgroups import SampledLaunch, Workgroup

__all__ = ["a_few", "listed", "sample"]


def listed() -> dict[str, Callable[[SampledLaunch], Iterable[Workgroup]]]:
    """The samples of all operations, by the name of the kernel."""
    return {kernel: choose for entry in OPERATIONS.values() for kernel, choose in entry.samples.items()}


def sample(launch: SampledLaunch) -> Iterable[Workgroup]:
    """The sampled workgroups of a launch; all of them for a kernel that no operation lists."""
    choose = listed().get(launch.kernel)
    return launch.everything() if choose is None else choose(launch)


def a_few(count: int) -> Callable[[SampledLaunch], list[Workgroup]]:
    """The first `count` workgroups of the sample: for counting instructions, when results are not read."""

    def choose(launch: SampledLaunch) -> list[Workgroup]:
        return [workgroup for _, workgroup in zip(range(count), sample(launch), strict=False)]

    return choose

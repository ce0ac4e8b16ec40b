"""A pytest plugin that runs an outside suite as it is: on a CPU, with cut shapes, without what is left out.

The suite's file is imported as it lies in its folder. What it imports comes from a module of `stand_ins`, its
"cuda" tensors lie on the CPU, where narrowkv's kernels run in Triton's interpreter. A suite with a chip runs
its own kernels on a virtual GPU.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, pretend_a_gpu
from suites import SUITES, Suite

__all__ = ["reduce_items"]

SUITE = next((suite for suite in SUITES if suite.name == os.environ.get("OUTSIDE_SUITE")), None)
FOLDER = Path(os.environ.get("OUTSIDE", "."))
_left_out: Counter[str] = Counter()
_counts: Counter[str] = Counter()
_mode = CudaOnCpu()


def reduce_items(suite: Suite, items: list[Any]) -> tuple[list[Any], list[Any], Counter[str]]:
    """Cuts the parameters of collected tests.

    Args:
        suite: how.
        items: pytest's; the values of their parameters are changed.

    Returns:
        The tests that run, those that do not, and how many of the latter for each reason.
    """
    kept, dropped, reasons, seen = [], [], Counter[str](), set()
    names = [getattr(item, "originalname", item.name) for item in items]
    cases, number = Counter(names), Counter[str]()
    for item, name in zip(items, names, strict=True):
        values = item.callspec.params if hasattr(item, "callspec") else {}
        reason = next((row.reason for row in suite.left_out if row.holds(name, values)), None)
        for parameter, cut in suite.cuts.items():
            if parameter in values:
                values[parameter] = cut(values[parameter])
        if reason is None:
            case = (name, repr(sorted(values.items(), key=lambda pair: pair[0])))
            if case in seen or len(seen) % suite.every:
                reason = "equal to another case, or not sampled, with cut shapes"
            seen.add(case)
        if suite.sample:
            first, number[name] = number[name], number[name] + 1
            if first * suite.sample // cases[name] == number[name] * suite.sample // cases[name]:
                reason = reason or "not sampled"
        if reason is None:
            kept.append(item)
        else:
            dropped.append(item)
            reasons[reason] += 1
    return kept, dropped, reasons


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "skip_global_cleanup: vLLM's")
    if SUITE is None:
        raise pytest.UsageError(f"OUTSIDE_SUITE must name a suite, got {os.environ.get('OUTSIDE_SUITE')!r}")
    if SUITE.chip:
        return
    pretend_a_gpu(SUITE.arch)
    _mode.__enter__()
    importlib.import_module(f"stand_ins.{SUITE.stand_in}").install(FOLDER, SUITE)


def pytest_unconfigure() -> None:
    if SUITE is not None and not SUITE.chip:
        _mode.__exit__(None, None, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    assert SUITE is not None
    items[:], dropped, reasons = reduce_items(SUITE, items)
    _left_out.update(reasons)
    config.hook.pytest_deselected(items=dropped)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _counts[report.outcome] += 1


def pytest_sessionfinish() -> None:
    if path := os.environ.get("OUTSIDE_REPORT"):
        Path(path).write_text(json.dumps({"counts": _counts, "left_out": _left_out}))


@pytest.fixture(autouse=True)
def _own_defaults() -> Any:
    """A suite's default dtype and seeds do not reach the next test."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)

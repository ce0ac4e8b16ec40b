"""Pytest settings for the whole workspace: skips, samples, the `device` fixture, hypothesis profiles."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from narrowkv.testing.places import Place

# pytest-xdist gives its workers a terminal of 80 columns; tables are tested at their own width.
os.environ.pop("COLUMNS", None)
# Worker processes share the cores; torch must hear of it before it is imported.
os.environ.setdefault(
    "OMP_NUM_THREADS",
    str(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))),
)

# A first example compiles or interprets kernels, so its time says nothing; failures must repeat anywhere.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", parent=settings.get_profile("repeatable"), derandomize=False, max_examples=500
)
settings.load_profile("repeatable")

LEFT_OUT = pytest.StashKey[int]()
NOT_VIRTUAL = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


@lru_cache(maxsize=1)
def gpu_missing() -> str | None:
    """Why tests marked gpu cannot run here, or None where they can."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"needs a GPU; torch {torch.__version__} sees none"


def not_for_a_virtual_gpu(item: pytest.Item) -> str | None:
    """Why a test marked gpu cannot run on this process's virtual GPU; None if it can, or there is none."""
    package = sys.modules.get("narrowkv.virtual_gpu")
    if package is None or package.current() is None or item.get_closest_marker("gpu") is None:
        return None
    for begins, containing, reason in virtual_left_out():
        if item.nodeid.startswith(begins) and containing in item.nodeid:
            return reason
    return None


@lru_cache(maxsize=1)
def virtual_left_out() -> list[tuple[str, str, str]]:
    """How a test's name begins, what it contains, and why a virtual GPU cannot run it."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    table = tomllib.loads((Path(__file__).parent / "tests" / "virtual_left_out.toml").read_text())
    return [
        (name, row.get("containing", ""), row["reason"]) for row in table["left_out"] for name in row["tests"]
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {item: reason for item in items if (reason := not_for_a_virtual_gpu(item))}
    if reasons:
        config.hook.pytest_deselected(items=list(reasons))
        items[:] = [item for item in items if item not in reasons]
        config.stash[NOT_VIRTUAL] = Counter(reasons.values())
    for item in items:
        if item.get_closest_marker("gpu") and (reason := gpu_missing()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("large_memory"):
            item.add_marker(pytest.mark.xdist_group("large memory"))
    if config.getoption("--run-slow"):
        return
    # Thousands of cases: a report of each that is skipped would take half a minute.
    left_out = {item for item in items if item.get_closest_marker("slow")}
    if any(item.get_closest_marker("sampled") for item in items) and gpu_missing():
        left_out |= not_in_the_sample([item for item in items if item not in left_out])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
        config.stash[LEFT_OUT] = len(left_out)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    lines = [
        f"{count} tests left out on the virtual GPU: {reason} (tests/virtual_left_out.toml)"
        for reason, count in config.stash.get(NOT_VIRTUAL, Counter[str]()).items()
    ]
    if count := config.stash.get(LEFT_OUT, 0):
        lines.append(f"{count} slow or unsampled cases run with --run-slow (make test-full) only")
    return lines


def not_in_the_sample(items: list[pytest.Item]) -> set[pytest.Item]:
    """All but cases of each test in which every value of every parameter appears; a GPU runs all of them.

    `sampled("target")`: in which every value appears for each target.
    `sampled(always=[{"mask": "window"}])`: with every case of that mask, because it finds what others do not.
    `sampled(most=2)`: at most two cases, those with the most values.
    `sampled("place", most={"gfx942": 2})`: at most two of that place.
    """
    from narrowkv.testing.covering import covering, values_of

    products: dict[tuple[str, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if not item.get_closest_marker("skip"):
                whole = [str(item.callspec.params.get(name)) for name in marker.args]
                products[(item.nodeid.split("[")[0], *whole)].append(item)
    left_out: set[pytest.Item] = set()
    for key, functions in products.items():
        cases = [
            frozenset().union(*(values_of(name, value) for name, value in function.callspec.params.items()))
            for function in functions
        ]
        marker = functions[0].get_closest_marker("sampled")
        options = marker.kwargs if marker else {}
        pinned = options.get("always", ())
        always = [
            index for index, function in enumerate(functions)
            if any(values.items() <= function.callspec.params.items() for values in pinned)
        ]  # fmt: skip
        most = options.get("most")
        if isinstance(most, dict):
            most = next((count for value, count in most.items() if value in key), None)
        chosen = covering(cases, always=always, most=most)
        left_out.update(functions[index] for index in set(range(len(cases))).difference(chosen))
    return left_out


@pytest.fixture(autouse=True)
def _give_back_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Worker processes share one GPU: none keeps what a test is done with."""
    yield
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("large_memory"):
        import torch

        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> str:
    """The device to test on: the GPU where there is one, else the CPU through Triton's interpreter."""
    return "cpu" if gpu_missing() else "cuda"


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Where a test runs, by its parameter: "here", which is the GPU where there is one and else the CPU, or
    an AMD target, whose machine code runs on the CPU and is watched for races and hazards."""
    from narrowkv.testing.emulation import emulating
    from narrowkv.testing.places import find_place

    if request.param == "here":
        return find_place(None)
    return replace(find_place(request.param), context=lambda: emulating(request.param, detect_hazards=True))

"""A stand-in for the GPU that benches measure on; the command is built once for all tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import typer.testing

from narrowkv.cli import bench
from narrowkv.testing import format_errors
from narrowkv.testing.bench import decode
from narrowkv.testing.bench.timing import Ceilings, Timing
from narrowkv.testing.format_errors import FP4_BEST, RECIPES
from narrowkv.testing.operation import ContractSet
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.places import Place

sys.path.insert(0, str(Path(__file__).parent))  # of cli_support


@pytest.fixture(autouse=True, scope="session")
def _one_command() -> Iterator[None]:
    """Typer's runner would build the whole command again for each call, which takes ten times the call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


class CpuTimer:
    """Stands in for the GPU's timer: runs calls for real, and makes up their times."""

    median_us = 100.0
    checked_replays = 1

    def capture(self, call: Callable[[], Any]) -> Any:
        call()
        return type("Graph", (), {"replay": staticmethod(call)})

    def replay(self, graph: Any) -> Timing:
        return Timing(self.median_us, 1.25, 98765.4, 10)

    def wait(self) -> None:
        pass


@pytest.fixture
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> CpuTimer:
    """A machine whose GPU is the CPU: every step of `bench decode` but the clock is real."""
    timer = CpuTimer()
    place = Place("gpu", "cuda", "stand-in GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "stand-in")
    monkeypatch.setattr(bench, "find_place", lambda name: place)
    monkeypatch.setattr(bench, "gpus", lambda: [{"name": "stand-in", "target": "cpu"}])
    monkeypatch.setattr(bench, "measure_ceilings", lambda timer: Ceilings(3e12, 3e12, 8e14))
    monkeypatch.setattr(bench, "GraphTimer", lambda samples, seconds: timer)
    monkeypatch.setattr(decode, "decode_bench", partial(decode.decode_bench, device="cpu"))
    return timer


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def few_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recipes of `validate fp4`, and a goal that the first of them misses."""
    goal = format_errors.Goal("FP4, a scale per head, ceil", FP4_BEST, "rmse", 0.5)
    recipes = tuple(recipe for recipe in RECIPES if recipe.name in (goal.recipe, goal.than))
    monkeypatch.setattr(format_errors, "GOALS", (goal,))
    monkeypatch.setattr(format_errors, "RECIPES", recipes)


@pytest.fixture
def add_set(monkeypatch: pytest.MonkeyPatch) -> Callable[[ContractSet], None]:
    """Makes a contract set known to `narrowkv probe`."""

    def add(chosen: ContractSet) -> None:
        for name, operation in list(OPERATIONS.items()):
            kept = tuple(one for one in operation.contracts if one.name != chosen.name)
            kept += (chosen,) if name == "decode" else ()
            monkeypatch.setitem(OPERATIONS, name, replace(operation, contracts=kept))

    return add

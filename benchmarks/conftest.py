"""Device time under pytest-benchmark: the GPU's clock, this run's ceilings, this device's baseline."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowkv.testing.bench.measure import Row, baseline_file, changes, load_baseline, regressions
from narrowkv.testing.bench.timing import Ceilings, GraphTimer, Timing, measure_ceilings
from narrowkv.testing.machine import gpus, versions
from narrowkv.testing.records import SCHEMA_VERSION, jsonable

BASELINES = Path(__file__).parent / "baselines"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("narrowkv benchmarks")
    group.addoption(
        "--update-baseline", action="store_true", help="store this run as the baseline of this device"
    )
    group.addoption(
        "--regression-threshold",
        type=float,
        default=0.08,
        help="by how much a row's ratio to the floor may grow",
    )


class DeviceClock:
    """The time a GPU has spent on samples: pytest-benchmark's timer, so its statistics are device time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = DeviceClock()


class BenchmarkTimer(GraphTimer):
    """A `GraphTimer` that hands every sample to pytest-benchmark."""

    def __init__(self, benchmark: Any) -> None:
        super().__init__()
        self._benchmark = benchmark

    def replay(self, graph: Any) -> Timing:
        self.warm_up(graph)
        samples: list[float] = []

        def one() -> None:
            samples.append(self.sample(graph))
            CLOCK.now += samples[-1] * 1e-6

        self._benchmark.pedantic(one, rounds=self.samples)
        return Timing.of(samples)


@dataclass
class Session:
    """What all benchmarks of a run share."""

    ceilings: Ceilings
    threshold: float
    baseline: dict[str, Any] | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, row: Row) -> None:
        """Keeps the row, and fails if it is wrong or slower than the baseline allows."""
        assert row.status == "pass", row.detail
        record = row.as_dict()
        self.rows.append(record)
        if self.baseline is None:
            return
        found = changes(self.baseline, [record])
        if not found:
            warnings.warn("the baseline has no such row; --update-baseline adds it", stacklevel=2)
        worse = regressions(found, self.threshold)
        assert not worse, "{before:.3f} x floor before, {now:.3f} now: {change:+.1%}".format(**worse[0])


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    file = baseline_file(BASELINES, torch.cuda.get_device_name())
    update = request.config.getoption("--update-baseline")
    baseline = load_baseline(file) if file.exists() and not update else None
    if baseline is None and not update:
        warnings.warn(
            f"no baseline for this device ({file.name}); --update-baseline stores one", stacklevel=2
        )
    ceilings = measure_ceilings(GraphTimer())
    current = Session(ceilings, request.config.getoption("--regression-threshold"), baseline)
    yield current
    if update and current.rows:
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": "bench",
            "device": gpus()[torch.cuda.current_device()],
            "versions": versions(),
            "ceilings": ceilings,
            "rows": current.rows,
        }
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n")

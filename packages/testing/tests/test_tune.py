"""The search of `narrowkv tune`, over configurations whose times and faults are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from narrowkv.testing.bench.timing import Timing
from narrowkv.testing.tune import TUNED_FAMILIES, TUNED_MODELS, SparseHeads, TuneSettings
from narrowkv.testing.tune.families import family_of
from narrowkv.testing.tune.search import Gpu, Shapes, TunedCall, check_shapes, tune_shapes
from narrowkv.testing.words import Heads


@dataclass(frozen=True)
class Made:
    """A configuration by its times at two shapes."""

    times: tuple[float, float]
    fault: str = ""


SHIPPED = Made((100.0, 50.0))


class MadeGpu(Gpu):
    """A GPU on which a configuration takes the time that it says."""

    def __init__(self) -> None:
        self.timer: Any = self
        self.replayed: list[float] = []
        self.compiled: list[Any] = []
        self.until = math.inf

    def capture(self, call: Callable[[], Any]) -> Any:
        call()
        return call

    def replay(self, graph: Any) -> Timing:
        us = graph.us
        self.replayed.append(us)
        return Timing(us, us * 0.99, us * 1.01, 10)

    def wait(self) -> None:
        pass

    def compile(self, shapes: Shapes[Any], choices: Iterable[Any]) -> None:
        self.compiled += choices

    def crashes(self, call: TunedCall) -> bool:
        choice = call.run.choice  # type: ignore[attr-defined]
        assert choice in self.compiled or None in self.compiled
        return bool(choice.fault == "crashes")

    def spills(self, call: TunedCall) -> int:
        return 8 if call.run.choice.fault == "spills" else 0  # type: ignore[attr-defined]


class Run:
    def __init__(self, index: int, choice: Made) -> None:
        self.choice, self.us = choice, choice.times[index]
        self._out = torch.zeros(4)

    def __call__(self) -> torch.Tensor:
        assert self.choice.fault != "crashes", "would end this process"
        if self.choice.fault == "fails":
            raise OutOfResources(2**20, 2**16, "shared memory")
        return self._out.fill_(2.0 if self.choice.fault == "wrong" else 1.0)

    def replay(self) -> None:
        self()
        if self.choice.fault == "nothing":
            self._out.fill_(torch.nan)


def _shapes(*choices: Made, refined: Callable[[Made], Sequence[Made]] = lambda _: ()) -> Shapes[Made]:
    def trial(index: int, choice: Made | None) -> TunedCall:
        run = Run(index, choice or SHIPPED)
        return TunedCall(run, lambda out: float((out - 1).abs().max()), 0.01)

    trials = (partial(trial, 0), partial(trial, 1))
    return Shapes("decode", "a class", ("4 x 64", "3 x 48"), "the shipped one", choices, refined, trials)


FAULTS = (
    Made((1.0, 1.0), "spills"), Made((2.0, 1.0), "wrong"), Made((3.0, 1.0), "fails"),
    Made((4.0, 1.0), "nothing"), Made((5.0, 1.0), "crashes"),
)  # fmt: skip


def test_the_fastest_right_configuration_is_kept_and_others_are_counted() -> None:
    row = tune_shapes(_shapes(Made((90.0, 45.0)), *FAULTS, Made((80.0, 45.0))), MadeGpu())
    assert row.choice == {"times": (80.0, 45.0), "fault": ""}
    assert (row.shipped_us, row.tuned_us) == ((100.0, 50.0), (80.0, 45.0))
    assert (row.tried, row.spilled, row.wrong, row.failed, row.crashed) == (7, 1, 2, 1, 1)
    assert row.spread == pytest.approx(0.02)
    assert row.shipped == "the shipped one"


@pytest.mark.parametrize(
    "times", [(60.0, 52.0), (99.0, 49.5), (120.0, 60.0)], ids=["slower at one", "within the noise", "slower"]
)
def test_the_shipped_configuration_stays_unless_another_is_faster_everywhere(
    times: tuple[float, float],
) -> None:
    row = tune_shapes(_shapes(Made(times)), MadeGpu())
    assert row.choice is None
    assert row.tuned_us == row.shipped_us == (100.0, 50.0)


def test_a_configuration_that_is_much_slower_is_not_timed_at_the_second_shape() -> None:
    gpu = MadeGpu()
    tune_shapes(_shapes(Made((80.0, 40.0)), Made((500.0, 41.0))), gpu)
    assert 500.0 in gpu.replayed
    assert 41.0 not in gpu.replayed


def test_variants_of_the_fastest_are_tried_after_it() -> None:
    row = tune_shapes(
        _shapes(
            Made((80.0, 40.0)), Made((90.0, 40.0)), refined=lambda best: [Made((best.times[0] - 10, 40.0))]
        ),
        MadeGpu(),
    )
    assert row.choice == {"times": (70.0, 40.0), "fault": ""}
    assert row.tried == 3


def test_nothing_is_tried_when_the_time_is_over() -> None:
    gpu = MadeGpu()

    def tell(done: int, total: int) -> None:
        if done == 2:
            gpu.until = 0.0

    with pytest.raises(TimeoutError):
        tune_shapes(_shapes(*(Made((80.0 - i, 40.0)) for i in range(5))), gpu, tell)
    assert gpu.replayed == [100.0, 50.0, 80.0, 40.0, 79.0, 40.0]


def test_a_wrong_shipped_configuration_ends_the_search() -> None:
    shapes = _shapes(Made((80.0, 40.0)))
    broken = Shapes(
        *(getattr(shapes, name) for name in ("family", "name", "measured", "shipped", "choices", "refined")),
        trials=tuple(lambda choice, make=make: make(choice or FAULTS[1]) for make in shapes.trials),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="decode, a class: the shipped configuration is wrong"):
        tune_shapes(broken, MadeGpu())


def test_without_times_configurations_are_only_checked() -> None:
    gpu = MadeGpu()
    counts = check_shapes(_shapes(Made((80.0, 40.0)), *FAULTS), gpu)
    assert (counts.tried, counts.spilled, counts.wrong, counts.failed, counts.crashed) == (6, 1, 2, 1, 1)


@pytest.mark.parametrize("family", TUNED_FAMILIES)
@pytest.mark.parametrize("model", TUNED_MODELS)
def test_measured_shapes_of_a_class_have_its_name_and_classes_differ(model: str, family: str) -> None:
    found = family_of(family, TuneSettings(TUNED_MODELS[model]), "cpu")
    names = [found.name_of(chosen) for chosen in found.classes()]
    sparse = isinstance(TUNED_MODELS[model], SparseHeads)
    if sparse != (family == "sparse") or (family == "sage" and TUNED_MODELS[model].head_dim > 128):
        assert names == []
        return
    assert len(names) == len(set(names)) >= 10
    for chosen in found.classes():
        assert {found.name_of((shape,)) for shape in chosen} == {found.name_of(chosen)}


SMALL = {
    "decode": Heads(4, 1, 64), "prefill": Heads(4, 1, 64), "sage": Heads(2, 1, 64),
    "sparse": SparseHeads(16, 40, window=8),
}  # fmt: skip


@pytest.mark.parametrize("family", TUNED_FAMILIES)
def test_configurations_of_a_family_give_the_results_of_the_reference(family: str) -> None:
    settings = TuneSettings(SMALL[family], batches=(2,), contexts=(64,), chunks=(8,))
    found = family_of(family, settings, "cpu")
    shapes = found.open(found.classes()[0])
    last = shapes.choices[-1]
    for choice in (None, last, *shapes.refined(last)[:1]):
        trial = shapes.trials[-1](choice)
        out = trial.run()
        assert trial.error(out) <= trial.bound
        out.zero_()
        assert trial.error(out) > trial.bound

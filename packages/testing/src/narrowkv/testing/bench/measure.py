"""The calls of a bench: measured and compared with ceilings of the same run, or modelled for AMD targets.

A measured call is checked before and after it is timed. A modelled call is planned at its full size; a
smaller call with the same kernels and the same split of the keys is traced, and its workgroups and passes are
multiplied by a `Scale`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from narrowkv.cdna_emulator import EmulatorError
from narrowkv.cdna_emulator.timing import PeakError
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import executing
from narrowkv.runtime.targets import get_target
from narrowkv.testing.bench.timing import Ceilings, GraphTimer, Timing
from narrowkv.testing.model import ModelExecutor, main_launch, waits
from narrowkv.testing.records import SCHEMA_VERSION, number

__all__ = [
    "Bench", "Call", "Columns", "ModelCall", "ModelRow", "Record", "Row", "check", "measure",
    "microseconds", "model_row", "ratio_of", "time_checked",
]  # fmt: skip


Record = Mapping[str, Any]
"""A measured row as an object."""
Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Columns:
    """A bench's own columns: by header, the name of a record's value or a function of the record.

    Attributes:
        labels: words, on the left; sizes: numbers, before the times; figures: after the times.
        series: the values that tell the series of a plot apart.
        shown: which of the records a table shows.
    """

    labels: Mapping[str, str | Callable[[Record], str]] = field(default_factory=dict)
    sizes: Mapping[str, str | Callable[[Record], str]] = field(default_factory=dict)
    series: tuple[str, ...] = ()
    figures: Mapping[str, Callable[[Record], str]] = field(default_factory=dict)
    shown: Callable[[Sequence[Record]], Sequence[Record]] = list


def keeping_last(make: Callable[[Key], Made], key: Callable[[Key], object]) -> Callable[[Key], Made]:
    """`make`, whose last result serves further arguments of its key, and is freed before another is made."""
    kept: dict[object, Made] = {}

    def get(argument: Key) -> Made:
        if key(argument) not in kept:
            kept.clear()  # frees the old one before the new one is made
            kept[key(argument)] = make(argument)
        return kept[key(argument)]

    return get


def microseconds(name: str) -> Callable[[Record], str]:
    """A record's time in microseconds."""
    return lambda row: number(row[name], 4)


def ratio_of(name: str) -> Callable[[Record], str]:
    """A record's ratio, or a dash."""
    return lambda row: "-" if row[name] is None else f"{row[name]:.2f}"


@dataclass(frozen=True)
class ModelCall:
    """One call for the timing model.

    Attributes:
        name: tells it from other calls of the same sizes.
        shape: a dataclass of its sizes.
        flops: multiplications and additions of its matrix products.
        hbm_share: see `narrowkv.cdna_emulator.timing.predict`.
        trace: makes a smaller call, after it has set the executor's scale.
        bytes_touched: bytes that the call must read or write, each counted once; None if they depend on the
            data.
    """

    name: str
    shape: Any
    flops: float
    hbm_share: float
    trace: Callable[[ModelExecutor], object]
    bytes_touched: float | None = None


@dataclass(frozen=True)
class ModelRow:
    """One call on one target under the timing model; every figure is a model's.

    Attributes:
        target, name, shape: which call.
        model_us: time of all its launches.
        model_bytes_per_s: bytes touched over it; model_flops_per_s: flops over it.
        model_bound: what bounds the kernel with the matrix instructions.
        model_waits: what its waves wait for.
        model_kernels_us: time of each launch.
        refused: why there are no figures.
    """

    target: str
    name: str
    shape: dict[str, Any]
    model_us: float | None = None
    model_bytes_per_s: float | None = None
    model_flops_per_s: float | None = None
    model_bound: str = ""
    model_waits: str = ""
    model_kernels_us: dict[str, float] | None = None
    refused: str = ""


def model_row(call: ModelCall, target: str) -> ModelRow:
    """The row of a call on a target."""
    row = ModelRow(target, call.name, asdict(call.shape))
    executor = ModelExecutor(target, call.hbm_share)
    try:
        with executing(executor):
            call.trace(executor)
    except (ValueError, TypeError, EmulatorError) as error:
        return replace(row, refused=f"{type(error).__name__}: {error}")
    seconds = sum(launch.prediction.seconds for launch in executor.modelled)
    main = main_launch(executor.modelled).prediction
    try:
        _check_peaks(call, target, seconds)
    except PeakError as error:
        return replace(row, refused=f"PeakError: {error}")
    return replace(
        row, model_us=1e6 * seconds,
        model_bytes_per_s=None if call.bytes_touched is None else call.bytes_touched / seconds,
        model_flops_per_s=call.flops / seconds, model_bound=main.bound.split(" (")[0],
        model_waits=waits(main),
        model_kernels_us={launch.name: 1e6 * launch.prediction.seconds for launch in executor.modelled},
    )  # fmt: skip


def _check_peaks(call: ModelCall, target: str, seconds: float) -> None:
    figures = get_target(target).figures
    assert figures is not None
    most = max(figures.bf16_flops_per_clk, figures.fp8_flops_per_clk, figures.fp4_flops_per_clk)
    rates = {
        "bytes/s of HBM": ((call.bytes_touched or 0.0) / seconds, figures.hbm_bytes_per_s),
        "flops of the matrix units": (call.flops / seconds, most * figures.compute_units * figures.clock_hz),
    }
    for what, (rate, peak) in rates.items():
        if rate > peak:
            raise PeakError(
                f"{1e6 * seconds:.2f} us would be {rate:.3g} {what}, above the peak of {peak:.3g}: the "
                "traced workgroups do not stand for the call"
            )


Shape = TypeVar("Shape")


@dataclass(frozen=True)
class Call:
    """One call to measure.

    Attributes:
        labels: what tells it from other calls of the same sizes, such as `{"mode": "fused"}`.
        prepare: does the host's work once and returns the function to time, which a graph can capture and
            which returns its output.
        bytes_touched: bytes that the call must read or write, each counted once.
        flops: multiplications and additions of its matrix products.
        error: relative L1 error of an output that has no NaN; None times the call unchecked.
        bound: largest error that passes.
        extra: further figures of the row by name, each measured after the call has passed; a name with None
            is not measured.
        is_peer: whether it is another project's implementation: what it raises becomes part of its row.
    """

    labels: Mapping[str, str]
    prepare: Callable[[], Callable[[], torch.Tensor]]
    bytes_touched: float
    flops: float
    error: Callable[[torch.Tensor], float] | None = None
    bound: float = math.inf
    extra: Mapping[str, Callable[[GraphTimer], float] | None] = field(default_factory=dict)
    is_peer: bool = False


@dataclass(frozen=True)
class Row:
    """One measured call; None is a figure that was not measured.

    Attributes:
        labels, sizes: which call it was.
        relative_l1: the largest error of the checks before and after timing.
        differing_replays: replays of its graph after timing whose output had other bits than the first.
        median_us, p10_us, p90_us: device time.
        floor_us: lower bound of the time by the ceilings of this run; ratio_to_floor: median over it.
        bytes_per_s, flops_per_s: `Call.bytes_touched` and `Call.flops` over the median.
        status: "pass", "fail", "inexact" (another implementation that misses the bound) or "refused".
        detail: the reason of a status other than "pass".
        extra: further figures.
    """

    labels: dict[str, str]
    sizes: dict[str, Any]
    relative_l1: float | None = None
    differing_replays: int | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    floor_us: float | None = None
    ratio_to_floor: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    status: str = "pass"
    detail: str = ""
    extra: dict[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """A flat record for JSON and CSV."""
        figures = {
            name: value for name, value in vars(self).items() if name not in ("labels", "sizes", "extra")
        }
        return {**self.labels, **self.sizes, **figures, **self.extra}


def time_checked(call: Call, timer: GraphTimer) -> tuple[float | None, int | None, Timing | None]:
    """Checks a call in a graph, times it, and checks further replays.

    Before each check the output, which a graph always writes to the same place, is filled with NaN. A call
    whose first error is NaN or above the bound is not timed.

    Returns:
        The largest error, how many of `timer.checked_replays` replays gave other bits than the first, timing.
    """
    run = call.prepare()
    outputs: list[torch.Tensor] = []

    def once() -> None:
        outputs[:] = [run()]

    graph = timer.capture(once)
    if call.error is None:
        return None, None, timer.replay(graph)
    error_of = call.error

    def replay() -> torch.Tensor:
        outputs[0].fill_(math.nan)
        graph.replay()
        timer.wait()
        return outputs[0]

    def error(o: torch.Tensor) -> float:
        return error_of(o) if bool(torch.isfinite(o).all()) else math.nan

    first = replay().clone()
    worst, differing = error(first), 0
    if not worst <= call.bound:
        return worst, None, None
    timing = timer.replay(graph)
    for _ in range(timer.checked_replays):
        if not torch.equal(replay(), first):
            differing += 1
            worst = max(worst, error(outputs[0]), key=lambda e: math.inf if math.isnan(e) else e)
    return worst, differing, timing


def measure(call: Call, sizes: Mapping[str, Any], ceilings: Ceilings, timer: GraphTimer) -> Row:
    """Checks and times one call. Only a peer's exceptions become a row of status "refused"."""
    row = Row(dict(call.labels), dict(sizes), extra=dict.fromkeys(call.extra))
    try:
        error, differing, timing = time_checked(call, timer)
    except Exception as problem:
        return _refused(row, call, problem)
    row = replace(row, relative_l1=error, differing_replays=differing)
    if timing is None or not (error is None or error <= call.bound):
        when = "before" if timing is None else "after"
        detail = f"relative L1 {error:.3g} {when} timing, bound {call.bound:g}"
        return replace(row, status="inexact" if call.is_peer else "fail", detail=detail)
    seconds, floor = timing.median_us * 1e-6, ceilings.floor_us(call.bytes_touched, call.flops)
    return replace(
        row, median_us=timing.median_us, p10_us=timing.p10_us, p90_us=timing.p90_us, floor_us=floor,
        ratio_to_floor=timing.median_us / floor, bytes_per_s=call.bytes_touched / seconds,
        flops_per_s=call.flops / seconds,
        extra={name: None if figure is None else figure(timer) for name, figure in call.extra.items()},
    )  # fmt: skip


def _refused(row: Row, call: Call, problem: Exception) -> Row:
    """The row of a peer that raised. What another call raised is raised again."""
    if not call.is_peer:
        raise problem
    reason = (str(problem).strip().splitlines() or [""])[0]
    kind = "" if isinstance(problem, UnsupportedError) else f"{type(problem).__name__}: "
    return replace(row, status="refused", detail=f"{kind}{reason}")


def check(call: Call, sizes: Mapping[str, Any]) -> Row:
    """The row of a call whose answer is checked and which is not timed: where no GPU has device times."""
    row = Row(dict(call.labels), dict(sizes), extra=dict.fromkeys(call.extra))
    try:
        o = call.prepare()()
    except Exception as problem:
        return _refused(row, call, problem)
    error = math.nan if call.error is None or not bool(torch.isfinite(o).all()) else call.error(o)
    if error <= call.bound:
        return replace(row, relative_l1=error)
    status = "inexact" if call.is_peer else "fail"
    return replace(
        row, relative_l1=error, status=status, detail=f"relative L1 {error:.3g}, bound {call.bound:g}"
    )


@dataclass(frozen=True, kw_only=True)
class Bench(Generic[Shape]):
    """The calls of one operation at given sizes.

    Attributes:
        name: of the bench.
        columns: of its table.
        calls: of a shape; each is measured before the next is made.
        modelled: calls of a shape for the timing model of AMD targets.
        sizes: what a row says about its shape, which is a dataclass unless this is given.
        seconds: see `GraphTimer`.
        ratio: name of the figure that compares a row with the fastest of the calls for which
            `is_baseline` holds; empty for none.
        is_baseline: whether other rows of the shape are compared with a row.
    """

    name: str
    columns: Columns
    calls: Callable[[Shape], Iterable[Call]]
    modelled: Callable[[Shape], Iterable[ModelCall]] = lambda shape: ()
    sizes: Callable[[Any], dict[str, Any]] = asdict
    seconds: float = 0.5
    ratio: str = ""
    is_baseline: Callable[[Row], bool] = lambda row: False

    def rehearse(self, shape: Shape) -> tuple[Row, ...]:
        """The rows of a shape whose calls are checked and not timed."""
        rows = [check(call, self.sizes(shape)) for call in self.calls(shape)]
        ratio = {self.ratio: None} if self.ratio else {}
        return tuple(replace(row, extra={**row.extra, **ratio}) for row in rows)

    def measure(self, shape: Shape, ceilings: Ceilings, timer: GraphTimer) -> tuple[Row, ...]:
        """The rows of a shape."""
        sizes = self.sizes(shape)
        rows = [measure(call, sizes, ceilings, timer) for call in self.calls(shape)]
        if not self.ratio:
            return tuple(rows)
        base = min((row.median_us for row in rows if self.is_baseline(row) and row.median_us), default=None)

        def ratio(row: Row) -> float | None:
            if base is None or row.median_us is None or self.is_baseline(row):
                return None
            return row.median_us / base

        return tuple(replace(row, extra={**row.extra, self.ratio: ratio(row)}) for row in rows)


# What tells rows of `bench decode` apart, in a baseline and in a later run.
KEYS = (
    "backend",
    "batch",
    "context",
    "page_size",
    "num_kv_heads",
    "ratio",
    "head_dim",
    "q",
    "format",
)
_FIGURE = "ratio_to_floor"


def baseline_file(folder: Path, device: str) -> Path:
    """The file of a device's baseline: its name in lower case, joined by dashes."""
    return folder / ("-".join(re.findall(r"[a-z0-9]+", device.lower())) + ".json")


def load_baseline(path: Path) -> dict[str, Any]:
    """The document of an earlier run of `narrowkv bench decode`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a document; the message says what is wrong.
    """
    try:
        document: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON document of `narrowkv bench`: {error}") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if rows is None or document.get("command") != "bench" or not isinstance(rows, list):
        raise ValueError(f"{path} must be a document of `narrowkv bench` with rows")
    if document.get("schema_version") != SCHEMA_VERSION:
        version = document.get("schema_version")
        raise ValueError(f"{path} must have schema_version {SCHEMA_VERSION}, got {version!r}")
    for row in rows:
        figure = row.get(_FIGURE) if isinstance(row, dict) else None
        if not isinstance(row, dict) or any(key not in row for key in KEYS):
            raise ValueError(f"{path} must have rows with {', '.join(KEYS)}")
        if figure is not None and not (isinstance(figure, int | float) and figure > 0):
            raise ValueError(f"{path} must have rows whose {_FIGURE} is positive, got {figure!r}")
    return dict(document)


def changes(baseline: Record, rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Compares every row that both runs measured: by ratios to the floor, which depend less on the run.

    Returns:
        Of each row its values of `KEYS`; before, now: time over the floor; change: by which share it became
        slower, 0.05 is five per cent.
    """

    def key(row: Record) -> tuple[Any, ...]:
        return tuple(row[name] for name in KEYS)

    before = {key(row): float(row[_FIGURE]) for row in baseline["rows"] if row.get(_FIGURE) is not None}
    found = []
    for row in rows:
        now, was = row.get(_FIGURE), before.get(key(row))
        if now is not None and was is not None:
            same = dict(zip(KEYS, key(row), strict=True))
            found.append({**same, "before": was, "now": float(now), "change": now / was - 1.0})
    return found


def regressions(found: Sequence[dict[str, Any]], threshold: float) -> list[dict[str, Any]]:
    """The changes that are slower by more than `threshold`, worst first."""
    return sorted((c for c in found if c["change"] > threshold), key=lambda c: c["change"], reverse=True)

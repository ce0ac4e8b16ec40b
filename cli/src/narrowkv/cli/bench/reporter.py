"""What every bench does around its calls: this run's ceilings, checks around the clock, table, document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from narrowkv.cli.bench.ceilings import Ceilings, measure_ceilings
from narrowkv.cli.bench.timing import FLUSH_BYTES, GraphTimer, Timing
from narrowkv.cli.environment import gpus, versions
from narrowkv.cli.places import find_place
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, number
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.workers import run_all


@dataclass(frozen=True)
class BenchRow:
    """One measured call; a bench adds which call it was, and what else it measured. None is not measured.

    Attributes:
        shape: a dataclass, the sizes that were called.
        relative_l1: the worse of the checks before and after timing.
        median_us, p10_us, p90_us: device time.
        floor_us: the least possible time by the ceilings of this run; ratio_to_floor: median over it.
        bytes_per_s: bytes touched once over the median; flops_per_s: flops over it.
        status: "pass", "fail", "inexact" (another implementation that misses the bound) or "refused".
        detail: why.
    """

    shape: Any
    _: KW_ONLY
    relative_l1: float | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    floor_us: float | None = None
    ratio_to_floor: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    status: str = "pass"
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON and CSV: what was called, its sizes, what was measured."""
        own = [f.name for f in fields(self) if not f.kw_only and f.name != "shape"]
        measured = [f.name for f in fields(self) if f.kw_only]
        sizes = {f.name: getattr(self.shape, f.name) for f in fields(self.shape)}
        return {n: getattr(self, n) for n in own} | sizes | {n: getattr(self, n) for n in measured}


Row = TypeVar("Row", bound=BenchRow)
Step = TypeVar("Step")


def timed(row: Row, timing: Timing, ceilings: Ceilings, bytes_touched: float, flops: float) -> Row:
    """The row with its times and rates."""
    seconds, floor = timing.median_us * 1e-6, ceilings.floor_us(bytes_touched, flops)
    return replace(
        row, median_us=timing.median_us, p10_us=timing.p10_us, p90_us=timing.p90_us, floor_us=floor,
        ratio_to_floor=timing.median_us / floor, bytes_per_s=bytes_touched / seconds,
        flops_per_s=flops / seconds,
    )  # fmt: skip


def time_checked(
    graph: Any, error: Callable[[], float], bound: float, timer: GraphTimer
) -> tuple[float, Timing | None]:
    """Checks a captured call, times it, and checks it again: (the worse error, timing).

    A call whose first error is over the bound, or NaN, is not timed.
    """
    before = error()
    if not before <= bound:
        return before, None
    timing = timer.replay(graph)
    return max(before, error(), key=lambda e: math.inf if math.isnan(e) else e), timing


def judged(row: Row, error: float, timing: Timing | None, bound: float, wrong: str = "fail") -> Row:
    """The row with its error; of status `wrong`, and why, where that is over the bound."""
    row = replace(row, relative_l1=error)
    if timing is not None and error <= bound:
        return row
    when = "before" if timing is None else "after"
    return replace(row, status=wrong, detail=f"relative L1 {error:.3g} {when} timing, bound {bound:g}")


@dataclass(frozen=True)
class Columns(Generic[Row]):
    """A bench's own columns: a header, and what a row has there.

    Attributes:
        labels: words, on the left.
        sizes: numbers, before the times.
        others: what else was measured, after the times.
    """

    labels: Mapping[str, Callable[[Row], str]]
    sizes: Mapping[str, Callable[[Row], object]]
    others: Mapping[str, Callable[[Row], str]] = field(default_factory=dict)

    def sheet(self, rows: Sequence[Row]) -> Sheet:
        """A table of rows."""
        times = ("us", "p10", "p90", "floor us", "x floor")
        sheet = Sheet(
            [
                *keys(*self.labels),
                *(Column(name, right=True, key=True) for name in self.sizes),
                *numbers(*times, *self.others, "GB/s", "TFLOP/s", "rel. L1"),
                Column(""),
            ]
        )
        for row in rows:
            sheet.add(
                *(show(row) for show in self.labels.values()),
                *(show(row) for show in self.sizes.values()),
                *(number(x, 4) for x in (row.median_us, row.p10_us, row.p90_us, row.floor_us)),
                ratio(row.ratio_to_floor),
                *(show(row) for show in self.others.values()),
                number(row.bytes_per_s / 1e9, 4) if row.bytes_per_s else "-",
                number(row.flops_per_s / 1e12) if row.flops_per_s else "-",
                f"{row.relative_l1:.2e}" if row.relative_l1 is not None else "-",
                "" if row.status == "pass" else f"{row.status}: {row.detail}",
                style={"pass": "", "fail": "bold red"}.get(row.status, "yellow"),
            )
        return sheet


def ratio(value: float | None) -> str:
    """A multiple, or a dash."""
    return "-" if value is None else f"{value:.2f}"


class BenchRun(Generic[Row]):
    """One run of a bench.

    Args:
        name: of the bench.
        kind: type of its rows.
        report: where it goes.
        samples, seconds: of a `GraphTimer`.
        without_a_gpu: the commands that work where this one cannot.

    Attributes:
        rows: what was measured.
        ceilings: of this run; None if it was interrupted before.
        place: the GPU in words.

    Raises:
        UnsupportedHereError: there is no GPU.
    """

    def __init__(
        self,
        name: str,
        kind: type[Row],
        report: Report,
        *,
        samples: int,
        seconds: float = 0.5,
        without_a_gpu: str,
    ) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedHereError(
                f"bench measures device time and needs a GPU; torch {torch.__version__} sees none. "
                f"{without_a_gpu} work without one"
            )
        self.name = name
        self._kind = kind
        self.place = find_place("gpu").description
        self.rows: list[Row] = []
        self.ceilings: Ceilings | None = None
        self._report = report
        self._samples = samples
        self._timer = GraphTimer(samples=samples, seconds=seconds)
        self._interrupted = False

    def measure(
        self, steps: Sequence[Step], work: Callable[[Step, Ceilings, GraphTimer], Sequence[Row]]
    ) -> None:
        """Measures the ceilings, and then the rows of every step that --resume does not have.

        Ctrl-C keeps the rows that were finished.
        """
        try:
            ceilings = self.ceilings = measure_ceilings(self._timer)
        except KeyboardInterrupt:
            self._interrupted = True
            return
        kept = self._report.files.resume is not None

        def rows_of(step: Step) -> tuple[Row, ...]:
            return tuple(work(step, ceilings, self._timer))

        def take(step: Step, rows: tuple[Row, ...]) -> str:
            self.rows += rows
            return str(step)

        self._interrupted = run_all(
            self._report,
            steps,
            rows_of,
            tuple[self._kind, ...],  # type: ignore[name-defined]
            take,
            what="measuring",
            settings={"bench": self.name, "samples": self._samples},
        )
        if kept:
            self._report.note("rows that --resume kept have the floor of the run that measured them")

    def show(self, columns: Columns[Row]) -> None:
        """The GPU, its ceilings and the table."""
        if self.ceilings is not None:
            self._report.say(f"{self.place}; measured ceilings: {self.ceilings}")
        self._report.show(columns.sheet(self.rows))

    def finish(self, series: Sequence[str], otherwise: ExitCode = ExitCode.OK, **more: Any) -> ExitCode:
        """Writes the files; the code is numerical if a row failed, else `otherwise`.

        Args:
            series: the fields of a row that tell series of the plot apart.
            otherwise: the code.
            more: more of the document.
        """
        records = [row.as_dict() for row in self.rows]
        body = {
            "bench": self.name,
            "device": gpus()[torch.cuda.current_device()],
            "versions": versions(),
            "method": {"flush_bytes": FLUSH_BYTES, "flush": "read", "samples": self._samples, "graph": True},
            "ceilings": self.ceilings,
            "rows": records,
            **more,
        }

        def plot(path: Path) -> None:
            from narrowkv.cli.plot import plot_roofline

            assert self.ceilings is not None  # there are rows
            title = f"{self.name} on {self.place}, measured"
            plot_roofline(records, self.ceilings, path, title=title, series=series)

        failed = any(row.status == "fail" for row in self.rows)
        code = ExitCode.NUMERICAL if failed else otherwise
        return self._report.finish(body, code, interrupted=self._interrupted, rows=records, plot=plot)

"""`narrowkv bench decode`: batches, contexts, pages, ratios, formats; each row is checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.cli.backends import PEERS, Backend, NotAnsweringError
from narrowkv.cli.bench.baseline import Change, changes, load_baseline, regressions
from narrowkv.cli.bench.ceilings import Ceilings, measure_ceilings
from narrowkv.cli.bench.timing import FLUSH_BYTES, GraphTimer, Timing
from narrowkv.cli.bench.workload import DecodeShape, Storage
from narrowkv.cli.cases import DecodeInputs
from narrowkv.cli.contracts import BOUND_16_BIT_QUERY, DECODE, Contract
from narrowkv.cli.environment import gpus, versions
from narrowkv.cli.places import find_place
from narrowkv.cli.report import (
    ExitCode,
    Report,
    UnsupportedHereError,
    UsageError,
    check_writable,
    number,
    to_csv,
)
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.accuracy import compare

# Above this many tokens a sample of the sequences is compared; that all outputs were written always is.
_CHECK_ALL_TOKENS = 2**18
_CHECKED_SEQUENCES = 4


@dataclass(frozen=True)
class BenchOptions:
    """What to measure and what to do with it.

    Attributes:
        samples: the most samples of a row.
        against: an earlier document to compare with.
        threshold: by how much a row may become slower.
        csv_file, plot_file: further outputs.
        peers: also time other backends.
    """

    samples: int = 50
    against: Path | None = None
    threshold: float = 0.05
    csv_file: Path | None = None
    plot_file: Path | None = None
    peers: bool = False


@dataclass(frozen=True)
class Row:
    """One measured call.

    Attributes:
        shape: what was called.
        backend: who was called.
        relative_l1: the worse of the checks before and after timing; None if there was none.
        median_us, p10_us, p90_us: device time.
        floor_us: the least possible time by the ceilings of this run.
        ratio_to_floor: median over floor.
        bytes_per_s: bytes touched once over the median.
        flops_per_s: flops over the median.
        status: "pass", "fail" or "refused".
        detail: why.
    """

    shape: DecodeShape
    backend: str
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
        """Flat, for JSON and CSV."""
        figures = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("shape", "backend")
        }
        return {"backend": self.backend, **self.shape.as_row(), **figures}


@dataclass(frozen=True)
class Checked:
    """Which sequences of a row are compared with the reference, and what it says."""

    sequences: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, cache: PagedKVCache, table: PageTable, shape: DecodeShape) -> Checked:
        """The reference of all sequences of a small row, of some of a large one."""
        count = (
            shape.batch
            if shape.batch * shape.context <= _CHECK_ALL_TOKENS
            else min(shape.batch, _CHECKED_SEQUENCES)
        )
        sequences = torch.linspace(0, shape.batch - 1, count, device=q.device).round().long()
        assert table.seq_lens is not None
        part = PageTable.from_block_table(
            table.page_ids[sequences].contiguous(),
            table.seq_lens[sequences].contiguous(),
            page_size=table.page_size,
        )
        expected = paged_decode_reference(q[sequences], cache, part)
        assert isinstance(expected, torch.Tensor)
        return cls(sequences, expected)

    def error(self, o: torch.Tensor) -> float:
        """Relative L1 of the checked sequences; NaN if any output at all was left unwritten."""
        if not bool(torch.isfinite(o).all()):
            return math.nan
        return compare(o[self.sequences], self.expected).relative_l1


def time_call(
    call: Callable[[], torch.Tensor], check: Checked, timer: GraphTimer
) -> tuple[float, Timing | None]:
    """Checks a call in a graph, times it, and checks it again: (worse error, timing).

    Before each check the output, which a graph always writes to the same place, is filled with NaN. A call
    that fails the first check is not timed.
    """
    kept: list[torch.Tensor] = []

    def once() -> None:
        kept[:] = [call()]

    graph = timer.capture(once)

    def error() -> float:
        kept[0].fill_(math.nan)
        graph.replay()
        timer.wait()
        return check.error(kept[0])

    before = error()
    if not before <= BOUND_16_BIT_QUERY:
        return before, None
    timing = timer.replay(graph)
    return max(before, error(), key=lambda e: math.inf if math.isnan(e) else e), timing


def _row(shape: DecodeShape, backend: str, ceilings: Ceilings, error: float, timing: Timing | None) -> Row:
    if timing is None or not error <= BOUND_16_BIT_QUERY:
        when = "before" if timing is None else "after"
        detail = f"relative L1 {error:.3g} {when} timing, bound {BOUND_16_BIT_QUERY:g}"
        return Row(
            shape, backend, error, status="fail" if backend == "narrowkv" else "inexact", detail=detail
        )
    floor = ceilings.floor_us(shape.bytes_touched, shape.flops)
    return Row(
        shape,
        backend,
        error,
        timing.median_us,
        timing.p10_us,
        timing.p90_us,
        floor,
        timing.median_us / floor,
        shape.bytes_touched / (timing.median_us * 1e-6),
        shape.flops / (timing.median_us * 1e-6),
    )


def measure(
    shape: DecodeShape, storage: Storage, ceilings: Ceilings, timer: GraphTimer, peers: bool
) -> list[Row]:
    """The rows of one shape: narrowkv's, then every peer's that is here."""
    q, cache, table = storage.inputs(shape)
    check = Checked.of(q, cache, table, shape)
    plan = plan_decode(q, cache, table)
    out = torch.empty_like(q)

    def ours() -> torch.Tensor:
        o = paged_decode(q, cache, table, out=out, plan=plan)
        assert isinstance(o, torch.Tensor)
        return o

    rows = [_row(shape, "narrowkv", ceilings, *time_call(ours, check, timer))]
    for backend in PEERS if peers else ():
        if backend.absent(find_place("gpu" if q.is_cuda else "cpu")) is None:
            rows.append(
                _peer(backend, shape, DecodeInputs(q, cache, table, {}, None), check, ceilings, timer)
            )
    return rows


def _peer(
    backend: Backend,
    shape: DecodeShape,
    inputs: DecodeInputs,
    check: Checked,
    ceilings: Ceilings,
    timer: GraphTimer,
) -> Row:
    formats = shape.cache_format
    contract = Contract(DECODE, shape.q, formats.k, formats.v, shape.page_size, False, BOUND_16_BIT_QUERY)
    try:
        prepared = backend.prepare(contract, inputs)
        return _row(shape, backend.name, ceilings, *time_call(prepared, check, timer))
    except NotAnsweringError as error:
        return Row(shape, backend.name, status="refused", detail=str(error))
    except Exception as error:
        text = str(error).strip().splitlines()
        return Row(
            shape, backend.name, status="refused", detail=f"{type(error).__name__}: {text[0] if text else ''}"
        )


def bench_decode(shapes: Sequence[DecodeShape], report: Report, options: BenchOptions) -> ExitCode:
    """Measures every shape and reports; Ctrl-C keeps the rows that were finished."""
    check_writable("--csv", options.csv_file)
    check_writable("--plot", options.plot_file)
    if options.threshold < 0:
        raise UsageError(f"--threshold must not be negative, got {options.threshold}")
    baseline = load_baseline(options.against) if options.against is not None else None
    if options.plot_file is not None:
        from narrowkv.cli.bench.plot import require_matplotlib

        require_matplotlib()
    if not torch.cuda.is_available():
        raise UnsupportedHereError(
            f"bench measures device time and needs a GPU; torch {torch.__version__} sees none. "
            "`narrowkv probe` and `narrowkv inspect` work without one"
        )
    place = find_place("gpu")
    timer = GraphTimer(samples=options.samples)
    rows: list[Row] = []
    ceilings: Ceilings | None = None
    interrupted = False
    with report.progress(len(shapes) + 1, "measuring") as line:
        try:
            ceilings = measure_ceilings(timer)
            line.advance("ceilings")
            storage: Storage | None = None
            for shape in shapes:
                if storage is None or not storage.fits(shape):
                    storage = None  # the old one is freed before the new one is made
                    storage = Storage(shape)
                rows += measure(shape, storage, ceilings, timer, options.peers)
                line.advance(str(shape))
        except KeyboardInterrupt:
            interrupted = True
    if ceilings is not None:
        report.say(f"{place.description}; {_ceilings_line(ceilings)}")
    report.show(_table(rows))
    records = [row.as_dict() for row in rows]
    found = changes(baseline, records) if baseline is not None else []
    worse = regressions(found, options.threshold)
    if baseline is not None:
        _say_changes(report, baseline, found, worse, options.threshold)
    if options.csv_file is not None:
        options.csv_file.write_text(to_csv(records))
    if options.plot_file is not None and ceilings is not None and rows:
        from narrowkv.cli.bench.plot import plot_roofline

        plot_roofline(records, ceilings, options.plot_file, place.description)
    failed = any(row.status == "fail" for row in rows)
    code = ExitCode.NUMERICAL if failed else ExitCode.REGRESSION if worse else ExitCode.OK
    body = {
        "bench": "decode",
        "device": gpus()[torch.cuda.current_device()],
        "versions": versions(),
        "method": {"flush_bytes": FLUSH_BYTES, "flush": "read", "samples": options.samples, "graph": True},
        "ceilings": ceilings,
        "rows": records,
        "against": [{**c.row, "before": c.before, "now": c.now, "change": c.by} for c in found],
    }
    return report.finish(body, code, interrupted=interrupted)


def _ceilings_line(c: Ceilings) -> str:
    rates = (c.copy_bytes_per_s / 1e9, c.read_bytes_per_s / 1e9, c.bf16_flops_per_s / 1e12)
    return "measured ceilings: copy {:.0f} GB/s, read {:.0f} GB/s, bf16 {:.0f} TFLOP/s".format(*rates)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in ("backend", "format", "Q"):
        table.add_column(column)
    for column in (
        "batch",
        "context",
        "page",
        "ratio",
        "us",
        "p10",
        "p90",
        "floor us",
        "x floor",
        "GB/s",
        "TFLOP/s",
        "rel. L1",
    ):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        s = row.shape
        times = [number(x, 4) for x in (row.median_us, row.p10_us, row.p90_us, row.floor_us)]
        ratio = f"{row.ratio_to_floor:.2f}" if row.ratio_to_floor is not None else "-"
        rates = [
            number(row.bytes_per_s / 1e9, 4) if row.bytes_per_s else "-",
            number(row.flops_per_s / 1e12) if row.flops_per_s else "-",
        ]
        error = f"{row.relative_l1:.2e}" if row.relative_l1 is not None else "-"
        sizes = [str(n) for n in (s.batch, s.context, s.page_size, s.ratio)]
        colour = {"pass": "", "fail": "bold red"}.get(row.status, "yellow")
        note = Text("" if row.status == "pass" else f"{row.status}: {row.detail}", style=colour)
        table.add_row(row.backend, s.format, s.q, *sizes, *times, ratio, *rates, error, note)
    return table


def _say_changes(
    report: Report,
    baseline: dict[str, Any],
    found: Sequence[Change],
    worse: Sequence[Change],
    threshold: float,
) -> None:
    before = (baseline.get("device") or {}).get("name")
    now = torch.cuda.get_device_name()
    if before != now:
        report.note(
            f"[yellow]the baseline is of {before}, this is {now}; "
            "ratios to the floor are compared all the same[/]"
        )
    report.say(f"{len(found)} rows compared, {len(worse)} slower by more than {threshold:.0%}")
    for change in worse:
        row = ", ".join(f"{name} {value}" for name, value in change.row.items())
        report.say(f"[bold red]{change.by:+.1%}[/] x floor {change.before:.2f} -> {change.now:.2f}: {row}")

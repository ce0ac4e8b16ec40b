"""`narrowkv bench decode`: batches, contexts, pages, ratios, formats; each row is checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import DecodeInputs
from narrowkv.cli.backends import OURS, PEERS, Backend, NotAnsweringError
from narrowkv.cli.bench.baseline import Change, changes, load_baseline, regressions
from narrowkv.cli.bench.ceilings import Ceilings
from narrowkv.cli.bench.reporter import BenchRow, BenchRun, Columns, judged, time_checked, timed
from narrowkv.cli.bench.timing import GraphTimer, Timing
from narrowkv.cli.bench.workload import DecodeShape, Storage
from narrowkv.cli.contracts import BOUND_16_BIT_QUERY, DECODE, Contract
from narrowkv.cli.places import find_place
from narrowkv.cli.report import ExitCode, Report, UsageError
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
        peers: also time other backends.
        batch_invariant: measure plans whose results do not depend on the batch.
    """

    samples: int = 50
    against: Path | None = None
    threshold: float = 0.05
    peers: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True)
class Row(BenchRow):
    """One measured call of `backend`."""

    shape: DecodeShape
    backend: str


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

    return time_checked(graph, error, BOUND_16_BIT_QUERY, timer)


def _row(shape: DecodeShape, backend: str, ceilings: Ceilings, error: float, timing: Timing | None) -> Row:
    wrong = "fail" if backend == OURS.name else "inexact"
    row = judged(Row(shape, backend), error, timing, BOUND_16_BIT_QUERY, wrong)
    if timing is None or row.status != "pass":
        return row
    return timed(row, timing, ceilings, shape.bytes_touched, shape.flops)


def measure(
    shape: DecodeShape, storage: Storage, ceilings: Ceilings, timer: GraphTimer, options: BenchOptions
) -> list[Row]:
    """The rows of one shape: narrowkv's, then every peer's that is here."""
    q, cache, table = storage.inputs(shape)
    check = Checked.of(q, cache, table, shape)
    plan = plan_decode(q, cache, table, batch_invariant=options.batch_invariant)
    out = torch.empty_like(q)

    def ours() -> torch.Tensor:
        o = paged_decode(q, cache, table, out=out, plan=plan)
        assert isinstance(o, torch.Tensor)
        return o

    rows = [_row(shape, OURS.name, ceilings, *time_call(ours, check, timer))]
    for backend in PEERS if options.peers else ():
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
    contract = Contract(DECODE, shape.q, formats.k, formats.v, shape.page_size, BOUND_16_BIT_QUERY)
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
    if options.threshold < 0:
        raise UsageError(f"--threshold must not be negative, got {options.threshold}")
    if options.against is None:
        report.refuse("without --against", "threshold")
    baseline = load_baseline(options.against) if options.against is not None else None
    run: BenchRun[Row] = BenchRun(
        "decode",
        Row,
        report,
        samples=options.samples,
        without_a_gpu="`narrowkv probe` and `narrowkv inspect`",
    )
    storage: Storage | None = None

    def work(shape: DecodeShape, ceilings: Ceilings, timer: GraphTimer) -> list[Row]:
        nonlocal storage
        if storage is None or not storage.fits(shape):
            storage = None  # the old one is freed before the new one is made
            storage = Storage(shape)
        return measure(shape, storage, ceilings, timer, options)

    run.measure(shapes, work)
    run.show(_COLUMNS)
    found = changes(baseline, [row.as_dict() for row in run.rows]) if baseline is not None else []
    worse = regressions(found, options.threshold)
    if baseline is not None:
        _say_changes(report, baseline, found, worse, options.threshold)
    against = [{**c.row, "before": c.before, "now": c.now, "change": c.by} for c in found]
    code = ExitCode.REGRESSION if worse else ExitCode.OK
    return run.finish(("backend", "format"), code, against=against)


_COLUMNS: Columns[Row] = Columns(
    labels={
        "backend": lambda row: row.backend,
        "format": lambda row: row.shape.format,
        "Q": lambda row: row.shape.q,
    },
    sizes={
        "batch": lambda row: row.shape.batch,
        "context": lambda row: row.shape.context,
        "page": lambda row: row.shape.page_size,
        "ratio": lambda row: row.shape.ratio,
    },
)


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

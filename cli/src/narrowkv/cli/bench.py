"""`narrowkv bench`: tables and documents of measured and modelled rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from narrowkv.cli.report import (
    Column,
    ExitCode,
    Report,
    Sheet,
    UnsupportedHereError,
    UsageError,
    keys,
    numbers,
)
from narrowkv.cli.running import check_amd_backend, run_all
from narrowkv.testing.backends import PEERS
from narrowkv.testing.bench.host import measure_host
from narrowkv.testing.bench.measure import (
    KEYS,
    Bench,
    Columns,
    ModelCall,
    ModelRow,
    Record,
    Row,
    changes,
    load_baseline,
    model_row,
    ratio_of,
    regressions,
)
from narrowkv.testing.bench.timing import FLUSH_BYTES, Ceilings, GraphTimer, measure_ceilings
from narrowkv.testing.bench.traffic import LayerStep, choices_bench, rehearsals, traffic_bench
from narrowkv.testing.machine import gpus, versions
from narrowkv.testing.places import find_place
from narrowkv.testing.records import number

Shape = TypeVar("Shape")


def bench(
    bench: Bench[Shape], shapes: Sequence[Shape], report: Report, *, samples: int,
    settings: Record | None = None, against: Path | None = None, threshold: float = 0.05,
) -> ExitCode:  # fmt: skip
    """Measures every shape and reports; Ctrl-C keeps the shapes that were finished.

    A virtual GPU has no device times: the answers there are checked, and nothing is timed.

    Args:
        bench: makes the calls.
        shapes: what to measure.
        report: where results go.
        samples: largest number of samples of a call.
        settings: everything except their shape that the rows depend on.
        against: a document of an earlier run to compare with.
        threshold: by which share a row may become slower.

    Raises:
        UsageError: `against` is no document of a bench, or the threshold is negative.
        UnsupportedHereError: there is no GPU.
    """
    if threshold < 0:
        raise UsageError(f"--threshold must not be negative, got {threshold}")
    if against is None:
        report.refuse("without --against", "threshold")
    baseline = None if against is None else _baseline(against)
    if not torch.cuda.is_available():
        raise UnsupportedHereError(
            f"bench measures device time and needs a GPU; torch {torch.__version__} sees none. Without one, "
            f"`narrowkv bench {bench.name} --on gfx942,gfx950` gives modelled times"
        )
    gpu = find_place("gpu")
    place, timer = gpu.description, None
    if gpu.has_times:
        timer = GraphTimer(samples=samples, seconds=bench.seconds)
    else:
        report.say(f"{place} has no device times: the answers are checked, and nothing is timed.")
        report.refuse("to a virtual GPU, which has no device times", "plot", "against")
    settings = {**(settings or {}), "samples": samples}
    rows, ceilings, interrupted = _measure(bench, shapes, report, timer, settings)
    records = [row.as_dict() for row in rows]
    if ceilings is not None:
        report.say(f"{place}; measured ceilings: {ceilings}")
    report.show(bench_table(bench.columns, records))
    code, compared = _compare(report, baseline, records, threshold)
    body = {
        "bench": bench.name,
        "device": gpus()[torch.cuda.current_device()],
        "versions": versions(),
        "method": {"flush_bytes": FLUSH_BYTES, "flush": "read", "samples": samples, "graph": True},
        "ceilings": ceilings,
        "rows": records,
        "against": compared,
    }

    def plot(path: Path) -> None:
        from narrowkv.testing.plot import plot_roofline

        assert ceilings is not None  # there are rows
        title = f"{bench.name} on {place}, measured"
        plot_roofline(records, ceilings, path, title=title, series=bench.columns.series)

    if any(row.status == "fail" for row in rows):
        code = ExitCode.NUMERICAL
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=plot)


def bench_traffic(steps: Sequence[LayerStep], report: Report, *, samples: int, choices: bool) -> ExitCode:
    """Measures steps of a serving engine; without a GPU smaller ones are checked.

    Args:
        steps: what to measure.
        report: where results go.
        samples: largest number of samples of a call.
        choices: compare the automatic choice with forced ones, not with other implementations.
    """
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    peers = [peer for peer in PEERS if peer.absent(has_gpu) is None]
    chosen = choices_bench(device) if choices else traffic_bench(peers, device)
    if has_gpu:
        return bench(chosen, steps, report, samples=samples)
    report.say("There is no GPU: a rehearsal of smaller steps, whose answers are checked. Nothing is timed.")
    report.refuse("to a rehearsal", "plot")
    done, interrupted = run_all(
        report, rehearsals(steps), chosen.rehearse, tuple[Row, ...], what="rehearsing"
    )
    rows = [row for _, found in done for row in found]
    sheet = Sheet([*keys("model", "traffic", "format", "call", "choice"), *numbers("rel. L1"), Column("")])
    records = [row.as_dict() for row in rows]
    for row in records:
        labels = (row["model"], row["traffic"], row["format"], row["call"] or row["backend"], row["choice"])
        said = "" if row["status"] == "pass" else f"{row['status']}: {row['detail']}"
        sheet.add(*labels, number(row["relative_l1"], 2), said)
    report.show(sheet)
    code = ExitCode.NUMERICAL if any(row.status == "fail" for row in rows) else ExitCode.OK
    body = {"bench": chosen.name, "rehearsal": True, "versions": versions(), "rows": records}
    return report.finish(body, code, interrupted=interrupted, rows=records)


def _measure(
    bench: Bench[Shape], shapes: Sequence[Shape], report: Report, timer: GraphTimer | None, settings: Record
) -> tuple[list[Row], Ceilings | None, bool]:
    """Measures every shape; without a timer the answers are checked only.

    Returns:
        The rows; the ceilings, if there is a timer; and whether Ctrl-C ended it.
    """
    try:
        ceilings = None if timer is None else measure_ceilings(timer)
    except KeyboardInterrupt:
        return [], None, True

    def work(shape: Shape) -> tuple[Row, ...]:
        if timer is None or ceilings is None:
            return bench.rehearse(shape)
        return bench.measure(shape, ceilings, timer)

    done, interrupted = run_all(
        report, shapes, work, tuple[Row, ...], what="measuring", settings={"bench": bench.name, **settings}
    )
    if report.resume is not None:
        report.note("rows that --resume kept have the floor of the run that measured them")
    return [row for _, found in done for row in found], ceilings, interrupted


def _baseline(path: Path) -> dict[str, Any]:
    try:
        return load_baseline(path)
    except OSError as error:
        raise UsageError(
            f"--against must be a readable file, got {path}: {error.strerror or error}"
        ) from None
    except ValueError as error:
        raise UsageError(f"--against: {error}") from None


def _compare(
    report: Report, baseline: dict[str, Any] | None, records: Sequence[Record], threshold: float
) -> tuple[ExitCode, list[dict[str, Any]]]:
    """Shows rows that are slower than in the baseline; returns the exit code and all comparisons."""
    if baseline is None:
        return ExitCode.OK, []
    found = changes(baseline, records)
    worse = regressions(found, threshold)
    before, now = (baseline.get("device") or {}).get("name"), torch.cuda.get_device_name()
    if before != now:
        report.note(
            f"[yellow]the baseline is of {before}, this is {now}; ratios to the floor are compared[/]"
        )
    report.say(f"{len(found)} rows compared, {len(worse)} slower by more than {threshold:.0%}")
    for change in worse:
        row = ", ".join(f"{name} {change[name]}" for name in KEYS)
        before, now = change["before"], change["now"]
        report.say(f"[bold red]{change['change']:+.1%}[/] x floor {before:.2f} -> {now:.2f}: {row}")
    return ExitCode.REGRESSION if worse else ExitCode.OK, found


def bench_modelled(
    bench: Bench[Shape], shapes: Sequence[Shape], targets: Sequence[str], report: Report
) -> ExitCode:
    """Models every call of every shape on every target and shows the rows.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
    """
    check_amd_backend()
    report.refuse("to modelled times", "plot", "resume")

    def work(step: tuple[str, ModelCall]) -> ModelRow:
        return model_row(step[1], step[0])

    steps = [(target, call) for target in targets for shape in shapes for call in bench.modelled(shape)]
    done, interrupted = run_all(
        report, steps, work, ModelRow, what="modelling", said=lambda _, row: f"{row.target} {row.name}"
    )
    rows = [row for _, row in done]
    report.line("timing model, not a measurement")
    report.show(_model_sheet(rows))
    records = [asdict(row) for row in rows]
    body = {"bench": bench.name, "versions": versions(), "model_rows": records}
    return report.finish(body, ExitCode.OK, interrupted=interrupted, rows=records)


def _model_sheet(rows: Sequence[ModelRow]) -> Sheet:
    """A table of modelled rows, with all their sizes."""
    table = Sheet([
        *keys("target", "call", *(rows[0].shape if rows else ())),
        *numbers("model us", "model GB/s", "model TFLOP/s"),
        Column("model: bound by"), Column("model: waves wait for"),
    ])  # fmt: skip
    for row in rows:
        rates = (
            number(rate / scale) if rate else "-"
            for rate, scale in ((row.model_bytes_per_s, 1e9), (row.model_flops_per_s, 1e12))
        )
        table.add(
            row.target, row.name, *row.shape.values(), number(row.model_us, 4), *rates,
            row.model_bound or row.refused, row.model_waits, style="yellow" if row.refused else "",
        )  # fmt: skip
    return table


def bench_host(
    report: Report, *, samples: int, shapes: int, captures: Sequence[int], context: int
) -> ExitCode:
    """Measures the host time of every operation, counts kernels of random shapes, and shows both."""
    if not torch.cuda.is_available():
        report.say(
            "There is no GPU: launches do nothing, and calls take the code path of gfx942. "
            "Times are those of Python before the launch."
        )
    found = measure_host(samples, shapes, captures, context)
    for row in found["rows"]:
        planned = "planned  " if row.planned else "         "
        report.line(
            f"{row.operation:20} {planned} {number(row.host_us):>8} us   {number(row.ratio_to_add)} x add_"
        )
    for name, count in found["kernels"].items():
        report.line(f"{name:20} {count} kernels over {shapes} random shapes")
    if sizes := list(found["workspace_bytes"].values()):
        report.line(
            f"workspace of {len(sizes)} capture sizes at {context} tokens: {max(sizes)} bytes shared, "
            f"{sum(sizes)} if each has its own"
        )
    return report.finish({**found, "kernels": {"random_shapes": shapes, **found["kernels"]}}, ExitCode.OK)


def bench_table(columns: Columns, records: Sequence[Record]) -> Sheet:
    """A table of records, with the columns of their bench."""
    sheet = Sheet([
        *keys(*columns.labels), *(Column(name, right=True, key=True) for name in columns.sizes),
        *numbers("us", "p10", "p90", "floor us", "x floor", *columns.figures, "GB/s", "TFLOP/s", "rel. L1"),
        Column(""),
    ])  # fmt: skip
    for row in columns.shown(records):
        own = [
            row[get] if isinstance(get, str) else get(row)
            for get in (*columns.labels.values(), *columns.sizes.values())
        ]
        error = row["relative_l1"]
        sheet.add(
            *own,
            *(number(row[name], 4) for name in ("median_us", "p10_us", "p90_us", "floor_us")),
            ratio_of("ratio_to_floor")(row), *(show(row) for show in columns.figures.values()),
            number(row["bytes_per_s"] / 1e9, 4) if row["bytes_per_s"] else "-",
            number(row["flops_per_s"] / 1e12) if row["flops_per_s"] else "-",
            "-" if error is None else f"{error:.2e}",
            "" if row["status"] == "pass" else f"{row['status']}: {row['detail']}",
            style={"pass": "", "fail": "bold red"}.get(row["status"], "yellow"),
        )  # fmt: skip
    return sheet

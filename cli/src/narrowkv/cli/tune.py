"""`narrowkv tune`: searches configurations on this machine's GPU, and shows what a file of them holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from narrowkv.cli.report import (
    Column,
    ExitCode,
    ProgressLine,
    Report,
    Sheet,
    UnsupportedHereError,
    UsageError,
    keys,
    numbers,
)
from narrowkv.runtime.launch.warmup import Compilers, usable_cores
from narrowkv.runtime.tuned import TunedRow, TuneFile, read_tuned
from narrowkv.testing.machine import versions
from narrowkv.testing.places import Place, find_place
from narrowkv.testing.records import number
from narrowkv.testing.tune import TuneSettings
from narrowkv.testing.tune.families import TunedFamily, family_of
from narrowkv.testing.tune.search import Gpu, check_shapes, tune_shapes

Step = tuple[TunedFamily[Any, Any], Any]
"""A family, and a shape class as its `classes` gives it."""


def tune(
    report: Report, families: Sequence[str], settings: Sequence[TuneSettings], *, file: Path, minutes: float,
    samples: int, jobs: int | None,
) -> ExitCode:  # fmt: skip
    """Searches every class that the file has no row for, and writes the file after each.

    Args:
        report: where progress goes.
        families, settings: whose classes.
        file: of the rows.
        minutes: since the command began, after which nothing further is compiled or tried.
        samples: of a call, at first and in each of the last rounds.
        jobs: processes that compile.

    Raises:
        UnsupportedHereError: there is no GPU.
        UsageError: the file is of another GPU or Triton.
    """
    until = time.monotonic() + 60 * minutes - report.seconds
    if not torch.cuda.is_available():
        raise UnsupportedHereError(f"tune times kernels and needs a GPU; torch {torch.__version__} sees none")
    with Compilers(jobs or usable_cores()) as compilers:
        place = find_place("gpu")
        found = _begun(file, place)
        work = classes_in_turns(
            [family_of(name, each, place.device) for each in settings for name in families]
        )
        if not place.has_times:
            return _rehearse(report, work, Gpu(samples, compilers), place)
        return _search(report, work, Gpu(samples, compilers, until), found, file)


def classes_in_turns(families: Sequence[TunedFamily[Any, Any]]) -> list[Step]:
    """The classes of all families, one of each in turn: every family has rows when the time is over."""
    steps = ([(family, chosen) for chosen in family.classes()] for family in families)
    return [step for turn in zip_longest(*steps) for step in turn if step is not None]


def _search(report: Report, work: Sequence[Step], gpu: Gpu, found: TuneFile, file: Path) -> ExitCode:
    """Searches the classes until the time of `gpu` is over; says a line of each as it ends."""
    rows, late, interrupted = dict(found.rows), 0, False
    kept = [step for step in work if _key(step) in rows]
    with report.progress(len(work), "tuning") as line:
        try:
            for step in kept:
                line.advance(_key(step)[1])
            for step in work:
                key = _key(step)
                if step in kept or time.monotonic() > gpu.until:
                    late += step not in kept
                    continue
                begun, compiling = time.monotonic(), gpu.seconds_compiling
                try:
                    rows[key] = _tuned(step, gpu, line)
                except TimeoutError:
                    late += 1
                    continue
                except torch.cuda.OutOfMemoryError:
                    report.note(f"left out, because it does not fit in the GPU's memory: {key[1]}")
                    continue
                replace(found, rows=rows).write(file)
                line.advance(key[1])
                took = time.monotonic() - begun, gpu.seconds_compiling - compiling
                report.line(_ended(rows[key], *took))
        except KeyboardInterrupt:
            interrupted = True
    _show_rows(report, list(rows.values()))
    report.line(
        f"{len(rows)} shape classes, {len(kept)} of them from before, {late} for which no time was left"
    )
    if late or interrupted:
        report.line(f"the same command goes on with the classes that {file} lacks")
    report.line(f"to use them: export NARROWKV_TUNED={file.resolve()}")
    body = {**replace(found, rows=rows).document(), "versions": versions()}
    return report.finish(body, ExitCode.OK, interrupted=interrupted)


def _tuned(step: Step, gpu: Gpu, line: ProgressLine) -> TunedRow:
    """Draws the tensors of a class, which end with this call, and searches it."""
    family, chosen = step
    line.tell(f"compiling for {family.name_of(chosen)}")
    return tune_shapes(
        family.open(chosen), gpu, lambda done, total: line.tell(f"{done} of {total} configurations")
    )


def _ended(row: TunedRow, seconds: float, compiling: float) -> str:
    """What a class's search took and found."""
    shipped, tuned = map(_times, (row.shipped_us, row.tuned_us))
    said = f"{tuned} us instead of {shipped}" if row.choice else f"the shipped one stays: {shipped} us"
    took = f"{row.tried} configurations in {seconds:.1f} s ({compiling:.1f} s compiling)"
    return f"{row.family}, {row.shape}: {took}; {said}"


def _key(step: Step) -> tuple[str, str]:
    """The family and the name of a class: the key of its row."""
    family, chosen = step
    return family.name, family.name_of(chosen)


def _begun(file: Path, place: Place) -> TuneFile:
    """The file of an earlier run of this GPU and Triton, or a new one."""
    if not file.exists():
        return TuneFile.of(place.target, torch.cuda.get_device_name())
    try:
        found = read_tuned(file)
    except ValueError as error:
        raise UsageError(f"--file: {error}, or give another file") from None
    if why := found.foreign(place.target):
        raise UsageError(f"--file: {file} {why}: give another file")
    return found


def _rehearse(report: Report, work: Sequence[Step], gpu: Gpu, place: Place) -> ExitCode:
    """Checks the configurations of each class; a virtual GPU has no device times, and no file is written."""
    report.say(
        f"{place.description} has no device times: configurations are checked, and no file is written."
    )
    wrong, body = 0, []
    with report.progress(len(work), "checking") as line:
        for family, chosen in work:
            shapes = family.open(chosen)
            counts = check_shapes(shapes, gpu)
            wrong += counts.wrong
            body.append({"family": shapes.family, "shape": shapes.name, **vars(counts)})
            line.advance(shapes.name)
            report.line(
                f"{shapes.family}, {shapes.name}: {counts.tried} configurations, {counts.spilled} spill, "
                f"{counts.wrong} wrong, {counts.failed} failed, {counts.crashed} crash the compiler"
            )
    return report.finish({"rehearsal": True, "classes": body}, ExitCode.NUMERICAL if wrong else ExitCode.OK)


def _show_rows(report: Report, rows: Sequence[TunedRow]) -> None:
    sheet = Sheet([
        *keys("family", "shape class", "measured"), *numbers("shipped us", "tuned us", "gain", "spread"),
        *numbers("tried", "spilled", "wrong", "failed", "crashed"), Column("configuration"),
    ])  # fmt: skip
    for row in rows:
        gain = sum(row.shipped_us) / sum(row.tuned_us) - 1
        shipped, tuned = map(_times, (row.shipped_us, row.tuned_us))
        said = ", ".join(f"{name} {value}" for name, value in (row.choice or {}).items())
        sheet.add(
            row.family, row.shape, ", ".join(row.measured), shipped, tuned,
            f"{gain:+.1%}" if row.choice else "-", number(row.spread, 2),
            *map(str, (row.tried, row.spilled, row.wrong, row.failed, row.crashed)), said or "shipped",
        )  # fmt: skip
    report.show(sheet)


def _times(times: Sequence[float]) -> str:
    return ", ".join(number(us) for us in times)


def show(report: Report, file: Path) -> ExitCode:
    """Shows the rows of a file beside the shipped configurations.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        found = read_tuned(file)
    except ValueError as error:
        raise UsageError(str(error)) from None
    report.line(
        f"{found.device} ({found.target}, {found.compute_units} compute units), Triton {found.triton}"
    )
    rows = list(found.rows.values())
    _show_rows(report, rows)
    changed = [row for row in rows if row.choice]
    for row in changed:
        report.line(f"{row.family}, {row.shape}: in the place of {row.shipped}")
    report.line(
        f"{len(changed)} of {len(rows)} shape classes have a configuration faster than the shipped one"
    )
    return report.finish({**found.document(), "versions": versions()}, ExitCode.OK)

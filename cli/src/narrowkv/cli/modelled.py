"""`narrowkv inspect model`: tables of modelled times. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowkv.cdna_emulator import EmulatorError
from narrowkv.cli.cases import parse_case
from narrowkv.cli.places import check_amd_backend
from narrowkv.cli.report import ExitCode, Report, UsageError
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.testing.machine import versions
from narrowkv.testing.model import Modelled, main_kernel, model_call, model_peer, waits
from narrowkv.testing.operation import Family
from narrowkv.testing.operations import OPERATIONS, families, family_of


def sheet(rows: Sequence[tuple[str, Sequence[Modelled]]]) -> Sheet:
    """Calls under the timing model: the hot loop of each on a full chip, and the time of all its launches."""
    table = Sheet([
        *keys("target", "call"),
        *numbers("model us", "waves/CU", "loop clk", "matrix", "VALU", "LDS", "memory"),
        *numbers("TFLOP/s", "at peak clock"),
        Column("bound by"), Column("waves wait for"),
    ])  # fmt: skip
    for name, launches in rows:
        p = main_kernel(launches).full
        seconds = sum(m.prediction.seconds for m in launches)
        cells: list[str] = [p.target, name, f"{1e6 * seconds:.0f}", str(p.waves_per_unit)]
        loop = p.loop
        if loop is None:
            table.add(*cells, *[""] * 7, p.bound, "no loop of four passes")
            continue
        shares = [f"{loop.busy[unit]:.0%}" for unit in ("matrix", "vector ALU", "LDS", "memory")]
        rate = f"{p.loop_flops_per_second / 1e12:.0f}"
        peak = f"{p.loop_flops_at_peak_clock / 1e12:.0f}"
        cells += [f"{loop.clocks:.0f}", *shares, rate, peak, p.bound.split(" (")[0], waits(p)]
        table.add(*cells)
    return table


def parse_call(text: str) -> Family:
    """A call by its operation and case: ``decode:lens=4096,ratio=12``.

    Raises:
        UsageError: no operation whose cases are lines has that name, or the case is none of its.
    """
    name, _, line = text.partition(":")
    known = [entry.name for entry in OPERATIONS.values() if entry.validate.one_shape is None]
    if name not in known:
        *others, last = (f"{one}:" for one in known)
        raise UsageError(f"--case must begin with {', '.join(others)} or {last}, got {text!r}")
    return family_of(OPERATIONS[name], parse_case(OPERATIONS[name], line))


def _peer(path: Path) -> Modelled:
    try:
        return model_peer(path)
    except (OSError, UnicodeDecodeError, EmulatorError, ValueError) as error:
        raise UsageError(f"--peer {path}: {error}") from None


def model_families(target: str, chosen: Mapping[str, Family]) -> list[tuple[str, list[Modelled]]]:
    """Models calls on a target.

    Raises:
        UsageError: an operation refuses its call, or the emulator cannot run it.
    """
    rows = []
    for name, family in chosen.items():
        try:
            rows.append((name, model_call(target, family.call, hbm_share=family.hbm_share)))
        except (ValueError, TypeError, EmulatorError) as error:
            raise UsageError(f"{target}, {name}: {error}") from None
    return rows


def show_model(report: Report, rows: Sequence[tuple[str, Sequence[Modelled]]]) -> list[dict[str, Any]]:
    """Shows calls under the model, and gives them for the document."""
    report.line("timing model, not a measurement; loop figures are of a full chip")
    report.show(sheet(rows))
    return [{"call": name, "launches": [m.as_dict() for m in launches]} for name, launches in rows]


def inspect_model(
    report: Report,
    *,
    targets: tuple[str, ...],
    names: Sequence[str] = (),
    cases: Sequence[str] = (),
    peers: Sequence[Path] = (),
) -> ExitCode:
    """Models calls on each target, and the hot loops of other assembly beside them.

    Args:
        report: where it goes.
        targets: AMD targets.
        names: families to model, of `families`; without names and cases, all.
        cases: calls as `parse_call` reads them.
        peers: files of assembly.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
        UsageError: a name, case or file is wrong.
    """
    check_amd_backend()
    rows: list[tuple[str, list[Modelled]]] = [(m.name, [m]) for m in map(_peer, peers)]
    for target in targets:
        known = families(target)
        if wrong := [name for name in names if name not in known]:
            raise UsageError(f"--family must be one of {'; '.join(known)}; got {wrong[0]!r}")
        chosen = {name: known[name] for name in (names or ([] if cases or peers else known))}
        rows += model_families(target, chosen | {case: parse_call(case) for case in cases})
    body = {"versions": versions(), "model": show_model(report, rows)}
    return report.finish(body, ExitCode.OK)

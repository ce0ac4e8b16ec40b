"""`narrowkv probe`: does each contract of a set hold, here and on each AMD target, and who else answers.

Each contract is run at every place asked for and compiled for every target. Where no place was asked for,
what was compiled also runs in the emulator: a sample of its workgroups, compared where those own the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from narrowkv.cli.answer_table import plot_errors, record, show_full
from narrowkv.cli.places import find_places
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.screen import show_screen
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.testing.backends import OURS, PEERS, peer_version
from narrowkv.testing.contracts import CONTRACT_SETS, ContractSet
from narrowkv.testing.machine import versions
from narrowkv.testing.probing import FAIL, PASS, Answer, Outcome, ProbeRun, Task, run_task


def probe(
    contracts: ContractSet,
    report: Report,
    *,
    on: Sequence[str] | None,
    jobs: int,
    targets: tuple[str, ...],
    full: bool = False,
) -> ExitCode:
    """Asks every contract of a set and shows one screen; Ctrl-C keeps what was answered.

    Args:
        contracts: the set.
        report: where it goes.
        on: where to run; without, at the one place that is here, and a sample of workgroups in the emulator.
        jobs: processes.
        targets: what to compile for.
        full: also show every contract at every place, and the code of each.
    """
    places = tuple(find_places(on))
    # Other implementations have no machine code to emulate: they answer at the first place of another kind.
    peers_at = next((place for place in places if not place.is_emulated), None)
    absent = {
        b.name: "has no code to emulate" if peers_at is None else b.absent(peers_at.is_gpu) for b in PEERS
    }
    asked = tuple(name for name, reason in absent.items() if reason is None)
    run = ProbeRun(contracts, places, targets, absent, jobs)
    shape, gpu = contracts.shape, {place.name for place in places if place.is_gpu}
    runs = {
        Task(c, shape, place.name, asked if place is peers_at else ()): i
        for place in places
        for i, c in enumerate(contracts.contracts)
    }
    compiles = {
        Task(c, shape, target=t, emulate=not on): i
        for i, c in enumerate(contracts.contracts)
        for t in targets
    }

    def take(task: Task, outcome: Outcome) -> str:
        run.add((runs if task.place else compiles)[task], outcome)
        return f"{task.contract.q} x {task.contract.cache}, page {task.contract.page_size}"

    interrupted = run_all(
        report, [*runs, *compiles], run_task, Outcome, take, jobs=jobs, what="probing",
        on_gpu=lambda task: task.place in gpu,
    )  # fmt: skip
    rows = list(run.rows())
    if full:
        show_full(report, rows)
    own = [row.status for row in rows if row.backend == OURS.name]
    # Unsupported where none could pass.
    code = ExitCode.OK if PASS in own else ExitCode.UNSUPPORTED
    if FAIL in own:
        code = ExitCode.NUMERICAL
    emulation = _emulation(rows, jobs)
    show_screen(report, run, code, full=full)
    body = {
        "set": contracts.name,
        "shape": shape,
        "ran_on": "; ".join(place.description for place in places),
        "places": [place.name for place in places],
        "versions": versions(),
        "backends": {b.name: {"absent": absent[b.name], "version": peer_version(b)} for b in PEERS},
        "emulation": emulation,
        "rows": rows,
    }
    records = [record(row) for row in rows]
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=partial(plot_errors, rows))


def _emulation(rows: list[Answer], jobs: int) -> dict[str, Any]:
    """What the samples took together; empty without any."""
    samples = [row.sample for row in rows if row.sample is not None]
    if not samples:
        return {}
    names = ("workgroups", "launched", "rows", "all_rows", "wave_instructions", "seconds")
    total = {name: sum(getattr(s, name) for s in samples) for name in names}
    return {"samples": len(samples), "processes": jobs, **total}


def list_sets(report: Report) -> ExitCode:
    """Shows the names of the sets."""
    sheet = Sheet([*keys("set"), *numbers("contracts"), Column("asks"), Column("shape")])
    for s in CONTRACT_SETS.values():
        sheet.add(s.name, len(s.contracts), s.title, s.shape)
    report.show(sheet)
    rows = [{"set": s.name, **asdict(c)} for s in CONTRACT_SETS.values() for c in s.contracts]
    return report.finish({"sets": list(CONTRACT_SETS.values())}, ExitCode.OK, rows=rows)

"""`narrowkv probe`: runs a set of contracts, and asks installed implementations of others the same.

Each contract is run at every requested place (the GPU, the CPU, or an emulated AMD target) and compiled for
every target. Without a requested place, some workgroups of the compiled AMD code also run in the emulator,
and the rows that they compute are compared with the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.running import find_places, run_all
from narrowkv.cli.screen import record, show_full, show_screen
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.testing.backends import OURS, PEERS
from narrowkv.testing.contracts import ContractSet
from narrowkv.testing.machine import versions
from narrowkv.testing.operations import contract_sets
from narrowkv.testing.plot import plot_answers
from narrowkv.testing.probing import FAIL, PASS, Outcome, ProbeRun, Task, run_task


def probe(
    contracts: ContractSet,
    report: Report,
    *,
    on: Sequence[str] | None,
    jobs: int,
    targets: tuple[str, ...],
    full: bool = False,
) -> ExitCode:
    """Runs every contract of a set and shows the answers on one screen; Ctrl-C stops and shows those so far.

    Args:
        contracts: the set.
        report: where it goes.
        on: where to run; None is the GPU or the CPU, and a sample of workgroups in the emulator.
        jobs: processes.
        targets: what to compile for.
        full: also show every contract at every place, and the code of each.
    """
    places = tuple(find_places(on))
    run = ProbeRun.of(contracts, places, targets, jobs)
    tasks = run.tasks(emulate=not on)
    gpu = {place.name for place in places if place.is_gpu}

    def said(task: Task, _: Outcome) -> str:
        return f"{task.contract.q} x {task.contract.cache}, page {task.contract.page_size}"

    done, interrupted = run_all(
        report, list(tasks), run_task, Outcome, what="probing", said=said, jobs=jobs,
        on_gpu=lambda task: task.place in gpu,
    )  # fmt: skip
    for task, outcome in done:
        run.add(tasks[task], outcome)
    rows = list(run.rows())
    if full:
        show_full(report, rows)
    own = [row.status for row in rows if row.backend == OURS.name]
    # Unsupported if no contract could pass.
    code = ExitCode.OK if PASS in own else ExitCode.UNSUPPORTED
    if FAIL in own:
        code = ExitCode.NUMERICAL
    show_screen(report, run, code, full=full)
    body = {
        "set": contracts.name,
        "shape": contracts.shape,
        "ran_on": "; ".join(place.description for place in places),
        "places": [place.name for place in places],
        "versions": versions(),
        "backends": {b.name: {"absent": run.absent[b.name], "version": b.version} for b in PEERS},
        "emulation": run.emulation(),
        "rows": rows,
    }
    records = [record(row) for row in rows]
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=partial(plot_answers, rows))


def list_sets(report: Report) -> ExitCode:
    """Shows the names of the sets."""
    sets = list(contract_sets().values())
    sheet = Sheet([*keys("set"), *numbers("contracts"), Column("asks"), Column("shape")])
    for s in sets:
        sheet.add(s.name, len(s.contracts), s.title, s.shape)
    report.show(sheet)
    rows = [{"set": s.name, **asdict(c)} for s in sets for c in s.contracts]
    return report.finish({"sets": sets}, ExitCode.OK, rows=rows)

"""`narrowkv probe`: does each contract of a set hold, here and on each AMD target, and who else answers.

Each contract is run at every place asked for and compiled for every target. Where no place was asked for,
what was compiled also runs in the emulator: a sample of its workgroups, compared where those own the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from narrowkv.cli.answer_table import plot_errors, record, show_full
from narrowkv.cli.names import AMD_TARGETS
from narrowkv.cli.places import find_places
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.screen import Seen, show_screen
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.testing.backends import OURS, PEERS, peer_version
from narrowkv.testing.contracts import CONTRACT_SETS, Contract, ContractSet
from narrowkv.testing.machine import versions
from narrowkv.testing.places import Place
from narrowkv.testing.probing import FAIL, PASS, SKIPPED, Answer, Compiled, Outcome, Task, run_task


@dataclass
class ProbeRun:
    """Collects answers as tasks finish."""

    contracts: ContractSet
    places: tuple[Place, ...]
    answers: dict[tuple[int, str, str], Answer] = field(default_factory=dict)
    compiled: dict[tuple[int, str], Compiled] = field(default_factory=dict)

    def add(self, index: int, outcome: Outcome) -> None:
        """Takes what a task of the contract at `index` found."""
        for answer in outcome.answers:
            self.answers[index, answer.backend, answer.place] = answer
        if outcome.compiled is not None:
            self.compiled[index, outcome.compiled.target] = outcome.compiled

    def rows(self) -> Iterator[Answer]:
        """Answers in the set's order, backend by backend and place by place.

        narrowkv's first carries what was compiled, its status the worse of both.
        """
        places = tuple(dict.fromkeys([*(place.name for place in self.places), *AMD_TARGETS]))
        for index, contract in enumerate(self.contracts.contracts):
            for backend in (OURS, *PEERS):
                found = [
                    self.answers[index, backend.name, place]
                    for place in places
                    if (index, backend.name, place) in self.answers
                ]
                if backend is OURS:
                    found = self._with_code(index, contract, found)
                yield from found

    def _with_code(self, index: int, contract: Contract, found: list[Answer]) -> list[Answer]:
        compiled = {t: self.compiled[index, t] for t in AMD_TARGETS if (index, t) in self.compiled}
        asked = self.places[0].name
        if compiled and not any(answer.sample is None for answer in found):
            found = [Answer(contract, OURS.name, asked, SKIPPED, "interrupted before it ran"), *found]
        if not found:
            return found
        first, *rest = found
        bad = next((c for c in compiled.values() if c.status == FAIL), None)
        if first.status == PASS and bad is not None:
            first = replace(first, status=bad.status, detail=f"{bad.target}: {bad.detail}")
        return [replace(first, compiled=compiled), *rest]

    def exit_code(self) -> ExitCode:
        """Numerical when one of narrowkv's own answers failed; unsupported when none could pass."""
        own = [row.status for row in self.rows() if row.backend == OURS.name]
        if FAIL in own:
            return ExitCode.NUMERICAL
        return ExitCode.OK if PASS in own else ExitCode.UNSUPPORTED


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
    run = ProbeRun(contracts, places)
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
    code = run.exit_code()
    emulation = _emulation(rows, jobs)
    seen = Seen(contracts, places, targets, absent, run.answers, run.compiled, jobs)
    show_screen(report, seen, code, full=full)
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

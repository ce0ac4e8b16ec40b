"""`narrowkv probe`: does each contract of a set hold, here and on each AMD target, and who else answers.

Each contract is run at every place asked for and compiled for every target. Where no place was asked for,
what was compiled also runs in the emulator: a sample of its workgroups, compared where those own the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from narrowkv.attn_decode.cases import DecodeInputs
from narrowkv.cli.answer_table import plot_errors, record, show_full
from narrowkv.cli.answers import (
    FAIL,
    INEXACT,
    PASS,
    REFUSED,
    SKIPPED,
    Answer,
    Compiled,
    Outcome,
)
from narrowkv.cli.contracts import DECODE, Contract, ContractSet
from narrowkv.cli.environment import versions
from narrowkv.cli.names import AMD_TARGETS
from narrowkv.cli.operations import contract_case
from narrowkv.cli.places import Place, find_place, find_places
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.screen import Seen, show_screen
from narrowkv.cli.workers import run_all
from narrowkv.quant.accuracy import compare
from narrowkv.testing.backends import OURS, PEERS, Backend, NotAnsweringError, peer_version
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.checking import check_sample
from narrowkv.testing.codegen import KernelCode, amd_backend_missing, compile_call
from narrowkv.testing.inspection import loop_model


@dataclass(frozen=True)
class Task:
    """One piece of work for a process.

    Attributes:
        contract, shape: the question.
        place: run it there, on narrowkv and on `peers`; empty: compile it.
        target: what to compile for.
        emulate: also run a sample of what was compiled.
    """

    contract: Contract
    shape: Any
    place: str = ""
    peers: tuple[str, ...] = ()
    target: str = ""
    emulate: bool = False


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def run_task(task: Task) -> Outcome:
    """Does one task; every outcome of the operations is a result, not an exception."""
    if task.place:
        return Outcome(_run(task.contract, task.shape, find_place(task.place), task.peers))
    return _compile(task.contract, task.shape, task.target, task.emulate)


def _compile(contract: Contract, shape: Any, target: str, emulate: bool) -> Outcome:
    if (missing := amd_backend_missing()) is not None:
        return Outcome(compiled=Compiled(target, SKIPPED, missing))
    try:
        # Compiled for a cache that narrowkv wrote itself, so known to hold no negative zero.
        inputs = contract_case(contract, shape, clean=True).inputs()
        artifacts = compile_call(target, lambda: OURS.prepare(inputs)())
    except Exception as error:
        return Outcome(compiled=Compiled(target, FAIL, _reason(error)))
    kernels = tuple(KernelCode.of(artifact) for artifact in artifacts)
    if not kernels:
        return Outcome(compiled=Compiled(target, FAIL, "the call launched nothing"))
    faults = [f"{k.name} spills {k.spills} registers" for k in kernels if k.spills]
    faults += [f"{k.name} uses {k.scratch_bytes} bytes of scratch" for k in kernels if k.scratch_bytes]
    compiled = Compiled(target, FAIL if faults else PASS, "; ".join(faults), kernels)
    if not emulate:
        return Outcome(compiled=compiled)
    asked = (contract, OURS.name, target)
    try:
        found = check_sample(target, inputs, lambda: OURS.prepare(inputs)(), contract.bound)
    except Exception as error:  # it was compiled, so whatever it says now is a defect
        return Outcome((Answer(*asked, FAIL, _reason(error)),), compiled)
    answer = Answer(
        *asked,
        FAIL if found.detail else PASS,
        found.detail,
        find_place(target).description,
        found.error.relative_l1,
        found.error.max_abs,
        inputs.bytes_per_token(),
        sample=found.sample,
    )
    # A roofline of decode's hot loop from the instructions that its sample executed.
    model = loop_model(found.runs, inputs, target) if isinstance(inputs, DecodeInputs) else None
    return Outcome((answer,), replace(compiled, model=model))


def _run(contract: Contract, shape: Any, place: Place, peers: tuple[str, ...]) -> tuple[Answer, ...]:
    try:
        inputs = contract_case(contract, shape).inputs(place.device)
    except Exception as error:
        return (Answer(contract, OURS.name, place.name, FAIL, _reason(error)),)
    expected, _ = inputs.reference()
    return tuple(
        _ask(backend, contract, inputs, expected, place)
        for backend in (OURS, *PEERS)
        if backend is OURS or (backend.name in peers and contract.operation == DECODE)
    )


@cache
def _timer() -> GraphTimer:
    return GraphTimer()


def _ask(backend: Backend, contract: Contract, inputs: Any, expected: torch.Tensor, place: Place) -> Answer:
    ours = backend is OURS
    kv_bytes = inputs.bytes_per_token()
    asked = (contract, backend.name, place.name)
    try:
        with place.context():
            call = backend.prepare(inputs)
            o = call()
    except NotAnsweringError as error:
        return Answer(*asked, SKIPPED, str(error))
    except Exception as error:
        return Answer(*asked, FAIL if ours else REFUSED, _reason(error), kv_bytes_per_token=kv_bytes)
    report = compare(o, expected)
    good = report.passes(relative_l1=contract.bound)
    time_us = None
    if place.is_gpu and good:
        try:
            timing = _timer().measure(call)
            time_us = {"median": timing.median_us, "p10": timing.p10_us, "p90": timing.p90_us}
        except Exception as error:
            # A peer may not be capturable, and then has an error but no time; narrowkv promises that it is.
            if ours:
                why = f"not capturable: {_reason(error)}"
                return Answer(*asked, FAIL, why, place.description, report.relative_l1)
    return Answer(
        *asked,
        PASS if good else (FAIL if ours else INEXACT),
        "" if good else f"{report} (bound {contract.bound:g})",
        place.description if ours or place.is_gpu else "CPU",
        report.relative_l1,
        report.max_abs,
        kv_bytes,
        time_us,
    )


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

"""Asks a contract: runs its call at a place, by narrowkv and by others, or compiles it for an AMD target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from narrowkv.quant.accuracy import compare
from narrowkv.testing.backends import OURS, PEERS, Backend, NotAnsweringError
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.checking import Sample, check_sample, reason_of
from narrowkv.testing.codegen import KernelCode, amd_backend_missing, compile_call, loop_model
from narrowkv.testing.contracts import Contract, ContractSet, Shape
from narrowkv.testing.operations import contract_case, operation_of
from narrowkv.testing.places import AMD_TARGETS, Place, find_place

__all__ = ["Answer", "Compiled", "Outcome", "ProbeRun", "Task", "run_task"]

PASS, FAIL, REFUSED, SKIPPED, INEXACT = "pass", "fail", "refused", "skipped", "inexact"
NOT_RUN = "not run"
STATUSES = (PASS, NOT_RUN, SKIPPED, REFUSED, INEXACT, FAIL)
"""From the best to the worst: several contracts together have the worst of theirs."""


@dataclass(frozen=True)
class Compiled:
    """One contract compiled for one target.

    Attributes:
        target: the target.
        status: pass, fail or skipped.
        detail: the reason where it is not a pass.
        kernels: every kernel of the call.
        model: fields of the roofline of a pass through decode's hot loop; None where it was not emulated.
    """

    target: str
    status: str
    detail: str = ""
    kernels: tuple[KernelCode, ...] = ()
    model: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What one backend said to one contract at one place.

    Attributes:
        contract: the question.
        backend: who was asked.
        place: where: "cpu", "gpu" or an emulated target.
        status: pass, fail or skipped; of another backend also refused, or inexact, which is over the bound.
        detail: the reason where it is not a pass.
        ran_on: where it ran; empty if it did not.
        relative_l1: kernel error against the fp32 reference on the same cache.
        max_abs: largest error.
        kv_bytes_per_token: bytes of K and V over all heads.
        time_us: device time on a GPU: median, p10, p90.
        compiled: by AMD target; narrowkv only.
        sample: where only a sample of the workgroups ran, which.
    """

    contract: Contract
    backend: str
    place: str
    status: str
    detail: str = ""
    ran_on: str = ""
    relative_l1: float | None = None
    max_abs: float | None = None
    kv_bytes_per_token: float | None = None
    time_us: dict[str, float] | None = None
    compiled: dict[str, Compiled] = field(default_factory=dict)
    sample: Sample | None = None


Outcome = tuple[tuple[Answer, ...], Compiled | None]
"""What a task found."""


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
    shape: Shape
    place: str = ""
    peers: tuple[str, ...] = ()
    target: str = ""
    emulate: bool = False


def run_task(task: Task) -> Outcome:
    """Does one task; every outcome of the operations is a result, not an exception."""
    if task.place:
        return _run(task.contract, task.shape, find_place(task.place), task.peers), None
    return _compile(task.contract, task.shape, task.target, task.emulate)


def _compile(contract: Contract, shape: Shape, target: str, emulate: bool) -> Outcome:
    if (missing := amd_backend_missing()) is not None:
        return (), Compiled(target, SKIPPED, missing)
    try:
        # Compiled for a cache that narrowkv wrote itself, so known to hold no negative zero.
        inputs = contract_case(contract, shape, clean=True).inputs()
        artifacts = compile_call(target, lambda: OURS.prepare(inputs)())
    except Exception as error:
        return (), Compiled(target, FAIL, reason_of(error))
    kernels = tuple(KernelCode.of(artifact) for artifact in artifacts)
    if not kernels:
        return (), Compiled(target, FAIL, "the call launched nothing")
    faults = [f"{k.name} spills {k.spills} registers" for k in kernels if k.spills]
    faults += [f"{k.name} spills in a loop" for k in kernels if k.spills_in_loops]
    faults += [f"{k.name} uses {k.scratch_bytes} bytes of scratch" for k in kernels if k.scratch_bytes]
    compiled = Compiled(target, FAIL if faults else PASS, "; ".join(faults), kernels)
    if not emulate:
        return (), compiled
    asked = (contract, OURS.name, target)
    try:
        found = check_sample(target, inputs, lambda: OURS.prepare(inputs)(), contract.bound)
    except Exception as error:  # it was compiled, so whatever it says now is a defect
        return (Answer(*asked, FAIL, reason_of(error)),), compiled
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
    # A roofline of the hot loop from the instructions that its sample executed.
    tile_bytes = operation_of(contract.operation).cases.tile_bytes
    model = None if tile_bytes is None else loop_model(found.runs, tile_bytes(inputs, target)[0], target)
    return (answer,), replace(compiled, model=model)


def _run(contract: Contract, shape: Shape, place: Place, peers: tuple[str, ...]) -> tuple[Answer, ...]:
    try:
        inputs = contract_case(contract, shape).inputs(place.device)
    except Exception as error:
        return (Answer(contract, OURS.name, place.name, FAIL, reason_of(error)),)
    expected, _ = inputs.reference()
    asked = peers if operation_of(contract.operation).has_peers else ()
    return tuple(
        _ask(backend, contract, inputs, expected, place)
        for backend in (OURS, *PEERS)
        if backend is OURS or backend.name in asked
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
        return Answer(*asked, FAIL if ours else REFUSED, reason_of(error), kv_bytes_per_token=kv_bytes)
    report = compare(o, expected)
    good = report.passes(relative_l1=contract.bound)
    time_us = None
    if place.has_times and good:
        try:
            timing = _timer().measure(call)
            time_us = {"median": timing.median_us, "p10": timing.p10_us, "p90": timing.p90_us}
        except Exception as error:
            # A peer may not be capturable, and then has an error but no time; narrowkv promises that it is.
            if ours:
                why = f"not capturable: {reason_of(error)}"
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
    """Collects answers as tasks finish.

    Attributes:
        contracts: the set.
        places: where it runs.
        targets: what it is compiled for.
        absent: by other backend, why it is not asked; None if it is.
        jobs: processes.
        answers: by index of the contract, backend and place.
        compiled: by index of the contract and target.
    """

    contracts: ContractSet
    places: tuple[Place, ...]
    targets: tuple[str, ...]
    absent: Mapping[str, str | None]
    jobs: int
    answers: dict[tuple[int, str, str], Answer] = field(default_factory=dict)
    compiled: dict[tuple[int, str], Compiled] = field(default_factory=dict)

    @classmethod
    def of(
        cls, contracts: ContractSet, places: tuple[Place, ...], targets: tuple[str, ...], jobs: int
    ) -> ProbeRun:
        """A run without answers; other implementations are asked at the first place that runs calls."""
        at = next((place for place in places if not place.is_emulated), None)
        absent = {
            peer.name: "has no code to emulate" if at is None else peer.absent(at.is_gpu) for peer in PEERS
        }
        return cls(contracts, places, targets, absent, jobs)

    def tasks(self, *, emulate: bool) -> dict[Task, int]:
        """Every contract, by its index, at every place, then for every target.

        `emulate` runs samples of what is compiled.
        """
        contracts, shape = self.contracts.contracts, self.contracts.shape
        at = next((place for place in self.places if not place.is_emulated), None)
        peers = tuple(name for name, reason in self.absent.items() if reason is None)
        runs = {
            Task(contract, shape, place.name, peers if place is at else ()): index
            for place in self.places
            for index, contract in enumerate(contracts)
        }
        return runs | {
            Task(contract, shape, target=target, emulate=emulate): index
            for index, contract in enumerate(contracts)
            for target in self.targets
        }

    def emulation(self) -> dict[str, Any]:
        """Sums over the emulated samples; empty if there are none."""
        samples = [answer.sample for answer in self.answers.values() if answer.sample is not None]
        if not samples:
            return {}
        names = ("workgroups", "launched", "rows", "all_rows", "wave_instructions", "seconds")
        total = {name: sum(getattr(sample, name) for sample in samples) for name in names}
        return {"samples": len(samples), "processes": self.jobs, **total}

    def add(self, index: int, outcome: Outcome) -> None:
        """Takes what a task of the contract at `index` found."""
        answers, compiled = outcome
        for answer in answers:
            self.answers[index, answer.backend, answer.place] = answer
        if compiled is not None:
            self.compiled[index, compiled.target] = compiled

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

    def statuses(self, index: int, backend: str, place: str) -> list[str]:
        """What a backend's call and its machine code came to at a place."""
        found = [self.answers.get((index, backend, place))]
        code = self.compiled.get((index, place)) if backend == OURS.name else None
        return [one.status for one in (*found, code) if one is not None]

    def verdict(self, index: int) -> str:
        """The worst status of narrowkv's own answers and code of a contract."""
        asked = dict.fromkeys([*(place.name for place in self.places), *self.targets])
        return max(
            (status for name in asked for status in self.statuses(index, OURS.name, name) or [NOT_RUN]),
            key=STATUSES.index,
        )

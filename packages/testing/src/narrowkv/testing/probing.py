"""Asks a contract: runs its call at a place, by narrowkv and by others, or compiles it for an AMD target.

The functions at the end say what the answers come to: rows and columns of a table, capacity, machine code,
reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from narrowkv.quant.accuracy import compare
from narrowkv.testing.backends import OURS, PEERS, Backend, NotAnsweringError
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.checking import Sample, check_sample, reason_of
from narrowkv.testing.codegen import KernelCode, amd_backend_missing, compile_call, loop_model
from narrowkv.testing.operation import Contract, ContractSet, Shape
from narrowkv.testing.operations import contract_case, operation_of
from narrowkv.testing.places import AMD_TARGETS, Place, find_place
from narrowkv.testing.records import number
from narrowkv.testing.words import QUERY_DTYPES

__all__ = [
    "Answer", "BackendColumn", "Compiled", "Outcome", "ProbeRun", "Task", "capacity", "cell", "code",
    "columns", "device_times", "emulated", "reasons", "run_task", "sections",
]  # fmt: skip

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
        total = {name: sum(getattr(s, name) for s in samples) for name in Sample.__dataclass_fields__}
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


_MARKS = {PASS: "ok", FAIL: "FAIL", INEXACT: "over"}
_COUNTED = (NOT_RUN, SKIPPED, REFUSED)


BackendColumn = tuple[tuple[str, str], str, str]
"""Two lines of a header, and the backend and the place or target whose answers stand below."""

ContractRow = tuple[str, tuple[int, ...]]
"""A cache format, and indices into the set: contracts that differ in page size and 16-bit query alone."""


def columns(seen: ProbeRun) -> list[BackendColumn]:
    """The columns of the table: narrowkv at each place and target, then other implementations."""
    found: list[BackendColumn] = []
    for name in dict.fromkeys([*(place.name for place in seen.places), *seen.targets]):
        place = next((place for place in seen.places if place.name == name), None)
        if place is None or place.is_emulated:
            ran = place is not None or any(where == name for _, _, where in seen.answers)
            head = (f"{name} code", "emulated" if ran else "compiled")
        else:
            head = ("this GPU", "") if place.is_gpu else ("this CPU", "interpreted")
        found.append((head, OURS.name, name))
    where = next((place.name for place in seen.places if not place.is_emulated), "")
    peers = [name for name, why in seen.absent.items() if why is None]
    return found + [((name, "peer"), name, where) for name in peers]


def sections(contracts: Sequence[Contract]) -> dict[str, list[ContractRow]]:
    """Rows by what they have in common: operation, queries, page sizes, bound."""
    pages: dict[tuple[str, str, str, float], list[int]] = {}
    for index, c in enumerate(contracts):
        pages.setdefault((c.function, c.q, c.cache, c.bound), []).append(index)
    # 16-bit queries over the same pages share a row.
    rows: dict[tuple[str, str, str, float, tuple[int, ...]], list[int]] = {}
    for (function, q, stored, bound), indices in pages.items():
        sizes = tuple(contracts[i].page_size for i in indices)
        kind = "16-bit" if q in QUERY_DTYPES else q
        rows.setdefault((function, kind, stored, bound, sizes), []).extend(indices)
    found: dict[str, list[ContractRow]] = {}
    for (function, _, stored, bound, sizes), indices in rows.items():
        queries = ", ".join(dict.fromkeys(contracts[i].q for i in indices))
        title = f"{function}: Q {queries}"
        if any(sizes):
            title += f"; pages of {', '.join(map(str, sizes))} tokens"
        found.setdefault(f"{title}; bound {bound:.1e}", []).append((stored, tuple(indices)))
    return found


def cell(seen: ProbeRun, row: ContractRow, column: BackendColumn) -> tuple[str, str]:
    """A mark with the worst error, and the worst status."""
    statuses: list[str] = []
    _, indices = row
    _, backend, place = column
    for index in indices:
        found = seen.statuses(index, backend, place)
        statuses += found or ([NOT_RUN] if backend == OURS.name else [])
    if not statuses:
        return "-", PASS
    worst = max(statuses, key=STATUSES.index)
    if worst in _COUNTED:
        count = statuses.count(worst)
        return f"{worst} {count}/{len(statuses)}" if count < len(statuses) else worst, worst
    answers = (seen.answers.get((i, backend, place)) for i in indices)
    errors = [a.relative_l1 for a in answers if a is not None and a.relative_l1 is not None]
    mark = _MARKS[worst]
    if errors:
        # NaN is the worst of all, and no comparison finds it.
        return f"{mark} {next((e for e in errors if e != e), max(errors)):.2e}", worst
    return mark if worst == FAIL else f"{mark} compiled", worst


def capacity(seen: ProbeRun) -> list[str]:
    """How many tokens a GiB holds in each format, and how many times bf16's that is."""
    sizes: dict[str, float] = {}
    for (index, backend, _), answer in seen.answers.items():
        if backend == OURS.name and answer.kv_bytes_per_token is not None:
            sizes[seen.contracts.contracts[index].cache] = answer.kv_bytes_per_token
    order = dict.fromkeys(c.cache for c in seen.contracts.contracts)
    shape = seen.contracts.shape
    paged = all(operation_of(c.operation).is_paged for c in seen.contracts.contracts)
    bf16 = sizes.get("bf16", 4.0 * shape.num_kv_heads * shape.head_dim if paged else None)
    parts = []
    for name in (name for name in order if name in sizes):
        ratio = f" ({bf16 / sizes[name]:.2f}x)" if bf16 else ""
        parts.append(f"{name} {number(2**30 / sizes[name] / 1000)}k{ratio}")
    if parts and bf16 and "bf16" not in sizes:
        parts.append("beside bf16")
    return parts


def code(seen: ProbeRun) -> Iterator[tuple[str, str, str]]:
    """A label, a sentence on the machine code and a status, for each target."""
    for target in seen.targets:
        found = [one for (_, name), one in sorted(seen.compiled.items()) if name == target]
        kernels = [kernel for one in found for kernel in one.kernels]
        if not kernels:
            why = next((one.detail for one in found if one.detail), "interrupted before it was compiled")
            yield target, f"not compiled: {why}", SKIPPED
            continue
        spills, scratch = max(k.spills for k in kernels), max(k.scratch_bytes for k in kernels)
        text = "no spills; "
        if bad := sum(any(k.faulty for k in one.kernels) for one in found):
            text = f"{bad} of {len(found)} calls spill: {spills} registers, {scratch} bytes of scratch; "
        models = [one.model for one in found if one.model is not None]
        shares = sorted(k.matrix_share for k in kernels if k.matrix_share)
        if models:
            over = sorted(model["issue_over_memory"] for model in models)
            by_memory = sum(model["bound_by"] == "memory" for model in models)
            bound = "decode bound by memory" if by_memory else "decode bound by issue"
            if 0 < by_memory < len(models):
                bound = f"bound by memory in {by_memory}/{len(models)}"
            text += f"{bound}, issue {over[0]:.2f}-{over[-1]:.2f} of it (model)"
        elif shares:
            text += f"matrix instructions {shares[0]:.0%} to {shares[-1]:.0%} of issue (model)"
        yield f"{target} code", text, FAIL if spills or scratch else PASS


def device_times(seen: ProbeRun) -> str:
    """Device times of each operation, where there is a GPU."""
    times: dict[str, list[float]] = {}
    for (index, backend, _), answer in seen.answers.items():
        if backend == OURS.name and answer.time_us is not None:
            times.setdefault(seen.contracts.contracts[index].function, []).append(answer.time_us["median"])
    return "; ".join(f"{name} {number(min(us))} to {number(max(us))} us" for name, us in times.items())


def emulated(seen: ProbeRun) -> str:
    """How much of the machine code was run, where that was a sample."""
    said = (
        "{workgroups} of {launched} workgroups, {rows} of {all_rows} output rows; "
        "bounds, alignment and uninitialised values checked in each"
    )
    return said.format(**total) if (total := seen.emulation()) else ""


def reasons(seen: ProbeRun) -> list[tuple[str, str]]:
    """Labels and reasons: failures first, then what was refused or skipped, then who was not asked."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for (_, name, place), answer in seen.answers.items():
        if answer.status == INEXACT:
            reason = f"{name}: error above the bound, which a peer may have"
            counts["over", "", reason] += 1
        elif answer.status != PASS and answer.detail:
            counts[answer.status, place, f"{name}: {answer.detail}"] += 1
    for (_, target), compiled in seen.compiled.items():
        if compiled.status == FAIL:
            counts[compiled.status, target, f"{OURS.name} for {target}: {compiled.detail}"] += 1
    found = sorted(
        counts.items(), key=lambda item: STATUSES.index(item[0][0]) if item[0][1] else 0, reverse=True
    )
    blocks = [(status, f"{text} ({count} x)" if count > 1 else text) for (status, _, text), count in found]
    missing: dict[str, list[str]] = {}
    for name, why in seen.absent.items():
        if why is not None:
            missing.setdefault(why, []).append(name)
    blocks += [("not asked", f"{', '.join(names)}: {why}") for why, names in missing.items()]
    return blocks

"""`narrowkv probe`: does each contract of a set hold, here and on each AMD target, and who else answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from narrowkv.cli.backends import (
    OURS,
    PEERS,
    Backend,
    NotAnsweringError,
    NotBuiltError,
    find_operation,
    peer_version,
)
from narrowkv.cli.bench.timing import GraphTimer
from narrowkv.cli.cases import DecodeCase, DecodeInputs, build
from narrowkv.cli.codegen import AMD_TARGETS, KernelCode, amd_backend_missing, compile_call, main_kernel
from narrowkv.cli.contracts import DECODE, Contract, ContractSet
from narrowkv.cli.environment import versions
from narrowkv.cli.places import Place, find_place
from narrowkv.cli.report import ExitCode, Report, number
from narrowkv.cli.workers import in_processes
from narrowkv.quant.accuracy import compare
from narrowkv.quant.quantize import quantize_per_tensor

PASS, FAIL, NOT_YET, REFUSED, SKIPPED, INEXACT = "pass", "fail", "not yet", "refused", "skipped", "inexact"
_COLOURS = {
    PASS: "green",
    FAIL: "bold red",
    NOT_YET: "yellow",
    REFUSED: "yellow",
    SKIPPED: "dim",
    INEXACT: "magenta",
}
# How an operation says no before it launches anything; whatever else it raises is a defect.
_REFUSALS = (NotBuiltError, ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Compiled:
    """One contract compiled for one target."""

    target: str
    status: str
    detail: str = ""
    kernels: tuple[KernelCode, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What one backend said to one contract.

    Attributes:
        contract: the question.
        backend: who was asked.
        status: pass, fail, not yet, refused, skipped, or inexact (another backend, over the bound).
        detail: the reason where it is not a pass.
        ran_on: where it ran; empty if it did not.
        relative_l1: kernel error against the fp32 reference on the same cache.
        max_abs: largest error.
        kv_bytes_per_token: bytes of K and V over all heads.
        time_us: device time on a GPU: median, p10, p90.
        compiled: by AMD target; narrowkv only.
    """

    contract: Contract
    backend: str
    status: str
    detail: str = ""
    ran_on: str = ""
    relative_l1: float | None = None
    max_abs: float | None = None
    kv_bytes_per_token: float | None = None
    time_us: dict[str, float] | None = None
    compiled: dict[str, Compiled] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One piece of work for a process: run a contract on every backend, or compile it for a target."""

    contract: Contract
    shape: Any
    place: str
    target: str | None
    peers: tuple[str, ...] = ()


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def contract_inputs(
    contract: Contract, shape: Any, device: str = "cpu", *, clean: bool = False
) -> DecodeInputs:
    """The tensors of a contract at a set's shape; sequences of the full context, pages shuffled."""
    fp8_query = contract.q.startswith("fp8_")
    case = DecodeCase(
        lens="+".join([str(shape.context)] * shape.batch),
        q_len=shape.q_len,
        kv_heads=shape.num_kv_heads,
        ratio=shape.gqa_ratio,
        head_dim=shape.head_dim,
        page_size=contract.page_size,
        q="bf16" if fp8_query else contract.q,
        k=contract.k,
        v=contract.v,
        clean=clean,
    )
    inputs = build(case, device)
    if not fp8_query:
        return inputs
    stored, _ = quantize_per_tensor(inputs.q.float(), contract.q, descale=1.0)
    return replace(inputs, q=stored)


def run_task(task: Task) -> list[Answer] | Compiled:
    """Does one task; every outcome of the operations is a result, not an exception."""
    if task.target is not None:
        return _compile(task.contract, task.shape, task.target)
    place = find_place(task.place)
    return _run(task.contract, task.shape, place, task.peers)


def _compile(contract: Contract, shape: Any, target: str) -> Compiled:
    if (missing := amd_backend_missing()) is not None:
        return Compiled(target, SKIPPED, missing)
    try:
        find_operation(contract.operation)
        # Compiled for a cache that narrowkv wrote itself, so known to hold no negative zero.
        inputs = contract_inputs(contract, shape, clean=True)
        artifacts = compile_call(target, lambda: OURS.prepare(contract, inputs)())
    except _REFUSALS as error:
        return Compiled(target, FAIL if contract.required else NOT_YET, _reason(error))
    except Exception as error:
        return Compiled(target, FAIL, _reason(error))
    kernels = tuple(KernelCode.of(artifact) for artifact in artifacts)
    if not kernels:
        return Compiled(target, FAIL, "the call launched nothing")
    faults = [f"{k.name} spills {k.spills} registers" for k in kernels if k.spills]
    faults += [f"{k.name} uses {k.scratch_bytes} bytes of scratch" for k in kernels if k.scratch_bytes]
    return Compiled(target, FAIL if faults else PASS, "; ".join(faults), kernels)


def _run(contract: Contract, shape: Any, place: Place, peers: tuple[str, ...]) -> list[Answer]:
    try:
        find_operation(contract.operation)
        inputs = contract_inputs(contract, shape, place.device)
    except _REFUSALS as error:
        return [Answer(contract, OURS.name, FAIL if contract.required else NOT_YET, _reason(error))]
    expected, _ = inputs.reference()
    return [
        _ask(backend, contract, inputs, expected, place)
        for backend in (OURS, *PEERS)
        if backend is OURS or (backend.name in peers and contract.operation == DECODE)
    ]


@cache
def _timer() -> GraphTimer:
    return GraphTimer()


def _ask(
    backend: Backend, contract: Contract, inputs: DecodeInputs, expected: torch.Tensor, place: Place
) -> Answer:
    ours = backend is OURS
    context = place.context if ours else find_place("gpu" if place.is_gpu else "cpu").context
    kv_bytes = inputs.cache.bytes_per_token()
    try:
        with context():
            call = backend.prepare(contract, inputs)
            o = call()
    except NotAnsweringError as error:
        return Answer(contract, backend.name, SKIPPED, str(error))
    except _REFUSALS as error:
        refusal = (FAIL if contract.required else NOT_YET) if ours else REFUSED
        return Answer(contract, backend.name, refusal, _reason(error), kv_bytes_per_token=kv_bytes)
    except Exception as error:
        return Answer(
            contract, backend.name, FAIL if ours else REFUSED, _reason(error), kv_bytes_per_token=kv_bytes
        )
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
                return Answer(contract, backend.name, FAIL, why, place.description, report.relative_l1)
    return Answer(
        contract,
        backend.name,
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
    place: Place
    answers: dict[tuple[int, str], Answer] = field(default_factory=dict)
    compiled: dict[tuple[int, str], Compiled] = field(default_factory=dict)

    def rows(self) -> Iterator[Answer]:
        """Answers in the set's order, narrowkv's with what was compiled, its status the worse of both."""
        for index, contract in enumerate(self.contracts.contracts):
            for backend in (OURS, *PEERS):
                answer = self.answers.get((index, backend.name))
                if backend is OURS:
                    compiled = {
                        t: self.compiled[index, t] for t in AMD_TARGETS if (index, t) in self.compiled
                    }
                    if answer is None and not compiled:
                        continue
                    answer = answer or Answer(contract, OURS.name, SKIPPED, "interrupted before it ran")
                    bad = next((c for c in compiled.values() if c.status in (FAIL, NOT_YET)), None)
                    if answer.status == PASS and bad is not None:
                        answer = replace(answer, status=bad.status, detail=f"{bad.target}: {bad.detail}")
                    yield replace(answer, compiled=compiled)
                elif answer is not None:
                    yield answer

    def exit_code(self) -> ExitCode:
        """Numerical when one of narrowkv's own answers failed; unsupported when none could pass."""
        own = [row.status for row in self.rows() if row.backend == OURS.name]
        if FAIL in own:
            return ExitCode.NUMERICAL
        return ExitCode.OK if PASS in own else ExitCode.UNSUPPORTED


def probe(
    contracts: ContractSet, report: Report, *, on: str | None, jobs: int, targets: tuple[str, ...]
) -> ExitCode:
    """Asks every contract of a set and reports; Ctrl-C keeps what was answered."""
    place = find_place(on)
    present = {backend.name: backend.absent(place) for backend in PEERS}
    asked = tuple(name for name, reason in present.items() if reason is None)
    run = ProbeRun(contracts, place)
    report.say(f"[bold]{contracts.name}[/]: {contracts.title}\n{contracts.shape}; {place.description}")
    indexed = list(enumerate(contracts.contracts))
    runs = {Task(c, contracts.shape, place.name, None, asked): i for i, c in indexed}
    compiles = {Task(c, contracts.shape, place.name, target): i for i, c in indexed for target in targets}
    interrupted = False
    with report.progress(len(runs) + len(compiles), "probing") as line:
        try:
            for task, result in _results(list(runs), list(compiles), place, jobs):
                if isinstance(result, Compiled):
                    run.compiled[compiles[task], result.target] = result
                else:
                    for answer in result:
                        run.answers[runs[task], answer.backend] = answer
                line.advance(f"{task.contract.q} x {task.contract.cache}, page {task.contract.page_size}")
        except KeyboardInterrupt:
            interrupted = True
    rows = list(run.rows())
    notes = _Notes()
    report.show(_table(rows, present, place, notes))
    for text, index in notes.texts.items():
        report.line(f"[{index}] {text}")
    code = run.exit_code()
    report.say(_verdict(rows, code))
    report.say(
        "kernel error (rel. L1) is against fp32 on the same cache; "
        "code figures are of the hot loop's kernel, compiled and not run"
    )
    body = {
        "set": contracts.name,
        "shape": contracts.shape,
        "ran_on": place.description,
        "versions": versions(),
        "backends": {b.name: {"absent": present[b.name], "version": peer_version(b)} for b in PEERS},
        "rows": rows,
    }
    return report.finish(body, code, interrupted=interrupted)


def _results(
    runs: list[Task], compiles: list[Task], place: Place, jobs: int
) -> Iterator[tuple[Task, list[Answer] | Compiled]]:
    if place.is_gpu:
        # One process owns the GPU, and nothing else runs while it takes times.
        for task in runs:
            yield task, run_task(task)
        yield from in_processes(run_task, compiles, jobs)
    else:
        yield from in_processes(run_task, [*runs, *compiles], jobs)


def _verdict(rows: list[Answer], code: ExitCode) -> str:
    own = [row.status for row in rows if row.backend == OURS.name]
    counts = ", ".join(f"{own.count(s)} {s}" for s in (PASS, FAIL, NOT_YET, SKIPPED) if s in own)
    colour = {ExitCode.OK: "green", ExitCode.NUMERICAL: "bold red"}.get(code, "yellow")
    return f"[{colour}]narrowkv: {counts or 'nothing ran'}[/]"


def _code_cell(compiled: Compiled | None) -> Text:
    if compiled is None:
        return Text("-", style="dim")
    if not compiled.kernels:
        return Text(compiled.status, style=_COLOURS[compiled.status])
    kernel = main_kernel(compiled.kernels)
    spills = sum(k.spills for k in compiled.kernels)
    mfma = ", ".join(f"{n} x {name.removeprefix('v_mfma_f32_')}" for name, n in kernel.mfma.items())
    registers = f"{kernel.vgprs + kernel.agprs} VGPR"
    text = f"{registers} {spills} spill {kernel.lds_bytes / 1024:g}K LDS\n{mfma or 'no MFMA in a loop'}"
    return Text(text, style=_COLOURS[compiled.status])


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _lines(rows: list[Answer]) -> Iterator[list[Answer]]:
    """Rows of the table: an answer that ran anywhere by itself, the rest together by operation and reason."""
    groups: dict[tuple[Any, ...], list[Answer]] = {}
    for index, row in enumerate(rows):
        silent = not row.ran_on and not any(c.kernels for c in row.compiled.values())
        key = (row.contract.operation, row.backend, row.status, row.detail) if silent else (index,)
        groups.setdefault(key, []).append(row)
    yield from groups.values()


class _Notes:
    """Reasons too long for a cell, numbered."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts) + 1)


def _table(rows: list[Answer], absent: dict[str, str | None], place: Place, notes: _Notes) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in (
        "operation",
        "Q",
        "cache",
        "page",
        "backend",
        *AMD_TARGETS,
        "ran on",
        "rel. L1",
        "B/token",
    ):
        right = column in ("page", "rel. L1", "B/token")
        least = {"Q": 5, "cache": 14}.get(column)
        table.add_column(column, justify="right" if right else "left", no_wrap=least is None, min_width=least)
    if place.is_gpu:
        table.add_column("us", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for group in _lines(rows):
        row, c = group[0], group[0].contract
        pages = _joined(str(r.contract.page_size) for r in group)
        queries, caches = _joined(r.contract.q for r in group), _joined(r.contract.cache for r in group)
        cells: list[Text | str] = [c.function, queries, caches, pages, row.backend]
        ours = row.backend == OURS.name
        cells += [_code_cell(row.compiled.get(target)) if ours else "" for target in AMD_TARGETS]
        cells += ["gpu" if row.ran_on and place.is_gpu else "cpu" if row.ran_on else "-"]
        cells += [f"{row.relative_l1:.2e}" if row.relative_l1 is not None else "-"]
        cells += [number(row.kv_bytes_per_token, 5) if len(group) == 1 else "-"]
        if place.is_gpu:
            cells += [number(row.time_us["median"]) if row.time_us else "-"]
        verdict = Text(row.status, style=_COLOURS[row.status])
        if row.status == INEXACT:
            verdict = Text(f"over {c.bound:g}", style=_COLOURS[INEXACT])
        elif row.detail:
            verdict.append(f" [{notes.number(row.detail)}]", style="default")
        table.add_row(*cells, verdict)
    for name, reason in absent.items():
        if reason is not None:
            blank = [""] * (len(table.columns) - 6)
            table.add_row("", "", "", "", name, *blank, Text(f"{SKIPPED}: {reason}", style=_COLOURS[SKIPPED]))
    return table

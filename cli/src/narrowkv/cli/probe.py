"""`narrowkv probe`: sets of contracts, and calls of models.

Each contract is run at every requested place (the GPU, the CPU, or an emulated AMD target) and compiled for
every target. Without a requested place, some workgroups of the compiled AMD code also run in the emulator,
and the rows that they compute are compared with the reference.

Installed implementations of others are asked the same contracts. The screen has a row for each contract, a
column for each place, and figures below: at most 40 lines of 80 columns, whatever the set and the terminal;
`--full` has the rest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from narrowkv.cli.report import Column, ExitCode, Report, Sheet, filled, keys, numbers, own_command
from narrowkv.cli.running import find_places, run_all
from narrowkv.testing import probing
from narrowkv.testing.backends import OURS, PEERS
from narrowkv.testing.codegen import main_kernel
from narrowkv.testing.machine import versions
from narrowkv.testing.models import (
    EXACT,
    MODELS,
    RANKS,
    WRONG,
    Model,
    ModelAnswer,
    ModelTask,
    Need,
    all_tasks,
    answer,
    tasks_of,
)
from narrowkv.testing.operation import ContractSet
from narrowkv.testing.operations import contract_sets
from narrowkv.testing.places import Place
from narrowkv.testing.plot import plot_answers
from narrowkv.testing.probing import (
    FAIL,
    INEXACT,
    NOT_RUN,
    PASS,
    REFUSED,
    SKIPPED,
    STATUSES,
    Answer,
    Outcome,
    ProbeRun,
    Task,
    run_task,
)
from narrowkv.testing.records import number
from narrowkv.testing.words import AMD_TARGETS


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


LINES = 40
WIDTH = 80
_WIDEST = 120
_LABEL = 12  # width of the label of a line under the matrix
_CELL_GAP = 2
_STYLES = {PASS: "green", FAIL: "bold red", INEXACT: "magenta"}


def show_screen(report: Report, seen: ProbeRun, code: ExitCode, *, full: bool) -> None:
    """Shows the screen, each line with its style."""
    width = report.human.width
    width = WIDTH if width > 1000 else max(WIDTH, min(width, _WIDEST))
    head = list(_head(seen, width))
    matrix = list(_matrix(seen, width))
    tail = list(_tail(seen, width))
    end = list(_end(report, seen, code, full=full))
    spare = LINES - len(head) - len(matrix) - len(tail) - len(end) - 2
    for line, style in (*head, *matrix, ("", ""), *tail, *_reasons(seen, width, spare), *end):
        report.line(line, style)


Line = tuple[str, str]
"""Text and its rich style."""


def _labelled(label: str, text: str | Sequence[str], width: int, style: str = "") -> list[Line]:
    """Words, or parts that stay whole, behind a label; indented where they go on."""
    if isinstance(text, str):
        wrapped = textwrap.wrap(text, width - _LABEL, break_long_words=False, break_on_hyphens=False)
    else:
        wrapped = list(filled(text, width - _LABEL))
    return [(f"{label if i == 0 else '':{_LABEL}}{line}", style) for i, line in enumerate(wrapped)]


def _head(seen: ProbeRun, width: int) -> Iterator[Line]:
    contracts, shape = seen.contracts, seen.contracts.shape
    title = f"{contracts.name}: {contracts.title}"
    yield from ((line, "bold") for line in textwrap.wrap(title, width))
    heads = f"{shape.num_qo_heads} query heads over {shape.num_kv_heads} KV heads (GQA {shape.gqa_ratio})"
    text = f"{heads}, head_dim {shape.head_dim}, batch {shape.batch}, context {shape.context}"
    if shape.q_len > 1:
        text += f", {shape.q_len} query tokens a sequence"
    what = "in each cell the worst relative L1 error against fp32 on the same cache"
    gpu = next((place.description for place in seen.places if place.is_gpu), None)
    for part in filter(None, (text, gpu, what)):
        yield from ((line, "") for line in textwrap.wrap(part, width))


def _matrix(seen: ProbeRun, width: int) -> Iterator[Line]:
    asked, parts = probing.columns(seen), probing.sections(seen.contracts.contracts)
    labels = max(len(cache) for rows in parts.values() for cache, _ in rows)
    cells = {
        (row, column): probing.cell(seen, row, column)
        for rows in parts.values()
        for row in rows
        for column in asked
    }
    widths = {
        column: max(*map(len, column[0]), *(len(cells[row, column][0]) for row, c in cells if c == column))
        for column in asked
    }
    # Columns that do not fit beside the others stand below them.
    bands: list[list[probing.BackendColumn]] = [[]]
    used = labels
    for column in asked:
        if bands[-1] and used + _CELL_GAP + widths[column] > width:
            bands.append([])
            used = labels
        bands[-1].append(column)
        used += _CELL_GAP + widths[column]
    for band in bands:
        # Peers answer decode only, so further bands leave out sections without an answer.
        shown = {
            title: rows
            for title, rows in parts.items()
            if band is bands[0] or any(cells[row, column][0] != "-" for row in rows for column in band)
        }
        for i in (0, 1):
            heads = (f"{'':{_CELL_GAP}}{column[0][i]:{widths[column]}}" for column in band)
            yield f"{'' if i == 0 else 'KV cache':{labels}}{''.join(heads)}".rstrip(), "bold"
        for title, rows in shown.items():
            yield title, "cyan"
            for row in rows:
                found = [cells[row, column] for column in band]
                text = "".join(
                    f"{'':{_CELL_GAP}}{cell:{widths[c]}}" for (cell, _), c in zip(found, band, strict=True)
                )
                worst = max((status for _, status in found), key=STATUSES.index)
                yield f"{row[0]:{labels}}{text}".rstrip(), _STYLES.get(worst, "yellow")


def _tail(seen: ProbeRun, width: int) -> Iterator[Line]:
    """Capacity, machine code, device times and the emulated sample, where there are any."""
    yield from _labelled("tokens/GiB", probing.capacity(seen), width)
    for label, text, status in probing.code(seen):
        yield from _labelled(label, text, width, {FAIL: "bold red", SKIPPED: "yellow"}.get(status, ""))
    yield from _labelled("device time", probing.device_times(seen), width)
    yield from _labelled("emulated", probing.emulated(seen), width)


def _reasons(seen: ProbeRun, width: int, spare: int) -> list[Line]:
    """Reasons of what did not pass or was not asked: as many as fit in `spare` lines."""
    blocks = [_labelled(label, text, width) for label, text in probing.reasons(seen)]
    shown: list[Line] = []
    for index, block in enumerate(blocks):
        last = index == len(blocks) - 1
        if len(shown) + len(block) > spare - (not last):
            left = len(blocks) - index
            return [*shown, (f"{'':{_LABEL}}and {left} more reason{'s' * (left > 1)}: see --full", "yellow")]
        shown += block
    return shown


def _end(report: Report, seen: ProbeRun, code: ExitCode, *, full: bool) -> Iterator[Line]:
    verdicts = [seen.verdict(index) for index in range(len(seen.contracts.contracts))]
    shown = [(PASS, "pass"), (FAIL, "fail"), (SKIPPED, "skipped"), (NOT_RUN, NOT_RUN)]
    counts = [
        f"{n} {word}" for status, word in shown if (n := verdicts.count(status)) or word in ("pass", "fail")
    ]
    minutes, seconds = divmod(round(report.seconds), 60)
    took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    style = {ExitCode.OK: "green", ExitCode.NUMERICAL: "bold red"}.get(code, "yellow")
    things = "contract" if len(verdicts) == 1 else "contracts"
    yield f"{len(verdicts)} {things}: {', '.join(counts)}; {took}, {seen.jobs} processes", style
    name, chosen = own_command(), seen.contracts.name
    rest = [f"{name} validate --on {target}" for target in seen.targets[:1]]
    if code == ExitCode.OK:
        rest.append(
            f"{name} bench decode" if any(place.is_gpu for place in seen.places) else f"{name} inspect"
        )
    for index, line in enumerate([*([] if full else [f"{name} probe {chosen} --full"]), *rest]):
        yield f"{'' if index else 'next':{_LABEL}}{line}", "bold"


_ROW_STYLES = {FAIL: "bold red", REFUSED: "yellow", SKIPPED: "dim", INEXACT: "magenta"}
_CONTRACT = ("operation", "Q", "cache", "page")


def _contract(row: Answer) -> tuple[object, ...]:
    c = row.contract
    return c.function, c.q, c.cache, c.page_size or "-"


def show_full(report: Report, rows: Sequence[Answer]) -> None:
    """Shows every answer, and the code of every contract; long reasons stand below, numbered."""
    notes: dict[str, int] = {}
    errors = ("rel. L1", "max", "bytes/token", "tokens/GiB", "us")
    answers = Sheet([*keys(*_CONTRACT, "backend", "ran on"), *numbers(*errors), Column("verdict")])
    figures = ("VGPR", "AGPR", "spilled", "scratch", "LDS", "waves/SIMD", "matrix", "issue/memory")
    loop = Column("matrix instructions of the loop")
    code = Sheet([*keys(*_CONTRACT, "target"), *numbers(*figures), loop])
    for row in rows:
        verdict = row.status
        if row.detail and row.status != INEXACT:
            verdict += f" [{notes.setdefault(row.detail, len(notes) + 1)}]"
        elif row.status == INEXACT:
            verdict = f"over {row.contract.bound:g}"
        where = f"{row.place} emulated" if row.place in AMD_TARGETS else row.place
        kv_bytes = row.kv_bytes_per_token
        answers.add(
            *_contract(row), row.backend, where if row.ran_on else "-",
            *("-" if error is None else f"{error:.2e}" for error in (row.relative_l1, row.max_abs)),
            number(kv_bytes, 5), number(2**30 / kv_bytes) if kv_bytes else "-",
            number(row.time_us["median"]) if row.time_us else "-", verdict,
            style=_ROW_STYLES.get(row.status, ""),
        )  # fmt: skip
        for target, compiled in row.compiled.items():
            if not compiled.kernels:
                code.add(*_contract(row), target, *"-" * 8, compiled.status, style="yellow")
                continue
            k = main_kernel(compiled.kernels)
            mfma = ", ".join(f"{n} x {name.removeprefix('v_mfma_')}" for name, n in k.mfma.items())
            code.add(
                *_contract(row), target, k.vgprs, k.agprs, sum(each.spills for each in compiled.kernels),
                max(each.scratch_bytes for each in compiled.kernels), k.lds_bytes, k.waves_per_simd,
                f"{k.matrix_share:.0%}",
                "-" if compiled.model is None else f"{compiled.model['issue_over_memory']:.2f}",
                mfma or "none", style=_ROW_STYLES.get(compiled.status, ""),
            )  # fmt: skip
    report.show(answers)
    for text, index in notes.items():
        report.line(f"[{index}] {text}")
    if code.rows:
        report.say("\nmachine code; matrix and issue/memory are models of the hot loop, not measurements")
        report.show(code)
    report.say("")


def record(row: Answer) -> dict[str, Any]:
    """A CSV row."""
    fields = {name: getattr(row, name) for name in row.__dataclass_fields__ if name != "compiled"}
    return {name: value for name, value in fields.items() if value is not None}


_ORDER = (EXACT, REFUSED, WRONG)  # from the best to the worst
_MODEL_STYLES = {EXACT: "green", REFUSED: "yellow", WRONG: "bold red"}


@dataclass
class Answers:
    """What came of the calls at some places."""

    places: tuple[Place, ...]
    found: dict[ModelTask, ModelAnswer] = field(default_factory=dict)

    def of(self, need: Need, ranks: int) -> list[tuple[ModelTask, ModelAnswer]]:
        """The answers at every place; none where the ranks do not divide the heads, or it was not run."""
        tasks = [tasks_of(need, place.name).get(ranks) for place in self.places]
        return [(task, self.found[task]) for task in tasks if task in self.found and task is not None]

    def worst(self, need: Need, ranks: int) -> ModelAnswer | None:
        """The worst answer of any place, by status and error; None without one."""
        answers = [one for _, one in self.of(need, ranks)]
        return max(answers, key=lambda a: (_ORDER.index(a.status), a.relative_l1 or 0.0), default=None)

    def statuses(self, model: Model, ranks: int) -> list[str]:
        """The worst status of each call of a model."""
        answers = [self.worst(need, ranks) for need in model.needs]
        return [one.status for one in answers if one is not None]

    def reasons(self) -> Iterator[tuple[str, str, str]]:
        """Status, reason and who made the calls, of what is not exact; each reason once."""
        who: dict[tuple[str, str], dict[str, None]] = {}
        for model in MODELS:
            for need in model.needs:
                for ranks in RANKS:
                    found = self.worst(need, ranks)
                    if found is not None and found.status != EXACT:
                        calls = who.setdefault((found.status, found.detail), {})
                        calls[f"{model.name} ({need.what})"] = None
        for (status, why), calls in who.items():
            yield status, why, ", ".join(calls)

    def records(self) -> list[dict[str, Any]]:
        """A row for each call of each model, on each number of ranks, at each place."""
        return [
            {"model": model.name, "call": need.what, "ranks": ranks, **asdict(task), **asdict(found)}
            for model in MODELS
            for need in model.needs
            for ranks in RANKS
            for task, found in self.of(need, ranks)
        ]


def probe_models(report: Report, *, on: Sequence[str] | None, jobs: int, full: bool) -> ExitCode:
    """Makes every call of every model on one rank of 1, 2, 4 and 8, and shows a row for each model.

    Args:
        report: where it goes.
        on: where to run; None is the GPU or the CPU.
        jobs: processes.
        full: also show a row for each call, with its error.
    """
    answers = Answers(tuple(find_places(on)))
    gpu = {place.name for place in answers.places if place.is_gpu}

    tasks = [task for place in answers.places for task in all_tasks(MODELS, place.name)]
    done, interrupted = run_all(
        report, tasks, answer, ModelAnswer, what="probing", jobs=jobs,
        said=lambda task, _: f"{task.operation} {task.line}", on_gpu=lambda task: task.place in gpu,
    )  # fmt: skip
    answers.found.update(done)
    if full:
        report.show(_calls(answers))
    report.say("Calls of a rank that are exact here, of those that the model's attention makes:")
    report.show(_models(answers))
    for status, why, who in answers.reasons():
        report.line(f"{status}: {who}: {why}", _MODEL_STYLES[status])
    for label, name in (("not checked", "unsure"), ("not attention over a cache", "beside")):
        for model in MODELS:
            if text := getattr(model, name):
                report.line(f"{label}: {model.name}: {text}")
    statuses = [found.status for found in answers.found.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in _ORDER if status in statuses)
    report.say(f"{len(statuses)} different calls: {counts}")
    if not full:
        report.line(f"next        {own_command()} probe models --full", "bold")
    body = {
        "set": "models",
        "ran_on": "; ".join(place.description for place in answers.places),
        "places": [place.name for place in answers.places],
        "versions": versions(),
        "models": [{**asdict(model), "needs": len(model.needs)} for model in MODELS],
        "rows": answers.records(),
    }
    code = ExitCode.NUMERICAL if WRONG in statuses else ExitCode.OK
    return report.finish(body, code, interrupted=interrupted, rows=answers.records())


def _models(answers: Answers) -> Sheet:
    """A row for each model: calls that are exact, of all, by number of ranks."""
    sheet = Sheet([*keys("model", "heads"), *numbers(*(f"TP {ranks}" for ranks in RANKS))])
    for model in MODELS:
        by_ranks = [answers.statuses(model, ranks) for ranks in RANKS]
        worst = max((status for found in by_ranks for status in found), key=_ORDER.index, default=REFUSED)
        cells = [f"{found.count(EXACT)}/{len(found)}" if found else "-" for found in by_ranks]
        sheet.add(model.name, model.heads, *cells, style=_MODEL_STYLES[worst])
    return sheet


def _calls(answers: Answers) -> Sheet:
    """A row for each call of each model: its relative L1 error by number of ranks."""
    sheet = Sheet([*keys("model", "call"), *numbers(*(f"TP {ranks}" for ranks in RANKS))])
    for model in MODELS:
        for need in model.needs:
            found = [answers.worst(need, ranks) for ranks in RANKS]
            worst = max((a.status for a in found if a is not None), key=_ORDER.index, default=REFUSED)
            cells = ["-" if a is None else _error(a) for a in found]
            sheet.add(model.name, need.what, *cells, style=_MODEL_STYLES[worst])
    return sheet


def _error(found: ModelAnswer) -> str:
    return found.status if found.relative_l1 is None else f"{found.status} {found.relative_l1:.1e}"

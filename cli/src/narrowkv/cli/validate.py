"""`narrowkv validate`: a seeded sweep over the decode contract's axes against the reference."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from narrowkv.cli.cases import LSE_BOUND, CaseResult, DecodeCase, build, check
from narrowkv.cli.contracts import BOUND_16_BIT_QUERY
from narrowkv.cli.environment import versions
from narrowkv.cli.places import Place, find_place, find_places
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sheet import Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.testing.records import jsonable

QUICK_RANDOM_CASES = 40
FULL_RANDOM_CASES = 800
_WORST_SHOWN = 5
_FAILURES_SHOWN = 20

# The contract's axes. Each value alone is one case of the quick sweep; the full one mixes them at random.
AXES: dict[str, tuple[Any, ...]] = {
    "ratio": (1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 71),
    "head_dim": (64, 80, 96, 128, 192, 256),
    "page_size": (1, 3, 7, 16, 48, 64),
    "layout": ("NHD", "HND", "tokens", "concat", "vectorised", "padded"),
    "table": ("block_table", "ragged"),
    "descale": ("float", "tensor", "head", "sequence_head", "page_head", "token_head"),
    "k": ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1"),
    "v": ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1"),
    "group": (0, 32),
    "q": ("bf16", "fp16"),
    "out": ("", "bf16", "fp16", "fp32"),
    "q_len": (1, 2, 4),
    "window": (-1, 0, 5, 40),
    "soft_cap": (0.0, 2.0, 30.0),
    "sinks": (False, True),
    "lens": ("64+37", "1", "0", "0+1+2", "16+17+15", "31+32+33", "63+64+65", "129+0+7", "300+5"),
    "split": ("", "none", "even", "uniform"),
    "data": ("gaussian", "outlier"),
    "clean": (False, True),
    "kv_heads": (1, 2, 3),
}
_VECTOR_PAGES = (16, 48, 64)


def mended(case: DecodeCase) -> DecodeCase:
    """The nearest case that a cache can have: some layouts want certain pages, and formats."""
    if case.layout == "tokens" and case.page_size != 1:
        case = replace(case, page_size=1)
    if case.layout == "vectorised":
        if case.page_size not in _VECTOR_PAGES:
            case = replace(case, page_size=16)
        if case.head_dim % 16:
            case = replace(case, head_dim=64)
    if case.layout == "concat" and case.k != case.v:
        case = replace(case, v=case.k)
    if {case.k, case.v} == {"bf16", "fp16"}:
        case = replace(case, v=case.k)
    if "fp4_e2m1" not in (case.k, case.v):
        case = replace(case, group=0)
    elif case.layout == "vectorised":
        case = replace(case, layout="HND")
    if case.group and case.head_dim % case.group:
        case = replace(case, head_dim=64)
    return case


def one_at_a_time() -> Iterator[DecodeCase]:
    """The default case, and each value of each axis alone; a cache format also for K and V alike."""
    yield DecodeCase()
    for name, values in AXES.items():
        for value in values:
            if value != getattr(DecodeCase(), name):
                yield mended(replace(DecodeCase(), **{name: value}))
    for fmt in AXES["k"]:
        yield DecodeCase(k=fmt, v=fmt)
    yield from (DecodeCase(k=k, v="fp4_e2m1", group=32) for k in ("fp4_e2m1", "fp8_e4m3fn"))
    yield DecodeCase(k="fp4_e2m1", v="fp4_e2m1", page_size=1, ratio=17, q_len=2)


def at_random(count: int, seed: int) -> Iterator[DecodeCase]:
    """Cases with every axis drawn at random; half of them with one format for K and V."""
    draw = random.Random(seed)
    for number in range(count):
        values = {name: draw.choice(choices) for name, choices in AXES.items()}
        if number % 2:
            values["v"] = values["k"]
        if values["ratio"] > 16:
            values["kv_heads"] = 1
        yield mended(DecodeCase(**values, seed=draw.randrange(2**31)))


def sweep(*, full: bool, seed: int) -> list[DecodeCase]:
    """The cases of a sweep, each once."""
    cases = [*one_at_a_time(), *at_random(FULL_RANDOM_CASES if full else QUICK_RANDOM_CASES, seed)]
    return list(dict.fromkeys(cases))


@dataclass(frozen=True)
class Kind:
    """An operation whose cases can be validated.

    Attributes:
        operation: its function, for people.
        argument: what names it on the command line; empty for decode.
        run: runs one case at a place.
        group: query and rows or cache of a case's line, for the table.
        bounds: relative L1 errors that pass, by what they hold for.
    """

    operation: str
    argument: str
    run: Callable[[Any, Place], CaseResult]
    group: Callable[[str], tuple[str, str]]
    bounds: dict[str, float] = field(hash=False)

    @property
    def bound(self) -> str:
        """The bounds for people."""
        return ", ".join(
            f"{bound:g}" if name == "relative_l1" else f"{bound:g} {name}"
            for name, bound in self.bounds.items()
        )


def _run_decode(case: DecodeCase, place: Place) -> CaseResult:
    inputs = build(case, place.device)
    with place.context():
        results = inputs.call()
    return check(case, inputs, BOUND_16_BIT_QUERY, lambda: results)


def _group_decode(line: str) -> tuple[str, str]:
    case = DecodeCase.parse(line)
    return case.q, case.k if case.k == case.v else "K and V differ"


DECODE_CASES = Kind("paged_decode", "", _run_decode, _group_decode, {"relative_l1": BOUND_16_BIT_QUERY})


@dataclass(frozen=True)
class Task:
    """A case, how and where to run it, and whether to watch LDS for races there."""

    case: Any
    kind: Kind
    place: str
    detect_races: bool = False
    detect_hazards: bool = False


def run_task(task: Task) -> CaseResult:
    """Runs one case; what goes wrong, a race too, is its result."""
    try:
        return task.kind.run(
            task.case,
            find_place(task.place, detect_races=task.detect_races, detect_hazards=task.detect_hazards),
        )
    except Exception as error:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return CaseResult(str(task.case), None, float("nan"), False, text)


@dataclass(frozen=True)
class Setting:
    """What the cases of a run have in common.

    Attributes:
        places: where they ran.
        default: the place that a command without --on takes.
        detect_races: whether LDS was watched.
        detect_hazards: whether waits and wait states were, too.
        kind: the operation.
    """

    places: tuple[Place, ...]
    default: str
    detect_races: bool = False
    detect_hazards: bool = False
    kind: Kind = DECODE_CASES

    def repro(self, result: CaseResult) -> str:
        """The command that repeats a case where it ran."""
        where = "" if result.place in ("", self.default) else f" --on {result.place}"
        races = " --detect-races" if self.detect_races else ""
        races += " --detect-hazards" if self.detect_hazards else ""
        operation = f" {self.kind.argument}" if self.kind.argument else ""
        return f"narrowkv validate{operation}{where}{races} --case {result.case}"

    def __str__(self) -> str:
        watched = "; LDS watched for races" if self.detect_races or self.detect_hazards else ""
        watched += ", waits for hazards" if self.detect_hazards else ""
        return "; ".join(place.description for place in self.places) + watched


def validate(
    cases: Sequence[Any] | Callable[[Place], Sequence[Any]],
    report: Report,
    *,
    on: Sequence[str] | None,
    jobs: int,
    seed: int,
    detect_races: bool = False,
    detect_hazards: bool = False,
    kind: Kind = DECODE_CASES,
) -> ExitCode:
    """Runs cases at every place and reports; Ctrl-C keeps those that were finished.

    `cases` may be a function of the place, for a sweep that not every target serves whole.
    """
    places = tuple(find_places(on, detect_races=detect_races, detect_hazards=detect_hazards))
    setting = Setting(places, find_place(None).name, detect_races, detect_hazards, kind)
    tasks = [
        Task(case, kind, place.name, detect_races, detect_hazards)
        for place in places
        for case in (cases(place) if callable(cases) else cases)
    ]
    found: dict[Task, CaseResult] = {}

    def take(task: Task, result: CaseResult) -> str:
        found[task] = replace(result, place=task.place)
        return "" if result.passed else f"failed: {result.case}"

    interrupted = run_all(report, tasks, run_task, CaseResult, take, jobs=jobs)
    results = [found[task] for task in tasks if task in found]
    failures = [result for result in results if not result.passed]
    report.say(f"{kind.operation} against fp32 on the same numbers, {setting}")
    if len(tasks) == len(places):
        for result in results:
            text = f"{result.error}; lse {result.lse_error:.3g}" if result.error else result.detail
            report.line(f"{result.place}: {text}" if len(places) > 1 else text)
    else:
        report.show(_table(results, kind))
        _show_worst(report, results, setting)
    for result in failures[:_FAILURES_SHOWN]:
        report.line(f"FAILED {result.detail}", "bold red")
        report.line(f"  {setting.repro(result)}")
    if len(failures) > _FAILURES_SHOWN:
        report.say(f"and {len(failures) - _FAILURES_SHOWN} more failures; --json lists all")
    colour = "bold red" if failures else "green"
    report.say(
        f"[{colour}]{len(results) - len(failures)} of {len(results)} cases pass[/] "
        f"(relative L1 <= {kind.bound})"
    )
    body = {
        "operation": kind.operation,
        "ran_on": "; ".join(place.description for place in places),
        "places": [place.name for place in places],
        "detect_races": detect_races,
        "detect_hazards": detect_hazards,
        "seed": seed,
        "versions": versions(),
        "bounds": {**kind.bounds, "lse": LSE_BOUND},
        "planned": len(tasks),
        "passed": len(results) - len(failures),
        "cases": (records := [{**jsonable(r), "command": setting.repro(r)} for r in results]),
    }
    code = ExitCode.NUMERICAL if failures else ExitCode.OK
    plot = partial(_plot, results, kind)
    return report.finish(body, code, interrupted=interrupted, rows=records, plot=plot)


def _groups(results: Sequence[CaseResult], kind: Kind) -> dict[tuple[str, str, str], list[CaseResult]]:
    """Results by place, query and cache."""
    groups: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault((result.place, *kind.group(result.case)), []).append(result)
    return dict(sorted(groups.items()))


def _plot(results: Sequence[CaseResult], kind: Kind, path: Path) -> None:
    """Every case's error, a row for each query and cache, a colour for each place."""
    from narrowkv.cli.plot import plot_dots

    dots = [
        (f"{q} over {cache}", where, r.error.relative_l1)
        for (where, q, cache), group in _groups(results, kind).items()
        for r in group
        if r.error is not None
    ]
    plot_dots(
        dots, path, title=f"{kind.operation} against fp32", label="relative L1 error", bounds=kind.bounds
    )


def _table(results: Sequence[CaseResult], kind: Kind) -> Sheet:
    """Errors by place and formats of query and cache."""
    sheet = Sheet(
        [
            *keys("ran on", "Q", "cache"),
            *numbers("cases", "pass", "median rel. L1", "worst rel. L1", "worst max", "worst lse"),
        ]
    )
    for (where, q, cache), group in _groups(results, kind).items():
        errors = [r.error.relative_l1 for r in group if r.error is not None]
        largest = [r.error.max_abs for r in group if r.error is not None]
        lse = [r.lse_error for r in group if r.error is not None]
        figures = (
            [f"{f:.2e}" for f in (statistics.median(errors), max(errors), max(largest), max(lse))]
            if errors
            else ["-"] * 4
        )
        passed = sum(r.passed for r in group)
        style = "" if passed == len(group) else "bold red"
        sheet.add(where, q, cache, len(group), passed, *figures, style=style)
    return sheet


def _show_worst(report: Report, results: Sequence[CaseResult], setting: Setting) -> None:
    passed = [r for r in results if r.passed and r.error is not None]
    worst = sorted(passed, key=lambda r: r.error.relative_l1 if r.error else 0.0, reverse=True)[:_WORST_SHOWN]
    if worst:
        report.say("worst of those that pass:")
    for result in worst:
        assert result.error is not None
        report.line(f"  {result.error.relative_l1:.2e}  {setting.repro(result)}")

"""The one screen of `probe`: contracts down, places across, and under it what follows from them.

It has at most 40 lines of 80 columns, whatever the set and the terminal; `--full` has the rest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from narrowkv.cli.names import QUERY_DTYPES
from narrowkv.cli.report import ExitCode, Report, own_command
from narrowkv.cli.sheet import filled
from narrowkv.testing.backends import OURS
from narrowkv.testing.checking import Sample
from narrowkv.testing.contracts import APPEND, DECODE, PREFILL, Contract
from narrowkv.testing.probing import FAIL, INEXACT, NOT_RUN, PASS, REFUSED, SKIPPED, STATUSES, ProbeRun
from narrowkv.testing.records import number

LINES = 40
WIDTH = 80
_WIDEST = 120
_LABEL = 12  # columns of what a line under the matrix begins with
_CELL_GAP = 2
_MARKS = {PASS: "ok", FAIL: "FAIL", INEXACT: "over"}
_COUNTED = (NOT_RUN, SKIPPED, REFUSED)
_STYLES = {PASS: "green", FAIL: "bold red", INEXACT: "magenta"}


@dataclass(frozen=True)
class _Column:
    """Where a contract was asked, and of whom: a backend at a place or target."""

    head: tuple[str, str]
    backend: str
    place: str


@dataclass(frozen=True)
class _Row:
    """Contracts that differ in page size and 16-bit query alone; indices into the set."""

    cache: str
    indices: tuple[int, ...]


def show_screen(report: Report, seen: ProbeRun, code: ExitCode, *, full: bool) -> None:
    """Shows the screen, each line with its style."""
    width = report.human.width
    width = WIDTH if width > 1000 else max(WIDTH, min(width, _WIDEST))
    head = list(_head(seen, width))
    matrix = list(_matrix(seen, width))
    tail = [*_capacity(seen, width), *_code(seen, width), *_times(seen, width), *_sample(seen, width)]
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


def _columns(seen: ProbeRun) -> list[_Column]:
    columns = []
    for name in dict.fromkeys([*(place.name for place in seen.places), *seen.targets]):
        place = next((place for place in seen.places if place.name == name), None)
        if place is None or place.is_emulated:
            ran = place is not None or any(where == name for _, _, where in seen.answers)
            head = (f"{name} code", "emulated" if ran else "compiled")
        else:
            head = ("this GPU", "") if place.is_gpu else ("this CPU", "interpreted")
        columns.append(_Column(head, OURS.name, name))
    where = next((place.name for place in seen.places if not place.is_emulated), "")
    return columns + [
        _Column((name, "peer"), name, where) for name, why in seen.absent.items() if why is None
    ]


def _sections(contracts: Sequence[Contract]) -> dict[str, list[_Row]]:
    """Rows by what they have in common: operation, queries, page sizes, bound."""
    pages: dict[tuple[str, str, str, float], list[int]] = {}
    for index, c in enumerate(contracts):
        pages.setdefault((c.function, c.q, c.cache, c.bound), []).append(index)
    # 16-bit queries over the same pages share a row.
    rows: dict[tuple[str, str, str, float, tuple[int, ...]], list[int]] = {}
    for (function, q, cache, bound), indices in pages.items():
        sizes = tuple(contracts[i].page_size for i in indices)
        kind = "16-bit" if q in QUERY_DTYPES else q
        rows.setdefault((function, kind, cache, bound, sizes), []).extend(indices)
    sections: dict[str, list[_Row]] = {}
    for (function, _, cache, bound, sizes), indices in rows.items():
        queries = ", ".join(dict.fromkeys(contracts[i].q for i in indices))
        title = f"{function}: Q {queries}"
        if any(sizes):
            title += f"; pages of {', '.join(map(str, sizes))} tokens"
        sections.setdefault(f"{title}; bound {bound:.1e}", []).append(_Row(cache, tuple(indices)))
    return sections


def _matrix(seen: ProbeRun, width: int) -> Iterator[Line]:
    columns, sections = _columns(seen), _sections(seen.contracts.contracts)
    labels = max(len(row.cache) for rows in sections.values() for row in rows)
    cells = {
        (row, column): _cell(seen, row, column)
        for rows in sections.values()
        for row in rows
        for column in columns
    }
    widths = {
        column: max(*map(len, column.head), *(len(cells[row, column][0]) for row, c in cells if c == column))
        for column in columns
    }
    # Columns that do not fit beside the others stand below them.
    bands: list[list[_Column]] = [[]]
    used = labels
    for column in columns:
        if bands[-1] and used + _CELL_GAP + widths[column] > width:
            bands.append([])
            used = labels
        bands[-1].append(column)
        used += _CELL_GAP + widths[column]
    for band in bands:
        # A peer is asked about decode alone: of sections without an answer, a further band says nothing.
        shown = {
            title: rows
            for title, rows in sections.items()
            if band is bands[0] or any(cells[row, column][0] != "-" for row in rows for column in band)
        }
        for i in (0, 1):
            heads = (f"{'':{_CELL_GAP}}{column.head[i]:{widths[column]}}" for column in band)
            yield f"{'' if i == 0 else 'KV cache':{labels}}{''.join(heads)}".rstrip(), "bold"
        for title, rows in shown.items():
            yield title, "cyan"
            for row in rows:
                found = [cells[row, column] for column in band]
                text = "".join(
                    f"{'':{_CELL_GAP}}{cell:{widths[c]}}" for (cell, _), c in zip(found, band, strict=True)
                )
                worst = max((status for _, status in found), key=STATUSES.index)
                yield f"{row.cache:{labels}}{text}".rstrip(), _STYLES.get(worst, "yellow")


def _cell(seen: ProbeRun, row: _Row, column: _Column) -> tuple[str, str]:
    """A mark and the worst error, and the status behind them."""
    statuses: list[str] = []
    for index in row.indices:
        found = seen.statuses(index, column.backend, column.place)
        statuses += found or ([NOT_RUN] if column.backend == OURS.name else [])
    if not statuses:
        return "-", PASS
    worst = max(statuses, key=STATUSES.index)
    if worst in _COUNTED:
        count = statuses.count(worst)
        return f"{worst} {count}/{len(statuses)}" if count < len(statuses) else worst, worst
    answers = (seen.answers.get((i, column.backend, column.place)) for i in row.indices)
    errors = [a.relative_l1 for a in answers if a is not None and a.relative_l1 is not None]
    mark = _MARKS[worst]
    if errors:
        # NaN is the worst of all, and no comparison finds it.
        return f"{mark} {next((e for e in errors if e != e), max(errors)):.2e}", worst
    return mark if worst == FAIL else f"{mark} compiled", worst


def _capacity(seen: ProbeRun, width: int) -> Iterator[Line]:
    """How many tokens a GiB holds in each format, and how many times bf16's that is."""
    sizes: dict[str, float] = {}
    for (index, backend, _), answer in seen.answers.items():
        if backend == OURS.name and answer.kv_bytes_per_token is not None:
            sizes[seen.contracts.contracts[index].cache] = answer.kv_bytes_per_token
    if not sizes:
        return
    order = dict.fromkeys(c.cache for c in seen.contracts.contracts)
    shape = seen.contracts.shape
    paged = all(c.operation in (DECODE, PREFILL, APPEND) for c in seen.contracts.contracts)
    bf16 = sizes.get("bf16", 4.0 * shape.num_kv_heads * shape.head_dim if paged else None)
    parts = []
    for name in (name for name in order if name in sizes):
        ratio = f" ({bf16 / sizes[name]:.2f}x)" if bf16 else ""
        parts.append(f"{name} {number(2**30 / sizes[name] / 1000)}k{ratio}")
    if bf16 and "bf16" not in sizes:
        parts.append("beside bf16")
    yield from _labelled("tokens/GiB", parts, width)


def _code(seen: ProbeRun, width: int) -> Iterator[Line]:
    """What the machine code of each target is like."""
    for target in seen.targets:
        found = [code for (_, name), code in sorted(seen.compiled.items()) if name == target]
        kernels = [kernel for code in found for kernel in code.kernels]
        if not kernels:
            why = next((code.detail for code in found if code.detail), "interrupted before it was compiled")
            yield from _labelled(target, f"not compiled: {why}", width, "yellow")
            continue
        spills, scratch = max(k.spills for k in kernels), max(k.scratch_bytes for k in kernels)
        text = "no spills; "
        if spills or scratch:
            bad = sum(any(k.spills or k.scratch_bytes for k in code.kernels) for code in found)
            text = f"{bad} of {len(found)} calls spill: {spills} registers, {scratch} bytes of scratch; "
        models = [code.model for code in found if code.model is not None]
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
        yield from _labelled(f"{target} code", text, width, "bold red" if spills or scratch else "")


def _times(seen: ProbeRun, width: int) -> Iterator[Line]:
    """Device times of each operation, where there is a GPU."""
    times: dict[str, list[float]] = {}
    for (index, backend, _), answer in seen.answers.items():
        if backend == OURS.name and answer.time_us is not None:
            times.setdefault(seen.contracts.contracts[index].function, []).append(answer.time_us["median"])
    text = "; ".join(f"{name} {number(min(us))} to {number(max(us))} us" for name, us in times.items())
    if text:
        yield from _labelled("device time", text, width)


def _sample(seen: ProbeRun, width: int) -> Iterator[Line]:
    """How much of the machine code was run, where that was a sample."""
    samples = [answer.sample for answer in seen.answers.values() if answer.sample is not None]
    if samples:
        total = {name: sum(getattr(s, name) for s in samples) for name in Sample.__dataclass_fields__}
        text = "{workgroups} of {launched} workgroups, {rows} of {all_rows} output rows".format(**total)
        yield from _labelled("emulated", text, width)


def _reasons(seen: ProbeRun, width: int, spare: int) -> list[Line]:
    """Who was not asked, what was refused or failed and why: as many as fit in `spare` lines."""
    counts: dict[tuple[str, str, str], int] = {}
    for (_, name, place), answer in seen.answers.items():
        if answer.status == INEXACT:
            reason = f"{name}: error above the bound, which a peer may have"
            counts["over", "", reason] = counts.get(("over", "", reason), 0) + 1
        elif answer.status != PASS and answer.detail:
            key = (answer.status, place, f"{name}: {answer.detail}")
            counts[key] = counts.get(key, 0) + 1
    for (_, target), code in seen.compiled.items():
        if code.status == FAIL:
            key = (code.status, target, f"{OURS.name} for {target}: {code.detail}")
            counts[key] = counts.get(key, 0) + 1
    found = sorted(
        counts.items(), key=lambda item: STATUSES.index(item[0][0]) if item[0][1] else 0, reverse=True
    )
    blocks = [
        _labelled(status, f"{text} ({count} x)" if count > 1 else text, width)
        for (status, _, text), count in found
    ]
    missing: dict[str, list[str]] = {}
    for name, why in seen.absent.items():
        if why is not None:
            missing.setdefault(why, []).append(name)
    blocks += [_labelled("not asked", f"{', '.join(names)}: {why}", width) for why, names in missing.items()]
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

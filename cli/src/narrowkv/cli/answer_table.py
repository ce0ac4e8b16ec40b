"""The table of `probe`: one row for each contract and backend, one line in it for each place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from narrowkv.cli.answers import FAIL, INEXACT, NOT_YET, PASS, REFUSED, SKIPPED, Answer, Compiled
from narrowkv.cli.backends import OURS
from narrowkv.cli.codegen import AMD_TARGETS, main_kernel
from narrowkv.cli.places import Place
from narrowkv.cli.report import number

_COLOURS = {
    PASS: "green",
    FAIL: "bold red",
    NOT_YET: "yellow",
    REFUSED: "yellow",
    SKIPPED: "dim",
    INEXACT: "magenta",
}


def _short(mnemonic: str) -> str:
    """A matrix instruction by what tells it from others: "16x16x16_f16", "scale 16x16x128_f8f6f4"."""
    return mnemonic.removeprefix("v_mfma_").replace("f32_", "", 1).replace("scale_", "scale ", 1)


def _capacity(bytes_per_token: float | None) -> str:
    """Bytes of a token over all heads, and how many thousand tokens a GiB holds."""
    if bytes_per_token is None:
        return "-"
    return f"{number(bytes_per_token, 5)}\n{number(2**30 / bytes_per_token / 1000)}k/GiB"


def _code_cell(compiled: Compiled | None) -> Text:
    if compiled is None:
        return Text("-", style="dim")
    if not compiled.kernels:
        return Text(compiled.status, style=_COLOURS[compiled.status])
    kernel = main_kernel(compiled.kernels)
    spills = sum(k.spills for k in compiled.kernels)
    mfma = ", ".join(f"{n} x {_short(name)}" for name, n in kernel.mfma.items())
    registers = f"{kernel.vgprs + kernel.agprs} VGPR"
    text = f"{registers} {spills} spill {kernel.lds_bytes / 1024:g}K LDS\n{mfma or 'no MFMA in a loop'}"
    return Text(text, style=_COLOURS[compiled.status])


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _lines(rows: list[Answer]) -> Iterator[list[Answer]]:
    """Rows of the table: what one backend said to a contract at all places, where it ran at any.

    Of the rest, those of one operation and one reason are one row.
    """
    ran = {(r.contract, r.backend) for r in rows if r.ran_on or any(c.kernels for c in r.compiled.values())}
    groups: dict[tuple[Any, ...], list[Answer]] = {}
    for row in rows:
        key: tuple[Any, ...] = (row.contract, row.backend)
        if key not in ran:
            key = (row.contract.operation, row.backend, row.status, row.detail)
        groups.setdefault(key, []).append(row)
    yield from groups.values()


class Notes:
    """Reasons too long for a cell, numbered.

    Attributes:
        texts: each reason with its number.
    """

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a reason."""
        return self.texts.setdefault(text, len(self.texts) + 1)


def _ran_on(row: Answer) -> str:
    if not row.ran_on:
        return "-"
    return f"{row.place} emulated" if row.place in AMD_TARGETS else row.place


def _verdict_cell(row: Answer, notes: Notes) -> Text:
    if row.status == INEXACT:
        return Text(f"over {row.contract.bound:g}", style=_COLOURS[INEXACT])
    verdict = Text(row.status, style=_COLOURS[row.status])
    if row.detail:
        verdict.append(f" [{notes.number(row.detail)}]", style="default")
    return verdict


def answer_table(
    rows: list[Answer], absent: dict[str, str | None], places: tuple[Place, ...], notes: Notes
) -> Table:
    """The table of all answers, and of who is absent; reasons go to `notes`."""
    timed = any(place.is_gpu for place in places)
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
    if timed:
        table.add_column("us", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for group in _lines(rows):
        row, c = group[0], group[0].contract
        pages = _joined(str(r.contract.page_size) for r in group)
        queries, caches = _joined(r.contract.q for r in group), _joined(r.contract.cache for r in group)
        cells: list[Text | str] = [c.function, queries, caches, pages, row.backend]
        ours = row.backend == OURS.name
        cells += [_code_cell(row.compiled.get(target)) if ours else "" for target in AMD_TARGETS]
        one = all(r.contract == c for r in group)
        each = group if one and any(r.ran_on for r in group) else group[:1]
        cells += ["\n".join(_ran_on(r) for r in each)]
        errors = (f"{r.relative_l1:.2e}" if r.relative_l1 is not None else "-" for r in each)
        cells += ["\n".join(errors), _capacity(row.kv_bytes_per_token) if one else "-"]
        if timed:
            times = (number(r.time_us["median"]) if r.time_us else "-" for r in each)
            cells += ["\n".join(times)]
        table.add_row(*cells, Text("\n").join(_verdict_cell(r, notes) for r in each))
    for name, reason in absent.items():
        if reason is not None:
            blank = [""] * (len(table.columns) - 6)
            table.add_row("", "", "", "", name, *blank, Text(f"{SKIPPED}: {reason}", style=_COLOURS[SKIPPED]))
    return table

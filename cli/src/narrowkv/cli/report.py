"""The output of every command: a table for people, one JSON document for programs, an exit code.

With `--json` stdout has only the document; tables and progress go to stderr. Without it the table goes to
stdout and progress to stderr. In a table that is wider than the terminal a row becomes a block of lines.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

# In a pipe every row stays one line, for grep.
_WIDTH_WITHOUT_TERMINAL = 100_000
_SECONDS_BETWEEN_LINES = 10.0
_PLOT_FORMATS = (".png", ".svg", ".pdf")


class ExitCode(IntEnum):
    """How a command ends. 130 is the shell's own code for a command that Ctrl-C ended."""

    OK = 0
    NUMERICAL = 1
    USAGE = 2
    UNSUPPORTED = 3
    REGRESSION = 4
    INTERRUPTED = 130


class UsageError(Exception):
    """Wrong arguments: an unknown name, a file that cannot be written, a broken baseline. Exit code 2."""


class UnsupportedHereError(Exception):
    """This machine lacks what the command needs. Exit code 3."""


def version() -> str:
    """The installed version of narrowkv-cli, or "source" when it runs from a source tree."""
    try:
        return metadata.version("narrowkv-cli")
    except metadata.PackageNotFoundError:
        return "source"


def check_writable(option: str, path: Path | None) -> None:
    """Refuses, before a long run, a file that could not be written after it.

    Raises:
        UsageError: naming the option, the file and the reason.
    """
    if path is None:
        return
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} must be a file that can be written, got {path}: {error.strerror or error}"
        ) from None
    if not existed:
        path.unlink()


def spelled(name: str) -> str:
    """The option or argument of a field or parameter."""
    known = {"contract_set": "CONTRACT-SET", "cache_format": "--format"}
    return known.get(name, f"--{name.replace('_', '-')}")


def own_command() -> str:
    """The command that starts this program again from the current folder."""
    started = sys.argv[0]
    name = Path(started).name
    if Path(started).parts[-3:] == ("narrowkv", "cli", "__main__.py"):
        return "python -m narrowkv.cli"
    if name != "narrowkv" or not Path(started).is_file():  # a test or another program
        return "narrowkv"
    on_path = shutil.which(name)
    if on_path and Path(on_path).resolve() == Path(started).resolve():
        return name
    return shlex.quote(min(started, os.path.relpath(started), key=len))


class Report:
    """Writes a command's text, tables, progress, document and files.

    Args:
        command: its name, for the document.
        as_json: whether stdout belongs to the document.
        typed: names of the parameters that the command line gave a value.
        out: file of the JSON document.
        csv: file of the rows.
        plot: file of the plot; its suffix is the format.
        resume: file of the finished cases, which a later run does not repeat.

    Raises:
        UsageError: a file cannot be written, or has the suffix of no plot.
        UnsupportedHereError: there is no matplotlib to plot with.
    """

    def __init__(
        self,
        command: str,
        *,
        as_json: bool = False,
        typed: frozenset[str] = frozenset(),
        out: Path | None = None,
        csv: Path | None = None,
        plot: Path | None = None,
        resume: Path | None = None,
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.typed = typed
        self.out, self.csv, self.plot, self.resume = out, csv, plot, resume
        self.err = _console(sys.stderr)
        self.human = self.err if as_json else _console(sys.stdout)
        self._begun = time.time()
        for name, path in (("out", out), ("csv", csv), ("plot", plot), ("resume", resume)):
            check_writable(f"--{name}", path)
        if plot is not None and plot.suffix not in _PLOT_FORMATS:
            known = ", ".join(_PLOT_FORMATS)
            raise UsageError(f"--plot must be a file that ends with one of {known}; got {plot}")
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise UnsupportedHereError("--plot needs matplotlib: pip install 'narrowkv-cli[plot]'")

    @property
    def seconds(self) -> float:
        """Since the command began."""
        return time.time() - self._begun

    def refuse(self, why: str, *names: str) -> None:
        """Refuses options that were typed though they do nothing here.

        Raises:
            UsageError: saying which, and `why`.
        """
        if typed := [name for name in names if name in self.typed]:
            options = ", ".join(map(spelled, typed))
            raise UsageError(f"{options} {'does' if len(typed) == 1 else 'do'} not apply {why}")

    def say(self, text: str) -> None:
        """One line for a person, where tables go."""
        self.human.print(text, highlight=False)

    def note(self, text: str) -> None:
        """One line of progress or advice: always stderr."""
        self.err.print(text, highlight=False)

    def line(self, text: str | Text, style: str = "") -> None:
        """One line without markup or line breaks: a command to copy, a path, another program's message."""
        self.human.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def show(self, sheet: Sheet) -> None:
        """A table for a person, complete at every width."""
        for line in sheet.lines(self.human.width):
            self.human.print(line, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int, what: str) -> Iterator[ProgressLine]:
        """A bar on a terminal; elsewhere a line every ten seconds."""
        if self.err.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self.err, transient=True) as bar:
                task = bar.add_task(what, total=total)
                yield ProgressLine(
                    total, lambda done, text: bar.update(task, completed=done, description=text or what)
                )
        else:
            yield ProgressLine(total, self._line_now_and_then(total, what))

    def _line_now_and_then(self, total: int, what: str) -> Any:
        last = [time.monotonic()]

        def show(done: int, text: str) -> None:
            now = time.monotonic()
            if done == total or now - last[0] >= _SECONDS_BETWEEN_LINES:
                last[0] = now
                self.note(f"{what} {done}/{total}{f': {text}' if text else ''}")

        return show

    def finish(
        self,
        body: Mapping[str, Any],
        exit_code: ExitCode,
        *,
        interrupted: bool = False,
        rows: Sequence[Mapping[str, Any]] = (),
        plot: Callable[[Path], None] | None = None,
    ) -> ExitCode:
        """Writes the files and returns the exit code: 130 if the run was cut short and nothing failed.

        Args:
            body: of the document.
            exit_code: of a run that was not cut short.
            interrupted: whether it was.
            rows: of the CSV file.
            plot: draws the plot into a file.
        """
        from narrowkv.testing.records import SCHEMA_VERSION, flat, jsonable, to_csv

        if interrupted:
            self.note("[yellow]interrupted[/]: what is shown was finished before; the rest was not run")
            if self.resume is not None:
                self.note(f"to go on, give the same command again: {self.resume} has what was finished")
            if exit_code in (ExitCode.OK, ExitCode.UNSUPPORTED):
                exit_code = ExitCode.INTERRUPTED
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "narrowkv": version(),
            "started": datetime.fromtimestamp(self._begun, timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 2),
            "interrupted": interrupted,
            "exit_code": int(exit_code),
            **body,
        }
        text = json.dumps(jsonable(document), indent=2, allow_nan=False) + "\n"
        if self.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()
        if self.out is not None:
            self.out.write_text(text)
        if self.csv is not None:
            self.csv.write_text(to_csv([flat(row) for row in rows]))
        if self.plot is not None and plot is not None:
            if rows:
                plot(self.plot)
            else:
                self.note(f"[yellow]{self.plot} was not drawn[/]: there is nothing to plot")
        return exit_code


class ProgressLine:
    """Counts finished items of a known total."""

    def __init__(self, total: int, show: Any) -> None:
        self.total = total
        self.done = 0
        self._show = show

    def tell(self, text: str) -> None:
        """Says what the next one is doing."""
        self._show(self.done, text)

    def advance(self, text: str = "") -> None:
        """One more is done; `text` says which."""
        self.done += 1
        self._show(self.done, text)


def _console(stream: IO[str]) -> Console:
    # rich honours NO_COLOR, and uses colours only on a terminal.
    if stream.isatty():
        return Console(file=stream)
    return Console(file=stream, width=shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 50)).columns)


_GAP = "  "
_INDENT = "    "


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its header; may be empty for the last, whose cells then stand without a name.
        right: whether cells are aligned right, as numbers are.
        key: whether it says which row this is; keys come first in a block.
    """

    name: str
    right: bool = False
    key: bool = False


def keys(*names: str) -> list[Column]:
    """Columns that say which row this is, aligned left."""
    return [Column(name, key=True) for name in names]


def numbers(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(name, right=True) for name in names]


@dataclass
class Sheet:
    """Rows of text under named columns.

    Attributes:
        columns: from left to right.
        rows: the cells of each row, and its rich style.
    """

    columns: Sequence[Column]
    rows: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def add(self, *cells: object, style: str = "") -> None:
        """One more row, a cell for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row must have {len(self.columns)} cells, got {len(cells)}")
        self.rows.append((tuple(str(cell) for cell in cells), style))

    def lines(self, width: int) -> Iterator[Text]:
        """Lines of a table if it fits in `width` columns, else of one block for each row."""
        names = [column.name for column in self.columns]
        widths = [
            max(len(name), *(len(cells[i]) for cells, _ in self.rows)) if self.rows else len(name)
            for i, name in enumerate(names)
        ]
        if sum(widths) + len(_GAP) * (len(widths) - 1) > width:
            for cells, style in self.rows:
                yield from (Text(line, style) for line in self._block(cells, width))
            return

        def line(cells: Sequence[str], style: str) -> Text:
            padded = (
                cell.rjust(w) if column.right else cell.ljust(w)
                for cell, column, w in zip(cells, self.columns, widths, strict=True)
            )
            return Text(_GAP.join(padded).rstrip(), style)

        yield line(names, "bold")
        yield line(["-" * w for w in widths], "dim")
        yield from (line(cells, style) for cells, style in self.rows)

    def _block(self, cells: Sequence[str], width: int) -> Iterator[str]:
        named = [
            (column.key, f"{column.name} {cell}".lstrip())
            for column, cell in zip(self.columns, cells, strict=True)
            if cell
        ]
        yield from filled([text for key, text in named if key], width, then=_INDENT)
        yield from filled([text for key, text in named if not key], width, first=_INDENT, then=_INDENT)


def filled(parts: Sequence[str], width: int, *, first: str = "", then: str = "") -> Iterator[str]:
    """Lines of at most `width` columns of whole `parts`; only a part that is longer makes a longer line."""
    line, empty = first, True
    for part in parts:
        gap = "" if empty else _GAP
        if not empty and len(line) + len(gap) + len(part) > width:
            yield line
            line, gap = then, ""
        line, empty = line + gap + part, False
    if not empty:
        yield line

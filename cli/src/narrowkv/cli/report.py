"""What every command does with its results: a table for people, one JSON document for programs, an exit code.

With `--json` the document is all that stdout ever gets; tables and progress go to stderr. Without it the
table goes to stdout and progress to stderr.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

SCHEMA_VERSION = 1
# A pipe has no width; rich would take 80 columns and break every row.
_WIDTH_WITHOUT_TERMINAL = 160
_SECONDS_BETWEEN_LINES = 10.0


class ExitCode(IntEnum):
    """How a command ends. 130 is the shell's own code for a command that Ctrl-C ended."""

    OK = 0
    NUMERICAL = 1
    USAGE = 2
    UNSUPPORTED = 3
    REGRESSION = 4
    INTERRUPTED = 130


class UsageError(Exception):
    """What was asked for cannot be: an unknown name, an unwritable file, a broken baseline. Exit code 2."""


class UnsupportedHereError(Exception):
    """This machine lacks what the command needs. Exit code 3."""


def jsonable(value: Any) -> Any:
    """`value` with dataclasses as objects and numbers that JSON lacks (NaN, infinities) as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


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


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, columns in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class Report:
    """Where a command's words, tables, progress and document go.

    Args:
        command: its name, for the document.
        as_json: whether stdout belongs to the document.
        out_file: also write the document here.
    """

    def __init__(self, command: str, *, as_json: bool = False, out_file: Path | None = None) -> None:
        self.command = command
        self.as_json = as_json
        self.out_file = out_file
        self.err = _console(sys.stderr)
        self.human = self.err if as_json else _console(sys.stdout)
        self._begun = time.time()
        check_writable("--out", out_file)

    def say(self, text: str) -> None:
        """One line for a person, where tables go."""
        self.human.print(text, highlight=False)

    def note(self, text: str) -> None:
        """One line of progress or advice: always stderr."""
        self.err.print(text, highlight=False)

    def line(self, text: str, style: str = "") -> None:
        """One line as it is, never broken: a command to copy, a path, another program's words."""
        self.human.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """A table or panel for a person."""
        self.human.print(renderable)

    @contextmanager
    def progress(self, total: int, what: str) -> Iterator[ProgressLine]:
        """A bar on a terminal; elsewhere a line now and then."""
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

    def finish(self, body: Mapping[str, Any], exit_code: ExitCode, *, interrupted: bool = False) -> ExitCode:
        """Writes the document and returns the exit code: 130 if the run was cut short and nothing failed."""
        if interrupted:
            self.note("[yellow]interrupted[/]: what is shown was finished before; the rest was not run")
            if exit_code in (ExitCode.OK, ExitCode.UNSUPPORTED):
                exit_code = ExitCode.INTERRUPTED
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "narrowkv": version(),
            "started": datetime.fromtimestamp(self._begun, timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(time.time() - self._begun, 2),
            "interrupted": interrupted,
            "exit_code": int(exit_code),
            **body,
        }
        text = json.dumps(jsonable(document), indent=2, allow_nan=False) + "\n"
        if self.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()
        if self.out_file is not None:
            self.out_file.write_text(text)
        return exit_code


class ProgressLine:
    """Counts finished items of a known total."""

    def __init__(self, total: int, show: Any) -> None:
        self.total = total
        self.done = 0
        self._show = show

    def advance(self, text: str = "") -> None:
        """One more is done; `text` says which."""
        self.done += 1
        self._show(self.done, text)


def _console(stream: IO[str]) -> Console:
    # rich honours NO_COLOR by itself, and colours nothing that is not a terminal.
    if stream.isatty():
        return Console(file=stream)
    return Console(file=stream, width=shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 50)).columns)


def number(value: float | None, digits: int = 3) -> str:
    """A number in as many significant digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"

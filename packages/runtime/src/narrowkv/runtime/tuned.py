"""The file of `narrowkv tune`: configurations that were measured on a user's own GPU.

The environment variable NARROWKV_TUNED names it. A family's `choose_config` chooses as it does without a
file; then, if the file has a row for the shape class of the call, it takes the configuration of that row.
Plans look a row up when they are made, so that calls of a plan cost the same with and without a file.

Rows that users sent with `narrowkv report` are shipped in files of the same form, one for each chip and
version of Triton, in `SHIPPED_ROWS` (`python tools/shipped_rows.py`). A user's own file comes before them.

Example:
    >>> from narrowkv.runtime.targets import get_target
    >>> tuned_row(get_target("gfx942"), "decode", "a shape class that no file has") is None
    True
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from narrowkv.runtime.targets import Target
from narrowkv.runtime.toolchain import triton_version

__all__ = [
    "SHIPPED_ROWS",
    "TuneFile",
    "TunedRow",
    "check_fields",
    "read_tuned",
    "shipped_only",
    "size_class",
    "tuned_choice",
    "tuned_row",
]

SHIPPED_ROWS = Path(__file__).parent / "tuned_rows"
_FORMAT = 2
_AGAIN = "run `narrowkv tune` again, or unset NARROWKV_TUNED"

Choice = TypeVar("Choice")
_ignored: ContextVar[bool] = ContextVar("narrowkv_ignores_tuned", default=False)


@dataclass(frozen=True)
class TunedRow:
    """The fastest configuration of one shape class.

    Attributes:
        family: of kernels, such as "decode".
        shape: the shape class, as the family writes it.
        choice: the fields of the configuration, as the family names them; None where the shipped
            configuration was the fastest.
        shipped: the shipped configuration at the first measured shape, in words.
        shipped_us: median device time of the shipped configuration at each measured shape of the class.
        tuned_us: the same of `choice`.
        spread: the largest (p90 - p10) / median of those times.
        measured: the measured shapes, in words.
        tried: configurations that were tried; spilled, wrong, failed, crashed: those of them that were
            dropped because they spill registers, differ from the reference, do not compile or launch, or
            crash the compiler.
        file: the path of the file, for messages; empty for a row that is shipped.
    """

    family: str
    shape: str
    choice: Mapping[str, Any] | None
    shipped: str
    shipped_us: tuple[float, ...]
    tuned_us: tuple[float, ...]
    spread: float
    measured: tuple[str, ...]
    tried: int
    spilled: int
    wrong: int
    failed: int
    crashed: int = 0
    file: str = ""

    def read_choice(self, kind: type[Choice]) -> Choice | None:
        """The configuration as an object of the family's dataclass.

        Raises:
            ValueError: its fields are not those of `kind`, or `kind` refuses a value.
        """
        if self.choice is None:
            return None
        names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
        if set(self.choice) != names:
            wrong = ", ".join(sorted(names ^ set(self.choice)))
            raise ValueError(
                f"{self.file}: a {self.family} row has unknown or missing fields: {wrong}; {_AGAIN}"
            )
        try:
            return kind(**self.choice)
        except ValueError as error:
            raise ValueError(
                f"{self.file}: a {self.family} row is not one that is tried: {error}; {_AGAIN}"
            ) from None

    def explain(self) -> str:
        """Where the configuration is from, and what it gains, for a person."""
        times = ", ".join(
            f"{tuned:.1f} us instead of {shipped:.1f}"
            for tuned, shipped in zip(self.tuned_us, self.shipped_us, strict=True)
        )
        where = f"tuned on this GPU ({self.file})" if self.file else "tuned on such a GPU"
        return f"{where}: {times}"


_ROW_FIELDS = [field.name for field in fields(TunedRow) if field.name != "file"]
_FILE_FIELDS = {"format", "target", "compute_units", "triton", "device", "rows"}


@dataclass(frozen=True)
class TuneFile:
    """What a file holds.

    Attributes:
        target: name of the target; compute_units: of the GPU; device: the GPU's name.
        triton: full version of Triton, a fork's suffix included.
        rows: by family and shape class.
    """

    target: str
    compute_units: int
    triton: str
    device: str
    rows: Mapping[tuple[str, str], TunedRow]

    @classmethod
    def of(cls, target: Target, device: str, rows: Sequence[TunedRow] = ()) -> TuneFile:
        """A file of rows that this Triton gave on a GPU."""
        return cls(
            target.name, target.compute_units, triton_version(), device,
            {(row.family, row.shape): row for row in rows},
        )  # fmt: skip

    def foreign(self, target: Target) -> str:
        """Why the rows are not for the target and the installed Triton; empty if they are."""
        if (self.target, self.compute_units) != (target.name, target.compute_units):
            return (
                f"is of {self.target} with {self.compute_units} compute units, and this is {target.name} "
                f"with {target.compute_units}"
            )
        if self.triton != triton_version():
            return f"is of Triton {self.triton}, and this is {triton_version()}"
        return ""

    @property
    def shipped_name(self) -> str:
        """The name of the file in `SHIPPED_ROWS` for this chip and Triton."""
        return f"{self.target}-{self.compute_units}-triton-{self.triton}.json"

    def document(self) -> dict[str, Any]:
        """The file's JSON document."""
        header = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = [{name: getattr(row, name) for name in _ROW_FIELDS} for row in self.rows.values()]
        return {"format": _FORMAT, **header, "rows": rows}

    def write(self, path: Path) -> None:
        """Writes the file; a reader sees the old one or the new one."""
        beside = path.with_name(f"{path.name}.new")
        beside.write_text(json.dumps(self.document(), indent=1) + "\n")
        beside.replace(path)


def read_tuned(path: Path) -> TuneFile:
    """Reads a file, or what a report of `narrowkv report` holds of one.

    Raises:
        ValueError: it cannot be read, or is not what `narrowkv tune` writes now; one line that says what to
            run.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a file of `narrowkv tune`: {error}; {_AGAIN}") from None
    if isinstance(document, dict) and document.get("tuned"):
        document = document["tuned"]
    if not isinstance(document, dict) or set(document) != _FILE_FIELDS or document["format"] != _FORMAT:
        named = sorted(_FILE_FIELDS ^ set(document)) if isinstance(document, dict) else []
        why = f"unknown or missing fields: {', '.join(named)}" if named else f"its format is not {_FORMAT}"
        raise ValueError(f"{path} is not what this `narrowkv tune` writes ({why}); {_AGAIN}")
    rows = {}
    for row in document["rows"]:
        if wrong := ", ".join(sorted(set(_ROW_FIELDS) ^ set(row))):
            raise ValueError(f"{path}: a row has unknown or missing fields: {wrong}; {_AGAIN}")
        lists = {name: tuple(row[name]) for name in ("shipped_us", "tuned_us", "measured")}
        rows[row["family"], row["shape"]] = TunedRow(**{**row, **lists}, file=str(path))
    return TuneFile(
        document["target"], document["compute_units"], document["triton"], document["device"], rows
    )


_read = lru_cache(maxsize=8)(read_tuned)


@lru_cache(maxsize=8)
def _shipped_rows(target: str, compute_units: int) -> Mapping[tuple[str, str], TunedRow]:
    path = SHIPPED_ROWS / TuneFile(target, compute_units, triton_version(), "", {}).shipped_name
    if not path.exists():
        return {}
    return {key: replace(row, file="") for key, row in read_tuned(path).rows.items()}


def tuned_row(target: Target, family: str, shape: str) -> TunedRow | None:
    """The row of a shape class in the file that NARROWKV_TUNED names, else the shipped one, if there is one.

    Raises:
        ValueError: the file cannot be read, is of another GPU or another Triton, or has unknown fields; one
            line that says what to run.
    """
    name = os.environ.get("NARROWKV_TUNED")
    row = None
    if name and not _ignored.get():
        file = _read(Path(name))
        if why := file.foreign(target):
            raise ValueError(f"{name} {why}; {_AGAIN}")
        row = file.rows.get((family, shape))
    if row is None or row.choice is None:
        row = _shipped_rows(target.name, target.compute_units).get((family, shape), row)
    return row


def check_fields(choice: Any, known: Mapping[str, Collection[Any]]) -> None:
    """Refuses a configuration of which a field has a value that its kernels do not know.

    Raises:
        ValueError: a field has an unknown value; the message names the field, what it may be and what it is.
    """
    for field in fields(choice):
        if (value := getattr(choice, field.name)) not in known[field.name]:
            raise ValueError(f"{field.name} must be one of {known[field.name]}, got {value!r}")


def tuned_choice(
    target: Target, family: str, shape: str, kind: type[Choice]
) -> tuple[Choice, str] | tuple[None, str]:
    """The configuration of a shape class, and where it is from; None where the shipped one is to be taken.

    Raises:
        ValueError: as `tuned_row`, and for a row whose configuration is not one of `kind`.
    """
    row = tuned_row(target, family, shape)
    choice = None if row is None else row.read_choice(kind)
    return (None, "") if row is None or choice is None else (choice, row.explain())


@contextlib.contextmanager
def shipped_only() -> Iterator[None]:
    """Plans that are made inside the block take the shipped configurations, whatever file is named."""
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


def size_class(size: int) -> int:
    """The least power of two that is at least `size`: sizes of one class share a row."""
    return 1 << max(size - 1, 0).bit_length()

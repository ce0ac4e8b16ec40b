"""Results as JSON and back, and a file of finished results, with which an interrupted run goes on.

Dataclasses become objects, and come back from the type that they had. The first line of a file of finished
results says what they depend on: the command, its settings, versions, the GPU and the source of narrowkv.
Each further line is one case and its result.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
"""Of the documents that the command `narrowkv` writes."""

_get_type_hints = cache(typing.get_type_hints)


def jsonable(value: Any) -> Any:
    """`value` with dataclasses as objects, functions by name, and numbers that JSON lacks as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return value if isinstance(value, (str, int, float, type(None))) else str(value)  # a torch.dtype


def revive(kind: Any, value: Any) -> Any:
    """The value of type `kind` that `jsonable` turned into `value`; a null float is NaN."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else revive(inner[0], value)
    if origin is tuple:
        each = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(revive(item_kind, item) for item_kind, item in zip(each, value, strict=True))
    if origin is list:
        return [revive(arguments[0], item) for item in value]
    if origin is dict:
        return {name: revive(arguments[1], item) for name, item in value.items()}
    made = origin or kind
    if is_dataclass(made) and isinstance(made, type):
        hints, bound = _get_type_hints(made), _type_arguments(kind)
        items = {f.name: hints[f.name] for f in fields(made) if f.init}
        return made(**{name: revive(bound.get(hint, hint), value[name]) for name, hint in items.items()})
    return math.nan if kind is float and value is None else value


def _type_arguments(kind: Any) -> dict[Any, Any]:
    """The types of a generic class's type variables, and of those of its generic bases."""
    made = typing.get_origin(kind) or kind
    found: dict[Any, Any] = {}
    for base in (kind, *getattr(made, "__orig_bases__", ())):
        variables = getattr(typing.get_origin(base), "__parameters__", ())
        found |= zip(variables, typing.get_args(base), strict=False)  # Generic itself has no variables
    return found


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, columns in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`record` with the items of objects in it as "name.item" and of lists joined by ";", for CSV."""
    found: dict[str, Any] = {}
    for name, value in jsonable(record).items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = ";".join(map(str, value)) if isinstance(value, list) else value
    return found


def number(value: float | None, digits: int = 3) -> str:
    """A number in as many significant digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


@cache
def source_digest() -> str:
    """A short hash of all Python files of the installed narrowkv packages."""
    import narrowkv

    digest = hashlib.sha256()
    for folder in sorted(narrowkv.__path__):
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Journal:
    """The results of one run; without a path none are kept.

    Args:
        path: the file, which is created if it does not exist.
        depends: what the results depend on besides the case, by name.
        kind: type of a result.

    Raises:
        ValueError: the file was written by a run with other dependencies, or is not such a file.
        OSError: it cannot be read or written.

    Example:
        >>> journal = Journal(None, {"command": "bench"}, float)
        >>> "a case" in journal
        False
    """

    def __init__(self, path: Path | None, depends: dict[str, Any], kind: Any) -> None:
        self._path = path
        self._kind = kind
        self._kept: dict[str, Any] = {}
        if path is None:
            return
        header = jsonable({**depends, "source": source_digest()})
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            path.write_text(_line(header))
            return
        found = self._parse(lines[0])
        if not isinstance(found, dict) or set(found) != set(header):
            raise ValueError(f"{path} must be a new file, or one that an earlier run kept results in")
        for name, value in header.items():
            if found[name] != value:
                if name == "source":
                    raise ValueError(f"narrowkv has changed since {path} was begun; give a new file")
                raise ValueError(
                    f"{path} is of a run with {name} {found[name]!r}, and this one has {value!r}; "
                    "give a new file"
                )
        entries = [entry for entry in map(self._parse, lines[1:]) if entry is not None]
        self._kept = {_line(entry["case"]): entry["result"] for entry in entries}
        # Drops a line that was cut off, so that the next one starts a new line.
        path.write_text("".join(map(_line, [header, *entries])))

    @staticmethod
    def _parse(line: str) -> Any:
        try:
            return json.loads(line)
        except ValueError:
            return None

    def __contains__(self, case: Any) -> bool:
        return self._path is not None and _line(jsonable(case)) in self._kept

    def result(self, case: Any) -> Any:
        """The result of a case that the file has."""
        return revive(self._kind, self._kept[_line(jsonable(case))])

    def add(self, case: Any, result: Any) -> None:
        """Writes the result of a case."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(_line(jsonable({"case": case, "result": result})))


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False) + "\n"

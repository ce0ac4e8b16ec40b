"""Finished cases in a file, so that a run that was cut short goes on where it stopped (`--resume FILE`).

The first line says what the cases depend on: the command, its settings, versions, the GPU and the source of
narrowkv. Each further line is one case and its result.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from narrowkv.cli.report import UsageError, jsonable

_get_type_hints = cache(typing.get_type_hints)


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
    """What the type variables of a generic class, or of its generic bases, stand for."""
    made = typing.get_origin(kind) or kind
    found: dict[Any, Any] = {}
    for base in (kind, *getattr(made, "__orig_bases__", ())):
        variables = getattr(typing.get_origin(base), "__parameters__", ())
        found |= zip(variables, typing.get_args(base), strict=False)  # Generic itself has no variables
    return found


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
    """The file of one run; without a path it keeps nothing.

    Args:
        path: the file; it is made where there is none.
        depends: what the results depend on besides the case.
        kind: type of a result.

    Raises:
        UsageError: the file is of another run, or no such file.
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
            raise UsageError(f"--resume must be a new file or one that --resume wrote, got {path}")
        for name, value in header.items():
            if found[name] != value:
                if name == "source":
                    raise UsageError(
                        f"--resume: narrowkv has changed since {path} was begun; give a new file"
                    )
                raise UsageError(
                    f"--resume {path} is of a run with {name} {found[name]!r}, and this one has {value!r}; "
                    "give a new file"
                )
        entries = [entry for entry in map(self._parse, lines[1:]) if entry is not None]
        self._kept = {_line(entry["case"]): entry["result"] for entry in entries}
        # Without a line that was cut in the middle, so that the next one begins at the margin.
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
        """The result that is kept of a case."""
        return revive(self._kind, self._kept[_line(jsonable(case))])

    def add(self, case: Any, result: Any) -> None:
        """Keeps a result."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(_line(jsonable({"case": case, "result": result})))


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False) + "\n"

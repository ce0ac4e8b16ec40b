"""A file of finished results, so that a run that was interrupted goes on where it stopped.

The first line says what the results depend on: the command, its settings, versions, the GPU and the source of
narrowkv. Each further line is one case and its result.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from narrowkv.testing.records import jsonable, revive


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

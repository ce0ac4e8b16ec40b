"""A table that is complete at every width: rows that do not fit become blocks of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.text import Text

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

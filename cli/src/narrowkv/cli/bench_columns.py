"""The columns of the tables of `narrowkv bench`, for each bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.testing.bench.traffic import best_choices
from narrowkv.testing.records import number

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """A bench's own columns: by header, the name of a record's value or a function of the record.

    Attributes:
        labels: words, on the left; sizes: numbers, before the times; figures: after the times.
        series: the values that tell the series of a plot apart.
        shown: which of the records a table shows.
    """

    labels: Mapping[str, str | Callable[[Record], str]]
    sizes: Mapping[str, str | Callable[[Record], str]]
    series: tuple[str, ...]
    figures: Mapping[str, Callable[[Record], str]] = field(default_factory=dict)
    shown: Callable[[Sequence[Record]], Sequence[Record]] = list

    def sheet(self, records: Sequence[Record]) -> Sheet:
        """A table of records."""
        sheet = Sheet([
            *keys(*self.labels), *(Column(name, right=True, key=True) for name in self.sizes),
            *numbers("us", "p10", "p90", "floor us", "x floor", *self.figures, "GB/s", "TFLOP/s", "rel. L1"),
            Column(""),
        ])  # fmt: skip
        for row in self.shown(records):
            own = [
                row[get] if isinstance(get, str) else get(row)
                for get in (*self.labels.values(), *self.sizes.values())
            ]
            error = row["relative_l1"]
            sheet.add(
                *own,
                *(number(row[name], 4) for name in ("median_us", "p10_us", "p90_us", "floor_us")),
                _ratio("ratio_to_floor")(row), *(show(row) for show in self.figures.values()),
                number(row["bytes_per_s"] / 1e9, 4) if row["bytes_per_s"] else "-",
                number(row["flops_per_s"] / 1e12) if row["flops_per_s"] else "-",
                "-" if error is None else f"{error:.2e}",
                "" if row["status"] == "pass" else f"{row['status']}: {row['detail']}",
                style={"pass": "", "fail": "bold red"}.get(row["status"], "yellow"),
            )  # fmt: skip
        return sheet


def _us(name: str) -> Callable[[Record], str]:
    return lambda row: number(row[name], 4)


def _ratio(name: str) -> Callable[[Record], str]:
    return lambda row: "-" if row[name] is None else f"{row[name]:.2f}"


_SIZES = {"batch": "batch", "new": "new_tokens", "keys": "keys"}
COLUMNS = {
    "decode": Columns(
        {"backend": "backend", "format": "format", "Q": "q"},
        {"batch": "batch", "context": "context", "page": "page_size", "ratio": "ratio"},
        ("backend", "format"),
    ),
    "prefill": Columns(
        {"format": "format"},
        {
            "heads": lambda row: f"{row['num_kv_heads'] * row['ratio']}/{row['num_kv_heads']}",
            "new": "new",
            "prefix": "prefix",
        },
        ("format", "ratio"),
        {
            f"{name} us": _us(f"{name.replace(' ', '_')}_us")
            for name in ("sdpa", "append", "two calls", "decode")
        },
    ),
    "sparse": Columns(
        {"mode": "mode"},
        {"tokens": "tokens", "heads": "heads", "top-k": "topk"},
        ("mode", "heads"),
        {
            "x bf16": _ratio("ratio_to_bf16"),
            "scratch MB": lambda row: (
                "-" if row["scratch_bytes"] is None else f"{row['scratch_bytes'] / 1e6:.1f}"
            ),
        },
    ),
    "sage": Columns(
        {
            "backend": "backend",
            "Q and K": "qk",
            "granularity": "granularity",
            "mask": lambda row: "causal" if row["causal"] else "none",
        },
        {"context": "context"},
        ("backend", "qk", "granularity"),
        {"K, V ready us": _us("attend_us"), "x sdpa": _ratio("ratio_to_sdpa")},
    ),
    "traffic": Columns(
        {
            "model": "model",
            "traffic": "traffic",
            "format": "format",
            "by": lambda row: row["call"] or row["backend"],
        },
        _SIZES,
        ("backend", "call", "model"),
        {"x best peer": _ratio("ratio_to_peer")},
    ),
    "choices": Columns(
        {"model": "model", "step": "traffic", "format": "format", "call": "call", "choice": "choice"},
        _SIZES,
        ("call", "choice"),
        {"x best": _ratio("ratio_to_best")},
        best_choices,
    ),
}
"""By the name of the bench."""

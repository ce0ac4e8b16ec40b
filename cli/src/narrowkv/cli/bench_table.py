"""The table of measured rows of `narrowkv bench`."""

from __future__ import annotations

from collections.abc import Sequence

from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.testing.bench.columns import Columns, Record, ratio_of
from narrowkv.testing.records import number


def bench_table(columns: Columns, records: Sequence[Record]) -> Sheet:
    """A table of records, with the columns of their bench."""
    sheet = Sheet([
        *keys(*columns.labels), *(Column(name, right=True, key=True) for name in columns.sizes),
        *numbers("us", "p10", "p90", "floor us", "x floor", *columns.figures, "GB/s", "TFLOP/s", "rel. L1"),
        Column(""),
    ])  # fmt: skip
    for row in columns.shown(records):
        own = [
            row[get] if isinstance(get, str) else get(row)
            for get in (*columns.labels.values(), *columns.sizes.values())
        ]
        error = row["relative_l1"]
        sheet.add(
            *own,
            *(number(row[name], 4) for name in ("median_us", "p10_us", "p90_us", "floor_us")),
            ratio_of("ratio_to_floor")(row), *(show(row) for show in columns.figures.values()),
            number(row["bytes_per_s"] / 1e9, 4) if row["bytes_per_s"] else "-",
            number(row["flops_per_s"] / 1e12) if row["flops_per_s"] else "-",
            "-" if error is None else f"{error:.2e}",
            "" if row["status"] == "pass" else f"{row['status']}: {row['detail']}",
            style={"pass": "", "fail": "bold red"}.get(row["status"], "yellow"),
        )  # fmt: skip
    return sheet

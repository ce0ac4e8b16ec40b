"""`--csv` and `--plot` of the commands with a table of numbers, and how series are told apart."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.sage import cases
from narrowkv.sage.cases import SageCase
from narrowkv.testing.contracts import DECODE, Contract, ContractSet, Shape
from narrowkv.testing.plot import style_of

run = CliRunner().invoke
ONE_SET = ContractSet(
    "one",
    "for tests",
    Shape(batch=2, q_len=1, context=48, num_qo_heads=24, num_kv_heads=2, head_dim=64),
    (Contract(DECODE, "bf16", "fp8_e4m3fn", "fp8_e4m3fn", 16, 0.002),),
)


def test_series_differ_in_colour_and_in_marker() -> None:
    first = [style_of(index) for index in range(7)]
    assert len({style["color"] for style in first}) == len({style["marker"] for style in first}) == 7
    styles = [tuple(style_of(index).values()) for index in range(63)]
    assert len(set(styles)) == 63


@pytest.mark.parametrize(
    ("arguments", "rows", "column"),
    [
        (["probe", "one", "--on", "cpu", "--jobs", "1", "--target", "gfx942"], 2, "relative_l1"),
        (["validate", "--on", "cpu", "--case", "lens=9,head_dim=64"], 1, "error.relative_l1"),
        (["validate", "sparse", "--on", "cpu", "--case", "lens=9"], 1, "error.max_abs"),
        (["validate", "sage", "--on", "cpu", "--jobs", "1"], 1, "total.relative_l1"),
        (["validate", "fp4", "--on", "cpu", "--seeds", "1", "--batch", "1", "--context", "48"], 19, "bits"),
        (
            ["inspect", "--no-model", "--target", "gfx950", "--context", "64", "--num-kv-heads", "1"],
            2,
            "vgprs",
        ),
        (["inspect", "sparse", "--no-model", "--target", "gfx942", "--case", "lens=16"], 1, "lds_bytes"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_every_table_of_numbers_can_be_csv_and_a_plot(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    add_set: Any,
    arguments: list[str],
    rows: int,
    column: str,
) -> None:
    pytest.importorskip("matplotlib")
    add_set(ONE_SET)
    monkeypatch.setattr(cases, "sweep", lambda **_: [SageCase.small()])
    table, plot = tmp_path / "rows.csv", tmp_path / "plot.png"
    result = run(app, [*arguments, "--csv", str(table), "--plot", str(plot), "--json"])
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)
    with table.open() as lines:
        found = list(csv.DictReader(lines))
    assert len(found) == rows
    assert all(float(row[column]) > 0 for row in found)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000


def test_a_plot_of_an_unknown_kind_is_refused_before_the_run(tmp_path: Path) -> None:
    result = run(app, ["validate", "--plot", str(tmp_path / "plot.jpeg2000")])
    assert result.exit_code == 2
    assert ".png, .svg, .pdf" in result.stderr

"""Tables are whole at every width: of `Sheet`, and of what each command prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.sheet import Column, Sheet, filled, keys, numbers
from narrowkv.testing import contracts
from narrowkv.testing.contracts import DECODE, Contract, ContractSet, Shape

WIDTHS = (80, 100, 120, 160, 200)
run = CliRunner().invoke


def sheet() -> Sheet:
    table = Sheet([*keys("operation", "KV cache"), *numbers("rel. L1", "tokens/GiB"), Column("")])
    table.add("paged_decode", "fp8_e4m3fn/fp4_e2m1", "1.44e-03", 694736, "")
    table.add(
        "batch_prefill", "bf16", "-", "", "refused: a reason of some words that is longer than the rest"
    )
    return table


def lines(table: Sheet, width: int) -> list[str]:
    return [line.plain for line in table.lines(width)]


def test_a_table_that_fits_has_a_line_for_each_row() -> None:
    head, rule, first, second = lines(sheet(), 200)
    assert head.split() == ["operation", "KV", "cache", "rel.", "L1", "tokens/GiB"]
    assert set(rule) == {"-", " "}
    assert first == "paged_decode   fp8_e4m3fn/fp4_e2m1  1.44e-03      694736"
    assert second.endswith("than the rest")


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_table_that_does_not_fit_is_blocks_without_a_cell_lost(width: int) -> None:
    found = lines(sheet(), width)
    assert found[0].startswith("operation paged_decode")
    text = "\n".join(found)
    for pair in ("KV cache fp8_e4m3fn/fp4_e2m1", "rel. L1 1.44e-03", "tokens/GiB 694736", "rel. L1 -"):
        assert pair in text
    assert "refused: a reason of some words that is longer than the rest" in text
    longest = max(len(pair) for pair in ("KV cache fp8_e4m3fn/fp4_e2m1", "refused: a reason")) + 4
    assert all(len(line) <= max(width, longest) for line in found if "reason" not in line)


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="a row must have 5 cells, got 1"):
        sheet().add("alone")


def test_parts_stay_whole() -> None:
    assert list(filled(["ab cd", "ef", "gh"], 9, first=" ", then="  ")) == [" ab cd", "  ef  gh"]
    assert list(filled(["longer than that"], 4)) == ["longer than that"]
    assert list(filled([], 4)) == []


def tables(text: str) -> Iterator[list[tuple[str, str]]]:
    """Of every row in the tables of `text`, the pairs of column name and cell."""
    found = text.splitlines()
    for index, line in enumerate(found):
        if not re.fullmatch(r"-+(  -+)*( *)", line):
            continue
        spans = [match.span() for match in re.finditer("-+", line)]
        # The last column has no rule where it has no name.
        spans[-1] = (spans[-1][0], 10**6)
        names = [found[index - 1][begin:end].strip() for begin, end in spans]
        for row in found[index + 1 :]:
            if "  " not in row.strip() or row.startswith(" "):
                break
            yield [(name, row[begin:end].strip()) for name, (begin, end) in zip(names, spans, strict=True)]


def assert_whole_at_every_width(monkeypatch: pytest.MonkeyPatch, arguments: list[str], least: int) -> None:
    """Runs a command piped and at each width; every cell of a row is there, in its order, unbroken."""
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = run(app, arguments)
    assert piped.exit_code == 0, piped.output
    rows = list(tables(piped.stdout))
    assert len(rows) >= least
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        shown = run(app, arguments).stdout
        for row in rows:
            cells = [(name, cell) for name, cell in row if cell]
            as_line = r" +".join(re.escape(cell) for _, cell in cells)
            as_block = r"\s+".join(re.escape(f"{name} {cell}".strip()) for name, cell in cells)
            assert re.search(f"(?m)^{as_line}$", shown) or re.search(as_block, shown), (width, row)
        # A line is too long only where it is one part that nothing can break.
        long = [line for line in shown.splitlines() if len(line) > width]
        assert all("  " not in line.strip() for line in long if not line.startswith(("FAILED", "  "))), long


@pytest.mark.parametrize("operation", ["decode", "prefill", "sparse"])
def test_validate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operation: str) -> None:
    cases = {
        "decode": ["lens=9,ratio=3,head_dim=64", "lens=9,q=fp16,head_dim=64,format=bf16"],
        "prefill": ["q_lens=3,lens=9", "q_lens=3,lens=9,q=fp16"],
        "sparse": ["lens=9", "lens=9,mode=prepass"],
    }[operation]
    options = ["--on", "cpu", "--jobs", "1", "--resume", str(tmp_path / "kept")]
    for case in cases:
        options += ["--case", case]
    assert_whole_at_every_width(monkeypatch, ["validate", operation, *options], 2)


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (["decode", "--context", "64", "--batch", "1", "--num-kv-heads", "1"], 3),
        (["prefill", "--case", "q_lens=3,lens=9"], 1),
        (["sparse", "--case", "lens=16"], 1),
    ],
)
def test_inspect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], least: int) -> None:
    options = ["--target", "gfx942", "--resume", str(tmp_path / "kept")]
    assert_whole_at_every_width(monkeypatch, ["inspect", *arguments, "--no-model", *options], least)


def test_probe_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, add_set: Any) -> None:
    shape = Shape(batch=2, q_len=1, context=48, num_qo_heads=24, num_kv_heads=2, head_dim=64)
    asked = (Contract(DECODE, "bf16", "fp8_e4m3fn", "fp4_e2m1", 16, 0.002),)
    add_set(ContractSet("one", "one", shape, asked))
    options = ["--on", "cpu", "--jobs", "1", "--resume", str(tmp_path / "kept")]
    assert_whole_at_every_width(monkeypatch, ["probe", "one", "--full", *options], 4)


def test_probe_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_whole_at_every_width(monkeypatch, ["probe", "--list"], len(contracts.CONTRACT_SETS))


SMALL = ["--batch", "1,2", "--context", "32", "--page-size", "16", "--num-kv-heads", "1", "--head-dim", "64"]


@pytest.mark.usefixtures("stand_in_gpu")
def test_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = [*SMALL, "--resume", str(tmp_path / "kept")]
    assert_whole_at_every_width(monkeypatch, ["bench", "decode", *options], 4)

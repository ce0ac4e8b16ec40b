"""A small run of every command with a table: its document, CSV and plot, and its tables at every width."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import FP8, SHAPE, SMALL_BENCH, document, narrowkv

from narrowkv.testing.cases import sage
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.format_errors import GOALS, RECIPES
from narrowkv.testing.operation import ContractSet, Shape
from narrowkv.testing.operations import contract_sets
from narrowkv.testing.plot import style_of

WIDTHS = (80, 100, 120, 160, 200)
Holds = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """A command line, and what it promises.

    Attributes:
        line: of the command.
        rows: of its CSV, and of its tables if `shown` is not given.
        column: a column of the CSV, whose numbers are positive.
        holds: checks the document.
        words: of what people see.
        shown: at least so many rows are in tables.
        needs: a fixture.
    """

    line: str
    rows: int
    column: str
    holds: Holds
    words: tuple[str, ...] = ()
    shown: int | None = None
    needs: str = "tmp_path"


def cases_hold(operation: str, *bounds: float) -> Holds:
    """Every case of `validate` passed within its bound."""

    def holds(found: dict[str, Any]) -> None:
        assert operation in found["operation"]
        assert found["planned"] == found["passed"] == len(found["cases"]) == len(bounds)
        assert found["bounds"]["relative_l1"] == bounds[0]
        for case, bound in zip(found["cases"], bounds, strict=True):
            assert case["passed"]
            assert case["bound"] == bound
            assert 0 < case["error"]["relative_l1"] <= bound

    return holds


def quantising_costs_sage_less_in_finer_groups(found: dict[str, Any]) -> None:
    assert found["operation"] == "sage_attention"
    coarse, fine, one_mean = (case["total"]["relative_l1"] for case in found["cases"])
    assert fine < coarse
    assert fine < one_mean
    assert all(case["error"]["relative_l1"] < sage.BOUND for case in found["cases"])


def recipes_are_held_against_goals(found: dict[str, Any]) -> None:
    assert [row["recipe"] for row in found["recipes"]] == [recipe.name for recipe in RECIPES]
    assert [row["recipe"] for row in found["goals"]] == [goal.recipe for goal in GOALS]


def kernels_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of every inspection, which neither spill nor use scratch."""
    assert "model" not in found
    kernels = [kernel for inspection in found["inspections"] for kernel in inspection["kernels"]]
    assert all(kernel["spills"] == kernel["scratch_bytes"] == 0 for kernel in kernels)
    return kernels


def decode_was_counted_as_it_executed(found: dict[str, Any]) -> None:
    assert kernels_of(found)
    for inspection in found["inspections"]:
        assert inspection["counts"] == "dynamic"
        assert inspection["model"]["label"] == inspection["whole_model"]["label"] == "model"
        assert inspection["emulated"]["workgroups"] > 0


def prefill_multiplies_fp8(found: dict[str, Any]) -> None:
    _, kernel = kernels_of(found)
    assert any("fp8" in name or "f8f6f4" in name for name in kernel["mfma"])
    assert 0 < kernel["matrix_share"] < 1


def sparse_multiplies_16_bit_numbers(found: dict[str, Any]) -> None:
    (kernel,) = kernels_of(found)  # Q of FP8 is widened: 16-bit products are faster
    assert kernel["mfma"]
    assert all("f16" in name for name in kernel["mfma"])


def sage_multiplies_integers_and_fp8(found: dict[str, Any]) -> None:
    assert "fp8_e4m3fn" in found["inspections"][0]["plan"]
    assert kernels_of(found)[-1]["mfma"] == {"v_mfma_i32_32x32x32_i8": 8, "v_mfma_f32_32x32x64_f8f6f4": 4}


def probe_answers(found: dict[str, Any]) -> None:
    rows = [row for row in found["rows"] if row["backend"] == "narrowkv"]
    assert [row["status"] for row in rows] == ["pass"] * len(rows)


def bench_measured(found: dict[str, Any]) -> None:
    assert all(row["status"] == "pass" and row["median_us"] == 100.0 for row in found["rows"])
    assert found["ceilings"]["read_bytes_per_s"] == 3e12
    assert found["device"]["name"] == "stand-in"


CPU = "--on cpu --jobs 1"
RUNS = {
    "probe": Run(
        f"probe one --full --target gfx942 {CPU}", 2, "relative_l1", probe_answers,
        ("VGPR", "tokens/GiB", "1 contract: 1 pass, 0 fail"), shown=3,
    ),
    "validate": Run(
        f"validate {CPU} --case lens=20+3,ratio=3,head_dim=64 "
        "--case lens=9,format=bf16,q=fp16,head_dim=64,q_len=2",
        2, "error.relative_l1", cases_hold("paged_decode", 0.002, 0.002), ("2 of 2 cases pass",),
    ),
    "validate prefill": Run(
        f"validate prefill {CPU} --case lens=20,q_lens=3 --case q=fp8_e4m3fn "
        "--case operation=append,q_lens=3+9,lens=20+30,format=fp4_e2m1",
        3, "error.relative_l1", cases_hold("prefill_append", 0.002, 0.02, 0.002), ("3 of 3 cases pass",),
    ),
    "validate sparse": Run(
        f"validate sparse {CPU} --case lens=20+3 --case mode=16bit,layout=bf16,lens=9",
        2, "error.max_abs", cases_hold("sparse_prefill", 0.004, 0.004), ("2 of 2 cases pass",),
    ),
    "validate sage": Run(
        f"validate sage {CPU}" + "".join(
            f" --case qk=int4,q_lens=130,k_lens=130,head_dim=64,ratio=2,{more}"
            for more in ("smooth_q=1,granularity=per_tensor", "smooth_q=1", "smooth_q=0")
        ),
        3, "total.relative_l1", quantising_costs_sage_less_in_finer_groups,
        ("3 of 3 cases pass", "against attention that quantises nothing", "mean of K and Q out"),
    ),
    "validate fp4": Run(
        f"validate fp4 {CPU} --seeds 1 --batch 1 --context 48",
        19, "bits", recipes_are_held_against_goals, ("OCP MX", "goals do not decide here"),
    ),
    "inspect": Run(
        "inspect --no-model --target gfx942,gfx950 --batch 1 --context 64 --num-kv-heads 1 --head-dim 64",
        4, "vgprs", decode_was_counted_as_it_executed,
        ("model, not a measurement", "a pass of the loop, executed instructions",
         "a whole workgroup, executed instructions", "emulated: "),
        shown=6,
    ),
    "inspect prefill": Run(
        "inspect prefill --no-model --target gfx950 --case q=fp8_e4m3fn,q_lens=64,lens=256,clean=1",
        2, "vgprs", prefill_multiplies_fp8, shown=1,
    ),
    "inspect sparse": Run(
        "inspect sparse --no-model --target gfx942 --case lens=16+16,q=fp8",
        1, "vgprs", sparse_multiplies_16_bit_numbers,
    ),
    "inspect sage": Run(
        "inspect sage --no-model --target gfx950",
        5, "vgprs", sage_multiplies_integers_and_fp8, shown=1,
    ),
    "bench decode": Run(SMALL_BENCH, 4, "median_us", bench_measured, ("x floor",), needs="stand_in_gpu"),
}  # fmt: skip


@pytest.fixture
def small_sweeps(monkeypatch: pytest.MonkeyPatch, add_set: Any) -> None:
    """Few cases where a command line cannot name them."""
    add_set(ContractSet("one", "one", SHAPE, (replace(FP8, v="fp4_e2m1"),)))
    one = SageCase(q_lens=(256,), k_lens=(256,))
    monkeypatch.setattr(sage, "CASES", replace(sage.CASES, shipped=lambda target: [one]))


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


def assert_whole_at_every_width(monkeypatch: pytest.MonkeyPatch, line: list[str], least: int) -> None:
    """Runs a command piped and at each width; every cell of a row is there, in its order, unbroken."""
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = list(tables(narrowkv("", *line).stdout))
    assert len(rows) >= least
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        shown = narrowkv("", *line).stdout
        for row in rows:
            cells = [(name, cell) for name, cell in row if cell]
            as_line = r" +".join(re.escape(cell) for _, cell in cells)
            as_block = r"\s+".join(re.escape(f"{name} {cell}".strip()) for name, cell in cells)
            assert re.search(f"(?m)^{as_line}$", shown) or re.search(as_block, shown), (width, row)
        # A line is too long only where it is one part that nothing can break.
        long = [line for line in shown.splitlines() if len(line) > width]
        assert all("  " not in line.strip() for line in long if not line.startswith(("FAILED", "  "))), long


@pytest.mark.usefixtures("small_sweeps")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_all_its_files_and_whole_tables(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    run = RUNS[name]
    request.getfixturevalue(run.needs)
    line = [*run.line.split(), "--resume", str(tmp_path / "kept")]
    out, table, plot = (tmp_path / name for name in ("out.json", "rows.csv", "plot.png"))
    result = narrowkv("", *line, "--json", "--out", out, "--csv", table, "--plot", plot)
    found = json.loads(result.stdout)
    assert found == json.loads(out.read_text())
    run.holds(found)
    with table.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == run.rows
    assert all(float(row[run.column]) > 0 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000
    for word in run.words:
        assert word in result.stderr
    assert_whole_at_every_width(monkeypatch, line, run.rows if run.shown is None else run.shown)


def test_the_list_of_sets_is_whole_at_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_whole_at_every_width(monkeypatch, ["probe", "--list"], len(contract_sets()))


def test_series_of_a_plot_differ_in_colour_and_in_marker() -> None:
    first = [style_of(index) for index in range(7)]
    assert len({style["color"] for style in first}) == len({style["marker"] for style in first}) == 7
    assert len({tuple(style_of(index).values()) for index in range(63)}) == 63


def test_probe_asks_sage_in_every_precision(monkeypatch: pytest.MonkeyPatch, add_set: Any) -> None:
    """Its machine code is that of test_codegen_sage; here int8 alone is compiled, for one target."""
    chosen = contract_sets()["sage"]
    small = Shape(batch=1, q_len=70, context=70, num_qo_heads=2, num_kv_heads=1, head_dim=64)
    assert [contract.q for contract in chosen.contracts] == ["int8", "int4", "fp8_e4m3fn"]
    add_set(ContractSet("one", chosen.title, small, chosen.contracts[:1]))
    (row,) = document("probe one --on cpu --jobs 1 --target gfx942")["rows"]
    (main,) = (k for k in row["compiled"]["gfx942"]["kernels"] if k["name"] == "_sage_attention_kernel")
    assert main["spills"] == main["scratch_bytes"] == 0
    assert main["mfma"]
    monkeypatch.setattr("narrowkv.testing.probing.amd_backend_missing", lambda: "not asked here")
    add_set(ContractSet("sage", chosen.title, small, chosen.contracts))
    rows = document("probe sage --on cpu --jobs 1")["rows"]
    own = [row for row in rows if row["backend"] == "narrowkv"]
    assert [row["contract"]["q"] for row in own] == ["int8", "int4", "fp8_e4m3fn"]
    assert all(row["status"] == "pass" and 0 < row["relative_l1"] < sage.BOUND for row in own)


def test_inspect_models_a_case_and_says_what_bounds_it() -> None:
    line = "inspect prefill --target gfx950 --case q_lens=16,lens=64,kernel=fused --json"
    result = narrowkv(line)
    (row,) = json.loads(result.stdout)["model"]
    assert row["launches"][0]["model"]["seconds"] > 0
    assert "model us" in result.stderr

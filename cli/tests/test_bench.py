"""`narrowkv bench`: whole runs with a stand-in for the GPU, comparison with a baseline, and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.testing import machine as environment
from narrowkv.testing.bench import decode
from narrowkv.testing.bench.ceilings import Ceilings
from narrowkv.testing.bench.measure import Bench, Row
from narrowkv.testing.plot import plot_roofline

run = CliRunner().invoke
CEILINGS = Ceilings(copy_bytes_per_s=3e12, read_bytes_per_s=3e12, bf16_flops_per_s=8e14)
SIZES = decode.DecodeSizes(2, 32, 16, 1, 3, 64, "bf16", "fp8_e4m3fn")
SMALL = [
    "--batch",
    "1,2",
    "--context",
    "32",
    "--page-size",
    "1,16",
    "--num-kv-heads",
    "1",
    "--head-dim",
    "64",
]


@pytest.mark.parametrize(
    "text", ["fp8_e4m3fn:32", "fp4_e2m1:8", "fp4_e2m1:e4m3+16", "fp8_e4m3fn:e4m3", "fp3"]
)
def test_a_format_that_is_not_one_ends_with_2(text: str) -> None:
    result = run(app, ["bench", "decode", "--format", text])
    assert result.exit_code == 2
    assert f"--format {text}" in result.stderr


def test_a_run_measures_every_row_and_writes_every_file(stand_in_gpu: Any, tmp_path: Path) -> None:
    table, plot, out = tmp_path / "rows.csv", tmp_path / "roofline.svg", tmp_path / "run.json"
    pytest.importorskip("matplotlib")
    options = ["--csv", str(table), "--plot", str(plot), "--out", str(out), "--json"]
    result = run(app, ["bench", "decode", *SMALL, *options])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document == json.loads(out.read_text())
    assert len(document["rows"]) == 2 * 2 * 2
    assert all(row["status"] == "pass" and row["median_us"] == 100.0 for row in document["rows"])
    assert document["ceilings"]["read_bytes_per_s"] == 3e12
    assert document["device"]["name"] == "stand-in"
    with table.open() as lines:
        assert [row["format"] for row in csv.DictReader(lines)] == [row["format"] for row in document["rows"]]
    assert "<svg" in plot.read_text()
    assert "x floor" in result.stderr


def test_slower_than_the_baseline_ends_with_4_and_names_the_row(stand_in_gpu: Any, tmp_path: Path) -> None:
    baseline = tmp_path / "before.json"
    assert run(app, ["bench", "decode", *SMALL, "--out", str(baseline)]).exit_code == 0
    against = ["bench", "decode", *SMALL, "--against", str(baseline)]
    stand_in_gpu.median_us = 104.0
    assert run(app, against).exit_code == 0, "within the threshold"
    stand_in_gpu.median_us = 106.0
    result = run(app, against)
    assert result.exit_code == 4
    assert "+6.0%" in result.stdout
    assert "page_size 16" in result.stdout
    assert run(app, [*against, "--threshold", "0.1"]).exit_code == 0


def test_a_wrong_kernel_ends_with_1_even_when_it_is_fast(
    stand_in_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode.paged_decode

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs).mul_(1.05)

    monkeypatch.setattr(decode, "paged_decode", wrong)
    result = run(app, ["bench", "decode", *SMALL, "--json"])
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert {(row["status"], row["median_us"]) for row in rows} == {("fail", None)}


def test_ctrl_c_keeps_the_rows_that_were_finished_and_resume_goes_on(
    stand_in_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = Bench.measure
    measured: list[Any] = []

    def until_third(bench: Any, shape: Any, *rest: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(shape)
        return right(bench, shape, *rest)

    monkeypatch.setattr(Bench, "measure", until_third)
    options = [*SMALL, "--page-size", "16", "--resume", str(tmp_path / "kept"), "--json"]
    result = run(app, ["bench", "decode", *options])
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert document["interrupted"] is True
    assert len(document["rows"]) == 2
    measured.clear()
    monkeypatch.setattr(Bench, "measure", lambda *a: measured.append(a[1]) or right(*a))
    result = run(app, ["bench", "decode", *options])
    assert result.exit_code == 0, result.output
    assert len(measured) == 2, "two of the four were kept"
    rows = json.loads(result.stdout)["rows"]
    assert [(row["format"], row["batch"]) for row in rows] == [
        ("fp8_e4m3fn", 1), ("fp8_e4m3fn", 2), ("bf16", 1), ("bf16", 2),
    ]  # fmt: skip
    assert run(app, ["bench", "decode", *options, "--samples", "7"]).exit_code == 2, "of other settings"


def record(**changed: Any) -> dict[str, Any]:
    return {**Row({"backend": "narrowkv"}, vars(SIZES)).as_dict(), "ratio_to_floor": 2.0, **changed}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "readable"),
        ("{", "JSON"),
        ("[]", "narrowkv bench"),
        ('{"command": "probe", "rows": []}', "narrowkv bench"),
        ('{"command": "bench"}', "rows"),
        ('{"command": "bench", "rows": [], "schema_version": 99}', "schema_version"),
        ('{"command": "bench", "rows": [{"batch": 1}], "schema_version": 1}', "page_size"),
        (
            json.dumps({"command": "bench", "schema_version": 1, "rows": [record(ratio_to_floor="fast")]}),
            "fast",
        ),
        (
            json.dumps({"command": "bench", "schema_version": 1, "rows": [record(ratio_to_floor=-1.0)]}),
            "-1.0",
        ),
    ],
)
def test_a_broken_baseline_ends_with_2_before_anything_is_measured(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    result = run(app, ["bench", "decode", "--against", str(path)])
    assert result.exit_code == 2
    assert words in result.stderr


def test_an_unwritable_csv_or_plot_ends_with_2(tmp_path: Path) -> None:
    for option in ("--csv", "--plot"):
        result = run(app, ["bench", "decode", option, str(tmp_path / "missing" / "file")])
        assert result.exit_code == 2
        assert option in result.stderr


def test_a_plot_without_matplotlib_ends_with_3_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from narrowkv.cli import report

    find = report.importlib.util.find_spec
    monkeypatch.setattr(
        report.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    result = run(app, ["bench", "decode", "--plot", str(tmp_path / "x.png")])
    assert result.exit_code == 3
    assert "narrowkv-cli[plot]" in result.stderr


def test_the_plot_leaves_out_rows_without_a_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times: dict[str, Any] = {"median_us": 50.0, "bytes_per_s": 2e12, "flops_per_s": 1e13}
    measured = record(**times)
    refused = Row({"backend": "peer"}, vars(SIZES), status="refused", detail="no").as_dict()
    path = tmp_path / "plot.png"
    plot_roofline([measured, refused], CEILINGS, path, title="a GPU", series=("backend", "format"))
    assert path.stat().st_size > 1000


def test_environment_names_no_gpu_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert environment.gpus() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("operation", ["prefill", "sparse", "sage"])
def test_without_a_gpu_it_says_so(operation: str) -> None:
    result = run(app, ["bench", operation])
    assert result.exit_code == 3
    assert "needs a GPU" in result.stderr
    assert f"bench {operation} --on gfx942,gfx950" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--heads", "96"], "--heads must be"), (["--new", "0"], "--new must be")]
)
def test_bad_lists_are_usage_errors(arguments: list[str], message: str) -> None:
    result = run(app, ["bench", "prefill", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.gpu
def test_a_small_bench_on_a_gpu(tmp_path: Path) -> None:
    rows = ["--batch", "4", "--context", "1024", "--page-size", "16", "--format", "fp8_e4m3fn", "--peers"]
    result = run(app, ["bench", "decode", *rows, "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0, result.stderr
    (ours,) = [r for r in document["rows"] if r["backend"] == "narrowkv"]
    assert ours["ratio_to_floor"] > 0.9
    assert document["ceilings"]["read_bytes_per_s"] > 1e11

"""`narrowkv bench`: figures, comparison with a baseline, and the whole run with a stand-in for the GPU."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.attn_decode import paged_decode, paged_decode_reference
from narrowkv.cli import environment
from narrowkv.cli.app import app
from narrowkv.cli.bench import decode, reporter
from narrowkv.cli.bench.baseline import KEYS, changes, load_baseline, regressions
from narrowkv.cli.bench.ceilings import Ceilings
from narrowkv.cli.bench.kernels import _read_kernel
from narrowkv.cli.bench.timing import Timing
from narrowkv.cli.bench.workload import DecodeShape, Storage, shapes
from narrowkv.cli.places import Place
from narrowkv.cli.plot import plot_roofline
from narrowkv.cli.report import UsageError
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.launch import LaunchOptions, launch

run = CliRunner().invoke
CEILINGS = Ceilings(copy_bytes_per_s=3e12, read_bytes_per_s=3e12, bf16_flops_per_s=8e14)
SHAPE = DecodeShape(2, 32, 16, 1, 3, 64, "bf16", "fp8_e4m3fn")
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


def test_timing_reports_the_median_and_the_tenths() -> None:
    timing = Timing.of([float(n) for n in range(101, 0, -1)])
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.samples) == (51.0, 11.0, 91.0, 101)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)
    assert Timing.of([1.0, 2.0]).median_us == 1.5
    with pytest.raises(ValueError, match="samples_us"):
        Timing.of([])


def test_the_floor_is_the_larger_of_bytes_and_flops() -> None:
    assert CEILINGS.floor_us(3e9, 0) == pytest.approx(1000)
    assert CEILINGS.floor_us(3e6, 8e11) == pytest.approx(1000)


def test_bytes_and_flops_of_a_row_by_hand() -> None:
    shape = DecodeShape(4, 1024, 16, 8, 12, 128, "bf16", "fp8_e4m3fn")
    kv = 4 * 1024 * 8 * 128 * 2
    q_and_o = 2 * 4 * 96 * 128 * 2
    assert shape.bytes_touched == kv + q_and_o + 4 * 4 * 64
    assert shape.flops == 4 * 4 * 1024 * 96 * 128
    mixed = DecodeShape(4, 1024, 16, 8, 12, 128, "bf16", "fp8_e4m3fn/bf16")
    assert mixed.bytes_touched - shape.bytes_touched == kv / 2


def test_fp4_rows_count_their_scales() -> None:
    tokens, rest = 4 * 1024 * 8, 2 * 4 * 96 * 128 * 2 + 4 * 4 * 64
    for fmt, row in (("fp4_e2m1", 130), ("fp4_e2m1:32", 136), ("fp8_e4m3fn/fp4_e2m1", 128 + 65)):
        shape = DecodeShape(4, 1024, 16, 8, 12, 128, "bf16", fmt)
        assert shape.bytes_touched == tokens * row + rest
        assert shape.layout == "HND"


@pytest.mark.parametrize("fmt", ["fp4_e2m1", "fp4_e2m1:32", "fp8_e4m3fn/fp4_e2m1:32"])
def test_fp4_storage_is_what_the_row_says(fmt: str) -> None:
    shape = DecodeShape(2, 32, 16, 2, 3, 64, "bf16", fmt)
    q, cache, table = Storage(shape, device="cpu").inputs(shape)
    assert cache.bytes_per_token() * 64 == shape.bytes_touched - 2 * q.numel() * 2 - 4 * 4
    error = relative_l1(paged_decode(q, cache, table), paged_decode_reference(q, cache, table))  # type: ignore[arg-type]
    assert error < 0.002


@pytest.mark.parametrize("text", ["fp8_e4m3fn:32", "fp4_e2m1:16", "fp3"])
def test_a_format_that_is_not_one_ends_with_2(text: str) -> None:
    result = run(app, ["bench", "decode", "--format", text])
    assert result.exit_code == 2
    assert f"--format {text}" in result.stderr


def test_rows_that_share_storage_are_neighbours() -> None:
    rows = shapes(
        batches=[1, 2],
        contexts=[64],
        page_sizes=[1, 16],
        num_kv_heads=2,
        ratios=[4, 12],
        head_dim=64,
        q="bf16",
        formats=["bf16", "fp8_e4m3fn"],
    )
    assert len(rows) == len(set(rows)) == 16
    storages = [(r.format, r.batch, r.context) for r in rows]
    assert len(list(dict.fromkeys(storages))) == sum(
        a != b for a, b in zip(storages, [None, *storages], strict=False)
    )


def test_storage_is_the_same_tokens_at_every_page_size() -> None:
    storage = Storage(SHAPE, device="cpu")
    q, cache, table = storage.inputs(SHAPE)
    assert q.shape == (2, 3, 64)
    assert sorted(table.page_ids.flatten().tolist()) == [0, 1, 2, 3]
    other = DecodeShape(2, 32, 1, 1, 3, 64, "bf16", "fp8_e4m3fn")
    assert storage.fits(other)
    assert not storage.fits(DecodeShape(2, 32, 16, 1, 3, 64, "bf16", "bf16"))
    _, token_cache, _ = storage.inputs(other)
    assert token_cache.page_size == 1
    assert token_cache.k.data_ptr() == cache.k.data_ptr()
    assert bool(torch.isfinite(cache.dequantize()[0]).all())


def test_the_reading_kernel_reads_every_element() -> None:
    x = torch.arange(1024 * 37, dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32)
    launch(_read_kernel, (8,), (x, out, 37), {"BLOCK": 1024, "STRIDE": 8}, LaunchOptions(num_warps=1))
    assert int(out.sum(dtype=torch.int32)) == int(x.sum(dtype=torch.int32))


class CpuGraph:
    """What a captured graph is to `time_call`: something that can be replayed."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.replay = call


class CpuTimer:
    """Stands in for the GPU's timer: runs calls for real, and makes up their times."""

    def __init__(self, samples: int = 50, median_us: float = 100.0) -> None:
        self.median_us = median_us
        self.timed = 0

    def capture(self, call: Callable[[], Any]) -> CpuGraph:
        call()
        return CpuGraph(call)

    def replay(self, graph: CpuGraph) -> Timing:
        self.timed += 1
        return Timing(self.median_us, self.median_us * 0.9, self.median_us * 1.2, 10)

    def wait(self) -> None:
        pass


def checked() -> tuple[decode.Checked, torch.Tensor]:
    q, cache, table = Storage(SHAPE, device="cpu").inputs(SHAPE)
    check = decode.Checked.of(q, cache, table, SHAPE)
    return check, check.expected.bfloat16()


def test_a_right_call_is_timed() -> None:
    check, right = checked()
    out = torch.empty_like(right)
    timer = CpuTimer()
    error, timing = decode.time_call(lambda: out.copy_(right), check, timer)  # type: ignore[arg-type]
    assert 0 < error <= 0.002
    assert timing is not None
    assert timer.timed == 1


def test_a_call_that_leaves_an_output_unwritten_is_caught_by_the_poison() -> None:
    check, right = checked()
    out = right.clone()  # right already, but by somebody else

    def lazy() -> torch.Tensor:
        out[:1] = right[:1]
        return out

    timer = CpuTimer()
    error, timing = decode.time_call(lazy, check, timer)  # type: ignore[arg-type]
    assert math.isnan(error)
    assert timing is None
    assert timer.timed == 0


def test_a_call_that_goes_wrong_while_it_is_timed_is_caught_after() -> None:
    check, right = checked()
    out = torch.empty_like(right)
    calls = [0]

    def tiring() -> torch.Tensor:
        calls[0] += 1
        return out.copy_(right if calls[0] < 3 else right * 1.1)

    error, timing = decode.time_call(tiring, check, CpuTimer())  # type: ignore[arg-type]
    assert timing is not None
    row = decode._row(SHAPE, "narrowkv", CEILINGS, error, timing)
    assert (row.status, row.median_us) == ("fail", None)
    assert "after timing" in row.detail


def test_a_row_has_all_its_figures() -> None:
    row = decode._row(SHAPE, "narrowkv", CEILINGS, 0.001, Timing(50.0, 40.0, 60.0, 9)).as_dict()
    assert row["floor_us"] == CEILINGS.floor_us(SHAPE.bytes_touched, SHAPE.flops)
    assert row["ratio_to_floor"] == pytest.approx(50.0 / row["floor_us"])
    assert row["bytes_per_s"] == pytest.approx(SHAPE.bytes_touched / 50e-6)
    assert row["flops_per_s"] == pytest.approx(SHAPE.flops / 50e-6)
    assert set(KEYS) <= set(row)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> CpuTimer:
    """A machine whose GPU is the CPU: every step of the run but the clock is real."""
    timer = CpuTimer()
    place = Place("gpu", "cpu", "stand-in GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "stand-in")
    monkeypatch.setattr(decode, "find_place", lambda name: place)
    monkeypatch.setattr(reporter, "find_place", lambda name: place)
    monkeypatch.setattr(reporter, "gpus", lambda: [{"name": "stand-in", "target": "cpu"}])
    monkeypatch.setattr(reporter, "measure_ceilings", lambda timer: CEILINGS)
    monkeypatch.setattr(reporter, "GraphTimer", lambda samples, seconds: timer)
    monkeypatch.setattr(decode, "Storage", lambda shape: Storage(shape, device="cpu"))
    return timer


def test_a_run_measures_every_row_and_writes_every_file(stand_in: CpuTimer, tmp_path: Path) -> None:
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


def test_slower_than_the_baseline_ends_with_4_and_names_the_row(stand_in: CpuTimer, tmp_path: Path) -> None:
    baseline = tmp_path / "before.json"
    assert run(app, ["bench", "decode", *SMALL, "--out", str(baseline)]).exit_code == 0
    against = ["bench", "decode", *SMALL, "--against", str(baseline)]
    stand_in.median_us = 104.0
    assert run(app, against).exit_code == 0, "within the threshold"
    stand_in.median_us = 106.0
    result = run(app, against)
    assert result.exit_code == 4
    assert "+6.0%" in result.stdout
    assert "page_size 16" in result.stdout
    assert run(app, [*against, "--threshold", "0.1"]).exit_code == 0


def test_a_wrong_kernel_ends_with_1_even_when_it_is_fast(
    stand_in: CpuTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode.paged_decode

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs).mul_(1.05)

    monkeypatch.setattr(decode, "paged_decode", wrong)
    result = run(app, ["bench", "decode", *SMALL, "--json"])
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert {(row["status"], row["median_us"]) for row in rows} == {("fail", None)}


def test_ctrl_c_keeps_the_rows_that_were_finished(
    stand_in: CpuTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode.measure
    finished: list[DecodeShape] = []

    def until_third(shape: DecodeShape, *rest: Any) -> Any:
        if len(finished) == 2:
            raise KeyboardInterrupt
        finished.append(shape)
        return right(shape, *rest)

    monkeypatch.setattr(decode, "measure", until_third)
    result = run(app, ["bench", "decode", *SMALL, "--json"])
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert document["interrupted"] is True
    assert len(document["rows"]) == 2


def row(**changed: Any) -> dict[str, Any]:
    plain = {"backend": "narrowkv", **SHAPE.as_row(), "ratio_to_floor": 2.0}
    return {**plain, **changed}


def test_changes_match_rows_by_what_they_are() -> None:
    before = {"rows": [row(), row(batch=8, ratio_to_floor=4.0), row(batch=16, ratio_to_floor=None)]}
    found = changes(
        before, [row(ratio_to_floor=2.2), row(batch=8, ratio_to_floor=3.0), row(batch=16), row(batch=32)]
    )
    assert [(c.row["batch"], round(c.by, 6)) for c in found] == [(2, 0.1), (8, -0.25)]
    assert [c.row["batch"] for c in regressions(found, 0.05)] == [2]
    assert regressions(found, 0.2) == []


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
        (json.dumps({"command": "bench", "schema_version": 1, "rows": [row(ratio_to_floor="fast")]}), "fast"),
        (json.dumps({"command": "bench", "schema_version": 1, "rows": [row(ratio_to_floor=-1.0)]}), "-1.0"),
    ],
)
def test_a_broken_baseline_ends_with_2_before_anything_is_measured(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="--against") as caught:
        load_baseline(path)
    assert words in str(caught.value)
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
    measured = decode._row(SHAPE, "narrowkv", CEILINGS, 0.001, Timing(50.0, 40.0, 60.0, 9)).as_dict()
    refused = decode.Row(SHAPE, "peer", status="refused", detail="no").as_dict()
    path = tmp_path / "plot.png"
    plot_roofline([measured, refused], CEILINGS, path, title="a GPU", series=("backend", "format"))
    assert path.stat().st_size > 1000


def test_environment_names_no_gpu_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert environment.gpus() == []


@pytest.mark.gpu
def test_a_small_bench_on_a_gpu(tmp_path: Path) -> None:
    rows = ["--batch", "4", "--context", "1024", "--page-size", "16", "--format", "fp8_e4m3fn", "--peers"]
    result = run(app, ["bench", "decode", *rows, "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0, result.stderr
    (ours,) = [r for r in document["rows"] if r["backend"] == "narrowkv"]
    assert ours["ratio_to_floor"] > 0.9
    assert document["ceilings"]["read_bytes_per_s"] > 1e11

"""`narrowkv bench` with a stand-in for the GPU, without one, of ranks and of the host; `narrowkv warmup`."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import SMALL_BENCH, document, narrowkv

from narrowkv.attn_prefill.warmup import model_cache
from narrowkv.cli import bench
from narrowkv.testing.bench import decode, traffic
from narrowkv.testing.bench.measure import Row
from narrowkv.testing.cases.context_parallel import CASES, Checked, check_cases
from narrowkv.testing.machine import describe, gpus

SIZES = decode.DecodeSizes(2, 32, 16, 1, 3, 64, "bf16", "fp8_e4m3fn")
SMALL = f"{SMALL_BENCH} --format fp8_e4m3fn"


def test_slower_than_the_baseline_ends_with_4_and_names_the_row(stand_in_gpu: Any, tmp_path: Path) -> None:
    baseline = tmp_path / "before.json"
    narrowkv(f"{SMALL} --out", baseline)
    against = f"{SMALL} --against {baseline}"
    stand_in_gpu.median_us = 104.0  # within the threshold
    narrowkv(against)
    stand_in_gpu.median_us = 106.0
    result = narrowkv(against, ends=4)
    assert "+6.0%" in result.stdout
    assert "page_size 16" in result.stdout
    narrowkv(f"{against} --threshold 0.1")


def test_a_wrong_kernel_ends_with_1_even_when_it_is_fast(
    stand_in_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode.paged_decode
    monkeypatch.setattr(decode, "paged_decode", lambda *a, **k: right(*a, **k).mul_(1.05))
    rows = document(SMALL, ends=1)["rows"]
    assert {(row["status"], row["median_us"]) for row in rows} == {("fail", None)}


def test_a_virtual_gpu_checks_answers_and_times_nothing(
    stand_in_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2-virtual")
    monkeypatch.setattr(bench, "measure_ceilings", lambda timer: pytest.fail("it would take hours"))
    found = document(SMALL)
    assert found["ceilings"] is None
    assert {(row["status"], row["median_us"]) for row in found["rows"]} == {("pass", None)}
    refused = narrowkv(f"{SMALL} --plot", tmp_path / "plot.svg", ends=2)
    assert "--plot does not apply to a virtual GPU, which has no device times" in refused.stderr


def baseline_of(ratio: object) -> str:
    row = {**Row({"backend": "narrowkv"}, vars(SIZES)).as_dict(), "ratio_to_floor": ratio}
    return json.dumps({"command": "bench", "schema_version": 1, "rows": [row]})


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
        (baseline_of("fast"), "fast"),
        (baseline_of(-1.0), "-1.0"),
    ],
)
def test_a_broken_baseline_ends_with_2_before_anything_is_measured(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    assert words in narrowkv("bench decode --against", path, ends=2).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_environment_names_no_gpu_where_there_is_none() -> None:
    assert gpus() == []


def test_environment_lists_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    files = (*root.glob("packages/*/pyproject.toml"), root / "cli" / "pyproject.toml")
    names = [re.findall(r'^name = "(.*)"', file.read_text(), re.MULTILINE)[0] for file in files]
    found = [SimpleNamespace(name=name, version="1") for name in (*names, "narrowkvs", "torch")]
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    assert set(describe()["narrowkv"]) == set(names)


STEP = traffic.LayerStep("llama-70b-tp8", "mixed", (1, 1, 20), (30, 9, 40))
ALIKE = traffic.LayerStep("llama-70b-tp8", "speculative", (2, 2), (30, 9), capacity=64)


@pytest.fixture
def small_steps(stand_in_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose GPU is the CPU, and steps that it runs in a moment."""

    monkeypatch.setattr(bench, "traffic_bench", lambda peers, _: traffic.traffic_bench(peers, "cpu"))
    monkeypatch.setattr(bench, "choices_bench", lambda _: traffic.choices_bench("cpu"))
    monkeypatch.setattr(traffic, "serving_steps", lambda *_: [STEP, ALIKE])
    monkeypatch.setattr(traffic, "grid", lambda: [STEP])
    monkeypatch.setitem(traffic.FORCED, "batch_prefill", ({"kernel": "fused", "num_splits": 4},))
    return stand_in_gpu


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_every_call_of_traffic_is_checked_and_none_is_timed() -> None:
    found = document("bench traffic --model llama-70b-tp8 --traffic decode,mixed --batch 2,8")
    assert [(row["traffic"], row["call"] or row["backend"]) for row in found["rows"]] == [
        ("decode", "paged_decode"), ("decode", "batch_prefill"), ("decode", "torch sdpa"),
        ("mixed", "batch_prefill"), ("mixed", "torch sdpa"), ("mixed", "prefill_append"),
    ]  # fmt: skip
    assert all(row["status"] == "pass" and row["relative_l1"] > 0 for row in found["rows"])
    assert all(row["median_us"] is None for row in found["rows"])


@pytest.mark.usefixtures("without_gpu")
def test_a_rehearsal_finds_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    right = traffic.paged_decode
    monkeypatch.setattr(traffic, "paged_decode", lambda *a, **k: right(*a, **k).mul_(1.01))
    found = document("bench traffic --model llama-70b-tp8 --traffic decode", ends=1)
    assert {row["call"]: row["status"] for row in found["rows"]} == {
        "paged_decode": "fail", "batch_prefill": "pass", "": "pass",
    }  # fmt: skip


@pytest.mark.usefixtures("small_steps")
def test_a_run_of_traffic_compares_with_the_fastest_peer(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert "x best peer" in narrowkv("bench traffic --out", out).stdout
    ours = [row for row in json.loads(out.read_text())["rows"] if row["backend"] == "narrowkv"]
    assert [(row["batch"], row["ratio_to_peer"]) for row in ours] == [(3, 1.0), (2, 1.0), (2, 1.0)]


def test_choices_show_automatic_beside_the_best_of_all_forced_ones(
    small_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([120.0, 100.0])
    timing = type(small_steps.replay(None))
    monkeypatch.setattr(small_steps, "replay", lambda graph: timing(next(times, 150.0), 1.0, 2.0, 10))
    result = narrowkv("bench traffic --choices --json")
    first, *rest = json.loads(result.stdout)["rows"]
    assert first["choice"] == "automatic"
    assert first["ratio_to_best"] == pytest.approx(1.2)
    assert [row["choice"] for row in rest] == ["kernel=fused, num_splits=4", "the caller's"]
    table = [line for line in result.stderr.splitlines() if line.startswith("llama")]
    assert len(table) == 2, "automatic and the best one"
    assert "1.20" in table[0]


def test_times_on_a_target_are_said_to_be_a_models() -> None:
    result = narrowkv(
        "bench decode --batch 2 --context 64 --page-size 16 --format fp8_e4m3fn --on gfx942 --json"
    )
    found = json.loads(result.stdout)
    assert "rows" not in found
    (row,) = found["model_rows"]
    assert row["model_us"] > 0
    assert "not a measurement" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says something else where there is one")
def test_the_host_is_measured_and_nothing_is_launched() -> None:
    result = narrowkv("bench host --samples 5 --shapes 0 --captures 1 --json")
    found = json.loads(result.stdout)
    assert found["launches"] == "none"
    assert "launches do nothing" in result.stderr
    assert {row["operation"] for row in found["rows"]} >= {"torch.add_", "torch sdpa", "paged_decode"}


@pytest.mark.parametrize(("error", "ends"), [(0.01, 0), (0.03, 1)])
def test_ranks_are_probed_and_the_worst_of_each_case_is_shown(
    error: float, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks compute is checked by test_ranks, of context_parallel; here their answers are made up."""

    def run_ranks(work: Any, ranks: int) -> list[list[Checked]]:
        assert work is check_cases
        return [[Checked(case.name, at, 0.01, 0.02, True, 64) for case in CASES] for at in (0.001, error)]

    monkeypatch.setattr("narrowkv.cli.ranks.run_ranks", run_ranks)
    found = document("probe cp --ranks 2", ends=ends)
    assert found["ranks"] == 2
    assert [case["name"] for case in found["cases"]] == [case.name for case in CASES]
    assert {(case["error"], case["passed"]) for case in found["cases"]} == {(error, ends == 0)}


def test_decode_over_many_gpus_is_modelled() -> None:
    rows = document("bench cp --model --gpus 8,72 --context 1048576 --target gfx950")["rows"]
    assert [(row["world"], row["batch"]) for row in rows] == [(8, 1), (8, 8), (72, 1), (72, 8)]
    assert all(1 < row["speedup"] < row["world"] for row in rows)


def test_warmup_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    line = (
        "warmup --target gfx950 --heads 2/1 --head-dim 64 --num-pages 32 --max-batch 1 --max-seq-len 16 "
        "--max-q-len 1 --format bf16 --jobs 1"
    )
    first, second = (document(line)["kernels"]["gfx950"] for _ in range(2))
    assert "_paged_decode_kernel" in first["compiled"]
    assert second == {"compiled": [], "cached": second["cached"]}
    assert sorted(second["cached"]) == sorted(first["compiled"])


def test_a_warm_cache_stands_for_a_larger_one() -> None:
    for num_pages in (2**24, 2**24 + 3):
        cache = model_cache("fp8_e4m3fn", num_pages, 16, 1, 64, "meta")  # of gigabytes
        assert cache.needs_64_bit_addresses
        assert cache.num_pages < 2**22
        assert cache.num_pages % 16 == num_pages % 16
    assert model_cache("bf16", 40, 16, 1, 64, "cpu").num_pages == 40


@pytest.mark.gpu
def test_a_small_bench_on_a_gpu() -> None:
    found = document("bench decode --batch 4 --context 1024 --page-size 16 --format fp8_e4m3fn --peers")
    (ours,) = [row for row in found["rows"] if row["backend"] == "narrowkv"]
    assert ours["ratio_to_floor"] > 0.9
    assert found["ceilings"]["read_bytes_per_s"] > 1e11

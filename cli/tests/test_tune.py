"""`narrowkv tune` with a stand-in for the GPU's clock: calls, checks and files are real."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import document, narrowkv

from narrowkv.attn_decode import DecodeShape, plan_decode
from narrowkv.cli import tune
from narrowkv.runtime import get_target, tuned
from narrowkv.runtime.targets import Target
from narrowkv.testing.bench.timing import Timing
from narrowkv.testing.machine_report import markdown, report_document
from narrowkv.testing.places import Place
from narrowkv.testing.tune import TUNED_MODELS, TuneSettings
from narrowkv.testing.tune.families import TunedFamily, family_of
from narrowkv.testing.tune.search import Gpu

SMALL = "tune --family decode --heads 4/1 --head-dim 64 --batch 1,2 --context 32"


class StandIn(Place):
    @property
    def target(self) -> Target:
        return get_target("cpu")


class CpuGpu(Gpu):
    """Runs calls for real; tiles of fewer keys are made up to be faster."""

    def __init__(self, samples: int, compilers: Any, until: float = math.inf) -> None:
        self.timer: Any = self
        self.timed: list[int] = []
        self.until, self.seconds_compiling = until, 0.0

    def capture(self, call: Callable[[], Any]) -> Any:
        call()
        return type("Graph", (), {"replay": staticmethod(call), "plan": call.keywords["plan"]})  # type: ignore[attr-defined]

    def replay(self, graph: Any) -> Timing:
        keys = graph.plan.config.block_n
        self.timed.append(keys)
        return Timing(float(keys), keys - 1.0, keys + 1.0, 10)

    def wait(self) -> None:
        pass

    def compile(self, shapes: Any, choices: Any) -> None:
        pass

    def crashes(self, call: Any) -> bool:
        return False

    def spills(self, trial: Any) -> int:
        return 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[CpuGpu]:
    """A machine whose GPU is the CPU; gets each stand-in that a command makes."""
    made: list[CpuGpu] = []

    def make(*arguments: Any) -> CpuGpu:
        made.append(CpuGpu(*arguments))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "stand-in")
    monkeypatch.setattr(tune, "find_place", lambda name: StandIn("gpu", "cuda", "stand-in GPU"))
    monkeypatch.setattr(tune, "family_of", lambda name, each, device: family_of(name, each, "cpu"))
    monkeypatch.setattr(tune, "Gpu", make)
    monkeypatch.setattr(tune, "Compilers", lambda processes: nullcontext())
    return made


def test_rows_are_written_continued_shown_and_used(
    gpus: list[CpuGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tuned.json"
    first = narrowkv(f"{SMALL} --minutes 0 --file", file)
    assert "0 shape classes, 0 of them from before, 2 for which no time was left" in first.stdout
    assert not file.exists()
    rows = document(SMALL, "--file", file)["rows"]
    assert [row["choice"]["block_n"] for row in rows] == [32, 32]
    assert rows[0]["shipped_us"] == [128.0]
    assert rows[0]["tuned_us"] == [32.0]
    assert all(row["tried"] >= 2 and row["wrong"] == row["failed"] == 0 for row in rows)
    again = narrowkv(f"{SMALL} --file", file)
    assert "2 shape classes, 2 of them from before" in again.stdout
    assert gpus[-1].timed == []
    shown = narrowkv("tune --show --file", file)
    assert "2 of 2 shape classes have a configuration faster than the shipped one" in shown.stdout
    assert "block_n 32" in shown.stdout
    assert "in the place of cpu, decode: tiles of 16 rows x 128 keys" in shown.stdout

    shape = DecodeShape(2, 1, 4, 1, 64, 16, 32)
    plan = partial(plan_decode, shape, "fp8_e4m3fn", device="cpu")
    assert plan().config.block_n == 128
    monkeypatch.setenv("NARROWKV_TUNED", str(file))
    assert plan().config.block_n == 32
    assert f"tuned on this GPU ({file})" in plan().explain()
    assert plan(batch_invariant=True).config.block_n == 128

    written = report_document({"gpus": []}, [])
    assert json.loads(json.dumps(written["tuned"])) == json.loads(file.read_text())
    assert "- configurations of a tune file: 2 shape classes" in markdown(written)
    file.write_text("{")
    assert "cannot be read" in markdown(report_document({"gpus": []}, []))


def test_a_search_that_is_cut_leaves_its_whole_classes_and_goes_on(
    gpus: list[CpuGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tuned.json"
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def slow(self: CpuGpu, graph: Any, whole: Any = CpuGpu.replay) -> Timing:
        clock[0] += 1.0
        timing: Timing = whole(self, graph)
        return timing

    monkeypatch.setattr(CpuGpu, "replay", slow)
    first = narrowkv(f"{SMALL} --minutes 1 --file", file)
    replays = len(gpus[-1].timed)
    assert "2 shape classes, 0 of them from before, 0 for which" in first.stdout
    assert first.stdout.count("configurations in") == 2
    file.unlink()
    minutes = (0.75 * replays - 1) / 60
    cut = narrowkv(f"{SMALL} --minutes {minutes} --file", file)
    assert "1 shape classes, 0 of them from before, 1 for which no time was left" in cut.stdout
    assert len(gpus[-1].timed) < replays
    assert len(tuned.read_tuned(file).rows) == 1
    again = narrowkv(f"{SMALL} --minutes 1 --file", file)
    assert "2 shape classes, 1 of them from before, 0 for which" in again.stdout


def test_families_take_turns() -> None:
    names = ("decode", "prefill", "sparse", "sage")
    models = (TUNED_MODELS["glm-4.5-air"], TUNED_MODELS["deepseek-v4-flash"])
    families = [family_of(name, TuneSettings(model), "cpu") for model in models for name in names]
    steps = tune.classes_in_turns(families)
    assert [family.name for family, _ in steps[:5]] == ["decode", "prefill", "sage", "sparse", "decode"]
    assert sum(len(family.classes()) for family in families) == len(steps)


def test_a_class_that_does_not_fit_in_memory_is_left_out(
    gpus: list[CpuGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(tune, "tune_shapes", full)
    result = narrowkv(f"{SMALL} --file", tmp_path / "tuned.json")
    assert result.stderr.count("does not fit in the GPU's memory: 4/1 heads of 64") == 2
    assert "0 shape classes" in result.stdout


def test_a_file_of_another_gpu_is_not_continued(gpus: list[CpuGpu], tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    tuned.TuneFile.of(get_target("gfx942"), "MI300X").write(file)
    refused = narrowkv(f"{SMALL} --file", file, ends=2)
    assert "is of gfx942 with 304 compute units, and this is cpu" in refused.stderr
    assert "give another file" in refused.stderr
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"colour": 1}))
    assert "unknown or missing fields: colour" in narrowkv("tune --show --file", broken, ends=2).stderr


def test_without_a_gpu_there_is_nothing_to_time(without_gpu: None) -> None:
    assert "tune times kernels and needs a GPU" in narrowkv("tune", ends=3).stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model glm-4.5-airy", "nearest: glm-4.5-air"), ("--family decoder", "nearest: decode"),
        ("--heads 4", "--heads must be query heads and KV heads"),
        ("--head-dim 64", "does not apply without --heads"),
        ("--heads 4/1 --model qwen3-moe", "--model does not apply with --heads"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(line: str, words: str) -> None:
    assert words in narrowkv(f"tune {line}", ends=2).stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        "--family decode --heads 4/1 --head-dim 64", "--family prefill --heads 4/1 --head-dim 64",
        "--family sparse --sparse-heads 16 --topk 40", "--family sage --heads 2/1 --head-dim 64",
    ],
)  # fmt: skip
def test_families_are_tuned_on_this_gpu(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(family: Any, chosen: Any, whole: Any = TunedFamily.open) -> Any:
        shapes = whole(family, chosen)
        return replace(shapes, choices=shapes.choices[1:2], refined=lambda _: ())

    monkeypatch.setattr(TunedFamily, "open", few)
    file = tmp_path / "tuned.json"
    command = f"tune {options} --batch 2 --chunk 8 --context 128 --samples 3 --jobs 2"
    found = document(command, "--file", file)
    for row in found["classes" if "rehearsal" in found else "rows"]:
        assert row["tried"] == 1
        assert (row["wrong"], row["failed"], row["crashed"]) == (0, 0, 0)

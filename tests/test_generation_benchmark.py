"""`benchmarks/engines_transformers.py` with a tiny model on a CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from tool_modules import TOOLS, load_module, load_tool

from narrowkv.engines.transformers import NarrowCache

bench = load_module(TOOLS.parent / "benchmarks" / "engines_transformers.py", "engines_transformers")

TINY = "--shape tiny --layers 1 --device cpu --steps 3 --context 20,9 --batch 2 --cache"


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["engines_transformers.py", *map(str, options)])
    bench.main()


@pytest.mark.parametrize("how", [["--fill"], ["--chunk", 8]])
def test_rows_are_measured_and_added_to_a_file(monkeypatch, tmp_path, how):
    out = tmp_path / "out.json"
    for names in ("dynamic-sdpa-flash", "bf16,dynamic-flash"):
        run(monkeypatch, *TINY.split(), names, *how, "--out", out)
    found = json.loads(out.read_text())
    assert len(found["commands"]) == 2
    assert "glm4_moe, 1 layers" in found["shape"]
    *measured, skipped = found["rows"]
    assert [(row["cache"], row["batch"], row["context"]) for row in measured] == [
        ("dynamic-sdpa-flash", 2, 20), ("dynamic-sdpa-flash", 2, 9), ("bf16", 2, 20), ("bf16", 2, 9)
    ]  # fmt: skip
    assert all(row["step_ms"] > 0 and row["logits_error"] < 0.05 for row in measured)
    assert all(("prefill_s" in row) == (how != ["--fill"]) for row in measured)
    assert skipped["cache"] == "dynamic-flash"
    assert "FlashAttention2" in skipped["skipped"]
    with pytest.raises(ValueError, match=r"must have shape 'glm4_moe, 2 layers"):
        run(monkeypatch, *TINY.split(), "bf16", *how, "--layers", 2, "--out", out)


@pytest.mark.parametrize("name", ["dynamic-sdpa", "static-sdpa", "fp8", "k8v4", "fp4"])
def test_the_bytes_that_are_wanted_are_those_of_the_cache(name):
    kind, model = bench.KINDS[name], bench.make_model("tiny", 2, "cpu")
    cache = kind.make(model.config, 100)
    k, v = torch.zeros(2, 3, 1, 100, 128, dtype=torch.bfloat16)
    for index in range(2):
        cache.update(k, v, index)
    assert bench.bytes_wanted(kind, model, 3, 100) == bench.bytes_of(cache) > 0


@pytest.mark.parametrize("name", ["dynamic-sdpa", "static-sdpa", "bf16"])
def test_a_filled_cache_is_continued(name):
    kind, model = bench.KINDS[name], bench.make_model("tiny", 1, "cpu")
    bench.narrow.register()
    model.set_attn_implementation(kind.attention)
    cache = kind.make(model.config, 32)
    bench.fill(cache, model, 2, 20, "cpu")
    model.generate(
        torch.ones(2, 21, dtype=torch.long), past_key_values=cache, max_new_tokens=3, eos_token_id=None
    )
    assert int(cache.get_seq_length()) == 23  # the last token is not stored
    if isinstance(cache, NarrowCache):
        assert cache.rows.seq_lens.tolist() == [23, 23]


def test_a_cache_whose_logits_differ_is_not_timed(monkeypatch):
    kind = bench.KINDS["fp4"]
    monkeypatch.setitem(bench.KINDS, "fp4", bench.Kind(kind.attention, kind.make, 0.001))
    with pytest.raises(SystemExit, match=r"fp4: logits differ by 0\.\d+, and at most 0.001 is right"):
        run(monkeypatch, *TINY.split(), "fp4", "--fill")


def test_a_cell_that_does_not_fit_says_so(monkeypatch):
    model = bench.make_model("tiny", 1, "cpu")
    options = bench.argparse.Namespace(device="cuda", steps=3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**30))
    row = bench.cell(bench.KINDS["dynamic-sdpa"], model, 64, 2**20, options)
    assert row == {"skipped": "its cache of 32.0 GiB does not fit in 0.0 GiB"}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))

    def measure(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(bench, "measure", measure)
    row = bench.cell(bench.KINDS["dynamic-sdpa"], model, 64, 2**20, options)
    assert row == {"skipped": "the GPU's memory does not suffice for its steps"}


def test_the_table_and_the_plot_of_a_stored_run(monkeypatch, tmp_path):
    results = load_tool("results")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.generate_tables() == "No run on a GPU is stored."
    sizes = {"cache_gib": 1.0, "peak_gib": 1.5, "step_ms": 1.0}
    cells = [
        {"cache": "dynamic-sdpa", "batch": 64, "context": 2048, "tokens_per_s": 100.0, **sizes},
        {"cache": "dynamic-flash", "skipped": "FlashAttention2 is not installed."},
        {"cache": "dynamic-sdpa", "batch": 64, "context": 131072, "skipped": "its cache does not fit"},
        {"cache": "fp4", "batch": 64, "context": 131072, "tokens_per_s": 50.0, **sizes},
        {"cache": "fp4", "batch": 64, "context": 2048, "tokens_per_s": 250.0, **sizes},
        {"cache": "fp8", "batch": 1, "context": 2048, "tokens_per_s": 10.0, **sizes},
    ]
    about = {
        "device": "NVIDIA H100",
        "versions": {"torch": "2.11"},
        "commands": ["python x"],
        "shape": "a, b",
    }
    (tmp_path / "generate-h100.json").write_text(json.dumps({**about, "rows": cells}))
    lines = results.generate_tables().splitlines()
    assert "| 64 | 2048 | 100 | - | 250 |" in lines
    assert "| 64 | 131072 | does not fit | - | 50 |" in lines
    assert "| 64 | 131072 | does not fit | - | 1.00, 1.50 |" in lines
    assert "DynamicCache, flash was not measured: FlashAttention2 is not installed." in lines
    speed, memory = results.generate("generate-h100")
    assert [[bar.text for bar in group.bars] for group in speed.groups] == [["1.00 x", "2.50 x"]]
    assert [group.heading for group in memory.groups] == [
        "batch 64, context 2048",
        "batch 64, context 131072",
    ]
    assert results.draw(speed, memory).startswith("<svg")

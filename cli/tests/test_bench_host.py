"""`narrowkv bench host` and `narrowkv warmup`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.attn_prefill.warmup import model_cache
from narrowkv.cli.app import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="says something else where there is one")
def test_the_command_says_that_nothing_is_launched() -> None:
    line = ["bench", "host", "--samples", "5", "--shapes", "0", "--captures", "1", "--json"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["launches"] == "none"
    assert "launches do nothing" in result.stderr
    assert {row["operation"] for row in document["rows"]} >= {"torch.add_", "torch sdpa", "paged_decode"}


def test_warmup_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = ["warmup", "--target", "gfx950", "--heads", "2/1", "--head-dim", "64", "--num-pages", "32"]
    command += ["--max-batch", "2", "--max-seq-len", "64", "--format", "bf16", "--jobs", "1", "--json"]
    found = []
    for _ in range(2):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["kernels"]["gfx950"])
    assert "_paged_decode_kernel" in found[0]["compiled"]
    assert found[1] == {"compiled": [], "cached": found[1]["cached"]}
    assert sorted(found[1]["cached"]) == sorted(found[0]["compiled"])


def test_a_warm_cache_stands_for_a_larger_one() -> None:
    for num_pages in (2**24, 2**24 + 3):
        cache = model_cache("fp8_e4m3fn", num_pages, 16, 1, 64, "meta")  # of gigabytes
        assert cache.needs_64_bit_addresses
        assert cache.num_pages < 2**22
        assert cache.num_pages % 16 == num_pages % 16
    assert model_cache("bf16", 40, 16, 1, 64, "cpu").num_pages == 40

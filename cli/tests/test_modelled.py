"""`narrowkv inspect model` and `narrowkv bench ... --on TARGET`: times that are a model's and say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.runtime.cases import parse_case
from narrowkv.testing.kinds import DECODE
from narrowkv.testing.model import model_call

CASE = "decode:lens=512,head_dim=64,kv_heads=1,split=none,format=bf16"


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", "model", *arguments])
    return result.exit_code, result.stdout if "--json" in arguments else result.output


def test_a_case_and_the_assembly_of_another_kernel(tmp_path: Path) -> None:
    inputs = parse_case(DECODE.case, CASE.partition(":")[2]).inputs()
    (launch,) = model_call("gfx942", inputs.call)
    assert launch.prediction.has_addresses
    loop = launch.full.loop
    assert loop is not None
    assert loop.passes >= 8
    assert launch.full.seconds > launch.prediction.seconds  # this call leaves most of the chip idle
    from narrowkv.testing.codegen import compile_call

    (artifact,) = compile_call("gfx942", inputs.call)
    peer = tmp_path / "peer.amdgcn"
    peer.write_text(artifact.assembly)
    code, text = _run("--target", "gfx942", "--case", CASE, "--peer", str(peer), "--json")
    assert code == 0, text
    document = json.loads(text)
    by_peer, by_case = document["model"]
    assert "peer.amdgcn" in by_peer["call"]
    (one,) = by_case["launches"]
    assert one["model"]["loop"]["clocks"] == pytest.approx(launch.prediction.loop.clocks)  # type: ignore[union-attr]
    assert {key for key in one if "model" not in key} == {"name"}  # every time is under a model's key
    code, text = _run("--target", "gfx942", "--peer", str(peer))
    assert code == 0
    assert "not a measurement" in text


def test_what_is_refused(tmp_path: Path) -> None:
    for arguments, message in (
        (["--family", "nothing"], "--family"),
        (["--case", "nothing:"], "--case"),
        (["--peer", str(tmp_path / "missing")], "--peer"),
    ):
        code, text = _run("--target", "gfx942", *arguments)
        assert code == 2, text
        assert message in text


def test_inspecting_a_case_shows_its_time_and_what_bounds_it() -> None:
    line = ["inspect", "prefill", "--target", "gfx950", "--case", "q_lens=16,lens=64,kernel=fused", "--json"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["model"]
    assert row["launches"][0]["model"]["seconds"] > 0
    assert "model us" in result.stderr
    result = CliRunner().invoke(app, [*line, "--no-model"])
    assert "model" not in json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "cpu"], "--on"), (["--on", "gpu,gfx942"], "another run"),
        (["--on", "gfx942", "--samples", "3"], "--samples"), (["--on", "gfx942", "--peers"], "--peers"),
    ],
)  # fmt: skip
def test_what_modelled_benches_refuse(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "decode", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_bench_on_a_target_says_that_its_times_are_a_models() -> None:
    sizes = ["--batch", "2", "--context", "64", "--page-size", "16", "--format", "fp8_e4m3fn"]
    result = CliRunner().invoke(app, ["bench", "decode", *sizes, "--on", "gfx942", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert "rows" not in document
    (row,) = document["model_rows"]
    assert row["model_us"] > 0
    assert "not a measurement" in result.stderr

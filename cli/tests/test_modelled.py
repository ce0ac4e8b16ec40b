"""`narrowkv inspect model` and `narrowkv bench ... --on TARGET`: times that are a model's and say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.bench.modelled import decode_calls, model_row
from narrowkv.cli.bench.workload import DecodeShape
from narrowkv.cli.cases import DECODE
from narrowkv.cli.modelled import families, main_kernel, model_call

CASE = "decode:lens=512,head_dim=64,kv_heads=1,split=none,format=bf16"


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", "model", *arguments])
    return result.exit_code, result.stdout if "--json" in arguments else result.output


def test_a_case_and_the_assembly_of_another_kernel(tmp_path: Path) -> None:
    inputs = DECODE.parse(CASE.partition(":")[2]).inputs()
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


SMALL_BENCHES = {
    "decode": ["--batch", "2", "--context", "64", "--page-size", "16", "--format", "fp8_e4m3fn"],
    "prefill": ["--new", "16", "--prefix", "48", "--heads", "4/1", "--format", "bf16"],
    "sparse": ["--tokens", "2", "--heads", "16", "--topk", "32", "--mode", "fused"],
    "sage": ["--batch", "1", "--context", "256", "--heads", "1", "--granularity", "per_block"],
}


@pytest.mark.parametrize(
    "bench",
    [name if name == "decode" else pytest.param(name, marks=pytest.mark.slow) for name in SMALL_BENCHES],
)
def test_a_bench_on_a_target_says_that_its_times_are_a_models(bench: str) -> None:
    result = CliRunner().invoke(app, ["bench", bench, *SMALL_BENCHES[bench], "--on", "gfx942", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert "rows" not in document
    for row in document["model_rows"]:
        assert {name for name in row if "model" not in name} == {"target", "name", "shape", "refused"}
        assert row["refused"] == ""
        assert row["model_us"] == pytest.approx(sum(row["model_kernels_us"].values()))
    assert "not a measurement" in result.stderr


def test_a_longer_context_takes_longer_by_its_keys() -> None:
    def seconds(context: int) -> float:
        (call,) = decode_calls(DecodeShape(512, context, 16, 1, 8, 64, "bf16", "bf16"))
        row = model_row(call, "gfx942")
        assert row.model_us is not None
        return row.model_us

    assert seconds(16384) / seconds(4096) == pytest.approx(4, rel=0.2)


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


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_every_family_has_a_loop_under_the_model(target: str) -> None:
    for name, family in families(target).items():
        prediction = main_kernel(model_call(target, family.call, hbm_share=family.hbm_share)).full
        assert prediction.loop is not None, name
        assert prediction.loop_flops_per_second > 1e12, name
        assert prediction.summary.startswith("model: ")

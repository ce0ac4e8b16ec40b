"""`narrowkv inspect model`: times that are a model's and say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.cases import DecodeCase, build
from narrowkv.cli.modelled import families, main_kernel, model_call

CASE = "decode:lens=512,head_dim=64,kv_heads=1,split=none,k=bf16,v=bf16"


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", "model", *arguments])
    return result.exit_code, result.stdout if "--json" in arguments else result.output


def test_a_case_and_the_assembly_of_another_kernel(tmp_path: Path) -> None:
    inputs = build(DecodeCase.parse(CASE.partition(":")[2]))
    (launch,) = model_call("gfx942", inputs.call)
    assert launch.prediction.has_addresses
    loop = launch.full.loop
    assert loop is not None
    assert loop.passes >= 8
    assert launch.full.seconds > launch.prediction.seconds  # this call leaves most of the chip idle
    from narrowkv.cli.codegen import compile_call

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


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_every_family_has_a_loop_under_the_model(target: str) -> None:
    for name, family in families(target).items():
        prediction = main_kernel(model_call(target, family.call, hbm_share=family.hbm_share)).full
        assert prediction.loop is not None, name
        assert prediction.loop_flops_per_second > 1e12, name
        assert prediction.summary.startswith("model: ")

"""`narrowkv inspect` says what is a model and what was counted."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from narrowkv.cli.app import app


def test_inspect_says_that_it_is_a_model_and_what_was_counted() -> None:
    line = ["inspect", "--no-model", "--target", "gfx950", "--context", "64", "--head-dim", "64"]
    line += ["--num-kv-heads", "1"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert "model, not a measurement" in result.stdout
    assert "a pass of the loop, executed instructions" in result.stdout
    assert "a whole workgroup, executed instructions" in result.stdout
    assert "emulated: " in result.stdout
    document = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    (inspection,) = document["inspections"]
    assert inspection["counts"] == "dynamic"
    assert inspection["model"]["label"] == inspection["whole_model"]["label"] == "model"
    assert inspection["emulated"]["workgroups"] > 0

"""`narrowkv accuracy` on a small trained model in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.names import ACCURACY_RECIPES
from narrowkv.engines.accuracy import RECIPES, Score
from narrowkv.engines.accuracy.evaluate import frontier
from narrowkv.engines.accuracy.tiny_lm import TinySizes
from narrowkv.quant import Calibration


def test_names_that_are_known_without_torch_are_those_of_the_package() -> None:
    assert tuple(recipe.name for recipe in RECIPES) == ACCURACY_RECIPES


def test_a_model_is_trained_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "narrowkv.cli.accuracy.TinySizes",
        lambda steps, context: TinySizes(1, 64, 2, 1, 64, context=context, batch=2, steps=steps),
    )
    folder = tmp_path / "model"
    trained = CliRunner().invoke(
        app, ["accuracy", "train-tiny", str(folder), "--steps", "2", "--context", "128"]
    )
    assert trained.exit_code == 0, trained.output
    assert "nats a byte" in trained.stdout
    arguments = ["accuracy", "--model", str(folder), "--tokens", "96", "--context", "64", "--needles", "1"]
    files = ["--plot", str(tmp_path / "kl.svg"), "--save-calibration", str(tmp_path / "c.npz"), "--json"]
    result = CliRunner().invoke(app, [*arguments, *files, "--recipe", "fp8,fp4-e4m3"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["recipe"] for row in found["recipes"]] == ["bf16", "fp8", "fp4-e4m3"]
    exact, fp8, fp4 = found["recipes"]
    assert (exact["kl"], exact["tokens"], exact["needles"]) == (0.0, 94, 1)
    assert 0 < fp8["kl"] < fp4["kl"]
    assert fp4["frontier"]
    assert (tmp_path / "kl.svg").read_text().count("fp4-e4m3")
    assert len(Calibration.load(tmp_path / "c.npz").layers) == 1
    assert "no kernel ran" in result.stderr


def test_what_cannot_be_measured_is_a_usage_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["accuracy", "--recipe", "fp5"])
    assert result.exit_code == 2
    assert "nearest" in result.stderr
    result = CliRunner().invoke(app, ["accuracy", "--model", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "cannot be loaded" in result.stderr


def test_the_frontier_has_no_recipe_that_another_of_as_few_bits_beats() -> None:
    def score(name: str, bits: float, kl: float) -> Score:
        return Score(name, "", bits, "torch", kl, 1.0, 0.0, 1.0, 0, 0, 1)

    scores = [
        score("a", 16, 0.0),
        score("b", 8, 0.1),
        score("c", 8, 0.2),
        score("d", 9, 0.1),
        score("e", 4, 1),
    ]
    # d costs what b costs, with more bits.
    assert frontier(scores) == {"a", "b", "e"}

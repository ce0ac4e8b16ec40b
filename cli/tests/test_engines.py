"""`narrowkv engines try`, with transformers; vLLM's part is the same but for the engine."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.names import ENGINE_CACHES, TINY_MODELS
from narrowkv.engines import tiny, trial


def test_names_that_are_known_without_torch_are_those_of_the_package() -> None:
    assert ENGINE_CACHES == trial.CACHES
    assert set(TINY_MODELS) == set(tiny.TINY_MODELS)


def test_a_trial_compares_with_the_engines_own_attention() -> None:
    arguments = ["engines", "try", "transformers", "--model", "llama-3-tiny", "--tokens", "2", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--cache", "bf16,fp8_e4m3fn"])
    assert result.exit_code == 0, result.output
    own, exact, narrow = json.loads(result.stdout)["trials"]
    assert own["calls"] == {}
    # Two layers: a prompt and one step after it.
    assert exact["calls"] == narrow["calls"] == {"append": 4, "batch_prefill": 2, "paged_decode": 2}
    assert exact["difference"] < 0.1
    assert exact["difference"] < narrow["difference"] < 1
    assert set(narrow["spent"]) == set(narrow["calls"])


def test_an_engine_that_is_not_installed_is_unsupported_here(monkeypatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr("narrowkv.cli.engines.try_engine", missing)
    result = CliRunner().invoke(app, ["engines", "try", "vllm"])
    assert result.exit_code == 3
    assert "vllm" in result.stderr


def test_a_model_that_an_engine_does_not_run_is_unsupported_here() -> None:
    result = CliRunner().invoke(app, ["engines", "try", "sglang", "--model", "deepseek-v4-tiny"])
    assert result.exit_code == 3
    assert "try it in transformers" in result.stderr

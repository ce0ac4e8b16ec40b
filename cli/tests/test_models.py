"""`narrowkv probe models`: a row for each model, and why a call is not exact."""

from __future__ import annotations

from typing import Any

import pytest
from cli_support import document, narrowkv

from narrowkv.cli import probe
from narrowkv.testing.models import EXACT, REFUSED, WRONG, Model, ModelAnswer, ModelTask, Need

CPU = "--on cpu --jobs 1"
SMALL = "head_dim=64,kv_heads={kv},ratio={ratio},lens=33+5"
TWO = (
    Model("small-one", "8/2, head_dim 64", "a test", (Need("decode", "decode", SMALL, 8, 2),)),
    Model(
        "small-two", "8/2, odd", "a test",
        (
            Need("decode", "decode", SMALL, 8, 2),
            Need("decode", "decode, 1024 wide", "head_dim=1024,kv_heads={kv},ratio={ratio},lens=5", 8, 2),
            Need("levitation", "levitation", ""),
        ),
        unsure="its number of wings", beside="two layers of another kind",
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MODELS", TWO)


def test_a_row_for_each_model_and_the_reasons() -> None:
    shown = narrowkv(f"probe models {CPU}").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "small-one 8/2, head_dim 64 1/1 1/1 1/1 1/1" in lines
    assert "small-two 8/2, odd 1/3 1/3 1/3 1/3" in lines
    assert any(line.startswith("refused: small-two (decode, 1024 wide): head_dim must be") for line in lines)
    assert "refused: small-two (levitation): narrowkv has no operation levitation" in lines
    assert "not checked: small-two: its number of wings" in lines
    assert "not attention over a cache: small-two: two layers of another kind" in lines
    assert "probe models --full" in shown


def test_the_document_has_a_row_for_each_call_and_number_of_ranks() -> None:
    found = document(f"probe models --full {CPU}")
    assert found["set"] == "models"
    assert [model["name"] for model in found["models"]] == ["small-one", "small-two"]
    rows = found["rows"]
    assert len(rows) == 4 * 4
    ours = [row for row in rows if row["model"] == "small-one"]
    assert [row["ranks"] for row in ours] == [1, 2, 4, 8]
    assert [row["line"].split(",")[1:3] for row in ours] == [
        ["kv_heads=2", "ratio=4"], ["kv_heads=1", "ratio=4"], ["kv_heads=1", "ratio=2"],
        ["kv_heads=1", "ratio=1"],
    ]  # fmt: skip
    assert all(row["status"] == EXACT and 0 < row["relative_l1"] < 0.002 for row in ours)
    assert {row["status"] for row in rows if row["call"] == "levitation"} == {REFUSED}


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(task: ModelTask) -> ModelAnswer:
        return ModelAnswer(WRONG, "far off", 0.5)

    monkeypatch.setattr(probe, "answer", wrong)
    found: dict[str, Any] = document(f"probe models {CPU}", ends=1)
    assert {row["status"] for row in found["rows"]} == {WRONG}


def test_options_of_contract_sets_are_refused() -> None:
    result = narrowkv("probe models --target gfx942", ends=2)
    assert "--target does not apply to models" in result.stderr

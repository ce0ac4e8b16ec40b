"""`validate prefill` and `inspect prefill`: cases, small runs, what must fail, what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.attn_prefill import cases as prefill_cases
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.cli.app import app
from narrowkv.runtime.cases import parse_case
from narrowkv.testing.checking import run_case
from narrowkv.testing.kinds import PREFILL

run = CliRunner().invoke
APPEND = "operation=append,q_lens=3+9,lens=20+30"
VALIDATE = ["validate", "prefill", "--on", "cpu", "--jobs", "1"]


def test_a_line_that_is_no_case_ends_with_2() -> None:
    result = run(app, [*VALIDATE, "--case", "page=3"])
    assert result.exit_code == 2
    assert "--case a name (page=3)" in result.stderr
    assert "nearest: page_size" in result.stderr


@pytest.mark.parametrize(
    ("fmt", "part", "name"), [("fp8_e4m3fn", "k", "k"), ("fp4_e2m1", "v_descale", "v_descale")]
)
def test_one_wrongly_stored_byte_fails_an_append(
    fmt: str, part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = prefill_cases.prefill_append

    def wrong(*arguments: Any, **options: Any) -> Any:
        results = right(*arguments, **options)
        stored = getattr(arguments[3], part).view(torch.uint8).flatten()
        stored[-1] ^= 1
        return results

    monkeypatch.setattr(prefill_cases, "prefill_append", wrong)
    result = run_case(parse_case(PREFILL.case, f"{APPEND},format={fmt}"))
    assert not result.passed
    assert result.detail == f"1 bytes of {name} stored wrongly"


def test_a_sweep_asks_each_place_for_its_own_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (
        PrefillCase(q_lens=(3,), lens=(9,)),
        parse_case(PREFILL.case, "q=fp8_e4m3fnuz,format=fp8_e4m3fnuz"),
    )
    monkeypatch.setattr(prefill_cases, "quick", lambda: iter(few))
    result = run(app, ["validate", "prefill", "--on", "cpu,gfx950", "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    ran = [(case["place"], case["case"]) for case in document["cases"]]
    assert ran == [("cpu", str(few[0])), ("cpu", str(few[1])), ("gfx950", str(few[0]))]


def test_inspect_shows_registers_and_the_share_of_matrix_instructions() -> None:
    line = "q=fp8_e4m3fn,q_lens=64,lens=256,clean=1"
    result = run(app, ["inspect", "prefill", "--target", "gfx950", "--case", line, "--no-model", "--json"])
    assert result.exit_code == 0, result.stderr
    (inspection,) = json.loads(result.stdout)["inspections"]
    widens, kernel = inspection["kernels"]
    assert widens["spills"] == widens["scratch_bytes"] == 0
    assert kernel["spills"] == kernel["scratch_bytes"] == 0
    assert any("fp8" in name or "f8f6f4" in name for name in kernel["mfma"])
    assert 0 < kernel["matrix_share"] < 1

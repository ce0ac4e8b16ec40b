"""`probe sage`, `validate sage`, `bench sage`, `inspect sage`: small runs, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.sage import cases
from narrowkv.sage.cases import SageCase, shipped, sweep
from narrowkv.testing.checking import CaseTask, run_task
from narrowkv.testing.contracts import CONTRACT_SETS, ContractSet, Shape

run = CliRunner().invoke
TOKENS: dict[str, Any] = {"q_lens": (130,), "k_lens": (130,), "gqa_ratio": 1}


def ask(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = run(app, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_probe_asks_every_precision(add_set: Any) -> None:
    chosen = CONTRACT_SETS["sage"]
    small = Shape(batch=1, q_len=70, context=70, num_qo_heads=2, num_kv_heads=1, head_dim=64)
    add_set(ContractSet(chosen.name, chosen.title, small, chosen.contracts))
    code, document = ask("probe", "sage", "--on", "cpu", "--jobs", "1")
    own = [row for row in document["rows"] if row["backend"] == "narrowkv"]
    assert code == 0
    assert [row["contract"]["q"] for row in own] == ["int8", "int4", "fp8_e4m3fn"]
    assert all(row["status"] == "pass" and 0 < row["relative_l1"] < cases.BOUND for row in own)
    for row in own:
        for target in ("gfx942", "gfx950"):
            (main,) = (k for k in row["compiled"][target]["kernels"] if k["name"] == "_sage_attention_kernel")
            assert main["spills"] == main["scratch_bytes"] == 0
            assert main["mfma"]


def test_one_shape_is_validated_and_misspelled_ones_are_refused() -> None:
    asked = ["validate", "sage", "--on", "cpu", "--jobs", "1", "--precision", "fp8"]
    code, document = ask(*asked, "--granularity", "per_thread", "--shape", "b=1,h=2,kv=1,s=70,d=64")
    assert code == 0
    assert document["passed"] == document["planned"] == 3
    assert all(case["kernel_l1"] < cases.BOUND for case in document["cases"])
    for shape, wrong in (
        ("b=1,h=2,s=70", "must name d"),
        ("b=1,h=3,kv=2,s=70,d=64", "2 KV heads, got 3"),
        ("1x2x70x64", "got '1x2x70x64'"),
        ("b=1,h=0,s=70,d=64", "got 'h=0'"),
    ):
        with pytest.raises(ValueError, match=wrong):
            cases.one_shape(shape)
    found = run(app, [*asked, "--shape", "b=1,h=2,s=70,d=64", "--granularity", "per_page"])
    assert found.exit_code == 2
    assert "--granularity must be one of" in found.output
    assert run(app, asked).exit_code == 2  # a precision of no shape


def test_validate_shows_every_granularity_beside_the_published_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = [
        SageCase.small(qk_dtype="int4", granularity=granularity, smooth_q=True, data="offset", **TOKENS)
        for granularity in ("per_tensor", "per_thread")
    ]
    monkeypatch.setattr(cases, "sweep", lambda **_: small)
    _, document = ask("validate", "sage", "--on", "cpu", "--jobs", "1")
    assert document["operation"] == "sage_attention"
    assert document["published"]["per_thread"] == [0.9945, 0.062, 0.031]
    coarse, fine = document["cases"]
    assert coarse["kernel_l1"] < cases.BOUND
    assert fine["total"]["relative_l1"] < coarse["total"]["relative_l1"]


def test_a_result_worse_than_published_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SageCase.small(qk_dtype="int4", smooth_q=True, data="offset", **TOKENS)
    monkeypatch.setitem(cases.PUBLISHED, "per_thread", (0.99999, 0.001, 0.001))
    monkeypatch.setattr(cases, "sweep", lambda **_: [case])
    code, document = ask("validate", "sage", "--on", "cpu", "--jobs", "1")
    assert code == 1
    assert "worse than published" in document["cases"][0]["detail"]


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.sage_attention

    def wrong(*arguments: Any, **options: Any) -> Any:
        o, lse = right(*arguments, **options)
        return o * 1.05, lse + 0.01

    monkeypatch.setattr(cases, "sage_attention", wrong)
    result = run_task(CaseTask(SageCase.small(), "cpu"))
    assert not result.passed
    assert "kernel error" in result.detail
    assert "lse differs" in result.detail


def test_the_sweep_covers_the_contract() -> None:
    quick, full = sweep(), sweep(full=True)
    assert len(quick) == len(set(quick)) == 3 * 4 * 3
    assert {case.data for case in full} == {"offset", "outlier", "gaussian"}
    assert {case.smoothing for case in quick} == {"none", "K", "K and Q"}
    assert {case.published for case in quick} == {None, *cases.PUBLISHED.values()}


def test_inspect_shows_every_shipped_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(shipped()) == 2 * 3 * 4
    monkeypatch.setattr(cases, "shipped", lambda: [SageCase(q_lens=(256,), k_lens=(256,))])
    code, document = ask("inspect", "sage", "--target", "gfx950", "--no-model")
    assert code == 0
    (found,) = document["inspections"]
    assert "fp8_e4m3fn" in found["plan"]
    assert found["kernels"][-1]["mfma"] == {"v_mfma_i32_32x32x32_i8": 8, "v_mfma_f32_32x32x64_f8f6f4": 4}


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "sage", "--qk", "int2"],
        ["bench", "sage", "--granularity", "per_row"],
        ["bench", "sage", "--context", "many"],
        ["bench", "sparse", "--mode", "best"],
        ["bench", "sparse", "--tokens", "0"],
        ["validate", "sage", "--case", "tokens=3"],
        ["validate", "sausage"],
        ["inspect", "sausage"],
    ],
    ids=" ".join,
)
def test_what_is_not_known_is_a_usage_error(arguments: list[str]) -> None:
    assert run(app, arguments).exit_code == 2

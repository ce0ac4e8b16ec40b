"""`validate prefill` and `inspect prefill`: cases, small runs, what must fail, what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.places import find_place
from narrowkv.cli.prefill import cases as prefill_cases
from narrowkv.cli.prefill.cases import (
    OF_APPEND,
    OF_BOTH,
    OF_PREFILL,
    PrefillCall,
    PrefillCase,
    build,
    can_be,
    full,
    quick,
    serves,
    sweep,
)
from narrowkv.cli.prefill.inspection import FORMATS, HEAD_DIMS, shipped_cases
from narrowkv.cli.report import UsageError
from narrowkv.runtime.targets import get_target

run = CliRunner().invoke
APPEND = "operation=append,q_lens=3+9,lens=20+30"
FEW = ["--case", "q_lens=3,lens=20", "--case", f"{APPEND},format=fp4_e2m1", "--case", "q=fp8_e4m3fn"]
VALIDATE = ["validate", "prefill", "--on", "cpu", "--jobs", "1"]


@pytest.mark.parametrize("case", [*list(quick())[::9], *list(full())[::61]], ids=str)
def test_a_case_survives_its_own_line(case: PrefillCase) -> None:
    assert PrefillCase.parse(str(case)) == case


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("operation=decode", "operation must be one of prefill, append"),
        ("kernel=append_then_attend", "kernel must be one of empty, dense, fused, decode"),
        (
            "operation=append,kernel=dense",
            "kernel must be one of empty, append_then_attend, pipelined, fused",
        ),
        ("layout=NDH", "layout"),
        ("q=fp32", "q must be one of"),
        ("lens=2+x+1", "lens must be numbers"),
        ("q_lens=2+1", "a number for each sequence"),
        ("operation=append,q_lens=5,lens=4", "count an append's new tokens"),
        ("operation=append,q=fp8_e4m3fn", "q=fp8_e4m3fn is not of operation append"),
        ("operation=append,table=ragged", "table=ragged is not of operation append"),
        ("rope=neox", "rope=neox is not of operation prefill"),
        ("fp8_compute=1", "fp8_compute=True is not of operation prefill"),
        ("format=int8", "format"),
        ("format=bf16:32", "only FP4 has scales"),
        ("page=3", "nearest: page_size"),
        ("page_size", "name=value pairs"),
    ],
)
def test_a_line_that_is_no_case_is_refused(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PrefillCase.parse(line)
    assert run(app, [*VALIDATE, "--case", line]).exit_code == 2


def test_the_sweep_meets_every_value_of_every_axis_with_each_kernel() -> None:
    cases = sweep(find_place("cpu"), everything=False)
    assert len(set(cases)) == len(cases)
    for kernel, own in (
        *(("dense", OF_PREFILL), ("fused", OF_PREFILL)),
        *((kernel, OF_APPEND) for kernel in ("append_then_attend", "fused")),
    ):
        operation = "prefill" if own is OF_PREFILL else "append"
        of_kernel = {case for case in cases if case.kernel == kernel and case.operation == operation}
        for change in (*OF_BOTH, *own):
            wanted = replace(PrefillCase(operation=operation, kernel=kernel), **change)
            assert wanted in of_kernel or not can_be(wanted), wanted
    assert any(case.fp8_compute for case in cases)
    assert {case.q for case in cases} == set(prefill_cases.QUERIES)
    assert len(sweep(find_place("cpu"), everything=True)) > 2 * len(cases)


@pytest.mark.parametrize(("target", "units"), [("gfx942", 2), ("gfx950", 1), ("sm90", 1), ("cpu", 2)])
def test_a_target_is_asked_for_what_it_has(target: str, units: int) -> None:
    """An OCP cache feeds gfx942's FNUZ units; no other target multiplies both kinds."""
    served = [case for case in quick() if serves(case, get_target(target))]
    assert len({case.fp8_unit for case in served} - {""}) == units
    assert {case for case in quick() if not case.fp8_unit} <= set(served)


def test_the_same_line_builds_the_same_bits() -> None:
    case = PrefillCase.parse(f"{APPEND},rope=gptj,sinks=1")
    one, other = build(case), build(case)
    for a, b in ((one.q, other.q), *zip(one.new, other.new, strict=True), (one.cache.k, other.cache.k)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_validate_passes_and_says_what_it_ran() -> None:
    result = run(app, [*VALIDATE, "--json", *FEW])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["planned"] == document["passed"] == 3
    assert "prefill_append" in document["operation"]
    assert document["bounds"]["relative_l1"] == 0.002
    assert [case["bound"] for case in document["cases"]] == [0.002, 0.002, 0.02]
    assert "3 of 3 cases pass" in result.stderr


def test_a_wrong_kernel_ends_with_1_and_a_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PrefillCall.call

    def wrong(self: PrefillCall) -> Any:
        o, lse = right(self)
        return (o if self.case.appends else o * 1.02), lse

    monkeypatch.setattr(PrefillCall, "call", wrong)
    result = run(app, [*VALIDATE, *FEW[:4]])
    assert result.exit_code == 1
    (line,) = [line.strip() for line in result.stdout.splitlines() if "--case q_lens=3,lens=20" in line]
    assert line.startswith("narrowkv validate prefill ")
    monkeypatch.undo()
    assert run(app, line.split()[1:]).exit_code == 0


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
    case = PrefillCase.parse(f"{APPEND},format={fmt}")
    result = prefill_cases.run(case, find_place("cpu"))
    assert not result.passed
    assert result.detail == f"1 bytes of {name} stored wrongly"


def test_a_sweep_asks_each_place_for_its_own_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (PrefillCase(q_lens="3", lens="9"), PrefillCase.parse("q=fp8_e4m3fnuz,format=fp8_e4m3fnuz"))
    monkeypatch.setattr(prefill_cases, "quick", lambda: iter(few))
    result = run(app, ["validate", "prefill", "--on", "cpu,gfx950", "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    ran = [(case["place"], case["case"]) for case in document["cases"]]
    assert ran == [("cpu", str(few[0])), ("cpu", str(few[1])), ("gfx950", str(few[0]))]


def test_what_is_shipped_covers_kernels_formats_and_fp8_units() -> None:
    for target, units in (("gfx942", {"fp8_e4m3fn", "fp8_e4m3fnuz"}), ("gfx950", {"fp8_e4m3fn"})):
        cases = shipped_cases(target)
        for way in (
            ("prefill", "dense"),
            ("prefill", "fused"),
            ("append", "append_then_attend"),
            ("append", "fused"),
        ):
            own = [case for case in cases if (case.operation, case.kernel) == way]
            shipped = {(case.format, case.head_dim) for case in own}
            assert shipped == {(fmt, head_dim) for fmt in FORMATS for head_dim in HEAD_DIMS}
        assert {case.format for case in cases if case.fp8_compute} == units
        assert {case.q for case in cases} == {"bf16", *units}


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

"""The screen of `probe`: 40 lines of 80 columns whatever the set, the answers and the terminal."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from narrowkv.cli.probe import show_screen
from narrowkv.cli.report import ExitCode, Report
from narrowkv.testing.checking import Sample
from narrowkv.testing.codegen import KernelCode
from narrowkv.testing.operations import PAGED_DECODE as DECODE
from narrowkv.testing.operations import contract_sets
from narrowkv.testing.places import Place
from narrowkv.testing.probing import FAIL, INEXACT, PASS, REFUSED, SKIPPED, Answer, Compiled, ProbeRun

CPU, GPU = Place("cpu", "cpu", "interpreter on the CPU"), Place("gpu", "cuda", "AMD Instinct MI300X (gfx942)")
TARGETS = ("gfx942", "gfx950")
KERNEL = KernelCode("_kernel", 128, 0, 40, 0, 0, 0, 8192, 2, 4, 0, {"v_mfma_f32_16x16x16_f16": 8}, {}, 0.25)
PEERS = {"torch sdpa": None, "aiter": None, "flashinfer": None}
ABSENT = {"torch sdpa": None, "aiter": "not installed", "flashinfer": "not installed"}
MAIN = contract_sets()["glm-gqa12"].contracts
COUNT = len(MAIN)
DECODES = [i for i, contract in enumerate(MAIN) if contract.operation == DECODE]


def seen(name: str = "glm-gqa12", place: Place = CPU, absent: dict[str, Any] = ABSENT) -> ProbeRun:
    """All that a run finds where everything passes; each error tells its cell."""
    chosen = contract_sets()[name]
    answers, compiled = {}, {}
    for i, contract in enumerate(chosen.contracts):
        for j, where in enumerate((place.name, *TARGETS)):
            took = None if j == 0 else Sample(8, 64, 4, 32, 1000, 0.5)
            error = 1e-3 + 1e-5 * i + 1e-4 * j
            answers[i, "narrowkv", where] = Answer(
                contract, "narrowkv", where, PASS, "", where, error, 0.01, 2048.0, sample=took
            )
        for j, (peer, why) in enumerate(absent.items()):
            if why is None and contract.operation == DECODE:
                answers[i, peer, place.name] = Answer(
                    contract, peer, place.name, PASS, "", place.name, 5e-4 + 1e-4 * j, 0.01, 2048.0
                )
        for target in TARGETS:
            modelled = contract.operation == DECODE
            model = {"bound_by": "memory", "issue_over_memory": 0.25 + i / 100} if modelled else None
            compiled[i, target] = Compiled(target, PASS, "", (KERNEL,), model)
    return ProbeRun(chosen, (place,), TARGETS, absent, 2, answers, compiled)


def rendered(found: ProbeRun, width: int = 80, code: ExitCode = ExitCode.OK) -> list[str]:
    report = Report("probe")
    stream = io.StringIO()
    report.human = Console(file=stream, width=width)
    show_screen(report, found, code, full=False)
    return stream.getvalue().splitlines()


def worst(found: ProbeRun, of: Answer) -> str:
    """The largest error of decode over the same cache by the same backend."""
    errors = [
        a.relative_l1
        for (_, b, p), a in found.answers.items()
        if (b, p) == (of.backend, of.place) and a.contract.cache == of.contract.cache
        and a.contract.operation == DECODE
    ]  # fmt: skip
    return f"{max(e for e in errors if e is not None):.2e}"


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200, 100_000])
@pytest.mark.parametrize("name", list(contract_sets()))
@pytest.mark.parametrize("absent", [ABSENT, PEERS], ids=["alone", "all peers"])
def test_the_screen_fits_and_has_every_cell(width: int, name: str, absent: dict[str, Any]) -> None:
    for place in (CPU, GPU):
        found = seen(name, place, absent)
        lines = rendered(found, width)
        text = "\n".join(lines)
        assert len(lines) <= 40
        assert max(map(len, lines)) <= (80 if width in (80, 100_000) else min(width, 120))
        for contract in found.contracts.contracts:
            assert contract.cache in text
            assert f"Q {contract.q}" in text or f", {contract.q}" in text
        for answer in found.answers.values():
            assert answer.contract.operation != DECODE or f"ok {worst(found, answer)}" in text
        count = len(found.contracts.contracts)
        assert f"{count} contracts: {count} pass, 0 fail; 0 s" in text
        assert "gfx942 code no spills" in text
        assert "next" in lines[-3]


def test_the_main_set_says_what_was_tested_and_what_follows() -> None:
    text = "\n".join(rendered(seen()))
    for words in (
        "96 query heads over 8 KV heads (GQA 12)", "batch 4, context 1024", "this CPU", "interpreted",
        "gfx942 code", "torch sdpa", "pages of 1, 16, 64 tokens", "bound 2.0e-03", "bf16 524k",
        f"decode bound by memory, issue 0.25-{0.25 + DECODES[-1] / 100:.2f} of it (model)",
        "aiter, flashinfer: not installed", f"{COUNT} pass, 0 fail", "probe glm-gqa12 --full",
        f"{8 * 2 * COUNT} of {64 * 2 * COUNT} workgroups",
    ):  # fmt: skip
        assert words in text


OWN, PEER = "narrowkv", "torch sdpa"
MANY_REASONS = {
    (i, OWN, "gfx942"): {"status": FAIL, "detail": f"reason {i} " + "of many " * 9} for i in range(COUNT)
}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        pytest.param(
            {(2, OWN, "cpu"): {"status": FAIL, "relative_l1": 0.5, "detail": "too large"}},
            (r"^bf16 .*FAIL 5.00e-01", f"{COUNT - 1} pass, 1 fail", "too large"), id="a large error",
        ),
        pytest.param(
            {(2, OWN, "cpu"): {"status": FAIL, "relative_l1": math.nan}},
            (r"^bf16 .*FAIL nan", f"{COUNT - 1} pass, 1 fail"), id="NaN",
        ),
        pytest.param(
            {(2, OWN, "cpu"): {"status": FAIL, "relative_l1": None, "detail": "fell over"}},
            (r"^bf16 .*FAIL", "fell over"), id="an exception",
        ),
        pytest.param(
            {(2, OWN, "cpu"): {"status": SKIPPED, "detail": "why"}},
            (r"^bf16 .*skipped 1/6", "why"), id="skipped",
        ),
        pytest.param(
            {
                (0, PEER, "cpu"): {"status": REFUSED, "detail": "TypeError: not so"},
                (3, PEER, "cpu"): {"status": INEXACT, "relative_l1": 3e-3},
            },
            ("refused 1/6", "torch sdpa: TypeError: not so", "over 3.00e-03", f"{COUNT} pass, 0 fail"),
            id="peers do not decide",
        ),
        pytest.param(
            MANY_REASONS,
            ("more reasons: see --full", f"{COUNT} contracts: 0 pass, {COUNT} fail"), id="many reasons",
        ),
    ],
)  # fmt: skip
def test_a_cell_shows_the_worst_of_its_contracts(changes: dict[Any, Any], shown: tuple[str, ...]) -> None:
    found = seen()
    answers = {key: replace(found.answers[key], **values) for key, values in changes.items()}
    lines = rendered(replace(found, answers={**found.answers, **answers}))
    assert len(lines) <= 40
    for words in shown:
        assert re.search(words, "\n".join(lines), re.MULTILINE), words


def test_code_that_spills_fails_its_cell_and_says_how_much() -> None:
    found = seen()
    spilling = (replace(KERNEL, spills=7, scratch_bytes=32),)
    bad = {(4, "gfx950"): Compiled("gfx950", FAIL, "_kernel spills 7 registers", spilling)}
    text = "\n".join(rendered(replace(found, compiled={**found.compiled, **bad}), code=ExitCode.NUMERICAL))
    for words in (
        f"1 of {COUNT} calls spill: 7 registers, 32 bytes of scratch", "FAIL", "_kernel spills 7 registers",
        f"{COUNT - 1} pass, 1 fail",
    ):  # fmt: skip
        assert words in text


def test_a_run_that_was_cut_short_says_what_was_not_run() -> None:
    found = seen()
    kept = {key: a for key, a in found.answers.items() if key[0] < 2}
    code = {key: c for key, c in found.compiled.items() if key[0] < 1}
    text = "\n".join(rendered(replace(found, answers=kept, compiled=code)))
    assert "not run 4/6" in text
    assert f"2 pass, 0 fail, {COUNT - 2} not run" in text or f"1 pass, 0 fail, {COUNT - 1} not run" in text
    nothing = "\n".join(rendered(replace(found, answers={}, compiled={})))
    assert f"{COUNT} not run" in nothing
    assert "interrupted before it was compiled" in nothing


def test_without_targets_or_an_emulator_the_columns_say_so() -> None:
    found = seen()
    own = {key: a for key, a in found.answers.items() if key[2] == "cpu"}
    lines = rendered(replace(found, answers=own))
    assert "compiled" in lines[4]
    assert any("ok compiled" in line for line in lines)
    assert not any("gfx942" in line for line in rendered(replace(found, answers=own, targets=()))[:-3])


def test_capacity_is_beside_bf16_even_where_it_was_not_asked() -> None:
    found = seen("prefill-append")
    only = replace(found.contracts, contracts=found.contracts.contracts[:1])
    answers = {key: answer for key, answer in found.answers.items() if key[0] == 0}
    lines = rendered(replace(found, contracts=only, answers=answers, compiled={}))
    assert any("fp8_e4m3fn 524k (2.00x)  beside bf16" in line for line in lines)


@pytest.mark.parametrize(
    ("by_issue", "words"),
    [
        (8, f"bound by memory in {len(DECODES) - 8}/{len(DECODES)}"),
        (len(DECODES), "decode bound by issue"),
    ],
    ids=["some", "all"],
)
def test_the_code_of_a_target_is_one_line_whatever_bounds_it(by_issue: int, words: str) -> None:
    found = seen()
    model = {"bound_by": "issue", "issue_over_memory": 1.07}
    slow = {(i, "gfx950"): replace(found.compiled[i, "gfx950"], model=model) for i in DECODES[:by_issue]}
    lines = rendered(replace(found, compiled={**found.compiled, **slow}))
    (line,) = (line for line in lines if line.startswith("gfx950 code"))
    assert words in line
    assert line.endswith("of it (model)")

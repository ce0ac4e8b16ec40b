"""Steps of serving traffic: lengths, reproducibility, and what a rehearsal keeps."""

from __future__ import annotations

import statistics

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill_reference
from narrowkv.quant.accuracy import compare
from narrowkv.testing.bench.traffic import (
    FORCED,
    LONGEST,
    SHORTEST,
    LayerStep,
    choices_bench,
    grid,
    serving_steps,
    step_tensors,
)
from narrowkv.testing.words import SERVED_MODELS, TRAFFIC


def test_the_same_seed_gives_the_same_lengths_whatever_else_is_asked_for() -> None:
    (one,) = serving_steps(["glm-4.5"], ["decode"], [64], ["bf16"], seed=3)
    many = serving_steps(["llama-8b", "glm-4.5"], TRAFFIC, [16, 64], ["fp8_e4m3fn", "bf16"], seed=3)
    assert one in many
    assert one.lens != serving_steps(["glm-4.5"], ["decode"], [64], ["bf16"], seed=4)[0].lens


def test_lengths_are_lognormal_within_their_bounds() -> None:
    (step,) = serving_steps(["llama-8b"], ["decode"], [2000], ["bf16"])
    old = [n - 1 for n in step.lens]
    assert SHORTEST <= min(old) < 150
    assert 30_000 < max(old) <= LONGEST
    assert 1800 < statistics.median(old) < 2200


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_each_kind_of_step_has_the_new_tokens_that_it_is_named_after(traffic: str) -> None:
    steps = serving_steps(list(SERVED_MODELS), [traffic], [1, 64, 256], ["fp8_e4m3fn"])
    for step in steps:
        assert all(0 < new <= full for new, full in zip(step.q_lens, step.lens, strict=True))
        few = [new for new in step.q_lens if new <= 16]
        if traffic == "decode":
            assert set(step.q_lens) == {1}
        elif traffic == "speculative":
            assert len(set(few)) == 1
            assert few[0] >= 2
        elif len(step.lens) > 4:
            assert 1 <= len(step.lens) - len(few) <= 4, "chunks of prompts"
            assert set(few) == ({1} if traffic == "mixed" else {1, 5})
    assert {step.appends for step in steps} == ({False, True} if traffic.endswith("mixed") else {False})


@pytest.mark.parametrize("step", [s for s in grid() if s.model == "glm-4.5"], ids=str)
def test_a_rehearsal_keeps_the_kind_of_step(step: LayerStep) -> None:
    small = step.rehearsal()
    assert 0 < len(small.lens) <= 4
    assert max(small.lens) < 3000
    assert (max(small.q_lens) > 16) == (max(step.q_lens) > 16)
    assert set(small.q_lens) & {1} == set(step.q_lens) & {1}


@pytest.mark.parametrize("appends", [False, True])
def test_the_expected_rows_are_those_of_the_reference(appends: bool) -> None:
    step = LayerStep("llama-70b-tp8", "mixed", (1, 40, 3), (30, 45, 9), "fp8_e4m3fn", appends=appends)
    inputs = step_tensors("cpu")(step)
    out = torch.empty_like(inputs.q)
    o = (inputs.prefill_append if appends else inputs.batch_prefill)(out)()
    error = inputs.error()
    assert 0 < error(o) < 0.002
    for row in (0, 1, 40, 41):
        wrong = o.clone()
        wrong[row] += 1.0
        assert error(wrong) > 0.01, row
    if not appends:
        expected = batch_prefill_reference(inputs.q, inputs.cache, inputs.table, inputs.starts)
        assert isinstance(expected, torch.Tensor)
        assert compare(o, expected).relative_l1 < 0.002


def test_every_forced_choice_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, choices in FORCED.items():
        few = tuple(forced for forced in choices if forced.get("num_splits") in (None, 4))
        monkeypatch.setitem(FORCED, name, few)
    for step in (
        LayerStep("llama-70b-tp8", "mixed", (1, 1, 20), (30, 9, 40)),
        LayerStep("llama-70b-tp8", "mixed", (1, 1, 20), (30, 9, 40), appends=True),
        LayerStep("llama-70b-tp8", "speculative", (2, 2), (30, 9), capacity=64),
    ):
        rows = choices_bench("cpu").rehearse(step)
        assert [row.detail for row in rows if row.status != "pass"] == []
        calls = {row.labels["call"] for row in rows}
        assert calls == (
            {"prefill_append"}
            if step.appends
            else {"batch_prefill", "two_calls" if step.traffic == "mixed" else "paged_decode"}
        )
        assert len(rows) >= 5

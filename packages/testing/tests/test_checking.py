"""A check passes right results and says what is wrong with others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.testing.cases import latent, sparse
from narrowkv.testing.cases.decode import BOUND, DecodeCase
from narrowkv.testing.cases.latent import LatentCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.checking import check, run_case

SMALL = DecodeCase(lens=(20, 3), gqa_ratio=3, head_dim=64)


def test_a_right_answer_passes() -> None:
    result = run_case(SMALL)
    assert result.passed, result.detail
    assert result.error is not None
    assert 0 < result.error.relative_l1 <= BOUND


def test_the_bound_grows_only_where_rounding_the_exact_result_already_passes_it() -> None:
    inputs = SMALL.inputs()
    exact, lse = inputs.reference()
    usual = check(SMALL, inputs, (exact.bfloat16(), lse))
    assert usual.passed
    assert usual.bound == BOUND
    # With a bound below bf16's own rounding, only the rounding itself gets through.
    strict = check(SMALL, inputs, (exact.bfloat16(), lse), bound=1e-4)
    assert strict.passed
    assert usual.error is not None
    assert strict.bound == pytest.approx(usual.error.relative_l1 + 1e-5)
    assert not check(SMALL, inputs, ((exact * 1.002).bfloat16(), lse), bound=1e-4).passed


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda o, lse: (o * 1.01, lse), "relL1"),
        (lambda o, lse: (o, lse + 0.01), "lse"),
        (lambda o, lse: (o.index_fill(0, torch.tensor([1]), float("nan")), lse), "not finite"),
        (lambda o, lse: (o, lse.index_fill(0, torch.tensor([0]), float("nan"))), "lse"),
        (lambda o, lse: (torch.zeros_like(o), lse), "relL1"),
    ],
)
def test_a_wrong_answer_fails_and_says_why(spoil: object, words: str) -> None:
    inputs = SMALL.inputs()
    result = check(SMALL, inputs, spoil(*inputs.reference()))  # type: ignore[operator]
    assert not result.passed
    assert words in result.detail


@pytest.mark.parametrize(
    "case", [DecodeCase.small(batch_invariant=True), PrefillCase.small(batch_invariant=True)]
)
def test_a_batch_invariant_case_has_such_a_plan(case: Any) -> None:
    assert case.inputs().plan().batch_invariant


@pytest.mark.parametrize(
    ("case", "where", "name"),
    [
        (SparseCase.small(mode="decode", splits=0, batch_invariant=True), sparse, "sparse_decode"),
        (LatentCase(batch_invariant=True), latent, "latent_decode"),
    ],
)
def test_a_batch_invariant_case_makes_such_a_call(
    case: Any, where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(where, name, lambda *_, **options: given.update(options))
    case.inputs().call()
    assert (given["batch_invariant"], given["num_splits"]) == (True, None)

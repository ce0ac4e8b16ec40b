"""Sparse attention's cases: a case is its line, and sweeps meet every axis."""

from __future__ import annotations

import pytest
import torch

from narrowkv.runtime.cases import CaseError, parse_case, spell_case
from narrowkv.sparse_fp8.cases import AXES, SparseCase, full, quick, shipped, sweep


@pytest.mark.parametrize("case", [*quick(), *list(full())[::31]], ids=str)
def test_a_case_survives_its_own_line(case: SparseCase) -> None:
    assert parse_case(SparseCase, spell_case(case)) == case


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mode=fast", "mode"),
        ("layout=NHD", "layout"),
        ("q=fp32", "q"),
        ("lens=2+x", "lens"),
        ("page=3", "page"),
    ],
)
def test_a_line_that_is_no_case_is_refused(line: str, words: str) -> None:
    with pytest.raises(CaseError, match=words):
        parse_case(SparseCase, line)


def test_the_sweep_meets_every_value_of_every_axis() -> None:
    cases = sweep()
    assert len(set(cases)) == len(cases)
    for name, values in AXES.items():
        assert {getattr(case, name) for case in cases} >= set(values)
    assert len(sweep(everything=True)) > 4 * len(cases)


def test_the_same_line_builds_the_same_bits() -> None:
    one, other = SparseCase(q="fp8").inputs(), SparseCase(q="fp8").inputs()
    assert isinstance(one.q, type(other.q))
    assert torch.equal(one.q.data.view(torch.uint8), other.q.data.view(torch.uint8))
    assert one.tensors.prefix is not None
    assert other.tensors.prefix is not None
    assert torch.equal(one.tensors.prefix.indices, other.tensors.prefix.indices)


def test_what_is_shipped_covers_heads_formats_and_ways() -> None:
    cases = shipped()
    assert {case.num_qo_heads for case in cases} == {16, 32, 64}
    assert {case.mode for case in cases} == {"16bit", "fused", "prepass", "decode"}
    v4, others = {"split", "packed584", "row512"}, {"packed528", "packed288", "record656", "record352"}
    assert {case.layout for case in cases} == {"bf16", *v4, *others}
    assert {case.q for case in cases} == {"bf16", "fp16", "fp8"}
    assert {case.format for case in cases} == {"fp8_e4m3fn", "fp8_e4m3fnuz"}
    assert {case.clean for case in cases} == {True, False}
    assert all(case.extend_lens for case in cases)

"""Sparse attention's cases: sweeps meet every axis."""

from __future__ import annotations

from narrowkv.testing.cases.sparse import AXES, shipped, sweep


def test_the_sweep_meets_every_value_of_every_axis() -> None:
    cases = sweep()
    assert len(set(cases)) == len(cases)
    for name, values in AXES.items():
        assert {getattr(case, name) for case in cases} >= set(values)
    assert len(sweep(everything=True)) > 4 * len(cases)


def test_what_is_shipped_covers_heads_formats_and_ways() -> None:
    cases = shipped()
    assert {case.num_qo_heads for case in cases} == {16, 32, 64}
    assert {case.mode for case in cases} == {"16bit", "fused", "prepass", "decode"}
    v4, others = {"split", "packed584", "row512"}, {"packed528", "packed288", "record656", "record352"}
    others.add("split512")
    assert {case.layout for case in cases} == {"bf16", *v4, *others}
    assert {case.q for case in cases} == {"bf16", "fp16", "fp8"}
    assert {case.format for case in cases} == {"fp8_e4m3fn", "fp8_e4m3fnuz"}
    assert {case.clean for case in cases} == {True, False}
    assert all(case.extend_lens for case in cases)

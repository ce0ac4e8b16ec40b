"""Samples of a product: every value of every axis, and the same cases each time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from narrowkv.testing.covering import covering, values_of


def test_every_value_is_in_a_sample_much_smaller_than_the_product() -> None:
    cases = [
        values_of("a", a) | values_of("b", b) | values_of("c", c)
        for a, b, c in product(range(6), "xyz", (True, False))
    ]
    chosen = covering(cases)
    assert frozenset().union(*(cases[i] for i in chosen)) == frozenset().union(*cases)
    assert len(chosen) == 6
    assert chosen == covering(cases)
    assert len({tuple(covering(cases, seed)) for seed in range(5)}) > 1
    assert {3, 4} <= set(covering(cases, always=[3, 4]))


def test_fields_of_a_dataclass_are_axes_of_their_own() -> None:
    @dataclass(frozen=True)
    class Inner:
        size: int

    @dataclass(frozen=True)
    class Case:
        mask: str
        inner: Inner

    assert values_of("case", Case("causal", Inner(3))) == {
        ("case.mask", "'causal'"),
        ("case.inner.size", "3"),
    }


def test_nothing_is_covered_by_nothing() -> None:
    assert covering([]) == []


def test_no_more_cases_than_asked_for_and_those_with_the_most_values_first() -> None:
    cases = [frozenset(each) for each in ("a", "abc", "de", "f")]
    assert covering(cases) == [1, 2, 3]
    assert covering(cases, most=2) == [1, 2]
    assert covering(cases, always=[3, 0], most=1) == [0, 3]

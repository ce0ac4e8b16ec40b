"""A case is its line, and its inputs show what a kernel gets wrong."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowkv.cli.cases import DecodeCase, build, check
from narrowkv.cli.report import UsageError
from narrowkv.cli.validate import AXES, at_random, mended, one_at_a_time, sweep

BOUND = 0.002
SMALL = DecodeCase(lens="20+3", ratio=3, head_dim=64, kv_heads=2)


@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in AXES.items()}),
    st.integers(0, 2**31),
)
def test_a_case_survives_its_own_line(values: dict[str, object], seed: int) -> None:
    case = DecodeCase(**values, seed=seed)  # type: ignore[arg-type]
    assert DecodeCase.parse(str(case)) == case
    assert " " not in str(case)


def test_an_empty_line_is_the_default() -> None:
    assert DecodeCase.parse("") == DecodeCase()
    assert DecodeCase.parse(str(DecodeCase())) == DecodeCase()
    assert DecodeCase.parse("lens=").batch == 0


def test_the_same_line_builds_the_same_bits() -> None:
    first, second = build(SMALL), build(SMALL)
    assert torch.equal(first.q, second.q)
    assert torch.equal(first.cache.k.view(torch.uint8), second.cache.k.view(torch.uint8))
    assert torch.equal(first.table.page_ids, second.table.page_ids)
    other = build(replace(SMALL, seed=1))
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize("layout", ["HND", "tokens", "concat", "vectorised", "padded"])
def test_every_layout_holds_the_same_numbers(layout: str) -> None:
    case = replace(SMALL, clean=True, page_size=1 if layout == "tokens" else 16)
    plain, moved = build(case), build(replace(case, layout=layout))
    for expected, got in zip(plain.cache.dequantize(), moved.cache.dequantize(), strict=True):
        assert torch.equal(expected, got)


def test_padded_is_strided_and_starts_off_a_16_byte_boundary() -> None:
    cache = build(replace(SMALL, layout="padded")).cache
    assert not cache.k.is_contiguous()
    assert cache.k.storage_offset() * cache.k.element_size() % 16


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"])
def test_unused_slots_are_nan_and_used_ones_are_not(fmt: str) -> None:
    inputs = build(replace(SMALL, k=fmt, v=fmt, table="ragged"))
    for x in inputs.cache.dequantize():
        assert int(x.isnan().sum()) == x.numel() - (20 + 3) * 2 * 64
    o, _ = inputs.reference()
    assert bool(torch.isfinite(o).all())


def test_a_clean_cache_has_no_nan_and_no_negative_zero() -> None:
    cache = build(replace(SMALL, clean=True)).cache
    assert cache.negative_zero_free
    for stored in (cache.k, cache.v):
        codes = stored.view(torch.uint8)
        assert not bool(((codes == 0x80) | (codes == 0x7F) | (codes == 0xFF)).any())


@pytest.mark.parametrize("descale", ["tensor", "head", "sequence_head", "page_head", "token_head"])
def test_descales_have_their_shape_and_are_not_all_alike(descale: str) -> None:
    inputs = build(replace(SMALL, descale=descale))
    cache = inputs.cache
    shapes = {
        "tensor": (1,),
        "head": (2,),
        "sequence_head": (2, 2),
        "page_head": (cache.num_pages, 2),
        "token_head": (cache.num_pages, 16, 2),
    }
    assert isinstance(cache.k_descale, torch.Tensor)
    assert tuple(cache.k_descale.shape) == shapes[descale]
    assert cache.k_granularity == descale
    assert len(set(cache.k_descale.flatten().tolist())) == cache.k_descale.numel()


def test_a_right_answer_passes() -> None:
    result = check(SMALL, build(SMALL), BOUND)
    assert result.passed, result.detail
    assert result.error is not None
    assert 0 < result.error.relative_l1 <= BOUND


def test_the_bound_grows_only_where_rounding_the_exact_result_already_passes_it() -> None:
    inputs = build(SMALL)
    exact, lse = inputs.reference()
    usual = check(SMALL, inputs, BOUND, lambda: (exact.bfloat16(), lse))
    assert usual.passed
    assert usual.bound == BOUND
    # With a bound below bf16's own rounding, only the rounding itself gets through.
    strict = check(SMALL, inputs, 1e-4, lambda: (exact.bfloat16(), lse))
    assert strict.passed
    assert usual.error is not None
    assert strict.bound == pytest.approx(usual.error.relative_l1 + 1e-5)
    assert not check(SMALL, inputs, 1e-4, lambda: ((exact * 1.002).bfloat16(), lse)).passed


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
    inputs = build(SMALL)
    result = check(SMALL, inputs, BOUND, lambda: spoil(*inputs.reference()))  # type: ignore[operator]
    assert not result.passed
    assert words in result.detail


def test_the_sweep_meets_every_value_of_every_axis() -> None:
    cases = sweep(full=False, seed=0)
    for name, values in AXES.items():
        met = {getattr(case, name) for case in cases}
        assert set(values) <= met, name
    assert set(AXES) <= {field.name for field in fields(DecodeCase)}


def test_each_axis_is_also_met_alone() -> None:
    alone = list(one_at_a_time())
    assert DecodeCase(ratio=71) in alone
    assert DecodeCase(page_size=7) in alone
    assert DecodeCase(layout="tokens", page_size=1) in alone
    assert DecodeCase(k="fp8_e4m3fnuz", v="fp8_e4m3fnuz") in alone


def test_the_contracts_own_values_are_in_the_axes() -> None:
    assert {1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 71} <= set(AXES["ratio"])
    assert {64, 80, 96, 128, 192, 256} <= set(AXES["head_dim"])
    assert {1, 3, 7, 16, 48, 64} <= set(AXES["page_size"])


def test_random_cases_can_be_built_and_depend_on_the_seed() -> None:
    cases = list(at_random(60, seed=3))
    assert cases == list(at_random(60, seed=3))
    assert cases != list(at_random(60, seed=4))
    for case in cases:
        assert mended(case) == case
        build(case)


def test_full_is_much_more_than_quick() -> None:
    assert len(sweep(full=True, seed=0)) > 5 * len(sweep(full=False, seed=0))


@pytest.mark.parametrize(
    "line",
    [
        "layout=tokens",
        "layout=vectorised,page_size=7",
        "layout=concat,k=bf16",
        "table=list",
        "descale=row",
        "data=x",
    ],
)
def test_a_case_that_no_cache_can_have_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="--case"):
        build(DecodeCase.parse(line))

"""Decode's cases: their inputs show what a kernel gets wrong, and sweeps meet every axis."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from narrowkv.paged_cache import CacheFormat
from narrowkv.testing.cases import CaseError, each_alone, parse_case
from narrowkv.testing.cases.decode import AXES, DecodeCase, at_random, mended, one_at_a_time, sweep

SMALL = DecodeCase(lens=(20, 3), gqa_ratio=3, head_dim=64, num_kv_heads=2)


def test_each_alone_leaves_out_the_value_of_the_base() -> None:
    axes = {"head_dim": (64, 128), "sinks": (False, True)}
    assert list(each_alone(DecodeCase(), axes)) == [DecodeCase(head_dim=64), DecodeCase(sinks=True)]


@pytest.mark.parametrize("layout", ["HND", "tokens", "concat", "vectorised", "padded"])
def test_every_layout_holds_the_same_numbers(layout: str) -> None:
    case = replace(SMALL, clean=True, page_size=1 if layout == "tokens" else 16)
    plain, moved = case.inputs(), replace(case, layout=layout).inputs()
    for expected, got in zip(plain.cache.dequantize(), moved.cache.dequantize(), strict=True):
        assert torch.equal(expected, got)


def test_padded_is_strided_and_starts_off_a_16_byte_boundary() -> None:
    cache = replace(SMALL, layout="padded").inputs().cache
    assert not cache.k.is_contiguous()
    assert cache.k.storage_offset() * cache.k.element_size() % 16


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"])
def test_unused_slots_are_nan_and_used_ones_are_not(fmt: str) -> None:
    inputs = replace(SMALL, format=fmt, ragged=True).inputs()
    for x in inputs.cache.dequantize():
        assert int(x.isnan().sum()) == x.numel() - (20 + 3) * 2 * 64
    o, _ = inputs.reference()
    assert bool(torch.isfinite(o).all())


def test_a_clean_cache_has_no_nan_and_no_negative_zero() -> None:
    cache = replace(SMALL, clean=True).inputs().cache
    assert cache.negative_zero_free
    for stored in (cache.k, cache.v):
        codes = stored.view(torch.uint8)
        assert not bool(((codes == 0x80) | (codes == 0x7F) | (codes == 0xFF)).any())


@pytest.mark.parametrize("descale", ["tensor", "head", "sequence_head", "page_head", "token_head"])
def test_descales_have_their_shape_and_are_not_all_alike(descale: str) -> None:
    inputs = replace(SMALL, granularity=descale).inputs()
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


def test_the_sweep_meets_every_value_of_every_axis() -> None:
    cases = sweep(full=False, seed=0)
    for name, values in AXES.items():
        met = {getattr(case.formats if name in ("k", "v") else case, name) for case in cases}
        assert set(values) <= met, name
    assert set(AXES) - {"k", "v"} <= {field.name for field in fields(DecodeCase)}


def test_each_axis_is_also_met_alone() -> None:
    expected = [
        {"gqa_ratio": 71}, {"page_size": 7}, {"layout": "tokens", "page_size": 1}, {"format": "fp8_e4m3fnuz"},
        {"format": CacheFormat("fp8_e4m3fn", "bf16")},
    ]  # fmt: skip
    alone = list(one_at_a_time())
    assert all(DecodeCase(**changes) in alone for changes in expected)


def test_the_contracts_own_values_are_in_the_axes() -> None:
    for axis, values in (
        ("gqa_ratio", {1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 71}),
        ("head_dim", {64, 80, 96, 128, 192, 256, 320, 512}),
        ("page_size", {1, 3, 7, 16, 48, 64}),
    ):
        assert values <= set(AXES[axis])


def test_random_cases_can_be_built_and_depend_on_the_seed() -> None:
    cases = list(at_random(60, seed=3))
    assert cases == list(at_random(60, seed=3))
    assert cases != list(at_random(60, seed=4))
    assert all(mended(case) == case for case in cases)
    for case in cases[::4]:
        case.inputs()


def test_full_is_much_more_than_quick() -> None:
    assert len(sweep(full=True, seed=0)) > 5 * len(sweep(full=False, seed=0))


@pytest.mark.parametrize(
    "line", ["layout=tokens", "layout=vectorised,page_size=7", "layout=concat,format=bf16/fp8_e4m3fn"]
)
def test_a_case_that_no_cache_can_have_is_refused(line: str) -> None:
    with pytest.raises(CaseError, match="layout="):
        parse_case(DecodeCase, line).inputs()

"""convert: the bytes that append would have written, in every format and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, append, append_reference
from narrowkv.paged_cache import convert as module
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing.cases.cache import copy_cache, differing_bytes

PAGES, HEADS, DIM = 2, 2, 64
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")
LAYOUTS = [("NHD", 3), ("HND", 5), ("tokens", 1), ("concat", 4), ("vectorised", 16)]
FORMATS = ["bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1", K8V4]


def _filled(format: str, layout: str, page_size: int, device: str, **options: Any) -> PagedKVCache:
    """A cache whose every slot is taken, by ordinary numbers, zeros and outliers."""
    cache = PagedKVCache.empty(
        PAGES, page_size, HEADS, DIM, format=format, layout=layout, device=device, **options
    )
    torch.manual_seed(3)
    new = torch.randn(2, PAGES * page_size, HEADS, DIM, device=device)
    new[:, 1] = 0
    new[0, :, :, ::13] *= 9
    append_reference(cache, new[0], new[1], torch.arange(PAGES * page_size, device=device))
    return cache


CASES = [
    (fmt, layout, size)
    for fmt in FORMATS
    for layout, size in LAYOUTS
    if not (layout == "vectorised" and "fp4" in str(fmt)) and not (layout == "concat" and fmt is K8V4)
]


@pytest.mark.parametrize(("fmt", "layout", "page_size"), CASES, ids=str)
def test_bytes_are_those_that_append_writes(
    fmt: str | CacheFormat, layout: str, page_size: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _filled("bf16", layout, page_size, device)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", page_size * HEADS * DIM)  # a page a chunk
    got = source.convert(fmt, k_descale=0.03, v_descale=0.02)
    want = PagedKVCache.empty(
        PAGES, page_size, HEADS, DIM, format=fmt, layout=layout, device=device, k_descale=0.03, v_descale=0.02
    )
    tokens = [x.flatten(0, 1) for x in source.dequantize()]
    append(want, *tokens, torch.arange(PAGES * page_size, device=device))
    assert not differing_bytes(got, want)
    assert [side.descale for side in got.sides() if isinstance(side.descale, float)] == [
        side.descale for side in want.sides() if isinstance(side.descale, float)
    ]
    assert got.layout == layout
    assert got.negative_zero_free == source.negative_zero_free


@pytest.mark.parametrize("group", [None, 32])
def test_a_layout_and_a_scale_group_may_be_chosen_and_the_source_does_not_change(
    group: int | None, device: str
) -> None:
    source = _filled(
        "fp8_e4m3fn", "vectorised", 16, device, k_descale=0.05, v_descale=torch.tensor([0.1, 0.2])
    )
    before = copy_cache(source)
    got = source.convert("fp4_e2m1", layout="HND", scale_group=group, exponent="ceil")
    assert got.layout == "HND"
    want = PagedKVCache.empty(PAGES, 16, HEADS, DIM, format="fp4_e2m1", layout="HND", scale_group=group)
    tokens = [x.flatten(0, 1).cpu() for x in source.dequantize()]
    append_reference(want, *tokens, torch.arange(PAGES * 16), exponent="ceil")
    for name in ("k", "v", "k_descale", "v_descale"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    assert not differing_bytes(source, before)


def test_fp8_descales_are_a_heads_largest_finite_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    source = PagedKVCache.empty(PAGES, 2, HEADS, DIM, format="bf16", device=device)
    source.k[1, 1, 0, 5], source.k[0, 0, 0, 0] = -896.0, float("inf")
    source.v[0, 0, 1, 9] = 2.0
    got = source.convert("fp8_e4m3fn")
    assert isinstance(got.k_descale, torch.Tensor)
    assert isinstance(got.v_descale, torch.Tensor)
    assert got.k_descale.tolist() == [2.0, 1.0]
    assert got.v_descale.tolist() == pytest.approx([1.0, 2.0 / 448])
    assert float(got.dequantize()[0][1, 1, 0, 5]) == -896.0
    per_token = source.convert("fp8_e4m3fn", k_descale=torch.zeros(PAGES, 2, HEADS, device=device))
    assert isinstance(per_token.k_descale, torch.Tensor)
    assert per_token.k_descale[1, 1].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"])
def test_the_largest_number_of_a_head_becomes_that_of_the_format(fmt: str) -> None:
    source = PagedKVCache.empty(PAGES, 2, HEADS, DIM, format="bf16")
    source.k[1, 1, :, 5] = source.v[0, 1, :, 3] = 3.0
    got = source.convert(fmt)
    expected = pytest.approx([3.0 / get_format(fmt).max_value] * HEADS)
    for descale in (got.k_descale, got.v_descale):
        assert isinstance(descale, torch.Tensor)
        assert descale.tolist() == expected


def test_what_cannot_be_converted_is_refused() -> None:
    source = _filled("bf16", "vectorised", 16, "cpu")
    with pytest.raises(
        UnsupportedError, match="'vectorised' is not defined for fp4_e2m1; layouts that are: NHD"
    ):
        source.convert("fp4_e2m1")
    with pytest.raises(ValueError, match=r"format.k must be one of .*fp4_e2m1, int8, int4; got 'fp4'"):
        source.convert("fp4")
    with pytest.raises(ValueError, match="exponent must be one of mse, floor, ceil"):
        source.convert("fp4_e2m1", layout="NHD", exponent="nearest")
    per_sequence = PagedKVCache.from_tensors(
        source.k, source.v, format="bf16", layout="vectorised",
        k_descale=torch.ones(5, HEADS), v_descale=1.0, k_granularity="sequence_head",
    )  # fmt: skip
    with pytest.raises(ValueError, match="k_descale is per sequence"):
        per_sequence.convert("fp8_e4m3fn")

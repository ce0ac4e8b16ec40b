"""Decode over INT8 and INT4 caches, alone and mixed with others, against the fp32 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.attn_decode.config import DecodeShape
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as

BOUND = 0.002
MIXED = [("int8", "int4"), ("int8", "fp4_e2m1"), ("fp8_e4m3fn", "int4"), ("int4", "bf16"), ("fp16", "int8")]


@pytest.mark.parametrize("granularity", ["float", "token_head"])
@pytest.mark.parametrize("fmt", ["int8", "int4", *(CacheFormat(k, v) for k, v in MIXED)], ids=str)
def test_formats_and_their_mixtures(fmt: str | CacheFormat, granularity: str, device: str) -> None:
    case = DecodeCase.small(lens=(40, 5), format=fmt, granularity=granularity, outliers=True)
    q, cache, table = case.build(device)
    o, lse = paged_decode(q, cache, table, out_dtype=torch.float32, return_lse=True)
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True)
    assert relative_l1(o, expected) <= BOUND
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("target", [None, "gfx942"])
@pytest.mark.parametrize("fmt", ["int4", CacheFormat("int8", "int4")], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 80, "layout": "padded"},
        {"q_len": 4, "gqa_ratio": 17, "window_left": 20},
        {"q_dtype": torch.float16, "logits_soft_cap": 5.0, "split": "uniform"},
        {"page_size": 1, "layout": "tokens", "ragged": True},
    ],
    ids=str,
)
def test_options_sizes_and_layouts(
    changes: dict[str, Any], fmt: str | CacheFormat, target: str | None, device: str
) -> None:
    if target is not None and device != "cpu":
        pytest.skip("kernels of another target run on a CPU only")
    inputs = DecodeCase.small(lens=(40, 5), format=fmt, granularity="token_head", **changes).inputs(device)
    if target is None:
        o, _ = inputs.call()
    else:
        with run_as(target):
            o, _ = inputs.call()
    assert relative_l1(o, inputs.reference()[0]) <= BOUND


@pytest.mark.parametrize("side", ["k_descale", "v_descale"])
def test_a_scale_that_is_nan_spoils_its_own_sequence_only(side: str, device: str) -> None:
    q, cache, table = DecodeCase.small(lens=(20, 5), format="int4").build(device)
    getattr(cache, side)[int(table.page_ids[0, 0]), 3, 0] = torch.nan
    o = paged_decode(q, cache, table, out_dtype=torch.float32)
    half = o.shape[1] // 2
    assert o[0, :half].isnan().all()
    assert o[1].isfinite().all()
    assert o[0, half:].isfinite().all()


def test_zero_points_are_no_part_of_the_scale(device: str) -> None:
    """One value whose code is its zero point, beside one whose is not."""
    q, cache, table = DecodeCase.small(lens=(2,), format="int4", num_kv_heads=1, gqa_ratio=1).build(device)
    page = int(table.page_ids[0, 0])
    cache.v.view(torch.uint8)[page, 0], cache.v.view(torch.uint8)[page, 1] = 0x77, 0xF0
    cache.k[page, :2] = 0
    word = torch.full((), 0.5, device=device).view(torch.int32) | 7
    cache.v_descale[page, :2] = word.view(torch.float32)
    cache.k_descale[page, :2] = 1.0
    o = paged_decode(q, cache, table, out_dtype=torch.float32)
    # Two keys alike: half of 0, and half of (0 - 7) / 2 and (15 - 7) / 2.
    assert o[0, 0, :4].tolist() == [-1.75, 2.0, -1.75, 2.0]


def test_integers_are_refused_by_the_native_kernel() -> None:
    shape = DecodeShape(4, 1, 96, 8, 128, 16, 1024)
    with run_as("gfx950"), pytest.raises(UnsupportedError, match="keys in fp4_e2m1, not int4"):
        plan_decode(shape, "int4", device="cpu", kernel="native")

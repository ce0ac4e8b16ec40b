"""The loop that reads FP4 with scales of groups to registers, on a CPU: plain arithmetic replaces its PTX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.attn_decode.kernels import registers
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant import KeyTransform
from narrowkv.quant import device_fp4_registers as ptx
from narrowkv.quant.accuracy import relative_l1
from narrowkv.quant.device_e4m3 import e4m3_to_fp16
from narrowkv.runtime.launch import interpreter, run_as

BOUND = 0.002


@triton.jit
def _element(words, PLACE: tl.constexpr):
    code = (words >> (4 * PLACE)) & 15
    magnitude = ((code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(code >= 8, -magnitude, magnitude).to(tl.float16)


@triton.jit
def _widen_keys(words, factor):
    return (
        _element(words, 0) * factor, _element(words, 4) * factor,
        _element(words, 1) * factor, _element(words, 5) * factor,
        _element(words, 2) * factor, _element(words, 6) * factor,
        _element(words, 3) * factor, _element(words, 7) * factor,
    )  # fmt: skip


@triton.jit
def _widen_values(a, b, fa, fb):
    return (
        _element(a, 0) * fa, _element(b, 0) * fb, _element(a, 1) * fa, _element(b, 1) * fb,
        _element(a, 2) * fa, _element(b, 2) * fb, _element(a, 3) * fa, _element(b, 3) * fb,
        _element(a, 4) * fa, _element(b, 4) * fb, _element(a, 5) * fa, _element(b, 5) * fb,
        _element(a, 6) * fa, _element(b, 6) * fb, _element(a, 7) * fa, _element(b, 7) * fb,
    )  # fmt: skip


@triton.jit
def _e4m3_pair(pair):
    low, high = pair.to(tl.int32) & 255, (pair.to(tl.int32) >> 8) & 255
    return e4m3_to_fp16(low.to(tl.uint8), False), e4m3_to_fp16(high.to(tl.uint8), False)


@triton.jit
def _same(number):
    return number


@pytest.fixture(autouse=True)
def plain_arithmetic() -> Iterator[None]:
    """The interpreter runs these instead of the functions that are inline PTX."""
    functions: dict[Any, Any] = {
        ptx.widen_keys: _widen_keys,
        ptx.widen_values: _widen_values,
        ptx.e4m3_pair_to_fp16: _e4m3_pair,
        registers.branch: _same,
    }
    with interpreter.replaced(functions):
        yield


def _spoil_unused_scales(cache: PagedKVCache, table: PageTable) -> None:
    """Gives every slot that holds no token the scales NaN and, with E8M0, 2**127."""
    used = torch.zeros(cache.k_descale.shape[:2], dtype=torch.bool)
    for ids, length in zip(table.page_ids.tolist(), table.seq_lens.tolist(), strict=True):
        for token in range(length):
            used[ids[token // cache.page_size], token % cache.page_size] = True
    for scales in (cache.k_descale, cache.v_descale):
        codes = scales.view(torch.uint8)
        codes[~used] = 0x7F if scales.dtype == torch.float8_e4m3fn else 255
        if scales.dtype == torch.uint8:
            codes[~used, ::2] = 254


@pytest.mark.parametrize(
    "options", [{}, {"layout": "HND", "window_left": 40}, {"logits_soft_cap": 5.0}], ids=str
)
@pytest.mark.parametrize(("group", "scale"), [(16, "e4m3"), (32, "e8m0"), (16, "e8m0"), (32, "e4m3")])
def test_operands_hold_the_keys_and_values_that_they_should(
    group: int, scale: str, options: dict[str, Any]
) -> None:
    case = DecodeCase(
        lens=(70, 5, 130), gqa_ratio=12, num_kv_heads=2, head_dim=128, page_size=16, stale_columns=0,
        format="fp4_e2m1", scale_group=group, scale_format=scale, spread=0.5, **options,
    )  # fmt: skip
    q, cache, table = case.build()
    _spoil_unused_scales(cache, table)
    call = {name: options[name] for name in ("window_left", "logits_soft_cap") if name in options}
    with run_as("sm90"):
        plan = plan_decode(q, cache, table)
        one_warp = replace(plan.config.options, num_warps=1)
        plan = replace(plan, config=replace(plan.config, block_n=32, options=one_warp))
        assert any(bound.constexprs["RULES"].registers for bound in plan.kernels(cache))
        o = paged_decode(q, cache, table, plan=plan, out_dtype=torch.float32, **call)
    assert relative_l1(o, paged_decode_reference(q, cache, table, **call)) <= BOUND


@pytest.mark.parametrize(
    "transform",
    [KeyTransform(rotated=True), KeyTransform(balance=torch.full((2, 128), 2.0), rotated=False)],
    ids=["rotation", "balance"],
)
def test_transformed_queries_do_not_take_this_way(transform: KeyTransform) -> None:
    """A lane's share of Q is not in the order in which it is transformed."""
    case = DecodeCase(
        lens=(130,), gqa_ratio=12, num_kv_heads=2, head_dim=128, page_size=16, format="fp4_e2m1",
        scale_group=16, scale_format="e4m3", spread=0.5,
    )  # fmt: skip
    q, cache, table = case.build()
    cache = replace(cache, key_transform=transform)
    with run_as("sm90"):
        kernels = plan_decode(q, cache, table).kernels(cache)
        assert not any(bound.constexprs["RULES"].registers for bound in kernels)

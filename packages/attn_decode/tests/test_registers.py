"""The loop that reads FP4 with scales of groups to registers, on a CPU: plain arithmetic replaces its PTX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.attn_decode.kernels import registers
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant import KeyTransform
from narrowkv.quant import device_fp4_registers as ptx
from narrowkv.quant.accuracy import relative_l1
from narrowkv.quant.device_e4m3 import e4m3_to_fp16
from narrowkv.runtime.launch import interpreter, run_as
from narrowkv.testing.cases.decode import DecodeCase, DecodeInputs
from narrowkv.testing.checking import assert_right

pytestmark = pytest.mark.sampled


@triton.jit
def _element(words, PLACE: tl.constexpr):
    code = (words >> (4 * PLACE)) & 15
    magnitude = ((code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(code >= 8, -magnitude, magnitude).to(tl.float16)


@triton.jit
def _half(bits, PLACE: tl.constexpr):
    return ((bits >> (16 * PLACE)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _widen_keys(words, factor):
    even, odd = _half(factor, 0), _half(factor, 1)
    return (
        _element(words, 0) * even, _element(words, 4) * odd,
        _element(words, 1) * even, _element(words, 5) * odd,
        _element(words, 2) * even, _element(words, 6) * odd,
        _element(words, 3) * even, _element(words, 7) * odd,
    )  # fmt: skip


@triton.jit
def _widen_values(a, b, factors):
    fa, fb = _half(factors, 0), _half(factors, 1)
    return (
        _element(a, 0) * fa, _element(b, 0) * fb, _element(a, 1) * fa, _element(b, 1) * fb,
        _element(a, 2) * fa, _element(b, 2) * fb, _element(a, 3) * fa, _element(b, 3) * fb,
        _element(a, 4) * fa, _element(b, 4) * fb, _element(a, 5) * fa, _element(b, 5) * fb,
        _element(a, 6) * fa, _element(b, 6) * fb, _element(a, 7) * fa, _element(b, 7) * fb,
    )  # fmt: skip


@triton.jit
def _e4m3(pair, PLACE: tl.constexpr):
    byte = ((pair.to(tl.int32) >> (8 * PLACE)) & 255).to(tl.uint8)
    return e4m3_to_fp16(byte, False).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _e4m3_pair(pair):
    return _e4m3(pair, 0) | (_e4m3(pair, 1) << 16)


@triton.jit
def _e4m3_pair_twice(pair):
    return _e4m3(pair, 0) * 65537, _e4m3(pair, 1) * 65537


@triton.jit
def _same(number):
    return number


@pytest.fixture(autouse=True, scope="module")
def plain_arithmetic() -> Iterator[None]:
    """The interpreter runs these instead of the functions that are inline PTX."""
    functions: dict[Any, Any] = {
        ptx.widen_keys: _widen_keys,
        ptx.widen_values: _widen_values,
        ptx.e4m3_pair_to_fp16: _e4m3_pair,
        ptx.e4m3_pair_to_fp16_twice: _e4m3_pair_twice,
        registers.branch: _same,
    }
    with interpreter.replaced(functions):
        yield


CASE = DecodeCase(
    lens=(70, 37), gqa_ratio=12, num_kv_heads=1, head_dim=128, page_size=16, stale_columns=0, spread=0.5,
    format="fp4_e2m1", scale_group=32, out_dtype=torch.float32,
)  # fmt: skip


def _plan(inputs: DecodeInputs) -> DecodePlan:
    """Of `attend_in_registers`, in tiles and warps that the interpreter is done with sooner."""
    plan = inputs.plan()
    one_warp = replace(plan.config.options, num_warps=1)
    plan = replace(plan, config=replace(plan.config, block_n=32, options=one_warp))
    assert any(bound.constexprs["RULES"].registers for bound in plan.kernels(inputs.cache))
    return plan


def _attends(case: DecodeCase, inputs: DecodeInputs | None = None, **options: Any) -> None:
    """Compares the results with the reference."""
    inputs = inputs or case.inputs()
    with run_as("sm90"):
        assert_right(case, inputs=inputs, plan=_plan(inputs), **options)


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
@pytest.mark.parametrize("scales", [(16, "e4m3"), (32, "e8m0"), (16, "e8m0"), (32, "e4m3")], ids=str)
def test_operands_hold_the_keys_and_values_that_they_should(scales, options):
    group, scale = scales
    case = replace(CASE, lens=(70, 5), num_kv_heads=2, scale_group=group, scale_format=scale, **options)
    inputs = case.inputs()
    _spoil_unused_scales(inputs.cache, inputs.table)
    _attends(case, inputs)


@pytest.mark.parametrize(
    "transform",
    [KeyTransform(rotated=True), KeyTransform(balance=torch.full((1, 128), 2.0), rotated=False)],
    ids=["rotation", "balance"],
)
def test_transformed_queries_do_not_take_this_way(transform):
    """A lane's share of Q is not in the order in which it is transformed."""
    inputs = replace(CASE, scale_group=16, scale_format="e4m3").inputs()
    cache = replace(inputs.cache, key_transform=transform)
    with run_as("sm90"):
        assert not any(bound.constexprs["RULES"].registers for bound in inputs.plan().kernels(cache))


@pytest.mark.parametrize("scale", ["e4m3", "e8m0"])
@pytest.mark.parametrize("sm_scale", [-0.1, 0.0])
def test_the_scale_of_scores_may_be_negative_or_zero(scale, sm_scale):
    _attends(replace(CASE, scale_format=scale), sm_scale=sm_scale)


@pytest.mark.parametrize("growth", [12, -12])
def test_exponents_of_values_differ_between_tiles(growth):
    inputs = CASE.inputs()
    inputs.cache.v_descale[inputs.table.page_ids[:, 2].long()] += growth
    _attends(CASE, inputs)


@pytest.mark.parametrize("side", ["k_descale", "v_descale"])
def test_a_nan_scale_reaches_its_own_sequence_only(side):
    inputs = CASE.inputs()
    getattr(inputs.cache, side)[int(inputs.table.page_ids[0, 1]), 3, 0, 2] = 255
    with run_as("sm90"):
        o, _ = inputs.call(_plan(inputs))
    spoiled = inputs.reference()[0].isnan()
    assert bool(spoiled[0].any())
    assert bool(o[spoiled].isnan().all())
    assert bool(o[1].isfinite().all())


def test_a_soft_cap_sees_the_offset_of_keys():
    inputs = CASE.inputs()
    transform = KeyTransform(offset=torch.linspace(-1, 1, 128)[None], rotated=False)
    moved = replace(inputs, cache=replace(inputs.cache, key_transform=transform))
    _attends(CASE, moved, logits_soft_cap=3.0)
    inputs.options["logits_soft_cap"] = 3.0
    assert relative_l1(inputs.reference()[0], moved.reference()[0]) > 10 * CASE.bound

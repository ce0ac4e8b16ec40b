"""The loop in which lanes load what they multiply, on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.quant import KeyTransform, device, device_fp4_e4m3
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import interpreter, run_as
from narrowkv.testing.cases.decode import DecodeCase, DecodeInputs
from narrowkv.testing.checking import assert_right

pytestmark = pytest.mark.sampled

CASE = DecodeCase(
    lens=(150, 37, 0), gqa_ratio=12, num_kv_heads=2, head_dim=128, page_size=16, stale_columns=0,
    format="fp4_e2m1", out_dtype=torch.float32,
)  # fmt: skip


@triton.jit
def _permuted(high, low, selectors):
    """`v_perm_b32` for selectors of 0 to 7."""
    result = selectors * 0
    for i in tl.static_range(4):
        place = (selectors >> (8 * i)) & 7
        word = tl.where(place >= 4, high, low)
        result |= ((word >> (8 * (place & 3))) & 255) << (8 * i)
    return result


@triton.jit
def _converted(words, scale, UNIFORM: tl.constexpr, PACK: tl.constexpr):
    """`v_cvt_scalef32_pk_f16_fp4` of the four bytes of words, with a scale of 2**-13."""
    out = ()
    for i in tl.static_range(4):
        pair = words * 0
        for half in tl.static_range(2):
            code = (words >> (8 * i + 4 * half)) & 15
            magnitude = ((code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True) * 2.0
            bits = magnitude.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) | ((code & 8) << 12)
            pair |= bits << (16 * half)
        out = out + (pair,)  # noqa: RUF005
    return out


@pytest.fixture(autouse=True, scope="module")
def plain_arithmetic() -> Iterator[None]:
    """The interpreter runs these instead of the instructions."""
    with interpreter.replaced({device_fp4_e4m3.permute: _permuted, device.fp4_bytes_cdna4: _converted}):
        yield


FP8_CASE = replace(CASE, q_dtype=torch.float8_e4m3fn, kernel="fp8")


def _takes_lanes(inputs: DecodeInputs, target: str = "gfx942") -> bool:
    with run_as(target):
        plan = inputs.plan()
        return any(bound.constexprs.get("RULES", plan).lanes for bound in plan.kernels(inputs.cache)[:1])


def _attends(
    case: DecodeCase, inputs: DecodeInputs | None = None, target: str = "gfx942", **options: Any
) -> None:
    inputs = inputs or case.inputs()
    assert _takes_lanes(inputs, target)
    with run_as(target):
        assert_right(case, inputs=inputs, plan=inputs.plan(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"layout": "HND", "window_left": 40}, {"logits_soft_cap": 5.0}, {"scale_format": "e4m3"},
        {"page_size": 4, "split": "none"}, {"page_size": 1}, {"split": "even", "gqa_ratio": 5},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_operands_hold_the_keys_and_values_that_they_should(options, target):
    _attends(replace(CASE, **options), target=target)


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "HND", "window_left": 40}, {"scale_format": "e4m3", "logits_soft_cap": 5.0}],
    ids=str,
)
def test_a_table_turns_fp4_into_fp8(options):
    """Every code occurs, minus zero too, which FNUZ would read as NaN."""
    case = replace(FP8_CASE, **options)
    inputs = case.inputs()
    for stored in (inputs.cache.k, inputs.cache.v):
        codes = torch.randint(
            256, stored.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8
        )
        stored.view(torch.uint8).copy_(codes)
    _attends(case, inputs)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"q_dtype": torch.bfloat16}, "queries in"), ({"format": "fp8_e4m3fn"}, "one scale a head"),
        ({"scale_group": 32}, "one scale a head"), ({"q_len": 2}, "one query token"),
        ({"page_size": 2}, "a multiple of 4 tokens"), ({"kernel": "decode"}, "needs kernel='fp8'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_table_does_not_serve_is_refused(changes, lacks):
    inputs = replace(FP8_CASE, **changes).inputs()
    with run_as("gfx942"), pytest.raises(UnsupportedError, match=lacks):
        inputs.call()


def test_transformed_queries_are_in_the_order_of_the_keys():
    case = replace(CASE, num_kv_heads=1)
    inputs = case.inputs()
    transform = KeyTransform(balance=torch.linspace(0.5, 2.0, 128)[None], rotated=True)
    _attends(case, replace(inputs, cache=replace(inputs.cache, key_transform=transform)))


@pytest.mark.parametrize(
    "changes",
    [{"q_len": 2, "gqa_ratio": 4}, {"head_dim": 64}, {"scale_group": 32}],
    ids=str,
)
def test_other_calls_keep_the_loop_over_tiles(changes):
    assert not _takes_lanes(replace(CASE, **changes).inputs())


def test_batch_invariant_plans_keep_their_sums():
    inputs = CASE.inputs()
    with run_as("gfx942"):
        plan = inputs.plan(batch_invariant=True)
        assert not plan.kernels(inputs.cache)[0].constexprs["RULES"].lanes

"""Decode over FP4 caches with E4M3 scales and with scales of groups, against the fp32 reference."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import K8V4, DecodeCase
from narrowkv.attn_decode.config import DecodeShape
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as

pytestmark = pytest.mark.sampled

F4 = "fp4_e2m1"
BOUND = 0.002


@pytest.mark.parametrize("fmt", [F4, K8V4, CacheFormat(k=F4, v="bf16")], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group", "scale"),
    [(64, None, "e4m3"), (128, None, "e4m3"), (64, 16, "e4m3"), (96, 32, "e4m3"), (96, 16, "e8m0")],
)
def test_keys_and_values_with_e4m3_scales_and_groups(
    fmt: str | CacheFormat, head_dim: int, group: int | None, scale: str, device: str
) -> None:
    workload = DecodeCase.small(
        format=fmt, scale_group=group, scale_format=scale, head_dim=head_dim, layout="HND", outliers=True
    )
    q, cache, table = workload.build(device)
    o = paged_decode(q, cache, table, out_dtype=torch.float32)
    assert relative_l1(o, paged_decode_reference(q, cache, table)) <= BOUND


def test_the_native_kernel_multiplies_scores_by_the_scale() -> None:
    if not hasattr(InterpreterBuilder, "create_dot_scaled"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} has no tl.dot_scaled")
    workload = DecodeCase.small(format=F4, scale_format="e4m3", head_dim=128, q_len=2)
    q, cache, table = workload.build()
    with run_as("gfx950"):
        plan = plan_decode(q, cache, table, kernel="native", split="none")
        o = paged_decode(q, cache, table, plan=plan, out_dtype=torch.float32)
    assert relative_l1(o, paged_decode_reference(q, cache, table)) <= BOUND


@pytest.mark.parametrize(
    ("group", "scale", "nan"), [(16, "e4m3", 0x7F), (16, "e8m0", 255), (32, "e8m0", 255)]
)
@pytest.mark.parametrize("side", ["k_descale", "v_descale"])
def test_a_group_whose_scale_is_nan_spoils_its_own_sequence_only(
    group: int, scale: str, nan: int, side: str, device: str
) -> None:
    workload = DecodeCase.small(lens=(20, 5), format=F4, scale_group=group, scale_format=scale, head_dim=64)
    q, cache, table = workload.build(device)
    scales = getattr(cache, side).view(torch.uint8)
    scales[int(table.page_ids[0, 0]), 3, 0, 1] = nan
    o = paged_decode(q, cache, table, out_dtype=torch.float32)
    expected = paged_decode_reference(q, cache, table)
    hit = expected.isnan()
    assert bool(hit[0].any())
    assert not bool(hit[1].any())
    assert bool(o[hit].isnan().all())
    assert bool(o[1].isfinite().all())
    heads = q.shape[1] // cache.num_kv_heads
    assert bool(o[0, heads:].isfinite().all()), "the other KV head"
    assert relative_l1(o[1], expected[1]) <= BOUND


@pytest.mark.parametrize(("low", "high"), [(0, 40), (110, 140), (215, 240)])
def test_powers_of_two_from_end_to_end(low: int, high: int, device: str) -> None:
    """Scales near either end of E8M0: the smallest values are tiny, and the largest do not overflow."""
    q, cache, table = DecodeCase.small(lens=(40,), format=F4, scale_group=32, head_dim=64).build(device)
    random = torch.Generator().manual_seed(0)
    assert isinstance(cache.v_descale, torch.Tensor)
    cache.v_descale.copy_(torch.randint(low, high, cache.v_descale.shape, generator=random))
    o = paged_decode(q, cache, table, out_dtype=torch.float32).double()
    assert relative_l1(o, paged_decode_reference(q, cache, table).double()) <= BOUND


@pytest.mark.parametrize(("group", "scale"), [(16, "e4m3"), (32, "e4m3"), (16, "e8m0")])
def test_the_native_kernel_refuses_scales_that_the_instruction_lacks(group: int, scale: str) -> None:
    q, cache, table = DecodeCase.small(format=F4, scale_group=group, scale_format=scale, head_dim=128).build()
    with run_as("gfx950"):
        plan = plan_decode(q, cache, table, kernel="native", split="none")
        with pytest.raises(UnsupportedError, match="kernel='native' needs keys with one scale a head or an"):
            paged_decode(q, cache, table, plan=plan)


def test_a_plan_from_a_shape_serves_caches_with_scales_of_groups() -> None:
    q, cache, table = DecodeCase.small(format=F4, scale_group=16, scale_format="e4m3", head_dim=64).build()
    shape = DecodeShape(len(q), 1, q.shape[1], cache.num_kv_heads, 64, cache.page_size, 256)
    plan = plan_decode(shape, F4, device="cpu", scale_group=16, scale_format="e4m3")
    assert plan.config == plan_decode(q, cache, table, max_seq_len=256).config
    o = paged_decode(q, cache, table, plan=plan, out_dtype=torch.float32)
    assert relative_l1(o, paged_decode_reference(q, cache, table)) <= BOUND
    with pytest.raises(ValueError, match="scale_format 'e4m3' is for an fp4_e2m1 cache"):
        plan_decode(shape, "fp8_e4m3fn", device="cpu", scale_format="e4m3")

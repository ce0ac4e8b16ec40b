"""Decode over FP4 caches, by both kernels, against the fp32 reference on the dequantised cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import K8V4, DecodeCase
from narrowkv.attn_decode.config import DecodeShape, choose_config
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import get_target

pytestmark = pytest.mark.sampled

W = DecodeCase.small
F4 = "fp4_e2m1"
BOUND = 0.002


def _run(
    q: torch.Tensor, cache: PagedKVCache, table: PageTable, kernel: str | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(o, lse)`; the native kernel as gfx950 takes it, but unsplit: that chip would get 2048 programs."""
    if kernel != "native":
        plan = plan_decode(q, cache, table, kernel=kernel)
        o, lse = paged_decode(q, cache, table, return_lse=True, plan=plan, **options)
        return o, lse
    if not hasattr(InterpreterBuilder, "create_dot_scaled"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} has no tl.dot_scaled")
    with run_as("gfx950"):
        plan = plan_decode(q, cache, table, kernel=kernel, split="none")
        assert plan.config.kernel == "native"
        o, lse = paged_decode(q, cache, table, return_lse=True, plan=plan, **options)
    return o, lse


def _check(workload: DecodeCase, device: str, kernel: str | None = None, **options: Any) -> None:
    q, cache, table = workload.build(device)
    out = torch.full(q.shape, math.nan, dtype=torch.float32, device=device)
    o, lse = _run(q, cache, table, kernel, out=out, **options)
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True, **options)
    assert relative_l1(o, expected) <= BOUND
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


def _kernels(kernel: str, device: str) -> str:
    if kernel == "native" and device != "cpu":
        pytest.skip("no GPU but gfx950 has the native kernel's instruction")
    return device


both = pytest.mark.parametrize("kernel", ["decode", "native"])


@both
@pytest.mark.parametrize("ratio", [1, 8, 12, 16, 17])
def test_every_ratio(ratio: int, kernel: str, device: str) -> None:
    _check(W(format=F4, gqa_ratio=ratio, head_dim=128), _kernels(kernel, device), kernel)


@both
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_every_page_size(page_size: int, kernel: str, device: str) -> None:
    _check(W(format=F4, page_size=page_size, layout="HND"), _kernels(kernel, device), kernel)


@both
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("scale_group", [None, 32])
def test_every_head_dim_with_either_scale(
    head_dim: int, scale_group: int | None, kernel: str, device: str
) -> None:
    workload = W(format=F4, head_dim=head_dim, scale_group=scale_group)
    _check(workload, _kernels(kernel, device), kernel)


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "cpu"])
@pytest.mark.parametrize("scale_group", [None, 32])
@pytest.mark.parametrize(
    "fmt",
    [K8V4, CacheFormat(k=F4, v="fp8_e4m3fn"), CacheFormat(k=F4, v="bf16"), CacheFormat(k="fp16", v=F4)],
    ids=str,
)
def test_keys_and_values_of_different_formats(fmt: CacheFormat, scale_group: int | None, target: str) -> None:
    q, cache, table = W(format=fmt, scale_group=scale_group, granularity="head").build()
    with run_as(target):
        plan = plan_decode(q, cache, table, split="none")
        o = paged_decode(q, cache, table, plan=plan, out_dtype=torch.float32)
    assert relative_l1(o, paged_decode_reference(q, cache, table)) <= BOUND


@both
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_speculative_tokens_windows_caps_and_sinks(q_dtype: torch.dtype, kernel: str, device: str) -> None:
    workload = W(format=F4, q_len=3, q_dtype=q_dtype, ragged=True)
    sinks = torch.linspace(-2, 2, 24, device=device)
    _check(workload, _kernels(kernel, device), kernel, window_left=40, logits_soft_cap=20.0, sinks=sinks)


@both
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_the_log_sum_exp_of_large_logits_has_all_bits_of_the_query(
    q_dtype: torch.dtype, kernel: str, device: str
) -> None:
    """A window of one key: lse is its logit, and keys with outliers make it large."""
    workload = W(format=F4, scale_group=32, head_dim=128, q_dtype=q_dtype, outliers=True, spread=1.0)
    q, cache, table = workload.build(_kernels(kernel, device))
    _, lse = _run(q, cache, table, kernel, window_left=0)
    _, expected = paged_decode_reference(q, cache, table, window_left=0, return_lse=True)
    torch.testing.assert_close(lse, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("fmt", [F4, K8V4], ids=["fp4", "k8v4"])
def test_split_sequences(fmt: str | CacheFormat, device: str) -> None:
    _check(W(format=fmt, lens=(3000, 700, 1), num_kv_heads=1), device)


@both
def test_queries_of_every_size(kernel: str, device: str) -> None:
    """bfloat16 holds what neither fp16 nor E4M3 does: a power of two brings each tile into range."""
    q, cache, table = W(format=F4).build(_kernels(kernel, device))
    for factor in (1e-30, 1e-6, 1e6, 1e30):
        scaled = (q.float() * factor).to(q.dtype)
        o, _ = _run(scaled, cache, table, kernel, sm_scale=0.125 / factor, out_dtype=torch.float32)
        assert relative_l1(o, paged_decode_reference(scaled, cache, table, sm_scale=0.125 / factor)) <= BOUND


@both
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_nan_scale_reaches_only_the_rows_that_attend_to_it(side: str, kernel: str, device: str) -> None:
    q, cache, table = W(format=F4, lens=(40, 40), q_len=2, gqa_ratio=2).build(_kernels(kernel, device))
    page = int(table.page_ids[0, 2])
    getattr(cache, f"{side}_descale")[page, 39 % 16, 1] = 0xFF  # the newest token, KV head 1
    bad = _run(q, cache, table, kernel)[0].isnan().any(-1)
    expected = torch.zeros_like(bad)
    expected[1, 2:4] = True  # sequence 0, second query token, heads of KV head 1
    assert torch.equal(bad, expected)


@both
@pytest.mark.parametrize("exponent", [0, 60, 127, 190])
def test_scales_of_any_size(exponent: int, kernel: str, device: str) -> None:
    """Scales 2**-127 .. 2**63, and keys whose scale is that much smaller than their neighbours'."""
    q, cache, table = W(format=F4).build(_kernels(kernel, device))
    for scales in (cache.k_descale, cache.v_descale):
        assert isinstance(scales, torch.Tensor)
        used = scales != 0xFF
        scales[used] = exponent
        scales[:, ::3][used[:, ::3]] = max(exponent - 20, 0)
    scale = 0.125 * 2.0 ** (127 - exponent)
    options: dict[str, Any] = {"sm_scale": min(scale, 2.0**100)}
    o, _ = _run(q, cache, table, kernel, out_dtype=torch.float32, **options)
    expected = paged_decode_reference(q, cache, table, **options)
    assert isinstance(expected, torch.Tensor)
    if exponent == 0:  # subnormal results may be flushed
        assert float((o - expected).abs().max()) <= 2.0**-126
    else:
        assert relative_l1(o, expected) <= BOUND


def test_the_kernel_follows_the_target_and_can_be_forced() -> None:
    shape = DecodeShape(4, 1, 24, 2, 128, 16, 1024)
    chosen = {
        name: choose_config(get_target(name), shape, F4, F4).kernel
        for name in ("gfx942", "gfx950", "sm90", "cpu")
    }
    assert chosen == {"gfx942": "decode", "gfx950": "decode", "sm90": "decode", "cpu": "decode"}
    assert choose_config(get_target("gfx950"), shape, F4, F4, kernel="native").kernel == "native"
    assert choose_config(get_target("gfx950"), shape, "fp8_e4m3fn", F4).kernel == "decode"
    for name, k, match in (("gfx942", F4, "gfx942 lacks"), ("gfx950", "fp8_e4m3fn", "keys in fp4_e2m1")):
        with pytest.raises(UnsupportedError, match=match):
            choose_config(get_target(name), shape, k, F4, kernel="native")
    with pytest.raises(ValueError, match="kernel"):
        choose_config(get_target("gfx950"), shape, F4, F4, kernel="fast")


def test_a_plan_is_of_one_target_and_a_kernel_that_it_has() -> None:
    q, cache, table = W(format=F4).build()
    plan = plan_decode(q, cache, table)
    with run_as("gfx950"), pytest.raises(ValueError, match="plan"):
        paged_decode(q, cache, table, plan=plan)
    with pytest.raises(UnsupportedError, match="native"):
        plan_decode(q, cache, table, kernel="native")

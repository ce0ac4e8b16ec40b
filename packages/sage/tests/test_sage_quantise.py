"""Sage's pre-pass kernels against the host's quantisers, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.quant.quantize import quantize_per_channel
from narrowkv.quant.sage import SAGE_GRANULARITIES, block_mean, quantize_per_token_group, token_mean
from narrowkv.runtime.launch import LaunchOptions, launch, run_as
from narrowkv.sage import plan_sage
from narrowkv.sage.kernels.quantise import quotients
from narrowkv.sage.launches import as_stored, attention_quantises, blocks_of_queries
from narrowkv.sage.prequantized import key_positions
from narrowkv.sage.reference import ranges_of, scratch_rows
from narrowkv.testing.cases.sage import PRECISIONS, SageCase

pytestmark = pytest.mark.sampled

W = SageCase.small
DENSE = W(q_lens=(150, 150), k_lens=(200, 200), num_kv_heads=2)
RAGGED = W(q_lens=(150, 0, 7, 128), k_lens=(1, 200, 0, 129), num_kv_heads=2, ragged=True)


def _bits(x):
    return x.view(torch.int32) if x.dtype == torch.float32 else x.view(torch.uint8)


def _same(got, want):
    """Equal bit for bit; a NaN equals a NaN."""
    if want.dtype == torch.float32:
        got, want = got.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0)
    return torch.equal(_bits(got.contiguous()), _bits(want.contiguous()))


def _check_rows(stored, descale, sequences, rows, groups, fmt):
    """Scratch `[heads, rows, width]` and its descales against the host, sequence by sequence."""
    if groups is None:
        whole, scale = quantize_per_token_group(torch.cat(sequences), None, fmt)
        assert _same(descale, scale)
        expected = list(whole.split([len(x) for x in sequences]))
    for i, (x, at) in enumerate(zip(sequences, rows, strict=True)):
        if groups is not None:
            codes, scale = quantize_per_token_group(x, groups, fmt)
            first = at.start // groups.span * groups.groups
            assert _same(descale[:, first : first + len(scale)].T, scale), f"descales of sequence {i}"
        else:
            codes = expected[i]
        assert _same(stored[:, at].transpose(0, 1), codes), f"codes of sequence {i}"


def check_prepass(workload, device="cpu", *, tensors=None, granularity="", **options):
    """Quantises a workload's Q, K and V and compares all that is stored."""
    q, k, v, starts_q, starts_k = tensors or workload.build(device)
    if granularity:
        options |= {"q_granularity": granularity, "k_granularity": granularity}
    plan = plan_sage(q, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **options)
    plan = replace(plan, config=replace(plan.config, quantises_q=False)).with_workspace()
    kv = plan.quantize_kv(k, v)
    plan.attend(q, kv, return_lse=True)
    query, _ = plan.scratch(plan.blocks())
    q_ranges, k_ranges = ranges_of(q, starts_q), ranges_of(k, starts_k)
    q_rows, k_rows = (scratch_rows(r, ragged=workload.ragged) for r in (q_ranges, k_ranges))
    queries, keys, values = (
        [x.cpu().reshape(-1, *x.shape[-2:])[r] for r in ranges]
        for x, ranges in ((q, q_ranges), (k, k_ranges), (v, k_ranges))
    )
    if plan.smooth_k:
        for got, key in zip(kv.k_mean.cpu(), keys, strict=True):
            assert _same(got, token_mean(key))
        keys = [x.float() - token_mean(x) for x in keys]
    if plan.smooth_q:
        queries = [x.float() - block_mean(x).repeat_interleave(128, 0)[: len(x)] for x in queries]
    _check_rows(kv.k.cpu(), kv.k_descale.cpu(), keys, k_rows, plan.k_groups, plan.qk_format)
    _check_rows(
        as_stored(query["q_codes"], plan.qk_format).cpu(),
        query["q_descale"].cpu(),
        queries,
        q_rows,
        plan.q_groups,
        plan.qk_format,
    )
    for seq, (x, at) in enumerate(zip(values, k_rows, strict=True)):
        codes, descale = quantize_per_channel(x, plan.config.fp8)
        assert _same(kv.v_descale[seq].cpu(), descale)
        stored = kv.v.cpu().view(torch.uint8)[:, :, at.start + key_positions(plan.config.key_order, len(x))]
        assert _same(stored.permute(2, 0, 1), codes), f"values of sequence {seq}"
    if plan.smooth_k and not plan.smooth_q:
        for seq, (x, at) in enumerate(zip(queries, q_rows, strict=True)):
            mean = kv.k_mean[seq].cpu().repeat_interleave(workload.gqa_ratio, 0)
            expected = plan.sm_scale * (x.float() * mean).sum(-1)
            torch.testing.assert_close(query["shift"][:, at].T.cpu(), expected, rtol=1e-5, atol=1e-4)
    return plan


@pytest.mark.parametrize("granularity", SAGE_GRANULARITIES)
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
@pytest.mark.parametrize(("smooth_k", "smooth_q"), [(True, False), (False, False), (True, True)])
def test_every_precision_granularity_and_smoothing(qk_dtype, granularity, smooth_k, smooth_q, device):
    how = {"qk_dtype": qk_dtype, "smooth_k": smooth_k, "smooth_q": smooth_q}
    check_prepass(DENSE, device, granularity=granularity, **how)


@pytest.mark.parametrize("granularity", ["per_tensor", "per_thread"])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_ragged_sequences_some_of_them_empty(granularity, smooth_q, device):
    check_prepass(RAGGED, device, granularity=granularity, smooth_q=smooth_q)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims_and_input_types(head_dim, dtype, device):
    check_prepass(W(head_dim=head_dim, dtype=dtype, q_lens=(70,), k_lens=(2100,)), device, qk_dtype="fp8")


@pytest.mark.parametrize(("target", "fp8"), [("gfx942", "fp8_e4m3fnuz"), ("gfx950", "fp8_e4m3fn")])
def test_the_formats_and_orders_of_amd_targets(target, fp8):
    with run_as(target):
        assert check_prepass(DENSE, qk_dtype="fp8").config.fp8 == fp8


def test_strided_heads_and_tokens(device):
    case = W(num_kv_heads=2, gqa_ratio=1)
    wide = torch.full((1, 150, 7, 3 * 64 + 5), math.nan, dtype=torch.bfloat16, device=device)
    views = [wide[:, :, 1:3, 64 * i + 1 : 64 * i + 65] for i in range(3)]
    for view, x in zip(views, case.build(device), strict=False):
        view.copy_(x)
    check_prepass(case, device, tensors=(*views, None, None))


@triton.jit
def _quotients_kernel(x_ptr, y_ptr, out_ptr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0) * M + tl.arange(0, M)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, quotients(tl.load(x_ptr + at), tl.load(y_ptr + row)[:, None], WIDE))


def test_quotients_are_rounded_as_divisions(device):
    """Divisors of every size that descales have, hard ones among them, and dividends near halves of them."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(1 << 23, 0x7C000000, (1024,), generator=random, dtype=torch.int32)
    bits[:256] |= 0x7FFFFF  # all ones, and almost
    bits[:128] -= torch.arange(128, dtype=torch.int32)
    y = bits.view(torch.float32)
    x = y[:, None] * (torch.randint(-255, 256, (1024, 64), generator=random) / 2)
    x[:, 32:] = x[:, 32:].nextafter(torch.zeros(()))
    x[:, 48:] = y[:, None] * (torch.rand(1024, 16, generator=random) * 254 - 127)
    out = torch.empty_like(x, device=device)
    args = (x.to(device), y.to(device), out)
    sizes = {"WIDE": True, "M": 32, "N": 64}
    launch(_quotients_kernel, (32, 1, 1), args, sizes, LaunchOptions(enable_fp_fusion=False))
    assert torch.equal(out.cpu(), x / y[:, None])


@pytest.mark.parametrize("most", [7.0, 127.0, 240.0, 448.0])
def test_quotients_of_numbers_of_16_bits(most, device):
    """All of them but for powers of two, by all descales and by the largest one."""
    x = torch.cat([1 + torch.arange(1024) / 1024, -1 - torch.arange(1024) / 1024])
    y = x[:1024] / most
    y[-1] = 3.4028234663852886e38 / most * (1 - 2.0**-23)
    x = x.expand(1024, 2048).contiguous()
    x[-1] *= 2.0**120
    out = torch.empty_like(x, device=device)
    args, sizes = (x.to(device), y.to(device), out), {"WIDE": False, "M": 64, "N": 2048}
    launch(_quotients_kernel, (16, 1, 1), args, sizes, LaunchOptions(enable_fp_fusion=False))
    assert torch.equal(out.cpu(), x / y[:, None])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("granularity", ["per_warp", "per_thread"])
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
def test_attention_quantises_q_to_the_same_bits(qk_dtype, granularity, ragged, device):
    q, k, v, starts_q, starts_k = (RAGGED if ragged else DENSE).build(device)
    options = {"qk_dtype": qk_dtype, "q_granularity": granularity, "causal": "bottom_right"}
    plan = plan_sage(q, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **options)
    found = []
    for quantises in (False, True):
        own = replace(plan, config=replace(plan.config, quantises_q=quantises))
        assert ("q_codes" in blocks_of_queries(own, own.shape, lse=False)) is not quantises
        found.append(own.run(q, k, v))
    assert torch.equal(*found)
    smoothed = plan.options._replace(smooth_k=False)
    assert attention_quantises(replace(own, options=smoothed), lse=True)
    assert not attention_quantises(own, lse=True)


@pytest.mark.parametrize("qk_dtype", PRECISIONS)
@pytest.mark.parametrize("granularity", ["per_tensor", "per_block", "per_thread"])
def test_degenerate_numbers(qk_dtype, granularity, device):
    """Zeros, a constant row, subnormals, the largest numbers, Inf, NaN: stored as the host stores them."""
    case = W(k_lens=(260,))
    tensors = case.build(device)
    for x in tensors[:3]:
        x[0, 3] = 0.0
        x[0, 4] = 7.0
        x[0, 5] = 1e-40
        x[0, 6] *= 1e30
        x[0, 7, 0, 5] = math.inf
        x[0, 8, 0, 6] = -math.inf
        x[0, 40:44, 0, 9] = math.nan
        x[0, 128:, 0] = 0.0
        x[..., 11] = 0.0
    how = {"qk_dtype": qk_dtype, "smooth_k": False, "granularity": granularity}
    check_prepass(case, device, tensors=tensors, **how)

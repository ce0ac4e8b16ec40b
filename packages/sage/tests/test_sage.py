"""sage_attention against fp32 over what the host quantisers store, and what must happen on bad input."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowkv.quant import compare, max_abs, relative_l1
from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.runtime.launch import run_as
from narrowkv.sage import plan_sage, sage_attention, sage_attention_reference
from narrowkv.sage.config import KeyOrder
from narrowkv.sage.reference import narrow_p_reference, short_sum_error
from narrowkv.testing.cases.sage import LSE_BOUND, PRECISIONS, PUBLISHED, SageCase
from narrowkv.testing.checking import assert_agrees
from narrowkv.testing.places import AMD_TARGETS

pytestmark = pytest.mark.sampled

W = SageCase.small
RAGGED = W(q_lens=(70, 0, 7, 128), k_lens=(1, 130, 0, 150), num_kv_heads=2, ragged=True)


def check(case, device="cpu", tensors=None, context=nullcontext, **options):
    """Calls Sage attention with an output full of NaN, compares o and lse with the reference, and returns o.

    P in E4M3 is what the operation is allowed besides the stored numbers: the bound is 1.25 times the error
    of that rounding alone, done in torch.
    """
    q, k, v, starts_q, starts_k = case.build(device)
    q, k, v = tensors or (q, k, v)
    options = {**options, "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    out = torch.full_like(q, math.nan)
    with context():  # its target also has the reference's FP8 format
        plan = plan_sage(q, k, **options)
        o, lse = plan.attend(q, plan.quantize_kv(k, v), out=out, return_lse=True)
        expected, expected_lse = sage_attention_reference(q, k, v, return_lse=True, **options)
        rounded = narrow_p_reference(q, k, v, **options)
    assert o.data_ptr() == out.data_ptr()
    bound = 1.25 * relative_l1(rounded, expected) + 2e-3
    assert bound < 0.04
    lse_bound = LSE_BOUND + short_sum_error(plan, q, k)
    assert_agrees((o, lse), (expected, expected_lse), bound=bound, lse_bound=lse_bound)
    return o


def of_both(granularity):
    """Options that give Q and K one granularity."""
    return {"q_granularity": granularity, "k_granularity": granularity}


everywhere = pytest.mark.parametrize("place", ["here", *AMD_TARGETS], indirect=True)


@pytest.mark.sampled("place", most=dict.fromkeys(AMD_TARGETS, 1))
@everywhere
@pytest.mark.parametrize("granularity", SAGE_GRANULARITIES)
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
def test_every_precision_and_granularity(qk_dtype, granularity, place):
    check(W(), place.device, context=place.context, qk_dtype=qk_dtype, **of_both(granularity))


MIXED = {
    "no keys": (W(q_lens=(70,), k_lens=(0,), gqa_ratio=1), {}),
    "fp16, head_dim 128": (
        W(q_lens=(70,), k_lens=(70,), head_dim=128, gqa_ratio=1, dtype=torch.float16), {"causal": "top_left"},
    ),
    "FP8, no mean of K": (W(), {"qk_dtype": "fp8", "smooth_k": False}),
    "int4, both means, a window": (
        W(q_lens=(140,), k_lens=(140,), head_dim=128, gqa_ratio=1),
        {"qk_dtype": "int4", "smooth_q": True, "window": (40, 9), "k_granularity": "per_thread"},
    ),
    "ragged": (
        W(q_lens=(70, 0, 7), k_lens=(1, 130, 80), gqa_ratio=1, ragged=True),
        {"causal": "bottom_right", "smooth_q": True},
    ),
}  # fmt: skip


@pytest.mark.sampled("place", most=dict.fromkeys(AMD_TARGETS, 1))
@everywhere
@pytest.mark.parametrize("name", MIXED)
def test_options_together(name, place):
    case, options = MIXED[name]
    check(case, place.device, context=place.context, **options)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_granularity", SAGE_GRANULARITIES)
@pytest.mark.parametrize("k_granularity", SAGE_GRANULARITIES)
@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
def test_every_mixture(qk_dtype, causal, smooth_q, q_granularity, k_granularity, head_dim, device):
    options = {"qk_dtype": qk_dtype, "causal": causal, "smooth_q": smooth_q}
    options |= {"q_granularity": q_granularity, "k_granularity": k_granularity}
    check(W(q_lens=(70,), k_lens=(260,), head_dim=head_dim), device, **options)


MASKS = {
    "none": {},
    "top left": {"causal": "top_left"},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (40, 20)},
    "window to the left": {"window": (40, -1)},
    "window to the right": {"window": (-1, 9)},
    "window of one key": {"window": (0, 0)},
    "causal window": {"causal": "bottom_right", "window": (33, 5)},
    "top-left window": {"causal": "top_left", "window": (33, -1)},
    "beyond the top-left diagonal": {"causal": "top_left", "window": (128, 30)},
    "beyond the bottom-right diagonal": {"causal": "bottom_right", "window": (40, 30)},
}


# A window's edge inside a tile shows which tiles are masked.
@pytest.mark.sampled(always=[{"mask": "window to the left", "lens": (150, 150)}])
@pytest.mark.parametrize("lens", [(70, 300), (300, 70), (150, 150)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_with_lengths_that_differ(mask, lens, device):
    check(W(q_lens=lens[:1], k_lens=lens[1:]), device, k_granularity="per_thread", **MASKS[mask])


@pytest.mark.parametrize("mask", ["none", "bottom right", "window"])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_ragged_sequences_some_of_them_empty(mask, smooth_q, device):
    check(RAGGED, device, smooth_q=smooth_q, **MASKS[mask])


@pytest.mark.parametrize("ratio", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gqa_ratios_and_head_dims_in_a_batch(ratio, head_dim, device):
    sizes = {"num_kv_heads": 2, "gqa_ratio": ratio, "head_dim": head_dim}
    check(W(q_lens=(40, 40), k_lens=(90, 90), **sizes), device, causal="bottom_right")


def test_fp16_in_and_out(device):
    assert check(W(dtype=torch.float16), device, smooth_q=True).dtype == torch.float16


@pytest.mark.parametrize("lens", [(1,), (65,), (128,), (1, 63, 64, 65, 127, 128, 129, 257)], ids=str)
def test_lengths_around_the_tiles(lens, device):
    case = W(q_lens=lens, k_lens=lens, ragged=len(lens) > 1)
    check(case, device, causal="bottom_right", k_granularity="per_thread")


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
def test_the_code_paths_of_amd_targets_when_interpreted(target, qk_dtype):
    with run_as(target):
        check(W(), qk_dtype=qk_dtype, k_granularity="per_thread", causal="bottom_right")


@pytest.mark.parametrize("order", [KeyOrder(2, 4, 2), KeyOrder(4, 2, 4), KeyOrder(2, 4, 4)], ids=str)
def test_no_order_of_the_keys_changes_the_result(order):
    q, k, v, *_ = W().build()
    o = []
    for chosen in (KeyOrder(), order):
        plan = plan_sage(q, k)
        plan = replace(plan, config=replace(plan.config, key_order=chosen, two_level=False))
        o.append(plan.attend(q, plan.quantize_kv(k, v)))
    assert relative_l1(o[1], o[0]) < 1e-3


@given(
    st.lists(st.tuples(st.integers(0, 140), st.integers(0, 140)), min_size=1, max_size=4),
    st.sampled_from(["int8", "int4", "fp8"]),
    st.sampled_from(SAGE_GRANULARITIES),
    st.sampled_from(sorted(MASKS)),
    st.booleans(),
)
@settings(max_examples=7)
def test_any_ragged_batch(lens, qk_dtype, granularity, mask, smooth_k):
    q_lens, k_lens = zip(*lens, strict=True)
    options = {"qk_dtype": qk_dtype, "q_granularity": granularity, "smooth_k": smooth_k}
    check(W(q_lens=q_lens, k_lens=k_lens, ragged=True), **options, **MASKS[mask])


# ---------------------------------------------------------------------------- smoothing and accuracy

SQUARE = W(q_lens=(256,), k_lens=(256,), head_dim=128)


def _against_exact(case, device, **options):
    q, k, v, *_ = case.build(device)
    return compare(sage_attention(q, k, v, **options), sage_attention_reference(q, k, v, qk_dtype=None))


def test_smoothing_lessens_the_error_and_keeps_lse(device):
    case = replace(SQUARE, data="offset")
    q, k, v, *_ = case.build(device)
    _, exact = sage_attention_reference(q, k, v, qk_dtype=None, return_lse=True)
    _, lse = sage_attention(q, k, v, return_lse=True)
    assert max_abs(lse, exact) < 0.2
    none, of_k, of_both_sides = (
        _against_exact(case, device, qk_dtype="int4", smooth_k=smooth_k, smooth_q=smooth_q).relative_l1
        for smooth_k, smooth_q in ((False, False), (True, False), (True, True))
    )
    assert of_both_sides < of_k < 0.7 * none


@pytest.mark.parametrize("granularity", PUBLISHED)
def test_int8_is_closer_than_the_published_int4_with_an_offset_in_k(granularity, device):
    cosine, l1, rmse = PUBLISHED[granularity]
    report = _against_exact(SQUARE, device, qk_dtype="int8", **of_both(granularity))
    assert report.passes(cosine=cosine, relative_l1=l1, rmse=rmse), str(report)


# ---------------------------------------------------------------------------- the same bits


def test_keys_and_values_quantised_once_serve_many_queries(device):
    q, k, v, *_ = W(k_lens=(200,)).build(device)
    options = {"causal": "bottom_right", "smooth_q": True}
    kv = plan_sage(q, k, **options).quantize_kv(k, v)
    for count in (150, 150, 20):
        part = q[:, -count:]
        again = plan_sage(part, k, **options).attend(part, kv, return_lse=True)
        expected = sage_attention(part, k, v, return_lse=True, **options)
        assert all(map(torch.equal, again, expected))


def test_a_call_again_and_a_sequence_alone_give_the_same_bits(device):
    """One descale for a whole tensor is of the whole batch; every finer one is the sequence's own."""
    q, k, v, starts_q, starts_k = RAGGED.build(device)
    options = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "smooth_q": True}
    whole = sage_attention(q, k, v, **options)
    assert torch.equal(sage_attention(q, k, v, **options), whole)
    alone = sage_attention(q[None, -128:], k[None, -150:], v[None, -150:], smooth_q=True)
    assert torch.equal(whole[-128:], alone[0])
    # Input past a tensor's end is never read.
    padded = [torch.cat([x, torch.full_like(x[:9], math.nan)]) for x in (q, k, v)]
    assert torch.equal(sage_attention(*padded, **options)[: len(q)], whole)


# ---------------------------------------------------------------------------- degenerate input


def test_a_zero_channel_of_v_and_a_constant_row_of_k(device):
    q, k, v, *_ = W().build(device)
    v[..., 5] = 0.0
    k[:, 7] = 3.0
    o = check(W(), device, tensors=(q, k, v), k_granularity="per_thread")
    assert bool((o[..., 5] == 0).all())


def test_keys_that_are_all_alike_average_v(device):
    q, k, v, *_ = W().build(device)
    k[:] = k[:, :1]
    mean = v.float().mean(1, keepdim=True).expand(-1, q.shape[1], -1, -1).repeat_interleave(2, 2)
    for smooth_k in (True, False):
        assert relative_l1(sage_attention(q, k, v, smooth_k=smooth_k), mean) < 0.06


@pytest.mark.parametrize(
    ("q_tokens", "k_tokens", "batch"), [(150, 0, 1), (0, 150, 1), (0, 0, 1), (150, 150, 0)]
)
def test_nothing_to_attend_to(q_tokens, k_tokens, batch, device):
    q, k, v, *_ = W().build(device)
    q, k, v = q[:batch, :q_tokens], k[:batch, :k_tokens], v[:batch, :k_tokens]
    o, lse = sage_attention(q, k, v, causal="bottom_right", return_lse=True)
    assert o.shape == q.shape
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())


def test_huge_logits_stay_finite(device):
    q, k, v, *_ = W().build(device)
    q[:, ::2] *= 2000
    o, lse = sage_attention(q, k, v, return_lse=True)
    assert float(lse.abs().max()) > 1e4
    assert bool(lse.isfinite().all())
    assert_agrees(o, narrow_p_reference(q, k, v), bound=0.03)


def test_a_scale_of_zero_is_uniform(device):
    check(W(), device, sm_scale=0.0, causal="bottom_right")


def test_a_nan_in_k_stays_with_its_head(device):
    case = W(num_kv_heads=2, gqa_ratio=1)
    q, k, v, *_ = case.build(device)
    clean = sage_attention(q, k, v)
    k[0, 140, 1, 3] = math.nan
    o = sage_attention(q, k, v)
    assert torch.equal(o[:, :, 0], clean[:, :, 0])
    assert bool(o[:, :, 1].isnan().all())


def test_a_nan_in_a_key_that_is_not_attended_to_is_not_seen(device):
    q, k, v, *_ = W().build(device)
    k[0, 140] = math.nan
    o = sage_attention(q, k, v, causal="bottom_right", smooth_k=False, k_granularity="per_thread")
    assert bool(o[:, :128].isfinite().all())  # the NaN's group begins at key 128
    assert bool(o[:, 140:].isnan().all())


# ---------------------------------------------------------------------------- refusals

BAD_OPTIONS = [
    ({"qk_dtype": "int2"}, ValueError, "qk_dtype must be one of int8, int4, fp8"),
    ({"q_granularity": "per_row"}, ValueError, "granularity must be one of per_tensor"),
    ({"causal": True}, ValueError, "causal must say how it is aligned"),
    ({"causal": "left"}, ValueError, "causal must be one of top_left, bottom_right"),
    ({"window": (-2, 0)}, ValueError, r"window\[0\] must be -1"),
    ({"window": (1.5, 0)}, TypeError, r"window\[0\] must be an int"),
    ({"window": (0, 2**31)}, ValueError, r"window\[1\] must be -1"),
    ({"window": 3}, TypeError, "window must be"),
    ({"window": (1, 2, 3)}, TypeError, "window must be"),
    ({"layout": "HND"}, ValueError, "layout must be one of BSHD, BHSD"),
    ({"sm_scale": 1e39}, ValueError, "sm_scale must be finite"),
    ({"sm_scale": "1"}, TypeError, "sm_scale must be a float"),
    ({"scale": 1.0}, TypeError, "unexpected keyword argument 'scale'"),
    ({"sm_scale": math.nan}, ValueError, "sm_scale must be finite"),
    ({"sm_scale": -1.0}, ValueError, "sm_scale must not be negative"),
    ({"cu_seqlens_q": torch.tensor([0, 1])}, ValueError, "both be given or both be None"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_are_refused(options, error, message):
    q, k, v, *_ = W().build()
    with pytest.raises(error, match=message):
        sage_attention(q, k, v, **options)


# What becomes of q, k, v, cu_seqlens_q and cu_seqlens_k of a ragged call.
BAD_TENSORS = {
    "q must have dtype one of": lambda q, k, v, *starts: (q.float(), k, v, *starts),
    "v must have dtype one of": lambda q, k, v, *starts: (q, k, v.float(), *starts),
    "head_dim in": lambda q, k, v, *starts: (q[..., :32], k[..., :32], v[..., :32], *starts),
    "k must have q's head_dim": lambda q, k, v, *starts: (q, k[..., :32], v, *starts),
    "multiple of k's 2 heads": lambda q, k, v, *starts: (q[:, :3], k, v, *starts),
    "v must have shape": lambda q, k, v, *starts: (q, k, v[1:], *starts),
    "contiguous last dimension": lambda q, k, v, *starts: (q, k, v.mT.contiguous().mT, *starts),
    "q must have shape": lambda q, k, v, *starts: (q, k, v, None, None),
    "cu_seqlens_q must have dtype one of": lambda q, k, v, a, b: (q, k, v, a.float(), b),
    "cu_seqlens_k must have shape": lambda q, k, v, a, b: (q, k, v, a, b[:-1]),
    "k must have q's batch": lambda q, k, v, *_: (q[None], torch.stack([k, k]), v[None], None, None),
    "k must not require grad": lambda q, k, v, *starts: (q, k.requires_grad_(), v, *starts),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_bad_tensors_are_refused(message):
    q, k, v, starts_q, starts_k = BAD_TENSORS[message](*RAGGED.build())
    with pytest.raises((TypeError, ValueError), match=message):
        sage_attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)


def test_outputs_and_stored_keys_of_other_calls_are_refused():
    q, k, v, *_ = W().build()
    plan = plan_sage(q, k)
    kv = plan.quantize_kv(k, v)
    for out, error, message in (
        (q.float(), TypeError, "out must have dtype"),
        (torch.empty_like(q[:, 1:]), ValueError, "out must have shape"),
        (q, ValueError, "out must not share memory with q"),
    ):
        with pytest.raises(error, match=message):
            plan.attend(q, kv, out=out)
    for keys, options in (
        (k, {"qk_dtype": "fp8"}),
        (k, {"k_granularity": "per_block"}),
        (k[:, 1:], {}),
        (k, {"smooth_q": True}),
    ):
        with pytest.raises(ValueError, match="kv must be quantised"):
            plan_sage(q, keys, **options).attend(q, kv)


def test_the_error_of_short_sums_does_not_depend_on_the_layout():
    q, k, *_ = W(q_lens=(20,), k_lens=(30,), num_kv_heads=2).build()
    turned = q.transpose(1, 2), k.transpose(1, 2)
    with run_as("sm90"):
        one = short_sum_error(plan_sage(q, k, qk_dtype="fp8"), q, k)
        other = short_sum_error(plan_sage(*turned, qk_dtype="fp8", layout="BHSD"), *turned)
    assert one == other > 0

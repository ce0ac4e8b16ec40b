"""sage_attention against fp32 over what the host quantisers store, and what must happen on bad input."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowkv.quant import compare, max_abs, relative_l1
from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.runtime.launch import run_as
from narrowkv.sage import plan_sage, sage_attention, sage_attention_reference
from narrowkv.sage.cases import LSE_BOUND, PRECISIONS, PUBLISHED, SageCase
from narrowkv.sage.config import KeyOrder
from narrowkv.sage.reference import narrow_p_reference, short_sum_error

pytestmark = pytest.mark.sampled

W = SageCase.small
RAGGED = W(q_lens=(70, 0, 7, 128), k_lens=(1, 130, 0, 150), num_kv_heads=2, ragged=True)


def check(
    workload: SageCase,
    device: str = "cpu",
    tensors: tuple[torch.Tensor, ...] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Runs with a poisoned output; compares o and lse; returns o.

    P in E4M3 is what the operation is allowed besides the stored numbers: the bound is 1.25 times the error
    of that rounding alone, done in torch.
    """
    q, k, v, starts_q, starts_k = workload.build(device)
    q, k, v = tensors or (q, k, v)
    options = {**options, "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    plan = plan_sage(q, k, **options)
    out = torch.full_like(q, math.nan)
    o, lse = plan.attend(q, plan.quantize_kv(k, v), out=out, return_lse=True)
    expected, expected_lse = sage_attention_reference(q, k, v, return_lse=True, **options)
    rounded = narrow_p_reference(q, k, v, **options)
    assert o.data_ptr() == out.data_ptr()
    report = compare(o, expected)
    bound = 1.25 * relative_l1(rounded, expected) + 2e-3
    assert report.passes(relative_l1=bound), f"{report} (bound {bound:.3g})"
    assert bound < 0.04
    assert max_abs(lse, expected_lse) <= LSE_BOUND + short_sum_error(plan, q, k)
    return o


@pytest.mark.parametrize("granularity", SAGE_GRANULARITIES)
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
def test_every_precision_and_granularity(qk_dtype: str, granularity: str, device: str) -> None:
    check(W(), device, qk_dtype=qk_dtype, q_granularity=granularity, k_granularity=granularity)


PAIRS = [(q, k) for q, k in itertools.product(SAGE_GRANULARITIES, repeat=2) if q != k]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("q_granularity", "k_granularity"), PAIRS)
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_every_precision_with_every_pair_of_granularities(
    qk_dtype: str, q_granularity: str, k_granularity: str, head_dim: int, smooth_q: bool, causal: str | None,
    device: str,
) -> None:  # fmt: skip
    check(
        W(q_lens=(70,), k_lens=(260,), head_dim=head_dim), device, qk_dtype=qk_dtype, causal=causal,
        q_granularity=q_granularity, k_granularity=k_granularity, smooth_q=smooth_q,
    )  # fmt: skip


MASKS: dict[str, dict[str, Any]] = {
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
def test_every_mask_with_lengths_that_differ(mask: str, lens: tuple[int, int], device: str) -> None:
    check(W(q_lens=lens[:1], k_lens=lens[1:]), device, k_granularity="per_thread", **MASKS[mask])


@pytest.mark.parametrize("mask", ["none", "bottom right", "window"])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_ragged_sequences_some_of_them_empty(mask: str, smooth_q: bool, device: str) -> None:
    check(RAGGED, device, smooth_q=smooth_q, **MASKS[mask])


@pytest.mark.parametrize("ratio", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gqa_ratios_and_head_dims_in_a_batch(ratio: int, head_dim: int, device: str) -> None:
    check(
        W(q_lens=(40, 40), k_lens=(90, 90), num_kv_heads=2, gqa_ratio=ratio, head_dim=head_dim), device,
        causal="bottom_right",
    )  # fmt: skip


def test_fp16_in_and_out(device: str) -> None:
    assert check(W(dtype=torch.float16), device, smooth_q=True).dtype == torch.float16


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129, 257])
def test_lengths_around_the_tiles(n: int, device: str) -> None:
    check(W(q_lens=(n,), k_lens=(n,)), device, causal="bottom_right", k_granularity="per_thread")


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("qk_dtype", PRECISIONS)
def test_the_code_paths_of_amd_targets_when_interpreted(target: str, qk_dtype: str) -> None:
    with run_as(target):
        check(W(), qk_dtype=qk_dtype, k_granularity="per_thread", causal="bottom_right")


@pytest.mark.parametrize(
    "order", [KeyOrder(), KeyOrder(2, 4, 2), KeyOrder(4, 2, 4), KeyOrder(2, 4, 4)], ids=str
)
def test_no_order_of_the_keys_changes_the_result(order: KeyOrder) -> None:
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
@settings(max_examples=10)
def test_any_ragged_batch(
    lens: list[tuple[int, int]], qk_dtype: str, granularity: str, mask: str, smooth_k: bool
) -> None:
    q_lens, k_lens = zip(*lens, strict=True)
    check(
        W(q_lens=q_lens, k_lens=k_lens, ragged=True), qk_dtype=qk_dtype, q_granularity=granularity,
        smooth_k=smooth_k, **MASKS[mask],
    )  # fmt: skip


# ---------------------------------------------------------------------------- smoothing and accuracy


def _against_exact(workload: SageCase, device: str, **options: Any) -> Any:
    q, k, v, *_ = workload.build(device)
    return compare(sage_attention(q, k, v, **options), sage_attention_reference(q, k, v, qk_dtype=None))


def test_smoothing_lessens_the_error_and_keeps_lse(device: str) -> None:
    workload = W(q_lens=(256,), k_lens=(256,), head_dim=128, data="offset")
    q, k, v, *_ = workload.build(device)
    _, exact = sage_attention_reference(q, k, v, qk_dtype=None, return_lse=True)
    _, lse = sage_attention(q, k, v, return_lse=True)
    assert max_abs(lse, exact) < 0.2
    errors = [
        _against_exact(workload, device, qk_dtype="int4", smooth_k=smooth_k, smooth_q=smooth_q).relative_l1
        for smooth_k, smooth_q in ((False, False), (True, False), (True, True))
    ]
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < errors[1]


@pytest.mark.parametrize("granularity", PUBLISHED)
def test_int8_is_closer_than_the_published_int4_with_an_offset_in_k(granularity: str, device: str) -> None:
    cosine, l1, rmse = PUBLISHED[granularity]
    report = _against_exact(
        W(q_lens=(256,), k_lens=(256,), head_dim=128), device, qk_dtype="int8", q_granularity=granularity,
        k_granularity=granularity,
    )  # fmt: skip
    assert report.passes(cosine=cosine, relative_l1=l1, rmse=rmse), str(report)


# ---------------------------------------------------------------------------- plans


def test_keys_and_values_quantised_once_serve_many_queries(device: str) -> None:
    q, k, v, *_ = W(k_lens=(200,)).build(device)
    options: dict[str, Any] = {"causal": "bottom_right", "smooth_q": True}
    plan = plan_sage(q, k, **options)
    kv = plan.quantize_kv(k, v)
    for count in (150, 150, 20):
        part = q[:, -count:]
        again = plan_sage(part, k, **options).attend(part, kv, return_lse=True)
        o, lse = sage_attention(part, k, v, return_lse=True, **options)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], lse)


def test_the_same_call_twice_is_bitwise_the_same(device: str) -> None:
    q, k, v, *_ = W(q_lens=(300,), k_lens=(300,)).build(device)
    assert torch.equal(sage_attention(q, k, v), sage_attention(q, k, v))


def test_a_sequence_alone_is_bitwise_the_same_as_in_a_batch(device: str) -> None:
    """One descale for a whole tensor is of the whole batch; every finer one is the sequence's own."""
    q, k, v, starts_q, starts_k = RAGGED.build(device)
    whole = sage_attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, smooth_q=True)
    alone = sage_attention(q[None, -128:], k[None, -150:], v[None, -150:], smooth_q=True)
    assert torch.equal(whole[-128:], alone[0])


def test_a_kv_of_another_plan_is_refused(device: str) -> None:
    q, k, v, *_ = W().build(device)
    plan = plan_sage(q, k)
    kv = plan.quantize_kv(k, v)
    for other in (
        plan_sage(q, k, qk_dtype="fp8"),
        plan_sage(q, k, k_granularity="per_block"),
        plan_sage(q, k[:, 1:]),
        plan_sage(q, k, smooth_q=True),
    ):
        with pytest.raises(ValueError, match="kv must be quantised"):
            other.attend(q, kv)


# ---------------------------------------------------------------------------- degenerate input


def test_a_zero_channel_of_v_and_a_constant_row_of_k(device: str) -> None:
    q, k, v, *_ = W().build(device)
    v[..., 5] = 0.0
    k[:, 7] = 3.0
    o = check(W(), device, tensors=(q, k, v), k_granularity="per_thread")
    assert bool((o[..., 5] == 0).all())


def test_keys_that_are_all_alike_average_v(device: str) -> None:
    q, k, v, *_ = W().build(device)
    k[:] = k[:, :1]
    for options in ({}, {"smooth_k": False}):
        o = sage_attention(q, k, v, **options)
        mean = v.float().mean(1, keepdim=True).expand(-1, q.shape[1], -1, -1).repeat_interleave(2, 2)
        assert relative_l1(o, mean) < 0.06


@pytest.mark.parametrize("empty", ["k", "q", "batch", "both"])
def test_nothing_to_attend_to(empty: str, device: str) -> None:
    q, k, v, *_ = W().build(device)
    if empty in ("k", "both"):
        k, v = k[:, :0], v[:, :0]
    if empty in ("q", "both"):
        q = q[:, :0]
    if empty == "batch":
        q, k, v = q[:0], k[:0], v[:0]
    o, lse = sage_attention(q, k, v, causal="bottom_right", return_lse=True)
    assert o.shape == q.shape
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())


def test_huge_logits_stay_finite(device: str) -> None:
    q, k, v, *_ = W().build(device)
    q[:, ::2] *= 2000
    o, lse = sage_attention(q, k, v, return_lse=True)
    assert float(lse.abs().max()) > 1e4
    assert bool(o.isfinite().all())
    assert bool(lse.isfinite().all())
    expected = narrow_p_reference(q, k, v)
    assert relative_l1(o, expected) < 0.03


def test_a_scale_of_zero_is_uniform(device: str) -> None:
    check(W(), device, sm_scale=0.0, causal="bottom_right")


def test_a_nan_in_k_stays_with_its_head(device: str) -> None:
    workload = W(num_kv_heads=2, gqa_ratio=1)
    q, k, v, *_ = workload.build(device)
    k[0, 140, 1, 3] = math.nan
    clean = sage_attention(q, *workload.build(device)[1:3])
    o = sage_attention(q, k, v)
    assert torch.equal(o[:, :, 0], clean[:, :, 0])
    assert bool(o[:, :, 1].isnan().all())


def test_a_nan_in_a_key_that_is_not_attended_to_is_not_seen(device: str) -> None:
    q, k, v, *_ = W().build(device)
    k[0, 140] = math.nan
    o = sage_attention(q, k, v, causal="bottom_right", smooth_k=False, k_granularity="per_thread")
    assert bool(o[:, :128].isfinite().all())  # the NaN's group begins at key 128
    assert bool(o[:, 140:].isnan().all())


def test_input_past_a_tensors_end_is_never_read(device: str) -> None:
    q, k, v, starts_q, starts_k = RAGGED.build(device)
    padded = [torch.cat([x, torch.full_like(x[:9], math.nan)]) for x in (q, k, v)]
    o = sage_attention(*padded, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    assert torch.equal(o[: len(q)], sage_attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k))


# ---------------------------------------------------------------------------- refusals

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
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


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v, *_ = W().build()
    with pytest.raises(error, match=message):
        sage_attention(q, k, v, **options)


def test_bad_tensors_are_refused() -> None:
    q, k, v, starts_q, starts_k = RAGGED.build()
    ragged = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    assert starts_q is not None
    for message, arguments, options in (
        ("q must have dtype one of", (q.float(), k, v), ragged),
        ("v must have dtype one of", (q, k, v.float()), ragged),
        ("head_dim in", (q[..., :32], k[..., :32], v[..., :32]), ragged),
        ("k must have q's head_dim", (q, k[..., :32], v), ragged),
        ("multiple of k's 2 heads", (q[:, :3], k, v), ragged),
        ("v must have shape", (q, k, v[1:]), ragged),
        ("contiguous last dimension", (q, k, v.transpose(0, 2).contiguous().transpose(0, 2)), ragged),
        ("q must have shape", (q, k, v), {}),
        ("cu_seqlens_q must have dtype one of", (q, k, v), {**ragged, "cu_seqlens_q": starts_q.float()}),
        ("cu_seqlens_k must have shape", (q, k, v), {**ragged, "cu_seqlens_k": starts_q[:-1]}),
        ("k must have q's batch", (q[None], k[None].expand(2, -1, -1, -1), v[None]), {}),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            sage_attention(*arguments, **options)
    grad = k.clone().requires_grad_()
    with pytest.raises(ValueError, match="k must not require grad"):
        sage_attention(q, grad, v, **ragged)


def test_bad_outputs_are_refused() -> None:
    q, k, v, *_ = W().build()
    plan = plan_sage(q, k)
    kv = plan.quantize_kv(k, v)
    with pytest.raises(TypeError, match="out must have dtype"):
        plan.attend(q, kv, out=q.float())
    with pytest.raises(ValueError, match="out must have shape"):
        plan.attend(q, kv, out=torch.empty_like(q[:, 1:]))
    with pytest.raises(ValueError, match="out must not share memory with q"):
        plan.attend(q, kv, out=q)

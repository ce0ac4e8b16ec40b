"""Sage attention: masks are exact, limits of lengths and grids hold, swapped axes are refused."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import executing
from narrowkv.sage import plan_sage, sage_attention, sage_attention_reference
from narrowkv.sage.options import SageArguments, SageOptions
from narrowkv.sage.torch_ops import traced_sage
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.sage import SageCase

pytestmark = pytest.mark.sampled
W = SageCase.small
I32 = torch.int32


# ------------------------------------------------------------------------------------------ masks

LARGEST = 2**31 - 1
# How rows are aligned, and how far they see to the left and right; None where no window is given.
WINDOWS = [
    ("top_left", None), ("top_left", (128, 30)), ("top_left", (4, 0)), ("top_left", (32, 31)),
    ("top_left", (0, 0)), ("top_left", (9, -1)), ("top_left", (LARGEST, LARGEST)),
    ("bottom_right", None), ("bottom_right", (128, 30)), ("bottom_right", (7, 50)),
    ("bottom_right", (32, 31)),
]  # fmt: skip


def _mask(causal: str, window: tuple[int, int] | None, rows: int, keys: int) -> torch.Tensor:
    """Which keys each row sees."""
    left, right = window or (-1, -1)
    behind = torch.arange(keys)[None] - torch.arange(rows)[:, None]
    if causal == "bottom_right":
        behind -= keys - rows
    return (behind <= max(right, 0)) & ((behind >= -left) | (left == -1))


@pytest.mark.parametrize("lens", [(50, 130), (130, 50), (40, 40)], ids=str)
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_every_window_is_that_of_a_naive_mask(
    causal: str, window: tuple[int, int] | None, lens: tuple[int, int], device: str
) -> None:
    options: dict[str, Any] = {"causal": causal, "return_lse": True, **({"window": window} if window else {})}
    q, k, v, *_ = W(q_lens=lens[:1], k_lens=lens[1:], gqa_ratio=1).build(device)
    mask = _mask(causal, window, *lens).to(device)
    scores = torch.einsum("qd,kd->qk", q[0, :, 0].float(), k[0, :, 0].float()) * 64**-0.5
    scores = scores.masked_fill(~mask, -math.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ v[0, :, 0].float()
    sums = torch.logsumexp(scores, -1)
    exact, exact_sums = sage_attention_reference(q, k, v, qk_dtype=None, **options)
    torch.testing.assert_close(exact[0, :, 0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exact_sums[0, :, 0], sums, rtol=1e-4, atol=1e-4)
    o, lse = sage_attention(q, k, v, **options)
    rounded, rounded_sums = sage_attention_reference(q, k, v, **options)
    assert torch.equal(lse[0, :, 0] == -math.inf, ~mask.any(-1))
    torch.testing.assert_close(lse, rounded_sums, rtol=0, atol=1e-3)
    assert float((o.float() - rounded).abs().sum()) <= 0.03 * float(rounded.abs().sum())


# ------------------------------------------------------------------------------------------ lengths


def test_a_sequence_with_a_start_outside_the_tensor_has_no_tokens(device: str) -> None:
    q, k, v, starts_q, starts_k = W(q_lens=(20, 7, 13), k_lens=(30, 4, 9), ragged=True).build(device)
    assert starts_q is not None
    far = starts_q.long()
    far[2] += 2**32  # cut to 32 bits it would be right
    out = torch.full_like(q, 7.0)
    sage_attention(q, k, v, cu_seqlens_q=far, cu_seqlens_k=starts_k, out=out)
    assert bool((out[20:] == 7.0).all())
    assert not bool((out[:20] == 7.0).all())


def test_many_more_sequences_than_are_looked_at_together(device: str) -> None:
    lens = tuple(1 + i % 2 for i in range(140))
    q, k, v, starts_q, starts_k = W(q_lens=lens, k_lens=lens, gqa_ratio=1, ragged=True).build(device)
    assert starts_q is not None
    plan = plan_sage(q, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, smooth_k=False)
    kv = plan.quantize_kv(k, v)
    assert kv.bounds is not None
    expected = torch.stack([starts_q[:-1], starts_q.diff()], -1)
    assert torch.equal(kv.bounds, expected)
    at = 2 * 63 + 1
    begin, end = int(starts_q[at]), int(starts_q[at + 1])
    alone = sage_attention(q[None, begin:end], k[None, begin:end], v[None, begin:end], smooth_k=False)
    assert torch.equal(plan.attend(q, kv)[begin:end], alone[0])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("target", ["gfx942", "gfx950", "cuda"])
def test_no_grid_passes_the_limit_of_its_second_and_third_extent(target: str, ragged: bool) -> None:
    batch = 70_000
    sizes = (batch, 1, 64) if ragged else (batch, 1, 1, 64)
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16).expand(sizes)
    starts = torch.arange(batch + 1, dtype=I32) if ragged else None
    recorder = LaunchRecorder(target)
    with executing(recorder):
        sage_attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True)
    assert len(recorder.launches) >= 5
    for launch in recorder.launches:
        assert all(extent <= 65535 for extent in launch.grid[1:]), launch.grid


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    "options", [{}, {"smooth_q": True, "causal": "bottom_right"}], ids=["plain", "causal"]
)
def test_heads_before_tokens_is_the_same_attention(options: dict[str, Any], device: str) -> None:
    q, k, v, *_ = W(q_lens=(40, 40), k_lens=(90, 90), num_kv_heads=2).build(device)
    right, right_lse = sage_attention(q, k, v, return_lse=True, **options)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    o, lse = sage_attention(*turned, layout="BHSD", return_lse=True, **options)
    assert o.is_contiguous()
    assert torch.equal(o.transpose(1, 2), right)
    assert torch.equal(lse.transpose(1, 2), right_lse)
    buffers = torch.empty_like(o), torch.empty_like(lse)
    plan = plan_sage(*turned[:2], layout="BHSD", **options)
    plan.attend(turned[0], plan.quantize_kv(*turned[1:]), out=buffers[0], lse=buffers[1])
    assert torch.equal(buffers[0], o)
    assert torch.equal(buffers[1], lse)
    expected, sums = sage_attention_reference(*turned, layout="BHSD", return_lse=True, **options)
    assert expected.shape == o.shape
    torch.testing.assert_close(lse, sums, rtol=0, atol=1e-3)


def test_axes_that_were_evidently_swapped_are_refused() -> None:
    q, k = torch.zeros(1, 8, 300, 64).bfloat16(), torch.zeros(1, 2, 300, 64).bfloat16()
    with pytest.raises(ValueError, match="pass layout='BHSD'"):
        sage_attention(q, k, k)
    with pytest.raises(ValueError, match="pass layout='BSHD'"):
        sage_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), layout="BHSD")
    # Fewer tokens than that, but other numbers of them.
    with pytest.raises(ValueError, match=r"multiple of k's 90 heads.*pass layout='BHSD'"):
        sage_attention(q[:, :, :40], k[:, :, :90], k[:, :, :90])
    starts = torch.tensor([0, 8], dtype=I32)
    with pytest.raises(ValueError, match="layout must be left out with cu_seqlens"):
        sage_attention(q[0], k[0], k[0], cu_seqlens_q=starts, cu_seqlens_k=starts, layout="BHSD")


# ------------------------------------------------------------------------------------------ plans

Q, K, V, *_ = W().build()


def test_results_overlap_neither_quantised_keys_nor_each_other() -> None:
    plan = plan_sage(Q, K)
    kv = plan.quantize_kv(K, V)
    kv.k.untyped_storage().resize_(max(kv.k.untyped_storage().nbytes(), Q.nbytes))
    out = torch.empty_like(Q)
    for results, message in (
        ({"out": torch.empty(0, dtype=Q.dtype).set_(kv.k.untyped_storage(), 0, Q.shape)}, "out .* with k"),
        ({"out": out, "lse": torch.empty(0).set_(out.untyped_storage(), 0, Q.shape[:-1])}, "out .* with lse"),
    ):
        with pytest.raises(ValueError, match=message.replace(".*", "must not share memory")):
            plan.attend(Q, kv, **results)


def _over(read: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor like another one in the memory of one that is at least as large."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(
        read.untyped_storage(), read.storage_offset() * read.itemsize // like.itemsize, like.shape
    )


@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize("steps", ["attend", "run"])
def test_results_of_a_later_call_overlap_nothing_that_is_read(steps: str, smooth_q: bool) -> None:
    """Shapes and dtypes of a later call are not checked again; where its tensors lie is."""
    lens = {"q_lens": (64,), "k_lens": (512,), "num_kv_heads": 2}  # K and V are larger than results
    q, k, v, *_ = W(**lens).build()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    with executing(LaunchRecorder("gfx942")) as recorder:
        plan = plan_sage(q, k, smooth_q=smooth_q)
        kv = plan.quantize_kv(k, v)
        call = partial(plan.attend, q, kv) if steps == "attend" else partial(plan.run, q, k, v)
        call(out=out, lse=lse)
        recorder.clear()
        read = {"q": q} | ({"k": kv.k, "v": kv.v} if steps == "attend" else {})
        read |= {"K as it came": k} if smooth_q else {}
        for name, tensor in read.items():
            for results in ({"out": _over(tensor, out), "lse": lse}, {"out": out, "lse": _over(tensor, lse)}):
                with pytest.raises(ValueError, match=f"must not share memory with {name}"):
                    call(**results)
        with pytest.raises(ValueError, match="out must not share memory with lse"):
            call(out=out, lse=_over(out, lse))
        assert not recorder.launches


def test_plans_compare_and_copy() -> None:
    starts = torch.tensor([0, 150], dtype=I32)
    plan = plan_sage(Q[0], K[0], cu_seqlens_q=starts, cu_seqlens_k=starts)
    kv = plan.quantize_kv(K[0], V[0])
    assert plan == plan
    assert plan != copy.copy(plan)
    for other in (copy.copy(plan), copy.deepcopy(plan), replace(plan)):
        assert torch.equal(other.attend(Q[0], kv), plan.attend(Q[0], kv))


def test_options_are_the_keywords_of_the_arguments_and_others_are_refused() -> None:
    assert SageOptions.__annotations__.keys() | {"q", "k", "v", "kv"} == set(SageArguments._fields)
    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    plan = plan_sage(x, x)
    kv = plan.quantize_kv(x, x)
    calls = {
        "qk_type": [
            partial(each, x, x, x) for each in (sage_attention, sage_attention_reference, traced_sage)
        ],
        "sm_scale": [partial(plan.run, x, x, x), partial(plan.attend, x, kv)],
        "cu_seqlens_k": [partial(plan.attend, x, kv)],
        "return_lse": [partial(plan_sage, x, x)],
    }
    for keyword, ways in calls.items():
        for way in ways:
            with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{keyword}'"):
                way(**{keyword: None})

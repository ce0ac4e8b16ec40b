"""Sage attention: wrong lengths stay with their sequences, masks are exact, swapped axes are refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import executing
from narrowkv.sage import plan_sage, sage_attention, sage_attention_reference
from narrowkv.sage.cases import SageCase
from narrowkv.testing.calls import LaunchRecorder

pytestmark = pytest.mark.sampled
W = SageCase.small
I32, I64 = torch.int32, torch.int64
RAGGED = W(q_lens=(20, 0, 7, 33, 5), k_lens=(30, 4, 40, 0, 9), gqa_ratio=1, ragged=True)


# ------------------------------------------------------------------------------------------ masks

# Names as composable-kernel's attention example spells them.
WINDOWS = {
    "t": {"causal": "top_left"},
    "b": {"causal": "bottom_right"},
    "t:128,30": {"causal": "top_left", "window": (128, 30)},
    "b:128,30": {"causal": "bottom_right", "window": (128, 30)},
    "t:4,0": {"causal": "top_left", "window": (4, 0)},
    "b:7,50": {"causal": "bottom_right", "window": (7, 50)},
    "xt:64": {"causal": "top_left", "window": (32, 31)},
    "xb:64": {"causal": "bottom_right", "window": (32, 31)},
    "xt:1": {"causal": "top_left", "window": (0, 0)},
    "t, window to the left": {"causal": "top_left", "window": (9, -1)},
    "a window as large as int32": {"causal": "top_left", "window": (2**31 - 1, 2**31 - 1)},
}


def _mask(name: str, rows: int, keys: int) -> torch.Tensor:
    """Which keys a row sees, from the generic coordinates (y, x) of that example: keys (i - y, i + x)."""
    word = name.partition(":")[0].partition(",")[0]
    options = WINDOWS[name]
    left, right = options.get("window", (-1, -1))
    right = 0 if right == -1 else right
    top_left = options["causal"] == "top_left"
    assert top_left == (word in ("t", "xt", "a window as large as int32"))
    left = (rows if top_left else keys) - 1 if left == -1 else left
    y = left + (0 if top_left else rows - keys) + 1
    x = right + (0 if top_left else keys - rows) + 1
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None]
    return (j > i - y) & (j < i + x)


@pytest.mark.parametrize("lens", [(50, 130), (130, 50), (40, 40)], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_every_window_is_that_of_a_naive_mask(name: str, lens: tuple[int, int], device: str) -> None:
    q, k, v, *_ = W(q_lens=lens[:1], k_lens=lens[1:], gqa_ratio=1).build(device)
    mask = _mask(name, *lens).to(device)
    scores = torch.einsum("qd,kd->qk", q[0, :, 0].float(), k[0, :, 0].float()) * 64**-0.5
    scores = scores.masked_fill(~mask, -math.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ v[0, :, 0].float()
    sums = torch.logsumexp(scores, -1)
    exact, exact_sums = sage_attention_reference(q, k, v, qk_dtype=None, return_lse=True, **WINDOWS[name])
    torch.testing.assert_close(exact[0, :, 0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exact_sums[0, :, 0], sums, rtol=1e-4, atol=1e-4)
    o, lse = sage_attention(q, k, v, return_lse=True, **WINDOWS[name])
    rounded, rounded_sums = sage_attention_reference(q, k, v, return_lse=True, **WINDOWS[name])
    assert torch.equal(lse[0, :, 0] == -math.inf, ~mask.any(-1))
    torch.testing.assert_close(lse, rounded_sums, rtol=0, atol=1e-3)
    assert float((o.float() - rounded).abs().sum()) <= 0.03 * float(rounded.abs().sum())


# ------------------------------------------------------------------------------------------ lengths


class _Between:
    """Q, K and V of a ragged call between rows of NaN, and where its sequences begin."""

    GUARDS = 150

    def __init__(self, device: str) -> None:
        q, k, v, starts_q, starts_k = RAGGED.build(device)
        assert starts_q is not None
        assert starts_k is not None
        self.q, self.k, self.v = (self._placed(x) for x in (q, k, v))
        self.starts = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
        self.out = self._placed(torch.full_like(q, math.nan))

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.full((len(x) + 2 * self.GUARDS, *x.shape[1:]), math.nan, dtype=x.dtype, device=x.device)
        placed = whole[self.GUARDS : self.GUARDS + len(x)]
        placed.copy_(x)
        return placed

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.out.fill_(7.0)
        o, lse = sage_attention(
            self.q, self.k, self.v, **{**self.starts, **options}, out=self.out, return_lse=True
        )  # type: ignore[misc]
        around = torch.cat([self.out._base[: self.GUARDS], self.out._base[-self.GUARDS :]])
        assert bool(around.isnan().all()), "written outside the output"
        return o.clone(), lse.clone()


VALUES = {
    "negative": -5,
    "most negative": -(2**31),
    "past the end": 10**4,
    "most": 2**31 - 1,
    "decreasing": 1,
}


@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_a_wrong_start_stays_with_the_sequences_that_it_bounds(
    which: str, what: str, smooth_q: bool, device: str
) -> None:
    call = _Between(device)
    right, right_lse = call.run(smooth_q=smooth_q)
    starts = call.starts[which].clone()
    starts[3] = VALUES[what]  # the end of sequence 2 and the beginning of sequence 3
    o, lse = call.run(smooth_q=smooth_q, **{which: starts})
    begins = call.starts["cu_seqlens_q"].tolist()
    for seq in (0, 1, 4):
        rows = slice(begins[seq], begins[seq + 1])
        assert torch.equal(o[rows], right[rows]), f"sequence {seq}"
        assert torch.equal(lse[rows], right_lse[rows]), f"sequence {seq}"
    assert not bool(o.isnan().any()), "a row outside the tensors was read"
    with pytest.raises(ValueError, match=f"{which} must"):
        call.run(**{which: starts}, validate=True)


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 1}, "must start at 0, got 1"),
        ({2: 1}, "must not decrease, got"),
        ({5: 10**6}, "must end within the .* tokens, got 1000000"),
    ],
)
def test_validate_says_what_is_wrong(which: str, change: dict[int, int], message: str) -> None:
    call = _Between("cpu")
    starts = call.starts[which].clone()
    for index, value in change.items():
        starts[index] = value
    with pytest.raises(ValueError, match=f"{which} {message}"):
        call.run(**{which: starts}, validate=True)
    call.run(validate=True)


def test_starts_may_be_int64_and_strided(device: str) -> None:
    call = _Between(device)
    right = call.run()
    spread = {}
    for name, starts in call.starts.items():
        column = torch.zeros(len(starts), 3, dtype=I64, device=device)
        column[:, 1] = starts
        spread[name] = column[:, 1]
    for got, want in zip(call.run(**spread), right, strict=True):
        assert torch.equal(got, want)
    far = call.starts["cu_seqlens_q"].long()
    far[3] = 2**32 + int(far[3])  # an int32 would wrap to the right value
    o, _ = call.run(cu_seqlens_q=far)
    begins = call.starts["cu_seqlens_q"].tolist()
    assert torch.equal(o[: begins[2]], right[0][: begins[2]])
    assert bool((o[begins[2] : begins[4]] == 7.0).all())


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


# ------------------------------------------------------------------------------------------ refusals

Q, K, V, *_ = W().build()
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "zero query heads": (ValueError, "at least 1, got 0", lambda: sage_attention(Q[:, :, :0], K, V)),
    "zero KV heads": (
        ValueError, "multiple of k's 0 heads", lambda: sage_attention(Q, K[:, :, :0], V[:, :, :0]),
    ),
    "k that is None": (TypeError, "k must be a torch.Tensor", lambda: sage_attention(Q, None, V)),
    "a kv of another class": (
        TypeError, "kv must be a QuantizedKV", lambda: plan_sage(Q, K).attend(Q, (K, V)),
    ),
    "more tokens than planned": (
        ValueError, "at most 1 sequences and 149 tokens as planned",
        lambda: plan_sage(Q[:, 1:], K).attend(Q, plan_sage(Q, K).quantize_kv(K, V)),
    ),
    "starts for a dense plan": (
        ValueError, "cu_seqlens_k must be None", lambda: plan_sage(Q, K).quantize_kv(K, V, cu_seqlens_k=Q),
    ),
    "a workspace of another class": (
        TypeError, "workspace must be a Workspace", lambda: plan_sage(Q, K).with_workspace(3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_words(what: str) -> None:
    error, message, call = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


def test_an_output_that_overlaps_itself_or_an_input_is_refused() -> None:
    plan = plan_sage(Q, K)
    kv = plan.quantize_kv(K, V)
    with pytest.raises(ValueError, match="out must not overlap itself"):
        plan.attend(Q, kv, out=torch.empty(1, 1, *Q.shape[2:], dtype=Q.dtype).expand(Q.shape))
    with pytest.raises(ValueError, match="out must not share memory with k"):
        plan.attend(Q, kv, out=torch.empty(0, dtype=Q.dtype).set_(_grown(kv.k, Q), 0, Q.shape))
    out = torch.empty_like(Q)
    lse = torch.empty(0).set_(out.untyped_storage(), 0, Q.shape[:-1])
    with pytest.raises(ValueError, match="lse must not share memory with o"):
        plan.attend(Q, kv, out=out, lse=lse)
    with pytest.raises(ValueError, match="lse must have shape"):
        plan.attend(Q, kv, lse=torch.empty(3))


def _grown(tensor: torch.Tensor, like: torch.Tensor) -> torch.UntypedStorage:
    storage = tensor.untyped_storage()
    storage.resize_(max(storage.nbytes(), like.nbytes))
    return storage


def test_plans_compare_and_copy() -> None:
    starts = torch.tensor([0, 150], dtype=I32)
    plan = plan_sage(Q[0], K[0], cu_seqlens_q=starts, cu_seqlens_k=starts)
    kv = plan.quantize_kv(K[0], V[0])
    assert plan == plan
    assert plan != copy.copy(plan)
    for other in (copy.copy(plan), copy.deepcopy(plan), replace(plan)):
        assert torch.equal(other.attend(Q[0], kv), plan.attend(Q[0], kv))

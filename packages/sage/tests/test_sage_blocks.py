"""Block masks: what is masked is neither attended to nor read, and what is shown is attended to exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.quant import relative_l1
from narrowkv.runtime.launch import executing
from narrowkv.sage import SageShape, plan_sage, sage_attention, sage_attention_reference
from narrowkv.sage.reference import narrow_p_reference, short_sum_error
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.sage import LSE_BOUND, SageCase
from narrowkv.testing.checking import assert_agrees
from narrowkv.testing.places import AMD_TARGETS, Place

pytestmark = pytest.mark.sampled
W = SageCase.small


def flags_of(case: SageCase, sizes: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    """The case's random mask; the first block of queries of head 0 attends to nothing."""
    flags = replace(case, blocks=sizes, seed=7).block_mask(device)
    flags[0, 0, 0] = False
    return flags


# Sizes of the blocks, lengths of Q and of K, and options.
CASES: dict[str, tuple[tuple[int, int], SageCase, dict[str, Any]]] = {
    "128 x 64": ((128, 64), W(q_lens=(300,), k_lens=(300,)), {}),
    "256 x 128, causal": ((256, 128), W(q_lens=(300,), k_lens=(500,)), {"causal": "bottom_right"}),
    "a window": ((128, 128), W(q_lens=(300,), k_lens=(260,)), {"window": (100, 30)}),
    "rows past the keys": (
        (128, 64), W(q_lens=(300,), k_lens=(70,)), {"causal": "top_left", "window": (9, -1)},
    ),
    "a batch of fp16, FP8, both means": (
        (128, 64), W(q_lens=(140, 140), k_lens=(200, 200), num_kv_heads=2, dtype=torch.float16),
        {"qk_dtype": "fp8", "smooth_q": True},
    ),
    "int4, head_dim 128": (
        (128, 64), W(q_lens=(140,), k_lens=(200,), head_dim=128, gqa_ratio=1), {"qk_dtype": "int4"},
    ),
    "ragged": (
        (128, 64), W(q_lens=(140, 0, 300), k_lens=(260, 70, 64), ragged=True), {"causal": "bottom_right"},
    ),
    "ragged blocks of several tiles, a window": (
        (256, 128), W(q_lens=(300, 17), k_lens=(130, 300), ragged=True, gqa_ratio=1), {"window": (100, 30)},
    ),
    "no keys": ((128, 64), W(q_lens=(140,), k_lens=(0,), gqa_ratio=1), {}),
}  # fmt: skip


@pytest.mark.sampled("place", most=dict.fromkeys(AMD_TARGETS, 2))
@pytest.mark.parametrize("place", ["here", *AMD_TARGETS], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_a_block_mask_against_the_reference(name: str, place: Place) -> None:
    sizes, case, options = CASES[name]
    q, k, v, *starts = case.build(place.device)
    if case.ragged:
        options = {**options, "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    flags = flags_of(case, sizes, place.device)
    masked = {**options, "block_mask": flags, "block_sizes": sizes}
    out = torch.full_like(q, math.nan)
    with place.context():
        plan = plan_sage(q, k, block_sizes=sizes, **options)
        kv = plan_sage(q, k, **options).quantize_kv(k, v)  # keys are quantised alike without a mask
        o, lse = plan.attend(q, kv, block_mask=flags, out=out, return_lse=True)
        expected, sums = sage_attention_reference(q, k, v, return_lse=True, **masked)
        rounded = narrow_p_reference(q, k, v, **masked)
    bound = 1.25 * relative_l1(rounded, expected) + 2e-3
    assert bound < 0.04
    lse_bound = LSE_BOUND + short_sum_error(plan, q, k)
    assert_agrees((o, lse), (expected, sums), bound=bound, lse_bound=lse_bound)
    assert torch.equal(lse == -math.inf, sums == -math.inf)
    first = (slice(min(sizes[0], case.q_lens[0])), 0) if case.ragged else (0, slice(sizes[0]), 0)
    assert bool((o[first] == 0).all())
    assert bool((lse[first] == -math.inf).all())


def test_blocks_past_a_ragged_mask_are_masked(device: str) -> None:
    case = W(q_lens=(300, 100), k_lens=(200, 300), ragged=True)
    q, k, v, *starts = case.build(device)
    options = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "return_lse": True}
    whole = flags_of(case, (128, 64), device)
    whole[:, :, 2:], whole[..., 3:] = False, False
    expected = sage_attention(q, k, v, block_mask=whole, block_sizes=(128, 64), **options)
    found = sage_attention(q, k, v, block_mask=whole[:, :, :2, :3], block_sizes=(128, 64), **options)
    assert all(map(torch.equal, found, expected))
    assert bool((found[0][256:300] == 0).all())


def test_one_block_is_attention_to_its_keys_alone(device: str) -> None:
    """Without the reference: torch's softmax over the keys of the blocks that are shown."""
    q, k, v, *_ = W(q_lens=(128,), k_lens=(256,), gqa_ratio=1, data="gaussian").build(device)
    flags = torch.tensor([0, 1, 0, 1], device=device, dtype=torch.uint8).view(1, 1, 1, 4)
    o, lse = sage_attention(q, k, v, block_mask=flags, block_sizes=(128, 64), return_lse=True)
    keys = torch.cat([torch.arange(64, 128), torch.arange(192, 256)]).to(device)
    scores = q[0, :, 0].float() @ k[0, keys, 0].float().mT * 64**-0.5
    torch.testing.assert_close(lse[0, :, 0], scores.logsumexp(-1), rtol=0, atol=0.05)
    assert relative_l1(o[0, :, 0].float(), scores.softmax(-1) @ v[0, keys, 0].float()) < 0.06


def test_masked_blocks_are_not_read(device: str) -> None:
    """A product with a NaN of V would be NaN, whatever P is."""
    q, k, v, *_ = W(q_lens=(128,), k_lens=(384,)).build(device)
    v[:, 130] = math.nan
    flags = torch.ones(1, 2, 1, 3, dtype=torch.bool, device=device)
    assert bool(sage_attention(q, k, v, block_mask=flags).isnan().any())
    flags[..., 1] = False
    assert bool(sage_attention(q, k, v, block_mask=flags).isfinite().all())


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}], ids=["plain", "causal"])
def test_a_mask_that_shows_everything_gives_the_bits_of_none(options: dict[str, Any], device: str) -> None:
    q, k, v, *_ = W(q_lens=(200,), k_lens=(260,)).build(device)
    flags = torch.ones(1, 2, 2, 3, dtype=torch.bool, device=device)
    found = sage_attention(q, k, v, block_mask=flags, return_lse=True, **options)
    expected = sage_attention(q, k, v, return_lse=True, **options)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_any_integer_but_zero_shows_a_block_and_strides_are_those_of_the_tensor(
    dtype: torch.dtype, device: str
) -> None:
    q, k, v, *_ = W(q_lens=(200,), k_lens=(260,)).build(device)
    flags = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool, device=device)
    expected = sage_attention(q, k, v, block_mask=flags.expand(1, 2, 2, 3).contiguous())
    numbers = torch.tensor([[7, 0, 5], [0, 64, 120]], dtype=dtype, device=device)
    turned = numbers.mT.contiguous().mT.expand(1, 2, 2, 3)
    assert torch.equal(sage_attention(q, k, v, block_mask=turned), expected)


def test_heads_before_tokens_and_a_plan_with_a_workspace(device: str) -> None:
    case = W(q_lens=(200, 200), k_lens=(260, 260), num_kv_heads=2)
    q, k, v, *_ = case.build(device)
    flags = flags_of(case, (128, 128), device)
    expected = sage_attention(q, k, v, block_mask=flags)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    shape = SageShape(3, 300, 400, 4, 2, 64, ragged=False)
    plan = plan_sage(shape, device=device, layout="BHSD", block_sizes=(128, 128)).with_workspace()
    assert "block mask of 128 queries x 128 keys" in plan.explain()
    assert "takes no block mask" in plan.why_quantised()
    assert torch.equal(plan.run(q, k, v, block_mask=flags).transpose(1, 2), expected)
    # The flags of a call are read when it runs.
    flags.fill_(0)
    assert bool((plan.run(q, k, v, block_mask=flags) == 0).all())


def test_lists_of_more_tiles_than_are_looked_at_together(device: str) -> None:
    """128 tiles are looked at in a step: tiles of three steps, among them both sides of each border."""
    case = W(q_lens=(3,), k_lens=(64 * 260,), gqa_ratio=1)
    q, k, v, *_ = case.build(device)
    flags = torch.zeros(1, 1, 1, 260, dtype=torch.bool, device=device)
    flags[..., [1, 127, 128, 130, 255, 256, 258]] = True
    options = {"block_mask": flags, "block_sizes": (128, 64)}
    o, lse = sage_attention(q, k, v, return_lse=True, **options)
    expected, sums = sage_attention_reference(q, k, v, return_lse=True, **options)
    assert_agrees((o, lse), (expected, sums), bound=0.04, lse_bound=LSE_BOUND)


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("k_block", [64, 128, 192])
def test_a_tile_lies_in_one_block_on_every_target(target: str, k_block: int) -> None:
    q = torch.empty(1, 256, 1, 128, dtype=torch.bfloat16)
    with executing(LaunchRecorder(target)):
        config = plan_sage(q, q, block_sizes=(384, k_block)).config
    assert k_block % config.block_n == 0
    assert 384 % config.block_m == 0


STARTS = torch.tensor([0, 150], dtype=torch.int32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"block_mask": torch.ones(1, 2, 2, 2)}, TypeError, "block_mask must have dtype one of"),
    ({"block_mask": torch.ones(1, 2, 2, 2) > 0, "block_sizes": (128, 64)}, ValueError, r"\[1, 2, 2, 3\]"),
    ({"block_mask": torch.ones(1, 1, 2, 2) > 0}, ValueError, "block_mask must have shape"),
    ({"block_mask": torch.ones(2, 2) > 0}, ValueError, "block_mask must have shape"),
    ({"block_mask": [[1]]}, TypeError, "block_mask must be a torch.Tensor"),
    ({"block_mask": torch.ones(1, 2, 2, 2, device="meta") > 0}, ValueError, "block_mask must be on cpu"),
    ({"block_mask": torch.ones(1, 2, 2, 2) > 0, "block_sizes": (64, 64)}, ValueError, r"block_sizes\[0\]"),
    ({"block_mask": torch.ones(1, 2, 2, 2) > 0, "block_sizes": (128, 32)}, ValueError, r"block_sizes\[1\]"),
    ({"block_mask": torch.ones(1, 2, 2, 2) > 0, "block_sizes": (128, 1.5)}, TypeError, r"block_sizes\[1\]"),
    ({"block_mask": torch.ones(1, 2, 2, 2) > 0, "block_sizes": 128}, TypeError, "block_sizes must be"),
    ({"block_sizes": (128, 128)}, ValueError, "block_sizes must be left out"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=str)
def test_wrong_masks_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v, *_ = W().build()
    with pytest.raises(error, match=message):
        sage_attention(q, k, v, **options)


def test_masks_and_plans_that_do_not_fit_are_refused() -> None:
    q, k, v, *_ = W().build()
    flags = torch.ones(1, 2, 2, 2, dtype=torch.bool)
    plain, masked = plan_sage(q, k), plan_sage(q, k, block_sizes=(128, 128))
    kv = plain.quantize_kv(k, v)
    with pytest.raises(ValueError, match="plan was made without block_sizes"):
        plain.attend(q, kv, block_mask=flags)
    with pytest.raises(ValueError, match="block_mask must be given"):
        masked.attend(q, kv)
    with pytest.raises(ValueError, match="block_mask must have shape"):
        masked.attend(q[:, :100], kv, block_mask=flags)
    starts = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    for shape in ((1, 2, 3, 2), (1, 2, 2, 0)):
        flags = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(ValueError, match="block_mask must have 1 to 2 blocks on axis"):
            sage_attention(q[0], k[0], v[0], block_mask=flags, **starts)

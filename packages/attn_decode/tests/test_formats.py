"""Decode over FP4 and integer caches, by both kernels and beside other formats, against the reference."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.config import DecodeShape, choose_config
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import get_target
from narrowkv.testing.cases.decode import BOUND, DecodeCase
from narrowkv.testing.checking import assert_agrees, assert_right

pytestmark = pytest.mark.sampled

W = DecodeCase.small
F4, F8 = "fp4_e2m1", "fp8_e4m3fn"
FP16, FP32 = torch.float16, torch.float32
SHORT = (40, 5)


@contextmanager
def running(kernel, device):
    """Calls inside run `kernel` as the case asks for it: "native" is gfx950's, interpreted."""
    if kernel != "native":
        yield
        return
    if device != "cpu":
        pytest.skip("no GPU but gfx950 has the native kernel's instruction")
    if not hasattr(InterpreterBuilder, "create_dot_scaled"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} has no tl.dot_scaled")
    with run_as("gfx950"):
        yield


def fp4(kernel, **changes):
    """A case of FP4 by a kernel; unsplit by the native one, of which gfx950 would launch 2048 programs."""
    split = {"split": "none"} if kernel == "native" else {}
    return W(**{"format": F4, "kernel": kernel, "out_dtype": FP32, **split, **changes})


either_kernel = pytest.mark.parametrize("kernel", ["decode", "native"])
SPECULATIVE = {"q_len": 3, "ragged": True, "window_left": 40, "logits_soft_cap": 20.0, "sinks": True}
OF_EITHER_KERNEL = {
    "ratio 1, tokens": {"gqa_ratio": 1, "head_dim": 128, "page_size": 1, "layout": "HND"},
    "ratio 8, pages of 3": {"gqa_ratio": 8, "head_dim": 128, "page_size": 3, "layout": "HND"},
    "ratio 16, pages of 64": {"gqa_ratio": 16, "page_size": 64, "layout": "HND"},
    "ratio 17": {"gqa_ratio": 17, "head_dim": 128, "layout": "HND"},
    **{f"head_dim {n}": {"head_dim": n} for n in (64, 96, 256)},
    **{f"head_dim {n}, groups": {"head_dim": n, "scale_group": 32} for n in (64, 96, 128, 256)},
    "speculative, bf16": SPECULATIVE,
    "speculative, fp16": {**SPECULATIVE, "q_dtype": FP16},
    "E4M3 scales": {"scale_format": "e4m3", "head_dim": 128, "q_len": 2},
}  # fmt: skip


@pytest.mark.sampled(always=[{"name": "E4M3 scales", "kernel": "native"}])
@either_kernel
@pytest.mark.parametrize("name", OF_EITHER_KERNEL)
def test_fp4_by_either_kernel(name, kernel, device):
    case = fp4(kernel, **OF_EITHER_KERNEL[name])
    with running(kernel, device):
        assert_right(case, device)


def mixed(k, v, **changes):
    """A short case of K and V in two formats, with outliers in K."""
    return W(**{"format": CacheFormat(k, v), "lens": SHORT, "outliers": True, "out_dtype": FP32, **changes})


HALF_FP4 = ((F8, F4), (F4, F8), (F4, "bf16"), ("fp16", F4))
WITH_INTEGERS = (("int8", "int4"), ("int8", F4), (F8, "int4"), ("int4", "bf16"), ("fp16", "int8"))
MIXED = [
    *(mixed(*pair, granularity="head", scale_group=group) for pair in HALF_FP4 for group in (None, 32)),
    *(mixed(k, v, scale_group=group, scale_format="e4m3", layout="HND")
      for k, v in ((F4, F4), (F8, F4), (F4, "bf16")) for group in (None, 16, 32)),
    *(mixed(k, v, scale_group=16, head_dim=96) for k, v in ((F4, F4), (F8, F4), (F4, "bf16"))),
    *(mixed(*pair, granularity=of) for pair in WITH_INTEGERS for of in ("float", "token_head")),
    mixed("int4", "int4", head_dim=80, layout="padded"),
    mixed("int4", "int4", q_len=4, gqa_ratio=17, window_left=20),
    mixed("int8", "int4", q_dtype=FP16, logits_soft_cap=5.0, split="per_sequence", granularity="token_head"),
    mixed("int8", "int4", page_size=1, layout="tokens", ragged=True),
    *(mixed(k, F4, lens=(300, 70, 1), num_kv_heads=1, split="per_sequence") for k in (F4, F8)),
]  # fmt: skip


# The code paths of other targets are interpreted, unsplit unless the case says how.
@pytest.mark.parametrize("target", [None, "gfx942", "gfx950"])
@pytest.mark.parametrize("case", MIXED, ids=str)
def test_formats_and_their_mixtures(case, target, device):
    if target is None:
        assert_right(case, device)
        return
    if device != "cpu":
        pytest.skip("kernels of another target run on a CPU only")
    with run_as(target):
        assert_right(replace(case, split=case.split or "none"))


# ----------------------------------------------------------------------------------------- unusual numbers

E4M3_16, GROUP_16 = {"scale_group": 16, "scale_format": "e4m3"}, {"scale_group": 16}
# What becomes NaN of the newest token of the first sequence, KV head 1: kernel, case, tensor, place, code.
NANS = {
    "FP8": ("decode", {"format": F8}, "", (3,), 0x7F),
    "scale of FP4": ("decode", {}, "_descale", (), 0xFF),
    "scale of FP4, native": ("native", {}, "_descale", (), 0xFF),
    "E4M3 scale of 16": ("decode", E4M3_16, "_descale", (1,), 0x7F),
    "scale of 16": ("decode", GROUP_16, "_descale", (1,), 0xFF),
    "scale of 32": ("decode", {"scale_group": 32}, "_descale", (1,), 0xFF),
    "scale of INT4": ("decode", {"format": "int4"}, "_descale", (), math.nan),
}  # fmt: skip


@pytest.mark.sampled("name")
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", NANS)
def test_a_nan_reaches_only_the_rows_that_attend_to_it(name, side, device):
    kernel, changes, tensor, place, code = NANS[name]
    case = fp4(kernel, lens=(40, 40), q_len=2, gqa_ratio=2, **changes)
    inputs = case.inputs(device)
    stored = getattr(inputs.cache, side + tensor)
    stored = stored if stored.dtype == FP32 else stored.view(torch.uint8)
    stored[(int(inputs.table.page_ids[0, 2]), 39 % 16, 1, *place)] = code
    with running(kernel, device):
        o, _ = inputs.call()
    expected = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
    expected[1, 2:4] = True  # sequence 0, second query token, heads of KV head 1
    assert torch.equal(o.isnan().any(-1), expected)
    assert_agrees(o[~expected], inputs.reference()[0][~expected])


@either_kernel
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, FP16])
def test_the_log_sum_exp_of_large_logits_has_all_bits_of_the_query(q_dtype, kernel, device):
    """A window of one key: lse is its logit, and keys with outliers make it large."""
    changes = {"scale_group": 32, "head_dim": 128, "q_dtype": q_dtype, "outliers": True, "spread": 1.0}
    inputs = fp4(kernel, **changes, window_left=0).inputs(device)
    with running(kernel, device):
        assert_agrees(inputs.call(), inputs.reference(), lse_bound=2e-5)


@either_kernel
def test_queries_of_every_size(kernel, device):
    """bfloat16 holds what neither fp16 nor E4M3 does: a power of two brings each tile into range."""
    case = fp4(kernel, lens=SHORT)
    for factor in (1e-30, 1e-6, 1e6, 1e30):
        inputs = case.inputs(device)
        inputs.q.copy_(inputs.q.float() * factor)
        with running(kernel, device):
            assert_right(case, inputs=inputs, sm_scale=0.125 / factor)


@either_kernel
@pytest.mark.parametrize("exponent", [0, 60, 127, 190])
def test_scales_of_any_size(exponent, kernel, device):
    """Scales 2**-127 .. 2**63, and keys whose scale is that much smaller than their neighbours'."""
    inputs = fp4(kernel, lens=SHORT).inputs(device)
    for scales in (inputs.cache.k_descale, inputs.cache.v_descale):
        used = scales != 0xFF
        scales[used] = exponent
        scales[:, ::3][used[:, ::3]] = max(exponent - 20, 0)
    inputs.options["sm_scale"] = min(0.125 * 2.0 ** (127 - exponent), 2.0**100)
    with running(kernel, device):
        o, _ = inputs.call()
    expected, _ = inputs.reference()
    if exponent == 0:  # subnormal results may be flushed
        assert float((o - expected).abs().max()) <= 2.0**-126
    else:
        assert_agrees(o, expected)


@pytest.mark.parametrize(("low", "high"), [(0, 40), (110, 140), (215, 240)])
def test_powers_of_two_from_end_to_end(low, high, device):
    """Scales near either end of E8M0: the smallest values are tiny, and the largest do not overflow."""
    case = fp4("decode", lens=(40,), scale_group=32)
    inputs = case.inputs(device)
    scales, random = inputs.cache.v_descale, torch.Generator().manual_seed(0)
    scales.copy_(torch.randint(low, high, scales.shape, generator=random))
    assert_right(case, inputs=inputs)


def test_zero_points_are_no_part_of_the_scale(device):
    """One value whose code is its zero point, beside one whose is not."""
    q, cache, table = W(lens=(2,), format="int4", num_kv_heads=1, gqa_ratio=1).build(device)
    page = int(table.page_ids[0, 0])
    cache.v.view(torch.uint8)[page, 0], cache.v.view(torch.uint8)[page, 1] = 0x77, 0xF0
    cache.k[page, :2] = 0
    word = torch.full((), 0.5, device=device).view(torch.int32) | 7
    cache.v_descale[page, :2] = word.view(FP32)
    cache.k_descale[page, :2] = 1.0
    o = paged_decode(q, cache, table, out_dtype=FP32)
    # Two keys alike: half of 0, and half of (0 - 7) / 2 and (15 - 7) / 2.
    assert o[0, 0, :4].tolist() == [-1.75, 2.0, -1.75, 2.0]


# ------------------------------------------------------------------------------------ the choice of a kernel

SHAPE = DecodeShape(4, 1, 24, 2, 128, 16, 1024)


def test_the_kernel_follows_the_target_and_can_be_forced():
    chosen = {
        name: choose_config(get_target(name), SHAPE, F4, F4).kernel
        for name in ("gfx942", "gfx950", "sm90", "cpu")
    }
    assert set(chosen.values()) == {"decode"}
    gfx950 = get_target("gfx950")
    assert choose_config(gfx950, SHAPE, F4, F4, kernel="native").kernel == "native"
    assert choose_config(gfx950, SHAPE, F8, F4).kernel == "decode"
    with pytest.raises(ValueError, match="kernel"):
        choose_config(gfx950, SHAPE, F4, F4, kernel="fast")


@pytest.mark.parametrize(
    ("target", "k", "match"),
    [
        ("gfx942", F4, "gfx942 lacks"),
        ("gfx950", F8, "keys in fp4_e2m1"),
        ("gfx950", "int4", "keys in fp4_e2m1, not int4"),
        ("cpu", F4, "native"),
    ],
)
def test_a_target_or_keys_without_the_native_kernel_are_refused(target, k, match):
    with run_as(target), pytest.raises(UnsupportedError, match=match):
        plan_decode(SHAPE, CacheFormat(k, F4), device="cpu", kernel="native")


@pytest.mark.parametrize("changes", [E4M3_16, {"scale_group": 32, "scale_format": "e4m3"}, GROUP_16], ids=str)
def test_the_native_kernel_refuses_scales_that_the_instruction_lacks(changes):
    q, cache, table = W(format=F4, head_dim=128, **changes).build()
    with run_as("gfx950"):
        plan = plan_decode(q, cache, table, kernel="native", split="none")
        with pytest.raises(UnsupportedError, match="kernel='native' needs keys with one scale a head or an"):
            paged_decode(q, cache, table, plan=plan)


def test_a_plan_is_of_one_target():
    q, cache, table = W(format=F4).build()
    plan = plan_decode(q, cache, table)
    with run_as("gfx950"), pytest.raises(ValueError, match="plan"):
        paged_decode(q, cache, table, plan=plan)


def test_a_plan_from_a_shape_serves_caches_with_scales_of_groups():
    q, cache, table = W(format=F4, scale_group=16, scale_format="e4m3").build()
    shape = DecodeShape(len(q), 1, q.shape[1], cache.num_kv_heads, 64, cache.page_size, 256)
    plan = plan_decode(shape, F4, device="cpu", scale_group=16, scale_format="e4m3")
    assert plan.config == plan_decode(q, cache, table, max_seq_len=256).config
    o = paged_decode(q, cache, table, plan=plan, out_dtype=FP32)
    assert relative_l1(o, paged_decode_reference(q, cache, table)) <= BOUND
    with pytest.raises(ValueError, match="scale_format 'e4m3' is for an fp4_e2m1 cache"):
        plan_decode(shape, F8, device="cpu", scale_format="e4m3")

"""Hopper's own kernel against the fp32 reference: it runs on a GPU only."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, batch_prefill_reference, plan_prefill
from narrowkv.runtime.targets import device_target
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.checking import assert_agrees, assert_right

pytestmark = pytest.mark.gpu

W = PrefillCase.small
F8 = "fp8_e4m3fn"
QUERY_OF = {"fp16": torch.float16}
SIZES = {"q_lens": (70, 1, 300, 0, 33), "lens": (200, 64, 300, 77, 1290), "gqa_ratio": 12, "head_dim": 128}
ragged = partial(W, **SIZES)
# Keys that few tiles hold, each of 64.
FEW_KEYS = (200, 64, 300, 77, 900)
MASKS = [
    {},
    {"causal": False},
    {"window_left": 20},
    {"window_left": 300},
    {"causal": False, "window_left": 150, "window_right": 90},
    {"causal": False, "window_right": 5},
    {"logits_soft_cap": 5.0},
]


def cases():
    for head_dim, fmt in product((64, 128, 256), (F8, "fp8_e5m2", "bf16", "fp16")):
        yield ragged(head_dim=head_dim, format=fmt, q_dtype=QUERY_OF.get(fmt, torch.bfloat16))
    for head_dim in (64, 128, 256):
        yield ragged(head_dim=head_dim, format=F8, q_dtype=torch.float16)
    for mask, (fmt, head_dim) in product(MASKS, ((F8, 128), ("bf16", 128), ("bf16", 256))):
        yield ragged(head_dim=head_dim, format=fmt, **mask)
    for mask, fmt, splits in product(({}, {"window_left": 100}, MASKS[5]), (F8, "bf16"), (1, 3)):
        yield ragged(lens=FEW_KEYS, format=fmt, num_splits=splits, **mask)
    for granularity, splits in product(("head", "sequence_head"), (1, 2, 5)):
        yield ragged(granularity=granularity, page_size=1, ragged=True, num_splits=splits, sinks=True)
    long = ((5000,), (5000,)), ((1000,), (9000,)), ((200, 200), (3, 600)), ((64,) * 40, (700,) * 40)
    for q_lens, lens in long:
        yield W(q_lens, lens, gqa_ratio=6, num_kv_heads=4, head_dim=128)


@pytest.fixture(autouse=True)
def hopper():
    """The kernel is written for Hopper's matrix unit."""
    target = device_target(torch.device("cuda"))
    if target.name != "sm90":
        pytest.skip(f"needs Hopper; this GPU is {target.name}")


@pytest.fixture(params=[False, True], ids=["widened", "in pages"])
def in_pages(request):
    """Whether keys of a 16-bit cache stay in their pages."""
    if request.param:
        request.getfixturevalue("always_in_pages")
    return request.param


def _scratch(plan):
    """The scratch and the partial results of the plan's calls."""
    return plan.memory(plan.config).tensors


def _check(case, pipelined=True, **options):
    """Compares with the reference, over poisoned memory; a second call must give the same bits."""
    inputs = case.inputs("cuda")
    plan = inputs.plan()
    assert (plan.config.fallback is not None) == pipelined
    o, _ = assert_right(case, inputs=inputs, plan=plan, **options)
    assert torch.equal(inputs.run(plan).view(torch.int16), o.view(torch.int16))


@pytest.mark.parametrize("case", dict.fromkeys(cases()), ids=str)
def test_every_case(case):
    _check(case)


@pytest.mark.parametrize(
    ("layout", "page_size", "head_dim", "fmt"),
    [
        ("NHD", 16, 128, "bf16"),
        ("NHD", 8, 128, "bf16"),
        ("NHD", 64, 64, "bf16"),
        ("NHD", 256, 128, "fp16"),
        ("HND", 16, 64, "fp16"),
        ("HND", 32, 128, "bf16"),
        ("HND", 128, 128, "bf16"),
        ("concat", 16, 128, "bf16"),
    ],
)
@pytest.mark.parametrize("longest", [900, 1290])
@pytest.mark.usefixtures("always_in_pages")
def test_keys_that_stay_in_their_pages(layout, page_size, head_dim, fmt, longest):
    stored = {"layout": layout, "page_size": page_size, "head_dim": head_dim, "format": fmt}
    lens = (200, 64, 300, 77, longest)
    case = ragged(lens=lens, **stored, q_dtype=QUERY_OF.get(fmt, torch.bfloat16))
    _check(case)
    _check(replace(case, ragged=True, num_splits=2, window_left=100))
    _check(replace(case, causal=False, window_right=5))
    _check(replace(case, num_kv_heads=1))


# Pages of too few rows, or odd ones, and keys that do not lie in rows: K is widened.
@pytest.mark.parametrize(
    ("layout", "page_size"),
    [("NHD", 1), ("tokens", 1), ("NHD", 4), ("NHD", 48), ("NHD", 192), ("vectorised", 16)],
)
@pytest.mark.usefixtures("always_in_pages")
def test_keys_that_cannot_stay_in_their_pages(layout, page_size):
    _check(ragged(format="bf16", layout=layout, page_size=page_size))


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("new", "keys", "stays"), [(100, 9000, True), (100, 4000, False), (600, 9000, False)]
)
def test_only_long_caches_that_few_rows_read_stay_in_their_pages(new, keys, stays, fmt):
    sizes = {"q_lens": (new,), "lens": (keys,), "gqa_ratio": 4, "head_dim": 128}
    inputs = W(**sizes, format=fmt, q_dtype=QUERY_OF.get(fmt, torch.bfloat16)).inputs("cuda")
    plan = inputs.plan()
    assert plan.config.k_in_pages == stays
    scratch = _scratch(plan)["k"]
    scratch.fill_(math.nan)
    assert_agrees(inputs.run(plan), inputs.reference()[0])
    assert bool(scratch.isnan().all()) == stays


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tiles", [(), (148,), (145, 144), (9,), (0, 50, 147)], ids=str)
@pytest.mark.parametrize("factor", [2.0**-20, 512.0, 2.0**40], ids=str)
def test_values_that_differ_by_far_from_tile_to_tile(factor, tiles, splits):
    changes = {"gqa_ratio": 6, "head_dim": 128, "format": "bf16", "num_splits": splits}
    inputs = W((300,), (19000,), **changes).inputs("cuda")
    values, pages = inputs.cache.logical()[1], inputs.table.page_ids[0].long()
    for tile in tiles:
        values[pages[tile * 8 : tile * 8 + 8]] *= factor
    assert_agrees(inputs.run(inputs.plan()), inputs.reference()[0])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, {}), (128, {}), (128, {"window_left": 100}), (128, {"causal": False})],
    ids=str,
)
def test_a_launch_after_one_with_values_out_of_the_ordinary(head_dim, options, in_pages, splits):
    case = ragged(head_dim=head_dim, format="bf16", sinks=True, num_splits=splits, **options)
    inputs = case.inputs("cuda")
    plan = inputs.plan()
    assert plan.config.k_in_pages == in_pages
    values = inputs.cache.logical()[1]
    usual = values.clone()
    for factor in (1.0, 2.0**30, 2.0**-30, 1.0):
        values.copy_(usual * factor)
        # Memory is not poisoned: what the launch before left there must not matter.
        out = torch.full(inputs.q.shape, math.nan, dtype=inputs.q.dtype, device="cuda")
        assert_agrees(inputs.run(plan, out=out, return_lse=True), inputs.reference())
        # As the next launch expects them.
        assert not _scratch(plan)["factor_flag"].any()


# Attention begins before the launch that widens has ended, and must not read what the call before left.
@pytest.mark.parametrize("fmt", [F8, "bf16"])
@pytest.mark.parametrize(("q_lens", "lens"), [((300,), (1000,)), ((100, 40), (9000, 500))], ids=str)
def test_calls_that_follow_each_other(q_lens, lens, fmt):
    case = W(q_lens, lens, gqa_ratio=12, head_dim=128, format=fmt)
    calls = [case.build("cuda", seed) for seed in range(3)]
    plan = plan_prefill(*calls[0])
    assert plan.config.options.launch_pdl
    outs = [torch.full((5, *call[0].shape), math.nan, dtype=call[0].dtype, device="cuda") for call in calls]
    torch.cuda.synchronize()
    for i in range(5):
        for call, out in zip(calls, outs, strict=True):
            batch_prefill(*call, out=out[i], plan=plan)
    for call, out in zip(calls, outs, strict=True):
        assert_agrees(out[0], batch_prefill_reference(*call))
        for later in out[1:]:
            assert torch.equal(later.view(torch.int16), out[0].view(torch.int16))


def test_what_it_does_not_serve_runs_otherwise():
    _check(ragged(), sm_scale=-0.1)
    for fmt, head_dim in ((F8, 128), ("bf16", 128), ("bf16", 256)):
        case = ragged(head_dim=head_dim, format=fmt, logits_soft_cap=0.7, window_left=150)
        _check(case, sm_scale=-0.1)
    _check(ragged(granularity="token_head"), pipelined=False)


@pytest.mark.parametrize("fmt", [F8, "bf16"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_stays_with_the_rows_that_see_it(which, fmt, in_pages):
    inputs = W((200,), (600,), gqa_ratio=12, head_dim=128, format=fmt).inputs("cuda")
    stored = dict(zip("kv", inputs.cache.logical(), strict=True))[which].view(torch.uint8)
    page, slot = inputs.table.page_ids[0, 500 // 16], 500 % 16
    stored[page.long(), slot] = 0x7F if fmt == F8 else 0xFF
    plan = inputs.plan()
    assert plan.config.k_in_pages == (in_pages and fmt != F8)
    bad = inputs.run(plan).isnan().flatten(1).any(1)
    assert bad.tolist() == [position >= 500 for position in range(400, 600)]

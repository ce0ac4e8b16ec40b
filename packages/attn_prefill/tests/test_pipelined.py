"""Hopper's own kernel against the fp32 reference: it runs on a GPU only."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, batch_prefill_reference, plan_prefill
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.attn_prefill.memory import Memory
from narrowkv.attn_prefill.plan import PrefillPlan
from narrowkv.runtime.targets import device_target

pytestmark = pytest.mark.gpu

RAGGED = {"q_lens": (70, 1, 300, 0, 33), "lens": (200, 64, 300, 77, 1290), "gqa_ratio": 12}


@pytest.fixture(autouse=True)
def hopper() -> None:
    """The kernel is written for Hopper's matrix unit."""
    target = device_target(torch.device("cuda"))
    if target.name != "sm90":
        pytest.skip(f"needs Hopper; this GPU is {target.name}")


def _memory(plan: PrefillPlan) -> Memory:
    """The scratch and the partial results of the plan's calls."""
    memory = plan.memory(plan.config)
    assert memory is not None
    return memory


def _check(
    workload: PrefillCase,
    num_splits: int | None = None,
    pipelined: bool = True,
    **options: Any,
) -> None:
    """Runs twice over poisoned memory and compares o and lse; the second call must give the same bits."""
    q, cache, table, starts = workload.build("cuda")
    plan = plan_prefill(q, cache, table, starts, num_splits=num_splits)
    assert (plan.config.otherwise is not None) == pipelined
    for tensor in _memory(plan).tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device="cuda")
    o, lse = batch_prefill(q, cache, table, starts, out=out, return_lse=True, plan=plan, **options)
    expected, expected_lse = batch_prefill_reference(q, cache, table, starts, return_lse=True, **options)
    assert not bool(o.isnan().any())
    error = (o.float() - expected).abs().sum() / expected.abs().sum().clamp_min(1e-30)
    assert float(error) <= 0.002, plan.explain()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    again = batch_prefill(q, cache, table, starts, plan=plan, **options)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again.view(torch.int16), o.view(torch.int16))


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
def test_keys_that_stay_in_their_pages(
    layout: str, page_size: int, head_dim: int, fmt: str, longest: int
) -> None:
    lens = (200, 64, 300, 77, longest)
    workload = PrefillCase.small(
        q_lens=(70, 1, 300, 0, 33), lens=lens, gqa_ratio=12, head_dim=head_dim, format=fmt, layout=layout,
        page_size=page_size, q_dtype=torch.float16 if fmt == "fp16" else torch.bfloat16,
    )  # fmt: skip
    _check(workload)
    _check(replace(workload, ragged=True), num_splits=2, window_left=100)
    _check(workload, causal=False, window_right=5)
    _check(replace(workload, num_kv_heads=1))


# Pages of too few rows, or odd ones, and keys that do not lie in rows: K is widened.
@pytest.mark.parametrize(
    ("layout", "page_size"),
    [("NHD", 1), ("tokens", 1), ("NHD", 4), ("NHD", 48), ("NHD", 192), ("vectorised", 16)],
)
@pytest.mark.usefixtures("always_in_pages")
def test_keys_that_cannot_stay_in_their_pages(layout: str, page_size: int) -> None:
    workload = PrefillCase.small(**RAGGED, head_dim=128, format="bf16", layout=layout, page_size=page_size)
    _check(workload)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_only_long_caches_that_few_rows_read_stay_in_their_pages(fmt: str) -> None:
    q_dtype = torch.float16 if fmt == "fp16" else torch.bfloat16
    for new, keys, stays in ((100, 9000, True), (100, 4000, False), (600, 9000, False)):
        workload = PrefillCase.small(
            q_lens=(new,), lens=(keys,), gqa_ratio=4, head_dim=128, format=fmt, q_dtype=q_dtype
        )
        q, cache, table, starts = workload.build("cuda")
        plan = plan_prefill(q, cache, table, starts)
        assert plan.config.k_in_pages == stays
        keys = _memory(plan).tensors["k"]
        keys.fill_(math.nan)
        o = batch_prefill(q, cache, table, starts, plan=plan)
        expected = batch_prefill_reference(q, cache, table, starts)
        assert isinstance(o, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002
        assert bool(keys.isnan().all()) == stays


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("fmt", "q_dtype"),
    [
        ("fp8_e4m3fn", torch.bfloat16),
        ("fp8_e4m3fn", torch.float16),
        ("fp8_e5m2", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_formats(fmt: str, q_dtype: torch.dtype, head_dim: int) -> None:
    _check(PrefillCase.small(**RAGGED, format=fmt, q_dtype=q_dtype, head_dim=head_dim))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_left": 20},
        {"window_left": 300},
        {"causal": False, "window_left": 150, "window_right": 90},
        {"causal": False, "window_right": 5},
        {"logits_soft_cap": 5.0},
        {"logits_soft_cap": 0.7, "window_left": 150, "sm_scale": -0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize(("fmt", "head_dim"), [("fp8_e4m3fn", 128), ("bf16", 128), ("bf16", 256)])
def test_masks(options: dict[str, Any], fmt: str, head_dim: int) -> None:
    _check(PrefillCase.small(**RAGGED, head_dim=head_dim, format=fmt), **options)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("granularity", ["head", "sequence_head"])
def test_splits_sinks_and_descales(splits: int, granularity: str) -> None:
    sinks = torch.linspace(-3, 3, 24, device="cuda")
    _check(
        PrefillCase.small(**RAGGED, head_dim=128, granularity=granularity, page_size=1, ragged=True),
        num_splits=splits, sinks=sinks,
    )  # fmt: skip


@pytest.mark.parametrize(
    "lens", [((5000,), (5000,)), ((1000,), (9000,)), ((200, 200), (3, 600)), ((64,) * 40, (700,) * 40)]
)
def test_long_and_short(lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    _check(PrefillCase.small(q_lens=lens[0], lens=lens[1], gqa_ratio=6, num_kv_heads=4, head_dim=128))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("options", [{}, {"window_left": 100}, {"causal": False, "window_right": 5}], ids=str)
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "bf16"])
def test_few_keys(fmt: str, options: dict[str, Any], splits: int) -> None:
    # Tiles of 64 keys.
    lens = {"q_lens": (70, 1, 300, 0, 33), "lens": (200, 64, 300, 77, 900), "gqa_ratio": 12}
    _check(PrefillCase.small(**lens, head_dim=128, format=fmt), num_splits=splits, **options)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tiles", [(), (148,), (145, 144), (9,), (0, 50, 147)], ids=str)
@pytest.mark.parametrize("factor", [2.0**-20, 512.0, 2.0**40], ids=str)
def test_values_that_differ_by_far_from_tile_to_tile(
    factor: float, tiles: tuple[int, ...], splits: int
) -> None:
    workload = PrefillCase.small(q_lens=(300,), lens=(19000,), gqa_ratio=6, head_dim=128, format="bf16")
    q, cache, table, starts = workload.build("cuda")
    values, pages = cache.logical()[1], table.page_ids[0].long()
    for tile in tiles:
        values[pages[tile * 8 : tile * 8 + 8]] *= factor
    plan = plan_prefill(q, cache, table, starts, num_splits=splits)
    o = batch_prefill(q, cache, table, starts, plan=plan)
    expected = batch_prefill_reference(q, cache, table, starts)
    assert isinstance(o, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, {}), (128, {}), (128, {"window_left": 100}), (128, {"causal": False})],
    ids=str,
)
def test_a_launch_after_one_with_values_out_of_the_ordinary(
    head_dim: int, options: dict[str, Any], in_pages: bool, splits: int, request: pytest.FixtureRequest
) -> None:
    if in_pages:
        request.getfixturevalue("always_in_pages")
    workload = PrefillCase.small(**RAGGED, head_dim=head_dim, format="bf16")
    q, cache, table, starts = workload.build("cuda")
    sinks = torch.linspace(-3, 3, q.shape[1], device="cuda")
    plan = plan_prefill(q, cache, table, starts, num_splits=splits)
    assert plan.config.k_in_pages == in_pages
    values = cache.logical()[1]
    usual = values.clone()
    for factor in (1.0, 2.0**30, 2.0**-30, 1.0):
        values.copy_(usual * factor)
        out = torch.full(q.shape, math.nan, dtype=q.dtype, device="cuda")
        given = {"sinks": sinks, "return_lse": True, **options}
        o, lse = batch_prefill(q, cache, table, starts, out=out, plan=plan, **given)
        expected, expected_lse = batch_prefill_reference(q, cache, table, starts, **given)
        assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
        # As the next launch expects them.
        assert _memory(plan).tensors["unusual"].tolist() == [0, 0]


# Attention begins before the launch that widens has ended, and must not read what the call before left.
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "bf16"])
@pytest.mark.parametrize("lens", [((300,), (1000,)), ((100, 40), (9000, 500))], ids=str)
def test_calls_that_follow_each_other(lens: tuple[tuple[int, ...], tuple[int, ...]], fmt: str) -> None:
    workload = PrefillCase.small(q_lens=lens[0], lens=lens[1], gqa_ratio=12, head_dim=128, format=fmt)
    calls = [workload.build("cuda", seed) for seed in range(3)]
    plan = plan_prefill(*calls[0])
    assert plan.config.options.launch_pdl
    outs = [torch.full((5, *call[0].shape), math.nan, dtype=call[0].dtype, device="cuda") for call in calls]
    torch.cuda.synchronize()
    for i in range(5):
        for call, out in zip(calls, outs, strict=True):
            batch_prefill(*call, out=out[i], plan=plan)
    for call, out in zip(calls, outs, strict=True):
        expected = batch_prefill_reference(*call)
        assert isinstance(expected, torch.Tensor)
        assert float((out[0].float() - expected).abs().sum() / expected.abs().sum()) <= 0.002
        for later in out[1:]:
            assert torch.equal(later.view(torch.int16), out[0].view(torch.int16))


def test_what_it_does_not_serve_runs_otherwise() -> None:
    workload = PrefillCase.small(**RAGGED, head_dim=128)
    _check(workload, sm_scale=-0.1)
    _check(PrefillCase.small(**RAGGED, head_dim=128, granularity="token_head"), pipelined=False)


@pytest.mark.parametrize(("fmt", "in_pages"), [("fp8_e4m3fn", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_stays_with_the_rows_that_see_it(
    which: str, fmt: str, in_pages: bool, request: pytest.FixtureRequest
) -> None:
    if in_pages:
        request.getfixturevalue("always_in_pages")
    workload = PrefillCase.small(q_lens=(200,), lens=(600,), gqa_ratio=12, head_dim=128, format=fmt)
    q, cache, table, starts = workload.build("cuda")
    stored = dict(zip("kv", cache.logical(), strict=True))[which].view(torch.uint8)
    page, slot = table.page_ids[0, 500 // table.page_size], 500 % table.page_size
    stored[page.long(), slot] = 0x7F if fmt == "fp8_e4m3fn" else 0xFF
    plan = plan_prefill(q, cache, table, starts)
    assert plan.config.k_in_pages == in_pages
    o = batch_prefill(q, cache, table, starts, plan=plan)
    assert isinstance(o, torch.Tensor)
    bad = o.isnan().flatten(1).any(1)
    assert bad.tolist() == [position >= 500 for position in range(400, 600)]

"""batch_prefill against the fp32 reference over the contract's axes, and what must happen on every fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import batch_prefill, batch_prefill_reference, plan_prefill
from narrowkv.attn_prefill.cases import AXES, PrefillCase, poison_plan
from narrowkv.paged_cache import CacheFormat, PageTable
from narrowkv.quant.accuracy import compare
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as

pytestmark = pytest.mark.sampled

W = PrefillCase.small
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")
KERNELS = ["dense", "fused"]
either_kernel = pytest.mark.parametrize("kernel", KERNELS)


def axis(name: str, *fast: object) -> list[Any]:
    """Values of an axis of the sweep, of which only the full run takes those that are not named."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in AXES[name]]


def slow(*values: Any) -> list[Any]:
    """Values of an axis that only the full run takes."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _check(
    workload: PrefillCase,
    device: str,
    kernel: str | None = None,
    bound: float = 0.002,
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Runs with a poisoned output and poisoned scratch and compares o and lse; returns o."""
    q, cache, table, starts = workload.build(device)
    made = plan_prefill(q, cache, table, starts, kernel=kernel, **(plan or {}))
    poison_plan(made)
    dtype = q.dtype if q.dtype.itemsize == 2 else torch.bfloat16
    out = torch.full(q.shape, math.nan, dtype=dtype, device=device)
    o, lse = batch_prefill(q, cache, table, starts, out=out, return_lse=True, plan=made, **options)
    expected, expected_lse = batch_prefill_reference(q, cache, table, starts, return_lse=True, **options)
    assert o.data_ptr() == out.data_ptr()
    assert not bool(o.isnan().any())
    error = (o.float() - expected).abs().sum() / expected.abs().sum().clamp_min(1e-30)
    assert float(error) <= bound, made.explain()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    return o


@either_kernel
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", *axis("format", "bf16", "fp16", K8V4)], ids=str)
def test_every_cache_format_with_either_query(
    fmt: str | CacheFormat, q_dtype: torch.dtype, kernel: str, device: str
) -> None:
    _check(W(format=fmt, q_dtype=q_dtype), device, kernel)


@either_kernel
@pytest.mark.parametrize(("group", "scale"), [(32, "e8m0"), (16, "e8m0"), (16, "e4m3")])
def test_fp4_with_scales_of_groups(group: int, scale: str, kernel: str, device: str) -> None:
    _check(W(format="fp4_e2m1", scale_group=group, scale_format=scale), device, kernel)
    _check(W(format=K8V4, scale_group=group, scale_format=scale), device, kernel)


@either_kernel
@pytest.mark.parametrize(
    ("layout", "page_size"), [("NHD", 16), ("HND", 16), ("tokens", 1), ("concat", 16), ("vectorised", 16)]
)
def test_every_layout(layout: str, page_size: int, kernel: str, device: str) -> None:
    _check(W(layout=layout, page_size=page_size), device, kernel)


@either_kernel
@pytest.mark.parametrize("page_size", [*axis("page_size", 1, 3, 128), *slow(16)])
def test_every_page_size(page_size: int, kernel: str, device: str) -> None:
    _check(W(page_size=page_size, ragged=page_size in (1, 32)), device, kernel)


@either_kernel
@pytest.mark.parametrize("ratio", axis("gqa_ratio", 1, 12))
def test_every_gqa_ratio(ratio: int, kernel: str, device: str) -> None:
    _check(W(gqa_ratio=ratio, num_kv_heads=1 if ratio > 12 else 2), device, kernel)


@either_kernel
@pytest.mark.parametrize("head_dim", axis("head_dim", 80, 112, 256))
def test_every_head_dim(head_dim: int, kernel: str, device: str) -> None:
    _check(W(head_dim=head_dim, num_kv_heads=1), device, kernel)


@either_kernel
@pytest.mark.parametrize(
    "granularity", ["sequence_head", "token_head", *slow("float", "tensor", "head", "page_head")]
)
def test_every_descale_shape(granularity: str, kernel: str, device: str) -> None:
    _check(W(granularity=granularity), device, kernel)


@either_kernel
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"causal": False, "window_right": 5},
        {"window_left": 20},
        {"causal": False, "window_left": 30, "window_right": 9},
        *slow(
            {"causal": False, "window_left": 40, "window_right": 0}, {"window_left": 0}, {"window_left": 1000}
        ),
    ],
    ids=str,
)
def test_every_mask(options: dict[str, Any], kernel: str, device: str) -> None:
    _check(W(q_lens=(9, 1, 30, 8), lens=(70, 5, 130, 3)), device, kernel, **options)


@either_kernel
def test_a_soft_cap_and_sinks(kernel: str, device: str) -> None:
    sinks = torch.linspace(-3, 3, 6, device=device)
    _check(W(), device, kernel, logits_soft_cap=3.0)
    _check(W(), device, kernel, sinks=sinks)
    _check(
        W(granularity="token_head"),
        device,
        kernel,
        sinks=sinks.bfloat16(),
        logits_soft_cap=1.0,
        window_left=20,
    )


# The FP8 query's own format, and whether P @ V has 8 bits: both kinds, and descales of each kind.
@either_kernel
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz"])
def test_fp8_queries(fmt: str, kernel: str, device: str) -> None:
    dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3fn" else torch.float8_e4m3fnuz
    if device == "cuda" and (fmt == "fp8_e4m3fnuz" or kernel == "dense"):
        pytest.skip("sm90 has no FNUZ, and FP8 queries are read from pages there")
    workload = W(format=fmt, q_dtype=dtype)
    # Dense: P and V are in float16.
    bound = 0.02 if kernel == "fused" else 0.002
    one = torch.tensor([0.3], device=device)
    _check(workload, device, kernel, bound=bound, q_descale=0.25)
    _check(workload, device, kernel, bound=bound, q_descale=one, window_left=40)
    _check(replace(workload, granularity="head"), device, kernel, bound=bound, causal=False)
    _check(replace(workload, granularity="token_head", head_dim=80), device, kernel, bound=bound)


@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz"])
def test_values_that_are_not_numbers_reach_only_rows_that_see_them_beside_fp8_queries(fmt: str) -> None:
    dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3fn" else torch.float8_e4m3fnuz
    q, cache, table, starts = W(format=fmt, q_dtype=dtype, q_lens=(20,), lens=(50,)).build()
    last = int(table.page_ids[0, 49 // cache.page_size])
    cache.v.view(torch.uint8)[last, 49 % cache.page_size] = 0x7F if fmt == "fp8_e4m3fn" else 0x80
    plan = plan_prefill(q, cache, table, starts, kernel="dense")
    o = batch_prefill(q, cache, table, starts, plan=plan, q_descale=0.25)
    expected = batch_prefill_reference(q, cache, table, starts, q_descale=0.25)
    assert isinstance(o, torch.Tensor)
    assert bool(o[-1].isnan().all())
    assert float((o[:-1].float() - expected[:-1]).abs().sum() / expected[:-1].abs().sum()) <= 0.002


@either_kernel
@pytest.mark.parametrize("clean", [True, False])
def test_an_ocp_cache_feeds_the_fnuz_unit_of_gfx942_as_it_is(clean: bool, kernel: str) -> None:
    q, cache, table, starts = W(q_dtype=torch.float8_e4m3fn, lens=(70, 5, 130)).build()
    if not clean:
        stored = cache.k.view(torch.uint8)
        stored[int(table.page_ids[0, 1]), 3, :, 5] = 0x80  # -0, which FNUZ reads as NaN
    cache = replace(cache, negative_zero_free=clean)
    with run_as("gfx942"):
        plan = plan_prefill(q, cache, table, starts, kernel=kernel)
        assert plan.config.fp8 == "fp8_e4m3fnuz"
        o = batch_prefill(q, cache, table, starts, plan=plan, q_descale=0.5)
    expected = batch_prefill_reference(q, cache, table, starts, q_descale=0.5)
    assert isinstance(o, torch.Tensor)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.02


@either_kernel
@pytest.mark.parametrize("out", [torch.float16, torch.float32])
def test_the_output_may_have_another_dtype(out: torch.dtype, kernel: str, device: str) -> None:
    q, cache, table, starts = W().build(device)
    plan = plan_prefill(q, cache, table, starts, kernel=kernel)
    o = batch_prefill(q, cache, table, starts, out_dtype=out, plan=plan)
    assert isinstance(o, torch.Tensor)
    assert o.dtype == out
    expected = batch_prefill_reference(q, cache, table, starts)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.0005


# No tokens, one token, more queries than keys, lengths around pages and tiles.
@either_kernel
@pytest.mark.parametrize(
    ("q_lens", "lens"),
    [
        ((1, 1, 1), (1, 16, 17)),
        ((0, 5, 0), (20, 5, 0)),
        ((7, 3), (2, 0)),
        ((1, 40, 2), (65, 64, 63)),
    ],
)
def test_mixed_lengths(q_lens: tuple[int, ...], lens: tuple[int, ...], kernel: str, device: str) -> None:
    o = _check(W(q_lens=q_lens, lens=lens), device, kernel)
    before = 0
    for q_len, kv_len in zip(q_lens, lens, strict=True):
        assert bool((o[before : before + max(q_len - kv_len, 0)] == 0).all())
        before += q_len


@either_kernel
@pytest.mark.parametrize(
    "powers",
    [(-30, 0, 40, 39, 9, 0, 0, -9, -60, 20), (-20, -18, -17, -16, -14, -20, -30, -25, -60, -16)],
    ids=["large", "small"],
)
def test_values_of_any_size_in_bf16(powers: tuple[int, ...], kernel: str, device: str) -> None:
    keys = 2000 if device == "cuda" else 300  # long enough for Hopper's own kernel, where there is one
    q, cache, table, starts = PrefillCase.small(
        q_lens=(keys // 10,), lens=(keys,), num_kv_heads=1, format="bf16", page_size=4
    ).build(device)
    values, pages = cache.logical()[1], table.page_ids[0, : keys // 4].long()
    for tenth, power in enumerate(powers):
        values[pages[tenth * len(pages) // 10 : (tenth + 1) * len(pages) // 10]] *= 2.0**power
    o = batch_prefill(q, cache, table, starts, plan=plan_prefill(q, cache, table, starts, kernel=kernel))
    expected = batch_prefill_reference(q, cache, table, starts)
    assert isinstance(o, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002


# Sums of such values, and V times what its scratch is scaled by, are beyond float32.
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("top", [1e37, 3e38])
def test_values_near_the_largest_of_float32_in_dense_prefill(top: float, splits: int, device: str) -> None:
    workload = W(q_lens=(30, 5), lens=(200, 40), num_kv_heads=1, format="bf16")
    q, cache, table, starts = workload.build(device)
    values = cache.logical()[1]
    values.copy_(torch.where(values.isfinite(), values.clamp(-1, 1) * top, values))
    plan = plan_prefill(q, cache, table, starts, kernel="dense", num_splits=splits)
    poison_plan(plan)
    sinks = torch.linspace(-3, 3, 3, device=device)
    o, lse = batch_prefill(
        q, cache, table, starts, plan=plan, return_lse=True, sinks=sinks, out_dtype=torch.float32
    )
    expected, expected_lse = batch_prefill_reference(q, cache, table, starts, return_lse=True, sinks=sinks)
    assert bool(o.isfinite().all())
    error = (o / top - expected / top).abs().sum() / (expected / top).abs().sum()
    assert float(error) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


# A sequence's bits do not depend on the batch, on the table's width or on other lengths.
@pytest.mark.parametrize("kernel", [None, "dense"])
def test_batch_invariant_results(kernel: str | None) -> None:
    workload = W(q_lens=(9, 1, 20), lens=(70, 5, 33), num_kv_heads=1, format="bf16")
    q, cache, table, starts = workload.build()

    def run(sequences: list[int], width: int) -> tuple[torch.Tensor, ...]:
        ids = torch.full((len(sequences), width), -1, dtype=torch.int32)
        ids[:, : table.page_ids.shape[1]] = table.page_ids[sequences]
        assert table.seq_lens is not None
        batch = PageTable.from_block_table(ids, table.seq_lens[sequences], page_size=16)
        rows = [torch.arange(int(starts[i]), int(starts[i + 1])) for i in sequences]
        begins = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).int()
        given = q[torch.cat(rows)]
        plan = plan_prefill(given, cache, batch, begins, kernel=kernel, batch_invariant=True)
        o, lse = batch_prefill(
            given,
            cache,
            batch,
            begins,
            plan=plan,
            batch_invariant=True,
            return_lse=True,
            sinks=torch.zeros(3),
        )
        last = len(rows[-1])
        return o[-last:], lse[-last:]

    with run_as("gfx942"):
        for seq in range(3):
            alone = run([seq], 5)
            for others, width in (([0, 1, 2], 5), ([1] * 8, 300)):
                for a, b in zip(run([*others, seq], width), alone, strict=True):
                    assert torch.equal(a, b)


@pytest.mark.slow
def test_batch_invariant_results_in_batches_up_to_300(device: str) -> None:
    q, cache, table, _ = W(q_lens=(3,), lens=(20,), num_kv_heads=1).build(device)
    assert table.seq_lens is not None
    alone = None
    for batch in (1, 2, 63, 64, 65, 300):
        many = PageTable.from_block_table(
            table.page_ids.expand(batch, -1).contiguous(), table.seq_lens.expand(batch).contiguous(),
            page_size=16,
        )  # fmt: skip
        starts = (torch.arange(batch + 1, device=device) * 3).int()
        o = batch_prefill(q.repeat(batch, 1, 1), cache, many, starts, batch_invariant=True)
        assert isinstance(o, torch.Tensor)
        alone = o if alone is None else alone
        assert torch.equal(o, alone.repeat(batch, 1, 1))


def test_a_plan_that_is_not_batch_invariant_is_refused_where_that_is_asked_for() -> None:
    q, cache, table, starts = W().build()
    plan = plan_prefill(q, cache, table, starts)
    with pytest.raises(ValueError, match="plan must be made with batch_invariant=True"):
        batch_prefill(q, cache, table, starts, plan=plan, batch_invariant=True)
    with pytest.raises(UnsupportedError, match="kernel='decode' needs one query token"):
        plan_prefill(q, cache, table, starts, kernel="decode", batch_invariant=True)
    for target in ("gfx942", "sm90", "gfx950"):
        with run_as(target):
            plans = [
                plan_prefill(
                    *W(q_lens=(n,) * batch, lens=(n + 500,) * batch, clean=True).build(), batch_invariant=True
                )
                for n, batch in ((1, 1), (1, 8), (100, 2), (300, 1))
            ]
        assert len({plan.config for plan in plans}) == 1


@either_kernel
def test_every_split_agrees(kernel: str, device: str) -> None:
    workload = W(q_lens=(9, 0, 20), lens=(130, 70, 200), granularity="head", num_kv_heads=1)
    for splits in (2, 5):
        _check(workload, device, kernel, plan={"num_splits": splits}, sinks=torch.zeros(3, device=device))


def test_the_values_of_one_tile_may_run_with_the_next_softmax(device: str) -> None:
    for fmt in ("bf16", "fp4_e2m1"):
        for splits in (1, 2):
            workload = W(format=fmt, lens=(5, 200), q_lens=(5, 25), num_kv_heads=1)
            q, cache, table, starts = workload.build(device)
            plan = plan_prefill(q, cache, table, starts, kernel="dense", num_splits=splits)
            plan = replace(plan, config=replace(plan.config, overlap=True))
            o, lse = batch_prefill(q, cache, table, starts, plan=plan, return_lse=True, window_left=100)
            expected, expected_lse = batch_prefill_reference(
                q, cache, table, starts, return_lse=True, window_left=100
            )
            assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


def test_tiles_run_longest_first(device: str) -> None:
    q, cache, table, starts = W(q_lens=(70, 1, 130, 40), lens=(100, 5, 130, 200), num_kv_heads=1).build(
        device
    )
    plan = plan_prefill(q, cache, table, starts, kernel="dense")
    batch_prefill(q, cache, table, starts, plan=plan)
    memory = plan.memory(plan.config)
    assert memory is not None
    rows = plan.config.block_m
    schedule = memory.tensors["schedule"][: plan.shape.row_tiles(rows)].tolist()
    tiles = [row[:6] for row in schedule if row[0] >= 0]
    work = [(kv_len - q_len) * 3 + (number + 1) * rows for _, number, _, q_len, kv_len, _ in tiles]
    assert work == sorted(work, reverse=True)
    every = {(seq, n) for seq, q_len in enumerate((70, 1, 130, 40)) for n in range(-(-q_len * 3 // rows))}
    assert {(tile[0], tile[1]) for tile in tiles} == every
    assert len(tiles) == len(every)


def test_one_query_token_everywhere_is_decoded_with_the_same_bits(device: str) -> None:
    q, cache, table, starts = W(q_lens=(1, 1, 1)).build(device)
    plan = plan_prefill(q, cache, table, starts, max_q_len=1)
    assert plan.decode is not None
    o = batch_prefill(q, cache, table, starts, plan=plan, window_left=30)
    assert isinstance(o, torch.Tensor)
    decoded = paged_decode(q, cache, table, window_left=30)
    assert isinstance(decoded, torch.Tensor)
    assert torch.equal(o, decoded)
    assert "paged_decode" in plan.explain()


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@either_kernel
def test_the_code_paths_of_amd_targets_when_interpreted(target: str, kernel: str) -> None:
    with run_as(target):
        for fmt in ("fp8_e4m3fn", "bf16"):
            _check(W(format=fmt, num_kv_heads=1), "cpu", kernel)


@given(
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 90)), min_size=1, max_size=3),
    st.sampled_from([1, 3, 16, 64]),
    st.booleans(),
    st.sampled_from(KERNELS),
    st.booleans(),
)
@settings(max_examples=6)
def test_any_ragged_batch(
    sizes: list[tuple[int, int]], page_size: int, ragged: bool, kernel: str, causal: bool
) -> None:
    q_lens, lens = zip(*sizes, strict=True)
    workload = W(q_lens=q_lens, lens=lens, page_size=page_size, ragged=ragged, num_kv_heads=1)
    _check(workload, "cpu", kernel, causal=causal)


@either_kernel
def test_permuted_pages_and_a_second_call_give_the_same_bits(kernel: str, device: str) -> None:
    q, cache, table, starts = W(lens=(64, 64), q_lens=(9, 30)).build(device)
    plan = plan_prefill(q, cache, table, starts, kernel=kernel)
    first = batch_prefill(q, cache, table, starts, plan=plan)
    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, batch_prefill(q, cache, table, starts, plan=plan))
    order = torch.randperm(cache.num_pages, device=device)
    moved_k, moved_v = torch.empty_like(cache.k), torch.empty_like(cache.v)
    for moved, stored in ((moved_k, cache.k), (moved_v, cache.v)):
        moved.view(torch.uint8)[order] = stored.view(torch.uint8)
    moved_table = PageTable.from_block_table(order[table.page_ids.long()].int(), table.seq_lens, page_size=16)
    moved_cache = replace(cache, k=moved_k, v=moved_v)
    assert torch.equal(first, batch_prefill(q, moved_cache, moved_table, starts, plan=plan))


@either_kernel
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("position", [0, 39])
def test_a_nan_reaches_only_the_rows_that_attend_to_it(
    which: str, position: int, kernel: str, device: str
) -> None:
    q, cache, table, starts = W(lens=(40, 20), q_lens=(40, 3), gqa_ratio=2).build(device)
    page = int(table.page_ids[0, position // 16])
    getattr(cache, which).view(torch.uint8)[page, position % 16, 1, 3] = 0x7F
    plan = plan_prefill(q, cache, table, starts, kernel=kernel)
    o = batch_prefill(q, cache, table, starts, plan=plan)
    assert isinstance(o, torch.Tensor)
    expected = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
    expected[position:40, 2:4] = True  # sequence 0, rows from the position on, heads of KV head 1
    assert torch.equal(o.isnan().any(-1), expected)


@either_kernel
@pytest.mark.parametrize("bad", [(math.nan,), (math.inf,), (-math.inf,), (math.nan, 3e38)], ids=str)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_a_value_that_is_not_finite_leaves_other_rows_as_they_are(
    fmt: str, bad: tuple[float, ...], kernel: str, device: str
) -> None:
    q, cache, table, starts = W(lens=(40, 20), q_lens=(40, 3), gqa_ratio=2, format=fmt).build(device)
    expected = batch_prefill_reference(q, cache, table, starts)
    assert isinstance(expected, torch.Tensor)
    row = cache.v[table.page_ids[0, 1].long(), 5, 1]  # of key 21
    row[: len(bad)] = torch.tensor(bad).to(row)
    o = batch_prefill(q, cache, table, starts, plan=plan_prefill(q, cache, table, starts, kernel=kernel))
    assert isinstance(o, torch.Tensor)
    sees = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
    sees[21:40, 2:4] = True
    assert torch.equal(o.isnan().any(-1), sees)
    assert compare(o[~sees], expected[~sees]).relative_l1 <= 0.002


@either_kernel
def test_huge_logits_extreme_sinks_and_a_zero_scale(kernel: str, device: str) -> None:
    q, cache, table, starts = W().build(device)
    plan = plan_prefill(q, cache, table, starts, kernel=kernel)

    def run(**options: Any) -> torch.Tensor:
        o = batch_prefill(q, cache, table, starts, plan=plan, **options)
        assert isinstance(o, torch.Tensor)
        return o

    assert bool(run(sm_scale=1e4).isfinite().all())
    assert bool(run(sm_scale=1e4, logits_soft_cap=5.0).isfinite().all())
    assert torch.equal(run(sinks=torch.full((6,), -math.inf, device=device)), run())
    assert bool((run(sinks=torch.full((6,), math.inf, device=device)) == 0).all())
    torch.testing.assert_close(
        run(sm_scale=0.0).float(),
        batch_prefill_reference(q, cache, table, starts, sm_scale=0.0),
        rtol=0.01,
        atol=0.01,
    )
    negative = batch_prefill_reference(q, cache, table, starts, sm_scale=-0.1)
    assert float((run(sm_scale=-0.1).float() - negative).abs().max()) < 0.02


@either_kernel
def test_strided_queries_and_a_cache_off_16_byte_boundaries(kernel: str, device: str) -> None:
    q, cache, table, starts = W(layout="HND").build(device)
    wide = torch.zeros(q.shape[0], 8, 72, dtype=q.dtype, device=device)
    wide[:, :6, :64] = q
    shifted = []
    for stored in (cache.k, cache.v):
        memory = torch.empty(stored.numel() + 8, dtype=torch.uint8, device=device)
        copy = memory[3 : 3 + stored.numel()].view(stored.shape)
        copy.copy_(stored.view(torch.uint8))
        shifted.append(copy.view(stored.dtype))
    moved = replace(cache, k=shifted[0], v=shifted[1])
    plan = plan_prefill(q, cache, table, starts, kernel=kernel)
    o = batch_prefill(wide[:, :6, :64], moved, table, starts, plan=plan)
    expected = batch_prefill_reference(q, cache, table, starts)
    assert isinstance(o, torch.Tensor)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002


def test_a_plan_is_held_to_its_call_and_may_be_dirty(device: str) -> None:
    q, cache, table, starts = W(lens=(200, 5, 60)).build(device)
    plan = plan_prefill(q, cache, table, starts, num_splits=4)
    first = batch_prefill(q, cache, table, starts, plan=plan)
    assert isinstance(first, torch.Tensor)
    poison_plan(plan)
    assert torch.equal(first, batch_prefill(q, cache, table, starts, plan=plan))
    memory = plan.memory(plan.config)
    assert memory is not None
    assert int(memory.tensors["arrived"].abs().sum()) == 0
    with pytest.raises(ValueError, match="call plan_prefill again"):
        batch_prefill(q[:, :4].contiguous(), cache, table, starts, plan=plan)


def test_a_plan_serves_other_lengths_within_its_bounds(device: str) -> None:
    q, cache, table, starts = W(q_lens=(20, 20), lens=(90, 128)).build(device)
    plan = plan_prefill(q, cache, table, starts, kernel="dense")
    assert table.seq_lens is not None
    starts.copy_(torch.tensor([0, 33, 40]))
    table.seq_lens.copy_(torch.tensor([64, 101]))
    o = batch_prefill(q, cache, table, starts, plan=plan)
    expected = batch_prefill_reference(q, cache, table, starts)
    assert isinstance(o, torch.Tensor)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002


def test_empty_batches_and_calls_without_tokens(device: str) -> None:
    q, cache, table, starts = W(q_lens=(0, 0, 0)).build(device)
    o, lse = batch_prefill(q, cache, table, starts, return_lse=True)
    assert o.shape == (0, 6, 64)
    assert lse.shape == (0, 6)
    none = PageTable.from_block_table(
        torch.zeros(0, 1, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int32, device=device),
        page_size=16,
    )
    o = batch_prefill(q, cache, none, torch.zeros(1, dtype=torch.int32, device=device))
    assert isinstance(o, torch.Tensor)
    assert o.shape == (0, 6, 64)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q in fp32": ({"q": torch.zeros(40, 6, 64)}, "q must have dtype"),
    "q of another head_dim": ({"q": torch.zeros(40, 6, 128).bfloat16()}, "the cache's head_dim 64"),
    "head_dim 72": ({"q": torch.zeros(40, 6, 72).bfloat16()}, "q must have head_dim in"),
    "7 heads over 2": ({"q": torch.zeros(40, 7, 64).bfloat16()}, "a multiple of the cache's 2 KV heads"),
    "int64 starts": ({"starts": torch.zeros(4, dtype=torch.int64)}, "cu_seqlens_q must have dtype"),
    "starts of another batch": ({"starts": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_q must have sh"),
    "NaN scale": ({"sm_scale": math.nan}, "sm_scale must be finite, got nan"),
    "negative cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap must be 0"),
    "window -2": ({"window_left": -2}, "window_left must be -1"),
    "float window": ({"causal": False, "window_right": 1.5}, "window_right must be an int"),
    "window beyond int32": ({"window_left": 2**31}, "window_left must be -1"),
    "scale beyond float32": ({"sm_scale": 1e39}, "sm_scale must"),
    "cap beyond float32": ({"logits_soft_cap": 1e39}, "logits_soft_cap must"),
    "zero query heads": ({"q": torch.zeros(40, 0, 64).bfloat16()}, "a multiple of the cache's 2 KV heads"),
    "a keyword that is not there": ({"return_log": True}, "unexpected keyword argument 'return_log'"),
    "causal and a right window": ({"window_right": 4}, "window_right must be -1 or 0 with causal=True"),
    "sinks of another count": ({"sinks": torch.zeros(5)}, "sinks must have shape"),
    "descale of a 16-bit query": ({"q_descale": 0.5}, "q_descale must be 1.0 for a query in"),
    "out of another shape": ({"out": torch.zeros(40, 6, 128).bfloat16()}, "out must have shape"),
    "integer out": ({"out_dtype": torch.int32}, "out_dtype must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_bad_input_is_refused_by_name(fault: str) -> None:
    change, message = REFUSED[fault]
    q, cache, table, starts = W().build()
    options = dict(change)
    q, starts = options.pop("q", q), options.pop("starts", starts)
    with pytest.raises((ValueError, TypeError), match=message):
        batch_prefill(q, cache, table, starts, **options)


def test_gradients_aliases_and_negative_descales_are_refused() -> None:
    q, cache, table, starts = W().build()
    with pytest.raises(ValueError, match="q must not require grad"):
        batch_prefill(q.clone().requires_grad_(), cache, table, starts)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        batch_prefill(q, cache, table, starts, out=q)
    stored = W(q_dtype=torch.float8_e4m3fn).build()
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="q_descale"):
            batch_prefill(*stored, q_descale=bad)


def test_formats_that_do_not_go_together_are_refused_with_what_would_work() -> None:
    q, cache, table, starts = W(format=CacheFormat(k="bf16", v="fp16")).build()
    with pytest.raises(UnsupportedError, match="each with itself or with FP8 or FP4 works"):
        batch_prefill(q, cache, table, starts)
    q, cache, table, starts = W(format="fp8_e5m2", q_dtype=torch.float8_e4m3fn).build()
    with pytest.raises(UnsupportedError, match="a 16-bit query reads any cache"):
        batch_prefill(q, cache, table, starts)
    q, cache, table, starts = W(format="fp8_e4m3fnuz", q_dtype=torch.float8_e4m3fnuz).build()
    with run_as("gfx950"), pytest.raises(UnsupportedError, match="gfx950 multiplies fp8_e4m3fn"):
        batch_prefill(q, cache, table, starts)


def test_forced_kernels_that_cannot_serve_a_call_are_refused() -> None:
    q, cache, table, starts = W().build()
    with pytest.raises(ValueError, match="kernel must be one of"):
        plan_prefill(q, cache, table, starts, kernel="fast")
    with pytest.raises(UnsupportedError, match="plan with max_q_len=1"):
        plan_prefill(q, cache, table, starts, kernel="decode")
    with pytest.raises(UnsupportedError, match="max_kv_tokens or a larger scratch_limit_bytes"):
        plan_prefill(q, cache, table, starts, kernel="dense", scratch_limit_bytes=0)
    assert plan_prefill(q, cache, table, starts, scratch_limit_bytes=0).config.kernel == "fused"
    assert "exceed the limit" in plan_prefill(q, cache, table, starts, scratch_limit_bytes=0).explain()


def test_wrong_values_are_found_when_asked_for_and_harmless_otherwise() -> None:
    q, cache, table, starts = W().build()
    assert table.seq_lens is not None
    for wrong in ([1, 9, 10, 40], [0, 10, 9, 40], [0, 9, 10, 41]):
        bad = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0"):
            plan_prefill(q, cache, table, bad, validate=True)
        batch_prefill(q, cache, table, bad)
    wild = PageTable.from_block_table(
        torch.full_like(table.page_ids, 2**27 + 12345), table.seq_lens, page_size=16
    )
    with pytest.raises(ValueError, match="page ids must be below"):
        plan_prefill(q, cache, wild, starts, validate=True)
    batch_prefill(q, cache, wild, starts)


@pytest.mark.slow
@either_kernel
@pytest.mark.parametrize(
    "fmt", ["bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1", K8V4], ids=str
)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_mixtures(fmt: str | CacheFormat, page_size: int, head_dim: int, kernel: str, device: str) -> None:
    for q_dtype in (torch.bfloat16, torch.float16):
        for options in (
            {},
            {"causal": False, "window_left": 33},
            {"logits_soft_cap": 4.0, "window_left": 60},
        ):
            workload = W(
                format=fmt,
                page_size=page_size,
                head_dim=head_dim,
                q_dtype=q_dtype,
                gqa_ratio=5,
                num_kv_heads=1,
            )
            _check(workload, device, kernel, plan={"num_splits": 2}, **options)

"""batch_prefill against the fp32 reference: a case for every value of every axis, and unusual input."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import batch_prefill, plan_prefill
from narrowkv.paged_cache import CacheFormat, PageTable
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import device_target, get_target
from narrowkv.testing.cases.decode import K8V4
from narrowkv.testing.cases.prefill import AXES, QUERIES, PrefillCase, poison_plan, serves, sweep
from narrowkv.testing.checking import assert_agrees, assert_right

pytestmark = pytest.mark.sampled

W = PrefillCase.small
KERNELS = ["dense", "fused"]
F4, F8 = "fp4_e2m1", "fp8_e4m3fn"
either_kernel = pytest.mark.parametrize("kernel", KERNELS)


def more_cases(kernel):
    """Cases of a kernel besides those of the sweep."""
    case = partial(W, kernel=kernel)
    for fmt in (F8, *AXES["format"]):
        yield case(format=fmt, q_dtype=torch.float16)
    for fmt, scale in product((F4, K8V4), ("e8m0", "e4m3")):
        yield case(format=fmt, scale_group=16, scale_format=scale)
    for mask in ({}, {"window_left": 20}, {"causal": False, "window_left": 40, "window_right": 0}):
        yield case((9, 1, 30, 8), (70, 5, 130, 3), **mask)
    for splits in (2, 5):
        yield case((9, 0, 20), (130, 70, 200), granularity="head", num_splits=splits, sinks=True)
    yield case(granularity="token_head", sinks=True, logits_soft_cap=1.0, window_left=20)
    for fmt in (F8, "fp8_e4m3fnuz"):
        fp8 = partial(case, format=fmt, q_dtype=QUERIES[fmt])
        yield fp8(window_left=40)
        yield fp8(granularity="head", causal=False)
        yield fp8(granularity="token_head", head_dim=80)


CPU = get_target("cpu")
QUICK = sweep(CPU)
CASES = [
    *(case for case in QUICK if not case.appends),
    *(case for kernel in KERNELS for case in more_cases(kernel)),
    W((5, 1, 12), (300, 5, 70), kernel="split", sinks=True, window_left=100),
    W(kernel="split", format=CacheFormat("int8", "int4"), granularity="token_head", head_dim=80),
    *(pytest.param(case, marks=pytest.mark.slow)
      for case in sweep(CPU, everything=True)[len(QUICK) :] if not case.appends),
]  # fmt: skip


def _call(inputs, plan=None, **options):
    """`o` of inputs with some options changed, by a plan."""
    return inputs.run(plan or inputs.plan(), **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case, device):
    if device == "cuda" and case.native_fp8:
        if case.kernel == "dense" or not serves(case, device_target(torch.device(device))):
            pytest.skip("NVIDIA has no FNUZ, and reads keys for FP8 queries from their pages")
    assert_right(case, device)


# More than 32 rows a sequence over E4M3 and FP4, for which Hopper has a kernel of its own.
TALL = partial(PrefillCase, format=F8, head_dim=128, gqa_ratio=12, num_kv_heads=2, stale_columns=0)


@pytest.mark.parametrize(
    "case",
    [
        TALL(q_lens=(8, 8, 8, 8), lens=(300, 8, 0, 1131), sinks=True),
        TALL(q_lens=(8, 0, 12, 5), lens=(300, 5, 1000, 5), granularity="head"),
        TALL(q_lens=(16, 11, 16), lens=(700, 127, 3), ragged=True, q_dtype=torch.float16, layout="HND"),
        TALL(q_lens=(16, 1, 23, 20), lens=(2000, 100, 800, 20), page_size=1),
        TALL(q_lens=(8, 9, 2), lens=(300, 131, 64), format=K8V4, sinks=True),
        TALL(q_lens=(14, 15), lens=(900, 15), format=K8V4),
        TALL(q_lens=(7, 8), lens=(700, 127), format=F4, ragged=True, q_dtype=torch.float16, spread=6.0),
        TALL(q_lens=(16, 16, 9), lens=(500, 130, 60), format=F4, page_size=64),
        TALL(q_lens=(4, 1, 5, 4), lens=(700, 40, 5, 300), sinks=True),
        TALL(q_lens=(3, 4, 4, 5), lens=(100, 900, 4, 333), format=K8V4),
        TALL(q_lens=(4,) * 40, lens=(40,) * 40, format=F4),
    ],
    ids=str,
)  # fmt: skip
def test_tall_tiles(case, device):
    inputs = case.inputs(device)
    plan = inputs.plan(max_q_len=max(case.q_lens))
    kernels = {bound.kernel.__name__ for bound in plan.kernels(inputs.cache, sinks=case.sinks)}
    assert ("_tall_prefill_kernel" in kernels) == (device_target(torch.device(device)).name == "sm90")
    assert_right(case, device, inputs=inputs, plan=plan)


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("fmt", [F8, "bf16"])
@either_kernel
def test_the_code_paths_of_amd_targets_when_interpreted(kernel, fmt, target):
    with run_as(target):
        assert_right(W(kernel=kernel, format=fmt, num_kv_heads=1))


@either_kernel
@pytest.mark.parametrize("out", [torch.float16, torch.float32])
def test_an_output_of_more_bits_is_closer(out, kernel, device):
    inputs = W(kernel=kernel).inputs(device)
    o = _call(inputs, out_dtype=out)
    assert o.dtype == out
    assert_agrees(o, inputs.reference()[0], bound=0.0005)


@either_kernel
def test_a_descale_of_an_fp8_query_is_a_number_or_a_tensor(kernel, device):
    if device == "cuda" and kernel == "dense":
        pytest.skip("NVIDIA reads keys for FP8 queries from their pages")
    case = W(q_dtype=torch.float8_e4m3fn, kernel=kernel)
    assert_right(case, device, q_descale=0.25)
    assert_right(case, device, q_descale=torch.tensor([0.3], device=device))


@either_kernel
@pytest.mark.parametrize("clean", [True, False])
def test_an_ocp_cache_feeds_the_fnuz_unit_of_gfx942_as_it_is(clean, kernel):
    case = W(q_dtype=torch.float8_e4m3fn, kernel=kernel)
    inputs = case.inputs()
    if not clean:
        stored = inputs.cache.k.view(torch.uint8)
        stored[int(inputs.table.page_ids[0, 1]), 3, :, 5] = 0x80  # -0, which FNUZ reads as NaN
    inputs = replace(inputs, cache=replace(inputs.cache, negative_zero_free=clean))
    with run_as("gfx942"):
        plan = inputs.plan()
        assert plan.config.fp8 == "fp8_e4m3fnuz"
        assert_right(case, inputs=inputs, plan=plan)


def test_the_values_of_one_tile_may_run_with_the_next_softmax(device):
    for fmt, splits in (("bf16", 1), (F4, 2)):
        case = W(
            (5, 25), (5, 200), format=fmt, num_kv_heads=1, num_splits=splits, kernel="dense", window_left=100
        )
        inputs = case.inputs(device)
        plan = inputs.plan()
        assert_right(case, inputs=inputs, plan=replace(plan, config=replace(plan.config, overlap=True)))


def test_one_query_token_everywhere_is_decoded_with_the_same_bits(device):
    q, cache, table, starts = W(q_lens=(1, 1, 1)).build(device)
    plan = plan_prefill(q, cache, table, starts, max_q_len=1)
    assert plan.decode is not None
    o = batch_prefill(q, cache, table, starts, plan=plan, window_left=30)
    assert torch.equal(o, paged_decode(q, cache, table, window_left=30))
    assert "paged_decode" in plan.explain()


# ------------------------------------------------------------------------------------------ plans in use


def test_tiles_run_longest_first(device):
    q_lens, lens = (70, 1, 130, 40), (100, 5, 130, 200)
    inputs = W(q_lens, lens, num_kv_heads=1, kernel="dense").inputs(device)
    plan = inputs.plan()
    _call(inputs, plan)
    rows = plan.config.block_m
    schedule = plan.memory(plan.config).tensors["schedule"][: plan.shape.row_tiles(rows)].tolist()
    tiles = [row[:6] for row in schedule if row[0] >= 0]
    work = [(kv_len - q_len) * 3 + (number + 1) * rows for _, number, _, q_len, kv_len, _ in tiles]
    assert work == sorted(work, reverse=True)
    every = {(seq, n) for seq, q_len in enumerate(q_lens) for n in range(-(-q_len * 3 // rows))}
    assert {(tile[0], tile[1]) for tile in tiles} == every
    assert len(tiles) == len(every)


# A sequence's bits do not depend on the batch, on the table's width or on other lengths.
@pytest.mark.parametrize("kernel", [None, "dense"])
def test_batch_invariant_results(kernel):
    q, cache, table, starts = W((9, 1, 20), (70, 5, 33), num_kv_heads=1, format="bf16").build()

    def run(sequences, width):
        ids = torch.full((len(sequences), width), -1, dtype=torch.int32)
        ids[:, : table.page_ids.shape[1]] = table.page_ids[sequences]
        batch = PageTable.from_block_table(ids, table.seq_lens[sequences], page_size=16)
        rows = [torch.arange(int(starts[i]), int(starts[i + 1])) for i in sequences]
        begins = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).int()
        call = (q[torch.cat(rows)], cache, batch, begins)
        plan = plan_prefill(*call, kernel=kernel, batch_invariant=True)
        options = {"batch_invariant": True, "return_lse": True, "sinks": torch.zeros(3)}
        o, lse = batch_prefill(*call, plan=plan, **options)
        last = len(rows[-1])
        return o[-last:], lse[-last:]

    with run_as("gfx942"):
        for seq, others, width in ((0, [0, 1, 2], 5), (1, [0, 1, 2], 5), (2, [1] * 4, 300)):
            for a, b in zip(run([*others, seq], width), run([seq], 5), strict=True):
                assert torch.equal(a, b)


@pytest.mark.slow
def test_batch_invariant_results_in_batches_up_to_300(device):
    q, cache, table, _ = W(q_lens=(3,), lens=(20,), num_kv_heads=1).build(device)
    alone = None
    for batch in (1, 2, 63, 64, 65, 300):
        ids, lens = table.page_ids.expand(batch, -1).contiguous(), table.seq_lens.expand(batch).contiguous()
        many = PageTable.from_block_table(ids, lens, page_size=16)
        starts = (torch.arange(batch + 1, device=device) * 3).int()
        o = batch_prefill(q.repeat(batch, 1, 1), cache, many, starts, batch_invariant=True)
        alone = o if alone is None else alone
        assert torch.equal(o, alone.repeat(batch, 1, 1))


def test_a_batch_invariant_configuration_does_not_depend_on_the_batch():
    for target in ("gfx942", "sm90", "gfx950"):
        with run_as(target):
            plans = [
                plan_prefill(*W((n,) * batch, (n + 500,) * batch, clean=True).build(), batch_invariant=True)
                for n, batch in ((1, 1), (1, 8), (100, 2), (300, 1))
            ]
        assert len({plan.config for plan in plans}) == 1


def test_a_plan_serves_other_lengths_within_its_bounds(device):
    case = W(q_lens=(20, 20), lens=(90, 128), kernel="dense")
    inputs = case.inputs(device)
    plan = inputs.plan()
    inputs.starts.copy_(torch.tensor([0, 33, 40]))
    inputs.table.seq_lens.copy_(torch.tensor([64, 101]))
    assert_right(case, inputs=inputs, plan=plan)


# -------------------------------------------------------------------------------------------- unusual numbers


@pytest.mark.parametrize("fmt", [F8, "fp8_e4m3fnuz"])
def test_values_that_are_not_numbers_reach_only_rows_that_see_them_beside_fp8_queries(fmt):
    inputs = W((20,), (50,), format=fmt, q_dtype=QUERIES[fmt], kernel="dense").inputs()
    last = int(inputs.table.page_ids[0, 49 // 16])
    inputs.cache.v.view(torch.uint8)[last, 49 % 16] = 0x7F if fmt == F8 else 0x80
    o = _call(inputs)
    assert bool(o[-1].isnan().all())
    assert_agrees(o[:-1], inputs.reference()[0][:-1])


@either_kernel
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("position", [0, 39])
def test_a_nan_reaches_only_the_rows_that_attend_to_it(which, position, kernel, device):
    inputs = W((40, 3), (40, 20), gqa_ratio=2, kernel=kernel).inputs(device)
    page = int(inputs.table.page_ids[0, position // 16])
    getattr(inputs.cache, which).view(torch.uint8)[page, position % 16, 1, 3] = 0x7F
    o = _call(inputs)
    expected = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
    expected[position:40, 2:4] = True  # sequence 0, rows from the position on, heads of KV head 1
    assert torch.equal(o.isnan().any(-1), expected)


@either_kernel
@pytest.mark.parametrize("bad", [(math.nan,), (math.inf,), (-math.inf,), (math.nan, 3e38)], ids=str)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_a_value_that_is_not_finite_leaves_other_rows_as_they_are(fmt, bad, kernel, device):
    inputs = W((40, 3), (40, 20), gqa_ratio=2, format=fmt, kernel=kernel).inputs(device)
    expected, _ = inputs.reference()
    row = inputs.cache.v[inputs.table.page_ids[0, 1].long(), 5, 1]  # of key 21
    row[: len(bad)] = torch.tensor(bad).to(row)
    o = _call(inputs)
    sees = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
    sees[21:40, 2:4] = True
    assert torch.equal(o.isnan().any(-1), sees)
    assert_agrees(o[~sees], expected[~sees])


@either_kernel
@pytest.mark.parametrize(
    "powers",
    [(-30, 0, 40, 39, 9, 0, 0, -9, -60, 20), (-20, -18, -17, -16, -14, -20, -30, -25, -60, -16)],
    ids=["large", "small"],
)
def test_values_of_any_size_in_bf16(powers, kernel, device):
    keys = 2000 if device == "cuda" else 300  # long enough for Hopper's own kernel, where there is one
    case = W((keys // 10,), (keys,), num_kv_heads=1, format="bf16", page_size=4, kernel=kernel)
    inputs = case.inputs(device)
    values, pages = inputs.cache.logical()[1], inputs.table.page_ids[0, : keys // 4].long()
    for tenth, power in enumerate(powers):
        values[pages[tenth * len(pages) // 10 : (tenth + 1) * len(pages) // 10]] *= 2.0**power
    assert_agrees(_call(inputs), inputs.reference()[0])


# Sums of such values, and V times what its scratch is scaled by, are beyond float32.
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("top", [1e37, 3e38])
def test_values_near_the_largest_of_float32_in_dense_prefill(top, splits, device):
    changes = {"num_kv_heads": 1, "format": "bf16", "kernel": "dense", "num_splits": splits, "sinks": True}
    inputs = W((30, 5), (200, 40), **changes).inputs(device)
    values = inputs.cache.logical()[1]
    values.copy_(torch.where(values.isfinite(), values.clamp(-1, 1) * top, values))
    plan = inputs.plan()
    poison_plan(plan)
    o, lse = _call(inputs, plan, return_lse=True, out_dtype=torch.float32)
    expected, expected_lse = inputs.reference()
    assert_agrees((o / top, lse), (expected / top, expected_lse))


@either_kernel
def test_sinks_in_bf16(kernel, device):
    assert_right(W(kernel=kernel), device, sinks=torch.linspace(-3, 3, 6, device=device).bfloat16())


@either_kernel
def test_rows_without_keys_are_zero(kernel, device):
    o, lse = assert_right(W((7, 3), (2, 0), kernel=kernel), device)
    assert bool((o[[*range(5), 7, 8, 9]] == 0).all())
    assert bool((lse[[*range(5), 7, 8, 9]] == -math.inf).all())


def test_calls_without_tokens(device):
    o, lse = W(q_lens=(0, 0, 0)).inputs(device).call()
    assert (o.shape, lse.shape) == ((0, 6, 64), (0, 6))


# ----------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "q in fp32": ({"q": torch.zeros(31, 6, 64)}, "q must have dtype"),
    "q of another head_dim": ({"q": torch.zeros(31, 6, 128).bfloat16()}, "the cache's head_dim 64"),
    "head_dim 72": ({"q": torch.zeros(31, 6, 72).bfloat16()}, "q must have head_dim in"),
    "7 heads over 2": ({"q": torch.zeros(31, 7, 64).bfloat16()}, "a multiple of the cache's 2 KV heads"),
    "zero query heads": ({"q": torch.zeros(31, 0, 64).bfloat16()}, "a multiple of the cache's 2 KV heads"),
    "gradients": ({"q": torch.zeros(31, 6, 64).bfloat16().requires_grad_()}, "q must not require grad"),
    "starts in fp32": ({"starts": torch.zeros(4)}, "cu_seqlens_q must have dtype"),
    "starts of another batch": ({"starts": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_q must have sh"),
    "NaN scale": ({"sm_scale": math.nan}, "sm_scale must be finite, got nan"),
    "scale beyond float32": ({"sm_scale": 1e39}, "sm_scale must"),
    "negative cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap must be 0"),
    "cap beyond float32": ({"logits_soft_cap": 1e39}, "logits_soft_cap must"),
    "window -2": ({"window_left": -2}, "window_left must be -1"),
    "window beyond int32": ({"window_left": 2**31}, "window_left must be -1"),
    "float window": ({"causal": False, "window_right": 1.5}, "window_right must be an int"),
    "causal and a right window": ({"window_right": 4}, "window_right must be -1 or 0 with causal=True"),
    "a keyword that is not there": ({"return_log": True}, "unexpected keyword argument 'return_log'"),
    "sinks of another count": ({"sinks": torch.zeros(5)}, "sinks must have shape"),
    "descale of a 16-bit query": ({"q_descale": 0.5}, "q_descale must be 1.0 for a query in"),
    "out of another shape": ({"out": torch.zeros(31, 6, 128).bfloat16()}, "out must have shape"),
    "integer out": ({"out_dtype": torch.int32}, "out_dtype must be one of"),
    **{f"descale {bad} of an FP8 query": (
        {"q": torch.zeros(31, 6, 64).to(torch.float8_e4m3fn), "q_descale": bad}, "q_descale")
       for bad in (0.0, -1.0, math.nan, math.inf)},
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_bad_input_is_refused_by_name(fault):
    change, message = REFUSED[fault]
    q, cache, table, starts = W().build()
    options = dict(change)
    q, starts = options.pop("q", q), options.pop("starts", starts)
    with pytest.raises((ValueError, TypeError), match=message):
        batch_prefill(q, cache, table, starts, **options)


@pytest.mark.parametrize(
    ("fmt", "query", "target", "message"),
    [
        (CacheFormat(k="bf16", v="fp16"), torch.bfloat16, "cpu", "each with itself or with FP8 or FP4 works"),
        ("fp8_e5m2", torch.float8_e4m3fn, "cpu", "a 16-bit query reads any cache"),
        ("int8", torch.float8_e4m3fn, "cpu", "int8"),
        ("fp8_e4m3fnuz", torch.float8_e4m3fnuz, "gfx950", "gfx950 multiplies fp8_e4m3fn"),
    ],
)
def test_formats_that_do_not_go_together_are_refused_with_what_would_work(fmt, query, target, message):
    call = W(format=fmt, q_dtype=query).build()
    with run_as(target), pytest.raises(UnsupportedError, match=message):
        batch_prefill(*call)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kernel": "fast"}, ValueError, "kernel must be one of"),
        ({"kernel": "decode"}, UnsupportedError, "plan with max_q_len=1"),
        ({"kernel": "decode", "batch_invariant": True}, UnsupportedError, "needs one query token"),
        ({"kernel": "dense", "scratch_limit_bytes": 0}, UnsupportedError, "or a larger scratch_limit_bytes"),
    ],
    ids=str,
)
def test_forced_kernels_that_cannot_serve_a_call_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_prefill(*W().build(), **arguments)


def test_a_plan_without_scratch_says_why_it_is_fused():
    plan = plan_prefill(*W().build(), scratch_limit_bytes=0)
    assert plan.config.kernel == "fused"
    assert "exceed the limit" in plan.explain()


def test_outputs_and_plans_of_other_calls_are_refused():
    q, cache, table, starts = W().build()
    with pytest.raises(ValueError, match="out must not share memory with q"):
        batch_prefill(q, cache, table, starts, out=q)
    plan = plan_prefill(q, cache, table, starts)
    with pytest.raises(ValueError, match="plan must be made with batch_invariant=True"):
        batch_prefill(q, cache, table, starts, plan=plan, batch_invariant=True)


def test_wrong_values_are_found_when_asked_for_and_harmless_otherwise():
    q, cache, table, starts = W().build()
    for wrong in ([1, 9, 10, 31], [0, 10, 9, 31], [0, 9, 10, 32]):
        bad = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0"):
            plan_prefill(q, cache, table, bad, validate=True)
        batch_prefill(q, cache, table, bad)
    wild_ids = torch.full_like(table.page_ids, 2**27 + 12345)
    wild = PageTable.from_block_table(wild_ids, table.seq_lens, page_size=16)
    with pytest.raises(ValueError, match="page ids must be below"):
        plan_prefill(q, cache, wild, starts, validate=True)
    batch_prefill(q, cache, wild, starts)

"""prefill_append: what it attends to, and that it stores what the host would, byte for byte, and no more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.planning import can_pipeline
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import device_target, get_target
from narrowkv.testing.cases.cache import copy_cache, differing_bytes
from narrowkv.testing.cases.decode import K8V4
from narrowkv.testing.cases.prefill import AXES, PrefillCase, sweep
from narrowkv.testing.checking import assert_agrees, assert_right

pytestmark = pytest.mark.sampled

W = PrefillCase.append
F8, FP16 = "fp8_e4m3fn", torch.float16
# "pipelined" is written for Hopper alone.
either_kernel = pytest.mark.parametrize(
    "kernel", ["append_then_attend", "fused", pytest.param("pipelined", marks=pytest.mark.gpu)]
)


def more_cases(kernel):
    """Cases of a kernel besides those of the sweep."""
    # Chunks that begin inside a page, in pages larger and smaller than the tile.
    for page_size in (16, *AXES["page_size"]):
        yield W((20, 3, 9), (7, 0, 66), page_size=page_size, num_kv_heads=1, kernel=kernel)
    for rope, rotary_dim in (("neox", 64), ("gptj", 32)):
        yield W(rope=rope, rotary_dim=rotary_dim, kernel=kernel, sinks=True, window_left=12)
    yield W(format=CacheFormat("int8", "int4"), granularity="token_head", rope="neox", kernel=kernel)


CPU = get_target("cpu")
QUICK = sweep(CPU)
# The window of the chunk's second tile of rows begins inside a tile of new keys.
WINDOW_IN_THE_CHUNK = W((40, 1), (20, 70), num_kv_heads=1, window_left=12, sinks=True, kernel="fused")
BOTH_KERNELS = [
    WINDOW_IN_THE_CHUNK,
    *(case for case in QUICK if case.appends),
    *(case for kernel in ("append_then_attend", "fused") for case in more_cases(kernel)),
]
CASES = [
    *BOTH_KERNELS,
    *(W(format=fmt, q_dtype=q) for fmt, q in ((F8, FP16), ("bf16", FP16), ("fp16", torch.bfloat16))),
    W(rope="neox", granularity="head", fp8_compute=True),
    W((5, 1, 12), (300, 5, 70), kernel="split", rope="gptj"),
    *(pytest.param(replace(case, kernel="pipelined"), marks=pytest.mark.gpu)
      for case in BOTH_KERNELS if case.kernel == "fused"),
    *(pytest.param(case, marks=pytest.mark.slow)
      for case in sweep(CPU, everything=True)[len(QUICK) :] if case.appends),
]  # fmt: skip


def inputs_of(case, device):
    """The case's tensors; skips what Hopper's own kernel does not serve."""
    inputs = case.inputs(device)
    if case.kernel == "pipelined":
        if not can_pipeline(device_target(inputs.q.device), inputs.q.dtype, inputs.cache):
            pytest.skip("not for this GPU, head_dim or descale")
    return inputs


@pytest.mark.sampled(always=[{"case": WINDOW_IN_THE_CHUNK}])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case, device):
    assert_right(case, inputs=inputs_of(case, device))


@either_kernel
def test_splits_leave_the_arrival_counters_at_zero(kernel, device):
    case = W((9, 0, 70), (130, 40, 0), num_kv_heads=1, num_splits=3, kernel=kernel)
    inputs = inputs_of(case, device)
    plan = inputs.plan()
    assert_right(case, inputs=inputs, plan=plan)
    assert int(plan.workspace.counters(2**16).abs().sum()) == 0


@pytest.mark.parametrize("fp8_compute", [False, True])
def test_the_code_paths_of_gfx950_when_interpreted(fp8_compute):
    """Other tests on a CPU take those of gfx942."""
    with run_as("gfx950"):
        assert_right(W(num_kv_heads=1, num_splits=1, fp8_compute=fp8_compute))


# --------------------------------------------------------------------------------- Hopper's own kernel

LENS = {"q_lens": (130, 40, 300, 1), "gqa_ratio": 6, "head_dim": 128, "kernel": "pipelined"}
OLD_LENS = pytest.mark.parametrize("lens", [(700, 0, 1153, 128), (100, 0, 513, 64)], ids=str)
SPLITS = pytest.mark.parametrize("splits", [1, 3])


@pytest.mark.gpu
@SPLITS
@pytest.mark.parametrize("window_left", [-1, 200])
@pytest.mark.parametrize(
    ("fmt", "granularity", "head_dim"),
    [(F8, "float", 128), (F8, "head", 64), ("fp8_e5m2", "tensor", 128), ("bf16", "float", 128)],
)
@OLD_LENS
def test_old_keys_that_end_anywhere_in_a_block(lens, fmt, granularity, head_dim, window_left, splits):
    changes = {**LENS, "format": fmt, "granularity": granularity, "head_dim": head_dim}
    case = W(lens=lens, num_splits=splits, window_left=window_left, **changes)
    assert_right(case, inputs=inputs_of(case, "cuda"))


# Old keys of a 16-bit cache in their pages, the chunk's own in the scratch: the former end anywhere.
@pytest.mark.gpu
@SPLITS
@pytest.mark.parametrize("window_left", [-1, 200])
@pytest.mark.parametrize(
    ("fmt", "granularity", "layout", "page_size"),
    [
        ("bf16", "float", "NHD", 16),
        ("bf16", "head", "HND", 8),
        ("bf16", "float", "NHD", 256),
        ("fp16", "float", "HND", 32),
        ("bf16", "float", "NHD", 4),
    ],
)
@OLD_LENS
@pytest.mark.usefixtures("always_in_pages")
def test_old_keys_that_stay_in_their_pages(lens, fmt, granularity, layout, page_size, window_left, splits):
    changes = {**LENS, "format": fmt, "granularity": granularity, "layout": layout, "page_size": page_size}
    dtype = FP16 if fmt == "fp16" else torch.bfloat16
    case = W(lens=lens, num_splits=splits, window_left=window_left, q_dtype=dtype, **changes)
    assert_right(case, inputs=inputs_of(case, "cuda"))


LONG = {"q_lens": (500,), "lens": (700,), "gqa_ratio": 6, "head_dim": 128, "kernel": "pipelined"}


@pytest.mark.gpu
@SPLITS
@pytest.mark.parametrize("window_left", [-1, 500])
@pytest.mark.parametrize("tiles", [(), (0,), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize(("fmt", "granularity"), [(F8, "float"), (F8, "head"), ("bf16", "float")])
def test_new_values_that_differ_by_far_from_tile_to_tile(fmt, granularity, tiles, window_left, splits):
    changes = {**LONG, "format": fmt, "granularity": granularity}
    inputs = inputs_of(W(num_splits=splits, window_left=window_left, **changes), "cuda")
    for tile in tiles:
        inputs.new[1][tile * 128 : tile * 128 + 128] *= 512 if fmt == F8 else 2.0**20
    assert_agrees(inputs.run(inputs.plan()), inputs.reference()[0])
    assert not inputs.wrong_bytes()


@pytest.mark.gpu
@SPLITS
@pytest.mark.parametrize("factor", [1.0, 2.0**30, 2.0**-30], ids=str)
@pytest.mark.usefixtures("always_in_pages")
def test_values_of_any_size_whose_keys_stay_in_their_pages(factor, splits):
    inputs = inputs_of(W(**LONG, format="bf16", num_splits=splits), "cuda")
    values, pages = inputs.cache.logical()[1], inputs.table.page_ids[0].long()
    values[pages[16:24]] *= factor
    inputs.new[1][:64] *= factor
    inputs = replace(inputs, wanted=copy_cache(inputs.cache))
    plan = inputs.plan()
    assert plan.config.k_in_pages
    assert_agrees(inputs.run(plan), inputs.reference()[0])
    assert not inputs.wrong_bytes()


@pytest.mark.gpu
@SPLITS
@pytest.mark.parametrize(("position", "window_left"), [(3, -1), (1100, -1), (1100, 500)])
@pytest.mark.usefixtures("always_in_pages")
def test_nan_of_an_old_value_whose_key_stays_in_its_page(position, window_left, splits):
    # In the second sequence's first tile, or its last one, which ends with rows that are no keys.
    changes = {**LONG, "q_lens": (500, 40), "lens": (700, 1101), "format": "bf16"}
    inputs = inputs_of(W(**changes, num_splits=splits, window_left=window_left), "cuda")
    page, slot = inputs.table.page_ids[1, position // 16].long(), position % 16
    inputs.cache.logical()[1][page, slot, 0, 5] = math.nan
    o = inputs.run(inputs.plan())
    expected = torch.zeros(o.shape[:2], dtype=torch.bool, device="cuda")
    expected[500:, :6] = True
    assert torch.equal(o.isnan().any(-1), expected)


# -------------------------------------------------------------------------------------------- unusual numbers


# In the scratch V is float16, in units of the descale and times a power of two where that does not do.
@pytest.mark.parametrize("kernel", ["append_then_attend", "fused"])
@pytest.mark.parametrize("factor", [2.0**-30, 2.0**40], ids=str)
@pytest.mark.parametrize(
    ("fmt", "granularity"), [(F8, "float"), (F8, "head"), ("bf16", "float"), (K8V4, "float")]
)
def test_new_values_of_any_size(fmt, granularity, factor, kernel, device):
    changes = {"num_kv_heads": 1, "format": fmt, "granularity": granularity, "kernel": kernel}
    inputs = W((70, 5), (0, 70), **changes).inputs(device)
    inputs.new[1][:64] *= factor
    o, expected = inputs.run(inputs.plan()), inputs.reference()[0]
    for rows in (slice(64), slice(64, None)):  # the first rows attend to nothing else
        assert_agrees(o[rows], expected[rows])
    assert not inputs.wrong_bytes()


@pytest.mark.parametrize("top", [1e37, 3e38])
def test_new_values_near_the_largest_of_float32(top, device):
    inputs = W((70, 9), (0, 20), num_kv_heads=1, format="bf16", kernel="append_then_attend").inputs(device)
    inputs.new[1].copy_(inputs.new[1].clamp(-1, 1) * top)
    o = inputs.run(inputs.plan(), out_dtype=torch.float32)
    assert_agrees(o / top, inputs.reference()[0] / top)
    assert not inputs.wrong_bytes()


@either_kernel
@pytest.mark.parametrize(("side", "bad"), [(0, [math.nan]), (1, [math.nan]), (1, [-math.inf, 3e38])], ids=str)
def test_nan_of_a_new_token_reaches_only_the_rows_that_attend_to_it(side, bad, kernel, device):
    inputs = inputs_of(W((20,), (20,), kernel=kernel), device)
    plan = inputs.plan()
    finite = inputs.run(plan)
    inputs.new[side][7, 1, 3 : 3 + len(bad)] = torch.tensor(bad).to(inputs.q)
    o = inputs.run(plan)
    sees = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
    sees[7:, 3:6] = True
    assert torch.equal(o.isnan().any(-1), sees)
    torch.testing.assert_close(o[~sees], finite[~sees], rtol=1e-2, atol=1e-3)


# What has no page, or one beyond the cache, is attended to and not stored.
@either_kernel
def test_tokens_without_a_page_are_not_stored(kernel, device):
    case = W((25, 5), (20, 3), kernel=kernel)
    inputs = inputs_of(case, device)
    lens = torch.tensor([20, 0], dtype=torch.int32, device=device)
    ids = inputs.table.page_ids[:, :2].contiguous()
    ids[1, 0] = inputs.cache.num_pages
    short = PageTable.from_block_table(ids, cached_lens=lens, page_size=16)
    assert_right(case, inputs=replace(inputs, table=short))
    message = "must have pages for the new tokens: sequence 0 comes to 45 tokens, got pages for 32"
    with pytest.raises(ValueError, match=message):
        plan_append(inputs.q, inputs.cache, short, inputs.starts, validate=True)


def test_a_call_without_tokens_changes_nothing(device):
    q, k_new, v_new, cache, table, starts, _ = W(q_lens=(0, 0, 0)).build_append(device)
    before = copy_cache(cache)
    o, lse = prefill_append(q, k_new, v_new, cache, table, starts, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 6, 64), (0, 6))
    assert not differing_bytes(cache, before)


# ----------------------------------------------------------------------------------------------- refusals

RAGGED = PageTable.from_ragged(*(torch.zeros(n, dtype=torch.int32) for n in (4, 1, 3)), page_size=16)
REFUSED = {
    "k_new in another dtype": ({"k_new": torch.zeros(31, 2, 64)}, "k_new must have dtype"),
    "v_new of another count": ({"v_new": torch.zeros(30, 2, 64).bfloat16()}, "v_new must have shape"),
    "gradients": ({"k_new": torch.zeros(31, 2, 64).bfloat16().requires_grad_()}, "k_new must not require"),
    "fp32 queries": ({"q": torch.zeros(31, 6, 64)}, "q must have dtype"),
    "negative cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap must be 0"),
    "window -2": ({"window_left": -2}, "window_left must be -1"),
    "window beyond int32": ({"window_left": 2**31}, "window_left must be -1"),
    "sinks of another count": ({"sinks": torch.zeros(5)}, "sinks must have shape"),
    "NaN scale": ({"sm_scale": math.nan}, "sm_scale must be finite"),
    "scale beyond float32": ({"sm_scale": 1e39}, "sm_scale must"),
    "a ragged table": ({"table": RAGGED}, "page_table must hold the lengths before the append"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_bad_input_is_refused_by_name_and_changes_nothing(fault):
    change, message = REFUSED[fault]
    names = ("q", "k_new", "v_new", "cache", "table", "starts")
    given = dict(zip(names, W().build_append(), strict=False))
    before = copy_cache(given["cache"])
    call = [change.get(name, given[name]) for name in names]
    with pytest.raises((ValueError, TypeError), match=message):
        prefill_append(*call, **{name: value for name, value in change.items() if name not in names})
    assert not differing_bytes(given["cache"], before)


def test_caches_tables_and_plans_that_cannot_append_are_refused():
    per_page = W(granularity="page_head").build_append()
    with pytest.raises(
        ValueError, match="k_descale must be per tensor, per head or per token-head to append"
    ):
        prefill_append(*per_page[:6])
    q, k_new, v_new, cache, table, starts, _ = W().build_append()
    after = replace(table, before_append=False)
    with pytest.raises(ValueError, match="call plan_append again"):
        prefill_append(q, k_new, v_new, cache, table, starts, plan=plan_prefill(q, cache, after, starts))
    with pytest.raises(ValueError, match=r"page_table must hold the lengths before .*PagePool.table_before"):
        plan_append(q, cache, after, starts)
    plan = plan_append(q, cache, table, starts)
    with pytest.raises(ValueError, match="plan must be made with fp8_compute=True"):
        prefill_append(q, k_new, v_new, cache, table, starts, plan=plan, fp8_compute=True)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="k_descale"):
            PagedKVCache.from_tensors(cache.k, cache.v, format=cache.format, k_descale=bad, v_descale=1.0)


# Whose lengths are meant is part of the table.
@pytest.mark.parametrize("call", [batch_prefill, plan_prefill, paged_decode])
def test_a_table_before_an_append_is_refused_by_operations_that_append_nothing(call):
    q, _, _, cache, table, starts, _ = W(lens=(20,), q_lens=(1,)).build_append()
    with pytest.raises(ValueError, match="page_table must hold lengths that include the tokens of this"):
        call(q, cache, table, *([] if call is paged_decode else [starts]))


@pytest.mark.parametrize(
    ("fmt", "arguments", "message"),
    [
        ("fp16", {"kernel": "append_then_attend"}, "needs keys in fp16 and new ones in bf16 in one scratch"),
        ("fp16", {"fp8_compute": True}, "fp8_compute needs K and V in one FP8 format"),
        (
            CacheFormat("int8", "int4"), {"fp8_compute": True},
            "one FP8 format, got k=int8, v=int4; without it any cache",
        ),
        (F8, {"fp8_compute": True, "kernel": "append_then_attend"}, "fp8_compute has kernel='fused' only"),
    ],
    ids=str,
)  # fmt: skip
def test_forced_kernels_that_cannot_serve_a_call_are_refused(fmt, arguments, message):
    q, _, _, cache, table, starts, _ = W(format=fmt).build_append()
    with pytest.raises(UnsupportedError, match=message):
        plan_append(q, cache, table, starts, **arguments)

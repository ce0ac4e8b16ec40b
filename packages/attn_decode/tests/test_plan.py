"""Plans of decode, beside what tests/plans asks of every plan: kernels, grids, forms of inputs, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import DecodeShape, paged_decode, paged_decode_reference, plan_decode, planning
from narrowkv.attn_decode.kernels import _merge_splits_kernel, _paged_decode_kernel
from narrowkv.attn_decode.options import DecodeArguments, DecodeOptions
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch import executing, run_as
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.decode import DecodeCase

I32 = torch.int32
SMALL = DecodeCase.small(lens=(70, 5, 33), num_kv_heads=1, gqa_ratio=2, clean=True)
SHAPE = DecodeShape(batch=4, q_len=1, num_qo_heads=2, num_kv_heads=1, head_dim=64, page_size=16, capacity=96)
MODEL = DecodeShape(
    batch=512, q_len=1, num_qo_heads=96, num_kv_heads=8, head_dim=128, page_size=16, capacity=131072
)


# ---------------------------------------------------------------------------- memory, kernels, grids


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "bf16", "fp4_e2m1"])
@pytest.mark.parametrize("capacity", [64, 2048, 131072])
def test_a_model_needs_a_small_workspace_and_few_kernels(capacity: int, fmt: str, target: str) -> None:
    """51 capture sizes up to 512: one plan."""
    cache = PagedKVCache.empty(1, 16, 8, 128, format=fmt)
    with executing(LaunchRecorder(target)):
        plan = plan_decode(replace(MODEL, capacity=capacity), fmt, device="cpu")
        found = plan.kernels(cache, return_lse=True)
    # Shares for twelve programs a unit, not eight.
    twelve = fmt == "fp4_e2m1" or (target, fmt) == ("sm90", "fp8_e4m3fn")
    assert plan.workspace_bytes() <= (80 if twelve else 70) * 2**20
    assert plan.workspace_bytes() > 0 or capacity < 131072
    # gfx942 has two tiles of FP8 calls, for few splits and for many.
    assert 1 <= len(found) <= (11 if (target, fmt) == ("gfx942", "fp8_e4m3fn") else 8)
    assert {launch.kernel for launch in found} <= {_paged_decode_kernel, _merge_splits_kernel}
    assert len(
        {(launch.kernel, tuple(launch.constexprs.values()), launch.options) for launch in found}
    ) == len(found)


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize(
    ("batch", "options"),
    [(128, {"tokens_per_split": 256}), (300, {"batch_invariant": True}), (70000, {})],
    ids=str,
)
def test_grids_stay_within_what_targets_take(batch: int, options: dict[str, Any], target: str) -> None:
    """128 sequences of 131072 tokens in splits of 256 once had more programs in y than a device takes."""
    cache = PagedKVCache.empty(1, 16, 1, 64, format="fp8_e4m3fn")
    shape = replace(SHAPE, batch=1, num_qo_heads=1, capacity=131072 if batch < 1000 else 64)
    ids = torch.zeros(1, 8192, dtype=I32).expand(batch, 8192)
    table = PageTable.from_block_table(ids, torch.zeros(batch, dtype=I32), page_size=16)
    with executing(LaunchRecorder(target)) as recorder:
        plan = plan_decode(shape, "fp8_e4m3fn", device="cpu", **options)
        large = replace(shape, batch=batch)
        plan = replace(plan, shape=large, config=plan.config_for(batch), workspace=None)
        plan.run(torch.zeros(batch, 1, 64, dtype=torch.bfloat16), cache, table)
    assert recorder.launches
    for launch in recorder.launches:
        assert all(extent <= 65535 for extent in launch.grid[1:])
        assert launch.grid[0] < 2**31


def test_unplanned_calls_of_the_same_shapes_share_a_plan() -> None:
    q, cache, table = SMALL.build()
    expected = paged_decode_reference(q, cache, table)
    paged_decode(q, cache, table)
    before = len(planning._plans)
    for _ in range(2):
        torch.testing.assert_close(paged_decode(q, cache, table).float(), expected, rtol=0.02, atol=0.01)
    assert len(planning._plans) == before
    with run_as("gfx942"):  # another target has its own
        torch.testing.assert_close(paged_decode(q, cache, table).float(), expected, rtol=0.02, atol=0.01)
    assert len(planning._plans) == before + 1


# ---------------------------------------------------------------------------- forms of inputs and outputs


def test_a_plan_is_on_the_device_of_tensors_that_are_made_there() -> None:
    """Tensors on "cpu:0" are on "cpu", as those on "cuda" are on "cuda:0"."""
    plan_decode(SHAPE, "fp8_e4m3fn", device="cpu:0").run(*SMALL.build())


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with a stride in every dimension."""
    wide = torch.full([3 * size + 1 for size in x.shape], -7, dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(0, 3 * size, 3) for size in x.shape)]
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", [torch.clone, _apart])
def test_page_tables_of_either_width_and_any_stride(
    dtype: torch.dtype, form: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    q, cache, table = SMALL.build(device)
    plan = plan_decode(q, cache, table, max_batch=4)
    expected = paged_decode(q, cache, table, plan=plan, return_lse=True)
    ids, lens = form(table.page_ids.to(dtype)), form(table.seq_lens.to(dtype))
    other = PageTable.from_block_table(ids, lens, page_size=table.page_size)
    found = paged_decode(q, cache, other, plan=plan, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_scales_without_dimension_are_scales_of_one_element(device: str) -> None:
    q, cache, table = SMALL.build(device)
    results = []
    for shape in ((), (1,)):
        scales: Any = {name: torch.full(shape, 0.5, device=device) for name in ("k_descale", "v_descale")}
        other = PagedKVCache.from_tensors(cache.k, cache.v, format=cache.format, **scales)
        results.append(paged_decode(q, other, table, plan=plan_decode(q, other, table)))
    assert torch.equal(*results)


def test_a_buffer_for_the_log_sum_exp_is_written_and_returned(device: str) -> None:
    q, cache, table = SMALL.build(device)
    _, expected = paged_decode_reference(q, cache, table, return_lse=True)
    room = torch.full((3, 5), math.nan, device=device)
    _, lse = paged_decode(q, cache, table, lse=room[:, 1:3], return_lse=True)
    assert lse.data_ptr() == room[:, 1:3].data_ptr()
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-3)
    assert bool(room[:, [0, 3, 4]].isnan().all())
    again = torch.full((3, 2), math.nan, device=device)
    alone = paged_decode(q, cache, table, lse=again)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(again, lse)


# ---------------------------------------------------------------------------- refusals


def test_a_shape_comes_with_a_format_and_a_device() -> None:
    q, cache, table = SMALL.build()
    for arguments, options in (
        ((SHAPE, "fp8_e4m3fn"), {}),
        ((SHAPE, cache), {"device": "cpu"}),
        ((SHAPE, "fp8_e4m3fn", table), {"device": "cpu"}),
        ((q, cache), {}),
        ((q, "fp8_e4m3fn", table), {}),
        ((None, cache, table), {}),
    ):
        with pytest.raises(TypeError, match=r"DecodeShape needs|must be a"):
            plan_decode(*arguments, **options)
    with pytest.raises(ValueError, match="with a DecodeShape only"):
        plan_decode(q, cache, table, device="cpu")
    with pytest.raises(ValueError, match="head_dim in"):
        plan_decode(replace(SHAPE, head_dim=100), "fp8_e4m3fn", device="cpu")
    with pytest.raises(ValueError, match="max_batch must be at least q's batch 3"):
        plan_decode(q, cache, table, max_batch=2)


@pytest.mark.parametrize(
    "change", [{"page_size": 3}, {"format": "bf16"}, {"head_dim": 80}, {"num_kv_heads": 2}]
)
def test_a_plan_refuses_another_cache(change: dict[str, Any]) -> None:
    plan = plan_decode(SHAPE, "fp8_e4m3fn", device="cpu")
    with pytest.raises(ValueError, match="call plan_decode again"):
        plan.run(*replace(SMALL, **change).build())


OPTIONS: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("sm_scale must be finite in float32", {"sm_scale": 1e39}, ValueError),
    ("sm_scale times the descale of K", {"sm_scale": 3e38}, ValueError),
    ("logits_soft_cap must be finite in float32", {"logits_soft_cap": 1e39}, ValueError),
    ("window_left must be -1", {"window_left": 2**31}, ValueError),
    ("window_left must be an int", {"window_left": 1.5}, TypeError),
    ("sinks must be a torch.Tensor", {"sinks": [1.0, 2.0]}, TypeError),
    ("lse must have dtype", {"lse": torch.zeros(3, 2, dtype=torch.float16)}, TypeError),
    ("lse must have shape", {"lse": torch.zeros(3, 3)}, ValueError),
    ("lse must have a contiguous", {"lse": torch.zeros(3, 4)[:, ::2]}, ValueError),
    ("plan must be a DecodePlan", {"plan": 3}, TypeError),
    ("out must be a torch.Tensor", {"out": [0.0]}, TypeError),
    ("lse must be a torch.Tensor", {"lse": 0.0}, TypeError),
]


@pytest.mark.parametrize(("match", "options", "error"), OPTIONS, ids=[row[0] for row in OPTIONS])
def test_options_out_of_range_or_of_a_wrong_class_are_refused(
    match: str, options: dict[str, Any], error: type[Exception]
) -> None:
    q, cache, table = SMALL.build()
    with pytest.raises(error, match=match):
        paged_decode(q, replace(cache, k_descale=8.0), table, **options)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("which", ["q", "cache", "page_table"])
def test_objects_of_a_wrong_class_are_type_errors(which: str, planned: bool) -> None:
    q, cache, table = SMALL.build()
    plan = plan_decode(q, cache, table) if planned else None
    arguments = {"q": q, "cache": cache, "page_table": table, which: {"not": "this"}}
    with pytest.raises(TypeError, match=f"{which} must be a"):
        paged_decode(**arguments, plan=plan)


def test_queries_without_heads_or_rows_are_refused() -> None:
    q, cache, table = SMALL.build()
    with pytest.raises(ValueError, match="positive multiple of the cache's 1 KV heads, got num_qo_heads=0"):
        paged_decode(q[:, :0], cache, table)
    with pytest.raises(ValueError, match="batch \\* q_len rows"):
        paged_decode(q[:0], cache, table)


def test_descales_of_another_batch_are_refused() -> None:
    q, cache, table = replace(SMALL, granularity="sequence_head").build()
    for name in ("k_descale", "v_descale"):
        value = getattr(cache, name)
        for rows in (value[:1], torch.cat([value, value])):
            with pytest.raises(ValueError, match=rf"{name} must have shape \[3, 1\]"):
                paged_decode(q, replace(cache, **{name: rows}), table)
    plan = plan_decode(q, cache, table)
    plan.run(q, cache, table)
    two = PageTable.from_block_table(table.page_ids[:2], table.seq_lens[:2], page_size=table.page_size)
    with pytest.raises(ValueError, match="k_descale must have shape"):
        plan.run(q[:2], cache, two)


FAULTS: list[tuple[str, Callable[[PagedKVCache, PageTable], Any]]] = [
    ("seq_lens must not be negative", lambda c, t: t.seq_lens.__setitem__(1, -1)),
    ("seq_lens must not exceed the table's capacity", lambda c, t: t.seq_lens.__setitem__(1, 81)),
    ("page ids must not be negative", lambda c, t: t.page_ids.__setitem__((0, 0), -1)),
    ("page ids must be below num_pages", lambda c, t: t.page_ids.__setitem__((0, 0), c.num_pages)),
    ("k_descale must be finite", lambda c, t: c.k_descale.__setitem__(0, 0.0)),
    ("v_descale must be finite", lambda c, t: c.v_descale.__setitem__(0, math.nan)),
]


@pytest.mark.parametrize(("match", "plant"), FAULTS, ids=[row[0] for row in FAULTS])
def test_validate_reports_wrong_values(match: str, plant: Callable[[PagedKVCache, PageTable], Any]) -> None:
    q, cache, table = replace(SMALL, granularity="head").build()
    plan = plan_decode(q, cache, table, validate=True)
    calls = (
        lambda: paged_decode(q, cache, table, validate=True),
        lambda: paged_decode(q, cache, table, validate=True, plan=plan),
        lambda: plan_decode(q, cache, table, validate=True),
    )
    calls[0]()
    plant(cache, table)
    for call in calls:
        with pytest.raises(ValueError, match=match):
            call()


def test_options_are_the_keywords_of_the_arguments_and_others_are_refused() -> None:
    assert DecodeOptions.__annotations__.keys() == DecodeArguments._field_defaults.keys()
    q, cache, table = DecodeCase.small().build()
    for way in (paged_decode, plan_decode(q, cache, table).run, paged_decode_reference):
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'window'"):
            way(q, cache, table, window=3)

"""Plans: one for every batch, from shapes alone, with shared memory, few kernels and few Python calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import DecodePlan, DecodeShape, paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.attn_decode.kernels import _merge_splits_kernel, _paged_decode_kernel
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch import Workspace, executing, run_as
from narrowkv.testing.calls import LaunchRecorder, functions_entered

I32 = torch.int32
W = DecodeCase.small
SMALL = W(lens=(70, 5, 33), num_kv_heads=1, gqa_ratio=2, clean=True)
SHAPE = DecodeShape(batch=4, q_len=1, num_qo_heads=2, num_kv_heads=1, head_dim=64, page_size=16, capacity=96)


def _close(o: Any, q: torch.Tensor, cache: PagedKVCache, table: PageTable, **options: Any) -> None:
    expected = paged_decode_reference(q, cache, table, **options)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(o.float(), expected, rtol=0.02, atol=0.01)


def _part(table: PageTable, batch: int) -> PageTable:
    assert table.seq_lens is not None
    return PageTable.from_block_table(
        table.page_ids[:batch], table.seq_lens[:batch], page_size=table.page_size
    )


# ---------------------------------------------------------------------------- shapes, batches, workspaces


def test_one_plan_from_shapes_serves_every_batch_up_to_its_maximum(device: str) -> None:
    plan = plan_decode(SHAPE, "fp8_e4m3fn", device=device)
    q, cache, table = SMALL.build(device)
    for batch in (3, 1, 2, 3):
        part = _part(table, batch)
        _close(plan.run(q[:batch], cache, part), q[:batch], cache, part)
        _close(paged_decode(q[:batch], cache, part, plan=plan), q[:batch], cache, part)
    larger = W(lens=(5, 6, 7, 8, 9), num_kv_heads=1, gqa_ratio=2).build(device)
    with pytest.raises(ValueError, match=r"or a larger batch .* call plan_decode again"):
        plan.run(*larger)


@pytest.mark.parametrize(
    "change", [{"page_size": 3}, {"format": "bf16"}, {"head_dim": 80}, {"num_kv_heads": 2}]
)
def test_a_plan_refuses_another_cache(change: dict[str, Any]) -> None:
    plan = plan_decode(SHAPE, "fp8_e4m3fn", device="cpu")
    with pytest.raises(ValueError, match="call plan_decode again"):
        plan.run(*replace(SMALL, **change).build())


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
        with pytest.raises(TypeError):
            plan_decode(*arguments, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with a DecodeShape only"):
        plan_decode(q, cache, table, device="cpu")
    with pytest.raises(ValueError, match="head_dim in"):
        plan_decode(replace(SHAPE, head_dim=100), "fp8_e4m3fn", device="cpu")
    with pytest.raises(ValueError, match="max_batch must be at least q's batch 3"):
        plan_decode(q, cache, table, max_batch=2)


def test_plans_share_a_workspace_and_the_calls_of_each_are_right(device: str) -> None:
    wide = W(lens=(300, 64), num_kv_heads=2, gqa_ratio=17).build(device)
    small = SMALL.build(device)
    plans = [plan_decode(*inputs, tokens_per_split=32) for inputs in (wide, small)]
    needed = [plan.workspace_bytes() for plan in plans]
    assert needed[0] > needed[1] > 0
    shared = Workspace(max(needed), device)
    bound = [plan_decode(*inputs, tokens_per_split=32, workspace=shared) for inputs in (wide, small)]
    for _ in range(2):
        for plan, inputs in zip(bound, (wide, small), strict=True):
            assert plan.workspace is shared
            expected = paged_decode_reference(*inputs)
            assert float((plan.run(*inputs).float() - expected).abs().sum() / expected.abs().sum()) <= 0.002
    with pytest.raises(ValueError, match=f"workspace must have at least {needed[0]} bytes"):
        plan_decode(*wide, tokens_per_split=32, workspace=Workspace(needed[1], device))
    with pytest.raises(TypeError, match="workspace must be a Workspace"):
        plan_decode(*wide, workspace=7)  # type: ignore[arg-type]


def test_capture_sizes_of_a_large_model_need_one_small_workspace() -> None:
    """96 query and 8 KV heads at 131072 tokens, 51 capture sizes up to 512: one plan."""
    shape = DecodeShape(
        batch=512, q_len=1, num_qo_heads=96, num_kv_heads=8, head_dim=128, page_size=16, capacity=131072
    )
    for target in ("sm90", "gfx942", "gfx950"):
        with executing(LaunchRecorder(target)):
            plan = plan_decode(shape, "fp8_e4m3fn", device="cpu")
        assert 0 < plan.workspace_bytes() <= 70 * 2**20, target


def test_plans_and_their_copies_are_equal_only_to_themselves() -> None:
    q, cache, table = replace(SMALL, lens=(300, 5)).build()
    plan = plan_decode(q, cache, table, tokens_per_split=32)
    again = plan_decode(q, cache, table, tokens_per_split=32)
    assert plan != again
    assert plan != "a plan"
    assert len({plan, again}) == 2
    for other in (copy.copy(plan), copy.deepcopy(plan), replace(plan)):
        assert torch.equal(other.run(q, cache, table), plan.run(q, cache, table))
    assert copy.deepcopy(plan).workspace is not plan.workspace
    assert "workspace" not in repr(plan)


# ---------------------------------------------------------------------------- kernels and host work


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "bf16", "fp4_e2m1"])
@pytest.mark.parametrize("capacity", [64, 2048, 131072])
def test_a_model_reaches_at_most_eight_kernels(capacity: int, fmt: str, target: str) -> None:
    shape = DecodeShape(
        batch=512, q_len=1, num_qo_heads=96, num_kv_heads=8, head_dim=128, page_size=16, capacity=capacity
    )
    cache = PagedKVCache.empty(1, 16, 8, 128, format=fmt)
    with executing(LaunchRecorder(target)):
        plan = plan_decode(shape, fmt, device="cpu")
        found = plan.kernels(cache, return_lse=True)
    assert 1 <= len(found) <= 8
    assert {launch.kernel for launch in found} <= {_paged_decode_kernel, _merge_splits_kernel}
    assert len(
        {(launch.kernel, tuple(launch.constexprs.values()), launch.options) for launch in found}
    ) == len(found)


def test_every_launch_is_one_that_the_plan_lists() -> None:
    recorder = LaunchRecorder("sm90")
    cache = PagedKVCache.empty(8, 16, 2, 64, format="fp8_e4m3fn")
    shape = DecodeShape(
        batch=64, q_len=1, num_qo_heads=24, num_kv_heads=2, head_dim=64, page_size=16, capacity=65536
    )
    with executing(recorder):
        plan = plan_decode(shape, "fp8_e4m3fn", device="cpu")
        listed = {(b.kernel, tuple(b.constexprs.values()), b.options) for b in plan.kernels(cache)}
        for batch in range(1, 65):
            table = PageTable.from_block_table(
                torch.zeros(batch, 1 + batch % 7, dtype=I32), torch.zeros(batch, dtype=I32), page_size=16
            )
            plan.run(torch.zeros(batch, 24, 64, dtype=torch.bfloat16), cache, table)
    assert {launch.specialisation for launch in recorder.launches} == listed


def test_grids_stay_within_what_targets_take() -> None:
    """128 sequences of 131072 tokens in splits of 256 once had more programs in y than a device takes."""
    cache = PagedKVCache.empty(1, 16, 1, 64, format="fp8_e4m3fn")
    for target in ("sm90", "gfx942"):
        recorder = LaunchRecorder(target)
        with executing(recorder):
            for batch, options in (
                (128, {"tokens_per_split": 256}),
                (300, {"batch_invariant": True}),
                (70000, {}),
            ):
                shape = DecodeShape(
                    batch=batch, q_len=1, num_qo_heads=1, num_kv_heads=1, head_dim=64, page_size=16,
                    capacity=131072 if batch < 1000 else 64,
                )  # fmt: skip
                plan = replace(plan_decode(replace(shape, batch=1), "fp8_e4m3fn", device="cpu", **options))
                plan = replace(plan, shape=shape, config=plan.config_for(batch), workspace=None)
                table = PageTable.from_block_table(
                    torch.zeros(1, 8192, dtype=I32).expand(batch, 8192),
                    torch.zeros(batch, dtype=I32),
                    page_size=16,
                )
                recorder.clear()
                plan.run(torch.zeros(batch, 1, 64, dtype=torch.bfloat16), cache, table)
                assert recorder.launches
                for launch in recorder.launches:
                    assert all(extent <= 65535 for extent in launch.grid[1:])
                    assert launch.grid[0] < 2**31


@pytest.mark.parametrize("given", [False, True])
def test_a_planned_call_enters_few_python_functions(given: bool) -> None:
    cache = PagedKVCache.empty(8, 16, 1, 64, format="fp8_e4m3fn")
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    lens = torch.zeros(4, dtype=I32)
    ids = torch.zeros(4, 8, dtype=I32)
    results = {"out": torch.empty_like(q), "lse": torch.empty(4, 2)} if given else {}
    recorder = LaunchRecorder("gfx942")
    with executing(recorder):
        plan = plan_decode(SHAPE, "fp8_e4m3fn", device="cpu")

        table = PageTable.from_block_table(ids, lens, page_size=16)

        def call() -> None:
            paged_decode(q, cache, table, plan=plan, **results)  # type: ignore[arg-type]

        entered = functions_entered(call)
    assert len(recorder.launches) == 2 * 2  # attention and the merging of splits
    assert len(entered) <= 6, entered


def test_a_cache_that_is_gone_is_not_kept_by_plans() -> None:
    import gc
    import weakref

    q, cache, table = SMALL.build()
    paged_decode(q, cache, table)
    gone = weakref.ref(cache), weakref.ref(cache.k)
    del cache
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_unplanned_calls_of_the_same_shapes_share_a_plan() -> None:
    from narrowkv.attn_decode import planning as plans

    q, cache, table = SMALL.build()
    paged_decode(q, cache, table)
    before = len(plans._plans)
    for _ in range(2):
        _close(paged_decode(q, cache, table), q, cache, table)
    with run_as("gfx942"):  # another target has its own
        _close(paged_decode(q, cache, table), q, cache, table)
    assert len(plans._plans) == before + 1


def test_the_same_plan_serves_calls_with_other_options_and_layers() -> None:
    q, cache, table = SMALL.build()
    plan = plan_decode(q, cache, table)
    other = replace(cache, k_descale=2 * float(cache.k_descale), v_descale=0.5)
    for layer in (cache, other, cache):
        _close(plan.run(q, layer, table), q, layer, table)
        _close(plan.run(q, layer, table, window_left=9), q, layer, table, window_left=9)
        _close(plan.run(q, layer, table, sm_scale=0.5), q, layer, table, sm_scale=0.5)
        _close(plan.run(q, layer, table, logits_soft_cap=2.0), q, layer, table, logits_soft_cap=2.0)


# ---------------------------------------------------------------------------- refusals


def _overlapping(q: torch.Tensor) -> list[tuple[str, dict[str, Any]]]:
    raw = torch.empty(q.shape, dtype=torch.float32)
    return [
        ("out must not overlap itself", {"out": torch.empty(1, 2, 64).expand(3, 2, 64)}),
        ("lse must not overlap itself", {"lse": torch.empty(1, 2).expand(3, 2)}),
        ("must not share memory with lse", {"out": raw, "lse": raw.view(-1)[:6].view(3, 2)}),
    ]


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("again", [False, True])
def test_results_overlap_neither_themselves_nor_each_other(case: int, again: bool) -> None:
    q, cache, table = SMALL.build()
    plan = plan_decode(q, cache, table)
    if again:  # the same strides were accepted before, where they were apart
        plan.run(q, cache, table, out=torch.empty(3, 2, 64), lse=torch.empty(3, 2))
    match, results = _overlapping(q)[case]
    with pytest.raises(ValueError, match=match):
        plan.run(q, cache, table, **results)


@pytest.mark.parametrize("what", ["q", "k", "v", "k_descale", "v_descale", "page_ids", "seq_lens", "sinks"])
@pytest.mark.parametrize("result", ["out", "lse"])
def test_results_do_not_overlap_an_input(what: str, result: str) -> None:
    """In a second call: the first one, whose results are apart, has the same shapes and strides."""
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    used = 0

    def place(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal used
        used += -used % 256
        size = tensor.numel() * tensor.element_size()
        view = arena[used : used + size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        used += size
        return view

    q, cache, table = W(
        lens=(20, 5), num_kv_heads=1, gqa_ratio=2, granularity="token_head", clean=True
    ).build()
    assert table.seq_lens is not None
    tensors = {
        "q": place(q), "k": place(cache.k.view(torch.uint8)).view(cache.k.dtype),
        "v": place(cache.v.view(torch.uint8)).view(cache.v.dtype),
        "k_descale": place(cache.k_descale), "v_descale": place(cache.v_descale),  # type: ignore[arg-type]
        "page_ids": place(table.page_ids.clamp(0, 3)), "seq_lens": place(table.seq_lens),
        "sinks": place(torch.zeros(2)),
    }  # fmt: skip
    of_cache = {name: tensors[name] for name in ("k", "v", "k_descale", "v_descale")}
    cache = replace(cache, **of_cache)
    table = PageTable.from_block_table(tensors["page_ids"], tensors["seq_lens"], page_size=16)
    plan = plan_decode(tensors["q"], cache, table)
    apart = {"out": torch.zeros(2, 2, 64), "lse": torch.zeros(2, 2)}
    plan.run(tensors["q"], cache, table, sinks=tensors["sinks"], **apart)
    size = apart[result].numel()
    begin = tensors[what].data_ptr() - arena.data_ptr()
    on_input = arena[begin : begin + 4 * size].view(torch.float32).view(apart[result].shape)
    before = arena.clone()
    with pytest.raises(ValueError, match=rf"{result} must not share memory with"):
        plan.run(tensors["q"], cache, table, sinks=tensors["sinks"], **{**apart, result: on_input})
    assert torch.equal(arena, before)


VALUES: list[tuple[str, dict[str, Any], type[Exception]]] = [
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


@pytest.mark.parametrize(("match", "options", "error"), VALUES, ids=[v[0] for v in VALUES])
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
        paged_decode(**arguments, plan=plan)  # type: ignore[arg-type]


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
        assert isinstance(value, torch.Tensor)
        for rows in (value[:1], torch.cat([value, value])):
            with pytest.raises(ValueError, match=rf"{name} must have shape \[3, 1\]"):
                paged_decode(q, replace(cache, **{name: rows}), table)
    plan = plan_decode(q, cache, table)
    plan.run(q, cache, table)
    with pytest.raises(ValueError, match="k_descale must have shape"):
        plan.run(q[:2], cache, _part(table, 2))


FAULTS: list[tuple[str, Callable[[PagedKVCache, PageTable], Any]]] = [
    ("seq_lens must not be negative", lambda c, t: t.seq_lens.__setitem__(1, -1)),  # type: ignore[union-attr]
    ("seq_lens must not exceed the table's capacity", lambda c, t: t.seq_lens.__setitem__(1, 81)),  # type: ignore[union-attr]
    ("page ids must not be negative", lambda c, t: t.page_ids.__setitem__((0, 0), -1)),
    ("page ids must be below num_pages", lambda c, t: t.page_ids.__setitem__((0, 0), c.num_pages)),
    ("k_descale must be finite", lambda c, t: c.k_descale.__setitem__(0, 0.0)),  # type: ignore[union-attr]
    ("v_descale must be finite", lambda c, t: c.v_descale.__setitem__(0, math.nan)),  # type: ignore[union-attr]
]


@pytest.mark.parametrize(("match", "plant"), FAULTS, ids=[f[0] for f in FAULTS])
def test_validate_reports_wrong_values(match: str, plant: Callable[[PagedKVCache, PageTable], Any]) -> None:
    q, cache, table = replace(SMALL, granularity="head").build()
    plan = plan_decode(q, cache, table, validate=True)
    paged_decode(q, cache, table, validate=True)
    plant(cache, table)
    with pytest.raises(ValueError, match=match):
        paged_decode(q, cache, table, validate=True)
    with pytest.raises(ValueError, match=match):
        paged_decode(q, cache, table, validate=True, plan=plan)
    with pytest.raises(ValueError, match=match):
        plan_decode(q, cache, table, validate=True)


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


# ---------------------------------------------------------------------------- graphs


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"tokens_per_split": 64}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_graph_replayed_with_other_lengths_and_tables_equals_eager(
    batch: int, options: dict[str, Any]
) -> None:
    q, cache, table = W(lens=(500, 300, 17), clean=True).build("cuda")
    shape = DecodeShape(
        batch=8, q_len=1, num_qo_heads=24, num_kv_heads=2, head_dim=64, page_size=16, capacity=1024
    )
    plan: DecodePlan = plan_decode(shape, "fp8_e4m3fn", device=q.device, **options)
    ids = table.page_ids[:batch].clamp(0, cache.num_pages - 1).clone()
    lens = torch.tensor([500, 300, 17][:batch], dtype=I32, device="cuda")
    part, rows = PageTable.from_block_table(ids, lens, page_size=16), q[:batch]
    out, lse = torch.empty_like(rows), torch.empty(batch, 24, device="cuda")
    plan.run(rows, cache, part, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(rows, cache, part, out=out, lse=lse)
    for changed, order in (([500, 300, 17], 0), ([1, 299, 0], 1), ([433, 16, 12], 2)):
        lens.copy_(torch.tensor(changed[:batch]))
        ids.copy_(ids.roll(order, 1))
        eager, eager_lse = plan.run(rows, cache, part, return_lse=True)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        _close(eager, rows, cache, part)

"""Plans: one for all calls up to its maxima, from shapes alone, with shared memory and few Python calls."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import (
    AppendPlan,
    PrefillShape,
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
    prefill_append_reference,
)
from narrowkv.attn_prefill import planning as plans
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.attn_prefill.cases import poison_plan as poison
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.cases import copy_cache, differing_bytes
from narrowkv.quant.accuracy import compare
from narrowkv.runtime.launch import Workspace, executing, run_as
from narrowkv.testing.calls import LaunchRecorder, TorchOperations, functions_entered

pytestmark = pytest.mark.sampled

I32 = torch.int32
HEADS: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 3, "clean": True}
SHAPE = PrefillShape(
    batch=3, num_tokens=64, max_q_len=64, num_qo_heads=3, num_kv_heads=1, head_dim=64, page_size=16,
    max_seq_len=160, kv_tokens=480,
)  # fmt: skip
CACHE = {"fp8": "fp8_e4m3fn", "bf16": "bf16"}
# Query tokens and keys of each sequence.
CALLS = [((20, 1, 9), (40, 5, 130)), ((30,), (64,)), ((1, 1), (7, 90)), ((2, 0, 62), (2, 9, 160))]


def _cache(fmt: str, device: str = "cpu", heads: int = 1, head_dim: int = 64) -> PagedKVCache:
    return PagedKVCache.empty(1, 16, heads, head_dim, format=fmt, device=device, k_descale=0.5)


# ---------------------------------------------------------------------------- shapes, sizes, workspaces


@pytest.mark.parametrize("kernel", [None, "dense", "fused"])
def test_one_plan_from_shapes_serves_every_call_up_to_its_maxima(kernel: str | None, device: str) -> None:
    plan = plan_prefill(SHAPE, _cache("fp8_e4m3fn", device), kernel=kernel)
    for q_lens, lens in (*CALLS, CALLS[0]):
        q, cache, table, starts = PrefillCase.small(q_lens, lens, **HEADS).build(device)
        poison(plan)
        o = batch_prefill(q, cache, table, starts, plan=plan)
        assert torch.equal(plan.run(q, cache, table, starts), o)  # type: ignore[arg-type]
        expected = batch_prefill_reference(q, cache, table, starts)
        assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002  # type: ignore[union-attr]
    for q_lens, lens in (((65,), (65,)), ((1, 1, 1, 1), (5, 6, 7, 8))):
        larger = PrefillCase.small(q_lens, lens, **HEADS).build(device)
        with pytest.raises(ValueError, match=r"or more, got a plan for 64 of 3: call plan_prefill again"):
            plan.run(*larger)


@pytest.mark.parametrize("kernel", [None, "append_then_attend", "fused"])
def test_one_plan_of_appends_serves_every_call_up_to_its_maxima(kernel: str | None, device: str) -> None:
    plan = plan_append(SHAPE, _cache("bf16", device), kernel=kernel)
    for q_lens, lens in (*CALLS, CALLS[0]):
        old = tuple(length - new for length, new in zip(lens, q_lens, strict=True))
        workload = PrefillCase.append(q_lens, old, format="bf16", rope="neox", **HEADS)
        q, k_new, v_new, cache, table, starts, rope = workload.build_append(device)
        poison(plan)
        for turn in (rope, None):
            own, wanted = copy_cache(cache), copy_cache(cache)
            o = prefill_append(q, k_new, v_new, own, table, starts, rope=turn, plan=plan)
            expected = prefill_append_reference(q, k_new, v_new, wanted, table, starts, rope=turn)
            assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002  # type: ignore[union-attr]
            assert not differing_bytes(own, wanted)


def test_plans_share_a_workspace(device: str) -> None:
    cache = _cache("fp8_e4m3fn", device)
    shapes = [SHAPE, replace(SHAPE, num_tokens=16, max_q_len=16)]
    needed = [plan_append(shape, cache).workspace_bytes() for shape in shapes]
    assert needed[0] > needed[1] > 0
    shared = Workspace(needed[0], device)
    bound = [plan_append(shape, cache, workspace=shared) for shape in shapes]
    attends = plan_prefill(replace(SHAPE, max_seq_len=64), cache, workspace=shared)
    for _ in range(2):
        for plan in bound:
            q, k_new, v_new, own, table, starts, _rope = PrefillCase.append(
                (9, 5), (20, 3), **HEADS
            ).build_append(device)
            wanted = copy_cache(own)
            o = plan.run(q, k_new, v_new, own, table, starts)
            expected = prefill_append_reference(q, k_new, v_new, wanted, table, starts)
            assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002  # type: ignore[union-attr]
        inputs = PrefillCase.small((5, 9), (30, 20), **HEADS).build(device)
        o = attends.run(*inputs)
        expected = batch_prefill_reference(*inputs)
        assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=f"workspace must have at least {needed[0]} bytes"):
        plan_append(SHAPE, cache, workspace=Workspace(needed[1], device))
    with pytest.raises(TypeError, match="workspace must be a Workspace"):
        plan_prefill(SHAPE, cache, workspace=7)  # type: ignore[arg-type]
    assert copy.deepcopy(bound[0]).workspace is not shared
    assert "workspace" not in repr(bound[0])


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_the_workspace_has_the_bound_that_is_stated(target: str) -> None:
    """96 query and 8 KV heads: 4 bytes for each channel of a key, in blocks, and partial results besides."""
    shape = PrefillShape(
        batch=64, num_tokens=8192, max_q_len=8192, num_qo_heads=96, num_kv_heads=8, head_dim=128,
        page_size=16, max_seq_len=131072, kv_tokens=2**18,
    )  # fmt: skip
    with executing(LaunchRecorder(target)):
        plan = plan_prefill(shape, _cache("fp8_e4m3fn", heads=8, head_dim=128))
    units = plan.target.figures.units if plan.target.figures else 2
    keys = 4 * (shape.kv_tokens + shape.batch * 128) * 8 * 128
    partials = 8 * 2 * units * (64 if target == "sm90" else 128) * (128 + 2) * 4
    tiles = 32 * (8192 * 12 // 16 + shape.batch)
    factors = 2 * 8 * (shape.kv_tokens + shape.batch * 128) * 4
    assert keys // 2 < plan.workspace_bytes() <= keys + partials + tiles + factors + 4096


def test_shapes_of_plans_are_checked() -> None:
    cache = _cache("fp8_e4m3fn")
    for change, message in (
        ({"num_kv_heads": 3}, "shape must have the cache's"),
        ({"page_size": 8}, "shape must have the cache's"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"q_dtype": torch.float32}, "q_dtype must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_prefill(replace(SHAPE, **change), cache)  # type: ignore[arg-type]
    q, cache, table, starts = PrefillCase.small(**HEADS).build()
    with pytest.raises(TypeError, match="must be None with a PrefillShape"):
        plan_prefill(SHAPE, cache, table, starts)
    with pytest.raises(TypeError, match="page_table must be a PageTable"):
        plan_prefill(q, cache)
    with pytest.raises(ValueError, match="call plan_prefill again"):
        plan_prefill(SHAPE, _cache("bf16")).run(q, cache, table, starts)


def test_one_query_token_of_every_sequence_is_decoded_by_a_plan_from_shapes() -> None:
    plan = plan_prefill(replace(SHAPE, num_tokens=3, max_q_len=1), _cache("fp8_e4m3fn"))
    assert plan.decode is not None
    assert plan.decode.workspace is plan.workspace
    for q_lens, lens in (((1, 1, 1), (40, 5, 130)), ((1, 1), (7, 9)), ((1, 0, 1), (30, 5, 7))):
        inputs = PrefillCase.small(q_lens, lens, **HEADS).build()
        o = plan.run(*inputs)
        expected = batch_prefill_reference(*inputs)
        assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002  # type: ignore[union-attr]


def test_overlap_is_refused_in_calls_like_one_that_was_served() -> None:
    q, k_new, v_new, cache, table, starts, rope = PrefillCase.append(
        format="bf16", rope="neox", **HEADS
    ).build_append()
    after = replace(table, before_append=False)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    attends, appends = plan_prefill(q, cache, after, starts), plan_append(q, cache, table, starts)
    attends.run(q, cache, after, starts, out=out, lse=lse)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        attends.run(q, cache, after, starts, out=q, lse=lse)
    appends.run(q, k_new, v_new, cache, table, starts, rope=rope, out=out, lse=lse)
    before = copy_cache(cache)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        appends.run(q, k_new, v_new, cache, table, starts, rope=rope, out=q, lse=lse)
    inside = cache.k.flatten()[: k_new.numel()].view(k_new.shape)
    with pytest.raises(ValueError, match=r"cache.k must not share memory with k_new"):
        appends.run(q, inside, v_new, cache, table, starts, rope=rope, out=out, lse=lse)
    assert not differing_bytes(cache, before)


# ---------------------------------------------------------------------------- kernels and host work


def _planned(appends: bool, given: bool, target: str) -> tuple[LaunchRecorder, Callable[[], Any]]:
    """A planned call that launches nothing."""
    recorder = LaunchRecorder(target)
    q, k_new, v_new, cache, table, starts, rope = PrefillCase.append(rope="neox", **HEADS).build_append()
    results = {"out": torch.empty_like(q), "lse": torch.empty(q.shape[:2])} if given else {}
    with executing(recorder):
        if appends:
            plan = plan_append(q, cache, table, starts)
            return recorder, lambda: prefill_append(
                q, k_new, v_new, cache, table, starts, rope=rope, plan=plan, **results
            )
        after = replace(table, before_append=False)
        attends = plan_prefill(q, cache, after, starts)
        return recorder, lambda: batch_prefill(q, cache, after, starts, plan=attends, **results)


@pytest.mark.parametrize("target", ["gfx942", "sm90"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("appends", [False, True])
def test_a_planned_call_enters_few_python_functions(appends: bool, given: bool, target: str) -> None:
    recorder, call = _planned(appends, given, target)
    with executing(recorder):
        entered = functions_entered(call)
    assert 2 <= len(recorder.launches) <= 4
    assert len(entered) <= 7, entered


@pytest.mark.parametrize("target", ["gfx942", "sm90"])
@pytest.mark.parametrize("appends", [False, True])
def test_a_planned_call_allocates_nothing_but_outputs(appends: bool, target: str) -> None:
    recorder = LaunchRecorder(target)
    q, k_new, v_new, cache, table, starts, _ = PrefillCase.append(**HEADS).build_append()
    after = replace(table, before_append=False)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    with executing(recorder):
        plan = plan_append(q, cache, table, starts) if appends else plan_prefill(q, cache, after, starts)

        def call(**options: Any) -> None:
            if isinstance(plan, AppendPlan):
                plan.run(q, k_new, v_new, cache, table, starts, **options)
            else:
                plan.run(q, cache, after, starts, **options)

        for options, operations in (
            ({"out": out, "lse": lse}, []),
            ({"return_lse": True}, ["aten.empty.memory_format"] * 2),
        ):
            call(**options)  # the first call prepares its launches
            with TorchOperations() as seen:
                call(**options)
            assert seen.names == operations


def _random_calls(count: int) -> Iterator[tuple[int, int]]:
    draw = random.Random(1)
    for _ in range(count):
        batch = draw.choice((1, 1, 2, 3, 16, 17, draw.randint(1, 60)))
        longest = draw.choice((1, 2, 7, 64, 120))
        yield batch, min(sum(draw.randint(1, longest) for _ in range(batch)), 8192)


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("capacity", [256, 1024, 6400])
@pytest.mark.parametrize("appends", [False, True])
def test_every_launch_is_one_that_the_plan_lists(appends: bool, capacity: int, target: str) -> None:
    cache = _cache("fp8_e4m3fn", heads=8, head_dim=128)
    shape = PrefillShape(
        batch=64, num_tokens=8192, max_q_len=8192, num_qo_heads=96, num_kv_heads=8, head_dim=128,
        page_size=16, max_seq_len=capacity, kv_tokens=64 * capacity,
    )  # fmt: skip
    recorder = LaunchRecorder(target)
    with executing(recorder):
        plan = plan_append(shape, cache) if appends else plan_prefill(shape, cache)
        listed = {(b.kernel, tuple(b.constexprs.values()), b.options) for b in plan.kernels(cache)}
        for batch, tokens in _random_calls(60):
            lens = torch.zeros(batch, dtype=I32)
            table = PageTable.from_block_table(
                torch.zeros(batch, capacity // 16, dtype=I32),
                **{"cached_lens" if appends else "seq_lens": lens},
                page_size=16,
            )
            starts = torch.zeros(batch + 1, dtype=I32)
            rows = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
            q, new = rows.expand(tokens, 96, 128), rows.expand(tokens, 8, 128)
            if isinstance(plan, AppendPlan):
                plan.run(q, new, new, cache, table, starts)
            else:
                plan.run(q, cache, table, starts)
    seen = {launch.specialisation for launch in recorder.launches}
    assert seen <= listed
    assert 1 <= len(seen) <= len(listed) <= 12


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("granularity", ["float", "token_head"])
@pytest.mark.parametrize("appends", [False, True])
def test_the_memory_of_a_plan_holds_that_of_every_call(appends: bool, granularity: str, target: str) -> None:
    cache = PrefillCase.small(
        num_kv_heads=8, head_dim=128, granularity=granularity, format="bf16", clean=True
    ).build()[1]
    shape = PrefillShape(
        batch=64, num_tokens=8192, max_q_len=8192, num_qo_heads=96, num_kv_heads=8, head_dim=128,
        page_size=16, max_seq_len=131072, kv_tokens=2**20,
    )  # fmt: skip
    with executing(LaunchRecorder(target)):
        plan = plan_append(shape, cache) if appends else plan_prefill(shape, cache)
        for batch, tokens in [*_random_calls(100), (64, 8192), (1, 8192), (1, 300), (7, 2000)]:
            of_call = plan.shape_of_call(batch, tokens)
            config = plan.config_for(of_call)
            for part in (config, config.otherwise):
                if part is None or part.kernel == "decode":
                    continue
                exact = plan.needs(of_call, part, exact=True)
                held = plan.needs(plan.shape, part, exact=False)
                blocks, counters = held.blocks, held.counters
                for name, (sizes, dtype) in exact.blocks.items():
                    assert dtype == blocks[name][1]
                    assert math.prod(sizes) <= math.prod(blocks[name][0]), name
                for name, count in exact.counters.items():
                    assert count <= counters[name]


def test_unplanned_calls_of_any_size_share_a_plan() -> None:
    workload = PrefillCase.small((5, 9), (30, 20), **HEADS)
    inputs = workload.build()
    batch_prefill(*inputs)
    before = len(plans._plans)
    for q_lens, lens in CALLS:
        other = PrefillCase.small(q_lens, lens, **HEADS).build()
        o = batch_prefill(*other)
        expected = batch_prefill_reference(*other)
        assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002  # type: ignore[union-attr]
    assert len(plans._plans) == before
    with run_as("gfx942"):  # another target has its own
        batch_prefill(*inputs)
    assert len(plans._plans) == before + 1


def test_a_cache_that_is_gone_is_not_kept_by_plans() -> None:
    import gc
    import weakref

    q, cache, table, starts = PrefillCase.small(**HEADS).build()
    batch_prefill(q, cache, table, starts)
    gone = weakref.ref(cache), weakref.ref(cache.k)
    del cache
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_the_same_plan_serves_layers_and_options() -> None:
    q, cache, table, starts = PrefillCase.small(**HEADS).build()
    plan = plan_prefill(q, cache, table, starts)
    other = replace(cache, k_descale=2 * float(cache.k_descale), v_descale=0.5)
    for layer in (cache, other, cache):
        for options in ({}, {"window_left": 9}, {"sm_scale": -0.5}, {"logits_soft_cap": 2.0}):
            o = plan.run(q, layer, table, starts, **options)
            expected = batch_prefill_reference(q, layer, table, starts, **options)
            assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002  # type: ignore[union-attr]


# ---------------------------------------------------------------------------- graphs


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", CACHE)
@pytest.mark.parametrize("appends", [False, True])
def test_a_captured_graph_replays_with_other_lengths_and_pages(appends: bool, fmt: str) -> None:
    sizes: dict[str, Any] = {"num_kv_heads": 2, "gqa_ratio": 12, "head_dim": 128, "format": CACHE[fmt]}
    tokens, lens = 300, (1500, 900, 700)
    q, k_new, v_new, cache, table, starts, _ = PrefillCase.append((200, 60, 40), lens, **sizes).build_append(
        "cuda"
    )
    assert table.seq_lens is not None
    if not appends:
        table = replace(table, before_append=False)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    plan = (plan_append if appends else plan_prefill)(q, cache, table, starts)
    pages = table.page_ids.clone()
    saved = copy_cache(cache)

    def call() -> None:
        if isinstance(plan, AppendPlan):
            plan.run(q, k_new, v_new, cache, table, starts, out=out, lse=lse)
        else:
            plan.run(q, cache, table, starts, out=out, lse=lse)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for q_lens, held, order in (
        ((200, 60, 40), lens, (0, 1, 2)),
        ((1, 298, 1), (40, 1200, 3), (2, 0, 1)),
        ((0, 150, 150), (7, 550, 800), (1, 2, 0)),
    ):
        assert sum(q_lens) == tokens
        starts.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        table.seq_lens.copy_(torch.tensor(held))
        table.page_ids.copy_(pages[list(order)])
        results = []
        for run in (graph.replay, call):
            for stored, old in ((cache.k, saved.k), (cache.v, saved.v)):
                stored.view(torch.uint8).copy_(old.view(torch.uint8))
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            results.append((out.clone(), lse.clone(), copy_cache(cache)))
        (o, sums, stored_by_graph), (wanted, wanted_sums, stored_by_call) = results
        assert torch.equal(o.view(torch.int16), wanted.view(torch.int16))
        assert torch.equal(sums.view(I32), wanted_sums.view(I32))
        assert not differing_bytes(stored_by_graph, stored_by_call)
        if not appends:
            expected = batch_prefill_reference(q, cache, table, starts)
            error = (o.float() - expected).abs().sum() / expected.abs().sum()  # type: ignore[union-attr]
            assert float(error) <= 0.002


def test_a_table_of_other_widths_is_served() -> None:
    q, cache, table, starts = PrefillCase.small(**HEADS).build()
    assert table.seq_lens is not None
    plan = plan_prefill(q, cache, table, starts)
    o = plan.run(q, cache, table, starts)
    wide = torch.full((table.batch_size, 40), -1, dtype=I32)
    wide[:, : table.page_ids.shape[1]] = table.page_ids
    wider = PageTable.from_block_table(wide, table.seq_lens, page_size=table.page_size)
    assert torch.equal(plan.run(q, cache, wider, starts), o)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_caches_that_differ_in_strides_alone_take_launches_of_their_own(kernel: str) -> None:
    """One plan; V apart from K, and descales of sequences that are stored once or for each sequence."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 6, 3, 16, 1, 64, generator=generator).to(torch.float8_e4m3fn)
    table = PageTable.from_block_table(
        torch.tensor([[4, 0], [1, 5]], dtype=torch.int32),
        torch.tensor([20, 30], dtype=torch.int32),
        page_size=16,
    )
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    q = torch.randn(5, 4, 64, generator=generator).bfloat16()
    once, each = torch.tensor([[0.5]]).expand(2, 1), torch.tensor([[0.5], [1.5]])
    kinds = [(pages[0, :, 0], pages[1, :, 0], once), (pages[0, :, 0], pages[1, :, 0], each)]
    kinds += [(pages[0, :, 0], pages[1, :, 0].clone(), each), (pages[0, :, 1], pages[1, :, 2], each)]
    plan = None
    for k, v, descale in (*kinds, *kinds[::-1]):
        cache = PagedKVCache.from_tensors(
            k, v, format="fp8_e4m3fn", layout="NHD", k_descale=descale, v_descale=descale,
            k_granularity="sequence_head", v_granularity="sequence_head",
        )  # fmt: skip
        plan = plan or plan_prefill(q, cache, table, starts, kernel=kernel)
        o = batch_prefill(q, cache, table, starts, plan=plan)
        expected = batch_prefill_reference(q, cache, table, starts)
        assert compare(o, expected).relative_l1 <= 0.002

"""Steps of a paged engine without the engine: one workspace, what a step does beside its kernels, graphs."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from engine_checks import BF16

from narrowkv.attn_decode import DecodeShape, paged_decode_reference
from narrowkv.attn_prefill import batch_prefill_reference, plan_prefill
from narrowkv.engines import steps
from narrowkv.engines.steps import Step, attend, divide, reserve_decode
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.quant import relative_l1
from narrowkv.runtime.launch import executing, run_as
from narrowkv.runtime.targets import get_target
from narrowkv.testing.bench.host import NullExecutor

PAGE, HEADS, KV_HEADS, DIM = 16, 12, 1, 64


@pytest.fixture(autouse=True)
def no_plans():
    """Every test makes its own plans and workspaces."""
    kept = (
        steps._workspaces, steps._decode_plans, steps._scratch, steps._prefill_plans, steps._captured
    )  # fmt: skip
    for each in kept:
        each.clear()
    yield
    for each in kept:
        each.clear()


def table_of(lens, pages=8, device="cpu"):
    ids = torch.randperm(len(lens) * pages, generator=torch.Generator().manual_seed(0)).view(len(lens), -1)
    given = torch.tensor(lens, dtype=torch.int32, device=device)
    return PageTable.from_block_table(ids.int().to(device), given, page_size=PAGE)


def uneven_step(q_lens, lens, *, decode_tokens=1, known=True, device="cpu"):
    """A step of requests with these query tokens and keys, as the engines' adapters make it."""
    starts = [0, *accumulate(q_lens)]
    step = Step(
        sum(q_lens), max(q_lens), max(lens), torch.tensor(starts, dtype=torch.int32, device=device),
        table_of(lens, device=device),
    )  # fmt: skip
    return divide(step, starts, lens if known else None, decode_tokens=decode_tokens)


def filled(pages, *, format="fp8_e4m3fn", device="cpu", seed=1):
    random = torch.Generator().manual_seed(seed)
    scale = {} if format in ("bf16", "fp4_e2m1") else {"k_descale": 0.02, "v_descale": 0.02}
    cache = PagedKVCache.empty(pages, PAGE, KV_HEADS, DIM, format=format, device=device, **scale)
    k, v = torch.randn(2, pages * PAGE, KV_HEADS, DIM, generator=random).bfloat16().to(device)
    append(cache, k, v, torch.arange(pages * PAGE, device=device))
    return cache


@pytest.mark.parametrize("target", ["cpu", "gfx942", "gfx950"])
def test_what_is_reserved_is_enough_for_every_step_of_an_engine(target):
    # 96 query heads, three guesses: steps of four tokens take more memory than those of one, and a KV head of
    # 12 rows takes more for two tokens than for four.
    batch, pages, guesses = 16, 64, 3
    format = "fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3fn"
    for kv_heads in (8, 1):
        shape = DecodeShape(
            batch=batch, q_len=1 + guesses, num_qo_heads=12 * kv_heads, num_kv_heads=kv_heads, head_dim=DIM,
            page_size=PAGE, capacity=pages * PAGE, q_dtype=torch.bfloat16,
        )  # fmt: skip
        with run_as(target):
            reserve_decode(shape, format, torch.device("cpu"))
            reserved = steps._workspaces[torch.device("cpu")]
            cache = PagedKVCache.empty(1, PAGE, kv_heads, DIM, format=format, k_descale=1.0, v_descale=1.0)
            for tokens in range(1, 2 + guesses):
                for requests in (1, batch):
                    table = PageTable.from_block_table(
                        torch.zeros(requests, pages, dtype=torch.int32),
                        torch.zeros(requests, dtype=torch.int32), page_size=PAGE,
                    )  # fmt: skip
                    q = torch.empty(requests * tokens, 12 * kv_heads, DIM, dtype=torch.bfloat16)
                    step = Step(requests * tokens, tokens, 1, None, table)
                    plan = steps._decode_plan(q, cache, step, batch)
                    assert plan.workspace is reserved
        assert steps._workspaces == {torch.device("cpu"): reserved}


def test_layers_of_other_windows_and_formats_share_one_workspace():
    table = table_of([100, 37])
    step = Step(2, 1, 100, None, table)
    q = torch.randn(2, HEADS, DIM).bfloat16()
    out = torch.empty_like(q)
    for format, window in (("fp8_e4m3fn", -1), ("fp8_e4m3fn", 9), ("bf16", -1)):
        cache = filled(16, format=format)
        attend(step, q, cache, out, max_batch=2, window_left=window)
        exact = paged_decode_reference(q, cache, table, window_left=window, out_dtype=torch.float32)
        assert relative_l1(out, exact) < BF16
    held = {id(plan.workspace) for plan in steps._decode_plans.values()}
    assert len(steps._decode_plans) == 2
    assert len(held) == 1


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
def test_a_token_has_the_same_bits_in_every_step_that_is_batch_invariant(format):
    # The last tokens of a sequence of 70, alone, in chunks, and beside a prompt or decodes of others.
    cache, table = filled(4 * 8, format=format), table_of([70, 33, 128, 7])
    rows = torch.randn(70, HEADS, DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    other = torch.randn(40, HEADS, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()

    def last_row(mine, others, window):
        """The sequence's last token in a step of its last `mine` tokens, and as many as given of others."""
        counts = torch.tensor([mine, *others], dtype=torch.int32)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        pages = PageTable.from_block_table(
            table.page_ids[: len(counts)], table.seq_lens[: len(counts)], page_size=PAGE
        )
        q = torch.cat([rows[70 - mine :], other[: sum(others)]])
        step = Step(int(starts[-1]), int(counts.max()), 128, starts, pages)
        out = torch.empty_like(q)
        attend(step, q, cache, out, max_batch=4, batch_invariant=True, window_left=window)
        return out[mine - 1]

    for window in (-1, 37):
        alone = last_row(1, [], window)
        for mine, others in ((1, [1, 1, 1]), (4, [4]), (3, [30]), (33, []), (70, [1, 1, 7])):
            assert torch.equal(last_row(mine, others, window), alone)
    view = PageTable.from_block_table(table.page_ids[:1], table.seq_lens[:1], page_size=PAGE)
    exact = paged_decode_reference(rows[-1:], cache, view, window_left=37, out_dtype=torch.float32)
    assert relative_l1(alone, exact[0]) < BF16


@pytest.mark.sampled
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize(
    ("q_lens", "lens", "decode_tokens", "parts"),
    [
        ((1, 1, 1, 9, 5), (100, 37, 1, 80, 5), 1, [3, 14]),  # decodes before prefills
        ((9, 5, 1, 1), (80, 5, 100, 37), 1, [14, 2]),  # and after them
        ((4, 1, 3, 9), (100, 37, 90, 80), 4, [8, 9]),  # guesses, a number of its own in each request
        ((4, 1, 3), (100, 37, 90), 4, []),  # no prefills
        ((3, 3), (100, 37), 4, []),  # a decode step
        ((9, 5), (80, 5), 1, []),  # no decodes
        ((1, 9, 1, 5), (37, 80, 100, 5), 1, [1, 15]),  # a request that only looks like a decode
        ((5, 1, 9), (80, 100, 37), 1, []),  # decodes in between
    ],
)
def test_a_step_of_uneven_rows_is_attention_in_parts(q_lens, lens, decode_tokens, parts, window):
    step = uneven_step(q_lens, lens, decode_tokens=decode_tokens)
    assert [part.num_tokens for part in step.parts] == parts
    cache, starts = filled(8 * len(lens)), torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32)
    q = torch.randn(sum(q_lens), HEADS, DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = torch.full_like(q, float("nan"))
    attend(step, q, cache, out, max_batch=len(lens), window_left=window)
    exact = batch_prefill_reference(q, cache, step.table, starts, window_left=window, out_dtype=torch.float32)
    assert relative_l1(out, exact) < BF16


def test_decodes_are_served_by_decode_and_prefills_count_their_own_keys(monkeypatch):
    calls = []
    for name in ("paged_decode", "batch_prefill"):
        monkeypatch.setattr(steps, name, lambda q, *args, name=name, **options: calls.append((name, len(q))))
    step = uneven_step((1, 1, 9, 5), (100, 37, 80, 5))
    q = torch.zeros(16, HEADS, DIM).bfloat16()
    attend(step, q, filled(32), torch.empty_like(q), max_batch=4)
    assert calls == [("paged_decode", 2), ("batch_prefill", 14)]
    decodes, prefills = step.parts
    assert (decodes.max_kv_tokens, prefills.max_kv_tokens, prefills.max_seq_len) == (137, 85, 80)
    (plan,) = steps._prefill_plans.values()
    assert (plan.shape.batch, plan.shape.kv_tokens) == (2, 96)
    calls.clear()
    attend(uneven_step((1, 5), (100, 37)), q[:6], filled(32), torch.empty_like(q[:6]), max_batch=4)
    assert calls == [("paged_decode", 1), ("batch_prefill", 5)]  # the end of a prompt is no decode


def test_long_decodes_leave_the_scratch_to_prefills():
    # All keys of the step would take 1.1 GB when widened, those of the prefill 67 MB.
    cache = PagedKVCache.empty(1, PAGE, 8, 128, format="fp8_e4m3fnuz", k_descale=1.0, v_descale=1.0)
    q_lens, lens = (1,) * 30 + (512,), (8192,) * 30 + (16384,)
    starts = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32)
    ids = torch.zeros(31, 16384 // PAGE, dtype=torch.int32)
    table = PageTable.from_block_table(ids, torch.tensor(lens, dtype=torch.int32), page_size=PAGE)
    step = Step(542, 512, 16384, starts, table)
    q = torch.empty(542, 96, 128, dtype=torch.bfloat16)
    with executing(NullExecutor(get_target("gfx942"))):
        for known in (None, lens):
            attend(divide(step, starts.tolist(), known), q, cache, torch.empty_like(q), max_batch=31)
            attend(step, q, cache, torch.empty_like(q), max_batch=31)
            kernels = {plan.shape.batch: plan.config.kernel for plan in steps._prefill_plans.values()}
            assert kernels == {1: "dense", 32: "fused"}
            steps._prefill_plans.clear()


def test_kept_plans_reserve_little_more_than_the_step_takes():
    # 64 times the keys of the longest request are three times the keys of all.
    cache = PagedKVCache.empty(1, PAGE, 8, 128, format="fp8_e4m3fnuz", k_descale=1.0, v_descale=1.0)
    q_lens, lens = (20,) * 63 + (512,), (300,) * 63 + (900,)
    starts = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32)
    table = PageTable.from_block_table(
        torch.zeros(64, 64, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), page_size=PAGE
    )
    q = torch.empty(sum(q_lens), 96, 128, dtype=torch.bfloat16)
    with executing(NullExecutor(get_target("gfx942"))):
        bounds = {"max_q_len": 512, "max_seq_len": 900, "max_kv_tokens": sum(lens)}
        exact = plan_prefill(q, cache, table, starts, **bounds).workspace_bytes()
        step = divide(Step(len(q), 512, 900, starts, table), starts.tolist(), lens)
        attend(step, q, cache, torch.empty_like(q), max_batch=64)
    assert steps._scratch[torch.device("cpu")].num_bytes <= 1.25 * exact


def test_plans_of_prefills_outlive_their_steps_and_share_one_workspace():
    cache = filled(32)
    q = torch.randn(64, HEADS, DIM).bfloat16()

    def run(*sizes):
        step = uneven_step(*sizes)
        rows = q[: step.num_tokens]
        attend(step, rows, cache, torch.empty_like(rows), max_batch=4)
        return dict(steps._prefill_plans)

    first = run((9, 5), (80, 50))
    assert run((10, 4), (75, 55)) == first  # about as large: the same plan
    larger = run((30, 5), (120, 50))
    assert len(larger) == 1  # its scratch is larger, so the smaller one is gone
    assert first.keys().isdisjoint(larger)
    both = run((9, 5), (80, 50))
    assert len(both) == 2
    assert {id(plan.workspace) for plan in both.values()} == {id(steps._scratch[torch.device("cpu")])}


@pytest.mark.parametrize("sizes", [((1, 1), (40, 30)), ((9, 5), (80, 50))], ids=["decode", "prefill"])
def test_a_plan_is_for_one_target(sizes):
    cache, step = filled(32), uneven_step(*sizes)
    q = torch.randn(step.num_tokens, HEADS, DIM).bfloat16()
    for target in ("gfx942", "gfx950", "gfx942"):
        with executing(NullExecutor(get_target(target))):
            attend(step, q, cache, torch.empty_like(q), max_batch=4)
    assert len({**steps._decode_plans, **dict(steps._prefill_plans)}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3fn"])
def test_a_graph_of_a_step_is_replayed_with_other_pages_and_lengths(format):
    """What vLLM and SGLang capture of a decode step: storing a token and attending to the pages."""
    cache = filled(3 * 8, format=format, device="cuda")
    table = table_of([20, 97, 1], device="cuda")
    q = torch.randn(3, HEADS, DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, 3, KV_HEADS, DIM, device="cuda").bfloat16()
    slots = torch.zeros(3, dtype=torch.int64, device="cuda")
    step, out = Step(3, 1, 8 * PAGE, None, table), torch.empty_like(q)

    def layer():
        append(cache, k, v, slots)
        attend(step, q, cache, out, max_batch=4)

    def prepare(lens):
        """Writes what graphs read, as the engines do between replays; a length of 0 is padding."""
        table.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        last = table.seq_lens.long() - 1
        places = table.page_ids.long().gather(1, (last.clamp(min=0) // PAGE)[:, None])[:, 0]
        slots.copy_(torch.where(last >= 0, places * PAGE + last % PAGE, -1))

    prepare([20, 97, 1])
    layer()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for lens in ([21, 98, 2], [128, 16, 0], [1, 64, 77]):
        table.page_ids.copy_(table.page_ids[torch.tensor([2, 0, 1], device="cuda")])
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        prepare(lens)
        out.fill_(float("nan"))
        graph.replay()
        exact = paged_decode_reference(q, cache, table, out_dtype=torch.float32)
        assert relative_l1(out, exact) < BF16
        stored = cache.dequantize()[0].flatten(0, 1)[slots[slots >= 0]]
        assert (stored - k[slots >= 0].float()).norm() / stored.norm() < 0.05
        if 0 in lens:
            assert not out[lens.index(0)].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ragged", "batch_invariant"])
def test_a_graph_of_a_step_by_prefill_kernels_is_replayed_with_other_query_lengths(kind):
    """What vLLM captures with adaptive verification or batch invariance; the plan is made in the capture."""
    most = 1 if kind == "batch_invariant" else 3
    cache = filled(3 * 8, device="cuda")
    table = table_of([20, 97, 8], device="cuda")
    q = torch.randn(3 * most, HEADS, DIM, device="cuda").bfloat16()
    starts = torch.arange(0, 3 * most + 1, most, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def layer():
        step = Step(3 * most, most, 8 * PAGE, starts, table, ragged=kind == "ragged")
        attend(step, q, cache, out, max_batch=4, batch_invariant=kind == "batch_invariant")

    layer()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for lens, counts in (([21, 98, 9], [1, 3, 2]), ([128, 16, 0], [3, 1, 0]), ([1, 64, 77], [1, 1, 3])):
        counts = [min(count, most) for count in counts]
        table.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        table.page_ids.copy_(table.page_ids[torch.tensor([2, 0, 1], device="cuda")])
        starts.copy_(torch.tensor([0, *counts]).cumsum(0))
        q.copy_(torch.randn_like(q))
        out.fill_(float("nan"))
        graph.replay()
        tokens = sum(counts)
        exact = batch_prefill_reference(q[:tokens], cache, table, starts, out_dtype=torch.float32)
        assert relative_l1(out[:tokens], exact) < BF16


@pytest.mark.gpu
def test_no_step_waits_for_a_gpu():
    """Decode and prefill steps queue their launches and read nothing back."""
    cache = filled(16, device="cuda")
    q = torch.randn(2, HEADS, DIM, device="cuda").bfloat16()
    chunk = torch.randn(11, HEADS, DIM, device="cuda").bfloat16()
    starts = torch.tensor([0, 9, 11], dtype=torch.int32, device="cuda")
    table = table_of([100, 37], device="cuda")

    def run():
        out, chunk_out = torch.empty_like(q), torch.empty_like(chunk)
        attend(Step(2, 1, 100, None, table), q, cache, out, max_batch=2)
        attend(Step(11, 9, 100, starts, table), chunk, cache, chunk_out, max_batch=2)
        return chunk_out

    run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = batch_prefill_reference(chunk, cache, table, starts, out_dtype=torch.float32)
    assert relative_l1(found, exact) < BF16


@pytest.mark.gpu
def test_a_captured_prefill_keeps_its_scratch():
    """Its plan stays when later steps need more scratch; one that is made during a capture is the graph's."""
    cache = filled(32, device="cuda")
    q = torch.randn(14, HEADS, DIM, device="cuda").bfloat16()
    long = torch.randn(120, HEADS, DIM, device="cuda").bfloat16()
    for planned in (True, False):
        step, out = uneven_step((9, 5), (80, 50), device="cuda"), torch.empty_like(q)
        attend(step, q, cache, out, max_batch=4)  # compiles
        if not planned:
            steps._prefill_plans.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(step, q, cache, out, max_batch=4)
        assert bool(steps._prefill_plans) == planned
        attend(
            uneven_step((64, 56), (120, 110), device="cuda"), long, cache, torch.empty_like(long), max_batch=4
        )
        junk = torch.full((2**22,), 255, dtype=torch.uint8, device="cuda")  # where freed memory was
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        starts = torch.tensor([0, 9, 14], dtype=torch.int32, device="cuda")
        exact = batch_prefill_reference(q, cache, step.table, starts, out_dtype=torch.float32)
        assert relative_l1(out, exact) < BF16
        assert steps._captured[-1].workspace is not None
        del junk

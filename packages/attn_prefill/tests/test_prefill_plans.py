"""Plans of prefill, beside what tests/plans asks of every plan: memory, decode by a plan, forms of inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import (
    PrefillShape,
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    planning,
)
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.accuracy import compare
from narrowkv.runtime.launch import executing, run_as
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.cache import copy_cache, differing_bytes
from narrowkv.testing.cases.prefill import PrefillCase

pytestmark = pytest.mark.sampled

HEADS: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 3, "clean": True}
SHAPE = PrefillShape(
    batch=3, num_tokens=64, max_q_len=64, num_qo_heads=3, num_kv_heads=1, head_dim=64, page_size=16,
    max_seq_len=160, kv_tokens=480,
)  # fmt: skip
MODEL = PrefillShape(
    batch=64, num_tokens=8192, max_q_len=8192, num_qo_heads=96, num_kv_heads=8, head_dim=128, page_size=16,
    max_seq_len=131072, kv_tokens=2**18,
)  # fmt: skip


def _cache(fmt: str, heads: int = 1, head_dim: int = 64) -> PagedKVCache:
    return PagedKVCache.empty(1, 16, heads, head_dim, format=fmt, k_descale=0.5)


# ---------------------------------------------------------------------------- memory


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_the_workspace_has_the_bound_that_is_stated(target: str) -> None:
    """96 query and 8 KV heads: 4 bytes for each channel of a key, in blocks, and partial results besides."""
    with executing(LaunchRecorder(target)):
        plan = plan_prefill(MODEL, _cache("fp8_e4m3fn", heads=8, head_dim=128))
    units = plan.target.figures.compute_units
    keys = 4 * (MODEL.kv_tokens + MODEL.batch * 128) * 8 * 128
    partials = 8 * 2 * units * (64 if target == "sm90" else 128) * (128 + 2) * 4
    tiles = 32 * (8192 * 12 // 16 + MODEL.batch)
    factors = 2 * 8 * (MODEL.kv_tokens + MODEL.batch * 128) * 4
    assert keys // 2 < plan.workspace_bytes() <= keys + partials + tiles + factors + 4096


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("granularity", ["float", "token_head"])
@pytest.mark.parametrize("appends", [False, True])
def test_the_memory_of_a_plan_holds_that_of_every_call(appends: bool, granularity: str, target: str) -> None:
    cache = PrefillCase.small(
        num_kv_heads=8, head_dim=128, granularity=granularity, format="bf16", clean=True
    ).build()[1]
    calls = [
        (batch, batch * longest) for batch in (1, 2, 3, 16, 17, 40, 60) for longest in (1, 2, 7, 64, 120)
    ]
    with executing(LaunchRecorder(target)):
        plan = (plan_append if appends else plan_prefill)(replace(MODEL, kv_tokens=2**20), cache)
        for batch, tokens in [*calls, (64, 8192), (1, 8192), (1, 300), (7, 2000)]:
            of_call = plan.shape_of_call(batch, tokens)
            config = plan.config_for(of_call)
            for part in (config, config.fallback):
                if part is None or part.kernel == "decode":
                    continue
                exact = plan.memory_sizes(of_call, part, exact=True)
                held = plan.memory_sizes(plan.shape, part, exact=False)
                for name, (sizes, dtype) in exact.blocks.items():
                    assert dtype == held.blocks[name][1]
                    assert math.prod(sizes) <= math.prod(held.blocks[name][0]), name
                for name, count in exact.counters.items():
                    assert count <= held.counters[name]


# ---------------------------------------------------------------------------- kinds of calls


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_a_plan_of_many_sequences_has_counters_for_all_their_splits(target: str) -> None:
    """4096 sequences with 16 KV heads: each tile of rows has a counter, and those that run at once more."""
    shape = replace(
        MODEL, batch=4096, num_tokens=8192, max_q_len=2, num_qo_heads=64, num_kv_heads=16, head_dim=64,
        max_seq_len=2048, kv_tokens=4096 * 2048,
    )  # fmt: skip
    with executing(LaunchRecorder(target)):
        plan = plan_prefill(shape, _cache("fp8_e4m3fn", heads=16), kernel="split").with_workspace()
        memory = plan.memory(plan.config)
    assert memory is not None
    assert plan.config.kernel == "split"
    assert memory.tensors["arrived"].numel() > 4096 * 16


def test_one_query_token_of_every_sequence_is_decoded_by_a_plan_from_shapes() -> None:
    plan = plan_prefill(replace(SHAPE, num_tokens=3, max_q_len=1), _cache("fp8_e4m3fn"))
    assert plan.decode is not None
    assert plan.decode.workspace is plan.workspace
    for q_lens, lens in (((1, 1, 1), (40, 5, 130)), ((1, 1), (7, 9)), ((1, 0, 1), (30, 5, 7))):
        inputs = PrefillCase.small(q_lens, lens, **HEADS).build()
        assert compare(plan.run(*inputs), batch_prefill_reference(*inputs)).relative_l1 <= 0.002


def test_unplanned_calls_of_any_size_share_a_plan() -> None:
    inputs = PrefillCase.small((5, 9), (30, 20), **HEADS).build()
    batch_prefill(*inputs)
    before = len(planning._plans)
    for q_lens, lens in (((20, 1, 9), (40, 5, 130)), ((30,), (64,)), ((2, 0, 62), (2, 9, 160))):
        other = PrefillCase.small(q_lens, lens, **HEADS).build()
        assert compare(batch_prefill(*other), batch_prefill_reference(*other)).relative_l1 <= 0.002
    assert len(planning._plans) == before
    with run_as("gfx942"):  # another target has its own
        batch_prefill(*inputs)
    assert len(planning._plans) == before + 1


def test_a_table_of_other_widths_is_served() -> None:
    q, cache, table, starts = PrefillCase.small(**HEADS).build()
    plan = plan_prefill(q, cache, table, starts)
    o = plan.run(q, cache, table, starts)
    wide = torch.full((table.batch_size, 40), -1, dtype=torch.int32)
    wide[:, : table.page_ids.shape[1]] = table.page_ids
    wider = PageTable.from_block_table(wide, table.seq_lens, page_size=table.page_size)
    assert torch.equal(plan.run(q, cache, wider, starts), o)


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


# ---------------------------------------------------------------------------- refusals


def test_new_tokens_in_the_cache_are_refused_in_calls_like_one_that_was_served() -> None:
    q, k_new, v_new, cache, table, starts, rope = PrefillCase.append(
        format="bf16", rope="neox", **HEADS
    ).build_append()
    plan = plan_append(q, cache, table, starts)
    plan.run(q, k_new, v_new, cache, table, starts, rope=rope)
    before = copy_cache(cache)
    inside = cache.k.flatten()[: k_new.numel()].view(k_new.shape)
    with pytest.raises(ValueError, match=r"cache.k must not share memory with k_new"):
        plan.run(q, inside, v_new, cache, table, starts, rope=rope)
    assert not differing_bytes(cache, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "shape must have the cache's"),
        ({"page_size": 8}, "shape must have the cache's"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"q_dtype": torch.float32}, "q_dtype must be one of"),
    ],
    ids=str,
)
def test_shapes_of_plans_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_prefill(replace(SHAPE, **change), _cache("fp8_e4m3fn"))


def test_what_does_not_go_together_is_refused() -> None:
    q, cache, table, starts = PrefillCase.small(**HEADS).build()
    with pytest.raises(TypeError, match="must be None with a PrefillShape"):
        plan_prefill(SHAPE, cache, table, starts)
    with pytest.raises(TypeError, match="page_table must be a PageTable"):
        plan_prefill(q, cache)
    with pytest.raises(ValueError, match="call plan_prefill again"):
        plan_prefill(SHAPE, _cache("bf16")).run(q, cache, table, starts)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 32), (96, 32), (128, 32)])
def test_fp8_products_have_few_rows_on_nvidia(head_dim: int, rows: int) -> None:
    """Tiles of 64 rows are wrong with ptxas 12.9: see `stale_codes` in `tests/generated_code.py`."""
    case = PrefillCase.small(
        (128,), (128,), head_dim=head_dim, q_dtype=torch.float8_e4m3fn, format="fp8_e4m3fn"
    )
    with run_as("sm90"):
        config = case.inputs().plan().config
    assert (config.kernel, config.block_m) == ("fused", rows)

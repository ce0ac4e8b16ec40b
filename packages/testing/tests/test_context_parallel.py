"""The cost model everywhere; measuring, and capture on NCCL, where there are two GPUs."""

from __future__ import annotations

import itertools

import pytest
import torch

from narrowkv.attn_decode import DecodeShape
from narrowkv.context_parallel.buffers import Moves, allocate, exchange_bytes
from narrowkv.context_parallel.exchange import ExchangeSizes, SymmetricMemory, sent_bytes
from narrowkv.context_parallel.layout import ShardLayout
from narrowkv.context_parallel.plan import plan_cp_decode
from narrowkv.context_parallel.ranks import run_ranks
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import Workspace
from narrowkv.testing.bench.context_parallel import (
    LINK_OF_TARGET,
    LINKS,
    Measured,
    Setting,
    collective_us,
    line_of,
    measure_ranks,
    predict,
)
from narrowkv.testing.cases.context_parallel import CASES, plan_case

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
def test_captured_steps_on_nccl_serve_other_lengths() -> None:
    setting = Setting(contexts=(4096,), batches=(1, 3))
    for rows in run_ranks(measure_ranks, 2, setting, device="cuda"):
        assert {row.comm for row in rows} == {"a2a", "ag_rs", "symm_mem"}
        for row in rows:
            if row.refusal:
                assert row.comm == "symm_mem", row
                continue
            assert row.captured, row
            assert row.error < 2.0**-8, row
            assert row.repeats or row.comm == "ag_rs", row


def test_a_world_of_one_costs_its_attention_only() -> None:
    step = predict(Setting(), 1, 2**20, 1, target="gfx942", link="xgmi4")
    assert step.step_us == step.attention_us == step.one_gpu_us
    assert (step.speedup, step.sent_bytes, step.communication_us) == (1.0, 0, 0.0)
    # 2048 bytes a token at 85% of 5.3 TB/s, and the launches.
    assert step.one_gpu_us == pytest.approx(2048 * 2**20 / (0.85 * 5.3e12) * 1e6 + 6)


def test_communication_grows_with_ranks_and_domains() -> None:
    link = LINKS["xgmi4"]
    times = [collective_us(link, world, 1e4) for world in (1, 2, 8, 9, 72)]
    assert times == sorted(times)
    assert times[0] == 0
    # One link of a mesh carries what one peer gets; a switch carries it at the GPU's whole rate.
    assert collective_us(link, 2, 64e9 * 1e-3) == pytest.approx(1e3 + 6.6 + 0.6)
    assert collective_us(LINKS["nvlink4"], 2, 450e9 * 1e-3) == pytest.approx(1e3 + 6.6 + 0.6)
    assert set(LINK_OF_TARGET.values()) <= set(LINKS)
    with pytest.raises(ValueError, match="world must be at least 1"):
        collective_us(link, 0, 1.0)


def test_the_model_sends_the_bytes_that_a_plan_sends() -> None:
    for world in (2, 4, 8):
        predicted = predict(Setting(), world, 4096, 3, target="gfx942", link="xgmi4")
        sizes = ExchangeSizes(world, 0, 3, 96, 128)
        queries = (world - 1) * 3 * 96 // world * 128 * 2
        assert predicted.sent_bytes == sent_bytes(sizes, torch.bfloat16, "a2a") + queries
    # What engines report of one token, eight ranks and 96 heads of 128 channels in bf16.
    sent = sent_bytes(ExchangeSizes(8, 0, 1, 96, 128), torch.bfloat16, "a2a")
    assert 21_504 <= sent <= 21_504 * 1.15


def test_a_row_says_what_was_found_or_why_not() -> None:
    row = Measured(2, 4096, 1, "a2a", "fp32", 1, 0.1, 100.0, 60.0, 52.0, 16.0, 99, 1e-4, True, True)
    assert row.speedup == pytest.approx(100 / 60)
    assert row.hidden == pytest.approx(0.5)
    assert row.tokens_per_s == pytest.approx(1e6 / 60)
    assert row.context_at_equal_time == int(4096 * 92 / 52)
    assert "1.67 x" in line_of(row)
    assert "not run: no GPU" in line_of(Measured(2, 4096, 1, "a2a", "fp32", 1, refusal="no GPU"))


def test_symmetric_memory_says_what_it_lacks_and_what_to_use() -> None:
    with pytest.raises(UnsupportedError, match="needs GPUs, got cpu: use comm='a2a'"):
        SymmetricMemory(256, None, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"comm": "p2p"}, "comm must be one of"),
        ({"heads": "some"}, "heads must be one of"),
        ({"partial_dtype": torch.float16}, "partial_dtype must be one of"),
        ({"head_groups": 0}, "head_groups must be"),
    ],
)
def test_a_plan_says_what_it_does_not_take(change: dict[str, object], match: str) -> None:
    q, shard, _ = plan_case(CASES[0], 0, 1)
    with pytest.raises(ValueError, match=match):
        plan_cp_decode(q, shard.cache, shard.table, **change)  # type: ignore[arg-type]


def test_a_call_that_the_plan_is_not_for_is_refused() -> None:
    q, shard, plan = plan_case(CASES[0], 0, 1)
    two = next(case for case in CASES if case.workload.q_len == 2)
    _, other, _ = plan_case(two, 0, 1)
    options = {
        "sm_scale": None, "out": None, "out_dtype": None, "logits_soft_cap": 0.0, "sinks": None,
        "return_lse": False, "lse": None, "validate": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="table must be made by"):
        plan.run(q, shard.cache, other.table, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sinks must have shape"):
        plan.run(q, shard.cache, shard.table, **{**options, "sinks": torch.zeros(9)})  # type: ignore[arg-type]
    assert "rank 0 of 1" in plan.explain()


@pytest.mark.parametrize("comm", ["a2a", "ag_rs"])
def test_steps_of_any_batch_lie_in_the_memory_of_the_largest(comm: str) -> None:
    shape = DecodeShape(
        batch=16, q_len=2, num_qo_heads=96, num_kv_heads=8, head_dim=128, page_size=16, capacity=4096
    )
    moves = Moves(ShardLayout(4, 1, 16), comm, torch.float32, "sharded", 1, shape, torch.device("cpu"))
    workspace = Workspace(exchange_bytes(moves), "cpu")
    for tokens in range(1, 33):
        found = allocate(moves, tokens, None, workspace)
        parts = [found.gathered, found.partial[0].lse, found.partial[0].send, found.partial[0].recv]
        spans = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.itemsize) for x in parts if x is not None)
        begin = workspace._buffer.data_ptr()
        assert begin <= spans[0][0]
        assert spans[-1][1] <= begin + workspace.num_bytes
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    with pytest.raises(ValueError, match="workspace must have at least"):
        allocate(moves, 33, None, workspace)

"""Mixed batches: sequences with few query tokens have launches of their own, and the caller sorts nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import (
    PrefillShape,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
)
from narrowkv.attn_prefill.cost import RATES, few_bounds
from narrowkv.attn_prefill.tiles import ANY_LEN, PrefillConfig
from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant.accuracy import compare
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import executing
from narrowkv.runtime.targets import get_target
from narrowkv.testing.calls import LaunchRecorder, TorchOperations
from narrowkv.testing.cases.prefill import PrefillCase, PrefillInputs, poison_plan

pytestmark = pytest.mark.sampled

# 16 query tokens of 8 heads are the most of a class of few on a CPU, as on gfx942: two tiles of 64 rows.
HEADS: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 8}
FEW = 16


def _classes(config: PrefillConfig) -> list[tuple[str, tuple[int, int]]]:
    return [(part.kernel, part.q_lens) for part in (*config.short_queries, config)]


def _compare(case: PrefillCase, inputs: PrefillInputs, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Answers, lse and stored bytes against the reference."""
    expected, expected_lse = inputs.reference()
    rows = torch.isfinite(expected_lse)
    assert torch.equal(torch.isfinite(lse), rows)
    assert compare(o, expected).relative_l1 <= case.bound
    assert float((lse - expected_lse)[rows].abs().max()) <= case.lse_bound
    assert not inputs.wrong_bytes()


def _check(case: PrefillCase) -> PrefillConfig:
    """The call of a case, before which every buffer holds NaN."""
    inputs = case.inputs()
    _compare(case, inputs, *inputs.call())
    return inputs.plan().config


MIXES = {
    "interleaved": ((1, 30, 4, 17, 1), (330, 90, 20, 40, 1)),
    "few behind many": ((40, 1, 2), (64, 129, 5)),
    "many behind few": ((16, 1, 17), (16, 300, 17)),
    "without tokens": ((0, 1, 0, 33, 0), (70, 65, 0, 100, 9)),
    "no few": ((30, 0, 25), (30, 64, 100)),
    "no many": ((1, 0, 5, 16), (513, 10, 40, 16)),
    "more rows than keys": ((3, 40), (1, 20)),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("operation", ["prefill", "append"])
def test_mixed_batches(name: str, operation: str) -> None:
    q_lens, lens = MIXES[name]
    if operation == "append":
        lens = tuple(max(full, new) for full, new in zip(lens, q_lens, strict=True))
    config = _check(PrefillCase.small(q_lens, lens, operation=operation, **HEADS))
    dense = "append_then_attend" if operation == "append" else "dense"
    assert _classes(config) == [("split", (0, FEW)), (dense, (FEW + 1, ANY_LEN))]


CHANGES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 70},
    "window and sinks": {"window_left": 12, "sinks": True},
    "soft cap": {"logits_soft_cap": 3.0},
    "descale of each key": {"granularity": "token_head"},
    "bf16": {"format": "bf16"},
    "fp16 over bf16": {"format": "bf16", "q_dtype": torch.float16},
    "FP4": {"format": "fp4_e2m1"},
    "two KV heads, ratio 71": {"num_kv_heads": 2, "gqa_ratio": 71},
    "head_dim 256": {"head_dim": 256},
    "ragged": {"ragged": True},
    "all keys": {"causal": False},
    "window to the right": {"causal": False, "window_right": 5},
    "append, RoPE": {"operation": "append", "rope": "neox"},
    "append, window and sinks": {"operation": "append", "window_left": 12, "sinks": True},
    "append, soft cap": {"operation": "append", "logits_soft_cap": 3.0},
    "append, FP4": {"operation": "append", "format": "fp4_e2m1"},
}
_MIX = MIXES["interleaved"]


@pytest.mark.parametrize("name", CHANGES)
def test_mixed_batches_with_options(name: str) -> None:
    config = _check(PrefillCase.small(*_MIX, **HEADS | CHANGES[name]))
    assert [part.kernel for part in config.short_queries] == ["split"]


@pytest.mark.parametrize("operation", ["prefill", "append"])
@pytest.mark.parametrize("change", [{}, {"window_left": 200, "sinks": True}], ids=str)
def test_long_sequences_have_more_splits_than_short_ones(operation: str, change: dict[str, Any]) -> None:
    """Two tiles of rows and up to five splits of a sequence, beside sequences with one, and none."""
    case = PrefillCase.small((1, 9, 0, 2), (1300, 700, 8, 30), operation=operation, kernel="split", **HEADS)
    _check(replace(case, **change))


LOOPS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window and sinks": {"window_left": 200, "sinks": True},
    "soft cap": {"logits_soft_cap": 3.0},
    "descale of each key": {"granularity": "token_head"},
    "fp16 over bf16": {"format": "bf16", "q_dtype": torch.float16},
    "window on both sides": {"causal": False, "window_left": 90, "window_right": 5},
    "all keys": {"causal": False},
}


# An append is causal.
@pytest.mark.parametrize(
    ("operation", "name"),
    [*(("prefill", name) for name in LOOPS), *(("append", n) for n in LOOPS if "causal" not in LOOPS[n])],
)
@pytest.mark.parametrize("block_m", [16, 64])
def test_equal_shares_by_the_loop_of_decode(name: str, block_m: int, operation: str) -> None:
    """As NVIDIA's kernels are, in tiles of few rows and of many."""
    case = PrefillCase.small((1, 9, 0, 2), (700, 330, 8, 30), operation=operation, kernel="split", **HEADS)
    _check_by_the_loop_of_decode(replace(case, **LOOPS[name]), block_m, slots=1)


@pytest.mark.parametrize("slots", [7, 60])
@pytest.mark.parametrize("operation", ["prefill", "append"])
def test_splits_are_merged_in_groups(operation: str, slots: int) -> None:
    """More than 8 splits of a sequence, beside sequences with few."""
    case = PrefillCase.small((1, 9, 0, 2), (2700, 330, 8, 30), operation=operation, kernel="split", **HEADS)
    _check_by_the_loop_of_decode(case, 16, slots=slots)


def _check_by_the_loop_of_decode(case: PrefillCase, block_m: int, *, slots: int) -> None:
    inputs = case.inputs()
    plan = inputs.plan()
    config = replace(plan.config, block_m=block_m, block_n=32, num_splits=slots, as_decode=True)
    plan = replace(plan, config=config).with_workspace(None)
    poison_plan(plan)
    _compare(case, inputs, *inputs.run(plan, return_lse=True))


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("operation", ["prefill", "append"])
def test_sequences_with_fewer_tokens_than_expected_are_served(name: str, operation: str) -> None:
    """`min_q_len` leaves classes out, and with them no sequence."""
    q_lens, lens = MIXES[name]
    if operation == "append":
        lens = tuple(max(full, new) for full, new in zip(lens, q_lens, strict=True))
    case = PrefillCase.small(q_lens, lens, operation=operation, **HEADS)
    inputs = case.inputs()
    make: Any = plan_append if operation == "append" else plan_prefill
    plan = make(replace(inputs.plan().shape, min_q_len=FEW + 1), inputs.cache)
    assert [part.q_lens for part in (*plan.config.short_queries, plan.config)] == [(0, ANY_LEN)]
    poison_plan(plan)
    _compare(case, inputs, *inputs.run(plan, return_lse=True))


def test_the_caller_cannot_force_splits_of_equal_shares() -> None:
    q, cache, table, starts = PrefillCase.small(**HEADS).build()
    with pytest.raises(UnsupportedError, match="leave num_splits out, got 2"):
        plan_prefill(q, cache, table, starts, kernel="split", num_splits=2)


@pytest.mark.parametrize("appends", [False, True])
def test_sequences_change_their_class_between_calls_of_a_plan(appends: bool) -> None:
    """Lengths are on the device: the same launches serve every division of the tokens."""
    case = PrefillCase.append((20, 6, 10), (90, 40, 70), **HEADS)
    q, k_new, v_new, cache, table, starts, _ = case.build_append()
    if not appends:
        table = replace(table, before_append=False)
    plan = (plan_append if appends else plan_prefill)(q, cache, table, starts)
    assert len(plan.config.short_queries) == 1
    out = torch.empty_like(q)
    for q_lens in ((20, 6, 10), (1, 34, 1), (36, 0, 0), (12, 12, 12)):
        starts.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        out.fill_(math.nan)
        if appends:
            forced = plan_append(q, cache, table, starts, kernel="append_then_attend")
            expected = prefill_append(q, k_new, v_new, cache, table, starts, plan=forced)
            plan.run(q, k_new, v_new, cache, table, starts, out=out)
        else:
            expected = batch_prefill_reference(q, cache, table, starts)
            plan.run(q, cache, table, starts, out=out)
        assert compare(out, expected).relative_l1 <= 0.003


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
def test_a_planned_mixed_call_allocates_nothing(target: str) -> None:
    q, cache, table, starts = PrefillCase.small((1, 400, 2), (30000, 900, 10), **HEADS).build()
    out = torch.empty_like(q)
    with executing(LaunchRecorder(target)):
        plan = plan_prefill(q, cache, table, starts)
        assert plan.config.short_queries
        plan.run(q, cache, table, starts, out=out)  # the first call prepares its launches
        with TorchOperations() as seen:
            plan.run(q, cache, table, starts, out=out)
    assert not seen.names


def test_a_batch_invariant_plan_has_one_class() -> None:
    q, cache, table, starts = PrefillCase.small(*_MIX, **HEADS).build()
    assert _classes(plan_prefill(q, cache, table, starts, batch_invariant=True).config) == [
        ("fused", (0, ANY_LEN))
    ]


# ---------------------------------------------------------------------------- the rule


def _shape(batch: int, num_tokens: int, ratio: int = 12, keys: int = 8192, **bounds: int) -> PrefillShape:
    return PrefillShape(
        batch=batch, num_tokens=num_tokens, max_q_len=bounds.get("max_q_len", num_tokens),
        num_qo_heads=8 * ratio, num_kv_heads=8, head_dim=128, page_size=16, max_seq_len=keys,
        kv_tokens=batch * keys,
    )  # fmt: skip


def _planned(
    target: str, shape: PrefillShape, fmt: str = "fp8_e4m3fn", appends: bool = False
) -> PrefillConfig:
    cache = PagedKVCache.empty(1, 16, 8, 128, format=fmt)
    with executing(LaunchRecorder(target)):
        plan: Any = plan_append if appends else plan_prefill
        config = plan(shape, cache, scratch_limit_bytes=2**45).config
    assert isinstance(config, PrefillConfig)
    return config


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
def test_which_classes_a_call_can_have(target: str, appends: bool) -> None:
    widened = "pipelined" if target == "sm90" else "dense"
    bounds = few_bounds(get_target(target), _shape(64, 2108), ("fp8_e4m3fn",) * 2, widened)
    few, most = min(len(bounds), 2), bounds[-1][0]  # tiles of 32 rows are alone

    def kernels(*sizes: int, **bounds: int) -> list[str]:
        config = _planned(target, _shape(*sizes, **bounds), appends=appends)
        return [part.kernel for part in (*config.short_queries, config)]

    dense = "dense" if not appends else "pipelined" if target == "sm90" else "append_then_attend"
    assert kernels(64, 2108) == ["split"] * few + [dense]  # decodes and chunks
    assert kernels(64, 64 * most, max_q_len=most) == ["split"] * few
    assert kernels(64, most) == ["split"] * few
    assert kernels(1, most) == ["split"]
    assert kernels(1, most + 1) == [dense]
    # Sequences that would take no longer among the others than a launch of their own takes.
    assert kernels(2, 4096, keys=64) == ["append_then_attend" if appends else "dense"]


@pytest.mark.parametrize("target", sorted(RATES))
def test_more_keys_are_shared_by_more_rows_where_widening_costs_more(target: str) -> None:
    """The class of few has more rows for 16-bit caches than for FP4, which is slow to widen in the loop."""
    shape = _shape(64, 2108, ratio=4)
    most = {
        fmt: few_bounds(get_target(target), shape, (fmt, fmt), "dense")[-1][0]
        for fmt in ("bf16", "fp8_e4m3fn", "fp4_e2m1")
    }
    assert most["bf16"] >= most["fp8_e4m3fn"] >= most["fp4_e2m1"] >= 1


def test_a_plan_explains_its_classes() -> None:
    cache = PagedKVCache.empty(1, 16, 8, 128, format="fp8_e4m3fn")
    with executing(LaunchRecorder("gfx942")):
        lines = plan_prefill(_shape(64, 2108, max_q_len=512), cache).explain().splitlines()
    assert len(lines) == 2
    assert "split, because few rows share each key" in lines[0]
    assert "sequences of 1 to 10 query tokens" in lines[0]
    assert lines[0].index("estimates for 64 with 10") < lines[0].index("split 17") < lines[0].index("dense")
    assert "sequences of 11 query tokens or more" in lines[1]
    assert lines[1].index("dense 3") < lines[1].index(", split")


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
def test_sequences_that_one_kernel_serves_together_have_tiles_of_64_rows_and_more(target: str) -> None:
    """Tiles by the mean of a few short sequences would be kernels that warming up does not reach."""
    shape = replace(_shape(17, 37, keys=1008), num_qo_heads=12, num_kv_heads=1, head_dim=64)
    cache = PagedKVCache.empty(1, 16, 1, 64, format="fp8_e4m3fn")
    with executing(LaunchRecorder(target)):
        config = plan_prefill(shape, cache).config
    assert config.kernel == "dense"
    assert config.block_m >= 64


def test_keys_in_16_bits_that_stay_in_their_pages_are_widened_for_fewer_rows() -> None:
    """100 tokens at ratio 4 over long keys: K is read once from its pages by the pipelined kernel."""
    most = [few_bounds(get_target("sm90"), _shape(1, 100, 4, 9000), ("bf16",) * 2, way)[-1][0] for way in
            ("dense", "pipelined")]  # fmt: skip
    assert most[1] < 100 < most[0]

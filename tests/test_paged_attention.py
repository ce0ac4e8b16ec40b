"""What attention over a paged cache promises whatever its input: the same bits wherever the numbers lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowkv.paged_cache import PageTable
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase, poison_plan
from narrowkv.testing.checking import assert_right


@dataclass(frozen=True)
class OperationEntry:
    """An operation over a paged cache.

    Attributes:
        case: makes a case from its fields.
        planner: the name of the function that plans its calls.
        splits: arguments of that function that split keys over programs.
    """

    case: Callable[..., Any]
    planner: str
    splits: dict[str, int]


OPERATIONS = {
    "decode": OperationEntry(partial(DecodeCase.small, gqa_ratio=3), "plan_decode", {"tokens_per_split": 32}),
    "dense": OperationEntry(partial(PrefillCase.small, kernel="dense"), "plan_prefill", {"num_splits": 4}),
    "fused": OperationEntry(partial(PrefillCase.small, kernel="fused"), "plan_prefill", {"num_splits": 4}),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def attend(inputs, plan=None, **options):
    """`(o, lse)` of inputs with some options changed."""
    return replace(inputs, options={**inputs.options, **options}).call(plan)


@given(
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 90)), min_size=1, max_size=4),
    st.sampled_from([1, 3, 16, 64]),
    st.booleans(),
    st.sampled_from([*OPERATIONS]),
    st.booleans(),
)
@settings(max_examples=15)
def test_any_ragged_batch(sizes, page_size, ragged, name, masked):
    """Prefill has new tokens of each sequence, and may not be causal; decode has one and may be split."""
    q_lens, lens = zip(*sizes, strict=True)
    own = {"q_lens": q_lens, "causal": masked} if name != "decode" else {"split": "even" if masked else ""}
    shape = {"lens": lens, "page_size": page_size, "ragged": ragged, "num_kv_heads": 1}
    assert_right(OPERATIONS[name].case(**shape, **own))


@every_operation
def test_a_batch_of_no_sequences(operation, device):
    case = operation.case(lens=(), **({} if operation.planner == "plan_decode" else {"q_lens": ()}))
    o, lse = case.inputs(device).call()
    assert (o.shape, lse.shape) == ((0, 6, 64), (0, 6))


@every_operation
def test_permuted_pages_and_a_second_call_give_the_same_bits(operation, device):
    inputs = operation.case(lens=(64, 64, 64)).inputs(device)
    cache, table, plan = inputs.cache, inputs.table, inputs.plan()
    first, _ = inputs.call(plan)
    assert torch.equal(first, inputs.call(plan)[0])
    order = torch.randperm(cache.num_pages, device=device)
    k, v = (x.view(torch.uint8)[order.argsort()].view(x.dtype) for x in (cache.k, cache.v))
    moved = PageTable.from_block_table(order[table.page_ids.long()].int(), table.seq_lens, page_size=16)
    moved_inputs = replace(inputs, cache=replace(cache, k=k, v=v), table=moved)
    assert torch.equal(first, moved_inputs.call(plan)[0])


@every_operation
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_strided_queries_and_storage_off_16_byte_boundaries_give_the_same_bits(layout, operation, device):
    inputs = operation.case(layout=layout).inputs(device)
    plan = inputs.plan()
    expected, _ = inputs.call(plan)
    rows, heads, _ = inputs.q.shape
    q = torch.zeros(rows, 2 * heads, 80, dtype=inputs.q.dtype, device=device)[:, ::2, 5:69].copy_(inputs.q)
    assert torch.equal(replace(inputs, q=q).call(plan)[0], expected)
    for name in "kv":
        stored = getattr(inputs.cache, name)
        memory = torch.zeros(stored.numel() + 3, dtype=torch.uint8, device=device)[3:]
        memory.copy_(stored.view(torch.uint8).flatten())
        moved = replace(inputs.cache, **{name: memory.view(stored.shape).view(stored.dtype)})
        assert torch.equal(replace(inputs, cache=moved).call(plan)[0], expected)


@every_operation
def test_what_a_workspace_holds_before_a_call_does_not_matter(operation, device):
    inputs = operation.case(lens=(300, 5, 60)).inputs(device)
    plan = inputs.plan(**operation.splits)
    plan.workspace.carve([((plan.workspace.num_bytes,), torch.uint8)])[0].zero_()
    first, _ = inputs.call(plan)
    poison_plan(plan)
    assert torch.equal(first, inputs.call(plan)[0])
    assert int(plan.workspace.counters(2**16).abs().sum()) == 0


@every_operation
def test_huge_logits_extreme_sinks_and_unusual_scales(operation, device):
    case = operation.case()
    inputs = case.inputs(device)
    plan = inputs.plan()
    for cap in (0.0, 5.0):
        for result in attend(inputs, plan, sm_scale=1e4, logits_soft_cap=cap):
            assert bool(result.isfinite().all())
    nothing, everything = (torch.full((6,), sink, device=device) for sink in (-math.inf, math.inf))
    assert torch.equal(attend(inputs, plan, sinks=nothing)[0], inputs.call(plan)[0])
    assert bool((attend(inputs, plan, sinks=everything)[0] == 0).all())
    for scale in (0.0, -0.1):
        assert_right(case, inputs=inputs, plan=plan, sm_scale=scale)


@every_operation
def test_a_plan_for_another_call_is_refused_with_what_is_needed(operation, device):
    plan = operation.case().inputs(device).plan()
    with pytest.raises(ValueError, match=f"call {operation.planner} again"):
        operation.case(gqa_ratio=5).inputs(device).call(plan)

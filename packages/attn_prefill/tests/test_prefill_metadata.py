"""Lengths beyond the bounds of a plan, and open windows; results and workspace lie between guard zones.

Wrong values in metadata are tested for all operations in tests/test_hostile_metadata.py, and refused
arguments in tests/test_arguments.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill
from narrowkv.attn_prefill.planning import can_pipeline
from narrowkv.runtime.targets import device_target
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.memory_guards import GuardZones

pytestmark = pytest.mark.sampled
INT32_MAX = 2**31 - 1
PREFILL = PrefillCase.small(q_lens=(9, 5, 30, 3), lens=(40, 5, 70, 33), num_kv_heads=1, gqa_ratio=7)
APPEND = PrefillCase.append(q_lens=(9, 5, 40, 3), lens=(20, 0, 70, 5), num_kv_heads=1, gqa_ratio=7)
# "": the automatic choice, by which sequences with few query tokens have a launch of their own.
CASES = [
    *(replace(PREFILL, kernel=kernel) for kernel in ("dense", "fused", "split", "")),
    *(replace(APPEND, kernel=kernel) for kernel in ("append_then_attend", "fused", "split", "")),
    pytest.param(replace(APPEND, kernel="pipelined"), marks=pytest.mark.gpu),
]
MASKED = [
    replace(PREFILL, kernel=kernel, causal=False, window_left=window)
    for kernel in ("dense", "fused", "split", "")
    for window in (-1, 9)
]


def _run(case: PrefillCase, device: str, splits: int = 1, **bounds: int) -> tuple[torch.Tensor, ...]:
    """O and lse, NaN where nothing is written, and for an append K and V of each sequence's pages."""
    inputs = case.inputs(device)
    if case.kernel == "pipelined" and not can_pipeline(
        device_target(inputs.q.device), inputs.q.dtype, inputs.cache
    ):
        pytest.skip("not for this GPU")
    # Kernel "split" and the automatic choice divide keys by themselves.
    forced = {"kernel": case.kernel or None, "num_splits": None if case.kernel in ("split", "") else splits}
    make: Any = plan_append if case.appends else plan_prefill
    plan = make(inputs.q, inputs.cache, inputs.table, inputs.starts, **forced, **bounds)
    zones = GuardZones()
    plan = plan.with_workspace(zones.workspace(plan.workspace_bytes(), plan.device))
    inputs = replace(
        inputs,
        cache=replace(inputs.cache, **{x: zones.place(x, getattr(inputs.cache, x)) for x in ("k", "v")}),
    )
    out = zones.place("out", torch.full_like(inputs.q, math.nan))
    lse = zones.place("lse", inputs.q.new_full(inputs.q.shape[:2], math.nan, dtype=torch.float32))
    inputs.run(plan, out=out, lse=lse, validate=False)  # on the CPU bounds would be looked at
    assert zones.damaged() == []
    stored = inputs.cache.k, inputs.cache.v
    return (
        out,
        lse,
        *(x.view(torch.uint8)[inputs.table.page_ids.clamp(max=len(x) - 1).long()] for x in stored),
    )


_right = cache(_run)


def _rows(case: PrefillCase, *sequences: int) -> torch.Tensor:
    """The rows of these sequences."""
    ends = torch.tensor(case.q_lens).cumsum(0).tolist()
    return torch.cat([torch.arange(ends[seq] - case.q_lens[seq], ends[seq]) for seq in sequences])


def _compare(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], rows: torch.Tensor, exact: bool
) -> None:
    """Compares rows of the outputs, and the pages of all sequences but the third."""
    for got, want in zip(found[:2], expected[:2], strict=True):
        if exact:
            assert torch.equal(got[rows], want[rows])
        torch.testing.assert_close(got[rows], want[rows], rtol=1e-2, atol=1e-3)
    for got, want in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [*CASES, *MASKED], ids=str)
def test_rows_inside_a_bound_on_query_tokens_that_is_too_low(
    case: PrefillCase, splits: int, device: str
) -> None:
    found = _run(case, device, splits, max_q_len=9)
    inside = torch.cat([_rows(case, seq)[:9] for seq in range(4)])
    # The automatic choice serves sequence 2 by another kernel.
    _compare(found, _right(case, device, splits), inside, exact=case.kernel != "")
    outside = torch.ones(sum(case.q_lens), dtype=torch.bool)
    outside[inside] = False
    assert bool(found[0][outside].isnan().all())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_inside_a_bound_on_keys_that_is_too_low(case: PrefillCase, splits: int, device: str) -> None:
    expected = _right(case, device, splits)
    others = _rows(case, 0, 1, 3)
    if case.appends:
        for low in ({"max_seq_len": 64}, {"max_kv_tokens": 64}):  # sequence 2 has 70 old keys
            _compare(_run(case, device, splits, **low), expected, others, exact=True)
        return
    # The rows of sequence 2 stand at positions 40 to 69: the first ten see no key beyond the bound.
    inside = torch.cat([others, _rows(case, 2)[:10]])
    _compare(_run(case, device, splits, max_seq_len=50), expected, inside, exact=False)


@pytest.mark.parametrize("longest", [70, 260])
def test_the_longest_sequences_are_left_out_of_scratch_that_is_too_small(longest: int, device: str) -> None:
    case = replace(PREFILL, kernel="dense", lens=(40, 5, longest, 33))
    # Blocks of 64 keys: one for each sequence, and one more.
    found = _run(case, device, max_kv_tokens=64, max_seq_len=longest)
    _compare(found, _right(case, device), _rows(case, 0, 1, 3), exact=True)


@pytest.mark.parametrize("window", [INT32_MAX, 2**30])
@pytest.mark.parametrize("kernel", ["dense", "fused", "split", ""])
def test_a_window_that_reaches_every_key_is_none(kernel: str, window: int, device: str) -> None:
    every = replace(PREFILL, kernel=kernel, causal=False)
    found = _run(replace(every, window_left=window, window_right=window), device)
    _compare(found, _right(every, device), _rows(every, 0, 1, 2, 3), exact=True)


def test_a_schedule_of_few_tiles_ends_with_its_last_tile(device: str) -> None:
    """A program places eight tiles: here one, and seven that there are not."""
    _run(replace(PREFILL, kernel="dense", q_lens=(8,), lens=(8,), gqa_ratio=1), device)


def test_descales_of_slots_without_a_token_are_not_looked_at(device: str) -> None:
    q, kv, table, starts = PrefillCase.small(granularity="token_head").build(device)
    assert isinstance(kv.k_descale, torch.Tensor)
    kv.k_descale[table.page_ids[2, 4].long(), 6:] = math.nan  # behind the last of 70 tokens
    batch_prefill(q, kv, table, starts, validate=True)


@pytest.mark.parametrize("bound", [{"max_kv_tokens": 64}, {"max_seq_len": 64}], ids=str)
@pytest.mark.parametrize("kernel", ["dense", "append_then_attend"])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_whose_keys_the_scratch_lacks_are_nan_and_never_zeros(
    splits: int, kernel: str, bound: dict[str, int], device: str
) -> None:
    """A captured graph cannot raise; numbers over some of the keys would pass for a result."""
    case = replace(APPEND if kernel != "dense" else PREFILL, kernel=kernel)
    case = replace(case, lens=(40, 5, 300, 33))
    o, lse, *_ = _run(case, device, splits, **bound)
    last = _rows(case, 2)[-1:]  # its row sees all of 300 keys
    assert bool(o[last].isnan().all())
    assert bool(lse[last].isnan().all())
    assert not bool(o[_rows(case, 0, 1, 3)].isnan().any())
    with pytest.raises(ValueError, match=f"{next(iter(bound))} must be at least"):
        _run(case, device, splits, validate=True, **bound)

"""Decode over ranks, in processes of their own with gloo between them."""

from __future__ import annotations

import pytest
import rank_faults
from torch.multiprocessing import ProcessExitedException

from narrowkv.context_parallel.cases import CASES, check_cases
from narrowkv.context_parallel.ranks import run_ranks
from narrowkv.testing.covering import covering, values_of

AXES = ("interleave", "own_pages", "window", "comm", "partial_dtype", "heads", "head_groups")
four, eight = (pytest.param(world, marks=pytest.mark.slow) for world in (4, 8))


def test_a_world_of_one_needs_no_group() -> None:
    for checked in check_cases():
        assert checked.passed, checked
        assert checked.sent_bytes == 0


def names_for(world: int) -> tuple[str, ...]:
    """Two ranks run every case, three every kind of layout and exchange, four and more all but long ones."""
    if world == 2:
        return ()
    if world > 3:
        return tuple(case.name for case in CASES if case.workload.q_len < 8)
    kinds = [frozenset().union(*(values_of(axis, getattr(case, axis)) for axis in AXES)) for case in CASES]
    return tuple(CASES[index].name for index in covering(kinds))


@pytest.mark.parametrize("world", [2, 3, four, eight])
def test_every_case_equals_one_gpu(world: int) -> None:
    names = names_for(world)
    ranks = run_ranks(check_cases, world, names, timeout_s=240)
    assert len(ranks) == world
    for rank, checks in enumerate(ranks):
        assert len(checks) == (len(names) or len(CASES))
        for checked in checks:
            assert checked.passed, (rank, checked)
            assert checked.sent_bytes > 0
            # A check that compared a rank with itself would have no error at all.
            assert checked.error > 0


def test_a_mismatch_or_an_error_of_one_rank_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(rank_faults.every_fault, 2, timeout_s=30)
    matches = (
        "interleave must be the same on every rank",
        "head_groups must divide",
        "layout must be for rank",
    )
    for one, other, match in zip(first, second, matches, strict=False):
        assert match in one
        assert match in other
    assert first[3] == "ValueError: something of rank 0"
    assert second[3] == "ValueError: rank 0 of the group refused the call: something of rank 0"
    assert (
        first[4]
        == second[4]
        == "ValueError: number must be the same on every rank of the group: rank 0 has 0, rank 1 has 1"
    )


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(ProcessExitedException, match="exit code 7"):
        run_ranks(rank_faults.one_dies, 3, timeout_s=20)

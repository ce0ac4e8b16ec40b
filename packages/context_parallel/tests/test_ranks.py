"""Decode over ranks, in processes of their own with gloo between them."""

from __future__ import annotations

import pytest
import rank_faults
from torch.multiprocessing import ProcessExitedException

from narrowkv.context_parallel.cases import CASES, check_cases
from narrowkv.context_parallel.ranks import run_ranks

eight = pytest.param(8, marks=pytest.mark.slow)


def test_a_world_of_one_needs_no_group() -> None:
    for checked in check_cases():
        assert checked.passed, checked
        assert checked.sent_bytes == 0


@pytest.mark.parametrize("world", [2, 3, 4, eight])
def test_every_case_equals_one_gpu(world: int) -> None:
    names = () if world < 4 else tuple(case.name for case in CASES if case.workload.q_len < 8)
    ranks = run_ranks(check_cases, world, names, timeout_s=240)
    assert len(ranks) == world
    for rank, checks in enumerate(ranks):
        assert len(checks) == (len(names) or len(CASES))
        for checked in checks:
            assert checked.passed, (rank, checked)
            assert checked.sent_bytes > 0
            # A check that compared a rank with itself would have no error at all.
            assert checked.error > 0


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (rank_faults.different_interleaves, "interleave must be the same on every rank"),
        (rank_faults.one_refuses, "head_groups must divide"),
        (rank_faults.wrong_world, "layout must be for rank"),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(fault: object, match: str) -> None:
    for told in run_ranks(fault, 2, timeout_s=30):  # type: ignore[arg-type]
        assert match in told, told


def test_an_error_on_one_rank_reaches_all() -> None:
    first, second = run_ranks(rank_faults.errors_of_agreement, 2, timeout_s=30)
    assert first[0] == "ValueError: something of rank 0"
    assert second[0] == "ValueError: rank 0 of the group refused the call: something of rank 0"
    assert (
        first[1]
        == second[1]
        == ("ValueError: number must be the same on every rank of the group: rank 0 has 0, rank 1 has 1")
    )


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(ProcessExitedException, match="exit code 7"):
        run_ranks(rank_faults.one_dies, 3, timeout_s=20)

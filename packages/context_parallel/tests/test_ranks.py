"""Every operation over ranks, in processes of their own with gloo between them."""

from __future__ import annotations

import pytest
import rank_faults
import rank_work
import torch
from torch.multiprocessing import ProcessExitedException

from narrowkv.context_parallel import PrefillShares, ShardLayout
from narrowkv.context_parallel.cases import CASES, check_cases
from narrowkv.context_parallel.ranks import run_ranks
from narrowkv.testing.covering import covering, values_of

AXES = ("interleave", "own_pages", "window", "comm", "partial_dtype", "heads", "head_groups")
four, eight = (pytest.param(world, marks=pytest.mark.slow) for world in (4, 8))


def test_a_world_of_one_needs_no_group() -> None:
    for checked in check_cases():
        assert checked.passed, checked
        assert checked.sent_bytes == 0


def cases_for(world: int) -> tuple[str, ...]:
    """Two ranks run every case, three every kind of layout and exchange, four and more all but long ones."""
    if world == 2:
        return tuple(case.name for case in CASES)
    if world > 3:
        return tuple(case.name for case in CASES if case.workload.q_len < 8)
    kinds = [frozenset().union(*(values_of(axis, getattr(case, axis)) for axis in AXES)) for case in CASES]
    return tuple(CASES[index].name for index in covering(kinds))


PREFILLS = {
    2: tuple(rank_work.PREFILLS),
    3: ("a prompt", "a chunk by a ring, own pages", "fewer tokens than blocks"),
    4: tuple(rank_work.PREFILLS),
    8: (),
}


@pytest.mark.parametrize("world", [2, 3, four, eight])
def test_ranks_equal_one_gpu(world: int) -> None:
    """All that these ranks are asked for, in one set of processes: it takes seconds to start them."""
    names = cases_for(world)
    # Three ranks have no number of heads that a sparse kernel takes; two show what Sage and faults do.
    sparse, sage, faults = world in (2, 4), world in (2, 4), world == 2
    work = names, PREFILLS[world], sparse, sage, faults
    ranks = run_ranks(rank_work.everything, world, *work, timeout_s=240)
    bound = 2 * rank_work.one_gpu_error()
    assert len(ranks) == world
    for rank, found in enumerate(ranks):
        assert len(found["decode"]) == len(names)
        for checked in found["decode"]:
            assert checked.passed, (rank, checked)
            assert checked.sent_bytes > 0
            # A check that compared a rank with itself would have no error at all.
            assert checked.error > 0
        assert set(found["prefill"]) == set(PREFILLS[world])
        for name, (error, differs) in found["prefill"].items():
            assert error <= bound, name
            assert differs == 0, name
        # The result is rounded to bf16 once more than one rank's in fp32.
        assert set(found["sparse"]) == ({"bf16 decode", "FP8 prefill"} if sparse else set())
        assert all(difference <= 2.0**-8 for difference in found["sparse"].values())
        assert set(found["sage"]) == ({"full", "causal"} if sage else set())
        for error, one in found["sage"].values():
            assert error <= 2 * one
    if faults:
        check_what_ranks_are_told(*(found["faults"] for found in ranks))


def check_what_ranks_are_told(first: list[str], second: list[str]) -> None:
    """A mismatch, or an error of one rank, is an error on every rank."""
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
    differs = "ValueError: number must be the same on every rank of the group: rank 0 has 0, rank 1 has 1"
    assert first[4] == second[4] == differs


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(ProcessExitedException, match="exit code 7"):
        run_ranks(rank_faults.one_dies, 2, timeout_s=20)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_shares_are_every_token_once_and_equal_work(world: int) -> None:
    new_lens = (100, 0, 3, 41)
    rows, work = [], []
    for rank in range(world):
        shares = PrefillShares(ShardLayout(world, rank), new_lens)
        rows.append(shares.rows())
        work.append(sum(p + 1 for early, late in shares.blocks(rank)[:1] for p in (*early, *late)))
        places, first_pages = shares.places(rank)
        assert len(set(places.tolist())) == len(rows[-1])
        assert places.numel() == 0 or int(places.max()) < shares.most_pages * 16
        assert first_pages.shape == (len(new_lens),)
    assert sorted(torch.cat(rows).tolist()) == list(range(sum(new_lens)))
    assert max(work) - min(work) <= 100


def test_shares_refuse_negative_lengths() -> None:
    with pytest.raises(ValueError, match="new_lens must be numbers"):
        PrefillShares(ShardLayout(2, 0), [3, -1])

"""Every operation over ranks, in processes of their own with gloo between them."""

from __future__ import annotations

import pytest
import rank_work
from rank_work import PREFILLS
from torch.multiprocessing import ProcessExitedException

from narrowkv.context_parallel.ranks import run_ranks
from narrowkv.testing.cases.context_parallel import CASES, check_cases
from narrowkv.testing.covering import covering, values_of

AXES = ("interleave", "own_pages", "window", "comm", "partial_dtype", "heads", "head_groups")
ALL = tuple(case.name for case in CASES)
SHORT = tuple(case.name for case in CASES if case.workload.q_len < 8)
# Cases with every kind of layout and exchange: for three ranks; two take what is left.
KINDS = tuple(
    CASES[index].name
    for index in covering(
        [frozenset().union(*(values_of(axis, getattr(case, axis)) for axis in AXES)) for case in CASES]
    )
)
PREFILLS_OF_THREE = ("a prompt", "a chunk by a ring, own pages", "fewer tokens than blocks")
# What ranks are told, in part, where they ask for different things.
MISMATCHES = (
    "interleave must be the same on every rank",
    "head_groups must divide",
    "layout must be for rank",
)
WRONG_PREFILLS = (
    "out must have shape", "out must not share memory with cache.k", "sinks must have shape",
    "window_left must be", "logits_soft_cap must be", "sm_scale must be finite",
    "dtype of q must be the same on every rank", "sm_scale must be the same",
    "logits_soft_cap must be the same", "q must have a multiple of the cache's 2 KV heads",
    "page_table must have page_size", "page_table must be of the whole", "slot_mapping must be on cpu like k",
    "out must not share memory with cache.k", "out must not share memory with q",
    "cache.v must not share memory with k_new",
)  # fmt: skip
WRONG_CHUNKS = (
    "ValueError: out must not share memory with q", "ValueError: out must not share memory with cache.v",
    "ValueError: sinks must have shape", "TypeError: sinks must have dtype",
    "ValueError: out_dtype must be one of",
)  # fmt: skip
OVERLAPS = (
    "out must not share memory with q",
    "out must not share memory with lse",
    "lse must not share memory with sinks",
    "out must not share memory with cache.k",
)


def test_a_world_of_one_needs_no_group() -> None:
    for checked in check_cases():
        assert checked.passed, checked
        assert checked.sent_bytes == 0


def left(names: tuple[str, ...], taken: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in taken)


@pytest.mark.parametrize(
    ("world", "decodes", "prefills", "others"),
    [
        # Three ranks have no number of heads that a sparse kernel takes; two show what Sage and faults do.
        pytest.param(2, left(ALL, KINDS), left(tuple(PREFILLS), PREFILLS_OF_THREE), True, id="2"),
        pytest.param(3, KINDS, PREFILLS_OF_THREE, False, id="3"),
        pytest.param(2, KINDS, PREFILLS_OF_THREE, False, id="the cases of 3 by 2", marks=pytest.mark.slow),
        pytest.param(4, SHORT, tuple(PREFILLS), True, id="4", marks=pytest.mark.slow),
        pytest.param(8, SHORT, (), False, id="8", marks=pytest.mark.slow),
    ],
)
def test_ranks_equal_one_gpu(
    world: int, decodes: tuple[str, ...], prefills: tuple[str, ...], others: bool
) -> None:
    """All that these ranks are asked for, in one set of processes: it takes seconds to start them."""
    ranks = run_ranks(rank_work.everything, world, decodes, prefills, others, timeout_s=240)
    bound = 2 * rank_work.one_gpu_error()
    assert len(ranks) == world
    for rank, found in enumerate(ranks):
        assert [checked.name for checked in found["decode"]] == list(decodes)
        for checked in found["decode"]:
            assert checked.passed, (rank, checked)
            assert checked.sent_bytes > 0
            # A check that compared a rank with itself would have no error at all.
            assert checked.error > 0
        assert list(found["prefill"]) == list(prefills)
        for name, (error, is_stored) in found["prefill"].items():
            assert error <= bound, name
            assert is_stored, name
        # The result is rounded to bf16 once more than one rank's in fp32.
        assert set(found["sparse"]) == ({"bf16 decode", "FP8 prefill"} if others else set())
        assert all(difference <= 2.0**-8 for difference in found["sparse"].values())
        assert set(found["sage"]) == ({"full", "causal"} if others else set())
        assert all(error <= 2 * one for error, one in found["sage"].values())
        if others:
            *told, failed, differs = found["faults"]
            assert all(match in message for match, message in zip(MISMATCHES, told, strict=True))
            refused = "rank 0 of the group refused the call: " if rank else ""
            assert failed == f"ValueError: {refused}something of rank 0"
            message = "number must be the same on every rank of the group: rank 0 has 0, rank 1 has 1"
            assert differs.startswith(f"ValueError: {message}")


def test_what_ranks_refuse() -> None:
    """Results over what a rank reads, in a first and in a later decode; prefills that one rank refuses."""
    for rank, (overlaps, prefills, chunks) in enumerate(run_ranks(rank_work.refusals, 2, timeout_s=60)):
        count = len(OVERLAPS)
        first, apart, later = overlaps[:count], overlaps[count : 2 * count], overlaps[2 * count :]
        assert apart == ["nothing"] * count
        for match, *messages in zip(OVERLAPS, first, later, strict=True):
            assert all(match in message for message in messages), messages
        refused = "rank 0 of the group refused the call: " if rank else ""
        for match, message in zip(WRONG_PREFILLS, prefills, strict=True):
            told = match if "the same" in match else refused + match
            assert message.startswith(f"ValueError: {told}")
        for match, message in zip(WRONG_CHUNKS, chunks, strict=True):
            assert message.startswith(match)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(ProcessExitedException, match="exit code 7"):
        run_ranks(rank_work.one_dies, 2, timeout_s=20)

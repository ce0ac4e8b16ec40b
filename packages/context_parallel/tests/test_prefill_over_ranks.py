"""Prefill, sparse attention and Sage over ranks, in processes with gloo between them."""

from __future__ import annotations

import pytest
import rank_work
import torch

from narrowkv.context_parallel import PrefillShares, ShardLayout
from narrowkv.context_parallel.ranks import run_ranks


@pytest.mark.parametrize(
    ("world", "prefills"),
    [
        (2, tuple(rank_work.PREFILLS)),
        (3, ("a prompt", "a chunk by a ring, own pages", "fewer tokens than blocks")),
        pytest.param(4, tuple(rank_work.PREFILLS), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_ranks_equal_one_gpu(world: int, prefills: tuple[str, ...]) -> None:
    for found in run_ranks(rank_work.everything, world, prefills, timeout_s=240):
        bound = 2 * found["one GPU"]
        for name, (error, differs) in found["prefill"].items():
            assert error <= bound, name
            assert differs == 0, name
        # The result is rounded to bf16 once more than one rank's in fp32.
        assert set(found["sparse"]) == (set() if world == 3 else {"bf16 decode", "FP8 prefill"})
        assert all(difference <= 2.0**-8 for difference in found["sparse"].values())
        for error, one in found["sage"].values():
            assert error <= 2 * one


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

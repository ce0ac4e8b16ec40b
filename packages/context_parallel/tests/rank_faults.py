"""What ranks do wrong; each function runs on every rank and returns what it was told."""

from __future__ import annotations

import os
from dataclasses import replace

import torch.distributed as dist

from narrowkv.context_parallel import cp_paged_decode
from narrowkv.context_parallel.cases import CASES, plan_case
from narrowkv.context_parallel.groups import agreement, group_of


def different_interleaves() -> str:
    """Rank 1 deals tokens in other runs."""
    case = replace(CASES[0], interleave=4 if dist.get_rank() else 2)
    return _told(lambda: plan_case(case, dist.get_rank(), dist.get_world_size()))


def one_refuses() -> str:
    """Rank 1 alone asks for head groups that there are not."""
    case = replace(CASES[0], head_groups=3 if dist.get_rank() else 1)
    return _told(lambda: plan_case(case, dist.get_rank(), dist.get_world_size()))


def wrong_world() -> str:
    """Every rank has a layout of more ranks than there are."""
    return _told(lambda: plan_case(CASES[0], dist.get_rank(), dist.get_world_size() + 1))


def one_dies() -> str:
    """Rank 1 ends between two steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, shard, plan = plan_case(CASES[0], rank, world)
    cp_paged_decode(q, shard.cache, shard.table, plan=plan)
    if rank == 1:
        os._exit(7)
    return _told(lambda: cp_paged_decode(q, shard.cache, shard.table, plan=plan))


def every_fault() -> list[str]:
    """Mismatches between ranks, an error in one rank's block, then ranks that differ."""
    group = group_of(None)

    def fails() -> None:
        with agreement(group):
            if dist.get_rank() == 0:
                raise ValueError("something of rank 0")

    def differs() -> None:
        with agreement(group) as equal:
            equal["number"] = dist.get_rank()

    mismatches = different_interleaves(), one_refuses(), wrong_world()
    return [*mismatches, _told(fails), _told(differs)]


def _told(work: object) -> str:
    assert callable(work)
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

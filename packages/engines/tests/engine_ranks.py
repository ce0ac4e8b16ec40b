"""Steps of an engine with decode context parallelism; runs on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from engine_checks import attention

from narrowkv.attn_decode import DecodeShape
from narrowkv.context_parallel import ShardLayout
from narrowkv.engines import ranks as engine_ranks
from narrowkv.engines import steps as engine_steps
from narrowkv.engines.ranks import Ranks, RanksStep, attend_over_ranks
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.quant import KeyTransform, relative_l1
from narrowkv.runtime.errors import UnsupportedError

PAGE, HEADS, DIM = 16, 2, 64
OLDER = (37, 0, 5)


def steps(interleave: int, comm: str, *, rotated: bool = False) -> dict[str, float]:
    """A chunk of a prompt, then decode steps, in a paged engine's terms; relative errors against float32."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)
    layout = ShardLayout(world, rank, interleave)
    ranks = Ranks(layout, dist.group.WORLD, comm)
    shape = DecodeShape(
        batch=4, q_len=3, num_qo_heads=HEADS * world, num_kv_heads=1, head_dim=DIM, page_size=PAGE,
        capacity=256,
    )  # fmt: skip
    engine_ranks._exchanges.clear()
    engine_steps._workspaces.clear()
    engine_steps.reserve_decode(shape, "bf16", torch.device("cpu"))
    ranks.reserve(shape, torch.device("cpu"))
    reserved = [engine_steps._workspaces.copy(), engine_ranks._exchanges.copy()]
    covers = PAGE * world
    lens = list(OLDER)
    width = -(-(max(lens) + 40) // covers)
    block_table = torch.randperm(len(lens) * width, generator=random).view(len(lens), -1).int()
    cache = PagedKVCache.empty(block_table.numel(), PAGE, 1, DIM, format="bf16")
    if rotated:  # as UltraQuant's slots
        cache = replace(cache, key_transform=KeyTransform())
    k, v = ([torch.zeros(0, 1, DIM).bfloat16() for _ in lens] for _ in range(2))

    def store(counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens into the cache, where the engine's slots say; returns them."""
        new = []
        slots = []
        for seq, count in enumerate(counts):
            rows = torch.randn(2, count, 1, DIM, generator=random).bfloat16()
            positions = torch.arange(k[seq].shape[0], k[seq].shape[0] + count)
            slots.append(block_table[seq, positions // covers].long() * covers + positions % covers)
            k[seq], v[seq] = torch.cat([k[seq], rows[0]]), torch.cat([v[seq], rows[1]])
            new.append(rows)
        both = torch.cat(new, 1)
        append(cache, both[0], both[1], layout.local_slots(torch.cat(slots), PAGE))
        return both[0], both[1]

    def step(name: str, counts: tuple[int, ...], window: int = -1, *, sinks: bool = False) -> None:
        k_new, v_new = store(counts)
        q = torch.randn(sum(counts), HEADS * world, DIM, generator=random).bfloat16()
        sink = torch.linspace(-1, 1, HEADS * world) if sinks else None
        own = slice(rank * HEADS, (rank + 1) * HEADS)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        table = PageTable.from_block_table(
            block_table, torch.tensor([len(each) for each in k]).int(), page_size=covers
        )
        out = torch.empty(sum(counts), HEADS, DIM, dtype=torch.bfloat16)
        attend_over_ranks(
            RanksStep(sum(counts), max(counts), max(map(len, k)), starts, table), q[:, own], k_new, v_new,
            cache, out, ranks=ranks, max_batch=4, window_left=window,
            sinks=None if sink is None else sink[own], sm_scale=DIM**-0.5, logits_soft_cap=0.0,
        )  # fmt: skip
        expected = [
            attention(rows, k[seq], v[seq], DIM**-0.5, window=window, sinks=sink)[0]
            for seq, rows in enumerate(q.split(counts))
        ]
        found[name] = relative_l1(out, torch.cat(expected)[:, own])

    found: dict[str, float] = {}
    store(OLDER)
    step("a chunk of a prompt", (9, 30, 0), sinks=True)
    step("a token", (1, 1, 1), sinks=True)
    step("another token, by the same plan", (1, 1, 1))
    step("speculative tokens", (3, 3, 3))
    step("a token in a window", (1, 1, 1), window=7)
    plans = len(ranks.plans)
    assert plans == 3, plans
    # What was reserved serves every step: nothing was allocated after an engine has measured its memory.
    assert reserved == [engine_steps._workspaces, engine_ranks._exchanges]
    for plan in ranks.plans.values():
        held = [plan.exchange, *(each.workspace for each in plan.local)]
        assert {id(each) for each in held} <= {id(each) for kept in reserved for each in kept.values()}
    try:
        step("a chunk in a window", (9, 2, 1), window=7)
    except UnsupportedError:
        found["a chunk in a window"] = 0.0
    return found


def every_step() -> list[dict[str, float]]:
    """The steps by each exchange; by one of them over keys that are rotated."""
    return [steps(1, "a2a"), steps(16, "ag_rs", rotated=True)]

"""What ranks do: operations compared with one GPU's, and mistakes; each function runs on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from narrowkv.attn_prefill import batch_prefill
from narrowkv.context_parallel import (
    PrefillShares,
    ShardLayout,
    cp_chunk_attention,
    cp_paged_decode,
    cp_prefill,
    cp_sparse_attention,
    merge_over_ranks,
    ring_sage_attention,
)
from narrowkv.context_parallel.groups import agreement, group_of
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.quant import relative_l1
from narrowkv.runtime.attention.reference import attention_reference
from narrowkv.sage import sage_attention
from narrowkv.sparse_fp8 import DSV4Rows, KVSource, sparse_decode, sparse_prefill_fp8
from narrowkv.testing.cases.context_parallel import CASES, check_cases, plan_case

PAGE = 4


@dataclass(frozen=True)
class Prefill:
    """New tokens of each sequence behind older ones, which the cache holds already."""

    older: tuple[int, ...]
    new: tuple[int, ...]
    comm: str = "all_gather"
    interleave: int = PAGE
    own_pages: bool = False
    window: int = -1
    sinks: bool = False
    format: str = "bf16"


PREFILLS = {
    "a prompt": Prefill((0, 0), (37, 5)),
    "a prompt by a ring, sinks": Prefill((0, 0), (37, 2), "ring", sinks=True),
    "a chunk": Prefill((21, 0), (9, 16)),
    "a chunk by a ring, own pages": Prefill((8, 33), (11, 4), "ring", own_pages=True),
    "a chunk in a window": Prefill((21, 3), (9, 14), window=6, interleave=1),
    "fewer tokens than blocks": Prefill((5, 0, 7), (1, 0, 2), sinks=True),
    "an FP8 cache": Prefill((13, 2), (6, 5), format="fp8_e4m3fn"),
}


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, **options: Any) -> tuple[Any, Any]:
    """Causal attention in float32 of queries at `first` and later places: the result, and its lse."""
    options = {"logits_soft_cap": 0.0, "window_left": -1, "window_right": 0, "sinks": None, **options}
    places = torch.arange(first, first + q.shape[0])
    return attention_reference(q, k.float(), v.float(), places, sm_scale=64**-0.5, **options)


def prefill(name: str) -> tuple[float, bool]:
    """A chunk over ranks: relative error against float32, and whether the cache has the right bytes."""
    case = PREFILLS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = ShardLayout(world, rank, case.interleave)
    random = torch.Generator().manual_seed(3)
    totals = [a + b for a, b in zip(case.older, case.new, strict=True)]
    q = torch.randn(sum(case.new), 4, 64, generator=random).bfloat16()
    k, v = (torch.randn(sum(totals), 2, 64, generator=random).bfloat16() for _ in range(2))
    covers = PAGE if case.own_pages else PAGE * world
    width = -(-max(totals) // covers)
    ids = torch.randperm(len(totals) * width, generator=random).view(len(totals), -1)
    seqs = torch.repeat_interleave(torch.arange(len(totals)), torch.tensor(totals))
    positions = torch.cat([torch.arange(n) for n in totals])
    slots = ids[seqs, positions // covers] * covers + positions % covers
    is_new = positions >= torch.tensor(case.older)[seqs]

    def cache_of(tokens: torch.Tensor) -> PagedKVCache:
        """This rank's cache with some of the tokens."""
        descales = {"k_descale": 0.02, "v_descale": 0.02}
        made = PagedKVCache.empty(ids.numel(), PAGE, 2, 64, format=case.format, **descales)
        where = positions[tokens] if case.own_pages else None
        append(made, k[tokens], v[tokens], layout.local_slots(slots[tokens], PAGE, positions=where))
        return made

    cache, expected_cache = cache_of(~is_new), cache_of(torch.ones_like(is_new))
    table = PageTable.from_block_table(ids, cached_lens=torch.tensor(case.older), page_size=covers)
    shares = PrefillShares(layout, case.new, older=any(case.older))
    mine = shares.rows()
    sinks = torch.linspace(-1, 1, 4) if case.sinks else None
    o = cp_prefill(
        q[mine], k[is_new][mine], v[is_new][mine], cache, table, shares=shares, slot_mapping=slots[is_new],
        comm=case.comm, sinks=sinks, window_left=case.window,
    )  # fmt: skip
    pairs = (cache.k, expected_cache.k), (cache.v, expected_cache.v)
    is_stored = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    # Older tokens were stored in the cache's format; new ones are exact.
    seen_k, seen_v = (x.float() if case.format == "bf16" else _with_older_in_fp8(x, is_new) for x in (k, v))
    expected = [
        exact(rows, seen_k[seqs == seq], seen_v[seqs == seq], first, window_left=case.window, sinks=sinks)[0]
        for seq, (first, rows) in enumerate(zip(case.older, q.split(case.new), strict=True))
    ]
    wanted = torch.cat(expected)[mine]
    return relative_l1(o, wanted) if mine.numel() else 0.0, is_stored


def _with_older_in_fp8(x: torch.Tensor, is_new: torch.Tensor) -> torch.Tensor:
    """Tokens as an FP8 cache of descale 0.02 holds the older of them."""
    cache = PagedKVCache.empty(x.shape[0], 1, 2, 64, format="fp8_e4m3fn", k_descale=0.02, v_descale=0.02)
    append(cache, x, x, torch.arange(x.shape[0]))
    return torch.where(is_new[:, None, None], x.float(), cache.dequantize()[0][:, 0])


def one_gpu_error() -> float:
    """Relative error of one GPU's prefill in bf16, which bounds are made of."""
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(40, heads, 64, generator=random).bfloat16() for heads in (4, 2, 2))
    cache = PagedKVCache.from_tensors(k[:, None], v[:, None], format="bf16")
    table = PageTable.from_block_table(torch.arange(40)[None], torch.tensor([40]), page_size=1)
    o = batch_prefill(q, cache, table, torch.tensor([0, 40], dtype=torch.int32))
    assert isinstance(o, torch.Tensor)
    return relative_l1(o, exact(q, k, v, 0)[0])


def sparse() -> dict[str, float]:
    """Decode and FP8 prefill over a pool whose rows are dealt to ranks: differences from one rank's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(5)
    heads, tokens = 8 * world, 3
    rows = torch.randn(40, 512, generator=random)
    q = torch.randn(tokens, heads, 512, generator=random).bfloat16()
    sink = torch.linspace(-1, 1, heads)
    indptr = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    indices = torch.randint(-1, 40, (20,), generator=random).int()
    layout = ShardLayout(world, rank, 4)
    own = layout.globalize(torch.arange(layout.local_lens(40)))
    mine = slice(rank * heads // world, (rank + 1) * heads // world)
    found = {}
    for name, attend, pool, part in (
        ("bf16 decode", sparse_decode, rows.bfloat16(), rows[own].bfloat16()),
        ("FP8 prefill", sparse_prefill_fp8, DSV4Rows.quantize(rows, layout="split"),
         DSV4Rows.quantize(rows[own], layout="split")),
    ):  # fmt: skip
        whole, whole_lse = attend(
            q, KVSource(pool, indptr, indices), attn_sink=sink, return_lse=True,
            out=torch.empty(q.shape, dtype=torch.float32),
        )  # fmt: skip
        o, lse = cp_sparse_attention(
            q[:, mine].contiguous(), KVSource(part, indptr, indices), layout=layout, attend=attend,
            attn_sink=sink[mine],
        )  # fmt: skip
        torch.testing.assert_close(lse, whole_lse[:, mine], rtol=1e-3, atol=1e-3)
        found[name] = relative_l1(o, whole[:, mine])
    return found


def sage() -> dict[str, tuple[float, float]]:
    """Sage over a ring: relative error against float32, and that of one GPU's Sage."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 24 * world, heads, 64, generator=random).bfloat16() for heads in (2, 1, 1))
    mine = slice(24 * rank, 24 * (rank + 1))
    found = {}
    for causal in (False, True):
        (o, lse), (again, _) = (
            ring_sage_attention(q[:, mine], k[:, mine], v[:, mine], causal=causal, qk_dtype="int8")
            for _ in range(2)
        )
        assert torch.equal(o, again)
        alone = sage_attention(q, k, v, causal="top_left" if causal else None, qk_dtype="int8")
        expected, log_sum = exact(q[0], k[0], v[0], 0, window_right=0 if causal else -1)
        assert isinstance(alone, torch.Tensor)
        torch.testing.assert_close(lse[0], log_sum[mine], rtol=2e-2, atol=2e-2)
        errors = relative_l1(o[0], expected[mine]), relative_l1(alone[0, mine], expected[mine])
        found["causal" if causal else "full"] = errors
    return found


def one_dies() -> str:
    """Rank 1 ends between two steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, shard, plan = plan_case(CASES[0], rank, world)
    cp_paged_decode(q, shard.cache, shard.table, plan=plan)
    if rank == 1:
        os._exit(7)
    return _told(lambda: cp_paged_decode(q, shard.cache, shard.table, plan=plan))


def faults() -> list[str]:
    """What each rank is told of ranks that ask for different things, and of an error of rank 0 alone."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def agree(**values: int) -> None:
        with agreement(group_of(None)) as equal:
            equal.update(values)
            if rank == 0 and not values:
                raise ValueError("something of rank 0")

    return [
        _told(lambda: plan_case(replace(CASES[0], interleave=4 if rank else 2), rank, world)),
        _told(lambda: plan_case(replace(CASES[0], head_groups=3 if rank else 1), rank, world)),
        _told(lambda: plan_case(CASES[0], rank, world + 1)),
        _told(agree),
        _told(lambda: agree(number=rank)),
    ]


def wrong_prefills() -> list[str]:
    """What each rank is told where rank 0 alone passes something wrong, before any token is sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = ShardLayout(world, rank, PAGE)
    shares = PrefillShares(layout, (8,), older=True)
    tokens = shares.rows().numel()
    q, k, v = (torch.zeros(tokens, heads, 64).bfloat16() for heads in (4, 2, 2))
    cache = PagedKVCache.empty(4, PAGE, 2, 64, format="bf16")
    table = PageTable.from_block_table(
        torch.zeros(1, 4, dtype=torch.int32), cached_lens=torch.zeros(1, dtype=torch.int32),
        page_size=PAGE * world,
    )  # fmt: skip
    inside = cache.k.flatten()[: q.numel()].view(q.shape)
    wrong: tuple[dict[str, Any], ...] = (
        {"out": q[:, :1]}, {"out": inside}, {"sinks": torch.zeros(5)}, {"window_left": -2},
        {"logits_soft_cap": -1.0}, {"sm_scale": float("nan")},
        # Right on one rank, and other than what the others pass.
        {"q": q.half(), "k_new": k.half(), "v_new": v.half()}, {"sm_scale": 0.5}, {"logits_soft_cap": 30.0},
        {"q": q[:, :1].repeat(1, 3, 1)}, {"page_table": replace(table, page_size=3)},
        {"page_table": table.with_key_ranges(torch.zeros(1, 1, 2, dtype=torch.int32))},
        {"slot_mapping": torch.arange(8, device="meta")},
    )  # fmt: skip
    prefill = partial(cp_prefill, cache=cache, shares=shares)
    right = {"q": q, "k_new": k, "v_new": v, "page_table": table, "slot_mapping": torch.arange(8)}
    told = [_told(partial(prefill, **right | ({} if rank else given))) for given in wrong]
    # Calls that differ from an earlier one in what their results lie over.
    apart = {"out": torch.empty_like(q)}
    assert _told(partial(prefill, **right | apart)) == "nothing"
    stored_over = {"k_new": cache.v.flatten()[: k.numel()].view(k.shape)}
    later: tuple[dict[str, Any], ...] = ({"out": inside}, {"out": q}, apart | stored_over)
    return told + [_told(partial(prefill, **right | (apart if rank else given))) for given in later]


def wrong_chunks() -> list[str]:
    """What every rank is told of wrong results and sinks of other operations, before anything is sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = ShardLayout(world, rank, PAGE)
    q, k, v = (torch.zeros(3, heads, 64).bfloat16() for heads in (4, 2, 2))
    cache = PagedKVCache.empty(4, PAGE, 2, 64, format="bf16")
    table = PageTable.from_block_table(
        torch.zeros(1, 4, dtype=torch.int32), torch.tensor([3], dtype=torch.int32), page_size=PAGE * world
    )
    starts = torch.tensor([0, 3], dtype=torch.int32)
    inside = cache.v.flatten()[: q.numel()].view(q.shape)
    chunk = partial(cp_chunk_attention, q, k, v, cache, table, starts, layout=layout)
    merge = partial(merge_over_ranks, torch.zeros(3, 2 * world, 64), torch.zeros(3, 2 * world))
    return [
        _told(partial(chunk, out=q)),
        _told(partial(chunk, out=inside)),
        _told(partial(chunk, sinks=torch.zeros(3))),
        _told(partial(merge, sinks=torch.zeros(2, dtype=torch.int32))),
        _told(partial(merge, out_dtype=torch.int8)),
    ]


def overlaps() -> list[str]:
    """What a first and a later decode are told of results over queries, each other, sinks or the cache."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, shard, plan = plan_case(CASES[0], rank, world)
    q, heads = q.contiguous(), q.shape[1]
    memory = torch.zeros(q.shape[0] * heads)  # of an lse, with sinks in its first row
    lse, sinks = memory.view(q.shape[0], heads), memory[:heads]
    out = torch.empty_like(q)
    stored = torch.empty(0, dtype=q.dtype).set_(shard.cache.k.untyped_storage())

    def step(**results: Any) -> str:
        return _told(lambda: cp_paged_decode(q, shard.cache, shard.table, plan=plan, **results))

    wrong: tuple[dict[str, Any], ...] = (
        {"out": q}, {"out": out, "lse": out.view(-1).view(torch.float32)[: lse.numel()].view(lse.shape)},
        {"lse": lse, "sinks": sinks}, {"out": stored[: q.numel()].view(q.shape)},
    )  # fmt: skip
    first = [step(**results) for results in wrong]
    apart: tuple[dict[str, Any], ...] = (
        {"out": out}, {"out": out, "lse": lse}, {"lse": lse, "sinks": sinks.clone()},
        {"out": torch.empty_like(q)},
    )  # fmt: skip
    return [*first, *(step(**results) for results in apart), *(step(**results) for results in wrong)]


def refusals() -> tuple[list[str], list[str], list[str]]:
    """All of these in one set of processes."""
    return overlaps(), wrong_prefills(), wrong_chunks()


def _told(work: Callable[[], object]) -> str:
    try:
        work()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def everything(decodes: tuple[str, ...], prefills: tuple[str, ...], others: bool) -> dict[str, Any]:
    """All of it in one set of processes, with the cases of decode and the prefills of these names."""
    return {
        "decode": check_cases(decodes),
        "prefill": {name: prefill(name) for name in prefills},
        "sparse": sparse() if others else {},
        "sage": sage() if others else {},
        "faults": faults() if others else [],
    }

"""Named context-parallel decode steps and seeded shards; tests, `probe cp` and `bench cp` draw from here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from narrowkv.attn_decode import paged_decode, paged_decode_reference
from narrowkv.context_parallel.api import cp_paged_decode
from narrowkv.context_parallel.layout import ShardedTable, ShardLayout
from narrowkv.context_parallel.plan import CPDecodePlan, plan_cp_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.descales import PER_TOKEN_GRANULARITIES
from narrowkv.quant.accuracy import relative_l1
from narrowkv.testing.cases.decode import K8V4, DecodeCase

_I32 = torch.int32
# One more rounding to bf16 on the way, of results that are weighted to sum to one.
_BF16_ROUNDING = 2.0**-8


@dataclass(frozen=True)
class CPCase:
    """A decode step over ranks to build.

    Attributes:
        name: what it is about.
        workload: the step on one GPU; its heads are multiplied by the ranks, so that any number divides them.
        interleave, page_size: of the shards.
        own_pages: each page id belongs to one rank's cache, else ids are shared; see `ShardLayout`.
        window: how many earlier keys a row attends to, or -1. sinks, soft_cap: whether there are any.
        comm, partial_dtype, heads, head_groups: of the plan.
    """

    name: str
    workload: DecodeCase
    interleave: int = 4
    page_size: int = 4
    own_pages: bool = False
    window: int = -1
    sinks: bool = False
    soft_cap: float = 0.0
    comm: str = "a2a"
    partial_dtype: torch.dtype = torch.float32
    heads: str = "sharded"
    head_groups: int = 1


# One token, and none: shards of most ranks are empty.
_SMALL = DecodeCase.small(lens=(41, 1, 0), gqa_ratio=2, num_kv_heads=1, page_size=4)


def _small(**changes: Any) -> DecodeCase:
    return replace(_SMALL, **changes)


_EIGHT = _small(q_len=8, lens=(41, 3, 9))

CASES = (
    CPCase("FP8, interleave of a page", _SMALL),
    CPCase("bf16, interleave 1", _small(format="bf16"), interleave=1),
    CPCase("fp16, two pages of the owner's", _small(format="fp16"), interleave=8, own_pages=True),
    CPCase("E5M2, sinks", _small(format="fp8_e5m2"), sinks=True),
    CPCase("FNUZ, sinks by reduce-scatter", _small(format="fp8_e4m3fnuz"), sinks=True, comm="ag_rs"),
    CPCase("FP4, replicated heads", _small(format="fp4_e2m1"), heads="replicated", sinks=True),
    CPCase("FP4 by groups of 32", _small(format="fp4_e2m1", scale_group=32), interleave=2),
    CPCase("K FP8, V FP4, a window", _small(format=K8V4), window=6, interleave=1),
    CPCase("descale by token", _small(granularity="token_head"), interleave=2, partial_dtype=torch.bfloat16),
    CPCase("descale by sequence", _small(granularity="sequence_head")),
    CPCase("two query tokens, interleave 1", _small(q_len=2), interleave=1, soft_cap=5.0),
    CPCase("three query tokens in a window", _small(q_len=3), interleave=2, window=5, sinks=True),
    CPCase("eight query tokens, reduce-scatter", _EIGHT, interleave=1, comm="ag_rs"),
    CPCase("eight query tokens of pages", _EIGHT, own_pages=True, window=9),
    CPCase("two head groups", _small(num_kv_heads=2), head_groups=2, sinks=True),
    CPCase(
        "two head groups, reduce-scatter, replicated",
        _small(num_kv_heads=4),
        head_groups=2,
        comm="ag_rs",
        heads="replicated",
    ),
    CPCase("bf16 partials by reduce-scatter", _SMALL, comm="ag_rs", partial_dtype=torch.bfloat16),
)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a case.

    Attributes:
        cache: its tokens; unused slots hold NaN.
        whole: the page table of the whole sequences, as an engine has it.
        table: what the layout makes of it.
    """

    cache: PagedKVCache
    whole: PageTable
    table: ShardedTable


def whole_step(case: CPCase, world: int, seed: int = 0) -> tuple[torch.Tensor, PagedKVCache, PageTable]:
    """The step on one GPU: q of all heads, cache, page table."""
    heads = case.workload.num_kv_heads * world
    return replace(case.workload, num_kv_heads=heads).build(seed=seed)


def sinks_of(case: CPCase, num_heads: int) -> torch.Tensor | None:
    """Sinks of all heads, or None."""
    return torch.linspace(-2.0, 2.0, num_heads) if case.sinks else None


def spread(
    cache: PagedKVCache, table: PageTable, layout: ShardLayout, *, page_size: int, own_pages: bool,
    q_len: int = 1, window_left: int = -1, seed: int = 0,
) -> Shard:  # fmt: skip
    """A rank's shard of a cache that one GPU holds, byte for byte, with its own pages, shuffled.

    All ranks that pass the same seed make shards that go together. Descales must be per token, or shared by
    all of a sequence's tokens.
    """
    random = torch.Generator().manual_seed(seed)
    lens = table.seq_lens_tensor().cpu()
    covers = page_size * (1 if own_pages else layout.world)
    width = max(-(-int(lens.max()) // covers), 1) if lens.numel() else 1
    num_pages = lens.shape[0] * width + 2
    ids = torch.randperm(num_pages, generator=random)[: lens.shape[0] * width].view(-1, width)
    ids = ids.to(cache.k.device, _I32)
    whole = PageTable.from_block_table(ids, lens.to(ids), page_size=covers)
    tokens, places = [], []
    for seq, length in enumerate(lens.tolist()):
        position = torch.arange(length, device=ids.device)
        position = position[layout.owner(position) == layout.rank]
        pages, _ = table.pages_of(seq)
        tokens.append(pages[position // table.page_size] * table.page_size + position % table.page_size)
        at = position if own_pages else layout.localize(position)
        places.append(ids[seq, at // page_size].long() * page_size + at % page_size)
    source, target = torch.cat(tokens), torch.cat(places)
    sides = []
    for stored, descale, kind in zip(
        cache.logical(), (cache.k_descale, cache.v_descale), (cache.k_granularity, cache.v_granularity),
        strict=True,
    ):  # fmt: skip
        if isinstance(descale, torch.Tensor) and kind in PER_TOKEN_GRANULARITIES:
            descale = _moved(descale, num_pages, page_size, source, target)
        sides.append((_moved(stored, num_pages, page_size, source, target), descale, kind))
    (k, k_descale, k_kind), (v, v_descale, v_kind) = sides
    shard = PagedKVCache.from_tensors(
        k, v, format=cache.format, k_descale=k_descale, v_descale=v_descale,
        k_granularity=k_kind if isinstance(k_descale, torch.Tensor) else None,
        v_granularity=v_kind if isinstance(v_descale, torch.Tensor) else None,
        k_tensor_scale=cache.k_tensor_scale, v_tensor_scale=cache.v_tensor_scale,
    )  # fmt: skip
    return Shard(shard, whole, layout.shard_table(whole, page_size, q_len=q_len, window_left=window_left))


def _moved(
    stored: torch.Tensor, num_pages: int, page_size: int, source: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Tokens of `[pages, page, ...]` in other pages.

    Every other byte is 0xFF, which is NaN in each format that has one.
    """
    flat = stored.contiguous()
    raw = flat.view(torch.uint8).flatten(0, 1)
    moved = torch.full((num_pages * page_size, *raw.shape[1:]), 0xFF, dtype=torch.uint8, device=raw.device)
    moved[target] = raw[source]
    return moved.view(stored.dtype).view(num_pages, page_size, *stored.shape[2:])


@dataclass(frozen=True)
class Checked:
    """Result of the check of a case.

    Attributes:
        name: the case.
        error: relative L1 error against the reference; one_rank: that of one GPU's kernel; bound: the most.
        repeats: whether a second run gave the same bits.
        sent_bytes: that this rank sent to others in a step.
    """

    name: str
    error: float
    one_rank: float
    bound: float
    repeats: bool
    sent_bytes: int

    @property
    def passed(self) -> bool:
        """Whether the error is in bounds and a2a repeats bit for bit."""
        return self.error <= self.bound and self.repeats


def plan_case(case: CPCase, rank: int, world: int) -> tuple[torch.Tensor, Shard, CPDecodePlan]:
    """This rank's queries, shard and plan; all ranks must call it."""
    q, cache, table = whole_step(case, world)
    layout = ShardLayout(world, rank, case.interleave)
    shard = spread(
        cache, table, layout, page_size=case.page_size, own_pages=case.own_pages,
        q_len=case.workload.q_len, window_left=case.window,
    )  # fmt: skip
    if case.heads == "sharded":
        q = q.view(q.shape[0], world, -1, q.shape[2])[:, rank]
    plan = plan_cp_decode(
        q, shard.cache, shard.table, comm=case.comm, partial_dtype=case.partial_dtype, heads=case.heads,
        head_groups=case.head_groups,
    )  # fmt: skip
    return q, shard, plan


def check_case(case: CPCase, rank: int, world: int) -> Checked:
    """Runs a case on this rank and compares its heads with one GPU's reference; all ranks must call it."""
    q, shard, plan = plan_case(case, rank, world)
    whole_q, cache, table = whole_step(case, world)
    sinks = sinks_of(case, whole_q.shape[1])
    options: dict[str, Any] = {"logits_soft_cap": case.soft_cap}
    one = {**options, "window_left": case.window, "sinks": sinks, "return_lse": True}
    expected = paged_decode_reference(whole_q, cache, table, **one)
    alone = paged_decode(whole_q, cache, table, out_dtype=torch.float32, **one)
    heads = whole_q.shape[1] // world
    own = slice(rank * heads, (rank + 1) * heads) if case.heads == "sharded" else slice(None)
    own_sinks = None if sinks is None else sinks[own]
    runs = [
        cp_paged_decode(
            q, shard.cache, shard.table, plan=plan, sinks=own_sinks, out_dtype=torch.float32,
            return_lse=True, **options,
        )
        for _ in range(2)
    ]  # fmt: skip
    (o, lse), (again, _) = runs
    error, one_rank = (relative_l1(got, expected[0][:, own]) for got in (o, alone[0][:, own]))
    torch.testing.assert_close(lse, expected[1][:, own], rtol=1e-3, atol=1e-3)
    bound = 2 * one_rank + 1e-6 + (_BF16_ROUNDING if case.partial_dtype == torch.bfloat16 else 0.0)
    repeats = case.comm == "ag_rs" or torch.equal(o, again)
    return Checked(case.name, error, one_rank, bound, repeats, sum(plan.sent_bytes().values()))


def check_cases(names: tuple[str, ...] = ()) -> list[Checked]:
    """Checks the named cases, or all, on the ranks of the default group; for `run_ranks`."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return [check_case(case, rank, world) for case in CASES if not names or case.name in names]

"""Which rank holds which token, compared with lists."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference
from narrowkv.context_parallel import PrefillShares, ShardLayout, cp_paged_decode_reference
from narrowkv.context_parallel.heads import every_nth_head
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.testing.cases.context_parallel import spread
from narrowkv.testing.cases.decode import K8V4, DecodeCase

LAYOUTS = [(1, 1), (2, 1), (3, 4), (4, 16), (5, 3)]


@pytest.mark.parametrize(("world", "interleave"), LAYOUTS)
def test_every_token_has_one_owner_and_one_place(world: int, interleave: int) -> None:
    positions = torch.arange(200)
    places = []
    for rank in range(world):
        layout = ShardLayout(world, rank, interleave)
        local = layout.localize(positions)
        owned = positions[local >= 0]
        assert owned.tolist() == [p for p in range(200) if layout.owner(p) == rank]
        assert local[local >= 0].tolist() == list(range(len(owned)))
        assert torch.equal(layout.globalize(local[local >= 0]), owned)
        lens = torch.arange(-3, 201, dtype=torch.int32)
        expected = [sum(int(p) < n for p in owned) for n in lens.tolist()]
        assert layout.local_lens(lens).tolist() == expected
        assert [layout.local_lens(n) for n in lens.tolist()] == expected
        places.append(len(owned))
    assert sum(places) == 200


@pytest.mark.parametrize("window", [-1, 0, 7])
@pytest.mark.parametrize(("world", "interleave"), LAYOUTS)
def test_key_ranges_are_the_owned_keys_of_each_row(world: int, interleave: int, window: int) -> None:
    lens = torch.tensor([0, 1, 5, 37, 64])
    for rank in range(world):
        layout = ShardLayout(world, rank, interleave)
        ranges = layout.key_ranges(lens, 4, window)
        for seq, length in enumerate(lens.tolist()):
            own = [p for p in range(length) if layout.owner(p) == rank]
            for row in range(4):
                position = length - 4 + row
                first = position - window if window >= 0 else 0
                seen = [i for i, p in enumerate(own) if first <= p <= position]
                begin, end = ranges[seq, row].tolist()
                assert list(range(begin, end)) == seen


@pytest.mark.parametrize(
    ("interleave", "own_pages", "ragged"),
    [(1, False, False), (1, False, True), (4, False, False), (4, False, True), (4, True, False),
     (8, True, False)],
)  # fmt: skip
def test_appends_write_what_attention_reads(interleave: int, own_pages: bool, ragged: bool) -> None:
    world, page, lens = 3, 4, (37, 1, 0, 24)
    random = torch.Generator().manual_seed(0)
    covers = page if own_pages else page * world
    width = -(-max(lens) // covers)
    ids = torch.randperm(len(lens) * width, generator=random).view(len(lens), -1)
    k, v = (torch.randn(sum(lens), 2, 64, generator=random).bfloat16() for _ in range(2))
    positions = torch.cat([torch.arange(n) for n in lens])
    seqs = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    slots = ids[seqs, positions // covers] * covers + positions % covers
    whole = PageTable.from_block_table(ids, torch.tensor(lens), page_size=covers)
    if ragged:
        counts = [-(-n // covers) for n in lens]
        starts = torch.tensor([0, *counts]).cumsum(0)
        pages = torch.cat([row[:count] for row, count in zip(ids, counts, strict=True)])
        last = torch.tensor([(n - 1) % covers + 1 if n else 0 for n in lens])
        whole = PageTable.from_ragged(starts, pages, last, page_size=covers)
    written = torch.zeros(sum(lens), dtype=torch.int64)
    for rank in range(world):
        layout = ShardLayout(world, rank, interleave)
        cache = PagedKVCache.empty(ids.numel(), page, 2, 64, format="bf16")
        local = layout.local_slots(slots, page, positions=positions if own_pages else None)
        append(cache, k, v, local, validate=True)
        written += local >= 0
        table = layout.shard_table(whole, page).table
        for seq in range(len(lens)):
            got, _ = cache.gather(table, seq)
            own = (seqs == seq) & (layout.owner(positions) == rank)
            assert torch.equal(got, k[own].float())
    assert bool((written == 1).all())


def test_padding_slots_stay_padding() -> None:
    layout = ShardLayout(2, 1, 2)
    slots = torch.tensor([-1, -1], dtype=torch.int32)
    assert layout.local_slots(slots, 4).tolist() == [-1, -1]
    assert ShardLayout(2, 1, 4).local_slots(slots, 4, positions=torch.tensor([4, 5])).tolist() == [-1, -1]


@pytest.mark.parametrize("own_pages", [False, True])
def test_the_reference_over_shards_is_the_reference_of_the_whole(own_pages: bool) -> None:
    q, cache, table = DecodeCase.small(lens=(41, 3, 9), q_len=3, gqa_ratio=2, page_size=4).build()
    sinks = torch.linspace(-1, 1, 4)
    shards = []
    for rank in range(3):
        shard = spread(
            cache, table, ShardLayout(3, rank, 4), page_size=4, own_pages=own_pages, q_len=3, window_left=6
        )
        shards.append((shard.cache, shard.table))
    o, lse = cp_paged_decode_reference(q, shards, sinks=sinks)
    options = {"window_left": 6, "sinks": sinks, "return_lse": True}
    expected, expected_lse = paged_decode_reference(q, cache, table, **options)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "workload",
    [
        DecodeCase.small(lens=(20,), num_kv_heads=4, gqa_ratio=2, layout=layout, granularity=granularity)
        for layout, granularity in [
            ("NHD", "head"), ("HND", "token_head"), ("concat", "float"), ("vectorised", "sequence_head"),
            ("padded", "page_head"), ("NHD", "tensor"),
        ]
    ]
    + [DecodeCase.small(lens=(20,), num_kv_heads=4, gqa_ratio=2, format=K8V4, scale_group=32)],
    ids=lambda w: f"{w.layout} {w.granularity} {w.format}",
)  # fmt: skip
def test_every_other_head_is_the_same_cache(workload: DecodeCase) -> None:
    q, cache, table = workload.build()
    whole = paged_decode(q, cache, table, out_dtype=torch.float32)
    for first in range(2):
        part = every_nth_head(cache, first, 2)
        assert every_nth_head(cache, first, 2) is part
        heads = torch.arange(q.shape[1]).view(-1, 2, 2)[:, first].flatten()
        got = paged_decode(q[:, heads].contiguous(), part, table, out_dtype=torch.float32)
        torch.testing.assert_close(got, whole[:, heads], rtol=1e-5, atol=1e-6)


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


I64 = torch.zeros(2, 3, dtype=torch.int64)


def _sharded(interleave: int, page_size: int, **options: object) -> object:
    lens = {} if options else {"seq_lens": I64[:, 0]}
    table = PageTable.from_block_table(I64, **lens, **options, page_size=page_size)  # type: ignore[arg-type]
    return ShardLayout(2, 0, interleave).shard_table(table, 4)


# Rows: what is made, and a pattern of the error's message.
REFUSALS = {
    "rank": (lambda: ShardLayout(2, 2), "rank must lie in"),
    "world": (lambda: ShardLayout(0, 0), "world must be"),
    "interleave": (lambda: ShardLayout(2, 0, 0), "interleave must be"),
    "interleave 3": (lambda: ShardLayout(2, 0, 3).local_slots(I64[0], 4), "multiple or a divisor"),
    "two pages": (lambda: ShardLayout(2, 0, 8).local_slots(I64[0], 4), "must divide page_size"),
    "half a page of its own": (lambda: ShardLayout(2, 0, 2).local_slots(I64[0], 4, positions=I64[0]),
        "must be a multiple of"),
    "pages of 5": (lambda: _sharded(4, 5), "page_table must have page_size 4"),
    "two shared pages": (lambda: _sharded(8, 8), "must divide page_size"),
    "half a page of a table": (lambda: _sharded(2, 4), "pass the table of shared pages"),
    "a ragged table": (lambda: ShardLayout(2, 0, 4).shard_table(
        PageTable.from_ragged(I64[0], I64[0], I64[0, :2], page_size=4), 4), "to_block_table"),
    "cached tokens": (lambda: _sharded(4, 4, cached_lens=I64[:, 0]), "without cached_lens"),
    "a negative share": (lambda: PrefillShares(ShardLayout(2, 0), [3, -1]), "new_lens must be numbers"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "match"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_go_together_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()

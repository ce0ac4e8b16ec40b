"""PagePool: exact counts, shared prefixes, and requests that change nothing when they fail."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowkv.paged_cache import PagedKVCache, PagePool, PoolExhausted, append, apply_copies


def _state(pool: PagePool) -> object:
    return (
        pool.free_pages,
        list(pool._free),
        list(pool._references),
        {s: pool.pages(s) for s in pool._sequences},
    )


def test_pages_are_counted_exactly() -> None:
    pool = PagePool(8, 16)
    a = pool.allocate(17)
    assert (pool.free_pages, pool.length(a), len(pool.pages(a))) == (6, 17, 2)
    assert pool.extend(a, 15) == []
    assert pool.free_pages == 6
    pool.extend(a, 1)
    assert pool.free_pages == 5
    pool.free(a)
    assert pool.free_pages == 8


def test_a_fork_shares_pages_and_copies_a_partial_page_on_write() -> None:
    pool = PagePool(8, 4)
    a = pool.allocate(6)
    b = pool.fork(a)
    assert pool.pages(a) == pool.pages(b)
    assert pool.free_pages == 6
    (copy,) = pool.extend(b, 1)
    assert (copy.source, copy.destination, copy.tokens) == (pool.pages(a)[1], pool.pages(b)[1], 2)
    assert pool.pages(a)[0] == pool.pages(b)[0]
    assert pool.extend(a, 1) == [], "the other side owns its last page again"
    pool.free(a)
    pool.free(b)
    assert pool.free_pages == 8


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    pool = PagePool(8, 4)
    a = pool.allocate(8)
    b = pool.fork(a)
    assert pool.extend(b, 1) == []
    assert pool.free_pages == 5


# FAULTS 37
def test_exhaustion_double_free_and_forks_of_the_dead_change_nothing() -> None:
    pool = PagePool(3, 4)
    a = pool.allocate(5)
    b = pool.fork(a)
    before = _state(pool)
    with pytest.raises(PoolExhausted, match="2 pages are needed, 1 of 3 are free"):
        pool.allocate(8)
    with pytest.raises(PoolExhausted):
        pool.extend(b, 4)  # one page for the copy, one for the growth
    assert _state(pool) == before
    pool.free(b)
    before = _state(pool)
    for call in (
        lambda: pool.free(b),
        lambda: pool.fork(b),
        lambda: pool.extend(b, 1),
        lambda: pool.length(b),
    ):
        with pytest.raises(KeyError, match="does not exist or was freed"):
            call()
    assert _state(pool) == before


def test_slots_follow_the_pages_and_stay_within_the_sequence() -> None:
    pool = PagePool(4, 4)
    pool.allocate(4)
    a = pool.allocate(6)
    first, second = pool.pages(a)
    assert pool.slot_mapping(a, 3, 3).tolist() == [first * 4 + 3, second * 4, second * 4 + 1]
    with pytest.raises(ValueError, match="within the sequence of 6"):
        pool.slot_mapping(a, 4, 3)


def test_a_page_table_of_the_pool_reads_back_what_was_appended() -> None:
    pool, cache = PagePool(6, 4), PagedKVCache.empty(6, 4, 1, 64, format="bf16")
    parent = pool.allocate(6)
    tokens = torch.arange(6.0)[:, None, None].expand(6, 1, 64).bfloat16()
    append(cache, tokens, tokens, pool.slot_mapping(parent, 0, 6))
    child = pool.fork(parent)
    apply_copies(cache, pool.extend(child, 1))
    append(cache, tokens[:1] + 50, tokens[:1] + 50, pool.slot_mapping(child, 6, 1))
    table = pool.page_table([parent, child])
    assert cache.gather(table, 0)[0][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert cache.gather(table, 1)[1][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 50]


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "extend", "fork", "free"]), st.integers(0, 9)), max_size=40
    )
)
def test_no_sequence_of_calls_loses_or_shares_a_page_by_mistake(calls: list[tuple[str, int]]) -> None:
    pool = PagePool(8, 4)
    alive: list[int] = []
    for name, n in calls:
        try:
            if name == "allocate":
                alive.append(pool.allocate(n))
            elif alive:
                seq = alive[n % len(alive)]
                if name == "extend":
                    pool.extend(seq, n)
                elif name == "fork":
                    alive.append(pool.fork(seq))
                else:
                    pool.free(seq)
                    alive.remove(seq)
        except PoolExhausted:
            pass
        held = {page for seq in alive for page in pool.pages(seq)}
        assert pool.free_pages == 8 - len(held)
        for seq in alive:
            assert len(set(pool.pages(seq))) == len(pool.pages(seq)) == -(-pool.length(seq) // 4)

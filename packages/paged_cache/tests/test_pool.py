"""PagePool: exact counts, shared prefixes, and requests that change nothing when they fail."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowkv.paged_cache import (
    CopiesPending,
    PageCopy,
    PagedKVCache,
    PagePool,
    PoolExhausted,
    append,
    apply_copies,
)


def _state(pool: PagePool) -> object:
    return (
        pool.free_pages,
        list(pool._free),
        list(pool._references),
        list(pool._copied_from),
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


@pytest.mark.parametrize(
    ("fmt", "group"), [("bf16", None), ("fp4_e2m1", None), ("fp4_e2m1", 32), ("int8", None), ("int4", None)]
)
def test_a_page_is_copied_in_every_layer_with_its_scales_and_reads_back_what_was_appended(
    fmt: str, group: int | None
) -> None:
    layers = [PagedKVCache.empty(6, 4, 1, 64, format=fmt, scale_group=group) for _ in range(2)]
    pool = PagePool(6, 4, caches=layers)
    parent = pool.allocate(6)
    numbers = torch.tensor([1.0, 2, 4, 8, 16, 32, 64])
    tokens = numbers[:, None, None].repeat(1, 1, 64)
    for layer, cache in enumerate(layers, 1):
        append(cache, tokens[:6] * layer, -tokens[:6], pool.slot_mapping(parent, 0, 6))
    child = pool.fork(parent)
    (copy,) = pool.extend(child, 1)
    assert pool.pages(child)[1] == copy.destination != pool.pages(parent)[1]
    table = pool.page_table([parent, child])
    bound = {"rtol": 1e-6 if fmt.startswith("int") else 0, "atol": 0}
    for layer, cache in enumerate(layers, 1):
        append(cache, tokens[6:] * layer, tokens[:1], pool.slot_mapping(child, 6, 1))
        torch.testing.assert_close(cache.gather(table, 0)[0][:, 0, 0], numbers[:6] * layer, **bound)
        k, v = cache.gather(table, 1)
        torch.testing.assert_close(k[:, 0, 63], numbers * layer, **bound)
        torch.testing.assert_close(v[:, 0, 0], torch.cat([-numbers[:6], numbers[:1]]), **bound)


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
                    pool.copies_done(seq)
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


def _filled(pool: PagePool, cache: PagedKVCache, tokens: int) -> int:
    """A sequence whose token i holds the number i + 1."""
    seq = pool.allocate(tokens)
    x = torch.arange(1.0, tokens + 1)[:, None, None].expand(tokens, 1, 64).bfloat16()
    append(cache, x, x, pool.slot_mapping(seq, 0, tokens))
    return seq


def test_without_caches_a_sequence_cannot_be_used_before_its_copies_are_done() -> None:
    cache = PagedKVCache.empty(6, 4, 1, 64, format="bf16")
    pool = PagePool(6, 4)
    parent = _filled(pool, cache, 6)
    child = pool.fork(parent)
    copies = pool.extend(child, 1)
    before = _state(pool)
    for use in (
        lambda: pool.extend(child, 1),
        lambda: pool.fork(child),
        lambda: pool.slot_mapping(child, 6, 1),
        lambda: pool.page_table([parent, child]),
        lambda: pool.table_before([child], 1),
        lambda: pool.table_after([child]),
    ):
        with pytest.raises(
            CopiesPending, match=r"sequence 1 shares a page .*apply_copies.* copies_done\(1\)"
        ):
            use()
        assert _state(pool) == before
    pool.page_table([parent])
    apply_copies(cache, copies)
    pool.copies_done(child)
    assert cache.gather(pool.page_table([child]), 0)[0][:6, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_page_that_is_still_to_be_copied_is_not_given_to_another_sequence() -> None:
    cache = PagedKVCache.empty(3, 4, 1, 64, format="bf16")
    pool = PagePool(3, 4)
    parent = _filled(pool, cache, 2)
    child = pool.fork(parent)
    copies = pool.extend(child, 1)
    pool.free(parent)
    assert pool.free_pages == 1
    other = pool.allocate(4)
    assert pool.pages(other)[0] != copies[0].source
    apply_copies(cache, copies)
    pool.copies_done(child)
    assert pool.free_pages == 1
    pool.free(child)
    pool.free(other)
    assert pool.free_pages == 3
    child = pool.fork(parent := pool.allocate(2))
    pool.extend(child, 1)
    pool.free(child)
    pool.free(parent)
    assert pool.free_pages == 3, "a sequence that is freed needs no copy"


def test_the_tables_before_and_after_an_extension() -> None:
    pool = PagePool(8, 4)
    a, b = pool.allocate(6), pool.allocate()
    pool.extend(a, 3)
    pool.extend(b, 2)
    before, after = pool.table_before([a, b], [3, 2]), pool.table_after([a, b], max_pages=4)
    assert before.before_append
    assert not after.before_append
    assert before.seq_lens is not None
    assert after.seq_lens is not None
    assert (before.seq_lens.tolist(), after.seq_lens.tolist()) == ([6, 0], [9, 2])
    pages = [list(pool.pages(a)), [*pool.pages(b), -1, -1]]
    assert before.page_ids.tolist() == pages
    assert after.page_ids.tolist() == [[*row, -1] for row in pages]
    assert pool.table_before([b], 2).capacity == 4
    assert pool.table_before([], 2).page_ids.shape == (0, 1)
    with pytest.raises(ValueError, match="max_pages must be at least 3, got 2"):
        pool.table_after([a], max_pages=2)
    for count in (10, -1):
        with pytest.raises(ValueError, match=r"new_tokens must lie in 0..length .* call extend first"):
            pool.table_before([a], count)
    with pytest.raises(ValueError, match=r"one count a sequence \(2\), got 1"):
        pool.table_before([a, b], [3])


def test_caches_that_are_not_the_pools_are_refused() -> None:
    cache = PagedKVCache.empty(4, 4, 1, 64, format="bf16")
    for pages, size in ((5, 4), (4, 8)):
        with pytest.raises(ValueError, match="caches must have pages of"):
            PagePool(pages, size, caches=[cache])
    with pytest.raises(TypeError, match="caches must be a PagedKVCache, got Tensor"):
        PagePool(4, 4, caches=[cache.k])  # type: ignore[list-item]
    for copy in (PageCopy(0, 4, 1), PageCopy(-1, 0, 1)):
        with pytest.raises(ValueError, match=r"pages in \[0, 4\)"):
            apply_copies(cache, [copy])
    with pytest.raises(TypeError, match="cache must be a PagedKVCache"):
        apply_copies([cache], [])  # type: ignore[arg-type]


def test_slots_past_int32_are_int64() -> None:
    pool = PagePool(3, 2**30)
    pool.allocate(2**30)
    seq = pool.allocate(2**30 + 8)
    slots = pool.slot_mapping(seq, 2**30 + 4, 2)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [2 * 2**30 + 4, 2 * 2**30 + 5]

"""Allocation of pages to sequences, on the host: shared prefixes by reference counts, copy on write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.descales import PER_PAGE_GRANULARITIES
from narrowkv.paged_cache.page_table import NO_PAGE, PageTable
from narrowkv.runtime.errors import check_instance, check_positive_int

_INT32_MAX = 2**31 - 1


class PoolExhausted(RuntimeError):
    """There are fewer free pages than a request needs; nothing was changed."""


class CopiesPending(RuntimeError):
    """A sequence is used before the page copies that `PagePool.extend` asked for were reported as done."""


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    pending: PageCopy | None = None


@dataclass(frozen=True)
class PageCopy:
    """A page whose first `tokens` tokens are to be copied before anything is appended."""

    source: int
    destination: int
    tokens: int


class PagePool:
    """Assigns pages to sequences. Every method either succeeds or changes nothing.

    A pool that is given its caches copies shared pages itself. A pool without caches (in a scheduler whose
    caches are in other processes) returns the copies from `extend`, and raises `CopiesPending` for that
    sequence until `copies_done` is called.

    Args:
        num_pages: pages of the cache.
        page_size: tokens a page.
        caches: the caches of all layers that these pages belong to.

    Example:
        >>> cache = PagedKVCache.empty(4, 16, 2, 64, format="fp8_e4m3fn", k_descale=0.1, v_descale=0.1)
        >>> pool = PagePool(num_pages=4, page_size=16, caches=[cache])
        >>> a = pool.allocate(20)
        >>> pool.free_pages
        2
        >>> b = pool.fork(a)
        >>> [copy.tokens for copy in pool.extend(b, 1)]
        [4]
        >>> pool.free(a); pool.free(b); pool.free_pages
        4
    """

    def __init__(self, num_pages: int, page_size: int, *, caches: Sequence[PagedKVCache] = ()) -> None:
        self.num_pages = check_positive_int("num_pages", num_pages)
        self.page_size = check_positive_int("page_size", page_size)
        for cache in caches:
            check_instance("caches", cache, PagedKVCache)
            if cache.page_size != page_size or cache.num_pages < num_pages:
                raise ValueError(
                    f"caches must have pages of {page_size} tokens and at least {num_pages} of them, "
                    f"got {cache.num_pages} of {cache.page_size} tokens"
                )
        self.caches = tuple(caches)
        # Taken from the end, so that pages are first given out in ascending order.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._copied_from = [0] * num_pages  # pending copies that read a page
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds and no pending copy reads."""
        return len(self._free)

    def length(self, seq: int) -> int:
        """Number of tokens of a sequence."""
        return self._get(seq).length

    def pages(self, seq: int) -> tuple[int, ...]:
        """Page ids of a sequence, in order."""
        return tuple(self._get(seq).pages)

    def allocate(self, length: int = 0) -> int:
        """A new sequence of `length` tokens; returns its id.

        Raises:
            PoolExhausted: too few free pages.
            ValueError: a negative length.
        """
        if length < 0:
            raise ValueError(f"length must not be negative, got {length}")
        pages = self._take(self._pages_for(length))
        seq, self._next_id = self._next_id, self._next_id + 1
        self._sequences[seq] = _Sequence(pages, length)
        return seq

    def extend(self, seq: int, num_tokens: int) -> list[PageCopy]:
        """Makes room for `num_tokens` more tokens.

        A partly filled last page that another sequence shares is replaced by a copy. A pool with caches has
        queued these copies on the current stream when it returns. Without caches, perform them in every
        layer's cache (`apply_copies`) and call `copies_done` before the sequence is used again.

        Returns:
            The page copies, performed or to be performed; at most one.

        Raises:
            PoolExhausted: too few free pages.
            CopiesPending: a copy of an earlier extension is not done.
            KeyError: no such sequence.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        state = self._ready(seq)
        partial = state.length % self.page_size
        shared = bool(num_tokens and partial and self._references[state.pages[-1]] > 1)
        grown = self._pages_for(state.length + num_tokens) - len(state.pages)
        fresh = self._take(grown + shared)
        copies = []
        if shared:
            state.pending = PageCopy(state.pages[-1], fresh.pop(0), partial)
            # The page is not changed until it is copied, even if the other sequences are freed.
            self._copied_from[state.pending.source] += 1
            self._references[state.pending.source] -= 1
            state.pages[-1] = state.pending.destination
            copies.append(state.pending)
        state.pages.extend(fresh)
        state.length += num_tokens
        if copies and self.caches:
            for cache in self.caches:
                apply_copies(cache, copies)
            self.copies_done(seq)
        return copies

    def copies_done(self, seq: int) -> None:
        """Reports that the copies from `extend` were performed, or are queued ahead of all later work.

        Raises:
            KeyError: no such sequence.
        """
        state = self._get(seq)
        if state.pending is not None:
            source, state.pending = state.pending.source, None
            self._copied_from[source] -= 1
            self._give_back(source)

    def fork(self, seq: int) -> int:
        """A new sequence that shares all pages of `seq`.

        Raises:
            CopiesPending: a copy of an earlier extension is not done.
            KeyError: no such sequence.
        """
        state = self._ready(seq)
        for page in state.pages:
            self._references[page] += 1
        child, self._next_id = self._next_id, self._next_id + 1
        self._sequences[child] = _Sequence(list(state.pages), state.length)
        return child

    def free(self, seq: int) -> None:
        """Frees a sequence's pages; pages that other sequences share stay in use.

        Copies that its last extension asked for are no longer needed: drop them, or have them queued ahead of
        all later work.

        Raises:
            KeyError: no such sequence, or freed before.
        """
        self.copies_done(seq)
        state = self._sequences.pop(seq)
        for page in reversed(state.pages):
            self._references[page] -= 1
            self._give_back(page)

    def slot_mapping(
        self, seq: int, start: int, num_tokens: int, *, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Slots of tokens `start .. start + num_tokens` of a sequence, for `append`.

        Returns:
            `[num_tokens]` on `device` (default: that of the pool's caches, else the CPU), int32, or int64 if
            the pool has more than 2**31 - 1 slots.

        Raises:
            ValueError: tokens beyond the sequence.
            CopiesPending: a copy of an earlier extension is not done.
        """
        state = self._ready(seq)
        if start < 0 or num_tokens < 0 or start + num_tokens > state.length:
            raise ValueError(
                f"tokens {start}..{start + num_tokens} must lie within the sequence of {state.length}"
            )
        token = torch.arange(start, start + num_tokens)
        pages = torch.tensor(state.pages or [0])
        slots = pages[token // self.page_size] * self.page_size + token % self.page_size
        fits = self.num_pages * self.page_size <= _INT32_MAX
        return slots.to(device=self._device(device), dtype=torch.int32 if fits else torch.int64)

    def page_table(self, seqs: Sequence[int], *, device: torch.device | str | None = None) -> PageTable:
        """A ragged page table of these sequences, with all their tokens.

        Args:
            seqs: ids of sequences, one a row of the batch.
            device: where; default that of the pool's caches, else the CPU.

        Raises:
            CopiesPending: a copy of an earlier extension is not done.
        """
        states = [self._ready(seq) for seq in seqs]
        counts = torch.tensor([0] + [len(state.pages) for state in states])
        indices = [page for state in states for page in state.pages]
        last = [
            state.length - (len(state.pages) - 1) * self.page_size if state.pages else 0 for state in states
        ]
        device = self._device(device)
        return PageTable.from_ragged(
            counts.cumsum(0).to(device=device, dtype=torch.int32),
            torch.tensor(indices, dtype=torch.int32, device=device),
            torch.tensor(last, dtype=torch.int32, device=device),
            page_size=self.page_size,
        )

    def table_before(
        self,
        seqs: Sequence[int],
        new_tokens: int | Sequence[int],
        *,
        max_pages: int | None = None,
        device: torch.device | str | None = None,
    ) -> PageTable:
        """The block table for `prefill_append`: lengths without the newest tokens, pages for them too.

        Args:
            seqs: ids of sequences that were extended, one a row of the batch.
            new_tokens: how many tokens the call appends: a number for each sequence, or one number for all.
            max_pages: columns, if the table is to be wider than its longest row (a captured graph); entries
                past a sequence's pages are -1.
            device: where; default that of the pool's caches, else the CPU.

        Raises:
            ValueError: more new tokens than a sequence has, or a row longer than `max_pages`.
            CopiesPending: a copy of an earlier extension is not done.

        Example:
            >>> pool = PagePool(num_pages=4, page_size=16)
            >>> seq = pool.allocate(20)
            >>> copies = pool.extend(seq, 5)
            >>> table = pool.table_before([seq], 5)
            >>> table.seq_lens.tolist(), table.page_ids.tolist()
            ([20], [[0, 1]])
        """
        counts = [new_tokens] * len(seqs) if isinstance(new_tokens, int) else list(new_tokens)
        if len(counts) != len(seqs):
            raise ValueError(f"new_tokens must have one count a sequence ({len(seqs)}), got {len(counts)}")
        lens = [self._get(seq).length - count for seq, count in zip(seqs, counts, strict=True)]
        if any(count < 0 for count in counts) or any(length < 0 for length in lens):
            raise ValueError(
                f"new_tokens must lie in 0..length of each sequence, got {counts} for lengths "
                f"{[self._get(seq).length for seq in seqs]}: call extend first"
            )
        ids, cached = self._block_table(seqs, lens, max_pages, device)
        return PageTable.from_block_table(ids, cached_lens=cached, page_size=self.page_size)

    def table_after(
        self,
        seqs: Sequence[int],
        *,
        max_pages: int | None = None,
        device: torch.device | str | None = None,
    ) -> PageTable:
        """The block table with all tokens of these sequences; arguments and errors as for `table_before`."""
        ids, lens = self._block_table(seqs, [self._get(seq).length for seq in seqs], max_pages, device)
        return PageTable.from_block_table(ids, lens, page_size=self.page_size)

    def _block_table(
        self,
        seqs: Sequence[int],
        lens: list[int],
        max_pages: int | None,
        device: torch.device | str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self._ready(seq).pages for seq in seqs]
        longest = max((len(row) for row in rows), default=0)
        width = max(longest, 1) if max_pages is None else max_pages
        if width < longest:
            raise ValueError(f"max_pages must be at least {longest}, got {max_pages}")
        padded = [row + [NO_PAGE] * (width - len(row)) for row in rows]
        device = self._device(device)
        return (
            torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), width),
            torch.tensor(lens, dtype=torch.int32, device=device),
        )

    def _device(self, device: torch.device | str | None) -> torch.device | str:
        if device is not None:
            return device
        return self.caches[0].k.device if self.caches else "cpu"

    def _get(self, seq: int) -> _Sequence:
        if seq not in self._sequences:
            raise KeyError(f"sequence {seq} does not exist or was freed")
        return self._sequences[seq]

    def _ready(self, seq: int) -> _Sequence:
        state = self._get(seq)
        if state.pending is not None:
            raise CopiesPending(
                f"sequence {seq} shares a page that is still to be copied: perform {state.pending} in every "
                f"layer's cache (apply_copies), then call copies_done({seq}); a PagePool made with "
                "caches=[...] does both itself"
            )
        return state

    def _give_back(self, page: int) -> None:
        if self._references[page] == 0 and self._copied_from[page] == 0:
            self._free.append(page)

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise PoolExhausted(f"{count} pages are needed, {len(self._free)} of {self.num_pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken


def apply_copies(cache: PagedKVCache, copies: list[PageCopy]) -> None:
    """Copies the pages that `PagePool.extend` asked for, per-token descales included.

    Only for a pool that does not know its caches: call it for the cache of every layer, then
    `PagePool.copies_done`.

    Raises:
        TypeError, ValueError: not a cache, or a page that it does not have.
    """
    check_instance("cache", cache, PagedKVCache)
    for copy in copies:
        if not all(0 <= page < cache.num_pages for page in (copy.source, copy.destination)):
            raise ValueError(f"copies must name pages in [0, {cache.num_pages}), got {copy}")
    for copy in copies:
        # Whole pages are copied, in any layout: the append that follows overwrites the rest of the page.
        cache.k[copy.destination].copy_(cache.k[copy.source])
        cache.v[copy.destination].copy_(cache.v[copy.source])
        for descale, kind in ((cache.k_descale, cache.k_granularity), (cache.v_descale, cache.v_granularity)):
            if isinstance(descale, torch.Tensor) and kind in PER_PAGE_GRANULARITIES:
                descale[copy.destination].copy_(descale[copy.source])

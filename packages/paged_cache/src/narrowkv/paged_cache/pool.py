"""Allocation of pages to sequences, on the host: shared prefixes by reference counts, copy on write."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.descales import PER_PAGE_GRANULARITIES
from narrowkv.paged_cache.page_table import PageTable
from narrowkv.quant.errors import check_positive_int


class PoolExhausted(RuntimeError):
    """There are fewer free pages than a request needs; nothing was changed."""


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class PageCopy:
    """A page whose first `tokens` tokens are to be copied before anything is appended."""

    source: int
    destination: int
    tokens: int


class PagePool:
    """Which pages are free, and which sequence holds which. Every method either succeeds or changes nothing.

    Args:
        num_pages: pages of the cache.
        page_size: tokens a page.

    Example:
        >>> pool = PagePool(num_pages=4, page_size=16)
        >>> a = pool.allocate(20)
        >>> pool.free_pages
        2
        >>> b = pool.fork(a)
        >>> [copy.tokens for copy in pool.extend(b, 1)]
        [4]
        >>> pool.free(a); pool.free(b); pool.free_pages
        4
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = check_positive_int("num_pages", num_pages)
        self.page_size = check_positive_int("page_size", page_size)
        # Taken from the end, so that pages are handed out in ascending order at first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
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
        """Room for `num_tokens` more tokens.

        Returns:
            Page copies to perform first (`apply_copies`): a partly filled last page that another sequence
            shares is replaced.

        Raises:
            PoolExhausted: too few free pages.
            KeyError: no such sequence.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        state = self._get(seq)
        partial = state.length % self.page_size
        shared = bool(num_tokens and partial and self._references[state.pages[-1]] > 1)
        grown = self._pages_for(state.length + num_tokens) - len(state.pages)
        fresh = self._take(grown + shared)
        copies = []
        if shared:
            source, destination = state.pages[-1], fresh.pop(0)
            self._references[source] -= 1
            state.pages[-1] = destination
            copies.append(PageCopy(source, destination, partial))
        state.pages.extend(fresh)
        state.length += num_tokens
        return copies

    def fork(self, seq: int) -> int:
        """A new sequence that shares all pages of `seq`.

        Raises:
            KeyError: no such sequence.
        """
        state = self._get(seq)
        for page in state.pages:
            self._references[page] += 1
        child, self._next_id = self._next_id, self._next_id + 1
        self._sequences[child] = _Sequence(list(state.pages), state.length)
        return child

    def free(self, seq: int) -> None:
        """Gives a sequence's pages back; shared ones stay with the others.

        Raises:
            KeyError: no such sequence, or freed before.
        """
        state = self._get(seq)
        del self._sequences[seq]
        for page in reversed(state.pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def slot_mapping(
        self, seq: int, start: int, num_tokens: int, *, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Slots of tokens `start .. start + num_tokens` of a sequence, int32.

        Raises:
            ValueError: tokens beyond the sequence.
        """
        state = self._get(seq)
        if start < 0 or num_tokens < 0 or start + num_tokens > state.length:
            raise ValueError(
                f"tokens {start}..{start + num_tokens} must lie within the sequence of {state.length}"
            )
        token = torch.arange(start, start + num_tokens)
        pages = torch.tensor(state.pages or [0])
        slots = pages[token // self.page_size] * self.page_size + token % self.page_size
        return slots.to(device=device, dtype=torch.int32)

    def page_table(self, seqs: list[int], *, device: torch.device | str = "cpu") -> PageTable:
        """A ragged page table of these sequences."""
        states = [self._get(seq) for seq in seqs]
        counts = torch.tensor([0] + [len(state.pages) for state in states])
        indices = [page for state in states for page in state.pages]
        last = [
            state.length - (len(state.pages) - 1) * self.page_size if state.pages else 0 for state in states
        ]
        return PageTable.from_ragged(
            counts.cumsum(0).to(device=device, dtype=torch.int32),
            torch.tensor(indices, dtype=torch.int32, device=device),
            torch.tensor(last, dtype=torch.int32, device=device),
            page_size=self.page_size,
        )

    def _get(self, seq: int) -> _Sequence:
        if seq not in self._sequences:
            raise KeyError(f"sequence {seq} does not exist or was freed")
        return self._sequences[seq]

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
    """Copies the pages that `PagePool.extend` asked for, per-token descales included."""
    for copy in copies:
        # Whole pages: the tail is written by the append that follows, and any layout copies alike.
        cache.k[copy.destination].copy_(cache.k[copy.source])
        cache.v[copy.destination].copy_(cache.v[copy.source])
        for descale, kind in ((cache.k_descale, cache.k_granularity), (cache.v_descale, cache.v_granularity)):
            if isinstance(descale, torch.Tensor) and kind in PER_PAGE_GRANULARITIES:
                descale[copy.destination].copy_(descale[copy.source])

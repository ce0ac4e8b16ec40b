"""Which rank holds which token of a sequence, and the metadata of a rank's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from narrowkv.paged_cache import PageTable
from narrowkv.paged_cache.page_table import NO_PAGE
from narrowkv.runtime.errors import check_index_vector, check_instance, check_positive_int, check_window

_Number = TypeVar("_Number", int, torch.Tensor)


@dataclass(frozen=True)
class ShardLayout:
    """The division of every sequence's tokens over ranks: position p belongs to `(p // interleave) % world`.

    A rank keeps its tokens in order, so that its key number `local_lens(p)` is the first of its keys at or
    after position p. All tensors are computed on their device, without a host synchronisation.

    Attributes:
        world: ranks that share each sequence.
        rank: this one.
        interleave: number of adjacent tokens that one rank holds. It must be a multiple or a divisor of the
            cache's page size, so that a page holds whole runs of tokens.

    Raises:
        ValueError: sizes below 1, or a rank outside the world.

    Example:
        >>> layout = ShardLayout(world=2, rank=1, interleave=4)
        >>> [layout.owner(p) for p in (0, 3, 4, 8, 13)]
        [0, 0, 1, 0, 1]
        >>> layout.local_lens(10)
        4
    """

    world: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_positive_int("world", self.world)
        check_positive_int("interleave", self.interleave)
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.world:
            raise ValueError(f"rank must lie in [0, {self.world}), got {self.rank!r}")

    def check_page_size(self, page_size: int) -> None:
        """Checks that no page of this size mixes runs of tokens.

        Raises:
            ValueError: the interleave is neither a multiple nor a divisor of it.
        """
        check_positive_int("page_size", page_size)
        if self.interleave % page_size and page_size % self.interleave:
            raise ValueError(
                f"interleave must be a multiple or a divisor of the cache's page_size {page_size}, got "
                f"{self.interleave}"
            )

    def owner(self, position: _Number) -> _Number:
        """The rank that holds a position, for an int or a tensor of any shape."""
        return position // self.interleave % self.world

    def local_lens(self, seq_lens: _Number) -> _Number:
        """How many of a sequence's first `seq_lens` tokens this rank holds, for an int or a tensor."""
        stripe = self.interleave * self.world
        begin = self.rank * self.interleave
        if isinstance(seq_lens, torch.Tensor):
            lens = seq_lens.clamp(min=0)
            rest = (lens % stripe - begin).clamp(0, self.interleave)
            return lens // stripe * self.interleave + rest
        lens = max(seq_lens, 0)
        return lens // stripe * self.interleave + min(max(lens % stripe - begin, 0), self.interleave)

    def localize(self, indices: torch.Tensor) -> torch.Tensor:
        """Global token numbers as this rank's: -1 for tokens of other ranks, and for numbers below 0.

        Args:
            indices: int32 or int64, any shape: positions of a sequence, or rows of a pool that all ranks
                share in this layout.

        Returns:
            The same shape and dtype: where this rank's memory holds each token.

        Example:
            >>> ShardLayout(2, 1, 2).localize(torch.tensor([0, 2, 3, 6, -1])).tolist()
            [-1, 0, 1, 2, -1]
        """
        stripe = self.interleave * self.world
        local = indices // stripe * self.interleave + indices % self.interleave
        return torch.where((indices >= 0) & (self.owner(indices) == self.rank), local, -1)

    def globalize(self, indices: torch.Tensor) -> torch.Tensor:
        """Global positions of this rank's tokens, for numbers of at least 0: the inverse of `localize`."""
        run = self.rank * self.interleave
        return indices // self.interleave * (self.interleave * self.world) + run + indices % self.interleave

    def local_slots(
        self, slot_mapping: torch.Tensor, page_size: int, *, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Slots of new tokens in this rank's cache, for `narrowkv.paged_cache.append`; -1 for others' tokens.

        Args:
            slot_mapping: `[tokens]` int32 or int64. Without `positions`: slots of the shared pages that
                `shard_table` describes, which hold `page_size * world` tokens each. With `positions`: slots
                in the cache of the token's owner. -1 is padding.
            page_size: of this rank's cache.
            positions: `[tokens]` of each token in its sequence: where pages are a rank's own.

        Returns:
            `[tokens]`, as `slot_mapping`. `append` skips -1, so that only owned tokens are written.

        Raises:
            TypeError, ValueError: for wrong shapes, or an interleave that does not go with the pages.

        Example:
            >>> layout = ShardLayout(world=2, rank=1, interleave=1)
            >>> layout.local_slots(torch.tensor([0, 1, 9, -1]), page_size=4).tolist()
            [-1, 0, 4, -1]
        """
        check_index_vector("slot_mapping", slot_mapping, "tokens")
        self.check_page_size(page_size)
        if positions is not None:
            check_index_vector("positions", positions, slot_mapping.shape[0])
            self._check_own_pages(page_size)
            return torch.where(self.owner(positions) == self.rank, slot_mapping, -1)
        self._check_shared_pages(page_size)
        return self.localize(slot_mapping)

    def key_ranges(self, seq_lens: torch.Tensor, q_len: int, window_left: int = -1) -> torch.Tensor:
        """The keys [begin, end) of this rank that each of a sequence's newest tokens attends to.

        They are not the rank's length minus a constant: with interleaving, the number of tokens that a rank
        holds up to a position grows in steps.

        Args:
            seq_lens: `[batch]` tokens of the whole sequences, the newest ones included.
            q_len: query tokens of each sequence; row i stands at position `seq_len - q_len + i`.
            window_left: how many earlier keys of the whole sequence a row attends to; -1 for all.

        Returns:
            `[batch, q_len, 2]` int32, for `PageTable.with_key_ranges`.
        """
        rows = torch.arange(1 - q_len, 1, dtype=seq_lens.dtype, device=seq_lens.device)
        ends = seq_lens[:, None] + rows
        begins = ends - 1 - window_left if window_left >= 0 else torch.zeros_like(ends)
        return self.local_lens(torch.stack((begins, ends), -1)).to(torch.int32)

    def shard_table(
        self, page_table: PageTable, page_size: int, *, q_len: int = 1, window_left: int = -1
    ) -> ShardedTable:
        """This rank's page table of the whole sequences' one.

        The page size tells two kinds of global table apart. *Shared pages*: the table's pages have
        `page_size * world` tokens, and a page id is the same page of `page_size` slots in every rank's cache;
        the interleave divides `page_size`. This is what vLLM keeps. *Own pages*: the table's pages have
        `page_size` tokens, and an id is a page of the cache of the rank that owns its tokens; the interleave
        is a multiple of `page_size`. Such a table must be a block table.

        Args:
            page_table: of the whole sequences, equal on all ranks; lengths include the call's tokens.
            page_size: of this rank's cache.
            q_len: query tokens of each sequence.
            window_left: how many earlier keys of the whole sequence a row attends to; -1 for all.

        Returns:
            The table for `cp_paged_decode`; make one for each window that a model's layers have.

        Raises:
            TypeError, ValueError: for a table that is neither of the two, or does not go with the interleave.

        Example:
            >>> ids, lens = torch.tensor([[3, 1]]), torch.tensor([21])
            >>> table = PageTable.from_block_table(ids, lens, page_size=16)
            >>> ShardLayout(2, 0, interleave=8).shard_table(table, 8).table.seq_lens.tolist()
            [13]
        """
        check_instance("page_table", page_table, PageTable)
        check_positive_int("q_len", q_len)
        check_window("window_left", window_left)
        self.check_page_size(page_size)
        masked = page_table.key_ranges is not None or page_table.tree_mask is not None
        if page_table.before_append or masked:
            raise ValueError(
                "page_table must be of the whole sequences with the call's tokens: without cached_lens, "
                "key_ranges and tree_mask"
            )
        lens = page_table.seq_lens_tensor()
        if self.owns_pages(page_table, page_size):
            self._check_own_pages(page_size)
            table = self._of_own_pages(page_table, lens)
        elif page_table.page_size == page_size * self.world:
            self._check_shared_pages(page_size)
            table = self._of_shared_pages(page_table, lens, page_size)
        else:
            raise ValueError(
                f"page_table must have page_size {page_size} (pages of the rank that owns their tokens) or "
                f"{page_size * self.world} (pages that all {self.world} ranks share), got "
                f"{page_table.page_size}"
            )
        if q_len > 1 or window_left >= 0:
            table = table.with_key_ranges(self.key_ranges(lens, q_len, window_left))
        return ShardedTable(table, self, q_len, window_left)

    def owns_pages(self, page_table: PageTable, page_size: int) -> bool:
        """Whether a table of the whole sequences has pages of single ranks; see `shard_table`."""
        # With one rank both kinds have pages of this size.
        only_one = self.world == 1 and self.interleave % page_size != 0
        return page_table.page_size == page_size and not only_one

    def _of_shared_pages(self, whole: PageTable, lens: torch.Tensor, page_size: int) -> PageTable:
        if whole.kind == "block_table":
            local = self.local_lens(lens).to(torch.int32)
            return PageTable.from_block_table(whole.page_ids, local, page_size=page_size)
        assert whole.kv_indptr is not None
        assert whole.kv_last_page_len is not None
        # A last page may hold none of this rank's tokens: 0 is a length that kernels take.
        last = self.local_lens(whole.kv_last_page_len).to(torch.int32)
        return PageTable.from_ragged(whole.kv_indptr, whole.page_ids, last, page_size=page_size)

    def _of_own_pages(self, whole: PageTable, lens: torch.Tensor) -> PageTable:
        if whole.kind != "block_table":
            raise ValueError(
                "page_table must be a block table where pages are a rank's own: convert it with "
                "page_table.to_block_table(max_pages)"
            )
        ids = whole.page_ids
        pages = self.interleave // whole.page_size
        width = -(-ids.shape[1] // (pages * self.world)) * pages
        columns = ShardLayout(self.world, self.rank, pages).globalize(torch.arange(width, device=ids.device))
        inside = columns < ids.shape[1]
        padded = torch.cat([ids, ids.new_full((ids.shape[0], 1), NO_PAGE)], 1)
        own = padded[:, torch.where(inside, columns, ids.shape[1])]
        held = lens.clamp(max=whole.capacity)
        local = self.local_lens(held).to(torch.int32)
        return PageTable.from_block_table(own, local, page_size=whole.page_size)

    def _check_shared_pages(self, page_size: int) -> None:
        if page_size % self.interleave:
            raise ValueError(
                f"interleave must divide page_size {page_size} where ranks share page ids, got "
                f"{self.interleave}"
            )

    def _check_own_pages(self, page_size: int) -> None:
        if self.interleave % page_size:
            raise ValueError(
                f"interleave must be a multiple of page_size {page_size} where pages are a rank's own, got "
                f"{self.interleave}: with a smaller one, pass the table of shared pages, of "
                f"{page_size * self.world} tokens each"
            )


@dataclass(frozen=True, eq=False)
class ShardedTable:
    """One rank's page table; made by `ShardLayout.shard_table`.

    Attributes:
        table: pages and lengths of this rank's tokens, with `key_ranges` where several query tokens or a
            window need them.
        layout: what it was made by.
        q_len: query tokens of each sequence.
        window_left: of the whole sequence; -1 for none.
    """

    table: PageTable
    layout: ShardLayout
    q_len: int
    window_left: int

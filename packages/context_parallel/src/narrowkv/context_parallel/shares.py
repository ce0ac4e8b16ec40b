"""Which new tokens of a prefill each rank computes, so that causal attention costs every rank the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from narrowkv.context_parallel.layout import ShardLayout
from narrowkv.runtime.errors import check_instance

# Tokens of a page of the blocks that ranks send each other.
PAGE = 16


class PrefillShares:
    """New tokens of a batch of sequences, divided over ranks by a zigzag.

    Each sequence's new tokens are cut in `2 * world` blocks; rank r computes blocks r and
    `2 * world - 1 - r`, an early and a late one. Any lengths are served, also shorter than the ranks.

    Args:
        layout: the ranks, and which of them holds which token afterwards.
        new_lens: new tokens of each sequence, on the host.
        older: whether a sequence may have tokens in the cache already; if none has, queries are not sent.

    Example:
        >>> PrefillShares(ShardLayout(world=2, rank=1), [8, 2]).rows().tolist()
        [2, 3, 4, 5, 8]
    """

    def __init__(self, layout: ShardLayout, new_lens: Sequence[int], *, older: bool = True) -> None:
        self.older = older
        self.layout = check_instance("layout", layout, ShardLayout)
        self.new_lens = tuple(new_lens)
        if not all(isinstance(n, int) and n >= 0 for n in self.new_lens):
            raise ValueError(f"new_lens must be numbers of at least 0, got {list(self.new_lens)[:16]}")

    def blocks(self, rank: int) -> list[tuple[range, range]]:
        """The early and the late block of each sequence that a rank computes, counted in its new tokens."""
        cuts = 2 * self.layout.world

        def block(length: int, number: int) -> range:
            return range(length * number // cuts, length * (number + 1) // cuts)

        return [(block(n, rank), block(n, cuts - 1 - rank)) for n in self.new_lens]

    def lens(self, rank: int) -> list[tuple[int, int]]:
        """The lengths of `blocks`."""
        return [(len(early), len(late)) for early, late in self.blocks(rank)]

    def rows(self, rank: int | None = None) -> torch.Tensor:
        """`[own tokens]` int64 on the CPU: a rank's tokens, by default this one's, among all new tokens.

        All new tokens stand one sequence after the other; `q[shares.rows()]` are what `cp_prefill` takes.
        """
        first, found = 0, [torch.zeros(0, dtype=torch.int64)]
        for length, blocks in zip(
            self.new_lens, self.blocks(self.layout.rank if rank is None else rank), strict=True
        ):
            found += [torch.arange(block.start, block.stop) + first for block in blocks]
            first += length
        return torch.cat(found)

    def places(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of a rank's tokens in its block of pages, and each sequence's first page there.

        Returns:
            `[own tokens]` and `[sequences]` int64 on the CPU.
        """
        counts = [early + late for early, late in self.lens(rank)]
        pages = torch.tensor([0, *(-(-count // PAGE) for count in counts)]).cumsum(0)
        places = [torch.arange(count) + PAGE * int(page) for count, page in zip(counts, pages, strict=False)]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *places]), pages[:-1]

    @cached_property
    def most_pages(self) -> int:
        """Pages of the largest rank's block; all ranks send as many."""
        world = self.layout.world
        return max(1, *(sum(-(-(a + b) // PAGE) for a, b in self.lens(rank)) for rank in range(world)))

    @cached_property
    def most_rows(self) -> int:
        """Tokens of the rank that has most."""
        return max(1, *(sum(a + b for a, b in self.lens(rank)) for rank in range(self.layout.world)))

"""Places of the first and the newest tokens of each row in a small FP8 cache beside the pages of the rest.

Token t of a row is in the small cache if it is one of the first `first` or of the newest `recent` tokens. Row
b has one page of `first + recent` slots there: the first tokens keep theirs, the newest go around the others.
Tokens from `first` on are stored in the narrow pages too, as token `t - first`, when they come, so that
nothing has to be converted when they leave the small cache; attention reads those that have left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowkv.paged_cache import PageTable


class WindowStep(NamedTuple):
    """Where the tokens of a step go, and what was stored before it.

    Attributes:
        near_slots, far_slots: `[batch * tokens]` int32, slots in the small cache and in the pages; -1 for
            tokens that are not stored there.
        near_before, far_before: the tokens before a step of several tokens; None where there are none.
    """

    near_slots: torch.Tensor
    far_slots: torch.Tensor
    near_before: PageTable | None = None
    far_before: PageTable | None = None


class Window:
    """The small cache's part of the rows of a batch; nothing is read from the device.

    Args:
        table: the pages of each row.
        first, recent: tokens that are kept apart.

    Attributes:
        near, far: tables of what a step of one token attends to, in the small cache and in the pages.
    """

    def __init__(self, table: PageTable, first: int, recent: int) -> None:
        self.first, self.recent, self.size = first, recent, first + recent
        batch, device = table.batch_size, table.page_ids.device
        self._near_lens, self._far_lens = torch.zeros(2, batch, dtype=torch.int32, device=device).unbind()
        ids = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        self._begins = ids * self.size  # [batch, 1]
        self.near = PageTable.from_block_table(ids, self._near_lens, page_size=self.size)
        self.far = PageTable.from_block_table(table.page_ids, self._far_lens, page_size=table.page_size)

    def set_lens(self, seq_lens: torch.Tensor) -> None:
        """Makes the tables those of rows of these lengths, int32 `[batch]`."""
        torch.clamp(seq_lens, max=self.size, out=self._near_lens)
        torch.clamp(seq_lens - self.size, min=0, out=self._far_lens)

    def before(self, padded: bool) -> tuple[PageTable, PageTable]:
        """Tables of what the rows hold now; padded: with empty sequences before, between and after them."""
        near, far = (
            PageTable.from_block_table(
                *(between_padding(x) if padded else x.clone() for x in (table.page_ids, lens)),
                page_size=table.page_size,
            )
            for table, lens in ((self.near, self._near_lens), (self.far, self._far_lens))
        )
        return near, far

    def slots(
        self, slots: torch.Tensor, first_slots: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of new tokens in the small cache and in the pages, flat.

        Args:
            slots: `[batch, tokens]` int32 where all tokens would lie in the pages; -1 for padding.
            first_slots: `[batch]` slot of each row's first token.
            seq_lens: `[batch]` lengths with the new tokens.
        """
        places, stored = slots - first_slots[:, None], slots >= 0
        is_first = places < self.first
        near = torch.where(is_first, places, self.first + (places - self.first) % self.recent) + self._begins
        is_near = stored & (is_first | (places >= seq_lens[:, None] - self.recent))
        near = torch.where(is_near, near, -1)
        far = torch.where(stored & ~is_first, slots - self.first, -1)
        return near.flatten(), far.flatten()


def between_padding(rows: torch.Tensor) -> torch.Tensor:
    """Rows `[batch, ...]` as `[2 * batch + 1, ...]` with zeros before, between and after them."""
    spread = rows.new_zeros(2 * rows.shape[0] + 1, *rows.shape[1:])
    spread[1::2] = rows
    return spread

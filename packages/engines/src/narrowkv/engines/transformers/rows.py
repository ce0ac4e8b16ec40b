"""Slots of the tokens of each row of a batch, and how a step of the model advances them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowkv.attn_decode import DecodePlan, plan_decode
from narrowkv.attn_prefill import PrefillPlan, plan_prefill
from narrowkv.engines.transformers.window import Window, WindowStep, between_padding
from narrowkv.paged_cache import PagedKVCache, PageTable


@dataclass(frozen=True)
class ForwardPass:
    """What the layers share in one forward pass.

    Attributes:
        tokens: new tokens of each row, padding included.
        slots: `[batch * tokens]` int32, where each new token is stored; -1 for padding. That of steps of one
            token is written again by the next step.
        table: the pages of each sequence, with the new tokens in the lengths.
        starts: `[sequences + 1]` int32, where each sequence's queries begin; None if every row has one query.
        window: the same for layers that keep first and newest tokens apart, or None.
    """

    tokens: int
    slots: torch.Tensor
    table: PageTable
    starts: torch.Tensor | None
    window: WindowStep | None = None


class PaddedBatch:
    """The rows of a batch. Row b has the pages `b * pages .. (b + 1) * pages`; its padding is not stored.

    Nothing is read from the device: lengths, slots and starts are computed there.

    Args:
        batch: rows.
        max_length: tokens that a row can hold.
        page_size: tokens a page.
        device: where the cache is.
        first, recent: tokens of each row that some layers keep apart, the first and the newest.

    Attributes:
        first_slot: `[batch]` int32, where each row's first token is stored.
    """

    def __init__(
        self, batch: int, max_length: int, page_size: int, device: torch.device, *, first: int = 0,
        recent: int = 0,
    ) -> None:  # fmt: skip
        self.batch, self.max_length, self.page_size, self.device = batch, max_length, page_size, device
        self.pages = -(-max_length // page_size)
        ids = torch.arange(batch * self.pages, dtype=torch.int32, device=device)
        # Of each row: the slot of its last token, and its length; a step moves both on by one operation.
        self._state = torch.zeros(2, batch, dtype=torch.int32, device=device)
        self._slots, self.seq_lens = self._state.unbind()
        self.table = PageTable.from_block_table(
            ids.view(batch, self.pages), self.seq_lens, page_size=page_size
        )
        self.first_slot = torch.arange(batch, dtype=torch.int32, device=device) * (self.pages * page_size)
        self.window = Window(self.table, first, recent) if recent else None
        self.length = 0
        self.step: ForwardPass | None = None
        self._one_token = ForwardPass(1, self._slots, self.table, None)
        self.set_lens(self.seq_lens)
        self._decode_plans: dict[Any, DecodePlan] = {}
        self._prefill_plans: dict[Any, PrefillPlan] = {}

    def advance(self, tokens: int, padding: torch.Tensor | None) -> ForwardPass:
        """Makes room for the next tokens of every row.

        Args:
            tokens: new tokens of each row, padding included.
            padding: `[batch, at least tokens]`, 0 for padding, which is at the ends of a row; its last
                columns are the new tokens. None if there is none.

        Raises:
            ValueError: the rows cannot hold that many.
        """
        if self.length + tokens > self.max_length:
            raise ValueError(
                f"NarrowCache must have max_length of at least {self.length + tokens} for these tokens, got "
                f"{self.max_length}: make it with the length of the prompt and of all new tokens"
            )
        before: tuple[PageTable, PageTable] | tuple[None, None] = (None, None)
        if self.window is not None and tokens > 1 and self.length:
            before = self.window.before(padding is not None)
        self.length += tokens
        if tokens != 1:
            self._prefill_plans.clear()  # their scratch is sized for one chunk
        if padding is None:
            self.step = self._advance_all(tokens)
        elif tokens == 1:
            kept = padding[:, -1].bool()
            self._state.add_(kept)
            self.step = ForwardPass(1, torch.where(kept, self._slots, -1), self.table, None)
        else:
            self.step = self._advance_padded(tokens, padding[:, -tokens:])
        if self.window is not None:
            self.window.set_lens(self.seq_lens)
            slots = self.window.slots(
                self.step.slots.view(self.batch, tokens), self.first_slot, self.seq_lens
            )
            self.step = replace(self.step, window=WindowStep(*slots, *before))
        return self.step

    def _advance_all(self, tokens: int) -> ForwardPass:
        self._state.add_(tokens)
        if tokens == 1:
            return self._one_token
        index = torch.arange(1 - tokens, 1, dtype=torch.int32, device=self.device)
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * tokens
        return ForwardPass(tokens, (self._slots[:, None] + index).flatten(), self.table, starts)

    def _advance_padded(self, tokens: int, padding: torch.Tensor) -> ForwardPass:
        """Sequences of padding, which attend to nothing, stand between the rows' sequences."""
        starts, counts = interleaved_starts(padding)
        kept = padding.bool()
        index = self._slots[:, None] + kept.cumsum(1, dtype=torch.int32)
        self._state.add_(counts)
        table = PageTable.from_block_table(
            between_padding(self.table.page_ids), between_padding(self.seq_lens), page_size=self.page_size
        )
        return ForwardPass(tokens, torch.where(kept, index, -1).flatten(), table, starts)

    def crop(self, tokens: int) -> None:
        """Forgets the last tokens of every row."""
        self.length -= tokens
        self._state.sub_(self.seq_lens.clamp(max=tokens))

    def clear(self) -> None:
        """Forgets all tokens."""
        self.length, self.step = 0, None
        self.set_lens(torch.zeros_like(self.seq_lens))

    def set_lens(self, seq_lens: torch.Tensor) -> None:
        """Makes each row as long as the int32 `[batch]` tensor says."""
        self.seq_lens.copy_(seq_lens)
        torch.add(self.first_slot, self.seq_lens - 1, out=self._slots)
        if self.window is not None:
            self.window.set_lens(self.seq_lens)

    def decode_plan(self, q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> DecodePlan:
        """The plan of a decode step over such a cache and table, made once for all layers of a shape."""
        key = (q.shape, q.dtype, cache.num_kv_heads, cache.format, cache.page_size)
        plan = self._decode_plans.get(key)
        if plan is None:
            plan = self._decode_plans[key] = plan_decode(q, cache, table)
        return plan

    def prefill_plan(self, q: torch.Tensor, cache: PagedKVCache, step: ForwardPass) -> PrefillPlan | None:
        """The plan of this chunk, made once for all layers of a shape.

        None where torch.compile traces, which cannot follow how a plan is made: the operator makes its own.
        """
        if torch.compiler.is_compiling():
            return None
        key = (q.shape, q.dtype, cache.num_kv_heads, cache.format)
        plan = self._prefill_plans.get(key)
        if plan is None:
            assert step.starts is not None
            plan = self._prefill_plans[key] = plan_prefill(
                q, cache, step.table, step.starts, max_q_len=step.tokens, max_seq_len=self.length,
                max_kv_tokens=self.batch * self.length,
            )  # fmt: skip
        return plan


def interleaved_starts(padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where sequences begin if every row's tokens are a sequence, and the padding between them, too.

    Args:
        padding: `[batch, tokens]`, 0 for padding, which is at the ends of a row.

    Returns:
        `[2 * batch + 2]` int32 starts, of sequences 0, 2, 4... of padding and 1, 3, 5... of the rows; and
        `[batch]` int32, the tokens of each row.

    Example:
        >>> starts, counts = interleaved_starts(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]))
        >>> starts.tolist(), counts.tolist()
        ([0, 2, 4, 4, 7, 8], [2, 3])
    """
    batch, tokens = padding.shape
    seen = padding.bool().cumsum(1)
    counts = seen[:, -1].to(torch.int32)
    begin = (seen == 0).sum(1) + torch.arange(batch, device=padding.device) * tokens
    starts = torch.zeros(2 * batch + 2, dtype=torch.int32, device=padding.device)
    starts[1:-1:2] = begin
    starts[2:-1:2] = begin + counts
    starts[-1:].fill_(batch * tokens)
    return starts, counts

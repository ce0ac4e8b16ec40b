"""Page tables: the pages of each sequence, from either form of metadata that engines keep."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from narrowkv.runtime.errors import (
    check_dtype,
    check_index_vector,
    check_positive_int,
    check_same_device,
    check_shape,
)
from narrowkv.runtime.operation import Bounded

NO_PAGE = -1  # in a block table, past the end of a sequence

# Metadata of block tables that passed the checks: an engine makes a table in each step.
_checked_tables: Bounded[bool] = Bounded(4096)


def _check_block_table(name: str, block_table: torch.Tensor, lens: torch.Tensor, page_size: int) -> None:
    """Checks the metadata of `PageTable.from_block_table`; name: of the lengths.

    Raises:
        TypeError, ValueError: for wrong dtypes or shapes.
    """
    check_positive_int("page_size", page_size)
    check_dtype("block_table", block_table, (torch.int32, torch.int64))
    if block_table.dim() != 2:
        raise ValueError(f"block_table must have shape [batch, max_pages], got {tuple(block_table.shape)}")
    check_index_vector(name, lens, "batch")
    if lens.shape[0] != block_table.shape[0]:
        raise ValueError(f"{name} must have batch = {block_table.shape[0]} entries, got {lens.shape[0]}")
    check_same_device(block_table=block_table, **{name: lens})


@dataclass(frozen=True, eq=False)
class PageTable:
    """Page ids and lengths of a batch.

    It holds the caller's tensors by reference: updating them in place updates the table. Two tables are equal
    only if they are the same object.

    Attributes:
        kind: "ragged" or "block_table".
        page_ids: `[nnz]` (ragged: kv_indices) or `[batch, max_pages]` (block table). This and the tensors
            below are int32 or int64, and may be strided.
        page_size: tokens a page.
        kv_indptr: ragged: `[batch + 1]`, where each sequence's page ids begin.
        kv_last_page_len: ragged: `[batch]`, tokens in each sequence's last page.
        seq_lens: block table: `[batch]`.
        before_append: whether the lengths leave out the tokens of the call. `prefill_append`, which appends
            them, takes such tables only; every other operation refuses them.
        key_ranges: `[batch, q_len, 2]` int32, contiguous: the keys [begin, end) that each query token attends
            to; None where lengths and a window say it. See `with_key_ranges`.
        tree_mask: `[batch, q_len]` int32 or int64, contiguous: which of the last q_len keys each query token
            attends to; None for those up to itself. See `with_tree_mask`.
    """

    kind: str
    page_ids: torch.Tensor
    page_size: int
    kv_indptr: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    before_append: bool = False
    key_ranges: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None

    @classmethod
    def from_ragged(
        cls,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        *,
        page_size: int,
        num_pages: int | None = None,
        validate: bool = False,
    ) -> PageTable:
        """From FlashInfer-style metadata.

        Args:
            kv_indptr: `[batch + 1]` int32 or int64, any stride.
            kv_indices: `[nnz]` page ids, int32 or int64, any stride.
            kv_last_page_len: `[batch]` int32 or int64, any stride: 1..page_size, or 0 for an empty sequence.
            page_size: tokens a page.
            num_pages: with `validate`, the page ids' bound.
            validate: look at the values, which waits for the device.

        Raises:
            TypeError, ValueError: for wrong dtypes or shapes; with `validate` also for wrong values.

        Example:
            >>> i32 = dict(dtype=torch.int32)
            >>> indptr, indices = torch.tensor([0, 2], **i32), torch.tensor([3, 1], **i32)
            >>> table = PageTable.from_ragged(indptr, indices, torch.tensor([5], **i32), page_size=16)
            >>> table.seq_lens_tensor().tolist()
            [21]
        """
        check_positive_int("page_size", page_size)
        check_index_vector("kv_indptr", kv_indptr, "batch + 1")
        check_index_vector("kv_indices", kv_indices, "page ids")
        check_index_vector("kv_last_page_len", kv_last_page_len, "batch")
        if kv_indptr.shape[0] != kv_last_page_len.shape[0] + 1:
            raise ValueError(
                f"kv_indptr must have batch + 1 = {kv_last_page_len.shape[0] + 1} entries, "
                f"got {kv_indptr.shape[0]}"
            )
        check_same_device(kv_indptr=kv_indptr, kv_indices=kv_indices, kv_last_page_len=kv_last_page_len)
        table = cls("ragged", kv_indices, page_size, kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
        if validate:
            table.check_values(num_pages)
        return table

    @classmethod
    def from_block_table(
        cls,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        *,
        cached_lens: torch.Tensor | None = None,
        page_size: int,
        num_pages: int | None = None,
        validate: bool = False,
    ) -> PageTable:
        """From vLLM-style metadata.

        Args:
            block_table: `[batch, max_pages]` int32 or int64, any strides; entries past a sequence's end are
                never read.
            seq_lens: `[batch]` tokens of each sequence, those of the call included; int32 or int64, any
                stride.
            cached_lens: `[batch]`, instead of `seq_lens`: tokens that the cache holds before the call
                appends its own. The block table has pages for both. For `prefill_append`.
            page_size, num_pages, validate: as for `from_ragged`.

        Raises:
            TypeError, ValueError: for wrong dtypes or shapes; with `validate` also for wrong values.

        Example:
            >>> i32 = dict(dtype=torch.int32)
            >>> block_table, seq_lens = torch.tensor([[3, 1]], **i32), torch.tensor([21], **i32)
            >>> PageTable.from_block_table(block_table, seq_lens, page_size=16).capacity
            32
            >>> PageTable.from_block_table(block_table, cached_lens=seq_lens, page_size=16).before_append
            True
        """
        if (seq_lens is None) == (cached_lens is None):
            raise ValueError(
                "pass either seq_lens (lengths with the call's tokens) or cached_lens (lengths before "
                f"prefill_append stores them), got {'neither' if seq_lens is None else 'both'}"
            )
        name, lens = ("seq_lens", seq_lens) if cached_lens is None else ("cached_lens", cached_lens)
        assert lens is not None
        try:
            checked = (
                type(page_size), page_size, type(block_table), block_table.shape, block_table.dtype,
                block_table.device, type(lens), lens.shape, lens.dtype, lens.device,
            )  # fmt: skip
            known = checked in _checked_tables
        except (AttributeError, TypeError):  # no tensor, or shapes that torch traces
            checked, known = None, False
        if not known:
            _check_block_table(name, block_table, lens, page_size)
            if checked is not None:
                _checked_tables.keep(checked, True)
        table = cls(
            "block_table", block_table, page_size, seq_lens=lens, before_append=cached_lens is not None
        )
        if validate:
            table.check_values(num_pages)
        return table

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        lens = self.seq_lens if self.seq_lens is not None else self.kv_last_page_len
        assert lens is not None
        return int(lens.shape[0])

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence can have according to the shapes."""
        return int(self.page_ids.shape[-1]) * self.page_size

    def with_key_ranges(self, key_ranges: torch.Tensor) -> PageTable:
        """The same table with the keys that each query token attends to, for `paged_decode`.

        A sequence whose keys are spread over ranks needs them where there are several query tokens or a
        window: the keys that a rank holds up to a position are not its length minus a constant.

        Args:
            key_ranges: `[batch, q_len, 2]` int32, contiguous, held by reference: query token i of sequence b
                attends to keys `key_ranges[b, i, 0]` to `key_ranges[b, i, 1] - 1`. Neither number may
                decrease from a query token to the next. The kernel clamps ranges to the sequence's length, so
                that wrong numbers make wrong results, but read nothing beyond the sequence.

        Raises:
            TypeError, ValueError: for a wrong dtype, shape, device or strides.

        Example:
            >>> i32 = dict(dtype=torch.int32)
            >>> table = PageTable.from_block_table(
            ...     torch.tensor([[3, 1]], **i32), torch.tensor([21], **i32), page_size=16
            ... )
            >>> table.with_key_ranges(torch.tensor([[[0, 19], [0, 21]]], **i32)).key_ranges.shape
            torch.Size([1, 2, 2])
        """
        check_dtype("key_ranges", key_ranges, (torch.int32,))
        check_shape("key_ranges", key_ranges, (self.batch_size, "q_len", 2))
        if not key_ranges.is_contiguous():
            raise ValueError(f"key_ranges must be contiguous, got strides {key_ranges.stride()}")
        check_same_device(page_ids=self.page_ids, key_ranges=key_ranges)
        return replace(self, key_ranges=key_ranges)

    def with_tree_mask(self, tree_mask: torch.Tensor) -> PageTable:
        """The same table with a tree of speculative tokens, for `paged_decode`.

        Query token i of a sequence attends to every key before the sequence's last q_len ones, and to those
        of the last q_len whose bits are set. The order among the new tokens does not matter. A window counts
        from the place `seq_len - q_len + i`; where it should count from a token's depth in the tree, give the
        window as `with_key_ranges` too.

        Args:
            tree_mask: `[batch, q_len]`, contiguous, held by reference: bit j of element `[b, i]` says whether
                query token i of sequence b attends to the j-th of the sequence's last q_len keys. int32 holds
                up to 32 tokens, int64 up to 64; higher bits are ignored. See `pack_tree_mask` and
                `tree_mask_from_custom_mask`.

        Raises:
            TypeError, ValueError: for a wrong dtype, shape, device or strides.

        Example:
            >>> i32 = dict(dtype=torch.int32)
            >>> table = PageTable.from_block_table(
            ...     torch.tensor([[3, 1]], **i32), torch.tensor([21], **i32), page_size=16
            ... )
            >>> star = torch.tensor([[0b001, 0b011, 0b101]], **i32)  # two continuations of one token
            >>> table.with_tree_mask(star).tree_mask.shape
            torch.Size([1, 3])
        """
        check_dtype("tree_mask", tree_mask, (torch.int32, torch.int64))
        check_shape("tree_mask", tree_mask, (self.batch_size, "q_len"))
        width = 8 * tree_mask.element_size()
        if tree_mask.shape[1] > width:
            hint = "use int64" if width == 32 else "no tree has more than 64"
            raise ValueError(
                f"tree_mask must have at most {width} query tokens in {tree_mask.dtype}, "
                f"got {tree_mask.shape[1]}: {hint}"
            )
        if not tree_mask.is_contiguous():
            raise ValueError(f"tree_mask must be contiguous, got strides {tree_mask.stride()}")
        check_same_device(page_ids=self.page_ids, tree_mask=tree_mask)
        return replace(self, tree_mask=tree_mask)

    def seq_lens_tensor(self) -> torch.Tensor:
        """`[batch]` lengths: as given, or int32 and computed on the device for a ragged table."""
        if self.seq_lens is not None:
            return self.seq_lens
        assert self.kv_indptr is not None
        assert self.kv_last_page_len is not None
        pages = self.kv_indptr[1:] - self.kv_indptr[:-1]
        lens = (pages - 1) * self.page_size + self.kv_last_page_len
        return torch.where(pages > 0, lens, torch.zeros_like(lens)).to(torch.int32)

    def to_block_table(self, max_pages: int) -> PageTable:
        """The same table with a `[batch, max_pages]` block table, built on the device; unused entries are -1.

        Args:
            max_pages: columns of the table. Page ids beyond it are dropped without an error, because reading
                the lengths would wait for the device; `check_values` of the new table reports them.
        """
        if self.kind == "block_table":
            return self
        assert self.kv_indptr is not None
        column = torch.arange(max_pages, device=self.page_ids.device)
        begin, end = self.kv_indptr[:-1, None].long(), self.kv_indptr[1:, None].long()
        index = begin + column
        inside = index < end
        padded = torch.cat([self.page_ids, self.page_ids.new_full((1,), NO_PAGE)])
        ids = padded[index.clamp(0, self.page_ids.shape[0])]
        return PageTable.from_block_table(
            torch.where(inside, ids, NO_PAGE),
            self.seq_lens_tensor(),
            page_size=self.page_size,
        )

    def pages_of(self, seq: int) -> tuple[torch.Tensor, int]:
        """One sequence's page ids (int64) and length. Waits for the device."""
        seq_len = int(self.seq_lens_tensor()[seq])
        count = -(-seq_len // self.page_size)
        if self.kind == "block_table":
            return self.page_ids[seq, :count].long(), seq_len
        assert self.kv_indptr is not None
        begin = int(self.kv_indptr[seq])
        return self.page_ids[begin : begin + count].long(), seq_len

    def check_values(self, num_pages: int | None = None) -> None:
        """Looks at the metadata's values, which waits for the device.

        Raises:
            ValueError: naming the first fault found.
        """
        lens = self.seq_lens_tensor().cpu()
        name = "cached_lens" if self.before_append else "seq_lens"
        if self.kind == "ragged":
            assert self.kv_indptr is not None
            assert self.kv_last_page_len is not None
            indptr, last = self.kv_indptr.cpu(), self.kv_last_page_len.cpu()
            if int(indptr[0]) != 0:
                raise ValueError(f"kv_indptr must begin with 0, got {int(indptr[0])}")
            if bool((indptr.diff() < 0).any()):
                raise ValueError(f"kv_indptr must not decrease, got {indptr.tolist()[:16]}")
            if int(indptr[-1]) > self.page_ids.shape[0]:
                raise ValueError(
                    f"kv_indptr must end within kv_indices ({self.page_ids.shape[0]}), got {int(indptr[-1])}"
                )
            occupied = indptr.diff() > 0
            if bool(((last < 1) & occupied).any()) or bool((last > self.page_size).any()):
                raise ValueError(
                    f"kv_last_page_len must lie in 1..{self.page_size}, got {last.tolist()[:16]}"
                )
            ids = self.page_ids[: int(indptr[-1])].cpu()
        else:
            if bool((lens < 0).any()):
                raise ValueError(f"{name} must not be negative, got {int(lens.min())}")
            if lens.numel() and int(lens.max()) > self.capacity:
                raise ValueError(
                    f"{name} must not exceed the table's capacity {self.capacity}, got {int(lens.max())}"
                )
            column = torch.arange(self.page_ids.shape[1])
            ids = self.page_ids.cpu()[column[None] * self.page_size < lens[:, None]]
        if ids.numel() and int(ids.min()) < 0:
            raise ValueError(f"page ids must not be negative, got {int(ids.min())}")
        if num_pages is not None and ids.numel() and int(ids.max()) >= num_pages:
            raise ValueError(f"page ids must be below num_pages = {num_pages}, got {int(ids.max())}")

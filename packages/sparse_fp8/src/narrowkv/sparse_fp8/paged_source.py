"""A source of latent attention: rows, and a page table of the sequences that attend to all of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from narrowkv.paged_cache import PageTable
from narrowkv.paged_cache.bound_table import BOUND_TABLES, bind_table
from narrowkv.runtime.errors import (
    check_dtype,
    check_instance,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
)
from narrowkv.sparse_fp8.binding import (
    bind_16_bit_rows,
    byte_range,
    format_id_of,
)
from narrowkv.sparse_fp8.kernels.rows import PagedForm, PageList
from narrowkv.sparse_fp8.layouts import HEAD_DIM, ROPE_DIM
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import MOST_ROWS, Source, check_scales

__all__ = ["PagedSource", "flat_rows"]


def flat_rows(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """16-bit rows `[num_rows, columns]` of pages `[num_pages, page_size, columns]`; others as they are.

    Raises:
        TypeError, ValueError: naming what was expected and what was given.
    """
    check_dtype("rows", rows, (torch.bfloat16, torch.float16))
    wide = HEAD_DIM + ROPE_DIM
    columns = wide if rows.dim() and rows.shape[-1] == wide else HEAD_DIM
    if rows.dim() == 3:
        check_shape("rows", rows, ("num_pages", page_size, columns))
        if rows.shape[0] > 1 and page_size > 1 and rows.stride(0) != page_size * rows.stride(1):
            raise ValueError(
                "rows must have pages that follow each other, a stride of page_size rows between them "
                f"({page_size} * {rows.stride(1)}), got {rows.stride(0)}: pass a contiguous cache"
            )
        step = rows.stride(1) if page_size > 1 else rows.stride(0)
        rows = rows.as_strided((rows.shape[0] * page_size, columns), (step, rows.stride(2)))
    check_shape("rows", rows, ("num_rows", columns))
    check_last_dim_contiguous("rows", rows)
    return rows


@dataclass(frozen=True, eq=False)
class PagedSource(Source):
    """Latent rows of sequences that a page table describes; attributes as those of `KVSource`.

    Attributes:
        rows: bf16 or fp16 `[num_rows, 512]` or `[num_rows, 576]`, or pages of them, or `DSV4Rows`.
        table: the pages of each sequence, and its length.
        num_tokens: sequences.
        nnz: page ids of a sequence; ragged: of all sequences.
        pages: what kernels are compiled for, with one query token of one head.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given. Values are not read.
    """

    rows: torch.Tensor | DSV4Rows
    table: PageTable
    pages: PagedForm = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the metadata once."""
        table = check_instance("page_table", self.table, PageTable)
        size = check_positive_int("page_size", table.page_size)
        if isinstance(self.rows, DSV4Rows):
            bound = self.rows.bound
            if size not in (1, self.rows.page_size) and self.rows.places.is_paged:
                raise ValueError(
                    f"page_table must have the page_size of rows, {self.rows.page_size}, or 1 (a page id "
                    f"is then a row number), got {size}"
                )
        elif isinstance(self.rows, torch.Tensor):
            bound = bind_16_bit_rows(flat_rows(self.rows, size))
        else:
            raise TypeError(f"rows must be a torch.Tensor or DSV4Rows, got {type(self.rows).__name__}")
        if bound.num_rows > MOST_ROWS:
            raise ValueError(f"rows must hold at most {MOST_ROWS} rows, got {bound.num_rows}")
        for name, mask in (("key_ranges", table.key_ranges), ("tree_mask", table.tree_mask)):
            if mask is not None:
                raise ValueError(
                    f"page_table must have no {name}, which only paged_decode takes: leave it out"
                )
        if table.before_append:
            raise ValueError(
                "page_table must hold lengths that include the tokens of this call, got lengths before an "
                "append (cached_lens): pass seq_lens"
            )
        bound_table = BOUND_TABLES.get(id(table)) or bind_table(table)
        csr = PageList(bound_table.ids, bound_table.row, bound_table.lens, *bound_table.steps)
        check_same_device(**bound.tensors, page_table=table.page_ids)
        named = {f"rows {name}": tensor for name, tensor in bound.tensors.items()}
        derived = {
            "num_tokens": bound_table.batch,
            "num_rows": bound.num_rows,
            "nnz": bound_table.max_pages,
            "device": table.page_ids.device,
            "int32_lists": False,
            "format": bound.format,
            "offsets_64_bit": bound.format.offsets_64_bit,
            "bound": bound,
            "pointers": bound.pointers,
            "csr": csr,
            "format_id": format_id_of(bound.pointers, csr, bound.format),
            "byte_ranges": tuple(byte_range(each) for each in {**named, **self.lists}.values()),
            "pages": PagedForm(size, table.kind == "ragged", 1, 1),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @cached_property
    def listed(self) -> int:
        """Rows that all sequences have room for, which is at least what they attend to."""
        return self.nnz * self.table.page_size * (1 if self.pages.RAGGED else self.num_tokens)

    @property
    def lists(self) -> dict[str, torch.Tensor]:
        """The tensors of the page table."""
        table = self.table
        found = {
            "page_ids": table.page_ids, "seq_lens": table.seq_lens, "kv_indptr": table.kv_indptr,
            "kv_last_page_len": table.kv_last_page_len,
        }  # fmt: skip
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def check_values(self, name: str) -> None:
        """Reads the page table, and the scales of the rows, on the host; this waits for the device.

        Raises:
            ValueError: lengths or page ids that the table or the rows do not have; a scale that no writer
                stores.
        """
        self.table.check_values(self.num_rows // self.pages.PAGE_SIZE)
        if isinstance(self.rows, DSV4Rows):
            named = [self.table.pages_of(seq)[0] * self.pages.PAGE_SIZE for seq in range(self.num_tokens)]
            slots = torch.arange(self.pages.PAGE_SIZE, device=self.device)
            rows = torch.cat([first[:, None] + slots for first in named]) if named else slots[:0]
            check_scales(name, self.rows, rows.flatten())

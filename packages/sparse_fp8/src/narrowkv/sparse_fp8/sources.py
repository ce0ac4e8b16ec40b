"""Sources: rows, and the lists, or the page table, of those that each query token attends to.

Example:
    >>> import torch
    >>> indptr = torch.tensor([0, 2, 3], dtype=torch.int32)
    >>> KVSource(torch.zeros(8, 512).bfloat16(), indptr, torch.tensor([5, -1, 0], dtype=torch.int32)).num_rows
    8
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from narrowkv.paged_cache import PageTable
from narrowkv.paged_cache.binding import BOUND_TABLES, bind_table
from narrowkv.runtime.errors import (
    check_dtype,
    check_instance,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
    check_tensor,
)
from narrowkv.runtime.launch import named_values
from narrowkv.sparse_fp8.binding import (
    BoundRows,
    RowsFormat,
    bind_16_bit_rows,
    byte_range,
    format_id_of,
)
from narrowkv.sparse_fp8.kernels.rows import Csr, PagedForm, PageList, RowPointers
from narrowkv.sparse_fp8.layouts import HEAD_DIM, ROPE_DIM
from narrowkv.sparse_fp8.rows import DSV4Rows

__all__ = ["KVSource", "PagedSource", "Source"]

_INTEGERS = (torch.int32, torch.int64)
# Kernels count rows and indices in 32 bits, including a tile past the end.
MOST_ROWS = 2**31 - 2**16


class Source:
    """What a plan and the launches of a call read of a source, however its rows are named."""

    rows: torch.Tensor | DSV4Rows
    num_tokens: int
    num_rows: int
    nnz: int
    device: torch.device
    int32_lists: bool
    format: RowsFormat
    offsets_64_bit: bool
    bound: BoundRows
    pointers: RowPointers
    csr: Csr | PageList
    format_id: int
    byte_ranges: tuple[tuple[int, int], ...]

    def _derive(
        self, bound: BoundRows, csr: Csr | PageList, *, num_tokens: int, nnz: int, int32_lists: bool
    ) -> None:
        """Sets the attributes that follow from the rows and from what names them."""
        tensors = {**bound.tensors, **self.lists}
        derived = {
            "num_tokens": num_tokens,
            "num_rows": bound.num_rows,
            "nnz": nnz,
            "device": next(iter(self.lists.values())).device,
            "int32_lists": int32_lists,
            "format": bound.format,
            "offsets_64_bit": bound.format.offsets_64_bit,
            "bound": bound,
            "pointers": bound.pointers,
            "csr": csr,
            "format_id": format_id_of(bound.pointers, csr, bound.format),
            "byte_ranges": tuple(byte_range(tensor) for tensor in tensors.values()),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @cached_property
    def listed(self) -> int:
        """Rows that all tokens attend to, at most."""
        return self.nnz

    @property
    def lists(self) -> dict[str, torch.Tensor]:
        """The tensors that name rows."""
        raise NotImplementedError

    @cached_property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """The tensors of `pointers` and `csr` and their sizes as a call's values, for each side of a call."""
        return {
            side: {
                **named_values(side, self.pointers), **named_values(side, self.csr),
                f"{side}_nnz": self.nnz, f"{side}_rows": self.num_rows,
            }
            for side in ("prefix", "extend")
        }  # fmt: skip

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What calls are checked and prepared for, of a source."""
        return (
            type(self), self.format_id, self.device, self.num_tokens, self.num_rows, self.nnz, self.listed,
            self.int32_lists,
        )  # fmt: skip

    @cached_property
    def layout(self) -> tuple[int, bool, str]:
        """What the launches of a call depend on; see `narrowkv.sparse_fp8.launches.SideLayout`."""
        return self.format_id, self.offsets_64_bit, ""

    @property
    def requires_grad(self) -> bool:
        """Whether the rows do: quantised ones never do."""
        return isinstance(self.rows, torch.Tensor) and self.rows.requires_grad

    def check_values(self, name: str) -> None:
        """Reads what names rows, and their scales, on the host; this waits for the device.

        Raises:
            ValueError: naming the first fault found.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class KVSource(Source):
    """Rows, and which of them each query token attends to (a CSR).

    Everything but values is checked when an object is made, and never again: keep it as long as its tensors
    stay where they are, and write new index lists into them.

    Attributes:
        rows: bf16 or fp16 `[num_rows, 512]` or `[num_rows, 576]` (RoPE last), or `DSV4Rows`.
        indptr: int32 or int64 `[num_tokens + 1]`, from 0 upwards; contiguous.
        indices: int32 or int64 `[nnz]`, row numbers in any order; -1 is skipped; a row named twice counts
            twice; contiguous.
        num_tokens: query tokens.
        num_rows: rows that an index may name.
        nnz: indices of all tokens.
        device: where the tensors lie.
        int32_lists: whether both index lists are int32.
        format: how the rows are stored.
        offsets_64_bit: whether an offset into the rows can need more than 31 bits.
        bound, pointers: the rows as kernels take them.
        csr: the index lists as kernels take them.
        format_id: an id that sources with the same formats, dtypes and strides have in common.
        byte_ranges: for each tensor, the addresses of its first byte and of the byte after its last.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given. Values are not read.

    Example:
        >>> import torch
        >>> pool = torch.zeros(8, 512, dtype=torch.bfloat16)
        >>> indptr = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> KVSource(pool, indptr, torch.tensor([5, -1, 0], dtype=torch.int32)).num_tokens
        2
    """

    rows: torch.Tensor | DSV4Rows
    indptr: torch.Tensor
    indices: torch.Tensor

    def __post_init__(self) -> None:
        """Checks the metadata once."""
        if torch.compiler.is_compiling():
            return  # traced calls read the tensors alone, and their operators make sources that check them
        check_dtype("indptr", self.indptr, _INTEGERS)
        check_dtype("indices", self.indices, _INTEGERS)
        if self.indptr.dim() != 1 or self.indptr.shape[0] < 1:
            raise ValueError(f"indptr must have shape [num_tokens + 1], got {list(self.indptr.shape)}")
        check_shape("indices", self.indices, ("nnz",))
        for name, vector in (("indptr", self.indptr), ("indices", self.indices)):
            check_last_dim_contiguous(name, vector)
            if vector.shape[0] > MOST_ROWS:
                raise ValueError(f"{name} must have at most {MOST_ROWS} elements, got {vector.shape[0]}")
        bound = _bind_rows(self.rows)
        check_same_device(**bound.tensors, indptr=self.indptr, indices=self.indices)
        self._derive(
            bound,
            Csr(self.indptr, self.indices, 0),
            num_tokens=self.indptr.shape[0] - 1,
            nnz=self.indices.shape[0],
            int32_lists=self.indptr.dtype == self.indices.dtype == torch.int32,
        )

    @property
    def lists(self) -> dict[str, torch.Tensor]:
        """The index lists."""
        return {"indptr": self.indptr, "indices": self.indices}

    def check_values(self, name: str) -> None:
        """Reads the CSR, and the scales of the rows that it names, on the host; this waits for the device.

        Raises:
            ValueError: `indptr` does not start at 0, decreases or passes the end of `indices`; an index is
                below -1 or not a row; a scale of a row that is named is not a power of two.
        """
        indptr = self.indptr.cpu()
        if int(indptr[0]) != 0:
            raise ValueError(f"{name}.indptr must start at 0, got {int(indptr[0])}")
        decreasing = (indptr[1:] < indptr[:-1]).nonzero()
        if decreasing.numel():
            at = int(decreasing[0])
            raise ValueError(
                f"{name}.indptr must not decrease, got {int(indptr[at])} and then {int(indptr[at + 1])} "
                f"at elements {at} and {at + 1}"
            )
        if int(indptr[-1]) > self.nnz:
            raise ValueError(f"{name}.indptr must end within the {self.nnz} indices, got {int(indptr[-1])}")
        used = self.indices[: int(indptr[-1])]
        if not used.numel():
            return
        low, high = int(used.min()), int(used.max())
        if low < -1 or high >= self.num_rows:
            raise ValueError(
                f"{name}.indices must be -1 or rows below {self.num_rows}, got {low if low < -1 else high}"
            )
        if isinstance(self.rows, DSV4Rows):
            check_scales(name, self.rows, used[used >= 0])


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
        bound = _bind_rows(self.rows, size)
        if isinstance(self.rows, DSV4Rows):
            if size not in (1, self.rows.page_size) and self.rows.places.is_paged:
                raise ValueError(
                    f"page_table must have the page_size of rows, {self.rows.page_size}, or 1 (a page id "
                    f"is then a row number), got {size}"
                )
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
        object.__setattr__(self, "pages", PagedForm(size, table.kind == "ragged", 1, 1))
        self._derive(bound, csr, num_tokens=bound_table.batch, nnz=bound_table.max_pages, int32_lists=True)

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


def _bind_rows(rows: object, page_size: int | None = None) -> BoundRows:
    """Rows as kernels take them; 16-bit ones may be pages of `page_size` rows where there is a page table.

    Raises:
        TypeError, ValueError: naming what was expected and what was given.
    """
    if isinstance(rows, DSV4Rows):
        bound = rows.bound
    elif isinstance(rows, torch.Tensor):
        check_dtype("rows", rows, (torch.bfloat16, torch.float16))
        wide = HEAD_DIM + ROPE_DIM
        columns = wide if rows.shape[-1:] == (wide,) else HEAD_DIM
        if page_size is not None and rows.dim() == 3:
            rows = _flat_rows(rows, page_size, columns)
        check_shape("rows", rows, ("num_rows", columns))
        check_last_dim_contiguous("rows", rows)
        bound = bind_16_bit_rows(rows)
    else:
        raise TypeError(f"rows must be a torch.Tensor or DSV4Rows, got {type(rows).__name__}")
    if bound.num_rows > MOST_ROWS:
        raise ValueError(f"rows must hold at most {MOST_ROWS} rows, got {bound.num_rows}")
    return bound


def _flat_rows(rows: torch.Tensor, page_size: int, columns: int) -> torch.Tensor:
    """16-bit rows `[num_rows, columns]` of pages `[num_pages, page_size, columns]`."""
    check_shape("rows", rows, ("num_pages", page_size, columns))
    if rows.shape[0] > 1 and page_size > 1 and rows.stride(0) != page_size * rows.stride(1):
        raise ValueError(
            "rows must have pages that follow each other, a stride of page_size rows between them "
            f"({page_size} * {rows.stride(1)}), got {rows.stride(0)}: pass a contiguous cache"
        )
    step = rows.stride(1) if page_size > 1 else rows.stride(0)
    return rows.as_strided((rows.shape[0] * page_size, columns), (step, rows.stride(2)))


def check_scales(name: str, rows: DSV4Rows, index: torch.Tensor | None = None) -> None:
    """Refuses scales of rows `index`, or of all rows, that no writer stores; this waits for the device.

    Raises:
        ValueError: a scale is negative, NaN or infinite, or no power of two where the layout has those.
    """
    scales = check_tensor("scale", rows.unpack()[2])
    if index is not None:
        scales = scales[index.long()]
    good, wanted = torch.isfinite(scales) & (scales >= 0), "finite and not negative"
    if rows.places.scale in ("e8m0", "pow2"):
        mantissa, _ = torch.frexp(scales)
        good, wanted = good & (mantissa == 0.5), "powers of two"
    bad = ~good
    if bool(bad.any()):
        raise ValueError(
            f"{name}.rows must have scales that are {wanted}, got {float(scales[bad][0])} "
            f"({int(bad.sum())} such values)"
        )

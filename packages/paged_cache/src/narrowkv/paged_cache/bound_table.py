"""A page table as the arguments of kernels, found once for each table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.page_table import PageTable
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.operation import Bounded
from narrowkv.runtime.spans import spans_of

_INT32_MAX = 2**31 - 1


class BoundTable(NamedTuple):
    """A page table as the arguments of kernels.

    Attributes:
        ids, row, lens, num_ids, max_pages: see `Table`. `ids` has an element even if the table has none.
        steps: strides of ids, row and lens, as `TableSteps` has them.
        batch: sequences.
        spans: addresses that the tensors take.
        ranges, tree: `key_ranges` and `tree_mask` of the table, or None.
        number: the same for all tables that ask for the same kernels and, with the same batch, pass the same
            checks.
    """

    ids: torch.Tensor
    row: torch.Tensor | int
    lens: torch.Tensor
    num_ids: int
    max_pages: int
    steps: tuple[int | None, int | None, int | None]
    batch: int
    spans: list[tuple[int, int]]
    ranges: torch.Tensor | None
    tree: torch.Tensor | None
    number: int


BOUND_TABLES: ByIdentity[BoundTable] = ByIdentity()
_numbers: dict[Any, int] = {}
# Of block tables of one shape: a bound one without its tensors, and the bytes that page ids and lengths span.
_layouts: Bounded[tuple[tuple[Any, ...], int, int]] = Bounded(4096)


def bind_table(table: PageTable) -> BoundTable:
    """The page table as kernel arguments; `BOUND_TABLES` has it from then on.

    Engines make a table in each step: a block table is looked at once for each shape.

    Raises:
        ValueError: it spans more page ids than kernels count.
    """
    ids, lens = table.page_ids, table.seq_lens
    if lens is None or table.key_ranges is not None or table.tree_mask is not None:
        return BOUND_TABLES.keep(table, _bound_table(table))
    key = (
        table.page_size, table.before_append, ids.shape, ids.stride(), ids.dtype, ids.device,
        lens.shape, lens.stride(), lens.dtype, lens.device,
    )  # fmt: skip
    found = _layouts.get(key)
    if found is None:
        bound = _bound_table(table)
        if ids.numel() and lens.numel():
            (_, ids_end), (_, lens_end) = bound.spans
            sizes = ids_end - ids.data_ptr(), lens_end - lens.data_ptr()
            _layouts.keep(
                key, ((bound.num_ids, bound.max_pages, bound.steps, bound.batch, bound.number), *sizes)
            )
        return BOUND_TABLES.keep(table, bound)
    (num_ids, max_pages, steps, batch, number), ids_bytes, lens_bytes = found
    first, begin = ids.data_ptr(), lens.data_ptr()
    spans = [(first, first + ids_bytes), (begin, begin + lens_bytes)]
    bound = BoundTable(ids, ids.stride(0), lens, num_ids, max_pages, steps, batch, spans, None, None, number)
    return BOUND_TABLES.keep(table, bound)


def _bound_table(table: PageTable) -> BoundTable:
    ids, indptr = table.page_ids, table.kv_indptr
    lens = table.kv_last_page_len if table.seq_lens is None else table.seq_lens
    assert lens is not None
    num_ids = 1 + sum((size - 1) * stride for size, stride in zip(ids.shape, ids.stride(), strict=True))
    if num_ids > _INT32_MAX:
        raise ValueError(
            f"page_table must span fewer than 2**31 page ids, got shape {tuple(ids.shape)} with strides "
            f"{ids.stride()}"
        )
    steps = step_of(ids), None if indptr is None else step_of(indptr), step_of(lens)
    signature = (
        table.kind, table.page_size, table.before_append, steps, ids.device, ids.dtype, lens.dtype,
        lens.dim(), lens.device, ids.shape[-1] == 0,
        None if indptr is None else (indptr.dtype, indptr.device),
        None if table.key_ranges is None else table.key_ranges.shape[1:],
        None if table.tree_mask is None else (table.tree_mask.shape[1:], table.tree_mask.dtype),
    )  # fmt: skip
    return BoundTable(
        ids if ids.numel() else ids.new_zeros(1, 1),
        ids.stride(0) if indptr is None else indptr, lens, max(num_ids, 1), ids.shape[-1], steps,
        lens.shape[0], spans_of(ids, lens, indptr, table.key_ranges, table.tree_mask), table.key_ranges,
        table.tree_mask, _numbers.setdefault(signature, len(_numbers)),
    )  # fmt: skip


def step_of(tensor: torch.Tensor) -> int | None:
    """The stride of the last dimension, or None for 1, as `Table` has it."""
    return None if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.stride(-1)

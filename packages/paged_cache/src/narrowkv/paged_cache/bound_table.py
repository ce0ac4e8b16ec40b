"""A page table as the arguments of kernels, found once for each table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.page_table import PageTable
from narrowkv.runtime.identity import ByIdentity
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


def bind_table(table: PageTable) -> BoundTable:
    """The page table as kernel arguments; `BOUND_TABLES` has it from then on.

    Raises:
        ValueError: it spans more page ids than kernels count.
    """
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
    bound = BoundTable(
        ids if ids.numel() else ids.new_zeros(1, 1),
        ids.stride(0) if indptr is None else indptr, lens, max(num_ids, 1), ids.shape[-1], steps,
        lens.shape[0], spans_of(ids, lens, indptr, table.key_ranges, table.tree_mask), table.key_ranges,
        table.tree_mask, _numbers.setdefault(signature, len(_numbers)),
    )  # fmt: skip
    return BOUND_TABLES.keep(table, bound)


def step_of(tensor: torch.Tensor) -> int | None:
    """The stride of the last dimension, or None for 1, as `Table` has it."""
    return None if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.stride(-1)

"""Rows, and which of them each query token attends to.

Example:
    >>> import torch
    >>> indptr = torch.tensor([0, 2, 3], dtype=torch.int32)
    >>> KVSource(torch.zeros(8, 512).bfloat16(), indptr, torch.tensor([5, -1, 0], dtype=torch.int32)).num_rows
    8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.quant.errors import (
    check_dtype,
    check_int32,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
)
from narrowkv.sparse_fp8.rows import HEAD_DIM, DSV4Rows

__all__ = ["KVSource"]


@dataclass(frozen=True)
class KVSource:
    """Rows, and which of them each query token attends to (a CSR).

    Attributes:
        rows: bf16 or fp16 `[num_rows, 512]` (RoPE last), or `DSV4Rows`.
        indptr: int32 `[num_tokens + 1]`, from 0 upwards.
        indices: int32 `[nnz]`, row numbers in any order; -1 is skipped; a row named twice counts twice.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came. Values are not read.

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
        check_int32("indptr", self.indptr)
        check_int32("indices", self.indices)
        if self.indptr.dim() != 1 or self.indptr.shape[0] < 1:
            raise ValueError(f"indptr must have shape [num_tokens + 1], got {list(self.indptr.shape)}")
        check_shape("indices", self.indices, ("nnz",))
        check_last_dim_contiguous("indptr", self.indptr)
        check_last_dim_contiguous("indices", self.indices)
        if isinstance(self.rows, torch.Tensor):
            check_dtype("rows", self.rows, (torch.bfloat16, torch.float16))
            check_shape("rows", self.rows, ("num_rows", HEAD_DIM))
            check_last_dim_contiguous("rows", self.rows)
        elif not isinstance(self.rows, DSV4Rows):
            raise TypeError(f"rows must be a torch.Tensor or DSV4Rows, got {type(self.rows).__name__}")
        check_same_device(
            rows=self.rows if isinstance(self.rows, torch.Tensor) else self.rows.data,
            indptr=self.indptr,
            indices=self.indices,
        )

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return self.indptr.shape[0] - 1

    @property
    def num_rows(self) -> int:
        """Rows that an index may name."""
        return self.rows.shape[0] if isinstance(self.rows, torch.Tensor) else self.rows.num_rows

    def check_values(self, name: str) -> None:
        """Reads the CSR on the host and refuses what is not one; this waits for the device.

        Raises:
            ValueError: `indptr` does not start at 0, decreases or passes the end of `indices`; an index is
                below -1 or not a row.
        """
        indptr = self.indptr.cpu()
        if int(indptr[0]) != 0:
            raise ValueError(f"{name}.indptr must start at 0, got {int(indptr[0])}")
        if bool((indptr.diff() < 0).any()):
            raise ValueError(f"{name}.indptr must not decrease, got {indptr.tolist()[:8]}...")
        if int(indptr[-1]) > self.indices.shape[0]:
            raise ValueError(
                f"{name}.indptr must end within the {self.indices.shape[0]} indices, got {int(indptr[-1])}"
            )
        used = self.indices[: int(indptr[-1])]
        if used.numel():
            low, high = int(used.min()), int(used.max())
            if low < -1 or high >= self.num_rows:
                raise ValueError(
                    f"{name}.indices must be -1 or rows below {self.num_rows}, "
                    f"got {low if low < -1 else high}"
                )

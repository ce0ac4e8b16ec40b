"""Sources: rows, and lists of the rows that each query token attends to.

Example:
    >>> import torch
    >>> indptr = torch.tensor([0, 2, 3], dtype=torch.int32)
    >>> KVSource(torch.zeros(8, 512).bfloat16(), indptr, torch.tensor([5, -1, 0], dtype=torch.int32)).num_rows
    8
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from narrowkv.runtime.errors import (
    check_dtype,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
    check_tensor,
)
from narrowkv.runtime.launch import named_values
from narrowkv.sparse_fp8.binding import (
    BoundRows,
    RowsFormat,
    bind_16_bit_rows,
    bind_csr,
    byte_range,
    format_id_of,
)
from narrowkv.sparse_fp8.kernels.rows import Csr, PageList, RowPointers
from narrowkv.sparse_fp8.layouts import HEAD_DIM, ROPE_DIM
from narrowkv.sparse_fp8.rows import DSV4Rows

__all__ = ["KVSource", "Source"]

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
                sys.intern(f"{side}_nnz"): self.nnz, sys.intern(f"{side}_rows"): self.num_rows,
            }
            for side in ("prefix", "extend")
        }  # fmt: skip

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
        if isinstance(self.rows, DSV4Rows):
            bound = self.rows.bound
        elif isinstance(self.rows, torch.Tensor):
            check_dtype("rows", self.rows, (torch.bfloat16, torch.float16))
            check_shape("rows", self.rows, ("num_rows", _columns(self.rows)))
            check_last_dim_contiguous("rows", self.rows)
            bound = bind_16_bit_rows(self.rows)
        else:
            raise TypeError(f"rows must be a torch.Tensor or DSV4Rows, got {type(self.rows).__name__}")
        if bound.num_rows > MOST_ROWS:
            raise ValueError(f"rows must hold at most {MOST_ROWS} rows, got {bound.num_rows}")
        tensors = {**bound.tensors, "indptr": self.indptr, "indices": self.indices}
        check_same_device(**tensors)
        csr = bind_csr(self.indptr, self.indices)
        derived = {
            "num_tokens": self.indptr.shape[0] - 1,
            "num_rows": bound.num_rows,
            "nnz": self.indices.shape[0],
            "device": self.indices.device,
            "int32_lists": self.indptr.dtype == self.indices.dtype == torch.int32,
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

    @property
    def lists(self) -> dict[str, torch.Tensor]:
        """The index lists."""
        return {"indptr": self.indptr, "indices": self.indices}

    def check_grad(self, name: str) -> None:
        """Refuses tensors that require grad while grad mode is on.

        Raises:
            ValueError: naming the tensor.
        """
        check_no_grad(**{f"{name}.{part}": tensor for part, tensor in self.bound.tensors.items()})

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


def _columns(rows: torch.Tensor) -> int:
    """The columns that 16-bit rows must have: 512, or 576 if they have those."""
    return HEAD_DIM + ROPE_DIM if rows.shape[-1:] == (HEAD_DIM + ROPE_DIM,) else HEAD_DIM


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

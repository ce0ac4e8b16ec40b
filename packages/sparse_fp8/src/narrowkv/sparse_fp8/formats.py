"""How a query and its sources are stored, and which of them can be attended together."""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import UnsupportedError, check_dtype, check_shape
from narrowkv.sparse_fp8.binding import RowsFormat
from narrowkv.sparse_fp8.config import MOST_HEADS
from narrowkv.sparse_fp8.layouts import HEAD_DIM, ROPE_DIM
from narrowkv.sparse_fp8.rows import DSV4Rows, query_heads

__all__ = [
    "QUERY_FORMATS",
    "check_formats",
    "check_fused",
    "num_heads_of",
    "query_format",
    "widened_format",
]

HEAD_DIMS = (HEAD_DIM, HEAD_DIM + ROPE_DIM)
QUERY_FORMATS = {
    (name, columns): RowsFormat(name, columns=columns) for name in ("bf16", "fp16") for columns in HEAD_DIMS
}


def widened_format(rows: RowsFormat) -> RowsFormat:
    """How a query or rows are stored once they are widened to 16 bits."""
    return QUERY_FORMATS["fp16" if rows.dtype == torch.float16 else "bf16", rows.head_dim]


def check_formats(mode: str, query: RowsFormat, prefix: RowsFormat | None, extend: RowsFormat | None) -> None:
    """Refuses sources and queries that a mode cannot attend together.

    Raises:
        TypeError, ValueError, UnsupportedError: naming the argument, what was expected and what was given.
    """
    named = {name: rows for name, rows in (("prefix", prefix), ("extend", extend)) if rows is not None}
    if not named:
        raise ValueError("prefix or extend must be given, got None for both")
    if mode == "16bit":
        if query.is_quantized:
            raise TypeError("q must be a bf16 or fp16 tensor over 16-bit rows, got DSV4Rows")
        for name, rows in named.items():
            if rows.is_quantized:
                raise UnsupportedError(
                    f"{name}.rows must be a bf16 or fp16 tensor here, got DSV4Rows: use sparse_prefill_fp8"
                )
    elif not any(rows.is_quantized for rows in named.values()):
        raise UnsupportedError(
            "prefix.rows or extend.rows must be DSV4Rows here, got 16-bit rows: use sparse_prefill"
        )
    for name, rows in named.items():
        if rows.head_dim != query.head_dim:
            raise ValueError(
                f"{name}.rows must have as many columns as q, {query.head_dim}, got {rows.head_dim}"
            )
    if mode == "fused":
        check_fused(named)
    for name, rows in named.items():
        if not rows.is_quantized and rows.dtype != query.dtype:
            raise TypeError(f"{name}.rows must have the dtype of q, {query.dtype}, got {rows.dtype}")


def check_fused(rows: dict[str, RowsFormat]) -> None:
    """Refuses 16-bit rows, which the fused kernels do not read.

    Raises:
        UnsupportedError: naming the source and what works.
    """
    for name, stored in rows.items():
        if not stored.is_quantized:
            raise UnsupportedError(
                f"{name}.rows must be DSV4Rows for the fused kernel, got 16-bit rows: quantise them with "
                "DSV4Rows.quantize, or use mode='prepass' of sparse_prefill_fp8, which takes both kinds"
            )


def query_format(q: torch.Tensor | DSV4Rows) -> RowsFormat:
    """How a query is stored; the addresses of a 16-bit one are looked at in each call.

    Raises:
        TypeError: q is neither a bf16 or fp16 tensor nor `DSV4Rows`.
    """
    if isinstance(q, DSV4Rows):
        return q.bound.format
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch.Tensor or DSV4Rows, got {type(q).__name__}")
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    check_shape("q", q, ("num_tokens", "num_qo_heads", _columns(q)))
    return QUERY_FORMATS["bf16" if q.dtype is torch.bfloat16 else "fp16", q.shape[-1]]


def _columns(q: torch.Tensor) -> int:
    """The columns that a query must have: 512, or 576 if it has those."""
    return q.shape[-1] if q.dim() and q.shape[-1] in HEAD_DIMS else HEAD_DIM


def num_heads_of(q: torch.Tensor | DSV4Rows, tokens: int, num_qo_heads: int | None) -> int:
    """The query heads of a call that was not planned.

    Raises:
        ValueError: the query cannot hold `tokens` times any supported number of heads.
    """
    if isinstance(q, DSV4Rows):
        heads = query_heads(q, tokens, num_qo_heads)
        spare = q.num_rows - heads * tokens
        if not 1 <= heads <= MOST_HEADS or not 0 <= spare < (1 if num_qo_heads is None else q.page_size):
            raise ValueError(
                f"q must hold num_tokens * num_qo_heads rows, num_qo_heads from 1 to {MOST_HEADS}, for "
                f"{tokens} tokens; got {q.num_rows} rows and num_qo_heads={num_qo_heads}"
            )
        return heads
    if not 1 <= q.shape[1] <= MOST_HEADS:
        raise ValueError(f"q must have 1 to {MOST_HEADS} heads, got {q.shape[1]}")
    if num_qo_heads not in (None, q.shape[1]):
        raise ValueError(f"num_qo_heads must be {q.shape[1]} as q has it, got {num_qo_heads}")
    return q.shape[1]

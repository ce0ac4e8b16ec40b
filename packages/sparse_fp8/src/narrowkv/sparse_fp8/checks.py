"""Properties that all calls of a plan share, and the comparison of a call with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from narrowkv.runtime.errors import (
    OUT_DTYPES,
    check_dtype,
    check_last_dim_contiguous,
    check_lse,
    check_no_grad,
    check_out,
    check_same_device,
    check_shape,
    check_sinks,
)
from narrowkv.runtime.operation import Plan
from narrowkv.sparse_fp8.binding import RowsFormat
from narrowkv.sparse_fp8.kernels.rows import PagedForm
from narrowkv.sparse_fp8.layouts import HEAD_DIM
from narrowkv.sparse_fp8.options import SparseArguments
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource, PagedSource, Source, check_scales

__all__ = ["SparseSettings", "check_values"]


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseSettings(Plan):
    """Properties that all calls of a plan share.

    Attributes:
        mode: "16bit" attends 16-bit rows, "fused" quantised rows as stored, "prepass" quantised rows that are
            first expanded to 16 bits in scratch memory.
        num_qo_heads: query heads; over a page table query tokens of a sequence times heads.
        query, prefix, extend: how the query and the rows are stored; None for a source that is absent.
        has_sink: whether calls have an `attn_sink`.
        writes_lse: whether calls write and return the log-sum-exp.
        sm_scale: the softmax scale.
        max_num_tokens, max_indices: the largest call, indices of each source; None for a plan without a
            workspace, whose calls allocate what they need.
        pages: of the page table that names the rows of `prefix`; then a token is a sequence. None for index
            lists.

    The other attributes are those of `narrowkv.runtime.operation.Plan`.
    """

    mode: str
    num_qo_heads: int
    query: RowsFormat
    prefix: RowsFormat | None
    extend: RowsFormat | None
    has_sink: bool
    writes_lse: bool
    sm_scale: float
    max_num_tokens: int | None = None
    max_indices: int | None = None
    pages: PagedForm | None = None

    @cached_property
    def query_dtype(self) -> torch.dtype:
        """The dtype of a 16-bit query, and of scratch memory."""
        return self.query.dtype

    @cached_property
    def source_class(self) -> type[Source]:
        """The class of the calls' sources."""
        return KVSource if self.pages is None else PagedSource

    @cached_property
    def num_sinks(self) -> int:
        """Elements of `attn_sink`: one a head."""
        return self.num_qo_heads if self.pages is None else int(self.pages.HEADS)

    @cached_property
    def head_dim(self) -> int:
        """Columns of q and of rows; v and the output have 512."""
        return self.query.head_dim

    def check_inputs(self, given: SparseArguments) -> int:
        """Compares with the plan what a call can change; returns the number of tokens.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        q, prefix, extend, attn_sink = given[:4]
        source = prefix if prefix is not None else extend
        if not isinstance(source, Source):
            raise TypeError(f"prefix or extend must be a KVSource, got {type(source).__name__}")
        tokens = source.num_tokens
        for name, planned, rows in (("prefix", self.prefix, prefix), ("extend", self.extend, extend)):
            if planned is None and rows is None:
                continue
            if planned is None or rows is None or type(rows) is not self.source_class:
                _refuse_source(name, planned, rows)
            elif rows.format != planned or rows.num_tokens != tokens or rows.device != self.device:
                self._refuse_format(name, planned, rows, tokens)
            elif self.max_indices is not None and rows.nnz > self.max_indices:
                raise ValueError(
                    f"{name}.indices must have at most {self.max_indices} as planned, got {rows.nnz}"
                )
        if self.max_num_tokens is not None and tokens > self.max_num_tokens:
            raise ValueError(f"q must have at most {self.max_num_tokens} tokens as planned, got {tokens}")
        if isinstance(q, torch.Tensor):
            self._check_query(q, tokens)
        else:
            self._check_quantized_query(q, tokens)
        if (attn_sink is None) == self.has_sink:
            wanted = "a tensor: the plan has a sink" if self.has_sink else "None: the plan has no sink"
            raise ValueError(f"attn_sink must be {wanted}")
        check_sinks(
            attn_sink, self.num_sinks, self.device, name="attn_sink", dtypes=(torch.float32,), like="plan"
        )
        read = {"q": q, "prefix.rows": prefix and prefix.rows, "extend.rows": extend and extend.rows}
        # Quantised rows and queries never require gradients.
        check_no_grad(**{name: x for name, x in read.items() if isinstance(x, torch.Tensor)})
        return tokens

    def _check_quantized_query(self, q: DSV4Rows, tokens: int) -> None:
        if not isinstance(q, DSV4Rows):
            raise TypeError(f"q must be a torch.Tensor or DSV4Rows, got {type(q).__name__}")
        if q.bound.format != self.query or q.device != self.device:
            raise ValueError(
                f"q must be stored as planned, {self.query} on {self.device}, "
                f"got {q.bound.format} on {q.device}"
            )
        # Pages are whole: the last may hold rows that are no head's.
        if not 0 <= q.num_rows - self.num_qo_heads * tokens < q.page_size:
            raise ValueError(
                f"q must hold num_tokens * num_qo_heads rows, {tokens} * {self.num_qo_heads}, "
                f"got {q.num_rows}"
            )

    def _check_query(self, q: torch.Tensor, tokens: int) -> None:
        if self.query.is_quantized:
            raise TypeError("q must be DSV4Rows as planned, got a torch.Tensor")
        check_dtype("q", q, self.query.dtype)
        check_same_device(plan=torch.empty(0, device=self.device), q=q)
        if q.dim() == 3 and q.shape[0] != tokens:
            raise ValueError(f"q must have {tokens} tokens like the sources' indptr, got {q.shape[0]}")
        check_shape("q", q, (tokens, self.num_qo_heads, self.head_dim))
        check_last_dim_contiguous("q", q)

    def _refuse_format(self, name: str, planned: RowsFormat, given: Source, tokens: int) -> None:
        lists = {f"{name}.{part}": x for part, x in given.lists.items()}
        check_same_device(plan=torch.empty(0, device=self.device), **lists)
        if given.num_tokens != tokens:
            raise ValueError(
                f"{name}.indptr must have {tokens + 1} elements like prefix.indptr, "
                f"got {given.num_tokens + 1}"
            )
        raise ValueError(f"{name}.rows must be stored as planned, {planned}, got {given.format}")

    def check_out(self, out: torch.Tensor, tokens: int) -> None:
        """Refuses an output of the wrong kind.

        Raises:
            TypeError, ValueError: naming what was expected and what was given.
        """
        check_out(out, (tokens, self.num_qo_heads, HEAD_DIM), OUT_DTYPES, self.device, "plan")

    def check_lse(self, lse: torch.Tensor, tokens: int) -> None:
        """Refuses a log-sum-exp tensor of the wrong kind.

        Raises:
            TypeError, ValueError: naming what was expected and what was given.
        """
        check_lse(lse, (tokens, self.num_qo_heads), self.device, like="plan", any_strides=True)


def inputs_of(given: SparseArguments) -> dict[str, torch.Tensor | None]:
    """All tensors that a call reads, by name."""
    q, prefix, extend, attn_sink = given[:4]
    inputs: dict[str, torch.Tensor | None] = {"attn_sink": attn_sink}
    if isinstance(q, DSV4Rows):
        inputs |= {part.replace("rows", "q"): x for part, x in q.bound.tensors.items()}
    else:
        inputs["q"] = q
    for name, source in (("prefix", prefix), ("extend", extend)):
        if source is not None:
            inputs |= {f"{name}.{part}": x for part, x in source.bound.tensors.items()}
            inputs |= {f"{name}.{part}": x for part, x in source.lists.items()}
    return inputs


def _refuse_source(name: str, planned: RowsFormat | None, given: object) -> None:
    if given is not None and not isinstance(given, KVSource):
        raise TypeError(f"{name} must be a KVSource or None, got {type(given).__name__}")
    wanted = "None" if planned is None else "a KVSource"
    raise ValueError(f"{name} must be {wanted} as planned, got {type(given).__name__}")


def check_values(given: SparseArguments) -> None:
    """Reads index lists, scales and the sink on the host (it waits for the device); refuses wrong values.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    q, prefix, extend, attn_sink = given[:4]
    if isinstance(q, DSV4Rows):
        check_scales("q", q)
    for name, source in (("prefix", prefix), ("extend", extend)):
        if source is not None:
            source.check_values(name)
    if attn_sink is not None and bool(attn_sink.isnan().any()):
        raise ValueError("attn_sink must not hold NaN: -inf is no sink")
